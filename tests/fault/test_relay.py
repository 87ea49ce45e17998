"""An observer that fails, wherever it fails: the bytes flow, and what it costs is counted."""

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from typing import Any

import pytest

from quantdrift.core.records import Loss
from quantdrift.sidecar.relay.http1 import observer as observing
from quantdrift.sidecar.relay.http1.framing import MessageFramer
from quantdrift.sidecar.relay.http1.observer import Http1Observer
from quantdrift.sidecar.relay.observing import observer
from quantdrift.sidecar.relay.observing.head_cache import CachedHead
from quantdrift.sidecar.relay.observing.observer import CaptureScope
from quantdrift.sidecar.sampling.first_phase import Sampler
from quantdrift.sidecar.state.counters import Count, Gauge
from tests.support.sidecar.planted_faults import failing
from tests.support.sidecar.relay_rig import Bench, answer, end, on_both_loops, post, rig

pytestmark = pytest.mark.fault

REQUESTS = [post(b"one"), post(b"two" * 250_000), post(b"three")]
RESPONSES = [answer(b"1" * 700_000), answer(b"2"), b"HTTP/1.1 200 OK\r\n\r\nuntil the end"]

# Everything that is called back while a connection is observed.
POINTS: list[tuple[Any, str]] = [
    (Http1Observer, "__init__"),
    (Http1Observer, "request"),
    (Http1Observer, "response"),
    (Http1Observer, "response_eof"),
    (Http1Observer, "close"),
    (Http1Observer, "_request_head"),
    (Http1Observer, "_request_piece"),
    (Http1Observer, "_request_end"),
    (Http1Observer, "_response_head"),
    (Http1Observer, "_response_piece"),
    (Http1Observer, "_response_end"),
    (Http1Observer, "_start_capture"),
    (Http1Observer, "_keep"),
    (Http1Observer, "_release"),
    (Http1Observer, "_hand_over"),
    (MessageFramer, "__init__"),
    (MessageFramer, "feed"),
    (MessageFramer, "eof"),
    (MessageFramer, "_head"),
    (MessageFramer, "_take_whole_message"),
    (MessageFramer, "_end"),
    (CachedHead, "find"),
    (Sampler, "take"),
    (CaptureScope, "sampling_key"),
    (CaptureScope, "add_held_bytes"),
    (observing, "parse_request"),
    (observing, "parse_response"),
    (observer, "frame"),
]


async def serve(reader: StreamReader, writer: StreamWriter) -> None:
    """Answer three requests, the last until the end."""
    for request, response in zip(REQUESTS, RESPONSES, strict=True):
        assert await reader.readexactly(len(request)) == request
        writer.write(response)
        await writer.drain()


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(("owner", "name"), POINTS, ids=[f"{o.__name__}.{n}" for o, n in POINTS])
@on_both_loops
async def test_bytes_flow_wherever_the_observer_raises(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int
) -> None:
    """At its first call or later: both sides get every byte, and the error is counted."""
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), nth, RuntimeError))
    bench = Bench()
    async with rig(bench, serve) as at:
        assert await at.talk(*REQUESTS) == b"".join(RESPONSES)
        monkeypatch.undo()
        await at.quiet()
        n_errors = bench.slot.gauge(Gauge.OBSERVER_ERRORS)
        # A connection has one observer and one close: the second call is the next connection's.
        assert n_errors >= 1 or (nth == 2 and name in {"__init__", "close", "eof", "response_eof"})
        bench.slot.set(Gauge.HELD_BYTES, 0)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Http1Observer, "_response_piece"),
        (Http1Observer, "_hand_over"),
        (Sampler, "take"),
        (observer, "frame"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@on_both_loops
async def test_the_buffer_of_a_failing_observer_is_lost_and_counted(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """Every exchange that was taken is handed over or counted under `observer_error`; memory is given back."""
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), 2, RuntimeError))
    bench = Bench()
    async with rig(bench, serve) as at:
        assert await at.talk(*REQUESTS) == b"".join(RESPONSES)
        await at.quiet()
    assert bench.balance() == 0
    n_lost = bench.lost(Loss.OBSERVER_ERROR) + bench.lost(Loss.UNOBSERVED)
    assert n_lost + len(bench.taken) == bench.slot.count(0, Count.TAKEN) > 0
    assert bench.scope.held_bytes == 0
    assert bench.slot.gauge(Gauge.OBSERVER_ERRORS) == 1
    assert bench.slot.gauge(Gauge.BLIND) == 1


@on_both_loops
async def test_a_hand_off_that_raises_costs_its_exchange_alone_and_the_connection() -> None:
    """The next connection is observed again."""
    bench = Bench()
    take = bench.scope.send_frame
    bench.scope.send_frame = failing(take, 1, ValueError)
    async with rig(bench, serve) as at:
        assert await at.talk(*REQUESTS) == b"".join(RESPONSES)
        await at.quiet()
        bench.scope.send_frame = take
        assert await at.talk(*REQUESTS) == b"".join(RESPONSES)
        await at.quiet()
    assert bench.pairs == list(zip(REQUESTS, RESPONSES, strict=True))
    assert bench.balance() == 0


@on_both_loops
async def test_draining_survives_an_observer_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot say whether a connection is idle, the connection stays until it is cut."""

    def fail(_: Http1Observer) -> bool:
        raise RuntimeError("planted")

    monkeypatch.setattr(Http1Observer, "is_idle", property(fail))
    bench = Bench()
    async with rig(bench, serve) as at:
        reader, writer = await at.client()
        writer.write(REQUESTS[0])
        assert await reader.readexactly(len(RESPONSES[0])) == RESPONSES[0]
        draining = asyncio.create_task(at.relay.drain())
        writer.write(REQUESTS[1])
        assert await reader.readexactly(len(RESPONSES[1])) == RESPONSES[1]
        assert not draining.done()
        at.relay.abort()
        await draining
        with contextlib.suppress(ConnectionError):
            await reader.read()
        await end(writer)
    assert bench.slot.gauge(Gauge.OBSERVER_ERRORS) == 1
