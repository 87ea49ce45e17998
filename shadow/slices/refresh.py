"""The refresh of what the monitor decides about slices: read from the database at the start and at intervals."""

import logging
from collections.abc import Callable
from typing import Final

from quantdrift.core.clusters import Clustering
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.slices import MOST_DISCOVERED, SliceKey
from quantdrift.shadow.slices.clusters import ClusterSlices
from quantdrift.storage.database import Database
from quantdrift.storage.noise_suspects import Suspects, suspects
from quantdrift.storage.slices.clusters import newest_clusterings, newest_id
from quantdrift.storage.slices.discovery import active_slices

_EVERY_S: Final = 60.0
_SUSPECTS_EVERY_S: Final = 5.0  # a page waits for the second replays
_LOG = logging.getLogger(__name__)

ByModel = dict[str, tuple[SliceKey, ...]]


class Refresh:
    """Reads something again and again, and passes it on when it has changed. While the database is unreachable the last one stays in use.

    Parameters
    ----------
    every_s
        Time between two reads.
    """

    what: str
    """What is read, for the log."""

    def __init__(self, database: Database, stop: Stop, *, every_s: float = _EVERY_S) -> None:
        self._database = database
        self._stop = stop
        self._every_s = every_s

    async def refresh_and_wait(self) -> None:
        """Refresh once, then wait."""
        await self.refresh()
        await self._stop.wait(self._every_s)

    async def refresh(self) -> None:
        """Read it, and pass it on if it has changed."""
        try:
            await self._read()
        except (RetryError, OperatorError) as error:
            _LOG.warning(
                "could not read %s, keeping the last ones and trying again in %g s: %s",
                self.what,
                self._every_s,
                error,
            )

    async def _read(self) -> None:
        raise NotImplementedError


class NoiseSuspects(Refresh):
    """The slices whose exchanges are replayed twice; `hand_on` gets all of them, from the event loop."""

    what = "which slices are replayed twice"

    def __init__(self, database: Database, hand_on: Callable[[Suspects], None], stop: Stop) -> None:
        super().__init__(database, stop, every_s=_SUSPECTS_EVERY_S)
        self._hand_on = hand_on
        self._now: Suspects = frozenset()

    async def _read(self) -> None:
        now = await suspects(self._database)
        if now != self._now:
            self._now = now
            self._hand_on(now)


class DiscoveredSlices(Refresh):
    """The confirmed slices.

    Parameters
    ----------
    hand_on
        Called with all slices, by model, from the event loop.
    most
        Most slices of one model; the oldest are kept. The monitor uses the same number.
    """

    what = "discovered slices"

    def __init__(
        self,
        database: Database,
        hand_on: Callable[[ByModel], None],
        stop: Stop,
        *,
        most: int = MOST_DISCOVERED,
    ) -> None:
        super().__init__(database, stop)
        self._hand_on = hand_on
        self._most = most
        self._now: ByModel = {}

    async def _read(self) -> None:
        by_model: dict[str, list[SliceKey]] = {}
        for key in await active_slices(self._database):
            by_model.setdefault(key.model, []).append(key)
        confirmed = {model: tuple(keys[: self._most]) for model, keys in by_model.items()}
        if confirmed != self._now:
            self._now = confirmed
            self._hand_on(confirmed)
            for model, keys in confirmed.items():
                _LOG.info("discovered slices of model %s: %s", model, ", ".join(key.name for key in keys))


class LearnedSlices(Refresh):
    """The newest clusterings, which `learned` uses. Where one is damaged, the last one stays in use."""

    what = "clusterings"

    def __init__(self, database: Database, learned: ClusterSlices, stop: Stop) -> None:
        super().__init__(database, stop)
        self._learned = learned
        self._newest = 0
        self._now: dict[tuple[str, str, str], Clustering] = {}

    async def _read(self) -> None:
        newest = await newest_id(self._database)
        if newest == self._newest:
            return
        stored = await newest_clusterings(self._database, unreadable=_stays)
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
