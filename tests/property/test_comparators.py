"""What holds of every comparator, whatever two models give: with options that the contract tests do not have."""

from typing import Any

import pytest
from hypothesis import given

from quantdrift.core.config.schema import Model, OutputKind
from quantdrift.core.config.tasks import RawTensor
from quantdrift.core.config.vision import Activation, BoxFormat, Detection
from quantdrift.core.tasks import MEASURES, Task
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.tensors.arrays import Outputs
from quantdrift.testing.comparators import ComparatorCase, any_outputs, check_outcome

pytestmark = pytest.mark.property

KIND = OutputKind.PROBABILITIES


def _model(task: Task, **options: Any) -> Model:
    return Model(name="m", task=task, **options)


MODELS = (
    _model(Task.CLASSIFICATION, top_k=2, interest=(1,)),
    _model(Task.CLASSIFICATION, output_kind=KIND),
    _model(Task.MULTILABEL, interest=(0,)),
    _model(Task.MULTILABEL, output_kind=KIND),
    _model(Task.REGRESSION),
    _model(Task.EMBEDDING, tolerance=0.1),
    _model(Task.TENSOR, tensor=RawTensor(element_type="BF16")),
    _model(Task.SEGMENTATION, output_kind=KIND),
    _model(
        Task.DETECTION,
        detection=Detection(box_format=BoxFormat.CXCYWH, activation=Activation.SIGMOID),
        threshold=0.0,
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=[str(model.task) for model in MODELS])
@given(any_outputs(("y",)))
def test_two_outputs_are_an_outcome_or_refused(model: Model, sides: tuple[Outputs, Outputs]) -> None:
    """Of any type, shape and size of values: nothing overflows aloud, and the record can hold what is found."""
    case = ComparatorCase(str(model.task), lambda: comparator_of(model), MEASURES[model.task], lambda _: {})
    check_outcome(case, *sides)
    check_outcome(case, sides[0], {name: array.copy() for name, array in sides[0].items()})
