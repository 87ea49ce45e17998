"""The clusterings that a worker uses: the newest ones of the record, read at the start and about once a minute."""

import logging
from typing import Final

from quantdrift.core.clusters import Clustering
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.shadow.slices.clusters import ClusterSlices
from quantdrift.storage.database import Database
from quantdrift.storage.slices.clusters import newest_clusterings, newest_id

_EVERY_S: Final = 60.0
_LOG = logging.getLogger(__name__)


class SliceRefresh:
    """Puts the newest clusterings in force. A record that is away leaves those there are, a damaged one its own.

    Parameters
    ----------
    database
        Where they are.
    learned
        What uses them.
    stop
        Ends the waiting.
    every_s
        Time between two looks.
    """

    def __init__(
        self, database: Database, learned: ClusterSlices, stop: Stop, *, every_s: float = _EVERY_S
    ) -> None:
        self._database = database
        self._learned = learned
        self._stop = stop
        self._every_s = every_s
        self._newest = 0
        self._now: dict[tuple[str, str, str], Clustering] = {}

    async def refresh_and_wait(self) -> None:
        """Look once, then wait."""
        await self.refresh()
        await self._stop.wait(self._every_s)

    async def refresh(self) -> None:
        """Put what is new in force."""
        try:
            newest = await newest_id(self._database)
            if newest == self._newest:
                return
            stored = await newest_clusterings(self._database, unreadable=_stays)
        except (RetryError, OperatorError) as error:
            _LOG.warning("learned slices stay as they are: %s", error)
            return
        found = [one.clustering for one in stored]
        self._now |= {(one.model, one.reference_digest, one.space): one for one in found}
        self._learned.put_in_force(self._now.values())
        self._newest = newest
        for clustering in found:
            _LOG.info(
                "learned slices of %s: version %d, %d clusters",
                clustering.model,
                clustering.version,
                len(clustering.ids),
            )


def _stays(which: str, error: OperatorError) -> None:
    _LOG.warning("learned slices of %s stay as they are: %s", which, error)
