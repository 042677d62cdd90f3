"""The command line `megascale`: one file per command."""

from megascale_lightning.cli.main import main

__all__ = ["main"]
