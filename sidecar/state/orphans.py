"""Relay workers whose supervisor was killed: they go on serving until a new supervisor has their listening socket.

The kernel tells a worker of the death of its supervisor. It goes on accepting and forwarding, and offers its listening
socket at a Unix socket that is named after its process id. A new supervisor finds such workers, takes the socket, so that
no client is refused, and asks them to drain once its own workers serve. Without a new supervisor they serve for as long as
clients come, because one may fail to start for hours, and nothing else serves meanwhile. They drain after `ORPHAN_S` without a client.

Relay workers import this module, so it must stay light.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec

from quantdrift.sidecar.state.process_start import ProcessStart

_LOG = logging.getLogger(__name__)

ORPHANED: Final = signal.SIGUSR1
"""The signal that a relay worker gets when its supervisor dies."""
ORPHAN_S: Final = 60.0
"""After so long without a supervisor and without a client a worker drains: nobody needs it."""
ANSWER_S: Final = 3.0
"""After so long a worker that does not give its socket is killed: it is stopped or hangs, and keeps the port in use."""
_LOOK_S: Final = 0.05
_ANSWERS_AT_ONCE_S: Final = 0.5
_DRAIN: Final = b"d"
_HERE: Final = b"h"
_DRAINS: Final = b"e"  # it drains already, and has closed its listening socket
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_PROCESSES: Final = Path("/proc")


def _name(pid: int) -> str:
    return f"\0quantdrift-relay-{pid}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other side."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(credentials)
    return pid, uid


class End(Protocol):
    """Lets a worker drain."""

    def __call__(self, *, taken_over: bool) -> None:
        """Drain."""


class Orphan:
    """A relay worker without a supervisor, seen from inside.

    Parameters
    ----------
    listener
        The listening socket that it gives to a new supervisor.
    end
        Called once when the worker is to drain, with `taken_over`: whether a new supervisor's workers accept.
    clients
        Returns how many connections of clients were accepted so far, and how many are open.
    orphan_s
        After so long without a new supervisor and without a client it drains.
    """

    def __init__(
        self,
        listener: socket.socket,
        end: "End",
        clients: Callable[[], tuple[int, int]],
        orphan_s: float = ORPHAN_S,
    ) -> None:
        self._listener = listener
        self._end = end
        self._clients = clients
        self._orphan_s = orphan_s
        self._n_accepted = clients()[0]
        self._loop = asyncio.get_running_loop()
        self._connections: set[socket.socket] = set()
        self._offer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _LOG.warning(
            "the sidecar's supervisor was killed: this relay worker goes on until a new one has its port, or no client was"
            " connected for %g s",
            orphan_s,
        )
        self._timer = self._loop.call_later(orphan_s, self._end_if_unused)
        try:
            self._offer.setblocking(False)
            self._offer.bind(_name(os.getpid()))
            self._offer.listen()
        except OSError as error:
            _LOG.warning("no new supervisor can take the port from this relay worker: %s", error)
            return
        self._loop.add_reader(self._offer.fileno(), self._accept)

    def _end_if_unused(self) -> None:
        n_accepted, n_open = self._clients()
        if n_open or n_accepted != self._n_accepted:
            self._n_accepted = n_accepted
            self._timer = self._loop.call_later(self._orphan_s, self._end_if_unused)
        else:
            self.close()

    def close(self, *, taken_over: bool = False) -> None:
        """Withdraw the offer and drain."""
        self._timer.cancel()
        for connection in (self._offer, *self._connections):
            self._loop.remove_reader(connection.fileno())
            connection.close()
        self._connections.clear()
        self._end(taken_over=taken_over)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._offer.accept()
            connection.setblocking(False)
            if _peer(connection)[1] != os.geteuid():
                connection.close()
                return
            fd = self._listener.fileno()
            try:
                if fd < 0:
                    connection.sendall(_DRAINS)
                else:
                    socket.send_fds(connection, [_HERE], [fd])
            except OSError:
                connection.close()
                raise
            self._connections.add(connection)
            self._loop.add_reader(connection.fileno(), self._read, connection)

    def _read(self, connection: socket.socket) -> None:
        said = b""
        with contextlib.suppress(OSError):
            said = connection.recv(1)
        if said == _DRAIN:
            self.close(taken_over=True)
            return
        self._loop.remove_reader(connection.fileno())  # that supervisor has ended, too: another one may come
        self._connections.discard(connection)
        connection.close()


class Adoption:
    """The relay workers that a killed supervisor left behind, seen by the new one.

    Attributes
    ----------
    listener : socket.socket | None
        The listening socket, taken from one of them; None: there is none.
    """

    def __init__(self) -> None:
        self.listener: socket.socket | None = None
        self._connections: dict[int, socket.socket] = {}

    def release(self) -> None:
        """Ask the workers to drain: others accept from their socket now."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(_DRAIN)
        self.close()

    def close(self) -> None:
        """Leave the workers to themselves; those that were not asked to drain go on."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def ask(self, pid: int) -> bool:
        """Ask a worker for its socket; return whether it answered: one that drains has closed it."""
        if pid in self._connections:
            return True
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_ANSWERS_AT_ONCE_S)
        try:
            connection.connect(_name(pid))
            if _peer(connection) != (pid, os.geteuid()):
                raise PermissionError("another process has the worker's name")
            said, fds, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError:
            connection.close()
            return False
        for fd in fds:
            listener = socket.socket(fileno=fd)
            if self.listener is None:
                listener.setblocking(False)
                self.listener = listener
            else:
                listener.close()
        if not said:
            connection.close()
            return False
        self._connections[pid] = connection
        return True


async def adopt(listen: str) -> Adoption:
    """Take the listening socket from the workers that a killed supervisor left behind, if there are any.

    A worker that does not answer is killed.

    Parameters
    ----------
    listen
        The address that they listen on, as configured.
    """
    adoption = Adoption()
    until_s = time.monotonic() + ANSWER_S
    while silent := [pid for pid in orphans(listen) if not adoption.ask(pid)]:
        if time.monotonic() >= until_s:
            for pid in silent:
                _LOG.warning("relay worker %d of a killed supervisor does not answer: it is killed", pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            until_s += ANSWER_S
        await asyncio.sleep(_LOOK_S)
    if adoption.listener is not None:
        _LOG.info("took over %s from the relay workers of a killed supervisor", listen)
    return adoption


def orphans(listen: str) -> Iterator[int]:
    """Yield the process ids of this user's relay workers that listen on an address and have lost their supervisor."""
    if not _PROCESSES.is_dir():
        return
    for entry in _PROCESSES.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != os.geteuid():
                continue
            *arguments, last = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            if b"quantdrift.sidecar.relay.worker" not in arguments:
                continue
            start = msgspec.json.decode(last, type=ProcessStart)
            parent = int((entry / "stat").read_text("ascii", "replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, msgspec.MsgspecError):  # it has ended
            continue
        if start.listen == listen and parent != start.supervisor:
            yield int(entry.name)
