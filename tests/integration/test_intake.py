"""The intake process beside a real stream: what is told over HTTP becomes exchanges, counted like any other."""

import asyncio
import base64
import gzip
import io
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from cloudevents.core.bindings.http import to_binary_event
from cloudevents.core.v1.event import CloudEvent

from quantdrift.core.codec import decode_exchange
from quantdrift.core.config.schema import MIB, Stream
from quantdrift.core.records import Exchange, Tensor
from quantdrift.core.stream.connection import Queue
from tests.support.sidecar.raw_exchanges import REQUEST, RESPONSE
from tests.support.sidecar.relay_process import SidecarProcess, free_port, sidecar, wait

pytestmark = pytest.mark.integration

TOKEN = "a-token-of-sixteen"
TARGET = "/v2/models/digits/infer"


class Intake:
    """A sidecar without a relay, and what its stream holds."""

    def __init__(self, running: SidecarProcess, port: int, stream: Stream, *, logger_port: int = 0) -> None:
        self.running = running
        self.url = f"http://127.0.0.1:{port}"
        self.logger_url = f"http://127.0.0.1:{logger_port or port}"
        self._stream = stream
        self._stored: list[Exchange] = []

    def tell(self, body: Any, **headers: str) -> tuple[int, Any]:
        """Send a batch; return status and answer."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", **headers}

        async def post() -> tuple[int, Any]:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{self.url}/v1/exchanges", data=io.BytesIO(raw), headers=sent) as response,
            ):
                return response.status, await response.json()

        return asyncio.run(post())

    def log(
        self, half: str, identifier: str, body: Any, *, by: str = f"/kserve/{TOKEN}", **attributes: Any
    ) -> int:
        """Send an event as the KServe logger does, to the path that it was given; return the answer's status."""
        event = CloudEvent(
            {
                "type": f"org.kubeflow.serving.inference.{half}",
                "source": "http://localhost:9081/",
                "id": identifier,
                "specversion": "1.0",
                "datacontenttype": "application/json",
                "inferenceservicename": "digits",
                "namespace": "prod",
                "component": "predictor",
                **attributes,
            },
            body if isinstance(body, bytes) else json.dumps(body).encode(),
        )
        message = to_binary_event(event)

        async def post() -> int:
            async with (
                aiohttp.ClientSession() as session,
                session.post(
                    self.logger_url + by, data=io.BytesIO(message.body), headers=message.headers
                ) as response,
            ):
                return response.status

        return asyncio.run(post())

    def count(self, name: str, **labels: str) -> float:
        """Return a counter of the sidecar."""
        return self.running.count(f"quantdrift_sidecar_{name}_total", **labels)

    def stored(self) -> list[Exchange]:
        """Return everything that the stream was given so far."""

        async def read() -> list[bytes]:
            queue = await Queue.connect(self._stream, client_name="test")
            consumer = await queue.consumer("exchange", ack_wait_s=30)
            found = await consumer.fetch(100, max_bytes=10**7, timeout_s=0.5)
            await queue.close()
            return [delivery.data for delivery in found]

        self._stored += [decode_exchange(data) for data in asyncio.run(read())]
        return self._stored


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Intake]:
    """Return a running sidecar whose only way in is the intake."""
    stream, port, logger_port = (
        Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}"),
        free_port(),
        free_port(),
    )
    directory: Path = tmp_path_factory.mktemp("intake")
    (directory / "token").write_text(TOKEN)
    with sidecar(
        directory,
        0,
        SIDECAR__LISTEN="",
        SIDECAR__BACKEND="127.0.0.1:1",
        STREAM__URL=nats_url,
        STREAM__NAME=stream.name,
        INTAKE__LISTEN=f"127.0.0.1:{port}",
        INTAKE__TOKEN_FILE=str(directory / "token"),
        INTAKE__KSERVE_LOGGER=f"127.0.0.1:{logger_port}",
        INTAKE__PAIR_WINDOW_S=2,
        CAPTURE__HEADERS='["x-scanner"]',
        SAMPLING__RATE=1.0,
        MODELS='[{"name": "digits"}]',
    ) as running:
        yield Intake(running, port, stream, logger_port=logger_port)


def exchange(**changes: Any) -> dict[str, Any]:
    """Return an exchange as it is told."""
    return {"target": TARGET, "request": REQUEST, "response": RESPONSE, **changes}


def test_a_request_to_the_intake_becomes_an_exchange(intake: Intake) -> None:
    """JSON, binary tensors in base64 and a compressed batch: tensors, attributes and time are as they were told."""
    values = np.arange(4, dtype="<f4")
    tensor = {"name": "x", "shape": [4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    part = json.dumps({"inputs": [tensor]}).encode()
    binary = exchange(
        request_base64=base64.b64encode(part + values.tobytes()).decode(),
        headers={"X-Scanner": "faint", "Inference-Header-Content-Length": str(len(part))},
    )
    del binary["request"]
    before = intake.count("published", stratum="default")
    body = gzip.compress(json.dumps({"exchanges": [exchange(), binary]}).encode())
    assert intake.tell(body, **{"Content-Encoding": "gzip"}) == (200, {"accepted": 2, "rejected": []})
    wait(lambda: intake.count("published", stratum="default") == before + 2, "both are in the stream")
    plain, faint = sorted(intake.stored()[-2:], key=lambda one: len(one.attributes))
    assert plain.inputs == (Tensor(name="x", datatype="FP32", shape=(1, 2), data=b"\0\0\x80?\0\0\0@"),)
    assert plain.outputs[0].name == "y"
    assert faint.inputs[0].data == values.tobytes()
    assert faint.attributes == {"header.x-scanner": "faint"}
    assert (faint.model, faint.version, faint.sampling.pi) == ("digits", "unversioned", 1.0)


def test_one_bad_exchange_costs_the_others_nothing(intake: Intake) -> None:
    """It is named with its place; what cannot be decoded later is counted under its reason, as in the relay's case."""
    both = exchange(request_base64="")
    before = intake.count("published", stratum="default")
    lost = intake.count("lost", stratum="default", reason="decode")
    old = exchange(captured_at="2001-01-01T00:00:00Z")
    told = [both, exchange(), {"target": "x"}, old, exchange(request={"inputs": 1})]
    status, answer = intake.tell({"exchanges": told})
    assert (status, answer["accepted"]) == (200, 2)
    assert [rejected["index"] for rejected in answer["rejected"]] == [0, 2, 3]
    assert "request_base64" in answer["rejected"][0]["error"]
    wait(lambda: intake.count("published", stratum="default") == before + 1, "the good one is in the stream")
    wait(lambda: intake.count("lost", stratum="default", reason="decode") == lost + 1, "the other is counted")


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Authorization": ""}, {"exchanges": []}, 401),
        ({"Authorization": "Bearer wrong"}, {"exchanges": []}, 401),
        ({"Content-Type": "text/plain"}, {"exchanges": []}, 415),
        ({}, b"{", 400),
        ({}, {"exchange": []}, 400),
        ({}, {"exchanges": [{}] * 1001}, 400),
        ({"Content-Encoding": "br"}, {"exchanges": []}, 415),
        ({"Content-Encoding": "gzip"}, b"no gzip", 400),
        ({}, b" " * (2 * MIB + 1), 413),
    ],
    ids=[
        "no token",
        "wrong token",
        "type",
        "no JSON",
        "no batch",
        "too many",
        "coding",
        "no gzip",
        "too long",
    ],
)
def test_what_is_no_batch_is_refused_with_a_reason(
    intake: Intake, headers: dict[str, str], body: Any, status: int
) -> None:
    """The answer is JSON and says what is wrong, and the intake goes on."""
    answered, told = intake.tell(body, **headers)
    assert answered == status
    assert told["error"]
    assert intake.tell({"exchanges": []}) == (200, {"accepted": 0, "rejected": []})


def binary_of(kind: str, values: np.ndarray[Any, Any]) -> bytes:
    """Return a message with a binary tensor."""
    tensor = {
        "name": "x",
        "shape": list(values.shape),
        "datatype": "FP32",
        "parameters": {"binary_data_size": values.nbytes},
    }
    return json.dumps({kind: [tensor]}).encode() + values.tobytes()


def test_the_kserve_logger_is_understood(intake: Intake) -> None:
    """Either order, JSON and binary tensors: the length of the JSON part is not forwarded in either direction."""
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    before = intake.count("published", stratum="default")
    seen = len(intake.stored())
    metadata = json.dumps({"X-Scanner": ["old"]})
    assert intake.log("request", "a", REQUEST) == 200
    assert intake.log("response", "a", RESPONSE) == 200
    assert intake.log("response", "b", binary_of("outputs", values)) == 200
    assert intake.log("request", "b", binary_of("inputs", values), metadata=metadata) == 200
    wait(lambda: intake.count("published", stratum="default") == before + 2, "both are in the stream")
    found = intake.stored()[seen:]
    assert len(found) == 2
    binary = next(one for one in found if one.attributes)
    assert binary.attributes == {"header.x-scanner": "old"}
    assert binary.inputs[0].data == binary.outputs[0].data == values.tobytes()
    assert binary.model == "digits"


def forge(intake: Intake, by: str) -> list[int]:
    """Send both halves of twelve exchanges; return the statuses."""
    return [
        intake.log(half, f"forged-{number}", body, by=by)
        for number in range(12)
        for half, body in (("request", REQUEST), ("response", RESPONSE))
    ]


def test_events_of_whoever_has_no_token_reach_nothing(intake: Intake) -> None:
    """Twelve exchanges are refused and counted; the same twelve arrive with the token in the path."""
    names = ("ignored", "offered", "taken", "published")
    before, seen = {name: intake.count(name) for name in names}, len(intake.stored())
    refused = {why: intake.count("intake_refused", reason=why) for why in ("no_token", "wrong_token")}
    assert forge(intake, "/") == [401] * 24
    assert forge(intake, "/kserve/other") == [404] * 24
    assert {why: intake.count("intake_refused", reason=why) - n for why, n in refused.items()} == {
        "no_token": 24,
        "wrong_token": 24,
    }
    assert {name: intake.count(name) for name in names} == before
    assert len(intake.stored()) == seen
    assert forge(intake, f"/kserve/{TOKEN}") == [200] * 24
    wait(lambda: intake.count("published") == before["published"] + 12, "all are in the stream")
    assert len(intake.stored()) == seen + 12


@pytest.mark.release
def test_an_intake_takes_events_only_where_that_is_configured(tmp_path: Path, nats_url: str) -> None:
    """The port of programs has no sink for loggers: there is nothing to find out about a token there."""
    stream, port = Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}"), free_port()
    with sidecar(
        tmp_path,
        0,
        SIDECAR__LISTEN="",
        STREAM__URL=nats_url,
        STREAM__NAME=stream.name,
        INTAKE__LISTEN=f"127.0.0.1:{port}",
        SAMPLING__RATE=1.0,
        MODELS='[{"name": "digits"}]',
    ) as running:
        intake = Intake(running, port, stream)
        assert forge(intake, "/") == forge(intake, "/kserve/other") == [404] * 24
        assert intake.count("offered") == intake.count("ignored") == 0


def test_what_the_logger_leaves_alone_is_counted(intake: Intake) -> None:
    """A request whose answer was no 200 is lost after the window; an id that comes twice at once is lost at once."""
    before = intake.count("lost", stratum="default", reason="unpaired")
    published = intake.count("published", stratum="default")
    for body in (REQUEST, REQUEST):
        assert intake.log("request", "twice", body) == 200
    wait(lambda: intake.count("lost", stratum="default", reason="unpaired") == before + 2, "both are lost")
    assert intake.log("response", "twice", RESPONSE) == 200
    assert intake.log("request", "alone", REQUEST) == 200
    wait(
        lambda: intake.count("lost", stratum="default", reason="unpaired") == before + 3, "the window passes"
    )
    assert intake.count("published", stratum="default") == published


def test_the_logger_is_answered_whatever_it_sends(intake: Intake) -> None:
    """Its agent keeps what is not answered with 200."""
    ignored = intake.count("ignored")
    assert intake.log("outlier", "a", {}) == 200
    assert intake.log("request", "b", b"no JSON") == 200
    assert intake.log("request", "c", b" " * (17 << 20)) == 200
    assert intake.log("request", "d", REQUEST, inferenceservicename="") == 400
    wait(lambda: intake.count("ignored") == ignored + 4, "each is counted")
