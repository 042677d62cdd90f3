"""Even loads in several costs at once, such as an encoder's and a backbone's."""

from __future__ import annotations

import numpy as np

from megascale_lightning.types import FloatArray, IntArray

__all__ = ["assign_vectors"]

_REPAIR_ROUNDS = 200
_CLOSE = 1.005
_LEAST_GAIN = 1e-4


def assign_vectors(costs: FloatArray, *, num_bins: int, per_bin: int) -> IntArray:
    """Place each item where the largest of the normalised loads stays least, the largest items first.

    Args:
        costs: float64 [num_bins x per_bin, D], not negative.
        num_bins: Bins.
        per_bin: Items of each bin.

    Returns:
        int64 [num_bins, per_bin]: the items of each bin, in rising order.
    """
    # Seen the largest first, equal ones by all their costs, so that the order of arrival decides only between twins.
    scaled = costs * (num_bins / _totals(costs))
    order = np.lexsort((*(-scaled.T), -scaled.max(axis=1)))
    if per_bin == 1:
        return order[:, None]
    scaled = scaled[order]
    loads = np.zeros((num_bins, costs.shape[1]))
    room = np.full(num_bins, per_bin)
    closed = np.zeros(num_bins)
    places = np.empty(len(costs), dtype=np.int64)
    for item in range(len(costs)):
        chosen = int(((loads + scaled[item]).max(axis=1) + closed).argmin())
        places[item] = chosen
        loads[chosen] += scaled[item]
        room[chosen] -= 1
        if not room[chosen]:
            closed[chosen] = np.inf
    _repair(scaled, places, loads)
    members = np.argsort(places, kind="stable").reshape(num_bins, per_bin)
    return np.sort(order[members], axis=1)


def _totals(costs: FloatArray) -> FloatArray:
    """Float64 [D]: sums, in rising order, so that rounding is the same for any order of arrival; 1 for none."""
    totals: FloatArray = np.sort(costs, axis=0).sum(axis=0)
    return np.where(totals > 0, totals, 1.0)


def _repair(scaled: FloatArray, places: IntArray, loads: FloatArray) -> None:
    """Swap an item of the bin with the highest load against one of a lower bin while both end below it, in place.

    The lowest bin is asked first, the next ones where it has nothing to give. Stops near the mean (1 in scaled costs):
    the last half percent would cost far more time than it is worth.
    """
    for _ in range(_REPAIR_ROUNDS):
        peaks = loads.max(axis=1)
        full = int(peaks.argmax())
        if peaks[full] <= _CLOSE:
            return
        mine = np.flatnonzero(places == full)
        for other in np.argsort(peaks, kind="stable")[:-1].tolist():
            theirs = np.flatnonzero(places == other)
            moved = scaled[mine][:, None] - scaled[theirs][None]
            after = np.maximum((loads[full] - moved).max(axis=2), (loads[other] + moved).max(axis=2))
            if after.min() < peaks[full] - _LEAST_GAIN:
                break
        else:
            return
        first, second = divmod(int(after.argmin()), theirs.size)
        given, taken = mine[first], theirs[second]
        loads[full] -= moved[first, second]
        loads[other] += moved[first, second]
        places[given], places[taken] = other, full
