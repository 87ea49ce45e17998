"""The precision of a reference, as it is written to the database."""

import asyncio
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantdrift.core.config.schema import Model, Provider, Reference, Runtime
from quantdrift.core.errors import OperatorError
from quantdrift.demo.oip_server import InferenceServer, OnnxModel
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.runtimes.protocol import replayed_by
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from tests.support.shadow.onnx_models import BIAS, N_CLASSES, N_FEATURES, WEIGHT, inputs_of, model_of, saved

pytestmark = pytest.mark.integration


def _bfloat16_model() -> onnx.ModelProto:
    """Return the linear model with its weight stored as a BF16 parent has it."""
    halves = (WEIGHT.view(np.uint32) >> 16).astype(np.uint16)
    weight = helper.make_tensor("w", TensorProto.BFLOAT16, WEIGHT.shape, halves.tobytes(), raw=True)
    nodes = [
        helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "wide"], ["xw"]),
        helper.make_node("Add", ["xw", "b"], ["logits"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", N_FEATURES])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", N_CLASSES])
    return model_of(
        helper.make_graph(nodes, "linear", [x], [logits], [weight, numpy_helper.from_array(BIAS, "b")])
    )


def test_a_bf16_parent_is_declared_and_stored(tmp_path: Path) -> None:
    """Undeclared it is refused; declared it computes with the weights it has, and every batch says so."""
    path = saved(_bfloat16_model(), tmp_path / "parent.onnx")
    with pytest.raises(OperatorError, match="`w` is bfloat16"):
        OnnxRuntime(path, provider=Provider.CPU)
    runtime = OnnxRuntime(path, provider=Provider.CPU, allow_reduced_precision=("bfloat16",))
    told = replayed_by(runtime)
    assert told.precision == runtime.artefact.precision == "float32+bfloat16"
    assert (told.digest, told.runtime, told.device) == (runtime.artefact.digest, "onnxruntime", "cpu")
    weight = (WEIGHT.view(np.uint32) & 0xFFFF0000).view(np.float32)
    x = inputs_of(5)
    np.testing.assert_allclose(runtime.run({"x": x})["logits"], x @ weight + BIAS, rtol=1e-5, atol=1e-6)


async def test_a_precision_that_a_server_reports_must_be_declared(tmp_path: Path) -> None:
    """FP16 tensors are refused undeclared; declared, the record tells what was declared and that nobody verified it."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    half = helper.make_tensor_value_info("half", TensorProto.FLOAT16, ["n", 4])
    cast = helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16)
    path = saved(model_of(helper.make_graph([cast], "half", [x], [half])), tmp_path / "half.onnx")
    server = InferenceServer([OnnxModel("half", "1", path)])
    await server.start()
    try:
        url = f"http://127.0.0.1:{server.port}"

        def opened(*allowed: str) -> str:
            reference = Reference(runtime=Runtime.OIP_HTTP, url=url, allow_reduced_precision=allowed)
            runtime = open_reference(RuntimeRequest(model=Model(name="half"), reference=reference))
            runtime.close()
            return runtime.artefact.precision

        with pytest.raises(OperatorError, match=r'`half` as FP16.*allow_reduced_precision = \["float16"\]'):
            await asyncio.to_thread(opened)
        assert await asyncio.to_thread(opened, "float16") == "unverified+float16"
    finally:
        await server.stop()
