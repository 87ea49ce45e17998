"""References on a CUDA device."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from quantdrift.core.config.schema import Provider
from shadow.device import cuda_devices
from shadow.onnx_runtime import OnnxRuntime
from shadow.torch_runtime import TorchRuntime
from tests import torch_models
from tests.onnx_models import BIAS, N_CLASSES, inputs_of, linear_model, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_devices(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("provider", [Provider.CUDA, Provider.AUTO])
def test_the_device_is_taken_and_computes_strict_fp32(tmp_path: Path, provider: Provider) -> None:
    """The CUDA provider is the one in use, and its results are FP32: TF32 would be off by 1e-3."""
    weight = np.random.default_rng(1).normal(size=(4, N_CLASSES)).astype(np.float32) * 100
    runtime = OnnxRuntime(saved(linear_model(weight=weight), tmp_path / "linear.onnx"), provider=provider)
    assert runtime.provenance.provider == "CUDAExecutionProvider"
    assert runtime.provenance.device == cuda_devices()[0]
    x = inputs_of(4096)
    exact = x.astype(np.float64) @ weight.astype(np.float64) + BIAS
    logits = runtime.run({"x": x})["logits"]
    scale = np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)) + 1
    assert np.max(np.abs(logits - exact) / scale) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a PyTorch without CUDA")
@pytest.mark.parametrize("form", ["exported", "factory", "torchscript", "compiled"])
def test_pytorch_computes_strict_fp32_on_the_device(tmp_path: Path, form: str) -> None:
    """In each form of a reference; products and convolutions alike would be off by 1e-3 with TF32."""
    weight = np.random.default_rng(1).normal(size=(4, N_CLASSES)).astype(np.float32) * 100
    module = torch_models.Linear(weight)
    if form == "exported":
        opening = torch_models.opening(torch_models.exported(tmp_path / "linear.pt2", module))
    elif form == "torchscript":
        opening = torch_models.opening(
            torch_models.scripted(tmp_path / "linear.pt", module), torchscript=True
        )
    else:
        path = torch_models.weights(
            tmp_path / "l.safetensors", **{"product.weight": module.product.weight.detach()}
        )
        opening = torch_models.opening(path, factory=torch_models.FACTORY, compile=form == "compiled")
    runtime = TorchRuntime(msgspec.structs.replace(opening, provider=Provider.CUDA))
    assert runtime.provenance.provider.startswith("cuda")
    assert runtime.provenance.device == torch.cuda.get_device_name()
    assert runtime.provenance.driver
    x = inputs_of(4096)
    exact = x.astype(np.float64) @ weight.astype(np.float64) + BIAS
    scale = np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)) + 1
    assert np.max(np.abs(runtime.run({"x": x})["logits"] - exact) / scale) < 1e-5
    runtime.close()
