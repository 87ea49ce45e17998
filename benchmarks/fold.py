"""What the fold costs: one monitor leads, and folds the comparisons of the whole fleet.

    python -m benchmarks.fold [--quick] [--out out/benchmarks]

The shipped fold with its defaults is given stored batches of 64 exchanges of one item each. Every exchange lies in `all`
and in seven other slices, drawn evenly, which touches the most slices; header strata of two rates make the slices
weighted. All four signals of every slice are live from the beginning. Two ways to be written out:

- **as they come**: the rows of the touched slices are made after each batch;
- **a backlog**: after 64 batches, as the monitor does when it has fallen behind.

Time is the processor time of this process, in the median batch or backlog: other work on the machine hardly counts.
What reading the batches from Postgres and writing the rows to it takes is not in it. The share of each part is measured
apart, under a profiler, which makes small functions look slower than they are.

A plot of the cost against the number of slices is written to --out.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import msgspec
import numpy as np
from matplotlib.figure import Figure

from benchmarks.cost import live_state, signals
from benchmarks.result import Goal, finish
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.records import BodyStratum, HeaderStratum, Metric, Policy, Predicate, Verdict
from quantdrift.core.signals import budget_of, cap_of
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.header import LAST_AT, M
from quantdrift.drift.evidence.state import dump_state
from quantdrift.monitor.fold.fold import Fold
from quantdrift.monitor.fold_turn import ROWS_AT_ONCE
from quantdrift.storage.fold_rows import (
    BatchRows,
    Catalog,
    ComparisonRow,
    DetectorRow,
    Position,
    SliceRow,
    Snapshot,
    VerdictRow,
    VersionRow,
)

OUT = Path("out/benchmarks")
BATCH = 64
_AT_ONCE = ROWS_AT_ONCE // BATCH  # batches
SLICES_OF_EXCHANGE = 8
BEGIN_US = 1_770_000_000_000_000
EXCHANGES_PER_S = 50
MODEL = "model"
CONFIG = Config(models=(Model(name=MODEL),))
POLICY = Policy(
    epoch="e1",
    header_strata=(
        HeaderStratum(name="rare", rate=1.0, headers={"x-rare": "yes"}),
        HeaderStratum(name="default", rate=0.25),
    ),
    body_strata=(BodyStratum(name="default", rate=1.0),),
)
PARTS = {  # functions that together are nearly all of a fold; none is called by another
    "exchanges, sessions": {("fold.py", "_observations")},
    "roll-ups": {("rollup.py", "add"), ("rollup.py", "rows")},
    "what groups show": {("fold.py", "_groups")},
    "clock, new signals": {("fold.py", "_live"), ("fold.py", "_note")},
    "detectors": {("watch.py", "advance_joined")},
    "between batches": {("state.py", "tend")},
    "judging": {("verdict.py", "settle")},
    "rows of verdicts": {("slice_state.py", "verdict_rows")},
    "rows of detectors": {("slice_state.py", "detector_rows")},
}
Figures = dict[str, float | int | str | None]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much is folded.

    Parameters
    ----------
    batches
        Timed as they come, after a fifth as many that are not.
    backlogs
        Timed, after one that is not.
    profiled
        Batches under the profiler.
    slices
        Numbers of slices of the plot; 40, 1,000 and 10,000 are measured anyway.
    """

    batches: int = 200
    backlogs: int = 5
    profiled: int = 64
    slices: tuple[int, ...] = (10, 100, 300, 3_000)


QUICK = Scale(batches=40, backlogs=2, profiled=16, slices=(300,))
MEASURED = (40, 1_000, 10_000)


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds per slice and group, as they come and in a backlog."""

    slices: int
    written_each: float
    backlog: float

    @property
    def exchanges_per_s(self) -> float:
        """Exchanges folded in a second of one core, as they come."""
        return 1e6 / (self.written_each * SLICES_OF_EXCHANGE)

    @property
    def backlog_exchanges_per_s(self) -> float:
        """The same in a backlog."""
        return 1e6 / (self.backlog * SLICES_OF_EXCHANGE)


def main(scale: Scale, out: Path) -> None:
    """Measure, print and draw."""
    begin = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    costs = []
    for slices in sorted({*MEASURED, *scale.slices}):
        costs.append(measure(slices, scale))
        print(
            f"{slices:>6} slices: {costs[-1].written_each:6.1f} us per slice and group as they come "
            f"({costs[-1].exchanges_per_s:,.0f} exchanges/s), {costs[-1].backlog:6.1f} us in a backlog "
            f"({costs[-1].backlog_exchanges_per_s:,.0f} exchanges/s)",
            flush=True,
        )
    for slices in MEASURED[:2]:
        print(f"share of each part, {slices} slices, as they come:")
        for name, share in parts(slices, scale).items():
            print(f"  {name:<22} {share:6.1%}")
    for path in drawn(costs, out):
        print(f"plot: {path}")
    few, many, most = (next(one for one in costs if one.slices == slices) for slices in MEASURED)
    figures: Figures = {
        "fold_us_per_slice_group": few.written_each,
        "fold_us_per_slice_group_backlog": few.backlog,
        "fold_us_per_slice_group_1000": many.written_each,
        "fold_us_per_slice_group_1000_backlog": many.backlog,
        "fold_us_per_slice_group_10000": most.written_each,
        "fold_us_per_slice_group_10000_backlog": most.backlog,
        "fold_exchanges_per_s": few.exchanges_per_s,
        "fold_exchanges_per_s_backlog": few.backlog_exchanges_per_s,
        "fold_exchanges_per_s_1000": many.exchanges_per_s,
        "fold_exchanges_per_s_1000_backlog": many.backlog_exchanges_per_s,
        "seconds": round(time.monotonic() - begin),
    }
    finish(
        "fold",
        figures,
        [
            Goal(name="fold_us_per_slice_group", value=few.written_each, bound=7.0, unit="us"),
            Goal(name="fold_us_per_slice_group_1000", value=many.written_each, bound=15.0, unit="us"),
            Goal(
                name="fold_exchanges_per_s",
                value=few.exchanges_per_s,
                bound=15_000,
                unit="{exchange}/s",
                at_most=False,
            ),
        ],
    )


def measure(slices: int, scale: Scale) -> Cost:
    """Return what one group costs in one of so many slices."""
    return Cost(
        slices=slices,
        written_each=_median_us(slices, 1, scale.batches // 5, scale.batches),
        backlog=_median_us(slices, _AT_ONCE, 1, scale.backlogs),
    )


def parts(slices: int, scale: Scale) -> dict[str, float]:
    """Return the share of each part in the time of a fold that is written out after each batch."""
    fold, given = fold_of(slices), stream(slices)
    _fold(fold, given, 8)
    profile = cProfile.Profile()
    todo = [next(given) for _ in range(scale.profiled)]
    profile.enable()
    for rows in todo:
        fold.batch(rows)
        fold.take()
    profile.disable()
    stats = pstats.Stats(profile)
    total: float = vars(stats)["total_tt"]
    called = {(Path(file).name, name) for file, _, name in vars(stats)["stats"]}
    if unknown := set().union(*PARTS.values()) - called:
        raise ValueError(f"the fold has no such functions any more: {sorted(unknown)}; name others in PARTS")
    spent = dict.fromkeys(PARTS, 0.0)
    for (file, _, name), (_, _, _, cumulative, _) in vars(stats)["stats"].items():
        for part, functions in PARTS.items():
            if (Path(file).name, name) in functions:
                spent[part] += cumulative
    shares = {name: seconds / total for name, seconds in spent.items()}
    return {**shares, "the rest": 1.0 - sum(shares.values())}


def fold_of(slices: int) -> Fold:
    """Return a fold of a version with so many slices, each with four live signals."""
    fold = Fold(CONFIG, _snapshot(slices))
    fold.learn(_catalog(slices))
    return fold


def stream(slices: int, seed: int = 5) -> Iterator[BatchRows]:
    """Yield batches without end."""
    rng = np.random.default_rng(seed)
    at_us, seq = BEGIN_US, 0
    n_others = min(SLICES_OF_EXCHANGE, slices) - 1
    while True:
        seq += 1
        rows = []
        rare = rng.random(BATCH) < 0.1
        flip, margin = rng.random(BATCH) < 0.003, rng.beta(2.0, 1.0, BATCH)
        divergence = rng.lognormal(-6.0, 1.0, BATCH)
        for place in range(BATCH):
            at_us += 1_000_000 // EXCHANGES_PER_S
            others = 2 + rng.choice(slices - 1, n_others, replace=False)
            rows.append(
                ComparisonRow(
                    exchange_id=f"{seq:016x}{place:016x}",
                    item=0,
                    captured_us=at_us,
                    model_version_id=1,
                    policy_id=1,
                    slice_ids=(1, *sorted(others.tolist())),
                    group_key="",
                    pi1=1.0 if rare[place] else 0.25,
                    pi2=1.0,
                    u1=0.1,
                    u2=float(rng.random()),
                    candidate_margin=float(margin[place]),
                    flip=float(flip[place]),
                    topk=0.0,
                    js=float(divergence[place]) / 8.0,
                    divergence=float(divergence[place]),
                    margin=0.01,
                )
            )
        yield BatchRows(fold_seq=seq, stored_us=at_us + 500_000, comparisons=tuple(rows))


def _median_us(slices: int, batches_each: int, before: int, timed: int) -> float:
    fold, given = fold_of(slices), stream(slices)
    spent = []
    for number in range(before + timed):
        rows = [next(given) for _ in range(batches_each)]
        begin = time.process_time()
        for one in rows:
            fold.batch(one)
        fold.take()
        if number >= before:
            spent.append(time.process_time() - begin)
    groups = batches_each * BATCH * min(SLICES_OF_EXCHANGE, slices)
    return float(np.median(spent)) / groups * 1e6


def _fold(fold: Fold, given: Iterator[BatchRows], n: int) -> None:
    for _ in range(n):
        fold.batch(next(given))
        fold.take()


def _catalog(slices: int) -> Catalog:
    rows = [SliceRow(id=1, model=MODEL, name="all", predicate="true", where=())]
    for number in range(2, slices + 1):
        where = (Predicate(key="header.x-tenant", equals=str(number)),)
        predicate = f'header.x-tenant = "{number}"'
        rows.append(
            SliceRow(id=number, model=MODEL, name=f"tenant={number}", predicate=predicate, where=where)
        )
    version = VersionRow(
        id=1, model=MODEL, candidate_version="2", reference_digest="d" * 64, first_seen_us=BEGIN_US
    )
    return Catalog(versions={1: version}, slices={row.id: row for row in rows}, policies={1: POLICY})


def _snapshot(slices: int) -> Snapshot:
    budget = CONFIG.models[0].budget
    states = {key: live_state(key) for key in signals()}
    for key in (one for one in states if one.kind == BUDGET.kind):
        metric = Metric(key.metric)
        states[key] = BUDGET.fresh(
            budget=budget_of(metric, budget),
            scale=cap_of(metric, budget),
            weighted=True,
            mass=0.0,
            at_us=BEGIN_US,
        )
    for state in states.values():
        state[LAST_AT] = BEGIN_US
    detectors = [
        DetectorRow(
            model_version_id=1,
            slice_id=number,
            metric=key.metric,
            kind=key.kind,
            state=blob,
            budget=float(states[key][M]),
            n_groups=0,
            evidence=0.0,
            fold_seq=0,
            created_us=BEGIN_US,
            last_us=BEGIN_US,
            retired_us=None,
        )
        for key, blob in ((key, dump_state(key.kind, state)) for key, state in states.items())
        for number in range(1, slices + 1)
    ]
    verdicts = [
        VerdictRow(
            model_version_id=1,
            slice_id=number,
            verdict=Verdict.UNKNOWN,
            reason="",
            since_us=BEGIN_US,
            n_groups=0,
            evidence=0.0,
            threshold=10.0,
            estimate={},
            last_us=BEGIN_US,
            updated_us=BEGIN_US,
            fold_seq=0,
        )
        for number in range(1, slices + 1)
    ]
    return Snapshot(
        position=Position(event_us=BEGIN_US, n_detectors=len(detectors)),
        detectors=tuple(detectors),
        verdicts=tuple(verdicts),
    )


def drawn(costs: list[Cost], directory: Path) -> list[Path]:
    """Draw the cost against the number of slices; return the paths."""
    mpl.rcParams["svg.hashsalt"] = "fold"
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    slices = [one.slices for one in costs]
    axes.plot(slices, [one.written_each for one in costs], marker="o", label="rows written after each batch")
    axes.plot(
        slices,
        [one.backlog for one in costs],
        marker="s",
        label=f"rows written after {_AT_ONCE} batches (a backlog)",
    )
    for goal, at in ((7.0, 40), (15.0, 1_000)):
        axes.plot([at], [goal], marker="_", markersize=18, color="black", linestyle="none")
        axes.annotate("goal", (at, goal), textcoords="offset points", xytext=(12, -3))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("slices, of which each exchange lies in 8")
    axes.set_ylabel("processor time per slice and group, us")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    paths = [directory / f"fold.{suffix}" for suffix in ("png", "svg")]
    for path in paths:
        figure.savefig(path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--out", type=Path, default=OUT, help="where the plot goes")
    given_ = parser.parse_args()
    main(QUICK if given_.quick else Scale(), given_.out)
