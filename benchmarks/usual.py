"""What is usually done about flips, in a few lines each: a z test per window, an e-process that never restarts."""

import math

import numpy as np
from scipy.special import logsumexp

from quantdrift.drift.detectors.budget import RATES
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.observations import STEPS, BoolArray, FloatArray

WINDOW = 1024  # a multiple of STEPS
Z_05 = 1.6448536269514722  # one-sided, p < .05
EVER_05 = math.log(20)  # Ville: false alarm ever with P <= .05


class ZTest:
    """The z score of each full window's flips against the budget; 0 in between.

    Parameters
    ----------
    budget
        Flip rate.
    runs
        Side by side.
    """

    def __init__(self, budget: float, runs: int) -> None:
        self._budget = budget
        self._sum = np.zeros(runs)
        self._n = 0

    def follow(self, x: FloatArray) -> FloatArray:
        """Return the score after each step, (steps, runs)."""
        self._sum += x.sum(axis=0)
        self._n += STEPS
        scores = np.zeros(x.shape)
        if self._n == WINDOW:
            deviation = math.sqrt(self._budget * (1 - self._budget) / WINDOW)
            scores[-1] = (self._sum / WINDOW - self._budget) / deviation
            self._sum, self._n = np.zeros_like(self._sum), 0
        return scores

    def keep(self, runs: BoolArray) -> None:
        """Go on with these runs alone."""
        self._sum = self._sum[runs]


class NeverRestarted:
    """The log of the budget detector's bets as one e-process from the beginning on: what is lost in health is lost.

    Parameters
    ----------
    budget
        Flip rate.
    runs
        Side by side.
    """

    def __init__(self, budget: float, runs: int) -> None:
        fresh = BUDGET.fresh(budget=budget, scale=1.0, weighted=False, mass=0.0, at_us=0)
        self._budget, self._rates = budget, fresh[RATES]
        self._log = np.zeros((runs, len(self._rates)))

    def follow(self, x: FloatArray) -> FloatArray:
        """Return the log of the mean over bets after each step, (steps, runs)."""
        path = self._log + np.cumsum(np.log1p((x - self._budget)[..., None] * self._rates), axis=0)
        self._log = path[-1]
        return np.asarray(logsumexp(path, axis=2) - math.log(len(self._rates)))

    def keep(self, runs: BoolArray) -> None:
        """Go on with these runs alone."""
        self._log = self._log[runs]
