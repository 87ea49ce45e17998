"""What a process says, and how often."""

import importlib.machinery
import json
import logging
import os
import sys
import types
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.logs import EXPORT_WINDOW_S, MOST, WINDOW_S, Sparse, of_model, setup_logs
from quantdrift.core.records import Loss
from quantdrift.sidecar.capture.publisher import LossWarnings

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


def test_the_same_warning_is_said_once_a_minute_and_counted(
    log: tuple[logging.Logger, list[str]], clock: ManualClock
) -> None:
    """The important line stays in sight: what differs in numbers alone is the same, and is told with its count a minute later."""
    logger, said = log
    flood(logger, 1000)
    logger.error("something else")
    assert said == ["exchange 0 says nothing", "something else"]
    clock.advance(WINDOW_S)
    flood(logger, 2)
    assert said[2:] == ["exchange 0 says nothing (999 more like this one were left out before it)"]
    clock.advance(WINDOW_S)
    flood(logger, 1)
    assert said[3:] == ["exchange 0 says nothing (1 more like this one were left out before it)"]


def test_a_relapse_is_news(log: tuple[logging.Logger, list[str]]) -> None:
    """After the same module has said that a part works again, its next failure is said at once."""
    logger, said = log
    for _ in range(2):
        flood(logger, 3)
        logger.info("it works again")
    assert said == 2 * ["exchange 0 says nothing", "it works again"]


def test_a_flood_of_different_warnings_of_one_line_is_thinned_and_counted(
    log: tuple[logging.Logger, list[str]], clock: ManualClock
) -> None:
    """Names of clients may be many: the last of a minute says that others are left out, the next minute how many."""
    logger, said = log

    def name(n: int) -> None:
        for number in range(n):
            logger.warning("saw model %s", chr(0x4E00 + number))

    name(1000)
    logger.error("something else")
    assert len(said) == MOST + 1
    assert said[MOST - 1].endswith("(others of its kind are left out for 60 s)")
    assert said[MOST] == "something else"
    clock.advance(WINDOW_S)
    name(1)
    assert said[MOST + 1 :] == [f"saw model 一 ({1000 - MOST} others of its kind were left out before it)"]


def test_what_is_no_warning_is_not_thinned(log: tuple[logging.Logger, list[str]]) -> None:
    """Each alert of a large fleet is a line of its own."""
    logger, said = log
    flood(logger, 1000, logging.INFO)
    assert len(said) == 1000


def test_what_comes_now_and_then_is_said_each_time(
    log: tuple[logging.Logger, list[str]], clock: ManualClock
) -> None:
    """Once a minute is no flood, however long it goes on; different warnings do not hide each other."""
    logger, said = log
    for _ in range(100):
        flood(logger, 1)
        logger.warning("another one")
        clock.advance(WINDOW_S)
    assert len(said) == 200
    assert not any("left out" in line for line in said)


def test_a_json_line_names_its_process_and_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A collector of logs finds time, level, role, process id and model in fields of their own, the model only if there is one."""
    before = list(logging.getLogger().handlers)
    try:
        setup_logs("info", as_json=True, role="capture")
        logging.getLogger("quantdrift.test").warning(
            "model %s: lost %d", "digits", 3, extra=of_model("digits")
        )
        logging.getLogger("quantdrift.test").info("ready")
    finally:
        logging.basicConfig(handlers=before, force=True)
    about_model, plain = map(json.loads, capsys.readouterr().err.splitlines())
    assert datetime.fromisoformat(about_model.pop("time")).tzinfo is not None
    assert about_model == {
        "level": "warning",
        "role": "capture",
        "pid": os.getpid(),
        "logger": "quantdrift.test",
        "message": "model digits: lost 3",
        "model": "digits",
    }
    assert (plain["role"], plain["message"], "model" in plain) == ("capture", "ready", False)


def test_lost_exchanges_are_logged_once_a_minute_for_each_model_and_reason(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The first is logged at once, the others with their number; limits that somebody has set are not losses to warn of."""
    warnings = LossWarnings(clock)
    for _ in range(500):
        warnings.count("digits", Loss.PUBLISH)
    warnings.count("digits", Loss.STREAM_FULL)
    warnings.count("words", Loss.PUBLISH)
    warnings.count("words", Loss.RATE_CAP)
    warnings.log_rest()
    assert [record.args[:3] for record in caplog.records if isinstance(record.args, tuple)] == [
        ("digits", 1, "publish"),
        ("digits", 1, "stream_full"),
        ("words", 1, "publish"),
    ]
    assert "raise stream.max_bytes" in caplog.messages[1]
    clock.advance(60)
    caplog.clear()
    warnings.log_rest()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("model digits: lost 499 captured exchanges (publish): NATS did not")
    assert caplog.records[0].levelno == logging.WARNING
    clock.advance(3600)
    warnings.log_rest()
    assert len(caplog.messages) == 1


def test_lost_exchanges_of_many_invented_models_share_their_lines(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that invents names of models neither fills the memory nor the log."""
    warnings = LossWarnings(clock)
    for number in range(2000):
        warnings.count(f"invented {number}", Loss.PUBLISH)
    assert len(caplog.messages) <= 257


def test_an_exporter_whose_collector_refuses_says_so_once_an_hour(clock: ManualClock) -> None:
    """The library logs each export; a metric counts them."""
    logger, lines = logging.getLogger("opentelemetry.a.test"), Lines(clock)
    logger.propagate = False
    logger.addHandler(lines)
    try:
        for _ in range(3):
            logger.error("Failed to export traces, error code: UNIMPLEMENTED")
            clock.advance(EXPORT_WINDOW_S / 2)
    finally:
        logger.removeHandler(lines)
    assert [line.partition(" (")[2] for line in lines.said] == [
        "",
        "1 more like this one were left out before it)",
    ]


def test_a_module_that_is_run_logs_under_its_own_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m` calls it `__main__`, which is the name of every process."""
    main = types.ModuleType("__main__")
    main.__spec__ = importlib.machinery.ModuleSpec("quantdrift.sidecar.capture.process", None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    before = list(logging.getLogger().handlers)
    try:
        setup_logs("info", as_json=True, role="capture")
        logging.getLogger("__main__").info("capturing")
    finally:
        logging.basicConfig(handlers=before, force=True)
    assert json.loads(capsys.readouterr().err)["logger"] == "quantdrift.sidecar.capture.process"
