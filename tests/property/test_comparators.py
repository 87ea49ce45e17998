"""What holds of every comparator, whatever two models give."""

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quantdrift.core.config.schema import Model, OutputKind
from quantdrift.core.config.tasks import RawTensor, Regression
from quantdrift.core.config.vision import Activation, BoxFormat, Detection, Segmentation
from quantdrift.core.errors import QuarantineError
from quantdrift.core.tasks import MEASURES, Task
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.shadow.replay.rows import items_of

pytestmark = pytest.mark.property

Output = npt.NDArray[Any]
KIND = OutputKind.PROBABILITIES


def _model(task: Task, **options: Any) -> Model:
    return Model(name="m", task=task, **options)


MODELS = (
    _model(Task.CLASSIFICATION, top_k=2, interest=(1,)),
    _model(Task.CLASSIFICATION, output_kind=KIND),
    _model(Task.MULTILABEL, interest=(0,)),
    _model(Task.MULTILABEL, output_kind=KIND),
    _model(Task.REGRESSION),
    _model(Task.REGRESSION, regression=Regression(quantiles=(0.1, 0.5, 0.9))),
    _model(Task.EMBEDDING, tolerance=0.1),
    _model(Task.RANKING),
    _model(Task.TENSOR, tensor=RawTensor(element_type="BF16")),
    _model(Task.SEGMENTATION),
    _model(Task.SEGMENTATION, output_kind=KIND),
    _model(Task.SEGMENTATION, segmentation=Segmentation(classes_axis=0), background=0),
    _model(Task.DETECTION),
    _model(
        Task.DETECTION,
        detection=Detection(box_format=BoxFormat.CXCYWH, activation=Activation.SIGMOID),
        threshold=0.0,
    ),
)
# What floating-point arithmetic goes wrong at, and what most models take.
VALUES = st.sampled_from(
    [
        *(0.0, -0.0, 0.25, 0.5, 0.75, 1.0, 2.0, -1.0, -1e9, 1e-45, 5e-324),
        *(65504.0, 3.4e38, -3.4e38, 1.7e308, -1.7e308, np.nan, np.inf, -np.inf),
    ]
)
TYPES = st.sampled_from([np.float64, np.float32, np.float16, np.int8, np.uint8, np.int64, np.bool_])
SHAPES = st.one_of(
    st.tuples(st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 2, 3])),
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.sampled_from([0, 3, 6])),
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)),
)


def _as(values: Output, kind: Any) -> Output:
    if np.issubdtype(kind, np.integer):
        values = np.nan_to_num(values, posinf=9, neginf=-9).clip(-9, 9)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(kind)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=[str(model.task) for model in MODELS])
@given(st.data())
def test_two_outputs_are_an_outcome_or_refused(model: Model, data: st.DataObject) -> None:
    """Of any type, shape and size of values: nothing overflows aloud, and the record can hold what is found.

    A side that is finite on an item where the other is has a divergence in its range; a candidate that is not flips; of a
    reference that is not nothing is said; and no output differs from itself.
    """
    shape = data.draw(SHAPES)
    sides = [_as(data.draw(arrays(np.float64, shape, elements=VALUES)), data.draw(TYPES)) for _ in ("q", "p")]
    emptied = data.draw(st.sampled_from([None, None, None, 0, 1]))
    if emptied is not None:
        sides[emptied] = sides[emptied][:, np.newaxis][:, :0].reshape(shape[0], 0)
    _check(model, *sides)
    _check(model, sides[0], sides[0].copy())


def _check(model: Model, candidate: Output, reference: Output) -> None:
    try:
        found = comparator_of(model).compare({"y": candidate}, {"y": reference})
    except QuarantineError:
        return
    n = len(reference)
    stored = items_of(found, slices=[()] * n, features=[{}] * n, clusterings=[0] * n)
    assert len(stored) == n
    for one, q_finite, p_finite in zip(stored, found.candidate_finite, found.reference_finite, strict=True):
        detail = json.loads(one.detail or "", parse_constant=pytest.fail)
        assert detail.get("candidate_not_finite", False) == (not q_finite)
        assert (one.flip is None) == (not p_finite)
        assert (one.divergence is None) == (not (q_finite and p_finite))
        if one.divergence is None:
            assert one.flip is not False
        else:
            assert 0 <= one.divergence <= MEASURES[model.task].top * (1 + 1e-12)
            if candidate.dtype == reference.dtype and candidate.tobytes() == reference.tobytes():
                assert (one.flip, one.divergence) == (False, 0.0)
