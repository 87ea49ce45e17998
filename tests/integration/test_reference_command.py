"""`quantdrift reference`, as typed, against a server that really answers."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.onnx_models import WEIGHT, inputs_of, linear_model, saved

pytestmark = pytest.mark.integration

CONFIG = """
[shadow]
provider = "cpu"
[[models]]
name = "digits"
[[models.references]]
path = "linear.onnx"
[[models.references]]
runtime = "oip-http"
url = "http://127.0.0.1:{port}"
canaries = "canaries.safetensors"
"""


def _quantdrift(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quantdrift", "reference", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


@contextmanager
def _served(path: Path, port: int = 0) -> Iterator[int]:
    command = [sys.executable, "-m", "examples.oip_server", "--model", f"digits={path}"]
    with subprocess.Popen(
        [*command, "--listen", f"127.0.0.1:{port}"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline().rpartition(" ")[2])
        finally:
            server.terminate()


def test_a_server_is_held_to_what_the_file_gave(tmp_path: Path) -> None:
    """Recorded from the file: the server that holds it reproduces them, one with another model does not."""
    good = saved(linear_model(), tmp_path / "linear.onnx")
    other = saved(linear_model(weight=WEIGHT * np.float32(1.001)), tmp_path / "other.onnx")
    with _served(good) as port:
        (tmp_path / "config.toml").write_text(CONFIG.format(port=port))
        done = _quantdrift(tmp_path, "record", "digits", "--reference", "1", "--out", "canaries.safetensors")
        assert done.returncode == 0, done.stderr
        assert "x float32[8, 4] -> logits float32[8, 3]" in done.stdout
        done = _quantdrift(tmp_path, "check")
        assert (done.returncode, "reproduced" in done.stdout) == (0, True), done.stderr
        assert "no canaries" in done.stdout
    with _served(other, port):
        done = _quantdrift(tmp_path, "check", "digits", "--reference", "2", "--json")
        assert done.returncode == 2, done.stderr
        (told,) = json.loads(done.stdout)["references"]
        assert told["outcome"] == "failed"
        assert 1e-4 < told["deviations"]["logits"] < 2e-3
    done = _quantdrift(tmp_path, "check", "--json")
    assert done.returncode == 1
    assert [one["outcome"] for one in json.loads(done.stdout)["references"]] == ["no canaries", "away"]


def test_inputs_of_ones_own_are_recorded(tmp_path: Path) -> None:
    """From npz; those that the reference does not take are refused with both sides."""
    saved(linear_model(), tmp_path / "linear.onnx")
    (tmp_path / "config.toml").write_text(
        '[[models]]\nname = "m"\n[[models.references]]\npath = "linear.onnx"\n'
    )
    record = ("record", "m", "--out", "c.safetensors", "--inputs", "own.npz")
    np.savez(tmp_path / "own.npz", x=inputs_of(3))
    done = _quantdrift(tmp_path, *record, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["inputs"] == {"x": "float32[3, 4]"}
    np.savez(tmp_path / "own.npz", x=inputs_of(3).astype(np.float64))
    done = _quantdrift(tmp_path, *record)
    assert done.returncode == 2
    assert "x: float64[3, 4], the reference takes x: float32[?, 4]" in done.stderr
    for wrong, hint in (("record", "no model `n`"), ("check", "no model `n`")):
        done = _quantdrift(tmp_path, wrong, "n", *(("--out", "c") if wrong == "record" else ()))
        assert (done.returncode, hint in done.stderr) == (2, True)
