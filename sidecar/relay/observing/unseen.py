"""Connections that are not observed: their requests are counted from outside, as the turns of client and backend."""

from collections.abc import Callable

_HTTP1 = b"HTTP/1."
_STATUS = 9  # position of the first digit of the status in a response
TLS_TURNS = 1  # of a handshake, before the first request


class UnseenRequests:
    """The count of requests of one connection that is not observed.

    A request is whatever the client sends before the backend answers. Requests that the client sends without waiting
    for answers, as HTTP/2 clients do, count as one: the true number is at least this one. A request that an HTTP/1
    backend refuses (4xx) is not counted, so that senders of rubbish are not taken for clients.

    Parameters
    ----------
    count
        Called with `row` for each request.
    row
        Row of the table of counts that the last observed request of the connection belonged to; None: there was none.
    n_skipped
        Turns that are not requests.

    Attributes
    ----------
    waits : bool
        Whether the beginning of the backend's next bytes matters.
    """

    __slots__ = ("_backend_spoke", "_count", "_n_skipped", "_row", "waits")

    def __init__(
        self, count: Callable[[int | None], None], row: int | None = None, n_skipped: int = 0
    ) -> None:
        self._count = count
        self._row = row
        self._n_skipped = n_skipped
        self._backend_spoke = True
        self.waits = False

    def request(self) -> None:
        """Note that the client has sent something."""
        if self._backend_spoke:
            self._backend_spoke = False
            self.waits = True

    def response(self, chunk: bytes) -> None:
        """Note that the backend has sent something; only the beginning of it matters."""
        self._backend_spoke = True
        if not self.waits:
            return
        status = chunk[_STATUS : _STATUS + 1] if chunk.startswith(_HTTP1) else b""
        if status == b"1":  # an interim response: the final one follows
            return
        self.waits = False
        if self._n_skipped:
            self._n_skipped -= 1
        elif status != b"4":
            self._count(self._row)
