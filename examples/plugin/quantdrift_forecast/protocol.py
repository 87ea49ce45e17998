"""The protocol `score-v1`: `POST /v1/score`, whose body names the model.

    {"model": "demand", "inputs": {"x": [[1.0, 2.0]]}}  ->  {"version": "int8-1", "outputs": {"forecast": [[3.0, 4.0, 5.0]]}}

Values are JSON; the datatypes are those of `[[models.inputs]]` and `[[models.outputs]]`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quantdrift.plugins.protocols import (
    DecodedRequest,
    DecodedResponse,
    Head,
    Loss,
    LostError,
    ModelTensor,
    ProtocolPlugin,
    Tensor,
    WireContext,
    read_document,
    untyped_tensor,
)


class Score:
    """Decoder of requests `POST /v1/score` and their responses."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request, with tensors of the types that the configuration gives to the model it names."""
        document = read_document(body, wire.max_values)
        name = document.get("model")
        if not isinstance(name, str) or not name:
            raise LostError(Loss.DECODE, "`model` is missing")
        model = wire.model_named(name)
        return DecodedRequest(
            inputs=_tensors(document.get("inputs"), model.inputs), document=document, model=name
        )

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response to `query`; `wire.model` is the model that it names."""
        document = read_document(body, wire.max_values)
        version = document.get("version", "")
        if not isinstance(version, str):
            raise LostError(Loss.DECODE, "`version` is no text")
        outputs = () if wire.model is None else wire.model.outputs
        return DecodedResponse(version=version, outputs=_tensors(document.get("outputs"), outputs))


def _tensors(columns: Any, configured: Sequence[ModelTensor]) -> tuple[Tensor, ...]:
    if not isinstance(columns, Mapping) or not columns:
        raise LostError(Loss.DECODE, "there are no tensors")
    known = {tensor.name: tensor for tensor in configured}
    return tuple(untyped_tensor(name, data, known.get(name)) for name, data in columns.items())


SCORE = ProtocolPlugin(path="/v1/score", decoder=Score())
