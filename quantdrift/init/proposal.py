"""The configuration that follows from files, a server and traffic: every choice with its reason.

No I/O. What cannot be known is chosen as most need it, and said in `doubts`.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import MIB, Monitor, OutputKind, Sidecar, Slice
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import duration
from quantdrift.core.tasks import Task
from quantdrift.core.text import plain
from quantdrift.init.files import ModelFile
from quantdrift.init.server import Server
from quantdrift.init.traffic import MOST_VALUES, SeenAttribute, SeenModel, Source, Traffic, quantiles
from quantdrift.models.runtimes.onnx.output_kind import LastOperator
from quantdrift.models.tensors.arrays import Array, TensorSpec
from quantdrift.models.tensors.features import features_of

RARE: Final = 0.02
"""Share of the requests below which a value of a header is sampled whole."""
_FEW: Final = 2
_SESSION: Final = timedelta(seconds=Monitor().session_s)
_LEAST_REQUESTS: Final = 20
_LEAST_ITEMS: Final = 100
_MOST_SLICES: Final = 8
_MOST_RARE: Final = 8
_MOST_SHOWN: Final = 4
_LONGEST: Final = 64  # characters of a value that is a group; longer ones are texts
_MOST_COLUMNS: Final = 256
_MOST_GROUPS: Final = 8
_RATES: Final = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
_REPLAYS_PER_S: Final = 10.0
# Headers of HTTP, of proxies and of tracing: they say nothing of the input.
_TECHNICAL: Final = re.compile(
    r"accept.*|connection|content-.*|expect|host|user-agent|te|trailer|transfer-encoding|upgrade|via|forwarded|origin|referer"
    r"|cache-control|pragma|date|if-.*|keep-alive|traceparent|tracestate|baggage|b3|x-b3-.*|x-forwarded-.*|x-real-ip"
    r"|x-envoy-.*|x-amzn-.*|x-cloud-trace-context|cf-.*|sec-.*|dnt|priority|inference-header-content-length|grpc-.*|x-datadog-.*"
)
_SECRET: Final = re.compile(r".*(authorization|cookie|token|secret|password|api-?key|signature|credential).*")
_PERSON: Final = re.compile(r".*(user|customer|account|session|person|client|visitor|device|patient)(-?id)?$")
_DETECTIONS: Final = (
    ("boxes", "box"),
    ("scores", "score"),
    ("classes", "label|class"),
    ("count", "num|count"),
)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is compared, and why.

    Parameters
    ----------
    output
        The compared output; empty: the task names several, or any.
    options
        Further options of `[[models]]` and its tables, by dotted name.
    why
        In words, for the comment beside it.
    embedding
        A vector for each item whose clusters could be slices: an output, or an inner tensor of the file; empty: none was found.
    doubts
        What a person should look at.
    """

    task: Task
    output: str = ""
    output_kind: OutputKind | None = None
    options: Mapping[str, Any] = {}
    why: str
    embedding: str = ""
    doubts: tuple[str, ...] = ()


class Proposal(msgspec.Struct, kw_only=True):
    """Everything that `quantdrift init` writes; a person may change it before.

    Parameters
    ----------
    tap
        Socket by which the server reports its exchanges; empty: they are relayed from `listen` to `backend`.
    name
        Of the model, as on the wire.
    reference
        Path of its file, as it stands in the configuration; empty: none yet.
    runtime
        What runs it, if that is not the default.
    digest
        Of a file that is code.
    url, served_as
        Of a reference at a server: its address, and its name there if that is another one.
    groups
        What becomes slices, by source and name: the values that were seen, with their shares.
    rare
        Of these, header and value of requests that are sampled whole.
    person
        Header that names a person or session; empty: none.
    secretive
        Attributes with more values than a slice can have, which are not recorded.
    features
        Slices by features of the input.
    requests_per_s
        Of this model; None: no traffic was watched.
    max_exchange_bytes
        Largest exchange that a sidecar must capture; 0: its default is enough.
    notes
        What was found and is no option.
    """

    listen: str
    backend: str
    tap: str = ""
    name: str
    choice: Choice
    reference: str = ""
    runtime: str = ""
    digest: str = ""
    url: str = ""
    served_as: str = ""
    groups: dict[tuple[Source, str], dict[str, float]] = {}
    rare: tuple[tuple[str, str], ...] = ()
    person: str = ""
    secretive: tuple[str, ...] = ()
    features: tuple[Slice, ...] = ()
    rate: float = 0.05
    requests_per_s: float | None = None
    max_exchange_bytes: int = 0
    flip: float = 0.01
    otlp: str = ""
    notes: list[str] = []


def choose(reference: ModelFile, rows: Mapping[str, Array] | None = None) -> Choice:
    """Return how the outputs of a model are compared.

    Parameters
    ----------
    reference
        Its file.
    rows
        Captured outputs by name : (items, ...), where traffic was watched: they tell what no operator tells.

    Raises
    ------
    OperatorError
        No output can be compared.
    """
    floats = [spec for spec in reference.outputs if spec.dtype.kind == "f"]
    if not floats:
        raise OperatorError(_nothing_to_compare(reference))
    doubts: list[str] = []
    if reference.maps:
        doubts.append(
            f"the output {reference.maps[0]} is a list or dictionary and cannot be compared: export without ZipMap"
        )
    if boxes := _detection(reference):
        return Choice(
            task=Task.DETECTION,
            options={f"detection.{option}": name for option, name in boxes.items()},
            why=f"the outputs {', '.join(boxes.values())} are boxes with scores",
            doubts=(*doubts, "are the boxes xyxy, xywh or cxcywh? (detection.box_format)"),
        )
    spec = max(floats, key=_likeness)
    chosen = _of_output(reference, spec, None if rows is None else rows.get(spec.name))
    others = [other.name for other in reference.outputs if other.name != spec.name]
    why = chosen.why
    if others:
        why += f"; {', '.join(others)} {'is' if len(others) == 1 else 'are'} not compared"
    output = spec.name if others else ""
    embedding = spec.name if chosen.task is Task.EMBEDDING else reference.pooled.get(spec.name, "")
    return msgspec.structs.replace(
        chosen, output=output, why=why, embedding=embedding, doubts=(*doubts, *chosen.doubts)
    )


def _nothing_to_compare(reference: ModelFile) -> str:
    outputs = ", ".join(str(spec) for spec in reference.outputs) or "none that is a tensor"
    zipmap = (
        " Export it without ZipMap (options={'zipmap': False}), so that it gives probabilities."
        if reference.maps
        else ""
    )
    return f"{reference.path} has no output of floating-point numbers that could be compared; its outputs: {outputs}.{zipmap}"


def _detection(reference: ModelFile) -> dict[str, str]:
    """Return the outputs of a detector by option; empty: it is none."""
    found: dict[str, str] = {}
    for option, pattern in _DETECTIONS:
        names = [spec.name for spec in reference.outputs if re.search(pattern, spec.name.lower())]
        if names and names[0] not in found.values():
            found[option] = names[0]
    boxes = next((spec for spec in reference.outputs if spec.name == found.get("boxes")), None)
    is_detector = boxes is not None and "scores" in found and boxes.shape[-1:] in {(4,), (None,)}
    return found if is_detector else {}


def _likeness(spec: TensorSpec) -> tuple[int, int]:
    """Return how likely an output is the one to compare: the one that is called so, else the first."""
    name = spec.name.lower()
    return (
        any(word in name for word in ("prob", "logit", "score", "embed", "predict")),
        len(spec.shape) == _FEW,
    )


def _of_output(reference: ModelFile, spec: TensorSpec, rows: Array | None) -> Choice:
    shape, last = spec.shape, reference.kinds.get(spec.name)
    width = shape[1] if len(shape) == _FEW else None
    if spec.name in reference.unit_vectors or (rows is not None and _are_unit(rows)):
        return Choice(task=Task.EMBEDDING, why=f"{spec.name} is a vector of length 1")
    if len(shape) <= 1 or width == 1:
        if last is not None and last.kind is OutputKind.PROBABILITIES:
            return Choice(
                task=Task.MULTILABEL,
                output_kind=OutputKind.PROBABILITIES,
                why=f"{spec.name} is one probability ({last.operator})",
            )
        return Choice(task=Task.REGRESSION, why=f"{spec.name} is one number for each item")
    if len(shape) == _FEW:
        return _of_row(spec, last, rows)
    if len(shape) == 4 and last is not None:
        return Choice(
            task=Task.SEGMENTATION,
            output_kind=last.kind,
            why=f"{spec.name} has a score for each class and pixel ({last.operator})",
            doubts=("if it is no mask, set task to tensor",),
        )
    return Choice(
        task=Task.TENSOR,
        why=f"{spec} has no meaning that its file tells: numbers are compared",
        doubts=("set task if it is a mask, boxes or a ranking",),
    )


def _of_row(spec: TensorSpec, last: LastOperator | None, rows: Array | None) -> Choice:
    """Return how an output with a row of numbers for each item is compared."""
    name = spec.name.lower()
    if any(word in name for word in ("embed", "vector", "feature")) and (
        last is None or last.kind is OutputKind.LOGITS
    ):
        return Choice(task=Task.EMBEDDING, why=f"{spec.name} is a vector, by its name")
    if last is None and rows is not None and len(rows) and np.isfinite(rows).all():
        in_unit = bool((rows >= 0).all() and (rows <= 1).all())
        adds_up = in_unit and bool(np.allclose(rows.sum(axis=1), 1, atol=1e-3))
        kind = OutputKind.PROBABILITIES if adds_up else OutputKind.LOGITS
        why = (
            f"the {len(rows)} rows of {spec.name} that were seen {'add' if adds_up else 'do not add'} up to 1"
        )
        doubts = (
            ("several labels may be correct at once? then task = multilabel",)
            if in_unit and not adds_up
            else ()
        )
        return Choice(task=Task.CLASSIFICATION, output_kind=kind, why=why, doubts=doubts)
    if last is None:
        return Choice(
            task=Task.CLASSIFICATION,
            output_kind=OutputKind.LOGITS,
            why=f"{spec.name} has a number for each class",
            doubts=(f"the file does not tell whether {spec.name} holds logits or probabilities",),
        )
    if last.kind is OutputKind.PROBABILITIES and not last.sums_to_one:
        return Choice(
            task=Task.MULTILABEL,
            output_kind=last.kind,
            why=f"{spec.name} has a probability for each label ({last.operator})",
        )
    return Choice(task=Task.CLASSIFICATION, output_kind=last.kind, why=f"{spec.name} ends in {last.operator}")


def _are_unit(rows: Array) -> bool:
    if rows.ndim != _FEW or rows.shape[1] < 8 or not len(rows) or not np.isfinite(rows).all():
        return False
    return bool(np.allclose(np.linalg.norm(rows.astype(np.float64), axis=1), 1, atol=1e-3))


def name_of(
    asked: str, reference: str, server: Server | None, traffic: Traffic | None, outputs: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the model's name on the wire, and what to say of it.

    Parameters
    ----------
    asked
        What the user wrote; empty: nothing.
    reference
        The name of its file without the ending, or of the model at its server; empty: there is none.
    outputs
        Of the reference, to choose among several models.
    """
    seen = [model.name for model in traffic.models if model.name] if traffic is not None else []
    served = list(server.models) if server is not None else []
    names = seen or [model.name for model in served]
    if asked:
        if names and asked not in names:
            return asked, [f"no request and no server names the model {asked}: they name {', '.join(names)}"]
        return asked, []
    if len(names) > 1 and not seen:
        names = [model.name for model in served if set(model.outputs) & set(outputs)] or names
    if names:
        others = [name for name in names if name != names[0]]
        return names[0], [f"other models are served, too: {', '.join(others)}"] if others else []
    stem = re.sub(r"[-_.]?(fp32|f32|float32|reference)$", "", reference)
    return stem or "model", []


def rate_of(requests_per_s: float) -> float:
    """Return the share of the requests to sample that leaves some ten a second: the ratio to ten is the nearest to 1."""
    return min(_RATES, key=lambda rate: abs(math.log(rate * max(requests_per_s, 1.0) / _REPLAYS_PER_S)))


def use_traffic(proposal: Proposal, traffic: Traffic, inputs: Mapping[str, Array]) -> None:
    """Add what the traffic of the model tells: rates, headers, a person's header, features of inputs.

    Parameters
    ----------
    inputs
        Inputs that were captured, by name : (items, ...).
    """
    models = _models(proposal.name, traffic)
    n = sum(model.n for model in models)
    if traffic.seconds > 0 and n:
        proposal.requests_per_s = n / traffic.seconds
        proposal.rate = rate_of(proposal.requests_per_s)
    proposal.max_exchange_bytes = exchange_limit(traffic.largest_bytes)
    if n < _LEAST_REQUESTS:
        if n:
            proposal.notes.append(f"{n} requests are too few to propose slices: at least {_LEAST_REQUESTS}")
        return
    versions = [version for model in models for version in model.versions]
    if versions:
        proposal.notes.append(f"versions on the wire: {', '.join(versions[:_MOST_SHOWN])}")
    for attribute in _own(models):
        key = (attribute.source, attribute.name)
        is_person = bool(_PERSON.fullmatch(attribute.name.rpartition(".")[2]))
        if attribute.n < n / 10:
            continue
        if (
            is_person
            and attribute.source is Source.HEADER
            and attribute.n_values > _FEW
            and not proposal.person
        ):
            proposal.person = attribute.name
        elif (
            _FEW <= len(attribute.values) <= min(MOST_VALUES, attribute.n // 3)
            and max(map(len, attribute.values)) <= _LONGEST
            and len(proposal.groups) < _MOST_SLICES
        ):
            proposal.groups[key] = {plain(value): count / n for value, count in attribute.values.items()}
        elif attribute.n_values > _FEW:
            proposal.secretive = (*proposal.secretive, attribute.name)
    proposal.rare = tuple(rare_values(proposal.groups))[:_MOST_RARE] if proposal.rate < 1 else ()
    proposal.features = tuple(_features(inputs))


def exchange_limit(largest_bytes: int) -> int:
    """Return the limit of an exchange that has room for half as much again as the largest that came; 0: the default has it."""
    needed = largest_bytes * 3 // 2
    if needed <= Sidecar().max_exchange_bytes:
        return 0
    return math.ceil(needed / MIB) * MIB


def people_note(header: str) -> str:
    """Return what it costs that a header names a person."""
    return (
        f"{header} names a person: requests of one within {duration(_SESSION)} count as one observation, when that time is over. In a new"
        " version half of them count sooner: with 600 people in two minutes a first verdict takes four, with few it takes longer than that"
        " time. Without sampling.sticky_header it would be wrong where a person's answers are alike"
    )


def rare_values(groups: Mapping[tuple[Source, str], Mapping[str, float]]) -> Iterator[tuple[str, str]]:
    """Yield header and value of groups of requests that a sample would hardly have."""
    for (source, name), shares in groups.items():
        if source is Source.HEADER:
            yield from ((name, value) for value, share in shares.items() if share < RARE)


def slice_names(groups: Iterable[tuple[Source, str]]) -> dict[tuple[Source, str], str]:
    """Return the names of the slices by attributes: each attribute's own without `x-`, with its source where that is taken."""
    names: dict[tuple[Source, str], str] = {}
    for source, name in groups:
        short = name.removeprefix("x-") if source is Source.HEADER else name
        names[source, name] = f"{source.value} {short}" if short in names.values() else short
    return names


def _models(name: str, traffic: Traffic | None) -> list[SeenModel]:
    return [model for model in traffic.models if model.name == name] if traffic is not None else []


def _own(models: Sequence[SeenModel]) -> list[SeenAttribute]:
    """Return the attributes that may say something of the input, those with the fewest values first."""
    attributes = [
        attribute
        for model in models[:1]
        for attribute in model.attributes
        if not _SECRET.fullmatch(attribute.name.lower())
        and not (attribute.source is Source.HEADER and _TECHNICAL.fullmatch(attribute.name))
    ]
    return sorted(attributes, key=lambda seen: (not seen.values, len(seen.values), seen.source, seen.name))


def _features(inputs: Mapping[str, Array]) -> Iterator[Slice]:
    """Yield slices by the features of the first input that differ between items."""
    if not inputs or len(next(iter(inputs.values()))) < _LEAST_ITEMS:
        return
    name, array = next(iter(inputs.items()))
    if array.ndim == _FEW and array.shape[1] <= _MOST_COLUMNS and array.dtype != np.dtype(object):
        yield from itertools.islice(_columns(array.astype(np.float64)), _MOST_SLICES)
        return
    wanted = ("length",) if array.dtype == np.dtype(object) else ("contrast", "mean", "norm")
    for feature in wanted:
        rule = Slice(name=feature, feature=feature, edges=(0.0,))
        values = [next(iter(item.values())) for item in features_of([rule], {name: array}) if item]
        edges = quantiles(values, (0.1, 0.9)) if values else []
        if len(edges) == _FEW:
            yield Slice(name=feature, feature=feature, edges=tuple(edges))
            return


def _columns(table: Array) -> Iterator[Slice]:
    """Yield slices by the columns of a table that have few values: groups, such as a region or a tariff, by number."""
    if np.isnan(table).any():
        yield Slice(name="missing", feature="missing", edges=(1e-9,))
    for column, numbers in enumerate(table.T):
        values = np.unique(numbers[np.isfinite(numbers)])
        if _FEW <= len(values) <= _MOST_GROUPS:
            groups = tuple(f"{value:g}" for value in values)
            yield Slice(name=f"column {column}", feature="value", column=column, values=groups)
