"""What is asked of ONNX Runtime, and what is accepted."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from quantdrift.core.config.schema import Config, Model, Provider, Reference, Runtime, Shadow
from quantdrift.core.errors import OperatorError
from shadow.device import cuda_devices
from shadow.onnx_runtime import OnnxRuntime
from shadow.onnx_session import CPU, CUDA, TENSORRT, Engine, providers, run_bound
from shadow.opening import gpu_share
from shadow.tf32 import loaded_readers
from tests.onnx_models import inputs_of, linear_model, saved

pytestmark = pytest.mark.unit

WITHOUT_DEVICE = pytest.mark.skipif(bool(cuda_devices()), reason="this machine has a CUDA device")


def test_what_is_asked_for_is_strict_and_bounded(tmp_path: Path) -> None:
    """TF32, FP16, BF16 and INT8 are off by name; memory and cache are as configured."""
    tmp_path.chmod(0o700)
    engine = Engine(provider=Provider.TENSORRT, gpu_bytes=1 << 30, engine_cache=str(tmp_path))
    (first, tensorrt), (second, cuda), third = providers(engine)
    assert (first, second, third) == (TENSORRT, CUDA, CPU)
    assert {tensorrt[f"trt_{name}_enable"] for name in ("fp16", "bf16", "int8")} == {"0"}
    assert (tensorrt["trt_engine_cache_path"], tensorrt["trt_max_workspace_size"]) == (
        str(tmp_path),
        str(1 << 30),
    )
    assert (cuda["use_tf32"], cuda["gpu_mem_limit"]) == ("0", str(1 << 30))
    (_, unbounded), _ = providers(Engine(provider=Provider.CUDA))
    assert "gpu_mem_limit" not in unbounded
    (_, uncached), *_ = providers(Engine(provider=Provider.TENSORRT))
    assert not any("cache" in option for option in uncached)


@pytest.mark.parametrize(("mode", "hint"), [(0o777, "others may write"), (None, "Make the directory")])
def test_an_engine_cache_belongs_to_nobody_else(tmp_path: Path, mode: int | None, hint: str) -> None:
    """What is loaded from there is code."""
    cache = tmp_path / "engines"
    if mode is not None:
        cache.mkdir()
        cache.chmod(mode)
    with pytest.raises(OperatorError, match=hint):
        providers(Engine(provider=Provider.TENSORRT, engine_cache=str(cache)))


@WITHOUT_DEVICE
def test_another_provider_will_do_where_that_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it is refused; the record holds what was really taken."""
    path = saved(linear_model(), tmp_path / "linear.onnx")
    with pytest.raises(OperatorError, match=r"`cuda`.*took CPUExecutionProvider.*shadow\.allow_fallback"):
        OnnxRuntime(path, provider=Provider.CUDA)
    runtime = OnnxRuntime(path, provider=Provider.CUDA, allow_fallback=True)
    assert runtime.provenance.provider == CPU
    assert [record.levelno for record in caplog.records if "allow_fallback" in record.message] == [
        logging.WARNING
    ]


def test_bound_to_a_device_it_computes_the_same(tmp_path: Path) -> None:
    """In the order of the outputs, whatever the inputs' memory looks like."""
    path = saved(linear_model(), tmp_path / "linear.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=[CPU])
    x = np.repeat(inputs_of(6), 2, axis=1)[:, ::2]
    (found,) = run_bound(session, {"x": x}, {"logits": np.dtype(np.float32)}, "cpu")
    np.testing.assert_array_equal(found, session.run(["logits"], {"x": np.ascontiguousarray(x)})[0])


_TENSORRT = """
import os, sys
from pathlib import Path
from quantdrift.core.config.schema import Provider
from quantdrift.core.errors import OperatorError
from shadow.onnx_runtime import OnnxRuntime
try:
    OnnxRuntime(Path(sys.argv[1]), provider=Provider.TENSORRT)
except OperatorError as error:
    print(os.environ.get("NVIDIA_TF32_OVERRIDE"), error)
    if "ONNX" in str(error):
        runtime = OnnxRuntime(Path(sys.argv[1]), provider=Provider.TENSORRT, allow_fallback=True)
        print(runtime.provenance.provider)
"""


@WITHOUT_DEVICE
@pytest.mark.parametrize(
    ("told", "said"),
    [
        (None, "0 ONNX Runtime cannot load the reference"),
        ("0", "0 ONNX Runtime cannot load the reference"),
        ("1", "1 NVIDIA_TF32"),
    ],
)
def test_tensorrt_is_started_without_tf32_or_not_at_all(tmp_path: Path, told: str | None, said: str) -> None:
    """The whole process is told before a library is loaded; who says otherwise is asked to decide.

    Without its libraries it is refused, or another provider taken, as is allowed.
    """
    path = saved(linear_model(), tmp_path / "linear.onnx")
    environment = {name: value for name, value in os.environ.items() if name != "NVIDIA_TF32_OVERRIDE"}
    if told is not None:
        environment["NVIDIA_TF32_OVERRIDE"] = told
    done = subprocess.run(
        [sys.executable, "-c", _TENSORRT, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(said)
    assert done.stdout.endswith("CPUExecutionProvider\n") is (told != "1")


def test_libraries_that_were_loaded_too_early_are_seen(tmp_path: Path) -> None:
    """They have read the variable already."""
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/x86_64-linux-gnu/libcublas.so.13\n"
        "7f02-7f03 r-xp 00000000 08:01 13 /usr/lib/libc.so.6\n7f04-7f05 rw-p 00000000 00:00 0\n"
    )
    assert loaded_readers(maps) == ("libcublas",)
    assert loaded_readers(tmp_path / "nowhere") == ()


def test_gpu_memory_is_shared_out() -> None:
    """Each ONNX session has an arena of its own; PyTorch has one for the process; servers have none here."""
    onnx, torch = Reference(path="a.onnx"), Reference(runtime=Runtime.TORCH, path="a.pt2")
    away = Reference(runtime=Runtime.OIP_HTTP, url="http://t")
    models = (
        Model(name="a", references=(onnx, torch)),
        Model(name="b", references=(torch, away)),
        Model(name="c", references=(onnx,)),
    )
    config = Config(models=models, shadow=Shadow(gpu_bytes=4000))
    assert gpu_share(config, onnx) == 1000
    assert gpu_share(config, torch) == 2000
    assert gpu_share(config, onnx) * 2 + gpu_share(config, torch) == 4000
    assert gpu_share(Config(models=models), torch) == 0
