"""The registry of comparators by task."""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from quantdrift.core.config.schema import Model
from quantdrift.core.config.wrong_values import options_of
from quantdrift.core.plugins import plugin_record
from quantdrift.core.tasks import MEASURES, Task
from quantdrift.models.comparators import regression, tensor
from quantdrift.models.comparators.classes.classes_of_interest import numbers_of
from quantdrift.models.comparators.classes.classification import TOP_K, ClassificationComparator
from quantdrift.models.comparators.classes.multilabel import MultilabelComparator
from quantdrift.models.comparators.protocol import Comparator, SingleOutput, TaskPlugin
from quantdrift.models.comparators.ranking import RANKED, RankingComparator
from quantdrift.models.comparators.regression import RegressionComparator
from quantdrift.models.comparators.tensor import TensorComparator
from quantdrift.models.comparators.text.generation import GenerationComparator
from quantdrift.models.comparators.vectors import embedding
from quantdrift.models.comparators.vectors.embedding import EmbeddingComparator
from quantdrift.models.comparators.vision import segmentation
from quantdrift.models.comparators.vision.objects import THRESHOLD
from quantdrift.models.comparators.vision.segmentation import SegmentationComparator

Number = TypeVar("Number", int, float)


def comparator_of(model: Model) -> Comparator:
    """Return a comparator for a model's outputs.

    Raises
    ------
    OperatorError
        Its task is that of a plug-in that cannot be imported or is not named, or its options are wrong.
    """
    plugin = task_plugin(model.task)
    return plugin.comparator(model, options_for(plugin, model))


def task_plugin(task: Task) -> TaskPlugin:
    """Return the record of a task; raises `OperatorError` if no package that the configuration names adds it."""
    return _BUILT_IN.get(task) or plugin_record(task, TaskPlugin)


def options_for(plugin: TaskPlugin, model: Model) -> msgspec.Struct:
    """Return the options of a model whose task is a plug-in's; wrong ones raise `OperatorError`."""
    return options_of(plugin.options, model.options, f"models[{model.name}].options")


def _classification(model: Model) -> Comparator:
    interest = numbers_of(model.interest, model.labels)
    top_k = _or(model.top_k, TOP_K)
    return SingleOutput(
        ClassificationComparator(model.output_kind, top_k, interest, count_ties=model.count_ties)
    )


def _multilabel(model: Model) -> Comparator:
    interest = numbers_of(model.interest, model.labels)
    return SingleOutput(MultilabelComparator(model.output_kind, model.thresholds, interest))


def _detection(model: Model) -> Comparator:
    from quantdrift.models.comparators.vision.detection import (  # noqa: PLC0415 - imports SciPy, which no other task needs
        DetectionComparator,
    )

    threshold = model.threshold if isinstance(model.threshold, int | float) else THRESHOLD
    return DetectionComparator(model.detection, threshold=threshold, background=model.background)


def _record(task: Task, make: Callable[[Model], Comparator], types: str) -> TaskPlugin:
    return TaskPlugin(measure=MEASURES[task], comparator=lambda model, _: make(model), types=types)


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


_COMPARED: Final[Mapping[Task, tuple[Callable[[Model], Comparator], str]]] = {
    Task.CLASSIFICATION: (_classification, "f"),
    Task.MULTILABEL: (_multilabel, "fiu"),
    Task.EMBEDDING: (
        lambda model: SingleOutput(EmbeddingComparator(tolerance=_or(model.tolerance, embedding.TOLERANCE))),
        "fiu",
    ),
    Task.RANKING: (
        lambda model: SingleOutput(
            RankingComparator(model.ranking, top_k=_or(model.top_k, RANKED), count_ties=model.count_ties)
        ),
        "fiu",
    ),
    Task.DETECTION: (_detection, "fiu"),
    Task.SEGMENTATION: (
        lambda model: SingleOutput(
            SegmentationComparator(
                model.segmentation,
                model.output_kind,
                tolerance=_or(model.tolerance, segmentation.TOLERANCE),
                background=model.background,
            )
        ),
        "fiub",
    ),
    Task.REGRESSION: (
        lambda model: SingleOutput(
            RegressionComparator(model.regression, tolerance=_or(model.tolerance, regression.TOLERANCE))
        ),
        "fiu",
    ),
    Task.TENSOR: (
        lambda model: TensorComparator(model.tensor, tolerance=_or(model.tolerance, tensor.TOLERANCE)),
        "",
    ),
    Task.GENERATION: (lambda model: GenerationComparator(model.generation, model.budget.divergence_p99), ""),
}
_BUILT_IN: Final = {task: _record(task, make, types) for task, (make, types) in _COMPARED.items()}
