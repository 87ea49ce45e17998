"""The example of a plug-in, installed with pip, through the whole loop: a sidecar, a replay, an alert, the page, a report, a gate."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper as on
import pytest

from quantdrift.demo.services import Ports, child
from tests.support.plugin_packages import EXAMPLE, install_example

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

WEIGHT = np.abs(np.random.default_rng(1).normal(size=(4, 3))).cumsum(axis=1).astype(np.float32)
BIAS = np.array([1, 2, 3], np.float32)
SHIFT = 0.5  # of a drifted store's forecasts, relative
FAR = 4.0  # the same of another one: beyond the widest interval
_WITHIN_S = 150.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory into which the example is installed."""
    return install_example(tmp_path_factory.mktemp("plugin"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the example's configuration, its reference, and inputs for a gate."""
    (tmp_path / "config.toml").write_text((EXAMPLE / "config.toml").read_text())
    np.savez(tmp_path / "demand-fp32.npz", weight=WEIGHT, bias=BIAS)
    np.savez(tmp_path / "inputs.npz", x=np.random.default_rng(2).random((4000, 4), np.float32))
    return tmp_path


def _environment(site: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(site)}


def _quantdrift(site: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quantdrift", *arguments],
        env=_environment(site) | more,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


@pytest.mark.release
def test_its_own_tests_pass(site: Path, tmp_path: Path) -> None:
    """The suites of `quantdrift.testing`, run as a plug-in's author runs them."""
    tests = EXAMPLE / "tests"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            str(tmp_path / "pytest.ini"),
            str(tests),
        ],
        env=_environment(site),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]


def test_config_check_opens_its_reference_and_checks_its_options(site: Path, folder: Path) -> None:
    """What it adds is shown in its words, and a wrong option is an error with the nearest name."""
    config = folder / "config.toml"
    ran = _quantdrift(site, "config", "check", "--references", "-c", str(config))
    assert ran.returncode == 0, ran.stderr
    assert "model demand: forecast, changed answers <= 5.00%, mean pinball loss <= 0.01" in ran.stdout
    config.write_text(config.read_text().replace("tolerance = 0.02", "tolerence = 0.02"))
    ran = _quantdrift(site, "config", "check", "-c", str(config))
    assert ran.returncode == 2
    assert "unknown option `models[demand].options.tolerence`: did you mean `tolerance`?" in ran.stderr


def test_without_the_package_every_command_says_what_to_install(folder: Path, tmp_path: Path) -> None:
    """The configuration names it, and it is not there."""
    ran = _quantdrift(tmp_path, "config", "check", "-c", str(folder / "config.toml"))
    assert ran.returncode == 2
    assert "plugins: the package `quantdrift-forecast` is not installed here" in ran.stderr


@pytest.mark.parametrize(("shift", "code"), [(0.0, 0), (SHIFT, 3)])
def test_a_gate_judges_a_candidate_by_its_comparator(
    site: Path, folder: Path, shift: float, code: int
) -> None:
    """An ONNX file against the plug-in's reference."""
    candidate = folder / "candidate.onnx"
    onnx.save(_candidate(1 + shift), candidate)
    inputs, config = str(folder / "inputs.npz"), str(folder / "config.toml")
    ran = _quantdrift(site, "gate", str(candidate), "--inputs", inputs, "--slice", "all", "-c", config)
    assert ran.returncode == code, ran.stdout + ran.stderr


def _candidate(factor: float) -> onnx.ModelProto:
    graph = oh.make_graph(
        [
            oh.make_node("MatMul", ["x", "w"], ["product"]),
            oh.make_node("Add", ["product", "b"], ["forecast"]),
        ],
        "linear",
        [oh.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])],
        [oh.make_tensor_value_info("forecast", onnx.TensorProto.FLOAT, ["n", 3])],
        [on.from_array(WEIGHT * np.float32(factor), "w"), on.from_array(BIAS * np.float32(factor), "b")],
    )
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", 17)], ir_version=9)


async def test_a_drifted_store_pages_in_the_words_of_the_plug_in(site: Path, folder: Path) -> None:
    """From `POST /v1/score` through the sidecar to the alert, the page and the report.

    The loss of each forecast of a drifted store is some twenty times the budget: that it does not page has a probability far below
    1e-9. None flips, at this tolerance, so that the divergence decides and the alert has its name. In the other store that drifts each
    interval lies beyond the reference's, so that the signal of the plug-in decides: one in a thousand may.
    """
    config = folder / "config.toml"
    text = config.read_text().replace("tolerance = 0.02", "tolerance = 10.0")
    config.write_text(text.replace("missed-intervals = 0.02", "missed-intervals = 0.001"))
    async with _running(site, folder) as (ports, environment):
        page = f"http://127.0.0.1:{ports.page}"
        async with aiohttp.ClientSession() as session, _traffic(session, ports):
            alert, missed = await _alert(session, page, "north"), await _alert(session, page, "south")
        assert (alert["model"], alert["metric"]) == ("demand", "divergence")
        assert missed["metric"] == "missed-intervals"
        async with aiohttp.ClientSession() as session:
            slices = await _json(session, f"{page}/api/v1/slices")
            assert {row["candidate_version"] for row in slices["rows"]} == {"int8-1"}
            html = await _text(session, f"{page}/")
            row = next(row for row in slices["rows"] if row["slice"] == "store=south")
            of_slice = await _text(session, f"{page}/slice/{row['model_version_id']}/{row['slice_id']}")
            metrics = await _text(session, f"http://127.0.0.1:{ports.sidecar_admin}/metrics")
        assert "demand" in html
        assert (
            "Forecast intervals that do not overlap those of the reference in store=south over time"
            in of_slice
        )
        assert 'reason="decode"' in metrics
        data = ("--data", str(folder / "data"), "-c", str(folder / "config.toml"))
        shown = await asyncio.to_thread(
            _quantdrift, site, "alerts", "show", str(alert["id"]), *data, **environment
        )
        assert shown.returncode == 0, shown.stderr
        assert "pinball loss" in shown.stdout
        shown = await asyncio.to_thread(
            _quantdrift, site, "alerts", "show", str(missed["id"]), *data, **environment
        )
        assert (
            "100 % of forecast intervals in store=south do not overlap those of the reference" in shown.stdout
        )
        report = folder / "report.html"
        ran = await asyncio.to_thread(
            _quantdrift, site, "report", "--day", "--out", str(report), *data, **environment
        )
        assert ran.returncode == 0, ran.stderr
        html = report.read_text().replace("\u00a0", " ")
        assert "pinball loss" in html
        assert (
            "store=south, share of forecast intervals that do not overlap those of the reference, lately: 100 %"
            in html
        )


@asynccontextmanager
async def _running(site: Path, folder: Path) -> AsyncIterator[tuple[Ports, dict[str, str]]]:
    """Run a server of forecasts and `quantdrift up` inside the block."""
    ports = Ports.free()
    environment = {
        **ports.overrides(""),
        "PYTHONPATH": str(site),
        "QUANTDRIFT__SAMPLING__RATE": "1.0",
        "QUANTDRIFT__SIDECAR__DRAIN_DELAY_S": "0",
        "QUANTDRIFT__SIDECAR__TALLY_INTERVAL_S": "2",
        "QUANTDRIFT__MONITOR__SESSION_S": "5",
    }
    up = ["quantdrift", "up", "-c", str(folder / "config.toml"), "--data", str(folder / "data")]
    async with AsyncExitStack() as stack:
        stack.enter_context(_server(ports.model))
        started = await stack.enter_async_context(
            child("quantdrift up", up, folder / "logs" / "up.log", environment)
        )
        await started.ready(ports.admin(), "/readyz")
        yield ports, environment


class _Forecaster(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer with the reference's forecasts, which are too high for two stores."""
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        x = np.array(document["inputs"]["x"], np.float32)
        factor = 1 + {"north": SHIFT, "south": FAR}.get(self.headers["x-store"] or "", 0.0)
        forecast = (np.einsum("if,fo->io", x, WEIGHT) + BIAS) * np.float32(factor)
        body = json.dumps({"version": "int8-1", "outputs": {"forecast": forecast.tolist()}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


@contextmanager
def _server(port: int) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", port), _Forecaster) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@asynccontextmanager
async def _traffic(session: aiohttp.ClientSession, ports: Ports) -> AsyncIterator[None]:
    """Send requests of three stores inside the block, one in ten of them with a body that is no request."""

    async def send() -> None:
        rng = np.random.default_rng(3)
        url = f"http://127.0.0.1:{ports.sidecar}/v1/score"
        for number in range(10**9):
            store = ("north", "south", "west")[number % 3]
            document = {"model": "demand", "inputs": {"x": rng.random((2, 4)).tolist()}}
            if number % 10 == 9:
                document["note"] = {"inputs": document.pop("model")}
            async with session.post(url, json=document, headers={"x-store": store}) as answer:
                assert answer.status == 200
                await answer.read()
            await asyncio.sleep(0.01)  # 100 requests per second at most

    task = asyncio.create_task(send())
    try:
        yield
    finally:
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _alert(session: aiohttp.ClientSession, page: str, store: str) -> Mapping[str, Any]:
    """Wait for an alert of a store on the page's API."""
    async with asyncio.timeout(_WITHIN_S):
        while True:
            rows = []
            with suppress(aiohttp.ClientConnectorError):  # the page starts after what serves
                rows = (await _json(session, f"{page}/api/v1/alerts"))["rows"]
            if firing := [
                row for row in rows if (row["severity"], row["slice"]) == ("firing", f"store={store}")
            ]:
                return dict(firing[0])
            await asyncio.sleep(0.5)


async def _json(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as answer:
        assert answer.status == 200
        return await answer.text()
