"""The best that anybody could do: a CUSUM that knows both laws, tuned to a chance of false alarm.

`W <- max(0, W + log f1(x) / f0(x))`, alarm at W >= h. It is optimal at its false-alarm rate (Moustakides 1986). A
cycle is from W = 0 until W is back at 0 or at h, so its average run length is E0[cycle] / P0(cycle ends at h), and
false alarms come like a Poisson process: P(one within n) = 1 - exp(-n / ARL). The small probability is estimated
under the law after the change, `P0(ends at h) = E1[exp(-S) 1{ends at h}]`, S the sum at the end (Siegmund 1985).
"""

import math

import numpy as np

from benchmarks.streams import Law
from quantdrift.drift.evidence.observations import BoolArray, FloatArray

WITHIN, CHANCE = 200_000, 0.05
_CYCLES = 30_000
_STEP = 64


def tuned(before: Law, after: Law, *, within: int = WITHIN, chance: float = CHANCE, seed: int = 1) -> float:
    """Return the threshold h at which P(false alarm within `within`) is `chance`."""
    target = within / -math.log1p(-chance)
    h = math.log(target) - 3.0
    for _ in range(6):  # log ARL is almost linear in h with slope 1
        step = math.log(target / run_length(before, after, h, seed))
        h += step
        if abs(step) < 0.01:
            break
    return h


def run_length(before: Law, after: Law, h: float, seed: int = 1) -> float:
    """Return the average run length of the CUSUM with threshold h while nothing has changed."""
    rng = np.random.default_rng(seed)
    length = _ends(before, before, after, h, rng)[0].mean()
    sums = _ends(after, before, after, h, rng)[1]
    crossed = np.where(sums >= h, np.exp(-np.maximum(sums, h)), 0.0)
    return float(length / crossed.mean())


def _ends(
    drawn: Law, before: Law, after: Law, h: float, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Return lengths and final sums of cycles under the law `drawn`."""
    length, total = np.zeros(_CYCLES), np.zeros(_CYCLES)
    running = np.arange(_CYCLES)
    while len(running):
        path = total[running] + np.cumsum(
            log_ratio(before, after, drawn.draw(rng, (_STEP, len(running)))), axis=0
        )
        ended = (path <= 0) | (path >= h)
        over = ended.any(axis=0)
        step = np.where(over, ended.argmax(axis=0), _STEP - 1)
        total[running] = path[step, np.arange(len(running))]
        length[running] += step + 1
        running = running[~over]
    return length, total


def log_ratio(before: Law, after: Law, x: FloatArray) -> FloatArray:
    """Return the log likelihood ratio of each value; a value that cannot come after the change ends any cycle."""
    return np.maximum(after.log_density(x) - before.log_density(x), -1e6)


class Oracle:
    """The CUSUM of some runs side by side.

    Parameters
    ----------
    before, after
        The laws.
    runs
        How many.
    """

    def __init__(self, before: Law, after: Law, runs: int) -> None:
        self._laws = before, after
        self._w = np.zeros(runs)

    def follow(self, x: FloatArray) -> FloatArray:
        """Return W after each step, (steps, runs)."""
        sums = np.cumsum(log_ratio(*self._laws, x), axis=0)
        least = np.minimum(np.minimum.accumulate(sums, axis=0), -self._w)
        path = sums - least
        self._w = path[-1]
        return path

    def keep(self, runs: BoolArray) -> None:
        """Go on with these runs alone."""
        self._w = self._w[runs]
