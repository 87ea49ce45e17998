"""What `budget.latency_growth = 2` means: the limit that is learned, over twice the 99 % quantile of the traffic it was learned from.

A week of healthy traffic; independent times with a light and a heavy tail, at 300 to 20,000 exchanges a day, and times at a server
with one queue, whose use swings from 30 to 80 % in a day.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from quantdrift.core.signals import SLOW_SHARE
from quantdrift.drift.detectors.growth import EDGES, WEEK_US
from quantdrift.drift.detectors.protocol import GROWTH
from quantdrift.drift.evidence.group import N_TIME_BINS
from quantdrift.drift.evidence.observations import FloatArray, GroupSequence

NAMED: Final = 2.0
_MEAN_S: Final = 0.2
_PART: Final = 500
_DAY_S: Final = 86_400.0


def _independent(spread: float, a_day: int) -> Callable[[np.random.Generator], FloatArray]:
    return lambda rng: _MEAN_S * rng.lognormal(-(spread**2) / 2, spread, 7 * a_day)


def _queue(rng: np.random.Generator) -> FloatArray:
    most = 0.8
    at = np.sort(rng.uniform(0.0, 7 * _DAY_S, rng.poisson(most / _MEAN_S * 7 * _DAY_S)))
    use = (0.3 + most) / 2 - (most - 0.3) / 2 * np.cos(2 * np.pi * at / _DAY_S)
    at = at[rng.random(len(at)) < use / most]
    serves = _MEAN_S * rng.lognormal(-0.125, 0.5, len(at))
    work = np.concatenate(((0.0,), np.cumsum(serves[:-1] - np.diff(at))))
    latency_s: FloatArray = work - np.minimum.accumulate(work) + serves
    return latency_s[rng.random(len(at)) < 7 * 5_000 / len(at)]


LAWS: Final[Mapping[str, Callable[[np.random.Generator], FloatArray]]] = {
    "light tail, 300 a day": _independent(0.5, 300),
    "light tail, 1,000 a day": _independent(0.5, 1_000),
    "light tail, 20,000 a day": _independent(0.5, 20_000),
    "heavy tail, 300 a day": _independent(1.2, 300),
    "heavy tail, 1,000 a day": _independent(1.2, 1_000),
    "heavy tail, 20,000 a day": _independent(1.2, 20_000),
    "a queue with the load of the day": _queue,
}


def over_named(latency_s: FloatArray) -> float:
    """Return the limit that is learned from a week of these times, in their order, over `NAMED` times their 99 % quantile."""
    state = GROWTH.fresh(tau=NAMED - 1.0, scale=1.0, mass=0.0, at_us=0)
    at_us = np.linspace(0.0, 1.01 * WEEK_US, len(latency_s))
    x = np.zeros((len(latency_s), 1 + N_TIME_BINS))
    x[:, 0] = 1.0
    x[np.arange(len(x)), 1 + np.searchsorted(EDGES, latency_s, side="right")] = 1.0
    for first in range(0, len(x), _PART):
        some = slice(first, first + _PART)
        n = len(x[some])
        mass = np.arange(first + 1.0, first + 1 + n)
        GROWTH.follow(
            state[None],
            GroupSequence(np.array([n]), x[some], np.ones(n, dtype=np.bool_), mass, at_us[some], at_us[some]),
        )
        GROWTH.tend(state, mass=float(mass[-1]), at_us=int(at_us[some][-1]))
    limit_s = GROWTH.limit_s(state)
    assert limit_s is not None
    return limit_s / (NAMED * float(np.quantile(latency_s, 1.0 - SLOW_SHARE)))


def measure(*, quick: bool, seed: int = 271) -> dict[str, float]:
    """Return the median of the worst law, and the worst of all; print each law."""
    rng = np.random.default_rng(seed)
    medians, most = [], 0.0
    for name, law in LAWS.items():
        ratios = [over_named(law(rng)) for _ in range(3 if quick else 15)]
        medians.append(float(np.median(ratios)))
        most = max(most, *ratios)
        print(f"  {name:34} limit {medians[-1]:.2f} of what is named (worst {max(ratios):.2f})", flush=True)
    return {"growth_over_named": max(medians), "growth_over_named_worst": most}
