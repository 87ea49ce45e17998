"""Messages taken from a stream: pulled with a bound on their bytes, and acknowledged one by one."""

import asyncio
import itertools
from collections import deque
from datetime import datetime
from enum import Enum, auto
from typing import Self

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import Header

from quantdrift.core.errors import RetryError
from quantdrift.core.stream.errors import mapped
from quantdrift.core.stream.numbering import Numbered

REQUEST_S = 5.0
_SLACK_S = 2.0  # a server that is there says within this that a pull request has expired


class Delivery:
    """One message taken from a stream, to be acknowledged within the consumer's `ack_wait_s`.

    Parameters
    ----------
    client, message
        As the client library delivered it.

    Attributes
    ----------
    data
        The message's bytes.
    subject
        The subject it was published to.
    sequence
        Its number in the stream.
    n_delivered
        How often it was delivered by now, this time included.
    numbered
        Its number among those of its sidecar; None where it has none.
    streamed_at
        When the stream stored it, by the server's clock.
    """

    __slots__ = (
        "_client",
        "_message",
        "data",
        "n_delivered",
        "numbered",
        "sequence",
        "streamed_at",
        "subject",
    )

    def __init__(self, client: Client, message: Msg) -> None:
        self._client = client
        self._message = message
        metadata = message.metadata
        self.data: bytes = message.data
        self.subject: str = message.subject
        self.sequence: int = metadata.sequence.stream
        self.n_delivered: int = metadata.num_delivered
        self.numbered = Numbered.read(message.headers)
        self.streamed_at: datetime = metadata.timestamp

    async def ack(self) -> None:
        """Mark it as done and wait until the server has confirmed that.

        Raises
        ------
        RetryError
            Not confirmed: it may be delivered again.
        """
        self._require_server()
        async with mapped():
            await self._message.ack_sync(timeout=REQUEST_S)

    async def done(self) -> None:
        """Mark it as done, without waiting: what is sent after it arrives after it.

        Raises
        ------
        RetryError
            The server is away: it comes again.
        """
        self._require_server()
        async with mapped():
            await self._message.ack()

    async def nak(self, delay_s: float) -> None:
        """Give it back, to be delivered again after `delay_s` seconds; nothing else waits for it.

        Raises
        ------
        RetryError
            The server is away: it comes again after `ack_wait_s`.
        """
        self._require_server()
        async with mapped():
            await self._message.nak(delay=delay_s)

    async def in_progress(self) -> None:
        """Start its `ack_wait_s` anew.

        Raises
        ------
        RetryError
            The server is away.
        """
        self._require_server()
        async with mapped():
            await self._message.in_progress()

    def _require_server(self) -> None:
        """Fail at once while the server is away: the library would keep the answer back and send it some time."""
        if not self._client.is_connected:
            raise RetryError("NATS is away")


class PullInbox:
    """Where the messages that one client pulls from a consumer arrive. Use `open`.

    The client library's own `fetch` knows no limit in bytes, and a server that sends far more than a client reads
    disconnects it: pull requests are made here.

    Parameters
    ----------
    client, prefix
        Everything that comes under the prefix is taken.
    stream, durable
        Names of the stream and its consumer.
    """

    def __init__(self, client: Client, prefix: str, stream: str, durable: str) -> None:
        self.client = client
        self._arrived: deque[Msg] = deque()
        self._something = asyncio.Event()
        self._prefix = prefix
        self._stream = stream
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._numbers = itertools.count()

    @classmethod
    async def open(cls, client: Client, stream: str, durable: str) -> Self:
        """Listen.

        Raises
        ------
        RetryError
            The server is away.
        """
        inbox = cls(client, client.new_inbox(), stream, durable)
        async with mapped():
            await client.subscribe(f"{inbox._prefix}.*", cb=inbox._arrive)
        return inbox

    async def pull(self, n: int, max_bytes: int, timeout_s: float) -> list[Delivery]:
        """Return messages until there are `n` or `max_bytes`, or `timeout_s` has passed; 0: what is there at once.

        Messages come to the inbox whatever request they answer: what came too late for an earlier call is taken
        by the next. A status is heeded only where it answers the request of this call.

        Raises
        ------
        RetryError
            The server is away, or the consumer is.
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
                message = await self._next(until + _SLACK_S)
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
                raise RetryError(f"the stream {self._stream} gave the request up: {message.headers}")
        return taken

    async def _arrive(self, message: Msg) -> None:
        # The library's own `next_msg` takes a task and a timer for each message.
        self._arrived.append(message)
        self._something.set()

    async def _next(self, until: float) -> Msg:
        """Return the next message, or fail with `TimeoutError` where none has come by `until`."""
        if not self._arrived:
            self._something.clear()
            async with asyncio.timeout_at(until):
                await self._something.wait()
        return self._arrived.popleft()

    def _leftovers(self, n: int) -> list[Msg]:
        """Return up to `n` messages that are here already."""
        found: list[Msg] = []
        while self._arrived and len(found) < n:
            message = self._arrived.popleft()
            if _read(message, "") is _Answer.MESSAGE:
                found.append(message)
        return found

    async def _ask(self, n: int, max_bytes: int, timeout_s: float) -> str:
        """Request up to `n` messages and return the subject that a status of this request comes to."""
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
