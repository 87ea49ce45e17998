"""`quantdrift init`, as typed, before a server that really answers."""

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from quantdrift.core.config.load import load
from tests.integration.test_reference_command import served
from tests.support.commands import invoked
from tests.support.shadow.onnx_models import N_FEATURES, WEIGHT, linear_model, saved
from tests.support.sidecar.relay_process import free_port

pytestmark = pytest.mark.integration

SECRET = "hush-hush"
REQUESTS = 240


class Client(threading.Thread):
    """Sends requests until it is told to stop."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._url = f"http://127.0.0.1:{port}/v2/models/digits/infer"
        self._stopped = threading.Event()
        self.n_answered = 0

    def run(self) -> None:
        """Send one request after the other; nobody may listen yet."""
        rng = np.random.default_rng(5)
        number = 0
        while not self._stopped.is_set():
            x = rng.normal(size=(2, N_FEATURES)).round(3)
            x[:, 1] = rng.integers(0, 2, size=2)
            tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
            headers = {
                "Content-Type": "application/json",
                "Authorization": f"Bearer {SECRET}",
                "X-Scanner": "archive" if number % 64 == 0 else "office",
                "X-Request-Id": str(number),
            }
            body = json.dumps({"inputs": [tensor]}).encode()
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(self._url, body, headers), timeout=20
                ) as answer:
                    answer.read()
            except (OSError, urllib.error.URLError):
                self._stopped.wait(0.05)
                continue
            number += 1
            self.n_answered += 1

    def stop(self) -> None:
        """End it."""
        self._stopped.set()
        self.join()


def test_a_minute_of_traffic_makes_a_configuration_that_works(tmp_path: Path) -> None:
    """The model's name, slices and strata from headers, a column of the input, and first replays through the reference."""
    saved(linear_model(), tmp_path / "model-fp32.onnx")
    candidate = saved(linear_model(weight=WEIGHT * np.float32(-1)), tmp_path / "candidate.onnx")
    listen = free_port()
    with served(candidate) as port:
        client = Client(listen)
        client.start()
        try:
            done = invoked(
                *("init", "model-fp32.onnx", "--candidate", "candidate.onnx", "--yes"),
                *("--backend", f"127.0.0.1:{port}", "--listen", f"127.0.0.1:{listen}"),
                *("--watch", "600", "--requests", str(REQUESTS)),
                directory=tmp_path,
            )
        finally:
            client.stop()
    assert done.returncode == 0, done.stderr
    assert client.n_answered >= REQUESTS
    assert "oip_server 1 speaks oip-v2-rest" in done.stderr
    assert SECRET not in done.stdout + done.stderr + (tmp_path / "config.toml").read_text()
    config = load(tmp_path / "config.toml")
    (model,) = config.models
    assert (model.name, model.task, model.output_kind) == ("digits", "classification", "logits")
    assert config.capture.headers == ("x-scanner",)
    assert [stratum.headers for stratum in config.sampling.header_strata] == [{"x-scanner": "archive"}]
    assert [(rule.header, rule.feature, rule.column) for rule in config.slices] == [
        ("x-scanner", "", None),
        ("", "value", 1),
    ]
    compared, changed = (
        int(part)
        for part in (
            done.stdout.partition(" answers of 64 requests were compared")[0].rpartition("\n")[2],
            done.stdout.partition("compared with the reference: ")[2].partition(" ")[0],
        )
    )
    assert compared == 128
    assert changed > 64  # each score has the other sign
    assert "scanner=archive" in done.stdout.partition("three times its budget")[2]

    before = (tmp_path / "config.toml").read_text()
    again = invoked("init", "model-fp32.onnx", "--yes", "--json", "--model", "other", directory=tmp_path)
    assert again.returncode == 0, again.stderr
    told = json.loads(again.stdout)
    assert told["written"] is False
    assert 'models[other].name = "other"  (not in the file)' in told["differences"]
    assert (tmp_path / "config.toml").read_text() == before


def test_without_server_and_traffic_the_files_are_enough(tmp_path: Path) -> None:
    """The configuration that is written passes `config check`."""
    saved(linear_model(), tmp_path / "model-fp32.onnx")
    address = f"127.0.0.1:{free_port()}"
    done = invoked("init", "model-fp32.onnx", "--yes", "--backend", address, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{address}: nothing answers there now" in done.stderr
    assert load(tmp_path / "config.toml").models[0].name == "model"
    checked = invoked("config", "check", directory=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "float32" in checked.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("candidate.txt",), "is no ONNX file"),
        (("model-fp32.onnx", "--listen", "here"), "--listen here: it must be HOST:PORT"),
        (("folder",), "is a folder without config.json"),
    ],
)
def test_what_cannot_work_is_said_and_nothing_is_written(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """Exit code 2, and no file."""
    saved(linear_model(), tmp_path / "model-fp32.onnx")
    (tmp_path / "candidate.txt").write_text("")
    (tmp_path / "folder").mkdir()
    done = invoked("init", *arguments, "--yes", directory=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "config.toml").exists()


def test_a_folder_of_a_language_model_is_a_reference(language_folder: Path, tmp_path: Path) -> None:
    """Its task and its runtime are named, and it is opened."""
    address = f"127.0.0.1:{free_port()}"
    done = invoked("init", str(language_folder), "--yes", "--json", "--backend", address, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    (model,) = load(tmp_path / "config.toml").models
    (reference,) = model.references
    assert (model.task, reference.runtime) == ("generation", "transformers")
    (text,) = json.loads(done.stdout)["checked"].values()
    assert text.startswith("float32")
