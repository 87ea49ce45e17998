"""The counts that a worker stores: tallies, from their stream, and the samples that expired before any worker had finished them."""

import logging

from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.core.logs import of_model
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Tally
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Consumer, Queue
from quantdrift.core.stream.consume import Delivery
from quantdrift.core.stream.tallies import read_tally
from quantdrift.shadow.pipeline.in_flight import acknowledge, give_back
from quantdrift.shadow.pipeline.metrics import ShadowMetrics
from quantdrift.shadow.pipeline.store import until_stored
from quantdrift.storage.account.expiries import SKEW, count_expired
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database

_LOG = logging.getLogger(__name__)
_FETCH = 64
_FETCH_S = 1.0
_PAUSE_S = 0.5
_COUNT_S = 5.0


class TallyStore:
    """Stores tallies. One task calls it.

    Tallies are cumulative: one that cannot be decoded, or was delivered too often, is dropped with a warning, and the next
    tally of its sidecar replaces it.

    Parameters
    ----------
    consumer
        Consumer of the stream of tallies.
    worker
        Name of this worker in the database.
    max_deliveries, fetch_bytes, store_limit_s
        Deliveries per tally, bytes per fetch, and the longest transaction.
    """

    def __init__(
        self,
        *,
        consumer: Consumer,
        writer: Writer,
        worker: str,
        meters: ShadowMetrics,
        stop: Stop,
        max_deliveries: int,
        fetch_bytes: int,
        store_limit_s: float,
    ) -> None:
        self._consumer = consumer
        self._writer = writer
        self._worker = worker
        self._meters = meters
        self._stop = stop
        self._max_deliveries = max_deliveries
        self._fetch_bytes = fetch_bytes
        self._store_limit_s = store_limit_s

    async def take_once(self) -> None:
        """Fetch once and store the tallies; redelivered ones are stored one by one."""
        try:
            deliveries = await self._consumer.fetch(_FETCH, max_bytes=self._fetch_bytes, timeout_s=_FETCH_S)
        except RetryError as error:
            _LOG.debug("%s", error)
            await self._stop.wait(_PAUSE_S)
            return
        await self._store([delivery for delivery in deliveries if delivery.n_delivered == 1])
        for delivery in deliveries:
            if delivery.n_delivered > 1:
                await self._store([delivery])

    async def _store(self, deliveries: list[Delivery]) -> None:
        read = [
            (tally, delivery.streamed_at)
            for delivery in deliveries
            if (tally := self._read(delivery)) is not None
        ]
        if read:
            tallies, streamed_at = zip(*read, strict=True)
            written = await until_stored(
                lambda: self._writer.store_tallies(self._worker, tallies, streamed_at),
                self._stop,
                limit_s=self._store_limit_s,
                failed=self._meters.store_failed,
            )
            if written is None:
                await give_back(deliveries)
                return
        await acknowledge(deliveries)

    def _read(self, delivery: Delivery) -> Tally | None:
        if delivery.n_delivered > self._max_deliveries:
            _LOG.warning(
                "dropped a tally that could not be stored %d times; the next one replaces it",
                delivery.n_delivered - 1,
            )
            return None
        try:
            return read_tally(delivery.data, delivery.subject)
        except QuarantineError as error:
            _LOG.warning("dropped a tally that cannot be used; the next one replaces it: %s", error)
            return None


class ExpiredCount:
    """Counts expired samples. One task calls `count_and_wait` in a loop.

    JetStream does not report expired messages. A sample has expired if the stream no longer holds it and no worker has
    finished it. Every worker checks, one at a time counts, and the result is stored with the tallies.

    Parameters
    ----------
    worker
        Name of this worker in the database.
    """

    def __init__(
        self, *, queue: Queue, database: Database, worker: str, meters: ShadowMetrics, stop: Stop
    ) -> None:
        self._queue = queue
        self._database = database
        self._worker = worker
        self._meters = meters
        self._stop = stop

    async def count_and_wait(self) -> None:
        """Count once, then wait for a few seconds."""
        try:
            await self._count()
        except (RetryError, OperatorError) as error:
            _LOG.debug("could not count expired samples, trying again in %g s: %s", _COUNT_S, error)
        await self._stop.wait(_COUNT_S)

    async def _count(self) -> None:
        gone_until = (await read_backlog(self._queue)).gone_until
        if gone_until is None:
            return
        counts = await count_expired(self._database, self._worker, gone_until - SKEW)
        self._meters.expired(counts)
        for model in sorted({count.model for count in counts}):
            n = sum(count.n for count in counts if count.model == model)
            if n > 0:
                _LOG.warning(
                    "%d samples of model %s left the stream before they were replayed: add shadow workers or raise"
                    " stream.max_age_s, unless somebody dropped them (`quantdrift stream drop`)",
                    n,
                    model,
                    extra=of_model(model),
                )
