"""The backlog of the exchange stream: exchanges that the shadow has not processed yet."""

from datetime import UTC, datetime

import msgspec

from quantdrift.core.errors import RetryError
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.consume import REQUEST_S
from quantdrift.core.stream.errors import mapped


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the stream at one moment.

    Parameters
    ----------
    n_messages, n_bytes
        Stored and not yet acknowledged.
    n_ever
        Messages that were ever stored.
    oldest_s
        Age of the oldest message, by the server's clock; 0 if the stream is empty.
    gone_until
        Messages stored before this time, by the server's clock, are no longer in the stream: the time of the oldest
        message, or now if the stream is empty; None if there is no stream.
    """

    n_messages: int
    n_bytes: int
    n_ever: int
    oldest_s: float
    gone_until: datetime | None = None


class _State(msgspec.Struct, frozen=True):
    messages: int = 0
    bytes: int = 0
    last_seq: int = 0
    first_ts: datetime | None = None


class _Info(msgspec.Struct, frozen=True):
    state: _State | None = None
    ts: datetime | None = None


async def read_backlog(queue: Queue) -> Backlog:
    """Return the backlog of the exchange stream; an empty one if there is no stream yet.

    Raises
    ------
    RetryError
        The server is unavailable, or its answer cannot be read.
    """
    client = await queue.live()
    async with mapped():
        answer = await client.request(
            f"$JS.API.STREAM.INFO.{queue.stream_name('exchange')}", b"", timeout=REQUEST_S
        )
    try:
        info = msgspec.json.decode(answer.data, type=_Info)
    except msgspec.MsgspecError as error:
        raise RetryError(f"the answer of NATS about the stream cannot be read: {error}") from error
    if info.state is None or not info.state.messages:
        n_ever = info.state.last_seq if info.state else 0
        gone_until = info.ts if info.state else None
        return Backlog(n_messages=0, n_bytes=0, n_ever=n_ever, oldest_s=0.0, gone_until=gone_until)
    now = info.ts or datetime.now(UTC)
    oldest = info.state.first_ts or now
    return Backlog(
        n_messages=info.state.messages,
        n_bytes=info.state.bytes,
        n_ever=info.state.last_seq,
        oldest_s=max(0.0, (now - oldest).total_seconds()),
        gone_until=info.state.first_ts,
    )
