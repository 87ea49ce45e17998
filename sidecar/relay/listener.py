"""The listener of a relay worker.

It accepts as many clients as there are file descriptors for both ends of each.

When the process has no file descriptor left, uvloop's own server closes waiting clients, and asyncio's tries
again only a second later. Here clients stay in the kernel's queue until other clients have left or another
worker accepts them.
"""

import asyncio
import logging
import socket

from quantdrift.sidecar.relay.connection import Relay
from quantdrift.sidecar.state.counters import Gauge

_LOG = logging.getLogger(__name__)

_MAX_ACCEPTS = 8  # in one turn of the loop, so that other workers and open connections get their share
_PAUSE_S = 0.05
_OWN_FILES = 64  # of the loop, the log and the hand-off, and some to look up the backend's name
_FILES_PER_CLIENT = 2


class Listener:
    """Accepts clients from a listening socket.

    Parameters
    ----------
    listener
        Non-blocking, listening; closed by `close`.
    relay
        Serves the clients.
    n_files
        The process's limit on open files.
    """

    def __init__(self, listener: socket.socket, relay: Relay, n_files: int) -> None:
        self._listener = listener
        self._relay = relay
        self._loop = relay.loop
        self._max_clients = max(1, (n_files - _OWN_FILES) // _FILES_PER_CLIENT)
        self._connecting: set[asyncio.Task[None]] = set()
        self._is_paused = self._has_left = False
        self._retry_timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Start accepting."""
        self._retry_timer = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def leave(self) -> None:
        """Stop accepting at once: another process accepts the clients that are waiting, from the same socket."""
        self._has_left = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._loop.remove_reader(self._listener.fileno())

    def close(self) -> None:
        """Accept the clients that are waiting, then stop. Open connections stay."""
        while self._retry_timer is None and not self._has_left and self._accept():
            pass
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _accept(self) -> bool:
        """Accept some clients; return whether there may be more."""
        for _ in range(_MAX_ACCEPTS):
            if len(self._relay.connections) + len(self._connecting) >= self._max_clients:
                self._pause("this worker has no file descriptors left (raise the limit on open files)")
                return False
            try:
                client_socket, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False  # another worker was faster, or the client disconnected
            except OSError as error:  # the whole system has no file or memory left
                self._pause(str(error))
                return False
            self._is_paused = False
            client_socket.setblocking(False)
            task = self._loop.create_task(self._connect(client_socket))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        return True

    async def _connect(self, client_socket: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._relay.accept, client_socket)
        except OSError as error:
            _LOG.debug("a client disconnected while it was being accepted: %s", error)
            client_socket.close()

    def _pause(self, reason: str) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._retry_timer = self._loop.call_later(_PAUSE_S, self.open)
        if not self._is_paused:
            self._is_paused = True
            self._relay.scope.slot.adjust(Gauge.ACCEPT_PAUSES)
            _LOG.warning("new clients have to wait: %s", reason)
