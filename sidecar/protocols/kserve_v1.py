"""KServe v1, which is TensorFlow Serving's REST: `POST /v1/models/NAME:predict`, requests and responses to tensors.

By rows, `{"instances": [...]}` -> `{"predictions": [...]}`, a row being a value or an object of named values; or by
columns, `{"inputs": ...}` -> `{"outputs": ...}`, one tensor or an object of named ones. No type is on the wire.
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
            `decode`: not what the protocol says, rows that differ, or values of several kinds. `metadata`: an empty
            list, whose type nothing tells. `too_large`: more values than may be held.
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
    told = () if model is None else model.inputs
    return _tensors(document, _REQUEST, told, _only(told, "instances"))


def response_tensors(document: Mapping[str, Any], model: Model | None) -> tuple[Tensor, ...]:
    """Return the outputs of a document with `predictions` or `outputs`; errors as for a request."""
    told = () if model is None else model.outputs
    return _tensors(document, _RESPONSE, told, output_name(model, "predictions"))


def output_name(model: Model | None, otherwise: str) -> str:
    """Return what an output is called that has no name on the wire.

    That of the only configured output, or of the output that is compared, or `otherwise`.
    """
    if model is None:
        return otherwise
    return _only(model.outputs, model.output or otherwise)


def named_tensors(columns: Mapping[str, Any], told: Sequence[ModelTensor]) -> tuple[Tensor, ...]:
    """Return a tensor for each name; errors as for a request."""
    known = {tensor.name: tensor for tensor in told}
    if not columns:
        raise LostError(Loss.DECODE, "no tensor at all")
    return tuple(untyped_tensor(name, data, known.get(name)) for name, data in columns.items())


def _tensors(
    document: Mapping[str, Any], members: Mapping[str, bool], told: Sequence[ModelTensor], unnamed: str
) -> tuple[Tensor, ...]:
    given = [name for name in members if name in document]
    if len(given) != 1:
        raise LostError(Loss.DECODE, f"exactly one of {' and '.join(members)} is due")
    data = document[given[0]]
    if members[given[0]] and isinstance(data, list) and any(_is_named(row) for row in data):
        data = _columns(data)
    return named_tensors(data if _is_named(data) else {unnamed: data}, told)


def _only(told: Sequence[ModelTensor], otherwise: str) -> str:
    return told[0].name if len(told) == 1 else otherwise


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and not is_bytes(value)


def _columns(rows: list[Any]) -> dict[str, list[Any]]:
    names = rows[0].keys() if isinstance(rows[0], dict) else {}
    if not all(_is_named(row) and row.keys() == names for row in rows):
        raise LostError(Loss.DECODE, "rows that do not have the same names")
    return {name: [row[name] for row in rows] for name in names}
