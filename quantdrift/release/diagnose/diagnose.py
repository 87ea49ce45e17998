"""The diagnosis: which quantised sites of a candidate damage a slice."""

import hashlib
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from quantdrift.core.config.schema import Model, Reference, Runtime
from quantdrift.core.diagnosable import reference_problem
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Exchange, ExemplarKind, Verdict
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.tasks import Task
from quantdrift.core.text import Table, plain
from quantdrift.facts.diagnosis import Diagnosis, DiagnosisVerdict
from quantdrift.facts.language_diagnosis import LanguageDiagnosis
from quantdrift.facts.words.diagnosis import cause_of, details_of, diagnosed, sentence_of
from quantdrift.facts.words.language_diagnosis import (
    language_details,
    language_diagnosed,
    language_sentence,
)
from quantdrift.release.blocking import wait_for
from quantdrift.release.diagnose.blame import diagnose as search
from quantdrift.release.diagnose.copies import Copy
from quantdrift.release.diagnose.damaged import Damaged, damaged
from quantdrift.release.diagnose.exemplars import opener, waiting
from quantdrift.release.diagnose.samples import (
    Samples,
    check_served,
    comparison,
    of_exemplars,
    of_waiting,
    recorded,
)
from quantdrift.release.notes import add_note
from quantdrift.release.progress import OnProgress, Watch
from quantdrift.release.recording import layout_of, parts_of
from quantdrift.release.result import Result
from quantdrift.release.setting import File, Setting, existing
from quantdrift.release.trees import copy_of_onnx
from quantdrift.storage.alerts.alerts import FindingKind

SWITCHING: Final = "switching sites"
_PICTURES: Final = (".svg", ".png")
_CLIENT: Final = "quantdrift diagnose"
_COLOURS: Final = {
    DiagnosisVerdict.NAMED: Verdict.FIRING,
    DiagnosisVerdict.NOBODY: Verdict.WARNING,
    DiagnosisVerdict.TOO_FEW: Verdict.UNKNOWN,
}
_FACTORY: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PACKAGE: Final = "quantdrift.release.diagnose.pytorch"


class DiagnoseResult(Result, frozen=True, kw_only=True):
    """Which sites of a candidate damage a slice.

    Parameters
    ----------
    alert
        The number of the alert; None: there is none.
    candidate
        Digest of the candidate: `sha256:...`.
    inputs
        The recorded inputs; empty: exemplars, or what waited in the stream.
    n_chosen
        Inputs that are kept because they are damaged; they count in no share.
    picture
        The file of the picture; empty: none was asked for.
    """

    model: str
    slice: str
    alert: int | None
    candidate: str
    inputs: str
    n_chosen: int
    diagnosis: Diagnosis | LanguageDiagnosis
    picture: str = ""

    @property
    def colour(self) -> Verdict:
        """Red where a cause is named, amber where there is none, grey where there are too few inputs."""
        return _COLOURS[self.diagnosis.verdict]

    def blocks(self) -> Sequence[str | Table]:
        """Return the inputs, the damage, its cause, and what to do."""
        n = self.diagnosis.n_items
        if isinstance(self.diagnosis, LanguageDiagnosis):
            source = self.inputs or "exemplars"
            head = f"Answers: {n:,} of {plain(self.slice)} in {source}."
            return [head, *language_diagnosed(self.diagnosis, model=self.model, slice_name=self.slice)]
        inputs = (
            f"Inputs: {n:,} of {plain(self.slice)} in {self.inputs}."
            if self.inputs
            else f"Inputs: {n} that nobody has chosen, and {self.n_chosen} that are kept because they are damaged; these count in no share."
        )
        lines = [inputs, *diagnosed(self.diagnosis, model=self.model, slice_name=self.slice)]
        if self.picture:
            lines.append(
                f"Picture: {self.picture}"
                if self.diagnosis.one_off
                else "No picture was written: no site was tried."
            )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return what the command prints with `--json`."""
        return {
            "alert": self.alert,
            "model": self.model,
            "slice": self.slice,
            "candidate": self.candidate,
            **msgspec.to_builtins(self.diagnosis),
        }


def diagnose(
    alert: int | None = None,
    *,
    candidate: File,
    inputs: File | None = None,
    config: File = "config.toml",
    data: File | None = None,
    model: str = "",
    slice: str = "",  # noqa: A002 -- the word of the product
    factory: str = "",
    digest: str = "",
    reference: int | None = None,
    picture: File | None = None,
    seed: int = 1,
    no_note: bool = False,
    progress: OnProgress | None = None,
) -> DiagnoseResult:
    """Name the quantised sites of a candidate that damage a slice: that of an alert, or `slice`.

    Each site is put into FP32 alone and with others, on inputs of the slice; a site is named only if it restores more than 39 placebos do, on
    inputs on which it was not chosen. A healthy candidate is accused in at most 5 % of diagnoses. The result becomes a note of the alert. The
    parameters are the options of `quantdrift diagnose`, whose help explains each.

    Parameters
    ----------
    alert
        The number of the alert.
    candidate
        The quantised model that serves: an ONNX file (QDQ, weights in blocks, dynamic INT8, FP16, BF16, decision trees), an exported program, or with `factory` a file of weights.
    inputs
        Recorded inputs: a .npz or .safetensors file, or a folder of them; None: the exemplars of the slice, or what waits in the stream.
    config, data
        The configuration file, and the data directory of a running `quantdrift up`, whose Postgres and NATS are used.
    picture
        Write a picture of the sites and ranges: a .svg or .png file.
    progress
        Called with each step and share of the work.

    Raises
    ------
    OperatorError
        Something must be changed by a person; the sentence is the one that the command prints.
    RetryError
        Something is away that may come back.
    """
    file = existing(candidate, "--candidate")
    target = None if picture is None else Path(picture)
    if target is not None and target.suffix not in _PICTURES:
        raise OperatorError(f"--picture {target}: pictures are .svg or .png files")
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
    if case.model.task is Task.GENERATION:
        if factory or digest or target is not None:
            raise OperatorError(
                "--factory, --digest and --picture are not for language models: leave them out"
            )
        return _of_language(case, file, inputs, alert=alert, seed=seed, is_noted=not no_note)
    copy = open_copy(
        case.model, case.reference, file, factory=factory, digest=digest, threads=case.config.shadow.threads
    )
    compare = comparison(case.model, copy)
    if inputs is None:
        samples = _kept(case, copy)
        check_served(samples, copy, compare)
    else:
        samples = _recorded(case, copy, existing(inputs, "--inputs"))
    diagnosis = search(
        copy,
        compare,
        samples.inside,
        elsewhere=samples.elsewhere,
        damaged=samples.damaged,
        budget=case.model.budget.flip,
        seed=seed,
        progress=watch.shares(SWITCHING),
    )
    if target is not None and diagnosis.one_off:
        from quantdrift.release.diagnose.picture import write  # noqa: PLC0415 - Matplotlib takes a second

        write(diagnosis, target, title=f"{case.model.name}, {case.slice.name}: {cause_of(diagnosis)}")
    served = f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    if alert is not None and not no_note and diagnosis.verdict is not DiagnosisVerdict.TOO_FEW:
        text, details = sentence_of(diagnosis), details_of(diagnosis, served)
        add_note(case.setting, watch, alert, kind=FindingKind.CAUSE, text=text, details=details)
    return DiagnoseResult(
        model=case.model.name,
        slice=case.slice.name,
        alert=alert,
        candidate=served,
        inputs="" if inputs is None else str(inputs),
        n_chosen=len(next(iter(samples.damaged.values()))) if samples.damaged else 0,
        diagnosis=diagnosis,
        picture="" if target is None else str(target),
        notes=tuple(watch.notes),
    )


def _of_language(
    case: Damaged, folder: Path, inputs: File | None, *, alert: int | None, seed: int, is_noted: bool
) -> DiagnoseResult:
    """Return which layers of a language model's candidate damage a slice."""
    try:
        from quantdrift.release.diagnose.language import diagnose as language  # noqa: PLC0415 - PyTorch and transformers, for these models alone
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise OperatorError(
            "a candidate of a language model needs the extra `text` here: pip install 'quantdrift[text]'"
        ) from error

    watch = case.watch
    watch.step("loading the reference and the candidate")
    pair = language.LanguagePair(case, folder)
    try:
        texts = (
            language.exemplar_texts(case)
            if inputs is None
            else language.recorded_texts(case, pair, existing(inputs, "--inputs"))
        )
        watch.step("scoring answers")
        diagnosis = language.diagnosed_language(pair, texts, seed=seed, progress=watch.shares(SWITCHING))
    finally:
        pair.close()
    if alert is not None and is_noted and diagnosis.verdict is not DiagnosisVerdict.TOO_FEW:
        details = language_details(diagnosis, pair.digest)
        add_note(
            case.setting,
            watch,
            alert,
            kind=FindingKind.CAUSE,
            text=language_sentence(diagnosis),
            details=details,
        )
    return DiagnoseResult(
        model=case.model.name,
        slice=case.slice.name,
        alert=alert,
        candidate=pair.digest,
        inputs="" if inputs is None else str(inputs),
        n_chosen=0,
        diagnosis=diagnosis,
        notes=tuple(watch.notes),
    )


def _kept(case: Damaged, copy: Copy) -> Samples:
    """Return the exemplars of the slice, and random ones of its neighbours; without any, what waits in the stream."""
    rule = case.slice.name.partition("=")[0]
    case.watch.step(f"reading exemplars of {case.slice.name}")
    inside, others, version = case.exemplars(
        client_name=_CLIENT, is_wanted=lambda name: name.startswith(f"{rule}=")
    )
    if any(exemplar.kind is ExemplarKind.RANDOM for exemplar in inside):
        case.watch.step(f"{len(inside)} exemplars of {version}")
        case.note_unreadable()
        return of_exemplars(inside, others, copy)
    case.watch.step("reading what waits in the stream")
    exchanges = wait_for(_waiting(case))
    if case.version:
        exchanges = [exchange for exchange in exchanges if exchange.stored_version == case.version]
    case.note_unreadable()
    return of_waiting(exchanges, case.slice, copy)


async def _waiting(case: Damaged) -> list[Exchange]:
    config = case.setting.with_stream(case.config, NatsRole.ADMIN)
    queue = await Queue.connect(config.stream, client_name=_CLIENT, role=NatsRole.ADMIN)
    try:
        exchanges = waiting(
            queue, case.model.name, opened=opener(config.stream), unreadable=case.problems.append
        )
        return [exchange async for exchange in exchanges]
    finally:
        await queue.close()


def _recorded(case: Damaged, copy: Copy, inputs: Path) -> Samples:
    """Return the recorded items of the slice, and others."""
    parts = parts_of(inputs)
    layout = layout_of(case.config, case.rules, copy.inputs)
    progress = case.watch.counted("reading inputs", sum(part.n_bytes for part in parts))
    return recorded(parts, layout, case.rules, case.slice, progress=progress)


def open_copy(
    model: Model, reference: Reference, candidate: Path, *, factory: str, digest: str, threads: int
) -> Copy:
    """Return the copy of a candidate in which each site can be switched to FP32.

    Parameters
    ----------
    model, reference
        The model, and its reference.
    candidate
        The file of the candidate.
    factory
        `package.module:function` of a candidate in PyTorch; empty: it has none.
    digest
        `sha256:...` of a candidate that is an exported program; else empty.
    threads
        CPU threads, 0 for one per core.

    Raises
    ------
    OperatorError
        Candidate and reference are not of one kind, a file cannot be read, or no site can be named.
    """
    if factory and not _FACTORY.fullmatch(factory):
        raise OperatorError(f"--factory {factory}: it must be `package.module:function`")
    if reference.runtime is Runtime.ONNX:
        if factory or digest:
            raise OperatorError(
                f"--factory and --digest are of candidates in PyTorch, and the reference of model `{model.name}` is an ONNX file: give the"
                " reference in PyTorch, too"
            )
        return copy_of_onnx(candidate, Path(reference.path), threads=threads, columns=model.columns)
    if problem := reference_problem(model, reference):
        raise OperatorError(problem)
    if factory:
        copy: Copy = _imported("modules").copy_of_modules(model, reference, candidate, factory, threads)
    elif candidate.suffix == ".pt2":
        copy = _imported("program").copy_of_program(model, reference, candidate, digest, threads)
    else:
        raise OperatorError(
            f"the reference of model `{model.name}` is in PyTorch, and the candidate {candidate} is no exported program (.pt2): give the"
            " function that makes the candidate of this file with --factory package.module:function"
        )
    return copy


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise OperatorError("a candidate in PyTorch needs PyTorch here: pip install torch") from error
