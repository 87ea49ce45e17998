"""References on a CUDA device."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from quantdrift.core.config.schema import Provider
from quantdrift.core.errors import QuarantineError
from shadow.device import cuda_devices
from shadow.onnx_runtime import OnnxRuntime
from shadow.torch_runtime import TorchRuntime
from tests import torch_models
from tests.onnx_models import BIAS, N_CLASSES, WEIGHT, inputs_of, linear_model, logits_of, saved

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


def test_onnx_runtime_keeps_within_its_memory(tmp_path: Path) -> None:
    """A batch beyond it is set aside as a replay error; a smaller one is computed on."""
    path = saved(linear_model(), tmp_path / "linear.onnx")
    runtime = OnnxRuntime(path, provider=Provider.CUDA, gpu_bytes=32 << 20)
    with pytest.raises(QuarantineError, match="replay"):
        runtime.run({"x": np.zeros((8 << 20, 4), np.float32)})
    x = inputs_of(64)
    np.testing.assert_allclose(runtime.run({"x": x})["logits"], logits_of(x), rtol=1e-5, atol=1e-6)


def test_tensorrt_computes_strict_fp32(tmp_path: Path) -> None:
    """With engines that are kept where the configuration says: TF32 would be off by 1e-3."""
    pytest.importorskip("tensorrt", reason="no TensorRT on this machine")
    cache = tmp_path / "engines"
    cache.mkdir(mode=0o700)
    weight = np.random.default_rng(1).normal(size=(4, N_CLASSES)).astype(np.float32) * 100
    path = saved(linear_model(weight=weight), tmp_path / "linear.onnx")
    runtime = OnnxRuntime(path, provider=Provider.TENSORRT, engine_cache=str(cache))
    assert runtime.provenance.provider == "TensorrtExecutionProvider"
    x = inputs_of(4096)
    exact = x.astype(np.float64) @ weight.astype(np.float64) + BIAS
    scale = np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)) + 1
    assert np.max(np.abs(runtime.run({"x": x})["logits"] - exact) / scale) < 1e-5
    assert list(cache.iterdir())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a PyTorch without CUDA")
@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_and_copies_beside_them_change_nothing(tmp_path: Path, *, compiled: bool) -> None:
    """Split into buckets, replayed as graphs, with an inner layer: the same as without, again and again."""
    path = torch_models.weights(tmp_path / "linear.safetensors")
    runtime = TorchRuntime(
        msgspec.structs.replace(
            torch_models.opening(
                path,
                factory=torch_models.FACTORY,
                compile=compiled,
                buckets=(1, 8, 64),
                cuda_graphs=True,
                embedding="product",
            ),
            provider=Provider.CUDA,
        )
    )
    assert runtime.provenance.provider == ("cuda compiled graphs" if compiled else "cuda graphs")
    for n_items in (1, 9, 64, 200, 3):
        x = inputs_of(n_items, seed=n_items)
        found = runtime.run({"x": x})
        np.testing.assert_allclose(found["logits"], logits_of(x), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["product"], x @ WEIGHT, rtol=1e-5, atol=1e-6)
    runtime.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a PyTorch without CUDA")
def test_pytorch_keeps_within_its_memory(tmp_path: Path) -> None:
    """It runs out of memory where it would take more; a smaller batch is computed on."""
    opening = torch_models.opening(torch_models.exported(tmp_path / "linear.pt2"))
    runtime = TorchRuntime(msgspec.structs.replace(opening, provider=Provider.CUDA, gpu_bytes=64 << 20))
    try:
        with pytest.raises(QuarantineError, match="OutOfMemoryError"):
            runtime.run({"x": np.zeros((16 << 20, 4), np.float32)})
        x = inputs_of(64)
        np.testing.assert_allclose(runtime.run({"x": x})["logits"], logits_of(x), rtol=1e-5, atol=1e-6)
    finally:
        runtime.close()
        torch.cuda.set_per_process_memory_fraction(1.0)
