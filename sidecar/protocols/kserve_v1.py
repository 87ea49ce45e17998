"""Decoder of KServe v1, the REST protocol of TensorFlow Serving: `POST /v1/models/NAME:predict`.

By rows, `{"instances": [...]}` -> `{"predictions": [...]}`, where a row is a value or an object of named
values; or by columns, `{"inputs": ...}` -> `{"outputs": ...}`, one tensor or an object of named tensors.
There are no datatypes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quantdrift.core.config.schema import Model, ModelTensor
from quantdrift.core.records import Loss, Tensor
from quantdrift.sidecar.protocols.decoder import DecodedRequest, DecodedResponse, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.protocols.json_tensors import is_bytes, read_document, untyped_tensor

_REQUEST = {"instances": True, "inputs": False}
_RESPONSE = {"predictions": True, "outputs": False}
_SIGNATURE = "signature_name"


class KserveV1:
    """Decoder of requests `POST /v1/models/NAME:predict` and their responses."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request.

        Raises
        ------
        LostError
            `decode`: it does not follow the protocol, rows differ, or values are of several kinds.
            `metadata`: an empty list of unknown type. `too_large`: too many values.
        """
        document = read_document(body, wire.max_values)
        parameters = {_SIGNATURE: document[_SIGNATURE]} if _SIGNATURE in document else {}
        return DecodedRequest(
            inputs=request_tensors(document, wire.model), parameters=parameters, document=document
        )

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response; errors as for a request."""
        document = read_document(body, wire.max_values)
        return DecodedResponse(version="", outputs=response_tensors(document, wire.model))


def request_tensors(document: Mapping[str, Any], model: Model | None) -> tuple[Tensor, ...]:
    """Return the inputs of a document with `instances` or `inputs`; errors as for a request."""
    configured = () if model is None else model.inputs
    return _tensors(document, _REQUEST, configured, _only(configured, "instances"))


def response_tensors(document: Mapping[str, Any], model: Model | None) -> tuple[Tensor, ...]:
    """Return the outputs of a document with `predictions` or `outputs`; errors as for a request."""
    configured = () if model is None else model.outputs
    return _tensors(document, _RESPONSE, configured, output_name(model, "predictions"))


def output_name(model: Model | None, otherwise: str) -> str:
    """Return the name for an output that has none on the wire.

    It is the name of the only configured output, else of the compared output, else `otherwise`.
    """
    if model is None:
        return otherwise
    return _only(model.outputs, model.output or otherwise)


def named_tensors(columns: Mapping[str, Any], configured: Sequence[ModelTensor]) -> tuple[Tensor, ...]:
    """Return a tensor for each name; errors as for a request."""
    by_name = {tensor.name: tensor for tensor in configured}
    if not columns:
        raise LostError(Loss.DECODE, "there are no tensors")
    return tuple(untyped_tensor(name, data, by_name.get(name)) for name, data in columns.items())


def _tensors(
    document: Mapping[str, Any], members: Mapping[str, bool], configured: Sequence[ModelTensor], unnamed: str
) -> tuple[Tensor, ...]:
    present = [name for name in members if name in document]
    if len(present) != 1:
        raise LostError(Loss.DECODE, f"exactly one of {' and '.join(members)} is required")
    data = document[present[0]]
    if members[present[0]] and isinstance(data, list) and any(_is_named(row) for row in data):
        data = _columns(data)
    return named_tensors(data if _is_named(data) else {unnamed: data}, configured)


def _only(configured: Sequence[ModelTensor], otherwise: str) -> str:
    return configured[0].name if len(configured) == 1 else otherwise


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and not is_bytes(value)


def _columns(rows: list[Any]) -> dict[str, list[Any]]:
    names = rows[0].keys() if isinstance(rows[0], dict) else {}
    if not all(_is_named(row) and row.keys() == names for row in rows):
        raise LostError(Loss.DECODE, "rows have different names")
    return {name: [row[name] for row in rows] for name in names}
