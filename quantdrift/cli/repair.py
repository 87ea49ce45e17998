"""The command `quantdrift repair`, which builds repairs of a candidate for a damaged slice, and measures them."""

import hashlib
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
import numpy as np

from quantdrift.cli.alerts import NO_NOTE, add_note
from quantdrift.cli.damaged import MODEL, SLICE, Damaged, damaged, exemplars_of, say_unreadable
from quantdrift.cli.diagnose import cause_of, details_of, sentence_of, text_of
from quantdrift.cli.options import CONFIG, DATA, JSON, emit
from quantdrift.cli.output import Steps, columns
from quantdrift.cli.reference import REFERENCE
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import part
from quantdrift.core.text import plain

if TYPE_CHECKING:
    from quantdrift.drift.gate import Decision
    from quantdrift.shadow.repair.blame import Compare, Diagnosis
    from quantdrift.shadow.repair.remedies import Change, Measured, NotBuilt, Workbench
    from quantdrift.shadow.repair.samples import Recording
    from quantdrift.shadow.repair.sites import SwitchableCopy

_KINDS: Final = ("recalibrate", "own-copy", "fp32-sites", "reference", "roll-back")
_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
_FORMAT: Final = 1
_MOST_NOTED: Final = 10  # repairs in the note of an alert
_WORKS: Final = ("passes", "restores")
_RESULTS: Final = {
    "passes": "pass",
    "restores": "the reference answers",
    "more items needed": "more items needed",
    "other slices stay bad": "fail: {worse} was bad before",
    "not enough": "fail: not enough",
    "moves the damage": "fail: damages {worse}",
    "does not help": "fail: does not help",
}


@click.command()
@click.argument("alert_id", metavar="[ALERT]", type=click.IntRange(min=1), required=False)
@click.option(
    "--candidate",
    type=_FILE,
    required=True,
    help="The quantised model that serves: an ONNX file in QDQ form.",
)
@click.option(
    "--inputs",
    type=click.Path(exists=True, path_type=Path),
    help="Recorded inputs of all traffic: a .npz or .safetensors file, or a folder of them, as for quantdrift gate.  [default: the"
    " exemplars of all slices]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="A new folder for the repaired models; nothing in it is ever overwritten.",
)
@CONFIG
@DATA
@MODEL
@SLICE
@REFERENCE
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(_KINDS),
    help="Build only these. Repeatable.  [default: all that the cause allows]",
)
@click.option(
    "--alpha",
    type=click.FloatRange(0, 0.5, min_open=True),
    default=0.05,
    show_default=True,
    help="Probability that any repair passes wrongly, at most.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of what is drawn at random.")
@NO_NOTE
@JSON
def repair(
    alert_id: int | None,
    candidate: Path,
    inputs: Path | None,
    out: Path,
    config_path: Path,
    data: Path | None,
    name: str,
    slice_name: str,
    number: int | None,
    only: tuple[str, ...],
    alpha: float,
    seed: int,
    *,
    no_note: bool,
    as_json: bool,
) -> None:
    """Build repairs of the candidate for a damaged slice, that of ALERT or the one of --slice, and measure them.

    The recorded inputs are split into halves. One finds the cause and calibrates; on the other each repair is measured on every slice,
    and judged as quantdrift gate does. Repairs that work come first, the cheapest first.

    Without --inputs it works on the exemplars that the shadow keeps. Damaged ones find the cause and calibrate; only random ones measure, each
    slice by those that were drawn for it. They are too few for a pass: the gate on live traffic decides.

    The models are written to the folder --out, with repairs.json and routes for a proxy. Nothing is deployed. With ALERT the cause and the
    repairs become notes of the alert.

    \b
    recalibrate  new activation ranges, from all traffic and the slice
    own-copy     a second quantised copy with the ranges of the slice, and a route to it
    fp32-sites   the sites to blame are not quantised
    reference    a route of the slice to the reference
    roll-back    the reference serves everything

    Exit code 0 if a repaired model passes, 3 if none does, 4 if there are too few inputs to tell; 1 and 2 are errors.

    \b
    Examples:
      quantdrift repair 12 --candidate models/digits-int8.onnx --inputs recorded/ --out repaired/
      quantdrift repair --slice scanner=archive --candidate digits-int8.onnx --inputs recorded.npz --out repaired/ --only own-copy
    """
    from quantdrift.shadow.gate.offline import is_routable
    from quantdrift.shadow.repair.remedies import Kind, Workbench, halves
    from quantdrift.shadow.repair.samples import comparison
    from quantdrift.shadow.repair.sites import SwitchableCopy

    case = damaged(config_path, data, alert_id=alert_id, name=name, slice_name=slice_name, number=number)
    _check_empty(out)
    copy = SwitchableCopy(candidate, case.onnx)
    compare = comparison(case.model, copy)
    if inputs is None:
        recording = _exemplars(case, data, copy, compare, quiet=as_json)
    else:
        recording = _recording(case, copy, inputs, quiet=as_json)
    rng = np.random.default_rng(seed)
    work, fresh = halves(recording, case.slice.name, rng)
    found = _diagnosed(case, copy, compare, recording, work, seed=seed, quiet=as_json)
    bench = Workbench(
        copy,
        compare,
        candidate=candidate,
        reference=case.onnx,
        recording=recording,
        slice_name=case.slice.name,
        work=work,
        fresh=fresh,
        rng=rng,
    )
    measured: list[Measured] = []
    skipped: list[NotBuilt] = []
    if _is_damaged(found) or (len(recording.chosen) and found.verdict.value != "too few exemplars"):
        measured, skipped = _built(
            bench,
            case,
            found,
            [Kind(one) for one in only or _KINDS],
            alpha=alpha,
            routable=is_routable(case.slice),
            quiet=as_json,
        )
    record = _record(case, candidate, alert_id, seed, found, measured, skipped, recording)
    if measured:
        _write(out, case, measured, record)
        if alert_id is not None and not no_note:
            digest = record["candidate"]
            add_note(config_path, data, alert_id, "cause", sentence_of(found), details_of(found, digest))
            details = _details(measured, case.slice.name, digest, candidate.stat().st_size)
            add_note(
                config_path,
                data,
                alert_id,
                "repair",
                _sentence(measured, case.slice.name, candidate.stat().st_size, recording.source),
                details,
            )
    if as_json:
        emit(record)
    else:
        click.echo(
            _text(
                case,
                candidate,
                out,
                found,
                measured,
                skipped,
                recording,
                n_items=(len(work), len(fresh)),
                gate_options=_gate_options(config_path, data, case, None if no_note else alert_id),
            )
        )
    sys.exit(_exit_code(found, measured))


def _check_empty(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise OperatorError(f"--out {out} is not empty, and nothing is overwritten: name a new folder")


def _recording(case: Damaged, copy: "SwitchableCopy", inputs: Path, *, quiet: bool) -> "Recording":
    from quantdrift.shadow.gate.recording import layout_of, parts_of
    from quantdrift.shadow.repair.samples import all_recorded

    parts = parts_of(inputs)
    layout = layout_of(case.config, case.rules, copy.inputs)
    length = sum(part.n_bytes for part in parts)
    with click.progressbar(length=length, label="reading inputs", hidden=quiet, file=sys.stderr) as bar:
        recording = all_recorded(case.config, case.slice, parts, layout, case.rules, progress=bar.update)
    if not len(recording.inside):
        raise OperatorError(
            f"--inputs {inputs}: no item is in the slice {case.slice.name}: record inputs of this slice"
        )
    return recording


def _exemplars(
    case: Damaged, data: Path | None, copy: "SwitchableCopy", compare: "Compare", *, quiet: bool
) -> "Recording":
    """Return the exemplars of all slices, with the damaged ones of the slice."""
    from quantdrift.shadow.repair.samples import check_served, exemplar_recording, of_exemplars

    problems: list[str] = []
    with Steps(quiet=quiet) as step:
        step("reading exemplars")
        found, others, _ = exemplars_of(
            case, data, problems, client_name="quantdrift repair", is_wanted=lambda _: True
        )
    say_unreadable(problems)
    if not any(one.kind.value == "random" for one in found):
        raise OperatorError(
            f"no exemplar of the slice {case.slice.name} that was drawn at random can be read for this version. Record inputs and give"
            " --inputs, or let the shadow keep exemplars: models.exemplars = true"
        )
    check_served(of_exemplars(found, [], copy), copy, compare)
    return exemplar_recording(case.config, case.slice, [*found, *others], case.rules, copy)


def _diagnosed(
    case: Damaged,
    copy: "SwitchableCopy",
    compare: "Compare",
    recording: "Recording",
    work: Any,
    *,
    seed: int,
    quiet: bool,
) -> "Diagnosis":
    from quantdrift.shadow.repair.blame import diagnose
    from quantdrift.shadow.repair.samples import MOST_ELSEWHERE, MOST_INSIDE, thinned

    inside = np.intersect1d(work, recording.items.members[case.slice.name])
    elsewhere, chosen = np.setdiff1d(work, recording.inside), np.intersect1d(work, recording.chosen)
    sides = [
        {name: recording.inputs[name][thinned(rows, most)] for name in copy.inputs}
        for rows, most in ((inside, MOST_INSIDE), (elsewhere, MOST_ELSEWHERE), (chosen, MOST_INSIDE))
    ]
    with click.progressbar(length=1000, label="switching sites", hidden=quiet, file=sys.stderr) as bar:
        return diagnose(
            copy,
            compare,
            sides[0],
            elsewhere=sides[1],
            damaged=sides[2] if len(chosen) else None,
            budget=case.model.budget.flip,
            keep_aside=False,
            seed=seed,
            progress=lambda done, total: bar.update(1000 * done // total - bar.pos),
        )


def _is_damaged(found: "Diagnosis") -> bool:
    return bool(found.one_off) and found.flips > found.budget


def _built(
    bench: "Workbench",
    case: Damaged,
    found: "Diagnosis",
    kinds: Sequence[Any],
    *,
    alpha: float,
    routable: bool,
    quiet: bool,
) -> "tuple[list[Measured], list[NotBuilt]]":
    repairs, skipped = bench.build(found, only=kinds, is_routable=routable)
    with click.progressbar(
        length=len(repairs), label="measuring repairs", hidden=quiet, file=sys.stderr
    ) as bar:
        measured = bench.measure(
            repairs,
            model=case.model.name,
            budget=case.model.budget.flip,
            at=datetime.now(UTC),
            alpha=alpha,
            progress=lambda: bar.update(1),
        )
    return measured, skipped


def _exit_code(found: "Diagnosis", measured: "Sequence[Measured]") -> int:
    results = {one.result.value for one in measured if one.repair.model}
    if "passes" in results:
        return 0
    return 4 if "more items needed" in results or found.verdict.value == "too few exemplars" else 3


def _is_written(one: "Measured") -> bool:
    """Return whether a model may be of use: it does not fail in the slice itself, nor by damage elsewhere."""
    return bool(one.repair.model) and one.result.value in {
        "passes",
        "more items needed",
        "other slices stay bad",
    }


def _file(number: int, one: "Measured") -> str:
    return f"{number}-{one.repair.kind.value}.onnx"


def _write(out: Path, case: Damaged, measured: "Sequence[Measured]", record: dict[str, Any]) -> None:
    """Write the models that may be of use, their routes, and the record."""
    from quantdrift.shadow.repair.routes import route_of

    files: dict[str, bytes] = {"repairs.json": msgspec.json.format(msgspec.json.encode(record)) + b"\n"}
    for number, one in enumerate(measured, start=1):
        if _is_written(one):
            files[_file(number, one)] = one.repair.model
        if one.repair.is_routed and (_is_written(one) or not one.repair.model):
            route = route_of(case.slice, f"{case.model.name}-{one.repair.kind.value}")
            if route is not None:
                files[f"{number}-{one.repair.kind.value}.route.yaml"] = route.encode()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            with (out / name).open("xb") as file:
                file.write(content)
    except OSError as error:
        raise OperatorError(f"--out {error.filename or out} cannot be written: {error.strerror}") from error


def _record(
    case: Damaged,
    candidate: Path,
    alert_id: int | None,
    seed: int,
    found: "Diagnosis",
    measured: "Sequence[Measured]",
    skipped: "Sequence[NotBuilt]",
    recording: "Recording",
) -> dict[str, Any]:
    """Return what `repairs.json` has."""
    from quantdrift.shadow.gate.observations import digests_of

    return {
        "format": _FORMAT,
        "made_at": datetime.now(UTC),
        "alert": alert_id,
        "model": case.model.name,
        "slice": case.slice.name,
        "candidate": _digest(candidate.read_bytes()),
        "reference": _digest(case.onnx.read_bytes()),
        "seed": seed,
        "inputs": recording.source,
        "diagnosis": msgspec.to_builtins(found),
        "repairs": [
            {
                "number": number,
                "kind": one.repair.kind.value,
                "result": one.result.value,
                "file": _file(number, one) if _is_written(one) else None,
                "digest": _digest(one.repair.model) if one.repair.model else None,
                "route": case.slice.name if one.repair.is_routed else None,
                "sites": one.repair.sites,
                "calibrated_on": [recording.names[row] for row in one.repair.calibrated_on],
                "calibration": digests_of(
                    {name: array[[*one.repair.calibrated_on]] for name, array in recording.inputs.items()}
                )
                if one.repair.calibrated_on
                else [],
                "cut": msgspec.to_builtins(one.cut),
                "ranges": {"hold": one.repair.kept, "tried": one.repair.tried},
                "worse": one.worse,
                "flips": msgspec.to_builtins(one.flips),
                "time_ratio": one.time_ratio,
                "bytes": one.n_bytes,
                "gate": one.decision,
            }
            for number, one in enumerate(measured, start=1)
        ],
        "not_built": [msgspec.to_builtins(one) for one in skipped],
    }


def _sentence(measured: "Sequence[Measured]", name: str, n_bytes: int, source: str) -> str:
    """Return the best repair in words, for a person who reads the alert."""
    best = next((one for one in measured if _is_written(one)), measured[0])
    words = _row(0, best, name, n_bytes)
    return (
        f"Repair: {words[1]}. Changed answers {words[2]}, of all traffic {words[5]}; worst other slice {words[3]}; processor time {best.time_ratio:.2f} times the"
        f" candidate's. Gate on {source}: {words[-1]}."
    )


def _details(measured: "Sequence[Measured]", name: str, digest: str, n_bytes: int) -> dict[str, Any]:
    """Return the table of repairs that an alert keeps."""
    head = ("repair", "changed", "worst", "cut", "all", "time", "files", "gate")
    rows = [
        _row(number, one, name, n_bytes)[1:] for number, one in enumerate(measured[:_MOST_NOTED], start=1)
    ]
    return {"candidate": digest, "repairs": [dict(zip(head, row, strict=True)) for row in rows]}


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _text(
    case: Damaged,
    candidate: Path,
    out: Path,
    found: "Diagnosis",
    measured: "Sequence[Measured]",
    skipped: "Sequence[NotBuilt]",
    recording: "Recording",
    *,
    n_items: tuple[int, int],
    gate_options: Sequence[str],
) -> str:
    """Return the repairs for the terminal."""
    name = case.slice.name
    if not measured:
        reason = [f"{one.kind.value}: not built, {one.why}" for one in skipped]
        return "\n".join([text_of(found, model=case.model.name, slice_name=name), *reason])
    lines = _head(case, found, measured[0].flips.get(name), n_items, recording.source)
    if len(recording.chosen):
        lines.append(
            f"{len(recording.chosen)} of them are kept because they are damaged: they measure nothing. Each slice is measured by those that were"
            " drawn for it at random."
        )
    lines.append("")
    head = (
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
    lines += [
        columns(
            head,
            [
                _row(number, one, name, candidate.stat().st_size)
                for number, one in enumerate(measured, start=1)
            ],
        ),
        "",
        f"changed answers: of {plain(name)}. Processor time and files: relative to the candidate, on this machine's processor.",
    ]
    if any(one.cut for one in measured):
        lines.append(
            "cut off by new ranges: inputs with values outside of a new range that were inside of the old one, or of these the tenth or hundredth"
            " that is cut most, where more answers change."
        )
    lines += _copies(recording)
    lines += [f"{_KIND_WORDS[one.kind.value]}: not built, {one.why}." for one in skipped]
    lines += ["", *_advice(case, candidate, out, measured, recording, gate_options)]
    return "\n".join(lines)


def _head(
    case: Damaged, found: "Diagnosis", change: "Change | None", n_items: tuple[int, int], source: str
) -> list[str]:
    """Return the damage with the cause, and on which of the inputs which share was counted."""
    n_change, before = (0, 0.0) if change is None else (change.n, change.before)
    n = found.n_items + n_change
    share = (found.flips * found.n_items + before * n_change) / n if n else 0.0
    measured_on = "" if change is None else f", {n_change:,} of the slice ({part(before)} change)"
    return [
        f"{plain(case.model.name)}, {plain(case.slice.name)}: {part(share)} of {n:,} answers change; the budget is {part(found.budget)}.",
        f"Cause: {cause_of(found)}.",
        (
            f"Found and calibrated on {n_items[0]:,} {source}, {found.n_items:,} of the slice ({part(found.flips)} change);"
            f" measured on {n_items[1]:,} others{measured_on}."
        ),
    ]


def _copies(recording: "Recording") -> list[str]:
    from quantdrift.shadow.gate.judge import said_of

    return [f"{note[0].upper()}{note[1:]}." for note in said_of(recording.items)]


_KIND_WORDS: Final = {
    "recalibrate": "recalibrate",
    "own-copy": "a copy for the slice",
    "fp32-sites": "sites in FP32",
    "reference": "reference for the slice",
    "roll-back": "roll back",
}


def _row(number: int, one: "Measured", name: str, n_bytes: int) -> tuple[str, ...]:
    words = _KIND_WORDS[one.repair.kind.value]
    if one.repair.sites:
        words = f"in FP32: {', '.join(one.repair.sites)}"
    elif one.repair.calibrated_on:
        words += f", {len(one.repair.calibrated_on)} items"
        if one.repair.kept < 1.0:
            words += f", {part(one.repair.kept)} of the values"
    return (
        str(number),
        words,
        _change(one, name),
        _worst(one, name),
        _cut(one),
        _change(one, "all"),
        f"{one.time_ratio:.2f} x",
        f"{one.n_bytes / n_bytes:.1f} x",
        _RESULTS[one.result.value].format(worse=", ".join(plain(slice_) for slice_ in one.worse)),
    )


def _change(one: "Measured", name: str) -> str:
    change = one.flips.get(name)
    return "-" if change is None else f"{part(change.before)} -> {part(change.after)}"


def _worst(one: "Measured", name: str) -> str:
    """Return the other slice in which most answers change that did not before."""
    others = {other: change for other, change in one.flips.items() if other not in {name, "all"}}
    if not others:
        return "-"
    worst = max(others, key=lambda other: (others[other].after - others[other].before, others[other].after))
    return f"{plain(worst)} {part(others[worst].before)} -> {part(others[worst].after)}"


def _cut(one: "Measured") -> str:
    """Return the group of inputs that new ranges cut off in which most answers change that did not before, with its size."""
    if not one.repair.ranges:
        return "-"
    if not one.cut:
        return "none"
    worst = max(one.cut.values(), key=lambda change: (change.after - change.before, change.n))
    return f"{worst.n:,} inputs {part(worst.before)} -> {part(worst.after)}"


def _gate_options(config_path: Path, data: Path | None, case: Damaged, note: int | None) -> list[str]:
    """Return the options with which the gate judges the same model, and writes its verdict to the same alert."""
    options = [] if note is None else [f"--note={note}"]
    if len(case.config.models) > 1:
        options.append(f"--model={case.model.name}")
    if config_path != Path("config.toml"):
        options.append(f"--config={config_path}")
    return options if data is None else [*options, f"--data={data}"]


def _advice(
    case: Damaged,
    candidate: Path,
    out: Path,
    measured: "Sequence[Measured]",
    recording: "Recording",
    gate_options: Sequence[str],
) -> list[str]:
    """Return what to do next."""
    best = measured[0]
    lines = []
    written = [(number, one) for number, one in enumerate(measured, start=1) if _is_written(one)]
    if written:
        number, one = written[0]
        file = out / _file(number, one)
        words = _KIND_WORDS[one.repair.kind.value]
        lines.append(f"{words[0].upper()}{words[1:]}: {file}")
        routed = [candidate, f"--route={case.slice.name}={file}", f"--against={candidate}"]
        served = routed if one.repair.is_routed else [file]
        command = shlex.join(map(str, ["quantdrift", "gate", *served, "--live", *gate_options]))
        lines.append(f"Next, judge it on live traffic: {command}")
        if one.result.value == "more items needed" and one.decision:
            lines.append(_missing(one.decision, recording))
    elif best.result.value in _WORKS:
        lines.append("No repaired model is good enough.")
    if not any(one.repair.model and one.result.value == "passes" for one in measured):
        left = [one for one in measured if one.result.value == "restores"]
        if left:
            words = _KIND_WORDS[left[0].repair.kind.value]
            lines.append(f"What is sure: {words}, at {left[0].time_ratio:.2f} times the processor time.")
    if any(one.time_ratio < 1.0 and one.repair.kind.value == "roll-back" for one in measured):
        lines.append(
            "The reference is not slower than the candidate on this machine: rolling back costs no time here."
        )
    lines.append(f"Everything that was measured: {out / 'repairs.json'}. Nothing was deployed.")
    return lines


def _missing(decision: "Decision", recording: "Recording") -> str:
    """Return how many more inputs are needed, of which slice."""
    lacking = [answer for answer in decision.slices if answer.verdict.value == "insufficient"]
    if recording.items.weight is not None:
        return "Exemplars are too few to decide it. The gate on live traffic decides; or record inputs, and give --inputs."
    open_ended = [answer.slice for answer in lacking if answer.more is None]
    if open_ended:
        return f"More inputs may not decide it: in {plain(open_ended[0])} the share of changed answers is at the limit."
    worst = max(lacking, key=lambda answer: answer.more or 0)
    return (
        f"To decide it, about {worst.more:,} more inputs of {plain(worst.slice)} to judge by are needed. Record twice as many: one half finds"
        " the cause, the other judges."
    )
