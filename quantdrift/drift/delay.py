"""Detection delays: those of the shipped bets on simulated streams, and the shortest delay of any detector.

`simulate` runs the recursion of `quantdrift.drift.detectors.budget` with the bets of a fresh detector on independent groups of a
known law, seeded. It begins with no evidence, as a slice inside its budget nearly does, so it overestimates the delay.

`optimum` is the mean delay of the CUSUM that knows the rates before and after. Among all detectors with the same
average number of samples between false alarms it has the least worst-case mean delay (Moustakides, Annals of
Statistics 14, 1986), so a detector that knows less is not faster. For large A it grows as log(A) / KL (Lorden, Annals of
Mathematical Statistics 42, 1971). That rate alone is no bound at real sizes: at A = 4e6 and flips from 1 % to 3 % it
says 1,155 where the optimum is some 700. Hence Wald's approximation of both averages, with neither overshoot (Siegmund,
Sequential Analysis, 1985, chapter 2): within a tenth for the rates that matter here.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from quantdrift.drift.detectors.budget import RATES
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.clock import DAY_MASS
from quantdrift.drift.evidence.observations import STEPS, FloatArray
from quantdrift.facts.plan import Delay

STREAMS = 400
MOST_SAMPLES = 20_000
_QUANTILES = (0.1, 0.5, 0.9)
_LEAST_GROWTH = 0.1
_LARGEST_RATE = 1.0 - 1e-9  # a rate of 1 after the shift would make the optimum 1 / 0


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of one group's value: values and weights with their probabilities. Arrays are (atoms,).

    Parameters
    ----------
    x
        Clipped value over its cap, in [0, 1].
    v
        Weight c / pi, in (0, 1].
    probability
        They add up to 1.
    """

    x: FloatArray
    v: FloatArray
    probability: FloatArray


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """The calendar mass per sample, and the level that the evidence must reach.

    Parameters
    ----------
    gamma
        Mass per sample and signal: the time between samples over 30 days times the live detectors.
    threshold
        1 / q.
    mass_ratio
        The evidence must also be so many times the mass given to the slice's signals since their reset, or a day's mass
        of the whole fleet where that is less.
    mass_before
        That mass when the shift comes, summed over the slice's signals.
    n_signals
        Signals of the slice, which share its evidence and each get mass.
    """

    gamma: float
    threshold: float
    mass_ratio: float = 1000.0
    mass_before: float = 0.0
    n_signals: int = 1

    def needed(self, n: int) -> float:
        """Return the level that the evidence must reach at the n-th sample after the shift."""
        mass = self.mass_before + self.n_signals * self.gamma * n
        return max(self.threshold, self.mass_ratio * min(mass, DAY_MASS))


def flips(rate: float, mix: Sequence[tuple[float, float]] = ((1.0, 1.0),)) -> Distribution:
    """Return the law of groups of one item each that flips with probability `rate`.

    Among all distributions on [0, 1] with this mean it has the largest variance, and so the longest delay.

    Parameters
    ----------
    rate
        In [0, 1].
    mix
        Weights v and the share of the samples that have them, where inclusion probabilities differ.
    """
    v, share = np.array(mix, dtype=np.float64).T
    return Distribution(
        x=np.concatenate((np.ones_like(v), np.zeros_like(v))),
        v=np.concatenate((v, v)),
        probability=np.concatenate((rate * share, (1 - rate) * share)) / share.sum(),
    )


def simulate(
    law: Distribution,
    *,
    budget: float,
    allowance: Allowance,
    weighted: bool = False,
    most: int = MOST_SAMPLES,
    streams: int = STREAMS,
    seed: int = 1,
) -> Delay:
    """Return how many samples the budget detector needs under `law`.

    Parameters
    ----------
    law
        Distribution of the observations after the shift.
    budget
        Accepted mean of x, in (0, 1).
    allowance
        Mass and threshold.
    weighted
        Whether the detector is set up for weights that differ.
    most
        Samples after which a stream is given up.
    streams, seed
        How many independent streams. With 400 the median has a standard error of some 2 to 3 %.
    """
    state = BUDGET.fresh(budget=budget, scale=1.0, weighted=weighted, mass=0.0, at_us=0)
    factors = 1.0 + (law.v * (law.x - budget))[:, None] * state[RATES]
    borders = np.cumsum(law.probability)[:-1]
    # The evidence grows at most at this rate in the long run: a simulation that needs ten times as long is not tried.
    growth = float((law.probability @ np.log(factors)).max())
    if growth * most < _LEAST_GROWTH * math.log(allowance.needed(1) / allowance.gamma):
        return Delay(p10=None, p50=None, p90=None)
    rng = np.random.default_rng(seed)
    delay = np.full(streams, np.inf)
    running = np.arange(streams)
    evidence = np.zeros((streams, factors.shape[1]))
    for begin in range(0, most, STEPS):
        # Streams that have alarmed run only to the end of the block: their evidence grows without limit.
        drawn = np.searchsorted(borders, rng.random((STEPS, len(running))), side="right")
        for n, atoms in enumerate(drawn[: most - begin], start=begin + 1):
            evidence += allowance.gamma
            evidence *= factors[atoms]
            hit = evidence.mean(axis=1) >= allowance.needed(n)
            if hit.any():
                delay[running[hit]] = np.minimum(delay[running[hit]], n)
        undetected = np.isinf(delay[running])
        running, evidence = running[undetected], evidence[undetected]
        if not len(running):
            break
    p10, p50, p90 = (_samples(float(np.quantile(delay, q, method="lower"))) for q in _QUANTILES)
    return Delay(p10=p10, p50=p50, p90=p90)


def optimum(before: float, after: float, between: float) -> float:
    """Return the mean delay of the best possible detector, which knows both rates, in samples.

    Parameters
    ----------
    before, after
        Probability of a flip before, in (0, 1), and after the shift, in (0, 1]; different.
    between
        Samples between false alarms, on average: threshold / gamma.
    """
    after = min(after, _LARGEST_RATE)
    wanted = between * divergence(before, after)
    low, high = 0.0, 1.0 + math.log1p(wanted)
    while high - low > 1e-9:
        height = (low + high) / 2
        low, high = (height, high) if math.expm1(height) - height < wanted else (low, height)
    return (high + math.expm1(-high)) / divergence(after, before)


def divergence(p: float, q: float) -> float:
    """Return KL(p || q) of flips with these probabilities, in nats; p in [0, 1], q in (0, 1)."""
    return sum(a * math.log(a / b) for a, b in ((p, q), (1 - p, 1 - q)) if a > 0)


def _samples(n: float) -> int | None:
    return int(n) if math.isfinite(n) else None
