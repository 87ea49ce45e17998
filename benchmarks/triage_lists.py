"""A thousand slices for 80 days, ten of which drift: what the triage list names, day by day.

The calendar clock, the shipped watch with its pages, resets and recoveries, and the shipped list. Beside it what is
usual: a z test of the last ten days against the budget, Benjamini-Hochberg over the slices, every day anew.
"""

import math

import msgspec
import numpy as np
from scipy.special import ndtr

from benchmarks.race import budgeted
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.clock import DAY_US, CalendarClock
from quantdrift.drift.evidence.observations import FloatArray, IntArray
from quantdrift.drift.triage import ALPHA, triage
from quantdrift.drift.watch import Groups, Phase, Series, SignalKey, SliceWatch, Thresholds, advance

LOOKS = 80
PER_LOOK = 100
WINDOW_LOOKS = 10
N_SLICES, N_DRIFTED = 1000, 10
BUDGET_RATE, DRIFTED_RATE = 0.01, 0.03
THRESHOLDS = Thresholds(page=10.0, ticket=1.0)
_FLIP = SignalKey("flip", "budget")


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule listed over all looks.

    Parameters
    ----------
    fdr
        Mean over fleets and looks of the false share of the list: each look's is bounded, so this is.
    fdr_worst_look
        Mean over fleets of the false share of the list, at the look where that is largest.
    fdr_latched
        The same for whatever was ever listed, which no bound promises.
    n_false
        False slices ever listed, per fleet.
    power
        Drifted slices on the list at the last look, over all that drifted.
    """

    fdr: float
    fdr_worst_look: float
    fdr_latched: float
    n_false: float
    power: float


def look_after(
    seed: int, looks: int = LOOKS, n_slices: int = N_SLICES
) -> list[tuple[FloatArray, FloatArray]]:
    """Return per look who is listed by triage and by z tests, each (slices,) 0 / 1; the first ten slices drift.

    Every healthy slice is at its budget exactly, the worst that is allowed. Drifts begin between the eighth and the
    third eighth of the time, each at its own moment.
    """
    rng = np.random.default_rng(seed)
    n = looks * PER_LOOK
    onset = np.full(n_slices, n)
    onset[:N_DRIFTED] = rng.integers(n // 8, 3 * n // 8, N_DRIFTED)
    clock = CalendarClock(at_us=0, n_detectors=n_slices)
    watches = [SliceWatch() for _ in range(n_slices)]
    for watch in watches:
        fresh = BUDGET.fresh(budget=BUDGET_RATE, scale=1.0, weighted=False, mass=0.0, at_us=0)
        watch.add(_FLIP, fresh)
    at_alarm = np.zeros(n_slices)
    listed = []
    days: list[FloatArray] = []
    order = np.arange(PER_LOOK, dtype=np.float64)
    for look in range(looks):
        at = look * PER_LOOK + np.arange(PER_LOOK)
        at_us = np.asarray((at + 1.0) * (DAY_US / PER_LOOK), dtype=np.float64)
        mass = np.zeros(PER_LOOK)
        for step, moment in enumerate(at_us):
            clock = clock.seen(int(moment))
            mass[step] = clock.mass
        rate = np.where(at[:, None] >= onset, DRIFTED_RATE, BUDGET_RATE)
        flips = (rng.random(rate.shape) < rate).astype(np.float64)
        days = [*days[1 - WINDOW_LOOKS :], flips.sum(axis=0)]
        x, seen = budgeted(flips), np.ones(PER_LOOK, dtype=np.bool_)
        groups = [
            Groups(order=order, mass=mass, at_us=at_us, series={_FLIP: Series(x=x[:, one], seen=seen)})
            for one in range(n_slices)
        ]
        for change in advance(watches, groups, THRESHOLDS):
            if change.after is Phase.FIRING:
                at_alarm[change.watch] = sum(change.evidence.values())
        firing = np.array([watch.phase is Phase.FIRING for watch in watches])
        evidence = np.where(firing, at_alarm, [watch.evidence() for watch in watches])
        ours = _marked(triage(evidence, months=(look + 1) / 30), n_slices)
        listed.append((ours, _marked(_tested(days), n_slices)))
    return listed


def summarise(fleets: list[list[tuple[FloatArray, FloatArray]]]) -> tuple[Listing, Listing]:
    """Return what triage, and what the z tests listed."""
    found = np.array(fleets)  # (fleets, looks, rules, slices)
    ours, theirs = (_listing(found[:, :, rule]) for rule in range(2))
    return ours, theirs


def _listing(listed: FloatArray) -> Listing:
    def share(marks: FloatArray) -> FloatArray:
        wrong = marks[..., N_DRIFTED:].sum(axis=-1)
        return np.asarray(wrong / np.maximum(marks.sum(axis=-1), 1.0), dtype=np.float64)

    ever = listed.max(axis=1)
    return Listing(
        fdr=float(share(listed).mean()),
        fdr_worst_look=float(share(listed).mean(axis=0).max()),
        fdr_latched=float(share(ever).mean()),
        n_false=float(ever[:, N_DRIFTED:].sum(axis=1).mean()),
        power=float(listed[:, -1, :N_DRIFTED].mean()),
    )


def _marked(indices: IntArray, n: int) -> FloatArray:
    marks = np.zeros(n)
    marks[indices] = 1.0
    return marks


def _tested(days: list[FloatArray]) -> IntArray:
    """Return the slices that Benjamini-Hochberg lists from one-sided z tests of these days' flips."""
    n = len(days) * PER_LOOK
    z = (np.sum(days, axis=0) / n - BUDGET_RATE) / math.sqrt(BUDGET_RATE * (1 - BUDGET_RATE) / n)
    p = ndtr(-z)
    order = np.argsort(p)
    enough = np.flatnonzero(p[order] <= ALPHA * np.arange(1, len(p) + 1) / len(p))
    return order[: enough[-1] + 1] if len(enough) else order[:0]
