"""The vocabulary of attributes: the known values of those attributes that have a limited set of values."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

MOST_VALUES: Final = 1000


def known_values(
    keys: Iterable[str],
    values: Sequence[Mapping[str, str]],
    weights: npt.NDArray[np.float64],
    *,
    most_unseen: float,
) -> dict[str, frozenset[str]]:
    """Return per attribute the values seen so far, for those attributes whose values are known by now.

    The share of traffic whose value was never met is about the share whose value was met exactly once (Good 1953).
    With the next item counted as one of these, at the largest weight, (W_1 + w_max) / (W + w_max) must be at most
    `most_unseen`. A request id is unknown for ever by this rule: every value of it is new. So is an attribute with
    more than `MOST_VALUES` values.

    Parameters
    ----------
    keys
        Attributes, as recorded.
    values
        Attributes of each item; an absent one does not count.
    weights : (n,)
        1 / pi of each.
    most_unseen
        Largest share of ordinary traffic with a value that was not met.
    """
    vocabulary: dict[str, frozenset[str]] = {}
    for key in keys:
        present = [
            (value, weight)
            for of_one, weight in zip(values, weights.tolist(), strict=True)
            if (value := of_one.get(key)) is not None
        ]
        counts = Counter(value for value, _ in present)
        if not present or len(counts) > MOST_VALUES:
            continue
        total = sum(weight for _, weight in present)
        once = sum(weight for value, weight in present if counts[value] == 1)
        largest = max(weight for _, weight in present)
        if (once + largest) / (total + largest) <= most_unseen:
            vocabulary[key] = frozenset(counts)
    return vocabulary
