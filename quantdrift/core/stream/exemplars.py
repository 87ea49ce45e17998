"""The exemplars that the stream keeps: listing, reading and deleting them, and decrypting what workers encrypted."""

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Final
from urllib.parse import unquote

import msgspec
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig

from quantdrift.core.clock import SystemClock
from quantdrift.core.codec import decode_exemplar
from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import QuarantineError, QuarantineReason, RetryError
from quantdrift.core.keys import KeyFile
from quantdrift.core.records import Exemplar, ExemplarKind
from quantdrift.core.sealing import is_sealed, unseal
from quantdrift.core.stream.config import exemplars as subject_of_exemplars
from quantdrift.core.stream.connection import SLICE_HEADER, Queue
from quantdrift.core.stream.consume import REQUEST_S, Delivery, PullInbox
from quantdrift.core.stream.errors import mapped
from quantdrift.core.stream.subjects import model_of

_FETCH: Final = 256
_FETCH_BYTES: Final = 16 << 20
_FETCH_S: Final = 5.0
_PROGRESS_EVERY: Final = 500
_KEPT_S: Final = 60.0
_SIZE: Final = "Nats-Msg-Size"
_NO_MESSAGE: Final = 10037
_NOT_DELETED: Final = 10057  # JetStream says so of one that is gone, and of one that it cannot delete


Opened = Callable[[bytes, str], bytes]


class KeptExemplar(msgspec.Struct, frozen=True, kw_only=True):
    """An exemplar in the stream.

    Parameters
    ----------
    sequence
        Its number in the stream.
    stored_at
        When the stream stored it, by the server's clock.
    n_bytes
        Size of its payload.
    data
        Its payload as it is stored; empty if only headers were asked for.
    """

    sequence: int
    model: str
    slice: str
    kind: ExemplarKind
    stored_at: datetime
    n_bytes: int
    data: bytes = b""


async def kept_exemplars(
    queue: Queue, *, model: str = "", slice_name: str = "", kind: str = "", payload: bool = False
) -> AsyncIterator[KeptExemplar]:
    """Yield the exemplars that are kept now, oldest first; none if there is no stream. Needs the rights of a shadow.

    Parameters
    ----------
    model, slice_name, kind
        Only these; empty: all.
    payload
        Whether to read payloads, too.

    Raises
    ------
    RetryError
        The server is unavailable.
    """
    client = await queue.live()
    stream, name = queue.stream_name("exemplar"), f"read-{secrets.token_hex(8)}"
    config = ConsumerConfig(
        name=name,
        filter_subject=subject_of_exemplars(queue.stream_name("exchange"), model, slice_name, kind),
        ack_policy=AckPolicy.NONE,
        headers_only=not payload,
        inactive_threshold=_KEPT_S,
        mem_storage=True,
    )
    jetstream = client.jetstream(timeout=REQUEST_S)
    async with mapped():
        try:
            info = await jetstream.add_consumer(stream, config)
        except nats.js.errors.NotFoundError:
            return
    left = int(info.num_pending or 0)
    inbox = await PullInbox.open(client, stream, name)
    try:
        while left:
            deliveries = await inbox.pull(min(_FETCH, left), _FETCH_BYTES, _FETCH_S)
            if not deliveries:  # the others expired, or were displaced, meanwhile
                return
            left -= len(deliveries)
            for delivery in deliveries:
                if (kept := _kept(delivery)) is not None:
                    yield kept
    finally:
        await inbox.close()
        with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError):
            await jetstream.delete_consumer(stream, name)  # else the server does, after `_KEPT_S`


def opener(stream: Stream) -> Opened:
    """Return what decrypts messages of a model, with `stream.payload_key_file`."""
    keys = KeyFile.of(stream.payload_key_file, "stream.payload_key_file", SystemClock())

    def opened(message: bytes, model: str) -> bytes:
        if not is_sealed(message):
            return message
        ring = None if keys is None else keys.ring
        if ring is None:
            raise QuarantineError(QuarantineReason.ENCRYPTED, "it is encrypted: set stream.payload_key_file")
        return unseal(message, ring, model)

    return opened


async def exemplars(
    queue: Queue,
    model: str,
    slice_name: str,
    *,
    opened: Opened,
    kind: ExemplarKind | None = None,
    unreadable: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Exemplar]:
    """Yield the exemplars of a slice, oldest first; none if `models.exemplars` was never set. Needs the rights of a shadow.

    Damaged ones may rank sites. Only random ones may estimate something of the slice, with the weight 1 / `Exemplar.pi`; items
    of one exchange have the same weight.

    Parameters
    ----------
    opened
        Decrypts a message of a model.
    unreadable
        Called with the reason for each one that cannot be read: it is left out.

    Raises
    ------
    RetryError
        The server is unavailable.
    """
    messages = kept_exemplars(
        queue, model=model, slice_name=slice_name, kind="" if kind is None else kind.value, payload=True
    )
    async for kept in messages:
        try:
            exemplar = decode_exemplar(opened(kept.data, model))
        except QuarantineError as error:
            unreadable(error.detail)
            continue
        if exemplar.slice == slice_name and exemplar.exchange.model == model:
            yield exemplar


async def delete_exemplars(
    queue: Queue, found: Sequence[KeptExemplar], *, progress: Callable[[int], None] = lambda _: None
) -> int:
    """Delete exemplars and let the server overwrite their bytes; return how many were still there.

    Needs the rights of the administrator.

    Raises
    ------
    RetryError
        The server is unavailable, or cannot delete one. It does not answer to users without these rights.
    """
    jetstream = (await queue.live()).jetstream(timeout=REQUEST_S)
    stream, n = queue.stream_name("exemplar"), 0
    for number, kept in enumerate(found, 1):
        async with mapped():
            try:
                await jetstream.delete_msg(stream, kept.sequence)
            except nats.js.errors.APIError as error:
                if error.err_code == _NOT_DELETED and await _is_there(jetstream, stream, kept.sequence):
                    raise RetryError(
                        f"NATS cannot delete exemplars, {n} of {len(found)} are erased ({error.description}): give its disk room,"
                        " restart it, and run the command again"
                    ) from error
                if error.err_code not in (_NO_MESSAGE, _NOT_DELETED):
                    raise
            else:
                n += 1
        if number % _PROGRESS_EVERY == 0:
            progress(number)
    return n


async def _is_there(jetstream: JetStreamContext, stream: str, sequence: int) -> bool:
    try:
        await jetstream.get_msg(stream, sequence)
    except nats.js.errors.NotFoundError:
        return False
    return True


def _kept(delivery: Delivery) -> KeptExemplar | None:
    parts = delivery.subject.split(".")
    try:
        kind = ExemplarKind(parts[-1])
    except ValueError:
        return None
    headers = delivery.headers
    return KeptExemplar(
        sequence=delivery.sequence,
        model=model_of(parts[-3]),
        slice=unquote(headers.get(SLICE_HEADER, "")) or model_of(parts[-2]),
        kind=kind,
        stored_at=delivery.streamed_at,
        n_bytes=int(headers.get(_SIZE, len(delivery.data))),
        data=delivery.data,
    )
