"""The seam to what divergence means for a kind of model: arrays in, one divergence per item out."""

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from shadow.runtime import Array

Values = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Divergences(msgspec.Struct, frozen=True, kw_only=True):
    """Divergences of many items. All arrays : (items,); a value that is undefined is NaN.

    Parameters
    ----------
    flip, topk
        1 where it differs, 0 where not, float64.
    js, kl
        Nats, float64; `kl` may be infinite.
    margin, candidate_margin, reference_margin
        In [0, 1], float64.
    candidate_finite, reference_finite
        Whether that side's output is a distribution at all.
    candidate_top, reference_top
        Top class, int64; -1 where it is undefined.
    """

    flip: Values
    topk: Values
    js: Values
    kl: Values
    margin: Values
    candidate_margin: Values
    reference_margin: Values
    candidate_finite: Flags
    reference_finite: Flags
    candidate_top: npt.NDArray[np.int64]
    reference_top: npt.NDArray[np.int64]


class Comparator(Protocol):
    """Compares outputs. Items do not influence each other, and order does not matter."""

    def compare(self, candidate: Array, reference: Array) -> Divergences:
        """Return the divergence of each item.

        Parameters
        ----------
        candidate, reference
            The compared output of both sides : (items, ...). Texts come as objects of `bytes`.

        Raises
        ------
        QuarantineError
            Reason `output`: at least one item's outputs cannot be compared. The caller tries the exchanges of a
            batch one by one.
        """
        ...
