"""Budget breach: is the mean divergence above what the owner accepts? A mixture e-Shiryaev-Roberts detector.

H0 "conditional mean <= m at every moment", m > 0. Bet k multiplies its evidence by `e_k = 1 + lambda_k (vx - v m)`,
lambda_k = c_k / m, whose mean under H0 is at most 1:

    R_k <- (R_k + gamma) * e_k,    E = mean over k of R_k

with gamma the calendar mass since the last group. A page copy and a ticket copy of R have their own thresholds and
resets.

Assumption: x in [0, 1] (clipped downwards by the caller, which keeps H0 valid), inclusion probabilities known,
arrival and loss say nothing about x given the past. Nothing is assumed about other detectors.
Bound: E - mass + alarms / q is a supermartingale, so E[false alarms in (0, T]] <= q T / 30 d for the whole fleet. On
the sample clock (gamma = 1, threshold A): average run length >= A and P(alarm within n) <= n / A.
Source: STATISTICS 0 and 2; Shin, Ramdas, Rinaldo, arXiv 2203.03532.
Delay: 1 % -> 3 % flips in some 820 groups at A = 4e6 (1.2 times an oracle CUSUM); 440-925 groups more at the
production threshold, ln(1 / (q gamma)) = 21-27. 1 % -> 5 %: some 290 and 400-730.
"""

import msgspec
import numpy as np

from quantdrift.drift import interval, onset, resolve, signal, window
from quantdrift.drift.block import Block, FloatArray, IntArray, accumulate, running_sum
from quantdrift.drift.signal import (
    ALERTING,
    HEADER,
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
    X,
)

N_BETS = 14
LARGEST_BET = 0.95
SMALLEST_RATE = 0.25  # lambda of the smallest bet, c = 0.25 m
SMALLEST_RATE_WEIGHTED = 0.1

# The state of one signal: float64, after the header of `quantdrift.drift.signal`.
_K = N_BETS
RATES = slice(HEADER, HEADER + _K)
PAGE = slice(RATES.stop, RATES.stop + _K)
TICKET = slice(PAGE.stop, PAGE.stop + _K)
CUSUM = slice(TICKET.stop, TICKET.stop + _K)
FLOOR_AT = slice(CUSUM.stop, CUSUM.stop + _K)
FLOOR_N = slice(FLOOR_AT.stop, FLOOR_AT.stop + _K)
FLOOR_W = slice(FLOOR_N.stop, FLOOR_N.stop + _K)
FLOOR_X = slice(FLOOR_W.stop, FLOOR_W.stop + _K)
MIRROR = slice(FLOOR_X.stop, FLOOR_X.stop + len(resolve.BETS))
WINDOWS = slice(MIRROR.stop, MIRROR.stop + window.SIZE)
SIZE = WINDOWS.stop


class BudgetPath(msgspec.Struct, frozen=True, kw_only=True):
    """What N signals go through along a block. All arrays begin with (steps, N)."""

    start: FloatArray  # (N, SIZE)
    block: Block
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
    counts: FloatArray  # (1 + steps, N, 3): N, W, X
    windows: FloatArray  # (1 + steps, N, window.SIZE)

    def stopped(self, step: IntArray) -> FloatArray:
        """Return the states, (N, SIZE), after step `step[i]` of signal i."""
        row = np.arange(len(self.start))
        at = (step, row)
        after = (step + 1, row)
        state = self.start.copy()
        state[:, MASS] = self.mass[at]
        state[:, PAGE_MASS] = self.page_mass[at]
        state[:, TICKET_MASS] = self.ticket_mass[at]
        state[:, (N, W, X)] = self.counts[after]
        state[:, N_TOTAL] += state[:, N] - self.start[:, N]
        seen = np.where(self.block.seen, self.block.at_us, 0.0)
        state[:, LAST_AT] = np.maximum(state[:, LAST_AT], np.maximum.accumulate(seen, axis=0)[at])
        state[:, PAGE] = self.page_bets[at]
        state[:, TICKET] = self.ticket_bets[at]
        state[:, CUSUM] = self.twin.cusum[at]
        floor = self.twin.floor[at]
        fell = floor >= 0
        column = row[:, None]
        state[:, FLOOR_AT] = np.where(fell, self.block.at_us[floor, column], state[:, FLOOR_AT])
        for index, field in enumerate((FLOOR_N, FLOOR_W, FLOOR_X)):
            state[:, field] = np.where(fell, self.counts[floor + 1, column, index], state[:, field])
        state[:, MIRROR] = self.mirror[at]
        state[:, WINDOWS] = self.windows[after]
        return state


class BudgetDetector:
    """The detector of this module, for many signals at a time. It holds nothing: states are rows of numbers."""

    kind = "budget"
    size = SIZE
    width = 2  # vx, v of `quantdrift.drift.group`

    def fresh(self, *, budget: float, scale: float, weighted: bool, mass: float, at_us: int) -> FloatArray:
        """Return the state of a new signal, (SIZE,).

        Parameters
        ----------
        budget
            Accepted mean of the clipped signal over its cap, in (0, 1).
        scale
            The cap, in the metric's own unit.
        weighted
            Whether inclusion probabilities differ within the slice: such means need smaller bets.
        mass, at_us
            The calendar clock now: nothing before it counts.
        """
        if not 0 < budget < 1:
            raise ValueError(f"the budget {budget} is not inside (0, 1) of the cap")
        state = np.zeros(SIZE)
        smallest = SMALLEST_RATE_WEIGHTED if weighted else SMALLEST_RATE
        state[M], state[SCALE] = budget, scale
        state[RATES] = np.geomspace(smallest, LARGEST_BET / budget, N_BETS)
        state[RATES.stop - 1] = LARGEST_BET / budget
        signal.opened(state, mass=mass, at_us=at_us)
        self.arm(state, mass=mass, at_us=at_us)
        return state

    def arm(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Let both copies begin anew at this mass and time, in place."""
        signal.armed(state, mass=mass)
        state[PAGE] = state[TICKET] = state[MIRROR] = 0.0
        state[CUSUM] = 1.0
        state[FLOOR_AT] = at_us
        state[FLOOR_N] = state[FLOOR_W] = state[FLOOR_X] = 0.0
        window.verdict_changed(state[WINDOWS])

    def alarmed(self, state: FloatArray, *, page: bool) -> None:
        """After an alarm: reset the copy (both for a page) and start the mirror image, in place."""
        signal.paused(state, page=page)
        state[TICKET] = state[MIRROR] = 0.0
        if page:
            state[PAGE] = 0.0
        window.verdict_changed(state[WINDOWS])

    def evidence(self, state: FloatArray) -> float:
        """Return the evidence of the page copy."""
        return float(state[PAGE].sum()) / N_BETS

    def page_mass(self, state: FloatArray) -> float:
        """Return the calendar mass that the page copy was given since its reset."""
        return float(state[PAGE_MASS])

    def live(self, state: FloatArray) -> bool:
        """Return whether it takes part: always, it has nothing to learn."""
        return bool(state[M] > 0)

    def missing(self, state: FloatArray) -> int:
        """Return how many groups it lacks until it takes part: none."""
        return 0

    def tend(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Let the recent window move on, in place."""
        window.rotate(state[WINDOWS])

    def recent(self, state: FloatArray) -> interval.Estimate | None:
        """Return mean and interval over the recent window, in the metric's own unit."""
        return window.recent(state[WINDOWS], float(state[SCALE]))

    def since_change(self, state: FloatArray) -> interval.Estimate | None:
        """Return the same since the last change of verdict; while firing its `low` is the severity."""
        return window.since_change(state[WINDOWS], float(state[SCALE]))

    def moved(self, state: FloatArray) -> Moved:
        """Return onset and means before and after it, of a copy that runs: before `alarmed` resets it."""
        evidence = state[PAGE] if state[PAGING] else state[TICKET]
        bet = onset.onset_bet(evidence)
        scale = float(state[SCALE])
        w, x = float(state[FLOOR_W][bet]), float(state[FLOOR_X][bet])
        w_after, x_after = float(state[W]) - w, float(state[X]) - x
        return Moved(
            onset_us=int(state[FLOOR_AT][bet]),
            before=scale * x / w if w > 0 else None,
            after=scale * x_after / w_after if w_after > 0 else None,
            n_after=int(state[N] - state[FLOOR_N][bet]),
        )

    def run(self, states: FloatArray, block: Block) -> BudgetPath:
        """Return what signals with `states`, (N, SIZE), go through along `block`."""
        seen = block.seen.astype(np.float64)
        vx, v = np.where(block.seen, block.x[..., 0], 0.0), np.where(block.seen, block.x[..., 1], 0.0)
        if v.max(initial=0.0) > 1.0:
            raise ValueError("a weight above 1 would break the false-alarm bound")
        m = states[:, M]
        z = vx - v * m
        factor = 1.0 + z[:, :, None] * states[:, RATES]
        product = accumulate(np.multiply, factor)
        before = np.concatenate((np.ones((1, *product.shape[1:])), product[:-1]))
        masses = np.maximum.accumulate(
            np.concatenate((states[None, :, MASS], np.where(block.seen, block.mass, 0.0)))
        )
        gamma = np.diff(masses, axis=0)
        paging, ticketing = gamma * states[:, PAGING], gamma * states[:, TICKETING]
        page = product * (states[:, PAGE] + accumulate(np.add, paging[:, :, None] / before))
        ticket = product * (states[:, TICKET] + accumulate(np.add, ticketing[:, :, None] / before))
        mirror = resolve.mirror(states[:, MIRROR], m, z, seen * states[:, ALERTING])
        return BudgetPath(
            start=states,
            block=block,
            mass=masses[1:],
            page=page.sum(axis=2) / N_BETS,
            page_mass=running_sum(states[:, PAGE_MASS], paging)[1:],
            ticket=ticket.sum(axis=2) / N_BETS,
            ticket_mass=running_sum(states[:, TICKET_MASS], ticketing)[1:],
            recovery=mirror.sum(axis=2) / len(resolve.BETS),
            page_bets=page,
            ticket_bets=ticket,
            mirror=mirror,
            twin=onset.follow(states[:, CUSUM], product, block.seen),
            counts=running_sum(states[:, (N, W, X)], np.stack((seen, v, vx), axis=-1)),
            windows=window.advance(states[:, WINDOWS], vx, v, seen),
        )
