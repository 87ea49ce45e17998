"""A drift while versions are released, and beside canaries, against the same drift under one version.

    python -m benchmarks.releases [--quick]

`release`: a new version after every 700 exchanges. `canary`: one after every 700 exchanges of a version that goes on; it has a
twentieth of the traffic. All versions drift alike from the first exchange of the drift on. The evidence moves as the fold moves it:
`LAG` exchanges after a version has ended. Thresholds are those of production, on the sample clock; delays are medians, counted
in exchanges of the versions that are no canaries.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import numpy as np

from benchmarks.delays import PRODUCTION
from benchmarks.race import OBSERVE, Shipped
from benchmarks.result import Goal, finish
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS, LEARNERS
from quantdrift.drift.evidence.observations import FloatArray

EVERY: Final = 700
LAG: Final = 20
"""Exchanges until the monitor moves the evidence of a version that ended: at one a second, its ten seconds and the silence."""
_PART: Final = 350  # exchanges between two looks at baselines


class Law(msgspec.Struct, frozen=True, kw_only=True):
    """A drift that one kind of detector finds.

    Parameters
    ----------
    n_before
        Exchanges before the drift, of one version.
    horizon
        Most exchanges of the drift.
    draw
        Returns values of a shape, before the drift or in it.
    """

    kind: str
    n_before: int
    horizon: int
    draw: Callable[[np.random.Generator, tuple[int, int], bool], FloatArray]


def _flips(before: float, after: float) -> Callable[[np.random.Generator, tuple[int, int], bool], FloatArray]:
    return lambda rng, shape, drifted: (rng.random(shape) < (after if drifted else before)).astype(np.float64)


def _tail(rng: np.random.Generator, shape: tuple[int, int], drifted: bool) -> FloatArray:  # noqa: FBT001 - as in `Law`
    x = np.exp(rng.normal(size=shape) - 6.0)
    return np.where(drifted & (x > np.exp(2.326 - 6.0)), 3.0 * x, x)


LAWS: Final[Mapping[str, Law]] = {
    "budget": Law(kind="budget", n_before=0, horizon=40_000, draw=_flips(0.018, 0.018)),
    "change": Law(kind="change", n_before=10_500, horizon=28_000, draw=_flips(0.005, 0.02)),
    "tail": Law(kind="tail", n_before=20_300, horizon=28_000, draw=_tail),
}


def delays(law: Law, runs: int, *, every: int = 0, canary: bool = False, seed: int = 1) -> FloatArray:
    """Return per run the exchanges until any version pages; infinite if not within the horizon.

    Parameters
    ----------
    every
        Exchanges between two new versions; 0: there is one version.
    canary
        Whether the new version has a twentieth of the traffic and ends before the next one; otherwise it replaces the old one.
    """
    rng, detector = np.random.default_rng(seed), DETECTORS[law.kind]
    main = _begun(law, runs)
    for begin in range(0, law.n_before, _PART):
        main.follow(law.draw(rng, (min(_PART, law.n_before - begin), runs), False))
    first = np.full(runs, np.inf)

    def follow(version: Shipped, n: int, begin: int, weight: int = 1) -> None:
        passed = version.follow(law.draw(rng, (n, runs), True)) >= PRODUCTION
        step = np.where(passed.any(axis=0), begin + weight * passed.argmax(axis=0) + 1.0, np.inf)
        np.minimum(first, step, out=first)

    for begin in range(0, law.horizon, every or EVERY):
        if np.isfinite(first).all():
            break
        late = 0
        if every and begin:
            new = _successor(law, main, runs)
            late = 0 if canary else LAG
            follow(new, every // 20 if canary else LAG, begin, 20 if canary else 1)
            heir, ended = (main, new) if canary else (new, main)
            for state, before in zip(heir.states, ended.states, strict=True):
                detector.carry(state, before)
            main = heir
        for part in range(late, every or EVERY, _PART):
            follow(main, min(_PART, (every or EVERY) - part), begin + part)
    return first


def _begun(law: Law, runs: int) -> Shipped:
    if law.kind == BUDGET.kind:
        state = BUDGET.fresh(budget=0.01, scale=1.0, weighted=False, mass=0.0, at_us=0)
    else:
        state = LEARNERS[law.kind].fresh(tau=0.25, scale=1.0, mass=0.0, at_us=0)
    return Shipped(DETECTORS[law.kind], state, OBSERVE[law.kind], runs)


def _successor(law: Law, before: Shipped, runs: int) -> Shipped:
    version = _begun(law, runs)
    if law.kind != BUDGET.kind:
        inherit = LEARNERS[law.kind].inherit
        version.states = np.stack([inherit(state, mass=0.0, at_us=0) for state in before.states])
    return version


def measure(*, quick: bool) -> dict[str, float]:
    """Return the delays of each law, and the worst ratio to the delay under one version for releases and for canaries."""
    runs = 24 if quick else 96
    figures: dict[str, float] = {}
    for name, law in LAWS.items():
        alone = float(np.median(delays(law, runs)))
        figures[f"{name}_one_version"] = alone
        for how in ("release", "canary"):
            found = delays(law, runs, every=EVERY, canary=how == "canary")
            figures[f"{name}_{how}"] = float(np.median(found))
            figures[f"{name}_{how}_missed"] = float(np.isinf(found).mean())
            figures[f"{name}_{how}_ratio"] = figures[f"{name}_{how}"] / alone
    for how in ("release", "canary"):
        figures[f"{how}_delay_ratio"] = max(figures[f"{name}_{how}_ratio"] for name in LAWS)
    return figures


def main(*, quick: bool) -> None:
    """Measure, print, and end with one line of JSON."""
    figures = measure(quick=quick)
    for name, value in figures.items():
        print(f"{name:40} {value:.3f}")
    goals = [
        Goal(name=name, value=figures[name], bound=1.3, unit="ratio")
        for name in ("release_delay_ratio", "canary_delay_ratio")
    ]
    finish("releases", {**figures}, goals)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    main(quick=parser.parse_args().quick)
