"""What `quantdrift diagnose`, `repair` and `gate` can do for a slice of a model: the commands and who prints them ask here. Pure.

Known are the configuration, the slice and, from the alert, what the model is made of. The file of the candidate is not: whether sites of an
ONNX file can be named, only the command that reads it can say.
"""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from quantdrift.core.config.schema import Config, Model, Reference, Runtime
from quantdrift.core.records import Predicate
from quantdrift.core.slices import CAPTURED, feature_key
from quantdrift.core.tasks import Build, Task
from quantdrift.core.text import plain

LEFT: Final = "What is left: serve the slice by the reference, or roll the candidate back"


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A command that works for an alert: what it gives, and how it is typed."""

    gives: str
    text: str


class NextCommands(msgspec.Struct, frozen=True, kw_only=True):
    """The commands that work for an alert, and why others do not; each may be empty."""

    commands: tuple[Command, ...] = ()
    why_not: str = ""


def next_commands(
    config: Config,
    *,
    alert_id: int,
    model: str,
    version: str,
    slice_name: str,
    where: Sequence[Predicate],
    build: Build | None = None,
    known: Collection[str] = (),
    options: str = "",
) -> NextCommands:
    """Return the commands that lead from an alert to a repair.

    Parameters
    ----------
    alert_id, model, version, slice_name, where
        The alert, and the slice with its conditions.
    build
        What the model is made of; None: not known.
    known
        What was found already: `cause`, `repair`, `gate`.
    options
        Options that every command needs, such as `--data`.
    """
    configured = config.model(model)
    if configured is None:
        return NextCommands(why_not=f"the configuration has no model `{plain(model)}`")
    number, reference = reference_of(configured, version)
    if reference is None:
        return NextCommands(
            why_not=f"the configuration has no reference of `{plain(model)}` {plain(version)}"
        )
    chosen = f" --reference={number}" if len(configured.references) > 1 else ""
    more = f"{chosen}{options}"
    untold = slice_problem(config, where, slice_name)
    problem = ("" if configured.exemplars else untold) or reference_problem(configured, reference)
    if configured.task is not Task.GENERATION:
        problem = problem or task_problem(configured)
    inputs = (
        "" if untold else " --inputs FOLDER"
    )  # without it the commands take exemplars, which know their slice
    commands = []
    if not problem and "cause" not in known and not _is_gguf(reference):
        commands.append(_diagnose(reference, alert_id, f"{inputs}{more}", build))
    if not problem and not repair_problem(configured, reference) and "repair" not in known:
        factory = "" if reference.runtime is Runtime.ONNX else " --factory MODULE:FUNCTION"
        text = f"quantdrift repair {alert_id} --candidate FILE{factory}{inputs} --out REPAIRED{more}"
        commands.append(Command(gives="Build repairs", text=text))
    if "gate" not in known:
        judged = "FOLDER-OR-URL --live" if configured.task is Task.GENERATION else "FILE --inputs FOLDER"
        text = f"quantdrift gate {judged} --model={plain(model)} --note={alert_id}{options if configured.task is Task.GENERATION else more}"
        commands.append(Command(gives="Is another file better", text=text))
    return NextCommands(commands=tuple(commands), why_not=problem.partition(". ")[0])


def _is_gguf(reference: Reference) -> bool:
    """Return whether the candidate is a GGUF file, as far as the configuration tells: `diagnose` reads none."""
    return any(path.endswith(".gguf") for path in (reference.path, reference.copy.path))


def _diagnose(reference: Reference, alert_id: int, more: str, build: Build | None) -> Command:
    if reference.runtime is Runtime.TRANSFORMERS:
        return Command(
            gives="Cause, if the candidate is a folder, and no GGUF file",
            text=f"quantdrift diagnose {alert_id} --candidate FOLDER{more.replace('--inputs FOLDER', '--inputs PROMPTS.jsonl')}",
        )
    if reference.runtime is Runtime.TORCH:
        text = f"quantdrift diagnose {alert_id} --candidate FILE --factory MODULE:FUNCTION{more}"
        return Command(gives="Cause", text=text)
    text = f"quantdrift diagnose {alert_id} --candidate FILE{more}"
    return Command(
        gives="Cause" if build is Build.TREES else "Cause, if the candidate is an ONNX file",
        text=text,
    )


def reference_of(model: Model, version: str) -> tuple[int, Reference | None]:
    """Return the reference that a version is compared with and its number, from 1; None if there is none."""
    for number, reference in enumerate(model.references, start=1):
        if any(fnmatchcase(version, pattern) for pattern in reference.versions):
            return number, reference
    return 0, None


def slice_problem(config: Config, where: Sequence[Predicate], name: str) -> str:
    """Return why recorded inputs do not tell which items belong to a slice; empty: they do."""
    if is_told(config, where):
        return ""
    return f"recorded inputs do not tell which items belong to the slice {plain(name)}: it is learned, or has the rest of the values"


def is_told(config: Config, where: Sequence[Predicate]) -> bool:
    """Return whether attributes and features tell a slice: neither learned, nor `(other)`, which depends on what has a place."""
    features = {feature_key(rule) for rule in config.slices if rule.feature}
    return all(
        (condition.key.startswith(CAPTURED) or condition.key in features)
        and (condition.equals, condition.low, condition.high) != (None, None, None)
        for condition in where
    )


def task_problem(model: Model) -> str:
    """Return why the outputs of a model cannot be diagnosed; empty: they can."""
    if model.batched and model.task is not Task.GENERATION:
        return ""
    return f"model `{model.name}` with the task `{model.task}` cannot be diagnosed: only models whose outputs have a row for each item can"


def reference_problem(model: Model, reference: Reference) -> str:
    """Return why the sites of a candidate of this reference cannot be put into FP32; empty: nothing that is known speaks against it."""
    if model.task is Task.GENERATION:
        if reference.runtime is Runtime.TRANSFORMERS:
            return ""
        return f"the reference of model `{model.name}` is no folder of a language model, so no layer of the candidate can get its weights. {LEFT}"
    if reference.runtime in {Runtime.ONNX, Runtime.TORCH}:
        return ""
    return (
        f"the reference of model `{model.name}` is neither an ONNX file nor in PyTorch, so the sites of the candidate cannot be put"
        f" into FP32. {LEFT}"
    )


def repair_problem(model: Model, reference: Reference) -> str:
    """Return why no repair of a candidate of this reference can be built; empty: one can."""
    if reference.runtime is Runtime.ONNX or (reference.runtime is Runtime.TORCH and reference.factory):
        return ""
    return f"the reference of model `{model.name}` is neither an ONNX file nor a factory of PyTorch, and only candidates of these are repaired. {LEFT}"


def build_of(model: Model, version: str, *, trees: bool = False) -> Build:
    """Return what a version of a model is made of, as far as the configuration and its reference tell.

    Parameters
    ----------
    trees
        Whether its reference is made of decision trees, as the shadow has seen.
    """
    if trees:
        return Build.TREES
    _, reference = reference_of(model, version)
    if model.task is Task.GENERATION:
        return Build.LANGUAGE
    is_network = reference is not None and reference.runtime in {Runtime.ONNX, Runtime.TORCH}
    return Build.NETWORK if is_network else Build.OTHER
