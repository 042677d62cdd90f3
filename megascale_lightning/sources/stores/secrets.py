"""Keeps credentials out of everything that is shown or saved: what is secret, and how it is masked."""

from __future__ import annotations

import base64
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from megascale_lightning.errors import ConfigError

__all__ = [
    "ENV",
    "MASK",
    "differing_parameters",
    "has_password",
    "leaves",
    "mask_options",
    "masked",
    "named_variables",
    "redact",
    "remember_secrets",
    "resolve_options",
    "strip_signature",
    "without_secrets",
]

MASK: Final = "***"
"""Stands where a secret was."""

ENV: Final = "env:"
"""A value of `storage_options` that begins so names an environment variable."""

_LEAST: Final = 6
"""Shorter texts would be found everywhere; nobody has such a password."""

_HARMLESS: Final = frozenset(
    {"protocol", "scheme", "endpoint_url", "endpoint_override", "region", "region_name", "cache_type", "profile"}
    | {"signature_version", "addressing_style", "project", "account_name", "default_location", "location"}
)
"""Options that are shown as they are, so that messages stay readable."""

_SIGNED: Final = re.compile(
    r"(x-amz-|x-goog-|x-ms-).*|.*(signature|token|secret|passw|credential|api.?key|access.?key|googleaccessid|auth).*"
    r"|sig|key|expires|policy|key-pair-id|sv|se|sp|sr|st|spr|sks?|ske|skv|skt|skoid|sktid|pwd",
    re.IGNORECASE,
)
"""Names of query parameters that sign a URL."""

_PASSWORD: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#@\s:]*:[^/?#@\s]*@")
_URL_IN_TEXT: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>()]+")

_known: set[str] = set()
_lock = threading.Lock()


def has_password(text: str) -> bool:
    """Whether a URL in a text holds `user:password@`."""
    return _PASSWORD.search(text) is not None


def strip_signature(url: str) -> str:
    """A URL without the parameters that sign it (presigned URLs); any other text as it is.

    >>> strip_signature("https://host/a.parquet?version=2&X-Amz-Signature=f00")
    'https://host/a.parquet?version=2'
    """
    if "?" not in url or "://" not in url:
        return url
    parts = urlsplit(url)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    kept = [(name, value) for name, value in pairs if not _SIGNED.fullmatch(name)]
    return url if len(kept) == len(pairs) else urlunsplit(parts._replace(query=urlencode(kept)))


def differing_parameters(one: str, other: str) -> list[str]:
    """Names of the parameters that two URLs have different values of, sorted."""
    pairs = [set(parse_qsl(urlsplit(url).query, keep_blank_values=True)) for url in (one, other)]
    return sorted({name for name, _ in pairs[0] ^ pairs[1]})


def named_variables(options: Any) -> Iterator[str]:
    """Environment variables that `storage_options` name, at any depth."""
    for _, value in leaves(options):
        if value.startswith(ENV):
            yield value[len(ENV) :]


def resolve_options(options: Any, where: str) -> Any:
    """Options with the values of the variables that they name, which are remembered as secrets.

    Args:
        options: A mapping, or what is inside one.
        where: For messages.

    Raises:
        ConfigError: A variable is not set, or a value is one that was masked.
    """
    if isinstance(options, Mapping):
        return {key: resolve_options(value, f"{where}[{key!r}]") for key, value in options.items()}
    if type(options) in (list, tuple):
        return type(options)(resolve_options(item, where) for item in options)
    if options == MASK:
        raise ConfigError(
            f"{where} is masked: it comes from a checkpoint or a saved configuration, which keep no secrets; give the "
            f'value again, or "{ENV}NAME" to take it from an environment variable'
        )
    if not isinstance(options, str) or not options.startswith(ENV):
        return options
    value = os.environ.get(options[len(ENV) :])
    if value is None:
        raise ConfigError(f"{where} names the environment variable {options[len(ENV) :]!r}, which is not set")
    remember_secrets([value])
    return value


def leaves(options: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(Key, text) of all texts in nested options."""
    if isinstance(options, str):
        yield key, options
    elif isinstance(options, bytes):
        yield key, options.decode(errors="replace")
    elif isinstance(options, Mapping):
        for name, value in options.items():
            yield from leaves(value, str(name))
    elif isinstance(options, (list, tuple, set, frozenset)):
        encode = getattr(options, "encode", None)  # aiohttp.BasicAuth, as it stands in the header
        if callable(encode):
            yield key, encode()
        for value in options:
            yield from leaves(value, key)


def remember_secrets(options: Any) -> None:
    """`redact` masks these texts from now on, in this process."""
    found = set()
    for key, text in leaves(options):
        if key in _HARMLESS or text.startswith(ENV):
            continue
        found |= {text, *text.split()[1:], *_basic_words(text)}  # "Bearer abc": also without its first word
    with _lock:
        _known.update(text for text in found if len(text) >= _LEAST and text != MASK)


def _basic_words(text: str) -> list[str]:
    """The password of a header of HTTP's basic authentication."""
    kind, _, coded = text.partition(" ")
    if kind.lower() != "basic":
        return []
    try:
        return [base64.b64decode(coded, validate=True).decode().partition(":")[2]]
    except ValueError:
        return []


def redact(text: str) -> str:
    """A message without the secrets that this process knows of, and without signatures of URLs."""
    with _lock:
        known = sorted(_known, key=len, reverse=True)
    for secret in known:
        text = text.replace(secret, MASK)
    return _URL_IN_TEXT.sub(lambda match: masked(match.group()), text)


def masked(url: str) -> str:
    """A URL as it may be shown."""
    return strip_signature(_PASSWORD.sub(lambda match: match.group().split("://")[0] + f"://{MASK}@", url))


def mask_options(options: Any, key: str = "") -> Any:
    """Options as they may be saved: `env:NAME`, numbers and switches stay, other texts and objects are masked."""
    if isinstance(options, Mapping):
        items = {str(name): mask_options(value, str(name)) for name, value in options.items()}
        return items if any(items.get(name) is not value for name, value in options.items()) else options
    if isinstance(options, (list, tuple)):
        found = [mask_options(item, key) for item in options]
        return found if any(a is not b for a, b in zip(found, options, strict=True)) else options
    if options is None or isinstance(options, (bool, int, float)):
        return options
    if isinstance(options, str) and (key in _HARMLESS or options == MASK or options.startswith(ENV)):
        return options
    return MASK


def without_secrets(value: Any) -> Any:
    """Plain settings without secrets: `storage_options` at any depth masked, URLs without passwords and signatures.

    What holds none is returned as the object it is.
    """
    if isinstance(value, str):
        return masked(value) if "://" in value else value
    if isinstance(value, Mapping):
        items = {
            key: mask_options(item) if key == "storage_options" else without_secrets(item)
            for key, item in value.items()
        }
        return items if any(items[key] is not value[key] for key in items) else value
    if type(value) in (list, tuple):
        found = _all_without(value)
        return type(value)(found) if any(a is not b for a, b in zip(found, value, strict=True)) else value
    return value


def _all_without(values: Iterable[Any]) -> list[Any]:
    return [without_secrets(item) for item in values]
