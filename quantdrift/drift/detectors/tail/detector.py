"""Tail: large divergences became more frequent, or larger, though the mean may not have moved at all.

H0 "the groups are exchangeable": new groups are like the baseline. With C(>= b) the weight of all groups so far, the
newest included, at or above bin b, and n their number, an item in bin b has the shares

    hi = T(C(>= b) / n),   lo = T(C(> b) / n),   each at most 1,

T the largest share that is tolerated (`quantdrift.drift.detectors.tail.rank`),
and bet k (see `quantdrift.drift.detectors.tail.rank`) pays `e_k`, averaged over the group by its weights; then

    R_k <- (R_k + gamma) * e_k,   E = sum over k of w_k R_k.

Validity of the learned null: given the pool of the n groups, without their order, the newest is each of them with
chance 1 / n. The weight in bin b is then the difference of its shares on average, and e_k is the average of its density
over (lo, hi]. The density falls and has mean 1, and T moves every item to larger shares: the mean of e_k is at most 1.
It holds for any law, ties, fractional weights and every tau >= 0, and all the more for laws with fewer large values: an
improvement is no evidence. Nothing is estimated. The newest group must be in the pool. tau is the tolerance: shares may
vary by this factor, and so may all values, as in a season.

The learned null cannot detect what its pool has absorbed: a slow drift, or one from before the pool was long. A part of
the capital therefore bets the same against bounds that only fall: the least upper bounds of the shares so far
(`quantdrift.drift.detectors.tail.quantile.ceilings`, valid at all times at once), tolerated. With shares at most these the
mean of e is at most 1, because each bet pays more the further out an item lies. Frozen by hand, all of the capital does.
They are not lowered after an alert, nor below what a season within the tolerance needs while the baseline does not span
whole weeks.

A fifth of the capital bets on a change since a moment against every mean that the past allows: a smooth change, which the
pool takes in (`quantdrift.drift.detectors.tail.past`).

While an alert lasts nothing goes into the baseline, but the pool of the learned null includes the new groups: a page
copy that continues through a warning against a fixed pool would bet against a finite sample.

Bound: as for every detector on this engine (Shin, Ramdas, Rinaldo, arXiv 2203.03532), plus `delta` for the frozen
bounds. For the learned half the mean of E is at most the mass given at fixed times; that alarms keep to it is
verified by simulation, not proved.
Delay: lognormal (sigma 1), the top 1 % scaled by three, the mean the same to two decimals, history of 40,000, A = 4e6:
some 570 groups without tolerance (1.46 times an oracle CUSUM that does not know the gap), 1,060 with tau = 0.25.
"""

import math

import msgspec
import numpy as np

from quantdrift.core.errors import OperatorError
from quantdrift.drift.detectors.tail import extreme, past, pooled_histogram, quantile
from quantdrift.drift.detectors.tail.payoff import capital, factors
from quantdrift.drift.detectors.tail.pooled_histogram import (
    ASIDE,
    BAR,
    BASE,
    BINS,
    BOUND_N,
    CUSUM,
    FLOOR,
    FROZEN,
    LIVE,
    MIRROR,
    MORE,
    N_BETS,
    NEWER,
    OLDER,
    ONSET_AT,
    PAGE,
    PAST,
    READY,
    SELECTED,
    SIZE,
    TAU,
    TailBaseline,
)
from quantdrift.drift.detectors.tail.quantile import N_BINS
from quantdrift.drift.evidence import header, interval, onset
from quantdrift.drift.evidence import recovery as resolve
from quantdrift.drift.evidence import run as path
from quantdrift.drift.evidence.clock import DAY_US
from quantdrift.drift.evidence.header import (
    ALERTING,
    CREATED_AT,
    LAST_AT,
    N_TOTAL,
    PAGE_MASS,
    PAGING,
    SCALE,
    TICKET_MASS,
    M,
    N,
    Onset,
    W,
)
from quantdrift.drift.evidence.numba_cache import compiled, dot
from quantdrift.drift.evidence.observations import FloatArray, GroupSequence, IntArray, ObservationBlock
from quantdrift.drift.evidence.run import BlockRun, SequenceRun

SHOWN = 0.99  # the quantile that a single number shows
# Start indices, since compiled code cannot use slices of the module.
_ONES = np.ones(N_BETS)
_PAGE, _MIRROR, _PAST = PAGE.start, MIRROR.start, PAST.start
_FLOOR_AT = FLOOR.start + pooled_histogram.AT
_PAST_END, _PAST_EVIDENCE = PAST.stop, PAST.start + past.EVIDENCE
_BASE, _ASIDE = BASE.start, ASIDE.start


class TailDetector:
    """The detector of this module, for many signals at a time. It has no state of its own: states are rows of numbers."""

    kind = "tail"
    size = SIZE
    record: type[msgspec.Struct] = TailBaseline
    width = N_BINS  # per bin, the group's items in it over the group's items

    def fresh(self, *, tau: float, scale: float, mass: float, at_us: int, delta: float = 1e-5) -> FloatArray:
        """Return the state of a new signal, (SIZE,), that first learns its baseline.

        Parameters
        ----------
        tau
            Tolerance: by which factor above 1 every share may swing.
        scale
            What 1 on the grid of `quantdrift.drift.detectors.tail.quantile` is in the metric's own unit.
        mass, at_us
            The calendar clock now: nothing before it counts.
        delta
            Chance that the frozen bounds will be below the truth, in (0, 1).
        """
        blank = TailBaseline(
            counts=(0.0,) * N_BINS, n_groups=0, tau=tau, delta=delta, since_us=at_us, until_us=at_us
        )
        return self.from_content(blank, scale=scale, mass=mass, at_us=at_us)

    def live(self, state: FloatArray) -> bool:
        """Return whether its baseline is complete."""
        return bool(state[LIVE])

    def missing(self, state: FloatArray) -> int:
        """Return how many more groups the baseline needs."""
        return 0 if state[LIVE] else max(READY - int(state[BASE][0]), 0)

    def missings(self, states: FloatArray) -> IntArray:
        """Return how many groups each baseline lacks, (N,)."""
        lacking = np.maximum(READY - states[:, BASE.start].astype(np.intp), 0)
        return np.where(states[:, LIVE] != 0.0, 0, lacking)

    def due_us(self, states: FloatArray) -> FloatArray:
        """Return from when on each baseline is complete, or a snapshot of it is due, (N,)."""
        complete = states[:, BASE.start] >= READY
        learning = np.where(complete, -np.inf, np.inf)
        due = np.where(states[:, LIVE] != 0.0, states[:, NEWER.start + 1] + DAY_US, learning)
        due[pooled_histogram.may_fall(states)] = -np.inf
        return np.where(states[:, ALERTING] != 0.0, np.inf, due)

    def tend(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Do the work between batches, in place: go live when complete, lower bounds, and keep a daily snapshot."""
        if state.item(ALERTING):
            return
        if not state.item(LIVE):
            if not self.missing(state):
                pooled_histogram.complete(state)
                self.arm(state, mass=mass, at_us=at_us)
            return
        # Called for every signal after every batch: the answer is nearly always no.
        if state.item(BASE.start) >= MORE * state.item(BOUND_N) and pooled_histogram.may_fall(state[None])[0]:
            pooled_histogram.lower(state)
        if at_us - state.item(NEWER.start + 1) >= DAY_US:
            state[OLDER] = state[NEWER]
            state[NEWER] = pooled_histogram.growing(state)
            state[NEWER.start + 1] = at_us

    def arm(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Restart both copies, in place; after an alert with the baseline from before its onset.

        What was seen since then is set aside, for `keep`.
        """
        if state[FROZEN]:
            state[ASIDE] = state[OLDER] = state[NEWER] = 0.0
            state[[ASIDE.start + 1, OLDER.start + 1, NEWER.start + 1]] = at_us
        elif state[ALERTING] and state[LIVE]:
            pooled_histogram.go_back(state)
        past.clear(state[PAST])
        if alerted := bool(state[ALERTING]):
            state[ONSET_AT] = SELECTED
        header.armed(state, mass=mass)
        if alerted and not state[FROZEN]:
            pooled_histogram.restart_past(state)
        state[PAGE] = state[MIRROR] = 0.0
        state[[M, BAR]] = 0.0
        self._floor(state, at_us)

    def alarmed(self, state: FloatArray, *, page: bool) -> None:
        """Reset the copy (both for a page), stop learning, and watch for recovery, in place.

        Recovery is required at and above the bin whose share has risen most clearly since the onset, in nats, over
        (1 + tau) times its earlier share; where none has risen clearly, this signal does not delay the end of the alert.
        """
        if not state[ALERTING]:
            state[ONSET_AT] = state[FLOOR][1]
            if state[FROZEN]:
                state[OLDER] = state[NEWER] = state[ASIDE].copy()
            else:
                pooled_histogram.before_onset(state)
                state[ASIDE] = 0.0
        header.paused(state, page=page)
        state[MIRROR] = 0.0
        if page:
            state[PAGE] = 0.0
            past.clear(state[PAST])
        if state[LIVE]:
            state[BAR], state[M] = pooled_histogram.raised(state)

    def inherit(self, state: FloatArray, *, mass: float, at_us: int) -> FloatArray:
        """Return a new signal with another signal's baseline and bounds: for a version's successor.

        Where the other alerts, from its baseline before the onset. Where it still learns, the new one learns on.
        """
        content = pooled_histogram.read(state)
        return self.from_content(content, scale=float(state[SCALE]), mass=mass, at_us=at_us)

    def carry(self, state: FloatArray, before: FloatArray) -> bool:
        """Move the evidence of a version that ended to the one that serves instead, both in place; see `Detector.carry`."""
        if not (self.live(state) and self.live(before) and header.handed_over(state, before, (PAGE,))):
            return False
        n = float(pooled_histogram.seen(state)[0])
        past.hand_over(state[PAST], before[PAST], header.HANDED_OVER, n)
        return True

    def from_content(self, content: TailBaseline, *, scale: float, mass: float, at_us: int) -> FloatArray:
        """Return a new signal with a stored baseline: live if that has bounds or is long enough, else it continues to learn."""
        state = np.zeros(SIZE)
        state[SCALE] = scale
        header.opened(state, mass=mass, at_us=at_us)
        pooled_histogram.write(state, content)
        self.arm(state, mass=mass, at_us=at_us)
        return state

    def content(self, state: FloatArray) -> TailBaseline:
        """Return the baseline for storing, complete or not; during an alert that from before the onset."""
        return pooled_histogram.read(state)

    def learned(self, state: FloatArray) -> int:
        """Return the number of groups in the baseline."""
        return pooled_histogram.read(state).n_groups

    def freeze(self, state: FloatArray) -> None:
        """Stop learning, in place: only bounds from the whole baseline are tested, and the evidence restarts.

        Raises
        ------
        OperatorError
            The baseline is not complete.
        """
        if lacking := self.missing(state):
            raise OperatorError(f"the baseline cannot be frozen yet: {lacking} groups are missing")
        pooled_histogram.freeze(state)
        state[PAGE] = 0.0
        past.clear(state[PAST])
        state[[PAGE_MASS, TICKET_MASS]] = 0.0
        self._floor(state, int(state[LAST_AT]))

    def keep(self, state: FloatArray) -> None:
        """Add the groups that the last alert set aside to the baseline, after it was judged false; in place.

        While it still lasts, or any time until the next one.
        """
        if pooled_histogram.has_aside(state):
            pooled_histogram.keep(state)
            pooled_histogram.restart_past(state)

    def aside(self, state: FloatArray) -> bool:
        """Return whether `keep` would change the baseline."""
        return pooled_histogram.has_aside(state)

    def evidence(self, state: FloatArray) -> float:
        """Return the evidence of the page copy."""
        return float(state[PAGE].sum() + state[_PAST_EVIDENCE])

    def evidences(self, states: FloatArray) -> FloatArray:
        """Return the evidence of the page copies, (N,)."""
        evidence: FloatArray = states[:, PAGE].sum(axis=1) + states[:, _PAST_EVIDENCE]
        return evidence

    def page_mass(self, state: FloatArray) -> float:
        """Return the calendar mass given to the page copy since its reset."""
        return float(state[PAGE_MASS])

    def moved(self, state: FloatArray) -> Onset:
        """Return the onset, and p99 before and since it, where there are enough groups (300)."""
        since = np.maximum(pooled_histogram.seen(state) - state[FLOOR], 0.0)
        scale = float(state[SCALE])
        before, after = (
            quantile.point(histogram[2:], histogram[0], SHOWN) for histogram in (state[FLOOR], since)
        )
        return Onset(
            onset_us=int(max(state[FLOOR][1], state[CREATED_AT])),
            before=None if before is None else scale * before,
            after=None if after is None else scale * after,
            n_after=int(since[0]),
            n_before=int(state[FLOOR][0]),
        )

    def recent(self, state: FloatArray) -> interval.WeightedEstimate | None:
        """Return p99 with its band over the last day or two (while alerting: since the alarm), if there are enough groups."""
        return self.shown(state, SHOWN)

    def since_change(self, state: FloatArray) -> interval.WeightedEstimate | None:
        """Return p99 since the alarm; while watching, the recent one."""
        return self.shown(state, SHOWN)

    def shown(
        self, state: FloatArray, q: float, *, shortfall: bool = False
    ) -> interval.WeightedEstimate | None:
        """Return a quantile of the recent window, or the mean above it, in the metric's own unit."""
        window = pooled_histogram.recent(state)
        find = quantile.shortfall if shortfall else quantile.quantile
        estimate = find(window[2:], window[0], q)
        return estimate.scaled(float(state[SCALE])) if estimate else None

    def extrapolated(self, state: FloatArray, q: float) -> float | None:
        """Return a quantile beyond the size of the recent window, extrapolated from the shape of its tail; see `extreme`."""
        window = pooled_histogram.recent(state)
        value = extreme.extreme_quantile(window[2:], float(window[0]), q)
        return None if value is None else value * float(state[SCALE])

    def run(self, states: FloatArray, block: ObservationBlock) -> BlockRun:
        """Run signals with `states`, (N, SIZE), over `block`, and return their run."""
        return BlockRun(self.follow, states, block)

    def follow(self, states: FloatArray, groups: GroupSequence) -> SequenceRun:
        """Run signals over their groups, changing `states`, (N, SIZE), in place, and return their run."""
        course = np.empty((path.N_ROWS, len(groups.seen)))
        if not _follow(states, groups, course):
            raise ValueError("the weights of a group over its bins are at least 0 and add up to 1")
        return SequenceRun(course=course, states=states)

    @staticmethod
    def _floor(state: FloatArray, at_us: int) -> None:
        state[CUSUM] = 1.0
        state[FLOOR] = pooled_histogram.seen(state)
        state[FLOOR][1] = at_us


@compiled
def _follow(states: FloatArray, groups: GroupSequence, course: FloatArray) -> bool:
    """Run states, (N, SIZE), over a sequence of groups, in place, and write their run; False: an invalid group."""
    factor, shares, pool = np.empty(N_BETS), np.empty(N_BETS), np.empty(N_BINS)
    above = np.zeros(N_BINS + 1)
    ends, x, seen, mass, at_us, captured_us = groups
    begin = 0
    for row in range(len(states)):
        state = states[row]
        capital(state, shares)
        asked = state[BAR] > 0 and state[ALERTING] > 0
        mirror = state[_MIRROR : _MIRROR + len(resolve.BETS)]
        page = _evidence(state)
        recovery = resolve.recovered(mirror) if asked else math.inf
        for group in range(begin, ends[row]):
            if seen[group]:
                allowance = header.spend(state, mass[group], at_us[group], state[LIVE])
                if not pooled_histogram.take(state, x[group]):
                    return False
                state[N_TOTAL] += 1.0
                state[N] += 1.0
                state[W] += 1.0
                cusum = state[CUSUM]
                if _look(state, above, allowance, at_us[group]):
                    capital(state, shares)
                if state[LIVE] > 0:
                    factors(state, x[group], pool, factor)
                    page = _grow(state, factor, shares, allowance, page)
                if state[CUSUM] == 1.0:
                    pooled_histogram.remember(state, at_us[group])
                elif state[CUSUM] > cusum and captured_us[group] < state[_FLOOR_AT]:
                    state[_FLOOR_AT] = captured_us[group]  # as `onset.redate`
                if asked:
                    resolve.reflect(mirror, state[M], x[group, int(state[BAR]) :].sum() - state[M])
                    recovery = resolve.recovered(mirror)
            path.note(course, group, state, page, recovery)
        begin = ends[row]
    return True


@compiled
def _look(state: FloatArray, above: FloatArray, allowance: float, at_us: float) -> bool:
    """Give the bets against the past their part of the allowance, and look at them where it is time, in place.

    Returns
    -------
    Whether their levels were chosen now: the capital is shared with them from here on.
    """
    if state[FROZEN] > 0:
        return False
    part = state[_PAST:_PAST_END]
    without = part[past.LEVEL] == 0.0
    if not without:
        part[past.PENDING] += past.SHARE * allowance
    aside = 1.0 * pooled_histogram.sets_aside(state)
    n = state[_BASE] + aside * state[_ASIDE]
    if state[PAGING] == 0.0 or n % past.EVERY != 0.0:
        return False
    for bin_ in range(N_BINS - 1, -1, -1):
        above[bin_] = above[bin_ + 1] + state[_BASE + BINS + bin_] + aside * state[_ASIDE + BINS + bin_]
    past.look(part, above, n, at_us, state[TAU])
    return bool(without and part[past.LEVEL] > 0.0)


@compiled
def _grow(state: FloatArray, factor: FloatArray, shares: FloatArray, given: float, page: float) -> float:
    """Update evidence and its twin by a group, in place; return the evidence, which was `page`."""
    for bet in range(N_BETS):
        state[_PAGE + bet] = (state[_PAGE + bet] + shares[bet] * given) * factor[bet]
    staked, after = page + given, _evidence(state)
    if staked > 0.0:
        state[CUSUM] = onset.twin(state[CUSUM], after / staked)
    return after


@compiled
def _evidence(state: FloatArray) -> float:
    evidence: float = dot(state[_PAGE : _PAGE + N_BETS], _ONES) + state[_PAST_EVIDENCE]
    return evidence
