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
from quantdrift.drift import bag, extreme, interval, onset, quantile, resolve, signal
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
from quantdrift.drift.block import Block, BoolArray, FloatArray, IntArray, running_sum
from quantdrift.drift.clock import DAY_US
from quantdrift.drift.quantile import N_BINS
from quantdrift.drift.signal import (
    ALERTING,
    LAST_AT,
    MASS,
    N_TOTAL,
    PAGE_MASS,
    PAGING,
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


class TailPath(msgspec.Struct, frozen=True, kw_only=True):
    """What N signals go through along a block. Arrays begin with (steps, N) unless stated."""

    start: FloatArray  # (N, SIZE)
    block: Block
    items: tuple[IntArray, ...]  # step, signal and bin of every weight there is
    mass: FloatArray
    page: FloatArray
    page_mass: FloatArray
    ticket: FloatArray
    ticket_mass: FloatArray
    recovery: FloatArray
    page_bets: FloatArray
    ticket_bets: FloatArray
    mirror: FloatArray
    twin: onset.Twin
    counts: FloatArray  # (1 + steps, N) groups

    def stopped(self, step: IntArray) -> FloatArray:
        """Return the states, (N, SIZE), after step `step[i]` of signal i."""
        row = np.arange(len(self.start))
        at = (step, row)
        state = self.start.copy()
        state[:, MASS] = self.mass[at]
        state[:, PAGE_MASS] = self.page_mass[at]
        state[:, TICKET_MASS] = self.ticket_mass[at]
        groups = self.counts[step + 1, row]
        for field in (N_TOTAL, N, W):
            state[:, field] += groups
        times = np.where(self.block.seen, self.block.at_us, 0.0)
        state[:, LAST_AT] = np.maximum(state[:, LAST_AT], np.maximum.accumulate(times, axis=0)[at])
        state[:, PAGE] = self.page_bets[at]
        state[:, TICKET] = self.ticket_bets[at]
        state[:, MIRROR] = self.mirror[at]
        state[:, CUSUM] = self.twin.cusum[at][:, 0]
        floor = self.twin.floor[at][:, 0]
        fell = floor >= 0
        before = bag.seen(state)
        self._add(before, np.where(fell, floor, -1))
        before[:, 1] = self.block.at_us[floor, row]
        state[:, FLOOR] = np.where(fell[:, None], before, state[:, FLOOR])
        learning = bag.learning(self.start) > 0
        for part, chosen in ((BASE, learning), (ASIDE, ~learning)):
            sums = state[:, part]
            self._add(sums, np.where(chosen, step, -1))
            sums[:, 1] = np.where(chosen, state[:, LAST_AT], sums[:, 1])
        return state

    def _add(self, sums: FloatArray, last: IntArray) -> None:
        """Add every signal's groups up to step `last` to its histogram, in place, in the order they came."""
        step, row, place = self.items
        taken = step <= last[row]
        np.add.at(sums, (row[taken], place[taken] + 2), self.block.x[step, row, place][taken])
        sums[:, 0] += np.where(last >= 0, self.counts[last + 1, np.arange(len(sums))], 0.0)


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

    def run(self, states: FloatArray, block: Block) -> TailPath:
        """Return what signals with `states`, (N, SIZE), go through along `block`."""
        seen = block.seen
        weights = np.where(seen[:, :, None], block.x, 0.0)
        if weights.min(initial=0.0) < 0.0 or (np.abs(weights.sum(axis=2) - seen) > _ROUNDING).any():
            raise ValueError("the weights of a group over its bins are at least 0 and add up to 1")
        counts = running_sum(np.zeros(len(states)), seen.astype(np.float64))
        items = np.unravel_index(np.flatnonzero(weights != 0.0), weights.shape)
        factor = factors(states, weights, counts, items)
        product = _along(np.multiply, factor)
        before = np.concatenate((np.ones((1, *product.shape[1:])), product[:-1]))
        masses = np.maximum.accumulate(
            np.concatenate((states[None, :, MASS], np.where(seen, block.mass, 0.0)))
        )
        gamma = np.diff(masses, axis=0) * states[:, LIVE]
        paging, ticketing = gamma * states[:, PAGING], gamma * states[:, TICKETING]
        gain = _along(np.add, gamma[:, :, None] / before) * capital(states)
        page = product * (states[:, PAGE] + states[:, PAGING, None] * gain)
        ticket = product * (states[:, TICKET] + states[:, TICKETING, None] * gain)
        total = page.sum(axis=2)
        staked = np.concatenate((states[None, :, PAGE].sum(axis=2), total[:-1])) + paging
        growth = np.where(seen & (staked > 0), total / np.where(staked > 0, staked, 1.0), 1.0)
        mirror, asked = _mirror(states, weights, seen)
        return TailPath(
            start=states,
            block=block,
            items=items,
            mass=masses[1:],
            page=total,
            page_mass=running_sum(states[:, PAGE_MASS], paging)[1:],
            ticket=ticket.sum(axis=2),
            ticket_mass=running_sum(states[:, TICKET_MASS], ticketing)[1:],
            recovery=np.where(asked, mirror.sum(axis=2) / len(resolve.BETS), np.inf),
            page_bets=page,
            ticket_bets=ticket,
            mirror=mirror,
            twin=onset.follow(states[:, CUSUM, None], _along(np.multiply, growth)[:, :, None], seen),
            counts=counts,
        )

    @staticmethod
    def _floor(state: FloatArray, at_us: int) -> None:
        state[CUSUM] = 1.0
        state[FLOOR] = bag.seen(state)
        state[FLOOR][1] = at_us


def _along(combine: np.ufunc, steps: FloatArray) -> FloatArray:
    """Return the running sum or product over the first axis, row by row: many times faster than `accumulate`."""
    rows = np.array(steps)
    for step in range(1, len(rows)):
        combine(rows[step - 1], rows[step], out=rows[step])
    return rows


def _mirror(states: FloatArray, weights: FloatArray, seen: BoolArray) -> tuple[FloatArray, BoolArray]:
    """Return the mirror image at and above each signal's bar, (steps, N, bets), and which signals are asked for it."""
    bar = states[:, BAR]
    asked = (bar > 0) & (states[:, ALERTING] > 0)
    m = np.where(asked, states[:, M], 0.0)
    z = np.zeros(seen.shape)
    if asked.any():
        over = np.where(np.arange(N_BINS) >= bar[asked, None], weights[:, asked], 0.0).sum(axis=2)
        z[:, asked] = np.where(seen[:, asked], over - m[asked], 0.0)
    return resolve.mirror(states[:, MIRROR], m, z, (seen & asked).astype(np.float64)), asked
