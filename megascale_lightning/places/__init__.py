"""Where a trainer rank stands: the four axes of a job, and the tree that gives every rank its place on them."""

from megascale_lightning.places.axes import AXES, Axis, fold_axis
from megascale_lightning.places.tree import ClientPlaceTree, Place

__all__ = ["AXES", "Axis", "ClientPlaceTree", "Place", "fold_axis"]
