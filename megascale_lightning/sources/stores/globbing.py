"""`match_local`: what a pattern matches on this machine; `**` goes through no link twice that leads back up."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from itertools import dropwhile

__all__ = ["match_local"]


def match_local(pattern: str) -> list[str]:
    """Paths that match, sorted, each once; `**` stands for folders at any depth.

    Of the links to folders, `**` follows those that do not lead back to where it came from, or above: `glob` would
    list all that is there again and again, as often as the system goes through links.

    Args:
        pattern: Absolute.
    """
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return sorted(glob.glob(pattern))
    at = parts.index("**")
    roots = match_local(os.sep.join(parts[:at]) or os.sep)
    # A pattern that ends so means all that is below.
    rest = list(dropwhile("**".__eq__, parts[at:])) or ["*"]
    found = {
        path
        for root in roots
        for folder in _folders(root, (os.path.realpath(root),))
        for path in match_local(os.path.join(glob.escape(folder), *rest))
    }
    return sorted(found)


def _folders(path: str, above: tuple[str, ...]) -> Iterator[str]:
    """A folder and all below it; hidden ones are left out.

    Args:
        path: The folder.
        above: The real paths of it and of those that were gone through.
    """
    yield path
    try:
        with os.scandir(path) as entries:
            below = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:  # as `glob` does: what may not be looked into matches nothing
        return
    for entry in below:
        real = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(above[-1], entry.name)
        if not entry.is_symlink() or not any(_is_inside(folder, real) for folder in above):
            yield from _folders(entry.path, (*above, real))


def _is_inside(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder
