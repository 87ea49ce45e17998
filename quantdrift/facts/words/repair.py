"""What a repair says: the damage, a table of what was built, and what to do next."""

import shlex
from pathlib import Path
from typing import Any, Final

from quantdrift.core.notation import capital, part
from quantdrift.core.slices import ALL
from quantdrift.core.text import Table, plain
from quantdrift.facts.gate import Decision, Outcome
from quantdrift.facts.repairs import MeasuredRepair, Repaired, RepairKind, RepairOutcome
from quantdrift.facts.words.diagnosis import cause_of, diagnosed

_MOST_NOTED: Final = 10  # repairs in the note of an alert
_RESULTS: Final = {
    RepairOutcome.PASSES: "pass",
    RepairOutcome.RESTORES: "the reference answers",
    RepairOutcome.MORE_ITEMS: "more items needed",
    RepairOutcome.OTHERS_BAD: "fail: {worse} was bad before",
    RepairOutcome.NOT_ENOUGH: "fail: not enough",
    RepairOutcome.MOVES: "fail: damages {worse}",
    RepairOutcome.NO_HELP: "fail: does not help",
}
_KINDS: Final = {
    RepairKind.RECALIBRATE: "recalibrate",
    RepairKind.OWN_COPY: "a copy for the slice",
    RepairKind.FP32_SITES: "sites in FP32",
    RepairKind.REFERENCE: "reference for the slice",
    RepairKind.ROLL_BACK: "roll back",
}
_HEAD: Final = (
    "",
    "repair",
    "changed answers",
    "worst other slice",
    "cut off by new ranges",
    "all traffic",
    "processor time",
    "model files",
    "gate",
)


def repaired(repairs: Repaired) -> list[str | Table]:
    """Return the repairs in paragraphs and tables; without any, the diagnosis."""
    measured = repairs.measured
    if not measured:
        reasons = [f"{skipped.kind.value}: not built, {skipped.why}" for skipped in repairs.not_built]
        return [
            *diagnosed(repairs.diagnosis, model=repairs.model, slice_name=repairs.slice),
            *reasons,
        ]
    lines: list[str | Table] = [*_damage(repairs)]
    if repairs.n_chosen:
        lines.append(
            f"{repairs.n_chosen} of them are kept because they are damaged: they measure nothing. Each slice is measured by those that were"
            " drawn for it at random."
        )
    lines += [
        "",
        Table(_HEAD, tuple(_row(repairs, number, each) for number, each in enumerate(measured, start=1))),
        "",
        f"changed answers: of {plain(repairs.slice)}. Processor time and files: relative to the candidate, on this machine's processor.",
    ]
    if any(each.cut for each in measured):
        lines.append(
            "cut off by new ranges: inputs with values outside of a new range that were inside of the old one, or of these the tenth or hundredth"
            " that is cut most, where more answers change."
        )
    lines += [f"{capital(remark)}." for remark in repairs.remarks]
    lines += [f"{_KINDS[skipped.kind]}: not built, {skipped.why}." for skipped in repairs.not_built]
    return [*lines, "", *_advice(repairs)]


def sentence(repairs: Repaired) -> str:
    """Return the best repair in words, for a person who reads the alert."""
    best = next((each for each in repairs.measured if each.is_of_use), repairs.measured[0])
    words = _row(repairs, 0, best)
    return (
        f"Repair: {words[1]}. Changed answers {words[2]}, of all traffic {words[5]}; worst other slice {words[3]}; processor time {best.time_ratio:.2f} times the"
        f" candidate's. Gate on {repairs.source}: {words[-1]}."
    )


def details(repairs: Repaired, candidate: str) -> dict[str, Any]:
    """Return the table of repairs that an alert keeps; `candidate` is its digest."""
    head = ("repair", "changed", "worst", "cut", "all", "time", "files", "gate")
    rows = [
        _row(repairs, number, each)[1:] for number, each in enumerate(repairs.measured[:_MOST_NOTED], start=1)
    ]
    return {"candidate": candidate, "repairs": [dict(zip(head, row, strict=True)) for row in rows]}


def _damage(repairs: Repaired) -> list[str]:
    """Return the damage with the cause, and on which of the inputs which share was counted."""
    diagnosis, change = repairs.diagnosis, repairs.measured[0].flips.get(repairs.slice)
    n_change, before = (0, 0.0) if change is None else (change.n, change.before)
    n = diagnosis.n_items + n_change
    share = (diagnosis.flips * diagnosis.n_items + before * n_change) / n if n else 0.0
    measured_on = "" if change is None else f", {n_change:,} of the slice ({part(before)} change)"
    return [
        f"{plain(repairs.model)}, {plain(repairs.slice)}: {part(share)} of {n:,} answers change; the budget is {part(diagnosis.budget)}.",
        f"Cause: {cause_of(diagnosis)}.",
        (
            f"Found and calibrated on {repairs.n_work:,} {repairs.source}, {diagnosis.n_items:,} of the slice ({part(diagnosis.flips)} change);"
            f" measured on {repairs.n_fresh:,} others{measured_on}."
        ),
    ]


def _row(repairs: Repaired, number: int, measured: MeasuredRepair) -> tuple[str, ...]:
    repair = measured.repair
    words = _KINDS[repair.kind]
    if repair.sites:
        words = f"in FP32: {', '.join(repair.sites)}"
    elif repair.calibrated_on:
        words += f", {len(repair.calibrated_on)} items"
        if repair.kept < 1.0:
            words += f", {part(repair.kept)} of the values"
    return (
        str(number),
        words,
        _change(measured, repairs.slice),
        _worst(measured, repairs.slice),
        _cut(measured),
        _change(measured, ALL),
        f"{measured.time_ratio:.2f} x",
        f"{measured.n_bytes / repairs.n_bytes:.1f} x",
        _RESULTS[measured.result].format(worse=", ".join(plain(name) for name in measured.worse)),
    )


def _change(measured: MeasuredRepair, name: str) -> str:
    change = measured.flips.get(name)
    return "-" if change is None else f"{part(change.before)} -> {part(change.after)}"


def _worst(measured: MeasuredRepair, name: str) -> str:
    """Return the other slice in which most answers change that did not before."""
    others = {other: change for other, change in measured.flips.items() if other not in {name, ALL}}
    if not others:
        return "-"
    worst = max(others, key=lambda other: (others[other].after - others[other].before, others[other].after))
    return f"{plain(worst)} {part(others[worst].before)} -> {part(others[worst].after)}"


def _cut(measured: MeasuredRepair) -> str:
    """Return the group of inputs that new ranges cut off in which most answers change that did not before, with its size."""
    if not measured.repair.ranges:
        return "-"
    if not measured.cut:
        return "none"
    worst = max(measured.cut.values(), key=lambda change: (change.after - change.before, change.n))
    return f"{worst.n:,} inputs {part(worst.before)} -> {part(worst.after)}"


def _advice(repairs: Repaired) -> list[str]:
    """Return what to do next."""
    measured, out, candidate = repairs.measured, Path(repairs.out), repairs.candidate
    lines = []
    number, best = next(
        ((number, each) for number, each in enumerate(measured, start=1) if each.is_of_use), (0, None)
    )
    if best is not None:
        file, words = out / best.repair.file(number), _KINDS[best.repair.kind]
        lines.append(f"{capital(words)}: {file}")
        if best.repair.suffix != ".onnx":
            lines.append(
                "It has the FP32 weights of these layers, by their names in the module: set them behind the function that makes the candidate, and"
                " serve that under a version of its own."
            )
        routed = [candidate, f"--route={repairs.slice}={file}", f"--against={candidate}"]
        served = routed if best.repair.is_routed else [str(file)]
        command = shlex.join(["quantdrift", "gate", *served, "--live", *repairs.gate_options])
        if best.repair.suffix == ".onnx":
            lines.append(f"Next, judge it on live traffic: {command}")
        if best.result is RepairOutcome.MORE_ITEMS and best.decision:
            lines.append(_missing(best.decision, is_weighted=repairs.is_weighted))
    elif measured[0].result in {RepairOutcome.PASSES, RepairOutcome.RESTORES}:
        lines.append("No repaired model is good enough.")
    if not any(each.repair.model and each.result is RepairOutcome.PASSES for each in measured):
        sure = next((each for each in measured if each.result is RepairOutcome.RESTORES), None)
        if sure is not None:
            lines.append(
                f"What is sure: {_KINDS[sure.repair.kind]}, at {sure.time_ratio:.2f} times the processor time."
            )
    if any(each.time_ratio < 1.0 and each.repair.kind is RepairKind.ROLL_BACK for each in measured):
        lines.append(
            "The reference is not slower than the candidate on this machine: rolling back costs no time here."
        )
    return [*lines, f"Everything that was measured: {out / 'repairs.json'}. Nothing was deployed."]


def _missing(decision: Decision, *, is_weighted: bool) -> str:
    """Return how many more inputs are needed, of which slice."""
    if is_weighted:
        return "Exemplars are too few to decide it. The gate on live traffic decides; or record inputs, and give --inputs."
    lacking = [answer for answer in decision.slices if answer.verdict is Outcome.INSUFFICIENT]
    open_ended = [answer.slice for answer in lacking if answer.more is None]
    if open_ended:
        return f"More inputs may not decide it: in {plain(open_ended[0])} the share of changed answers is at the limit."
    worst = max(lacking, key=lambda answer: answer.more or 0)
    return (
        f"To decide it, about {worst.more:,} more inputs of {plain(worst.slice)} to judge by are needed. Record twice as many: one half finds"
        " the cause, the other judges."
    )
