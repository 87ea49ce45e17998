"""Cases, run on one way after the other, round after round."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks import load, ways
from benchmarks.load import Load
from benchmarks.payload import Size, Wire, request, write_script
from benchmarks.ways import Way

_SETTLE_S = 20.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent.

    Parameters
    ----------
    size, wire
        Of the requests.
    connections
        How many.
    streams
        Requests at a time on each; of HTTP/1.1 there is one.
    """

    size: Size
    wire: Wire
    connections: int
    streams: int = 1

    def __str__(self) -> str:
        streams = f" of {self.streams}" if self.streams > 1 else ""
        return f"{self.size} {self.wire} x {self.connections}{streams}"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A case on a way in one round.

    Parameters
    ----------
    load
        What the clients saw.
    serving_s, capturing_s
        Processor time of the processes on the serving path, and of those beside it.
    n_offered, n_published
        Requests that the relay told to be inference, and exchanges that were published; of other ways 0.
    """

    load: Load
    serving_s: float
    capturing_s: float
    n_offered: float
    n_published: float

    @property
    def cpu_us(self) -> float:
        """Processor time of the serving path for each request."""
        return 1e6 * self.serving_s / self.load.requests

    @property
    def capture_us(self) -> float:
        """Processor time of the capture process for each exchange that it published."""
        if not self.n_published:
            return math.inf if self.capturing_s > 1.0 else 0.0
        return 1e6 * self.capturing_s / self.n_published

    @property
    def whole_us(self) -> float:
        """What a request costs whose exchange is published."""
        return self.cpu_us + self.capture_us

    @property
    def mean_us(self) -> float:
        """What a request costs on the whole, whatever becomes of its exchange."""
        return 1e6 * (self.serving_s + self.capturing_s) / self.load.requests


Round = Mapping[tuple[Case, str], Run]
Figure = Callable[[Run], float]


def run(name: str, way: Way, case: Case, seconds: float, directory: Path, *, lead_s: float = 0.0) -> Run:
    """Run a case on a way.

    Parameters
    ----------
    name
        Of the way, for messages.
    way
        Which.
    case
        What is sent.
    seconds
        How long.
    directory
        For what wrk reads.
    lead_s
        How long before that, unmeasured: what lets a burst pass first has let it pass.

    Raises
    ------
    LoadError
        A request failed: a way that fails is no cheaper one.
    """
    payload, url = request(case.size, case.wire), way.url(case.wire)
    script = directory / f"{case.size}-{case.wire}.lua"
    if not script.exists():
        write_script(payload, directory, script.stem)
    if lead_s:
        load.wrk(script, url, connections=case.connections, seconds=lead_s)
    before, serving_s, capturing_s = way.counts(), ways.cpu_s(way.serving), ways.cpu_s(way.capturing)
    if case.wire is Wire.GRPC:
        seen = load.h2load(payload, url, connections=case.connections, streams=case.streams, seconds=seconds)
    else:
        seen = load.wrk(script, url, connections=case.connections, seconds=seconds)
    serving_s = ways.cpu_s(way.serving) - serving_s
    if seen.failed or not seen.requests:
        raise load.LoadError(f"{name}, {case}: {seen.failed} of {seen.requests} requests failed")
    after = _settled(way)
    return Run(
        load=seen,
        serving_s=serving_s,
        capturing_s=ways.cpu_s(way.capturing) - capturing_s,
        n_offered=after.get(ways.OFFERED, 0.0) - before.get(ways.OFFERED, 0.0),
        n_published=after.get(ways.PUBLISHED, 0.0) - before.get(ways.PUBLISHED, 0.0),
    )


def median(rounds: Sequence[Round], case: Case, way: str, figure: Figure) -> float:
    """Return the median of a figure over the rounds."""
    return statistics.median(figure(each[case, way]) for each in rounds)


def ratio(rounds: Sequence[Round], case: Case, way: str, over: str, figure: Figure) -> float:
    """Return the median over the rounds of a figure of `way` over that of another in the same round."""
    return statistics.median(figure(each[case, way]) / figure(each[case, over]) for each in rounds)


def middle(runs: Sequence[Run]) -> Run:
    """Return the turn whose cost is the middle one: what other work did to one of them counts for nothing."""
    return sorted(runs, key=lambda one: one.mean_us)[len(runs) // 2]


def _settled(way: Way) -> dict[str, float]:
    """Return the counts once the capture process has done what waited for it."""
    until = time.monotonic() + _SETTLE_S
    counts = way.counts()
    while way.capturing and time.monotonic() < until:
        time.sleep(0.1)
        before, counts = counts, way.counts()
        if counts == before and not counts.get(ways.QUEUED):
            break
    return counts
