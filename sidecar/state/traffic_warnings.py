"""Warnings about traffic that is not captured or not answered, derived from the shared counters.

Clients see only a closed connection, or nothing at all. The supervisor checks once a second; a relay worker
only counts, because it is on the serving path and a log may be slow.
"""

import errno
import logging
import os
import re
import socket
from collections.abc import Callable

from quantdrift.core.clock import Clock
from quantdrift.core.notation import count_of
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Count, Counters, Gauge
from quantdrift.sidecar.state.routes import known_requests

_LOG = logging.getLogger(__name__)

WARNING_INTERVAL_S = 60.0
MIN_COUNT = 10  # requests or connections before the first warning
_GROWTH = 10  # the next warning comes at this many times the number
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_NO_NAME = -1


def connect_errno(error: OSError) -> int:
    """Return the error number of a failed connection.

    A number below 0 stands for a name that cannot be resolved.
    """
    if isinstance(error, socket.gaierror):
        return _NO_NAME
    if isinstance(error, TimeoutError) and error.errno is None:
        return errno.ETIMEDOUT
    if error.errno is None:  # the name has several addresses, and the text has an error for each
        match = _ERRNO.search(str(error))
        return int(match[1]) if match else 0
    return error.errno


def _describe_errno(number: int) -> str:
    if number < 0:
        return "its name cannot be resolved"
    return os.strerror(number) if number else "it cannot be connected to"


class TrafficWarnings:
    """Checks the counters and logs problems.

    It logs a problem at once, then at most every `WARNING_INTERVAL_S`, and once when it ends.

    Parameters
    ----------
    counters
        Of all processes.
    live_config
        Returns the configuration in effect.
    clock
        Times the warnings.
    """

    def __init__(self, counters: Counters, live_config: Callable[[], LiveConfig], clock: Clock) -> None:
        self._counters = counters
        self._live_config = live_config
        self._backend = _Backend(counters, live_config().config.sidecar.backend, clock)
        self._has_predictions = False
        self._next_n_posts = self._next_n_blind = MIN_COUNT

    def poll(self) -> None:
        """Log new problems. Called about once a second."""
        self._backend.poll()
        if not self._has_predictions:
            self._check_for_predictions()

    def _check_for_predictions(self) -> None:
        """Warn of traffic without any inference request.

        After the first inference request this check is over.
        """
        n_posts, n_blind = self._counters.gauge(Gauge.UNKNOWN_POSTS), self._counters.gauge(Gauge.BLIND)
        if n_posts < self._next_n_posts and n_blind < self._next_n_blind:
            return
        live_config = self._live_config()
        n_offered = self._counters.total(Count.OFFERED, len(live_config.rows))
        self._has_predictions = n_offered > self._counters.gauge(Gauge.UNSEEN_REQUESTS)
        if self._has_predictions:
            return
        if n_posts >= self._next_n_posts:
            self._next_n_posts = _GROWTH * n_posts
            _LOG.warning(
                "nothing is sampled: %d POST requests have passed, and none is a prediction in a protocol of "
                "capture.protocols, which covers %s. Compare with the paths that your clients request",
                n_posts,
                ", ".join(known_requests(live_config.config.capture.protocols, live_config.paths)) or "none",
            )
        if n_blind >= self._next_n_blind:
            self._next_n_blind = _GROWTH * n_blind
            _LOG.warning(
                "nothing is sampled: the relay cannot read %d connections, which use TLS or are not HTTP, and no other "
                "connection carries predictions. Put the sidecar where the traffic is not encrypted",
                n_blind,
            )


class _Backend:
    """The check that connections reach the backend.

    Nothing is logged twice: a warning counts the failures since the one before, and one line reports the
    recovery.
    """

    def __init__(self, counters: Counters, address: str, clock: Clock) -> None:
        self._counters = counters
        self._address = address
        self._clock = clock
        self._n_seen = 0  # failures, as of the last poll
        self._n_logged = 0  # failures, as of the last warning
        self._n_reached = 0  # successful connections, as of the last poll that saw a failure
        self._first_failure = clock.now()  # when the first failure was seen that is not logged yet
        self._logged_s: float | None = None
        self._down_since_s: float | None = None  # None: no recovery is to be logged

    def poll(self) -> None:
        failed = self._counters.gauge(Gauge.BACKEND_FAILED)
        reached = self._counters.gauge(Gauge.BACKEND_REACHED)
        now_s = self._clock.monotonic_s()
        if failed > self._n_seen:
            if self._n_seen == self._n_logged:
                self._first_failure = self._clock.now()
            self._n_seen, self._n_reached = failed, reached
        elif self._down_since_s is not None and reached > self._n_reached:
            _LOG.info(
                "the backend %s (sidecar.backend) accepts connections again, after %.0f s",
                self._address,
                now_s - self._down_since_s,
            )
            self._down_since_s = None
        if failed > self._n_logged and (
            self._logged_s is None or now_s - self._logged_s >= WARNING_INTERVAL_S
        ):
            self._log_failures(failed - self._n_logged)
            self._n_logged, self._logged_s = failed, now_s
            if self._down_since_s is None:
                self._down_since_s = now_s

    def _log_failures(self, n_failed: int) -> None:
        slots = (self._counters.slot(index) for index in range(self._counters.n_slots))
        number_of_last = next((number for slot in slots if (number := slot.gauge(Gauge.BACKEND_ERROR))), 0)
        _LOG.warning(
            "the backend %s (sidecar.backend) did not accept %s since %s: %s. Their clients were "
            "disconnected without an answer. Start the server there, or correct the option",
            self._address,
            count_of(n_failed, "connection"),
            self._first_failure.strftime("%H:%M:%S UTC"),
            _describe_errno(number_of_last),
        )
