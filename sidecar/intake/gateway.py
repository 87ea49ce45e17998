"""The gateway of all intakes: it draws, counts and hands over exchanges as the relay does."""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import (
    HEAD_BYTES,
    Origin,
    RawMeta,
    frame,
    lengths,
    parse,
    parse_meta,
)
from quantdrift.sidecar.handoff.http_head import request_head, response_head
from quantdrift.sidecar.relay.observing.observer import CaptureScope
from quantdrift.sidecar.sampling.first_phase import Draw
from quantdrift.sidecar.state.counters import INTAKE_DENIALS, Count, Denial, Gauge
from quantdrift.sidecar.state.routes import model_in
from quantdrift.sidecar.tap.wire import Counts

_LOG = logging.getLogger(__name__)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_MAX_COUNT = 1 << 48  # in one message; larger counts could overflow the shared table
_FRAMING_HEADERS = frozenset({"transfer-encoding", "content-length", "connection"})


class SampledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled request, which must be handed over or lost exactly once.

    Parameters
    ----------
    draw
        The first phase's decision.
    head
        The request's head.
    origin
        How it came in.
    """

    draw: Draw
    head: bytes
    origin: Origin


class Gateway:
    """Samples requests of the intakes and hands their exchanges over to the capture process.

    Parameters
    ----------
    scope
        Routes, sampler, counters and hand-off of this process.
    """

    def __init__(self, scope: CaptureScope) -> None:
        self._scope = scope
        self._n_models_denied = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of incomplete exchanges that all intakes buffer."""
        return self._scope.held_bytes

    @property
    def max_exchange_bytes(self) -> int:
        """Most bytes of a request and its response together."""
        return self._scope.max_exchange_bytes

    def sample(
        self,
        target: str,
        headers: Mapping[str, str],
        method: str = "POST",
        version: bytes = b"HTTP/1.1",
        *,
        origin: Origin,
    ) -> SampledRequest | None:
        """Count a request and draw it.

        Where the body alone names the model, the capture process checks whether the sender may report on it.

        Parameters
        ----------
        target
            Path and query, as the client requested them.
        headers
            Headers of the request.
        method
            Method of the request.
        version
            HTTP version; gRPC is only recognised in `HTTP/2`.
        origin
            How it came in.

        Returns
        -------
        SampledRequest or None
            None if the request is not inference, is of a model that the sender may not report on, or is not taken:
            no more is to be done with it.
        """
        scope = self._scope
        method_bytes, target_bytes = method.encode(errors="replace"), target.encode(errors="replace")
        path = scope.routes.find(method_bytes, target_bytes)
        if path is None:
            scope.count_ignored(is_unknown=method_bytes == b"POST")
            return None
        if (model := model_in(path)) and not origin.allows(model):
            self.refuse_model(origin)
            return None
        head = request_head(method_bytes, target_bytes, _encode_headers(headers), version)
        draw = scope.sampler.draw(method_bytes, path, head, 0, len(head))
        scope.slot.add(draw.stratum, Count.OFFERED)
        if not draw.taken or scope.refuses(draw.stratum):
            return None
        scope.slot.add(draw.stratum, Count.TAKEN)
        return SampledRequest(draw=draw, head=head, origin=origin)

    def hand_over(
        self,
        sampled: SampledRequest,
        request: bytes,
        response: bytes,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        captured_at: datetime | None = None,
        version: bytes = b"HTTP/1.1",
    ) -> None:
        """Send an exchange to the capture process, or count why it is lost.

        Parameters
        ----------
        sampled
            The result of `sample` for its request.
        request, response
            Contents.
        status, headers
            Status and headers of the response.
        captured_at
            Time when the response was complete; aware. None: now.
        version
            HTTP version.
        """
        head, answer = sampled.head, response_head(status, _encode_headers(headers or {}), version)
        if len(head) + len(request) + len(answer) + len(response) > self._scope.max_exchange_bytes:
            self.lose(sampled, Loss.TOO_LARGE, request)
            return
        at = captured_at or self._scope.clock.now()
        meta = RawMeta(
            id=sampled.draw.id,
            stratum=sampled.draw.stratum,
            pi1=sampled.draw.pi1,
            u1=sampled.draw.u1,
            epoch=sampled.draw.epoch,
            captured_at_ns=(at - _EPOCH) // _MICROSECOND * 1000,
            request_head_bytes=len(head),
            request_bytes=len(head) + len(request),
            response_head_bytes=len(answer),
            response_bytes=len(answer) + len(response),
            origin=sampled.origin,
        )
        self._scope.send_frame(sampled.draw.stratum, frame(meta, [head, request, answer, response]))

    def refuse_model(self, origin: Origin) -> None:
        """Count and log an exchange of a model that its sender may not report on. It is not traffic of that model."""
        self.count_denied(Denial.MODEL)
        self._n_models_denied += 1
        if (
            self._n_models_denied & (self._n_models_denied - 1) == 0
        ):  # 1, 2, 4, 8: a batch must not flood the log
            _LOG.warning(
                "an exchange of %s is refused, because intake.token_file does not allow this caller to report on its"
                " model (%d so far)",
                origin.caller,
                self._n_models_denied,
            )

    def forward_frame(self, content: bytes, n_rows: int, origin: Origin) -> None:
        """Forward a hand-off frame of a tap, which has drawn the exchange by the rates that it received.

        Parameters
        ----------
        content
            The frame.
        n_rows
            Rows in use in the table of counts.
        origin
            How it came in; what the frame says about that is not believed.

        Raises
        ------
        ValueError
            It is not a valid frame.
        """
        if len(content) < HEAD_BYTES:
            raise ValueError("a frame without lengths")
        n_rest, n_meta = lengths(content[:HEAD_BYTES])
        if n_rest != len(content) - HEAD_BYTES or not 0 <= n_meta <= n_rest:
            raise ValueError("a frame whose lengths do not add up")
        meta, request, response = parse(n_meta, memoryview(content)[HEAD_BYTES:])
        if not 0 <= meta.stratum < n_rows:
            raise ValueError(f"no row {meta.stratum} in the table of counts")
        if self._scope.refuses(meta.stratum):
            return
        self._scope.slot.add(meta.stratum, Count.TAKEN)
        meta = msgspec.structs.replace(meta, origin=origin)
        self._scope.send_frame(meta.stratum, frame(meta, [request, response]))

    def lose_frame(self, start: bytes, n_rows: int) -> None:
        """Count a frame of a tap as lost, because there is no memory for it.

        Parameters
        ----------
        start
            Its lengths and metadata, or more.
        n_rows
            Rows in use in the table of counts.

        Raises
        ------
        ValueError
            It is not the start of a valid frame.
        """
        if len(start) < HEAD_BYTES:
            raise ValueError("a frame without lengths")
        _, n_meta = lengths(start[:HEAD_BYTES])
        if not 0 <= n_meta <= len(start) - HEAD_BYTES:
            raise ValueError("a frame whose lengths do not add up")
        stratum = parse_meta(start[HEAD_BYTES : HEAD_BYTES + n_meta]).stratum
        if not 0 <= stratum < n_rows:
            raise ValueError(f"no row {stratum} in the table of counts")
        self._scope.slot.add(stratum, Count.TAKEN)
        self._scope.slot.lose(stratum, Loss.HELD_BYTES)

    def add_counts(self, counts: Counts, rows: Mapping[str, int]) -> None:
        """Add the counts of a tap.

        Parameters
        ----------
        counts
            The new counts. A stratum that this sidecar never had belongs to an earlier sidecar; its calls are
            counted like those of a tap without rates.
        rows
            The row of each stratum that this sidecar has had.

        Raises
        ------
        ValueError
            A count is negative or too large.
        """
        slot = self._scope.slot
        lost = [(stratum, loss, n) for stratum, by_loss in counts.lost.items() for loss, n in by_loss.items()]
        numbers = [*counts.offered.values(), *(n for _, _, n in lost), counts.early, counts.errors]
        if any(not 0 <= n <= _MAX_COUNT for n in numbers):
            raise ValueError("a count is negative or too large")
        early = counts.early
        for stratum, n in counts.offered.items():
            if stratum in rows:
                slot.add(rows[stratum], Count.OFFERED, n)
            else:
                early += n
        for stratum, loss, n in lost:
            if stratum in rows:
                slot.add(rows[stratum], Count.TAKEN, n)
                slot.lose(rows[stratum], loss, n)
        slot.adjust(Gauge.OBSERVER_ERRORS, counts.errors)
        slot.adjust(Gauge.EARLY, early)

    def count_tap(self) -> None:
        """Count a tap that has connected."""
        self._scope.slot.adjust(Gauge.TAP_CONNECTIONS)

    def count_ignored(self) -> None:
        """Count a message that is not inference."""
        self._scope.slot.adjust(Gauge.IGNORED)

    def count_unobserved(self) -> None:
        """Count what there was no memory for before it could be drawn."""
        self._scope.slot.adjust(Gauge.UNOBSERVED)

    def count_denied(self, reason: Denial) -> None:
        """Count a refused call."""
        self._scope.slot.adjust(INTAKE_DENIALS[reason])

    def reserve(self, n_bytes: int, limit_bytes: int) -> bool:
        """Add `n_bytes` to the buffered bytes if all together stay within the limit; return whether they are added."""
        if self._scope.held_bytes + n_bytes > limit_bytes:
            return False
        self._scope.add_held_bytes(n_bytes)
        return True

    def add_held_bytes(self, n_bytes: int) -> None:
        """Add `n_bytes`, which may be negative, to the buffered bytes of incomplete exchanges."""
        self._scope.add_held_bytes(n_bytes)

    def lose(self, sampled: SampledRequest, loss: Loss, request: bytes | None = None) -> None:
        """Count an exchange that cannot be handed over.

        Parameters
        ----------
        sampled
            The result of `sample` for its request.
        loss
            Why it is lost.
        request
            The whole content of the request, which may name the model; None: it is not there.
        """
        scope, draw, head = self._scope, sampled.draw, sampled.head
        if (
            request is None
            or draw.stratum not in scope.sampler.nameless_rows
            or len(head) + len(request) > scope.max_exchange_bytes
        ):
            scope.slot.lose(draw.stratum, loss)
        else:
            scope.send_lost(draw, loss, [head, request], len(head), origin=sampled.origin)


def _encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return header fields without those of framing, because the body is handed over without framing."""
    return [
        (name.encode(errors="replace"), value.encode(errors="replace"))
        for name, value in headers.items()
        if name.lower() not in _FRAMING_HEADERS
    ]
