"""What a load test of an endpoint has found: records that are shown, drawn, written as JSON and judged by the gate."""

from datetime import datetime
from enum import StrEnum
from typing import Final

import msgspec

from quantdrift.core.config.address import without_mark

FORMAT: Final = 1
"""Number of the JSON form; it rises when an old reader would misread the new form."""
LEAST_P95: Final = 100
LEAST_P99: Final = 500
"""Requests of which a p95 and a p99 have an interval: five of them took longer."""


def without_path(address: str) -> str:
    """Return the scheme, host and port of an address, without credentials."""
    scheme, _, rest = without_mark(address).partition("://")
    return f"{scheme.lower()}://{rest.split('/')[0].rpartition('@')[2].lower()}"


class Arrival(StrEnum):
    """How the requests of a step follow each other."""

    RECORDED = "recorded"  # with the gaps of the recording, stretched to the offered load
    RATES = (
        "rates"  # at random, with the recorded changes of the rate: only a part of the requests was captured
    )
    POISSON = "poisson"  # at random and at a constant rate: the recording has no times, or too few requests


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded requests whose shape the load has.

    Parameters
    ----------
    source
        The file or folder, or `live`.
    n
        Recorded requests.
    arrival
        How the driven requests follow each other.
    window_s
        Time in which they came; None: the recording has no times.
    captured_share
        Share of the requests in that time that were captured, by their sampling probabilities.
    rate_per_s
        Requests per second in production, captured or not; None: unknown.
    peak_per_s
        The most requests in one second of the window, captured or not; None: unknown.
    gap_cv
        Standard deviation of the recorded gaps divided by their mean: 1 for arrivals at random, more in bursts; None: unknown.
    in_flight
        Requests that were under way at once in production, on average: rate times mean latency; None: unknown.
    body_p50_bytes, body_p99_bytes
        Sizes of the bodies.
    unusable
        How many captured exchanges could not be made into requests, by the reason.
    """

    source: str
    n: int
    arrival: Arrival
    window_s: float | None = None
    captured_share: float = 1.0
    rate_per_s: float | None = None
    peak_per_s: float | None = None
    gap_cv: float | None = None
    in_flight: float | None = None
    body_p50_bytes: int = 0
    body_p99_bytes: int = 0
    unusable: dict[str, int] = {}


class ServerTime(msgspec.Struct, frozen=True, kw_only=True):
    """What Triton counted meanwhile, per request that it answered.

    Parameters
    ----------
    n
        Requests.
    queue_s, compute_s
        Mean time in its queue, and in the model with the copying of inputs and outputs.
    batch
        Mean number of requests in an execution; None: not known.
    """

    n: int
    queue_s: float
    compute_s: float
    batch: float | None = None


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


class LoadStep(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one offered load.

    Latencies are those of answered requests, from the time at which a request was due to the last byte of its answer, so a request that waits
    for its turn counts its waiting wherever that happens.

    Parameters
    ----------
    offered_per_s
        Requests due per second.
    seconds
        From the time at which the first one was due to the time at which the last one was.
    n
        Requests due.
    mean_s, p50_s, p95_s, p99_s
        Latency; None: no request was answered.
    error_share
        Share of the requests without an answer of the status 2xx.
    errors
        How many, by the reason: a status, `timeout`, `connection`, `not sent`.
    throughput_per_s
        Answered requests per second, until the last answer.
    in_flight
        Requests under way, on average over the requests that were sent.
    late_p99_s
        p99 of the time by which this client sent later than it was due.
    is_on_schedule
        Whether the client kept its schedule. If it did not, the figures are partly those of the client, and nothing is judged by them.
    server
        What Triton counted; None: it is not asked, or did not answer.
    """

    offered_per_s: float
    seconds: float
    n: int
    mean_s: float | None
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    error_share: float
    errors: dict[str, int]
    throughput_per_s: float
    in_flight: float
    late_p99_s: float
    is_on_schedule: bool
    server: ServerTime | None = None


class Alone(msgspec.Struct, frozen=True, kw_only=True):
    """Single requests, each sent when the one before was answered: the service time.

    Parameters
    ----------
    n
        Answered requests.
    mean_s
        Mean latency, with its 95 % interval.
    p50_s, p95_s, p99_s
        Latency.
    server
        What Triton counted; the rest of the latency is that of its front end, the network and this client.
    """

    n: int
    mean_s: Interval
    p50_s: float
    p95_s: float
    p99_s: float
    server: ServerTime | None = None


class Knee(msgspec.Struct, frozen=True, kw_only=True):
    """The queueing onset: the offered load at which requests wait as long, on average, as a single request takes alone.

    Parameters
    ----------
    per_s
        Requests per second, with the 95 % interval; None: no step shows it.
    why
        Where it is None: the reason, in a sentence.
    """

    per_s: Interval | None
    why: str = ""


class SliceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one slice at the sustained load."""

    slice: str
    n: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    error_share: float


class Sustained(msgspec.Struct, frozen=True, kw_only=True):
    """The load that was offered for a longer time, by which the gate judges.

    Parameters
    ----------
    step
        Its figures.
    p95_s, p99_s, throughput_per_s, error_share
        The figures that have budgets, with 95 % intervals, by a bootstrap of blocks of time; None: fewer than
        `LEAST_P95` or `LEAST_P99` requests were answered.
    slices
        Its requests by slice.
    """

    step: LoadStep
    p95_s: Interval | None
    p99_s: Interval | None
    throughput_per_s: Interval
    error_share: Interval
    slices: tuple[SliceLoad, ...] = ()


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that were all due at once, where refused ones are sent again.

    Parameters
    ----------
    n
        Requests.
    answered_at_once, answered_later
        Requests that were answered at the first try, and after one retry or more.
    retries
        Requests that were sent again.
    errors
        Requests without an answer in the end, by the reason.
    p50_s, p99_s
        Latency of the answered ones, retries and their pauses included; None: none was answered.
    drained_s
        Time until the last one had its answer, or had none for good.
    """

    n: int
    answered_at_once: int
    answered_later: int
    retries: int
    errors: dict[str, int]
    p50_s: float | None
    p99_s: float | None
    drained_s: float


class LoadTest(msgspec.Struct, frozen=True, kw_only=True):
    """A load test of one endpoint.

    Parameters
    ----------
    format
        As `FORMAT`.
    target
        The address, without credentials.
    model
        The model of the configuration whose requests were sent; empty: none.
    began_at, took_s
        When it began (aware, UTC), and how long it took.
    traffic
        The requests whose shape the load has.
    alone
        Single requests; None: it ended before.
    steps
        By offered load.
    knee, sustained, burst
        As they are called; None: it ended before.
    stopped
        Why it ended before its time, in a sentence; empty: it did not.
    """

    format: int = FORMAT
    target: str
    model: str
    began_at: datetime
    took_s: float
    traffic: Traffic
    alone: Alone | None = None
    steps: tuple[LoadStep, ...] = ()
    knee: Knee | None = None
    sustained: Sustained | None = None
    burst: Burst | None = None
    stopped: str = ""
