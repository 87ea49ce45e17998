"""The gate: whether a candidate is good enough on every slice, of recorded inputs or of live traffic, before it is deployed."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import CandidateCopy, Config, Model, Slice
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.signals import is_judged, is_watched
from quantdrift.core.slices import ALL
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.tasks import Task
from quantdrift.core.text import Table
from quantdrift.core.token_histogram import TokenQuantiles, counts_of, quantiles_of
from quantdrift.drift.gate import Question, decision
from quantdrift.facts.gate import Decision, Followed, Kind, LoadRun, Outcome
from quantdrift.facts.words.gate import decided, followed, junit, sentence, so_far
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.runtimes.protocol import ReferenceRuntime, digest_of
from quantdrift.models.runtimes.registry import check_mapping, opened_reference, runtime_request
from quantdrift.release.blocking import wait_for
from quantdrift.release.chosen_model import chosen_reference, model_named, rules_named, rules_of, slices_named
from quantdrift.release.gate.follow import Job, follow
from quantdrift.release.gate.found import KINDS, NONE_FOUND, FoundSlices, LearnedItems, found_slices
from quantdrift.release.gate.judge import (
    Asked,
    Observed,
    check_attributes,
    judge,
    n_questions,
    notes_of,
    observed,
    said_of,
    undeclared,
)
from quantdrift.release.gate.load import LoadBudget, measured, read_load
from quantdrift.release.gate.observations import calibration_of
from quantdrift.release.gate.offline import (
    Compared,
    ComparedModels,
    SliceRoute,
    check_task_of_labels,
    compared,
    open_candidate,
    route_slice,
    served_items,
)
from quantdrift.release.notes import add_note, alert_of
from quantdrift.release.origin import check_origin
from quantdrift.release.progress import OnProgress, Watch
from quantdrift.release.recording import layout_of, parts_of
from quantdrift.release.result import Result
from quantdrift.release.setting import File, Setting, existing
from quantdrift.shadow.replay.references import References, VersionReference
from quantdrift.storage.alerts.alerts import AlertFact, FindingKind
from quantdrift.storage.database import Database

_RATIOS: Final = {"99": 0.99, "99.9": 0.999}
_LOADED: Final = "loaded"  # the labels are those of the database, not an array
_COLOURS: Final = {
    Outcome.PASS: Verdict.OK,
    Outcome.FAIL: Verdict.FIRING,
    Outcome.INSUFFICIENT: Verdict.UNKNOWN,
}


class GateResult(Result, frozen=True, kw_only=True):
    """What the gate says of a candidate.

    Parameters
    ----------
    decision
        The verdict, with the answer to each question of each slice.
    live
        What was seen of the live traffic; None: it was judged on recorded inputs.
    """

    decision: Decision
    live: Followed | None = None

    @property
    def passed(self) -> bool:
        """Whether the candidate may replace what serves."""
        return self.decision.verdict is Outcome.PASS

    @property
    def colour(self) -> Verdict:
        """Teal where it passes, red where it fails, grey where the evidence is not enough."""
        return _COLOURS[self.decision.verdict]

    def junit(self) -> bytes:
        """Return it as JUnit XML: a test case for each question of each slice; what is insufficient is an error."""
        return junit(self.decision)

    def blocks(self) -> Sequence[str | Table]:
        """Return a table of the answers, and the verdict in a sentence."""
        return followed(self.live) if self.live else decided(self.decision)

    def to_dict(self) -> dict[str, Any]:
        """Return what the command prints with `--json`."""
        record: dict[str, Any] = msgspec.to_builtins(self.decision)
        if self.live is None:
            return record
        live: dict[str, Any] = msgspec.to_builtins(self.live)
        del live["elapsed_s"], live["decision"]
        live["exchanges"] = live.pop("seen")
        return live | record


class _Gate(msgspec.Struct, frozen=True, kw_only=True):
    """What is judged, and how: the parameters of `gate` that both ways share."""

    setting: Setting
    watch: Watch
    candidate: Path
    where: str
    routes: dict[str, Path]
    against: Path | None
    budget: LoadBudget
    run: LoadRun | None
    alert: AlertFact | None
    note: int | None
    model: str
    margin: float | None
    mlperf: str | None
    accuracy: float | None
    divergence: bool
    alpha: float
    other_weights: bool
    generate: int = 0

    @property
    def files(self) -> tuple[Path, ...]:
        """The candidate, and the files of its routes."""
        return (self.candidate, *self.routes.values())

    @property
    def routes_alone_change_answers(self) -> bool:
        """Whether what serves is the candidate itself."""
        if self.against is None or not self.routes:
            return False
        return (
            self.against.samefile(self.candidate) or self.against.read_bytes() == self.candidate.read_bytes()
        )

    def check_file(self) -> None:
        """Refuse a candidate that is a folder or at a server, which only those of language models are."""
        if not self.candidate.is_file():
            raise OperatorError(
                f"CANDIDATE {self.where} is no file: only candidates of models with the task `generation` are folders or at servers"
            )

    def check_options_of_text(self, *more: tuple[str, object]) -> None:
        """Refuse options that are not for language models."""
        for option, value in (
            ("--route", self.routes),
            ("--against", self.against),
            ("--mlperf", self.mlperf),
            ("--latency-p95, --latency-p99, --throughput and --error-share", self.budget.n),
            *more,
        ):
            if value:
                raise OperatorError(f"{option} is not for language models: leave it out")

    def check_origins(self, model: Model, number: int | None) -> None:
        """Refuse a candidate that was made from another checkpoint, before anything runs; tell which weights are faulty."""
        if self.other_weights or not model.references:
            return
        _, reference = chosen_reference(model, number)
        for file in self.files:
            remedy = " For a model that was trained further: --other-weights"
            for text in check_origin(file, reference, remedy=remedy):
                self.watch.note(text)

    def asked(self, model: Model, *, labels: str, is_against: bool) -> Asked:
        """Return what is asked of each slice, and of all inputs together."""
        if self.margin is not None and not is_against:
            raise OperatorError("--margin needs --against, the model that is serving, or --live")
        if self.mlperf is None and (labels or self.accuracy is not None):
            raise OperatorError("--labels and --reference-accuracy need --mlperf 99 or --mlperf 99.9")
        if self.mlperf is not None and bool(labels) == (self.accuracy is not None):
            raise OperatorError(
                "--mlperf needs either --labels, the array with the true classes, or without labels --reference-accuracy, a lower"
                " bound of the reference's accuracy, of which the changed answers can take away at most their share"
            )
        together = []
        if self.mlperf is not None:
            ratio = _RATIOS[self.mlperf]
            together.append(
                Question.accuracy(ratio)
                if labels
                else Question.accuracy_by_flips(ratio, self.accuracy or 0.0)
            )
        asked = Asked(slices=self._of_slices(model, is_against=is_against), all=tuple(together))
        if not self.routes_alone_change_answers:
            return asked
        harm = tuple(question for question in asked.slices if question.kind is Kind.HARM)
        return msgspec.structs.replace(asked, routed=frozenset(self.routes), unrouted=harm)

    def _of_slices(self, model: Model, *, is_against: bool) -> tuple[Question, ...]:
        """Return what is asked of each slice: of generated text by the budgets of its tokens, else about changed answers."""
        budget, is_text = model.budget, model.task is Task.GENERATION
        questions = []
        if not is_text or is_judged(Metric.FLIP, budget):
            questions.append(Question.flips(budget.flip))
            if is_against:
                questions.append(Question.harm(budget.flip / 2 if self.margin is None else self.margin))
        elif self.margin is not None:
            raise OperatorError(
                f"--margin is about changed answers, by which model `{model.name}` is not judged: models.budget.watch does not name `flip`"
            )
        if is_text and is_watched(Metric.CHANGED_TOKENS.value, budget.signals):
            questions.append(Question.changed_tokens(budget.signals[Metric.CHANGED_TOKENS.value]))
        if self.divergence or (is_text and is_judged(Metric.DIVERGENCE, budget)):
            if budget.divergence >= budget.cap:
                raise OperatorError(
                    f"model `{model.name}`: models.budget.divergence is {budget.divergence:g}, which no mean exceeds, because a divergence counts"
                    f" at most models.budget.cap ({budget.cap:g}): lower the former"
                )
            questions.append(Question.divergence(budget.divergence, budget.cap))
        if self.generate:
            questions += [
                Question.of_generated(kind, budget.signals[kind.value])
                for kind in (Kind.BROKEN, Kind.UNLIKELY)
                if is_watched(kind.value, budget.signals)
            ]
        return tuple(questions)

    def opened(self, config: Config, file: Path, what: str = "candidate") -> ReferenceRuntime:
        """Return a loaded file that is judged or compared with."""
        return open_candidate(file, what=what, provider=config.shadow.provider, threads=config.shadow.threads)

    def write_note(self, decision: Decision) -> None:
        """Write the verdict to an alert, if there is one."""
        if self.note is None:
            return
        slices = dict.fromkeys(
            answer.slice for answer in decision.slices if answer.verdict is not Outcome.PASS
        )
        details = {
            "candidate": decision.candidate,
            "verdict": decision.verdict.value,
            "slices": list(slices),
        }
        text = f"Gate: {sentence(decision)}"
        add_note(self.setting, self.watch, self.note, kind=FindingKind.GATE, text=text, details=details)


def gate(
    candidate: File,
    *,
    inputs: File | None = None,
    live: bool = False,
    config: File = "config.toml",
    data: File | None = None,
    model: str = "",
    slices: Sequence[str] = (),
    alert: int | None = None,
    routes: Mapping[str, File] | None = None,
    against: File | None = None,
    calibration: Sequence[File] = (),
    margin: float | None = None,
    mlperf: Literal["99", "99.9"] | None = None,
    labels: str = "",
    reference_accuracy: float | None = None,
    divergence: bool = False,
    latency_p95_s: float | None = None,
    latency_p99_s: float | None = None,
    throughput_per_s: float | None = None,
    error_share: float | None = None,
    loads: Mapping[str, File] | None = None,
    reference: int | None = None,
    alpha: float = 0.05,
    wait: timedelta = timedelta(days=1),
    any_hour: bool = False,
    other_weights: bool = False,
    generate: int = 0,
    note: int | None = None,
    no_note: bool = False,
    stop: Callable[[], Stop] | None = None,
    progress: OnProgress | None = None,
) -> GateResult:
    """Judge whether a candidate, an ONNX file or a language model, is good enough on every slice, before it is deployed.

    It runs the reference and the candidate on recorded inputs, or on live traffic from now on, and asks whether each slice is within the
    budget of the model. With neither, it judges finished load runs alone. The parameters are the options of `quantdrift gate`, whose help
    explains each.

    Parameters
    ----------
    inputs
        Recorded inputs: a .npz or .safetensors file, or a folder of them.
    live
        Judge on live traffic, in place of `inputs`.
    config, data
        The configuration file, and the data directory of a running `quantdrift up`, whose Postgres and NATS are used.
    slices
        Names of slice rules, or `cluster`, `novel`, `discovered`; none: every slice.
    alert
        Judge only the slice of this alert, and write the verdict to it.
    routes
        Files that serve a slice each, by its name; the candidate serves the rest.
    against
        The model that is serving: the candidate must not be worse.
    latency_p95_s, latency_p99_s, throughput_per_s, error_share
        What the candidate must keep, measured on the inputs or read from `loads`; None of them: with `loads` the budgets of the model.
    loads
        Finished load runs: that of the candidate by the name `all`, that of a route by its slice. Without `inputs` and `live` they alone
        are judged, and the candidate may be an address.
    generate
        Recorded prompts that a language model answers by itself, to be asked for broken answers and unlikely tokens.
    wait
        With `live`: longest time.
    stop
        With `live`: makes the request to end it before its time, such as `quantdrift.core.process.run.SignalStop`.
    progress
        Called with each step and share of the work.

    Raises
    ------
    OperatorError
        Something must be changed by a person; the sentence is the one that the command prints.
    RetryError
        Something is away that may come back.
    """
    is_load_alone = bool(loads) and inputs is None and not live
    if live == (inputs is not None) and not is_load_alone:
        raise OperatorError(
            "give either --inputs, recorded inputs, or --live; or --load alone, to judge a load run and nothing else"
        )
    if alert is not None and (model or slices):
        raise OperatorError("--alert gives the model and the slice: leave out --model and --slice")
    if note is not None and (no_note or alert is not None):
        raise OperatorError("--note is in place of --alert, which writes a note itself, and of --no-note")
    setting, watch = Setting.of(config, data), Watch(progress)
    is_server = "://" in os.fspath(candidate)
    file = Path(candidate) if is_server else existing(candidate, "CANDIDATE")
    files = {name: existing(path, f"--route {name}") for name, path in (routes or {}).items()}
    budget = LoadBudget(
        latency_p95_s=latency_p95_s,
        latency_p99_s=latency_p99_s,
        throughput_per_s=throughput_per_s,
        error_share=error_share,
    )
    about = alert if note is None else note
    fact = None if about is None else alert_of(setting, about)
    if fact is not None and model not in ("", fact.model):
        raise OperatorError(f"alert {fact.id} is about model `{fact.model}`, and not about `{model}`")
    served = {ALL: os.fspath(candidate), **{name: str(path) for name, path in files.items()}}
    if loads and not budget.n:
        budget = LoadBudget.of_model(model_named(setting.config(), fact.model if fact else model).budget)
    run = _load_run(loads or {}, budget, served, live=live)
    job = _Gate(
        setting=setting,
        watch=watch,
        candidate=file,
        where=os.fspath(candidate),
        routes=files,
        against=None if against is None else existing(against, "--against"),
        budget=budget,
        run=run,
        alert=None if alert is None else fact,
        note=None if no_note or fact is None else fact.id,
        model=fact.model if fact else model,
        margin=margin,
        mlperf=mlperf,
        accuracy=reference_accuracy,
        divergence=divergence,
        alpha=alpha,
        other_weights=other_weights,
        generate=generate,
    )
    if is_load_alone:
        _refuse(
            "needs --inputs or --live: --load alone judges the load run",
            ("--slice", slices),
            ("--alert", alert),
            ("--against", against),
            ("--calibration", calibration),
            ("--margin", margin),
            ("--mlperf", mlperf),
            ("--labels", labels),
            ("--reference-accuracy", reference_accuracy),
            ("--divergence", divergence),
            ("--reference", reference),
            ("--generate", generate),
        )
        return _load_alone(job)
    if inputs is not None:
        calibrated = [Path(path) for path in calibration]
        return _recorded(
            job,
            existing(inputs, "--inputs"),
            chosen=slices,
            calibration=calibrated,
            labels=labels,
            number=reference,
        )
    other = None if job.routes_alone_change_answers else against
    _refuse(
        "is for --inputs: live traffic is judged on all watched slices, against what serves",
        ("--against", other),
        ("--slice", slices),
        ("--reference", reference),
        ("--calibration", calibration),
        ("--generate", generate),
    )
    if labels:
        raise OperatorError(
            "--labels is for --inputs: true classes come later than the traffic. Leave it out, and load them with `quantdrift labels"
            " load` while the gate runs; or give --reference-accuracy, a lower bound of the reference's accuracy"
        )
    return wait_for(_live(job, wait, stop or Stop, every_hour=not any_hour))


def _refuse(why: str, *options: tuple[str, object]) -> None:
    """Refuse options that were given and have no meaning."""
    for option, value in options:
        if value:
            raise OperatorError(f"{option} {why}")


async def _live(job: _Gate, wait: timedelta, stop: Callable[[], Stop], *, every_hour: bool) -> GateResult:
    """Judge a candidate on live traffic."""
    setting, watch = job.setting, job.watch
    config = setting.config()
    secrets = setting.secrets(config)
    config = setting.with_stream(config, NatsRole.SHADOW)
    model = model_named(config, job.model)
    if model.task is Task.GENERATION:
        job.check_options_of_text()
    else:
        job.check_file()
        if len(model.references) == 1:
            job.check_origins(model, None)
    labels = _LOADED if job.mlperf is not None and job.accuracy is None else ""
    asked = job.asked(model, labels=labels, is_against=True)
    if labels:
        check_task_of_labels(model)
    judged = Job(
        config=config,
        model=model,
        only=job.alert.slice if job.alert else "",
        run=job.run,
        references=References(
            [_without_copies(model)], lambda of, reference: opened_reference(config, of, reference)
        ),
        candidate=_opened_text(job, config, model)
        if model.task is Task.GENERATION
        else job.opened(config, job.candidate),
        routes=tuple((name, job.opened(config, file)) for name, file in job.routes.items()),
        asked=asked,
        every_hour=every_hour,
        alpha=job.alpha,
        wait=wait,
    )
    async with Database(secrets.dsn) as database:
        queue = await Queue.connect(config.stream, client_name="gate", role=NatsRole.SHADOW)
        try:
            watch.step(f"waiting for exchanges of model {model.name}")
            live = await follow(
                judged,
                database=database,
                queue=queue,
                clock=SystemClock(),
                look=lambda now: watch.step(so_far(now)),
                stop=stop(),
            )
        finally:
            await queue.close()
    if not live.interrupted:
        job.write_note(live.decision)
    return GateResult(decision=live.decision, live=live, notes=tuple(watch.notes))


def _load_alone(job: _Gate) -> GateResult:
    """Judge the load runs of a candidate and its routes, and nothing else."""
    model = model_named(job.setting.config(), job.model)
    digests = [f"sha256:{digest_of(job.candidate)}" if job.candidate.is_file() else job.where]
    digests += [f"{name}=sha256:{digest_of(file)}" for name, file in job.routes.items()]
    decided = msgspec.structs.replace(
        decision((), model=model.name, candidate=" ".join(digests), at=datetime.now(UTC), run=job.run),
        not_judged=("the answers of every slice: neither --inputs nor --live was given",),
    )
    job.write_note(decided)
    return GateResult(decision=decided, notes=tuple(job.watch.notes))


def _without_copies(model: Model) -> Model:
    """Return a model whose references have no copy of the candidate that serves: the one that is judged takes its place."""
    references = tuple(
        msgspec.structs.replace(reference, copy=CandidateCopy()) for reference in model.references
    )
    return msgspec.structs.replace(model, references=references)


def _opened_text(job: _Gate, config: Config, model: Model) -> ReferenceRuntime:
    """Return a language model that is judged, loaded; what it needs besides its address is that of the first reference."""
    from quantdrift.release.gate.prompts import (  # noqa: PLC0415 - the comparator of generated text, for these models alone
        open_language_candidate,
    )

    if not model.references:
        raise OperatorError(
            f"model `{model.name}` has no [[models.references]]: there is nothing to compare with"
        )
    return open_language_candidate(runtime_request(config, model, model.references[0]), job.where)


def _recorded(
    job: _Gate,
    inputs: Path,
    *,
    chosen: Sequence[str],
    calibration: Sequence[Path],
    labels: str,
    number: int | None,
) -> GateResult:
    """Judge a candidate on recorded inputs."""
    watch = job.watch
    config = job.setting.config()
    model = model_named(config, job.model)
    asked = job.asked(model, labels=labels, is_against=job.against is not None)
    rules, kinds = _judged_slices(config, model, job.alert, chosen)
    if model.task is Task.GENERATION:
        job.check_options_of_text(("--calibration", calibration), (f"--slice {next(iter(kinds), '')}", kinds))
        return _prompts(job, config, model, asked, inputs=inputs, rules=rules, number=number)
    if job.generate:
        raise OperatorError("--generate is for language models: leave it out")
    job.check_file()
    job.check_origins(model, number)
    sides = _sides(job, config, model, rules, number)
    try:
        learned = _found_slices(job, config, model, sides, rules=rules, chosen=chosen, kinds=kinds)
        parts = _compared(
            watch, config, model, sides, inputs=inputs, rules=rules, learned=learned, labels=labels
        )
        check_attributes(inputs, rules, parts)
        learned = learned.told_by({key for part in parts for key in part.items.attributes})
        items = observed(
            msgspec.structs.replace(config, slices=tuple(rules)),
            model.name,
            parts,
            learned,
            calibration=calibration_of(calibration, job.files, sides.inputs),
        )
        if job.alert:
            items = _of_alert(items, job.alert, inputs, learned.left_out)
        for note in (*notes_of(rules, parts), *said_of(items)):
            watch.note(f"--inputs {inputs}: {note}")
        run, beside = job.run, 0 if job.run else job.budget.n * (1 + len(job.routes))
        if beside:
            fail_level = job.alpha / (n_questions(asked, items) + beside)
            run = _measured(job, model, sides, parts, fail_level)
    finally:
        sides.close()
    decision = msgspec.structs.replace(
        judge(
            asked,
            items,
            model=model.name,
            candidate=sides.digest,
            at=datetime.now(UTC),
            alpha=job.alpha,
            run=run,
            beside=beside,
        ),
        not_judged=learned.left_out,
    )
    job.write_note(decision)
    return GateResult(decision=decision, notes=tuple(watch.notes))


def _prompts(
    job: _Gate,
    config: Config,
    model: Model,
    asked: Asked,
    *,
    inputs: Path,
    rules: Sequence[Slice],
    number: int | None,
) -> GateResult:
    """Judge a candidate of a language model on recorded prompts."""
    from quantdrift.release.gate.prompts import (  # noqa: PLC0415 - the comparator of generated text, for these models alone
        SUFFIXES,
        chosen_prompts,
        compared_prompts,
        generated_answers,
        open_language_candidate,
        read_prompts,
        with_answers,
    )

    watch = job.watch
    if not model.references:
        raise OperatorError(
            f"model `{model.name}` has no [[models.references]]: there is nothing to compare with"
        )
    _, reference = chosen_reference(model, number)
    parts = parts_of(inputs, suffixes=SUFFIXES)
    layout = layout_of(config, rules, ["prompt"])
    recorded = [read_prompts(part, layout) for part in parts]
    watch.step("loading the reference and the candidate")
    candidate = open_language_candidate(runtime_request(config, model, reference), job.where)
    try:
        if n_own := sum(sum(each.own) for each in recorded):
            answered = watch.counted("the candidate answers prompts without an answer", n_own)
            recorded = [with_answers(each, candidate, model, answered) for each in recorded]
        runtime = opened_reference(
            config, model, msgspec.structs.replace(reference, copy=CandidateCopy())
        )  # the candidate takes the place of a replica
        try:
            progress = watch.counted("scoring answers", sum(len(each.requests) for each in recorded))
            found = [
                compared_prompts(
                    each,
                    model=model,
                    reference=runtime,
                    candidate=candidate,
                    comparator=comparator_of(model),
                    rules=rules,
                    progress=progress,
                )
                for each in recorded
            ]
            files = [each.compared for each in found]
            n_chosen = 0
            if job.generate:
                rows = chosen_prompts(recorded, job.generate)
                n_chosen = sum(map(len, rows))
                progress = watch.counted("the candidate generates answers", n_chosen)
                files = [
                    generated_answers(
                        each,
                        of_file,
                        compared,
                        model=model,
                        reference=runtime,
                        candidate=candidate,
                        comparator=comparator_of(model),
                        progress=progress,
                    )
                    for each, of_file, compared in zip(recorded, rows, files, strict=True)
                ]
        finally:
            runtime.close()
    finally:
        candidate.close()
    check_attributes(inputs, rules, files)
    items = observed(msgspec.structs.replace(config, slices=tuple(rules)), model.name, files)
    if job.alert:
        items = _of_alert(items, job.alert, inputs, ())
    for note in (*undeclared(rules, files), *said_of(items)):
        watch.note(f"--inputs {inputs}: {note}")
    if unknown := int(np.isnan(items.flip).sum()):
        watch.note(
            f"--inputs {inputs}: of {unknown:,} answers it is not known whether they are changed, because the most likely tokens of one of the"
            " models are not known at too many positions, or the answer has no token: these positions count in the divergence alone, if at all"
        )
    if items.broken is not None and (n_open := n_chosen - int((~np.isnan(items.broken)).sum())):
        watch.note(
            f"--generate {job.generate}: of {n_open:,} answers it is not known whether they are broken, because a folder has no grammar and not all penalties,"
            " models.generation.own_tokens cut them, or an empty answer was drawn"
        )
    n_tokens = np.concatenate([each.n_tokens for each in found])
    decision = judge(
        asked,
        items,
        model=model.name,
        candidate=candidate.artefact.digest,
        at=datetime.now(UTC),
        alpha=job.alpha,
    )
    decision = msgspec.structs.replace(
        decision,
        tokens={name: int(n_tokens[members].sum()) for name, members in items.members.items()},
        divergence_of_tokens=_of_tokens([bins for each in found for bins in each.bins], items),
        not_judged=("learned and discovered slices: recorded prompts do not tell them",),
    )
    job.write_note(decision)
    return GateResult(decision=decision, notes=tuple(watch.notes))


def _of_tokens(bins: Sequence[str], items: Observed) -> dict[str, TokenQuantiles]:
    """Return the quantiles of the divergence over all tokens of each slice."""
    found = {}
    for name, members in items.members.items():
        pooled: Counter[int] = Counter()
        for row in members.tolist():
            pooled.update(counts_of(bins[row]))
        quantiles = quantiles_of(pooled, pooled.total())
        if quantiles is not None:
            found[name] = quantiles
    return found


def _load_run(
    loads: Mapping[str, File], budget: LoadBudget, models: Mapping[str, str], *, live: bool
) -> LoadRun | None:
    """Return the finished load runs of a candidate and its routes, or None where there is none."""
    if not loads:
        if live and budget.n:
            raise OperatorError(
                "--latency-p95, --latency-p99 and --throughput need --load with --live: measure the candidate where it will serve, and give the file"
            )
        if budget.error_share is not None:
            raise OperatorError("--error-share needs --load: a file that is run here makes no errors")
        return None
    if not budget.n:
        raise OperatorError(
            "--load needs a budget: --latency-p95, --latency-p99, --throughput or --error-share, or models.budget.latency_p95_s, latency_p99_s,"
            " throughput_per_s or error_share"
        )
    for of, load in loads.items():
        if of not in models:
            raise OperatorError(
                f"--load {of}={load}: there is no --route {of}=FILE whose load run this could be"
            )
    if absent := [of for of in models if of not in loads]:
        option = "--load FILE" if absent[0] == ALL else f"--load {absent[0]}=FILE"
        raise OperatorError(
            f"the load run of {models[absent[0]]} is missing, and every file must keep the budget: give {option}, too"
        )
    return LoadRun.joined(
        [read_load(Path(loads[of]), budget, file=model, of=of) for of, model in models.items()]
    )


def _measured(
    job: _Gate, model: Model, sides: ComparedModels, parts: Sequence[Compared], fail_level: float
) -> LoadRun:
    """Return the speed of the candidate, and of each route, on the recorded inputs that it serves."""
    runtimes = [(ALL, sides.candidate), *((route.slice.name, route.runtime) for route in sides.routes)]
    runs = []
    for (of, runtime), items in zip(runtimes, served_items(sides, parts), strict=True):
        job.watch.step(f"measuring the latency of {runtime.artefact.path}, one request after the other")
        runs.append(
            measured(
                runtime,
                [part.items.inputs for part in parts],
                job.budget,
                items=items,
                of=of,
                batched=model.batched,
                pass_level=job.alpha,
                fail_level=fail_level,
            )
        )
    return LoadRun.joined(runs)


def _judged_slices(
    config: Config, model: Model, alert: AlertFact | None, chosen: Sequence[str]
) -> tuple[list[Slice], tuple[str, ...]]:
    """Return the slice rules that are judged, and the kinds of learned and discovered slices that `--slice` names.

    No kind: all of them without `--slice`, else none.
    """
    if alert:
        return _rules_of_alert(config, model, alert), ()
    rules = {rule.name for rule in rules_of(config, model)}
    kinds = tuple(kind for kind in KINDS if kind in chosen and kind not in rules)
    named = [name for name in chosen if name not in kinds]
    return rules_named(config, model, named or ([ALL] if kinds else ()), kinds=KINDS), kinds


def _rules_of_alert(config: Config, model: Model, alert: AlertFact) -> list[Slice]:
    """Return the slice rules that make the slice of an alert; none where it is all inputs, learned or discovered."""
    if alert.slice == ALL:
        return []
    rules = rules_of(config, model)
    for rule in rules:
        needed = [other for other in rules if other is rule or other.name in rule.cross]
        if any(key.name == alert.slice for key in slices_named(config, model, needed, alert.slice)):
            return needed
    return []


def _found_slices(
    job: _Gate,
    config: Config,
    model: Model,
    sides: ComparedModels,
    *,
    rules: Sequence[Slice],
    chosen: Sequence[str],
    kinds: Sequence[str],
) -> FoundSlices:
    """Return the learned and discovered slices that are judged, of which the database knows.

    Where nobody has asked for one by name, a database that does not answer is a reason to leave them out, and to say so.
    """
    alert = job.alert
    if (alert and (rules or alert.slice == ALL)) or (chosen and not kinds):
        return NONE_FOUND

    async def read() -> FoundSlices:
        async with Database(job.setting.secrets(config).dsn) as database:
            return await found_slices(database, config, model, sides.reference.runtime.artefact.digest)

    try:
        learned = wait_for(read())
    except (OperatorError, RetryError) as error:
        if alert or kinds:
            raise
        return FoundSlices(
            left_out=(
                f"learned and discovered slices: the database, which knows them, cannot be read: {error}",
            )
        )
    if alert:
        return _found_of_alert(learned, alert)
    if absent := [kind for kind in kinds if not learned.only([kind]).keys]:
        reasons = "; ".join(learned.left_out) or "none had traffic within the last day"
        raise OperatorError(f"--slice {absent[0]}: there is no such slice to judge ({reasons})")
    return learned.only(kinds) if kinds else learned.without_novel()


def _found_of_alert(learned: FoundSlices, alert: AlertFact) -> FoundSlices:
    """Return the learned or discovered slice of an alert alone."""
    if all(key.name != alert.slice for key in learned.keys):
        raise OperatorError(
            f"alert {alert.id} is about the slice `{alert.slice}`, which no rule of [[slices]] makes, and which is neither a discovered slice nor"
            " one of the newest clustering with traffic within the last day. Leave --alert out to judge the other slices"
        )
    return msgspec.structs.replace(
        learned,
        learned=tuple(key for key in learned.learned if key.name == alert.slice),
        discovered=tuple(key for key in learned.discovered if key.name == alert.slice),
        left_out=(),
    )


def _of_alert(items: Observed, alert: AlertFact, inputs: Path, left_out: Sequence[str]) -> Observed:
    """Return the items with the slice of an alert, and with all inputs, as the only slices."""
    if alert.slice not in items.members:
        why = f" ({'; '.join(left_out)})" if left_out else ""
        raise OperatorError(
            f"--inputs {inputs}: no item is in the slice `{alert.slice}` of alert {alert.id}{why}: record inputs of this slice"
        )
    kept = {name: members for name, members in items.members.items() if name in {ALL, alert.slice}}
    return msgspec.structs.replace(items, members=kept)


def _sides(
    job: _Gate, config: Config, model: Model, rules: Sequence[Slice], number: int | None
) -> ComparedModels:
    """Return the models that are compared, loaded."""
    named = [
        (route_slice(slices_named(config, model, rules, name), name), file)
        for name, file in job.routes.items()
    ]
    if not model.references:
        raise OperatorError(
            f"model `{model.name}` has no [[models.references]]: there is nothing to compare with"
        )
    _, reference = chosen_reference(model, number)
    runtime, comparator = opened_reference(config, model, reference), comparator_of(model)
    check_mapping(model, reference, runtime, comparator.outputs)
    served = None if job.against is None else job.opened(config, job.against, "served model")
    return ComparedModels(
        reference=VersionReference(model=model, runtime=runtime, comparator=comparator, reference=reference),
        candidate=job.opened(config, job.candidate),
        served=served,
        routes=tuple(SliceRoute(slice=key, runtime=job.opened(config, file)) for key, file in named),
    )


def _compared(
    watch: Watch,
    config: Config,
    model: Model,
    sides: ComparedModels,
    *,
    inputs: Path,
    rules: Sequence[Slice],
    learned: FoundSlices,
    labels: str,
) -> list[Compared]:
    """Return what was compared, file by file."""
    parts = parts_of(inputs)
    layout = layout_of(config, rules, sides.inputs, labels, learned.attributes)
    layout = msgspec.structs.replace(layout, takers=sides.takers)
    if learned.keys:  # their conditions, and the space of a clustering, may be of any feature
        rules = [*rules, *(rule for rule in rules_of(config, model) if rule not in rules and rule.feature)]
    return list(
        compared(
            sides,
            parts,
            layout,
            rules,
            LearnedItems(config, model, learned, sides.reference.runtime.artefact.digest),
            step=config.shadow.batch_items,
            progress=watch.counted("comparing", sum(part.n_bytes for part in parts)),
        )
    )
