"""Warnings of a sidecar whose clients see only closed connections, or whose traffic has no predictions."""

import errno
import logging
import socket
from datetime import UTC, datetime

import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.config import Capture, Config, Model
from quantdrift.core.records import Loss, ModelCount, Protocol
from quantdrift.sidecar.capture.pipeline import MAX_NAMES, UnknownModels
from quantdrift.sidecar.capture.process import Tallies
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Count, Counters, Gauge, Row
from quantdrift.sidecar.state.routes import known_requests
from quantdrift.sidecar.state.traffic_warnings import (
    MIN_COUNT,
    WARNING_INTERVAL_S,
    TrafficWarnings,
    connect_errno,
)

pytestmark = pytest.mark.unit

NOON = datetime(2027, 1, 1, 12, tzinfo=UTC)


class World:
    """Counts of two relay workers, what is said of them, and a clock that stands."""

    def __init__(self, caplog: pytest.LogCaptureFixture, config: Config | None = None) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.clock = ManualClock(NOON)
        settled = LiveConfig.of(config or Config())
        self.counters = Counters.create(3, len(settled.rows))
        self.relays = [self.counters.slot(0), self.counters.slot(1)]
        self.symptoms = TrafficWarnings(self.counters, lambda: settled, self.clock)

    def look(self, *, after_s: float = 1.0) -> list[str]:
        """Let time pass, and return what is said then."""
        self.clock.advance(after_s)
        self._caplog.clear()
        self.symptoms.poll()
        return [record.getMessage() for record in self._caplog.records]

    def fail(self, n: int, worker: int = 0, why: int = errno.ECONNREFUSED) -> None:
        """Count connections that the backend did not accept."""
        self.relays[worker].adjust(Gauge.BACKEND_FAILED, n)
        self.relays[worker].set(Gauge.BACKEND_ERROR, why)

    def reach(self) -> None:
        """Count one that it did accept."""
        self.relays[1].adjust(Gauge.BACKEND_REACHED)


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> World:
    """Return a sidecar in which nothing has happened yet."""
    return World(caplog)


def test_an_unreachable_backend_is_logged_at_once_then_once_a_minute_and_when_it_is_back(
    world: World,
) -> None:
    """One line for all workers and all clients: which backend, which option, how many, since when, and why."""
    assert world.look() == []
    world.fail(2)
    world.fail(1, worker=1)
    assert world.look() == [
        (
            "the backend 127.0.0.1:8001 (sidecar.backend) did not accept 3 connections since 12:00:02 UTC: Connection "
            "refused. Their clients were disconnected without an answer. Start the server there, or correct the option"
        )
    ]
    world.fail(800)
    assert world.look() == []
    world.fail(9)
    (line,) = world.look(after_s=WARNING_INTERVAL_S)
    assert "did not accept 809 connections since 12:00:03 UTC" in line
    assert world.look(after_s=10 * WARNING_INTERVAL_S) == []
    world.reach()
    (line,) = world.look()
    assert line == "the backend 127.0.0.1:8001 (sidecar.backend) accepts connections again, after 662 s"
    world.reach()
    assert world.look(after_s=WARNING_INTERVAL_S) == []


def test_a_backend_that_comes_and_goes_makes_two_lines_a_minute(world: World) -> None:
    """Whatever it does, and none of its failures is left out."""
    lines = []
    for _ in range(10):
        world.fail(1)
        lines += world.look()
        world.reach()
        lines += world.look()
    assert len(lines) == 2
    (line,) = world.look(after_s=WARNING_INTERVAL_S)
    assert "did not accept 9 connections since 12:00:03 UTC" in line


def test_a_backend_that_accepts_some_connections_is_not_logged_as_back(world: World) -> None:
    """Its queue may be full."""
    for _ in range(5):
        world.fail(1)
        world.reach()
        assert not any("again" in line for line in world.look())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "Connection refused"),
        (TimeoutError(), "Connection timed out"),
        (OSError(errno.EHOSTUNREACH, "no route"), "No route to host"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "its name cannot be resolved"),
        (OSError("Multiple exceptions: [Errno 111] a, [Errno 111] b"), "Connection refused"),
        (OSError("unheard of"), "it cannot be connected to"),
    ],
)
def test_the_line_says_why_the_backend_was_not_reached(world: World, error: OSError, words: str) -> None:
    """Each cause asks for something else."""
    world.fail(1, why=connect_errno(error))
    (line,) = world.look()
    assert f"UTC: {words}. Their clients" in line


def test_traffic_without_a_prediction_is_logged_with_the_known_request_paths(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Again at ten times as many, and no more once one was seen. Few requests may be anything."""
    world = World(caplog, Config(capture=Capture(protocols=(Protocol.OIP_REST, Protocol.TORCHSERVE))))
    for relay in world.relays:
        relay.adjust(Gauge.UNKNOWN_POSTS, MIN_COUNT // 2 - 1)
    assert world.look() == []
    world.relays[0].adjust(Gauge.UNKNOWN_POSTS, 2)
    assert world.look() == [
        (
            "nothing is sampled: 10 POST requests have passed, and none is a prediction in a protocol of "
            "capture.protocols, which covers /v2/models/NAME/infer, /predictions/NAME. Compare with the paths that your "
            "clients request"
        )
    ]
    world.relays[0].adjust(Gauge.UNKNOWN_POSTS, 50)
    assert world.look() == []
    world.relays[0].adjust(Gauge.UNKNOWN_POSTS, 50)
    assert len(world.look()) == 1
    world.relays[1].add(0, Count.OFFERED)
    world.relays[0].adjust(Gauge.UNKNOWN_POSTS, 10_000)
    assert world.look() == []
    world.relays[0].adjust(Gauge.UNKNOWN_POSTS, 100_000)
    assert world.look() == []


def test_connections_that_cannot_be_parsed_are_logged(world: World) -> None:
    """Behind TLS a sidecar sees no predictions, and said nothing of it."""
    world.relays[0].adjust(Gauge.BLIND, MIN_COUNT)
    (line,) = world.look()
    assert "the relay cannot read 10 connections, which use TLS or are not HTTP" in line
    assert world.look() == []


def test_every_protocol_has_a_request_that_people_know() -> None:
    """None is left out of the hint."""
    assert len(set(known_requests(Protocol))) == len(Protocol)


class Told:
    """What is said of unknown models while the configuration knows `wines` and `digits`."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self.clock = ManualClock(NOON)
        self.strangers = UnknownModels(self.clock)
        self._models = (Model(name="wines"), Model(name="digits"))

    def tell(self, *, after_s: float = 1.0) -> list[str]:
        """Let time pass, and return what is said then."""
        self.clock.advance(after_s)
        self._caplog.clear()
        self.strangers.log([model.name for model in self._models])
        return [record.getMessage() for record in self._caplog.records]


def test_a_misspelt_model_is_logged_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    """At once, then all of a minute in one line."""
    told = Told(caplog)
    assert told.tell() == []
    told.strangers.count("wine", "all")
    assert told.tell() == [
        (
            "no such model is configured: saw model `wine` 1 time (did you mean `wines`?) in the sampled requests of the "
            "last 1 s, and compared none of them. Configured: wines, digits. Correct models.name, or add a [[models]]"
        )
    ]
    for _ in range(801):
        told.strangers.count("Wines", "all")
    told.strangers.count("resnet", "all")
    assert told.tell() == []
    (line,) = told.tell(after_s=60)
    assert "saw model `Wines` 801 times (did you mean `wines`?), model `resnet` 1 time in the" in line
    assert "of the last 61 s" in line
    assert told.tell(after_s=60) == []


def test_the_names_of_unknown_models_travel_in_the_tallies(caplog: pytest.LogCaptureFixture) -> None:
    """By stratum, a bounded number, after the log line too; what Postgres cannot store in a text is escaped."""
    told = Told(caplog)
    for name, stratum in (("wine", "all"), ("wine", "faint"), ("wine", "all"), ("a\0b", "all")):
        told.strangers.count(name, stratum)
    told.tell()
    told.strangers.count("wine", "all")
    for index in range(MAX_NAMES - 2):
        told.strangers.count(f"n{index}", "all")
    totals = told.strangers.totals
    assert totals["all", "wine"] == 3
    assert totals["faint", "wine"] == 1
    assert totals["all", "a\\x00b"] == 1
    assert len({name for _, name in totals}) == MAX_NAMES
    counters = Counters.create(1, 2)
    counters.slot(0).lose(0, Loss.UNKNOWN_MODEL, 4)
    tallies = Tallies(
        counters=counters,
        rows=lambda: [Row("all"), Row("faint")],
        unknown=totals,
        source="pod",
        boot="b",
        queue=lambda: None,
        clock=told.clock,
    )
    first, second = tallies.take().strata
    assert first.models["wine"] == ModelCount(taken=0, unknown=3)
    assert second.models == {"wine": ModelCount(taken=0, unknown=1)}


def test_invented_names_of_models_do_not_hide_a_misspelt_one(caplog: pytest.LogCaptureFixture) -> None:
    """They come first and fill every place; a name in a tenth of the requests gets one all the same, and keeps it."""
    told = Told(caplog)
    for index in range(100):
        told.strangers.count(f"first-{index}", "all")
    for index in range(2_000):
        told.strangers.count(f"later-{index}" if index % 10 else "wnie", "all")
    totals = told.strangers.totals
    assert totals["all", "wnie"] > 100
    assert len(totals) <= MAX_NAMES


def test_names_that_clients_choose_can_neither_fill_memory_nor_forge_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their number and length are bounded, and control characters are written out."""
    told = Told(caplog)
    told.strangers.count("a\nb\x1b[31m\u202e`" + "x" * 100_000, "all")
    told.strangers.count("", "all")
    for index in range(10_000):
        told.strangers.count(f"n{index}", "all")
    (line,) = told.tell()
    assert "model `a\\nb\\x1b[31m\\u202e'xxx" in line
    assert line.isprintable()
    assert f"and other names {10_002 - 3:,} times" in line
    assert len(line) < 500
    assert MAX_NAMES < 100
