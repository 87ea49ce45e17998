"""What is asked of ONNX Runtime, and what is accepted."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from quantdrift.core.config.schema import Config, Model, Provider, Reference, Runtime, Shadow
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.models.runtimes.onnx.device import cuda_devices
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.runtimes.onnx.session import CPU, CUDA, TENSORRT, Engine, providers, run_bound
from quantdrift.models.runtimes.protocol import replayed_by
from quantdrift.models.runtimes.registry import RuntimeRequest, gpu_share, open_reference
from quantdrift.models.runtimes.tf32 import OVERRIDE, loaded_libraries
from tests.support.resident_memory import MB, apart, resident_bytes
from tests.support.shadow.onnx_models import inputs_of, linear_model, model_of, saved

WITHOUT_DEVICE = pytest.mark.skipif(bool(cuda_devices()), reason="this machine has a CUDA device")


@pytest.mark.unit
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


@pytest.mark.unit
@pytest.mark.parametrize(("mode", "hint"), [(0o777, "others may write"), (None, "Create the directory")])
def test_an_engine_cache_belongs_to_nobody_else(tmp_path: Path, mode: int | None, hint: str) -> None:
    """What is loaded from there is code."""
    cache = tmp_path / "engines"
    if mode is not None:
        cache.mkdir()
        cache.chmod(mode)
    with pytest.raises(OperatorError, match=hint):
        providers(Engine(provider=Provider.TENSORRT, engine_cache=str(cache)))


@pytest.mark.unit
@WITHOUT_DEVICE
def test_a_device_that_is_not_there_is_refused_and_auto_takes_the_next(tmp_path: Path) -> None:
    """The error names the option; the provenance holds what was really taken."""
    path = saved(linear_model(), tmp_path / "linear.onnx")
    with pytest.raises(
        OperatorError, match=r"`cuda`.*uses CPUExecutionProvider.*set shadow\.provider to `auto`"
    ):
        OnnxRuntime(path, provider=Provider.CUDA)
    assert OnnxRuntime(path, provider=Provider.AUTO).provenance.provider == CPU


@pytest.mark.unit
def test_bound_to_a_device_it_computes_the_same(tmp_path: Path) -> None:
    """In the order of the outputs, whatever the inputs' memory looks like."""
    path = saved(linear_model(), tmp_path / "linear.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=[CPU])
    x = np.repeat(inputs_of(6), 2, axis=1)[:, ::2]
    (found,) = run_bound(session, {"x": x}, {"logits": np.dtype(np.float32)}, "cpu")
    np.testing.assert_array_equal(found, session.run(["logits"], {"x": np.ascontiguousarray(x)})[0])


@pytest.mark.unit
def test_an_error_keeps_nothing_that_was_bound(tmp_path: Path) -> None:
    """Its cause would hold every call that it came through, and with them memory on the device that the next input needs."""
    runtime = OnnxRuntime(saved(linear_model(), tmp_path / "linear.onnx"), provider=Provider.CPU, threads=1)
    with pytest.raises(QuarantineError, match=r"InvalidArgument INVALID_ARGUMENT") as caught:
        runtime.run({"x": inputs_of(2)[:, :1]})
    assert caught.value.__cause__ is caught.value.__context__ is None


_TENSORRT = """
import os, sys
from pathlib import Path
from quantdrift.core.config.schema import Provider
from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
try:
    OnnxRuntime(Path(sys.argv[1]), provider=Provider.TENSORRT)
except OperatorError as error:
    print(os.environ.get("NVIDIA_TF32_OVERRIDE"), error)
"""


@pytest.mark.integration
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

    Without its libraries it is refused.
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


@pytest.mark.integration
def test_references_that_run_next_to_tensorrt_are_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is opened first: PyTorch loads the same libraries, and TensorRT would be too late."""
    monkeypatch.delenv(OVERRIDE, raising=False)
    reference = Reference(runtime=Runtime.TORCH, path="nowhere.pt2")
    for provider, said in ((Provider.CPU, None), (Provider.TENSORRT, "0")):
        with pytest.raises(OperatorError):
            open_reference(RuntimeRequest(model=Model(name="a"), reference=reference, provider=provider))
        assert os.environ.get(OVERRIDE) == said


@pytest.mark.unit
def test_libraries_that_were_loaded_too_early_are_seen(tmp_path: Path) -> None:
    """They have read the variable already."""
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/x86_64-linux-gnu/libcublas.so.13\n"
        "7f02-7f03 r-xp 00000000 08:01 13 /usr/lib/libc.so.6\n7f04-7f05 rw-p 00000000 00:00 0\n"
    )
    assert loaded_libraries(maps) == ("libcublas",)
    assert loaded_libraries(tmp_path / "nowhere") == ()


@pytest.mark.unit
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


@pytest.mark.integration
def test_lengths_that_never_come_again_leave_nothing_behind(tmp_path: Path) -> None:
    """A reference of text meets thousands of lengths: a plan of memory for each, kept for good, took 8 MB here."""
    assert apart(_growth_over_lengths, tmp_path) < 2 * MB


def _growth_over_lengths(tmp_path: Path) -> int:
    n_steps, n_lengths = 500, 300
    names = [f"h{step}" for step in range(n_steps)]
    graph = helper.make_graph(
        [
            *(
                helper.make_node("Sin", [before], [name])
                for before, name in zip(["x", *names], names, strict=False)
            ),
            helper.make_node("Sum", names, ["y"]),
        ],
        "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "length"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "length"])],
    )
    runtime = OnnxRuntime(saved(model_of(graph), tmp_path / "wide.onnx"), provider=Provider.CPU, threads=1)
    runtime.run({"x": np.zeros((1, n_lengths), np.float32)})
    before = resident_bytes()
    for length in range(1, n_lengths):
        runtime.run({"x": np.zeros((1, length), np.float32)})
    return resident_bytes() - before


@pytest.mark.unit
def test_a_reference_of_decision_trees_is_known_as_such(tmp_path: Path) -> None:
    """Each batch says so, and what is advised of an alert depends on it."""
    tree = helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_treeids=[0, 0, 0],
        nodes_nodeids=[0, 1, 2],
        nodes_featureids=[0, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_values=[0.5, 0.0, 0.0],
        nodes_truenodeids=[1, 0, 0],
        nodes_falsenodeids=[2, 0, 0],
        target_treeids=[0, 0],
        target_nodeids=[1, 2],
        target_ids=[0, 0],
        target_weights=[-1.0, 1.0],
    )
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])
        for name, size in (("x", 4), ("y", 1))
    )
    model = model_of(helper.make_graph([tree], "trees", [x], [y]))
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    forest = OnnxRuntime(saved(model, tmp_path / "trees.onnx"), provider=Provider.CPU)
    assert replayed_by(forest).build == "trees"
    assert float(forest.run({"x": np.ones((1, 4), np.float32)})["y"].item()) == 1.0
    network = OnnxRuntime(saved(linear_model(), tmp_path / "linear.onnx"), provider=Provider.CPU)
    assert replayed_by(network).build == ""
