"""Figures of each site on given inputs: how its range is used, what it clips, what it rounds; and the error of each weight.

They explain a cause that swaps have found (`blame`); they do not find it. A large error may change no decision, and a small one
at the right place many.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.models.tensors.arrays import Array
from quantdrift.release.diagnose.copies import Copy
from quantdrift.release.scales import along
from quantdrift.release.sites import Site

Values = npt.NDArray[np.float64]
_STEP: Final = 16  # items whose activations are in memory together
_SLACK: Final = 1e-6  # of a range: its ends are rounded to float32


class RangeUse(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How inputs use an activation range. All arrays : (items,), float64.

    Parameters
    ----------
    outside
        Share of values outside the range.
    used
        Largest minus smallest value, as a share of the range; at most 1.
    levels
        Number of distinct integers.
    clipping, rounding
        Mean square of what is cut off at the ends of the range, and of what is rounded inside it. No value has both, so their sum
        is the mean square error of the pair. Rounding alone has an error of s^2 / 12 on average, with s the step, where values are
        spread over many steps (Bennett, Spectra of quantized signals, 1948).
    variance
        Of the values.
    """

    outside: Values
    used: Values
    levels: Values
    clipping: Values
    rounding: Values
    variance: Values

    @property
    def error(self) -> Values:
        """Mean square error of the pair : (items,)."""
        return self.clipping + self.rounding


class WeightError(msgspec.Struct, frozen=True, kw_only=True):
    """The error of a weight site.

    Parameters
    ----------
    relative
        Root mean square of the error, relative to that of the weight.
    worst_channel
        The same of the channel that has most; `relative` where one scale is for all.
    channel
        Its number; None where one scale is for all.
    """

    relative: float
    worst_channel: float
    channel: int | None


def range_use(copy: Copy, inputs: Mapping[str, Array]) -> dict[int, RangeUse]:
    """Return how inputs use each activation range, by the number of the site.

    The values are those of the copy with all sites in FP32: what the range should have represented. They are reduced to a few
    numbers for each item, 16 items at a time.
    """
    n_items = len(next(iter(inputs.values())))
    parts: dict[int, list[RangeUse]] = {}
    for begin in range(0, n_items, _STEP):
        part = {name: array[begin : begin + _STEP] for name, array in inputs.items()}
        for number, raw in copy.raw(part, copy.everywhere).items():
            parts.setdefault(number, []).append(use_of(copy.sites[number], raw))
    return {
        number: RangeUse(
            **{
                name: np.concatenate([getattr(part, name) for part in uses])
                for name in RangeUse.__struct_fields__
            }
        )
        for number, uses in parts.items()
    }


def use_of(site: Site, raw: Array) -> RangeUse:
    """Return how values : (items, ...) use the range of a site."""
    values = raw.astype(np.float64)
    scale, zero, low, high = (
        along(part, site.axis, values.ndim) for part in (site.scale, site.zero_point, site.low, site.high)
    )
    slack = _SLACK * (high - low)
    flat = (len(values), -1)
    outside = (values < low - slack) | (values > high + slack)
    inside = np.clip(values, low, high)
    integers = np.clip(np.rint(values / scale) + zero, site.lowest, site.highest)
    share = ((inside - low) / (high - low)).reshape(flat)
    levels = np.zeros((len(values), site.highest - site.lowest + 1), dtype=bool)
    levels[np.arange(len(values))[:, np.newaxis], integers.reshape(flat).astype(np.int64) - site.lowest] = (
        True
    )
    return RangeUse(
        outside=outside.reshape(flat).mean(axis=1),
        used=share.max(axis=1) - share.min(axis=1),
        levels=levels.sum(axis=1).astype(np.float64),
        clipping=np.square(values - inside).reshape(flat).mean(axis=1),
        rounding=np.square(inside - (integers - zero) * scale).reshape(flat).mean(axis=1),
        variance=values.reshape(flat).var(axis=1),
    )


def weight_errors(copy: Copy) -> dict[int, WeightError]:
    """Return the error of each weight site, by its number; of weight and bias the larger one."""
    errors: dict[int, WeightError] = {}
    for weight in copy.weights:
        error = _weight_error(weight.raw.astype(np.float64), weight.served.astype(np.float64), weight.axis)
        if weight.site not in errors or error.relative > errors[weight.site].relative:
            errors[weight.site] = error
    return errors


def _weight_error(raw: Values, served: Values, axis: int | None) -> WeightError:
    relative = _relative(raw, served)
    if axis is None:
        return WeightError(relative=relative, worst_channel=relative, channel=None)
    pairs = zip(np.moveaxis(raw, axis, 0), np.moveaxis(served, axis, 0), strict=True)
    by_channel = [_relative(*pair) for pair in pairs]
    channel = int(np.argmax(by_channel))
    return WeightError(relative=relative, worst_channel=by_channel[channel], channel=channel)


def _relative(raw: Values, served: Values) -> float:
    size = float(np.sqrt(np.square(raw).mean()))
    error = float(np.sqrt(np.square(raw - served).mean()))
    return error / size if size else float(bool(error))
