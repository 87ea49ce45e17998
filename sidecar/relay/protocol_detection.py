"""Tells by the first bytes of a client what is spoken on its connection, and who is to follow it."""

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
    """Stands in for an observer until the client has said enough.

    HTTP/2 is followed where the client knows beforehand that the backend speaks it; TLS is not, and counted. All
    else is taken for HTTP/1.1.

    Parameters
    ----------
    scope
        Shared by the worker's observers.
    on_decided
        Called with the observer that is shown everything from then on; what came before is shown to it right after.
    """

    __slots__ = ("_answers", "_early", "_early_bytes", "_on_decided")

    def __init__(self, scope: CaptureScope, on_decided: Callable[[ExchangeObserver], None]) -> None:
        super().__init__(scope)
        self._on_decided = on_decided
        self._early = b""
        self._answers: list[bytes] = []  # an HTTP/2 server need not wait for the client
        self._early_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether the client has sent nothing yet."""
        return self.is_active and not self._early

    def request(self, chunk: bytes) -> None:
        """Take bytes that the client sent."""
        if not self.is_active:
            return
        data = self._early + chunk
        if PREFACE.startswith(data) or _TLS.startswith(data):
            self._early = data
            return
        if data.startswith(_TLS):
            self._scope.slot.note(Gauge.BLIND)
            self.abandon(Loss.FRAMING)
            return
        observer = (Http2Observer if data.startswith(PREFACE) else Http1Observer)(self._scope)
        self.is_active = False
        self._on_decided(observer)
        for answer in self._answers:
            observer.response(answer)
        observer.request(data)

    def response(self, chunk: bytes) -> None:
        """Take bytes that the backend sent."""
        if not self.is_active:
            return
        self._early_bytes += len(chunk)
        if self._early_bytes > MAX_HEADER_BYTES:
            self._scope.slot.note(Gauge.BLIND)
            self.abandon(Loss.FRAMING)
            return
        self._answers.append(chunk)

    def response_eof(self) -> None:
        """Take note that the backend will send no more: nothing has begun."""

    def abandon(self, loss: Loss) -> None:
        """Forget what came, and follow no more."""
        super().abandon(loss)
        self._early = b""
        self._answers.clear()
