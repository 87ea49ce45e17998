"""The rows to store for the divergences of a comparison, one for each item."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.slices import SliceKey
from quantdrift.models.comparators.protocol import Divergences, Values
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


def _numbers(column: Values) -> Iterable[float | None]:
    """Return the numbers, None (null in the database) for NaN."""
    if not len(column):
        return repeat(None)
    values: list[float | None] = column.tolist()
    for index in np.flatnonzero(np.isnan(column)).tolist():
        values[index] = None
    return values


def _flags(column: Values) -> Iterable[bool | None]:
    return (None if value is None else bool(value) for value in _numbers(column))


def _details(divergences: Divergences, clusterings: Sequence[int]) -> Iterator[str]:
    """Yield the details of each item as a JSON object; undefined ones are left out."""
    columns = {name: _defined(column) for name, column in divergences.detail.items()}
    for side, finite in (
        ("candidate", divergences.candidate_finite),
        ("reference", divergences.reference_finite),
    ):
        if not finite.all():
            columns[f"{side}_not_finite"] = [None if is_finite else True for is_finite in finite.tolist()]
    if any(clusterings):
        columns["clustering"] = [clustering or None for clustering in clusterings]
    if not columns:
        yield from repeat("{}", len(clusterings))
        return
    detail = _detail_type(tuple(columns))
    for values in zip(*columns.values(), strict=True):
        yield _ENCODER.encode(detail(*values)).decode()


@lru_cache(maxsize=256)
def _detail_type(names: tuple[str, ...]) -> type[msgspec.Struct]:
    """Return a record of details with these names, in this order. Those that are None are left out of its JSON."""
    fields = [f"f{index}" for index in range(len(names))]
    return msgspec.defstruct(
        "Detail",
        [(field, Any, None) for field in fields],
        rename=dict(zip(fields, names, strict=True)),
        omit_defaults=True,
        gc=False,
    )


def _defined(column: npt.NDArray[Any]) -> list[Any]:
    """Return the values of a detail, None for those that are undefined.

    Numbers have six significant digits, which take half the space of sixteen; whole numbers and others are as they are.
    """
    if column.dtype.kind != "f":
        values: list[Any] = column.tolist()
        if column.dtype.kind == "O":
            values = [
                None if isinstance(value, float) and not math.isfinite(value) else value for value in values
            ]
        return values
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = 10.0 ** (_DIGITS - 1 - np.floor(np.log10(np.abs(column))))
        short = np.rint(column * scale) / scale
    numbers: list[Any] = np.where(np.isfinite(short) & (column != np.rint(column)), short, column).tolist()
    for index in np.flatnonzero(~np.isfinite(column)).tolist():
        numbers[index] = None
    return numbers
