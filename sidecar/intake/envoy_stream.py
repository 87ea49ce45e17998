"""One stream of Envoy's external processing: an HTTP exchange that is told message by message. No I/O.

In observability mode Envoy waits for no answer and takes none. A stream that is closed is told nothing more, so what is
not taken costs one message.
"""

import logging
from enum import Enum, auto

from google.protobuf.message import DecodeError

from quantdrift.core.config.schema import Config
from quantdrift.core.records import Loss
from quantdrift.sidecar.intake import ext_proc_pb2 as wire
from quantdrift.sidecar.intake.gateway import Gateway, SampledRequest

# What gRPC keeps for an open stream: measured with 2,000 of them, on Linux x86-64 with CPython 3.11 and grpcio 1.85.
STREAM_BYTES = 32 * 1024
_PIECE_BYTES = 100  # what a piece of a body costs beside its content
_HTTP1 = b"HTTP/1.1"
_HTTP2 = b"HTTP/2"
_LOG = logging.getLogger(__name__)


class FilterAdvice(Enum):
    """What is most likely wrong in the filter's configuration."""

    MODE = "observability_mode of its ext_proc filter must be true, nothing is answered here"
    BODIES = "request_body_mode and response_body_mode of its ext_proc filter must be STREAMED"
    TRAILERS = "response_trailer_mode of its ext_proc filter must be SEND, gRPC has its status there"


class StreamLimits:
    """What the streams share: a bound, which they share with the other ways in, and what was said of the filter.

    Parameters
    ----------
    config
        Of the sidecar.
    entrance
        Keeps the account.
    """

    def __init__(self, config: Config, entrance: Gateway) -> None:
        self._entrance = entrance
        self._said: set[FilterAdvice] = set()
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        """Go over to another bound."""
        self._limit_bytes = config.intake.max_pending_bytes

    def take(self, n_bytes: int) -> bool:
        """Hold `n_bytes` more, unless that is too much; return whether they are held."""
        if self._entrance.held_bytes + n_bytes > self._limit_bytes:
            return False
        self._entrance.hold(n_bytes)
        return True

    def give(self, n_bytes: int) -> None:
        """Hold `n_bytes` no more."""
        self._entrance.hold(-n_bytes)

    def say(self, advice: FilterAdvice) -> None:
        """Log once what may be to be changed in Envoy."""
        if advice not in self._said:
            self._said.add(advice)
            _LOG.warning("Envoy does not tell an exchange whole. If it tells none: %s", advice.value)


class _State(Enum):
    HEADERS = auto()  # of the message have not come
    BODY = auto()
    ENDED = auto()


class _Half:
    """A request or a response, as far as it has been told."""

    __slots__ = ("headers", "n_bytes", "pieces", "state")

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        self.n_bytes = 0
        self.state = _State.HEADERS


class Stream:
    """Takes the messages of one stream.

    `end` must be called after the last, whatever happened.

    Parameters
    ----------
    entrance
        Where the exchange goes.
    room
        Shared by all streams.
    """

    __slots__ = ("_charged_bytes", "_entrance", "_request", "_response", "_room", "_status", "_ticket")

    def __init__(self, entrance: Gateway, room: StreamLimits) -> None:
        self._entrance = entrance
        self._room = room
        self._ticket: SampledRequest | None = None
        self._request = _Half()
        self._response = _Half()
        self._status = 0
        self._charged_bytes = 0

    def take(self, data: bytes) -> bool:
        """Take a message, and return whether another is wanted: where none is, the stream is to be closed.

        Parameters
        ----------
        data
            A ProcessingRequest, serialised.
        """
        try:
            message = wire.ProcessingRequest.FromString(data)
        except DecodeError as error:
            _LOG.debug("a message of Envoy's is unreadable: %s", error)
            return self._lose(Loss.FRAMING)
        kind = message.WhichOneof("request")
        if self._ticket is None:
            return kind == "request_headers" and self._ask(message)
        if kind == "request_body":
            self._body(self._request, message.request_body)
        elif kind == "response_headers":
            self._answer(message.response_headers)
        elif kind == "response_body":
            self._body(self._response, message.response_body)
        elif kind == "request_trailers":
            self._request.state = _State.ENDED  # there is nothing in them that is used
        elif kind == "response_trailers":
            self._trailers(message.response_trailers)
        elif kind == "request_headers":
            self._lose(Loss.FRAMING)  # what Envoy may tell beside, one day, is passed over
        if self._request.state is self._response.state is _State.ENDED:
            self._hand_over()
        return self._is_open

    def end(self) -> None:
        """Take note that nothing more will come: what is not complete is lost."""
        if self._ticket is not None:
            self._advise()
            self._lose(Loss.TRUNCATED)

    def _ask(self, message: wire.ProcessingRequest) -> bool:
        asked = message.request_headers
        pseudo = _fields(asked.headers, self._request)
        headers = self._request.headers
        if authority := pseudo.get(":authority"):
            headers.setdefault("host", authority)
        self._ticket = self._entrance.offer(
            pseudo.get(":path", ""), headers, pseudo.get(":method", ""), self._version
        )
        if self._ticket is None:
            return False
        if not message.observability_mode:
            self._room.say(FilterAdvice.MODE)
            return self._lose(Loss.FRAMING)
        self._request.state = _State.ENDED if asked.end_of_stream else _State.BODY
        return self._charge(STREAM_BYTES + len(self._ticket.head))

    def _answer(self, answered: wire.HttpHeaders) -> None:
        if self._response.state is not _State.HEADERS:
            self._lose(Loss.FRAMING)
            return
        status = _fields(answered.headers, self._response).get(":status", "")
        self._status = int(status) if status.isdecimal() else 0
        self._response.state = _State.ENDED if answered.end_of_stream else _State.BODY
        self._charge(answered.ByteSize())

    def _body(self, half: _Half, body: wire.HttpBody) -> None:
        if half.state is not _State.BODY:
            self._lose(Loss.FRAMING)
            return
        if body.body:
            n_bytes = len(body.body)
            total = self._request.n_bytes + self._response.n_bytes + n_bytes
            if total > self._entrance.max_exchange_bytes:
                self._lose(Loss.HELD_BYTES)
                return
            if not self._charge(n_bytes + _PIECE_BYTES):
                return
            half.pieces.append(body.body)
            half.n_bytes += n_bytes
        if body.end_of_stream:
            half.state = _State.ENDED

    def _trailers(self, told: wire.HttpTrailers) -> None:
        if self._response.state is not _State.BODY:
            self._lose(Loss.FRAMING)
            return
        _fields(told.trailers, self._response)
        self._response.state = _State.ENDED
        self._charge(told.ByteSize())

    def _hand_over(self) -> None:
        if self._ticket is None:
            return  # what came last was too much
        ticket, self._ticket = self._ticket, None
        self._entrance.hand_over(
            ticket,
            b"".join(self._request.pieces),
            b"".join(self._response.pieces),
            status=self._status,
            headers=self._response.headers,
            version=self._version,
        )
        self._release()

    @property
    def _is_open(self) -> bool:
        return self._ticket is not None

    @property
    def _version(self) -> bytes:
        is_grpc = self._request.headers.get("content-type", "").startswith("application/grpc")
        return _HTTP2 if is_grpc else _HTTP1

    def _charge(self, n_bytes: int) -> bool:
        if not self._room.take(n_bytes):
            return self._lose(Loss.HELD_BYTES)
        self._charged_bytes += n_bytes
        return True

    def _lose(self, loss: Loss) -> bool:
        """Let go of the exchange if there is one; return False: no more is wanted."""
        if self._ticket is not None:
            self._entrance.lose(self._ticket, loss)
            self._ticket = None
        self._release()
        return False

    def _release(self) -> None:
        self._request.pieces.clear()
        self._response.pieces.clear()
        self._room.give(self._charged_bytes)
        self._charged_bytes = 0

    def _advise(self) -> None:
        """Say so where what is missing may have a cause that a person can mend."""
        if self._response.state is not _State.BODY:
            return
        if self._request.state is _State.BODY and not self._request.n_bytes:
            self._room.say(FilterAdvice.BODIES)
        elif self._version == _HTTP2 and self._response.n_bytes:
            self._room.say(FilterAdvice.TRAILERS)


def _fields(told: wire.HeaderMap, half: _Half) -> dict[str, str]:
    """Add header fields to those of `half`, and return the pseudo-header fields."""
    pseudo: dict[str, str] = {}
    for field in told.headers:
        name, value = _text(field.key).lower(), _text(field.raw_value or field.value)
        if name.startswith(":"):
            pseudo[name] = value
        else:
            held = half.headers
            held[name] = f"{held[name]}, {value}" if name in held else value
    return pseudo


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
