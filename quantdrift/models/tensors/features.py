"""The input features that slices bin: numbers of an item, computed for a whole batch at once.

| feature | of an item with elements x_1 ... x_n |
|---|---|
| `length` | its first dimension, 1 for a scalar; for text the number of characters, over all its elements |
| `rank` | how many dimensions it has |
| `size` | n |
| `norm` | Euclidean norm, sqrt(sum x^2) |
| `mean` | arithmetic mean |
| `contrast` | standard deviation over its elements (of the population: divided by n) |
| `missing` | share of elements that are not a number; of one `column`, 0 or 1 |
| `value` | the number in one `column` |

`norm`, `mean` and `contrast` are computed in float64 and leave out elements that are not a number. A feature that is
undefined (text, no element left) or infinite is absent, and its item is in no bin.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from quantdrift.core.config.schema import Slice
from quantdrift.core.slices import describing_key, feature_key
from quantdrift.models.tensors.arrays import Array

MOST_DESCRIBED: Final = 4
"""Inputs of an item that `describing_features` looks at."""
LEAST_DESCRIBED: Final = 16
"""Elements of an item from which on they are described: the mean of one number would be that number, which nobody asked to store."""
Values = npt.NDArray[np.float64]
_PART_ELEMENTS = 1 << 16


def features_of(rules: Iterable[Slice], inputs: Mapping[str, Array]) -> list[dict[str, float]]:
    """Return the features that `rules` need, one entry per item, keyed by `feature_key`.

    Parameters
    ----------
    rules
        Slices that apply to the model; those by attribute, or of missing inputs, are ignored.
    inputs
        Name to array : (items, ...), in the order of the request; a rule without an input's name uses the first.
    """
    first = next(iter(inputs))
    features: list[dict[str, float]] = [{} for _ in inputs[first]]
    wanted = {feature_key(rule): rule for rule in rules if rule.feature}
    for key, rule in wanted.items():
        array = inputs.get(rule.input or first)
        if array is None:
            continue
        if isinstance(rule.column, int):
            values = _value(array, rule.column)
            values = values if rule.feature == "value" else _absent(array, values)
        else:
            values = np.concatenate([_FEATURES[rule.feature](part) for part in _parts(array)])
        for item, value, finite in zip(features, values.tolist(), np.isfinite(values).tolist(), strict=True):
            if finite:
                item[key] = value
    return features


def describing_features(inputs: Mapping[str, Array], item: int) -> dict[str, float]:
    """Return features of one item that clusters are described with, keyed by `describing_key`; no slice needs them.

    Of the first `MOST_DESCRIBED` inputs: `length`; and of at least `LEAST_DESCRIBED` elements `mean`, `contrast`, `missing`, and `zeros`, the
    share of elements that are zero; of texts their length alone. What is undefined or infinite is absent.

    Parameters
    ----------
    inputs
        Name to array : (items, ...).
    item
        Which of the items.
    """
    found: dict[str, float] = {}
    for name, array in list(inputs.items())[:MOST_DESCRIBED]:
        if array.ndim == 0 or item >= len(array):
            continue  # not of items
        part = array[item : item + 1]
        numbers = part.dtype != np.dtype(object)
        if not numbers and not all(isinstance(value, str | bytes) for value in np.ravel(part)):
            continue  # what a language model is asked
        for feature, measure in _DESCRIBING.items():
            if measure is not _length and not (numbers and part.size >= LEAST_DESCRIBED):
                continue
            value = float(measure(part)[0])
            if np.isfinite(value):
                found[describing_key(feature, name)] = value
    return found


def _parts(array: Array) -> list[Array]:
    """Return the items in parts that fit into the processor's cache, so that large inputs are read from memory once."""
    width = max(int(np.prod(array.shape[1:])), 1)
    step = max(_PART_ELEMENTS // width, 1)
    return [array[begin : begin + step] for begin in range(0, len(array), step)]


def _length(array: Array) -> Values:
    if array.dtype == np.dtype(object):
        return np.array([sum(len(text) for text in np.ravel(item)) for item in array], dtype=np.float64)
    return _same(array, array.shape[1] if array.ndim > 1 else 1)


def _rank(array: Array) -> Values:
    return _same(array, array.ndim - 1)


def _size(array: Array) -> Values:
    return _same(array, int(np.prod(array.shape[1:])))


def _norm(array: Array) -> Values:
    elements = _elements(array)
    with np.errstate(over="ignore"):
        elements *= elements
    total, counts = _total(elements)
    return np.where(counts > 0, np.sqrt(total), np.nan)


def _mean(array: Array) -> Values:
    return _average(_elements(array))


def _contrast(array: Array) -> Values:
    elements = _elements(array)
    with np.errstate(over="ignore", invalid="ignore"):
        elements -= _average(elements)[:, np.newaxis]
        elements *= elements
    return np.sqrt(_average(elements))


def _missing(array: Array) -> Values:
    elements = _elements(array)
    if elements.shape[1] == 0 or array.dtype == np.dtype(object):
        return _same(array, np.nan)
    share: Values = np.isnan(elements).mean(axis=1)
    return share


def _zeros(array: Array) -> Values:
    if array.dtype == np.dtype(object):
        return _same(array, np.nan)
    return _average((_elements(array) == 0.0).astype(np.float64))


def _value(array: Array, column: int) -> Values:
    """Return one number of each item, NaN where an item is text or has fewer numbers."""
    width = int(np.prod(array.shape[1:]))
    if array.dtype == np.dtype(object) or column >= width:
        return _same(array, np.nan)
    values: Values = array.reshape(len(array), width)[:, column].astype(np.float64)
    return values


def _absent(array: Array, values: Values) -> Values:
    """Return whether one number of each item is missing, NaN where the items are text."""
    return _same(array, np.nan) if array.dtype == np.dtype(object) else np.isnan(values).astype(np.float64)


def _elements(array: Array) -> Values:
    """Return a copy of the items : (items, elements), float64."""
    if array.dtype == np.dtype(object):
        return np.full((len(array), 1), np.nan)
    return array.reshape(len(array), int(np.prod(array.shape[1:]))).astype(np.float64)


def _total(elements: Values) -> tuple[Values, npt.NDArray[np.int64]]:
    """Return the sum and the count of each item's numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        total: Values = elements.sum(axis=1)
        if not np.isnan(total).any():
            return total, np.full(len(elements), elements.shape[1])
        present = ~np.isnan(elements)
        return np.sum(elements, axis=1, where=present), present.sum(axis=1)


def _average(elements: Values) -> Values:
    """Return the mean of each item's numbers, NaN where there is none."""
    total, counts = _total(elements)
    average: Values = np.divide(total, counts, out=np.full(len(elements), np.nan), where=counts > 0)
    return average


def _same(array: Array, value: float) -> Values:
    return np.full(len(array), float(value))


_FEATURES: dict[str, Callable[[Array], Values]] = {
    "length": _length,
    "rank": _rank,
    "size": _size,
    "norm": _norm,
    "mean": _mean,
    "contrast": _contrast,
    "missing": _missing,
}
_DESCRIBING: dict[str, Callable[[Array], Values]] = {
    "length": _length,
    "mean": _mean,
    "contrast": _contrast,
    "missing": _missing,
    "zeros": _zeros,
}
