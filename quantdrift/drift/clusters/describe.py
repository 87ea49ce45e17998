"""The description of a cluster: declared slices that are more frequent in it than elsewhere."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

MOST_LABELS: Final = 1000
MOST_TRAITS: Final = 3
LEAST_COUNT: Final = 10
LEAST_LIFT: Final = 1.2


class Trait(msgspec.Struct, frozen=True, kw_only=True):
    """A declared slice that is over-represented in a cluster.

    Parameters
    ----------
    label
        The slice's name, e.g. `scanner=faint`.
    lift
        Its share within the cluster over its share of everything, both weighted by 1 / pi.
    share
        Its share within the cluster.
    count
        Vectors of the cluster that have it, not weighted.
    """

    label: str
    lift: float
    share: float
    count: int


def traits_of(
    positions: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float64],
    labels: Sequence[Sequence[str]],
    n_clusters: int,
) -> list[tuple[Trait, ...]]:
    """Return per cluster the labels that distinguish it from the rest, the most distinctive first.

    Labels are ranked by what they add to the divergence of the cluster's labels from those of all traffic: share * ln(lift).
    One counts only from `LEAST_COUNT` vectors and a lift of `LEAST_LIFT` on. These are descriptions, not tests:
    nothing is claimed of their significance.

    Parameters
    ----------
    positions : (n,)
        The cluster of each vector, from 0; below 0 for none.
    weights : (n,)
        1 / pi.
    labels
        Names of each vector's declared slices; beyond the `MOST_LABELS` most frequent they are left out.
    n_clusters
        How many clusters there are.
    """
    frequent_labels = {
        label for label, _ in Counter(label for of_one in labels for label in of_one).most_common(MOST_LABELS)
    }
    overall: defaultdict[str, float] = defaultdict(float)
    inside: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(n_clusters)]
    counts: list[Counter[str]] = [Counter() for _ in range(n_clusters)]
    for position, weight, of_one in zip(positions.tolist(), weights.tolist(), labels, strict=True):
        for label in frequent_labels.intersection(of_one):
            overall[label] += weight
            if position >= 0:
                inside[position][label] += weight
                counts[position][label] += 1
    total = float(weights.sum())
    result = []
    for position, sums in enumerate(inside):
        mass = float(weights[positions == position].sum())
        traits = [
            Trait(
                label=label,
                lift=(sums[label] / mass) / (overall[label] / total),
                share=sums[label] / mass,
                count=count,
            )
            for label, count in counts[position].items()
            if count >= LEAST_COUNT
        ]
        result.append(_telling(traits))
    return result


def _telling(traits: list[Trait]) -> tuple[Trait, ...]:
    frequent = [trait for trait in traits if trait.lift >= LEAST_LIFT]
    frequent.sort(key=lambda trait: (-trait.share * math.log(trait.lift), trait.label))
    return tuple(frequent[:MOST_TRAITS])
