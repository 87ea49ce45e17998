"""The connections of a load test's client: HTTP/1.1, and the Open Inference Protocol over gRPC."""

import asyncio
import ssl
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import aiohttp

from quantdrift.core.config.address import ServerUrl
from quantdrift.core.errors import OperatorError
from quantdrift.core.tls import Tls
from quantdrift.release.load_test.drive import HttpRequest

if TYPE_CHECKING:
    import grpc

GRPC: Final = ("grpc", "grpcs")
"""Schemes of addresses that are driven over gRPC."""
_PIECE: Final = 65_536
_MOST_ANSWER: Final = 64 * 2**20
_CHANNELS: Final = 8
"""Connections of gRPC: a server may allow 100 requests under way on each, and more would wait in the client."""


class HttpWire:
    """Connections of HTTP/1.1, as many as requests are under way.

    Parameters
    ----------
    base, path
        `http://HOST:PORT`, and the path of every request; empty: that of the recorded one.
    requests
        Those that are sent.
    headers
        Further headers of every request.
    tls
        Certificates for an address in `https`.
    timeout_s
        A request without an answer after so long has none.

    Attributes
    ----------
    tls_problem : str
        Why the last handshake failed, in words; empty: none did.
    """

    def __init__(
        self,
        base: str,
        path: str,
        requests: Sequence[HttpRequest],
        *,
        headers: dict[str, str],
        tls: Tls,
        timeout_s: float,
    ) -> None:
        self._urls = [base + (path or request.path) for request in requests]
        self._requests = requests
        self._headers = [{**request.headers, **headers} for request in requests]
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._tls, self.tls_problem = tls, ""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls.context()),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # a proxy would be another target
            skip_auto_headers=("User-Agent", "Content-Type"),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, number: int) -> str:
        """Return why a request was not answered; empty: it was."""
        request = self._requests[number]
        assert self._session is not None
        try:
            async with self._session.request(
                request.method,
                self._urls[number],
                data=request.body or None,
                headers=self._headers[number],
                allow_redirects=False,  # to another target
                timeout=self._timeout,
            ) as response:
                n_bytes = 0
                async for piece in response.content.iter_chunked(_PIECE):
                    n_bytes += len(piece)
                    if n_bytes > _MOST_ANSWER:
                        return "too long"
                return "" if 200 <= response.status < 300 else str(response.status)
        except TimeoutError:
            return "timeout"
        except ssl.SSLError as error:  # what aiohttp raises of a handshake is one, too
            self.tls_problem = self._tls.in_words(error)
            return "TLS"
        except aiohttp.ClientConnectorError:
            return "connection"
        except (aiohttp.ClientError, OSError):
            return "broken off"


class GrpcWire:
    """A few connections of gRPC that requests share, as the clients of a model server do.

    Parameters
    ----------
    target
        Its address.
    requests
        As `requests.as_grpc` returns them.
    headers
        Further metadata of every request; `user-agent` becomes that of the connection.
    tls
        Certificates for an address in `grpcs`.
    timeout_s
        A request without an answer after so long has none.

    Attributes
    ----------
    tls_problem : str
        Why the last handshake failed, in words; empty: none did.
    """

    def __init__(
        self,
        target: ServerUrl,
        requests: Sequence[HttpRequest],
        *,
        headers: dict[str, str],
        tls: Tls,
        timeout_s: float,
    ) -> None:
        further = dict(headers)
        self._agent = further.pop("user-agent", "")
        self._target, self._tls, self._timeout_s = target, tls, timeout_s
        self._requests = [
            (request.path, request.body, tuple({**request.headers, **further}.items()))
            for request in requests
        ]
        self.tls_problem = ""
        self._channels: list[grpc.aio.Channel] = []

    async def __aenter__(self) -> Self:
        try:
            import grpc  # noqa: PLC0415 - of another extra
        except ModuleNotFoundError as error:
            raise OperatorError(
                "an address of gRPC needs grpcio: pip install 'quantdrift[ext-proc]'"
            ) from error

        options = (
            ("grpc.max_receive_message_length", _MOST_ANSWER),
            ("grpc.max_send_message_length", -1),
            ("grpc.primary_user_agent", self._agent),
            ("grpc.use_local_subchannel_pool", 1),  # else all channels to an address are one connection
            ("grpc.enable_http_proxy", 0),  # a proxy would be another target
            ("grpc.enable_retries", 0),
            ("grpc.max_reconnect_backoff_ms", 1_000),
        )
        where = urlsplit(self._target.url).netloc
        for _ in range(_CHANNELS):
            if self._target.is_encrypted:
                credentials = self._tls.grpc_credentials()
                self._channels.append(grpc.aio.secure_channel(where, credentials, options))
            else:
                self._channels.append(grpc.aio.insecure_channel(where, options))
        calls = {
            path: [channel.unary_unary(path) for channel in self._channels]  # bytes in, bytes out
            for path in {path for path, _, _ in self._requests}
        }
        self._calls: dict[str, Any] = {path: cycle(each) for path, each in calls.items()}
        self._error = grpc.aio.AioRpcError
        self._named = {
            grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
            grpc.StatusCode.CANCELLED: "broken off",
        }
        self._away = grpc.StatusCode.UNAVAILABLE
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def send(self, number: int) -> str:
        """Return why a request was not answered, the name of a status of gRPC for instance; empty: it was."""
        path, body, metadata = self._requests[number]
        try:
            await next(self._calls[path])(body, timeout=self._timeout_s, metadata=metadata)
        except self._error as error:
            code = error.code()
            if code is self._away and self._target.is_encrypted and not self.tls_problem:
                self.tls_problem = await asyncio.to_thread(self._tls.grpc_problem, self._target.url)
            if code is self._away and self.tls_problem:
                return "TLS"
            reason: str = self._named.get(code, code.name)
            return reason
        return ""
