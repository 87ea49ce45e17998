"""The cache of parsed request and response heads."""

import pytest

from quantdrift.sidecar.relay.observing.head_cache import CachedHead, FieldCache, HeadCache
from quantdrift.sidecar.relay.observing.heads import RequestHead, parse_request

pytestmark = pytest.mark.unit


def head(*fields: bytes) -> bytes:
    """Return a request head."""
    return b"\r\n".join((b"POST /x HTTP/1.1", b"Host: h", *fields)) + b"\r\n\r\n"


def read(data: bytes, lines: FieldCache, habit: CachedHead[RequestHead]) -> RequestHead:
    """Read a head that is all of `data`."""
    return parse_request(data, 0, len(data), lines, habit)


def test_a_client_s_usual_head_is_known_whatever_its_trace() -> None:
    """Of a head that differs in one value alone nothing is parsed any more: it is the very same record."""
    lines, habit = FieldCache(), CachedHead[RequestHead](HeadCache())
    first = [head(b"traceparent: %d" % i, b"Content-Length: 7") for i in range(5)]
    read(first[0], lines, habit)
    known = read(first[1], lines, habit)
    assert all(habit.find(data, 0, len(data)) is known for data in first)
    other = head(b"traceparent: 1", b"Content-Length: 8")
    assert habit.find(other, 0, len(other)) is None


def test_connections_with_the_same_habit_share_it() -> None:
    """Ten thousand clients of one kind need its text once."""
    lines, habits = FieldCache(), HeadCache[RequestHead]()
    known = []
    for _ in range(3):
        habit = CachedHead(habits)
        for i in range(2):
            read(head(b"traceparent: %d" % i), lines, habit)
        data = head(b"traceparent: 9")
        known.append(habit.find(data, 0, len(data)))
    assert known[1] is known[2] is not None


@pytest.mark.slow
def test_memory_is_bounded_whatever_clients_send() -> None:
    """Names, values, lengths and start lines that never come twice are forgotten again."""
    lines, habits = FieldCache([b"x-scanner"]), HeadCache[RequestHead]()
    for i in range(5_000):
        fields = (b"n%d: v" % i, b"trace: %d" % i, b"x-scanner: %d" % i, b"Content-Length: %d" % i)
        read(head(*fields), lines, CachedHead(habits))
        read(head(b"x: %d" % i, b"y%d: " % i + b"z" * 100_000), lines, CachedHead(habits))
    assert len(lines.plain) + len(lines.meanings) + len(habits._known) <= 3 * 1024
    assert max(map(len, lines.plain)) <= 256


@pytest.mark.parametrize("name", [b"Authorization", b"cookie", b"X-Api-Key", b"Proxy-Authorization"])
def test_credentials_are_not_kept(name: bytes) -> None:
    """Neither as a line, nor within a habit."""
    lines, habits = FieldCache([name.lower()]), HeadCache[RequestHead]()
    for wanted in (FieldCache(), lines):
        habit = CachedHead(habits)
        for _ in range(3):
            read(head(name + b": secret", b"Content-Length: 7"), wanted, habit)
        assert not any(b"secret" in line for line in (*wanted.plain, *wanted.meanings))
    assert not any(b"secret" in text for habit in habits._known for text in habit)
