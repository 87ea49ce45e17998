"""One stream of Envoy's external processing: an HTTP exchange that arrives message by message. No I/O.

In observability mode Envoy waits for no answer and accepts none. It sends nothing more on a closed stream, so
a request that is not sampled costs one message.
"""

import logging
from enum import Enum, auto

from google.protobuf.message import DecodeError

from quantdrift.core.config.schema import Config
from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import Origin
from quantdrift.sidecar.intake import ext_proc_pb2 as wire
from quantdrift.sidecar.intake.gateway import Gateway, SampledRequest

# What gRPC keeps for an open stream: measured with 2,000 of them, on Linux x86-64 with CPython 3.11 and
# grpcio 1.85.
STREAM_BYTES = 32 * 1024
_PIECE_BYTES = 100  # memory of a piece of a body in addition to its content
_HTTP1 = b"HTTP/1.1"
_HTTP2 = b"HTTP/2"
_LOG = logging.getLogger(__name__)


class FilterAdvice(Enum):
    """The most likely fault in the configuration of Envoy's filter."""

    MODE = "set observability_mode of its ext_proc filter to true, because this server sends no answers"
    BODIES = "set request_body_mode and response_body_mode of its ext_proc filter to STREAMED"
    TRAILERS = "set response_trailer_mode of its ext_proc filter to SEND, because gRPC has its status there"


class StreamLimits:
    """The limit on buffered bytes, shared with the other intakes, and the advice that was logged already.

    Parameters
    ----------
    config
        Configuration of the sidecar.
    gateway
        Counts the buffered bytes of all intakes.
    """

    def __init__(self, config: Config, gateway: Gateway) -> None:
        self._gateway = gateway
        self._logged: set[FilterAdvice] = set()
        self._n_unfinished = 0
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        """Apply another limit."""
        self._limit_bytes = config.intake.max_pending_bytes

    def reserve(self, n_bytes: int) -> bool:
        """Reserve `n_bytes` if the limit allows; return whether they are reserved."""
        return self._gateway.reserve(n_bytes, self._limit_bytes)

    def release(self, n_bytes: int) -> None:
        """Release `n_bytes`."""
        self._gateway.add_held_bytes(-n_bytes)

    def unfinished_bytes(self) -> int:
        """Return how many bytes messages that have not arrived whole may have."""
        return self._limit_bytes - self._gateway.held_bytes + self._n_unfinished

    def add_unfinished(self, change: int) -> None:
        """Count bytes of messages that have not arrived whole."""
        self._n_unfinished += change
        self._gateway.add_held_bytes(change)

    def log_advice(self, advice: FilterAdvice) -> None:
        """Log once what to change in Envoy."""
        if advice not in self._logged:
            self._logged.add(advice)
            _LOG.warning("Envoy sent an incomplete exchange. If all are incomplete: %s", advice.value)


class _StreamPhase(Enum):
    HEADERS = auto()  # the headers have not arrived
    BODY = auto()
    ENDED = auto()


class _Half:
    """A request or a response, as far as it has arrived."""

    __slots__ = ("headers", "n_bytes", "pieces", "state")

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        self.n_bytes = 0
        self.state = _StreamPhase.HEADERS


class ExchangeStream:
    """One stream and its exchange.

    `end` must be called after the last message, in any case.

    Parameters
    ----------
    gateway
        Receives the exchange.
    limits
        Shared by all streams.
    origin
        Who sends it.
    """

    __slots__ = (
        "_charged_bytes",
        "_gateway",
        "_limits",
        "_origin",
        "_request",
        "_response",
        "_sampled",
        "_status",
    )

    def __init__(self, gateway: Gateway, limits: StreamLimits, origin: Origin) -> None:
        self._gateway = gateway
        self._origin = origin
        self._limits = limits
        self._sampled: SampledRequest | None = None
        self._request = _Half()
        self._response = _Half()
        self._status = 0
        self._charged_bytes = 0

    def take(self, data: bytes) -> bool:
        """Handle a message; return whether more are needed. If not, the stream must be closed.

        Parameters
        ----------
        data
            A ProcessingRequest, serialised.
        """
        try:
            message = wire.ProcessingRequest.FromString(data)
        except DecodeError as error:
            _LOG.debug("a message of Envoy cannot be parsed: %s", error)
            return self._lose(Loss.FRAMING)
        kind = message.WhichOneof("request")
        if self._sampled is None:
            return kind == "request_headers" and self._on_request_headers(message)
        if kind == "request_body":
            self._on_body(self._request, message.request_body)
        elif kind == "response_headers":
            self._on_response_headers(message.response_headers)
        elif kind == "response_body":
            self._on_body(self._response, message.response_body)
        elif kind == "request_trailers":
            self._request.state = _StreamPhase.ENDED  # they are not used
        elif kind == "response_trailers":
            self._on_trailers(message.response_trailers)
        elif kind == "request_headers":
            self._lose(Loss.FRAMING)  # other kinds of messages, which Envoy may add, are ignored
        if self._request.state is self._response.state is _StreamPhase.ENDED:
            self._hand_over()
        return self._sampled is not None

    def end(self) -> None:
        """Handle the end of the stream: an incomplete exchange is lost."""
        if self._sampled is not None:
            self._advise()
            self._lose(Loss.TRUNCATED)

    def _on_request_headers(self, message: wire.ProcessingRequest) -> bool:
        request_headers = message.request_headers
        pseudo = _fields(request_headers.headers, self._request)
        headers = self._request.headers
        if authority := pseudo.get(":authority"):
            headers.setdefault("host", authority)
        self._sampled = self._gateway.sample(
            pseudo.get(":path", ""),
            headers,
            pseudo.get(":method", ""),
            self._version,
            origin=self._origin,
        )
        if self._sampled is None:
            return False
        if not message.observability_mode:
            self._limits.log_advice(FilterAdvice.MODE)
            return self._lose(Loss.FRAMING)
        self._request.state = _StreamPhase.ENDED if request_headers.end_of_stream else _StreamPhase.BODY
        return self._charge(STREAM_BYTES + len(self._sampled.head))

    def _on_response_headers(self, response_headers: wire.HttpHeaders) -> None:
        if self._response.state is not _StreamPhase.HEADERS:
            self._lose(Loss.FRAMING)
            return
        status = _fields(response_headers.headers, self._response).get(":status", "")
        self._status = int(status) if status.isdecimal() else 0
        self._response.state = _StreamPhase.ENDED if response_headers.end_of_stream else _StreamPhase.BODY
        self._charge(response_headers.ByteSize())

    def _on_body(self, half: _Half, body: wire.HttpBody) -> None:
        if half.state is not _StreamPhase.BODY:
            self._lose(Loss.FRAMING)
            return
        if body.body:
            n_bytes = len(body.body)
            total = self._request.n_bytes + self._response.n_bytes + n_bytes
            if total > self._gateway.max_exchange_bytes:
                self._lose(Loss.TOO_LARGE)
                return
            if not self._charge(n_bytes + _PIECE_BYTES):
                return
            half.pieces.append(body.body)
            half.n_bytes += n_bytes
        if body.end_of_stream:
            half.state = _StreamPhase.ENDED

    def _on_trailers(self, message: wire.HttpTrailers) -> None:
        if self._response.state is not _StreamPhase.BODY:
            self._lose(Loss.FRAMING)
            return
        _fields(message.trailers, self._response)
        self._response.state = _StreamPhase.ENDED
        self._charge(message.ByteSize())

    def _hand_over(self) -> None:
        if self._sampled is None:
            return  # the last message exceeded a limit
        sampled, self._sampled = self._sampled, None
        self._gateway.hand_over(
            sampled,
            b"".join(self._request.pieces),
            b"".join(self._response.pieces),
            status=self._status,
            headers=self._response.headers,
            version=self._version,
        )
        self._release()

    @property
    def _version(self) -> bytes:
        is_grpc = self._request.headers.get("content-type", "").startswith("application/grpc")
        return _HTTP2 if is_grpc else _HTTP1

    def _charge(self, n_bytes: int) -> bool:
        if not self._limits.reserve(n_bytes):
            return self._lose(Loss.HELD_BYTES)
        self._charged_bytes += n_bytes
        return True

    def _lose(self, loss: Loss) -> bool:
        """Count the exchange as lost if there is one; return False, since no more messages are needed."""
        if self._sampled is not None:
            is_whole = self._request.state is _StreamPhase.ENDED
            self._gateway.lose(self._sampled, loss, b"".join(self._request.pieces) if is_whole else None)
            self._sampled = None
        self._release()
        return False

    def _release(self) -> None:
        self._request.pieces.clear()
        self._response.pieces.clear()
        self._limits.release(self._charged_bytes)
        self._charged_bytes = 0

    def _advise(self) -> None:
        """Log advice if the configuration of Envoy may be the reason for the missing part."""
        if self._response.state is not _StreamPhase.BODY:
            return
        if self._request.state is _StreamPhase.BODY and not self._request.n_bytes:
            self._limits.log_advice(FilterAdvice.BODIES)
        elif self._version == _HTTP2 and self._response.n_bytes:
            self._limits.log_advice(FilterAdvice.TRAILERS)


def _fields(message: wire.HeaderMap, half: _Half) -> dict[str, str]:
    """Add header fields to those of `half`, and return the pseudo-header fields."""
    pseudo: dict[str, str] = {}
    for field in message.headers:
        name, value = _text(field.key).lower(), _text(field.raw_value or field.value)
        if name.startswith(":"):
            pseudo[name] = value
        else:
            headers = half.headers
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return pseudo


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
