"""Growth of the latency: do more answers take much longer than the slowest 1 % did in the first week? A learned budget.

What is learned is a time L, once, from at least a week: the first edge of a fixed grid such that two shares are shown to be at most
1 %, that above L and that above `growth` L. From then on the share that takes longer than `growth` L is tested against 1 %, by
`quantdrift.drift.detectors.budget`, whose state is the first part of this one's.

Bound of what is tested: the upper bound of the share above `growth` L is `quantdrift.drift.evidence.bound`, valid at all times at once, and for
any weights. It falls from edge to edge. So it is wrong only if the bound of one share is wrong, that of
the last edge with more than 1 % above it, and no union over edges is needed (as in Howard and Ramdas, Sequential estimation of
quantiles, Bernoulli 2022): P(more than 1 % are above `growth` L) <= `DELTA`.
Bound of what is named: L itself lies below the true 99 % quantile with a probability of at most `NAMED_DELTA`, by Chernoff's bound (Hoeffding
1963, theorem 1): P(share of n <= a) <= exp(-n KL(a, 1 %)). It is for one look, at a time that does not depend on the times that were
measured: learning ends by the week and the weight. If it is wrong, the test is one of a growth that is a step of the grid
less, and no false alarm where nothing grows. With one bound of `DELTA` for both, L was the time that 0.05 % of 2,000 exchanges exceed, not 1 %.
Assumption: the times that were learned from, and those that follow, are of one law, in the sense of that module: given the
past, each exchange is above an edge with the same chance. Load breaks it: neighbours wait in one queue, and an hour of the
afternoon is slower than the night. What holds without it is the test alone: H0 "at every moment at most 1 % take longer
than `growth` L", with the bound of the budget. Whether an hour of much load is a breach of that, `growth` decides; a week,
so that every hour of it is learned from.
Load, by simulation (`tests.statistical.test_latency`): a server whose use swings from 30 to 80 % in a day. Its daily peaks are no
breach with growth = 2, and a breach with growth = 1.
L is frozen. A baseline that went on learning would follow a candidate that becomes slow slowly.
"""

import math

import msgspec
import numpy as np
from scipy.special import xlog1py, xlogy

from quantdrift.core.errors import OperatorError
from quantdrift.core.signals import SLOW_SHARE
from quantdrift.drift.detectors import budget
from quantdrift.drift.detectors.budget import BudgetDetector
from quantdrift.drift.evidence import header, interval
from quantdrift.drift.evidence import recovery as resolve
from quantdrift.drift.evidence import run as path
from quantdrift.drift.evidence.bound import at_most
from quantdrift.drift.evidence.clock import DAY_US
from quantdrift.drift.evidence.group import N_TIME_BINS, ROUNDING
from quantdrift.drift.evidence.header import (
    ALERTING,
    LAST_AT,
    MASS,
    N_TOTAL,
    PAGING,
    TICKETING,
    N,
    Onset,
    W,
)
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray, GroupSequence, IntArray, ObservationBlock
from quantdrift.drift.evidence.run import BlockRun, SequenceRun

STEPS_TO_DOUBLE = 4
EDGES: FloatArray = 2.0 ** (np.arange(N_TIME_BINS - 1) / STEPS_TO_DOUBLE - 10)  # seconds, from 1 ms to 14 min
DELTA = 1e-5
NAMED_DELTA = 0.1
WEEK_US = 7 * DAY_US
READY = 2000.0  # groups of weight 1, with which the bound of a share of 0.05 % is at most 1 %

# The state of one signal: that of a budget's detector, and what was learned.
_SIZE = budget.SIZE
GROWTH, SINCE_AT, UNTIL_AT, N_LEARNED, LEARNED, FIRST_SLOW = range(_SIZE, _SIZE + 6)
COUNTS = slice(FIRST_SLOW + 1, FIRST_SLOW + 1 + N_TIME_BINS)
SIZE = COUNTS.stop
_COUNTS = COUNTS.start
_PAGE, _TICKET, _MIRROR = budget.PAGE.start, budget.TICKET.start, budget.MIRROR.start


class LatencyBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned of the latency of a slice.

    Parameters
    ----------
    counts
        Weight of the exchanges in each bin of time, `N_TIME_BINS` numbers.
    n_groups
        Groups in it.
    growth
        How many times as long as `learned_s` the slowest 1 % may take.
    since_us, until_us
        Event times of its first and last group, microseconds since 1970.
    learned_s
        The time that at most 1 % are shown to exceed, in seconds; 0: it still learns.
    """

    counts: tuple[float, ...]
    n_groups: int
    growth: float
    since_us: int = 0
    until_us: int = 0
    learned_s: float = 0.0


class GrowthDetector:
    """The detector of this module, for many signals at a time. It has no state of its own: states are rows of numbers."""

    kind = "growth"
    size = SIZE
    record: type[msgspec.Struct] = LatencyBaseline
    width = (
        1 + N_TIME_BINS
    )  # c, then the weight in each bin of time: `quantdrift.drift.evidence.group.group_times`

    def __init__(self) -> None:
        self._budget = BudgetDetector()

    def fresh(self, *, tau: float, scale: float, mass: float, at_us: int) -> FloatArray:
        """Return the state of a new signal, (SIZE,), that has learned nothing yet.

        Parameters
        ----------
        tau
            How much longer than what was learned the slowest 1 % may take, as a share of it: growth - 1.
        scale
            1: what is tested is a share.
        mass, at_us
            The calendar clock now: nothing before it counts.
        """
        blank = LatencyBaseline(
            counts=(0.0,) * N_TIME_BINS, n_groups=0, growth=1.0 + tau, since_us=at_us, until_us=at_us
        )
        return self.from_content(blank, scale=scale, mass=mass, at_us=at_us)

    def from_content(self, content: LatencyBaseline, *, scale: float, mass: float, at_us: int) -> FloatArray:
        """Return the state of a signal with a stored baseline: live, or learning on."""
        if len(content.counts) != N_TIME_BINS or not content.growth >= 1.0:
            raise ValueError(
                f"a baseline of the latency has {N_TIME_BINS} weights, and a growth of at least 1"
            )
        state = np.zeros(SIZE)
        state[: budget.SIZE] = self._budget.fresh(
            budget=SLOW_SHARE, scale=scale, weighted=True, mass=mass, at_us=at_us
        )
        state[COUNTS], state[N_LEARNED], state[GROWTH] = content.counts, content.n_groups, content.growth
        state[SINCE_AT], state[UNTIL_AT] = content.since_us, content.until_us
        if content.learned_s:
            self._limit(state, int(np.searchsorted(EDGES, content.learned_s * (1.0 - 1e-9))) + 1)
        return state

    def inherit(self, state: FloatArray, *, mass: float, at_us: int) -> FloatArray:
        """Return the state of a new signal with the baseline in `state`; where that still learns, it learns on."""
        return self.from_content(
            self.content(state), scale=float(state[header.SCALE]), mass=mass, at_us=at_us
        )

    def carry(self, state: FloatArray, before: FloatArray) -> bool:
        """Move the evidence of a version that ended to the one that serves instead, both in place; see `Detector.carry`."""
        return self.live(state) and self.live(before) and self._budget.carry(state, before)

    def content(self, state: FloatArray) -> LatencyBaseline:
        """Return the baseline for storing."""
        return LatencyBaseline(
            counts=tuple(map(float, state[COUNTS])),
            n_groups=int(state[N_LEARNED]),
            growth=float(state[GROWTH]),
            since_us=int(state[SINCE_AT]),
            until_us=int(state[UNTIL_AT]),
            learned_s=float(EDGES[int(state[LEARNED]) - 1]) if state[LEARNED] else 0.0,
        )

    def limit_s(self, state: FloatArray) -> float | None:
        """Return the seconds that at most 1 % may exceed: growth times what was learned; None while it learns."""
        return float(EDGES[int(state[FIRST_SLOW]) - 1]) if state[FIRST_SLOW] else None

    def retune(self, state: FloatArray, growth: float) -> bool:
        """Allow another growth from now on, in place, with new evidence; return whether it is another."""
        if state[GROWTH] == growth:
            return False
        state[GROWTH] = growth
        if self.live(state):
            alerting, paging = bool(state[ALERTING]), bool(state[PAGING])
            # With less room less is shown of what is tested.
            self._limit(state, self._learnable(state) or int(state[LEARNED]))
            state[budget.WINDOWS] = 0.0
            self.arm(state, mass=float(state[MASS]), at_us=int(state[LAST_AT]))
            if alerting:
                self.alarmed(state, page=not paging)
        return True

    def freeze(self, state: FloatArray) -> None:
        """Stop learning, in place, though a week is not over; what is live is frozen already.

        Raises
        ------
        OperatorError
            There are too few groups.
        """
        if self.live(state):
            return
        first_slow = self._learnable(state)
        if first_slow is None:
            raise OperatorError(
                f"the baseline cannot be frozen yet: {self.missing(state)} groups are missing"
            )
        self._limit(state, first_slow)

    def keep(self, state: FloatArray) -> None:
        """Do nothing: an alert takes nothing out of a baseline that is frozen."""

    def aside(self, state: FloatArray) -> bool:
        """Return whether `keep` would change the baseline: never."""
        return False

    def learned(self, state: FloatArray) -> int:
        """Return the number of groups in the baseline."""
        return int(state[N_LEARNED])

    def live(self, state: FloatArray) -> bool:
        """Return whether its baseline is complete."""
        return bool(state[FIRST_SLOW])

    def enough(self, state: FloatArray) -> bool:
        """Return whether there are groups enough for a baseline, though perhaps not a week of them."""
        return bool(state[COUNTS].sum() >= READY)

    def missing(self, state: FloatArray) -> int:
        """Return how many more groups the baseline needs."""
        return int(self.missings(state[None])[0])

    def missings(self, states: FloatArray) -> IntArray:
        """Return how many groups each lacks, (N,): for the weight, and at the rate so far for the week."""
        weight, n = states[:, COUNTS].sum(axis=1), states[:, N_LEARNED]
        each = np.where(n > 0, weight / np.maximum(n, 1.0), 1.0)
        for_weight = np.ceil(np.maximum(READY - weight, 0.0) / np.maximum(each, 1e-6))
        span_us = np.maximum(states[:, UNTIL_AT] - states[:, SINCE_AT], 1.0)
        for_week = np.where(
            span_us < WEEK_US, np.maximum(np.ceil(n * np.maximum(WEEK_US - span_us, 0.0) / span_us), 1.0), 0.0
        )
        # In the first hours the rate is a guess: no more than the weight asks for, until there is a day of it.
        for_week = np.where(span_us < DAY_US, np.minimum(for_week, READY), for_week)
        lacking = np.maximum(for_weight, for_week).astype(np.intp)
        return np.where(states[:, FIRST_SLOW] != 0.0, 0, lacking)

    def due_us(self, states: FloatArray) -> FloatArray:
        """Return from when on each baseline is complete, or a window has to move on, (N,)."""
        complete = (self.missings(states) == 0) & (states[:, ALERTING] == 0.0)
        learning = np.where(complete, -np.inf, np.inf)
        return np.where(states[:, FIRST_SLOW] != 0.0, self._budget.due_us(states), learning)

    def tend(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Do the work between batches, in place: advance the recent window, and go live when the baseline is complete."""
        if self.live(state):
            self._budget.tend(state, mass=mass, at_us=at_us)
            return
        if state.item(ALERTING) or self.missing(state):
            return
        first_slow = self._learnable(state)
        if first_slow is not None:
            self._limit(state, first_slow)
            self.arm(state, mass=mass, at_us=at_us)

    def arm(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Restart both copies at this mass and time, in place."""
        self._budget.arm(state, mass=mass, at_us=at_us)

    def alarmed(self, state: FloatArray, *, page: bool) -> None:
        """After an alarm: reset the copy (both for a page) and watch for recovery, in place."""
        self._budget.alarmed(state, page=page)

    def evidence(self, state: FloatArray) -> float:
        """Return the evidence of the page copy."""
        return self._budget.evidence(state)

    def evidences(self, states: FloatArray) -> FloatArray:
        """Return the evidence of the page copies, (N,)."""
        return self._budget.evidences(states)

    def page_mass(self, state: FloatArray) -> float:
        """Return the calendar mass given to the page copy since its reset."""
        return self._budget.page_mass(state)

    def moved(self, state: FloatArray) -> Onset:
        """Return the onset and the shares before and after it, of a running copy: call it before `alarmed` resets it."""
        return self._budget.moved(state)

    def recent(self, state: FloatArray) -> interval.WeightedEstimate | None:
        """Return the share and its interval over the recent window."""
        return self._budget.recent(state)

    def since_change(self, state: FloatArray) -> interval.WeightedEstimate | None:
        """Return the same since the last change of verdict."""
        return self._budget.since_change(state)

    def run(self, states: FloatArray, block: ObservationBlock) -> BlockRun:
        """Run signals with `states`, (N, SIZE), over `block`, and return their run."""
        return BlockRun(self.follow, states, block)

    def follow(self, states: FloatArray, groups: GroupSequence) -> SequenceRun:
        """Run signals over their groups, changing `states`, (N, SIZE), in place, and return their run."""
        course = np.empty((path.N_ROWS, len(groups.seen)))
        if not _follow(states, groups, course):
            raise ValueError("a weight above 1 would break the false-alarm bound")
        return SequenceRun(course=course, states=states)

    def _learnable(self, state: FloatArray) -> int | None:
        """Return the first bin above the time that at most 1 % are shown to exceed; None where nothing is shown yet."""
        counts = state[COUNTS]
        above = np.cumsum(counts[::-1])[::-1][1:]  # at or above each edge
        n = float(counts.sum())
        likely = np.flatnonzero(above < SLOW_SHARE * n)
        if not len(likely):
            return None
        tested = np.append(above[_steps(state) :], np.zeros(_steps(state)))[: len(above)]
        share = above[likely] / n
        surprise = n * (
            xlogy(share, share / SLOW_SHARE) + xlog1py(1.0 - share, (SLOW_SHARE - share) / (1.0 - SLOW_SHARE))
        )
        m, of_all = np.full(len(likely), SLOW_SHARE), np.full(len(likely), n)
        is_shown = (surprise >= -math.log(NAMED_DELTA)) & at_most(m, tested[likely], of_all, DELTA)
        shown = likely[is_shown]
        return int(shown[0]) + 1 if len(shown) else None

    @staticmethod
    def _limit(state: FloatArray, place: int) -> None:
        """Go live with the bin above what was learned, in place; growth is rounded up to whole steps of the grid."""
        state[LEARNED], state[FIRST_SLOW] = place, min(place + _steps(state), N_TIME_BINS - 1)


def _steps(state: FloatArray) -> int:
    """Return the growth in steps of the grid, rounded up."""
    return math.ceil(STEPS_TO_DOUBLE * math.log2(state[GROWTH]) - 1e-9)


@compiled
def _follow(states: FloatArray, groups: GroupSequence, course: FloatArray) -> bool:
    """Run states, (N, SIZE), over a sequence of groups, in place, and write their run; False: an invalid group."""
    ends, x, seen, mass, at_us, captured_us = groups
    value = np.empty(3)  # vx, v and c, as for a budget
    begin = 0
    for row in range(len(states)):
        state = states[row]
        live = state[FIRST_SLOW] > 0
        mirror = state[_MIRROR : _MIRROR + len(resolve.BETS)]
        page = budget.evidence_of(state) if live else 0.0
        recovery = resolve.recovered(mirror) if live else np.inf
        for group in range(begin, ends[row]):
            if seen[group]:
                _weigh(x[group], int(state[FIRST_SLOW]), value)
                if value[1] > 1.0 + ROUNDING:
                    return False
                value[1] = min(value[1], 1.0)
                allowance = header.spend(state, mass[group], at_us[group], 1.0 if live else 0.0)
                if live:
                    budget.see(state, value, allowance, at_us[group], captured_us[group])
                    page, recovery = budget.evidence_of(state), resolve.recovered(mirror)
                else:
                    _learn(state, x[group], value[1])
            path.note(course, group, state, page, recovery)
        begin = ends[row]
        for bet in range(budget.N_BETS):
            state[_TICKET + bet] = state[_PAGE + bet] * state[TICKETING]
    return True


@compiled
def _weigh(x: FloatArray, first_slow: int, value: FloatArray) -> None:
    """Write vx, v and c of a group: what is in or above a bin is slow."""
    value[0] = value[1] = 0.0
    value[2] = x[0]
    for bin_ in range(N_TIME_BINS):
        value[1] += x[1 + bin_]
        if bin_ >= first_slow:
            value[0] += x[1 + bin_]
    value[0] = min(value[0], 1.0)


@compiled
def _learn(state: FloatArray, x: FloatArray, v: float) -> None:
    """Add a group to the baseline, in place."""
    state[N_TOTAL] += 1.0
    state[N] += 1.0
    state[W] += v
    state[N_LEARNED] += 1.0
    state[UNTIL_AT] = state[LAST_AT]
    for bin_ in range(N_TIME_BINS):
        state[_COUNTS + bin_] += x[1 + bin_]
