"""`quantdrift init`, as typed, before a server that really answers."""

import hashlib
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from quantdrift.core.config.load import load
from quantdrift.core.config.schema import MIB
from tests.integration.test_reference_command import served
from tests.support.commands import invoked, typed
from tests.support.shadow.onnx_models import N_FEATURES, WEIGHT, linear_model, saved
from tests.support.sidecar.relay_process import free_port

pytestmark = pytest.mark.integration

SECRET = "hush-hush"
REQUESTS = 240
LARGE = 2_500_000
"""Bytes of the first request, above the default of `sidecar.max_exchange_bytes`."""


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
            body = json.dumps(
                {
                    "inputs": [tensor],
                    "parameters": {"tier": "gold" if number % 2 else "basic", "trace": f"t{number}"},
                    "context": {"channel": "web" if number % 3 else "phone"},
                    **({} if number else {"pad": "x" * LARGE}),
                }
            ).encode()
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
    assert config.sidecar.max_exchange_bytes == 4 * MIB
    (model,) = config.models
    assert (model.name, model.task, model.output_kind) == ("digits", "classification", "logits")
    assert config.capture.headers == ("x-scanner",)
    assert [stratum.headers for stratum in config.sampling.header_strata] == [{"x-scanner": "archive"}]
    assert (config.capture.parameters, config.capture.json) == (("tier",), ("context.channel",))
    assert [(rule.header or rule.parameter or rule.json, rule.column) for rule in config.slices] == [
        ("x-scanner", None),
        ("context.channel", None),
        ("tier", None),
        ("", 1),
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

    assert "more than the accepted 0.01: this version would alert" in done.stdout
    before = (tmp_path / "config.toml").read_text()
    again = invoked("init", "model-fp32.onnx", "--yes", "--json", "--model", "other", directory=tmp_path)
    assert again.returncode == 0, again.stderr
    told = json.loads(again.stdout)
    assert told["written"] is False
    assert 'models[other].name = "other"  (not in the file)' in told["differences"]
    assert (tmp_path / "config.toml").read_text() == before
    again = invoked("init", "model-fp32.onnx", "--yes", "--model", "other", directory=tmp_path)
    assert "To have it written with all of this, move config.toml away" in again.stdout


def test_without_server_and_traffic_the_files_are_enough(tmp_path: Path) -> None:
    """The configuration that is written passes `config check`."""
    saved(linear_model(), tmp_path / "model-fp32.onnx")
    address = f"127.0.0.1:{free_port()}"
    done = invoked("init", "model-fp32.onnx", "--yes", "--backend", address, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{address}: nothing answers there now" in done.stderr
    assert f"nothing answers at {address} now: start the inference server there" in done.stdout
    assert load(tmp_path / "config.toml").models[0].name == "model"
    checked = invoked("config", "check", directory=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "float32" in checked.stdout


def test_a_tap_needs_no_address(tmp_path: Path) -> None:
    """The configuration opens its socket and no port, and the last line says what the server needs."""
    saved(linear_model(), tmp_path / "model-fp32.onnx")
    done = invoked("init", "model-fp32.onnx", "--yes", "--tap", "t/tap", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"start the server with QUANTDRIFT_TAP={tmp_path}/t/tap" in done.stdout
    config = load(tmp_path / "config.toml")
    assert (config.sidecar.listen, config.intake.tap) == ("", str(tmp_path / "t/tap"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("candidate.txt",), "is no ONNX file"),
        (("missing.onnx",), "missing.onnx: there is no such file or folder"),
        (
            ("model-fp23.onnx",),
            "model-fp23.onnx: there is no such file or folder: did you mean `model-fp32.onnx`?",
        ),
        (("http://127.0.0.1:1",), "nothing answers there"),
        (("model-fp32.onnx", "--listen", "here"), "--listen here: it must be HOST:PORT"),
        (
            ("model-fp32.onnx", "--backend", "127.0.0.1:1", "--watch", "5"),
            "nothing answers at 127.0.0.1:1, where --watch relays requests to",
        ),
        (("model-fp32.onnx", "--tap", "tap", "--watch", "5"), "--tap needs no --backend, --listen, --watch"),
        (("folder",), "is a folder without config.json"),
        (("model-fp32.onnx", "--compose", "--out", "other.toml"), "needs a configuration called config.toml"),
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


@pytest.mark.release
def test_an_exported_program_is_pinned_opened_and_compared(tmp_path: Path) -> None:
    """What it takes and gives, and that the rows which it gives do not add up to 1; another file of that name is refused."""
    from tests.support.shadow.torch_models import exported

    program = exported(tmp_path / "model-fp32.pt2")
    address = f"127.0.0.1:{free_port()}"
    done = invoked("init", "model-fp32.pt2", "--yes", "--json", "--backend", address, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    (model,) = load(tmp_path / "config.toml").models
    (reference,) = model.references
    assert (model.name, model.task, model.output_kind) == ("model", "classification", "logits")
    assert (reference.runtime, reference.path) == ("torch", str(program))
    assert reference.digest == f"sha256:{hashlib.sha256(program.read_bytes()).hexdigest()}"
    (text,) = json.loads(done.stdout)["checked"].values()
    assert text.startswith("float32")
    program.write_bytes(b"another")
    checked = invoked("config", "check", "--references", directory=tmp_path)
    assert checked.returncode == 2
    assert reference.digest in checked.stderr


def test_a_model_at_a_server_is_a_reference(tmp_path: Path) -> None:
    """By its address, with the name that it has there; it is opened, and requests are replayed through it."""
    reference = saved(linear_model(), tmp_path / "reference.onnx")
    candidate = saved(linear_model(weight=WEIGHT * np.float32(-1)), tmp_path / "candidate.onnx")
    listen = free_port()
    with served(candidate) as port, served(reference) as other:
        client = Client(listen)
        client.start()
        try:
            done = invoked(
                *("init", f"http://127.0.0.1:{other}/v2/models/digits", "--yes", "--json"),
                *("--backend", f"127.0.0.1:{port}", "--listen", f"127.0.0.1:{listen}"),
                *("--watch", "600", "--requests", "80"),
                directory=tmp_path,
            )
        finally:
            client.stop()
    assert done.returncode == 0, done.stderr
    (model,) = load(tmp_path / "config.toml").models
    (found,) = model.references
    assert (model.name, model.output_kind) == ("digits", "logits")
    assert (found.runtime, found.url, found.model, found.path) == (
        "oip-http",
        f"http://127.0.0.1:{other}",
        "",
        "",
    )
    assert json.loads(done.stdout)["replays"].startswith("128 answers of 64 requests were compared")


def test_in_a_terminal_it_asks_and_what_is_answered_is_written(tmp_path: Path) -> None:
    """Addresses, the name, the accepted share and the collector; Enter takes what was found. No server answers, so that there is nothing to watch."""
    saved(linear_model(), tmp_path / "model-fp32.onnx")
    backend, listen = (f"127.0.0.1:{free_port()}" for _ in range(2))
    answers = (
        ("Address of the inference server [127.0.0.1:8001]: ", backend),
        ("Address for clients from now on [0.0.0.0:8000]: ", listen),
        ("The model's name in requests [model]: ", "credit"),
        ("Accepted share of changed answers [0.01]: ", "2"),
        ("Accepted share of changed answers [0.01]: ", "0.02"),
        ("OpenTelemetry collector (empty: none): ", ""),
    )
    code, shown = typed(["init", "model-fp32.onnx"], answers, directory=tmp_path)
    assert code == 0, shown
    assert "2.0 is not in the range 0<x<1" in shown
    assert "config.toml is written" in shown
    config = load(tmp_path / "config.toml")
    (model,) = config.models
    assert (model.name, model.budget.flip) == ("credit", 0.02)
    assert (config.sidecar.backend, config.sidecar.listen) == (backend, listen)


def test_in_a_terminal_the_end_of_the_input_writes_nothing(tmp_path: Path) -> None:
    """Ctrl-D at a question."""
    saved(linear_model(), tmp_path / "model-fp32.onnx")
    answers = (("Address of the inference server [127.0.0.1:8001]: ", "\x04"),)
    code, shown = typed(["init", "model-fp32.onnx"], answers, directory=tmp_path)
    assert code == 1, shown
    assert "Aborted" in shown
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
