"""False alarms measured against what is proven, at thresholds low enough for them to happen.

**Sample clock** (mass 1 per group): P(alarm within n groups) <= n / A, at A = 4 n.
**Calendar clock**: a fleet of slices, rare and frequent ones, each with arrivals of its own; after an alarm its slice
is armed again at the end of the batch. False alarms <= q * (allowance given), and the allowance is a unit in 30 days
from the first live detector on. The shipped rule that evidence must also be 1,000 times the mass since the reset only
takes alarms away; it is not in force here.

Every slice is at the edge of what its null allows: at its budget exactly, or ever the same law.
"""

import msgspec
import numpy as np
from scipy.stats import beta, chi2

from benchmarks.race import OBSERVE, known, learned, race
from benchmarks.streams import BASELINE, Case, Divergences, Flips, Law, Stream
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS, LEARNERS
from quantdrift.drift.evidence.clock import DAY_US, MONTH_US, CalendarClock
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.watch import Groups, Phase, Series, SignalKey, SliceWatch, Thresholds, advance

CONFIDENCE = 0.95
# That of a latency's growth is the budget's, once it is learned.
NULLS: dict[str, Law] = {"budget": Flips(rate=0.01), "change": Flips(rate=0.02), "tail": Divergences()}
READY = {"budget": 0, "change": BASELINE, "tail": 10_000}
_FACTOR = 4.0
_N_SLICES = 20


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """False alarms of one kind of detector on one clock.

    Parameters
    ----------
    kind, clock
        What was measured.
    n_groups
        Group values that were drawn while it was live.
    n_alarms
        False alarms.
    ratio
        Measured over proven.
    ratio_high
        The same at the upper 95 % confidence limit of the measured number.
    """

    kind: str
    clock: str
    n_groups: int
    n_alarms: int
    ratio: float
    ratio_high: float


def on_sample_clock(kind: str, runs: int, n: int, seed: int) -> Measured:
    """Return the chance of an alarm within n groups against n / A.

    Parameters
    ----------
    kind
        Of the detector.
    runs
        Side by side.
    n
        Groups after it has become live; a multiple of 32.
    seed
        Of the stream.
    """
    law, ready = NULLS[kind], -(-READY[kind] // 32) * 32
    contestant = known(0.01, runs) if kind == "budget" else learned(kind, 0.0, runs)
    case = Case(name=kind, before=law, after=law, change=ready + n)
    found = race(Stream(case, runs, seed), {kind: (contestant, [_FACTOR * n])}, horizon=0)[kind]
    hits = int(np.isfinite(found.first[0]).sum())
    high = float(beta.ppf(CONFIDENCE, hits + 1, runs - hits)) if hits < runs else 1.0
    return Measured(
        kind=kind,
        clock="sample",
        n_groups=runs * n,
        n_alarms=hits,
        ratio=_FACTOR * hits / runs,
        ratio_high=_FACTOR * high,
    )


def on_calendar_clock(kind: str, days: int, seed: int) -> Measured:
    """Return the false alarms of a fleet of 20 slices against its allowance.

    Slices get 20 to 2,000 groups a day, learners 200 to 2,000; detectors become live one after the other, and the
    allowance of each shrinks as they do.
    """
    rng = np.random.default_rng(seed)
    per_day = np.geomspace(20 if kind == "budget" else 200, 2000, _N_SLICES)
    # One false alarm per 3,000 groups of a fleet of slices with mean traffic, if the bound were attained.
    threshold = 3000 / (30 * float(per_day.sum()))
    thresholds = Thresholds(page=threshold, ticket=float("inf"), mass_ratio=0.0)
    key, detector, law = SignalKey("x", kind), DETECTORS[kind], NULLS[kind]
    watches = []
    for _ in range(_N_SLICES):
        watches.append(SliceWatch())
        watches[-1].add(key, _fresh(kind))
    clock = CalendarClock(at_us=0)
    months, n_alarms, n_groups = 0.0, 0, 0
    for day in range(days):
        live = [detector.live(watch.states[key]) for watch in watches]
        clock = clock.with_detectors(sum(live))
        owner = rng.permutation(np.repeat(np.arange(_N_SLICES), rng.poisson(per_day)))
        at_us = np.sort(rng.integers(day * DAY_US, (day + 1) * DAY_US, len(owner)))
        mass = np.zeros(len(owner))
        for place, moment in enumerate(at_us.tolist()):
            clock = clock.seen(moment)
            mass[place] = clock.mass
        x = law.draw(rng, (len(owner), 1))
        values = OBSERVE[kind](x)[:, 0]
        groups = [
            Groups(
                order=np.flatnonzero(owner == one).astype(np.float64),
                mass=mass[owner == one],
                at_us=at_us[owner == one].astype(np.float64),
                series={
                    key: Series(x=values[owner == one], seen=np.ones((owner == one).sum(), dtype=np.bool_))
                },
            )
            for one in range(_N_SLICES)
        ]
        changes = advance(watches, groups, thresholds)
        n_alarms += sum(change.after is Phase.FIRING for change in changes)
        months += DAY_US / MONTH_US if any(live) else 0.0
        n_groups += int(np.isin(owner, np.flatnonzero(live)).sum())
        for watch in watches:
            if watch.phase is not Phase.WATCHING:
                watch.stand_down(mass=clock.mass, at_us=(day + 1) * DAY_US)
            detector.tend(watch.states[key], mass=clock.mass, at_us=(day + 1) * DAY_US)
    bound = months / threshold
    return Measured(
        kind=kind,
        clock="calendar",
        n_groups=n_groups,
        n_alarms=n_alarms,
        ratio=n_alarms / bound,
        ratio_high=float(chi2.ppf(CONFIDENCE, 2 * (n_alarms + 1)) / 2 / bound),
    )


def together(parts: list[Measured]) -> Measured:
    """Return shorter measurements of the same thing as one; each counts alike."""
    first, n_alarms = parts[0], sum(part.n_alarms for part in parts)
    ratio = float(np.mean([part.ratio for part in parts]))
    slack = chi2.ppf(CONFIDENCE, 2 * (n_alarms + 1)) / 2 / max(n_alarms, 1)
    widest = max(part.ratio_high for part in parts)
    return Measured(
        kind=first.kind,
        clock=first.clock,
        n_groups=sum(part.n_groups for part in parts),
        n_alarms=n_alarms,
        ratio=ratio,
        ratio_high=float(ratio * slack) if n_alarms else widest / len(parts),
    )


def _fresh(kind: str) -> FloatArray:
    if kind == "budget":
        return BUDGET.fresh(budget=0.01, scale=1.0, weighted=False, mass=0.0, at_us=0)
    return LEARNERS[kind].fresh(tau=0.0, scale=1.0, mass=0.0, at_us=0)
