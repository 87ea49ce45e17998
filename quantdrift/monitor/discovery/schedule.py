"""The nightly search for slices, in the leading monitor.

A round runs in a thread with its own event loop and connections: the fold never waits for it. It gives up after
`LIMIT_S`, and when the process stops.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import RetryError
from quantdrift.core.logs import of_model
from quantdrift.core.process.run import TURN_S, Stop
from quantdrift.core.telemetry import DISCOVERED, DISCOVERY_OVERFLOW, SEARCH_TIME, Telemetry
from quantdrift.drift.discovery.search import GivenUpError
from quantdrift.monitor.discovery.round import EVERY_S, LIMIT_S, Round, discover
from quantdrift.storage.address import Dsn
from quantdrift.storage.database import Database
from quantdrift.storage.slices.discovery import last_searched

_CONNECTIONS: Final = 2
_LOOK_AGAIN: Final = timedelta(hours=1)  # after a round without anything to search, or a failure
_LOG = logging.getLogger(__name__)


class Discoverer:
    """The schedule of discovery rounds. One task calls `turn` repeatedly.

    Parameters
    ----------
    dsn
        Address of the database; each round opens its own connections.
    database
        The monitor's connections, for the time of the last search.
    leads
        Returns whether this process leads.
    """

    def __init__(
        self,
        *,
        config: Config,
        dsn: Dsn,
        database: Database,
        telemetry: Telemetry,
        clock: Clock,
        stop: Stop,
        leads: Callable[[], bool],
    ) -> None:
        self._config = config
        self._dsn = dsn
        self._database = database
        self._clock = clock
        self._stop = stop
        self._leads = leads
        self._due_at: datetime | None = None
        self._time = telemetry.histogram(SEARCH_TIME)
        self._discovered = telemetry.counter(DISCOVERED)
        self._overflow = telemetry.counter(DISCOVERY_OVERFLOW)

    async def turn(self) -> None:
        """Run a round if one is due, then wait for `TURN_S`.

        Raises
        ------
        RetryError, OperatorError
            As `discover`.
        """
        if self._config.monitor.discovery and self._leads() and await self._due():
            await self._round()
        await self._stop.wait(TURN_S)

    async def _due(self) -> bool:
        now = self._clock.now()
        if self._due_at is None:
            last = await last_searched(self._database)
            self._due_at = last + self._every() if last else now
        return now >= self._due_at or self._due_at - now > self._every()  # or the clock was set back

    async def _round(self) -> None:
        begun_s, now = self._clock.monotonic_s(), self._clock.now()
        # Set first: after an error the database must not be read in a tight loop.
        self._due_at = now + min(self._every(), _LOOK_AGAIN)
        try:
            result = await asyncio.to_thread(self._in_thread, now)
        except GivenUpError:
            if not self._stop.is_set():
                _LOG.warning(
                    "the search for slices did not end within %g s: give the monitor more CPU, or set "
                    "monitor.discovery = false",
                    LIMIT_S,
                )
            self._due_at = now + self._every()
            return
        except RetryError:
            self._due_at = None  # another process may have searched
            raise
        if result.searches:
            self._due_at = now + self._every()
        self._time.record(self._clock.monotonic_s() - begun_s)
        self._report(result)

    def _in_thread(self, now: datetime) -> Round:
        ends_s = self._clock.monotonic_s() + LIMIT_S

        async def in_own_loop() -> Round:
            async with Database(self._dsn, pool_size=_CONNECTIONS, statement_timeout_s=LIMIT_S) as database:
                return await discover(
                    database,
                    self._config,
                    now,
                    give_up=lambda: self._stop.is_set() or self._clock.monotonic_s() >= ends_s,
                )

        return asyncio.run(in_own_loop())

    def _report(self, result: Round) -> None:
        for row in result.settled:
            reason = result.reasons.get(row.id, "")
            _LOG.info(
                "discovered slice %s of %s: %s: %s",
                row.predicate,
                row.model,
                row.status,
                reason,
                extra=of_model(row.model),
            )
            self._discovered.add(1, {"model": row.model, "status": row.status.value})
        for row in result.frozen:
            _LOG.info(
                "under test on later traffic: %s of %s", row.predicate, row.model, extra=of_model(row.model)
            )
            self._discovered.add(1, {"model": row.model, "status": row.status.value})
        for model, count in result.waiting.items():
            self._overflow.add(count, {"model": model, "limit": "slices"})
        for model, count in result.unknown.items():
            self._overflow.add(count, {"model": model, "limit": "policies"})
        for version_search in result.searches:
            self._overflow.add(
                version_search.search.n_left_out,
                {"model": version_search.version.model, "limit": "conditions"},
            )

    def _every(self) -> timedelta:
        return timedelta(seconds=EVERY_S)
