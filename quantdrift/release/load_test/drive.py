"""The client of a load test: it sends each request when it is due, whether or not the ones before it were answered.

A client that waits for an answer before it sends the next request slows down with the endpoint, and does not see how long others would have waited. So the latency
counts from the time at which a request was due, not from the time at which it was sent.

It is one event loop. What it cannot send in time it sends late, and it says how late (`Driven.late_s`).
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Final, Protocol

import msgspec
import numpy as np

from quantdrift.core.process.run import Stop
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray

SPIN_S: Final = (
    0.0015  # an event loop wakes up to a millisecond late: it is awake by then, and looks at the clock
)
_LEAST_ENDED: Final = 20  # requests, before a share of errors ends a step
TRIES: Final = 3
"""How often a request of a burst is sent at most."""
_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_AGAIN: Final = frozenset({"429", "502", "503", "504", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "connection"})
"""What a client tries again: the endpoint has not begun with the request."""
NOT_SENT: Final = "not sent"
STOPPED: Final = "it was stopped"


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it is sent; over gRPC the path is the method, and the headers are its metadata.

    Parameters
    ----------
    method, path, headers, body
        Without the headers that belong to a connection.
    slices
        Names of the slices that it is in.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    slices: tuple[str, ...] = ()


class Driven(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the requests of one step, in the order in which they were due.

    Parameters
    ----------
    due_s
        When each was due, from the beginning of the step : (requests,).
    latency_s
        From then to the last byte of its answer; nan: it was not answered : (requests,).
    late_s
        By which it was sent later than due; nan: it was not sent : (requests,).
    in_flight
        Requests under way when it was sent : (requests,).
    chosen
        Number of the recorded request : (requests,).
    errors
        Requests without an answer of the status 2xx, by the reason.
    took_s
        Until the last answer.
    stopped
        Why it ended before its time; empty: it did not.
    """

    due_s: FloatArray
    latency_s: FloatArray
    late_s: FloatArray
    in_flight: IntArray
    chosen: IntArray
    errors: dict[str, int]
    took_s: float
    stopped: str = ""

    @property
    def is_answered(self) -> BoolArray:
        """Whether each was answered : (requests,)."""
        answered: BoolArray = ~np.isnan(self.latency_s)
        return answered


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request that is sent again where it is refused."""

    latency_s: float
    retries: int
    error: str


class Wire(Protocol):
    """The connections to an endpoint, in one protocol."""

    async def send(self, number: int) -> str:
        """Send a recorded request by its number, and wait for its answer; return why it has none, or empty."""


class Client:
    """Sends recorded requests to one address, each when it is due.

    Parameters
    ----------
    wire
        Its connections.
    most_in_flight
        A request that is due while so many are under way is not sent, and counts as an error.
    most_errors
        A share of errors above it ends a step.
    stop
        The request to end.
    sent
        Called with each number of requests that were sent.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        most_in_flight: int,
        most_errors: float,
        stop: Stop,
        sent: Callable[[int], None],
    ) -> None:
        self._wire = wire
        self._most_in_flight, self._most_errors = most_in_flight, most_errors
        self._stop, self._sent = stop, sent

    async def alone(self, chosen: IntArray, longest_s: float) -> Driven:
        """Send requests one after the other, for at most `longest_s`."""
        latencies, errors = list[float](), Counter[str]()
        began = time.perf_counter()
        stopped = ""
        for number in chosen.tolist():
            if self._stop.is_set() or time.perf_counter() - began > longest_s:
                break
            at = time.perf_counter()
            error = await self._wire.send(number)
            latencies.append(float("nan") if error else time.perf_counter() - at)
            self._sent(1)
            errors[error] += bool(error)
            if stopped := self._too_many(errors.total(), len(latencies)):
                break
        n = len(latencies)
        return Driven(
            due_s=np.zeros(n),
            latency_s=np.array(latencies),
            late_s=np.zeros(n),
            in_flight=np.ones(n, dtype=np.intp),
            chosen=chosen[:n],
            errors=dict(+errors),
            took_s=time.perf_counter() - began,
            stopped=stopped,
        )

    async def drive(self, due_s: FloatArray, chosen: IntArray) -> Driven:
        """Send each request when it is due, and wait for the answers of all."""
        n = len(due_s)
        step = _Step(n)
        began = time.perf_counter() + SPIN_S
        n_due, told = n, 0
        for place, (offset, number) in enumerate(zip(due_s.tolist(), chosen.tolist(), strict=True)):
            due = began + offset
            is_time = await self._wait_until(due)
            if not is_time or self._too_many(step.errors.total(), step.n_ended):
                n_due = place
                break
            if len(step.tasks) >= self._most_in_flight:
                step.end(NOT_SENT)
            else:
                step.begin(self._due(step, place, number, due))
            if place - told >= max(1, n // 50):
                self._sent(place - told)
                told = place
        self._sent(n_due - told)
        while step.tasks and not self._stop.is_set():
            await asyncio.wait(step.tasks, timeout=0.1)
        await step.cancel()
        return Driven(
            due_s=due_s[:n_due],
            latency_s=step.latency[:n_due],
            late_s=step.late[:n_due],
            in_flight=step.in_flight[:n_due],
            chosen=chosen[:n_due],
            errors=dict(+step.errors),
            took_s=time.perf_counter() - began,
            stopped=STOPPED if self._stop.is_set() else self._too_many(step.errors.total(), step.n_ended),
        )

    async def _due(self, step: "_Step", place: int, number: int, due: float) -> None:
        step.late[place] = time.perf_counter() - due
        step.in_flight[place] = len(step.tasks)
        error = await self._wire.send(number)
        if not error:
            step.latency[place] = time.perf_counter() - due
        step.end(error)

    async def at_once(self, chosen: IntArray) -> tuple[list[Tried], float]:
        """Send requests all at once, and refused ones again, at most twice; return what came of each, and when the last one ended."""
        began = time.perf_counter()
        rng = random.Random(0)  # noqa: S311 - pauses

        async def tried(number: int) -> Tried:
            error = ""
            for attempt in range(TRIES):
                error = await self._wire.send(number)
                is_last = attempt == TRIES - 1 or error not in _AGAIN or self._stop.is_set()
                if not error or is_last:
                    break
                await asyncio.sleep(min(_PAUSE_S * 2**attempt * rng.uniform(0.5, 1.5), _LONGEST_PAUSE_S))
            self._sent(1)
            return Tried(latency_s=time.perf_counter() - began, retries=attempt, error=error)

        ended = list(await asyncio.gather(*(tried(number) for number in chosen.tolist())))
        return ended, time.perf_counter() - began

    async def recovered(self, number: int, usual_s: float, longest_s: float) -> bool:
        """Wait until a request takes no longer than `usual_s`, since an endpoint goes on with what nobody waits for any more."""
        ends = time.perf_counter() + longest_s
        while not self._stop.is_set() and time.perf_counter() < ends:
            at = time.perf_counter()
            error = await self._wire.send(number)
            self._sent(1)
            if not error and time.perf_counter() - at <= usual_s:
                return True
            await self._stop.wait(0.2)
        return False

    async def _wait_until(self, at: float) -> bool:
        """Wait; return False if the request to end came before."""
        while (left := at - time.perf_counter()) > 0:
            if self._stop.is_set():
                return False
            if left > SPIN_S:
                await asyncio.sleep(min(left - SPIN_S, 0.1))
            else:
                await asyncio.sleep(0)
        return not self._stop.is_set()

    def _too_many(self, n_errors: int, n_ended: int) -> str:
        if n_ended < _LEAST_ENDED or n_errors <= self._most_errors * n_ended:
            return ""
        return f"{n_errors:,} of {n_ended:,} requests had no answer"


class _Step:
    """What came of the requests of a step so far, and those that are under way."""

    def __init__(self, n: int) -> None:
        self.latency, self.late = np.full(n, np.nan), np.full(n, np.nan)
        self.in_flight = np.zeros(n, dtype=np.intp)
        self.errors = Counter[str]()
        self.n_ended = 0
        self.tasks = set[asyncio.Task[None]]()

    def begin(self, sending: Coroutine[None, None, None]) -> None:
        """Start a request."""
        task = asyncio.get_running_loop().create_task(sending)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def end(self, error: str) -> None:
        """Count a request that has ended."""
        self.n_ended += 1
        if error:
            self.errors[error] += 1

    async def cancel(self) -> None:
        """Cancel what is under way."""
        left = list(self.tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
