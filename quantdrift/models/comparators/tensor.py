"""The comparator for raw tensors: outputs of numbers or texts, without further meaning.

With p all numbers of an item in one output of the reference, and q the candidate's:

- `divergence` = |q - p| / |p|, lengths of vectors: the relative root-mean-square error, without a unit, from 0 to infinity
  (infinity where all of p is zero and q is not). It is 10 ^ (-SQNR / 20), SQNR being the ratio of signal to quantisation
  noise in dB (Jayant and Noll, Digital Coding of Waveforms, 1984).
- `flip` = 1 where it is above the tolerance, or only the candidate is not finite.

In `detail`:

- `sqnr_db` = -20 log10 of the divergence, in dB: higher is better; 26 dB is 5 %. Left out of equal outputs.
- `cosine_distance` = 1 - cos(p, q), in [0, 2]. Undefined where a side is all zero.
- `max_absolute_error` = the largest |q - p|, in the unit of the output.
- `max_ulp_error` = the largest distance in units in the last place (ulp) of the candidate's floating type. Undefined for
  other types.
- `candidate_nan`, `candidate_infinite`, `reference_nan`, `reference_infinite`: their number, if there are any.
- `by_output`: the divergence of each output, if there are several.

Of several outputs the worst one counts, except for the numbers of NaN and infinities, which are summed. Integers and
booleans are compared as numbers, 64 bits exactly. Texts are equal (0) or not (1).

Minus infinity at the same position of both sides is a mask, and no difference. Any other value that is not finite makes its
side not finite, and so does an output without numbers: if it is the candidate's, it is a flip and all but the counts is
undefined; if it is the reference's, everything but the counts is undefined.

Distances in ulp: floating-point numbers of one sign are in the order of their bits, read as integers; with the order of the
negative ones reversed, the difference of these integers is the number of representable numbers between (Goldberg, What
every computer scientist should know about floating-point arithmetic, ACM Computing Surveys, 1991). Both zeros are equal.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.config.tasks import RawTensor
from quantdrift.models.comparators.protocol import Divergences, Flags, Values
from quantdrift.models.comparators.vectors.embedding import direction, distance, length
from quantdrift.models.tensors.arrays import Array, Outputs, output_error

_TYPES = {"FP16": (np.float16, np.int16), "FP32": (np.float32, np.int32), "FP64": (np.float64, np.int64)}
_BY_SIZE = {2: "FP16", 4: "FP32", 8: "FP64"}


def type_of(array: Array) -> str:
    """Return the name of a floating type; empty for other types."""
    return _BY_SIZE.get(array.dtype.itemsize, "") if array.dtype.kind == "f" else ""


def steps_apart(first: Array, second: Array, type_name: str) -> Values:
    """Return the distance of numbers in ulp of a floating type, both rounded to it first.

    Parameters
    ----------
    first, second
        Arrays of one shape, floating point and finite. A number too large for the type is one ulp above its largest
        number.
    type_name
        FP16, BF16, FP32 or FP64.
    """
    return absolute_difference(_ordered(first, type_name), _ordered(second, type_name))


def absolute_difference(first: Array, second: Array) -> Values:
    """Return the absolute difference of integers of one type : float64, computed exactly."""
    low, high = np.minimum(first, second), np.maximum(first, second)
    return (high.astype(np.uint64) - low.astype(np.uint64)).astype(
        np.float64
    )  # wraps around to the difference


def _ordered(values: Array, type_name: str) -> Array:
    """Return integers in the order of the numbers."""
    with np.errstate(over="ignore"):
        if type_name == "BF16":
            bits = _to_bfloat16(values.astype(np.float32))
        else:
            floating, integer = _TYPES[type_name]
            bits = values.astype(floating).view(integer)
    return np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits)


def _to_bfloat16(values: Array) -> Array:
    """Return the bits of bfloat16, the upper half of a float32, rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16).view(np.int16)


_WORST = ("cosine_distance", "max_absolute_error", "max_ulp_error")
_COUNTS = ("candidate_nan", "candidate_infinite", "reference_nan", "reference_infinite")


class _OutputError(msgspec.Struct, frozen=True, kw_only=True):
    """The divergence of one output : (items,) each; undefined where a side is not finite."""

    error: Values
    candidate_finite: Flags
    reference_finite: Flags
    figures: dict[str, Values] = {}


TOLERANCE = 0.05
"""Relative error of a flip where `models.tolerance` is not given."""


class TensorComparator:
    """Compares raw outputs.

    Parameters
    ----------
    options
        `models.tensor`: outputs and floating type.
    tolerance
        An item flips when the relative error of an output exceeds this.
    """

    def __init__(self, options: RawTensor, *, tolerance: float = TOLERANCE) -> None:
        self._options = options
        self._tolerance = tolerance

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs to compare; empty: the one that `models.output` selects."""
        return self._options.outputs

    def compare(self, candidate: Outputs, reference: Outputs) -> Divergences:
        """Return the divergence of each item.

        Parameters
        ----------
        candidate, reference
            By name : (items, ...) each, numbers or texts.

        Raises
        ------
        QuarantineError
            Reason `output`: shapes differ, or one side holds texts and the other numbers.
        """
        by_output = [_of_output(candidate[name], reference[name], name, self._options) for name in candidate]
        q_finite = np.all([output.candidate_finite for output in by_output], axis=0)
        p_finite = np.all([output.reference_finite for output in by_output], axis=0)
        both = q_finite & p_finite
        error = np.where(both, np.max([output.error for output in by_output], axis=0), np.nan)
        flip = np.where(q_finite, error > self._tolerance, True).astype(np.float64)
        with np.errstate(divide="ignore"):
            detail: dict[str, npt.NDArray[Any]] = {"sqnr_db": -20 * np.log10(error)}
        detail |= {name: np.where(both, _worst(by_output, name), np.nan) for name in _WORST}
        detail |= {name: _counted(by_output, name) for name in _COUNTS}
        if len(by_output) > 1:
            detail["by_output"] = _by_output(list(candidate), by_output, both)
        return Divergences(
            flip=np.where(p_finite, flip, np.nan),
            divergence=error,
            candidate_finite=q_finite,
            reference_finite=p_finite,
            detail=detail,
        )


def _of_output(candidate: Array, reference: Array, name: str, options: RawTensor) -> _OutputError:
    sides = f"`{name}`: the candidate's output is {_described(candidate)}, the reference's {_described(reference)}"
    texts = [array.dtype.kind == "O" for array in (candidate, reference)]
    empty = [not array[:1].size for array in (candidate, reference)]
    if len(candidate) != len(reference) or (candidate.shape != reference.shape and not any(empty)):
        raise output_error(f"{sides}: only outputs of one shape can be compared")
    if any(empty):
        unknown = np.full(len(reference), np.nan)
        finite = [np.full(len(reference), not is_empty) for is_empty in empty]
        return _OutputError(error=unknown, candidate_finite=finite[0], reference_finite=finite[1])
    if texts[0] != texts[1]:
        raise output_error(f"{sides}: texts can only be compared with texts")
    q, p = (array.reshape(len(array), -1) for array in (candidate, reference))
    return _of_texts(q, p) if texts[0] else _of_numbers(q, p, options.element_type)


def _described(array: Array) -> str:
    return f"{'text' if array.dtype.kind == 'O' else array.dtype.name}{list(array.shape)}"


def _of_texts(candidate: Array, reference: Array) -> _OutputError:
    differ = [
        any(_bytes(q) != _bytes(p) for q, p in zip(*rows, strict=True))
        for rows in zip(candidate.tolist(), reference.tolist(), strict=True)
    ]
    always = np.ones(len(differ), dtype=np.bool_)
    return _OutputError(
        error=np.array(differ, dtype=np.float64), candidate_finite=always, reference_finite=always
    )


def _bytes(text: Any) -> bytes:
    return text if isinstance(text, bytes) else str(text).encode()


def _of_numbers(candidate: Array, reference: Array, element_type: str) -> _OutputError:
    q, p = candidate.astype(np.float64), reference.astype(np.float64)
    masked = np.isneginf(q) & np.isneginf(p)
    q_finite, p_finite = (np.asarray((np.isfinite(side) | masked).all(axis=1)) for side in (q, p))
    both = q_finite & p_finite
    defined = both[:, np.newaxis] & ~masked
    q, p = (np.where(defined, side, 0.0) for side in (q, p))
    with np.errstate(over="ignore"):  # as far apart as float64 reaches: infinitely
        difference = np.abs(q - p)
    if candidate.dtype == reference.dtype and candidate.dtype.kind in "iu":
        difference = absolute_difference(candidate, reference)
    figures = {"max_absolute_error": difference.max(axis=1)}
    cosine = distance(direction(q), direction(p))
    figures["cosine_distance"] = np.where(q.any(axis=1) & p.any(axis=1), cosine, np.nan)
    if type_name := (element_type if candidate.dtype.kind == "f" else "") or type_of(candidate):
        figures["max_ulp_error"] = steps_apart(q, p, type_name).max(axis=1)
    for side, array in (("candidate", candidate), ("reference", reference)):
        figures[f"{side}_nan"] = np.isnan(array).sum(axis=1).astype(np.float64)
        figures[f"{side}_infinite"] = np.isinf(array).sum(axis=1).astype(np.float64)
    return _OutputError(
        error=np.where(both, _relative(difference, p), np.nan),
        candidate_finite=q_finite,
        reference_finite=p_finite,
        figures=figures,
    )


def _relative(difference: Values, reference: Values) -> Values:
    """Return the length of the difference over that of the reference : (items,)."""
    largest = np.abs(reference).max(axis=1, keepdims=True)
    scale = np.where(largest > 0, largest, 1.0)
    size = length(reference / scale)
    with np.errstate(over="ignore"):
        scaled = difference / scale
    reached = np.isfinite(scaled)
    error = length(np.where(reached, scaled, 0.0))
    defined = reached.all(axis=1) & ((size > 0) | (error == 0))
    return np.where(defined, error / np.where(size > 0, size, 1.0), np.inf)


def _worst(outputs: Sequence[_OutputError], name: str) -> Values:
    """Return the largest value of a figure over all outputs; NaN where none has it."""
    worst: Values = np.fmax.reduce(
        [output.figures.get(name, np.full(len(output.error), np.nan)) for output in outputs], axis=0
    )
    return worst


def _counted(outputs: Sequence[_OutputError], name: str) -> npt.NDArray[Any]:
    """Return a count over all outputs; None, which is not stored, where it is zero."""
    count = np.sum([output.figures.get(name, np.zeros(len(output.error))) for output in outputs], axis=0)
    detail: npt.NDArray[Any] = count.astype(np.int64).astype(object)
    detail[count == 0] = None
    return detail


def _by_output(names: Sequence[str], outputs: Sequence[_OutputError], both: Flags) -> npt.NDArray[Any]:
    """Return the error of each output by its name, without infinite ones; None where a side is not finite."""
    rows = zip(*(output.error.tolist() for output in outputs), strict=True)
    detail = np.empty(len(both), dtype=object)
    detail[:] = [
        {name: error for name, error in zip(names, row, strict=True) if math.isfinite(error)} for row in rows
    ]
    detail[~both] = None
    return detail
