"""Tasks of models, and the meaning of the two watched divergences for each task.

Every task has a 0/1 divergence, `flip`, which says that the decision changed, and a graded one, `divergence`, which
changes before decisions do. Both are watched. Other measurements of a comparator are stored with them.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from quantdrift.core.plugins import Extensible, NoOptions, record_of


class Task(Extensible):
    """Kind of output of a model."""

    CLASSIFICATION = "classification"  # scores of classes, one of which is correct
    MULTILABEL = "multilabel"  # scores of labels, any number of which are correct
    REGRESSION = "regression"  # numbers
    EMBEDDING = "embedding"  # a vector of meaning
    RANKING = "ranking"  # scores by which items are ordered
    DETECTION = "detection"  # boxes with classes and scores
    SEGMENTATION = "segmentation"  # a class of each pixel
    GENERATION = "generation"  # text, token by token
    TENSOR = "tensor"  # numbers without a known meaning


class Build(StrEnum):
    """What a model is made of, as far as advice and commands depend on it."""

    NETWORK = "network"  # layers with weights and activations
    TREES = "trees"  # decision trees
    LANGUAGE = "language"  # a language model
    OTHER = "other"  # not known: only a server has it


OF_TOKENS = "divergence_bins"
"""Entry of `comparison.detail`: the histogram of the divergence over the tokens of an answer (`quantdrift.core.token_histogram`)."""

LABELS = frozenset({"candidate_top", "reference_top", "worst_class", OF_TOKENS})
"""Entries of `comparison.detail` that are class numbers or histograms, of which a mean is meaningless."""

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
"""Counts in `comparison.detail` that are present only if they are not zero."""


_DIVERGENCES: Final = {"kl": "KL", "regret": "regret"}
"""The divergences that an answer of a language model can have, by `measure` in `comparison.detail`."""


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """The meaning of the two watched divergences of a task.

    Parameters
    ----------
    flip
        When an item flips, in words that follow `an item flips where`.
    name
        Usual name of the graded divergence.
    unit
        UCUM unit of the graded divergence; empty: a number without a unit.
    top
        Largest possible value of the graded divergence, or infinity.
    measured_by_divergence
        Whether an item without a divergence was not measured even where it is known not to flip, because a check of its form
        alone said so.
    """

    flip: str
    name: str
    unit: str = ""
    top: float = float("inf")
    measured_by_divergence: bool = False

    def of(self, n_answers: Mapping[str, int]) -> "Measure":
        """Return it with the name of what was measured of some answers.

        Parameters
        ----------
        n_answers
            Answers by `measure` in `comparison.detail`, which generated text alone has; those without a divergence are `none`.
        """
        counts = {_DIVERGENCES[kind]: n for kind, n in n_answers.items() if kind in _DIVERGENCES and n > 0}
        if not counts:
            return self
        kind, *others = sorted(counts, key=lambda name: -counts[name])
        name = f"{kind} per token"
        if others:
            share = round(100 * counts[kind] / sum(counts.values()))
            name = f"divergence per token ({kind} of {min(share, 99)} % of the answers, else {others[0]})"
        return msgspec.structs.replace(self, name=name)


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What all processes need to know of the task of a plug-in.

    Parameters
    ----------
    measure
        The meaning of its two watched divergences.
    options
        The type of `[models.options]`.
    """

    measure: Measure
    options: type[msgspec.Struct] = NoOptions


class _Measures(dict[Task, Measure]):
    """The meanings of the divergences by task; those of a plug-in's task are in its record."""

    def __missing__(self, task: Task) -> Measure:
        record = record_of(task, TaskRecord)
        return _OF_ANOTHER_PACKAGE if record is None else record.measure


# Of a record in the database whose plug-in this process does not know.
_OF_ANOTHER_PACKAGE: Final = Measure(
    flip="the comparator of its plug-in says so (`plugins` does not name it here)", name="divergence"
)
MEASURES: Final = _Measures(
    {
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
            name="divergence per token",
            unit="nat",
            measured_by_divergence=True,
        ),
        Task.TENSOR: Measure(flip="the error is above the tolerance or not finite", name="relative error"),
    }
)
