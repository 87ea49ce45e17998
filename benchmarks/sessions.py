"""Sessions that nobody declared: how often they are found within 2,000 exchanges, and independent requests taken for them.

    python -m benchmarks.sessions [--quick]

Each user sends 2 to 40 requests in a burst, one to ten users at a time. The log divergence of two requests of one user has
correlation 0.3 (found) or 0 (independent). The same of 50 and 100 users at a time, within 8,000. Sources (stores, cameras) send bursts of 2 to 12 and come back: where they merely
differ they are healthy, and where bursts of one source differ, too, with correlation 0.3, they have sessions. A fault: 4 of 60
sources change nearly a third of their answers from some exchange on, which must page, and not be taken for sessions first.
"""

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import numpy as np

from benchmarks.bursts import bursts, sources
from benchmarks.delays import PRODUCTION
from benchmarks.race import known
from benchmarks.result import Goal, finish
from quantdrift.drift.dependence import BLOCK, LOOK
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.monitor.session_search import evidence_after
from quantdrift.storage.fold.undeclared_sessions import ExchangeOutcome, SessionEvidence

N_EXCHANGES = 2000
AT_ONCE = (1, 3, 10)
N_OF_SOURCES = 10_000
DEEP = (50, 100)
N_DEEP = 8000
# Sources, bursts at the same time, most requests of a burst, and how much sources differ.
SOURCES = (
    (40, 1, 12, 0.5),
    (40, 20, 12, 1.0),
    (40, 3, 4, 1.0),
    (300, 3, 12, 0.5),
    (300, 20, 12, 1.0),
    (300, 10, 4, 0.2),
    (120, 10, 12, 1.0),
)


# Of a fault: sources, those that have it, exchanges before it and after, and the share of changed answers in and outside of it.
N_WITH_FAULT, N_FAULTY, BEFORE_FAULT, AFTER_FAULT = 60, 4, 4_000, 8_000
FAULTY_FLIPS, OTHER_FLIPS, FAULT_SHIFT = 0.3, 0.003, 2.0

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def found_after(values: Sequence[str], outcome: FloatArray, *, seed: int) -> int | None:
    """Return after how many exchanges of a version the search says that its slice `all` has sessions; None: never."""
    rows = [
        ExchangeOutcome(
            model_version_id=1,
            exchange_id=f"{seed}-{place}",
            captured_at=BEGIN + timedelta(seconds=place),
            slice_ids=(1,),
            attributes={"header.key": value},
            outcome=divergence,
        )
        for place, (value, divergence) in enumerate(zip(values, outcome.tolist(), strict=True))
    ]
    evidence: dict[tuple[int, str], SessionEvidence] = {}
    found: int | None = None
    for until in range(LOOK, len(rows) + 1, LOOK):
        first = (until - LOOK) // (BLOCK * LOOK) * BLOCK * LOOK
        known = {attribute for _, attribute in evidence}
        for row in evidence_after(rows[first:until], evidence, known, {1}, begin=until - LOOK - first):
            evidence[row.slice_id, row.attribute] = row
        is_found = any(row.found_at for row in evidence.values())
        found = (found or until) if is_found else None
    return found


def share_found(runs: int, *, alike: float, seed: int) -> float:
    """Return the share of versions whose slice `all` is said to have sessions."""
    rng = np.random.default_rng(seed)
    streams = (
        bursts(rng, N_EXCHANGES, alike=alike, at_once=AT_ONCE[run % len(AT_ONCE)]) for run in range(runs)
    )
    return sum(found_after(*stream, seed=seed) is not None for stream in streams) / runs


def share_found_deep(runs: int, *, alike: float, seed: int) -> float:
    """Return the share of versions with many users at the same time whose slice `all` is said to have sessions."""
    rng = np.random.default_rng(seed)
    streams = (bursts(rng, N_DEEP, alike=alike, at_once=DEEP[run % len(DEEP)]) for run in range(runs))
    return sum(found_after(*stream, seed=seed) is not None for stream in streams) / runs


def share_of_sources(runs: int, *, alike: float, seed: int) -> float:
    """Return the share of versions of sources that differ, every law of `SOURCES` as often, that are said to have sessions."""
    rng = np.random.default_rng(seed)
    n_found = 0
    for run in range(runs):
        n_sources, at_once, most, between = SOURCES[run % len(SOURCES)]
        stream = sources(
            rng, N_OF_SOURCES, n_sources=n_sources, at_once=at_once, most=most, between=between, alike=alike
        )
        n_found += found_after(*stream, seed=seed + run) is not None
    return n_found / runs


def share_of_faults_paged(runs: int, *, seed: int) -> float:
    """Return the share of versions with a fault of some sources that page before anything is taken for sessions."""
    rng, n = np.random.default_rng(seed), BEFORE_FAULT + AFTER_FAULT
    flips, found = np.zeros((n, runs)), np.full(runs, np.inf)
    for run in range(runs):
        names, outcome = sources(rng, n, n_sources=N_WITH_FAULT, at_once=10, most=12, between=0.5)
        number = np.array([int(name[1:]) for name in names])
        faulty = (number < N_FAULTY) & (np.arange(n) >= BEFORE_FAULT)
        outcome = np.where(faulty, outcome * np.exp(FAULT_SHIFT), outcome)
        flips[:, run] = rng.random(n) < np.where(faulty, FAULTY_FLIPS, OTHER_FLIPS)
        after = found_after(names, outcome, seed=seed + run)
        found[run] = np.inf if after is None else after
    detector, passed = known(0.01, runs), np.full(runs, np.inf)
    for first in range(0, n, LOOK):
        pages = detector.follow(flips[first : first + LOOK]) >= PRODUCTION
        step = np.where(pages.any(axis=0), first + pages.argmax(axis=0) + 1.0, np.inf)
        passed = np.minimum(passed, step)
    return float((np.isfinite(passed) & (passed < found)).mean())


def measure(*, quick: bool) -> dict[str, float]:
    """Return the shares of healthy sources that are flagged, of sessions that are found, and of faults that page."""
    runs = 90 if quick else 900
    return {
        "healthy_sources_flagged": share_of_sources(runs // 3, alike=0.0, seed=4),
        "sessions_found": min(
            share_found(runs, alike=0.3, seed=1), share_of_sources(runs // 3, alike=0.3, seed=5)
        ),
        "deep_sessions_found": share_found_deep(runs // 3, alike=0.3, seed=8),
        "source_fault_paged": share_of_faults_paged(20 if quick else 100, seed=6),
    }


def main(runs: int) -> None:
    """Measure, print, and end with one line of JSON."""
    flagged = share_found(runs, alike=0.3, seed=1)
    independent = share_found(runs, alike=0.0, seed=2)
    of_sources = share_of_sources(runs // 3, alike=0.0, seed=4)
    in_sources = share_of_sources(runs // 3, alike=0.3, seed=5)
    figures: dict[str, float | int | str | None] = {
        "runs": runs,
        "undeclared_sessions_flagged": flagged,
        "undeclared_sessions_flagged_at_0.2": share_found(runs, alike=0.2, seed=3),
        "independent_flagged": independent,
        "healthy_sources_flagged": of_sources,
        "deep_sessions_found": (deep := share_found_deep(runs // 3, alike=0.3, seed=8)),
        "deep_independent_flagged": (deep_flagged := share_found_deep(runs // 3, alike=0.0, seed=9)),
        "sessions_of_sources_found": in_sources,
    }
    for name, value in figures.items():
        print(f"{name:36} {value}")
    finish(
        "sessions",
        figures,
        [
            Goal(name="undeclared_sessions_flagged", value=flagged, bound=0.95, unit="1", at_most=False),
            Goal(name="independent_flagged", value=independent, bound=0.01, unit="1"),
            Goal(name="deep_sessions_found", value=deep, bound=0.95, unit="1", at_most=False),
            Goal(name="deep_independent_flagged", value=deep_flagged, bound=0.01, unit="1"),
            Goal(name="healthy_sources_flagged", value=of_sources, bound=0.01, unit="1"),
            Goal(name="sessions_of_sources_found", value=in_sources, bound=0.95, unit="1", at_most=False),
        ],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    main(90 if parser.parse_args().quick else 900)
