"""What the leading monitor does for the audit: its own configuration, pauses without an entry, and the head of the chain.

A command that pauses sampling writes its entry itself, unless Postgres is away or its user has no right there. So the monitor
compares what is paused in NATS with the newest entry. It adds one if they differ: with its own name, and with the user that
the command has named as part of the state.

The head goes to the collector once a day. Whoever owns the database can write the whole chain again, but not the collector's
copy.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

from opentelemetry._logs import LogRecord, SeverityNumber

from quantdrift.core.clock import Clock, is_due
from quantdrift.core.config.schema import Config
from quantdrift.core.config.state import changed_options, config_digest, config_state
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import TURN_S, Stop
from quantdrift.core.sampling.pause import KEY, Pause, PauseError, decode
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.keyvalue import Entry, KeyValue
from quantdrift.core.stream.rights import NatsRole
from quantdrift.storage.audit import Action, Verified, add, newest, verify
from quantdrift.storage.database import Database
from quantdrift.storage.leader import Fence
from quantdrift.storage.process_reports import audit_reports, count_waiting

EVENT_NAME: Final = "quantdrift.audit.head"
LOOK_S: Final = 5.0
MOST_REPORTED: Final = 240
"""Entries in an hour about what processes report: one who has a sidecar's key must not fill the audit."""
MOST_OF_ONE: Final = 20
"""Those of one process: one that changes all the time must not use up the entries of the others."""
_MOST_REPORTS: Final = 20
_HOUR_S: Final = 3600.0
_HEAD_EVERY: Final = timedelta(days=1)
_PROCESS: Final = "monitor"
_PAUSES: Final = (Action.PAUSE, Action.RESUME, Action.PAUSE_SEEN)
_LOG = logging.getLogger(__name__)


class Auditor:
    """Adds entries about what no command has written, and publishes the head. One task calls `turn` and, at the end, `close`.

    Parameters
    ----------
    leads
        Returns whether this process leads.
    publish
        Sends one log record to the collector, and returns an empty string or the reason; it may block.
    """

    def __init__(
        self,
        *,
        config: Config,
        database: Database,
        clock: Clock,
        stop: Stop,
        leads: Callable[[], bool],
        fence: Fence,
        publish: Callable[[LogRecord], str],
    ) -> None:
        self._config = config
        self._database = database
        self._clock = clock
        self._stop = stop
        self._leads = leads
        self._fence = fence
        self._publish = publish
        self._queue: Queue | None = None
        self._is_config_known = False
        self._head_at: datetime | None = None
        self._known_revision = 0
        self._doubtful_revision = 0
        self._why_not = ""
        self._hour_since_s = clock.monotonic_s()
        self._reported: Counter[str] = Counter()
        self._full: set[str] = set()

    async def turn(self) -> None:
        """Do what is due, and wait for `LOOK_S`.

        Raises
        ------
        RetryError, OperatorError
            Postgres is not available, or the monitor's user lacks a right.
        """
        if not self._leads():
            self._is_config_known = False
            await self._stop.wait(TURN_S)
            return
        if not self._is_config_known:
            await self.record_config()
            self._is_config_known = True
        await self.record_reports()
        if (entry := await self._read_pause()) is not None:
            await self.look(entry)
        now = self._clock.now()
        if is_due(self._head_at, _HEAD_EVERY, now):
            await self.publish_head()
            self._head_at = now
        await self._stop.wait(LOOK_S)

    async def close(self) -> None:
        """Disconnect from NATS."""
        if self._queue is not None:
            await self._queue.close()

    async def record_config(self) -> None:
        """Add an entry if the last monitor that led had another configuration.

        Raises
        ------
        RetryError, OperatorError
            As `Database.begin`.
        """
        options = config_state(self._config)
        digest = config_digest(options)
        async with self._database.begin() as connection:
            await self._fence(connection)
            last = await newest(connection, [Action.CONFIGURATION], _PROCESS)
            before: dict[str, Any] = {} if last is None else last.after
            if before.get("digest") == digest:
                return
            former = before.get("options", {})
            changed = changed_options(former, options)
            await add(
                connection,
                Action.CONFIGURATION,
                subject=_PROCESS,
                before={
                    "digest": before["digest"],
                    "options": {name: former[name] for name in changed if name in former},
                }
                if before
                else None,
                after={"digest": digest, "changed": changed, "options": options},
            )

    async def record_reports(self) -> None:
        """Add entries about configurations and local pauses that sidecars and shadow workers have reported.

        A process that is new, with a configuration that another one of its role has, gets no entry about it: pods come and
        go, and entries stay for ever. At most `MOST_REPORTED` entries are added in an hour, and about `MOST_OF_ONE` of one
        process; what waits is the newest state.

        Raises
        ------
        RetryError, OperatorError
            As `Database.begin`.
        """
        if self._clock.monotonic_s() - self._hour_since_s >= _HOUR_S:
            self._hour_since_s = self._clock.monotonic_s()
            self._reported.clear()
            self._full.clear()
        if self._reported.total() >= MOST_REPORTED:
            return
        async with self._database.begin() as connection:
            await self._fence(connection)
            added = await audit_reports(connection, _MOST_REPORTS, self._full)
            n_waiting = await count_waiting(connection) if added else 0
        self._reported.update(added)
        for process in sorted(added):
            if self._reported[process] >= MOST_OF_ONE:
                self._full.add(process)
                _LOG.warning(
                    "%s has reported %d changes of its configuration or pause within an hour: those that follow wait for the next"
                    " hour, and only the newest is then in the audit; find out what changes it",
                    process,
                    self._reported[process],
                )
        if (n := self._reported.total()) >= MOST_REPORTED:
            _LOG.warning(
                "sidecars and shadow workers have reported %d changes of configuration or pause within an hour: those that follow"
                " wait for the next hour, of %d processes now; see `quantdrift audit list`",
                n,
                n_waiting,
            )

    async def publish_head(self) -> Verified:
        """Verify the chain, and send its head to the collector.

        Raises
        ------
        RetryError
            The collector did not take it, or Postgres is not available.
        OperatorError
            As `Database.begin`.
        """
        async with self._database.begin() as connection:
            verified = await verify(connection)
        for finding in verified.findings:
            _LOG.error("the audit was changed: %s; run `quantdrift audit verify`", finding.problem)
        _LOG.info("head of the audit: %s", verified.head)
        if why := await asyncio.to_thread(self._publish, head_record(verified, self._clock.now())):
            raise RetryError(f"the head of the audit was not sent: {why}")
        return verified

    async def look(self, entry: Entry) -> None:
        """Add an entry about a pause in NATS, if its command wrote none until the next call.

        A command puts the pause before its transaction ends, so that the first look may come too early.

        Raises
        ------
        RetryError, OperatorError
            As `Database.begin`.
        """
        if entry.revision == self._known_revision:
            return
        number, after = _state(entry)
        subject = f"revision {entry.revision}"
        async with self._database.begin() as connection:
            await self._fence(connection)
            last = await newest(connection, _PAUSES)
            is_known = (
                last is not None
                and last.after == after
                and (last.seq == number or (last.action == Action.PAUSE_SEEN and last.subject == subject))
            )
            if not is_known and self._doubtful_revision != entry.revision:
                self._doubtful_revision = entry.revision
                return
            if not is_known:
                await add(
                    connection,
                    Action.PAUSE_SEEN,
                    subject=subject,
                    before=None if last is None else last.after,
                    after=after,
                    note="seen in NATS without an entry of its command; `by` is what the command said",
                )
        self._known_revision = entry.revision

    async def _read_pause(self) -> Entry | None:
        """Return what is stored in NATS; None: nothing, or NATS is away, which is logged once."""
        try:
            if self._queue is None:
                self._queue = await Queue.connect(
                    self._config.stream, client_name="quantdrift-monitor", role=NatsRole.MONITOR
                )
            entry = await KeyValue(self._queue, self._config.stream, purpose=KEY).get(KEY)
        except (RetryError, OperatorError) as error:
            if not self._why_not:
                _LOG.warning("pauses without an entry in the audit are not noticed: %s", error)
            self._why_not = str(error)
            return None
        self._why_not = ""
        return entry


def head_record(verified: Verified, at: datetime) -> LogRecord:
    """Return the OpenTelemetry event with the head of the chain."""
    is_intact = not verified.findings
    severity = SeverityNumber.INFO if is_intact else SeverityNumber.ERROR
    return LogRecord(
        timestamp=int(at.timestamp() * 1e9),
        observed_timestamp=int(at.timestamp() * 1e9),
        severity_number=severity,
        severity_text=severity.name,
        body=f"audit: {verified.n} entries, {'intact' if is_intact else 'CHANGED'}, head {verified.head}",
        attributes={
            "quantdrift.head": str(verified.head),
            "quantdrift.n": verified.n,
            "quantdrift.intact": is_intact,
        },
        event_name=EVENT_NAME,
    )


def _state(entry: Entry) -> tuple[int, dict[str, Any]]:
    """Return the number of the entry in the audit that the command names, and what is paused."""
    try:
        pause: Pause = decode(entry.value)
    except PauseError:
        return 0, {"unreadable_bytes": len(entry.value)}
    return pause.audit, pause.state()
