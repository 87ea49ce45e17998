"""Captured tensors that are called or typed otherwise than the reference's."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Model, Reference, ReferenceInput
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.runtimes.registry import check_mapping
from quantdrift.models.tensors.arrays import Array, TensorSpec
from quantdrift.models.tensors.codec import fit_inputs
from quantdrift.shadow.pipeline.classify import classify
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
from tests.support.shadow.onnx_models import BIAS, WEIGHT, exchange_of, inputs_of, logits_of, tensor

pytestmark = pytest.mark.unit

SCALE, ZERO_POINT = 0.05, -3


def _fitted(array: npt.NDArray[Any], datatype: str, wanted: type[np.generic], **entry: Any) -> Array:
    spec = TensorSpec(name="x", dtype=np.dtype(wanted), shape=(None, 2))
    mapping = (ReferenceInput(name="x", captured="image", **entry),)
    return fit_inputs([tensor("image", array, datatype)], [spec], batched=True, mapping=mapping)["x"]


def test_an_input_may_be_called_otherwise() -> None:
    """The reference's name comes out; where the captured tensor is not there, both names are said."""
    x = np.ones((3, 2), np.float32)
    np.testing.assert_array_equal(_fitted(x, "FP32", np.float32), x)
    spec = TensorSpec(name="x", dtype=np.dtype(np.float32), shape=(None, 2))
    with pytest.raises(QuarantineError, match=r"\['x'\].*image \(as x\).*models\.references\.inputs"):
        fit_inputs(
            [tensor("x", x)], [spec], batched=True, mapping=(ReferenceInput(name="x", captured="image"),)
        )


@pytest.mark.parametrize(
    ("array", "datatype", "wanted"),
    [
        (np.array([[1, -2]], np.int32), "INT32", np.int64),
        (np.array([[1, 2]], np.uint8), "UINT8", np.int64),
        (np.array([[1.5, -2]], np.float16), "FP16", np.float32),
    ],
)
def test_what_loses_nothing_is_cast_unasked(
    array: npt.NDArray[Any], datatype: str, wanted: type[np.generic]
) -> None:
    """To a wider type of the same kind."""
    found = _fitted(array, datatype, wanted)
    assert found.dtype == wanted
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    ("array", "datatype", "wanted"),
    [
        (np.array([[1.5, 0.1]], np.float64), "FP64", np.float32),
        (np.array([[1, 255]], np.uint8), "UINT8", np.float32),
        (np.array([[1, -2]], np.int64), "INT64", np.int32),
        (np.array([[1.0, -2.0]], np.float32), "FP32", np.int64),
        (np.array([[True, False]]), "BOOL", np.int64),
    ],
)
def test_other_casts_are_asked_for(array: npt.NDArray[Any], datatype: str, wanted: type[np.generic]) -> None:
    """Unasked they set the exchange aside, with both sides and what to do."""
    with pytest.raises(
        QuarantineError, match=rf"{datatype}\[1, 2\].*{np.dtype(wanted).name}\[\?, 2\]; set .*cast"
    ):
        _fitted(array, datatype, wanted)
    found = _fitted(array, datatype, wanted, cast=True)
    assert found.dtype == wanted
    np.testing.assert_allclose(found, array.astype(np.float64), rtol=1e-7)


@pytest.mark.parametrize(
    ("array", "datatype", "wanted"),
    [
        (np.array([[0, 2**40]], np.int64), "INT64", np.int32),
        (np.array([[0, 1.5]], np.float32), "FP32", np.int64),
        (np.array([[0, np.nan]], np.float32), "FP32", np.int64),
        (np.array([[0, 1e300]], np.float64), "FP64", np.float32),
        (np.array([[0, -1]], np.int8), "INT8", np.uint8),
        (np.array([[0, 200]], np.uint8), "UINT8", np.int8),
        (np.array([[0, 2**64 - 1]], np.uint64), "UINT64", np.int64),
        (np.array([[0, 2**24 + 1]], np.int64), "INT64", np.float32),
    ],
)
def test_a_cast_that_changes_the_input_sets_it_aside(
    array: npt.NDArray[Any], datatype: str, wanted: type[np.generic]
) -> None:
    """Another input would be replayed than the one that was captured."""
    with pytest.raises(QuarantineError, match="do not fit that type"):
        _fitted(array, datatype, wanted, cast=True)


@pytest.mark.parametrize(("dtype", "datatype"), [(np.int8, "INT8"), (np.uint8, "UINT8")])
def test_quantised_integers_are_dequantised(dtype: type[np.generic], datatype: str) -> None:
    """(value - zero_point) * scale, over the whole range of the type."""
    bounds = np.iinfo(dtype)  # type: ignore[type-var]
    array = np.arange(bounds.min, bounds.max + 1).astype(dtype).reshape(-1, 2)
    found = _fitted(array, datatype, np.float32, scale=SCALE, zero_point=ZERO_POINT)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, (array.astype(float) - ZERO_POINT) * SCALE, rtol=1e-7)
    with pytest.raises(QuarantineError, match="only for integers"):
        _fitted(np.ones((1, 2), np.float32), "FP32", np.float32, scale=SCALE)


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        (Reference(inputs=(ReferenceInput(name="pixels"),)), r"`pixels`.*\['x'\]"),
        (Reference(output="scores"), r"`scores`.*\['logits'\]"),
    ],
)
def test_names_that_a_reference_does_not_have_are_the_operators_to_mend(
    reference: Reference, hint: str
) -> None:
    """At the start, not exchange by exchange."""
    model = Model(name="digits", output="logits", references=(reference,))
    with pytest.raises(OperatorError, match=hint):
        References([model], lambda _, __: LinearRuntime(WEIGHT, BIAS))


def test_one_output_cannot_be_named_where_several_are_compared() -> None:
    """Each of them has its own name."""
    runtime = LinearRuntime(WEIGHT, BIAS)
    with pytest.raises(OperatorError, match=r"compares \['boxes', 'scores'\]"):
        check_mapping(Model(name="digits"), Reference(output_scale=0.1), runtime, ("boxes", "scores"))


def test_what_is_dequantised_is_floating_point() -> None:
    """An integer input of the reference has no scale."""
    runtime = LinearRuntime(WEIGHT, BIAS)
    runtime.inputs = (TensorSpec(name="x", dtype=np.dtype(np.int8), shape=(None, 4)),)
    with pytest.raises(OperatorError, match=r"x: int8\[\?, 4\]"):
        check_mapping(
            Model(name="digits"), Reference(inputs=(ReferenceInput(name="x", scale=1.0),)), runtime, ()
        )


def test_integers_of_a_quantised_candidate_are_dequantised_and_compared() -> None:
    """Names and types differ on both sides; the same numbers give no divergence, others do."""
    reference = Reference(
        path="m.onnx",
        inputs=(ReferenceInput(name="x", captured="image", scale=SCALE, zero_point=ZERO_POINT),),
        output="logits",
        output_scale=0.1,
        output_zero_point=7,
    )
    model = Model(name="digits", output="scores", top_k=2, references=(reference,))
    references = References([model], lambda _, __: LinearRuntime(WEIGHT, BIAS))
    image = np.round(inputs_of(5) / SCALE + ZERO_POINT).clip(-128, 127).astype(np.int8)
    logits = logits_of(((image.astype(np.float32) - ZERO_POINT) * SCALE).astype(np.float32))
    scores = np.round(logits / 0.1 + 7).astype(np.int8)
    exact = exchange_of(inputs_of(5))
    found = []
    for output in (scores, scores[:, ::-1].copy()):
        exchange = msgspec.structs.replace(
            exact, inputs=(tensor("image", image, "INT8"),), outputs=(tensor("scores", output, "INT8"),)
        )
        case = classify(encode(exchange), sequence=1, n_delivered=1, max_deliveries=5, references=references)
        assert isinstance(case, PreparedExchange)
        (outcome,) = compare_batch([case], most_items=64)
        assert isinstance(outcome, ReplayResult)
        found.append(outcome.divergences.js.max())
    assert found[0] < 0.01 < found[1]
