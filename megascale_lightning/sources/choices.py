"""What settings of a source are chosen from, and what its paths may not be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from megascale_lightning.sources.stores.files import flat_paths
from megascale_lightning.sources.stores.secrets import has_password, leaves, masked
from megascale_lightning.sources.stores.storage import is_web

__all__ = ["Executor", "Format", "OnError", "Overlong", "path_problems"]

Format = Literal[
    "parquet",
    "arrow",
    "jsonl",
    "csv",
    "text",
    "webdataset",
    "megatron",
    "images",
    "mds",
    "litdata",
    "dataset",
    "iterable",
]
OnError = Literal["raise", "skip", "quarantine"]
Executor = Literal["inline", "threads", "processes"]
Overlong = Literal["split", "truncate", "drop", "error"]

_IPV6 = re.compile(r"(?<=://)([^/@]*@)?\[[0-9A-Fa-f:.%]*\]")


def path_problems(data: Any, options: Mapping[str, Any] | None, *, has_filesystem: bool) -> list[str]:
    """What is wrong with the paths in `data`, and the URLs in storage options.

    Args:
        data: As in `Source.data`.
        options: As in `Source.storage_options`.
        has_filesystem: `Source.filesystem` reads them.
    """
    found = []
    paths = list(flat_paths(data))
    if any(map(has_password, [*paths, *(text for _, text in leaves(options or {}))])):
        found.append(
            "a URL holds a user name and a password, and URLs are kept in checkpoints and logs: leave them out of "
            "it and give storage_options, for HTTP {'headers': {'Authorization': 'env:NAME'}} with a variable that "
            "holds 'Basic ...' or 'Bearer ...'"
        )
    cut = next((path for path in paths if is_web(path) and "#" in path), None)
    if cut is not None:
        found.append(
            f"a web server is not sent what follows the '#' in {masked(cut)}: write %23 where a name has a '#', or "
            "leave it out"
        )
    if not has_filesystem and any(map(_is_chained, paths)):
        found.append(
            "chained URLs ('::') are not read: give the filesystem that reads the files, made by fsspec, as "
            "filesystem=, and plain paths"
        )
    return found


def _is_chained(path: str) -> bool:
    return "://" in path and "::" in _IPV6.sub("", path)
