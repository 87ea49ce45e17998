"""What one group shows, as one would write it down first: item after item."""

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np

from quantdrift.core.config.schema import Budget
from quantdrift.core.records import Metric
from quantdrift.core.sampling.inclusion import second_rate
from quantdrift.core.signals import WATCHED, cap_of
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, TAIL
from quantdrift.drift.detectors.tail.quantile import bin_of
from quantdrift.drift.evidence.group import ROUNDING, group_value, session_value
from quantdrift.drift.evidence.margin import N_BINS, margin_bin
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.watch import SignalKey
from quantdrift.monitor.fold.groups import clipped
from quantdrift.monitor.fold.inclusion import SliceRates
from quantdrift.storage.fold_rows import ComparisonRow

_BUDGETS = {metric: SignalKey(metric.value, BUDGET.kind) for metric in WATCHED}
_CHANGE, _TAIL = SignalKey("flip", "change"), SignalKey("divergence", "tail")
_LOG = logging.getLogger(__name__)


def shown(
    slice_id: int,
    items: Sequence[ComparisonRow],
    rates_of: Callable[[int, int], SliceRates],
    budget: Budget,
) -> dict[SignalKey, FloatArray]:
    """Return what one group shows in a slice: per signal its values, (width,). What shows nothing is left out.

    Parameters
    ----------
    slice_id
        The slice, for the log.
    items
        The items of an exchange or of a closed session that lie in it.
    rates_of
        How a slice is sampled under a policy.
    budget
        With the caps.
    """
    session, policy_id = bool(items[0].group_key), items[0].policy_id
    rates = rates_of(slice_id, policy_id)
    items = [
        item
        for item in items
        if item.policy_id == policy_id
        or item.u2 < second_rate(rates_of(slice_id, item.policy_id).sure, item.pi1)
    ]
    later = [item for item in items if item.policy_id != policy_id]
    part = [item for item in items if item.policy_id == policy_id]
    if session:
        part = [item for item in part if item.u2 < second_rate(rates.sure, item.pi1)]
    found: dict[SignalKey, FloatArray] = {}
    for metric in WATCHED:
        cap = cap_of(metric, budget)
        seen = [(item, x / cap) for item in part if (x := clipped(metric, item, cap)) is not None]
        if not seen:
            continue
        others = [x / cap for item in later if (x := clipped(metric, item, cap)) is not None]
        value = _weighted(slice_id, seen, others, rates, session=session)
        if value is not None:
            found[_BUDGETS[metric]] = value
    found |= _learned(items, rates, session=session)
    return found


def _learned(
    items: Sequence[ComparisonRow], rates: SliceRates, *, session: bool
) -> dict[SignalKey, FloatArray]:
    """Return what the detectors without weights see: items thinned to a constant probability."""
    first = items[0].policy_id
    kept = [
        item for item in items if item.policy_id != first or (keeps_part if session else _keeps)(rates, item)
    ]
    found = {}
    flips = [(item, x) for item in kept if (x := clipped(Metric.FLIP, item, 1.0)) is not None]
    if any(item.policy_id == first for item, _ in flips):
        value = np.zeros(CHANGE.width)
        for item, x in flips:
            place = margin_bin(item.candidate_margin)
            value[place] += 1.0 / len(flips)
            value[N_BINS + place] += x / len(flips)
        found[_CHANGE] = value
    tails = [(item, x) for item in kept if (x := clipped(Metric.DIVERGENCE, item, math.inf)) is not None]
    tail = [x for _, x in tails]
    if any(item.policy_id == first for item, _ in tails):
        value = np.zeros(TAIL.width)
        for x in tail:
            value[bin_of(x)] += 1.0
        found[_TAIL] = value / len(tail)
    return found


def _weighted(
    slice_id: int,
    seen: Sequence[tuple[ComparisonRow, float]],
    others: Sequence[float],
    rates: SliceRates,
    *,
    session: bool,
) -> FloatArray | None:
    x, c = [value for _, value in seen], rates.session if session else rates.smallest
    try:
        if session:
            value = session_value(x, [item.pi1 for item, _ in seen], rates.sure, c, others)
        else:
            value = group_value(x, [item.pi for item, _ in seen], c, len(seen))
    except ValueError as error:
        # What its sidecar said of its sampling does not fit together: no observation, whatever it shows.
        _LOG.warning("exchange %s says nothing of slice %d: %s", seen[0][0].exchange_id, slice_id, error)
        return None
    return np.array([value.vx, value.v, c])


def slices_of(items: Sequence[ComparisonRow]) -> dict[int, tuple[ComparisonRow, ...]]:
    """Return per slice, ascending, the items that lie in it."""
    ids = sorted({slice_id for row in items for slice_id in row.slice_ids})
    return {slice_id: tuple(row for row in items if slice_id in row.slice_ids) for slice_id in ids}


def _keeps(rates: SliceRates, item: ComparisonRow) -> bool:
    """Return whether a detector without weights sees `item`: every item of the slice with probability `smallest`."""
    least = rates.smallest * (1.0 - ROUNDING)  # below it, the item was sampled under another policy
    return item.pi >= least and item.u2 < second_rate(rates.smallest, item.pi1)


def keeps_part(rates: SliceRates, item: ComparisonRow) -> bool:
    """Return whether it sees the part of a session that `item` belongs to: every part with probability `smallest`."""
    second = second_rate(rates.sure, item.pi1)
    return second > 0 and item.u1 < rates.smallest / second and item.u2 < second
