"""The knee of a latency curve: the offered load at which requests wait, on average, as long as a single request takes alone.

The waiting time of a step is its mean latency minus that of single requests. Of a server that does one request at a time, each in the time S, with
arrivals at random, the mean wait is rho S / (2 (1 - rho)) at the utilisation rho (Pollaczek and Khinchine), which is S at rho = 2/3: the knee is at
2 / (3 S) requests per second.

Between the steps the load is a quadratic function of log(wait / S), fitted to the steps whose wait is within `_SPAN` times S both ways; with three such steps
it is a straight line, with two the line through them. Near the knee the waits of queues are nearly exponential in the load, so neither a model of the server
nor many steps are needed; where they are not, the knee is still between the steps on both sides of it, or next to them. Single requests and steps are resampled in blocks of time for the 95 % interval (Kunsch, 1989), since the latencies of
neighbours depend on each other.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.facts.load_test import Interval, Knee

_SPAN: Final = 8.0
_QUADRATIC: Final = 4
_BLOCKS: Final = 20
_RESAMPLED: Final = 400
_TAILS: Final = (0.025, 0.975)
_REFUSED: Final = 0.01
"""With more errors than this a step does not tell how long requests wait."""


class Waited(msgspec.Struct, frozen=True, kw_only=True):
    """The latencies of one step, of answered requests in the order in which they were due : (requests,)."""

    offered_per_s: float
    latency_s: FloatArray
    error_share: float = 0.0
    is_on_schedule: bool = True

    @property
    def tells(self) -> bool:
        """Whether its mean latency is that of the endpoint at this load."""
        return self.is_on_schedule and self.error_share <= _REFUSED and len(self.latency_s) > 0


def knee_of(alone_s: FloatArray, steps: Sequence[Waited], rng: np.random.Generator) -> Knee:
    """Return the knee.

    Parameters
    ----------
    alone_s
        Latencies of single requests : (requests,).
    steps
        At least one.
    """
    steps = sorted(steps, key=lambda step: step.offered_per_s)
    telling = [step for step in steps if step.tells]
    loads = np.array([step.offered_per_s for step in telling])
    service = float(alone_s.mean())
    value = _crossing(loads, np.array([step.latency_s.mean() for step in telling]) - service, service)
    if value is None:
        return Knee(per_s=None, why=_why(steps, telling, service))
    found = []
    for _ in range(_RESAMPLED):
        alone = float(resampled(alone_s, rng).mean())
        means = np.array([resampled(step.latency_s, rng).mean() for step in telling])
        crossing = _crossing(loads, means - alone, alone)
        # A resample that all steps are below or above of says that it is beyond them.
        found.append(crossing if crossing is not None else loads[-1] if means[-1] < 2 * alone else loads[0])
    low, high = np.quantile(found, _TAILS)
    return Knee(per_s=Interval(value=value, low=min(float(low), value), high=max(float(high), value)))


def resampled(values: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Return as many values, drawn in blocks of neighbours around a circle: a twentieth of them each."""
    n = len(values)
    length = max(1, n // _BLOCKS)
    starts = rng.integers(n, size=-(-n // length))
    places = (starts[:, None] + np.arange(length)).ravel()[:n] % n
    drawn: FloatArray = values[places]
    return drawn


def is_past(mean_s: float, alone_s: float) -> bool:
    """Return whether requests with this mean latency wait longer than a single one takes."""
    return mean_s >= 2 * alone_s


def _crossing(loads: FloatArray, waits: FloatArray, service: float) -> float | None:
    """Return the load at which the wait is the service time; None: the steps are all below, or all above."""
    if len(loads) < 2 or not (waits < service).any() or not (waits >= service).any():
        return None
    low = int(np.flatnonzero(waits < service)[-1])  # by chance it may be above the first that waits longer
    high = int(np.flatnonzero(waits >= service)[0])
    used = (waits > service / _SPAN) & (waits < service * _SPAN)
    if used.sum() < 3 or not (waits[used] < service).any() or not (waits[used] >= service).any():
        used = np.zeros(len(waits), dtype=np.bool_)
        used[[low, high]] = True
    logs = np.log(np.maximum(waits[used], service / 1000) / service)
    degree = 2 if len(logs) >= _QUADRATIC else 1
    crossing = float(np.polyval(np.polyfit(logs, loads[used], degree), 0.0))
    first, last = sorted((low, high))
    return float(np.clip(crossing, loads[max(first - 1, 0)], loads[min(last + 1, len(loads) - 1)]))


def _why(steps: Sequence[Waited], telling: Sequence[Waited], service: float) -> str:
    """Return why no knee was found."""
    if not telling:
        if any(step.is_on_schedule for step in steps):
            return "requests fail at every load"
        return "this client kept its schedule at no load: run it on a machine where nothing else runs"
    highest = telling[-1].offered_per_s
    if not is_past(float(telling[-1].latency_s.mean()), service):
        above = [step for step in steps if step.offered_per_s > highest]
        if any(step.is_on_schedule for step in above):
            return f"above {highest:,.4g} requests per second the endpoint refuses requests before they wait"
        if above:
            return f"it is above {highest:,.4g} requests per second: beyond that this client cannot keep its schedule"
        return f"it is above {highest:,.4g} requests per second, the highest load that was offered"
    return (
        f"it is below {telling[0].offered_per_s:,.4g} requests per second, the lowest load that was offered"
    )
