"""The registry of comparators by task."""

from collections.abc import Callable

from quantdrift.core.config.schema import Model
from quantdrift.core.errors import OperatorError
from quantdrift.core.tasks import Task
from quantdrift.shadow.comparators.classes.classes_of_interest import numbers_of
from quantdrift.shadow.comparators.classes.classification import ClassificationComparator
from quantdrift.shadow.comparators.classes.multilabel import MultilabelComparator
from quantdrift.shadow.comparators.protocol import Comparator, SingleOutput
from quantdrift.shadow.comparators.ranking import RankingComparator
from quantdrift.shadow.comparators.regression import RegressionComparator
from quantdrift.shadow.comparators.tensor import TensorComparator
from quantdrift.shadow.comparators.text.generation import GenerationComparator
from quantdrift.shadow.comparators.vectors.embedding import EmbeddingComparator
from quantdrift.shadow.comparators.vision.segmentation import SegmentationComparator


def comparator_of(model: Model) -> Comparator:
    """Return a comparator for a model's outputs.

    Raises
    ------
    OperatorError
        Its task has no comparator.
    """
    make = _MAKERS.get(model.task)
    if make is None:
        raise OperatorError(
            f"model `{model.name}`: the task `{model.task}` has no comparator; set another `task`"
        )
    return make(model)


def _classification(model: Model) -> Comparator:
    interest = numbers_of(model.classification.interest, model.labels)
    return SingleOutput(
        ClassificationComparator(
            model.output_kind, model.top_k, interest, count_ties=model.classification.count_ties
        )
    )


def _multilabel(model: Model) -> Comparator:
    options = model.multilabel
    interest = numbers_of(options.interest, model.labels)
    return SingleOutput(MultilabelComparator(model.output_kind, options.thresholds, interest))


def _detection(model: Model) -> Comparator:
    from quantdrift.shadow.comparators.vision.detection import DetectionComparator  # noqa: PLC0415 - imports SciPy, which no other task needs

    return DetectionComparator(model.detection)


_MAKERS: dict[Task, Callable[[Model], Comparator]] = {
    Task.CLASSIFICATION: _classification,
    Task.MULTILABEL: _multilabel,
    Task.EMBEDDING: lambda model: SingleOutput(EmbeddingComparator(model.vectors)),
    Task.RANKING: lambda model: SingleOutput(RankingComparator(model.ranking)),
    Task.DETECTION: _detection,
    Task.SEGMENTATION: lambda model: SingleOutput(
        SegmentationComparator(model.segmentation, model.output_kind)
    ),
    Task.REGRESSION: lambda model: SingleOutput(RegressionComparator(model.regression)),
    Task.TENSOR: lambda model: TensorComparator(model.tensor),
    Task.GENERATION: lambda model: GenerationComparator(model.generation),
}
