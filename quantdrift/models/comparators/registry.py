"""The registry of comparators by task."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from quantdrift.core.config.schema import Model
from quantdrift.core.config.wrong_values import options_of
from quantdrift.core.plugins import plugin_record
from quantdrift.core.tasks import Task
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

COMPARED_TYPES: Final[Mapping[Task, str]] = MappingProxyType(
    {
        Task.CLASSIFICATION: "f",
        Task.MULTILABEL: "fiu",
        Task.REGRESSION: "fiu",
        Task.EMBEDDING: "fiu",
        Task.RANKING: "fiu",
        Task.DETECTION: "fiu",
        Task.SEGMENTATION: "fiub",
    }
)
"""Kinds of NumPy types that a task compares, of the reference; a task that is not here compares any."""


def comparator_of(model: Model) -> Comparator:
    """Return a comparator for a model's outputs.

    Raises
    ------
    OperatorError
        Its task is that of a plug-in that cannot be imported or is not named, or its options are wrong.
    """
    if make := _MAKERS.get(model.task):
        return make(model)
    plugin = plugin_record(model.task, TaskPlugin)
    return plugin.comparator(model, options_for(plugin, model))


def options_for(plugin: TaskPlugin, model: Model) -> msgspec.Struct:
    """Return the options of a model whose task is a plug-in's; wrong ones raise `OperatorError`."""
    return options_of(plugin.options, model.options, f"models[{model.name}].options")


def compared_types(task: Task) -> str:
    """Return the kinds of NumPy types that a task compares, of the reference; empty: any."""
    return COMPARED_TYPES.get(task, "") if task.is_built_in else plugin_record(task, TaskPlugin).types


def _classification(model: Model) -> Comparator:
    interest = numbers_of(model.interest, model.labels)
    top_k = TOP_K if model.top_k is None else model.top_k
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


def _tolerance(model: Model) -> float:
    return _TOLERANCES[model.task] if model.tolerance is None else model.tolerance


_TOLERANCES: Final = {
    Task.REGRESSION: regression.TOLERANCE,
    Task.TENSOR: tensor.TOLERANCE,
    Task.EMBEDDING: embedding.TOLERANCE,
    Task.SEGMENTATION: segmentation.TOLERANCE,
}
_MAKERS: dict[Task, Callable[[Model], Comparator]] = {
    Task.CLASSIFICATION: _classification,
    Task.MULTILABEL: _multilabel,
    Task.EMBEDDING: lambda model: SingleOutput(EmbeddingComparator(tolerance=_tolerance(model))),
    Task.RANKING: lambda model: SingleOutput(
        RankingComparator(
            model.ranking,
            top_k=RANKED if model.top_k is None else model.top_k,
            count_ties=model.count_ties,
        )
    ),
    Task.DETECTION: _detection,
    Task.SEGMENTATION: lambda model: SingleOutput(
        SegmentationComparator(
            model.segmentation, model.output_kind, tolerance=_tolerance(model), background=model.background
        )
    ),
    Task.REGRESSION: lambda model: SingleOutput(
        RegressionComparator(model.regression, tolerance=_tolerance(model))
    ),
    Task.TENSOR: lambda model: TensorComparator(model.tensor, tolerance=_tolerance(model)),
    Task.GENERATION: lambda model: GenerationComparator(model.generation),
}
