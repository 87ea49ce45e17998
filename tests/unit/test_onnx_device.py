"""The device that ONNX Runtime runs a reference on."""

import logging
from pathlib import Path

import pytest

from quantdrift.core.config.schema import Provider
from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.onnx.device import cuda_devices
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from tests.support.shadow.onnx_models import linear_model, saved

pytestmark = pytest.mark.unit

WITHOUT_DEVICE = pytest.mark.skipif(bool(cuda_devices()), reason="this machine has a CUDA device")


@WITHOUT_DEVICE
def test_cuda_without_a_device_refuses_to_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime would quietly take the CPU: that is an operator's error, and the console stays silent."""
    path = saved(linear_model(), tmp_path / "linear.onnx")
    with pytest.raises(OperatorError, match=r"`cuda`.*CPUExecutionProvider.*`auto`"):
        OnnxRuntime(path, provider=Provider.CUDA)
    assert capfd.readouterr() == ("", "")


@WITHOUT_DEVICE
def test_auto_says_what_it_got(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a device it is the CPU, and the log says so."""
    caplog.set_level(logging.INFO)
    runtime = OnnxRuntime(saved(linear_model(), tmp_path / "linear.onnx"), provider=Provider.AUTO)
    assert (runtime.provenance.provider, runtime.provenance.device) == ("CPUExecutionProvider", "cpu")
    assert "CPUExecutionProvider on cpu, TF32 off" in caplog.text
    assert capfd.readouterr() == ("", "")


def test_provenance_has_file_and_library(tmp_path: Path) -> None:
    """Opset, producer and version are recorded."""
    path = saved(linear_model(), tmp_path / "linear.onnx")
    runtime = OnnxRuntime(path, provider=Provider.CPU, threads=1)
    assert (runtime.artefact.opset, runtime.artefact.producer) == (20, "tests 1")
    assert (runtime.artefact.path, runtime.provenance.runtime) == (str(path), "onnxruntime")
