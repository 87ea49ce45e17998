"""Numbers of both sides, ready to be compared: float64, and what is not finite set aside."""

import math

import msgspec
import numpy as np

from quantdrift.shadow.comparators.protocol import Flags, Values
from quantdrift.shadow.tensors.arrays import Array, output_error

# Half a step of 8 bits: what a candidate that computes in them says is zero may be all of this.
LOG_ZERO = -math.log(512)
TOLERANCE = 0.01  # a logistic function quantised to 8 bits may be off by a step; what is further off is no probability


class NumberPair(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of both sides.

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
        """Return 1 where the decision differs, or only the candidate is not finite; NaN where the reference is not."""
        flip = np.where(self.candidate_finite, differs, True).astype(np.float64)
        return np.where(self.reference_finite, flip, np.nan)

    def defined(self, values: Values) -> Values:
        """Return values of items; NaN where a side is not finite."""
        return np.where(self.both, values, np.nan)


def rounded(log_q: Values, log_p: Values) -> Values:
    """Return ln of the candidate's probabilities; of a zero what fits the reference's best of all that rounds to it."""
    return np.where(np.isneginf(log_q), np.minimum(log_p, LOG_ZERO), log_q)


def pair_of(candidate: Array, reference: Array, what: str, *, masked: bool = False) -> NumberPair:
    """Return the numbers of both sides.

    Parameters
    ----------
    candidate, reference
        (items, ...); a side that holds no number for an item is not finite.
    what
        What they should be, for the error: `[items, labels]`.
    masked
        Whether minus infinity is a value like any other: a logit of what is ruled out.

    Raises
    ------
    QuarantineError
        Reason `output`: they are no numbers, or their shapes differ.
    """
    candidate, reference = aligned(candidate, reference, what)
    (q, q_finite), (p, p_finite) = _finite(candidate, masked=masked), _finite(reference, masked=masked)
    return NumberPair(candidate=q, reference=p, candidate_finite=q_finite, reference_finite=p_finite)


def aligned(candidate: Array, reference: Array, what: str) -> tuple[Values, Values]:
    """Return the numbers of both sides : (items, ...), of one shape; NaN where a side holds none. As `pair_of` else."""
    for side, array in (("candidate", candidate), ("reference", reference)):
        if array.dtype.kind not in "fiu":
            kind = "text" if array.dtype.kind == "O" else array.dtype.name
            raise output_error(f"the {side}'s output is {kind}: {what} of numbers can be compared")
    if len(candidate) != len(reference):
        raise output_error(
            f"the candidate's output has {len(candidate)} items, the reference's {len(reference)}"
        )
    candidate, reference = filled(candidate, reference), filled(reference, candidate)
    if candidate.shape != reference.shape:
        raise output_error(
            f"the candidate's output is {list(candidate.shape)}, the reference's {list(reference.shape)}: {what} of one "
            "shape can be compared"
        )
    return candidate.astype(np.float64), reference.astype(np.float64)


def is_empty(side: Array) -> bool:
    """Return whether a side holds nothing for its items."""
    return len(side) > 0 and not side[:1].size


def filled(side: Array, other: Array, *, least: int = 1) -> Array:
    """Return `side`; where it holds nothing, something that is not finite, of the other's shape.

    Parameters
    ----------
    side, other
        (items, ...).
    least
        How many numbers an item gets where the other holds nothing either.
    """
    if not is_empty(side):
        return side
    shape = (len(side), least) if is_empty(other) else (len(side), *other.shape[1:])
    return np.full(shape, np.nan)


def _finite(values: Values, *, masked: bool) -> tuple[Values, Flags]:
    good = np.isfinite(values) | (masked & np.isneginf(values))
    finite: Flags = np.asarray(good.all(axis=tuple(range(1, values.ndim))))
    return np.where(finite.reshape(-1, *(1,) * (values.ndim - 1)), values, 0.0), finite
