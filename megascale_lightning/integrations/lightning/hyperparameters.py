"""Hyperparameters of a DataModule as plain values, so that a checkpoint with them loads under `weights_only=True`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from os import PathLike
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.join import Join
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.secrets import mask_options, without_secrets

__all__ = ["mask_saved_config", "plain", "revived"]

_PACKAGE: Final = __name__.partition(".")[0]
_MANY: Final = 100


def plain(value: Any) -> Any:
    """The same hyperparameter without objects of this package; what is not ours stays as it is.

    A source becomes the mapping of its settings, a list of sources a mapping by name, rows, mixtures and strategies
    become `{"class_path": ..., "init_args": ...}`: the forms that a YAML file has them in. Of a function its dotted
    path is kept, of a dataset a word about what it was. Texts in `storage_options` are masked unless they are
    `env:NAME`, and URLs lose what signs them.
    """
    return without_secrets(_plain(value))


def mask_saved_config(trainer: Any) -> None:
    """What LightningCLI is about to write beside a run (`SaveConfigCallback`) loses its secrets, as `plain` has it.

    Args:
        trainer: Whose callbacks have not been set up yet.
    """
    for callback in getattr(trainer, "callbacks", ()):
        config = getattr(callback, "config", None)
        if config is not None and hasattr(callback, "parser") and hasattr(config, "clone"):
            callback.config = _masked_namespace(config.clone())


def mask_printed_settings() -> None:
    """Teach jsonargparse, if it is there, that `--print_config` and saved YAML files show no secrets.

    Sources with secrets are taken as they were written, past its own types, and written without them.
    """
    try:
        from jsonargparse.typing import register_type
    except ImportError:
        return
    from megascale_lightning import config

    def refuse(_: Any) -> Any:
        raise ValueError("there is no secret in it")

    register_type(
        vars(config)["SecretSettings"],
        serializer=without_secrets,
        deserializer=refuse,
        type_check=lambda value, _: isinstance(value, (dict, list)) and without_secrets(value) is not value,
    )


def _masked_namespace(value: Any) -> Any:
    """A namespace of jsonargparse, which is changed, or any other value."""
    if not hasattr(value, "clone") or not hasattr(value, "__dict__"):
        return without_secrets(value)
    for name, inner in list(vars(value).items()):
        masked = mask_options(inner) if name == "storage_options" and inner is not None else _masked_list(inner)
        setattr(value, name, masked)
    return value


def _masked_list(value: Any) -> Any:
    if isinstance(value, list):
        return [_masked_namespace(item) for item in value]
    if isinstance(value, dict):
        return without_secrets({name: _masked_namespace(item) for name, item in value.items()})
    return _masked_namespace(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Source):
        return _settings(value)
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(item, Source) for item in value) and len({s.name for s in value}) == len(value):
            return {source.name: _settings(source) for source in value}
        return [_plain(item) for item in value] if _has_ours(value) else value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()} if _has_ours(value) else value
    if _is_ours(value):
        kind = type(value)
        return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": _changed(value)}
    return value


def revived(value: Any) -> Any:
    """What `plain` made of an object of this package, as that object again; everything else as it is.

    Raises:
        ConfigError: The class path names no class of this package.
    """
    if not isinstance(value, Mapping):
        return value
    if "class_path" not in value:
        inside = {name: revived(item) for name, item in value.items()}
        return inside if any(inside[name] is not item for name, item in value.items()) else value
    path = str(value["class_path"])
    module, _, name = path.rpartition(".")
    # Checkpoints come from anywhere: no other code than ours is looked for, let alone run.
    if module != _PACKAGE and not module.startswith(f"{_PACKAGE}."):
        raise ConfigError(f"class_path {path!r} is no class of {_PACKAGE}: give the object itself")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"class_path {path!r} is not there ({error})") from error
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ConfigError(f"class_path {path!r} is no class of settings")
    return kind(**{name: revived(given) for name, given in value.get("init_args", {}).items()})


def _is_ours(value: Any) -> bool:
    return is_dataclass(value) and type(value).__module__.startswith(f"{_PACKAGE}.")


def _has_ours(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_ours, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_ours, value))
    return _is_ours(value)


def _settings(source: Source) -> dict[str, Any]:
    return {name: value for name, value in _changed(source).items() if name != "name"}


def _changed(value: Any) -> dict[str, Any]:
    """Fields that differ from their defaults, as plain values."""
    return {
        field.name: _kept(getattr(value, field.name))
        for field in fields(value)
        if field.init and not _is_default(field, getattr(value, field.name))
    }


def _is_default(field: Field[Any], value: Any) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return default is not MISSING and type(value) is type(default) and bool(value == default)


def _kept(value: Any) -> Any:
    """A setting of ours as a plain value; what cannot be one is described."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Join):
        return _changed(value)
    if _is_ours(value):
        return _plain(value)
    if isinstance(value, (list, tuple)):
        # A long list of anything but paths, and points of a schedule, is data, not a setting.
        whole = len(value) <= _MANY or _is_texts(value) or _is_points(value)
        return [_kept(item) for item in value] if whole else f"<{len(value)} items>"
    if isinstance(value, dict):
        return {str(key): _kept(item) for key, item in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, PathLike):
        return str(value)
    return _dotted(value) or f"<{getattr(value, '__qualname__', type(value).__qualname__)}>"


def _is_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(item, str) for item in values)


def _is_points(values: Sequence[Any]) -> bool:
    return all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], dict) for item in values)


def _dotted(value: Any) -> str | None:
    """Where a function or a class can be imported from."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
    found = getattr(sys.modules.get(str(module)), name, None)
    return f"{module}.{name}" if found is value else None


mask_printed_settings()
