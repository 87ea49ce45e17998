"""The base of the observers: the scope that they share, and the buffer of a sampled exchange."""

import itertools
import logging
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import ClassVar, Protocol

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Sidecar
from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import PIECE_BYTES, RELAYED, Origin, RawMeta, frame
from quantdrift.sidecar.relay.observing.head_cache import FieldCache, HeadCache, remember
from quantdrift.sidecar.relay.observing.heads import FramingError, RequestHead, ResponseHead
from quantdrift.sidecar.relay.observing.memory import BYTES_PER_CONNECTION, ObserverMemory
from quantdrift.sidecar.relay.observing.unseen import UnseenRequests
from quantdrift.sidecar.sampling.first_phase import Draw, Sampler, SamplingKey
from quantdrift.sidecar.sampling.load_shedding import LoadShedding
from quantdrift.sidecar.state.counters import Count, Gauge, Slot
from quantdrift.sidecar.state.routes import Routes

_LOG = logging.getLogger(__name__)

_SHARES_S = 1.0
_KEY_BYTES = 1024  # longest target and fields that are cached
_HELD_BYTES = 500  # memory of a buffered exchange in addition to its bytes
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

SendFrame = Callable[[int, Sequence[bytes | memoryview]], None]


class CaptureScope:
    """The scope of capture, shared by the observers of a relay worker: limits, routes, sampler and counters.

    Parameters
    ----------
    sidecar
        The limits.
    routes
        Which requests are inference.
    sampler
        First sampling phase.
    send_frame
        Called with each finished exchange: the index of its header stratum, and the buffers of its frame.
    slot
        The counters of the worker.
    clock
        Stamps complete responses.
    load_shedding
        Refuses a share of the drawn requests; None: no request is refused.

    Attributes
    ----------
    held_bytes : int
        Bytes of unfinished exchanges that all observers buffer.
    memory : ObserverMemory
        Memory that observers use to follow their connections.
    names : frozenset of bytes
        Lower-case names of the header fields to look for: those of the sampler.
    field_cache : FieldCache
        Header lines seen so far.
    request_heads, response_heads : HeadCache
        The usual heads of requests and responses.
    generation : int
        Rises with each new configuration, which makes all cached values invalid.
    """

    __slots__ = (
        "_sampling_keys",
        "_unseen_shares",
        "_unseen_until_s",
        "clock",
        "field_cache",
        "generation",
        "held_bytes",
        "load_shedding",
        "max_connections",
        "max_exchange_bytes",
        "max_held_bytes",
        "memory",
        "names",
        "request_heads",
        "response_heads",
        "routes",
        "sampler",
        "send_frame",
        "slot",
    )

    def __init__(
        self,
        sidecar: Sidecar,
        *,
        routes: Routes,
        sampler: Sampler,
        send_frame: SendFrame,
        slot: Slot,
        clock: Clock,
        load_shedding: LoadShedding | None = None,
    ) -> None:
        self.load_shedding = load_shedding
        self.send_frame = send_frame
        self.slot = slot
        self.clock = clock
        self.held_bytes = 0
        self.memory = ObserverMemory(0)
        self.generation = 0
        self.reconfigure(sidecar, routes, sampler)

    def reconfigure(self, sidecar: Sidecar, routes: Routes, sampler: Sampler) -> None:
        """Apply other limits, routes and strata; cached values of the earlier ones become invalid."""
        self.max_connections = sidecar.max_connections
        self.memory.limit_bytes = sidecar.max_connections * BYTES_PER_CONNECTION
        self.max_exchange_bytes = sidecar.max_exchange_bytes
        self.max_held_bytes = sidecar.held_bytes
        self.routes = routes
        self.sampler = sampler
        self.generation += 1
        self.names = sampler.names
        self.field_cache = FieldCache(self.names)
        self.request_heads: HeadCache[RequestHead] = HeadCache()
        self.response_heads: HeadCache[ResponseHead] = HeadCache()
        self._sampling_keys: dict[tuple[bytes, bytes, tuple[bytes, ...]], SamplingKey | None] = {}
        self._unseen_shares: list[int] = []
        self._unseen_until_s = -math.inf

    def sampling_key(self, head: RequestHead, data: bytes, start: int, stop: int) -> SamplingKey | None:
        """Return the sampling key of the request whose head is `data[start:stop]`.

        None if the request is not inference.
        """
        key = head.method, head.target, head.wanted
        try:
            return self._sampling_keys[key]
        except KeyError:
            path = self.routes.find(head.method, head.target)
            sampling_key = (
                None if path is None else self.sampler.key_for(head.method, path, data, start, stop)
            )
            if len(head.target) + sum(map(len, head.wanted)) <= _KEY_BYTES:
                remember(self._sampling_keys, key, sampling_key)
            return sampling_key

    def count_ignored(self, *, is_unknown: bool) -> None:
        """Count a request that is not inference.

        Parameters
        ----------
        is_unknown
            Whether it may be inference in an unknown protocol: it has a body, and is no probe.
        """
        self.slot.adjust(Gauge.IGNORED)
        if is_unknown:
            self.slot.adjust(Gauge.UNKNOWN_POSTS)

    def count_unseen(self, row: int | None) -> None:
        """Count a request that was not observed: as offered, and if such a request is drawn, as taken and lost.

        Parameters
        ----------
        row
            Row in the table of counts, where stratum and model are known. None: the request counts for no model, in one
            of the header strata, drawn by their shares of the requests that this process has seen.
        """
        slot = self.slot
        slot.adjust(Gauge.UNSEEN_REQUESTS)
        if row is None:
            row = self._drawn_row()
        slot.add(row, Count.OFFERED)
        if self.sampler.takes_unseen(row):
            slot.add(row, Count.TAKEN)
            slot.lose(row, Loss.UNOBSERVED)

    def _drawn_row(self) -> int:
        now_s = self.clock.monotonic_s()
        strata = self.sampler.rows_by_stratum
        if now_s >= self._unseen_until_s:  # adding up the whole table for each request would take too long
            self._unseen_until_s = now_s + _SHARES_S
            offered = (sum(self.slot.count(row, Count.OFFERED) for row in rows) for rows in strata)
            self._unseen_shares = list(itertools.accumulate(offered))
        if not self._unseen_shares[-1]:
            return strata[-1][0]  # of the stratum `default`
        (drawn,) = random.choices(strata, cum_weights=self._unseen_shares)  # noqa: S311 - no secret
        return drawn[0]

    def refuses(self, stratum: int) -> bool:
        """Return whether load shedding refuses a drawn request of a stratum.

        A refused one is counted as lost.
        """
        loss = None if self.load_shedding is None else self.load_shedding.refusal()
        if loss is None:
            return False
        self.slot.add(stratum, Count.TAKEN)
        self.slot.lose(stratum, loss)
        return True

    def send_lost(
        self,
        draw: Draw,
        loss: Loss,
        request: Sequence[bytes | memoryview],
        head_bytes: int,
        origin: Origin = RELAYED,
    ) -> None:
        """Send the request of a lost exchange to the capture process, which counts it for the model that the body names.

        Parameters
        ----------
        draw
            The first phase's decision.
        loss
            Why it is lost.
        request, head_bytes
            The whole request, and the length of its head.
        origin
            How it came in.
        """
        meta = RawMeta(
            id=draw.id,
            stratum=draw.stratum,
            pi1=draw.pi1,
            u1=draw.u1,
            epoch=draw.epoch,
            captured_at_ns=(self.clock.now() - _EPOCH) // _MICROSECOND * 1000,
            request_head_bytes=head_bytes,
            request_bytes=sum(map(len, request)),
            response_head_bytes=0,
            response_bytes=0,
            origin=origin,
            lost=loss,
        )
        self.send_frame(draw.stratum, frame(meta, request))

    def add_held_bytes(self, n_bytes: int) -> None:
        """Add `n_bytes`, which may be negative, to the buffered bytes."""
        self.held_bytes += n_bytes
        self.slot.set(Gauge.HELD_BYTES, self.held_bytes)


class CaptureBuffer:
    """The buffer of a sampled exchange, with the bytes received so far.

    Parameters
    ----------
    draw
        The first phase's decision.
    """

    __slots__ = (
        "answered_s",
        "asked_s",
        "captured_at_ns",
        "charged_bytes",
        "draw",
        "first_byte_s",
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
        self.captured_at_ns = 0  # when its response was complete; 0: it is not complete yet
        # Readings of the monotonic clock: the request is complete, the response's content begins, the response is complete.
        self.asked_s: float | None = None
        self.first_byte_s: float | None = None
        self.answered_s: float | None = None


class MessageReader(Protocol):
    """Reads the messages of one direction of a connection."""

    def feed(self, chunk: bytes) -> None:
        """Read the next bytes.

        Raises
        ------
        FramingError
            They are not what the protocol allows, or too long.
        """


class ExchangeObserver(ABC):
    """The observer of one connection.

    It buffers sampled exchanges, within the worker's limits, until they are complete.

    It gets the bytes after they were forwarded, cut into any parts. If a method raises, `abandon` must be
    called, and no other method after it.

    Parameters
    ----------
    scope
        Shared by the worker's observers.

    Attributes
    ----------
    is_active : bool
        Whether the connection is still followed.
    client_may_send_anytime : bool
        Whether the client may send at any time, also between requests (HTTP/2).
    is_resumable : bool
        Whether, between exchanges, a new observer can take the place of this one.
    unseen : UnseenRequests or None
        Counts the requests once the connection can no longer be followed; None: it is followed, or carries no requests.
    """

    __slots__ = ("_buffers", "_scope", "is_active", "unseen")

    client_may_send_anytime: ClassVar[bool] = False
    is_resumable: ClassVar[bool] = False
    _requests: MessageReader
    _responses: MessageReader

    def __init__(self, scope: CaptureScope) -> None:
        self._scope = scope
        self._buffers: set[CaptureBuffer] = set()
        self.is_active = True
        self.unseen: UnseenRequests | None = None

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether the connection is known to be between exchanges."""

    @property
    def waits_for_client(self) -> bool:
        """Whether the client, not the backend, must send something next."""
        return self.is_idle

    @property
    def has_no_whole_head(self) -> bool:
        """Whether nothing is due but the rest of the head of a request, or the first request of an HTTP/2 connection."""
        return False

    @property
    def last_stream(self) -> int | None:
        """Number of the newest stream of an HTTP/2 connection; None: it is none."""
        return None

    @property
    def last_row(self) -> int | None:
        """Row in the table of counts of the last inference request; None: there was none."""
        return None

    def closing(self, chunk: bytes) -> bytes:
        """Return bytes of the backend as a draining relay forwards them: with the end of the connection announced.

        Called before `response`, which gets the bytes as they came.
        """
        return chunk

    def request(self, chunk: bytes) -> None:
        """Take bytes from the client."""
        if self.is_active:
            try:
                self._requests.feed(chunk)
            except FramingError as error:
                self._on_framing_error(error)
                self.skip_request(0)
        elif self.unseen is not None:
            self.unseen.request()

    def response(self, chunk: bytes) -> None:
        """Take bytes from the backend."""
        if self.is_active:
            try:
                self._responses.feed(chunk)
            except FramingError as error:
                self._on_framing_error(error)
        elif self.unseen is not None:
            self.unseen.response(chunk)

    def skip_request(self, n_bytes: int) -> int:
        """Skip the next bytes of the client if their content is not needed; return how many were skipped."""
        if self.is_active:
            return 0
        if self.unseen is not None:
            self.unseen.request()
        return n_bytes

    def skip_response(self, n_bytes: int) -> int:
        """Skip the next bytes of the backend if their content is not needed; return how many were skipped."""
        return 0 if self.is_active or (self.unseen is not None and self.unseen.waits) else n_bytes

    @abstractmethod
    def response_eof(self) -> None:
        """Handle the end of file of the backend."""

    def close(self, loss: Loss = Loss.TRUNCATED) -> None:
        """Handle the end of the connection: unfinished exchanges are lost, and counted under `loss`."""
        self.abandon(loss)

    def abandon(self, loss: Loss) -> None:
        """Drop all buffered exchanges, counted under `loss`, and stop observing."""
        self.is_active = False
        for buffer in list(self._buffers):
            self._drop(buffer, loss)

    def _on_framing_error(self, error: FramingError) -> None:
        _LOG.debug("stopped observing a connection: %s", error)
        self._go_blind()

    def _go_blind(self, n_skipped: int = 0) -> None:
        """Stop following a connection that may still carry requests, and count them from now on.

        Parameters
        ----------
        n_skipped
            Turns of client and backend that come first and are no requests.
        """
        self._scope.slot.adjust(Gauge.BLIND)
        self.unseen = UnseenRequests(self._scope.count_unseen, self.last_row, n_skipped)
        self.abandon(Loss.FRAMING)

    def _start_capture(self, draw: Draw) -> CaptureBuffer:
        self._scope.slot.add(draw.stratum, Count.TAKEN)
        buffer = CaptureBuffer(draw)
        self._buffers.add(buffer)
        return buffer

    def _keep(
        self, buffer: CaptureBuffer, pieces: list[bytes | memoryview], data: bytes, start: int, stop: int
    ) -> bool:
        """Buffer `data[start:stop]`, unless the exchange was dropped or becomes too large.

        Return whether it is buffered.
        """
        if buffer not in self._buffers:
            return False
        scope = self._scope
        n_bytes = stop - start
        charge = n_bytes + PIECE_BYTES + (0 if buffer.charged_bytes else _HELD_BYTES)
        if buffer.request_bytes + buffer.response_bytes + n_bytes > scope.max_exchange_bytes:
            self._drop(buffer, Loss.TOO_LARGE)
            return False
        if scope.held_bytes + charge > scope.max_held_bytes:
            self._drop(buffer, Loss.HELD_BYTES)
            return False
        if n_bytes == len(data):
            pieces.append(data)
        elif 2 * n_bytes >= len(data):
            pieces.append(memoryview(data)[start:stop])
        else:
            pieces.append(data[start:stop])  # a view would keep a buffer of more than twice its size alive
        buffer.charged_bytes += charge
        scope.add_held_bytes(charge)
        return True

    def _mark_asked(self, buffer: CaptureBuffer) -> None:
        """Note that the request of a sampled exchange is complete: its last bytes were forwarded before."""
        buffer.asked_s = self._scope.clock.monotonic_s()

    def _mark_first_byte(self, buffer: CaptureBuffer) -> None:
        """Note that the content of the response begins, the first time this is called."""
        if buffer.first_byte_s is None:
            buffer.first_byte_s = self._scope.clock.monotonic_s()

    def _mark_complete(self, buffer: CaptureBuffer) -> None:
        clock = self._scope.clock
        buffer.answered_s = clock.monotonic_s()
        buffer.captured_at_ns = (clock.now() - _EPOCH) // _MICROSECOND * 1000

    def _drop(self, buffer: CaptureBuffer, loss: Loss) -> None:
        """Count an exchange as lost; where only its body names the model, the capture process does, which reads it."""
        draw = buffer.draw
        if (
            loss is Loss.OBSERVER_ERROR  # it may have been the hand-off that failed
            or buffer.asked_s is None
            or draw.stratum not in self._scope.sampler.nameless_rows
        ):
            self._scope.slot.lose(draw.stratum, loss)
        else:
            self._scope.send_lost(draw, loss, buffer.request, buffer.request_head_bytes)
        self._release(buffer)

    def _release(self, buffer: CaptureBuffer) -> None:
        self._buffers.discard(buffer)
        buffer.request.clear()
        buffer.response.clear()
        self._scope.add_held_bytes(-buffer.charged_bytes)
        buffer.charged_bytes = 0

    def _hand_over(self, buffer: CaptureBuffer) -> None:
        if buffer not in self._buffers:
            return
        meta = RawMeta(
            id=buffer.draw.id,
            stratum=buffer.draw.stratum,
            pi1=buffer.draw.pi1,
            u1=buffer.draw.u1,
            epoch=buffer.draw.epoch,
            captured_at_ns=buffer.captured_at_ns,
            request_head_bytes=buffer.request_head_bytes,
            request_bytes=buffer.request_bytes,
            response_head_bytes=buffer.response_head_bytes,
            response_bytes=buffer.response_bytes,
            latency_s=_between(buffer.asked_s, buffer.answered_s),
            first_byte_s=_between(buffer.asked_s, buffer.first_byte_s),
        )
        self._scope.send_frame(buffer.draw.stratum, frame(meta, [*buffer.request, *buffer.response]))
        self._release(buffer)


def _between(asked_s: float | None, at_s: float | None) -> float | None:
    """Return the time since the request was complete; None for an answer that came before that."""
    return None if asked_s is None or at_s is None or at_s < asked_s else at_s - asked_s


class Unobserved(ExchangeObserver):
    """Takes the place of an observer where a connection is not observed: it counts the requests.

    Parameters
    ----------
    scope
        Shared by the worker's observers.
    before
        The observer until now; None: there was none.
    """

    __slots__ = ()

    def __init__(self, scope: CaptureScope, before: ExchangeObserver | None = None) -> None:
        super().__init__(scope)
        self.is_active = False
        if before is None:
            self.unseen = UnseenRequests(scope.count_unseen)
        elif before.is_active:
            self.unseen = UnseenRequests(scope.count_unseen, before.last_row)
        else:
            self.unseen = before.unseen

    @property
    def is_idle(self) -> bool:
        """False: it is not known."""
        return False

    def response_eof(self) -> None:
        """Do nothing: no exchange is followed."""
