"""Where a relay worker's clients come in: accepts as many as there are files for both ends of each.

A loop's own server closes the clients that wait when the process has no file left (uvloop), or tries again only a
second later (asyncio). Here they stay in the kernel's queue until others have gone or another worker accepts them.
"""

import asyncio
import logging
import socket

from quantdrift.sidecar.relay.connection import Relay
from quantdrift.sidecar.state.counters import Gauge

_LOG = logging.getLogger(__name__)

_AT_ONCE = 8  # in one turn of the loop: other workers, and those who are connected, have their turn, too
_PAUSE_S = 0.05
_OWN_FILES = 64  # the loop's, the log's, the hand-off's, and some to look up the backend's name
_FILES_PER_CLIENT = 2


class Listener:
    """Accepts from a listening socket what a relay can serve.

    Parameters
    ----------
    listener
        Non-blocking, listening; closed by `close`.
    relay
        Serves the clients.
    n_files
        Most that the process may have open.
    """

    def __init__(self, listener: socket.socket, relay: Relay, n_files: int) -> None:
        self._listener = listener
        self._relay = relay
        self._loop = relay.loop
        self._most = max(1, (n_files - _OWN_FILES) // _FILES_PER_CLIENT)
        self._entering: set[asyncio.Task[None]] = set()
        self._is_full = False
        self._opening: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Accept from now on."""
        self._opening = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept those who wait, and then no more. Who is in already stays."""
        while self._opening is None and self._accept():
            pass
        if self._opening is not None:
            self._opening.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _accept(self) -> bool:
        """Accept some; return whether there may be more."""
        for _ in range(_AT_ONCE):
            if len(self._relay.connections) + len(self._entering) >= self._most:
                self._pause("as many clients as there are files for")
                return False
            try:
                end, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False  # another worker was faster, or the client went away
            except OSError as error:  # no file or no memory is left in the whole system
                self._pause(str(error))
                return False
            self._is_full = False
            end.setblocking(False)
            task = self._loop.create_task(self._enter(end))
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)
        return True

    async def _enter(self, end: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._relay.accept, end)
        except OSError as error:
            _LOG.debug("a client went away as it came: %s", error)
            end.close()

    def _pause(self, reason: str) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._opening = self._loop.call_later(_PAUSE_S, self.open)
        if not self._is_full:
            self._is_full = True
            self._relay.scope.slot.note(Gauge.ACCEPT_PAUSES)
            _LOG.warning("clients wait to be accepted: %s", reason)
