"""Protocol detection: the first bytes of a client decide which observer follows its connection."""

from collections.abc import Callable

from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import MAX_HEADER_BYTES
from quantdrift.sidecar.relay.http1.observer import Http1Observer
from quantdrift.sidecar.relay.http2.frames import PREFACE
from quantdrift.sidecar.relay.http2.observer import Http2Observer
from quantdrift.sidecar.relay.observing.observer import CaptureScope, ExchangeObserver
from quantdrift.sidecar.state.counters import Gauge

_TLS = b"\x16\x03"  # a record of a handshake, in any version


class ProtocolDetector(ExchangeObserver):
    """The observer of a new connection until its protocol is known.

    HTTP/2 is followed where the client uses prior knowledge (h2c). TLS is not followed, but counted.
    Everything else is taken for HTTP/1.1.

    Parameters
    ----------
    scope
        Shared by the worker's observers.
    on_decided
        Called with the observer that gets everything from then on; it is given the earlier bytes right after.
    """

    __slots__ = ("_early_bytes", "_early_data", "_early_responses", "_on_decided")

    def __init__(self, scope: CaptureScope, on_decided: Callable[[ExchangeObserver], None]) -> None:
        super().__init__(scope)
        self._on_decided = on_decided
        self._early_data = b""
        self._early_responses: list[bytes] = []  # an HTTP/2 server need not wait for the client
        self._early_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether the client has sent nothing yet."""
        return self.is_active and not self._early_data

    def request(self, chunk: bytes) -> None:
        """Take bytes from the client."""
        if not self.is_active:
            return
        data = self._early_data + chunk
        if PREFACE.startswith(data) or _TLS.startswith(data):
            self._early_data = data
            return
        if data.startswith(_TLS):
            self._scope.slot.adjust(Gauge.BLIND)
            self.abandon(Loss.FRAMING)
            return
        observer = (Http2Observer if data.startswith(PREFACE) else Http1Observer)(self._scope)
        self.is_active = False
        self._on_decided(observer)
        for response in self._early_responses:
            observer.response(response)
        observer.request(data)

    def response(self, chunk: bytes) -> None:
        """Take bytes from the backend."""
        if not self.is_active:
            return
        self._early_bytes += len(chunk)
        if self._early_bytes > MAX_HEADER_BYTES:
            self._scope.slot.adjust(Gauge.BLIND)
            self.abandon(Loss.FRAMING)
            return
        self._early_responses.append(chunk)

    def response_eof(self) -> None:
        """Do nothing: no exchange has begun."""

    def abandon(self, loss: Loss) -> None:
        """Discard the bytes so far and stop observing."""
        super().abandon(loss)
        self._early_data = b""
        self._early_responses.clear()
