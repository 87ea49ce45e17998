"""Adapters for the bodies of TorchServe: three built-in ones, and custom ones.

`bytes` keeps bodies unchanged, `json` reads KServe v1 and plain JSON, `scores` reads the responses of
TorchServe's classifiers. A custom adapter, `package.module:Name`, is called without arguments; its code runs
in the capture process.
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
    """Keeps bodies unchanged: each field of a form, or the whole body, becomes a tensor of BYTES.

    This is enough to replay a reference that takes text; images need a custom adapter.
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
            As for the decoder of KServe v1.
        """
        if len(parts) == 1:
            document = read_json(parts[0].data, wire.max_values)
            return request_tensors(_enveloped(document, "instances", "inputs"), wire.model)
        columns = {part.name: read_json(part.data, wire.max_values) for part in parts}
        if len(columns) < len(parts):
            raise LostError(Loss.DECODE, "two fields with the same name")
        return named_tensors(columns, () if wire.model is None else wire.model.inputs)

    def outputs(self, part: Part, wire: WireContext) -> tuple[Tensor, ...]:
        """Return the tensors of the body; errors as for a request."""
        document = read_json(part.data, wire.max_values)
        return response_tensors(_enveloped(document, "predictions", "outputs"), wire.model)


class ScoresAdapter(BytesAdapter):
    """Reads an object from label to probability, or a list of them: TorchServe's image and text classifiers.

    The result has the form of Triton's classification extension, `value:index:label`, the largest value first
    : BYTES, (items, labels). The index is that of the configured label; without labels the label must be the
    index itself.
    """

    def outputs(self, part: Part, wire: WireContext) -> tuple[Tensor, ...]:
        """Return the tensor.

        Raises
        ------
        LostError
            `decode`: not such objects, or of different sizes. `metadata`: a label that is not configured.
            `too_large`: too many scores.
        """
        document = read_json(part.data, wire.max_values)
        rows = document if isinstance(document, list) else [document]
        sizes = {len(row) if isinstance(row, dict) else 0 for row in rows}
        if len(sizes) != 1 or 0 in sizes:
            raise LostError(Loss.DECODE, "not objects from label to score, or of different sizes")
        if len(rows) * len(rows[0]) > _MAX_SCORES:
            raise LostError(Loss.TOO_LARGE, f"more than {_MAX_SCORES} scores")
        labels = () if wire.model is None else wire.model.labels
        indices = {label: index for index, label in enumerate(labels)}
        texts = [text for row in rows for text in _ranked(row, indices)]
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
    """Return the adapter called `name`; a custom one is imported, which runs its code.

    Raises
    ------
    OperatorError
        It cannot be imported or created, or lacks the methods of an adapter.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    module, _, kind = name.partition(":")
    try:
        adapter = getattr(importlib.import_module(module), kind)()
    except Exception as error:
        raise OperatorError(f"models.adapter `{name}` cannot be created: {error!r}") from error
    if not all(callable(getattr(adapter, method, None)) for method in ("inputs", "outputs")):
        raise OperatorError(
            f"models.adapter `{name}` is not an adapter: it needs the methods `inputs` and `outputs`"
        )
    return adapter  # type: ignore[no-any-return]  # any object with the methods is an adapter


def _enveloped(document: Any, rows: str, columns: str) -> Mapping[str, Any]:
    """Return the document in the form of KServe v1: a bare list has rows, anything else has columns."""
    if isinstance(document, dict) and len({rows, columns} & document.keys()) == 1:
        return document
    return {rows if isinstance(document, list) else columns: document}


def _ranked(row: Mapping[str, Any], indices: Mapping[str, int]) -> list[str]:
    if not all(type(value) in (int, float) for value in row.values()):
        raise LostError(Loss.DECODE, "a score is not a number")
    try:
        scores = sorted(((float(value), label) for label, value in row.items()), key=lambda entry: -entry[0])
    except OverflowError as error:
        raise LostError(Loss.DECODE, "a score is not a number") from error
    lines = []
    for value, label in scores:
        index = indices.get(label)
        if index is None and not indices and label.isdecimal() and len(label) < 10:
            index = int(label)
        if index is None:
            raise LostError(Loss.METADATA, "a label that models.labels does not name")
        lines.append(f"{value!r}:{index}:{label}")
    return lines
