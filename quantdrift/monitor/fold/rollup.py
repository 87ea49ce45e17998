"""What a batch adds to the hourly and daily sums."""

import math
from collections.abc import Sequence

import numpy as np

from quantdrift.storage.monitor.rows import ComparisonRow, RollupRow

HOUR_US = 3_600_000_000
DIVERGENCE_BINS = 64
_EDGES = np.geomspace(1e-6, 10.0, DIVERGENCE_BINS + 1)[1:-1]
_MEANS = ("flip", "topk", "js", "divergence", "margin")


class _Sums:
    def __init__(self) -> None:
        self.n_items = self.n_groups = self.n_infinite = 0
        self.weight = self.weight_sq = 0.0
        self.means = dict.fromkeys(_MEANS, 0.0)
        self.weights = dict.fromkeys(_MEANS, 0.0)
        self.divergence_bins = [0.0] * DIVERGENCE_BINS


class Rollup:
    """Sums of one fold, per candidate version, slice and hour of capture."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int, int], _Sums] = {}

    def add(self, slice_id: int, items: Sequence[ComparisonRow], cap: float) -> None:
        """Add one group: the items of one exchange that lie in a slice.

        The group has weight 1 / pi and each item an equal part of it; a metric that an item lacks adds nothing, and
        nothing to that metric's weight.
        """
        first = items[0]
        hour_us = first.captured_us - first.captured_us % HOUR_US
        sums = self._sums.setdefault((first.model_version_id, slice_id, hour_us), _Sums())
        weight = 1.0 / first.pi
        sums.n_items += len(items)
        sums.n_groups += 1
        sums.weight += weight
        sums.weight_sq += weight * weight
        share = weight / len(items)
        for row in items:
            for metric in _MEANS:
                value = getattr(row, metric)
                if value is not None:
                    sums.weights[metric] += share
                    sums.means[metric] += share * (min(value, cap) if metric == "divergence" else value)
            if row.divergence is not None:
                sums.n_infinite += math.isinf(row.divergence)
                sums.divergence_bins[int(np.searchsorted(_EDGES, row.divergence, side="right"))] += share

    def rows(self) -> list[RollupRow]:
        """Return the sums, ordered by their key."""
        return [
            RollupRow(
                model_version_id=version,
                slice_id=slice_id,
                hour_us=hour_us,
                n_items=sums.n_items,
                n_groups=sums.n_groups,
                weight=sums.weight,
                weight_sq=sums.weight_sq,
                n_infinite=sums.n_infinite,
                divergence_bins=tuple(sums.divergence_bins),
                **sums.means,
                **{f"{metric}_weight": weight for metric, weight in sums.weights.items()},
            )
            for (version, slice_id, hour_us), sums in sorted(self._sums.items())
        ]
