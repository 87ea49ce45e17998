"""References on a CUDA device."""

from pathlib import Path

import numpy as np
import pytest

from quantdrift.core.config.schema import Provider
from shadow.device import cuda_devices
from shadow.onnx_runtime import OnnxRuntime
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
