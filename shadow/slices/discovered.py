"""The refresh of discovered slices: the confirmed ones, read from the database about once a minute."""

import logging
from collections.abc import Callable
from typing import Final

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.slices import SliceKey
from quantdrift.storage.database import Database
from quantdrift.storage.slices.discovery import active_slices

_EVERY_S: Final = 60.0
_LOG = logging.getLogger(__name__)

ByModel = dict[str, tuple[SliceKey, ...]]


class DiscoveredSlices:
    """Passes the confirmed slices on whenever they change. While the database is unreachable the last ones stay in use.

    Parameters
    ----------
    hand_on
        Called with all slices, by model, from the event loop.
    most
        Most slices of one model; the oldest are kept. The monitor uses the same number.
    every_s
        Time between two reads.
    """

    def __init__(
        self,
        database: Database,
        hand_on: Callable[[ByModel], None],
        stop: Stop,
        *,
        most: int,
        every_s: float = _EVERY_S,
    ) -> None:
        self._database = database
        self._hand_on = hand_on
        self._stop = stop
        self._most = most
        self._every_s = every_s
        self._now: ByModel = {}

    async def refresh_and_wait(self) -> None:
        """Refresh once, then wait."""
        await self.refresh()
        await self._stop.wait(self._every_s)

    async def refresh(self) -> None:
        """Read the slices, and pass them on if they have changed."""
        try:
            active = await active_slices(self._database)
        except (RetryError, OperatorError) as error:
            _LOG.warning(
                "could not read discovered slices, keeping the last ones and trying again in %g s: %s",
                self._every_s,
                error,
            )
            return
        by_model: dict[str, list[SliceKey]] = {}
        for key in active:
            by_model.setdefault(key.model, []).append(key)
        confirmed = {model: tuple(keys[: self._most]) for model, keys in by_model.items()}
        if confirmed != self._now:
            self._now = confirmed
            self._hand_on(confirmed)
            for model, keys in confirmed.items():
                _LOG.info("discovered slices of model %s: %s", model, ", ".join(key.name for key in keys))
