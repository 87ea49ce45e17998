"""When the certificates of NATS and Postgres end: the monitor looks at each server once an hour, by a connection that goes no further."""

import asyncio
import contextlib
import logging
import struct
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from typing import Final
from urllib.parse import urlsplit

from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.process.run import Stop
from quantdrift.core.stream.config import current_stream
from quantdrift.core.telemetry import Telemetry
from quantdrift.core.tls import Tls, end_of
from quantdrift.storage.address import Dsn, PostgresAddress

LOOK_S: Final = 3600.0
_ANSWER_S: Final = 3.0  # the end of the process may have to wait for it
_INFO_S: Final = 1.0
_NATS_PORT: Final = 4222
_HTTPS_PORT: Final = 443
_SSL_REQUEST: Final = struct.pack("!II", 8, 80_877_103)
_LOG = logging.getLogger(__name__)
Greet = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]


class ServerCertificates:
    """Looks at the servers once an hour, since a long connection does not show that a certificate was renewed.

    A server that does not answer, or not in TLS, keeps what was seen of it before; nothing is logged of it here, because whoever
    needs the connection says so.
    """

    def __init__(self, *, config: Config, dsn: Dsn, telemetry: Telemetry, stop: Stop) -> None:
        self._config = config
        self._dsn = dsn
        self._telemetry = telemetry
        self._stop = stop

    async def turn(self) -> None:
        """Look once, and wait for `LOOK_S`."""
        await self.look()
        await self._stop.wait(LOOK_S)

    async def look(self) -> None:
        """Look at every server, and note when the first certificate of each kind ends."""
        for option, servers in (("stream.url", self._nats), ("storage.dsn_file", self._postgres)):
            ends = []
            # What is wrong with an address or a file is said by whoever connects with it.
            with contextlib.suppress(OperatorError):
                ends = [await _end(*server) for server in servers()]
            if known := [end for end in ends if end is not None]:
                self._telemetry.note_server_certificate(f"server of {option}", min(known))

    def _nats(self) -> Iterator[tuple[Tls, str, int, Greet]]:
        stream = current_stream(self._config.stream)
        if not stream.requires_tls:
            return
        for server in stream.servers:
            is_web = server.scheme in {"ws", "wss"}
            port = urlsplit(server.url).port or (_HTTPS_PORT if is_web else _NATS_PORT)
            yield Tls.of_stream(stream), server.host, port, _at_once if is_web else _after_info

    def _postgres(self) -> Iterator[tuple[Tls, str, int, Greet]]:
        address = PostgresAddress.of(self._dsn if isinstance(self._dsn, str) else self._dsn())
        if address.tls is None:
            return
        for host, port in address.servers:
            yield address.tls, host, port, _after_request


async def _end(tls: Tls, host: str, port: int, greet: Greet) -> datetime | None:
    """Return when the certificate of a server ends; None if none was seen."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                if not await greet(reader, writer):
                    return None
                await writer.start_tls(tls.context(), server_hostname=host)
                shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                return None if shown is None else end_of(shown)
            finally:
                writer.transport.abort()
    except (OSError, EOFError, TimeoutError, ValueError, IndexError) as error:
        _LOG.debug("the certificate of %s:%d is not seen: %s", host, port, error)
        return None


async def _after_info(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> bool:
    """NATS says INFO first; one with `handshake_first` says nothing."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_INFO_S):
            await reader.readline()
    return True


async def _after_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Postgres is asked, and says S if it has a certificate."""
    writer.write(_SSL_REQUEST)
    return await reader.readexactly(1) == b"S"


async def _at_once(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> bool:
    return True
