"""Clients that keep their connections, as a service mesh or a connection pool does, and count what goes wrong."""

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from typing import Self

from tests.support.sidecar.relay_process import DEADLINE_S
from tests.support.sidecar.relay_rig import answer, post

CLOSE = b"Connection: close\r\n"


class Load:
    """Clients in threads of their own, each sending one request after the other on one connection.

    As HTTP clients do, they open another connection after a response with `Connection: close`, and where they see the end
    of a connection before they use it again. Where a request fails, it is sent again on a new connection; each request's body is sent by nobody else.

    Parameters
    ----------
    ports
        Where to connect, in the order in which to try: first the instance under test, then others.
    n_clients
        How many.
    """

    def __init__(self, ports: Callable[[], list[int]], n_clients: int) -> None:
        self._ports = ports
        self._stop = threading.Event()
        self._counting = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(n_clients)]
        self.n_good = 0
        self.n_told = 0
        """Answered requests whose response announced the end of the connection."""
        self.n_untouched = 0
        """Failed requests of which no byte of a response had come."""
        self.n_cut = 0
        """Failed requests whose response had begun."""
        self.n_failed_twice = 0
        self.n_refused = 0
        """Connections that the first of the ports did not accept."""
        self.wrong: list[bytes] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no more, and wait for what is under way."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _run(self, client: int) -> None:
        number = 0
        end, is_over = self._connect(), False
        while not self._stop.is_set():
            number += 1
            body = b"%d:%d" % (client, number)
            if is_over or select.select([end], [], [], 0)[0]:
                end.close()
                end = self._connect()
            is_good, is_over = self._ask(end, body)
            if is_good:
                continue
            end.close()
            end = self._connect()
            is_good, is_over = self._ask(end, body)
            if not is_good:
                self._count("n_failed_twice")
        end.close()

    def _connect(self) -> socket.socket:
        for index, port in enumerate(self._ports()):
            try:
                return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
            except OSError:
                if index == 0:
                    self._count("n_refused")
        raise AssertionError("nobody listens")

    def _ask(self, end: socket.socket, body: bytes) -> tuple[bool, bool]:
        """Return whether the request was answered, and whether the connection ends with the response."""
        expected, last, got = answer(b"to " + body), answer(b"to " + body, fields=CLOSE), b""
        with contextlib.suppress(OSError):
            end.sendall(post(body))
            while len(got) < len(last if CLOSE in got else expected) and (data := end.recv(65_536)):
                got += data
        if got == last:
            self._count("n_told")
        if got in (expected, last):
            self._count("n_good")
            return True, got == last
        if not expected.startswith(got):
            self.wrong.append(got)
        else:
            self._count("n_cut" if got else "n_untouched")
        return False, True

    def _count(self, name: str) -> None:
        with self._counting:
            setattr(self, name, getattr(self, name) + 1)
