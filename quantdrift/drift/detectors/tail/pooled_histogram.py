"""The pooled histogram of a tail detector: all groups, the part that is the baseline, and the layout of both in its state.

Everything here is decided between batches or at an alarm, one signal at a time; what happens group by group is in
`quantdrift.drift.detectors.tail.detector`.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from quantdrift.core.errors import OperatorError
from quantdrift.drift.detectors.tail import past, quantile, rank
from quantdrift.drift.detectors.tail.quantile import EDGES, N_BINS
from quantdrift.drift.evidence import recovery
from quantdrift.drift.evidence.clock import beyond_weeks
from quantdrift.drift.evidence.header import ALERTING, HEADER, LAST_AT, SCALE
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import BoolArray, FloatArray

READY = 10_000  # groups of a baseline
DEFAULT_TAU = 0.25
DEFAULT_DELTA = 1e-5
_ROUNDING = 1e-9
_WIDEST, _HALVINGS = 1e4, 40  # of the search for the tolerance of a pool
TOLD = 25.0  # groups at or above a bin needed to compare siblings there
MORE = 1.125  # times the groups behind the bounds, at which they are lowered
SELECTED = -1.0  # in `ONSET_AT`
CLEAR = 4.0  # nats by which a share must have risen for recovery to be required
N_LEARNED = rank.N_BETS  # against the learned null
N_BETS = N_LEARNED + rank.N_BETS  # then against the frozen one

# The state of one signal: float64, after the header of `quantdrift.drift.evidence.header`. A histogram is its number of
# groups, the event time it stands for, and the weight per bin.
GROUPS, AT, BINS = range(3)
_HISTOGRAM = BINS + N_BINS
(
    TAU,
    DELTA,  # chance that the frozen bounds are too low
    LIVE,  # 1.0 when the baseline is complete
    FROZEN,  # 1.0 when frozen by hand: it does not learn any more
    BAR,  # bin at and above which recovery is required; 0 where it is not
    ONSET_AT,  # of the current alarm, microseconds; SELECTED when an earlier one has chosen what was learned
    CUSUM,  # twin of the page copy
    BOUND_N,  # groups behind the frozen bounds
    SINCE_AT,  # event time from which on the baseline was learned, microseconds
) = range(HEADER, HEADER + 9)
BASE = slice(HEADER + 9, HEADER + 9 + _HISTOGRAM)  # the baseline: learned groups
ASIDE = slice(BASE.stop, BASE.stop + _HISTOGRAM)  # groups not learned: while alerting, or frozen
FLOOR = slice(ASIDE.stop, ASIDE.stop + _HISTOGRAM)  # sum of both when the twin was last at its floor
OLDER = slice(FLOOR.stop, FLOOR.stop + _HISTOGRAM)  # snapshots of the growing histogram, a day apart
NEWER = slice(OLDER.stop, OLDER.stop + _HISTOGRAM)
BOUND = slice(NEWER.stop, NEWER.stop + N_BINS)  # frozen upper bounds of the shares at or above each bin
PAGE = slice(BOUND.stop, BOUND.stop + N_BETS)
MIRROR = slice(PAGE.stop, PAGE.stop + len(recovery.BETS))
PAST = slice(MIRROR.stop, MIRROR.stop + past.SIZE)  # bets against what the past allows
SIZE = PAST.stop
# Start indices, since compiled code cannot use slices of the module.
_BASE, _ASIDE, _FLOOR = BASE.start, ASIDE.start, FLOOR.start


class TailBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """A stored baseline of the tail.

    Parameters
    ----------
    counts
        Weight per bin of the grid, `N_BINS` numbers adding up to `n_groups`.
    n_groups
        Groups in it.
    bound
        Upper bounds of the shares at or above each bin, without tolerance; empty where there are none yet.
    n_bound
        Groups behind these bounds, 0 where there are none.
    tau
        Tolerance: shares up to (1 + tau) times the baseline's are no drift.
    delta
        Probability that any of the bounds is too low.
    since_us, until_us
        Event times of its first and last group, microseconds since 1970.
    fixed
        Frozen by hand: nothing is learned any more, and the bounds alone are tested.
    selected
        An alert has chosen what was learned: the bounds are lowered no more.
    begin
        Bin of the first level of `quantdrift.drift.detectors.tail.past`, and the counts that the past begins after; empty
        where there is none.
    """

    counts: tuple[float, ...]
    n_groups: int
    bound: tuple[float, ...] = ()
    n_bound: int = 0
    tau: float = DEFAULT_TAU
    delta: float = DEFAULT_DELTA
    since_us: int = 0
    until_us: int = 0
    fixed: bool = False
    selected: bool = False
    begin: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that are not a baseline on this grid: they would break the bound."""
        if len(self.counts) != N_BINS or len(self.bound) not in {0, N_BINS}:
            raise OperatorError(
                f"a baseline of the tail has {N_BINS} bins: learn it again, or import it again"
            )
        if min(self.counts) < 0 or abs(sum(self.counts) - self.n_groups) > _ROUNDING * (1 + self.n_groups):
            raise OperatorError("the counts of a baseline do not add up to its groups: import it again")
        if len(self.begin) not in {0, past.N_BEGIN} or not all(map(math.isfinite, self.begin)):
            raise OperatorError("the begin of a baseline has a level and its counts: import it again")
        if not (0 <= self.tau < math.inf and 0 < self.delta < 1):
            raise OperatorError("a baseline has a tolerance from 0 on and a delta inside (0, 1)")


class Exceedance(msgspec.Struct, frozen=True, kw_only=True):
    """The move of the share above one level; it needs fewer groups than a quantile.

    Parameters
    ----------
    level
        In the metric's own unit.
    before, after
        Share of items at or above it in the baseline, and since the onset.
    """

    level: float
    before: float
    after: float


def pool(contents: Sequence[TailBaseline]) -> TailBaseline:
    """Return the pooled baseline of sibling slices, for a slice with too few groups of its own.

    What is assumed: the tail of the slice that is to use it is no heavier than that of the heaviest of its siblings.
    These differ among themselves, and a slice whose divergences are 1.3 times those of the pool alarms with certainty
    at a tolerance of 0. So the tolerance is widened until no sibling would: by the least tolerance at which the share of
    each at or above any bin is no drift from that of all, where each can be expected to have 25 groups there. The
    price is delay, the more so where the slice's own tail is light: let its own baseline take over when that is
    complete.

    Raises
    ------
    OperatorError
        There is nothing to pool.
    """
    if not contents:
        raise OperatorError(
            "no sibling has a baseline to pool: name one that has, or wait until one is complete"
        )
    counts = np.sum([sibling.counts for sibling in contents], axis=0)
    tau = max(sibling.tau for sibling in contents)
    return TailBaseline(
        counts=tuple(counts.tolist()),
        n_groups=sum(sibling.n_groups for sibling in contents),
        tau=(1.0 + tau) * _spread([sibling for sibling in contents if sibling.n_groups]) - 1.0,
        delta=max(sibling.delta for sibling in contents),
        since_us=min(sibling.since_us for sibling in contents),
        until_us=max(sibling.until_us for sibling in contents),
        selected=any(sibling.selected for sibling in contents),
    )


def _spread(contents: Sequence[TailBaseline]) -> float:
    """Return 1 plus the least tolerance at which no sibling's share at or above a bin is drift from that of all."""
    if not contents:
        return 1.0
    above = quantile.survival(np.array([sibling.counts for sibling in contents]))[:, :-1]
    n = np.array([sibling.n_groups for sibling in contents], dtype=np.float64)
    together = above.sum(axis=0) / n.sum()
    largest = (above / n[:, None]).max(axis=0)
    comparable = np.flatnonzero(together * n.min() >= TOLD).tolist()
    low, high = 0.0, _WIDEST
    for _ in range(_HALVINGS):
        tau = (low + high) / 2
        if all(
            largest[bin_] <= rank.tolerated(together, 1.0, bin_, tau, rank.shift(tau)) for bin_ in comparable
        ):
            high = tau
        else:
            low = tau
    return 1.0 + high


def read(state: FloatArray) -> TailBaseline:
    """Return the baseline in a state, complete or not; during an alert, that from before the onset."""
    base = state[NEWER] if state[ALERTING] and state[LIVE] and not state[FROZEN] else state[BASE]
    return TailBaseline(
        counts=tuple(base[2:].tolist()),
        n_groups=int(base[0]),
        bound=tuple(state[BOUND].tolist()) if state[BOUND_N] else (),
        n_bound=int(state[BOUND_N]),
        tau=float(state[TAU]),
        delta=float(state[DELTA]),
        since_us=int(state[SINCE_AT]),
        until_us=int(base[1]),
        fixed=bool(state[FROZEN]),
        selected=bool(not state[FROZEN] and (state[ALERTING] or state[ONSET_AT] == SELECTED)),
        begin=past.begin(state[PAST]),
    )


def write(state: FloatArray, content: TailBaseline) -> None:
    """Write a baseline into a new state, in place; it is complete when it is long enough or has bounds."""
    state[BASE] = (content.n_groups, content.until_us, *content.counts)
    state[[TAU, DELTA, SINCE_AT]] = content.tau, content.delta, content.since_us
    state[FROZEN] = float(content.fixed)
    state[ONSET_AT] = SELECTED if content.selected else 0.0
    if content.bound:
        state[BOUND], state[BOUND_N] = content.bound, content.n_bound
    if content.begin and content.begin[1] <= content.n_groups:
        past.write_begin(state[PAST], content.begin)
    elif content.n_groups >= past.FIRST:
        restart_past(state)
    if content.bound or content.n_groups >= READY:
        complete(state)


def restart_past(state: FloatArray) -> None:
    """Let the past of `quantdrift.drift.detectors.tail.past` begin after all that was seen, in place."""
    pool = seen(state)
    past.restart(state[PAST], quantile.survival(pool[BINS:]), pool[GROUPS], state[LAST_AT], state[TAU])


def learning(state: FloatArray) -> FloatArray:
    """Return 1.0 where new groups are added to the baseline, 0.0 where they are set aside; (...,) of (..., SIZE)."""
    return np.asarray((1.0 - state[..., ALERTING]) * (1.0 - state[..., FROZEN]))


def seen(state: FloatArray) -> FloatArray:
    """Return the pooled histogram: the baseline plus the groups set aside; (..., 66) of (..., SIZE)."""
    return np.asarray(state[..., BASE] + state[..., ASIDE] * (1.0 - learning(state))[..., None])


@compiled
def sets_aside(state: FloatArray) -> bool:
    """Return whether new groups are set aside, and not learned; of one state."""
    return bool(state[ALERTING] > 0 or state[FROZEN] > 0)


@compiled
def take(state: FloatArray, group: FloatArray) -> bool:
    """Add a group, (N_BINS,) weights, to the pool, in place; return whether these are at least 0 and sum to 1."""
    row = _ASIDE if sets_aside(state) else _BASE
    state[row + GROUPS] += 1.0
    state[row + AT] = state[LAST_AT]
    whole = 0.0
    for bin_ in range(N_BINS):
        if group[bin_] != 0.0:
            if not group[bin_] > 0.0:
                return False
            whole += group[bin_]
            state[row + BINS + bin_] += group[bin_]
    return abs(whole - 1.0) <= _ROUNDING


@compiled
def remember(state: FloatArray, at_us: float) -> None:
    """Copy the pool when the twin is at its floor, in place."""
    aside = 1.0 * sets_aside(state)
    for field in range(_HISTOGRAM):
        state[_FLOOR + field] = state[_BASE + field] + aside * state[_ASIDE + field]
    state[_FLOOR + AT] = at_us


def complete(state: FloatArray) -> None:
    """Complete the baseline, in place: fix its frozen bounds, unless it came with some."""
    if not state[BOUND_N]:
        state[BOUND] = _ceilings(state)
        state[BOUND_N] = state[BASE][0]
    state[LIVE] = 1.0
    state[OLDER] = state[NEWER] = state[BASE].copy()


def lower(state: FloatArray) -> None:
    """Lower the frozen bounds to those of what has been learned by now, in place, where these are less.

    They are time-uniform, so the least of them so far is one. A baseline of less than whole weeks may come from a trough
    of the season that the tolerance allows for: no bound goes below the share that there would be with that part of
    its time raised to the middle of such a season.
    """
    swing = float(state[TAU]) * beyond_weeks(state[BASE.start + AT] - state[SINCE_AT])
    state[BOUND_N] = state[BASE][0]
    if swing >= 1.0:
        return
    above, n, up = quantile.survival(state[BASE][2:]), float(state[BASE][0]), 1.0 / (1.0 - swing) - 1.0
    middles = [rank.tolerated(above, n, bin_, up, rank.shift(up)) for bin_ in range(N_BINS)]
    state[BOUND] = np.minimum(state[BOUND], np.maximum(_ceilings(state), middles))


def may_fall(states: FloatArray) -> BoolArray:
    """Return whether enough was learned since the bounds of each of many were fixed to lower them, (N,).

    Not while an alert lasts, nor after one: what it took out of the baseline was chosen by its values.
    """
    free = (states[:, LIVE] > 0) & (states[:, ALERTING] == 0) & (states[:, FROZEN] == 0)
    grown = states[:, BASE.start] >= MORE * states[:, BOUND_N]
    return np.asarray(free & grown & (states[:, ONSET_AT] != SELECTED))


def _ceilings(state: FloatArray) -> FloatArray:
    return quantile.ceilings(state[BASE][2:], float(state[BASE][0]), float(state[DELTA]))


def growing(state: FloatArray) -> FloatArray:
    """Return the histogram that new groups are added to, (66,)."""
    return state[BASE] if learning(state) else state[ASIDE]


def recent(state: FloatArray) -> FloatArray:
    """Return the histogram of the last day or two, or since the alarm during an alert, (66,)."""
    if state[ALERTING] and not state[FROZEN]:
        return state[ASIDE]
    return np.maximum(growing(state) - state[OLDER], 0.0)


def freeze(state: FloatArray) -> None:
    """Freeze the baseline as it is, or as it was before an onset, with bounds from all of it; in place."""
    if state[ALERTING]:
        go_back(state)
    state[FROZEN], state[BOUND_N] = 1.0, 0.0
    complete(state)
    for part in (ASIDE, OLDER, NEWER):
        state[part] = 0.0
        state[part][1] = state[LAST_AT]


def before_onset(state: FloatArray) -> None:
    """Set both snapshots to the newest one from before the onset, or to the groups up to it; in place."""
    snapshot = next((part for part in (NEWER, OLDER) if state[part][1] <= state[ONSET_AT]), FLOOR)
    state[NEWER] = state[OLDER] = state[snapshot].copy()


def go_back(state: FloatArray) -> None:
    """Reset the baseline to before the onset, in place; the groups since then are set aside."""
    dropped = np.maximum(state[BASE] + state[ASIDE] - state[NEWER], 0.0)  # fractions may round below zero
    dropped[1] = state[LAST_AT]
    state[ASIDE], state[BASE] = dropped, state[NEWER]


def raised(state: FloatArray) -> tuple[int, float]:
    """Return the bin at and above which the share rose most clearly since the onset, and its largest accepted share.

    The level of the bet that won would not do: when the top 1 % is scaled by three, p99 itself does not move.

    Returns
    -------
    The bin, and the largest tolerated share there, from the shares before the onset or their frozen bounds, whichever
    is less; (0, 0.0) where no share rose clearly.
    """
    now = seen(state)
    since = np.maximum(now - state[FLOOR], 0.0)
    if since[0] < 1.0:
        return 0, 0.0
    base = state[BASE] if state[FROZEN] else state[FLOOR]
    before = (quantile.survival(base[2:])[:-1] + 1.0) / (base[0] + 1.0)
    shares, tau = np.minimum(before, state[BOUND]), float(state[TAU])
    allowed = np.array([rank.tolerated(shares, 1.0, bin_, tau, rank.shift(tau)) for bin_ in range(N_BINS)])
    after = np.minimum(quantile.survival(since[2:])[:-1] / since[0], 1.0)
    nats = np.where(after > allowed, since[0] * quantile.divergence(after, allowed), 0.0)
    best = int(np.argmax(nats))
    return (best, float(allowed[best])) if nats[best] >= CLEAR else (0, 0.0)


def exceedance(state: FloatArray) -> Exceedance | None:
    """Return how the share moved at the level where that is clearest, or None where none has clearly.

    From the state that alarmed, before the alarm resets it; `before` is the baseline up to the estimated onset.
    """
    best, _ = raised(state)
    if not best:
        return None
    before, since = state[FLOOR], np.maximum(seen(state) - state[FLOOR], 0.0)
    return Exceedance(
        level=float(state[SCALE] * EDGES[best - 1]),
        before=float(before[2 + best :].sum() / before[0]),
        after=float(since[2 + best :].sum() / since[0]),
    )


def keep(state: FloatArray) -> None:
    """Add the groups that the last alert set aside to the baseline, in place, during the alert or after it."""
    if state[FROZEN]:
        return
    back = state[ASIDE].copy()
    state[ASIDE] = 0.0
    if state[ALERTING]:
        _join(state[BASE], back)
        state[NEWER] = state[OLDER] = state[BASE].copy()
    else:
        for part in (BASE, FLOOR, OLDER, NEWER):
            _join(state[part], back)


def has_aside(state: FloatArray) -> bool:
    """Return whether `keep` would change anything: an alert is open, or has set groups aside."""
    return bool(not state[FROZEN] and (state[ALERTING] or state[ASIDE][0]))


def _join(sums: FloatArray, more: FloatArray) -> None:
    sums[0] += more[0]
    sums[2:] += more[2:]
