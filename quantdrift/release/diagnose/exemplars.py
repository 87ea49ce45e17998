"""Exchanges of a slice with their payload, for a diagnosis or a repair: its exemplars, or those that still wait in the stream."""

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Final

import nats.js.errors

from quantdrift.core.clock import SystemClock
from quantdrift.core.codec import decode_exemplar
from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.keys import KeyFile
from quantdrift.core.records import Exchange, Exemplar, ExemplarKind
from quantdrift.core.sealing import is_sealed, unseal
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.consume import REQUEST_S
from quantdrift.core.stream.errors import mapped
from quantdrift.core.stream.exemplars import kept_exemplars
from quantdrift.core.stream.search import answered
from quantdrift.core.stream.subjects import subject_token
from quantdrift.shadow.pipeline.validate import StreamedMessage, read_exchange

LONGEST: Final = timedelta(hours=1)
"""How far back the samples' stream is read."""

Opened = Callable[[bytes, str], bytes]


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


async def waiting(
    queue: Queue,
    model: str,
    *,
    opened: Opened,
    since: datetime | None = None,
    unreadable: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Exchange]:
    """Yield the exchanges of a model that wait in the stream of samples, oldest first. No worker loses one by it.

    This is what is left where no exemplars are kept. A worker deletes an exchange from the stream once it has stored the
    comparison. So a healthy installation has seconds of traffic there, and one whose shadow is down up to `stream.max_age_s`. They
    have no outputs of the reference, and nobody has put them into slices. Needs the rights of the administrator.

    Parameters
    ----------
    opened
        Decrypts a message of a model.
    since
        Only what was stored since then, by the server's clock; None: within the last hour.
    unreadable
        Called with the reason for each one that cannot be read: it is left out.

    Raises
    ------
    RetryError
        The server is unavailable, or does not answer: it does not answer to users without these rights either.
    """
    jetstream = (await queue.live()).jetstream(timeout=REQUEST_S)
    name = queue.stream_name("exchange")
    subject, sequence = f"{name}.exchange.{subject_token(model)}", 1
    begin = datetime.now(UTC) - LONGEST if since is None else since
    async with answered(), mapped():
        try:
            last = (await jetstream.stream_info(name)).state.last_seq
        except nats.js.errors.NotFoundError:
            return
    while sequence <= last:
        async with answered(), mapped():
            try:
                message = await jetstream.get_msg(name, seq=sequence, subject=subject, next=True)
            except nats.js.errors.NotFoundError:
                return
        assert message.seq is not None
        sequence = message.seq + 1
        stored_at = message.time or datetime.now(UTC)
        if stored_at < begin:
            continue
        try:
            yield read_exchange(
                opened(message.data or b"", model), StreamedMessage(model=model, streamed_at=stored_at)
            )
        except QuarantineError as error:
            unreadable(error.detail)
