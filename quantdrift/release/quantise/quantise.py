"""The search for a quantised model that every slice accepts: the cheapest one that the gate passes, built from the reference."""

import hashlib
import math
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from quantdrift.core.config.schema import Config, Model, Reference
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Verdict
from quantdrift.core.tasks import Task
from quantdrift.core.text import Table
from quantdrift.drift.gate import ALPHA, Question, trials
from quantdrift.facts.gate import Outcome
from quantdrift.facts.quantised import CostKind, Quantised
from quantdrift.facts.words.quantised import name_of, quantised
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.runtimes.registry import check_mapping, opened_reference
from quantdrift.release.chosen_model import chosen_reference, model_named, rules_named
from quantdrift.release.diagnose.samples import not_computed
from quantdrift.release.gate.judge import Observed, check_attributes, observed, said_of, undeclared
from quantdrift.release.gate.observations import QUANTISED, digests_of
from quantdrift.release.gate.offline import Compared, ComparedModels, check_inputs, open_candidate
from quantdrift.release.progress import OnProgress, Watch
from quantdrift.release.quantise.recipes import Quantiser
from quantdrift.release.quantise.search import Search, calibration_feeds, part_of_files, split
from quantdrift.release.recording import layout_of, parts_of, read
from quantdrift.release.result import Result
from quantdrift.release.setting import File, Setting, existing
from quantdrift.release.sites import fixed_rows, session_of
from quantdrift.shadow.replay.references import VersionReference

_FORMAT: Final = 1
_ROWS: Final = 32  # items of one run, where the graph takes any number
_ONNX: Final = ".onnx"
MOST_RECIPES: Final = 80
LONGEST_MINUTES: Final = 30.0
NAME: Final = "quantised.onnx"


class QuantiseResult(Result, frozen=True, kw_only=True):
    """The quantised models that were tried for a reference, and the cheapest one that passes on every slice.

    Parameters
    ----------
    quantised
        What was tried, measured and judged.
    record
        What the folder's `quantised.json` has.
    """

    quantised: Quantised
    record: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether a quantised model passes on every slice."""
        return self.quantised.verdict is Outcome.PASS

    @property
    def file(self) -> Path | None:
        """The file that was written: of the cheapest that passes, or of the one to judge with more inputs."""
        return Path(self.quantised.file) if self.quantised.file else None

    @property
    def colour(self) -> Verdict:
        """Teal where one passes, red where none does, grey where the evidence is not enough."""
        return {
            Outcome.PASS: Verdict.OK,
            Outcome.FAIL: Verdict.FIRING,
            Outcome.INSUFFICIENT: Verdict.UNKNOWN,
        }[self.quantised.verdict]

    def blocks(self) -> Sequence[str | Table]:
        """Return what was tried, a table of the curve of cost and changed answers, and what to do next."""
        return quantised(self.quantised)

    def to_dict(self) -> dict[str, Any]:
        """Return what the command prints with `--json`."""
        return self.record


def quantise(
    file: File | None = None,
    *,
    inputs: File,
    out: File,
    config: File = "config.toml",
    model: str = "",
    slices: Sequence[str] = (),
    prefer: Literal["size", "time"] = "size",
    max_recipes: int = MOST_RECIPES,
    minutes: float = LONGEST_MINUTES,
    reference: int | None = None,
    picture: File | None = None,
    alpha: float = ALPHA,
    seed: int = 1,
    progress: OnProgress | None = None,
) -> QuantiseResult:
    """Search the cheapest quantised model of a reference that the gate passes on every slice, and write it.

    One half of the inputs calibrates and chooses; the other, which chooses nothing, judges as the gate does. The parameters are the options of
    `quantdrift quantise`, whose help explains each.

    Parameters
    ----------
    file
        The ONNX file in FP32 that is quantised; None: the reference of the configuration.
    inputs
        Recorded inputs of all traffic: a .npz or .safetensors file, or a folder of them.
    out
        A new folder for the model and the record.
    config
        The configuration file.
    slices
        Names of slice rules; none: every slice of the configuration.
    prefer
        What makes one model cheaper: the size of the file, or the processor time of an answer.
    max_recipes, minutes
        Recipes to try, at most, and the time for it.
    reference
        Number of the reference of the model that says what is right, from 1.
    picture
        A .svg or .png file for a picture of the curve; None: no picture.
    alpha
        Probability that the result is not good enough on some slice, at most.
    progress
        Called with each step and share of the work.

    Raises
    ------
    OperatorError
        Something must be changed by a person; the sentence is the one that the command prints.
    RetryError
        The reference is at a server that is unreachable.
    """
    setting, watch, folder = Setting.of(config, None), Watch(progress), Path(out)
    options = setting.config()
    chosen = model_named(options, model)
    if chosen.task is Task.GENERATION:
        raise OperatorError(
            f"model `{chosen.name}` has the task `generation`: quantise language models with another tool, and judge the result with"
            " `quantdrift gate`"
        )
    if folder.exists() and any(folder.iterdir()):
        raise OperatorError(f"--out {folder} is not empty, and nothing is overwritten: name a new folder")
    if picture is not None:
        from quantdrift.release.drawing import check_format  # noqa: PLC0415 - Matplotlib only where it draws

        check_format(Path(picture))
    source = existing(inputs, "--inputs")
    right, fp32 = _files(chosen, file, reference)
    rules = rules_named(options, chosen, slices)
    options = msgspec.structs.replace(options, slices=tuple(rules))
    runtime, comparator = opened_reference(options, chosen, right), comparator_of(chosen)
    check_mapping(chosen, right, runtime, comparator.outputs)
    version = VersionReference(model=chosen, runtime=runtime, comparator=comparator, reference=right)
    try:
        files = _read(options, version, fp32, source, watch)
        check_attributes(source, rules, files)
        items = observed(options, chosen.name, files)
        for note in (*undeclared(rules, files), *said_of(items)):
            watch.note(f"--inputs {source}: {note}")
        return _searched(
            setting,
            options,
            version,
            watch,
            source=source,
            file=fp32,
            files=files,
            items=items,
            folder=folder,
            prefer=CostKind(prefer),
            most=max_recipes,
            minutes=minutes,
            picture=None if picture is None else Path(picture),
            alpha=alpha,
            seed=seed,
        )
    finally:
        runtime.close()


def _files(model: Model, given: File | None, number: int | None) -> tuple[Reference, Path]:
    """Return the reference that says what is right, and the ONNX file that is quantised."""
    if not model.references:
        if given is None:
            raise OperatorError(
                f"give REFERENCE, the FP32 model as an ONNX file: model `{model.name}` has no [[models.references]]"
            )
        return Reference(path=str(existing(given, "REFERENCE"))), Path(given)
    _, right = chosen_reference(model, number)
    if given is not None:
        return right, existing(given, "REFERENCE")
    if not right.path.endswith(_ONNX):
        raise OperatorError(
            f"give REFERENCE, the FP32 model as an ONNX file: the reference of model `{model.name}` is none ({right.where(model.name)})"
        )
    return right, existing(right.path, "models.references.path")


def _read(
    config: Config, version: VersionReference, file: Path, source: Path, watch: Watch
) -> list[Compared]:
    """Return the recorded items; they fit the file that is quantised."""
    what = f"the model {file}"
    runtime = open_candidate(
        file, what="reference", provider=config.shadow.provider, threads=config.shadow.threads
    )
    sides = ComparedModels(reference=version, candidate=runtime)
    try:
        parts = parts_of(source)
        layout = layout_of(config, config.slices, sides.inputs)
        layout = msgspec.structs.replace(layout, takers=dict.fromkeys(sides.takers, what))
        progress = watch.counted("reading inputs", sum(part.n_bytes for part in parts))
        files = []
        for part in parts:
            items = read(part, layout)
            check_inputs(items, runtime, what, version.model)
            files.append(not_computed(items, config.slices))
            progress(part.n_bytes)
    finally:
        runtime.close()
    return files


def _searched(
    setting: Setting,
    config: Config,
    version: VersionReference,
    watch: Watch,
    *,
    source: Path,
    file: Path,
    files: list[Compared],
    items: Observed,
    folder: Path,
    prefer: CostKind,
    most: int,
    minutes: float,
    picture: Path | None,
    alpha: float,
    seed: int,
) -> QuantiseResult:
    """Search, judge, and write what was found."""
    model = version.model
    budget = model.budget.flip
    parts = split(items, np.random.default_rng(seed))
    if not (len(parts.calibrate) and len(parts.choose) and len(parts.judge)):
        raise OperatorError(
            f"--inputs {source} has {len(items.group):,} items, which are too few to calibrate, to choose and to judge by: record some hundred of"
            " each slice"
        )
    _note_few(watch, items, parts.judge, budget=budget, alpha=alpha, source=source)
    session = session_of(str(file), str(file), 1)
    rows = fixed_rows(session)
    feeds = calibration_feeds(
        part_of_files(files, parts.calibrate),
        batched=model.batched,
        rows=rows or 1,  # of one shape: ranges by the values' frequencies take no others
        inputs=[node.name for node in session.get_inputs()],
    )
    with tempfile.TemporaryDirectory(prefix="quantdrift.") as name:
        watch.step(f"preparing {file}")
        quantiser = Quantiser(file, feeds, Path(name))
        watch.step("computing the answers of the reference")
        search = Search(
            config,
            version,
            file,
            files=files,
            items=items,
            parts=parts,
            quantiser=quantiser,
            folder=Path(name),
            prefer=prefer,
            most=most,
            seconds=60.0 * minutes,
            rows=rows or _ROWS,
            alpha=alpha,
        )
        recipes, not_tried = quantiser.recipes()
        search.try_all(recipes, watch.counted("trying recipes", len(recipes)))
        search.try_layers(lambda family: watch.step(f"trying layers in FP32 ({family.value})"))
        built: dict[int, Path] = {}

        def rebuilt(number: int) -> Path:
            path = Path(name) / f"{number}{_ONNX}"
            watch.step(f"judging {name_of(search.tried[number].recipe)}")
            quantiser.build(search.tried[number].recipe, path)
            built[number] = path
            return path

        decisions, winner = search.judge(rebuilt)
        judged = list(decisions)
        verdict = Outcome.FAIL
        if winner is not None:
            verdict = Outcome.PASS
        elif judged:
            verdict = decisions[judged[0]].verdict
        kept = winner if winner is not None else judged[0] if verdict is Outcome.INSUFFICIENT else None
        found = Quantised(
            model=model.name,
            reference=str(file),
            n_bytes=search.tried[0].n_bytes,
            budget=budget,
            prefer=prefer,
            tried=tuple(
                msgspec.structs.replace(each, decision=decisions.get(position))
                for position, each in enumerate(search.tried)
            ),
            sequence=tuple(judged),
            chosen=winner,
            verdict=verdict,
            out=str(folder),
            file="" if kept is None else str(folder / NAME),
            n_calibration=len(parts.calibrate),
            n_choosing=len(parts.choose),
            n_judging=len(parts.judge),
            not_tried=tuple(not_tried),
            ended=search.ended,
            remarks=tuple(said_of(items)),
            gate_options=_gate_options(setting, config, model),
        )
        content = b"" if kept is None else built[kept].read_bytes()
    worked = np.union1d(parts.calibrate, parts.choose)
    record = _record(found, file, content, part_of_files(files, worked), seed=seed)
    _write(folder, content, record)
    if picture is not None:
        from quantdrift.release.quantise.picture import write  # noqa: PLC0415 - Matplotlib only where it draws

        write(found, picture)
    return QuantiseResult(quantised=found, record=record, notes=tuple(watch.notes))


def _note_few(watch: Watch, items: Observed, rows: Any, *, budget: float, alpha: float, source: Path) -> None:
    """Note the slices that have too few items to pass, even if no answer changes."""
    (trial,) = trials([Question.flips(budget)], alpha)
    needed = trial.needed()
    judging = items.part(rows, flip=np.zeros(len(rows)))
    for name, members in judging.members.items():
        n = len(np.unique(judging.group[members]))
        if needed is not None and n < needed:
            watch.note(
                f"--inputs {source}: {name} has {n:,} of the {needed:,} inputs in the half that judges which a pass needs where no answer changes:"
                " nothing can pass"
            )


def _gate_options(setting: Setting, config: Config, model: Model) -> tuple[str, ...]:
    options = [f"--model={model.name}"] if len(config.models) > 1 else []
    return (*options, *([f"--config={setting.path}"] if setting.path != Path("config.toml") else []))


def _record(
    found: Quantised, file: Path, content: bytes, worked: Sequence[Compared], *, seed: int
) -> dict[str, Any]:
    """Return what `quantised.json` has; `worked` are the items that calibrated and chose, and prove nothing of the file."""
    record: dict[str, Any] = msgspec.to_builtins(
        {
            "format": _FORMAT,
            "made_at": datetime.now(UTC),
            "model": found.model,
            "verdict": found.verdict,
            "reference": _digest(file.read_bytes()),
            "seed": seed,
            "budget": found.budget,
            "prefer": found.prefer,
            "inputs": {
                "calibration": found.n_calibration,
                "choosing": found.n_choosing,
                "judging": found.n_judging,
            },
            "file": NAME if content else None,
            "digest": _digest(content) if content else None,
            "chosen": found.chosen,
            "judged": found.sequence,
            "recipes": [
                {
                    "number": number,
                    "name": name_of(each.recipe),
                    "recipe": each.recipe,
                    "bytes": each.n_bytes,
                    "time_ratio": each.time_ratio if math.isfinite(each.time_ratio) else None,
                    "slices": each.changes,
                    "worst": each.worst[0],
                    "within_budget": each.within,
                    "problem": each.problem,
                    "gate": each.decision,
                }
                for number, each in enumerate(found.tried)
            ],
            "not_tried": found.not_tried,
            "ended": found.ended,
            "made_from": [digest for part in worked for digest in digests_of(part.items.inputs)],
        }
    )
    return record


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _write(folder: Path, content: bytes, record: dict[str, Any]) -> None:
    files = {QUANTISED: msgspec.json.format(msgspec.json.encode(record)) + b"\n"}
    if content:
        files[NAME] = content
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("xb") as opened:
                opened.write(text)
    except OSError as error:
        raise OperatorError(
            f"--out {error.filename or folder} cannot be written: {error.strerror}"
        ) from error
