"""The one exception tree: everything this package raises on purpose derives from `MegaScaleError`.

    MegaScaleError
    ├── ConfigError (ValueError)      what the user set is wrong, or does not fit together
    ├── DataError (ValueError)        a record, a file or a transform is at fault; names source, file, unit and row
    │   ├── CorruptDataError          stored bytes are broken for good; names source, file and unit
    │   ├── EmptySourceError          a whole epoch of a source gave nothing
    │   └── ReplayError               the same record gave other metadata the second time
    ├── StateError (ValueError)       a saved state is unreadable, of another version, or of other data
    ├── StreamError (RuntimeError)    the stream cannot go on
    │   ├── NotOpenError              a role does not know the generation it was asked for
    │   └── StalledError              nothing arrived for too long; names who holds the stream back
    └── RuntimeFailure (RuntimeError) the processes behind the stream are at fault
        ├── RayUnreachableError       Ray does not answer
        ├── RoleMissingError          an actor did not come back in time
        └── ForkError                 a handle was used in a forked child

Messages say what was given, what is allowed and what to do.
"""

__all__ = [
    "ConfigError",
    "CorruptDataError",
    "DataError",
    "EmptySourceError",
    "ForkError",
    "MegaScaleError",
    "MegaScaleWarning",
    "NotOpenError",
    "RayUnreachableError",
    "ReplayError",
    "RoleMissingError",
    "RuntimeFailure",
    "StalledError",
    "StateError",
    "StreamError",
]


class MegaScaleError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(MegaScaleError, ValueError):
    """A setting is wrong, or two settings contradict each other."""


class DataError(MegaScaleError, ValueError):
    """A record, a file or a transform is at fault."""


class CorruptDataError(DataError):
    """The stored bytes of a unit are broken for good: cut short, a wrong magic number, checksum or compression.

    Readers raise it for what reading again cannot mend, and `on_error` decides about all records of the unit. What may
    be read tomorrow (a missing file, an error of the disk, of the network, of permissions) is a `DataError`, which
    always ends the run: else a flaky disk could change the stream.
    """


class EmptySourceError(DataError):
    """A whole epoch of a source yields no sample."""


class ReplayError(DataError):
    """A record read again gives other metadata than the plan was made from."""


class StateError(MegaScaleError, ValueError):
    """A saved state cannot be used: unreadable, of another version, or of other data."""


class StreamError(MegaScaleError, RuntimeError):
    """A stream cannot go on."""


class NotOpenError(StreamError):
    """A role does not know the generation it was asked for: the client opens it again."""


class StalledError(StreamError):
    """Nothing arrived for too long, although every role answers."""


class RuntimeFailure(MegaScaleError, RuntimeError):
    """The processes behind the stream are at fault."""


class RayUnreachableError(RuntimeFailure):
    """Ray itself does not answer."""


class RoleMissingError(RuntimeFailure):
    """An actor died and did not come back in time."""


class ForkError(RuntimeFailure):
    """A handle was used in a process forked after it was made."""


class MegaScaleWarning(UserWarning):
    """A setting is overridden or has no effect."""
