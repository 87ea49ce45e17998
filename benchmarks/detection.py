"""How soon drift is seen, at which price in false alarms, and who sees it sooner.

    python -m benchmarks.detection [--quick | --long] [--peers] [--out out/benchmarks]

Everything runs the shipped detectors with their defaults, through the seam that the monitor uses, on seeded streams:

1. **Delay**, in groups of the slice from the change on, at threshold 4e6 on the sample clock (mass 1 per group,
   P(false alarm within 200,000) <= 5 % by theorem), over that of the oracle: a CUSUM that knows both laws, tuned to
   just that chance. Budgets are known or learned from 5,000 groups and 20,000 live ones, items have no margins. And
   the same at the production threshold: 0.1 pages per 30 days, 4,000 signals, one sample a second in the slice.
2. **Many slices**: false and missed entries of the triage list, 1,000 slices of which 10 drift.
3. **False alarms** over the proven bound, both clocks, every detector. `--long` draws 1e9 groups for it.
4. **Cost**: time per group and slice, bytes per signal.
5. **Claims** that a mean delay does not show (`benchmarks.claims`): slow ramps, changes soon after a short baseline,
   tails that thicken smoothly, improvements, small excesses, old fleets, seasons of the scale.
6. `--peers`: river, Evidently, NannyML, Alibi Detect and MAPIE on the same streams, at their defaults and at the best
   of a grid of settings with at most 2.5 false alarms per million groups, as measured; each in an environment of its
   own under out/peers, made with pip. Those that do not install are named.

Plots of delay against false-alarm rate and the whole table as JSON are written to --out.
"""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import claims, cost, delays, estimates, falsealarm, triage_lists
from benchmarks.contest import Contest, contest, drawn
from benchmarks.result import Goal, finish
from benchmarks.streams import FLIPS, HARD, TAIL

OUT = Path("out/benchmarks")
ENVIRONMENTS = Path("out/peers")
SEED = 20_000


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much is drawn.

    Parameters
    ----------
    runs
        Per case.
    fleets, n_slices, looks
        For the triage list.
    null_runs, null_groups, parts
        For false alarms on the sample clock: side by side, groups of each, and how often anew.
    days
        Of the fleet on the calendar clock, per part.
    batches
        Timed for the cost.
    claim_runs
        Per claim.
    peer_runs
        Of the streams that peers get.
    """

    runs: int = 400
    fleets: int = 16
    n_slices: int = 1000
    looks: int = 80
    null_runs: int = 500
    null_groups: int = 2048
    parts: int = 2
    days: int = 60
    batches: int = 40
    claim_runs: int = 200
    peer_runs: int = 100


QUICK = Scale(
    runs=40,
    fleets=1,
    n_slices=200,
    looks=40,
    null_runs=200,
    null_groups=512,
    parts=1,
    days=15,
    batches=8,
    claim_runs=12,
    peer_runs=20,
)
LONG = Scale(null_runs=1000, null_groups=8192, parts=40, days=180)
Figures = dict[str, float | int | str | None]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured: what the JSON file holds."""

    delays: list[delays.Measured]
    triage: triage_lists.Listing
    z_tests: triage_lists.Listing
    false_alarms: list[falsealarm.Measured]
    contest: Contest | None
    figures: Figures


def main(scale: Scale, out: Path, *, peers: bool, jobs: int) -> None:
    """Measure all of it, print it, and write plots and JSON."""
    begin = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs) as pool:
        told = _Progress(begin)
        races = [pool.submit(delays.measure, name, scale.runs, SEED) for name in _longest_first()]
        fleets = [
            pool.submit(triage_lists.look_after, seed, scale.looks, scale.n_slices)
            for seed in range(scale.fleets)
        ]
        nulls = {
            (kind, clock): [_null(pool, scale, kind, clock, part) for part in range(scale.parts)]
            for kind in sorted(falsealarm.NULLS)
            for clock in ("sample", "calendar")
        }
        claimed = {name: pool.submit(claim, scale.claim_runs, SEED) for name, claim in claims.CLAIMS.items()}
        told.follow(
            {
                "delays": races,
                "many slices": fleets,
                "false alarms": [f for fs in nulls.values() for f in fs],
                "claims": list(claimed.values()),
            }
        )
        measured = [one for future in races for one in future.result()]
        ours, theirs = triage_lists.summarise([future.result() for future in fleets])
        false_alarms = [falsealarm.together([f.result() for f in parts]) for parts in nulls.values()]
    _say(begin, "cost")
    figures: Figures = {"n_runs": scale.runs}
    figures |= _figures(measured, ours, theirs, false_alarms) | _cost(scale)
    for name, future in claimed.items():
        found = future.result()
        figures |= found if isinstance(found, dict) else {name: found}
    met = None
    if peers:
        met = contest(
            measured,
            environments=ENVIRONMENTS,
            out=out,
            runs=scale.peer_runs,
            seed=SEED,
            say=lambda text: _say(begin, text),
        )
    for path in drawn(measured, met, out):
        print(f"plot: {path}")
    _print(measured, false_alarms, figures)
    report = Report(
        delays=measured,
        triage=ours,
        z_tests=theirs,
        false_alarms=false_alarms,
        contest=met,
        figures=figures,
    )
    (out / "detection.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    shown = estimates.measure(quick=scale is QUICK)
    figures |= shown
    figures["seconds"] = round(time.monotonic() - begin)
    finish("detection", figures, [*_goals(figures), *estimates.goals(shown)])


def _longest_first() -> list[str]:
    return [case.name for case in (FLIPS[4], FLIPS[3], TAIL, HARD, *FLIPS[:3])]


def _null(
    pool: ProcessPoolExecutor, scale: Scale, kind: str, clock: str, part: int
) -> "Future[falsealarm.Measured]":
    seed = SEED + part
    if clock == "sample":
        return pool.submit(falsealarm.on_sample_clock, kind, scale.null_runs, scale.null_groups, seed)
    return pool.submit(falsealarm.on_calendar_clock, kind, scale.days, seed)


def _figures(
    measured: list[delays.Measured],
    ours: triage_lists.Listing,
    theirs: triage_lists.Listing,
    false_alarms: list[falsealarm.Measured],
) -> Figures:
    def ratios(name: str, oracle: str = delays.BEST, case: str = "") -> list[float]:
        return [
            one.ratios[oracle].ratio
            for one in measured
            if one.name == name and oracle in one.ratios and case in one.case
        ]

    figures: Figures = {
        "budget_delay_ratio_max": max(ratios("budget")),
        "learned_delay_ratio_max": max(ratios("change, tau 0")),
        "learned_delay_ratio_tau25": max(ratios("change, tau 0.25", case=FLIPS[0].name)),
        # No real drift leaves a gap behind; the hard 1 % leave none, and their oracle knows all there is to know.
        "tail_delay_ratio": max(
            *ratios("tail, tau 0", delays.NO_GAP), *ratios("tail, tau 0", case=HARD.name)
        ),
        "tail_delay_ratio_gap_known": max(ratios("tail, tau 0", case=TAIL.name)),
        "fdr": ours.fdr,
        "fdr_worst_look": ours.fdr_worst_look,
        "fdr_latched": ours.fdr_latched,
        "power": ours.power,
        "z_test_fdr_latched": theirs.fdr_latched,
        "z_test_false_slices": theirs.n_false,
        "false_alarm_over_bound": max(one.ratio_high for one in false_alarms),
        "false_alarm_groups": sum(one.n_groups for one in false_alarms),
    }
    figures["z_test_p05_false_runs"] = max(one.false_runs for one in measured if "z test" in one.name)
    for one in measured:
        if one.production:
            stem = f"{one.case}: {one.name}"
            figures[f"production_delay {stem}"] = round(one.production[0], 1)
    return figures


def _cost(scale: Scale) -> Figures:
    keys = cost.signals()
    figures: Figures = {
        "us_per_slice_sample": cost.fleet_us(keys, scale.batches),
        "us_per_slice_sample_backlog": cost.wide_us(keys, 250, max(2, scale.batches // 10)),
        "signals_per_slice": len(keys),
        "state_bytes_per_slice": cost.state_bytes(),
    }
    for key in keys:
        stem = f"{key.metric}_{key.kind}"
        figures[f"us_{stem}"] = cost.fleet_us([key], scale.batches)
        figures[f"us_{stem}_backlog"] = cost.wide_us([key], 250, max(2, scale.batches // 10))
    return figures


def _goals(figures: Figures) -> list[Goal]:
    bounds: list[tuple[str, float, str, bool]] = [
        ("budget_delay_ratio_max", 1.25, "ratio", True),
        ("learned_delay_ratio_max", 1.35, "ratio", True),
        ("learned_delay_ratio_tau25", 2.0, "ratio", True),
        ("tail_delay_ratio", 1.5, "ratio", True),
        ("fdr", 0.05, "1", True),
        ("power", 1.0, "1", False),
        ("false_alarm_over_bound", 1.0, "ratio", True),
        ("slow_ramp_missed", 0.05, "1", True),
        ("early_change_missed", 0.10, "1", True),
        ("smooth_tail_missed", 0.05, "1", True),
        ("smooth_tail_delay_ratio", 2.5, "ratio", True),
        ("improvement_pages", 0.01, "1", True),
        ("small_excess_delay_ratio", 1.5, "ratio", True),
        ("fleet_age_ratio", 1.1, "ratio", True),
        ("tail_season_over_bound", 1.0, "ratio", True),
        ("us_per_slice_sample", 2.0, "us", True),
        ("state_bytes_per_slice", 4096, "By", True),
    ]
    return [
        Goal(name=name, value=float(figures[name] or 0.0), bound=bound, unit=unit, at_most=at_most)
        for name, bound, unit, at_most in bounds
    ]


def _print(
    measured: list[delays.Measured], false_alarms: list[falsealarm.Measured], figures: Figures
) -> None:
    print(
        f"\n{'case':<22}{'detector':<27}{'delay':>14}{'oracle':>14}{'ratio':>15}{'false':>6}{'missed':>7}  production"
    )
    for one in measured:
        for oracle, r in one.ratios.items():
            late = f"{one.production[0]:.0f} +- {one.production[1]:.0f}" if one.production else ""
            print(
                f"{one.case:<22}{one.name:<27}{r.delay:>7.0f} +- {r.delay_se:<3.0f}{r.best:>7.0f} +- {r.best_se:<3.0f}"
                f"{r.ratio:>7.2f} +- {r.ratio_se:<4.2f}{r.n_false:>6}{r.n_missed:>7}  {late}"
                f"{'' if oracle == delays.BEST else '  (' + oracle + ')'}"
            )
    print("\nfalse alarms over the proven bound (and upper 95 % confidence limit)")
    for found in false_alarms:
        print(
            f"  {found.kind:<8}{found.clock:<10}{found.n_alarms:>6} alarms in {found.n_groups:>11,} groups: "
            f"{found.ratio:.2f} ({found.ratio_high:.2f})"
        )
    print()
    for name, value in figures.items():
        print(f"  {name:<52} {value:.4g}" if isinstance(value, float) else f"  {name:<52} {value}")


class _Progress:
    """Says how many of what are done."""

    def __init__(self, begin: float) -> None:
        self._begin = begin

    def follow(self, tasks: Mapping[str, Sequence["Future[Any]"]]) -> None:
        of = {future: name for name, futures in tasks.items() for future in futures}
        done = dict.fromkeys(tasks, 0)
        for future in as_completed(of):
            done[of[future]] += 1
            _say(self._begin, ", ".join(f"{name} {done[name]}/{len(tasks[name])}" for name in tasks))


def _say(begin: float, text: str) -> None:
    print(f"[{time.monotonic() - begin:5.0f} s] {text}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a minute, with wide errors")
    size.add_argument("--long", action="store_true", help="1e9 groups for the false alarms: an hour or two")
    parser.add_argument(
        "--peers", action="store_true", help="other people's detectors too: some minutes more"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where plots and JSON go")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side")
    given = parser.parse_args()
    chosen = QUICK if given.quick else LONG if given.long else Scale()
    main(chosen, given.out, peers=given.peers, jobs=given.jobs)
