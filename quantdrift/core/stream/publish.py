"""Publishing with acknowledgement, with one subscription for all answers.

The library's own method costs three times as much per message: an inbox and a timeout task each.
"""

import asyncio
from collections.abc import Mapping
from typing import Self

import msgspec
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import Header

_NO_RESPONDERS = "503"
_ERROR = b'"error"'


class _Answer(msgspec.Struct, frozen=True):
    error: dict[str, int | str] | None = None


class Acknowledged:
    """A publisher on one connection. Use `open`; `publish` may run concurrently."""

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
            error = msgspec.json.decode(message.data, type=_Answer).error
            if error is not None:
                raise nats.js.errors.APIError.from_error(error)

    async def _answered(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)


def _expire(answer: asyncio.Future[Msg]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError("no acknowledgement"))
