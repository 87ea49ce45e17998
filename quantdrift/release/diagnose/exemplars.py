"""Exchanges of a slice with their payload, for a diagnosis or a repair: its exemplars, or those that still wait in the stream."""

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Final

import nats.js.errors

from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Exchange
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.consume import REQUEST_S
from quantdrift.core.stream.errors import mapped
from quantdrift.core.stream.exemplars import Opened, exemplars, opener
from quantdrift.core.stream.search import answered
from quantdrift.core.stream.subjects import subject_token
from quantdrift.shadow.pipeline.validate import StreamedMessage, read_exchange

__all__ = ["Opened", "exemplars", "opener", "waiting"]
LONGEST: Final = timedelta(hours=1)
"""How far back the samples' stream is read."""


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
