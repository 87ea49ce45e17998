"""From the rows of a batch to the groups that each slice is given."""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from quantdrift.core.config.schema import Budget
from quantdrift.core.records import Metric
from quantdrift.drift.block import FloatArray
from quantdrift.drift.group import GroupValue, group_value
from quantdrift.drift.watch import Groups, Series
from storage.fold_rows import ComparisonRow

WATCHED = (Metric.FLIP, Metric.KL)
_LOG = logging.getLogger(__name__)


class ExchangeRows(msgspec.Struct, frozen=True, kw_only=True):
    """The items of one exchange.

    Parameters
    ----------
    order
        Place of the exchange in its batch.
    rows
        Its items, in order.
    slices
        Per slice, ascending, the items that lie in it.
    """

    order: int
    rows: tuple[ComparisonRow, ...]
    slices: dict[int, tuple[ComparisonRow, ...]]


def exchanges(rows: Sequence[ComparisonRow]) -> Iterator[ExchangeRows]:
    """Yield the exchanges of a batch whose rows are ordered by (exchange_id, item)."""
    grouped = itertools.groupby(rows, key=lambda row: row.exchange_id)
    for order, (_, found) in enumerate(grouped):
        items = tuple(found)
        ids = sorted({slice_id for row in items for slice_id in row.slice_ids})
        slices = {slice_id: tuple(row for row in items if slice_id in row.slice_ids) for slice_id in ids}
        yield ExchangeRows(order=order, rows=items, slices=slices)


def cap_of(metric: Metric, budget: Budget) -> float:
    """Return what one unit of the clipped signal is in the metric's own unit."""
    return budget.kl_cap if metric is Metric.KL else 1.0


def budget_of(metric: Metric, budget: Budget) -> float:
    """Return the accepted mean of the clipped signal, over its cap."""
    return budget.kl / budget.kl_cap if metric is Metric.KL else budget.flip


def values_of(metric: Metric, items: Sequence[ComparisonRow], cap: float) -> list[float]:
    """Return the items' clipped values in [0, 1]; what has none is no observation."""
    found = []
    for row in items:
        value = row.kl if metric is Metric.KL else row.flip
        if value is not None and not math.isnan(value):
            found.append(min(max(value, 0.0), cap) / cap)
    return found


def group_values(
    slice_id: int, items: Sequence[ComparisonRow], smallest: float, budget: Budget
) -> dict[Metric, GroupValue]:
    """Return the value of one exchange in a slice, per metric that its items have.

    Parameters
    ----------
    slice_id
        The slice, for the log.
    items
        The items of the exchange that lie in it.
    smallest
        Lower bound of the slice's inclusion probabilities under the exchange's policy.
    budget
        With the caps.
    """
    first = items[0]
    values = {}
    for metric in WATCHED:
        x = values_of(metric, items, cap_of(metric, budget))
        if not x:
            continue
        try:
            values[metric] = group_value(x, [first.pi] * len(x), smallest, len(x))
        except ValueError as error:
            # What its sidecar said of its sampling does not fit together: no observation, whatever it shows.
            _LOG.warning("exchange %s says nothing of slice %d: %s", first.exchange_id, slice_id, error)
    return values


class SliceGroups:
    """Collects the groups of one slice along a batch."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._mass: list[float] = []
        self._at_us: list[int] = []
        self._values: dict[Metric, list[GroupValue | None]] = {}

    def add(self, order: int, mass: float, at_us: int, values: dict[Metric, GroupValue]) -> None:
        """Add one group with its value per metric; a metric without a value was not observed."""
        for metric in values:
            self._values.setdefault(metric, [None] * len(self._order))
        self._order.append(order)
        self._mass.append(mass)
        self._at_us.append(at_us)
        for metric, series in self._values.items():
            series.append(values.get(metric))

    def groups(self) -> Groups:
        """Return them as arrays."""
        return Groups(
            order=_floats(self._order),
            mass=_floats(self._mass),
            at_us=_floats(self._at_us),
            series={
                metric.value: Series(
                    vx=_floats([value.vx if value else 0.0 for value in series]),
                    v=_floats([value.v if value else 0.0 for value in series]),
                    seen=np.array([value is not None for value in series]),
                )
                for metric, series in self._values.items()
            },
        )


def _floats(values: Sequence[float]) -> FloatArray:
    return np.array(values, dtype=np.float64)
