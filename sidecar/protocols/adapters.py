"""How TorchServe's bodies are read: three ways that come with it, and any of one's own.

`bytes` keeps them as they are, `json` reads KServe v1 and plain JSON, `scores` reads what TorchServe's classifiers
answer. An adapter of one's own is code that runs in the capture process: `package.module:Name`, called without
arguments.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Loss, Tensor
from quantdrift.sidecar.protocols.decoder import Adapter, Part, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.json_tensors import pack_values, read_json, text_tensor
from quantdrift.sidecar.protocols.kserve_v1 import (
    named_tensors,
    output_name,
    request_tensors,
    response_tensors,
)

_MAX_SCORES = 100_000


class BytesAdapter:
    """Keeps bodies as they are: each field of a form, or the whole body, is a tensor of BYTES.

    A reference that takes text can be replayed from it; images need an adapter of one's own.
    """

    def inputs(self, parts: Sequence[Part], wire: WireContext) -> tuple[Tensor, ...]:
        """Return one tensor per name : BYTES, (fields of that name,)."""
        fields: dict[str, list[str | bytes]] = {}
        for part in parts:
            fields.setdefault(part.name, []).append(part.data)
        return tuple(text_tensor(name, values) for name, values in fields.items())

    def outputs(self, part: Part, wire: WireContext) -> tuple[Tensor, ...]:
        """Return the body : BYTES, (1,)."""
        return (text_tensor(output_name(wire.model, part.name), [part.data]),)


class JsonAdapter:
    """Reads JSON: a document of KServe v1, an object of named tensors, or one tensor."""

    def inputs(self, parts: Sequence[Part], wire: WireContext) -> tuple[Tensor, ...]:
        """Return the tensors of the body or the only field, or one for each of several fields.

        Raises
        ------
        LostError
            As from KServe v1's decoder.
        """
        if len(parts) == 1:
            document = read_json(parts[0].data, wire.max_values)
            return request_tensors(_enveloped(document, "instances", "inputs"), wire.model)
        columns = {part.name: read_json(part.data, wire.max_values) for part in parts}
        if len(columns) < len(parts):
            raise LostError(Loss.DECODE, "two fields of one name")
        return named_tensors(columns, () if wire.model is None else wire.model.inputs)

    def outputs(self, part: Part, wire: WireContext) -> tuple[Tensor, ...]:
        """Return the tensors of the body; errors as for a request."""
        document = read_json(part.data, wire.max_values)
        return response_tensors(_enveloped(document, "predictions", "outputs"), wire.model)


class ScoresAdapter(BytesAdapter):
    """Reads an object from label to probability, or a list of them: TorchServe's image and text classifiers.

    It becomes what Triton's classification extension answers, `value:index:label`, the largest first : BYTES,
    (items, labels). The index comes from the configured labels; without them the label must be the index itself.
    """

    def outputs(self, part: Part, wire: WireContext) -> tuple[Tensor, ...]:
        """Return the tensor.

        Raises
        ------
        LostError
            `decode`: no such objects, or of several sizes. `metadata`: a label that is not configured. `too_large`:
            more scores than may be held.
        """
        document = read_json(part.data, wire.max_values)
        rows = document if isinstance(document, list) else [document]
        sizes = {len(row) if isinstance(row, dict) else 0 for row in rows}
        if len(sizes) != 1 or 0 in sizes:
            raise LostError(Loss.DECODE, "no objects from label to score, or of several sizes")
        if len(rows) * len(rows[0]) > _MAX_SCORES:
            raise LostError(Loss.TOO_LARGE, f"more than {_MAX_SCORES} scores")
        labels = () if wire.model is None else wire.model.labels
        places = {label: place for place, label in enumerate(labels)}
        texts = [text for row in rows for text in _ranked(row, places)]
        return (
            Tensor(
                name=output_name(wire.model, "scores"),
                datatype="BYTES",
                shape=(len(rows), len(rows[0])),
                data=pack_values(texts, "BYTES"),
            ),
        )


BUILT_IN: Mapping[str, Callable[[], Adapter]] = {
    "bytes": BytesAdapter,
    "json": JsonAdapter,
    "scores": ScoresAdapter,
}


def load_adapter(name: str) -> Adapter:
    """Return the adapter called `name`; one that does not come with quantdrift is imported, which runs its code.

    Raises
    ------
    OperatorError
        It cannot be imported or made, or is no adapter.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    module, _, kind = name.partition(":")
    try:
        adapter = getattr(importlib.import_module(module), kind)()
    except Exception as error:
        raise OperatorError(f"models.adapter `{name}` cannot be made: {error!r}") from error
    if not all(callable(getattr(adapter, method, None)) for method in ("inputs", "outputs")):
        raise OperatorError(f"models.adapter `{name}` is none: it needs the methods `inputs` and `outputs`")
    return adapter  # type: ignore[no-any-return]  # whatever has the methods is one


def _enveloped(document: Any, rows: str, columns: str) -> Mapping[str, Any]:
    """Return the document as KServe v1 would have it: a bare list holds rows, anything else columns."""
    if isinstance(document, dict) and len({rows, columns} & document.keys()) == 1:
        return document
    return {rows if isinstance(document, list) else columns: document}


def _ranked(row: Mapping[str, Any], places: Mapping[str, int]) -> list[str]:
    if not all(type(value) in (int, float) for value in row.values()):
        raise LostError(Loss.DECODE, "a score that is no number")
    try:
        scores = sorted(((float(value), label) for label, value in row.items()), key=lambda entry: -entry[0])
    except OverflowError as error:
        raise LostError(Loss.DECODE, "a score that is no number") from error
    found = []
    for value, label in scores:
        place = places.get(label)
        if place is None and not places and label.isdecimal() and len(label) < 10:
            place = int(label)
        if place is None:
            raise LostError(Loss.METADATA, "a label that models.labels does not name")
        found.append(f"{value!r}:{place}:{label}")
    return found
