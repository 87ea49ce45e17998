"""What each bet of a tail detector pays for each group, and what capital it is given.

The null that learns is the bag with the group in it; the frozen one is a set of bounds. See `quantdrift.drift.tail`
for why both keep the mean at most 1, and `quantdrift.drift.rank` for the bets.
"""

import numpy as np

from quantdrift.drift import bag, quantile, rank
from quantdrift.drift.bag import BOUND, BOUND_N, FROZEN, LIVE, N_BETS, TAU
from quantdrift.drift.block import FloatArray, IntArray, Trail

READY_RAREST = 30_000  # groups from which on the bets on the top 0.1 % take part
FROZEN_SHARE = 0.1  # of the capital
STRETCH_SHARE = 0.6  # of what is left
_LEARNED_RAREST = rank.RAREST
_FROZEN_RAREST = slice(bag.N_LEARNED, bag.N_LEARNED + rank.RAREST.stop)


def capital(states: FloatArray) -> FloatArray:
    """Return what of each unit of mass every bet is given, (N, N_BETS), adding up to 1.

    All of it bets against the frozen null where the baseline was frozen by hand.
    """
    frozen = np.where(states[:, FROZEN] > 0, 1.0, FROZEN_SHARE)[:, None]
    parts = (
        np.tile((1.0 - STRETCH_SHARE) * (1.0 - frozen) / rank.N_BETS, rank.N_BETS),
        np.tile(STRETCH_SHARE * (1.0 - frozen) / len(rank.STRETCHES), len(rank.STRETCHES)),
        np.tile(frozen / rank.N_BETS, rank.N_BETS),
    )
    return np.concatenate(parts, axis=1)


def factors(
    states: FloatArray, trail: Trail, groups: FloatArray, items: tuple[IntArray, IntArray]
) -> FloatArray:
    """Return what each bet multiplies its evidence by, (groups, N_BETS); 1 where nothing is observed or known.

    Parameters
    ----------
    states
        (N, SIZE).
    trail
        The groups, with 0 in all bins of one that was not observed.
    groups
        (groups,) how many the signal was given up to each.
    items
        Group and bin of every weight that is not zero, in this order.
    """
    row = trail.steps.row
    factor = np.ones((len(row), N_BETS))
    live = states[:, LIVE] > 0
    group, place = items
    if not live.all():
        group, place = (index[live[row[group]]] for index in items)
    if not len(group):
        return factor
    held = bag.seen(states)
    seen = held[:, 0][row] + groups
    n = seen[group]
    begin = quantile.survival(held[:, 2:])
    more = quantile.survival(trail.x)
    trail.sums(more)
    owner = row[group]
    hi, lo = (np.minimum((begin[owner, at] + more[group, at]) / n, 1.0) for at in (place, place + 1))
    worth = _worth(states, owner, place, hi, lo)
    worth *= trail.x[group, place][:, None]
    # Item after item of a group, so that the bits do not depend on the company.
    first = np.append(True, np.diff(group) != 0)
    factor[group[first]] = worth[first]
    if not first.all():
        nth = np.arange(len(group)) - np.flatnonzero(first)[np.cumsum(first) - 1]
        for turn in range(1, int(nth.max()) + 1):
            of = nth == turn
            factor[group[of]] += worth[of]
    factor[:, _LEARNED_RAREST][seen < READY_RAREST] = 1.0
    factor[:, _FROZEN_RAREST][(states[:, BOUND_N] < READY_RAREST)[row]] = 1.0
    return factor


def _worth(states: FloatArray, row: IntArray, place: IntArray, hi: FloatArray, lo: FloatArray) -> FloatArray:
    """Return what items in bin `place` with shares `hi` and `lo` in the bag of signal `row` are worth, (n, N_BETS)."""
    tau = states[row, TAU]
    bound = np.append(states[:, BOUND], np.zeros((len(states), 1)), axis=1)
    most_hi, most_lo = bound[row, place], bound[row, place + 1]
    grown = 1.0 + np.append(tau, tau)
    either = rank.e_values(
        np.minimum(grown * np.append(hi, most_hi), 1.0), np.minimum(grown * np.append(lo, most_lo), 1.0)
    )
    n = len(row)
    parts = (either[:, :n], rank.stretch_values(hi, lo, tau), either[:, n:])
    return np.ascontiguousarray(np.concatenate(parts).T)
