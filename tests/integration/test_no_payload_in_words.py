"""Nothing of what people send is in any word of the product: no log, table, metric, span, event, page or terminal has it."""

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import msgspec
import pytest

from quantdrift import Tap
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Config
from quantdrift.core.data_directory import at_data
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.rights import NatsRole
from quantdrift.demo.otlp_receiver import OtlpReceiver
from quantdrift.monitor.outbox import EVENT_NAME
from tests.support.shadow.onnx_models import exchange_of, inputs_of, linear_model, logits_of, saved
from tests.support.sidecar.envoy_messages import METHOD, exchange
from tests.support.sidecar.relay_process import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DEADLINE_S = 60.0
N_WRONG = 400  # so many that what is lost on purpose is less than `monitor.max_loss_ratio`
CANARY = "CANARY-DE89370400440532013000"  # what follows it says where it was put
HOSTILE = "a\x1b[2J\x9bb\u202ec".encode()
UNSAFE = "\x1b\x9b\u202e"
SECRETS = {
    "QUANTDRIFT_SAMPLING_SALT": f"{CANARY}-salt",
    "QUANTDRIFT_INTAKE_TOKEN": f"{CANARY}-token",
}
CONFIG = """
[sidecar]
listen = "127.0.0.1:{relay}"
backend = "127.0.0.1:{backend}"
admin = "127.0.0.1:{sidecar}"
drain_delay_s = 0
grace_s = 3
tally_interval_s = 0.5
[intake]
listen = "127.0.0.1:{intake}"
kserve_logger = "127.0.0.1:{logger}"
ext_proc = "127.0.0.1:{envoy}"
tap = "{tap}"
pair_window_s = 1
[stream]
payload_key_file = "keys.json"
[capture]
headers = ["x-scanner", "x-user"]
hmac = ["header.x-user"]
hmac_key_file = "keys.json"
[sampling]
rate = 1.0
max_exchanges_per_s = 10000
[shadow]
admin = "127.0.0.1:{shadow}"
provider = "cpu"
threads = 1
[monitor]
admin = "127.0.0.1:{monitor}"
min_groups = 50
[telemetry]
otlp_endpoint = "{otlp}"
log_level = "debug"
[[slices]]
name = "scanner"
header = "x-scanner"
[[slices]]
name = "user"
header = "x-user"
[[models]]
name = "digits"
[[models.references]]
path = "linear.onnx"
[[models]]
name = "remote"
[[models.references]]
runtime = "oip-http"
url = "http://127.0.0.1:{reference}"
timeout_s = 5
"""


class _Server(BaseHTTPRequestHandler):
    """The candidate and the server of a reference: each answers with a canary of its own."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Describe the reference."""
        tensors = {"inputs": [_declared("x", 4)], "outputs": [_declared("logits", 3)]}
        described = {"name": "remote", "versions": ["1"], "platform": "test", **tensors}
        self._answer(200, described if self.path.endswith("/remote") else {"name": "server", "version": "1"})

    def do_POST(self) -> None:
        """Fail as a reference does, with the request in its words; answer as a candidate does."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, ThreadingHTTPServer)
        if self.server.server_port in _REFERENCES:
            self._answer(400, {"error": f"{CANARY}-reference \x1b[31m\x9b {body[:40]!r}"})
        elif b"fail" in body:
            self._answer(500, {"error": f"{CANARY}-candidate-error"})
        else:
            x = inputs_of(1)
            self._answer(
                200,
                {
                    "model_name": "digits",
                    "parameters": {"text": f"{CANARY}-answer-parameter"},
                    "outputs": [_declared("logits", 3) | {"shape": [1, 3], "data": logits_of(x)[0].tolist()}],
                },
            )

    def _answer(self, status: int, document: Any) -> None:
        text = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": len(text),
            "X-Answer": f"{CANARY}-answer-header",
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


_REFERENCES: set[int] = set()


def _declared(name: str, width: int) -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": [-1, width]}


@contextlib.contextmanager
def _server() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _post(port: int, path: str, body: bytes, headers: Mapping[str, Any]) -> int:
    """Return the status of an answer, 0 where the connection is closed instead."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, body, dict(headers))
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _question(data: Any = None, **more: Any) -> bytes:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": inputs_of(1)[0].tolist()}
    return json.dumps({"inputs": [tensor | (data or {})], **more}).encode()


def _send(ports: Mapping[str, int], tap: Path) -> None:
    """Put a canary into every place of every way in."""
    relay, intake, token = ports["relay"], ports["intake"], SECRETS["QUANTDRIFT_INTAKE_TOKEN"]
    headers = {
        "Content-Type": "application/json",
        "X-Secret": f"{CANARY}-header",
        "Cookie": f"{CANARY}-cookie",
        "X-User": f"{CANARY}-user",
        "X-Scanner": HOSTILE,
    }
    parameter = {"parameters": {"text": f"{CANARY}-parameter", "id": f"{CANARY}-id"}}
    texts = {"name": "x", "datatype": "BYTES", "shape": [1], "data": [f"{CANARY}-text"]}
    bodies = [
        *[_question(**parameter)] * 3,
        _question({"datatype": f"{CANARY}-datatype"}),
        _question({"shape": [f"{CANARY}-shape"]}),
        _question(texts),
        _question(**{f"{CANARY}-key": "fail"}),
        json.dumps({"inputs": f"{CANARY}-inputs"}).encode(),
        b'{"inputs": [' + CANARY.encode(),
    ]
    for model in ("digits", "remote"):
        for body in bodies:
            _post(relay, f"/v2/models/{model}/infer?q={CANARY}-query", body, headers)
    _post(relay, f"/{CANARY}-path", b"x", headers)
    headers["X-Scanner"] = "safe"  # the intake's server refuses the other one
    bearer = {"Authorization": f"Bearer {token}", **headers}
    one = {
        "target": f"/v2/models/digits/infer?q={CANARY}-target",
        "headers": {"x-secret": f"{CANARY}-intake-header"},
        "request": json.loads(_question()),
        "response": {"model_name": "digits", "outputs": f"{CANARY}-outputs"},
    }
    for batch in ({"exchanges": [one]}, {"exchanges": f"{CANARY}-batch"}, {f"{CANARY}-field": [one]}):
        _post(intake, "/v1/exchanges", json.dumps(batch).encode(), bearer)
    _post(intake, "/v1/exchanges", b"{}", {**headers, "Authorization": f"Bearer {CANARY}-wrong-token"})
    _post(ports["logger"], f"/kserve/{CANARY}-wrong-path", b"{}", headers)
    event = {
        "ce-type": "org.kubeflow.serving.inference.request",
        "ce-id": f"{CANARY}-event",
        "ce-source": f"{CANARY}-source",
        "ce-specversion": "1.0",
        "ce-inferenceservicename": "digits",
    }
    for more in (event, event | {"ce-type": f"{CANARY}-type"}, {}):
        _post(ports["logger"], "/", _question(**parameter), {**bearer, **more})
    client = Tap(str(tap), model="digits")
    x = inputs_of(1)
    for number in range(30):
        client.record({"x": x}, {"logits": logits_of(x)}, headers={"x-secret": f"{CANARY}-tap"})
        if number % 10 == 0:
            client.record({"x": [f"{CANARY}-tap-text"]}, {"logits": logits_of(x)})
        threading.Event().wait(0.1)
    client.close()


async def _send_by_envoy(port: int) -> None:
    """Put canaries into what Envoy says: an exchange that is compared, one that cannot be decoded, and a wrong token."""
    token = SECRETS["QUANTDRIFT_INTAKE_TOKEN"]
    headers = {
        "content-type": "application/json",
        "x-secret": f"{CANARY}-envoy-header",
        "x-user": f"{CANARY}-envoy",
    }
    answered = {"outputs": [_declared("logits", 3) | {"shape": [1, 3], "data": [0.1, 0.2, 0.3]}]}
    question = _question(parameters={"text": f"{CANARY}-envoy-parameter"})
    answer = json.dumps(answered | {"parameters": {"text": f"{CANARY}-envoy-answer"}}).encode()
    path = f"/v2/models/digits/infer?q={CANARY}-envoy-query"
    trailers = {"x-trailer": f"{CANARY}-envoy-trailer"}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for given, asked in (
            (token, question),
            (token, CANARY.encode()),
            (f"{CANARY}-envoy-token", question),
        ):
            call = channel.stream_stream(METHOD)(metadata=(("authorization", f"Bearer {given}"),))
            with contextlib.suppress(
                grpc.aio.AioRpcError, asyncio.InvalidStateError
            ):  # a refused stream ends early
                for message in exchange([asked], [answer], headers, path=path, trailers=trailers):
                    await call.write(message)
                await call.write(f"{CANARY}-envoy-message".encode())
            await call.code()


def _send_wrong_answers(port: int) -> None:
    """Report exchanges that the reference contradicts, of users whose names are canaries, until they must page."""
    wrong = {"outputs": [_declared("logits", 3) | {"shape": [1, 3], "data": [90.0, -90.0, -90.0]}]}
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {SECRETS['QUANTDRIFT_INTAKE_TOKEN']}",
    }
    for number in range(N_WRONG):  # one by one: what has the same time is no evidence
        one = {
            "target": f"/v2/models/digits/infer?q={CANARY}-alert-target",
            "headers": {
                "x-user": f"{CANARY}-alert-user",
                "x-scanner": "faint",
                "traceparent": f"{CANARY}-trace",
            },
            "request": json.loads(
                _question(parameters={"text": f"{CANARY}-alert-parameter", "id": f"{CANARY}-{number}"})
            ),
            "response": wrong | {"parameters": {"text": f"{CANARY}-alert-answer"}},
        }
        assert _post(port, "/v1/exchanges", json.dumps({"exchanges": [one]}).encode(), headers) == 200


async def _forge(data: Path) -> None:
    """Publish what no sidecar would, with the key of a sidecar."""
    stream = at_data(Config(), data, NatsRole.SIDECAR).stream
    queue = await Queue.connect(stream, client_name="test", role=NatsRole.SIDECAR)
    wire = encode(exchange_of(inputs_of(1)))
    forged = [
        f"{CANARY}-message".encode(),
        wire[:2]
        + msgspec.msgpack.encode(msgspec.msgpack.decode(wire[2:]) | {"captured_at": f"{CANARY}-time"}),
        wire[:2]
        + msgspec.msgpack.encode(msgspec.msgpack.decode(wire[2:]) | {"protocol": f"{CANARY}-protocol"}),
        wire[:2] + msgspec.msgpack.encode(msgspec.msgpack.decode(wire[2:]) | {"id": f"{CANARY}-id"}),
    ]
    for number, message in enumerate(forged):
        await queue.publish_exchange("digits", f"forged-{number}", message)
    await queue.publish_tally("pod", "b" * 32, 1, f"{CANARY}-tally".encode())
    await queue.close()


async def _stored(dsn: str) -> dict[str, str]:
    """Return every row of every table as text, by table."""
    connection = await asyncpg.connect(dsn)
    try:
        names = await connection.fetch("select tablename from pg_tables where schemaname = 'public'")
        return {
            name: "\n".join(row[0] for row in await connection.fetch(f'select t::text from "{name}" t'))
            for (name,) in names
        }
    finally:
        await connection.close()


async def _count(dsn: str, query: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval(query))
    finally:
        await connection.close()


def _wait(condition: Callable[[], bool], said: Callable[[], str]) -> None:
    until = time.monotonic() + DEADLINE_S
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < until, said()
        tick.wait(0.2)


def _command(directory: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "quantdrift", *words, "-c", "config.toml", "--data", "data"],
        cwd=directory,
        capture_output=True,
        check=False,
        timeout=120,
    )
    return (done.stdout + done.stderr).decode()


def test_no_canary_leaves_by_any_output(memory_path: Path, otlp_receiver: OtlpReceiver) -> None:
    """No output has anything of what came in, and none has a character that changes a terminal.

    Bodies, headers, paths, tensors, parameters, answers, errors, forged messages and secrets come in by relay, intake, KServe
    sink, Envoy, tap and stream, and an alert reaches the collector. The logs are at `debug`. The quarantine holds payloads
    only as ciphertext.
    """
    saved(linear_model(), memory_path / "linear.onnx")
    keys = subprocess.run(
        [sys.executable, "-m", "quantdrift", "keys", "new", memory_path / "keys.json"],
        check=True,
        capture_output=True,
    )
    ports = {
        name: free_port() for name in ("relay", "intake", "logger", "envoy", "sidecar", "shadow", "monitor")
    }
    with _server() as backend, _server() as reference, contextlib.ExitStack() as stack:
        _REFERENCES.add(reference)
        stack.callback(_REFERENCES.discard, reference)
        (memory_path / "config.toml").write_text(
            CONFIG.format(
                **ports,
                backend=backend,
                reference=reference,
                tap=memory_path / "tap",
                otlp=otlp_receiver.endpoint,
            )
        )
        log = stack.enter_context((memory_path / "log").open("wb"))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("QUANTDRIFT")}
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "quantdrift", "up", "-c", "config.toml", "--data", "data"],
                cwd=memory_path,
                stdout=log,
                stderr=log,
                env=kept | SECRETS | {"TMPDIR": str(memory_path), "QUANTDRIFT__WEB__LISTEN": ""},
            )
        )
        stack.callback(process.terminate)

        def said() -> str:
            return (memory_path / "log").read_bytes().decode(errors="replace")

        _wait(lambda: "quantdrift is up" in said(), said)
        dsn = (memory_path / "data" / "dsn").read_text().strip()
        _send(ports, memory_path / "tap")
        asyncio.run(_send_by_envoy(ports["envoy"]))
        asyncio.run(_forge(memory_path / "data"))
        _send_wrong_answers(ports["intake"])
        wanted = {
            "select count(*) from quarantine where reason = 'decode'": 3,
            "select count(*) from quarantine where reason = 'schema'": 1,
            "select count(*) from quarantine where reason = 'replay'": 1,
            "select count(*) from comparison": 4 + N_WRONG,
            "select count(*) from comparison where origin = 'ext_proc token'": 1,
            "select count(*) from tally": 1,
            "select count(*) from outbox where sent_at is not null": 1,
        }
        for query, n in wanted.items():
            _wait(
                lambda query=query, n=n: asyncio.run(_count(dsn, query)) >= n,  # type: ignore[misc]
                lambda query=query: f"{query}: {said()[-3000:]}",  # type: ignore[misc]
            )
        _wait(lambda: any(event.name == EVENT_NAME for event in otlp_receiver.events), said)
        outputs = asyncio.run(_stored(dsn))
        for name in ("sidecar", "shadow", "monitor"):
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[name]}/metrics", timeout=10) as answer:
                outputs[f"metrics of {name}"] = answer.read().decode()
        outputs["status"] = _command(memory_path, "status")
        outputs["status --json"] = _command(memory_path, "status", "--json")
        outputs["slices"] = _command(memory_path, "slices", "list")
        outputs["report"] = _command(memory_path, "report", "--day", "--out", "report.html")
        assert (memory_path / "report.html").exists(), outputs["report"]
        outputs["page"] = (memory_path / "report.html").read_text()
        process.terminate()
        process.wait(60)
    outputs["keys"] = keys.stdout.decode()
    outputs["log"] = said()
    outputs["OTLP"] = repr((otlp_receiver.events, otlp_receiver.metrics, otlp_receiver.spans))
    for name, text in outputs.items():
        lines = [line for line in text.splitlines() if CANARY in line or CANARY.encode().hex() in line]
        assert not lines, f"{name}: {lines[0][:2000]}"
        assert not set(UNSAFE) & set(text), f"{name} has a character that changes a terminal"
    shown = outputs["slices"]
    assert "scanner=a" in shown, (
        "an attribute that the configuration names is shown, without these characters"
    )
    key_id = json.loads((memory_path / "keys.json").read_text())["keys"][0]["id"]
    assert f"user={key_id}:" in shown, "a hashed value says which key hashed it"
