"""Embeddings of a reference: which tensor, which vectors, and what is said of a wrong name."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantdrift.core.config.schema import Provider
from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.embedding import vectors_of
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from tests.support.shadow.onnx_models import BIAS, WEIGHT, inputs_of, linear_model, logits_of, model_of, saved

pytestmark = pytest.mark.unit


def _load(path: Path, embedding: str) -> OnnxRuntime:
    return OnnxRuntime(path, provider=Provider.CPU, threads=1, embedding=embedding)


@pytest.mark.parametrize("wanted", ["xw", "product"])
def test_an_inner_tensor_or_a_layer_becomes_an_output(wanted: str, tmp_path: Path) -> None:
    """By either name; the digest stays that of the file, and the other outputs what they were."""
    path = saved(linear_model(), tmp_path / "linear.onnx")
    plain, runtime = _load(path, ""), _load(path, wanted)
    x = inputs_of(5)
    found = runtime.run({"x": x})
    assert runtime.embedding == "xw"
    assert [spec.name for spec in runtime.outputs] == ["logits", "xw"]
    np.testing.assert_allclose(found["xw"], x @ WEIGHT, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["logits"], logits_of(x), rtol=1e-5, atol=1e-6)
    assert runtime.artefact.digest == plain.artefact.digest


def test_an_output_needs_no_other_graph(tmp_path: Path) -> None:
    """It is there already."""
    runtime = _load(saved(linear_model(), tmp_path / "linear.onnx"), "logits")
    assert runtime.embedding == "logits"
    assert [spec.name for spec in runtime.outputs] == ["logits"]


def test_external_data_is_found_next_to_the_file(tmp_path: Path) -> None:
    """The widened graph is loaded from memory, its weights from where they lie."""
    path = tmp_path / "linear.onnx"
    onnx.save_model(
        linear_model(), path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    x = inputs_of(2)
    np.testing.assert_allclose(_load(path, "xw").run({"x": x})["xw"], x @ WEIGHT, rtol=1e-5, atol=1e-6)


def test_a_wrong_name_is_refused_with_those_that_come_near(tmp_path: Path) -> None:
    """Outputs, inner tensors and layers; with no near one, some that there are."""
    path = saved(linear_model(), tmp_path / "linear.onnx")
    with pytest.raises(OperatorError, match=r"no output or layer `prodct`.*did you mean `product`"):
        _load(path, "prodct")
    with pytest.raises(OperatorError, match=r"linear\.onnx.*it has `logits`, `product`"):
        _load(path, "zzzzzz")
    with pytest.raises(OperatorError, match="no output or layer"):
        LinearRuntime(WEIGHT, BIAS, embedding="pool")


def _wide(width: int) -> onnx.ModelProto:
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["wide"]),
            helper.make_node("ReduceMean", ["wide"], ["logits"], keepdims=1),
            helper.make_node("ArgMax", ["wide"], ["top"], axis=1),
        ],
        "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.zeros((4, width), np.float32), "w")],
    )
    return model_of(graph)


@pytest.mark.parametrize(("wanted", "said"), [("wide", "have 5000 numbers"), ("top", "is floating point")])
def test_what_cannot_be_an_embedding_is_refused_at_the_start(wanted: str, said: str, tmp_path: Path) -> None:
    """Too wide, and whole numbers."""
    path = saved(_wide(5000), tmp_path / "wide.onnx")
    with pytest.raises(OperatorError, match=said):
        _load(path, wanted)


def test_more_dimensions_are_averaged_to_one_vector_per_item() -> None:
    """Tokens, and whatever follows the channels."""
    array = np.arange(2 * 3 * 4 * 5, dtype=np.float64).reshape(2, 3, 4, 5)
    np.testing.assert_allclose(vectors_of(array), array.mean(axis=(2, 3)))
    np.testing.assert_allclose(vectors_of(array[:, :, :, 0]), array[:, :, :, 0].mean(axis=1))
    np.testing.assert_allclose(vectors_of(array[:, :, 0, 0]), array[:, :, 0, 0])
    np.testing.assert_allclose(vectors_of(array[:, 0, 0, 0]), array[:, :1, 0, 0])
    assert vectors_of(array).dtype == np.float32
