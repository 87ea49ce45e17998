"""A stream of Envoy's messages becomes one exchange, or a loss with its reason; nothing of it stays behind."""

import asyncio
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quantdrift.cli.main import main
from quantdrift.core.config import Config, SamplingOptions, Secrets
from quantdrift.core.config.schema import Intake
from quantdrift.core.errors import OperatorError
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import RELAYED
from quantdrift.sidecar.intake import ext_proc_pb2 as wire
from quantdrift.sidecar.intake.envoy_stream import STREAM_BYTES, ExchangeStream, StreamLimits
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.state.counters import Count, Gauge
from quantdrift.sidecar.supervisor import serve
from tests.support.sidecar.envoy_messages import (
    ANSWERED,
    ASKED,
    GRPC_PATH,
    exchange,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
)
from tests.support.sidecar.relay_rig import Bench

pytestmark = pytest.mark.unit

GRPC = {"content-type": "application/grpc+proto", "te": "trailers"}


class Told:
    """Streams that share a bench's scope."""

    def __init__(
        self, sampling: SamplingOptions | None = None, limit_bytes: int = 1 << 20, **bounds: Any
    ) -> None:
        self.bench = Bench(sampling, **bounds)
        self.entrance = Gateway(self.bench.scope)
        self.room = StreamLimits(Config(intake=Intake(max_pending_bytes=limit_bytes)), self.entrance)

    def stream(self) -> ExchangeStream:
        """Return a new one."""
        return ExchangeStream(self.entrance, self.room, RELAYED)

    def tell(self, messages: Iterable[bytes]) -> int:
        """Tell an exchange until no more is wanted, and end; return how many messages were taken."""
        stream, n_messages = self.stream(), 0
        for message in messages:
            n_messages += 1
            if not stream.take(message):
                break
        stream.end()
        return n_messages

    @property
    def held_bytes(self) -> int:
        """What the sidecar shows as held."""
        return self.bench.slot.gauge(Gauge.HELD_BYTES)


@pytest.fixture
def told() -> Told:
    """Return an entrance that takes everything."""
    return Told()


def test_an_exchange_is_handed_over_as_http_would_have_it(told: Told) -> None:
    """Pseudo-header fields become the start lines and Host; how bodies travelled is left out."""
    messages = [
        request_headers({"x-scanner": "faint", "transfer-encoding": "chunked"}),
        request_body(ASKED[:10]),
        request_body(b""),
        request_body(ASKED[10:], ends=True),
        response_headers({"content-type": "application/json", "content-length": "9"}, status=201),
        response_body(ANSWERED, ends=True),
    ]
    assert told.tell(messages) == len(messages)
    ((request, response),) = told.bench.pairs
    head, body = request.split(b"\r\n\r\n", 1)
    assert head.split(b"\r\n") == [
        b"POST /v2/models/digits/infer HTTP/1.1",
        b"x-scanner: faint",
        b"host: models",
    ]
    assert body == ASKED
    assert response == b"HTTP/1.1 201 \r\ncontent-type: application/json\r\n\r\n" + ANSWERED
    assert (told.bench.balance(), told.held_bytes) == (0, 0)


def test_grpc_has_its_trailers_in_the_head(told: Told) -> None:
    """As the relay hands HTTP/2 over; the last piece of a body does not say so where trailers follow."""
    told.tell(
        exchange([b"\0\0\0\0\0"], [b"\0\0\0\0\1x"], GRPC, path=GRPC_PATH, trailers={"grpc-status": "0"})
    )
    ((request, response),) = told.bench.pairs
    assert request.startswith(b"POST /inference.GRPCInferenceService/ModelInfer HTTP/2\r\n")
    assert response == b"HTTP/2 200 \r\ngrpc-status: 0\r\n\r\n\0\0\0\0\1x"


def test_a_call_that_fails_at_once_has_a_head_alone(told: Told) -> None:
    """Its status comes with the headers, and they are the last."""
    messages = [
        request_headers(GRPC, path=GRPC_PATH),
        request_body(b"\0\0\0\0\0", ends=True),
        response_headers({"grpc-status": "3"}, ends=True),
    ]
    told.tell(messages)
    ((_, response),) = told.bench.pairs
    assert response == b"HTTP/2 200 \r\ngrpc-status: 3\r\n\r\n"


def test_trailers_end_a_request(told: Told) -> None:
    """No piece of its body said that it was the last; the response may have come before."""
    messages = [
        request_headers(),
        request_body(ASKED),
        response_headers(),
        response_body(ANSWERED, ends=True),
        request_trailers(),
    ]
    assert told.tell(messages) == len(messages)
    assert len(told.bench.taken) == 1


@pytest.mark.parametrize("field", ["value", "raw_value"])
def test_values_are_read_from_either_field(told: Told, field: str) -> None:
    """Older Envoys fill the other one; bytes that are no UTF-8 are Latin-1; a repeated field is joined."""
    headers = [
        wire.HeaderValue(key=name, **{field: value})
        for name, value in (
            (b":method", b"POST"),
            (b":path", b"/v2/models/digits/infer"),
            (b"x-a", b"1"),
            (b"x-a", b"\xe9"),
        )
    ]
    asked = wire.HttpHeaders(headers=wire.HeaderMap(headers=headers), end_of_stream=True)
    first = wire.ProcessingRequest(request_headers=asked, observability_mode=True).SerializeToString()
    told.tell([first, response_headers(ends=True)])
    ((request, _),) = told.bench.pairs
    assert "x-a: 1, é" in request.decode().split("\r\n")


@pytest.mark.parametrize(
    ("first", "gauge"),
    [
        (request_headers(path="/healthz"), 1),
        (request_headers(method="GET"), 1),
        (response_headers(), 0),
        (b"", 0),
        (b"\x12\xff", 0),
    ],
    ids=["path", "method", "answer first", "empty", "unreadable"],
)
def test_a_stream_without_an_inference_is_closed_after_one_message(
    told: Told, first: bytes, gauge: int
) -> None:
    """Nothing is counted but that it was passed over."""
    assert told.tell([first, request_body(ASKED)]) == 1
    slot = told.bench.slot
    assert (slot.gauge(Gauge.IGNORED), slot.count(0, Count.OFFERED), told.held_bytes) == (gauge, 0, 0)


def test_what_is_not_taken_is_closed_after_its_headers() -> None:
    """It was offered, and costs no further message."""
    told = Told(SamplingOptions(rate=0.0))
    assert told.tell(exchange()) == 1
    assert told.bench.slot.count(0, Count.OFFERED) == 1
    assert told.bench.slot.count(0, Count.TAKEN) == 0


@pytest.mark.parametrize(
    "messages",
    [
        [request_headers(), request_headers()],
        [request_headers(), response_body(b"x")],
        [request_headers(), response_trailers({})],
        [request_headers(ends=True), request_body(b"x")],
        [request_headers(), response_headers(), response_headers()],
        [request_headers(), b"\x12\xff"],
    ],
    ids=["asked twice", "no head", "trailers alone", "after the end", "answered twice", "unreadable"],
)
def test_an_order_that_cannot_be_is_lost(told: Told, messages: list[bytes]) -> None:
    """Counted as framing; the stream is closed at once."""
    assert told.tell([*messages, request_body(b"x")]) == len(messages)
    assert told.bench.lost(Loss.FRAMING) == 1
    assert (told.bench.balance(), told.held_bytes) == (0, 0)


def test_a_stream_that_ends_early_is_lost_as_truncated(told: Told) -> None:
    """Wherever it ends; a whole request goes to the capture process, where its body may name the model."""
    messages = exchange()
    for n_messages in range(1, len(messages)):
        told.tell(messages[:n_messages])
        assert told.bench.lost(Loss.TRUNCATED) == n_messages
        assert len(told.bench.lost_requests) == n_messages - 1
    assert all(one.request.endswith(b"\r\n\r\n" + ASKED) for one in told.bench.lost_requests)
    assert (told.bench.taken, told.bench.balance(), told.held_bytes) == ([], 0, 0)


@pytest.mark.parametrize("half", [request_body, response_body])
def test_an_exchange_that_is_too_large_is_dropped_at_once(half: Any) -> None:
    """Nothing more of it is wanted, and nothing of it is held."""
    told = Told(max_exchange_bytes=1000)
    messages = [request_headers(), response_headers(), half(bytes(600)), half(bytes(600)), half(b"x")]
    assert told.tell(messages) == 4
    assert (told.bench.lost(Loss.TOO_LARGE), told.bench.balance(), told.held_bytes) == (1, 0, 0)


def test_all_streams_share_a_bound_with_the_other_ways() -> None:
    """A stream costs something before it holds anything: that bounds how many there are."""
    told = Told(limit_bytes=3 * STREAM_BYTES)
    open_now = [told.stream() for _ in range(3)]
    assert [stream.take(request_headers()) for stream in open_now] == [True, True, False]
    assert 2 * STREAM_BYTES < told.held_bytes < 3 * STREAM_BYTES
    told.entrance.add_held_bytes(3 * STREAM_BYTES)  # what others hold
    assert [stream.take(request_body(b"x")) for stream in open_now] == [False, False, False]
    assert told.bench.lost(Loss.HELD_BYTES) == 3


def test_an_envoy_that_waits_for_answers_is_disconnected_and_logged(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests would wait; it is said once."""
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert told.tell([request_headers(observes=False), request_body(b"x")]) == 1
    assert told.bench.lost(Loss.FRAMING) == 2
    assert [record.message.count("observability_mode") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("messages", "advice"),
    [
        ([request_headers(), response_headers()], "STREAMED"),
        (exchange([b"x"], [b"x", b""], GRPC, path=GRPC_PATH)[:-1], "trailer"),
    ],
    ids=["no bodies", "no trailers"],
)
def test_missing_parts_of_envoys_messages_are_logged(
    told: Told, caplog: pytest.LogCaptureFixture, messages: list[bytes], advice: str
) -> None:
    """The log names the option of its filter."""
    with caplog.at_level(logging.WARNING):
        told.tell(messages)
    assert advice in caplog.text


def test_what_must_be_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sidecar, which does not start, and by the check, which may run elsewhere."""
    monkeypatch.setitem(sys.modules, "grpc", None)  # as where it is not installed
    path = tmp_path / "config.toml"
    path.write_text('[sidecar]\nlisten = ""\n[intake]\next_proc = "127.0.0.1:9002"\n')
    ran = CliRunner().invoke(main, ["config", "check", "--config", str(path)])
    assert ran.exit_code == 0, ran.output
    assert "pip install 'quantdrift[ext-proc]'" in " ".join(ran.output.split())
    config = Config(intake=Intake(ext_proc="127.0.0.1:9002"))
    with pytest.raises(OperatorError, match=r"quantdrift\[ext-proc\]"):
        asyncio.run(serve(config, Secrets(), Stop()))
