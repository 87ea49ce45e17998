"""Requests and responses that arrive as separate events: paired by id, given up after a time, and never guessed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.sidecar.handoff.frame import RELAYED
from quantdrift.sidecar.intake.gateway import SampledRequest
from quantdrift.sidecar.intake.kserve_logger import EventPair, EventPairs, PendingRequest
from quantdrift.sidecar.sampling.first_phase import Draw

pytestmark = pytest.mark.unit


def asked(body: bytes = b"q") -> PendingRequest:
    """Return a request that was taken."""
    draw = Draw(0, True, 1.0, 0.5, "e", "0" * 32)
    return PendingRequest(sampled=SampledRequest(draw=draw, head=b"", origin=RELAYED), kind="", body=body)


def test_a_pair_is_joined_in_either_order() -> None:
    """Nothing is held afterwards."""
    pairs = EventPairs(30, 10**6)
    assert pairs.add_request("a", asked(), 0) == (None, [])
    assert pairs.add_response("a", b"r", 1) == (EventPair(request=asked(), response=b"r"), [])
    assert pairs.add_response("b", b"r", 2) == (None, [])
    assert pairs.add_request("b", asked(), 3) == (EventPair(request=asked(), response=b"r"), [])
    assert pairs.held_bytes == 0


def test_the_response_to_an_unsampled_request_is_dropped() -> None:
    """In either order, and without a trace."""
    pairs = EventPairs(30, 10**6)
    assert pairs.add_request("a", None, 0) == (None, [])
    assert pairs.add_response("a", b"r", 0) == (None, [])
    assert pairs.add_response("b", b"r", 0) == (None, [])
    assert pairs.add_request("b", None, 0) == (None, [])
    assert pairs.held_bytes == 0


def test_an_id_that_comes_again_after_its_pair_is_another_exchange() -> None:
    """A client may number its requests anew."""
    pairs = EventPairs(30, 10**6)
    for body in (b"1", b"2"):
        pairs.add_request("a", asked(body), 0)
        assert pairs.add_response("a", b"r" + body, 0) == (
            EventPair(request=asked(body), response=b"r" + body),
            [],
        )


@pytest.mark.parametrize("first_is_taken", [True, False])
def test_an_id_that_comes_twice_at_once_is_never_guessed(*, first_is_taken: bool) -> None:
    """Both requests are let go of, and both responses pass by."""
    pairs = EventPairs(30, 10**6)
    first = asked(b"1") if first_is_taken else None
    pairs.add_request("a", first, 0)
    wanted = [asked(b"1")] if first_is_taken else []
    assert pairs.add_request("a", asked(b"2"), 1) == (None, [*wanted, asked(b"2")])
    assert pairs.add_response("a", b"r", 2) == (None, [])
    assert pairs.add_response("a", b"r", 3) == (None, [])
    assert pairs.add_request("a", asked(b"3"), 4) == (None, [asked(b"3")])
    assert list(pairs.expire(40)) == []
    assert pairs.held_bytes == 0
    assert pairs.add_request("a", asked(), 50) == (None, [])


def test_two_responses_before_their_request_are_never_guessed() -> None:
    """The request that comes is let go of."""
    pairs = EventPairs(30, 10**6)
    pairs.add_response("a", b"1", 0)
    pairs.add_response("a", b"2", 0)
    assert pairs.add_request("a", asked(), 0) == (None, [asked()])


def test_a_request_without_a_response_is_dropped_after_the_window() -> None:
    """The request is told, the response is not: it may have been one that nobody took."""
    pairs = EventPairs(30, 10**6)
    pairs.add_request("a", asked(b"1"), 0)
    pairs.add_response("b", b"r", 10)
    pairs.add_request("c", asked(b"2"), 29)
    assert list(pairs.expire(29.9)) == []
    assert list(pairs.expire(30)) == [asked(b"1")]
    assert list(pairs.expire(59)) == [asked(b"2")]
    assert pairs.held_bytes == 0


def test_above_the_bound_the_oldest_gives_way() -> None:
    """Entries themselves count: a flood of empty events is bounded, too."""
    pairs = EventPairs(30, 10_000)
    for n in range(100):
        pairs.add_request(n, asked(b"x" * 100), 0)
        for _ in pairs.expire(0):
            pass
        assert pairs.held_bytes <= 10_000
    assert pairs.add_response(0, b"r", 0) == (None, [])
    assert pairs.add_response(99, b"r", 0)[0] is not None


@given(st.permutations([(half, n) for half in "qr" for n in range(6)]))
def test_every_pair_comes_out_once_whatever_the_order(events: list[tuple[str, int]]) -> None:
    """Halves of six exchanges in any order."""
    pairs = EventPairs(30, 10**6)
    found = []
    for half, n in events:
        body = b"%d" % n
        pair, lost = pairs.add_request(n, asked(body), 0) if half == "q" else pairs.add_response(n, body, 0)
        assert not lost
        if pair is not None:
            found.append((pair.request.body, pair.response))
    assert sorted(found) == [(b"%d" % n, b"%d" % n) for n in range(6)]
    assert pairs.held_bytes == 0


def test_a_long_key_counts() -> None:
    """A client chooses its id: what was not taken must not be held at the price of nothing."""
    pairs = EventPairs(30, 100_000)
    for n in range(100):
        pairs.add_request(("ns", "service", f"{n:050000}"), None, 0)
        assert list(pairs.expire(0)) == []
    assert len(pairs._entries) == 1
    assert list(pairs.expire(30)) == []
    assert pairs.held_bytes == 0
