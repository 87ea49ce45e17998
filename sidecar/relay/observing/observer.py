"""What the observers of a relay worker share: its bounds and counts, and how an exchange that was taken is held."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import ClassVar

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Sidecar
from quantdrift.core.records import MARK, Loss
from quantdrift.sidecar.handoff.frame import PIECE_BYTES, RawMeta, frame
from quantdrift.sidecar.relay.observing.head_cache import FieldCache, HeadCache, remember
from quantdrift.sidecar.relay.observing.heads import FramingError, RequestHead, ResponseHead
from quantdrift.sidecar.relay.observing.memory import FOR_EACH_BYTES, ObserverMemory
from quantdrift.sidecar.sampling.first_phase import Draw, Sampler, SamplingKey
from quantdrift.sidecar.sampling.load_shedding import LoadShedding
from quantdrift.sidecar.state.counters import Count, Gauge, Slot
from quantdrift.sidecar.state.routes import Routes

_LOG = logging.getLogger(__name__)

_PLACE_BYTES = 1024  # longest target and fields that are remembered
_HELD_BYTES = 500  # what a held exchange costs beside its buffers
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_MARK = MARK.encode()

Offer = Callable[[int, Sequence[bytes | memoryview]], None]


class CaptureScope:
    """What the observers of one relay worker share.

    Parameters
    ----------
    sidecar
        Bounds.
    routes
        What is inference.
    sampler
        First sampling phase.
    offer
        Takes a finished exchange: index of its header stratum, and the buffers of its frame.
    slot
        The worker's counts.
    clock
        Tells when a response was complete.
    gate
        Refuses what was drawn; without it nothing is.

    Attributes
    ----------
    held_bytes : int
        Held for unfinished exchanges by all observers together.
    parts : ObserverMemory
        Bounds what observers hold to follow their connections.
    names : frozenset of bytes
        Header fields that are looked for, in lower case: the sampler's, and the mark of what is not captured.
    lines : FieldCache
        What was seen of heads so far.
    asks, tells : HeadCache
        How clients' requests and the backend's responses mostly begin.
    generation : int
        Rises when places, lines, habits and bounds change.
    """

    __slots__ = (
        "_places",
        "asks",
        "clock",
        "gate",
        "generation",
        "held_bytes",
        "lines",
        "max_connections",
        "max_exchange_bytes",
        "max_held_bytes",
        "names",
        "offer",
        "parts",
        "routes",
        "sampler",
        "slot",
        "tells",
    )

    def __init__(
        self,
        sidecar: Sidecar,
        *,
        routes: Routes,
        sampler: Sampler,
        offer: Offer,
        slot: Slot,
        clock: Clock,
        gate: LoadShedding | None = None,
    ) -> None:
        self.gate = gate
        self.offer = offer
        self.slot = slot
        self.clock = clock
        self.held_bytes = 0
        self.parts = ObserverMemory(0)
        self.generation = 0
        self.reconfigure(sidecar, routes, sampler)

    def reconfigure(self, sidecar: Sidecar, routes: Routes, sampler: Sampler) -> None:
        """Go over to other bounds, routes and strata: what connections remember of the earlier ones is void."""
        self.max_connections = sidecar.max_connections
        self.parts.limit_bytes = sidecar.max_connections * FOR_EACH_BYTES
        self.max_exchange_bytes = sidecar.max_exchange_bytes
        self.max_held_bytes = sidecar.max_held_bytes
        self.routes = routes
        self.sampler = sampler
        self.generation += 1
        self.names = sampler.names | {_MARK}
        self.lines = FieldCache(self.names)
        self.asks: HeadCache[RequestHead] = HeadCache()
        self.tells: HeadCache[ResponseHead] = HeadCache()
        self._places: dict[tuple[bytes, bytes, tuple[bytes, ...]], SamplingKey | None] = {}

    def place(self, head: RequestHead, data: bytes, start: int, stop: int) -> SamplingKey | None:
        """Return what decides on the request whose head is `data[start:stop]`.

        None where it is no inference, or quantdrift's own.
        """
        key = head.method, head.target, head.wanted
        try:
            return self._places[key]
        except KeyError:
            path = None if is_marked(head.wanted) else self.routes.find(head.method, head.target)
            place = None if path is None else self.sampler.place(head.method, path, data, start, stop)
            if len(head.target) + sum(map(len, head.wanted)) <= _PLACE_BYTES:
                remember(self._places, key, place)
            return place

    def ignore(self, *, is_unknown: bool) -> None:
        """Count a request that is no inference, or quantdrift's own.

        Parameters
        ----------
        is_unknown
            It may have been meant to be inference: it brings a body, and is neither quantdrift's own nor a probe.
        """
        self.slot.note(Gauge.IGNORED)
        if is_unknown:
            self.slot.note(Gauge.UNKNOWN_POSTS)

    def refuses(self, stratum: int) -> bool:
        """Return whether the gate refuses a request of a stratum that was drawn: it is counted then, and not taken in."""
        loss = None if self.gate is None else self.gate.refusal()
        if loss is None:
            return False
        self.slot.add(stratum, Count.TAKEN)
        self.slot.lose(stratum, loss)
        return True

    def hold(self, n_bytes: int) -> None:
        """Account for `n_bytes`, which may be negative."""
        self.held_bytes += n_bytes
        self.slot.set(Gauge.HELD_BYTES, self.held_bytes)


class CaptureBuffer:
    """An exchange that was taken, with what has been seen of it.

    Parameters
    ----------
    draw
        The first phase's decision.
    """

    __slots__ = (
        "captured_at_ns",
        "charged_bytes",
        "draw",
        "request",
        "request_bytes",
        "request_head_bytes",
        "response",
        "response_bytes",
        "response_head_bytes",
    )

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.request: list[bytes | memoryview] = []
        self.request_head_bytes = 0
        self.request_bytes = 0
        self.response: list[bytes | memoryview] = []
        self.response_head_bytes = 0
        self.response_bytes = 0
        self.charged_bytes = 0
        self.captured_at_ns = 0  # when its response was complete; 0: it is not


class ExchangeObserver(ABC):
    """Observes one connection: holds what was taken, within the worker's bounds, until it is handed over or lost.

    It is shown the very bytes that were forwarded, after they were, in whatever parts. If a method raises, `abandon` must be called, and
    nothing else any more.

    Parameters
    ----------
    scope
        Shared by the worker's observers.

    Attributes
    ----------
    is_active : bool
        Whether the connection is still followed.
    speaks_unasked : bool
        Whether a client may send something at any time, not only requests.
    """

    __slots__ = ("_held", "_scope", "is_active")

    speaks_unasked: ClassVar[bool] = False

    def __init__(self, scope: CaptureScope) -> None:
        self._scope = scope
        self._held: set[CaptureBuffer] = set()
        self.is_active = True

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether the connection is known to be between exchanges."""

    @abstractmethod
    def request(self, chunk: bytes) -> None:
        """Take bytes that the client sent."""

    @abstractmethod
    def response(self, chunk: bytes) -> None:
        """Take bytes that the backend sent."""

    def skip_request(self, n_bytes: int) -> int:
        """Take note of the next bytes of the client without seeing them; return how many that does for."""
        return 0 if self.is_active else n_bytes

    def skip_response(self, n_bytes: int) -> int:
        """Take note of the next bytes of the backend without seeing them; return how many that does for."""
        return 0 if self.is_active else n_bytes

    @abstractmethod
    def response_eof(self) -> None:
        """Take note that the backend will send no more."""

    def close(self) -> None:
        """Take note that the connection is over: what is unfinished is lost."""
        self.abandon(Loss.TRUNCATED)

    def abandon(self, loss: Loss) -> None:
        """Let go of everything held, counted under `loss`, and follow no more."""
        self.is_active = False
        for held in list(self._held):
            self._let_go(held, loss)

    def _blind(self, error: FramingError) -> None:
        _LOG.debug("a connection is no longer observed: %s", error)
        self._scope.slot.note(Gauge.BLIND)
        self.abandon(Loss.FRAMING)

    def _take(self, draw: Draw) -> CaptureBuffer:
        self._scope.slot.add(draw.stratum, Count.TAKEN)
        held = CaptureBuffer(draw)
        self._held.add(held)
        return held

    def _keep(
        self, held: CaptureBuffer, pieces: list[bytes | memoryview], data: bytes, start: int, stop: int
    ) -> bool:
        """Hold `data[start:stop]` unless the exchange is let go, or would be too large with it; return whether."""
        if held not in self._held:
            return False
        scope = self._scope
        n_bytes = stop - start
        charge = n_bytes + PIECE_BYTES + (0 if held.charged_bytes else _HELD_BYTES)
        if (
            held.request_bytes + held.response_bytes + n_bytes > scope.max_exchange_bytes
            or scope.held_bytes + charge > scope.max_held_bytes
        ):
            self._let_go(held, Loss.HELD_BYTES)
            return False
        if n_bytes == len(data):
            pieces.append(data)
        elif 2 * n_bytes >= len(data):
            pieces.append(memoryview(data)[start:stop])
        else:
            pieces.append(data[start:stop])  # a view would keep a buffer of more than twice its size
        held.charged_bytes += charge
        scope.hold(charge)
        return True

    def _answered(self, held: CaptureBuffer) -> None:
        now = self._scope.clock.now()
        held.captured_at_ns = (now - _EPOCH) // _MICROSECOND * 1000

    def _let_go(self, held: CaptureBuffer, loss: Loss) -> None:
        self._scope.slot.lose(held.draw.stratum, loss)
        self._release(held)

    def _release(self, held: CaptureBuffer) -> None:
        self._held.discard(held)
        held.request.clear()
        held.response.clear()
        self._scope.hold(-held.charged_bytes)
        held.charged_bytes = 0

    def _hand_over(self, held: CaptureBuffer) -> None:
        if held not in self._held:
            return
        meta = RawMeta(
            id=held.draw.id,
            stratum=held.draw.stratum,
            pi1=held.draw.pi1,
            u1=held.draw.u1,
            epoch=held.draw.epoch,
            captured_at_ns=held.captured_at_ns,
            request_head_bytes=held.request_head_bytes,
            request_bytes=held.request_bytes,
            response_head_bytes=held.response_head_bytes,
            response_bytes=held.response_bytes,
        )
        self._scope.offer(held.draw.stratum, frame(meta, [*held.request, *held.response]))
        self._release(held)


def is_marked(wanted: Sequence[bytes]) -> bool:
    """Return whether one of the lines that were looked for is the mark of what is not captured."""
    return any(line.partition(b":")[0].lower() == _MARK for line in wanted)
