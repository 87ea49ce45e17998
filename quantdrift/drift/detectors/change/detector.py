"""Change against a learned baseline: is a slice worse than it used to be? A mixture e-Shiryaev-Roberts detector.

H0 "groups are exchangeable with the baseline's, given their margins, up to a factor of 1 + tau on the mean of x". A
group is two numbers per margin bin b, 32 in all: the share of its items in b, and the sum of x in [0, 1] over these,
divided by its items; shares sum to 1. Its items were thinned to one constant inclusion probability of the slice.

A signal learns until 5,000 groups with 50 events are in its baseline. Then margin bins are merged to at most five
testing strata, their means get upper bounds at level delta (`quantdrift.drift.evidence.bound`), and it is live:

    R_k <- (R_k + gamma) * e_k,    E = 0.85 (2/3 E_learned + 1/3 E_frozen) + 0.15 E_recurring

with the bets of `quantdrift.drift.detectors.change.bets`, and gamma the calendar mass since the last group. In both halves a ratio
in one stratum, r in {3, 10, 40, 150}, has a tenth of the weight for each stratum, and a ratio common to all of them the
rest: r in {1.5, 2, 3, 5, 8}, and {1.25, 1.5, 2, 3.5, 8} in the frozen half, whose null is above the mean. The learned half continues to learn and so needs no margin for the error of a finite
baseline; taken alone it would absorb a change that comes soon after a short one, which is what the frozen half is for:
the third that it has costs it ln 3 of evidence where it alone finds something, and the other ln 1.5. Both have 0.85 of the
capital; the rest bets at recurring hours alone, for what is worse on two days of the week, or at night. A page copy and a
ticket copy of R have their own thresholds and resets.

The bounds hold at all times at once, so they are lowered as more is learned and the least so far is tested; not after
an alert, which selects what is learned by its values, and not to below what a season within the tolerance needs while
the baseline does not span whole weeks (`quantdrift.drift.detectors.change.baseline`).

Assumption: arrival, loss and lag say nothing about x given the past; the traffic may move between margin strata.
Bound, frozen half: as `quantdrift.drift.detectors.budget`, plus delta per baseline. Learned half: given the pool of values every
e_k has mean at most 1, so E[E_t] <= mass given at every fixed time, and P(E_t >= A) <= mass / A, if the mass does not
depend on the values; sampling that follows the evidence, and detectors that become ready by it, are not covered. At the times of
alarms, the first passage, the same is verified by simulation over n0, p, r and tau, not proved. While an alert lasts
nothing goes into the baseline, but the null of the learned half includes the new groups: a page copy that continues
through a warning against a fixed null would bet against a finite sample (17 times the bound, measured).
Delay: 1 % -> 3 % flips at A = 4e6, baseline of 25,000 groups: 1.2 times an oracle CUSUM's 710 at tau = 0 and 1.87
times at tau = 0.25, of which 1.44 is the price of the tolerance for anybody (a CUSUM that knows both rates and must not
alarm at 1.25 %); with five testing strata 1.3 and 2 times. 2,000 groups after a baseline of 5,000, at the production
threshold and tau = 0.25, one in ten is not found within 30,000 groups: 70 events leave the bound near 1.7 %. A ramp from
1 to 2.3 % over 100,000 groups is found.
Two days of seven from 1 to 2.5 % at 1,000 a day, six weeks learned, production threshold: nine in ten page
within four weeks.
Recovery: H0 "(1 + tau) times the baseline at onset or more" (`quantdrift.drift.evidence.recovery`), in all strata,
or in the one that alarmed alone. Back at a baseline of 1 % with tau = 0.25 that takes some 4,000 groups (7,000 at worst).
"""

import msgspec
import numpy as np

from quantdrift.core.errors import OperatorError
from quantdrift.drift.detectors.change import baseline_state, bets
from quantdrift.drift.detectors.change.baseline import DEFAULT_DELTA, DEFAULT_TAU, N_STRATA, Baseline, missing
from quantdrift.drift.detectors.change.run import (
    CUSUM,
    FLOOR_AT,
    FLOOR_N,
    FLOOR_X,
    FOLLOWED,
    MIRROR,
    MIRROR_M,
    MIRRORED,
    PAGE,
    RECURRING,
    SIZE,
    TICKET,
    WINDOWS,
    evidence,
    evidences,
    follow,
)
from quantdrift.drift.evidence import header, interval, onset, window
from quantdrift.drift.evidence.header import (
    ALERTING,
    CREATED_AT,
    LAST_AT,
    PAGE_MASS,
    PAGING,
    SCALE,
    TICKET_MASS,
    TICKETING,
    M,
    N,
    Onset,
    W,
    X,
)
from quantdrift.drift.evidence.margin import N_BINS
from quantdrift.drift.evidence.observations import FloatArray, GroupSequence, IntArray, ObservationBlock
from quantdrift.drift.evidence.run import BlockRun, SequenceRun

OWN_RATIO = (
    100.0  # evidence per mass from which this signal counts as moved itself, and not only others of its slice
)
HIGHEST_M = 0.95  # largest mean that recovery is tested against


class ChangeDetector:
    """The detector of this module, for many signals at a time. It has no state of its own: states are rows of numbers."""

    kind = "change"
    size = SIZE
    width = 2 * N_BINS
    record: type[msgspec.Struct] = Baseline

    def fresh(
        self, *, scale: float, mass: float, at_us: int, tau: float = DEFAULT_TAU, delta: float = DEFAULT_DELTA
    ) -> FloatArray:
        """Return the state of a signal that has learned nothing yet, (SIZE,).

        Parameters
        ----------
        scale
            The cap of x, in the metric's own unit.
        mass, at_us
            The calendar clock now.
        tau
            Tolerance against seasons, at least 0: means up to (1 + tau) times the baseline are no change.
        delta
            Probability that the frozen half's bound lies below the baseline's mean: this much is added to the
            expected number of false pages, once per baseline.
        """
        return self.from_content(
            Baseline(
                share=(0.0,) * N_BINS,
                total=(0.0,) * N_BINS,
                n_groups=0,
                tau=tau,
                delta=delta,
                since_us=at_us,
                until_us=at_us,
            ),
            scale=scale,
            mass=mass,
            at_us=at_us,
        )

    def from_content(self, content: Baseline, *, scale: float, mass: float, at_us: int) -> FloatArray:
        """Return the state of a new signal with a stored baseline: live if that has strata, else it continues to learn."""
        state = np.zeros(SIZE)
        state[SCALE] = scale
        header.opened(state, mass=mass, at_us=at_us)
        baseline_state.write(state, content)
        self.arm(state, mass=mass, at_us=at_us)
        return state

    def learned(self, state: FloatArray) -> int:
        """Return the number of groups in the baseline."""
        return baseline_state.read(state).n_groups

    def content(self, state: FloatArray) -> Baseline:
        """Return the current baseline, for storing."""
        return baseline_state.read(state)

    def inherit(self, state: FloatArray, *, mass: float, at_us: int) -> FloatArray:
        """Return a new signal with another signal's baseline, strata and bounds: for a version's successor.

        Where the other alerts, with its baseline before the onset. It is live at once; where the other still learns, it learns
        on: where releases come faster than baselines, none would ever be ready. What versions do not have in common is in
        such a baseline as in a mixture of them.
        """
        other = state.copy()
        baseline_state.go_back(other)
        return self.from_content(
            baseline_state.read(other), scale=float(state[SCALE]), mass=mass, at_us=at_us
        )

    def carry(self, state: FloatArray, before: FloatArray) -> bool:
        """Move the evidence of a version that ended to the one that serves instead, both in place; see `Detector.carry`.

        Where their strata differ, the evidence of bets that the other one does not make goes to all of its bets.
        """
        if not (self.live(state) and self.live(before)):
            return False
        theirs, own = bets.weights(np.stack((before, state)))
        if (theirs != own).any():
            used = own > 0.0
            for part in (PAGE, TICKET):
                weighted = theirs * before[part]
                moved = np.divide(weighted, own, out=np.zeros_like(own), where=used)
                before[part] = moved + weighted[~used].sum() / own.sum() * used
        return header.handed_over(state, before, (PAGE, TICKET, RECURRING))

    def freeze(self, state: FloatArray) -> None:
        """Stop learning for good, in place: from now on only the frozen half is tested, and the evidence restarts.

        Raises
        ------
        OperatorError
            It has not learned enough yet.
        """
        if lacking := self.missing(state):
            raise OperatorError(f"the baseline cannot be frozen yet: some {lacking} groups are missing")
        # Groups between the onset and an open alert must not be in the bounds.
        baseline_state.go_back(state)
        baseline_state.fix(state)
        self._tested(state)
        state[PAGE] = state[TICKET] = state[RECURRING] = 0.0
        state[[PAGE_MASS, TICKET_MASS, N, W, X]] = 0.0
        self._floor(state, float(state[LAST_AT]))

    def keep(self, state: FloatArray) -> None:
        """Add the groups that an alert set aside to the baseline, in place: it was judged false.

        Also while the alert lasts; then nothing is taken out of the baseline when it is over.
        """
        baseline_state.take_back(state)
        self._tested(state)

    def aside(self, state: FloatArray) -> bool:
        """Return whether `keep` would change the baseline."""
        return baseline_state.has_aside(state)

    def live(self, state: FloatArray) -> bool:
        """Return whether the signal is live."""
        return state.item(baseline_state.STAGE) != baseline_state.LEARNING

    def missing(self, state: FloatArray) -> int:
        """Return how many more groups the signal needs until it is live, at the rate of events so far; 0 when live."""
        if self.live(state):
            return 0
        row = baseline_state.rows_of(state)[baseline_state.LIVE]
        return max(missing(int(row[baseline_state.GROUPS]), float(row[baseline_state.TOTAL].sum())), 1)

    def missings(self, states: FloatArray) -> IntArray:
        """Return how many groups each lacks, (N,)."""
        missings = np.zeros(len(states), dtype=np.intp)
        for row in np.flatnonzero(states[:, baseline_state.STAGE] == baseline_state.LEARNING).tolist():
            missings[row] = self.missing(states[row])
        return missings

    def due_us(self, states: FloatArray) -> FloatArray:
        """Return from when on each has a window to move on, a baseline that may be ready, or one to keep, (N,)."""
        soon = window.full(states, WINDOWS) | baseline_state.may_be_ready(states)
        return np.where(soon, -np.inf, baseline_state.kept_until_us(states))

    def tend(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Do the work between batches, in place: advance windows, lower bounds, go live when ready, keep a daily snapshot."""
        if window.rotate(state, WINDOWS):
            baseline_state.lower(state)
        if not self.live(state) and not state.item(ALERTING) and baseline_state.promising(state):
            learned = baseline_state.read(state)
            if learned.missing == 0:
                baseline_state.settle(state, learned.settled())
                self.arm(state, mass=mass, at_us=at_us)
        baseline_state.snapshot(state, at_us=at_us)

    def arm(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Restart both copies at this mass and time, in place; after an alert, with the baseline from before it."""
        baseline_state.go_back(state)
        header.armed(state, mass=mass)
        if not self.live(state):
            state[[PAGING, TICKETING]] = 0.0
        state[PAGE] = state[TICKET] = state[RECURRING] = state[MIRROR] = 0.0
        state[MIRROR_M] = state[MIRRORED] = 0.0
        self._floor(state, at_us)
        self._tested(state)
        window.verdict_changed(state[WINDOWS])

    def alarmed(self, state: FloatArray, *, page: bool) -> None:
        """After an alarm of its slice, in place: pause learning, reset the copy (both for a page), look for recovery."""
        if not state[ALERTING]:
            baseline_state.rows_of(state)[baseline_state.ASIDE] = 0.0
            state[baseline_state.ONSET_AT] = self.moved(state).onset_us
        if self.live(state):
            self._mirror(state)
        header.paused(state, page=page)
        state[TICKET] = state[MIRROR] = 0.0
        if page:
            state[PAGE] = state[RECURRING] = 0.0
        window.verdict_changed(state[WINDOWS])

    def evidence(self, state: FloatArray) -> float:
        """Return the evidence of the page copy."""
        return evidence(state) if self.live(state) else 0.0

    def evidences(self, states: FloatArray) -> FloatArray:
        """Return the evidence of the page copies, (N,)."""
        return evidences(states)

    def page_mass(self, state: FloatArray) -> float:
        """Return the calendar mass given to the page copy since its reset."""
        return float(state[PAGE_MASS])

    def recent(self, state: FloatArray) -> interval.WeightedEstimate | None:
        """Return mean and interval over the recent window, in the metric's own unit."""
        return window.recent(state[WINDOWS], float(state[SCALE]))

    def since_change(self, state: FloatArray) -> interval.WeightedEstimate | None:
        """Return the same since the last change of verdict; while firing its `low` is the severity."""
        return window.since_change(state[WINDOWS], float(state[SCALE]))

    def moved(self, state: FloatArray) -> Onset:
        """Return the onset and the means before and after it, of a running copy: call it before `alarmed` resets it.

        The mean before it is the baseline's, without what came since the onset.
        """
        bet = onset.onset_bet(self._weighted(state)[:FOLLOWED])
        n_after = float(state[N] - state[FLOOR_N][bet])
        x_after = float(state[X] - state[FLOOR_X][bet])
        rows = baseline_state.rows_of(state)
        learned = rows[baseline_state.LIVE] + (rows[baseline_state.ASIDE] if state[ALERTING] else 0.0)
        since = (n_after, x_after) if state[baseline_state.STAGE] != baseline_state.FIXED else (0.0, 0.0)
        n_before, x_before = (
            learned[baseline_state.GROUPS] - since[0],
            learned[baseline_state.TOTAL].sum() - since[1],
        )
        scale = float(state[SCALE])
        return Onset(
            onset_us=int(max(state[FLOOR_AT][bet], state[CREATED_AT])),
            before=scale * max(float(x_before), 0.0) / float(n_before) if n_before > 0 else None,
            after=scale * x_after / n_after if n_after > 0 else None,
            n_after=int(n_after),
            n_before=max(int(n_before), 0),
        )

    def run(self, states: FloatArray, block: ObservationBlock) -> BlockRun:
        """Run signals with `states`, (N, SIZE), over `block`, and return their run."""
        return BlockRun(follow, states, block)

    def follow(self, states: FloatArray, groups: GroupSequence) -> SequenceRun:
        """Run signals over their groups, changing `states`, (N, SIZE), in place, and return their run."""
        return follow(states, groups)

    def _mirror(self, state: FloatArray) -> None:
        """Write the means that recovery is tested against, from the evidence that alarmed, in place."""
        weighted = self._weighted(state)
        mass = float(state[PAGE_MASS] if state[PAGING] else state[TICKET_MASS])
        stratum = bets.stratum_of(int(np.argmax(weighted)))
        state[MIRRORED] = 1.0
        if stratum is not None and weighted.sum() >= OWN_RATIO * mass:
            state[MIRRORED] = np.arange(N_STRATA) == stratum
        row = baseline_state.rows_of(state)[baseline_state.LIVE]
        if state[baseline_state.STAGE] == baseline_state.LIVING and state[baseline_state.ONSET_AT] >= 0:
            row = baseline_state.before(state, float(state[baseline_state.ONSET_AT]))
        stratum_of_bin = baseline_state.strata_of(state)
        for stratum_ in range(N_STRATA):
            share, total = (
                row[part][stratum_of_bin == stratum_].sum()
                for part in (baseline_state.SHARE, baseline_state.TOTAL)
            )
            state[MIRROR_M.start + stratum_] = min(
                bets.null(total, share, state[baseline_state.TAU]), HIGHEST_M
            )

    @staticmethod
    def _weighted(state: FloatArray) -> FloatArray:
        """Return the weighted evidence of each bet of a running copy."""
        running = state[PAGE] if state[PAGING] else state[TICKET]
        weighted: FloatArray = bets.weights(state[None])[0] * running
        return weighted

    @staticmethod
    def _floor(state: FloatArray, at_us: float) -> None:
        state[CUSUM] = 1.0
        state[FLOOR_AT] = at_us
        state[FLOOR_N] = state[FLOOR_X] = 0.0

    @staticmethod
    def _tested(state: FloatArray) -> None:
        row = baseline_state.rows_of(state)[baseline_state.LIVE]
        mean = row[baseline_state.TOTAL].sum() / max(row[baseline_state.GROUPS], 1.0)
        state[M] = min(1.0, (1.0 + state[baseline_state.TAU]) * mean)
