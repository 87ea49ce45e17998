"""The HTTP/1.1 client of a reference's server: one kept connection, and the classification of refusals."""

import contextlib
import http.client
import json
import ssl
from typing import Final
from urllib.parse import urlsplit

from quantdrift.core.errors import RetryError
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.runtimes.remote.protocol import Refusal, RefusedError, RequestHeaders, server_of

_AWAY: Final = frozenset({429, 502, 503, 504})
_ACCESS: Final = frozenset({401, 403, 404, 407})
_SAID: Final = 200
_BROKEN_OFF: Final = (
    OSError,
    http.client.HTTPException,
)  # no route any more, or what TLS cannot read, among them


class HttpServer:
    """The connection to a server, with the address, token and time limit of a reference."""

    def __init__(self, request: RuntimeRequest) -> None:
        server = server_of(request)
        address = urlsplit(server.url)
        self._where = server.url
        self._base = address.path.rstrip("/")
        self._token = RequestHeaders(request)
        self._tls = request.tls if server.is_encrypted else None
        self._host, self._timeout_s = address.netloc, request.reference.timeout_s
        self._connection = http.client.HTTPConnection(self._host, timeout=self._timeout_s)

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Return status, headers and body; a kept connection that the server has closed is reopened.

        Raises
        ------
        RetryError
            The server is unreachable, or its certificate is not accepted. Then nothing was sent to it.
        TimeoutError
            It takes too long.
        OperatorError
            A file of a certificate or the token cannot be used.
        """
        reused = self._connection.sock is not None
        everything = {**(headers or {}), **self._token.headers()}
        try:
            return self._once(method, path, body, everything)
        except TimeoutError:
            raise
        except _BROKEN_OFF as error:
            if not reused:
                raise self._away(error) from error
        try:
            return self._once(method, path, body, everything)
        except TimeoutError:
            raise
        except _BROKEN_OFF as error:
            raise self._away(error) from error

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _once(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        try:
            if self._connection.sock is None:
                self._connect()
            connection = self._connection
            connection.request(method, self._base + path, body or None, headers)
            response = connection.getresponse()
            answer = response.read()
        except BaseException:
            self._connection.close()
            raise
        if response.status in _AWAY:
            raise RetryError(f"{self._where} answers {response.status}")
        return response.status, response.headers, answer

    def _connect(self) -> None:
        if self._tls is not None:  # with the certificates of now
            self._connection = http.client.HTTPSConnection(
                self._host, timeout=self._timeout_s, context=self._tls.context()
            )
        try:
            self._connection.connect()
        except OSError as error:  # refused, no such name, no route, no handshake, and no answer at all
            raise self._away(error) from error

    def _away(self, error: Exception) -> RetryError:
        why = self._tls.in_words(error) if self._tls and isinstance(error, ssl.SSLError) else repr(error)
        return RetryError(f"{self._where} is away: {why}")


def refuse(status: int, body: bytes) -> None:
    """Raise an error if the status is not 200.

    Raises
    ------
    RefusedError
        The server refused, or failed.
    """
    if status == http.HTTPStatus.OK:
        return
    message = body.decode(errors="replace")
    with contextlib.suppress(ValueError, AttributeError):
        document = json.loads(body)
        message = document.get("error", document.get("message", message))
        message = str(message.get("message", message) if isinstance(message, dict) else message)
    kind = Refusal.ACCESS if status in _ACCESS else Refusal.FAILURE if status >= 500 else Refusal.INPUT
    brief = f"HTTP {status}"
    raise RefusedError(f"{brief}: {''.join(message.splitlines()[:1])[:_SAID]}", kind, brief)
