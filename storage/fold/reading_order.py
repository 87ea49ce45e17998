"""The order in which exchanges are folded: by capture, whatever the batches in which they were stored.

A worker replays inputs of one shape together, so a stored batch has neighbours of one shape. Where changed answers depend on the
shape, the conditional mean in such a batch is not that of the traffic, and a bound that is true in the order of capture is false
in the order of batches. So a batch only brings its exchanges: they are folded once the *read mark* of their model has passed
their capture.

The mark is the latest capture among the batches that were stored at least a horizon ago; it moves once in a second of storing, so that
many small batches cost no more than a few large ones. What was fetched before them was captured
before, and has had that long to be stored as well. So it is valid for a backlog too, where all captures are old, and for several
workers. What comes later than that is late: a redelivery, a retry alone, replays that take longer than others. Where it is late by seconds,
the horizon grows by them, up to 30 s, and falls again over hours: what is always late by ten seconds is late once. Late exchanges
must not be folded in a lump, since what is late may depend on the shape. Each gets a place by the hash of its id in the next minute
of captures: a displacement that is independent of all else, which leaves independent traffic independent. Where traffic ends before
that minute is over, all that waits is folded once the model has been silent for the horizon, and the late exchanges get their places
among the others that wait. They are denser there than they would have been, and are a lump only where little else waits.

Marks are stored with the batches when these get their numbers, so that folding again gives the same order whatever the horizon
is by then.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from quantdrift.core.sampling.hash_draw import draw

LATE_SPREAD: Final = 12  # shortest horizons: a minute of captures at the default
MOST_HORIZON_US: Final = 30_000_000  # a worker that dies, or a clock that is slow, delays no alert by minutes
STEP_US: Final = 1_000_000
"""The mark moves with the first batch that is stored in one of these."""
_FALLS_IN_US: Final = 3_600_000_000.0
_LATE_KEY: Final = b"late"


class Stretch(NamedTuple):
    """What is folded with a batch of a model. Times are captures in microseconds, at most the time of storing.

    Parameters
    ----------
    after_us, until_us
        The read mark before the batch, and with it.
    rest_us
        The mark with which the last exchange of the batch itself is folded.
    horizon_us
        The horizon from then on.
    """

    after_us: int
    until_us: int
    rest_us: int
    horizon_us: int

    def place_us(self, exchange_id: str, captured_us: int) -> int:
        """Return the mark with which an exchange that this batch brought is folded.

        Parameters
        ----------
        captured_us
            At most the time of storing: a sidecar whose clock is ahead does not hold others up.
        """
        if not self.is_late(captured_us):
            return captured_us
        return self.after_us + 1 + int(draw(exchange_id, _LATE_KEY) * (self.rest_us - self.after_us))

    def is_late(self, captured_us: int) -> bool:
        """Return whether an exchange that this batch brought was captured before the mark."""
        return captured_us <= self.after_us


def closed_up(places_us: Sequence[int], late: Sequence[bool], after_us: int) -> list[int]:
    """Return the places of all that waits when traffic ends: those of late exchanges, moved up between the others.

    What lies between the mark and the last place is scaled to what lies between the mark and the last place of an exchange that
    is not late. Places that are uniform stay so. Without such an exchange nothing moves.

    Parameters
    ----------
    places_us
        After the mark.
    after_us
        The mark before the end.
    """
    last_us = max(
        (at_us for at_us, is_late in zip(places_us, late, strict=True) if not is_late), default=None
    )
    if last_us is None:
        return list(places_us)
    scale = min((last_us - after_us) / (max(places_us) - after_us), 1.0)
    return [
        after_us + 1 + int((at_us - after_us - 1) * scale) if is_late else at_us
        for at_us, is_late in zip(places_us, late, strict=True)
    ]


class WaitingBatch(NamedTuple):
    """A numbered batch whose captures are not all folded yet: number, time of storing and latest capture."""

    fold_seq: int
    stored_us: int
    captured_to_us: int


class ReadingOrder:
    """The read mark of one model.

    Parameters
    ----------
    horizon_us
        The shortest horizon: how much longer one exchange may take than another one, from the fetch until it is stored, without
        being late.
    last
        Of its last batch, with the time of storing; None before the first.
    waiting
        Batches with captures behind the mark of the last one, by number.
    """

    def __init__(
        self, horizon_us: int, last: tuple[Stretch, int] | None = None, waiting: Iterable[WaitingBatch] = ()
    ) -> None:
        self._shortest_us = horizon_us
        self._last = None if last is None else last[0]
        self._now_us = 0 if last is None else last[1]
        self._waiting: deque[tuple[int, int]] = deque()
        now_us = 0
        for batch in waiting:
            now_us = max(now_us, batch.stored_us)
            self._waiting.append((now_us, min(batch.captured_to_us, batch.stored_us)))

    def stretch(
        self, stored_us: int, captured_from_us: int, captured_to_us: int, *, ends: bool = False
    ) -> Stretch:
        """Return what is folded with the next batch of the model.

        Parameters
        ----------
        ends
            It brings nothing: the model has been silent for the horizon, and all that waits is folded, late exchanges too. The mark
            does not pass `captured_to_us`, so that what comes next is late only where it was captured before that.
        """
        captured_from_us, captured_to_us = min(captured_from_us, stored_us), min(captured_to_us, stored_us)
        now_us = max(self._now_us, stored_us)
        after_us = captured_from_us - MOST_HORIZON_US if self._last is None else self._last.until_us
        late = captured_from_us <= after_us and not ends
        # An exchange that was captured ten seconds ago needs no horizon of more, however far the mark is ahead of it.
        needed_us = min(self._horizon_us + after_us - captured_from_us, now_us - captured_from_us)
        horizon_us = self._horizon(now_us - self._now_us, needed_us if late else 0)
        moves = now_us // STEP_US > self._now_us // STEP_US
        self._now_us = now_us
        self._waiting.append((now_us - horizon_us if ends else now_us, captured_to_us))
        until_us = after_us
        while self._waiting and (ends or (moves and self._waiting[0][0] <= now_us - horizon_us)):
            until_us = max(until_us, self._waiting.popleft()[1])
        spread_us = LATE_SPREAD * self._shortest_us
        rest_us = max(captured_to_us, after_us + spread_us) if late else captured_to_us
        self._last = Stretch(after_us, until_us, rest_us, horizon_us)
        return self._last

    @property
    def _horizon_us(self) -> int:
        return self._shortest_us if self._last is None else self._last.horizon_us

    def _horizon(self, passed_us: int, needed_us: int) -> int:
        """Return the horizon after some time has passed, and something needed a horizon."""
        grown_us = self._horizon_us - self._shortest_us
        horizon_us = self._shortest_us + max(round(grown_us * math.exp(-passed_us / _FALLS_IN_US)), 0)
        return needed_us if horizon_us < needed_us <= MOST_HORIZON_US else horizon_us
