"""The shipped detectors and the oracle on one stream, side by side: who passes which threshold when."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from benchmarks.streams import Stream
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS, LEARNERS, Detector
from quantdrift.drift.detectors.tail.quantile import N_BINS as N_TAIL_BINS
from quantdrift.drift.detectors.tail.quantile import tail_bin
from quantdrift.drift.evidence.margin import N_BINS
from quantdrift.drift.evidence.observations import STEPS, BoolArray, FloatArray, ObservationBlock

OPERATING_POINT = 4e6
SECOND_US = 1_000_000
Observe = Callable[[FloatArray], FloatArray]


class Contestant(Protocol):
    """Something that turns values into a statistic which should be large after a change."""

    def follow(self, x: FloatArray) -> FloatArray:
        """Return the statistic after each step, (steps, runs), of values of that shape."""
        ...

    def keep(self, runs: BoolArray) -> None:
        """Go on with these runs alone."""
        ...


class Passages(msgspec.Struct, frozen=True, kw_only=True):
    """When a contestant passed its thresholds.

    Parameters
    ----------
    thresholds
        (T,) growing.
    change
        Groups before the change.
    first
        (T, runs) groups until the statistic first reached each; infinite where it never did.
    ready
        Groups before the contestant took part at all.
    """

    thresholds: FloatArray
    change: int
    first: FloatArray
    ready: int = 0

    def delays(self, threshold: int) -> FloatArray:
        """Return per run the groups from the change to the alarm; nan where it alarmed before, infinite if never."""
        first = self.first[threshold]
        return np.where(first > self.change, first - self.change, np.nan)

    def false_rate(self, threshold: int) -> tuple[int, float]:
        """Return false alarms, one per run at most, and the groups in which they could have come."""
        first = np.minimum(self.first[threshold], self.change)
        return int((self.first[threshold] <= self.change).sum()), float((first - self.ready).sum())


class Shipped:
    """A shipped detector, on the sample clock: mass 1 per group.

    Parameters
    ----------
    detector
        As registered.
    state
        Of a fresh signal.
    observe
        Turns (steps, runs) values into (steps, runs, width) group values.
    runs
        How many.
    apart_us
        Time from group to group: of the traffic, where the hour or the day matters.
    """

    def __init__(
        self, detector: Detector, state: FloatArray, observe: Observe, runs: int, *, apart_us: int = SECOND_US
    ) -> None:
        self.states = np.tile(state, (runs, 1))
        self._detector = detector
        self._observe = observe
        self._apart_us = apart_us
        self._n = 0

    def follow(self, x: FloatArray) -> FloatArray:
        """Return the page evidence after each step, (steps, runs); the copies are never reset."""
        at = np.broadcast_to(np.arange(self._n + 1.0, self._n + 1 + len(x))[:, None], x.shape)
        block = ObservationBlock(
            x=self._observe(x), seen=np.ones(x.shape, dtype=np.bool_), mass=at, at_us=at * self._apart_us
        )
        path = self._detector.run(self.states, block)
        self.states = path.stopped(np.full(x.shape[1], len(x) - 1))
        self._n += len(x)
        for state in self.states:
            self._detector.tend(state, mass=float(self._n), at_us=self._n * self._apart_us)
        return path.page

    def keep(self, runs: BoolArray) -> None:
        """Go on with these runs alone."""
        self.states = self.states[runs]


def budgeted(x: FloatArray) -> FloatArray:
    """Return what the budget detector observes: values of weight 1."""
    return np.stack((x, np.ones_like(x)), axis=-1)


def unstratified(x: FloatArray) -> FloatArray:
    """Return what the change detector observes of items without a margin: all in the last bin."""
    found = np.zeros((*x.shape, 2 * N_BINS))
    found[..., N_BINS - 1], found[..., -1] = 1.0, x
    return found


def binned(x: FloatArray) -> FloatArray:
    """Return what the tail detector observes of groups of one item."""
    return np.asarray(np.eye(N_TAIL_BINS)[tail_bin(x)], dtype=np.float64)


OBSERVE: dict[str, Observe] = {"budget": budgeted, "change": unstratified, "tail": binned}


def known(budget: float, runs: int) -> Shipped:
    """Return the budget detector with its defaults; the sampling probability is one and the same."""
    state = BUDGET.fresh(budget=budget, scale=1.0, weighted=False, mass=0.0, at_us=0)
    return Shipped(BUDGET, state, budgeted, runs)


def learned(kind: str, tau: float, runs: int, *, apart_us: int = SECOND_US) -> Shipped:
    """Return a detector that learns its baseline from the stream itself."""
    state = LEARNERS[kind].fresh(tau=tau, scale=1.0, mass=0.0, at_us=0)
    return Shipped(DETECTORS[kind], state, OBSERVE[kind], runs, apart_us=apart_us)


def race(
    stream: Stream, entries: Mapping[str, tuple[Contestant, Sequence[float]]], *, horizon: int
) -> dict[str, Passages]:
    """Return when each contestant passed each of its thresholds.

    A run of a contestant ends when it has passed all of them, or `horizon` groups after the change.

    Parameters
    ----------
    stream
        What they see.
    entries
        Name to contestant and growing thresholds.
    horizon
        Groups after the change.
    """
    change = stream.case.change
    first = {name: np.full((len(levels), stream.runs), np.inf) for name, (_, levels) in entries.items()}
    left = {name: np.arange(stream.runs) for name in entries}
    while stream.first < change + horizon and any(len(runs) for runs in left.values()):
        begin = stream.first
        x = stream.block()
        for name, (contestant, levels) in entries.items():
            runs = left[name]
            if not len(runs):
                continue
            top = np.maximum.accumulate(contestant.follow(x[:, runs]), axis=0)
            below = (top[None] < np.asarray(levels)[:, None, None]).sum(axis=1)
            found = np.where(below < STEPS, begin + below + 1.0, np.inf)
            first[name][:, runs] = np.minimum(first[name][:, runs], found)
            going = np.isinf(first[name][-1, runs])
            if not going.all():
                contestant.keep(going)
                left[name] = runs[going]
    return {
        name: Passages(thresholds=np.asarray(levels, dtype=np.float64), change=change, first=first[name])
        for name, (_, levels) in entries.items()
    }


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Two mean delays on the same runs.

    Parameters
    ----------
    delay, delay_se
        Mean delay and its standard error, groups.
    best, best_se
        The same of the oracle.
    ratio, ratio_se
        Their quotient; the runs are paired, so its error is less than the two suggest.
    n
        Runs in which neither alarmed before the change.
    n_false
        Runs in which the first did.
    n_missed
        Runs in which the first never did; they count with the horizon.
    """

    delay: float
    delay_se: float
    best: float
    best_se: float
    ratio: float
    ratio_se: float
    n: int
    n_false: int
    n_missed: int


def compare(passages: Passages, threshold: int, best: Passages, best_threshold: int, horizon: int) -> Ratio:
    """Return the delays at a threshold of each, in the runs where neither alarmed before the change."""
    ours, theirs = passages.delays(threshold), best.delays(best_threshold)
    both = ~np.isnan(ours) & ~np.isnan(theirs)
    y, x = np.minimum(ours[both], horizon), np.minimum(theirs[both], horizon)
    n = len(y)
    ratio = float(y.mean() / x.mean())
    return Ratio(
        delay=float(y.mean()),
        delay_se=float(y.std() / math.sqrt(n)),
        best=float(x.mean()),
        best_se=float(x.std() / math.sqrt(n)),
        ratio=ratio,
        ratio_se=float((y - ratio * x).std() / math.sqrt(n) / x.mean()),
        n=n,
        n_false=int(np.isnan(ours).sum()),
        n_missed=int(np.isinf(ours[both]).sum()),
    )
