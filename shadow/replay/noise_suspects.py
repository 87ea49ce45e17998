"""The refresh of suspect slices, read from the database every five seconds."""

import logging
from collections.abc import Callable
from typing import Final

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.storage.database import Database
from quantdrift.storage.noise import Suspects, suspects

_EVERY_S: Final = 5.0  # a page waits for the second replays
_LOG = logging.getLogger(__name__)


class NoiseSuspects:
    """Passes the suspect slices on whenever they change. While the database is unreachable the last ones stay in use.

    Parameters
    ----------
    hand_on
        Called with all suspect slices, from the event loop.
    every_s
        Time between two reads.
    """

    def __init__(
        self,
        database: Database,
        hand_on: Callable[[Suspects], None],
        stop: Stop,
        *,
        every_s: float = _EVERY_S,
    ) -> None:
        self._database = database
        self._hand_on = hand_on
        self._stop = stop
        self._every_s = every_s
        self._now: Suspects = frozenset()

    async def refresh_and_wait(self) -> None:
        """Refresh once, then wait."""
        await self.refresh()
        await self._stop.wait(self._every_s)

    async def refresh(self) -> None:
        """Read the slices, and pass them on if they have changed."""
        try:
            now = await suspects(self._database)
        except (RetryError, OperatorError) as error:
            _LOG.warning(
                "could not read which slices are replayed twice, keeping the last ones and trying again in %g s: %s",
                self._every_s,
                error,
            )
            return
        if now != self._now:
            self._now = now
            self._hand_on(now)
