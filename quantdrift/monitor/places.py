"""The turn of the leading monitor that gives slices and versions of clients' values their places, once a minute."""

import logging
from collections.abc import Callable
from typing import Final

from quantdrift.core.clock import Clock
from quantdrift.core.process.run import Stop
from quantdrift.storage.database import Database
from quantdrift.storage.slices.places import settle_places, sources

EVERY_S: Final = 60.0
_LOG = logging.getLogger(__name__)


class PlaceKeeper:
    """Decides on places, and logs each change. One task calls `turn` repeatedly.

    Parameters
    ----------
    leads
        Returns whether this process leads.
    """

    def __init__(
        self, *, database: Database, clock: Clock, stop: Stop, leads: Callable[[], bool], wait_s: float
    ) -> None:
        self._database = database
        self._clock = clock
        self._stop = stop
        self._leads = leads
        self._wait_s = wait_s
        self._due_s = 0.0

    async def turn(self) -> None:
        """Decide once a minute while this process leads, then wait for `wait_s`.

        Raises
        ------
        RetryError
            Postgres is not available.
        """
        if self._leads() and self._clock.monotonic_s() >= self._due_s:
            self._due_s = self._clock.monotonic_s() + EVERY_S
            await self.settle()
        await self._stop.wait(self._wait_s)

    async def settle(self) -> None:
        """Decide on the places of every source."""
        for model, source in await sources(self._database):
            for change in await settle_places(self._database, model, source):
                _LOG.info(
                    "model %s: %s %s: %s",
                    model,
                    change.name,
                    "is watched by itself from now on"
                    if change.admitted
                    else "counts as (other) from now on",
                    change.reason,
                )
