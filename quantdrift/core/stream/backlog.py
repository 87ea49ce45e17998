"""How much waits in the stream of exchanges: what the shadow has not caught up with."""

from datetime import UTC, datetime

import msgspec

from quantdrift.core.errors import RetryError
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.consume import REQUEST_S
from quantdrift.core.stream.errors import mapped


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """The stream at one moment.

    Parameters
    ----------
    n_messages, n_bytes
        Stored and not yet acknowledged.
    n_ever
        Messages that were ever stored.
    oldest_s
        Age of the oldest, by the server's clock; 0 when nothing waits.
    gone_until
        What was stored before this time, by the server's clock, is in the stream no more: when the oldest was stored, or
        now where nothing waits; None where there is no stream.
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
    """Return what waits in the exchange stream; nothing where there is no stream yet.

    Raises
    ------
    RetryError
        The server is away, or does not answer as it should.
    """
    client = await queue.live()
    async with mapped():
        answer = await client.request(
            f"$JS.API.STREAM.INFO.{queue.stream_name('exchange')}", b"", timeout=REQUEST_S
        )
    try:
        info = msgspec.json.decode(answer.data, type=_Info)
    except msgspec.MsgspecError as error:
        raise RetryError(f"NATS tells of the stream what is not understood: {error}") from error
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
