"""The rows to store for the divergences of a comparison, one for each item."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.slices import SliceKey
from quantdrift.models.comparators.protocol import Divergences, Flags, Values
from quantdrift.storage.comparisons.rows import ComparedItem

_ENCODER = msgspec.json.Encoder()
_DIGITS = 6


def items_of(
    divergences: Divergences,
    *,
    slices: Sequence[tuple[SliceKey, ...]],
    features: Sequence[dict[str, float]],
    clusterings: Sequence[int],
) -> tuple[ComparedItem, ...]:
    """Return the row of each item.

    Parameters
    ----------
    slices, features
        Slices and features of each item.
    clusterings
        The version of the clustering that assigned each item to its learned slices; 0: none.
    """
    columns = zip(
        slices,
        features,
        _flags(divergences.flip),
        _flags(divergences.tie),
        _flags(divergences.topk),
        _numbers(divergences.js),
        _numbers(divergences.divergence),
        _numbers(divergences.margin),
        _numbers(divergences.candidate_margin),
        _numbers(divergences.reference_margin),
        _details(divergences, clusterings),
        strict=False,  # a column that the task does not compute is infinite
    )
    return tuple(
        ComparedItem(
            slices=of_slices,
            features=of_features,
            flip=flip,
            tie=tie,
            topk=topk,
            js=js,
            divergence=divergence,
            margin=margin,
            candidate_margin=candidate_margin,
            reference_margin=reference_margin,
            detail=detail,
        )
        for (
            of_slices,
            of_features,
            flip,
            tie,
            topk,
            js,
            divergence,
            margin,
            candidate_margin,
            reference_margin,
            detail,
        ) in columns
    )


def _numbers(column: Values) -> Iterator[float | None]:
    """Return the numbers, None (null in the database) for NaN."""
    if not len(column):
        return repeat(None)
    return (None if math.isnan(value) else value for value in column.tolist())


def _flags(column: Values) -> Iterator[bool | None]:
    return (None if value is None else bool(value) for value in _numbers(column))


def _details(divergences: Divergences, clusterings: Sequence[int]) -> Iterator[str]:
    """Yield the details of each item as a JSON object; undefined ones are left out."""
    columns = {name: _shortened(column) for name, column in divergences.detail.items()}
    not_finite = {
        f"{side}_not_finite": _not_finite(finite)
        for side, finite in (
            ("candidate", divergences.candidate_finite),
            ("reference", divergences.reference_finite),
        )
    }
    for index, clustering in enumerate(clusterings):
        detail: Mapping[str, Any] = {
            **{name: column[index] for name, column in columns.items() if _is_defined(column[index])},
            **{name: True for name, indices in not_finite.items() if index in indices},
            **({"clustering": clustering} if clustering else {}),
        }
        yield _ENCODER.encode(detail).decode()


def _shortened(column: npt.NDArray[Any]) -> list[Any]:
    """Return numbers with six significant digits, which take half the space of sixteen; whole numbers and others as they are."""
    if column.dtype.kind != "f":
        values: list[Any] = column.tolist()
        return values
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = 10.0 ** (_DIGITS - 1 - np.floor(np.log10(np.abs(column))))
        short = np.rint(column * scale) / scale
    numbers: list[Any] = np.where(np.isfinite(short) & (column != np.rint(column)), short, column).tolist()
    return numbers


def _not_finite(finite: Flags) -> frozenset[int]:
    return frozenset(np.flatnonzero(~finite).tolist())


def _is_defined(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
