"""The count of samples that expired in the stream before a worker had finished them.

JetStream does not report expired messages. A sample has expired if the stream no longer holds it and no worker has
finished it. Every worker checks, one at a time counts, and the result is stored with the tallies.
"""

import logging

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.logs import of_model
from quantdrift.core.process.run import Stop
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.shadow.pipeline.metrics import ShadowMetrics
from quantdrift.storage.account.expiries import SKEW, count_expired
from quantdrift.storage.database import Database

_LOG = logging.getLogger(__name__)
_COUNT_S = 5.0


class ExpiredCount:
    """Counts expired samples. One task calls `count_and_wait` in a loop.

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
                    "%d samples of model %s expired in the stream before they were replayed: add shadow workers or"
                    " raise stream.max_age_s",
                    n,
                    model,
                    extra=of_model(model),
                )
