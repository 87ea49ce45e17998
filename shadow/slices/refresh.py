"""The refresh of clusterings: the newest ones, read from the database at the start and about once a minute."""

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
    """Loads the newest clusterings. While the database is unreachable, or a clustering is damaged, the last one stays in use.

    Parameters
    ----------
    learned
        Uses the clusterings.
    every_s
        Time between two reads.
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
        """Refresh once, then wait."""
        await self.refresh()
        await self._stop.wait(self._every_s)

    async def refresh(self) -> None:
        """Read the clusterings, and use new ones from now on."""
        try:
            newest = await newest_id(self._database)
            if newest == self._newest:
                return
            stored = await newest_clusterings(self._database, unreadable=_stays)
        except (RetryError, OperatorError) as error:
            _LOG.warning(
                "could not read clusterings, keeping the last ones and trying again in %g s: %s",
                self._every_s,
                error,
            )
            return
        clusterings = [row.clustering for row in stored]
        self._now |= {
            (clustering.model, clustering.reference_digest, clustering.space): clustering
            for clustering in clusterings
        }
        self._learned.use_clusterings(self._now.values())
        self._newest = newest
        for clustering in clusterings:
            _LOG.info(
                "learned slices of model %s: version %d, %d clusters",
                clustering.model,
                clustering.version,
                len(clustering.ids),
            )


def _stays(description: str, error: OperatorError) -> None:
    _LOG.warning("the newest clustering of %s is damaged, keeping the last one: %s", description, error)
