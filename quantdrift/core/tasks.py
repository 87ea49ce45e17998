"""What a model gives, and what it means that candidate and reference differ there.

Every kind of output has a 0/1 divergence, `flip`, which says that the decision changed, and a graded one,
`divergence`, which moves before decisions do. Both are watched. What else a comparator measures is kept beside them.
"""

from enum import StrEnum

import msgspec


class Task(StrEnum):
    """What kind of output a model gives."""

    CLASSIFICATION = "classification"  # scores of classes of which one is right
    MULTILABEL = "multilabel"  # scores of labels of which any number is right
    REGRESSION = "regression"  # numbers
    EMBEDDING = "embedding"  # a vector of meaning
    RANKING = "ranking"  # scores of things to be put in order
    DETECTION = "detection"  # boxes with classes and scores
    SEGMENTATION = "segmentation"  # a class of each pixel
    GENERATION = "generation"  # text, token by token
    TENSOR = "tensor"  # numbers of which nothing is known


LABELS = frozenset({"candidate_top", "reference_top", "worst_class"})
"""What stands in `comparison.detail` by the number of a class: a mean of them means nothing."""

COUNTED = frozenset(
    {
        "candidate_not_finite",
        "reference_not_finite",
        "candidate_nan",
        "candidate_infinite",
        "reference_nan",
        "reference_infinite",
    }
)
"""What stands there only where there is any."""


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """What the two watched divergences of a task are.

    Parameters
    ----------
    flip
        When an item flips, in words that go after `an item flips where`.
    name
        What people call its graded divergence.
    unit
        Of that, in UCUM; empty: a number without a unit.
    top
        Largest value that it may have; infinity where there is none.
    """

    flip: str
    name: str
    unit: str = ""
    top: float = float("inf")


MEASURES = {
    Task.CLASSIFICATION: Measure(flip="the top class differs", name="KL", unit="nat"),
    Task.MULTILABEL: Measure(flip="the set of labels above the threshold differs", name="KL", unit="nat"),
    Task.REGRESSION: Measure(
        flip="the error is above the tolerance or a sign changed", name="relative error"
    ),
    Task.EMBEDDING: Measure(
        flip="the cosine distance is above the tolerance", name="cosine distance", top=2.0
    ),
    Task.RANKING: Measure(flip="another thing comes first", name="NDCG loss", top=1.0),
    Task.DETECTION: Measure(
        flip="an object is missed, invented or of another class", name="quality loss", top=1.0
    ),
    Task.SEGMENTATION: Measure(
        flip="the share of changed pixels is above the tolerance", name="mIoU loss", top=1.0
    ),
    Task.GENERATION: Measure(
        flip="the reference would have gone on otherwise, or the answer is broken",
        name="KL per token",
        unit="nat",
    ),
    Task.TENSOR: Measure(flip="the error is above the tolerance or not finite", name="relative error"),
}
