"""What each bet of a tail detector pays for each group, and what capital it is given.

The null that learns is the bag with the group in it; the frozen one is a set of bounds. See `quantdrift.drift.tail`
for why both keep the mean at most 1, and `quantdrift.drift.rank` for the bets.
"""

import numpy as np

from quantdrift.drift import bag, rank
from quantdrift.drift.bag import BOUND, BOUND_N, FROZEN, LIVE, N_BETS, TAU
from quantdrift.drift.block import FloatArray, IntArray
from quantdrift.drift.quantile import N_BINS

READY_RAREST = 30_000  # groups from which on the bets on the top 0.1 % take part
FROZEN_SHARE = 0.1  # of the capital
STRETCH_SHARE = 0.6  # of what is left
_LEARNED_RAREST = rank.RAREST
_FROZEN_RAREST = slice(bag.N_LEARNED, bag.N_LEARNED + rank.RAREST.stop)
_BINS = np.arange(N_BINS)


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
    states: FloatArray, weights: FloatArray, counts: FloatArray, items: tuple[IntArray, ...]
) -> FloatArray:
    """Return what each bet multiplies its evidence by, (steps, N, N_BETS); 1 where nothing is observed or known.

    Parameters
    ----------
    states
        (N, SIZE).
    weights
        (steps, N, N_BINS), zero where nothing is observed.
    counts
        (1 + steps, N) groups before the first and after each step.
    items
        Step, signal and bin of every weight that is not zero, in this order.
    """
    factor = np.ones((*weights.shape[:2], N_BETS))
    live = states[:, LIVE] > 0
    step, row, place = (index[live[items[1]]] for index in items)
    if not len(step):
        return factor
    held = bag.seen(states)
    total = np.array(weights)
    total[0] += held[:, 2:]
    for after in range(1, len(total)):
        total[after] += total[after - 1]
    groups = held[:, 0] + counts[1:]
    drawn, own, n = total[step, row], total[step, row, place], groups[step, row]
    above = np.where(place[:, None] < _BINS, drawn, 0.0).sum(axis=1)
    worth = _worth(states, row, place, np.minimum((above + own) / n, 1.0), np.minimum(above / n, 1.0))
    worth *= weights[step, row, place][:, None]
    # Item after item of a group, so that the bits do not depend on the company.
    first = np.append(True, (np.diff(step) != 0) | (np.diff(row) != 0))
    nth = np.arange(len(step)) - np.flatnonzero(first)[np.cumsum(first) - 1]
    factor[step[first], row[first]] = worth[first]
    for turn in range(1, int(nth.max()) + 1):
        of = nth == turn
        factor[step[of], row[of]] += worth[of]
    factor[:, :, _LEARNED_RAREST][groups < READY_RAREST] = 1.0
    factor[:, :, _FROZEN_RAREST][:, states[:, BOUND_N] < READY_RAREST] = 1.0
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
