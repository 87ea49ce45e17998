"""References that differ from themselves: how often a healthy candidate pages for it.

Answers are compared with one replay of a reference whose decision differs between two replays with a chance of 2 %, from the first
exchange on or from a later one, as after a change of device. The candidate itself is within half of its budget of 1 %. Exchanges
are replayed again at the default `shadow.noise_share`, and the allowance for noise follows as in the fold.
"""

from typing import Final

import msgspec
import numpy as np

from benchmarks.delays import PRODUCTION
from quantdrift.core.config.schema import Shadow
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.observations import FloatArray, ObservationBlock
from quantdrift.drift.noise import Level, Noise, Sums, updated, window_of

BUDGET_M: Final = 0.01
NOISE: Final = 0.02
CANDIDATE: Final = 0.002
_TURN: Final = 50  # exchanges between two looks at the noise
_FIRST: Final = 500  # of which all are replayed again, as far as that fits into twice the share
_SECOND_US: Final = 1_000_000


class NoiseLaw(msgspec.Struct, frozen=True, kw_only=True):
    """When the noise begins, in exchanges of the version."""

    name: str
    begins: int


LAWS: Final = (
    NoiseLaw(name="from the first exchange", begins=0),
    NoiseLaw(name="after 20,000 exchanges", begins=20_000),
)


def paged(law: NoiseLaw, runs: int, *, after: int, seed: int) -> FloatArray:
    """Return per run the exchange at which it pages; infinite if not within `after` exchanges of noise."""
    rng, share = np.random.default_rng(seed), Shadow().noise_share
    states = np.stack([_fresh(0.0, 0)] * runs)
    noises, levels = [Noise()] * runs, [Level()] * runs
    page = np.full(runs, np.inf)
    for first in range(0, law.begins + after, _TURN):
        noise = NOISE if first >= law.begins else 0.0
        path = BUDGET.run(states, _block(rng.random((_TURN, runs)) < CANDIDATE + noise, first))
        hit = path.page >= PRODUCTION
        page = np.minimum(page, np.where(hit.any(axis=0), first + hit.argmax(axis=0) + 1.0, np.inf))
        states = path.stopped(np.full(runs, _TURN - 1))
        for run in range(runs):
            n = noises[run].older.n
            n_again = int(rng.binomial(_TURN, 2 * share if n < _FIRST else share))
            for differs in (rng.random(n_again) < noise).tolist():
                noises[run] = noises[run].seen(float(differs), 1.0, window_of(BUDGET_M))
            before = levels[run]
            if n_again and noises[run].older != Sums():
                levels[run] = updated(before, *noises[run].bounds(), BUDGET_M, 0.5 * BUDGET_M)
            if levels[run].added > before.added:
                states[run] = _fresh(levels[run].added, first + _TURN)
            elif levels[run].added < before.added:
                BUDGET.lower(states[run], BUDGET_M + levels[run].added)
    return page


def measure(*, quick: bool, seed: int = 270) -> dict[str, float]:
    """Return the share of healthy versions that page, of the worst law; print each."""
    runs, after = (12, 8_000) if quick else (48, 40_000)
    shares = []
    for law in LAWS:
        page = paged(law, runs, after=after, seed=seed)
        shares.append(float(np.isfinite(page).mean()))
        print(
            f"  noise of 2 % {law.name}: {shares[-1]:.0%} page, {law.begins:,} exchanges before it",
            flush=True,
        )
    return {"noise_pages": max(shares)}


def _fresh(allowance: float, at: int) -> FloatArray:
    return BUDGET.fresh(budget=BUDGET_M + allowance, scale=1.0, weighted=False, mass=float(at), at_us=0)


def _block(flips: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], first: int) -> ObservationBlock:
    at = np.broadcast_to(np.arange(first + 1.0, first + 1 + len(flips))[:, None], flips.shape)
    return ObservationBlock(
        x=np.stack((flips.astype(np.float64), np.ones(flips.shape)), axis=-1),
        seen=np.ones(flips.shape, dtype=np.bool_),
        mass=at,
        at_us=at * _SECOND_US,
    )
