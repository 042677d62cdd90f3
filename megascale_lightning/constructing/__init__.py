"""From plans and samples to batches: what a data constructor does, free of Ray, threads and torch."""

from megascale_lightning.constructing.constructor import DataConstructor

__all__ = ["DataConstructor"]
