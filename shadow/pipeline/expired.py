"""Counts what expired in the stream before a worker was done with it.

The stream says nothing of what it forgets. What it holds no more and no worker is done with has expired; every worker
asks, one at a time counts, and what was found is in the record with the tallies.
"""

import logging
from datetime import timedelta

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.shadow.pipeline.metrics import ShadowMetrics
from quantdrift.storage.database import Database
from quantdrift.storage.shadow.expiries import count_expired

_LOG = logging.getLogger(__name__)
_LOOK_S = 5.0
_SKEW = timedelta(seconds=1)  # of the servers of a cluster: the two streams may have different leaders


class ExpiredCount:
    """Counts again and again. One task calls `turn`.

    Parameters
    ----------
    queue
        Tells what the stream holds no more.
    database
        The record.
    worker
        Name of this worker in the record.
    meters
        Told what was found.
    stop
        Whether the process is to end.
    """

    def __init__(
        self, *, queue: Queue, database: Database, worker: str, meters: ShadowMetrics, stop: Stop
    ) -> None:
        self._queue = queue
        self._database = database
        self._worker = worker
        self._meters = meters
        self._stop = stop

    async def turn(self) -> None:
        """Count once, and wait."""
        try:
            await self._count()
        except (RetryError, OperatorError) as error:
            _LOG.debug("what has expired is not counted now: %s", error)
        await self._stop.wait(_LOOK_S)

    async def _count(self) -> None:
        gone_until = (await read_backlog(self._queue)).gone_until
        if gone_until is None:
            return
        found = await count_expired(self._database, self._worker, gone_until - _SKEW)
        self._meters.expired(found)
        for model in sorted({one.model for one in found}):
            n = sum(one.n for one in found if one.model == model)
            if n > 0:
                _LOG.warning(
                    "%d samples of %s expired in the stream before they were replayed: add workers or raise"
                    " stream.max_age_s",
                    n,
                    model,
                )
