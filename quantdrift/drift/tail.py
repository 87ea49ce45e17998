"""Tail: large divergences became more frequent, or larger, though the mean may not have moved at all.

H0 "the groups are exchangeable": what comes is like the baseline. With C(>= b) the weight of all groups so far, the
newest included, at or above bin b, and n their number, an item in bin b has the shares

    hi = (1 + tau) C(>= b) / n,   lo = (1 + tau) C(> b) / n,   each at most 1,

and bet k (see `quantdrift.drift.rank`) pays `e_k`, averaged over the group by its weights; then

    R_k <- (R_k + gamma) * e_k,   E = sum over k of w_k R_k.

Validity of the learned null: given the bag of the n groups, without their order, the newest is each of them with
chance 1 / n. The weight in bin b is then (hi - lo) / (1 + tau) on average, and e_k is the average of its density over
(lo, hi]: the sum over bins is the integral of the density over at most (0, 1 + tau), divided by 1 + tau, and as the
density falls and has mean 1 that is at most 1. It holds for any law, ties, fractional weights and every tau >= 0;
nothing is estimated. The newest group must be in the bag. tau is tolerance: shares may swing by so much.

What a bag has absorbed it cannot see: a drift that creeps in, or the one that was there before it was long. A part of
the capital therefore bets the same, without the stretch bets, against a null that does not move: upper bounds of the
shares, fixed when the baseline was complete, times 1 + tau. With shares at most these the mean of e is at most 1,
because each bet pays more the further out an item lies. Frozen by hand, all of the capital does.

While an alert lasts nothing goes into the baseline, but the bag of the learned null takes in what came since: a page
copy that runs on through a warning against a bag that stands still would be betting against a finite sample.

Bound: as for every detector on this engine (Shin, Ramdas, Rinaldo, arXiv 2203.03532), plus `delta` for the frozen
bounds. For the learned half the mean of E is at most the mass given at fixed times; that alarms keep to it is
verified by simulation, not proved.
Delay: lognormal (sigma 1), the top 1 % scaled by three, the mean the same to two decimals, history of 30,000,
A = 4e6: some 480 groups without tolerance (1.45 times an oracle CUSUM), 590 with tau = 0.25.
"""

import msgspec
import numpy as np

from quantdrift.core.errors import OperatorError
from quantdrift.drift import bag, extreme, interval, onset, path, quantile, resolve, signal
from quantdrift.drift.bag import (
    ASIDE,
    BAR,
    BASE,
    CUSUM,
    FLOOR,
    FROZEN,
    LIVE,
    MIRROR,
    NEWER,
    OLDER,
    ONSET_AT,
    PAGE,
    READY,
    SIZE,
    TICKET,
    TailBaseline,
)
from quantdrift.drift.block import Block, BoolArray, FloatArray, IntArray, Trail
from quantdrift.drift.clock import DAY_US
from quantdrift.drift.path import Flow, Path
from quantdrift.drift.quantile import N_BINS
from quantdrift.drift.signal import (
    ALERTING,
    LAST_AT,
    N_TOTAL,
    PAGE_MASS,
    SCALE,
    TICKET_MASS,
    TICKETING,
    M,
    Moved,
    N,
    W,
)
from quantdrift.drift.stake import capital, factors

SHOWN = 0.99  # the quantile that a single number shows
_ROUNDING = 1e-9


class TailDetector:
    """The detector of this module, for many signals at a time. It holds nothing: states are rows of numbers."""

    kind = "tail"
    size = SIZE
    record: type[msgspec.Struct] = TailBaseline
    width = N_BINS  # per bin, the group's items in it over the group's items

    def fresh(self, *, tau: float, scale: float, mass: float, at_us: int, delta: float = 1e-5) -> FloatArray:
        """Return the state of a new signal, (SIZE,), which learns its baseline first.

        Parameters
        ----------
        tau
            Tolerance: by which factor above 1 every share may swing.
        scale
            What 1 on the grid of `quantdrift.drift.quantile` is in the metric's own unit.
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
        """Return how many groups its baseline lacks."""
        return 0 if state[LIVE] else max(READY - int(state[BASE][0]), 0)

    def tend(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Between batches: take part when the baseline is complete, and keep a snapshot a day, in place."""
        if state[ALERTING]:
            return
        if not state[LIVE]:
            if not self.missing(state):
                bag.complete(state)
                self.arm(state, mass=mass, at_us=at_us)
        elif at_us - state[NEWER][1] >= DAY_US:
            state[OLDER] = state[NEWER]
            state[NEWER] = bag.growing(state)
            state[NEWER.start + 1] = at_us

    def arm(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Let both copies begin anew; after an alert from the baseline before its onset. In place.

        What was seen since then is set aside, for `keep`.
        """
        if state[FROZEN]:
            state[ASIDE] = state[OLDER] = state[NEWER] = 0.0
            state[[ASIDE.start + 1, OLDER.start + 1, NEWER.start + 1]] = at_us
        elif state[ALERTING] and state[LIVE]:
            bag.go_back(state)
        signal.armed(state, mass=mass)
        state[PAGE] = state[TICKET] = state[MIRROR] = 0.0
        state[[M, BAR, ONSET_AT]] = 0.0
        self._floor(state, at_us)

    def alarmed(self, state: FloatArray, *, page: bool) -> None:
        """Reset the copy (both for a page), learn nothing more, and watch for recovery, in place.

        Recovery is asked for at and above the bin whose share has risen most clearly since the onset, in nats, over
        (1 + tau) times what it was; where none has clearly, this signal does not stand in the way.
        """
        if not state[ALERTING]:
            state[ONSET_AT] = state[FLOOR][1]
            if state[FROZEN]:
                state[OLDER] = state[NEWER] = state[ASIDE].copy()
            else:
                bag.before_onset(state)
                state[ASIDE] = 0.0
        signal.paused(state, page=page)
        state[TICKET] = state[MIRROR] = 0.0
        if page:
            state[PAGE] = 0.0
        if state[LIVE]:
            state[BAR], state[M] = bag.raised(state)

    def inherit(self, state: FloatArray, *, mass: float, at_us: int) -> FloatArray:
        """Return a new signal that starts from another's baseline and bounds: a version and its successor.

        Where the other alerts, from its baseline before the onset. Where it still learns there is nothing to inherit:
        the new one learns from nothing.
        """
        scale, content = float(state[SCALE]), bag.read(state)
        if not self.live(state):
            return self.fresh(tau=content.tau, scale=scale, mass=mass, at_us=at_us, delta=content.delta)
        return self.from_content(content, scale=scale, mass=mass, at_us=at_us)

    def from_content(self, content: TailBaseline, *, scale: float, mass: float, at_us: int) -> FloatArray:
        """Return a new signal with a recorded baseline: live if that has bounds or is long enough, else it learns on."""
        state = np.zeros(SIZE)
        state[SCALE] = scale
        signal.opened(state, mass=mass, at_us=at_us)
        bag.write(state, content)
        self.arm(state, mass=mass, at_us=at_us)
        return state

    def content(self, state: FloatArray) -> TailBaseline:
        """Return the baseline, complete or not, as it is to be recorded; while alerting that before the onset."""
        return bag.read(state)

    def learned(self, state: FloatArray) -> int:
        """Return how many groups the baseline is made from."""
        return bag.read(state).n_groups

    def freeze(self, state: FloatArray) -> None:
        """Learn nothing more, in place: bounds from the whole baseline alone are tested, evidence begins anew.

        Raises
        ------
        OperatorError
            The baseline is not complete.
        """
        if lacking := self.missing(state):
            raise OperatorError(f"the baseline cannot be frozen yet: {lacking} groups are missing")
        bag.freeze(state)
        state[PAGE] = state[TICKET] = 0.0
        state[[PAGE_MASS, TICKET_MASS]] = 0.0
        self._floor(state, int(state[LAST_AT]))

    def keep(self, state: FloatArray) -> None:
        """Take back into the baseline what the last alert set aside, after it was judged false; in place.

        While it still lasts, or any time until the next one.
        """
        bag.keep(state)

    def evidence(self, state: FloatArray) -> float:
        """Return the evidence of the page copy."""
        return float(state[PAGE].sum())

    def page_mass(self, state: FloatArray) -> float:
        """Return the calendar mass that the page copy was given since its reset."""
        return float(state[PAGE_MASS])

    def moved(self, state: FloatArray) -> Moved:
        """Return the onset, and p99 before and since it, as far as there are groups enough to tell (300)."""
        since = np.maximum(bag.seen(state) - state[FLOOR], 0.0)
        scale = float(state[SCALE])
        before, after = (quantile.point(one[2:], one[0], SHOWN) for one in (state[FLOOR], since))
        return Moved(
            onset_us=int(state[FLOOR][1]),
            before=None if before is None else scale * before,
            after=None if after is None else scale * after,
            n_after=int(since[0]),
        )

    def recent(self, state: FloatArray) -> interval.Estimate | None:
        """Return p99 with its band over the last day or two (while alerting: since the alarm), if it can be told."""
        return self.shown(state, SHOWN)

    def since_change(self, state: FloatArray) -> interval.Estimate | None:
        """Return p99 since the alarm; while watching, the recent one."""
        return self.shown(state, SHOWN)

    def shown(self, state: FloatArray, q: float, *, shortfall: bool = False) -> interval.Estimate | None:
        """Return a quantile of the recent window, or the mean of what lies above it, in the metric's own unit."""
        window = bag.recent(state)
        find = quantile.shortfall if shortfall else quantile.quantile
        found = find(window[2:], window[0], q)
        return found.scaled(float(state[SCALE])) if found else None

    def extrapolated(self, state: FloatArray, q: float) -> float | None:
        """Return a quantile that the recent window is too small for, from the shape of its tail; see `extreme`."""
        window = bag.recent(state)
        found = extreme.extreme_quantile(window[2:], float(window[0]), q)
        return None if found is None else found * float(state[SCALE])

    def run(self, states: FloatArray, block: Block) -> Path:
        """Return what signals with `states`, (N, SIZE), go through along `block`."""
        return Path(self.follow, states, block)

    def follow(self, states: FloatArray, trail: Trail) -> Flow:
        """Return what signals with `states`, (N, SIZE), go through along their groups."""
        steps, seen = trail.steps, trail.seen
        row, last = steps.row, steps.last
        if not seen.all():
            trail = msgspec.structs.replace(trail, x=np.where(seen[:, None], trail.x, 0.0))
        weights = trail.x
        if weights.min() < 0.0 or (np.abs(weights.sum(axis=1) - seen) > _ROUNDING).any():
            raise ValueError("the weights of a group over its bins are at least 0 and add up to 1")
        counts = trail.sums(seen.astype(np.float64))
        items = np.divmod(np.flatnonzero(weights != 0.0), N_BINS)
        factor = factors(states, trail, counts, items)
        spent = path.spend(states, trail)
        live = states[:, LIVE][row]
        given = spent.given * live
        bets = steps.grow(states[:, PAGE], factor, factor * capital(states)[row] * given[:, None])
        page = bets.sum(axis=1)
        staked = steps.prior(states[:, PAGE].sum(axis=1), page) + given
        growth = np.where(seen & (staked > 0), page / np.where(staked > 0, staked, 1.0), 1.0)
        twin = onset.follow(steps, states[:, CUSUM, None], growth[:, None], seen)
        recovery, mirror = _mirror(states, trail)
        state = states.copy()
        spent.write(state, trail)
        state[:, PAGE_MASS] = np.where(state[:, LIVE] > 0, state[:, PAGE_MASS], states[:, PAGE_MASS])
        state[:, TICKET_MASS] = state[:, PAGE_MASS] * state[:, TICKETING]
        for field in (N_TOTAL, N, W):
            state[:, field] += counts[last]
        state[:, PAGE] = bets[last]
        state[:, TICKET] = state[:, PAGE] * state[:, TICKETING, None]
        state[:, MIRROR] = mirror
        state[:, CUSUM] = twin.cusum[:, 0]
        self._learn(state, trail, counts, items, twin.floor[:, 0])
        return Flow(
            page=page,
            page_mass=np.where(live > 0, spent.page_mass, states[row, PAGE_MASS]),
            ticket=page * states[row, TICKETING],
            ticket_mass=np.where(live > 0, spent.page_mass, states[row, PAGE_MASS]) * states[row, TICKETING],
            recovery=recovery,
            page_bets=bets,
            states=state,
        )

    @staticmethod
    def _learn(
        state: FloatArray, trail: Trail, counts: FloatArray, items: tuple[IntArray, IntArray], floor: IntArray
    ) -> None:
        """Take the groups into the histograms, in place: all of them, and those up to the floor of the twin."""
        n, steps = len(state), trail.steps
        group, place = items
        weight, owner = trail.x[group, place], steps.row[group]

        def sums(taken: BoolArray) -> FloatArray:
            cell = (owner * N_BINS + place)[taken]
            found = np.bincount(cell, weight[taken], n * N_BINS).reshape(n, N_BINS)
            return np.asarray(found, dtype=np.float64)

        at = steps.places(np.maximum(floor, 0))
        fell = floor >= 0
        before = bag.seen(state)
        before[:, 2:] += sums(steps.step[group] <= floor[owner])
        before[:, 0] += counts[at]
        before[:, 1] = trail.at_us[at]
        state[:, FLOOR] = np.where(fell[:, None], before, state[:, FLOOR])
        learning = bag.learning(state) > 0
        more = np.empty_like(before)
        more[:, 0], more[:, 1] = counts[steps.last], 0.0
        more[:, 2:] = sums(np.ones(len(group), dtype=np.bool_))
        for part, chosen in ((BASE, learning), (ASIDE, ~learning)):
            if chosen.any():
                sum_ = state[:, part] + more
                sum_[:, 1] = state[:, LAST_AT]
                state[:, part] = np.where(chosen[:, None], sum_, state[:, part])

    @staticmethod
    def _floor(state: FloatArray, at_us: int) -> None:
        state[CUSUM] = 1.0
        state[FLOOR] = bag.seen(state)
        state[FLOOR][1] = at_us


def _mirror(states: FloatArray, trail: Trail) -> tuple[FloatArray, FloatArray]:
    """Return the evidence after each group that it is over, (groups,), and the mirror image at the end."""
    steps, seen = trail.steps, trail.seen
    asked = (states[:, BAR] > 0) & (states[:, ALERTING] > 0)
    z = np.zeros(len(seen))
    if not asked.any():
        return np.full(len(seen), np.inf), states[:, MIRROR]
    of = asked[steps.row]
    bar, m = states[steps.row[of], BAR], np.where(asked, states[:, M], 0.0)
    z[of] = np.where(np.arange(N_BINS) >= bar[:, None], trail.x[of], 0.0).sum(axis=1) - m[steps.row[of]]
    recovery, mirror = resolve.mirror(steps, states[:, MIRROR], m, z, seen & of)
    return np.where(of, recovery, np.inf), mirror
