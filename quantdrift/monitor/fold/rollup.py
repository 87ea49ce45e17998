"""What a batch adds to the hourly and daily sums."""

from collections.abc import Iterator
from zlib import crc32

import numpy as np

from quantdrift.drift.evidence.group import GroupRows, ItemSums, Squares, add_squares, add_up
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.facts.estimate import N_GROUPS
from quantdrift.monitor.fold.groups import Columns, changes
from quantdrift.storage.fold_rows import RollupRow

HOUR_US = 3_600_000_000
DIVERGENCE_BINS = 64
_EDGES = np.geomspace(1e-6, 10.0, DIVERGENCE_BINS + 1)[1:-1]
_MEANS = ("flip", "topk", "js", "divergence", "margin", "tie")


# As `add_up` adds them.
_N_ITEMS, _N_GROUPS, _N_INFINITE, _WEIGHT, _WEIGHT_SQ = range(5)
_MEAN = 5
_OF_MEAN = _MEAN + len(_MEANS)
_BINS = _OF_MEAN + len(_MEANS)
_N_UNMEASURED = _BINS + DIVERGENCE_BINS
_CAP = _N_UNMEASURED + 1
# As `add_squares` adds them: of flips and of the divergence.
_SQUARED = np.array([_MEANS.index("flip"), _MEANS.index("divergence")])
_SQUARES = _CAP + 1
_HEAVIEST = _SQUARES + 3 * len(_SQUARED)
_PEOPLE = _HEAVIEST + 1
_OF_PEOPLE = 2 * N_GROUPS + 3
_SIZE = _PEOPLE + len(_SQUARED) * _OF_PEOPLE
_ZEROS = [0.0] * DIVERGENCE_BINS
_SPARSE = 8


class Rollup:
    """Sums of one fold, per candidate version, slice and hour of capture."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int, int], int] = {}
        self._sums = np.zeros((16, _SIZE))

    @property
    def n_rows(self) -> int:
        """How many sums there are."""
        return len(self._rows)

    def add(self, columns: Columns, which: BoolArray, cap: FloatArray, unmeasured: BoolArray) -> None:
        """Add groups: the items of one exchange that lie in a slice.

        A group has weight 1 / pi of its first item and each item an equal part of it; a metric that an item lacks adds
        nothing, and nothing to that metric's weight.

        Parameters
        ----------
        columns
            The items.
        which
            (groups,) those to be added; an hour of a slice takes them in their order.
        cap
            (items,) of the divergence.
        unmeasured
            (items,) those that nothing was measured of.
        """
        item, ends = columns.groups(which)
        if not len(ends):
            return
        begins = ends - np.diff(ends, prepend=0)
        first = item[begins]
        captured_us = columns.captured_us[first]
        version = np.array([columns.rows[index].model_version_id for index in first.tolist()])
        row = self._row(version, columns.slice_id[which], captured_us - captured_us % HOUR_US)
        if unmeasured.any():
            of_groups = np.add.reduceat(unmeasured[item].astype(np.float64), begins)
            np.add.at(self._sums[:, _N_UNMEASURED], row, of_groups)
        divergence = columns.column("divergence")
        values, present = columns.columns(_MEANS), columns.present(_MEANS)
        capped = _MEANS.index("divergence")
        values[:, capped] = np.minimum(divergence, cap)
        values[~present] = 0.0
        bins = np.where(present[:, capped], np.searchsorted(_EDGES, divergence, side="right"), -1)
        weight = 1.0 / (columns.column("pi1") * columns.column("pi2"))[first]
        items = ItemSums(values, np.ascontiguousarray(present), np.isinf(divergence), bins)
        groups = GroupRows(row, weight, item, ends)
        add_up(self._sums, groups, items)
        person = np.array([_random_group(comparison.group_key) for comparison in columns.rows])[first]
        add_squares(self._sums[:, _SQUARES:], groups, items, Squares(_SQUARED, person, N_GROUPS))
        np.maximum.at(self._sums[:, _CAP], row, cap[first])

    def close(self, columns: Columns, which: BoolArray) -> None:
        """Let the exchanges of sessions that have closed count as one in `weight_sq`.

        A session's exchanges are correlated, at worst all alike: (sum of w)^2 takes the place of the sum of w^2, so that
        n_eff counts sessions. Until its session closes an exchange counts alone.

        Parameters
        ----------
        columns
            The items.
        which
            (groups,) the closed sessions, each in the hour of its first item.
        """
        item, ends = columns.groups(which)
        if not len(ends):
            return
        begins = ends - np.diff(ends, prepend=0)
        ids = np.array([columns.rows[index].exchange_id for index in item.tolist()])
        new = np.zeros(len(item), dtype=np.bool_)
        new[begins] = True
        new[1:] |= ids[1:] != ids[:-1]
        weight = np.where(new, 1.0 / (columns.column("pi1") * columns.column("pi2"))[item], 0.0)
        total = np.add.reduceat(weight, begins)
        alone = np.add.reduceat(weight * weight, begins)
        first = item[begins]
        captured_us = columns.captured_us[first]
        version = np.array([columns.rows[index].model_version_id for index in first.tolist()])
        row = self._row(version, columns.slice_id[which], captured_us - captured_us % HOUR_US)
        np.add.at(self._sums[:, _WEIGHT_SQ], row, total * total - alone)

    def rows(self) -> list[RollupRow]:
        """Return the sums, ordered by their key."""
        if not self._rows:
            return []
        keys = sorted(self._rows)
        sums = self._sums[[self._rows[key] for key in keys]]
        sum_of = sums[:, :_BINS].T.tolist()
        n_items, n_groups, n_infinite = sums[:, :_WEIGHT].astype(np.int64).T.tolist()
        n_unmeasured = sums[:, _N_UNMEASURED].astype(np.int64).tolist()
        (*means, tie), (*weights, tie_weight) = sum_of[_MEAN:_OF_MEAN], sum_of[_OF_MEAN:]
        return list(
            map(
                RollupRow,
                *zip(*keys, strict=True),
                n_items,
                n_groups,
                sum_of[_WEIGHT],
                sum_of[_WEIGHT_SQ],
                *means,
                *weights,
                n_infinite,
                _tuples(sums[:, _BINS:_N_UNMEASURED]),
                tie,
                tie_weight,
                n_unmeasured,
                *sums[:, _CAP:_PEOPLE].T.tolist(),
                _people(sums[:, _PEOPLE:]),
            )
        )

    def _row(self, version: IntArray, slice_id: IntArray, hour_us: IntArray) -> IntArray:
        """Return the rows of `_sums` of groups."""
        starts = changes(version, slice_id, hour_us)
        keys = zip(version[starts].tolist(), slice_id[starts].tolist(), hour_us[starts].tolist(), strict=True)
        rows = [self._rows.setdefault(key, len(self._rows)) for key in keys]
        if len(self._rows) > len(self._sums):
            more = np.zeros((2 * len(self._rows), _SIZE))
            more[: len(self._sums)] = self._sums
            self._sums = more
        return np.repeat(np.array(rows), np.diff(starts, append=len(version)))


def _random_group(group_key: str) -> int:
    """Return the random group of a person, the same in every hour; -1 where nobody is named."""
    return crc32(group_key.encode()) % N_GROUPS if group_key else -1


def _people(sums: FloatArray) -> Iterator[tuple[float, ...]]:
    """Yield the sums of people of each row; empty where nobody is named."""
    for row, n_people in zip(sums, np.count_nonzero(sums, axis=1).tolist(), strict=True):
        yield tuple(row.tolist()) if n_people else ()


def _tuples(bins: FloatArray) -> Iterator[tuple[float, ...]]:
    """Yield rows as tuples. Those of a single batch are nearly all zeros, which need not be made one by one."""
    filled = bins != 0.0
    if filled.sum() * _SPARSE > filled.size:
        yield from map(tuple, bins.tolist())
        return
    ends = filled.sum(axis=1).cumsum().tolist()
    places, values, begin = np.nonzero(filled)[1].tolist(), bins[filled].tolist(), 0
    for end in ends:
        row = _ZEROS.copy()
        for index in range(begin, end):
            row[places[index]] = values[index]
        yield tuple(row)
        begin = end
