"""The check of a configuration against the references that it names.

References are opened in a process of its own: loading one runs native code, and for a factory code of yours, and a file that
brings that process down must not bring down the command.
"""

import importlib.util
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from quantdrift.core import plugins
from quantdrift.core.config.schema import Config, Model, OutputKind, Provider, Reference, Runtime
from quantdrift.core.config.wrong_values import nearest
from quantdrift.core.errors import OperatorError, QuantdriftError
from quantdrift.core.passed_secrets import variables
from quantdrift.core.tasks import Task

if TYPE_CHECKING:
    from quantdrift.models.runtimes.protocol import Artefact, ReferenceRuntime
    from quantdrift.models.tensors.arrays import TensorSpec

LARGE_BYTES: Final = 1 << 30
"""Size of a reference from which it is opened only on request: it takes longer than people wait for a check."""

_PACKAGES: Final[Mapping[Runtime, tuple[str, ...]]] = MappingProxyType(
    {
        Runtime.ONNX: ("onnx", "onnxruntime"),
        Runtime.TORCH: ("torch",),
        Runtime.TRANSFORMERS: ("torch", "transformers"),
    }
)
_CLASSES: Final = frozenset({Task.CLASSIFICATION, Task.MULTILABEL})
_OF_NUMBERS: Final = frozenset({"norm", "mean", "contrast", "missing", "value"})


class CheckedReferences(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the check.

    Parameters
    ----------
    artefacts
        Precision, opset and digest of each reference that was opened, by path.
    problems
        What does not fit, each as a sentence that says what to change.
    notes
        References that were not opened, with the reason.
    """

    artefacts: dict[str, str] = {}
    problems: list[str] = []
    notes: list[str] = []


class _Opened(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a reference after it was opened.

    Parameters
    ----------
    number
        Of the model in the configuration.
    inputs
        Input names, and whether each is text; None: they are not those of a captured request.
    widths
        Numbers of an item of each input; None: any.
    error
        Why it was not opened by an error that may pass, such as a server that is down.
    """

    number: int
    artefacts: dict[str, str] = {}
    inputs: dict[str, bool] | None = None
    widths: dict[str, int | None] = {}
    problems: list[str] = []
    notes: list[str] = []
    error: QuantdriftError | None = None


def check_references(config: Config, *, everything: bool) -> CheckedReferences:
    """Open references and compare the configuration with them: outputs, their types and kind, and inputs of slices.

    Parameters
    ----------
    everything
        Whether to open references that are large or at a server, too. What is not here is never opened: the caller says so.

    Raises
    ------
    RetryError
        A server is unreachable.
    """
    chosen: list[tuple[int, int]] = []
    notes: list[str] = []
    for number, model in enumerate(config.models):
        for position, reference in enumerate(model.references):
            why_not = _left_out(model, reference, everything=everything)
            if why_not is None:
                chosen.append((number, position))
            elif why_not:
                notes.append(why_not)
    opened = list(_opened(config, chosen, everything=everything))
    problems = [problem for opened_reference in opened for problem in opened_reference.problems]
    problems += _slice_inputs(config, opened)
    notes += [note for opened_reference in opened for note in opened_reference.notes]
    return CheckedReferences(
        artefacts={
            path: text for opened_reference in opened for path, text in opened_reference.artefacts.items()
        },
        problems=list(dict.fromkeys(problems)),
        notes=notes,
    )


def _left_out(model: Model, reference: Reference, *, everything: bool) -> str | None:
    """Return why a reference is not opened without a request; empty if something else says it, None if it is opened."""
    from quantdrift.models.runtimes.cache import files_bytes

    if reference.path and not Path(reference.path).exists():
        return ""
    if everything:
        return None
    if reference.url:
        return ""
    where = f"the reference {reference.path} of model `{model.name}` was not opened, so names, types and `output_kind`"
    missing = [
        name for name in _PACKAGES.get(reference.runtime, ()) if importlib.util.find_spec(name) is None
    ]
    if missing:
        return f"{where} were not compared with it: {', '.join(missing)} is not installed here"
    n_bytes = files_bytes(reference.path) + files_bytes(reference.copy.path)
    if n_bytes >= LARGE_BYTES:
        return f"{where} were not compared with it: it has {n_bytes / 2**30:.1f} GiB; --references opens it"
    return None


def _opened(config: Config, chosen: Sequence[tuple[int, int]], *, everything: bool) -> Iterator[_Opened]:
    """Open the chosen references, one after the other; a new process goes on behind one that ended the process."""
    token = variables().get("QUANTDRIFT_REFERENCE_TOKEN", "")
    context = get_context("spawn")
    while chosen:
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, config, chosen, token, everything)
        process = context.Process(target=_open_each, args=arguments, daemon=True)
        process.start()
        sender.close()
        try:
            while chosen:
                opened: _Opened = receiver.recv()
                if opened.error is not None:
                    raise opened.error
                yield opened
                chosen = chosen[1:]
        except EOFError:
            (number, position), *rest = chosen
            process.join()
            model = config.models[number]
            where = model.references[position].where(model.name)
            problem = (
                f"models `{model.name}`: loading the reference {where} ended its process (exit code {process.exitcode}): "
                "the file is broken, its code ends the process, or there is too little memory"
            )
            yield _Opened(number=number, problems=[problem])
            chosen = rest
        finally:
            process.kill()
            process.join()
            receiver.close()


def _open_each(
    sender: Connection, config: Config, chosen: Sequence[tuple[int, int]], token: str, everything: bool
) -> None:
    """Open references in the process that is only for this, and send what is known of each."""
    plugins.use(config.plugins)  # of the parent this process knows nothing but the configuration
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, too, and ends this process
    for number, position in chosen:
        model = config.models[number]
        try:
            sender.send(_open(config, number, model.references[position], token, everything=everything))
        except OperatorError as error:
            sender.send(_Opened(number=number, problems=[_named(model, str(error))]))
        except QuantdriftError as error:
            sender.send(_Opened(number=number, error=error))


def _named(model: Model, problem: str) -> str:
    name = f"`{model.name}`"
    return problem if name in problem else f"models {name}: {problem}"


def _open(config: Config, number: int, reference: Reference, token: str, *, everything: bool) -> _Opened:
    """Open a reference, and its copy if it has one, make the checks of the shadow, and compare the configuration with it."""
    from quantdrift.models.comparators.registry import comparator_of
    from quantdrift.models.runtimes.canaries.check import checked_canaries
    from quantdrift.models.runtimes.registry import check_mapping, open_reference, runtime_request
    from quantdrift.models.runtimes.text.candidate_replica import open_replica, replica_request

    model = config.models[number]
    request = msgspec.structs.replace(
        runtime_request(config, model, reference, token), provider=Provider.CPU, threads=1
    )
    runtime = open_reference(request)
    try:
        artefacts = [runtime.artefact]
        compared = comparator_of(model).outputs
        check_mapping(model, reference, runtime, compared)
        checked_canaries(model, reference, runtime)
        problems = list(_misfits(model, reference, runtime, compared))
        notes: list[str] = []
        if everything and model.task is Task.GENERATION and (other := _other_tokens(config, model, runtime)):
            # Of several models it is not known which of them that server serves.
            is_alone = sum(one.task is Task.GENERATION for one in config.models) == 1
            (problems if is_alone else notes).append(f"models `{model.name}`: {other}")
        inputs = {spec.name: spec.dtype.kind == "O" for spec in runtime.inputs}
        widths = {spec.name: _width(spec.shape, batched=model.batched) for spec in runtime.inputs}
    finally:
        runtime.close()
    copy = replica_request(request)
    if copy is not None and (everything or Path(copy.reference.path).exists()):
        replica = open_replica(copy)
        replica.close()
        artefacts.append(replica.artefact)
    return _Opened(
        number=number,
        artefacts={artefact.path: _described(artefact) for artefact in artefacts},
        inputs=None if model.task is Task.GENERATION else inputs,
        widths=widths,
        problems=problems,
        notes=notes,
    )


def _other_tokens(config: Config, model: Model, runtime: "ReferenceRuntime") -> str:
    """Return what the server behind the sidecar tokenises otherwise than the reference; empty: nothing that is known."""
    from quantdrift.models.runtimes.text.same_tokens import doubt_of
    from quantdrift.models.runtimes.text.scoring_runtime import ScoringRuntime

    if not isinstance(runtime, ScoringRuntime):
        return ""
    return doubt_of(runtime.language, config.sidecar.backend, model.name)


def _width(shape: Sequence[int | None], *, batched: bool) -> int | None:
    """Return how many numbers an item of an input has; None: any number."""
    sizes = [size for size in (shape[1:] if batched else shape) if size is not None]
    return math.prod(sizes) if len(sizes) == len(shape[1:] if batched else shape) else None


def _described(artefact: "Artefact") -> str:
    opset = f"opset {artefact.opset}, " if artefact.opset else ""
    return f"{artefact.precision}, {opset}sha256 {artefact.digest}"


def _misfits(
    model: Model, reference: Reference, runtime: "ReferenceRuntime", compared: Sequence[str]
) -> Iterator[str]:
    """Yield what does not fit between a model's options and its reference's outputs."""
    from quantdrift.shadow.replay.pairing import possible_outputs

    specs = {spec.name: spec for spec in runtime.outputs}
    if model.task is Task.GENERATION or not specs:
        return
    where = f"the reference {reference.where(model.name)}"
    names = list(compared)
    if not names:
        pairs = possible_outputs(model.output, reference.output, runtime)
        served = {tensor.name for tensor in model.outputs}
        common = [pair for pair in pairs if pair[0] in served] if served and not reference.output else pairs
        if pairs and not common:
            yield (
                f"models `{model.name}`: [[models.outputs]] names {sorted(served)}, and {where} has {sorted(specs)}: no output"
                " can be compared. Set output to the candidate's, and models.references.output to the reference's"
            )
            return
        names = [common[0][1]] if common else [model.output]
    for name in names:
        if name not in specs:
            yield f"models `{model.name}`: the output `{name}` is not one of {where}: {nearest(name, list(specs))}"
        elif problem := _unfit(model, specs[name]):
            others = [
                spec.name
                for spec in runtime.outputs
                if spec.name != runtime.embedding and not _unfit(model, spec)
            ]
            yield f"models `{model.name}`: {where} gives {problem}: {_instead(model, reference, others, is_named=bool(compared))}"
        elif problem := _other_kind(model, reference, specs[name]):
            yield problem


def _unfit(model: Model, spec: "TensorSpec") -> str:
    """Return what an output is and what the task compares, if the task cannot compare it; else nothing."""
    from quantdrift.models.comparators.registry import task_plugin

    kinds = task_plugin(model.task).types
    if kinds and spec.dtype.kind not in kinds:
        numbers = "numbers" if len(kinds) > 1 else "floating-point numbers"
        labels = " (labels)" if model.task is Task.CLASSIFICATION and spec.dtype.kind in "iuO" else ""
        return f"`{spec}`{labels}, and task `{model.task}` compares {numbers}, so that no exchange could be compared"
    is_known = model.task is Task.CLASSIFICATION and model.batched and bool(spec.shape)
    if is_known and (len(spec.shape) != 2 or spec.shape[1] == 1):
        return f"`{spec}`, and task `{model.task}` compares [items, classes] with at least two classes"
    return ""


def _instead(model: Model, reference: Reference, others: Sequence[str], *, is_named: bool) -> str:
    """Return what to do about an output that the task cannot compare."""
    if is_named:
        return "name another output in its place"
    if not others:
        return "export it with an output that can be compared, or set another `task`"
    if reference.output:
        return f'set models.references.output = "{others[0]}"'
    because = "" if model.output else " (without it, the first output is compared)"
    return f'set output = "{others[0]}"{because}'


def _other_kind(model: Model, reference: Reference, spec: "TensorSpec") -> str:
    """Return how `output_kind` contradicts the last operator of an output; empty if it does not, or nothing tells."""
    if model.task not in _CLASSES or reference.runtime is not Runtime.ONNX:
        return ""
    from quantdrift.models.runtimes.onnx.output_kind import last_operator

    last = last_operator(Path(reference.path), spec.name)
    if last is None or last.kind is model.output_kind:
        return ""
    if last.kind is OutputKind.PROBABILITIES and model.task is Task.CLASSIFICATION and not last.sums_to_one:
        return ""
    effect = (
        "divergences would look far smaller than they are"
        if last.kind is OutputKind.PROBABILITIES
        else "no exchange could be compared"
    )
    return (
        f"models `{model.name}`: output_kind is `{model.output_kind}`, but the output `{spec.name}` of the reference "
        f"{reference.path} ends in {last.operator}, which gives {last.kind}: {effect}. "
        f'Set output_kind = "{last.kind}"'
    )


def _slice_inputs(config: Config, opened: Sequence[_Opened]) -> Iterator[str]:
    """Yield slices by a feature whose input no model has, or whose input is text and the feature is of numbers."""
    for rule in config.slices:
        if not rule.feature:
            continue
        numbers = [number for number, model in enumerate(config.models) if rule.model in ("", model.name)]
        with_inputs = [
            opened_reference
            for opened_reference in opened
            if opened_reference.number in numbers and opened_reference.inputs is not None
        ]
        n_references = sum(len(config.models[number].references) for number in numbers)
        if not with_inputs or len(with_inputs) < n_references:
            continue  # one that was not opened may have the input
        inputs = {
            name: is_text
            for opened_reference in with_inputs
            for name, is_text in (opened_reference.inputs or {}).items()
        }
        of = f"of model `{rule.model}`" if rule.model else "of the models"
        if rule.input and rule.input not in inputs:
            yield f"slices `{rule.name}`: the input `{rule.input}` is not one {of}: {nearest(rule.input, list(inputs))}"
            continue
        read = [rule.input] if rule.input else list(inputs)
        if isinstance(rule.column, int):
            width = max(opened_reference.widths.get(read[0]) or math.inf for opened_reference in with_inputs)
            if rule.column >= width:
                yield f"slices `{rule.name}`: the input `{read[0]}` {of} has {width} numbers for an item, so its last column is {width - 1}"
                continue
        if rule.feature in _OF_NUMBERS and all(inputs[name] for name in read):
            names = ", ".join(f"`{name}`" for name in read)
            yield (
                f"slices `{rule.name}`: {names} {of} is text, and the feature `{rule.feature}` is of numbers, so that the slice"
                " would stay empty: use `length`"
            )
