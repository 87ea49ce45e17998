"""Whatever Envoy sends, and however it cuts it up: the same exchange, or a counted loss, and nothing is held on to."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.config import Config
from quantdrift.sidecar.handoff.frame import RELAYED
from quantdrift.sidecar.intake.envoy_stream import ExchangeStream, StreamLimits
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.state.counters import Gauge
from tests.support.sidecar.envoy_messages import (
    exchange,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
)
from tests.support.sidecar.relay_rig import Bench

pytestmark = pytest.mark.property

BODY = st.binary(max_size=200)
PIECES = st.lists(BODY, min_size=1, max_size=6)
MESSAGE = st.one_of(
    st.binary(max_size=30),
    st.builds(lambda ends: request_headers(ends=ends), st.booleans()),
    st.builds(lambda ends: response_headers(ends=ends), st.booleans()),
    st.builds(lambda body, ends: request_body(body, ends=ends), BODY, st.booleans()),
    st.builds(lambda body, ends: response_body(body, ends=ends), BODY, st.booleans()),
    st.just(request_trailers()),
    st.just(response_trailers({"grpc-status": "0"})),
)


def tell(bench: Bench, messages: list[bytes]) -> None:
    """Tell a stream's messages until no more is wanted, and end it; nothing of it is held any more."""
    entrance = Gateway(bench.scope)
    stream = ExchangeStream(entrance, StreamLimits(Config(), entrance), RELAYED)
    for message in messages:
        if not stream.take(message):
            break
    stream.end()
    assert bench.slot.gauge(Gauge.HELD_BYTES) == 0
    assert bench.balance() == 0


@given(PIECES, PIECES, st.sampled_from([None, {"x-end": "1"}]), st.integers(0, 2**32))
def test_pieces_and_their_order_change_nothing(
    asked: list[bytes], answered: list[bytes], trailers: dict[str, str] | None, seed: int
) -> None:
    """A server may answer while it is still asked: the two directions mix in any way."""
    whole = exchange(asked, answered, trailers=trailers)
    n_asked = 1 + len(asked)
    first, request, response = whole[0], whole[1:n_asked], whole[n_asked:]
    mixed, draw = [first], random.Random(seed)
    while request or response:
        side = draw.choice([side for side in (request, response) if side])
        mixed.append(side.pop(0))
    bench = Bench()
    tell(bench, mixed)
    ((got_request, got_response),) = bench.pairs
    assert got_request.split(b"\r\n\r\n", 1)[1] == b"".join(asked)
    assert got_response.split(b"\r\n\r\n", 1)[1] == b"".join(answered)


@given(st.lists(MESSAGE, max_size=12))
def test_no_sequence_of_messages_raises_or_leaks_memory(messages: list[bytes]) -> None:
    """What was taken is handed over or lost, exactly once."""
    tell(Bench(), [request_headers(), *messages])
    tell(Bench(), messages)
