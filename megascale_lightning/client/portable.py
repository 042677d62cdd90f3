"""Refuses the user's code that the roles' processes could not use, before any of them is started."""

from __future__ import annotations

from megascale_lightning.config import LoaderConfig
from megascale_lightning.runtime.pickling import dump
from megascale_lightning.sources.portability import check_code

__all__ = ["check_portable_code"]


def check_portable_code(config: LoaderConfig) -> None:
    """Look at the functions of every source. Ray is imported only where one of them looks suspicious.

    Raises:
        ConfigError: One does not pickle, is too large, or cannot be imported in another process.
    """
    for sources in config.streams().values():
        for source in sources:
            check_code(source, dump, elsewhere=config.runtime != "local")
