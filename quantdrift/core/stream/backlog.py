"""The backlog of the exchange stream: exchanges that the shadow has not processed yet, in all and of each model, and its end."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from quantdrift.core.errors import RetryError
from quantdrift.core.stream.connection import Queue, durable_name
from quantdrift.core.stream.consume import REQUEST_S
from quantdrift.core.stream.errors import mapped
from quantdrift.core.stream.subjects import model_of, subject_token
from quantdrift.core.text import misfit

_Answer = TypeVar("_Answer")


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the stream at one moment.

    Parameters
    ----------
    n_messages
        Stored and not yet acknowledged. Not what NATS has forgotten to delete after a full disk: nobody gets it again.
    n_bytes
        Stored, all of it: the limit of the stream counts them.
    n_ever
        Messages that were ever stored.
    oldest_s
        Age of the oldest message, by the server's clock; 0 if none waits. Where NATS has forgotten to delete some it is an upper
        bound.
    n_done
        Every message up to this one, counted from the stream's first message ever, is done.
    gone_until
        Messages stored before this time, by the server's clock, are no longer in the stream: the time of the oldest
        message, or now if the stream is empty; None if there is no stream.
    by_model
        `n_messages` by model.
    """

    n_messages: int
    n_bytes: int
    n_ever: int
    oldest_s: float
    n_done: int = 0
    gone_until: datetime | None = None
    by_model: dict[str, int] = {}


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """The exchanges of one model that wait in the stream.

    Parameters
    ----------
    n_messages
        Stored and not yet acknowledged. Not what NATS has forgotten to delete after a full disk: nobody gets it again.
    n_delivered
        Of these, delivered to a shadow worker that has not finished them.
    is_read
        Whether a shadow worker asks for exchanges of this model at this moment.
    read_at
        When a shadow worker last received one, by the server's clock; None: never, as far as the server remembers.
    """

    n_messages: int = 0
    n_delivered: int = 0
    is_read: bool = False
    read_at: datetime | None = None


class _StreamState(msgspec.Struct, frozen=True):
    messages: int = 0
    bytes: int = 0
    first_seq: int = 1
    last_seq: int = 0
    first_ts: datetime | None = None
    subjects: dict[str, int] | None = None


class _Delivered(msgspec.Struct, frozen=True):
    last_active: datetime | None = None


class _Floor(msgspec.Struct, frozen=True):
    stream_seq: int = 0


class _Consumer(msgspec.Struct, frozen=True):
    num_pending: int | None = None  # none: there is no consumer
    num_ack_pending: int = 0
    num_waiting: int = 0
    delivered: _Delivered = _Delivered()
    ack_floor: _Floor = _Floor()

    def n_of(self, stored: int) -> int:
        """Return how many of the stored messages that it reads are not acknowledged."""
        return stored if self.num_pending is None else min(stored, self.num_pending + self.num_ack_pending)


class _Purged(msgspec.Struct, frozen=True):
    success: bool = False
    purged: int = 0


class _Info(msgspec.Struct, frozen=True):
    state: _StreamState | None = None
    ts: datetime | None = None


async def read_backlog(queue: Queue) -> Backlog:
    """Return the backlog of the exchange stream; an empty one if there is no stream yet.

    Raises
    ------
    RetryError
        The server is unavailable, or its answer cannot be read.
    """
    info = await _info(queue)
    state = info.state
    if state is None:
        return Backlog(n_messages=0, n_bytes=0, n_ever=0, oldest_s=0.0)
    by_model, n_done = {}, state.last_seq
    for model, stored in _counts(queue, state).items():
        consumer = await _consumer(queue, model)
        by_model[model] = consumer.n_of(stored)
        if by_model[model]:
            n_done = min(n_done, max(consumer.ack_floor.stream_seq, state.first_seq - 1))
    n_messages = sum(by_model.values())
    now = info.ts or datetime.now(UTC)
    oldest = (state.first_ts or now) if n_messages else now
    return Backlog(
        n_messages=n_messages,
        n_bytes=state.bytes,
        n_ever=state.last_seq,
        oldest_s=max(0.0, (now - oldest).total_seconds()),
        n_done=n_done,
        gone_until=state.first_ts if state.messages else info.ts,
        by_model=by_model,
    )


async def read_waiting(queue: Queue, models: Iterable[str]) -> dict[str, Waiting]:
    """Return what waits of each model, for `models` and for every other one that the stream has exchanges of.

    It creates nothing: neither the stream nor a consumer.

    Raises
    ------
    RetryError
        The server is unavailable, or its answer cannot be read.
    """
    info = await _info(queue)
    n_stored = _counts(queue, info.state) if info.state else {}
    waiting = {}
    for model in sorted({*models, *n_stored}):
        consumer = await _consumer(queue, model)
        waiting[model] = Waiting(
            n_messages=consumer.n_of(n_stored.get(model, 0)),
            n_delivered=consumer.num_ack_pending,
            is_read=consumer.num_waiting > 0,
            read_at=consumer.delivered.last_active,
        )
    return waiting


async def drop_waiting(queue: Queue, model: str) -> int:
    """Remove every exchange of a model from the stream, and return how many there were. Needs the administrator's rights.

    What a worker has in hand is removed too, and compared all the same.

    Raises
    ------
    RetryError
        The server is unavailable, or does not answer: it does not answer to users without these rights either.
    """
    stream = queue.stream_name("exchange")
    wanted = msgspec.json.encode({"filter": f"{stream}.exchange.{subject_token(model)}"})
    purged = await _asked(queue, f"STREAM.PURGE.{stream}", wanted, _Purged)
    if not purged.success:
        raise RetryError(f"NATS did not drop what waits of model {model} in the stream {stream}")
    return purged.purged


async def are_tallies_read(queue: Queue) -> bool | None:
    """Return whether a shadow worker asks for tallies at this moment; None if there are none yet.

    Raises
    ------
    RetryError
        The server is unavailable, or its answer cannot be read.
    """
    stream = queue.stream_name("tally")
    info = await _asked(queue, f"STREAM.INFO.{stream}", b"", _Info)
    if info.state is None:
        return None
    consumer = await _asked(queue, f"CONSUMER.INFO.{stream}.{durable_name('')}", b"", _Consumer)
    return consumer.num_waiting > 0


async def _info(queue: Queue) -> _Info:
    """Return the state of the exchange stream with the number of messages of each model."""
    stream = queue.stream_name("exchange")
    wanted = msgspec.json.encode({"subjects_filter": f"{stream}.exchange.*"})
    return await _asked(queue, f"STREAM.INFO.{stream}", wanted, _Info)


async def _consumer(queue: Queue, model: str) -> _Consumer:
    """Return the consumer through which the shadow workers read the exchanges of a model."""
    stream = queue.stream_name("exchange")
    durable = durable_name(f"{stream}.exchange.{subject_token(model)}")
    return await _asked(queue, f"CONSUMER.INFO.{stream}.{durable}", b"", _Consumer)


def _counts(queue: Queue, state: _StreamState) -> dict[str, int]:
    """Return the number of stored messages of each model."""
    prefix = f"{queue.stream_name('exchange')}.exchange."
    return {model_of(subject.removeprefix(prefix)): n for subject, n in (state.subjects or {}).items()}


async def _asked(queue: Queue, about: str, request: bytes, kind: type[_Answer]) -> _Answer:
    """Return the answer of JetStream's API; one without content where the stream or the consumer does not exist."""
    client = await queue.live()
    async with mapped():
        answer = await client.request(f"$JS.API.{about}", request, timeout=REQUEST_S)
    try:
        return msgspec.json.decode(answer.data, type=kind)
    except msgspec.MsgspecError as error:
        raise RetryError(f"the answer of NATS about the stream cannot be read: {misfit(error)}") from error
