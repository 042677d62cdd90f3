"""`SavedStates`: the states of a session's streams as JSON, and back where they fit its settings and data."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megascale_lightning.checkpointing.filelists import FileLists, describe_changes
from megascale_lightning.checkpointing.fingerprint import (
    check_fingerprint,
    full_table,
    order_fingerprint,
    restarted_sources,
)
from megascale_lightning.checkpointing.state import (
    from_json,
    migrate,
    pack_weights,
    restart,
    to_json,
    weights_by_name,
)
from megascale_lightning.client.changes import cost_problem
from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError, StateError
from megascale_lightning.planning.calibration import CalibratedCost
from megascale_lightning.streams import StreamSpec, initial_levels, initial_state
from megascale_lightning.types import CostChange, LoaderState, MixtureChange
from megascale_lightning.version import __version__

__all__ = ["SavedStates"]

logger = logging.getLogger(__name__)


class SavedStates:
    """Writes and reads the states of resolved streams.

    Args:
        config: The settings.
        specs: The streams.
        digests: Of their file lists, by stream and source.
        run: Name of the run.
        lists: File lists of the training sources, on the process that reads them.
    """

    def __init__(
        self,
        config: LoaderConfig,
        specs: Mapping[str, StreamSpec],
        digests: Mapping[str, Mapping[str, str]],
        run: str,
        lists: FileLists,
    ) -> None:
        self._config = config
        self._specs = specs
        self._digests = digests
        self._run = run
        self._lists = lists
        self._said: set[tuple[str, ...]] = set()

    def to_json(self, stream: str, state: LoaderState) -> dict[str, Any]:
        """The saved form of a state, with what it needs to be checked at resume."""
        spec = self._specs[stream]
        names = [source.name for source in spec.sources]
        saved = to_json(state, names)
        declared = initial_state(self._specs[stream]).sources["weight"]
        changed = not np.array_equal(declared, state.sources["weight"])
        return saved | {
            "package": __version__,
            "run": self._run,
            "stream": stream,
            "mixture": {
                "unit": spec.mixture_unit,
                "declared": pack_weights(declared, names) if changed else None,
                **saved["mixture"],
            },
            "global_batch_size": spec.rows_per_step,
            "fingerprint": order_fingerprint(
                self._config,
                stream=stream,
                global_batch_size=spec.rows_per_step,
                passes=spec.passes,
                strategy=spec.order,
            ),
            "files": dict(self._digests[stream]),
        }

    def from_json(
        self,
        stream: str,
        saved: Mapping[str, Any],
        lists: FileLists | None = None,
        copied: Collection[str] = (),
    ) -> LoaderState:
        """The state of a saved form.

        Args:
            stream: The stream.
            saved: What `state_to_json` gave, here or in another run.
            lists: The file lists that it was saved with, to tell which files changed.
            copied: Sources whose files were only copied since.

        Raises:
            StateError: It is of a newer version, of other data or of other settings.
        """
        saved = migrate(saved)
        names = [source.name for source in self._specs[stream].sources]
        force = (*self._config.force_resume, *(f"modified.{name}" for name in copied))
        if saved.get("stream") != stream:
            raise StateError(f"the state is of stream {saved.get('stream')!r}, this is stream {stream!r}")
        if not saved.get("fingerprint"):
            raise StateError("the loader state is incomplete or damaged: it has no 'fingerprint' of its settings")
        state = from_json(saved, names, sources_may_differ="sources" in force)
        ours = self.to_json(stream, initial_state(self._specs[stream]))
        common = [name for name in names if name in saved["sources"]]
        try:
            old, new = _table(saved, common), _table(ours, common)
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise StateError(f"the loader state is incomplete or damaged: {type(error).__name__}: {error}") from error
        changed = check_fingerprint(old, new, force=force, notes=self._notes(lists))
        said = (stream, saved["certificate"], *changed)
        if changed and said not in self._said:  # a trainer hands the same state in twice
            self._said.add(said)
            shown = ", ".join(_shown(name, old, new) for name in changed)
            logger.warning("the checkpoint was written with other settings: %s; going on", shown)
        state = self._with_weights(stream, state, set(names) - set(common), changed)
        if "costs" in force:
            kept = tuple(change for change in state.changes if isinstance(change, MixtureChange))
            state = replace(state, costs=(), changes=kept)
        self._check_costs(stream, state)
        if "passes" in changed:
            state = replace(state, passes=int(state.sources["epoch"].min(initial=0)))
        anew = [names.index(name) for name in restarted_sources(changed, names)]
        state = restart(state, anew)
        curriculum = self._specs[stream].curriculum
        if curriculum is not None and len(anew) == len(names):
            state = replace(state, levels=initial_levels(state.sources, curriculum.num_levels))
        self._check_levels(stream, state)
        self._check_windows(stream, state)
        return state

    def _check_levels(self, stream: str, state: LoaderState) -> None:
        """The number of levels follows from the curriculum, which is the same by now."""
        curriculum = self._specs[stream].curriculum
        wanted = 0 if curriculum is None else curriculum.num_levels
        count = 0 if state.levels is None else state.levels.shape[1]
        if count != wanted and (count or state.step):  # before the first step there are none
            raise StateError(
                f"the loader state is damaged: it holds the places of {count} levels a source (levels.count), and the "
                f"curriculum has {wanted} of them"
            )

    def _check_windows(self, stream: str, state: LoaderState) -> None:
        """Parts are looked for where they are read: how many a window has is not known before."""
        for index, source in enumerate(self._specs[stream].sources):
            places = [(f"sources.{source.name}.window", int(state.sources["window"][index]))]
            if state.levels is not None:
                places.append((f"levels: of {source.name} a window", int(state.levels["window"][index].max())))
            for name, window in places:
                if window >= max(source.num_windows, 1):
                    raise StateError(
                        f"the loader state is damaged: {name} is {window}, and the source has {source.num_windows} of "
                        "them, counted from 0"
                    )

    def _check_costs(self, stream: str, state: LoaderState) -> None:
        """What is to take the place of the strategy's costs has to fit this strategy, too."""
        for costs in (state.costs, *(change.costs for change in state.changes if isinstance(change, CostChange))):
            try:
                problem = cost_problem(self._specs[stream], [CalibratedCost.of(given) for given in costs])
            except ConfigError as error:
                raise StateError(f"the loader state is damaged: its costs are none: {error}") from error
            if problem is not None:
                raise StateError(
                    f"the loader state holds the costs of a set_cost(), which do not fit the strategy: {problem}. Give "
                    'the strategy as it was, or say force_resume=["costs"] to go on by its own costs'
                )

    def _notes(self, lists: FileLists | None) -> dict[str, str]:
        now = self._lists
        said: dict[str, list[str]] = {}
        for name, files in (lists or {}).items():
            if name in now and tuple(files) != now[name]:
                source, _, join = name.partition("/")
                said.setdefault(source, []).append(f"{join}: " * bool(join) + describe_changes(files, now[name]))
        return {f"{kind}.{name}": "; ".join(notes) for name, notes in said.items() for kind in ("files", "modified")}

    def _with_weights(
        self, stream: str, state: LoaderState, added: Collection[str], changed: Collection[str]
    ) -> LoaderState:
        """The state with the config's weights where they were edited since, and with those of new sources."""
        spec = self._specs[stream]
        declared = spec.weights_at(state.step, replace(initial_state(spec), step=state.step), {})
        sources = state.sources.copy()
        if any(name.startswith("mixture.") or name == "mixture_schedule" for name in changed):
            # What was changed by hand since counts for more than what was to come in the run before.
            sources["weight"] = declared
            kept = tuple(change for change in state.changes if isinstance(change, CostChange))
            return replace(state, sources=sources, changes=kept, replaced=False)
        for index, source in enumerate(self._specs[stream].sources):
            if source.name in added:
                sources["weight"][index] = declared[index]
                for change in state.changes:
                    if isinstance(change, MixtureChange):
                        change.weights[index] = declared[index]
        return replace(state, sources=sources)


def _table(saved: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    declared = "weights" if saved["mixture"]["declared"] is None else "declared"
    return full_table(saved, weights_by_name(saved, declared), names)


def _shown(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """A setting that may differ; of the mixture, what is recorded is shown as old | new."""
    if not name.startswith("mixture"):
        return name
    return f"{name} ({old.get(name)!r} | {new.get(name)!r})"
