"""What Envoy tells an external processor of one HTTP exchange, in the order in which it does."""

import json
from collections.abc import Iterator, Mapping, Sequence

from quantdrift.sidecar.intake import ext_proc_pb2 as wire
from tests.support.sidecar.raw_exchanges import REQUEST, RESPONSE

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
PATH = "/v2/models/digits/infer"
GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
ASKED, ANSWERED = json.dumps(REQUEST).encode(), json.dumps(RESPONSE).encode()


def fields(given: Mapping[str, str]) -> wire.HeaderMap:
    """Return header fields as Envoy sends them: their values are bytes."""
    return wire.HeaderMap(
        headers=[
            wire.HeaderValue(key=name.encode(), raw_value=value.encode()) for name, value in given.items()
        ]
    )


def request_headers(
    headers: Mapping[str, str] | None = None,
    *,
    path: str = PATH,
    method: str = "POST",
    ends: bool = False,
    observes: bool = True,
) -> bytes:
    """Return the first message of a stream."""
    pseudo = {":authority": "models", ":path": path, ":method": method, ":scheme": "http"}
    told = wire.HttpHeaders(headers=fields({**pseudo, **(headers or {})}), end_of_stream=ends)
    return _sent(wire.ProcessingRequest(request_headers=told, observability_mode=observes))


def response_headers(
    headers: Mapping[str, str] | None = None, *, status: int = 200, ends: bool = False
) -> bytes:
    """Return the message with a response's headers."""
    told = wire.HttpHeaders(headers=fields({":status": str(status), **(headers or {})}), end_of_stream=ends)
    return _sent(wire.ProcessingRequest(response_headers=told, observability_mode=True))


def request_body(body: bytes, *, ends: bool = False) -> bytes:
    """Return a message with a piece of a request's body."""
    told = wire.HttpBody(body=body, end_of_stream=ends)
    return _sent(wire.ProcessingRequest(request_body=told, observability_mode=True))


def response_body(body: bytes, *, ends: bool = False) -> bytes:
    """Return a message with a piece of a response's body."""
    told = wire.HttpBody(body=body, end_of_stream=ends)
    return _sent(wire.ProcessingRequest(response_body=told, observability_mode=True))


def request_trailers() -> bytes:
    """Return the message with a request's trailers."""
    told = wire.HttpTrailers(trailers=fields({"x-end": "1"}))
    return _sent(wire.ProcessingRequest(request_trailers=told, observability_mode=True))


def response_trailers(headers: Mapping[str, str]) -> bytes:
    """Return the message with a response's trailers."""
    told = wire.HttpTrailers(trailers=fields(headers))
    return _sent(wire.ProcessingRequest(response_trailers=told, observability_mode=True))


def exchange(
    request: Sequence[bytes] = (ASKED,),
    response: Sequence[bytes] = (ANSWERED,),
    headers: Mapping[str, str] | None = None,
    *,
    path: str = PATH,
    trailers: Mapping[str, str] | None = None,
) -> list[bytes]:
    """Return the messages of a whole exchange.

    Parameters
    ----------
    request, response
        Bodies, in pieces.
    headers
        Of the request.
    path
        Of the request.
    trailers
        Of the response, where it has any: then no piece of its body says that it is the last.
    """
    messages = [request_headers(headers, path=path)]
    messages += [request_body(piece, ends=last) for piece, last in _marked(request)]
    messages += [response_headers()]
    messages += [response_body(piece, ends=last and trailers is None) for piece, last in _marked(response)]
    return messages if trailers is None else [*messages, response_trailers(trailers)]


def _marked(pieces: Sequence[bytes]) -> Iterator[tuple[bytes, bool]]:
    for place, piece in enumerate(pieces, 1):
        yield piece, place == len(pieces)


def _sent(message: wire.ProcessingRequest) -> bytes:
    return message.SerializeToString()
