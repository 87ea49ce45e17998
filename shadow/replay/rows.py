"""From divergences to the rows that are stored of them, one per item."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec
import numpy as np

from quantdrift.core.slices import SliceKey
from quantdrift.shadow.comparators.protocol import Divergences, Flags, Values
from quantdrift.storage.shadow.rows import ComparedItem

_ENCODER = msgspec.json.Encoder()


def items_of(
    found: Divergences,
    *,
    slices: Sequence[tuple[SliceKey, ...]],
    features: Sequence[dict[str, float]],
    clusterings: Sequence[int],
) -> tuple[ComparedItem, ...]:
    """Return what is stored of each item.

    Parameters
    ----------
    found
        Divergences of the items.
    slices, features
        Of each item.
    clusterings
        The version that put each item into its learned slices; 0: none did.
    """
    columns = zip(
        slices,
        features,
        _flags(found.flip),
        _flags(found.topk),
        _numbers(found.js),
        _numbers(found.divergence),
        _numbers(found.margin),
        _numbers(found.candidate_margin),
        _numbers(found.reference_margin),
        _details(found, clusterings),
        strict=False,  # what a task does not know has no end
    )
    return tuple(
        ComparedItem(
            slices=of_slices,
            features=of_features,
            flip=flip,
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
    """Return numbers; what is not a number is null in the record."""
    if not len(column):
        return repeat(None)
    return (None if math.isnan(value) else value for value in column.tolist())


def _flags(column: Values) -> Iterator[bool | None]:
    return (None if value is None else bool(value) for value in _numbers(column))


def _details(found: Divergences, clusterings: Sequence[int]) -> Iterator[str]:
    """Return what else is known of each item, as the text of a JSON object; what is undefined is left out."""
    columns: dict[str, list[Any]] = {name: column.tolist() for name, column in found.detail.items()}
    spoilt = {
        f"{side}_not_finite": _spoilt(finite)
        for side, finite in (("candidate", found.candidate_finite), ("reference", found.reference_finite))
    }
    for index, clustering in enumerate(clusterings):
        detail: Mapping[str, Any] = {
            **{name: column[index] for name, column in columns.items() if _is_told(column[index])},
            **{name: True for name, indices in spoilt.items() if index in indices},
            **({"clustering": clustering} if clustering else {}),
        }
        yield _ENCODER.encode(detail).decode()


def _spoilt(finite: Flags) -> frozenset[int]:
    return frozenset(np.flatnonzero(~finite).tolist())


def _is_told(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
