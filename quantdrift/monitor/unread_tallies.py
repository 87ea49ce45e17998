"""The tallies that no shadow worker reads, and what expires meanwhile, stored and counted by the leading monitor.

Shadow workers do both as long as one runs. If none does, counts would stand still: samples would expire in the stream
while every verdict stays as it was.
"""

import logging
from collections.abc import Callable
from typing import Final

from quantdrift.core.config.schema import MIB, Config
from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.core.process.run import TURN_S, Stop
from quantdrift.core.stream.backlog import are_tallies_read, read_backlog
from quantdrift.core.stream.connection import Consumer, Queue
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.stream.tallies import read_tally
from quantdrift.storage.account.expiries import SKEW, count_expired
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database

_LOG = logging.getLogger(__name__)
LOOK_S: Final = 5.0
_FETCH: Final = 64
_FETCH_BYTES: Final = 16 * MIB
_WORKER: Final = "monitor"


class UnreadTallies:
    """Stores the tallies that no shadow worker reads. One task calls `turn` repeatedly, and `close` at the end.

    Without NATS, or without the rights to write tallies, the monitor works as before; the reason is logged once.

    Parameters
    ----------
    leads
        Returns whether this process leads.
    """

    def __init__(
        self, *, config: Config, database: Database, writer: Writer, stop: Stop, leads: Callable[[], bool]
    ) -> None:
        self._config = config
        self._database = database
        self._writer = writer
        self._stop = stop
        self._leads = leads
        self._queue: Queue | None = None
        self._consumer: Consumer | None = None
        self._why_not = ""

    async def turn(self) -> None:
        """Look once, and wait for `LOOK_S`."""
        if not self._leads():
            await self._stop.wait(TURN_S)
            return
        try:
            await self.look()
        except (RetryError, OperatorError) as error:
            if not self._why_not:
                _LOG.warning(
                    "while no shadow worker runs, the counts of the sidecars are not stored, and what expires is not"
                    " counted: %s",
                    error,
                )
            self._why_not = str(error)
        else:
            self._why_not = ""
        await self._stop.wait(LOOK_S)

    async def look(self) -> None:
        """Store what waits and count what has expired, unless a shadow worker reads the tallies.

        Raises
        ------
        RetryError
            NATS or Postgres is not available.
        OperatorError
            The credentials of NATS cannot be used, or the database refuses the rows.
        """
        if self._queue is None:
            self._queue = await Queue.connect(
                self._config.stream, client_name="quantdrift-monitor", role=NatsRole.MONITOR
            )
        if await are_tallies_read(self._queue) is not False:
            return
        while await self._store(self._queue):
            pass
        gone_until = (await read_backlog(self._queue)).gone_until
        if gone_until is None:
            return
        for count in await count_expired(self._database, _WORKER, gone_until - SKEW):
            if count.n > 0:
                _LOG.warning(
                    "%d samples of model %s expired in the stream: no shadow worker runs",
                    count.n,
                    count.model,
                )

    async def close(self) -> None:
        """Disconnect."""
        if self._queue is not None:
            await self._queue.close()

    async def _store(self, queue: Queue) -> bool:
        """Store the tallies of one fetch; return whether there may be more."""
        if self._consumer is None:
            self._consumer = await queue.consumer("tally", ack_wait_s=self._config.shadow.ack_wait_s)
        deliveries = await self._consumer.fetch(_FETCH, max_bytes=_FETCH_BYTES, timeout_s=0.0)
        read = []
        for delivery in deliveries:
            try:
                read.append((read_tally(delivery.data, delivery.subject), delivery.streamed_at))
            except QuarantineError as error:
                _LOG.warning("dropped a tally that cannot be used; the next one replaces it: %s", error)
        if read:
            tallies, streamed_at = zip(*read, strict=True)
            await self._writer.store_tallies(_WORKER, tallies, streamed_at)
        for delivery in deliveries:
            await delivery.ack()
        return len(deliveries) == _FETCH
