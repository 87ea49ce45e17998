"""The numbers of both sides, prepared for comparison: float64, with items that are not finite marked."""

import math

import msgspec
import numpy as np

from quantdrift.models.comparators.protocol import Flags, Values
from quantdrift.models.tensors.arrays import Array, output_error

# Half a step of 8 bits: the largest value that an 8-bit candidate may round to zero.
LOG_ZERO = -math.log(512)
TOLERANCE = 0.01  # a logistic function quantised to 8 bits may be off by a step; values further off are not probabilities


class NumberPair(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of both sides.

    Parameters
    ----------
    candidate, reference
        (items, ...), of one shape, float64; zeros where that side is not finite.
    candidate_finite, reference_finite
        (items,).
    """

    candidate: Values
    reference: Values
    candidate_finite: Flags
    reference_finite: Flags

    @property
    def both(self) -> Flags:
        """Which items can be compared."""
        return self.candidate_finite & self.reference_finite

    def flip(self, differs: Flags) -> Values:
        """Return 1 where the decision differs, or only the candidate is not finite; NaN where the reference is not finite."""
        flip = np.where(self.candidate_finite, differs, True).astype(np.float64)
        return np.where(self.reference_finite, flip, np.nan)

    def defined(self, values: Values) -> Values:
        """Return values of items; NaN where a side is not finite."""
        return np.where(self.both, values, np.nan)


def rounded(log_q: Values, log_p: Values) -> Values:
    """Return ln of the candidate's probabilities; for a zero, of all values that round to it, the closest to the reference's."""
    return np.where(np.isneginf(log_q), np.minimum(log_p, LOG_ZERO), log_q)


def pair_of(candidate: Array, reference: Array, what: str, *, masked: bool = False) -> NumberPair:
    """Return the numbers of both sides.

    Parameters
    ----------
    candidate, reference
        (items, ...); a side without numbers for an item is not finite.
    what
        The expected shape, for the error: `[items, labels]`.
    masked
        Whether minus infinity is a valid value: the logit of an excluded class.

    Raises
    ------
    QuarantineError
        Reason `output`: they are not numbers, or their shapes differ.
    """
    candidate, reference = aligned(candidate, reference, what)
    (q, q_finite), (p, p_finite) = _finite(candidate, masked=masked), _finite(reference, masked=masked)
    return NumberPair(candidate=q, reference=p, candidate_finite=q_finite, reference_finite=p_finite)


def aligned(candidate: Array, reference: Array, what: str) -> tuple[Values, Values]:
    """Return the numbers of both sides : (items, ...), of one shape; NaN where a side has none. Errors as of `pair_of`."""
    for side, array in (("candidate", candidate), ("reference", reference)):
        if array.dtype.kind not in "fiu":
            kind = "text" if array.dtype.kind == "O" else array.dtype.name
            raise output_error(
                f"the {side}'s output is {kind}, but the task compares numbers {what}: check `models.output`"
            )
    if len(candidate) != len(reference):
        raise output_error(
            f"the candidate's output has {len(candidate)} items, the reference's {len(reference)}"
        )
    candidate, reference = filled(candidate, reference), filled(reference, candidate)
    if candidate.shape != reference.shape:
        raise output_error(
            f"the candidate's output is {list(candidate.shape)}, the reference's {list(reference.shape)}: only {what} of one "
            "shape can be compared"
        )
    return candidate.astype(np.float64), reference.astype(np.float64)


def is_empty(side: Array) -> bool:
    """Return whether a side has items, but no values for them."""
    return len(side) > 0 and not side[:1].size


def filled(side: Array, other: Array, *, least: int = 1) -> Array:
    """Return `side`, or if it is empty, NaN in the other's shape.

    Parameters
    ----------
    side, other
        (items, ...).
    least
        Numbers per item if the other side is empty too.
    """
    if not is_empty(side):
        return side
    shape = (len(side), least) if is_empty(other) else (len(side), *other.shape[1:])
    return np.full(shape, np.nan)


def _finite(values: Values, *, masked: bool) -> tuple[Values, Flags]:
    usable = np.isfinite(values) | (masked & np.isneginf(values))
    finite: Flags = np.asarray(usable.all(axis=tuple(range(1, values.ndim))))
    return np.where(finite.reshape(-1, *(1,) * (values.ndim - 1)), values, 0.0), finite
