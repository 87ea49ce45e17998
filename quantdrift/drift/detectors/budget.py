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
Source: Shin, Ramdas, Rinaldo, arXiv 2203.03532.
The bets lie the closer the smaller they are, evenly in lambda ** -0.3. The mixture costs ln(1 / share of the bets near
the best one), and a small change reaches an alarm with less evidence of its own than a large one (A is also made up of
the many places where it may have begun): spaced by logarithm, all changes would pay the same price, of which the
smallest would pay for the longest in groups. To first order the mixture costs 1.20 to 1.24 times the best bet in the
five changes that `benchmarks.detection` measures, 1.27 from 0.5 to 0.625 % and 1.34 from 1 to 1.15 %; with a smallest
bet of 0.25 the last would be 2.3. Ten bets would do as well as 28.
Delay: 1 % -> 3 % flips in some 820 groups at A = 4e6 (1.16 times an oracle CUSUM); 440-925 groups more at the
production threshold, ln(1 / (q gamma)) = 21-27. 1 % -> 5 %: some 290 and 400-730. 1 % -> 1.5 %: some 7,300 (1.17).
"""

import numpy as np

from quantdrift.drift.evidence import header, interval, onset, window
from quantdrift.drift.evidence import recovery as resolve
from quantdrift.drift.evidence import run as path
from quantdrift.drift.evidence.header import (
    ALERTING,
    CREATED_AT,
    HEADER,
    LAST_AT,
    MOST_EVIDENCE,
    N_TOTAL,
    PAGE_MASS,
    PAGING,
    SCALE,
    TICKETING,
    M,
    N,
    Onset,
    W,
    X,
)
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray, GroupSequence, IntArray, ObservationBlock
from quantdrift.drift.evidence.run import BlockRun, SequenceRun

N_BETS = 14
LARGEST_BET = 0.95
SMALLEST_RATE = 0.15  # lambda of the smallest bet, c = 0.15 m
SMALLEST_RATE_WEIGHTED = 0.1
_CROWDING = -0.3  # bets are evenly spaced in lambda to this power; towards 0 that is by logarithm

# The state of one signal: float64, after the header of `quantdrift.drift.evidence.header`.
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
# Start indices, since compiled code cannot use slices of the module.
_RATES, _PAGE, _TICKET, _CUSUM = RATES.start, PAGE.start, TICKET.start, CUSUM.start
_FLOOR_AT, _FLOOR_N, _FLOOR_W, _FLOOR_X = FLOOR_AT.start, FLOOR_N.start, FLOOR_W.start, FLOOR_X.start
_MIRROR, _WINDOWS = MIRROR.start, WINDOWS.start


class BudgetDetector:
    """The detector of this module, for many signals at a time. It has no state of its own: states are rows of numbers."""

    kind = "budget"
    size = SIZE
    width = 3  # vx, v and c of `quantdrift.drift.evidence.group`; c, for the displayed mean alone, may be left out: 1

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
        state[RATES] = _rates(budget, smallest)
        header.opened(state, mass=mass, at_us=at_us)
        self.arm(state, mass=mass, at_us=at_us)
        return state

    def lower(self, state: FloatArray, budget: float) -> None:
        """Test against a smaller mean from now on, in place; the evidence stays.

        Evidence against a larger mean is also evidence against every smaller one: H0 "mean <= m" includes the smaller
        one's. Not during an alert: recovery below the larger mean says nothing about the smaller.

        Raises
        ------
        ValueError
            The mean is not smaller, is not positive, or an alert is open.
        """
        if not 0 < budget <= state[M] or state[ALERTING]:
            raise ValueError(
                f"the evidence against {state[M]} cannot be kept for {budget}: it must be smaller and positive, and no"
                " alert may be open"
            )
        state[M] = budget
        state[RATES] = _rates(budget, state[RATES.start])

    def carry(self, state: FloatArray, before: FloatArray) -> bool:
        """Move the evidence of a version that ended to the one that serves instead, both in place; see `Detector.carry`.

        The means that they test may differ by what was added for noise, and so may the bets. The onset of each bet is that of the
        version with more evidence for one.
        """
        if not header.handed_over(state, before, (PAGE, TICKET)):
            return False
        earlier = before[CUSUM] > state[CUSUM]
        for floor, total in ((FLOOR_N, N), (FLOOR_W, W), (FLOOR_X, X)):
            state[floor] = np.where(earlier, before[floor], state[floor] + before[total])
            state[total] += before[total]
            before[floor] = before[total] = 0.0
        state[FLOOR_AT] = np.where(earlier, before[FLOOR_AT], state[FLOOR_AT])
        state[CREATED_AT] = min(state[CREATED_AT], before[CREATED_AT])
        state[CUSUM] = np.maximum(state[CUSUM], before[CUSUM])
        before[CUSUM], before[FLOOR_AT] = 1.0, before[LAST_AT]
        return True

    def arm(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Restart both copies at this mass and time, in place."""
        header.armed(state, mass=mass)
        state[PAGE] = state[TICKET] = state[MIRROR] = 0.0
        state[CUSUM] = 1.0
        state[FLOOR_AT] = at_us
        state[FLOOR_N] = state[FLOOR_W] = state[FLOOR_X] = 0.0
        window.verdict_changed(state[WINDOWS])

    def alarmed(self, state: FloatArray, *, page: bool) -> None:
        """After an alarm: reset the copy (both for a page) and start the mirror image, in place."""
        header.paused(state, page=page)
        state[TICKET] = state[MIRROR] = 0.0
        if page:
            state[PAGE] = 0.0
        window.verdict_changed(state[WINDOWS])

    def evidence(self, state: FloatArray) -> float:
        """Return the evidence of the page copy."""
        return float(state[PAGE].sum()) / N_BETS

    def evidences(self, states: FloatArray) -> FloatArray:
        """Return the evidence of the page copies, (N,)."""
        evidence: FloatArray = states[:, PAGE].sum(axis=1) / N_BETS
        return evidence

    def page_mass(self, state: FloatArray) -> float:
        """Return the calendar mass given to the page copy since its reset."""
        return float(state[PAGE_MASS])

    def live(self, state: FloatArray) -> bool:
        """Return whether the signal is live: always, since it learns nothing."""
        return bool(state[M] > 0)

    def missing(self, state: FloatArray) -> int:
        """Return how many more groups the signal needs until it is live: none."""
        return 0

    def missings(self, states: FloatArray) -> IntArray:
        """Return how many groups each lacks, (N,): none."""
        return np.zeros(len(states), dtype=np.intp)

    def due_us(self, states: FloatArray) -> FloatArray:
        """Return from when on a window of each has to move on, (N,)."""
        return np.where(window.full(states, WINDOWS), -np.inf, np.inf)

    def tend(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Advance the recent window, in place."""
        window.rotate(state, WINDOWS)

    def recent(self, state: FloatArray) -> interval.WeightedEstimate | None:
        """Return mean and interval over the recent window, in the metric's own unit."""
        return window.recent(state[WINDOWS], float(state[SCALE]))

    def recents(self, states: FloatArray, rows: IntArray) -> FloatArray:
        """Return mean, low, high and n of `recent` of some rows of `states`, (N, 4), to the bit; n is 0 for None."""
        return window.recents(states[:, WINDOWS][rows], states[:, SCALE][rows])

    def since_change(self, state: FloatArray) -> interval.WeightedEstimate | None:
        """Return the same since the last change of verdict; while firing its `low` is the severity."""
        return window.since_change(state[WINDOWS], float(state[SCALE]))

    def moved(self, state: FloatArray) -> Onset:
        """Return the onset and the means before and after it, of a running copy: call it before `alarmed` resets it."""
        evidence = state[PAGE] if state[PAGING] else state[TICKET]
        bet = onset.onset_bet(evidence)
        scale = float(state[SCALE])
        w, x = float(state[FLOOR_W][bet]), float(state[FLOOR_X][bet])
        w_after, x_after = float(state[W]) - w, float(state[X]) - x
        return Onset(
            onset_us=int(max(state[FLOOR_AT][bet], state[CREATED_AT])),
            before=scale * x / w if w > 0 else None,
            after=scale * x_after / w_after if w_after > 0 else None,
            n_after=int(state[N] - state[FLOOR_N][bet]),
            n_before=int(state[FLOOR_N][bet]),
        )

    def run(self, states: FloatArray, block: ObservationBlock) -> BlockRun:
        """Run signals with `states`, (N, SIZE), over `block`, and return their run."""
        return BlockRun(self.follow, states, block)

    def follow(self, states: FloatArray, groups: GroupSequence) -> SequenceRun:
        """Run signals over their groups, changing `states`, (N, SIZE), in place, and return their run."""
        course = np.empty((path.N_ROWS, len(groups.seen)))
        if not _follow(states, groups, course):
            raise ValueError("a weight above 1 would break the false-alarm bound")
        return SequenceRun(course=course, states=states)


def _rates(budget: float, smallest: float) -> FloatArray:
    """Return the bets against a budget, (N_BETS,), from the smallest up."""
    largest = LARGEST_BET / budget
    rates: FloatArray = np.linspace(smallest**_CROWDING, largest**_CROWDING, N_BETS) ** (1.0 / _CROWDING)
    rates[-1] = largest
    return rates


@compiled
def _follow(states: FloatArray, groups: GroupSequence, course: FloatArray) -> bool:
    """Run states, (N, SIZE), over a sequence of groups, in place, and write their run; False: an invalid group."""
    ends, x, seen, mass, at_us, captured_us = groups
    begin = 0
    for row in range(len(states)):
        state = states[row]
        mirror = state[_MIRROR : _MIRROR + len(resolve.BETS)]
        page, recovery = evidence_of(state), resolve.recovered(mirror)
        for group in range(begin, ends[row]):
            if seen[group]:
                if x[group, 1] > 1.0:
                    return False
                allowance = header.spend(state, mass[group], at_us[group], 1.0)
                see(state, x[group], allowance, at_us[group], captured_us[group])
                page, recovery = evidence_of(state), resolve.recovered(mirror)
            path.note(course, group, state, page, recovery)
        begin = ends[row]
        for bet in range(N_BETS):
            state[_TICKET + bet] = state[_PAGE + bet] * state[TICKETING]
    return True


@compiled
def see(state: FloatArray, x: FloatArray, given: float, at_us: float, captured_us: float) -> None:
    """Add one group to a signal, in place; `x` is vx, v and c, and `given` the mass that it got."""
    vx, v = x[0], x[1]
    c = x[2] if len(x) > 2 else 1.0
    state[N_TOTAL] += 1.0
    state[N] += 1.0
    state[W] += v
    state[X] += vx
    n, weight, total = state[N], state[W], state[X]
    z = vx - v * state[M]
    for bet in range(N_BETS):
        factor = 1.0 + state[_RATES + bet] * z
        state[_PAGE + bet] = min((state[_PAGE + bet] + given) * factor, MOST_EVIDENCE)
        after = onset.twin(state[_CUSUM + bet], factor)
        # Without branches, so that the processor handles several bets at a time; mostly the old value is written.
        state[_CUSUM + bet] = after
        state[_FLOOR_AT + bet] = at_us if after == 1.0 else state[_FLOOR_AT + bet]
        state[_FLOOR_N + bet] = n if after == 1.0 else state[_FLOOR_N + bet]
        state[_FLOOR_W + bet] = weight if after == 1.0 else state[_FLOOR_W + bet]
        state[_FLOOR_X + bet] = total if after == 1.0 else state[_FLOOR_X + bet]
    if captured_us < at_us and z > 0.0:
        onset.redate(
            state[_FLOOR_AT : _FLOOR_AT + N_BETS],
            state[_CUSUM : _CUSUM + N_BETS],
            1.0 + state[_RATES : _RATES + N_BETS] * z,
            captured_us,
        )
    if state[ALERTING] > 0:
        resolve.reflect(state[_MIRROR : _MIRROR + len(resolve.BETS)], state[M], z)
    window.advance(state[_WINDOWS : _WINDOWS + window.SIZE], v, vx, c)


@compiled
def evidence_of(state: FloatArray) -> float:
    """Return the evidence of the page copy."""
    total = 0.0
    for bet in range(N_BETS):
        total += state[_PAGE + bet]
    return total / N_BETS
