"""Sessions that nobody declared: how often they are found within 2,000 exchanges, and independent requests taken for them.

    python -m benchmarks.sessions [--quick]

Each user sends 2 to 40 requests in a burst, one to ten users at a time. The log divergence of two requests of one user has
correlation 0.3 (found) or 0 (independent).
"""

import argparse

import numpy as np

from benchmarks.bursts import bursts
from benchmarks.result import Goal, finish
from quantdrift.drift.dependence import LOOK, could_be_session, log_evidence, log_threshold

N_EXCHANGES = 2000
AT_ONCE = (1, 3, 10)


def share_found(runs: int, *, alike: float, seed: int) -> float:
    """Return the share of versions whose slice `all` is said to have sessions."""
    rng = np.random.default_rng(seed)
    n_found = 0
    for run in range(runs):
        users, divergence = bursts(rng, N_EXCHANGES, alike=alike, at_once=AT_ONCE[run % len(AT_ONCE)])
        evidence = 0.0
        for begin in range(0, N_EXCHANGES, LOOK):
            values, outcome = users[begin : begin + LOOK], divergence[begin : begin + LOOK]
            if could_be_session(values):
                evidence += log_evidence(values, outcome, rng.random(LOOK))
            if evidence >= log_threshold(everything=True):
                n_found += 1
                break
    return n_found / runs


def main(runs: int) -> None:
    """Measure, print, and end with one line of JSON."""
    flagged = share_found(runs, alike=0.3, seed=1)
    independent = share_found(runs, alike=0.0, seed=2)
    figures: dict[str, float | int | str | None] = {
        "runs": runs,
        "undeclared_sessions_flagged": flagged,
        "undeclared_sessions_flagged_at_0.2": share_found(runs, alike=0.2, seed=3),
        "independent_flagged": independent,
    }
    for name, value in figures.items():
        print(f"{name:36} {value}")
    finish(
        "sessions",
        figures,
        [
            Goal(name="undeclared_sessions_flagged", value=flagged, bound=0.95, unit="1", at_most=False),
            Goal(name="independent_flagged", value=independent, bound=0.01, unit="1"),
        ],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    main(90 if parser.parse_args().quick else 900)
