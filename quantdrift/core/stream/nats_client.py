"""A NATS client that, where TLS is required, sends nothing outside TLS.

The library (nats-py 2.16) decides by the server's first line, INFO, which an attacker on the path can change. If INFO
does not ask for TLS, the library sends its password in plaintext, even for a tls:// address.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Self
from urllib.parse import ParseResult

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import DEFAULT_BUFFER_SIZE, Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.js.api import Header
from nats.protocol.command import pub_cmd

from quantdrift.core.config.address import is_loopback
from quantdrift.core.config.schema import Stream
from quantdrift.core.stream.config import current_stream
from quantdrift.core.tls import SHUTDOWN_S, Tls

# A server with `handshake_first` sends nothing before the handshake: after this time without a line, start it.
_INFO_S: Final = 1.0
_CANCEL_S: Final = 0.1  # until a task that goes on is cancelled again
_NO_RESPONDERS = "503"
_ERROR = b'"error"'


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Await `work` for at most so many seconds, whether it takes note of being cancelled or not.

    `asyncio.timeout` cancels once. Where an answer arrives in the same turn, `asyncio.wait_for` of Python before 3.12, which the
    library uses, loses that: a client whose credentials are refused then tries again for ever.

    Raises
    ------
    TimeoutError
        It has not ended by then; it has now.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    n_before, n_cancelled = task.cancelling(), 0
    timer: asyncio.TimerHandle | None = None

    def cancel() -> None:
        nonlocal timer, n_cancelled
        n_cancelled += 1
        task.cancel()
        timer = loop.call_later(_CANCEL_S, cancel)

    timer = loop.call_later(seconds, cancel)
    try:
        await work
    except asyncio.CancelledError:
        if n_cancelled and task.cancelling() - n_cancelled <= n_before:
            raise TimeoutError from None
        raise  # somebody else cancelled it
    finally:
        if timer is not None:
            timer.cancel()
        for _ in range(n_cancelled):
            task.uncancel()


class PlaintextError(nats.errors.Error):
    """TLS is required, and the server does not offer it. Nothing was sent to it."""


class NatsClient(Client):
    """The library's client, but where TLS is required it sends nothing before the TLS handshake.

    This includes reconnects, and servers that another server has announced. Certificates are read for each connection.

    The address file is read for each connection too: its servers replace those that were known.

    Parameters
    ----------
    stream
        The addresses that are connected to first, and the file to read them from afterwards. Unless an address or a
        file asks for TLS, servers on this machine, and those whose address says `+plaintext`, are encrypted only if they
        ask for it. Servers that another one announces have no such address: they must be on this machine, or offer TLS.
    """

    def __init__(self, tls: Tls, stream: Stream) -> None:
        super().__init__()
        self._tls = tls
        self._stream = stream
        self._required = stream.requires_tls
        self._plaintext = self._plaintext_servers()
        self._arrivals: dict[int, Callable[[Msg], None]] = {}
        self._answers = ""  # the inbox
        self._asked: dict[str, asyncio.Future[Msg]] = {}
        self._n_asked = 0

    async def subscribe_directly(self, subject: str, arrive: Callable[[Msg], None]) -> Subscription:
        """Subscribe, and call `arrive` for each message as it is read: without the library's queue and task between.

        Nothing bounds what arrives: the caller asks the server for so much.
        """
        subscription = await self.subscribe(subject)
        self._arrivals = {sid: found for sid, found in self._arrivals.items() if sid in self._subs}
        self._arrivals[subscription._id] = arrive  # noqa: SLF001 - it has no other name
        return subscription

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        arrive = self._arrivals.get(sid)
        if arrive is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        elif sid in self._subs:  # it is still subscribed
            arrive(Msg(self, subject.decode(), reply.decode(), data, await self._process_headers(headers)))

    async def _connect_to_server(self, s: Srv) -> None:
        self._read_addresses(s)
        if s.uri.scheme not in {"ws", "wss"}:
            s.last_attempt = time.monotonic()
            if isinstance(self._transport, _Transport):
                self._transport.abandon()  # the library leaves it open where the server has refused it
            self._transport = _Transport(
                self._tls, s.tls_name or s.uri.hostname or "", required=self._must_encrypt(s.uri)
            )
            await self._transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])
            return
        if s.uri.scheme == "ws" and self._must_encrypt(s.uri):
            raise PlaintextError("TLS is asked for, and ws:// is plaintext: write wss://")
        if s.uri.scheme == "wss":
            self.options["tls"] = self._tls.context()
        await super()._connect_to_server(s)

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """Return the headers of a message, as the library does; for those of ASCII in a quarter of the time."""
        if not raw.isascii():
            others: dict[str, str] = Client._parse_header_lines(raw)  # noqa: SLF001 - what it would do without this method
            return others
        headers = {}
        for line in raw.decode().split("\r\n"):
            name, separator, value = line.partition(":")
            token = name.split()
            if separator and len(token) == 1:  # a name with a space in it is none
                headers[token[0]] = value.strip()
        return headers

    async def publish_to_each(self, subjects: Sequence[str], payload: bytes, timeout_s: float) -> None:
        """Publish the same to subjects that a server has named, in order, and wait for the answer to the last one.

        It is one command without a check for each, and costs less than the library's own `request` even for a single one.

        Raises
        ------
        nats.errors.Error, TimeoutError
            The client is closed, or there was no answer.
        """
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        if not self._answers:
            self._answers = self.new_inbox()
            await self.subscribe_directly(f"{self._answers}.*", self._answered)
        loop = asyncio.get_running_loop()
        self._n_asked += 1
        reply = f"{self._answers}.{self._n_asked:x}"
        answer: asyncio.Future[Msg] = loop.create_future()
        self._asked[reply] = answer
        timer = loop.call_later(timeout_s, _expire, answer)
        *others, last = subjects
        commands = [pub_cmd(subject, "", payload) for subject in others]
        try:
            await self._send_command(b"".join([*commands, pub_cmd(last, reply, payload)]))
            await self._flush_pending()
            message = await answer
        finally:
            timer.cancel()
            del self._asked[reply]
        if message.headers and message.headers.get(Header.STATUS.value) == _NO_RESPONDERS:
            raise nats.errors.NoRespondersError

    def _answered(self, message: Msg) -> None:
        answer = self._asked.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _read_addresses(self, chosen: Srv) -> None:
        """Take over the addresses in the file, if they have changed; `chosen` becomes the first of them."""
        stream = current_stream(self._stream)
        if stream.url == self._stream.url:
            return
        self._stream, self._required = stream, self._required or stream.requires_tls
        self._server_pool.clear()
        self._plaintext = self._plaintext_servers()
        self._setup_server_pool([server.url for server in stream.servers])
        chosen.uri, chosen.tls_name = self._server_pool[0].uri, None

    def _plaintext_servers(self) -> frozenset[tuple[str | None, int | None]]:
        """Return host and port of the servers whose address says `+plaintext`, as the library has them."""
        named = [server.url for server in self._stream.servers if server.is_plaintext_by_name]
        parsed = (self._parse_server_uri(url) for url in named)
        return frozenset((uri.hostname, uri.port) for uri in parsed)

    def _must_encrypt(self, uri: ParseResult) -> bool:
        is_allowed = is_loopback(uri.hostname or "") or (uri.hostname, uri.port) in self._plaintext
        return self._required or not is_allowed


class _Transport(TcpTransport):
    """One connection, which is encrypted before the client writes to it."""

    def __init__(self, tls: Tls, hostname: str, *, required: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of nats-py
        self._tls = tls
        self._hostname = hostname
        self._required = required
        self._info = b""

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: float) -> None:
        """Connect, read INFO, and do the handshake; nothing else is sent.

        Raises
        ------
        PlaintextError
            TLS is required, and the server does not offer it.
        ssl.SSLError
            Its certificate is not accepted, or the handshake failed.
        OperatorError
            A file cannot be used.
        """
        async with asyncio.timeout(connect_timeout):
            reader, writer = await asyncio.open_connection(uri.hostname, uri.port, limit=buffer_size)
            # Keep the bare writer below TLS: a writer without a reference closes its socket.
            self._bare_io_writer = self._io_writer = writer
            self._io_reader = reader
            try:
                self._info = await self._greet(reader, writer, connect_timeout)
            except BaseException:
                # The client must not wait for the old writer to close: after a handshake has begun it gets no notice of that.
                self._io_reader = self._io_writer = None
                writer.transport.abort()
                raise

    def abandon(self) -> None:
        """Close the connection, if there is one, and wait for nothing."""
        if self._io_writer is not None:
            self._io_writer.close()

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float
    ) -> bytes:
        """Return INFO once the connection is encrypted, or need not be."""
        line = await _first_line(reader, _INFO_S if self._required else timeout_s)
        if line is None:
            return await (await self._encrypt(writer, timeout_s)).readline()
        info = _read(line)
        if self._required and not (info.get("tls_required") or info.get("tls_available")):
            raise PlaintextError(
                "TLS is asked for, and the server offers none; nothing was sent to it. Set `tls` in the server's"
                " configuration; for plaintext write nats+plaintext:// and set no certificate files"
            )
        if not (self._required or info.get("tls_required")):
            return line
        await self._encrypt(writer, timeout_s)
        # An attacker who can change this line could name his own server, whose certificate is valid for its own name. Only
        # an INFO line inside TLS may name servers.
        info.pop("connect_urls", None)
        return b"INFO " + msgspec.json.encode(info | {"tls_required": True}) + b"\r\n"

    async def _encrypt(self, writer: asyncio.StreamWriter, timeout_s: float) -> asyncio.StreamReader:
        loop = asyncio.get_running_loop()
        # Data in the old reader came in plaintext and is dropped with it.
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport = await loop.start_tls(
            writer.transport,
            protocol,
            self._tls.context(),
            server_hostname=self._hostname,
            ssl_handshake_timeout=timeout_s,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )
        if transport is None:
            raise nats.errors.Error("the server closed the connection during the TLS handshake")
        protocol.connection_made(transport)
        self._io_reader, self._io_writer = reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        return reader

    async def connect_tls(self, *_: object) -> None:
        """Do nothing: the connection is encrypted already. The client calls this once it has read INFO."""

    async def readline(self) -> bytes:
        """Return INFO first, then the lines of the server."""
        if self._info:
            info, self._info = self._info, b""
            return info
        line: bytes = await super().readline()  # type: ignore[no-untyped-call]  # of nats-py
        return line


async def _first_line(reader: asyncio.StreamReader, timeout_s: float) -> bytes | None:
    """Return INFO, or None if the server waits for the handshake."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await reader.readline()
    return None


def _read(line: bytes) -> dict[str, Any]:
    if not line:
        raise nats.errors.Error("the server closed the connection")
    try:
        return msgspec.json.decode(line.removeprefix(b"INFO "), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise nats.errors.Error("this is not a NATS server: its first line is not INFO") from error


class _PublishAnswer(msgspec.Struct, frozen=True):
    error: dict[str, int | str] | None = None


class Acknowledged:
    """A publisher on one connection, with one subscription for all answers. Use `open`; `publish` may run concurrently.

    The library's own method costs three times as much per message: an inbox and a timeout task each.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._inbox = client.new_inbox()
        self._n_sent = 0
        self._waiting: dict[str, asyncio.Future[Msg]] = {}

    @classmethod
    async def open(cls, client: Client) -> Self:
        """Subscribe to the answers; the library repeats that after a reconnect."""
        opened = cls(client)
        await client.subscribe(f"{opened._inbox}.*", cb=opened._answered)
        return opened

    async def publish(self, subject: str, headers: Mapping[str, str], wire: bytes, timeout_s: float) -> None:
        """Publish a message and return once the stream has stored it.

        Raises
        ------
        nats.js.errors.NoStreamResponseError
            No stream has the subject.
        nats.js.errors.APIError
            It was refused.
        nats.errors.Error, TimeoutError
            It may or may not be stored.
        """
        loop = asyncio.get_running_loop()
        self._n_sent += 1
        reply = f"{self._inbox}.{self._n_sent:x}"
        answer: asyncio.Future[Msg] = loop.create_future()
        self._waiting[reply] = answer
        timer = loop.call_later(timeout_s, _expire, answer)
        try:
            await self.client.publish(subject, wire, reply=reply, headers=dict(headers))
            message = await answer
        finally:
            timer.cancel()
            del self._waiting[reply]
        if message.headers and message.headers.get(Header.STATUS.value) == _NO_RESPONDERS:
            raise nats.js.errors.NoStreamResponseError
        if _ERROR in message.data:
            error = msgspec.json.decode(message.data, type=_PublishAnswer).error
            if error is not None:
                raise nats.js.errors.APIError.from_error(error)

    async def _answered(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)


def _expire(answer: asyncio.Future[Msg]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError("no acknowledgement"))
