"""References on a CUDA device."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file

from quantdrift.core.config.schema import Model, ModelTensor, Provider
from quantdrift.core.errors import QuarantineError
from quantdrift.models.runtimes.onnx.device import cuda_devices
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.pytorch.runtime import TorchRuntime
from quantdrift.models.tensors.arrays import Array
from tests.contract import test_reference_runtime as suite
from tests.support.shadow import torch_models
from tests.support.shadow.onnx_models import WEIGHT, inputs_of, linear_model, logits_of, model_of, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_devices(), reason="no CUDA device on this machine"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch's compiler, about PyTorch
]

WIDTH, CHANNELS = 1024, 16
SUITE = [
    suite.of_suite("test_results_do_not_depend_on_the_batch"),
    suite.of_suite("test_inputs_that_cannot_be_computed_are_refused_as_replay_errors"),
    suite.of_suite("test_a_runtime_says_what_it_is"),
    suite.of_suite("test_inputs_may_be_views_and_read_only"),
    suite.of_suite("test_a_closed_runtime_may_be_closed_again"),
    suite.test_results_are_what_the_model_says,
    suite.test_inputs_of_another_shape_are_refused,
    suite.test_a_runtime_names_its_tensors,
    suite.test_a_candidate_is_as_far_off_as_it_was_moved,
]


def _onnx(directory: Path) -> ReferenceRuntime:
    return OnnxRuntime(saved(linear_model(), directory / "linear.onnx"), provider=Provider.CUDA)


def _torch(form: str) -> Callable[[Path], ReferenceRuntime]:
    def make(directory: Path) -> ReferenceRuntime:
        if form == "exported":
            opening = torch_models.opening(torch_models.exported(directory / "linear.pt2"))
        elif form == "torchscript":
            path = torch_models.scripted(directory / "linear.pt")
            opening = torch_models.opening(path)
        else:
            path = torch_models.weights(directory / "linear.safetensors")
            graphs = form == "graphs"
            opening = torch_models.opening(
                path, factory=torch_models.FACTORY, buckets=(1, 8) if graphs else (), cuda_graphs=graphs
            )
        return TorchRuntime(msgspec.structs.replace(opening, provider=Provider.CUDA))

    return make


@pytest.mark.parametrize("behaviour", SUITE, ids=lambda one: one.__name__)
@pytest.mark.parametrize("form", ["onnx", "exported", "factory", "torchscript", "graphs"])
def test_it_does_what_every_runtime_does(form: str, behaviour: Callable[..., None], tmp_path: Path) -> None:
    """The conformance suite, on the device."""
    if form != "onnx" and not torch.cuda.is_available():
        pytest.skip("a PyTorch without CUDA")
    behaviour(_onnx if form == "onnx" else _torch(form), tmp_path)


class Wide(torch.nn.Module):
    """A product and a convolution that are large enough for a library to take them to units for TF32."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.kernels = torch.nn.Parameter(torch.randn(CHANNELS, CHANNELS, 3, 3, generator=generator))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `product` : (items, WIDTH) and `convolved` : (items, CHANNELS, 6, 6) of `x` : (items, WIDTH)."""
        pictures = x.reshape(-1, self.kernels.shape[1], 8, 8)
        return {
            "product": x @ self.weight,
            "convolved": torch.nn.functional.conv2d(pictures, self.kernels),
        }


def _wide_items() -> npt.NDArray[np.float32]:
    return np.random.default_rng(2).normal(size=(256, WIDTH)).astype(np.float32)


def _wide_graph() -> onnx.ModelProto:
    float32, wide = TensorProto.FLOAT, Wide()
    stored = {"weight": wide.weight, "kernels": wide.kernels}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "weight"], ["product"]),
            helper.make_node("Reshape", ["x", "shape"], ["pictures"]),
            helper.make_node("Conv", ["pictures", "kernels"], ["convolved"]),
        ],
        "wide",
        [helper.make_tensor_value_info("x", float32, ["n", WIDTH])],
        [
            helper.make_tensor_value_info("product", float32, ["n", WIDTH]),
            helper.make_tensor_value_info("convolved", float32, ["n", CHANNELS, 6, 6]),
        ],
        [
            *(numpy_helper.from_array(one.detach().numpy(), name) for name, one in stored.items()),
            numpy_helper.from_array(np.array([-1, CHANNELS, 8, 8]), "shape"),
        ],
    )
    return model_of(graph)


def _check_strict(found: Mapping[str, Array]) -> None:
    """Check that nothing was rounded on the way: FP32 is some 3e-7 off, TF32 7e-5 and more."""
    items = torch.from_numpy(_wide_items()).double()
    wide = Wide().double()
    exact = wide(items)
    for one in wide.parameters():
        one.data.abs_()
    scale = wide(items.abs())
    for name, array in found.items():
        off = (torch.from_numpy(array) - exact[name]).abs() / scale[name]
        assert off.max() < 1e-5, name


@pytest.mark.parametrize("provider", [Provider.CUDA, Provider.AUTO])
def test_the_device_is_taken_and_computes_strict_fp32(tmp_path: Path, provider: Provider) -> None:
    """The CUDA provider is the one in use, for products and convolutions alike."""
    runtime = OnnxRuntime(saved(_wide_graph(), tmp_path / "wide.onnx"), provider=provider)
    assert runtime.provenance.provider == "CUDAExecutionProvider"
    assert runtime.provenance.device == cuda_devices()[0]
    assert runtime.provenance.driver
    _check_strict(runtime.run({"x": _wide_items()}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a PyTorch without CUDA")
@pytest.mark.parametrize("form", ["exported", "factory", "torchscript", "compiled"])
def test_pytorch_computes_strict_fp32_on_the_device(tmp_path: Path, form: str) -> None:
    """In each form of a reference, for products and convolutions alike."""
    model = Model(name="wide", inputs=(ModelTensor(name="x", datatype="FP32", shape=(-1, WIDTH)),))
    if form == "exported":
        path = torch_models.exported(tmp_path / "wide.pt2", Wide(), torch.zeros(2, WIDTH))
        opening = torch_models.opening(path, model=model)
    elif form == "torchscript":
        path = torch_models.scripted(tmp_path / "wide.pt", Wide())
        opening = torch_models.opening(path, model=model)
    else:
        path = tmp_path / "wide.safetensors"
        save_file(Wide().state_dict(), path)
        factory = "tests.gpu.test_cuda:Wide"
        opening = torch_models.opening(path, model=model, factory=factory, compile=form == "compiled")
    runtime = TorchRuntime(msgspec.structs.replace(opening, provider=Provider.CUDA))
    assert runtime.provenance.provider.startswith("cuda")
    assert runtime.provenance.device == torch.cuda.get_device_name()
    assert runtime.provenance.driver
    _check_strict(runtime.run({"x": _wide_items()}))
    runtime.close()


def test_onnx_runtime_keeps_within_its_memory(tmp_path: Path) -> None:
    """A batch beyond it is set aside as a replay error, were it for its inputs alone; a smaller one is computed on."""
    graph = helper.make_graph(
        [helper.make_node("Gather", ["x", "first"], ["logits"], axis=0)],
        "first",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 4])],
        [numpy_helper.from_array(np.zeros(1, np.int64), "first")],
    )
    path = saved(model_of(graph), tmp_path / "first.onnx")
    runtime = OnnxRuntime(path, provider=Provider.CUDA, gpu_bytes=32 << 20)
    with pytest.raises(QuarantineError, match="replay"):
        runtime.run({"x": np.zeros((8 << 20, 4), np.float32)})
    x = inputs_of(64)
    np.testing.assert_array_equal(runtime.run({"x": x})["logits"], x[:1])


_TENSORRT = """
import sys
from pathlib import Path
import numpy as np
from quantdrift.core.config.schema import Provider
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
runtime = OnnxRuntime(Path(sys.argv[1]), provider=Provider.TENSORRT, engine_cache=sys.argv[2])
print(runtime.provenance.provider)
np.savez(sys.argv[4], **runtime.run({"x": np.load(sys.argv[3])}))
"""


def test_tensorrt_computes_strict_fp32(tmp_path: Path) -> None:
    """With engines that are kept where the configuration says.

    In a process of its own, where nothing of NVIDIA's was loaded before TF32 was switched off.
    """
    if importlib.util.find_spec("tensorrt") is None:
        pytest.skip("no TensorRT on this machine")
    libraries = importlib.util.find_spec("tensorrt_libs")
    paths = [*(libraries.submodule_search_locations or () if libraries else ())]
    environment = {name: value for name, value in os.environ.items() if name != "NVIDIA_TF32_OVERRIDE"}
    environment["LD_LIBRARY_PATH"] = os.pathsep.join([*paths, environment.get("LD_LIBRARY_PATH", "")])
    cache = tmp_path / "engines"
    cache.mkdir(mode=0o700)
    path = saved(_wide_graph(), tmp_path / "wide.onnx")
    np.save(tmp_path / "x.npy", _wide_items())
    done = subprocess.run(
        [sys.executable, "-c", _TENSORRT, path, cache, tmp_path / "x.npy", tmp_path / "found.npz"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "TensorrtExecutionProvider\n", done.stderr
    with np.load(tmp_path / "found.npz") as found:
        _check_strict(found)
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
def test_a_closed_reference_with_graphs_leaves_no_memory_on_the_device(tmp_path: Path) -> None:
    """What libraries keep for the process they keep once, however often a reference is opened."""
    path = torch_models.weights(tmp_path / "linear.safetensors")
    opening = msgspec.structs.replace(
        torch_models.opening(path, factory=torch_models.FACTORY, buckets=(1, 8, 64), cuda_graphs=True),
        provider=Provider.CUDA,
    )

    def left() -> int:
        runtime = TorchRuntime(opening)
        runtime.run({"x": inputs_of(9)})
        runtime.close()
        return int(torch.cuda.memory_allocated())

    first = left()
    assert [left() for _ in range(3)] == [first] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a PyTorch without CUDA")
def test_pytorch_keeps_within_its_memory(tmp_path: Path) -> None:
    """It runs out of memory where it would take more; a smaller batch is computed on."""
    opening = torch_models.opening(torch_models.exported(tmp_path / "linear.pt2"))
    # What cuBLAS works in is part of it: some tens of MB.
    runtime = TorchRuntime(msgspec.structs.replace(opening, provider=Provider.CUDA, gpu_bytes=256 << 20))
    try:
        with pytest.raises(QuarantineError, match="OutOfMemoryError"):
            runtime.run({"x": np.zeros((32 << 20, 4), np.float32)})
        x = inputs_of(64)
        np.testing.assert_allclose(runtime.run({"x": x})["logits"], logits_of(x), rtol=1e-5, atol=1e-6)
    finally:
        runtime.close()
        torch.cuda.set_per_process_memory_fraction(1.0)
