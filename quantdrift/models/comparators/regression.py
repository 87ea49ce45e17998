"""The comparator for regression: models whose outputs are numbers.

With p the reference's and q the candidate's value of an output, and s = max(|p|, floor) the scale of its error:

- `flip` = 1 where |q - p| / s is above the tolerance for any output, or the sign of any with |p| above the floor changes.
- `divergence` = mean over outputs of |q - p| / s, without a unit, from 0 to infinity: the relative error, and below the
  floor the absolute one in units of the floor. A plain relative error would be infinite at p = 0 (Hyndman and Koehler,
  Another look at measures of forecast accuracy, International Journal of Forecasting, 2006, on why).

In `detail`, in the unit of the outputs unless stated otherwise:

- `absolute_error` = mean over outputs of |q - p|, `absolute_error_max` the largest.
- `relative_error_max` = the largest |q - p| / s, without a unit.
- `bias` = mean over outputs of (q - p) / s, without a unit: above 0 the candidate's values are larger.
- `sign_changes`: outputs with |p| above the floor whose sign differs.

If `models.regression.quantiles` names the quantiles of the last dimension:

- `crossings`: neighbouring quantiles that are out of order (Bassett and Koenker, An empirical quantile function, Journal
  of the American Statistical Association, 1982) in the candidate and not in the reference.
- `width_ratio` = the candidate's distance between the outer quantiles over the reference's, each summed over the series of
  an item: below 1 the candidate's interval is narrower. Undefined where the reference's distance is not above 0.

A side with any value that is not finite, or without values, is not finite: if it is the candidate's, it is a flip and all
else is undefined; if it is the reference's, everything is undefined.
"""

import numpy as np

from quantdrift.core.config.tasks import Regression
from quantdrift.models.comparators.numbers import NumberPair, pair_of
from quantdrift.models.comparators.protocol import Divergences, Values
from quantdrift.models.tensors.arrays import Array, output_error

TOLERANCE = 0.05
"""Relative error of a flip where `models.tolerance` is not given."""


class RegressionComparator:
    """Compares numbers.

    Parameters
    ----------
    options
        `models.regression`: floor and quantiles.
    tolerance
        An item flips when an output's relative error exceeds this.
    """

    def __init__(self, options: Regression, *, tolerance: float = TOLERANCE) -> None:
        self._options = options
        self._tolerance = tolerance

    def compare(self, candidate: Array, reference: Array) -> Divergences:
        """Return the divergence of each item.

        Parameters
        ----------
        candidate, reference
            (items,) or (items, ..., outputs).

        Raises
        ------
        QuarantineError
            Reason `output`: they are not numbers, their shapes differ, or their number is not that of the quantiles.
        """
        pair = pair_of(_rows(candidate), _rows(reference), "[items, outputs]")
        quantiles = self._quantiles(pair)
        q, p = (side.reshape(len(side), -1) for side in (pair.candidate, pair.reference))
        floor = self._options.floor
        with np.errstate(over="ignore"):  # as far apart as float64 reaches: infinitely
            error = q - p
            relative = error / np.maximum(np.abs(p), floor)
            size = np.abs(relative)
            signs = (np.sign(q) * np.sign(p) < 0) & (np.abs(p) > floor)
            figures = {
                "absolute_error": np.abs(error).mean(axis=1),
                "absolute_error_max": np.abs(error).max(axis=1),
                "relative_error_max": size.max(axis=1),
                "bias": _mean(relative),
                "sign_changes": signs.sum(axis=1).astype(np.float64),
            }
            divergence = size.mean(axis=1)
        return Divergences(
            flip=pair.flip(np.asarray(((size > self._tolerance) | signs).any(axis=1))),
            divergence=pair.defined(divergence),
            candidate_finite=pair.candidate_finite,
            reference_finite=pair.reference_finite,
            detail={name: pair.defined(values) for name, values in (figures | quantiles).items()},
        )

    def _quantiles(self, pair: NumberPair) -> dict[str, Values]:
        """Return the details about quantiles, if the outputs are quantiles."""
        count = len(self._options.quantiles)
        if not count:
            return {}
        if pair.reference_finite.any() and pair.reference.shape[-1] != count:
            raise output_error(
                f"models.regression.quantiles names {count} quantiles, but the output is {list(pair.reference.shape)}"
            )
        # An item may hold many series, such as the steps of a forecast.
        q, p = (side.reshape(len(side), -1, side.shape[-1]) for side in (pair.candidate, pair.reference))
        crossed = (q[..., 1:] < q[..., :-1]) & ~(p[..., 1:] < p[..., :-1])
        with np.errstate(over="ignore", invalid="ignore"):
            width, expected = ((side[..., -1] - side[..., 0]).sum(axis=1) for side in (q, p))
            ratio = width / np.where(expected > 0, expected, 1.0)
        return {
            "crossings": crossed.sum(axis=(1, 2)).astype(np.float64),
            "width_ratio": np.where(expected > 0, ratio, np.nan),
        }


def _rows(output: Array) -> Array:
    """Return the output with at least two dimensions : (items, ..., outputs)."""
    return output[:, np.newaxis] if output.ndim == 1 else output


def _mean(relative: Values) -> Values:
    """Return the mean of values that may be infinite; NaN where both infinities occur."""
    with np.errstate(invalid="ignore"):
        mean: Values = relative.mean(axis=1)
    return mean
