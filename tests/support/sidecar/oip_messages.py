"""Open Inference messages over HTTP, given to the decoder as the recorder gives them."""

from quantdrift.core.config.schema import Model
from quantdrift.sidecar.protocols.decoder import MAX_JSON_VALUES, DecodedRequest, DecodedResponse, WireContext
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.protocols.oip import OipRest


def decode_request(
    json_length: str | None,
    body: bytes,
    *,
    model: Model | None = None,
    max_values: int = MAX_JSON_VALUES,
) -> DecodedRequest:
    """Return the request in `body`, whose JSON part is so long."""
    wire = WireContext(max_bytes=len(body), max_values=max_values, model=model)
    return OipRest().request(_head(("POST", "/", "HTTP/1.1"), json_length), body, wire)


def decode_response(
    json_length: str | None, body: bytes, query: DecodedRequest | None = None
) -> DecodedResponse:
    """Return the response in `body`."""
    wire = WireContext(max_bytes=len(body))
    return OipRest().response(
        _head(("HTTP/1.1", "200", "OK"), json_length), body, query or DecodedRequest(inputs=()), wire
    )


def _head(start: tuple[str, str, str], json_length: str | None) -> Head:
    told = {} if json_length is None else {"inference-header-content-length": json_length}
    return Head(start=start, headers=told)
