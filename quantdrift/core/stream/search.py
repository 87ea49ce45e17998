"""The search of the exchanges that wait in the stream, and the deletion of some of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Final, Literal

import msgspec
import nats.errors
import nats.js.errors

from quantdrift.core.errors import RetryError
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.consume import REQUEST_S
from quantdrift.core.stream.errors import mapped

_POLL_S: Final = 0.2
_PROGRESS_EVERY: Final = 1000


class InStream(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in the stream: messages, and when the oldest and the newest of them were stored."""

    n: int = 0
    first_at: datetime | None = None
    last_at: datetime | None = None


async def search_stream(
    queue: Queue,
    is_one: Callable[[bytes], bool],
    *,
    delete: bool,
    progress: Callable[[str], None],
    kind: Literal["exchange", "exemplar"] = "exchange",
) -> InStream:
    """Read every exchange of the stream without taking it from the workers; delete those that `is_one` finds.

    With `kind`, search the exemplars instead.

    The server overwrites the bytes of a deleted message. Needs the administrator's rights.

    Raises
    ------
    RetryError
        The server is unavailable, or does not answer: it does not answer to users without these rights either.
    """
    jetstream = (await queue.live()).jetstream(timeout=REQUEST_S)
    name, subject = queue.stream_name(kind), f"{queue.stream_name('exchange')}.{kind}.>"
    n, times, sequence = 0, [], 1
    async with answered(), mapped():
        try:
            last = (await jetstream.stream_info(name)).state.last_seq
        except nats.js.errors.NotFoundError:
            return InStream()
        n_read = 0
        while sequence <= last:
            try:
                message = await jetstream.get_msg(name, seq=sequence, subject=subject, next=True)
            except nats.js.errors.NotFoundError:
                break
            assert message.seq is not None
            sequence = message.seq + 1
            n_read += 1
            if n_read % _PROGRESS_EVERY == 0:
                progress(f"searching the stream, {n_read} {kind}s")
            if not is_one(message.data or b""):
                continue
            n += 1
            if message.time is not None:
                times.append(message.time)
            if delete:
                try:
                    await jetstream.delete_msg(name, message.seq)
                except nats.js.errors.APIError:  # a worker has acknowledged it meanwhile, or it expired
                    continue
    return InStream(n=n, first_at=min(times, default=None), last_at=max(times, default=None))


@contextlib.asynccontextmanager
async def answered() -> AsyncIterator[None]:
    """Say what an absent answer may mean: the server does not answer to what a user may not ask."""
    try:
        yield
    except RetryError as error:
        if not isinstance(error.__cause__, nats.errors.TimeoutError):
            raise
        raise RetryError(
            "NATS did not answer: if it is up, stream.credentials_file is not that of the administrator, who alone may read"
            " and delete single messages of the stream (`quantdrift setup nats` made its key, admin.nk)"
        ) from error


async def has_exemplars(queue: Queue) -> bool:
    """Return whether there is a stream of exemplars.

    Raises
    ------
    RetryError
        As `search_stream`.
    """
    jetstream = (await queue.live()).jetstream(timeout=REQUEST_S)
    async with answered(), mapped():
        try:
            await jetstream.stream_info(queue.stream_name("exemplar"))
        except nats.js.errors.NotFoundError:
            return False
    return True


async def wait_for_workers(queue: Queue, limit_s: float) -> bool:
    """Wait until the workers have acknowledged what they have now; return False after `limit_s`.

    A worker that has an exchange in hand stores it, even if it was deleted from the stream meanwhile.

    Raises
    ------
    RetryError
        As `search_stream`.
    """
    jetstream = (await queue.live()).jetstream(timeout=REQUEST_S)
    name = queue.stream_name("exchange")
    delivered: dict[str, int] | None = None
    try:
        async with asyncio.timeout(limit_s), mapped():
            while True:
                try:
                    consumers = await jetstream.consumers_info(name)
                except nats.js.errors.NotFoundError:
                    return True
                if delivered is None:
                    delivered = {
                        consumer.name: consumer.delivered.stream_seq if consumer.delivered else 0
                        for consumer in consumers
                    }
                if all(
                    not consumer.num_ack_pending
                    or (
                        consumer.ack_floor is not None
                        and consumer.ack_floor.stream_seq >= delivered.get(consumer.name, 0)
                    )
                    for consumer in consumers
                ):
                    return True
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        return False
