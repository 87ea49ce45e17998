"""A forwarder that keeps the bytes of each connection: one before the relay and one behind it must keep the same."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator

_CHUNK = 65_536


class Line:
    """One connection: what came from the client's side, and what came from the server's."""

    def __init__(self) -> None:
        self.up, self.down = bytearray(), bytearray()
        self.closed = threading.Event()


class Wiretap(socketserver.ThreadingTCPServer):
    """Forwards every connection to a port of this machine.

    Parameters
    ----------
    target
        The port.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), _Forwarding)
        self.target = target
        self.lines: list[Line] = []

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    def closed(self) -> bool:
        """Return whether all connections are over."""
        return all(line.closed.is_set() for line in self.lines)

    def take(self) -> list[tuple[bytes, bytes]]:
        """Return what the connections carried up and down, in an order of its own, and forget it."""
        taken, self.lines = self.lines, []
        return sorted((bytes(line.up), bytes(line.down)) for line in taken)


class _Forwarding(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        """Carry one connection to its end."""
        assert isinstance(self.server, Wiretap)
        line = Line()
        self.server.lines.append(line)
        try:
            with socket.create_connection(("127.0.0.1", self.server.target)) as server:
                up = threading.Thread(target=_carry, args=(self.request, server, line.up))
                up.start()
                _carry(server, self.request, line.down)
                up.join()
        finally:
            line.closed.set()


def _carry(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            kept += data
            with contextlib.suppress(OSError):  # who has hung up hears no more, but what was said is kept
                sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def wiretap(target: int) -> Iterator[Wiretap]:
    """Run a forwarder in threads of this process."""
    with Wiretap(target) as tap:
        thread = threading.Thread(target=tap.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield tap
        finally:
            tap.shutdown()
            thread.join()
