"""The value of one group, which is the observation of a detector.

The items of one exchange are correlated, so the exchange is the unit. With `v_i = c / pi_i`, c at most every
inclusion probability of the policy,

    z = (1 / n) * sum over the sampled items i of v_i * (x_i - m)

has mean at most 0 while the mean over groups is at most m: the sampling probabilities cancel. It is kept as the two
numbers `vx = sum(v_i x_i) / n` and `v = sum(v_i) / n`, so that `z = vx - v * m` for every m. `v / c` is the group's 1 / pi,
by which a displayed mean weighs it: c differs between policies.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from quantdrift.drift.evidence.margin import N_BINS as N_MARGIN_BINS
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray

ROUNDING = 1e-9
N_TAIL_BINS = 64  # of a tail's histogram; `quantdrift.drift.detectors.tail.quantile` has their edges
N_TIME_BINS = 81  # of a histogram of latencies; `quantdrift.drift.detectors.growth` has their edges


class GroupValue(msgspec.Struct, frozen=True):
    """One observation.

    Parameters
    ----------
    vx
        Weighted mean of the items' values over the group's offered items, in [0, 1].
    v
        Mean of the weights over the same items, in [0, 1]; at least `vx`.
    """

    vx: float
    v: float


def group_value(x: Sequence[float], pi: Sequence[float], c: float, n_offered: int) -> GroupValue:
    """Return the value of a group.

    Parameters
    ----------
    x
        Values of the sampled items, clipped to [0, 1] by the caller: `min(x, cap) / cap`, so that an infinite one
        counts 1.
    pi
        Their inclusion probabilities.
    c
        Positive lower bound of every inclusion probability of the policy in effect.
    n_offered
        Items of the group that were offered, sampled or not.

    Raises
    ------
    ValueError
        A value outside [0, 1], or a probability below c: weights above 1 would break the false-alarm bound, and
        mean that the observation belongs to another policy than c does.
    """
    if not 0 < len(x) == len(pi) <= n_offered:
        raise ValueError("a group holds at least one sampled item and no more than were offered")
    vx = weight = 0.0
    for value, probability in zip(x, pi, strict=True):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"the value {value} is not clipped to [0, 1]")
        v = c / probability
        if not 0.0 < v <= 1.0 + ROUNDING:
            raise ValueError(f"the weight {v} = c / pi is above 1: c is no bound of this policy")
        v = min(v, 1.0)
        vx += v * value
        weight += v
    return GroupValue(vx / n_offered, weight / n_offered)


def session_value(
    x: Sequence[float], pi1: Sequence[float], sure: float, c: float, others: Sequence[float] = ()
) -> GroupValue:
    """Return the value of a session: the sum over its parts of v times the part's mean.

    A part is what lies in header strata of one rate. All of it is sampled or nothing, with probability
    min(pi1, sure), so that `v = c / min(pi1, sure)` makes the sum over the sampled parts unbiased for that over all parts,
    however the parts hang together. c is at most 1 over the sum of 1 / min(pi1, sure) over all rates, so that v is at most 1.

    Parameters
    ----------
    x
        Values of the items of the sampled parts, as of `group_value`.
    pi1
        The rates of their header strata.
    sure
        Lower bound of the body rates.
    others
        Values of its items that were sampled under later policies. They belong to each part, and give it no weight: the chance
        that the session counts is that of its first policy.

    Raises
    ------
    ValueError
        The weights are above 1 together: the session belongs to another policy than c does.
    """
    vx = weight = 0.0
    for rate in sorted(set(pi1)):
        of_part = [value for value, of in zip(x, pi1, strict=True) if of == rate]
        total = rest = 0.0
        for value in of_part:
            total += value
        for value in others:
            rest += value
        v = c / min(rate, sure)
        vx += v * ((total + rest) / (len(of_part) + len(others)))
        weight += v
    if not 0.0 < weight <= 1.0 + ROUNDING:
        raise ValueError(f"the weight {weight} of a session is above 1: c is no bound of this policy")
    return GroupValue(min(vx, 1.0), min(weight, 1.0))


class Items(NamedTuple):
    """Items by columns, (items,) each; NaN stands for a value that is undefined.

    Parameters
    ----------
    flip
        In [0, 1].
    divergence
        Clipped to [0, cap], over the cap.
    pi
        Total inclusion probability.
    pi1
        That of the first draw.
    u1, u2
        The draws.
    margin_bin
        Bin of `quantdrift.drift.evidence.margin`.
    tail_bin
        Bin of `quantdrift.drift.detectors.tail.quantile`, of the divergence without a cap.
    """

    flip: FloatArray
    divergence: FloatArray
    pi: FloatArray
    pi1: FloatArray
    u1: FloatArray
    u2: FloatArray
    margin_bin: IntArray
    tail_bin: IntArray


class Members(NamedTuple):
    """The items of each group, and how the groups were sampled.

    Parameters
    ----------
    item
        Indices of the items, group after group.
    ends
        (groups,) where the indices of each group end.
    smallest
        (groups,) c: lower bound of the inclusion probabilities.
    session
        (groups,) whether it is a session, which is sampled part by part: `session_value`.
    sure
        (groups,) lower bound of the body rates.
    least
        (groups,) c of a session.
    later
        As `item`: whether the item was sampled under a later policy than the first one of its session.
    """

    item: IntArray
    ends: IntArray
    smallest: FloatArray
    session: BoolArray
    sure: FloatArray
    least: FloatArray
    later: BoolArray


class Means(NamedTuple):
    """The values of groups for one metric.

    Parameters
    ----------
    x
        (groups, 3) the two numbers of `GroupValue`, and c.
    seen
        (groups,) whether the group has a value.
    refused
        (groups,) whether it has none because a weight is above 1.
    """

    x: FloatArray
    seen: BoolArray
    refused: BoolArray


class ThinnedGroups(NamedTuple):
    """The values of groups for detectors without weights, from items thinned to a constant probability.

    Parameters
    ----------
    change
        (groups, 2 * margin bins) per margin bin the share of the items, then the sum of flips over the items.
    tail
        (groups, tail bins) share of the items in each bin of divergence.
    seen_change, seen_tail
        (groups,) whether the group has values.
    """

    change: FloatArray
    tail: FloatArray
    seen_change: BoolArray
    seen_tail: BoolArray


def group_means(column: FloatArray, items: Items, members: Members) -> Means:
    """Return `group_value` for many groups, with the same bits; `column` has the metric of the items."""
    n = len(members.ends)
    means = Means(np.zeros((n, 3)), np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_))
    _means(column, items, members, means)
    return means


def group_times(bins: IntArray, items: Items, members: Members) -> Means:
    """Return the weights of many groups by bin of time: c, then of each bin the part of v that its items have.

    Parameters
    ----------
    bins
        (items,) bin of the latency; -1 where there is none.
    """
    n = len(members.ends)
    times = Means(np.zeros((n, 1 + N_TIME_BINS)), np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_))
    _times(bins, items, members, times)
    return times


def group_shares(items: Items, members: Members) -> ThinnedGroups:
    """Return the values of many groups for detectors without weights."""
    n = len(members.ends)
    shares = ThinnedGroups(
        np.zeros((n, 2 * N_MARGIN_BINS)),
        np.zeros((n, N_TAIL_BINS)),
        np.zeros(n, dtype=np.bool_),
        np.zeros(n, dtype=np.bool_),
    )
    _shares(items, members, shares)
    return shares


class GroupRows(NamedTuple):
    """Where groups are added up.

    Parameters
    ----------
    row, weight
        (groups,) the row of the sums that each is added to, and its weight.
    item, ends
        As in `Members`.
    """

    row: IntArray
    weight: FloatArray
    item: IntArray
    ends: IntArray


class Squares(NamedTuple):
    """What `add_squares` squares.

    Parameters
    ----------
    metric
        Columns of the items' values.
    person
        (groups,) the random group of the person whose group it is; -1: nobody is named.
    n_random
        Number of random groups.
    """

    metric: IntArray
    person: IntArray
    n_random: int


class ItemSums(NamedTuple):
    """What items add to sums.

    Parameters
    ----------
    values
        (items, metrics); 0 where there is none.
    present
        (items, metrics) where there is one.
    infinite
        (items,) whether the divergence is infinite.
    bins
        (items,) bin of the divergence; -1 where there is none.
    """

    values: FloatArray
    present: BoolArray
    infinite: BoolArray
    bins: IntArray


@compiled
def add_up(sums: FloatArray, groups: GroupRows, items: ItemSums) -> None:
    """Add groups to rows of sums, in place, in their order.

    The columns of a row are: the numbers of items, of groups and of infinite divergences, the sums of the weights and of
    their squares; then for each metric the weighted sum, for each metric the sum of the weights of the items that have
    it, and for each bin that of the items in it. An item has an equal part of its group's weight.

    Parameters
    ----------
    sums
        (rows, columns).
    groups
        What is added, and where.
    items
        What their items add.
    """
    row, weight, item, ends = groups
    begin, n_metrics = 0, items.values.shape[1]
    for group in range(len(ends)):
        of, n = sums[row[group]], ends[group] - begin
        of[0] += n
        of[1] += 1.0
        of[3] += weight[group]
        of[4] += weight[group] * weight[group]
        share = weight[group] / n
        for position in range(begin, ends[group]):
            member = item[position]
            of[2] += items.infinite[member]
            for metric in range(n_metrics):
                of[5 + metric] += share * items.values[member, metric]
                of[5 + n_metrics + metric] += share * items.present[member, metric]
            if items.bins[member] >= 0:
                of[5 + 2 * n_metrics + items.bins[member]] += share
        begin = ends[group]


@compiled
def add_squares(sums: FloatArray, groups: GroupRows, items: ItemSums, squares: Squares) -> None:
    """Add what intervals need to rows of sums, in place.

    The columns of a row are, for each of the metrics: the sums over groups of w^2, y^2 and w y, with w the weight of the group's items
    that have the metric and y their weighted sum; then the largest w of all; then, for each of the metrics, W and Y of each random
    group of people, and the three sums again over the groups of people alone.

    Parameters
    ----------
    sums
        (rows, columns).
    groups, items
        As of `add_up`.
    squares
        Which metrics, and whose groups they are.
    """
    row, weight, item, ends = groups
    metric, person, n_random = squares
    n_metrics = len(metric)
    heaviest = 3 * n_metrics
    size = 2 * n_random + 3
    begin = 0
    for group in range(len(ends)):
        of = sums[row[group]]
        share = weight[group] / (ends[group] - begin)
        for number in range(n_metrics):
            w, y = 0.0, 0.0
            for position in range(begin, ends[group]):
                w += share * items.present[item[position], metric[number]]
                y += share * items.values[item[position], metric[number]]
            of[3 * number] += w * w
            of[3 * number + 1] += y * y
            of[3 * number + 2] += w * y
            of[heaviest] = max(of[heaviest], w)
            if person[group] >= 0:
                first = heaviest + 1 + number * size
                of[first + person[group]] += w
                of[first + n_random + person[group]] += y
                of[first + 2 * n_random] += w * w
                of[first + 2 * n_random + 1] += y * y
                of[first + 2 * n_random + 2] += w * y
        begin = ends[group]


def compile_all() -> None:
    """Compile the functions of this module, by calling them with empty arrays."""
    no_values, no_indices = np.zeros(0), np.zeros(0, dtype=np.intp)
    items = Items(no_values, no_values, no_values, no_values, no_values, no_values, no_indices, no_indices)
    none = np.zeros(0, dtype=np.bool_)
    members = Members(no_indices, no_indices, no_values, none, no_values, no_values, none)
    group_means(no_values, items, members)
    group_times(no_indices, items, members)
    group_shares(items, members)
    table, some = np.zeros((0, 1)), np.zeros((0, 1), dtype=np.bool_)
    rows = GroupRows(no_indices, no_values, no_indices, no_indices)
    items_of_rows = ItemSums(table, some, members.session, no_indices)
    add_up(np.zeros((1, 8)), rows, items_of_rows)
    # A part of the columns, as the fold gives it.
    add_squares(np.zeros((2, 8))[:, 1:], rows, items_of_rows, Squares(no_indices, no_indices, 1))


@compiled
def _means(column: FloatArray, items: Items, members: Members, means: Means) -> None:
    begin = 0
    for group in range(len(members.ends)):
        if members.session[group]:
            _session_mean(column, items, members, group, means)
            begin = members.ends[group]
            continue
        n, vx, weight = 0, 0.0, 0.0
        for member in range(begin, members.ends[group]):
            item = members.item[member]
            if np.isnan(column[item]):
                continue
            v = members.smallest[group] / items.pi[item]
            if not 0.0 < v <= 1.0 + ROUNDING:
                means.refused[group] = True
            v = min(v, 1.0)
            n += 1
            vx += v * column[item]
            weight += v
        if n > 0 and not means.refused[group]:
            means.x[group, 0], means.x[group, 1] = vx / n, weight / n
            means.x[group, 2] = members.smallest[group]
            means.seen[group] = True
        begin = members.ends[group]


@compiled
def _session_mean(column: FloatArray, items: Items, members: Members, group: int, found: Means) -> None:
    """Write `session_value` of one session."""
    begin, end = members.ends[group - 1] if group > 0 else 0, members.ends[group]
    sure, last, vx, weight = members.sure[group], -1.0, 0.0, 0.0
    n_later, later = _later(column, members, begin, end)
    while True:  # part by part, by rising rate
        rate = np.inf
        for member in range(begin, end):
            item = members.item[member]
            inside = items.u2[item] < _second(sure, items.pi1[item]) and not np.isnan(column[item])
            if inside and not members.later[member] and last < items.pi1[item] < rate:
                rate = items.pi1[item]
        if rate == np.inf:
            break
        n, total = 0, 0.0
        for member in range(begin, end):
            item = members.item[member]
            if (
                items.pi1[item] == rate
                and not members.later[member]
                and items.u2[item] < _second(sure, rate)
                and not np.isnan(column[item])
            ):
                n += 1
                total += column[item]
        v = members.least[group] / min(rate, sure)
        vx += v * ((total + later) / (n + n_later))
        weight += v
        last = rate
    if weight > 1.0 + ROUNDING:
        found.refused[group] = True
    elif weight > 0.0:
        found.x[group, 0], found.x[group, 1], found.x[group, 2] = (
            min(vx, 1.0),
            min(weight, 1.0),
            members.least[group],
        )
        found.seen[group] = True


@compiled
def _later(column: FloatArray, members: Members, begin: int, end: int) -> tuple[int, float]:
    """Return number and sum of the values that were sampled under later policies."""
    n, total = 0, 0.0
    for member in range(begin, end):
        value = column[members.item[member]]
        if members.later[member] and not np.isnan(value):
            n += 1
            total += value
    return n, total


@compiled
def _times(bins: IntArray, items: Items, members: Members, times: Means) -> None:
    begin = 0
    for group in range(len(members.ends)):
        end = members.ends[group]
        if members.session[group]:
            _session_times(bins, items, members, group, times)
        else:
            n = 0
            for member in range(begin, end):
                item = members.item[member]
                n += bins[item] >= 0
                if bins[item] >= 0 and not 0.0 < members.smallest[group] / items.pi[item] <= 1.0 + ROUNDING:
                    times.refused[group] = True
            if n > 0 and not times.refused[group]:
                for member in range(begin, end):
                    item = members.item[member]
                    if bins[item] >= 0:
                        times.x[group, 1 + bins[item]] += (
                            min(members.smallest[group] / items.pi[item], 1.0) / n
                        )
                times.x[group, 0] = members.smallest[group]
                times.seen[group] = True
        begin = end


@compiled
def _session_times(bins: IntArray, items: Items, members: Members, group: int, found: Means) -> None:
    """Write the weights of one session by bin of time, part by part as in `session_value`."""
    begin, end = members.ends[group - 1] if group > 0 else 0, members.ends[group]
    sure, last, weight = members.sure[group], -1.0, 0.0
    n_later = 0
    for member in range(begin, end):
        n_later += members.later[member] and bins[members.item[member]] >= 0
    while True:
        rate, n = np.inf, 0
        for member in range(begin, end):
            item = members.item[member]
            inside = items.u2[item] < _second(sure, items.pi1[item]) and bins[item] >= 0
            inside = inside and not members.later[member]
            if inside and last < items.pi1[item] < rate:
                rate, n = items.pi1[item], 0
            n += inside and items.pi1[item] == rate
        if rate == np.inf:
            break
        v = members.least[group] / min(rate, sure)
        for member in range(begin, end):
            item = members.item[member]
            inside = items.pi1[item] == rate and items.u2[item] < _second(sure, rate)
            if (inside or members.later[member]) and bins[item] >= 0:
                found.x[group, 1 + bins[item]] += v / (n + n_later)
        weight += v
        last = rate
    if weight > 1.0 + ROUNDING:
        found.refused[group] = True
        found.x[group] = 0.0
    elif weight > 0.0:
        found.x[group, 0] = members.least[group]
        found.seen[group] = True


@compiled
def _second(sure: float, pi1: float) -> float:
    return min(1.0, sure / pi1) if pi1 > 0.0 else 0.0


@compiled
def _shares(items: Items, members: Members, shares: ThinnedGroups) -> None:
    begin = 0
    for group in range(len(members.ends)):
        end = members.ends[group]
        n_flips = n_tails = 0
        n_later_flips = n_later_tails = 0
        for index in range(begin, end):
            item = members.item[index]
            if members.later[index]:
                n_later_flips += not np.isnan(items.flip[item])
                n_later_tails += not np.isnan(items.divergence[item])
            elif _kept(items, members, group, item):
                n_flips += not np.isnan(items.flip[item])
                n_tails += not np.isnan(items.divergence[item])
        # Items of later policies count with the others, and never alone: they do not decide whether the session is seen.
        shares.seen_change[group], shares.seen_tail[group] = n_flips > 0, n_tails > 0
        n_flips += n_later_flips if n_flips > 0 else 0
        n_tails += n_later_tails if n_tails > 0 else 0
        for index in range(begin, end):
            item = members.item[index]
            if not (members.later[index] or _kept(items, members, group, item)):
                continue
            if shares.seen_change[group] and not np.isnan(items.flip[item]):
                margin = items.margin_bin[item]
                shares.change[group, margin] += 1.0 / n_flips
                shares.change[group, N_MARGIN_BINS + margin] += items.flip[item] / n_flips
            if shares.seen_tail[group] and not np.isnan(items.divergence[item]):
                shares.tail[group, items.tail_bin[item]] += 1.0
        for index in range(N_TAIL_BINS if n_tails > 1 else 0):
            shares.tail[group, index] /= n_tails
        begin = end


@compiled
def _kept(items: Items, members: Members, group: int, item: int) -> bool:
    """Return whether a detector without weights sees an item: each of the slice with the same probability."""
    c, pi1 = members.smallest[group], items.pi1[item]
    if members.session[group]:
        second = _second(members.sure[group], pi1)
        return bool(second > 0.0 and items.u1[item] < c / second and items.u2[item] < second)
    rate = min(1.0, c / pi1) if pi1 > 0.0 else 0.0
    return bool(items.pi[item] >= c * (1.0 - ROUNDING) and items.u2[item] < rate)
