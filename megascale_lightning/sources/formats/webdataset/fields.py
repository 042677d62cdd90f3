"""`SampleMaker`: what a sample of an archive is to the user: fields by extension or as mapped, decoded."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.formats.optionsets import IS_BOOL, check_options
from megascale_lightning.sources.formats.webdataset.samples import Part, TarSample
from megascale_lightning.sources.records import missing_key
from megascale_lightning.sources.source import Source

__all__ = ["SampleMaker", "check_tar_options"]

_ALTERNATIVE: Final = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")


def _load_array(content: bytes) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False)


def _load_arrays(content: bytes) -> Any:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)


_DECODERS: Final[dict[str, tuple[str, Callable[[bytes], Any]]]] = {
    **dict.fromkeys(("txt", "text", "transcript"), ("UTF-8", bytes.decode)),
    **dict.fromkeys(("json", "jsn"), ("JSON", json.loads)),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "id"), ("a whole number", int)),
    "npy": ("an array of numbers", _load_array),
    "npz": ("arrays of numbers", _load_arrays),
}
"""The last part of an extension -> (what its content has to be, how it is decoded)."""


def _is_fields(value: Any) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) and key for key in value)
        and all(_alternatives(one) is not None for one in value.values())
    )


def check_tar_options(source: Source) -> None:
    """Refuse wrong `format_options` of `webdataset`.

    Raises:
        ConfigError: As said.
    """
    check_options(
        source,
        "webdataset",
        {
            "decode": IS_BOOL,
            "fields": (
                'a mapping of names to extensions, such as {"image": "jpg;png", "text": "json[text]"}',
                _is_fields,
            ),
            "interleaved": ('"report" or "merge"', lambda value: value in ("report", "merge")),
            "split": ("the name of a split", lambda value: isinstance(value, str)),
            "url": IS_BOOL,
        },
    )


def _alternatives(value: Any) -> list[tuple[str, list[str]]] | None:
    """Extension and keys below it of "jpg;png", "json[text]", or a list of such; None where it is none."""
    if isinstance(value, str):
        value = re.split("[;,]", value)
    if not isinstance(value, Sequence) or not value:
        return None
    found = []
    for one in value:
        match = _ALTERNATIVE.fullmatch(one.strip()) if isinstance(one, str) else None
        if match is None:
            return None
        found.append((match.group(1).lower(), re.findall(r"\[([^\[\]]+)\]", match.group(2))))
    return found


class SampleMaker:
    """Makes the dict of a sample.

    Args:
        source: Its `format_options` say how.
        columns: Fields that are needed; None: all.
        fields: A mapping of fields, where the options have none.

    Raises:
        ConfigError: None of the mapped fields is among the columns of the source.
    """

    def __init__(self, source: Source, columns: Sequence[str] | None, fields: Mapping[str, str] | None = None) -> None:
        options = source.format_options
        mapped = options.get("fields", fields)
        self._decodes = bool(options.get("decode", True))
        self._adds_url = bool(options.get("url", False))
        self._columns = None if columns is None else set(columns)
        # A transform may do without some of them.
        self._needed = () if columns is None or source.is_transformed else tuple(columns)
        self._mapped = mapped
        self._fields: dict[str, list[tuple[str, list[str]]]] | None = None
        if mapped is not None:
            missing = sorted(set(source.columns or ()) - set(mapped) - {"__key__", "__url__"})
            if missing:
                raise ConfigError(
                    f"source {source.name!r}: columns names {', '.join(map(repr, missing))}, which is not among the "
                    f"fields {', '.join(map(repr, mapped))}"
                )
            wanted = [name for name in mapped if self._columns is None or name in self._columns]
            self._fields = {name: _alternatives(mapped[name]) or [] for name in wanted}
            self._extensions = {extension for options in self._fields.values() for extension, _ in options}

    def wants(self, extension: str) -> bool:
        """Whether the content of such a member is needed."""
        if self._fields is not None:
            return extension in self._extensions
        return self._columns is None or extension in self._columns

    def make(self, sample: TarSample, url: str) -> dict[str, Any] | None:
        """The user's sample, None where the sample failed, which is noted in it."""
        found: dict[str, Any] = {"__key__": "" if sample.key is None else sample.key.decode("utf-8", "replace")}
        if self._adds_url:
            found["__url__"] = url
        if sample.problem is None and self._fields is None:
            for extension, part in sample.parts.items():
                if part.content is not None:
                    found[extension] = self._value(sample, extension, part, keys=())
        elif self._fields is not None:
            for name, alternatives in self._fields.items():
                if sample.problem is None:
                    found[name] = self._pick(sample, name, alternatives)
        missing = next((name for name in self._needed if name not in found), None)
        if missing is not None:
            there = ["__key__", *(sample.parts if self._mapped is None else self._mapped)]
            sample.fail(missing_key(missing, there), sample.raw)
        return None if sample.problem is not None else found

    def _pick(self, sample: TarSample, name: str, alternatives: Sequence[tuple[str, list[str]]]) -> Any:
        for extension, keys in alternatives:
            part = sample.parts.get(extension)
            if part is None:
                continue
            value = self._value(sample, extension, part, keys)
            try:
                for key in keys:
                    value = value[int(key) if isinstance(value, list) else key]
            except (LookupError, TypeError, ValueError):
                if sample.problem is None:
                    continue
            return value
        asked = " or ".join(extension + "".join(f"[{key}]" for key in keys) for extension, keys in alternatives)
        there = ", ".join(sample.parts) or "none"
        sample.fail(f"field {name!r} has no {asked} in it; its members are {there}", sample.raw)
        return None

    def _value(self, sample: TarSample, extension: str, part: Part, keys: Sequence[str]) -> Any:
        content = part.content or b""
        decoder = _DECODERS.get(extension.rpartition(".")[2])
        if decoder is None or not (self._decodes or keys):
            return content
        kind, decode = decoder
        try:
            return decode(content)
        except Exception as error:  # of damaged bytes: zlib.error, MemoryError, struct.error, ...
            what = f"member {part.member.name.decode('utf-8', 'replace')!r} at byte {part.member.start}"
            sample.fail(f"{what} is not {kind}: {error}", part.member.header + content)
            return None
