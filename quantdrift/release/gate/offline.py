"""The comparison of recorded inputs: reference, candidate and what is serving, each in ONNX Runtime or the reference's own runtime."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import Model, Provider, Slice
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.core.records import Exchange, HeaderStratum, Policy, Sampling, Tensor
from quantdrift.core.sampling.inclusion import known_at_capture
from quantdrift.core.slices import ALL, TEXT, TIME, SliceKey, holds
from quantdrift.core.tasks import Task
from quantdrift.core.tensors import DTYPES
from quantdrift.drift.evidence.observations import IntArray
from quantdrift.models.comparators.protocol import Divergences, Flags, Values
from quantdrift.models.runtimes.onnx.precision import ANY_PRECISION
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.tensors.arrays import Array, TensorSpec
from quantdrift.models.tensors.codec import encode, fit_inputs
from quantdrift.models.tensors.features import features_of
from quantdrift.release.gate.found import LearnedItems
from quantdrift.release.recording import RecordedFile, RecordedItems, RecordingLayout, read
from quantdrift.shadow.replay.exchange import Answer, PreparedExchange
from quantdrift.shadow.replay.pairing import embedding_of, pair_of
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.replay.replay import ReplayResult, assemble, compare, replay

_SAMPLING: Final = Sampling(
    policy=Policy(epoch="", header_strata=(HeaderStratum(name="default", rate=1.0),), body_strata=()),
    header_stratum="default",
    body_stratum="default",
    pi1=1.0,
    pi2=1.0,
    u1=0.0,
    u2=0.0,
)
_DATATYPES: Final = {dtype: name for name, dtype in DTYPES.items()}


class SliceRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that is served by a model of its own.

    Parameters
    ----------
    slice
        The slice; it can be told from what is known at capture.
    runtime
        The model.
    """

    slice: SliceKey
    runtime: ReferenceRuntime


class ComparedModels(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are compared.

    Parameters
    ----------
    reference
        The reference with its comparator.
    served
        What is serving; None: not asked for.
    routes
        Models that serve a slice of the candidate's traffic; of several that fit the first one counts.
    """

    reference: VersionReference
    candidate: ReferenceRuntime
    served: ReferenceRuntime | None = None
    routes: tuple[SliceRoute, ...] = ()

    @property
    def models(self) -> tuple[tuple[ReferenceRuntime, str], ...]:
        """All models but the reference, each with what it is."""
        served = ((self.served, "served model"),) if self.served else ()
        return (
            (self.candidate, "candidate"),
            *((route.runtime, "candidate") for route in self.routes),
            *served,
        )

    @property
    def digest(self) -> str:
        """The digests of the candidate and of its routes."""
        digests = [f"sha256:{self.candidate.artefact.digest}"]
        digests += [f"{route.slice.name}=sha256:{route.runtime.artefact.digest}" for route in self.routes]
        return " ".join(digests)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all inputs, as requests name them."""
        mapped = {entry.name: entry.captured or entry.name for entry in self.reference.reference.inputs}
        names = [mapped.get(spec.name, spec.name) for spec in self.reference.runtime.inputs]
        for runtime, _ in self.models:
            names += [spec.name for spec in runtime.inputs]
        return tuple(dict.fromkeys(names))

    @property
    def takers(self) -> dict[str, str]:
        """The model that takes an input which the reference does not take, by the name of the input."""
        mapped = {entry.name: entry.captured or entry.name for entry in self.reference.reference.inputs}
        input_names = {mapped.get(spec.name, spec.name) for spec in self.reference.runtime.inputs}
        return {
            spec.name: f"the {what} {runtime.artefact.path}"
            for runtime, what in self.models
            for spec in runtime.inputs
            if spec.name not in input_names
        }

    def close(self) -> None:
        """Close all of them."""
        for runtime in (self.reference.runtime, *(runtime for runtime, _ in self.models)):
            runtime.close()


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of the items of one file.

    Parameters
    ----------
    features
        The features of each, for slices.
    flip, served_flip
        1 where the decision of the candidate, or of what is serving, differs from the reference's, 0 where not, NaN where it
        cannot be told : (items,); None: nothing is serving.
    divergence
        The divergence of the candidate, at most `models.budget.cap`; that of an output that is not finite is the cap : (items,).
    right
        Whether reference and candidate have the true class : (items, 2); None without labels.
    learned
        The learned slices of each item.
    changed_tokens
        Of generated text: share of the tokens at which the first choice differs, NaN where it is not known : (items,).
    broken, unlikely
        Of answers that the candidate generated: 1 where it is broken, else 0, and the share of its unlikely tokens, NaN where it generated
        none or that is not known : (items,); None: it was not asked to.
    """

    items: RecordedItems
    features: list[dict[str, float]]
    flip: Values
    served_flip: Values | None
    divergence: Values
    right: Array | None
    learned: list[tuple[SliceKey, ...]]
    changed_tokens: Values | None = None
    broken: Values | None = None
    unlikely: Values | None = None


def route_slice(slices: Sequence[SliceKey], name: str) -> SliceKey:
    """Return the slice that `--route` names.

    Raises
    ------
    OperatorError
        There is none, or a request cannot be routed by it.
    """
    route_key = next((key for key in slices if key.name == name), None)
    if route_key is None or name == ALL:
        names = ", ".join(f"`{key.name}`" for key in slices if key.name != ALL) or "none"
        raise OperatorError(f"--route {name}: there is no such slice; known are {names}")
    if not is_routable(route_key):
        raise OperatorError(
            f"--route {name}: a request cannot be routed by it, because only its headers, parameters and JSON are known before it is"
            " computed"
        )
    return route_key


def is_routable(key: SliceKey) -> bool:
    """Return whether requests of a slice can be told before they are computed."""
    return all(
        known_at_capture(condition) and not condition.key.startswith((TEXT, TIME)) for condition in key.where
    )


def served_items(sides: ComparedModels, found: Sequence[Compared]) -> list[IntArray]:
    """Return the numbers of the items, counted through all files, that the candidate serves, and that each route serves."""
    by: list[Array] = []
    for file in found:
        model = np.zeros(len(file.items), dtype=np.intp)
        for number, route in reversed(list(enumerate(sides.routes, start=1))):
            model[_inside(route.slice, file.items, slice(0, len(file.items)))] = number
        by.append(model)
    served = np.concatenate(by)
    return [np.flatnonzero(served == number) for number in range(1 + len(sides.routes))]


def open_candidate(path: Path, *, what: str, provider: Provider, threads: int) -> OnnxRuntime:
    """Load a candidate, of any precision.

    Raises
    ------
    OperatorError
        It is missing, is not ONNX, or cannot be loaded.
    """
    return OnnxRuntime(
        path, provider=provider, threads=threads, allow_reduced_precision=ANY_PRECISION, what=what
    )


def compared(
    sides: ComparedModels,
    parts: Sequence[RecordedFile],
    layout: RecordingLayout,
    rules: Sequence[Slice],
    learned: LearnedItems,
    *,
    step: int,
    progress: Callable[[int], None],
) -> Iterator[Compared]:
    """Yield what is found of each file.

    Parameters
    ----------
    sides, parts, layout
        The models, the files, and what their arrays are.
    rules
        The slices, whose features are needed.
    learned
        Finds the learned slices.
    step
        Most items in one run.
    progress
        Called with the number of bytes of the files that were done since the last call.

    Raises
    ------
    OperatorError
        Inputs do not fit a model, or a model fails on them.
    RetryError
        The reference is at a server that is unreachable.
    """
    for part in parts:
        items = read(part, layout)
        for runtime, what in sides.models:
            check_inputs(items, runtime, f"the {what} {runtime.artefact.path}", sides.reference.model)
        size = step if sides.reference.model.batched else 1
        steps = []
        for begin in range(0, len(items), size):
            rows = slice(begin, min(begin + size, len(items)))
            steps.append(_step(sides, items, rows, rules, learned))
            progress(part.n_bytes * rows.stop // len(items) - part.n_bytes * begin // len(items))
        yield _joined(items, steps)


class _ComparedRows(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of some rows of a file, as in `Compared`."""

    features: list[dict[str, float]]
    flip: Values
    served_flip: Values | None
    divergence: Values
    right: Array | None
    learned: list[tuple[SliceKey, ...]]


class AnsweredRows(msgspec.Struct, frozen=True, kw_only=True):
    """Some rows of a file with the answers of the reference.

    Parameters
    ----------
    entry
        The rows as one exchange, without an answer of a candidate.
    arrays
        The inputs, by name : (rows, ...).
    outputs
        What the reference answers.
    where
        The file and the rows, in words.
    """

    entry: PreparedExchange
    arrays: dict[str, Array]
    outputs: dict[str, Array]
    where: str

    def judged(
        self, runtime: ReferenceRuntime, labels: Array | None = None
    ) -> tuple[Values, Values, Array | None]:
        """Return the flips and the divergences of a candidate, and with labels whether reference and candidate have the true class.

        Raises
        ------
        OperatorError, QuarantineError
            The candidate cannot compute the rows, or its outputs cannot be compared.
        """
        answer = answered(self.entry, runtime, self.arrays, self.where, "candidate")
        divergences = _divergences(answer, self.outputs, self.where)
        divergence = capped(divergences, self.entry.version_reference.model.budget.cap)
        return divergences.flip, divergence, None if labels is None else _right(answer, self.outputs, labels)


def answered_rows(reference: VersionReference, items: RecordedItems, rows: slice) -> AnsweredRows:
    """Return some rows of a file with the answers of the reference.

    Raises
    ------
    OperatorError
        The reference cannot compute them.
    QuarantineError
        They do not fit the reference.
    RetryError
        The reference is at a server that is unreachable.
    """
    where = _place(items, rows)
    arrays = {name: array[rows] for name, array in items.inputs.items()}
    entry = _prepared(reference, arrays)
    outputs = computed(entry, where, "reference", step=rows.stop - rows.start)
    return AnsweredRows(entry=entry, arrays=arrays, outputs=outputs, where=where)


def _place(items: RecordedItems, rows: slice) -> str:
    return f"{items.path}, rows {rows.start} to {rows.stop - 1}"


def _step(
    sides: ComparedModels, items: RecordedItems, rows: slice, rules: Sequence[Slice], learned: LearnedItems
) -> _ComparedRows:
    """Run all models on some rows of a file, and compare them."""
    model = sides.reference.model
    try:
        answers = answered_rows(sides.reference, items, rows)
        labels = None if items.labels is None else _classes(items.labels[rows], model, items.path)
        flip, divergence, right = answers.judged(sides.candidate, labels)
        for route in reversed(sides.routes):
            inside = _inside(route.slice, items, rows)
            if inside.any():
                own, own_divergence, own_right = answers.judged(route.runtime, labels)
                flip = np.where(inside, own, flip)
                divergence = np.where(inside, own_divergence, divergence)
                if right is not None and own_right is not None:
                    right = np.where(inside[:, np.newaxis], own_right, right)
        entry, outputs, where = answers.entry, answers.outputs, answers.where
        served = None
        if sides.served is not None:
            served = _flips(
                answered(entry, sides.served, answers.arrays, where, "served model"), outputs, where
            )
    except QuarantineError as error:
        raise OperatorError(f"{_place(items, rows)}: {error.detail}") from error
    wanted = [rule for rule in rules if rule.feature]
    features = features_of(wanted, entry.inputs) if wanted else [{} for _ in range(entry.n_items)]
    return _ComparedRows(
        features=features,
        flip=flip,
        served_flip=served,
        divergence=divergence,
        right=right,
        learned=learned.of(
            entry.exchange,
            attributes={name: values[rows] for name, values in items.attributes.items()},
            features=features,
            embedding=embedding_of(entry, outputs),
        ),
    )


def capped(found: Divergences, cap: float) -> Values:
    """Return the divergences as they count, at most `cap`; where only the candidate's output is not finite it is `cap` : (items,)."""
    divergence = np.minimum(found.divergence, cap)
    return np.where(found.reference_finite & ~found.candidate_finite, cap, divergence)


def _inside(key: SliceKey, items: RecordedItems, rows: slice) -> Flags:
    """Return which rows are in a slice that attributes tell : (rows,)."""
    attributes = {name: values[rows] for name, values in items.attributes.items()}
    return np.array(
        [
            all(
                holds(condition, {name: values[row] for name, values in attributes.items()}, {})
                for condition in key.where
            )
            for row in range(rows.stop - rows.start)
        ]
    )


def _prepared(version_reference: VersionReference, arrays: dict[str, Array]) -> PreparedExchange:
    """Return rows as one exchange without an answer, ready for a model."""
    model, reference = version_reference.model, version_reference.reference
    mapped = {entry.name: entry.captured or entry.name for entry in reference.inputs}
    names = [mapped.get(spec.name, spec.name) for spec in version_reference.runtime.inputs]
    tensors = tuple(_tensor(name, _wire(arrays[name], model)) for name in names)
    exchange = Exchange(
        id=uuid.uuid4().hex,
        captured_at=datetime.now(UTC),
        source="gate",
        model=model.name,
        version="",
        protocol="",
        inputs=tensors,
        outputs=(),
        sampling=_SAMPLING,
    )
    inputs = fit_inputs(
        tensors, version_reference.runtime.inputs, batched=model.batched, mapping=reference.inputs
    )
    return PreparedExchange(
        stream_sequence=0,
        payload=b"",
        exchange=exchange,
        version_reference=version_reference,
        inputs=inputs,
    )


def answered(
    entry: PreparedExchange, runtime: ReferenceRuntime, arrays: dict[str, Array], where: str, what: str
) -> PreparedExchange:
    """Return the exchange with the answer of a candidate."""
    of_reference = entry.version_reference
    candidate = VersionReference(
        model=of_reference.model, runtime=runtime, comparator=of_reference.comparator
    )
    outputs = computed(_prepared(candidate, arrays), where, what, step=entry.n_items)
    if not outputs:
        raise OperatorError(
            f"{where}: no output of the {what} {runtime.artefact.path} has one entry for each item, but it has"
            f" {', '.join(map(str, runtime.outputs))}: export it with the outputs of the reference"
        )
    answer = tuple(_tensor(name, _wire(array, of_reference.model)) for name, array in outputs.items())
    return msgspec.structs.replace(entry, exchange=msgspec.structs.replace(entry.exchange, outputs=answer))


def computed(entry: PreparedExchange, where: str, what: str, *, step: int) -> dict[str, Array]:
    """Return the outputs of a model."""
    (outputs,) = replay(assemble([entry]), most_items=step)
    if isinstance(outputs, QuarantineError):
        path = entry.version_reference.runtime.artefact.path
        raise OperatorError(f"{where}: the {what} {path} cannot compute them: {outputs.detail}")
    return outputs


def _flips(judged: PreparedExchange, outputs: Answer, where: str) -> Values:
    return _divergences(judged, outputs, where).flip


def _divergences(judged: PreparedExchange, outputs: Answer, where: str) -> Divergences:
    (outcome,) = compare([judged], [outputs])
    if not isinstance(outcome, ReplayResult):
        raise OperatorError(f"{where}: the outputs cannot be compared: {outcome.detail}")
    return outcome.divergences


def _right(judged: PreparedExchange, outputs: Answer, labels: Array) -> Array:
    """Return whether reference and candidate have the true class : (items, 2)."""
    return np.stack([side == labels for side in top_classes(judged, outputs)], axis=1)


def top_classes(judged: PreparedExchange, outputs: Answer) -> tuple[IntArray, IntArray]:
    """Return the top classes of the reference and of the answer : (items,) each.

    Raises
    ------
    QuarantineError
        The outputs cannot be compared.
    """
    pair = pair_of(judged, outputs, {})
    if isinstance(pair, QuarantineError):
        raise pair
    reference, candidate = (next(iter(side.values())) for side in (pair.reference, pair.candidate))
    return (
        reference.reshape(len(reference), -1).argmax(axis=1),
        candidate.reshape(len(candidate), -1).argmax(axis=1),
    )


def check_task_of_labels(model: Model) -> None:
    """Check that true classes can say who is right.

    Raises
    ------
    OperatorError
        The model chooses no class.
    """
    if model.task is not Task.CLASSIFICATION:
        raise OperatorError(
            f"true classes are for classification, and model `{model.name}` has the task `{model.task}`: give --reference-accuracy in"
            " place of labels"
        )


def _classes(labels: Array, model: Model, path: Path) -> Array:
    """Return the numbers of the true classes."""
    check_task_of_labels(model)
    if labels.ndim != 1 or labels.dtype.kind not in "iuUS":
        raise OperatorError(
            f"{path}: the labels are {labels.dtype}{list(labels.shape)}, not one class for each item"
        )
    if labels.dtype.kind in "iu":
        return labels
    texts = [str(text) for text in (np.char.decode(labels) if labels.dtype.kind == "S" else labels).tolist()]
    numbers = {name: number for number, name in enumerate(model.labels)}
    if unknown := [text for text in texts if text not in numbers]:
        raise OperatorError(
            f"{path}: the label `{unknown[0]}` is not in `models.labels` of model `{model.name}`"
        )
    return np.array([numbers[text] for text in texts])


def check_inputs(items: RecordedItems, runtime: ReferenceRuntime, what: str, model: Model) -> None:
    """Check that arrays fit a candidate, before anything runs."""
    for spec in runtime.inputs:
        array = items.inputs[spec.name]
        shape = (None, *spec.shape[1:]) if model.batched and spec.shape else (None, *spec.shape)
        fits = len(shape) == array.ndim and all(
            want in {None, have} for want, have in zip(shape, array.shape, strict=True)
        )
        is_text = array.dtype.kind in "US"
        same = is_text if spec.dtype == np.dtype(object) else array.dtype == spec.dtype
        if not (fits and same):
            taken = TensorSpec(name=spec.name, dtype=spec.dtype, shape=shape)
            raise OperatorError(
                f"{items.path}: `{spec.name}` is {array.dtype}{list(array.shape)}, but {what} takes {taken}"
            )


def _wire(array: Array, model: Model) -> Array:
    """Return rows as they are on the wire: without the dimension of items where an exchange is one item."""
    return array if model.batched else array[0]


def _tensor(name: str, array: Any) -> Tensor:
    array = np.asarray(array)
    datatype = "BYTES" if array.dtype.kind in "OUS" else _DATATYPES.get(array.dtype, "")
    if not datatype:
        raise OperatorError(f"`{name}` has the element type {array.dtype}, which no request can have")
    return encode(name, datatype, array)


def _joined(items: RecordedItems, steps: Sequence[_ComparedRows]) -> Compared:
    served = [step.served_flip for step in steps if step.served_flip is not None]
    right = [step.right for step in steps if step.right is not None]
    return Compared(
        items=items,
        features=[features for step in steps for features in step.features],
        flip=np.concatenate([step.flip for step in steps]),
        divergence=np.concatenate([step.divergence for step in steps]),
        served_flip=np.concatenate(served) if served else None,
        right=np.concatenate(right) if right else None,
        learned=[keys for step in steps for keys in step.learned],
    )
