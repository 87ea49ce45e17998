"""The measures that moved between two windows: other changes in the slice of an alert.

The means of both windows are weighted by 1 / pi, their variances linearised and clustered by exchange or session (Binder,
International Statistical Review 51, 1983; `quantdrift.drift.explain.mix`). A window may hold a dozen exchanges, which need not
have shown what is rare: its variance is taken to be that of the other one, scaled to its size, where that is larger. A
measure moved where the difference exceeds the quantile of Student's t with the degrees of freedom of the smaller
window, at 0.1 % shared out over all measures that are looked at (Bonferroni).

Assumption: the clusters of each window are independent and alike, and their means near enough to normal. Bound: where
nothing moved, one alert in a thousand names any measure. It knows nothing of how the windows were chosen: an onset is
chosen by looking at the alert's own measure, and what goes along with that one looks moved a little sooner.
"""

import math
from collections.abc import Mapping

import msgspec
import numpy as np
from scipy.special import stdtrit

from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.facts.explanation import FEWEST_AFTER, FEWEST_BEFORE

LEVEL = 0.001
_ROUNDING = 1e-9
"""Share of a mean by which two sums of the same numbers may differ: a measure that is always 1 has no variance to compare with."""


class MeasuredItems(msgspec.Struct, frozen=True, kw_only=True):
    """The items of one window.

    Parameters
    ----------
    weight
        (n,) 1 / pi, shared by the items of an exchange; positive.
    cluster
        (n,) exchange or session, from 0: items of one are not independent.
    values
        By measure, (n,); not a number where an item has none.
    """

    weight: FloatArray
    cluster: IntArray
    values: Mapping[str, FloatArray]


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A measure that moved: its means, and the standard error of their difference."""

    name: str
    before: float
    after: float
    se: float


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """The measures that moved, the most certain first, and how many measures were compared."""

    found: tuple[Move, ...] = ()
    n_measures: int = 0


def moves(before: MeasuredItems, after: MeasuredItems) -> Moves:
    """Return the measures that moved; those with too few exchanges in a window are not compared.

    Parameters
    ----------
    before, after
        The windows.
    """
    looked = []
    for name in sorted(before.values.keys() & after.values.keys()):
        old, new = _mean(before, name), _mean(after, name)
        if old.n >= FEWEST_BEFORE and new.n >= FEWEST_AFTER:
            looked.append((name, old, new))
    moved = []
    for name, old, new in looked:
        variance = max(old.variance * old.n, new.variance * new.n) * (1 / old.n + 1 / new.n)
        least = -float(stdtrit(min(old.n, new.n) - 1, LEVEL / 2 / len(looked)))  # of Student's t
        difference = abs(new.value - old.value)
        is_rounding = difference <= _ROUNDING * max(abs(new.value), abs(old.value))
        if difference > least * math.sqrt(variance) and not is_rounding:
            moved.append(Move(name=name, before=old.value, after=new.value, se=math.sqrt(variance)))
    moved.sort(key=lambda move: -abs(move.after - move.before) / move.se if move.se else -math.inf)
    return Moves(found=tuple(moved), n_measures=len(looked))


class _Mean(msgspec.Struct, frozen=True, kw_only=True):
    value: float
    variance: float
    n: int


def _mean(window: MeasuredItems, name: str) -> _Mean:
    values = window.values[name]
    finite: BoolArray = np.isfinite(values)
    if not finite.any():
        return _Mean(value=math.nan, variance=math.inf, n=0)
    weight = window.weight[finite] / window.weight[finite].sum()
    value = float(weight @ values[finite])
    _, cluster = np.unique(window.cluster[finite], return_inverse=True)
    # Perplexities reach the largest float: their variance becomes infinite, so they never count as moved.
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.bincount(cluster, weights=weight * (values[finite] - value))
        squares = float(sums @ sums)
    n = len(sums)
    variance = squares * n / (n - 1) if n > 1 and math.isfinite(squares) else math.inf
    return _Mean(value=value, variance=variance, n=n)
