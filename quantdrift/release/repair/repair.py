"""Repairs: copies of a candidate that are built for a damaged slice, and measured on every slice."""

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import Runtime
from quantdrift.core.diagnosable import repair_problem
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import ExemplarKind, Predicate, Verdict
from quantdrift.core.slices import SliceKey
from quantdrift.core.text import Table
from quantdrift.drift.evidence.observations import IntArray
from quantdrift.facts.diagnosis import Diagnosis, DiagnosisVerdict
from quantdrift.facts.repairs import MeasuredRepair, Repaired, RepairKind, RepairOutcome
from quantdrift.facts.words.diagnosis import details_of, sentence_of
from quantdrift.facts.words.repair import details, repaired, sentence
from quantdrift.release.diagnose.blame import Compare, diagnose
from quantdrift.release.diagnose.copies import Copy
from quantdrift.release.diagnose.damaged import Damaged, damaged
from quantdrift.release.diagnose.diagnose import SWITCHING, open_copy
from quantdrift.release.diagnose.samples import (
    MOST_ELSEWHERE,
    MOST_INSIDE,
    Recording,
    all_recorded,
    check_served,
    comparison,
    exemplar_recording,
    of_exemplars,
    thinned,
)
from quantdrift.release.gate.judge import said_of
from quantdrift.release.gate.observations import digests_of
from quantdrift.release.gate.offline import is_routable
from quantdrift.release.notes import add_note
from quantdrift.release.progress import OnProgress, Watch
from quantdrift.release.recording import layout_of, parts_of
from quantdrift.release.repair.remedies import Workbench, halves
from quantdrift.release.result import Result
from quantdrift.release.setting import File, Setting, existing
from quantdrift.storage.alerts.alerts import FindingKind

_FORMAT: Final = 1
_HEADER: Final = "header."
_TEXT: Final = """\
# Requests of the slice {slice} go to {service}, and all others where they go today.
# {service} is a name for you to choose: the server of the repaired model.

# Istio: the first rule under `http` of the VirtualService of model {model}.
- match:
    - headers:
{istio}
  route:
    - destination: {{host: {service}}}
---
# Envoy: the first entry under `routes` of the virtual host of model {model}.
- match:
    prefix: "/"
    headers:
{envoy}
  route: {{cluster: {service}}}
"""


class RepairResult(Result, frozen=True, kw_only=True):
    """The repairs of a candidate for a slice, those that work first, the cheapest first.

    Parameters
    ----------
    repairs
        What was found, built and measured.
    record
        What the folder's `repairs.json` has.
    """

    repairs: Repaired
    record: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether a repaired model passes."""
        return RepairOutcome.PASSES in self._results

    @property
    def lacks_inputs(self) -> bool:
        """Whether there are too few inputs to tell."""
        too_few = self.repairs.diagnosis.verdict is DiagnosisVerdict.TOO_FEW
        return not self.passed and (too_few or RepairOutcome.MORE_ITEMS in self._results)

    @property
    def files(self) -> tuple[Path, ...]:
        """The repaired models that may be of use, the best first."""
        out = Path(self.repairs.out)
        return tuple(
            out / each.repair.file(number)
            for number, each in enumerate(self.repairs.measured, start=1)
            if each.is_of_use
        )

    @property
    def colour(self) -> Verdict:
        """Teal where a repaired model passes, grey where there are too few inputs, red where none helps."""
        if self.passed:
            return Verdict.OK
        return Verdict.UNKNOWN if self.lacks_inputs else Verdict.FIRING

    def blocks(self) -> Sequence[str | Table]:
        """Return the damage, a table of the repairs, and what to do next."""
        return repaired(self.repairs)

    def to_dict(self) -> dict[str, Any]:
        """Return what the command prints with `--json`."""
        return self.record

    @property
    def _results(self) -> set[RepairOutcome]:
        return {each.result for each in self.repairs.measured if each.repair.model}


def repair(
    alert: int | None = None,
    *,
    candidate: File,
    out: File,
    inputs: File | None = None,
    config: File = "config.toml",
    data: File | None = None,
    model: str = "",
    slice: str = "",  # noqa: A002 -- the word of the product
    factory: str = "",
    reference: int | None = None,
    only: Sequence[str] = (),
    alpha: float = 0.05,
    seed: int = 1,
    no_note: bool = False,
    progress: OnProgress | None = None,
) -> RepairResult:
    """Build repairs of a candidate for a damaged slice, that of an alert or `slice`, and measure them.

    One half of the inputs finds the cause and calibrates; on the other each repair is measured on every slice, and judged as the gate does.
    The models are written to `out`, with `repairs.json` and routes for a proxy; nothing is deployed. Cause and repairs become notes of the
    alert. The parameters are the options of `quantdrift repair`, whose help explains each.

    Parameters
    ----------
    alert
        The number of the alert.
    candidate
        The quantised model that serves: an ONNX file (QDQ, weights in blocks, dynamic INT8, FP16, BF16, decision trees), or with `factory` a file
        of weights.
    out
        A new folder for the repaired models.
    inputs
        Recorded inputs of all traffic: a .npz or .safetensors file, or a folder of them; None: the exemplars of all slices.
    config, data
        The configuration file, and the data directory of a running `quantdrift up`, whose Postgres and NATS are used.
    only
        Build only these: `recalibrate`, `own-copy`, `fp32-sites`, `reference`, `roll-back`.
    progress
        Called with each step and share of the work.

    Raises
    ------
    OperatorError
        Something must be changed by a person; the sentence is the one that the command prints.
    RetryError
        Something is away that may come back.
    """
    file, folder = existing(candidate, "--candidate"), Path(out)
    kinds = _kinds(only)
    watch = Watch(progress)
    case = damaged(
        Setting.of(config, data),
        watch,
        alert=alert,
        model=model,
        slice_name=slice,
        number=reference,
        is_recorded=inputs is not None,
    )
    if folder.exists() and any(folder.iterdir()):
        raise OperatorError(f"--out {folder} is not empty, and nothing is overwritten: name a new folder")
    if problem := repair_problem(case.model, case.reference):
        raise OperatorError(problem)
    is_onnx = case.reference.runtime is Runtime.ONNX
    if not is_onnx and not factory:
        raise OperatorError(
            f"the reference of model `{case.model.name}` is in PyTorch: give the function that makes the candidate of its weights with --factory"
            " package.module:function. An exported program is not repaired: export it again without the named layers"
        )
    copy: Any = open_copy(case.model, case.reference, file, factory=factory, digest="", threads=1)
    compare = comparison(case.model, copy)
    if inputs is None:
        recording = _exemplars(case, copy, compare)
    else:
        recording = _recorded(case, copy, existing(inputs, "--inputs"))
    rng = np.random.default_rng(seed)
    work, fresh = halves(recording, case.slice.name, rng)
    diagnosis = _diagnosed(case, copy, compare, recording, work=work, seed=seed)
    repairs = Repaired(
        model=case.model.name,
        slice=case.slice.name,
        candidate=str(file),
        n_bytes=file.stat().st_size,
        out=str(folder),
        diagnosis=diagnosis,
        source=recording.source,
        n_work=len(work),
        n_fresh=len(fresh),
        n_chosen=len(recording.chosen),
        is_weighted=recording.items.weight is not None,
        remarks=tuple(said_of(recording.items)),
        gate_options=_gate_options(case, None if no_note else alert),
    )
    is_damaged = bool(diagnosis.one_off) and diagnosis.flips > diagnosis.budget
    if is_damaged or (len(recording.chosen) and diagnosis.verdict is not DiagnosisVerdict.TOO_FEW):
        bench = Workbench(
            copy,
            compare,
            candidate=file,
            reference=Path(case.reference.path),
            recording=recording,
            slice_name=case.slice.name,
            work=work,
            fresh=fresh,
            rng=rng,
        )
        built, not_built = bench.build(diagnosis, only=kinds, is_routable=is_routable(case.slice))
        counted = watch.counted("measuring repairs", len(built))
        measured = bench.measure(
            built,
            model=case.model.name,
            budget=case.model.budget.flip,
            at=datetime.now(UTC),
            alpha=alpha,
            progress=lambda: counted(1),
        )
        repairs = msgspec.structs.replace(repairs, measured=tuple(measured), not_built=tuple(not_built))
    record = _record(case, file, repairs, recording, alert=alert, seed=seed)
    if repairs.measured:
        _write(folder, case, repairs.measured, record)
        if alert is not None and not no_note:
            digest = record["candidate"]
            for kind, text, figures in (
                (FindingKind.CAUSE, sentence_of(diagnosis), details_of(diagnosis, digest)),
                (FindingKind.REPAIR, sentence(repairs), details(repairs, digest)),
            ):
                add_note(case.setting, watch, alert, kind=kind, text=text, details=figures)
    return RepairResult(repairs=repairs, record=record, notes=tuple(watch.notes))


def _kinds(only: Sequence[str]) -> list[RepairKind]:
    names = [kind.value for kind in RepairKind]
    if unknown := [name for name in only if name not in names]:
        raise OperatorError(f"--only {unknown[0]}: there is no such repair; known are: {', '.join(names)}")
    return [RepairKind(name) for name in only or names]


def _recorded(case: Damaged, copy: Copy, inputs: Path) -> Recording:
    parts = parts_of(inputs)
    layout = layout_of(case.config, case.rules, copy.inputs)
    progress = case.watch.counted("reading inputs", sum(part.n_bytes for part in parts))
    recording = all_recorded(case.config, case.slice, parts, layout, case.rules, progress=progress)
    if not len(recording.inside):
        raise OperatorError(
            f"--inputs {inputs}: no item is in the slice {case.slice.name}: record inputs of this slice"
        )
    return recording


def _exemplars(case: Damaged, copy: Copy, compare: Compare) -> Recording:
    """Return the exemplars of all slices, with the damaged ones of the slice."""
    case.watch.step("reading exemplars")
    inside, others, _ = case.exemplars(client_name="quantdrift repair", is_wanted=lambda _: True)
    case.note_unreadable()
    if not any(exemplar.kind is ExemplarKind.RANDOM for exemplar in inside):
        raise OperatorError(
            f"no exemplar of the slice {case.slice.name} that was drawn at random can be read for this version. Record inputs and give"
            " --inputs, or let the shadow keep exemplars: models.exemplars = true"
        )
    check_served(of_exemplars(inside, [], copy), copy, compare)
    return exemplar_recording(case.config, case.slice, [*inside, *others], case.rules, copy)


def _diagnosed(
    case: Damaged,
    copy: Copy,
    compare: Compare,
    recording: Recording,
    *,
    work: IntArray,
    seed: int,
) -> Diagnosis:
    """Return the cause, on the half of the inputs that calibrates."""
    inside = np.intersect1d(work, recording.items.members[case.slice.name])
    elsewhere, chosen = np.setdiff1d(work, recording.inside), np.intersect1d(work, recording.chosen)
    sides = [
        {name: recording.inputs[name][thinned(rows, most)] for name in copy.inputs}
        for rows, most in ((inside, MOST_INSIDE), (elsewhere, MOST_ELSEWHERE), (chosen, MOST_INSIDE))
    ]
    return diagnose(
        copy,
        compare,
        sides[0],
        elsewhere=sides[1],
        damaged=sides[2] if len(chosen) else None,
        budget=case.model.budget.flip,
        keep_aside=False,
        seed=seed,
        progress=case.watch.shares(SWITCHING),
    )


def _write(out: Path, case: Damaged, measured: Sequence[MeasuredRepair], record: dict[str, Any]) -> None:
    """Write the models that may be of use, their routes, and the record."""
    files: dict[str, bytes] = {"repairs.json": msgspec.json.format(msgspec.json.encode(record)) + b"\n"}
    for number, each in enumerate(measured, start=1):
        name = each.repair.file(number)
        if each.is_of_use:
            files[name] = each.repair.model
        if each.repair.is_routed and (each.is_of_use or not each.repair.model):
            route = route_of(case.slice, f"{case.model.name}-{each.repair.kind.value}")
            if route is not None:
                files[f"{name.removesuffix('.onnx')}.route.yaml"] = route.encode()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            with (out / name).open("xb") as file:
                file.write(content)
    except OSError as error:
        raise OperatorError(f"--out {error.filename or out} cannot be written: {error.strerror}") from error


def _record(
    case: Damaged, candidate: Path, repairs: Repaired, recording: Recording, *, alert: int | None, seed: int
) -> dict[str, Any]:
    """Return what `repairs.json` has."""
    record: dict[str, Any] = msgspec.to_builtins(
        {
            "format": _FORMAT,
            "made_at": datetime.now(UTC),
            "alert": alert,
            "model": repairs.model,
            "slice": repairs.slice,
            "candidate": _digest(candidate.read_bytes()),
            "reference": _digest(Path(case.reference.path).read_bytes())
            if Path(case.reference.path).is_file()
            else None,
            "seed": seed,
            "inputs": recording.source,
            "diagnosis": repairs.diagnosis,
            "repairs": [
                {
                    "number": number,
                    "kind": each.repair.kind,
                    "result": each.result,
                    "file": each.repair.file(number) if each.is_of_use else None,
                    "digest": _digest(each.repair.model) if each.repair.model else None,
                    "route": repairs.slice if each.repair.is_routed else None,
                    "sites": each.repair.sites,
                    "calibrated_on": [recording.names[row] for row in each.repair.calibrated_on],
                    "calibration": digests_of(
                        {
                            name: array[[*each.repair.calibrated_on]]
                            for name, array in recording.inputs.items()
                        }
                    )
                    if each.repair.calibrated_on
                    else [],
                    "cut": each.cut,
                    "ranges": {"hold": each.repair.kept, "tried": each.repair.tried},
                    "worse": each.worse,
                    "flips": each.flips,
                    "time_ratio": each.time_ratio,
                    "bytes": each.n_bytes,
                    "gate": each.decision,
                }
                for number, each in enumerate(repairs.measured, start=1)
            ],
            "not_built": repairs.not_built,
        }
    )
    return record


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _gate_options(case: Damaged, note: int | None) -> tuple[str, ...]:
    """Return the options with which the gate judges the same model, and writes its verdict to the same alert."""
    setting = case.setting
    options = [] if note is None else [f"--note={note}"]
    if len(case.config.models) > 1:
        options.append(f"--model={case.model.name}")
    if setting.path != Path("config.toml"):
        options.append(f"--config={setting.path}")
    return tuple(options if setting.data is None else [*options, f"--data={setting.data}"])


def route_of(key: SliceKey, service: str) -> str | None:
    """Return a route for Istio and one for Envoy, as YAML; None: the slice is not made of headers with one value each."""
    if not key.where or not all(_is_header(condition) for condition in key.where):
        return None
    return _TEXT.format(
        slice=key.name.replace("\n", " "),
        service=service,
        model=key.model,
        istio="\n".join(f"        {name}: {{exact: {value}}}" for name, value in _quoted(key.where)),
        envoy="\n".join(
            f"      - {{name: {name}, string_match: {{exact: {value}}}}}"
            for name, value in _quoted(key.where)
        ),
    )


def _is_header(condition: Predicate) -> bool:
    return condition.key.startswith(_HEADER) and condition.equals is not None


def _quoted(conditions: Sequence[Predicate]) -> list[tuple[str, str]]:
    """Return the name and the value of each header as texts of YAML: it reads those of JSON."""
    return [
        (json.dumps(condition.key.removeprefix(_HEADER)), json.dumps(condition.equals))
        for condition in conditions
    ]
