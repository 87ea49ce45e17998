"""Replays until a rare slice's drift is found: a uniform sample against the shipped sampling policy.

    python -m benchmarks.sampling [--quick] [--every 500] [--out out/benchmarks]

A hundred disjoint slices, one of which holds 0.5 % of the traffic and goes from 1 % to 3 % flips. The shipped budget
detector looks for it, every group counting 1 on its clock, threshold 4e6 (P(false alarm within 200,000 samples of
the slice) <= 5 %). Counted are the replays of *all* slices from the change to the alarm:

- **uniform**: every item with the same probability;
- **policy**: `quantdrift.drift.sampling.allocation`, from what the run itself has seen, made anew every 500 replays.

Replays may be 1 % of the traffic, and no item can be replayed twice: a 0.5 % slice can fill at most half of them.
The first policy follows 2,000 uniform replays; the change comes after 20,000.

Where flips are is the question that margins answer, so it is varied: `concentrated` (before and after: normal noise of
the logits that passes the margin), `flat` (at any margin, before and after), `moved` (concentrated before, the new
flips at any margin), `far` (concentrated before, the new flips only above the 30 % quantile of the margins: the worst
for a policy that trusts margins). `largest` is `flat` in the slice with the most traffic, which a uniform sample serves
best. The worst case is the least gain of the last four.
"""

import argparse
import math
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import msgspec
import numpy as np

from benchmarks.result import Goal, finish
from quantdrift.core.records import HeaderStratum, Policy, Predicate
from quantdrift.drift.detectors import budget as fields
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.header import MASS, PAGE_MASS
from quantdrift.drift.evidence.observations import STEPS, FloatArray, IntArray, ObservationBlock
from quantdrift.drift.sampling.allocation import Demand, Recent, SamplingBudget, allocate, urgency
from quantdrift.drift.sampling.boosts import Boosts, Layout

N_SLICES = 100
RARE, LARGEST = 0, N_SLICES - 1
SHARE = 0.005
TRAFFIC_PER_S = 1000.0
REPLAYS_PER_S = 10.0
BEFORE, AFTER = 0.01, 0.03
OPERATING_POINT = 4e6
HISTORY = 2048  # samples of the slice before the change, uniform sampling
RECENT = 2000
EDGES = (0.01, 0.03, 0.1, 0.3)  # margins are given as their quantiles
WIDTHS = np.diff([0.0, *EDGES, 1.0])
MARGINS = np.array([0.005, 0.02, 0.06, 0.2, 0.6])
N_BINS = len(WIDTHS)
_SIDE_BY_SIDE = 1024


def _normal_noise(mean: float) -> FloatArray:
    """Return the flip rate of each bin where an item flips if normal noise passes its margin.

    P(flip | margin u) = Phi(-u / sigma) for margins with a constant density near 0; its mean is sigma / sqrt(2 pi).
    """
    sigma = mean * math.sqrt(2 * math.pi)
    edges = np.array([0.0, *EDGES, 1.0]) / sigma
    # The integral of Phi(-t) is t Phi(-t) - phi(t).
    upper = np.array([0.5 * math.erfc(t / math.sqrt(2)) for t in edges])
    integral = edges * upper - np.exp(-0.5 * edges**2) / math.sqrt(2 * math.pi)
    return np.asarray(sigma * np.diff(integral) / WIDTHS, dtype=np.float64)


_CLOSE = _normal_noise(BEFORE)
_FLAT = np.ones(N_BINS)
_FAR = np.array([0.0, 0.0, 0.0, 0.0, 1.0 / WIDTHS[-1]])
# Flip rates of the bins before and after the change, and which slice changes.
CASES = {
    "concentrated": (_CLOSE, _normal_noise(AFTER), RARE),
    "flat": (BEFORE * _FLAT, AFTER * _FLAT, RARE),
    "moved": (_CLOSE, _CLOSE + (AFTER - BEFORE) * _FLAT, RARE),
    "far": (_CLOSE, _CLOSE + (AFTER - BEFORE) * _FAR, RARE),
    "largest": (BEFORE * _FLAT, AFTER * _FLAT, LARGEST),
}


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How long it takes.

    Parameters
    ----------
    runs
        Seeded runs per case.
    n_before
        Replays before the change, with the policy.
    n_most
        Replays after the change at which a run is given up.
    """

    runs: int = 150
    n_before: int = 20_000
    n_most: int = 400_000


QUICK = Scale(runs=12, n_before=6_000)
FULL = Scale()


def shares() -> FloatArray:
    """Return the slices' traffic shares: from 0.05 % to some 5 %, log-spaced, one of them exactly 0.5 %."""
    others = np.geomspace(1.0, 100.0, N_SLICES - 1)
    return np.concatenate(([SHARE], (1 - SHARE) * others / others.sum()))


def flips(before: FloatArray, after: FloatArray, drifted: int) -> FloatArray:
    """Return the flip rates of all cells, (slices * bins,): those of the bins, in the drifted slice and the others."""
    rates = np.tile(before, (N_SLICES, 1))
    rates[drifted] = after
    return rates.ravel()


class Fleet:
    """Many runs side by side, each with a detector on every slice and a policy of its own."""

    def __init__(self, runs: int, every: int, rng: np.random.Generator) -> None:
        self.every = every
        self.rng = rng
        self.shares = shares()
        one = BUDGET.fresh(budget=BEFORE, scale=1.0, weighted=True, mass=0.0, at_us=0)
        self.states: FloatArray = np.tile(one, (runs, N_SLICES, 1))
        self.policies: list[Policy | None] = [None] * runs
        self.rates: FloatArray = np.full((runs, N_SLICES * N_BINS), REPLAYS_PER_S / TRAFFIC_PER_S)
        self.cells: IntArray = np.zeros((runs, 0), dtype=np.intp)
        self.pi: FloatArray = np.zeros((runs, 0))
        self.x: FloatArray = np.zeros((runs, 0))
        self.n_policies = 0
        demands = [f"slice={s}" for s in range(N_SLICES)]
        self.wheres = [(Predicate(key="header.x-slice", equals=name),) for name in demands]
        self.layout = Layout(header_strata=(HeaderStratum(name="default", rate=1.0),), edges=EDGES)
        self.boosts = Boosts(names=(*demands, "all"), wheres=(*self.wheres, ()), layout=self.layout)

    def branch(self, seed: int) -> "Fleet":
        """Return a copy that goes its own way."""
        twin = Fleet(len(self.states), self.every, np.random.default_rng(seed))
        twin.states, twin.rates = self.states.copy(), self.rates.copy()
        twin.policies = list(self.policies)
        twin.cells, twin.pi, twin.x = self.cells, self.pi, self.x
        return twin

    def keep(self, runs: IntArray) -> None:
        """Go on with these runs alone."""
        self.states, self.rates, self.policies = (
            self.states[runs],
            self.rates[runs],
            [self.policies[r] for r in runs],
        )
        self.cells, self.pi, self.x = self.cells[runs], self.pi[runs], self.x[runs]

    def advance(self, flip: FloatArray, drifted: int) -> FloatArray:
        """Replay `every` items in each run; return at which of them slice `drifted` alarmed, else infinity."""
        runs = len(self.states)
        weight = np.repeat(self.shares, N_BINS) * np.tile(WIDTHS, N_SLICES) * self.rates
        heights = np.cumsum(weight, axis=1)
        draws = self.rng.random((runs, self.every)) * heights[:, -1:]
        cells = np.stack([np.searchsorted(h, u, side="right") for h, u in zip(heights, draws, strict=True)])
        x = (self.rng.random(cells.shape) < flip[cells]).astype(np.float64)
        pi = np.take_along_axis(self.rates, cells, axis=1)
        least = self.rates.reshape(runs, N_SLICES, N_BINS).min(axis=2)
        v = np.take_along_axis(least, cells // N_BINS, axis=1) / pi
        found = self._observe(cells // N_BINS, x, v, drifted)
        self.cells = np.concatenate((self.cells, cells), axis=1)[:, -RECENT:]
        self.pi = np.concatenate((self.pi, pi), axis=1)[:, -RECENT:]
        self.x = np.concatenate((self.x, x), axis=1)[:, -RECENT:]
        return found

    def _observe(self, slices: IntArray, x: FloatArray, v: FloatArray, drifted: int) -> FloatArray:
        runs = len(slices)
        owner = slices + N_SLICES * np.arange(runs)[:, None]
        order = np.argsort(owner.ravel(), kind="stable")
        counts = np.bincount(owner.ravel(), minlength=runs * N_SLICES)
        starts = np.concatenate(([0], np.cumsum(counts)))[:-1]
        x, v, place = x.ravel()[order], v.ravel()[order], np.tile(np.arange(self.every), runs)[order]
        states = self.states.reshape(runs * N_SLICES, -1)
        found = np.full(runs, np.inf)
        for first in range(0, int(counts.max()), STEPS):
            left = np.minimum(counts - first, STEPS)
            for width in (1, 2, 4, 8, 16, 32):
                members = np.flatnonzero((left > width // 2) & (left <= width))
                for begin in range(0, len(members), _SIDE_BY_SIDE):
                    rows = members[begin : begin + _SIDE_BY_SIDE]
                    steps = np.arange(width)[:, None]
                    seen = steps < left[rows]
                    at = np.where(seen, starts[rows] + first + steps, 0)
                    mass = states[rows, MASS] + np.minimum(steps + 1, left[rows])
                    values = np.stack((x[at] * v[at], v[at]), axis=-1) * seen[:, :, None]
                    path = BUDGET.run(
                        states[rows], ObservationBlock(x=values, seen=seen, mass=mass, at_us=mass)
                    )
                    states[rows] = path.stopped(left[rows] - 1)
                    for column in np.flatnonzero(rows % N_SLICES == drifted):
                        hit = path.page[: left[rows[column]], column] >= OPERATING_POINT
                        if hit.any():
                            run = rows[column] // N_SLICES
                            found[run] = min(found[run], place[at[hit.argmax(), column]] + 1.0)
        self.states = states.reshape(runs, N_SLICES, -1)
        return found

    def allocate(self) -> None:
        """Make each run's policy anew from what it has seen."""
        evidence = self.states[:, :, fields.PAGE].mean(axis=2)
        n_recent = self.cells.shape[1]
        twice = np.repeat(np.arange(n_recent), 2)
        for run, mass in enumerate(self.states[:, :, PAGE_MASS]):
            demands = [
                Demand(
                    name=self.boosts.names[s],
                    where=where,
                    traffic_per_s=TRAFFIC_PER_S * self.shares[s],
                    evidence=urgency(float(evidence[run, s]), float(mass[s])),
                )
                for s, where in enumerate(self.wheres)
            ]
            demands.append(Demand(name="all", where=(), traffic_per_s=TRAFFIC_PER_S))
            cells = self.cells[run]
            recent = Recent(
                weight=1.0 / self.pi[run],
                n_items=np.ones(n_recent),
                header=np.zeros(n_recent, dtype=np.intp),
                margin=MARGINS[cells % N_BINS],
                flip=self.x[run],
                item=twice,
                slice=np.stack((cells // N_BINS, np.full(n_recent, N_SLICES)), axis=1).ravel(),
                offered_per_s=np.array([TRAFFIC_PER_S]),
            )
            made = allocate(
                recent,
                demands,
                self.layout,
                SamplingBudget(replays_per_s=REPLAYS_PER_S, taken_per_s=TRAFFIC_PER_S),
                epoch="e",
                previous=self.policies[run],
            )
            if made.kept:
                continue
            self.n_policies += 1
            self.policies[run] = made.policy
            rates = self.boosts.read(made.policy)
            assert rates is not None
            self.rates[run] = np.maximum(np.maximum(rates.boost[:-1], rates.boost[-1]), rates.base).ravel()


def with_policy(scale: Scale, every: int, seed: int) -> dict[str, FloatArray]:
    """Return per case the replays from the change to the alarm, one per run."""
    warm: dict[bytes, Fleet] = {}
    found = {}
    for number, (case, (before, after, drifted)) in enumerate(CASES.items()):
        key = before.tobytes()
        if key not in warm:
            _say(f"{case}: {scale.runs} runs, {scale.n_before:,} replays before the change")
            fleet = warm[key] = Fleet(scale.runs, every, np.random.default_rng([seed, number]))
            for n in range(every, scale.n_before + 1, every):
                fleet.advance(flips(before, before, drifted), drifted)
                if n >= RECENT:
                    fleet.allocate()
        found[case] = _after(
            warm[key].branch(seed + 100 + number), flips(before, after, drifted), drifted, scale
        )
        _say(f"{case}: found after {found[case].mean():,.0f} replays")
    return found


def _after(fleet: Fleet, flip: FloatArray, drifted: int, scale: Scale) -> FloatArray:
    replays = np.full(scale.runs, np.inf)
    left = np.arange(scale.runs)
    for n in range(0, scale.n_most, fleet.every):
        at = fleet.advance(flip, drifted)
        replays[left] = n + at
        going = np.flatnonzero(np.isinf(at))
        left = left[going]
        if not len(left):
            break
        fleet.keep(going)
        fleet.allocate()
    return np.asarray(np.minimum(replays, scale.n_most), dtype=np.float64)


def uniform(runs: int, seed: int) -> FloatArray:
    """Return the samples of the slice from the change to the alarm under uniform sampling, one per run."""
    rng = np.random.default_rng([seed, 99])
    one = BUDGET.fresh(budget=BEFORE, scale=1.0, weighted=False, mass=0.0, at_us=0)
    states, found, n = np.tile(one, (runs, 1)), np.full(runs, np.inf), 0
    while np.isinf(found).any():
        rate = BEFORE if n < HISTORY else AFTER
        x = (rng.random((STEPS, runs)) < rate).astype(np.float64)
        mass = np.broadcast_to(n + 1.0 + np.arange(STEPS)[:, None], x.shape)
        values = np.stack((x, np.ones_like(x)), axis=-1)
        path = BUDGET.run(
            states, ObservationBlock(x=values, seen=np.ones(x.shape, dtype=bool), mass=mass, at_us=mass)
        )
        hit = path.page >= OPERATING_POINT
        if n >= HISTORY:
            step = np.where(hit.any(axis=0), n - HISTORY + hit.argmax(axis=0) + 1.0, np.inf)
            found = np.minimum(found, step)
        states = path.stopped(np.full(runs, STEPS - 1))
        n += STEPS
    return found


def replays(samples: FloatArray, share: float, seed: int) -> FloatArray:
    """Return the replays of a uniform sample in which so many samples of a slice are: others lie between them."""
    rng = np.random.default_rng([seed, 98])
    return np.asarray(samples + rng.negative_binomial(samples.astype(np.int64), share), dtype=np.float64)


def ratio(base: FloatArray, other: FloatArray) -> tuple[float, float]:
    """Return the quotient of the means and its standard error (delta method)."""
    value = base.mean() / other.mean()
    relative = [sample.std(ddof=1) / sample.mean() / math.sqrt(len(sample)) for sample in (base, other)]
    return float(value), float(value * math.hypot(*relative))


def draw(path: Path, base: FloatArray, found: dict[str, FloatArray]) -> None:
    """Draw the distributions of the replays needed."""
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, sample in {"uniform": base, **{f"policy, {case}": s for case, s in found.items()}}.items():
        axes.step(np.sort(sample), np.arange(1, len(sample) + 1) / len(sample), where="post", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("replays of all slices since the change")
    axes.set_ylabel("share of runs that have found it")
    axes.set_title("A 0.5 % slice goes from 1 % to 3 % flips, 100 slices")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(scale: Scale, every: int, seed: int, out: Path) -> None:
    """Run all of it and print the figures."""
    samples = uniform(max(scale.runs, 200), seed)
    base = {slice_: replays(samples, shares()[slice_], seed) for slice_ in (RARE, LARGEST)}
    _say(
        f"uniform: found after {base[RARE].mean():,.0f} replays, in the largest slice {base[LARGEST].mean():,.0f}"
    )
    found = with_policy(scale, every, seed)
    figures: dict[str, float | int | str | None] = {"runs": scale.runs, "every": every, "seed": seed}
    for name, sample in {"uniform": base[RARE], "uniform_largest": base[LARGEST], **found}.items():
        figures[f"{name}_mean"] = float(sample.mean())
        figures[f"{name}_standard_error"] = float(sample.std(ddof=1) / math.sqrt(len(sample)))
        figures[f"{name}_median"] = float(np.median(sample))
        figures[f"{name}_p90"] = float(np.quantile(sample, 0.9))
    saved = {case: ratio(base[CASES[case][2]], sample) for case, sample in found.items()}
    for case, (value, error) in saved.items():
        figures[f"{case}_saved"], figures[f"{case}_saved_standard_error"] = value, error
    worst = min(value for case, (value, _) in saved.items() if case != "concentrated")
    for name, figure in figures.items():
        print(f"  {name:<38} {figure:,.4g}" if isinstance(figure, float) else f"  {name:<38} {figure}")
    goals = [
        Goal(name="replays_saved", value=saved["concentrated"][0], bound=15, unit="ratio", at_most=False),
        Goal(name="replays_saved_worst_case", value=worst, bound=1.0, unit="ratio", at_most=False),
    ]
    out.mkdir(parents=True, exist_ok=True)
    draw(out / "sampling.png", base[RARE], {case: s for case, s in found.items() if CASES[case][2] == RARE})
    (out / "sampling.json").write_bytes(msgspec.json.encode({"figures": figures, "goals": goals}))
    finish("sampling", figures, goals)


def _say(text: str) -> None:
    print(f"... {text}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="within about a minute; figures are rougher")
    parser.add_argument("--every", type=int, default=500, help="replays from one policy to the next")
    parser.add_argument("--runs", type=int, help="seeded runs per case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="where the plot goes")
    chosen = parser.parse_args()
    size = QUICK if chosen.quick else FULL
    if chosen.runs:
        size = msgspec.structs.replace(size, runs=chosen.runs)
    main(size, chosen.every, chosen.seed, chosen.out)
