"""The one door of every way in beside the relay: the same draw, the same counts and the same hand-off as there."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from quantdrift.core.records import MARK, Loss
from quantdrift.sidecar.handoff.frame import HEAD_BYTES, RawMeta, frame, lengths, parse
from quantdrift.sidecar.handoff.http_head import request_head, response_head
from quantdrift.sidecar.relay.observing.observer import CaptureScope
from quantdrift.sidecar.sampling.first_phase import Draw
from quantdrift.sidecar.state.counters import INTAKE_DENIALS, Count, Denial, Gauge
from quantdrift.sidecar.tap.wire import Counts

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_MOST_COUNTED = 1 << 48  # at once: more would run over in the shared table
_OF_FRAMING = frozenset({"transfer-encoding", "content-length", "connection"})


class SampledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was taken, and must be handed over or lost exactly once.

    Parameters
    ----------
    draw
        The first phase's decision.
    head
        The request's head.
    """

    draw: Draw
    head: bytes


class Gateway:
    """Takes exchanges in.

    Parameters
    ----------
    scope
        Routes, sampler, counts and hand-off of this process.
    """

    def __init__(self, scope: CaptureScope) -> None:
        self._scope = scope

    @property
    def held_bytes(self) -> int:
        """What all ways in together hold of exchanges that are not complete."""
        return self._scope.held_bytes

    @property
    def max_exchange_bytes(self) -> int:
        """Most that a request and its response may have together."""
        return self._scope.max_exchange_bytes

    def offer(
        self,
        target: str,
        headers: Mapping[str, str],
        method: str = "POST",
        version: bytes = b"HTTP/1.1",
    ) -> SampledRequest | None:
        """Count a request and draw.

        Parameters
        ----------
        target
            Path, and query if there is one, as a client would have asked for it.
        headers
            Of the request.
        method
            Of the request.
        version
            Of HTTP: gRPC is read in `HTTP/2` alone.

        Returns
        -------
        Ticket or None
            None where it is no inference, or quantdrift's own, or the first phase does not take it: nothing else is to
            be done with it.
        """
        scope = self._scope
        asked, where = method.encode(errors="replace"), target.encode(errors="replace")
        ours = any(name.lower() == MARK for name in headers)
        path = None if ours else scope.routes.find(asked, where)
        if path is None:
            scope.count_ignored(is_unknown=asked == b"POST" and not ours)
            return None
        head = request_head(asked, where, _raw(headers), version)
        draw = scope.sampler.draw(asked, path, head, 0, len(head))
        scope.slot.add(draw.stratum, Count.OFFERED)
        if not draw.taken or scope.refuses(draw.stratum):
            return None
        scope.slot.add(draw.stratum, Count.TAKEN)
        return SampledRequest(draw=draw, head=head)

    def hand_over(
        self,
        ticket: SampledRequest,
        request: bytes,
        response: bytes,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        captured_at: datetime | None = None,
        version: bytes = b"HTTP/1.1",
    ) -> None:
        """Give an exchange to the capture process, or count why it could not be given.

        Parameters
        ----------
        ticket
            Of its request.
        request, response
            Contents.
        status, headers
            Of the response.
        captured_at
            When the response was complete; aware. None: now.
        version
            Of HTTP.
        """
        head, answer = ticket.head, response_head(status, _raw(headers or {}), version)
        if len(head) + len(request) + len(answer) + len(response) > self._scope.max_exchange_bytes:
            self.lose(ticket, Loss.HELD_BYTES)
            return
        at = captured_at or self._scope.clock.now()
        meta = RawMeta(
            id=ticket.draw.id,
            stratum=ticket.draw.stratum,
            pi1=ticket.draw.pi1,
            u1=ticket.draw.u1,
            epoch=ticket.draw.epoch,
            captured_at_ns=(at - _EPOCH) // _MICROSECOND * 1000,
            request_head_bytes=len(head),
            request_bytes=len(head) + len(request),
            response_head_bytes=len(answer),
            response_bytes=len(answer) + len(response),
        )
        self._scope.send_frame(ticket.draw.stratum, frame(meta, [head, request, answer, response]))

    def admit(self, content: bytes, n_rows: int) -> None:
        """Pass on a frame of the hand-off whose maker has drawn already, by the rates that it was told.

        Parameters
        ----------
        content
            The frame.
        n_rows
            Header strata in the table of counts.

        Raises
        ------
        ValueError
            It is no such frame.
        """
        if len(content) < HEAD_BYTES:
            raise ValueError("a frame without lengths")
        n_rest, n_meta = lengths(content[:HEAD_BYTES])
        if n_rest != len(content) - HEAD_BYTES or not 0 <= n_meta <= n_rest:
            raise ValueError("a frame whose lengths do not add up")
        meta, _, _ = parse(n_meta, content[HEAD_BYTES:])
        if not 0 <= meta.stratum < n_rows:
            raise ValueError(f"there is no stratum {meta.stratum}")
        if self._scope.refuses(meta.stratum):
            return
        self._scope.slot.add(meta.stratum, Count.TAKEN)
        self._scope.send_frame(meta.stratum, [content])

    def count(self, counts: Counts, places: Mapping[str, int]) -> None:
        """Add what a tap has counted.

        Parameters
        ----------
        counts
            What is new. A stratum that this sidecar never had was an earlier sidecar's: its calls are counted as those
            of a tap that does not know the rates.
        places
            Row of each stratum that there has been.

        Raises
        ------
        ValueError
            It counts backwards, or beyond all bounds.
        """
        slot = self._scope.slot
        lost = [(stratum, loss, n) for stratum, of in counts.lost.items() for loss, n in of.items()]
        numbers = [*counts.offered.values(), *(n for _, _, n in lost), counts.early, counts.errors]
        if any(not 0 <= n <= _MOST_COUNTED for n in numbers):
            raise ValueError("counts that cannot be")
        early = counts.early
        for stratum, n in counts.offered.items():
            if stratum in places:
                slot.add(places[stratum], Count.OFFERED, n)
            else:
                early += n
        for stratum, loss, n in lost:
            if stratum in places:
                slot.add(places[stratum], Count.TAKEN, n)
                slot.lose(places[stratum], loss, n)
        slot.adjust(Gauge.OBSERVER_ERRORS, counts.errors)
        slot.adjust(Gauge.EARLY, early)

    def ignore(self) -> None:
        """Count a message that is no inference."""
        self._scope.slot.adjust(Gauge.IGNORED)

    def deny(self, why: Denial) -> None:
        """Count a call that was refused before anything was made of it."""
        self._scope.slot.adjust(INTAKE_DENIALS[why])

    def hold(self, n_bytes: int) -> None:
        """Account for `n_bytes` more of what waits to be complete, or fewer where it is negative."""
        self._scope.add_held_bytes(n_bytes)

    def lose(self, ticket: SampledRequest, loss: Loss) -> None:
        """Count an exchange that cannot be handed over."""
        self._scope.slot.lose(ticket.draw.stratum, loss)


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return header fields without those that tell how a body travelled: what is handed over is the content alone."""
    return [
        (name.encode(errors="replace"), value.encode(errors="replace"))
        for name, value in headers.items()
        if name.lower() not in _OF_FRAMING
    ]
