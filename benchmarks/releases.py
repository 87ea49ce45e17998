"""A drift while a new version of the model is released after every 500 exchanges, against the same drift under one version.

    python -m benchmarks.releases [--quick]

The budget is 1 %, and 2 % of the answers differ from the first exchange on. The evidence against a budget is carried to the next
version as the fold does it. The threshold is `OPERATING_POINT`, on the sample clock.
"""

import argparse

import numpy as np

from benchmarks.race import OPERATING_POINT, Shipped, budgeted
from benchmarks.result import Goal, finish
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.monitor.fold.state import CARRIED

BUDGET_RATE, RATE = 0.01, 0.02
EVERY = 500


def delays(
    runs: int, horizon: int, *, every: int, rate: float = RATE, share: float = CARRIED, seed: int = 1
) -> FloatArray:
    """Return per run the exchanges until the newest version passes the threshold; infinite if not within `horizon`.

    Parameters
    ----------
    every
        Exchanges of each version.
    share
        Of the evidence that goes on to the next version; 0: each starts from nothing.
    """
    rng = np.random.default_rng(seed)
    first = np.full(runs, np.inf)
    fresh = BUDGET.fresh(budget=BUDGET_RATE, scale=1.0, weighted=False, mass=0.0, at_us=0)
    newest = Shipped(BUDGET, fresh, budgeted, runs)
    for begin in range(0, horizon, every):
        if begin and share:
            for state, before in zip(following := np.tile(fresh, (runs, 1)), newest.states, strict=True):
                BUDGET.carry(state, before, share)
            newest = Shipped(BUDGET, fresh, budgeted, runs)
            newest.states = following
        elif begin:
            newest = Shipped(BUDGET, fresh, budgeted, runs)
        page = newest.follow((rng.random((every, runs)) < rate).astype(np.float64))
        passed = page >= OPERATING_POINT
        step = np.where(passed.any(axis=0), begin + passed.argmax(axis=0) + 1.0, np.inf)
        first = np.minimum(first, step)
    return first


def main(runs: int) -> None:
    """Measure, print, and end with one line of JSON."""
    horizon = 60 * EVERY
    one = delays(runs, horizon, every=horizon)
    carried = delays(runs, horizon, every=EVERY)
    restarted = delays(runs, horizon, every=EVERY, share=0.0)
    ratio = float(np.mean(carried) / np.mean(one))
    figures: dict[str, float | int | str | None] = {
        "runs": runs,
        "one_version_delay": float(np.mean(one)),
        "daily_release_delay": float(np.mean(carried)),
        "daily_release_delay_ratio": ratio,
        "found_in_60_versions": float(np.isfinite(carried).mean()),
        "found_in_60_versions_without_carrying": float(np.isfinite(restarted).mean()),
    }
    for name, value in figures.items():
        print(f"{name:40} {value}")
    finish(
        "releases", figures, [Goal(name="daily_release_delay_ratio", value=ratio, bound=1.2, unit="ratio")]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    main(64 if parser.parse_args().quick else 400)
