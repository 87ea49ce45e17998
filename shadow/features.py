"""Input features that slices bin: numbers of an item, computed for a whole batch at once.

| feature | of an item with elements x_1 ... x_n |
|---|---|
| `length` | its first dimension, 1 for a scalar; for text the number of characters, over all its elements |
| `rank` | how many dimensions it has |
| `size` | n |
| `norm` | Euclidean norm, sqrt(sum x^2) |
| `mean` | arithmetic mean |
| `contrast` | standard deviation over its elements (of the population: divided by n) |
| `missing` | share of elements that are not a number |

`norm`, `mean` and `contrast` leave out what is not a number, in float64. A feature that is undefined (text, no
element left) or infinite is absent, and its item lies in no bin.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from quantdrift.core.config.schema import Slice
from quantdrift.core.slices import feature_key
from shadow.runtime import Array

Values = npt.NDArray[np.float64]


def features_of(rules: Iterable[Slice], inputs: Mapping[str, Array]) -> list[dict[str, float]]:
    """Return the features that `rules` need, one entry per item, keyed by `feature_key`.

    Parameters
    ----------
    rules
        Slices that apply to the model; those by attribute are passed over, as are inputs that are not there.
    inputs
        Name to array : (items, ...), in the order of the request; without an input's name the first is taken.
    """
    first = next(iter(inputs))
    found: list[dict[str, float]] = [{} for _ in inputs[first]]
    wanted = {feature_key(rule): rule for rule in rules if rule.feature}
    for key, rule in wanted.items():
        array = inputs.get(rule.input or first)
        if array is None:
            continue
        for item, value in zip(found, _FEATURES[rule.feature](array).tolist(), strict=True):
            if np.isfinite(value):
                item[key] = value
    return found


def _length(array: Array) -> Values:
    if array.dtype == np.dtype(object):
        return np.array([sum(len(text) for text in np.ravel(item)) for item in array], dtype=np.float64)
    return _same(array, array.shape[1] if array.ndim > 1 else 1)


def _rank(array: Array) -> Values:
    return _same(array, array.ndim - 1)


def _size(array: Array) -> Values:
    return _same(array, int(np.prod(array.shape[1:])))


def _norm(array: Array) -> Values:
    elements, present = _elements(array)
    with np.errstate(over="ignore", invalid="ignore"):
        norm = np.sqrt(np.sum(elements * elements, axis=1, where=present))
    return np.where(present.any(axis=1), norm, np.nan)


def _mean(array: Array) -> Values:
    elements, present = _elements(array)
    return _average(elements, present)


def _contrast(array: Array) -> Values:
    elements, present = _elements(array)
    with np.errstate(over="ignore", invalid="ignore"):
        apart = elements - _average(elements, present)[:, np.newaxis]
        contrast: Values = np.sqrt(_average(apart * apart, present))
    return contrast


def _missing(array: Array) -> Values:
    elements, present = _elements(array)
    if elements.shape[1] == 0 or array.dtype == np.dtype(object):
        return _same(array, np.nan)
    share: Values = 1.0 - present.mean(axis=1)
    return share


def _elements(array: Array) -> tuple[Values, npt.NDArray[np.bool_]]:
    """Return the items : (items, elements), float64, and which elements are numbers."""
    if array.dtype == np.dtype(object):
        elements = np.full((len(array), 1), np.nan)
    else:
        elements = array.reshape(len(array), int(np.prod(array.shape[1:]))).astype(np.float64)
    return elements, ~np.isnan(elements)


def _average(elements: Values, present: npt.NDArray[np.bool_]) -> Values:
    """Return the mean of the present elements of each item, NaN where there is none."""
    counts = present.sum(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.sum(elements, axis=1, where=present)
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
