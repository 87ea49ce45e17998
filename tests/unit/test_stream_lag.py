"""The age of what waits in the stream, where NATS keeps messages that are done."""

import pytest

from quantdrift.core.stream.backlog import Backlog
from quantdrift.core.stream.lag import age, grown

pytestmark = pytest.mark.unit


def _ages(*backlogs: Backlog) -> list[float]:
    """Return the age at each look, one look every 15 seconds."""
    looks: list[tuple[float, int]] = []
    ages = []
    for number, backlog in enumerate(backlogs):
        looks = grown(looks, backlog, 15.0 * number)
        ages.append(age(looks, backlog, 15.0 * number))
    return ages


def _backlog(n_ever: int, n_done: int, oldest_s: float) -> Backlog:
    return Backlog(n_messages=n_ever - n_done, n_bytes=1, n_ever=n_ever, oldest_s=oldest_s, n_done=n_done)


def test_what_is_done_does_not_make_the_backlog_old() -> None:
    """27 messages that NATS keeps are half an hour old; what waits came after the last look."""
    assert _ages(
        _backlog(27, 27, 0.0), _backlog(30, 28, 1_815.0), _backlog(60, 55, 1_830.0), _backlog(60, 60, 0.0)
    ) == [0.0, 15.0, 15.0, 0.0]


def test_what_waits_grows_old() -> None:
    """The same message waits at each look; what waited at the first look may be as old as the server says."""
    assert _ages(*(_backlog(10, 0, 100.0 + 15.0 * look) for look in range(3))) == [100.0, 115.0, 130.0]
    waits = [_backlog(5, 5, 0.0), *(_backlog(9 + look, 5, 900.0) for look in range(4))]
    assert _ages(*waits) == [0.0, 15.0, 30.0, 45.0, 60.0]


def test_a_new_stream_begins_anew() -> None:
    """Its numbers begin at one, so earlier looks say nothing of it."""
    assert _ages(_backlog(1_000, 1_000, 0.0), _backlog(3, 0, 5.0)) == [0.0, 5.0]
