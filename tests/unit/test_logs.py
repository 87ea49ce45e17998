"""What a process says, and how often."""

import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.logs import MOST, WINDOW_S, Sparse

pytestmark = pytest.mark.unit


class Lines(logging.Handler):
    """Keeps what it is given."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.said: list[str] = []
        self.addFilter(Sparse(clock))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's text."""
        self.said.append(record.getMessage())


@pytest.fixture
def clock() -> ManualClock:
    """Return a clock that stands."""
    return ManualClock(datetime(2026, 3, 1, tzinfo=UTC))


@pytest.fixture
def log(clock: ManualClock) -> Iterator[tuple[logging.Logger, list[str]]]:
    """Return a logger with what it has said."""
    logger, lines = logging.getLogger("a log of its own"), Lines(clock)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    yield logger, lines.said
    logger.removeHandler(lines)


def flood(logger: logging.Logger, n: int, level: int = logging.WARNING) -> None:
    """Say the same of `n` exchanges."""
    for number in range(n):
        logger.log(level, "exchange %d says nothing", number)


def test_a_flood_of_the_same_warning_is_thinned_and_counted(
    log: tuple[logging.Logger, list[str]], clock: ManualClock
) -> None:
    """The first ones tell what is wrong, the last that more are left out, and the next minute how many."""
    logger, said = log
    flood(logger, 1000)
    logger.error("something else")
    assert len(said) == MOST + 1
    assert said[0] == "exchange 0 says nothing"
    assert said[MOST - 1].endswith("says nothing (more like this one are left out for 60 s)")
    assert said[MOST] == "something else"
    clock.advance(WINDOW_S)
    flood(logger, 2)
    left_out = 1000 - MOST
    assert said[MOST + 1 :] == [
        f"exchange 0 says nothing ({left_out} more like this one were left out before it)",
        "exchange 1 says nothing",
    ]


def test_what_is_no_warning_is_not_thinned(log: tuple[logging.Logger, list[str]]) -> None:
    """Each alert of a large fleet is a line of its own."""
    logger, said = log
    flood(logger, 1000, logging.INFO)
    assert len(said) == 1000


def test_a_few_warnings_in_a_minute_are_all_said(
    log: tuple[logging.Logger, list[str]], clock: ManualClock
) -> None:
    """Now and then is no flood, however long it goes on."""
    logger, said = log
    for _ in range(100):
        flood(logger, 5)
        clock.advance(WINDOW_S / 3)
    assert len(said) == 500
    assert not any("left out" in line for line in said)
