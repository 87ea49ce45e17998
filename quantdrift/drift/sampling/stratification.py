"""Margin bins: the distribution of flips over margins in a slice, and the best allocation of its samples to bins.

A candidate that flips does so mostly where its two top classes are close. Within a slice with shares w_h and flip
rates p_h of the bins h, the spread that estimates the flip rate best at a given number of samples is in proportion
to `s_h = sqrt(p_h (1 - p_h))` (Neyman, On the two different aspects of the representative method, JRSS 1934). Seven
tenths of the samples follow it, three tenths are spread evenly:

    shape_h = 0.7 s_h / sum_g(w_g s_g) + 0.3        with mean sum_h(w_h shape_h) = 1

The even part makes sure that flips elsewhere are found too: the next drift may flip at other margins than the last one.
With weights c / pi, a bin that is sampled at 0.3 of the mean rate costs at most a factor of 3.3.

The shape never rises with the margin. An exchange of many items is drawn by its smallest margin, so an item's
probability is that of its own margin or of a smaller one. Only if smaller margins never have smaller rates is the
rate of the item's own bin a lower bound of its probability, which both c and the thinning of unweighted detectors
need.
"""

from functools import cached_property

import msgspec
import numpy as np

from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray

EVEN_SHARE = 0.3
QUANTILES = (0.01, 0.03, 0.1, 0.3)
PRIOR_ITEMS = 50.0  # what is known of all items counts as so many of each slice

_TINY = float(np.finfo(np.float64).tiny)
_PREFERRED = np.array([1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0])  # ISO 3
_DECADES = 9
GRID: FloatArray = np.unique(
    np.round(np.append(np.multiply.outer(10.0 ** -np.arange(1, _DECADES + 1), _PREFERRED), 1.0), _DECADES + 2)
)


class Profile(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The contents of the margin bins of some slices; each row is a slice.

    Parameters
    ----------
    share
        (slices, bins), each bin's share of the slice's traffic; rows add up to 1.
    flip
        (slices, bins), flip rates in (0, 1).
    """

    share: FloatArray
    flip: FloatArray

    @cached_property
    def shape(self) -> FloatArray:
        """Each bin's rate over the slice's mean rate, (slices, bins), never rising with the margin."""
        spread = np.sqrt(self.flip * (1.0 - self.flip))
        norm = (self.share * spread).sum(axis=1, keepdims=True)
        shape: FloatArray = (1.0 - EVEN_SHARE) * spread / norm + EVEN_SHARE
        return falling(shape, self.share)

    def spread(self, mean: FloatArray) -> FloatArray:
        """Return rates in proportion to `shape`, at most 1, whose mean over each slice's traffic is `mean`."""
        level = mean.copy()
        for _ in range(self.shape.shape[1]):
            full = level[:, None] * self.shape >= 1.0
            unassigned = mean - (self.share * full).sum(axis=1)
            remaining = (self.share * self.shape * ~full).sum(axis=1)
            level = np.where(
                remaining > 0, np.maximum(unassigned / np.maximum(remaining, _TINY), level), level
            )
        return np.minimum(1.0, level[:, None] * self.shape)


def falling(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the rows that never rise and are closest to `values`, in weighted squares; weighted means are kept.

    `g_h = min over a <= h of max over b >= h of the weighted mean of a..b` (isotonic regression; Robertson, Wright,
    Dykstra, Order restricted statistical inference, 1988, theorem 1.4.4, mirrored).

    Parameters
    ----------
    values, weights
        (rows, columns); weights are not negative.
    """
    positive = np.maximum(weights, _TINY)
    zero = np.zeros((len(values), 1))
    sums = np.cumsum(np.concatenate((zero, values * positive), axis=1), axis=1)
    mass = np.cumsum(np.concatenate((zero, positive), axis=1), axis=1)
    n = values.shape[1]
    fitted = np.empty_like(values)
    for h in range(n):
        lower = np.stack(
            [
                ((sums[:, h + 1 :] - sums[:, a, None]) / (mass[:, h + 1 :] - mass[:, a, None])).max(axis=1)
                for a in range(h + 1)
            ]
        )
        fitted[:, h] = lower.min(axis=0)
    return fitted


def rounded_down(rates: FloatArray) -> FloatArray:
    """Return the largest preferred number at most each rate: ten to the decade, 0 below 1e-9."""
    at = np.searchsorted(GRID, rates * (1.0 + 1e-9), side="right")
    return np.where(at > 0, GRID[np.maximum(at, 1) - 1], 0.0)


def margin_edges(margin: FloatArray, weight: FloatArray) -> tuple[float, ...]:
    """Return bin edges at the 1, 3, 10 and 30 % quantiles of the margins, as preferred numbers.

    Preferred numbers, so that the edges of two samples of the same traffic are mostly the same.

    Parameters
    ----------
    margin
        (items,), in [0, 1]; NaN if the item has none.
    weight
        (items,), inverse inclusion probabilities.
    """
    finite = np.isfinite(margin)
    if not finite.any():
        return ()
    order = np.argsort(margin[finite])
    heights = np.cumsum(weight[finite][order])
    indices = np.searchsorted(heights, np.array(QUANTILES) * heights[-1])
    edges = rounded_down(margin[finite][order][indices])
    return tuple(float(edge) for edge in np.unique(edges) if edge > 0)


def bins_of(margin: FloatArray, edges: tuple[float, ...]) -> IntArray:
    """Return the bin of each margin, half-open intervals; without a margin the last, whose rate is the lowest."""
    return np.where(np.isfinite(margin), np.searchsorted(np.array(edges), margin, side="right"), len(edges))


def profile_of(
    bins: IntArray, flip: FloatArray, weight: FloatArray, owner: IntArray, shape: tuple[int, int]
) -> Profile:
    """Return the profile of each slice, shrunk towards that of all items where the slice has few items.

    Parameters
    ----------
    bins, flip, weight
        (memberships,): margin bin, flip (not a number where unknown) and weight of the item.
    owner
        (memberships,): the slice.
    shape
        Slices and bins.
    """
    n_slices, n_bins = shape
    cell = owner * n_bins + bins
    with_flip = np.isfinite(flip)

    def total(values: FloatArray, of: BoolArray | None = None) -> FloatArray:
        where = cell if of is None else cell[of]
        sums = np.bincount(where, weights=values, minlength=n_slices * n_bins)
        return np.asarray(sums.reshape(shape), dtype=np.float64)

    traffic, count = total(weight), total(np.ones(len(bins)))
    known_weight, n_known = (
        total(weight[with_flip], with_flip),
        total(np.ones(int(with_flip.sum())), with_flip),
    )
    flips = total((weight * np.where(with_flip, flip, 0.0))[with_flip], with_flip)

    overall = (flips.sum() + 0.5 * _mean(weight)) / (known_weight.sum() + _mean(weight))
    common = _shrunk(flips.sum(axis=0), known_weight.sum(axis=0), n_known.sum(axis=0), overall)
    share = traffic.sum(axis=0) / traffic.sum() if traffic.sum() > 0 else np.full(n_bins, 1.0 / n_bins)
    n = count.sum(axis=1, keepdims=True)
    in_slice = traffic.sum(axis=1, keepdims=True)
    own = np.divide(traffic, in_slice, out=np.zeros(shape), where=in_slice > 0)
    return Profile(
        share=(n * own + PRIOR_ITEMS * share) / (n + PRIOR_ITEMS),
        flip=_shrunk(flips, known_weight, n_known, common),
    )


def _shrunk(
    part: FloatArray, total_count: FloatArray, n: FloatArray, towards: FloatArray | float
) -> FloatArray:
    rate = np.divide(part, total_count, out=np.zeros_like(total_count), where=total_count > 0)
    mixed: FloatArray = (n * rate + PRIOR_ITEMS * towards) / (n + PRIOR_ITEMS)
    return mixed


def _mean(weight: FloatArray) -> float:
    return float(weight.mean()) if len(weight) else 1.0
