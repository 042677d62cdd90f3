"""`load_config`: the loader's settings from a YAML file, or from an object that a module or a script has."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError, MegaScaleError

__all__ = ["load_config"]

_PACKAGE: Final = __name__.partition(".")[0]
_FORMS: Final = (
    "give a YAML file (LightningCLI's, or one with `sources:` and `rows:`), package.module:attribute, or "
    "path/to/file.py:attribute, where attribute is a LoaderConfig, a MegaScaleDataModule or a function that returns one"
)
_OF_THE_TRAINER: Final = {"tree"}
"""Settings of the DataModule that say nothing of the data."""


def load_config(text: str) -> LoaderConfig:
    """The settings that a command line names.

    The working directory, and the folder of the file, are looked into for modules, as a script's folder would be.

    Args:
        text: A YAML file, `package.module:attribute` or `path/to/file.py:attribute`.

    Raises:
        ConfigError: There is no such thing, or it is something else.
        OSError: The file cannot be read.
    """
    _look_into(Path.cwd())
    path = Path(text)
    if path.suffix == ".py":
        raise ConfigError(f"{text} names no attribute: add one, as in {text}:config; {_FORMS}")
    if path.suffix in (".yaml", ".yml") and not path.exists():
        raise ConfigError(f"{text} is not there, seen from {Path.cwd()}; {_FORMS}")
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return _from_yaml(path)
    where, colon, attribute = text.rpartition(":")
    if not colon or not where or not attribute:
        raise ConfigError(f"{text!r} is no settings: {_FORMS}")
    found: Any = _module(where)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"{where} has no {attribute!r}; {_FORMS}")
        found = getattr(found, name)
    return _config_of(found, text)


def _look_into(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _module(where: str) -> Any:
    """A module by its name, or by its file.

    Raises:
        ConfigError: It cannot be imported, whatever its code raises.
    """
    path = Path(where)
    is_file = where.endswith(".py")
    if is_file and not path.is_file():
        raise ConfigError(f"{where} is not there, seen from {Path.cwd()}; {_FORMS}")
    try:
        if not is_file:
            return importlib.import_module(where)
        _look_into(path.resolve().parent)
        # Found by its name, like a module that is imported, what it defines can be pickled.
        name = path.stem if path.stem not in sys.modules else f"inspected_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where} cannot be imported ({type(error).__name__}: {error})") from error


def _config_of(found: Any, text: str) -> LoaderConfig:
    """The settings that an object has, or is, or returns."""
    given = found
    for _ in range(2):
        if isinstance(given, LoaderConfig):
            return given
        if not isinstance(given, type) and isinstance(getattr(given, "config", None), LoaderConfig):
            return given.config  # type: ignore[no-any-return]  # just checked
        if not callable(given) or given is not found:
            break
        try:
            given = given()
        except MegaScaleError:
            raise
        except Exception as error:
            raise ConfigError(f"{text} was called, and raised {type(error).__name__}: {error}") from error
    what = "" if given is found else f", and what it returned is a {type(given).__name__}"
    raise ConfigError(f"{text} is a {type(found).__name__}{what}; {_FORMS}")


def _from_yaml(path: Path) -> LoaderConfig:
    import yaml  # type: ignore[import-untyped]

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    _look_into(path.resolve().parent)
    if isinstance(settings, Mapping) and isinstance(settings.get("data"), Mapping):
        settings = settings["data"]
    if not isinstance(settings, Mapping) or not {"rows", "class_path"} & set(settings):
        keys = ", ".join(map(str, settings)) if isinstance(settings, Mapping) else type(settings).__name__
        raise ConfigError(f"{path} has neither a `data:` section nor `sources:` and `rows:`; it has: {keys}")
    if "class_path" in settings:
        kind, given = str(settings["class_path"]), settings.get("init_args", {})
        if kind.rpartition(".")[2] not in ("MegaScaleDataModule", "LoaderConfig"):
            return _config_of(_made({"class_path": kind, "init_args": given}, str(path)), f"{path}: {kind}")
        settings = given
    known = {field.name for field in fields(LoaderConfig)}
    unknown = sorted(map(str, set(settings) - known - _OF_THE_TRAINER))
    if unknown:
        raise ConfigError(
            f"{path} has settings {unknown}, which are none of MegaScaleDataModule's; of a DataModule of your own, "
            "name an object instead: package.module:attribute"
        )
    return LoaderConfig(**{name: _made(settings[name], str(path)) for name in settings if name in known})


def _made(value: Any, where: str) -> Any:
    """What a mapping with `class_path` stands for, at any depth.

    Raises:
        ConfigError: There is no such class, or it refuses its arguments.
    """
    if isinstance(value, list):
        return [_made(item, where) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "class_path" not in value:
        return {key: _made(item, where) for key, item in value.items()}
    path = str(value["class_path"])
    module, _, name = path.rpartition(".")
    given = {key: _made(item, where) for key, item in value.get("init_args", {}).items()}
    if name == "CollatedRows":
        # It runs on the ranks alone, and may bring torch.
        given.pop("collate_fn", None)
    try:
        kind = getattr(importlib.import_module(module or _PACKAGE), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: class_path {path!r} cannot be imported ({error})") from error
    try:
        return kind(**given)
    except TypeError as error:
        raise ConfigError(f"{where}: {path}: {error}") from error
