"""References that differ from themselves: how often a healthy candidate pages for it, and when a real drift beside it is found.

A part of the inputs lies so near the border of a decision that candidate and both replays decide each at random: two replays of such a
reference differ with a chance of half of the part. Besides, the candidate changes a share of the other answers. Answers are compared
with one replay. Exchanges are replayed again at the default `shadow.noise_share`, and all of them while the slice is suspect, from
`LAG` exchanges after it became so; tests, limits and allowance follow as in the fold. Pages need the threshold of production.
"""

from typing import Final

import msgspec
import numpy as np

from benchmarks.delays import PRODUCTION
from quantdrift.core.config.schema import Shadow
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, ObservationBlock
from quantdrift.drift.noise import Level, Noise, NoiseSums, updated, window_of
from quantdrift.drift.noise_pairs import PairTest, is_large
from quantdrift.monitor.fold.noise_pairs import CLEARED_BELOW, SUSPECT_FROM

BUDGET_M: Final = 0.01
LAG: Final = 200
_TURN: Final = 50  # exchanges between two folds
_FIRST: Final = 500  # of which all are replayed again, as far as that fits into twice the share
_SECOND_US: Final = 1_000_000


class NoiseLaw(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of the answers.

    Parameters
    ----------
    noise
        How often two replays differ, from the exchange `noise_from` on.
    changed
        Share of answers that the candidate changes, from the exchange `changed_from` on; `well` before.
    """

    name: str
    noise: float
    changed: float
    noise_from: int = 0
    changed_from: int = 0
    well: float = 0.002

    @property
    def begins(self) -> int:
        """The exchange from which on anything is not well."""
        return max(self.noise_from, self.changed_from)

    def answers(self, rng: np.random.Generator, first: int, runs: int) -> tuple[BoolArray, BoolArray]:
        """Return of the exchanges from `first` on, (_TURN, runs) each, whether the candidate and a second replay differ from the first."""
        noise = self.noise if first >= self.noise_from else 0.0
        changed = rng.random((_TURN, runs)) < (self.changed if first >= self.changed_from else self.well)
        by_chance = rng.random((_TURN, runs)) < 2.0 * noise
        candidate, one, two = rng.random((3, _TURN, runs)) < 0.5
        return np.where(by_chance, candidate != one, changed), by_chance & (one != two)


HEALTHY: Final = (
    NoiseLaw(name="noise of 2 % from the first exchange on", noise=0.02, changed=0.002),
    NoiseLaw(name="noise of 2 % after 20,000 exchanges", noise=0.02, changed=0.002, noise_from=20_000),
)
PLAIN: Final = NoiseLaw(name="2 % changed, no noise", noise=0.0, changed=0.02)
DRIFTS: Final = (
    NoiseLaw(name="2 % changed beside noise of 1 %", noise=0.01, changed=0.02),
    NoiseLaw(
        name="2 % changed after 10,000 exchanges with noise of 1 %",
        noise=0.01,
        changed=0.02,
        changed_from=10_000,
    ),
    NoiseLaw(name="2 % changed beside noise of 2 %", noise=0.02, changed=0.02),
)
SURE: Final = (
    PLAIN,
    NoiseLaw(name="5 % changed, no noise", noise=0.0, changed=0.05),
    NoiseLaw(name="30 % changed, no noise", noise=0.0, changed=0.3),
)


class Slice:
    """What the fold knows of one run: the noise of its reference, its test, and what is added to its budget."""

    def __init__(self) -> None:
        self.noise, self.level = Noise(), Level()
        self.test: PairTest | None = None
        self.added = 0.0

    def fold(
        self,
        first: int,
        evidence: float,
        state: FloatArray,
        changed: BoolArray,
        differs: BoolArray,
        *,
        n_random: int,
    ) -> None:
        """Fold the exchanges from `first` on, (_TURN,) each, with the evidence and the state after them.

        Of them `n_random` would be replayed again anyhow.
        """
        test = self.test
        is_paired = test is not None and first >= test.since_us
        n = _TURN if is_paired else n_random
        for differed in differs[:n].tolist():
            self.noise = self.noise.seen(float(differed), 1.0, window_of(BUDGET_M))
        if test is not None and is_paired:
            for difference in (changed.astype(float) - differs.astype(float)).tolist():
                test = test.seen(difference, 1.0)
        if n and self.noise.older != NoiseSums():
            self.level = updated(self.level, *self.noise.bounds(), BUDGET_M, 0.5 * BUDGET_M)
        if test is None and evidence >= SUSPECT_FROM * PRODUCTION:
            test = PairTest(budget=BUDGET_M, since_us=first + _TURN + LAG)
        elif test is not None and evidence < CLEARED_BELOW * PRODUCTION:
            test = test if test.explained and self.level.added else None
        if test is not None and evidence >= PRODUCTION and self._is_large(state):
            test = msgspec.structs.replace(test, shown=True)
        self.test = test

    def _is_large(self, state: FloatArray) -> bool:
        recent = BUDGET.recent(state)
        noise = self.noise.bounds()[1] if self.noise.older != NoiseSums() else 1.0
        return recent is not None and is_large(recent.low, noise, BUDGET_M)

    def retune(self, state: FloatArray, at: int) -> FloatArray:
        """Return the state that tests against the budget of now."""
        explained = self.test is not None and self.test.explained
        wanted = min(self.level.added, 0.9 * (1.0 - BUDGET_M)) if explained else 0.0
        before, self.added = self.added, wanted
        if wanted > before:
            return _fresh(wanted, at)
        if wanted < before:
            BUDGET.lower(state, BUDGET_M + wanted)
        return state


def paged(law: NoiseLaw, runs: int, *, after: int, seed: int, waits: bool = True) -> FloatArray:
    """Return per run the exchange at which it pages; infinite if not within `after` exchanges of what is not well.

    Parameters
    ----------
    waits
        Whether pages wait for second replays. If not, the noise of the reference is not known, and nothing is added for it.
    """
    rng, share = np.random.default_rng(seed), Shadow().noise_share
    states = np.stack([_fresh(0.0, 0)] * runs)
    slices = [Slice() for _ in range(runs)]
    page = np.full(runs, np.inf)
    for first in range(0, law.begins + after, _TURN):
        changed, differs = law.answers(rng, first, runs)
        path = BUDGET.run(states, _block(changed, first))
        hit = path.page >= PRODUCTION
        if waits:
            hit &= [entry.test is not None and entry.test.shown for entry in slices]
        page = np.minimum(page, np.where(hit.any(axis=0), first + hit.argmax(axis=0) + 1.0, np.inf))
        states = path.stopped(np.full(runs, _TURN - 1))
        if np.isfinite(page).all():
            break
        for run in np.flatnonzero(~np.isfinite(page)).tolist() if waits else ():
            n_random = int(rng.binomial(_TURN, 2 * share if slices[run].noise.older.n < _FIRST else share))
            slices[run].fold(
                first,
                float(path.page[-1, run]),
                states[run],
                changed[:, run],
                differs[:, run],
                n_random=n_random,
            )
            states[run] = slices[run].retune(states[run], first + _TURN)
    return page


def measure(*, quick: bool, seed: int = 270) -> dict[str, float]:
    """Return the share of healthy versions that page, of the worst law, and how much later a drift beside noise is found; print each."""
    runs, after = (12, 8_000) if quick else (48, 40_000)
    figures: dict[str, float] = {}
    shares = []
    for law in HEALTHY:
        shares.append(float(np.isfinite(paged(law, runs, after=after, seed=seed)).mean()))
        print(f"  {law.name}: {shares[-1]:.0%} page", flush=True)
    figures["noise_pages"] = max(shares)
    medians: dict[str, float] = {}
    for law in (*SURE, *DRIFTS):
        for waits in (False, True):
            delays = paged(law, runs, after=after, seed=seed, waits=waits) - law.changed_from
            median, late = (float(np.quantile(delays, q, method="higher")) for q in (0.5, 0.9))
            print(f"  {law.name}: pages after {median:,.0f} ({late:,.0f}), waits: {waits}", flush=True)
            medians[law.name] = median
        if law is PLAIN:
            figures["noise_none_ratio"] = medians[law.name] / float(
                np.median(paged(law, runs, after=after, seed=seed, waits=False))
            )
    figures["noise_delay_ratio"] = max(medians[law.name] for law in DRIFTS[:2]) / medians[PLAIN.name]
    return figures


def _fresh(allowance: float, at: int) -> FloatArray:
    return BUDGET.fresh(budget=BUDGET_M + allowance, scale=1.0, weighted=False, mass=float(at), at_us=0)


def _block(flips: BoolArray, first: int) -> ObservationBlock:
    at = np.broadcast_to(np.arange(first + 1.0, first + 1 + len(flips))[:, None], flips.shape)
    return ObservationBlock(
        x=np.stack((flips.astype(np.float64), np.ones(flips.shape)), axis=-1),
        seen=np.ones(flips.shape, dtype=np.bool_),
        mass=at,
        at_us=at * _SECOND_US,
    )
