"""From the rows of a batch to the groups that each slice is given."""

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from quantdrift.drift.block import FloatArray
from quantdrift.drift.watch import Groups, Series, SignalKey
from quantdrift.storage.monitor.rows import ComparisonRow


class ExchangeRows(msgspec.Struct, frozen=True, kw_only=True):
    """The items of one exchange.

    Parameters
    ----------
    order
        Place of the exchange in its batch.
    rows
        Its items, in order.
    """

    order: int
    rows: tuple[ComparisonRow, ...]


def exchanges(rows: Sequence[ComparisonRow]) -> Iterator[ExchangeRows]:
    """Yield the exchanges of a batch whose rows are ordered by (exchange_id, item)."""
    grouped = itertools.groupby(rows, key=lambda row: row.exchange_id)
    for order, (_, found) in enumerate(grouped):
        yield ExchangeRows(order=order, rows=tuple(found))


def slices_of(items: Sequence[ComparisonRow]) -> dict[int, tuple[ComparisonRow, ...]]:
    """Return per slice, ascending, the items that lie in it."""
    ids = sorted({slice_id for row in items for slice_id in row.slice_ids})
    return {slice_id: tuple(row for row in items if slice_id in row.slice_ids) for slice_id in ids}


class SliceGroups:
    """Collects the groups of one slice along a batch."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._mass: list[float] = []
        self._at_us: list[int] = []
        self._values: dict[SignalKey, list[FloatArray | None]] = {}

    def add(self, order: int, mass: float, at_us: int, values: dict[SignalKey, FloatArray]) -> None:
        """Add one group with its values per signal; a signal without any was not observed."""
        for key in values:
            self._values.setdefault(key, [None] * len(self._order))
        self._order.append(order)
        self._mass.append(mass)
        self._at_us.append(at_us)
        for key, series in self._values.items():
            series.append(values.get(key))

    def groups(self) -> Groups:
        """Return them as arrays."""
        return Groups(
            order=_floats(self._order),
            mass=_floats(self._mass),
            at_us=_floats(self._at_us),
            series={key: _series(values) for key, values in self._values.items()},
        )


def _series(values: Sequence[FloatArray | None]) -> Series:
    observed = [value for value in values if value is not None]
    if len(observed) == len(values):
        return Series(x=np.concatenate(observed).reshape(len(values), -1))
    x = np.zeros((len(values), len(observed[0])))
    seen = np.array([value is not None for value in values])
    x[seen] = observed
    return Series(x=x, seen=seen)


def _floats(values: Sequence[float]) -> FloatArray:
    return np.array(values, dtype=np.float64)
