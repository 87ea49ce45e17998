"""Protocol detection: the first bytes of a client decide which observer follows its connection."""

from collections.abc import Callable

from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import MAX_HEADER_BYTES
from quantdrift.sidecar.relay.http1.observer import Http1Observer
from quantdrift.sidecar.relay.http2.frames import PREFACE
from quantdrift.sidecar.relay.http2.observer import Http2Observer
from quantdrift.sidecar.relay.observing.errors import FramingError
from quantdrift.sidecar.relay.observing.memory import MemoryShare
from quantdrift.sidecar.relay.observing.observer import CaptureScope, ExchangeObserver
from quantdrift.sidecar.relay.observing.unseen import TLS_TURNS

_TLS = b"\x16\x03"  # a record of a handshake, in any version


class ProtocolDetector(ExchangeObserver):
    """The observer of a connection that has sent nothing yet, until its protocol is known.

    It also takes the place of an observer that gave way between two exchanges.

    HTTP/2 is followed where the client uses prior knowledge (h2c). TLS is not followed, but counted.
    Everything else is taken for HTTP/1.1.

    Parameters
    ----------
    scope
        Shared by the worker's observers.
    observe
        Called with the class of the observer; returns the observer that gets everything from then on. It is given the
        earlier bytes right after.
    """

    __slots__ = ("_early_bytes", "_early_data", "_early_responses", "_observe", "_share")

    def __init__(
        self,
        scope: CaptureScope,
        observe: Callable[[Callable[[CaptureScope], ExchangeObserver]], ExchangeObserver],
    ) -> None:
        super().__init__(scope)
        self._observe = observe
        self._share: MemoryShare | None = None
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
            super().request(chunk)
            return
        data = self._early_data + chunk
        if PREFACE.startswith(data) or _TLS.startswith(data):
            self._early_data = data
            return
        if data.startswith(_TLS):
            self._go_blind(TLS_TURNS)
            self.skip_request(0)
            return
        observer = self._observe(Http2Observer if data.startswith(PREFACE) else Http1Observer)
        self.is_active = False  # not before: if an observer cannot be made, requests are counted
        responses = list(self._early_responses)
        self._forget()
        for response in responses:
            observer.response(response)
        observer.request(data)

    def response(self, chunk: bytes) -> None:
        """Take bytes from the backend."""
        if not self.is_active:
            super().response(chunk)
            return
        self._early_bytes += len(chunk)
        if self._early_bytes > MAX_HEADER_BYTES:
            self._go_blind()
            return
        if self._share is None:
            self._share = MemoryShare(self._scope.memory)
        try:
            self._share.resize(self._early_bytes)
        except FramingError as error:
            self._on_framing_error(error)
            return
        self._early_responses.append(chunk)

    def response_eof(self) -> None:
        """Do nothing: no exchange has begun."""

    def abandon(self, loss: Loss) -> None:
        """Discard the bytes so far and stop observing."""
        super().abandon(loss)
        self._forget()

    def _forget(self) -> None:
        self._early_data = b""
        self._early_responses.clear()
        if self._share is not None:
            self._share.resize(0)
