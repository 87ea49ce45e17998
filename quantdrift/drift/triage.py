"""The triage list: slices to look at now, with a bound on the share that is listed by chance.

The evidence of all detectors together has, while nothing is wrong, a mean of at most one per month of operation,
since that is the allowance that the calendar clock has given out. So

    e_s = n_slices * E_s / age,    age = max(1, months since the start)

are compound e-values: their means add up to at most `n_slices`, however the detectors are spread over the slices and
under any dependence. The e-BH procedure lists the k* slices with the largest, k* the largest k with

    e_(k) >= n_slices / (alpha k),    which is    E_(k) >= age / (alpha k).

Assumption: that of every detector. Bound: at each look, the expected share of slices listed although nothing was
wrong there is at most alpha; it holds per look and is not latched: a list says what the evidence of today supports.
It finds drifts that many slices share sooner than a page does; one slice alone pages first.
A slice that fires has had its evidence reset; it keeps that of its alarm until the alert is over, and the bound stays,
because evidence less allowance, with what alarms took out added again, is a supermartingale.
Source: Wang and Ramdas, False discovery rate control with e-values, JRSS B 2022; Ignatiadis, Wang and Ramdas, Compound
e-values and empirical Bayes, arXiv 2409.19812; for e-detectors Dandapanthula and Ramdas, arXiv 2501.04130.
"""

import numpy as np

from quantdrift.drift.evidence.observations import FloatArray, IntArray

ALPHA = 0.05


def triage(evidence: FloatArray, *, months: float, alpha: float = ALPHA) -> IntArray:
    """Return the indices of the slices to look at, most evidence first.

    Parameters
    ----------
    evidence
        (slices,) summed page evidence of each slice; of one that fires, the evidence of its alarm.
    months
        Time since the fleet's clock started, in units of 30 days.
    alpha
        Largest expected share of false entries, in (0, 1].

    Raises
    ------
    ValueError
        Evidence that is negative or not a number, alpha outside (0, 1], or a time below 0.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha = {alpha} is not in (0, 1]")
    if not months >= 0:
        raise ValueError(f"months = {months} is not a time since the start: it must be at least 0")
    if not (evidence >= 0).all():
        raise ValueError("evidence must be a number, and not negative")
    order = np.argsort(-evidence, kind="stable")
    rank = np.arange(1, len(order) + 1)
    enough = np.flatnonzero(evidence[order] * rank * alpha >= max(1.0, months))
    return order[: enough[-1] + 1] if len(enough) else order[:0]
