"""A server that gets notifications by HTTP POST, and why it did not accept one."""

import asyncio
import http.client
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

import msgspec

from quantdrift.core.config.address import read_server_url
from quantdrift.core.config.load import read_headers
from quantdrift.core.errors import OperatorError, os_error_text
from quantdrift.core.tls import Tls

TIMEOUT_S: Final = 5.0
_WHOLE_S: Final = 2 * TIMEOUT_S
_MOST_BYTES: Final = 65_536
_SERVER_ERROR: Final = 500


class Reason(StrEnum):
    """Why a receiver did not accept a notification."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    TLS = "tls"
    REFUSED = "refused"  # another status than 2xx, 429 and 5xx
    UNAVAILABLE = "unavailable"  # 429 or 5xx
    SETUP = "setup"  # a file of ours cannot be used


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A notification that was not accepted.

    Parameters
    ----------
    text
        For a log line, without credentials.
    """

    reason: Reason
    text: str


class Receiver:
    """One address. It has a thread of its own, so that it cannot delay another one.

    Parameters
    ----------
    option
        The option that names it.
    url
        Its address, as configured.
    headers_file
        File with headers, which is read again for each request; empty: none.
    """

    def __init__(self, option: str, url: str, tls: Tls, headers_file: str = "") -> None:
        server = read_server_url(url, "https", "http")
        self._address = urlsplit(server.url)
        self._tls = tls if server.is_encrypted else None
        self._headers_file = headers_file
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="notify")
        # The path of a webhook may be a secret.
        self.name = f"{option} ({self._address.hostname}:{self._port})"

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Failure | None:
        """Send JSON to `path` below the address; return why it was not accepted, or None. Redirects are not followed."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_WHOLE_S):
                return await loop.run_in_executor(self._thread, self._post, path, body, dict(headers or {}))
        except TimeoutError:
            return Failure(reason=Reason.TIMEOUT, text=f"no answer within {_WHOLE_S:g} s")

    def close(self) -> None:
        """Start no other request."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def _port(self) -> int:
        return self._address.port or (443 if self._address.scheme == "https" else 80)

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> Failure | None:
        query = f"?{self._address.query}" if self._address.query else ""
        target = f"{self._address.path.rstrip('/')}{path}" or "/"
        connection: http.client.HTTPConnection | None = None
        try:
            own = read_headers(self._headers_file) if self._headers_file else {}
            connection = self._connection()
            everything = {"content-type": "application/json", "user-agent": "quantdrift", **own, **headers}
            connection.request("POST", f"{target}{query}", body, everything)
            response = connection.getresponse()
            response.read(_MOST_BYTES)
        except (OperatorError, OSError, http.client.HTTPException, ValueError) as error:
            return self._failure(error)
        finally:
            if connection is not None:
                connection.close()
        status = response.status
        if http.HTTPStatus.OK <= status < http.HTTPStatus.MULTIPLE_CHOICES:
            return None
        away = status >= _SERVER_ERROR or status == http.HTTPStatus.TOO_MANY_REQUESTS
        return Failure(
            reason=Reason.UNAVAILABLE if away else Reason.REFUSED, text=f"it answers with status {status}"
        )

    def _failure(self, error: Exception) -> Failure:
        match error:
            case OperatorError():
                return Failure(reason=Reason.SETUP, text=str(error))
            case TimeoutError():
                return Failure(reason=Reason.TIMEOUT, text=f"no answer within {TIMEOUT_S:g} s")
            case ssl.SSLError():
                why = self._tls.in_words(error) if self._tls else "the TLS handshake failed"
                return Failure(reason=Reason.TLS, text=why)
            case OSError():
                return Failure(reason=Reason.UNREACHABLE, text=os_error_text(error))
            case http.client.HTTPException():
                return Failure(
                    reason=Reason.UNREACHABLE, text=f"it does not answer in HTTP ({type(error).__name__})"
                )
        # A header with a line break: the text of the error has its value.
        return Failure(
            reason=Reason.SETUP, text=f"{self._headers_file} has a header that HTTP does not allow"
        )

    def _connection(self) -> http.client.HTTPConnection:
        host = self._address.hostname or ""
        if self._tls is None:
            return http.client.HTTPConnection(host, self._port, timeout=TIMEOUT_S)
        return http.client.HTTPSConnection(host, self._port, timeout=TIMEOUT_S, context=self._tls.context())
