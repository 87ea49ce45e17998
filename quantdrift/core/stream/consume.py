"""Pulling messages from a stream with a limit in bytes, and acknowledging them."""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Self

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import NotJSMessageError
from nats.js.api import Header

from quantdrift.core.errors import RetryError
from quantdrift.core.stream.errors import mapped
from quantdrift.core.stream.nats_client import NatsClient
from quantdrift.core.stream.numbering import Numbered

REQUEST_S = 5.0
_ACKNOWLEDGES = ["$JS", "ACK"]
_REPLY_TOKENS = 9  # of a server without domains
_SLACK_S = 2.0  # within this time a reachable server reports that a pull request has expired


class Delivery:
    """One message of a stream, to be acknowledged within the consumer's `ack_wait_s`.

    Attributes
    ----------
    client
        The client that has it.
    sequence
        Its number in the stream.
    n_delivered
        Number of deliveries so far, including this one.
    numbered
        Its number at its sidecar, if any.
    streamed_at
        When the stream stored it, by the server's clock.
    """

    __slots__ = (
        "_message",
        "client",
        "data",
        "n_delivered",
        "numbered",
        "sequence",
        "streamed_at",
        "subject",
    )

    def __init__(self, client: NatsClient, message: Msg) -> None:
        self.client = client
        self._message = message
        # "$JS.ACK", then domain and hash of the account where the server is new enough, then stream and consumer.
        tokens = message.reply.split(".")
        if len(tokens) < _REPLY_TOKENS or tokens[:2] != _ACKNOWLEDGES:
            raise NotJSMessageError
        at = 4 if len(tokens) == _REPLY_TOKENS else 6
        self.data: bytes = message.data
        self.subject: str = message.subject
        self.sequence = int(tokens[at + 1])
        self.n_delivered = int(tokens[at])
        self.numbered = Numbered.read(message.headers)
        self.streamed_at = datetime.fromtimestamp(int(tokens[at + 3]) / 1e9, UTC)

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the message."""
        return self._message.headers or {}

    async def ack(self) -> None:
        """Acknowledge it and wait for the confirmation of the server.

        Raises
        ------
        RetryError
            Not confirmed; it may be delivered again.
        """
        self.require_server()
        async with mapped():
            await self._message.ack_sync(timeout=REQUEST_S)

    async def nak(self, delay_s: float) -> None:
        """Request a redelivery after `delay_s` seconds; other messages do not wait for it.

        Raises
        ------
        RetryError
            The server is unavailable; it will be delivered again after `ack_wait_s`.
        """
        self.require_server()
        async with mapped():
            await self._message.nak(delay=delay_s)

    async def in_progress(self) -> None:
        """Restart its `ack_wait_s`.

        Raises
        ------
        RetryError
            The server is unavailable.
        """
        self.require_server()
        async with mapped():
            await self._message.in_progress()

    @property
    def reply(self) -> str:
        """The subject of its acknowledgement."""
        return self._message.reply

    def require_server(self) -> None:
        """Raise at once while disconnected; the library would buffer the answer and send it later."""
        if not self.client.is_connected:
            raise RetryError("NATS is not available")


async def acknowledge_all(deliveries: Sequence[Delivery]) -> None:
    """Acknowledge deliveries of one client; one whose acknowledgement is lost is delivered again.

    Only the last one is confirmed: the server reads a client's messages in order, so the confirmation covers the others.

    Raises
    ------
    RetryError
        Not confirmed; they may be delivered again.
    """
    if not deliveries:
        return
    last = deliveries[-1]
    last.require_server()
    async with mapped():
        await last.client.publish_to_each([delivery.reply for delivery in deliveries], Msg.Ack.Ack, REQUEST_S)


class PullInbox:
    """The inbox for messages that one client pulls from a consumer. Use `open`.

    The library's own `fetch` has no limit in bytes, and a server disconnects a client that reads far less than it is
    sent. So the pull requests are made here.

    Parameters
    ----------
    prefix
        Prefix of the reply subjects.
    stream, durable
        Names of the stream and its consumer.
    """

    def __init__(self, client: NatsClient, prefix: str, stream: str, durable: str) -> None:
        self.client = client
        self._arrived: deque[Msg] = deque()
        self._enough = asyncio.Event()
        self._wanted = self._wanted_bytes = 0
        self._prefix = prefix
        self._stream = stream
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._numbers = itertools.count()
        self._subscription: Subscription | None = None

    @classmethod
    async def open(cls, client: NatsClient, stream: str, durable: str) -> Self:
        """Subscribe to the reply subjects.

        Raises
        ------
        RetryError
            The server is unavailable.
        """
        inbox = cls(client, client.new_inbox(), stream, durable)
        async with mapped():
            inbox._subscription = await client.subscribe_directly(f"{inbox._prefix}.*", inbox._arrive)
        return inbox

    async def close(self) -> None:
        """Take no more messages."""
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._subscription.unsubscribe()

    async def pull(self, n: int, max_bytes: int, timeout_s: float) -> list[Delivery]:
        """Return up to `n` messages or `max_bytes`, or those that arrive within `timeout_s`; 0: those that wait already.

        A message that arrives too late for one call is returned by the next. A status counts only if it answers the
        request of this call.

        Raises
        ------
        RetryError
            The server or the consumer is unavailable.
        """
        async with mapped():
            messages = await self._pull(n, max_bytes, timeout_s)
        return [Delivery(self.client, message) for message in messages]

    async def _pull(self, n: int, max_bytes: int, timeout_s: float) -> list[Msg]:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        taken = self._leftovers(n)
        n_bytes = sum(len(message.data) for message in taken)
        if len(taken) >= n or n_bytes >= max_bytes:
            return taken
        asked = await self._ask(n - len(taken), max_bytes - n_bytes, timeout_s)
        while len(taken) < n and n_bytes < max_bytes:
            try:
                message = await self._next(n - len(taken), max_bytes - n_bytes, until + _SLACK_S)
            except TimeoutError as error:
                if taken:
                    break
                raise RetryError(f"the stream {self._stream} does not answer") from error
            answer = _read(message, asked)
            if answer is _Answer.MESSAGE:
                taken.append(message)
                n_bytes += len(message.data)
            elif answer is _Answer.NO_MORE or (taken and answer is not _Answer.OTHERS):
                break
            elif answer is _Answer.FIRST_TOO_LARGE:
                n = 1
                asked = await self._ask(n, 0, max(until - loop.time(), 0.1))
            elif answer is _Answer.BROKEN:
                raise RetryError(f"the stream {self._stream} ended the request: {message.headers}")
        return taken

    def _arrive(self, message: Msg) -> None:
        # The library's own `next_msg` costs a task and a timer per message, its callbacks a queue.
        self._arrived.append(message)
        self._wanted -= 1
        self._wanted_bytes -= len(message.data)
        if (
            self._wanted <= 0
            or self._wanted_bytes <= 0
            or (message.headers and Header.STATUS in message.headers)
        ):
            self._enough.set()

    async def _next(self, n: int, n_bytes: int, until: float) -> Msg:
        """Return the next message. If there is none, wait until `n` messages, `n_bytes` or a status have arrived: a wake-up for each costs more.

        Raises
        ------
        TimeoutError
            None has arrived by `until`.
        """
        if not self._arrived:
            self._enough.clear()
            self._wanted, self._wanted_bytes = n, n_bytes
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._enough.wait()
            if not self._arrived:
                raise TimeoutError
        return self._arrived.popleft()

    def _leftovers(self, n: int) -> list[Msg]:
        """Return up to `n` messages that have arrived already."""
        messages: list[Msg] = []
        while self._arrived and len(messages) < n:
            message = self._arrived.popleft()
            if _read(message, "") is _Answer.MESSAGE:
                messages.append(message)
        return messages

    async def _ask(self, n: int, max_bytes: int, timeout_s: float) -> str:
        """Request up to `n` messages and return the reply subject of this request."""
        reply = f"{self._prefix}.{next(self._numbers)}"
        request: dict[str, int | bool] = {"batch": n}
        request |= {"expires": int(timeout_s * 1e9)} if timeout_s else {"no_wait": True}
        if max_bytes:
            request["max_bytes"] = max_bytes
        await self.client.publish(self._subject, msgspec.json.encode(request), reply=reply)
        return reply


class _Answer(Enum):
    MESSAGE = auto()
    OTHERS = auto()  # a status of an earlier request
    NO_MORE = auto()  # the request has expired
    FIRST_TOO_LARGE = auto()
    BROKEN = auto()  # the consumer is deleted, moved or not recovered yet


def _read(message: Msg, asked: str) -> _Answer:
    headers = message.headers or {}
    status = headers.get(Header.STATUS)
    if status is None:
        return _Answer.MESSAGE
    if message.subject != asked:
        return _Answer.OTHERS
    if status in ("404", "408"):
        return _Answer.NO_MORE
    if status == "409" and "MaxBytes" in headers.get(Header.DESCRIPTION, ""):
        return _Answer.FIRST_TOO_LARGE
    return _Answer.BROKEN
