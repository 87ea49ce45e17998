"""The comparator of quantile forecasts.

With p the reference's and q the candidate's forecast of the quantile of level t, and d = p - q:

- The pinball loss of one quantile is max(t * d, (t - 1) * d): what the candidate's forecast would cost if the reference's came
  true (Koenker and Bassett, Regression quantiles, Econometrica, 1978). It is 0 if and only if both are equal.
- `divergence` = the mean loss over steps and levels, divided by the mean of |p| or the floor, whichever is larger: without a
  unit, from 0 to infinity.
- `flip` = 1 where the divergence is above the tolerance, or neighbouring quantiles cross in the candidate and not in the reference.

In `detail`: `crossings`, the number of such neighbours, and `missed`, the share of the steps, in [0, 1], in which the interval from the
candidate's lowest to its highest quantile does not overlap the reference's: the value of the signal `missed-intervals`.
"""

import numpy as np

from quantdrift.plugins.tasks import Array, Divergences, NumberPair, output_error, pair_of
from quantdrift_forecast.task import ForecastOptions


class PinballComparator:
    """Compares forecasts : (items, ..., levels).

    Parameters
    ----------
    options
        Levels, tolerance and floor.
    """

    def __init__(self, options: ForecastOptions) -> None:
        self._options = options
        self._levels = np.array(options.levels)

    def compare(self, candidate: Array, reference: Array) -> Divergences:
        """Return the divergence of each item.

        Raises
        ------
        QuarantineError
            They are not numbers, their shapes differ, or the last dimension is not that of the levels.
        """
        pair = pair_of(_rows(candidate), _rows(reference), "[items, ..., levels]")
        q, p = self._series(pair)
        # In units of the largest value, so that no difference of finite numbers overflows.
        unit = np.maximum(np.abs(p).max(axis=(1, 2)), np.abs(q).max(axis=(1, 2)))
        unit = np.maximum(unit, self._options.floor)
        scaled_q, scaled_p = (side / unit[:, np.newaxis, np.newaxis] for side in (q, p))
        short = scaled_p - scaled_q
        loss = np.maximum(self._levels * short, (self._levels - 1) * short).mean(axis=(1, 2))
        with np.errstate(over="ignore"):  # as far apart as float64 reaches: infinitely
            divergence = loss / np.maximum(np.abs(scaled_p).mean(axis=(1, 2)), self._options.floor / unit)
        crossings = ((q[..., 1:] < q[..., :-1]) & ~(p[..., 1:] < p[..., :-1])).sum(axis=(1, 2))
        # Crossing quantiles are sorted: an interval is where the forecasts are, whatever they are called.
        missed = ((q.max(axis=-1) < p.min(axis=-1)) | (p.max(axis=-1) < q.min(axis=-1))).mean(axis=1)
        return Divergences(
            flip=pair.flip(np.asarray((divergence > self._options.tolerance) | (crossings > 0))),
            divergence=pair.defined(divergence),
            candidate_finite=pair.candidate_finite,
            reference_finite=pair.reference_finite,
            detail={"crossings": pair.defined(crossings.astype(np.float64)), "missed": pair.defined(missed)},
        )

    def _series(self, pair: NumberPair) -> tuple[Array, Array]:
        """Return candidate and reference : (items, steps, levels)."""
        n_levels = len(self._levels)
        n_items, n_values = len(pair.reference), pair.reference[:1].size
        if pair.both.any() and pair.reference.shape[-1] != n_levels:
            raise output_error(
                f"options.levels names {n_levels} quantiles, but the output is {list(pair.reference.shape)}"
            )
        if not pair.both.any() and n_values % n_levels:  # nothing is compared, whatever its shape
            zeros = np.zeros((n_items, 1, n_levels))
            return zeros, zeros
        return (
            pair.candidate.reshape(n_items, -1, n_levels),
            pair.reference.reshape(n_items, -1, n_levels),
        )


def _rows(output: Array) -> Array:
    return output[:, np.newaxis] if output.ndim == 1 else output
