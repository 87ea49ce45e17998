"""Slices that may have lost far more samples than their header strata: their share has fallen while samples are missing.

`quantdrift.drift.share` says whether a share has fallen. That counts where what is missing of the slice's strata could explain at
least half of the fall, and would be more than `monitor.max_loss_ratio` of the slice.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Final

import numpy as np

from quantdrift.drift.share import HISTORY_H, Shares, fallen, usable_hours
from quantdrift.facts.words.verdict import fewer_samples
from quantdrift.monitor.fold.loss import LEAST_LOST, RecentCounts
from quantdrift.monitor.fold.rollup import HOUR_US
from quantdrift.storage.fold_rows import ShareHour

_EVERYTHING: Final = 0  # the `slice_id` of all traffic
_EXPLAINED: Final = 0.5


class MissingSamples:
    """The slices whose samples may be missing, and the hours in which nothing was lost.

    After a restart the hours before it are not known to be without losses.
    """

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, int], str] = {}
        self._lossless: dict[str, set[int]] = {}

    def __bool__(self) -> bool:
        """Return whether there is any such slice."""
        return bool(self._reasons)

    def reason(self, model: str, slice_id: int) -> str:
        """Return why a slice is not known; empty where its share has not fallen, or losses do not explain it."""
        return self._reasons.get((model, slice_id), "")

    def look(self, counts: Mapping[str, Sequence[RecentCounts]], now_us: int) -> list[str]:
        """Note of each model whether it loses samples now, and return those that do.

        Parameters
        ----------
        counts
            Per model, those of its header strata over the recent hour.
        """
        hour, losing = now_us // HOUR_US, []
        for model, of_strata in sorted(counts.items()):
            lossless = self._lossless.setdefault(model, set())
            if any(of.missing >= LEAST_LOST for of in of_strata):
                losing.append(model)
                lossless.discard(hour)
            else:
                lossless.add(hour)
            lossless.difference_update([past for past in lossless if past <= hour - HISTORY_H])
        return losing

    def see(
        self,
        rows: Sequence[ShareHour],
        now_us: int,
        counts: Callable[[str, int], RecentCounts | None],
        max_ratio: float,
    ) -> bool:
        """Find the slices whose samples may be missing; return whether these are others than before, or for other reasons.

        Parameters
        ----------
        rows
            By model, slice and hour; all traffic is slice 0. Slices without rows have not fallen.
        counts
            Returns the counts of the header strata of a model's slice over the recent hour; None where it is not watched.
        max_ratio
            `monitor.max_loss_ratio`.
        """
        before, self._reasons = self._reasons, {}
        newest = now_us // HOUR_US
        for model, of_model in groupby(rows, key=lambda row: row.model):
            self._see_model(model, list(of_model), newest, counts, max_ratio)
        return before != self._reasons

    def _see_model(
        self,
        model: str,
        rows: Sequence[ShareHour],
        newest: int,
        counts: Callable[[str, int], RecentCounts | None],
        max_ratio: float,
    ) -> None:
        slice_ids = sorted({row.slice_id for row in rows})
        if slice_ids[0] != _EVERYTHING or len(slice_ids) == 1:
            return
        oldest = newest - HISTORY_H + 1
        row_of = {slice_id: number for number, slice_id in enumerate(slice_ids)}
        sums = np.zeros((2, len(slice_ids), HISTORY_H))
        for row in rows:
            if 0 <= (hour := row.hour_us // HOUR_US - oldest) < HISTORY_H:
                sums[:, row_of[row.slice_id], hour] = row.weight, row.weight_sq
        shares = Shares(weight=sums[0, 1:], weight_sq=sums[1, 1:], total=sums[0, 0])
        hours = self._lossless.get(model, set())
        lossless = np.array([hour in hours for hour in range(oldest, newest + 1)])
        n_slices = rows[0].n_slices
        changes = fallen(shares, usable_hours(shares, lossless, n_slices=n_slices), n_slices=n_slices)
        for index in np.flatnonzero(changes.fallen).tolist():
            of = counts(model, slice_ids[1 + index])
            if of is not None and (
                reason := _reason(of, changes.before.item(index), changes.now.item(index), max_ratio)
            ):
                self._reasons[model, slice_ids[1 + index]] = reason


def _reason(counts: RecentCounts, before: float, now: float, max_ratio: float) -> str:
    """Return why a slice whose share has fallen is not known; empty where losses do not explain it."""
    missing = counts.missing / max(counts.taken, counts.missing, 1)
    of_slice = min(missing, before - now) / before
    if counts.missing < LEAST_LOST or missing < _EXPLAINED * (before - now) or of_slice <= max_ratio:
        return ""
    return fewer_samples(before, now, missing, of_slice)
