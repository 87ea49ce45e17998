"""Says in the log what the shared counts show to be wrong, where clients see only a closed connection, or nothing at all.

The supervisor looks once a second. A relay worker only counts: it is on the serving path, and a log may be slow.
"""

import errno
import logging
import os
import re
import socket
from collections.abc import Callable

from quantdrift.core.clock import Clock
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Count, Counters, Gauge
from quantdrift.sidecar.state.routes import known_requests

_LOG = logging.getLogger(__name__)

EVERY_S = 60.0
LEAST = 10  # requests or connections, before what they have in common is worth a line
_GROWTH = 10  # the next line comes when there are so many times more
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_NO_NAME = -1


def cause(error: OSError) -> int:
    """Return a number that tells why a connection could not be made: the system's, or one below 0 for an unknown name."""
    if isinstance(error, socket.gaierror):
        return _NO_NAME
    if isinstance(error, TimeoutError) and error.errno is None:
        return errno.ETIMEDOUT
    if error.errno is None:  # a name with several addresses, each with its own error: all are in the text
        told = _ERRNO.search(str(error))
        return int(told[1]) if told else 0
    return error.errno


def _words(number: int) -> str:
    if number < 0:
        return "its name cannot be looked up"
    return os.strerror(number) if number else "it cannot be connected to"


class TrafficWarnings:
    """Looks at the counts, and says what is wrong: at once, then at most once in `EVERY_S`, and once when it is over.

    Parameters
    ----------
    counters
        Of all processes.
    settled
        Returns what holds.
    clock
        Tells the time.
    """

    def __init__(self, counters: Counters, settled: Callable[[], LiveConfig], clock: Clock) -> None:
        self._counters = counters
        self._settled = settled
        self._backend = _Backend(counters, settled().config.sidecar.backend, clock)
        self._is_offered = False
        self._next_posts = self._next_blind = LEAST

    def look(self) -> None:
        """Say what is new. Called about once a second."""
        self._backend.look()
        if not self._is_offered:
            self._look_for_predictions()

    def _look_for_predictions(self) -> None:
        """Say that there is traffic, and nothing in it that could be sampled. Once there was something, this is over."""
        posts, blind = self._counters.gauge(Gauge.UNKNOWN_POSTS), self._counters.gauge(Gauge.BLIND)
        if posts < self._next_posts and blind < self._next_blind:
            return
        settled = self._settled()
        self._is_offered = self._counters.total(Count.OFFERED, len(settled.rows)) > 0
        if self._is_offered:
            return
        if posts >= self._next_posts:
            self._next_posts = _GROWTH * posts
            _LOG.warning(
                "nothing is sampled: %d POST requests have passed, and none is a prediction in a protocol of "
                "capture.protocols, which knows %s. Look in your clients for what they ask for",
                posts,
                ", ".join(known_requests(settled.config.capture.protocols)) or "none",
            )
        if blind >= self._next_blind:
            self._next_blind = _GROWTH * blind
            _LOG.warning(
                "nothing is sampled: %d connections carry what the relay cannot read, TLS or no HTTP, and no other "
                "connection carries predictions. Put the sidecar where the traffic is not encrypted",
                blind,
            )


class _Backend:
    """Whether clients' connections reach the backend.

    Nothing is said twice: a line tells of the failures since the one before, and of each line's end another.
    """

    def __init__(self, counters: Counters, where: str, clock: Clock) -> None:
        self._counters = counters
        self._where = where
        self._clock = clock
        self._n_seen = 0  # failures, as of the last look
        self._n_told = 0  # as of the last line
        self._n_reached = 0  # connections that were made, as of the last look that saw a failure
        self._begun = clock.now()  # when the first was seen that is not told yet
        self._told_s: float | None = None
        self._away_since_s: float | None = None  # where the end is still to be told

    def look(self) -> None:
        failed = self._counters.gauge(Gauge.BACKEND_FAILED)
        reached = self._counters.gauge(Gauge.BACKEND_REACHED)
        now_s = self._clock.monotonic_s()
        if failed > self._n_seen:
            if self._n_seen == self._n_told:
                self._begun = self._clock.now()
            self._n_seen, self._n_reached = failed, reached
        elif self._away_since_s is not None and reached > self._n_reached:
            _LOG.info(
                "the backend %s (sidecar.backend) accepts connections again, after %.0f s",
                self._where,
                now_s - self._away_since_s,
            )
            self._away_since_s = None
        if failed > self._n_told and (self._told_s is None or now_s - self._told_s >= EVERY_S):
            self._tell(failed - self._n_told)
            self._n_told, self._told_s = failed, now_s
            if self._away_since_s is None:
                self._away_since_s = now_s

    def _tell(self, n_failed: int) -> None:
        slots = (self._counters.slot(index) for index in range(self._counters.n_slots))
        why = next((number for slot in slots if (number := slot.gauge(Gauge.BACKEND_ERROR))), 0)
        _LOG.warning(
            "the backend %s (sidecar.backend) did not accept %d connections since %s: %s. Their clients were "
            "disconnected without an answer. Start the server there, or correct the option",
            self._where,
            n_failed,
            self._begun.strftime("%H:%M:%S UTC"),
            _words(why),
        )
