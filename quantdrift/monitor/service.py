"""The monitor process: one monitor leads, and it or several fold; temporary failures do not end it."""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from opentelemetry._logs import LogRecord
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

from quantdrift.core.clock import Clock, SystemClock, is_due
from quantdrift.core.config import Config, Secrets
from quantdrift.core.errors import OperatorError, QuantdriftError, RetryError
from quantdrift.core.links import alert_page
from quantdrift.core.passed_secrets import without_secrets
from quantdrift.core.process.admin import Admin
from quantdrift.core.process.backoff import Backoff
from quantdrift.core.process.child import ending_with_parent
from quantdrift.core.process.run import TURN_S, Stop, spare_collector, supervise
from quantdrift.core.stream.lag import StreamLag
from quantdrift.core.telemetry import (
    EVENTS_FAILED,
    EVENTS_SENT,
    Telemetry,
    otlp_exporter,
)
from quantdrift.drift.detectors.protocol import compile_all
from quantdrift.drift.evidence.numba_cache import is_complete, is_shared
from quantdrift.monitor.audit import Auditor
from quantdrift.monitor.discovery.clusters import ClusterFits
from quantdrift.monitor.discovery.schedule import Discoverer
from quantdrift.monitor.fold_turn import BATCHES_AT_ONCE, ROWS_AT_ONCE, FoldTurn
from quantdrift.monitor.gate import gate_routes
from quantdrift.monitor.gauges import SliceGauges
from quantdrift.monitor.notify.alertmanager import AlertmanagerNotifier
from quantdrift.monitor.notify.webhook import WebhookSender
from quantdrift.monitor.outbox import TIMEOUT_S, NoCollector, OtlpEvents, OutboxSender
from quantdrift.monitor.sampling.publish import PolicyMaker
from quantdrift.monitor.server_certificates import ServerCertificates
from quantdrift.monitor.session_search import SessionSearch
from quantdrift.monitor.unread_tallies import UnreadTallies
from quantdrift.storage.address import Dsn
from quantdrift.storage.admin.retention import maintain_by_two_clocks, merge_blocks, thin_tallies
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Connection, Database
from quantdrift.storage.fold.models import model_numbers, sum_up
from quantdrift.storage.fold.read import number, numbering
from quantdrift.storage.incidents.incidents import count_due, store_count
from quantdrift.storage.leader import Leadership
from quantdrift.storage.schema.revision import check_schema
from quantdrift.storage.shards import RENEWED_EVERY_S, HeldShards, ShardLeases, shard_states
from quantdrift.storage.slices.places import settle_places, sources

EXPORT_S: Final = 15.0
"""Time between two exports of the gauges, unless the variable of OpenTelemetry says otherwise."""
_EXPORT_VARIABLE: Final = "OTEL_METRIC_EXPORT_INTERVAL"
MAINTENANCE_EVERY = timedelta(days=1)
THIN_TALLIES_EVERY = timedelta(hours=1)
# An outage of Postgres is longer by at most this. A fold pauses for as long as it took: the states of many slices are then written
# less often, and half of the core is left.
_LONGEST_PAUSE_S = 2.0
_REPEATED_S: Final = 60.0
_UNFOLDED_S: Final = 5.0
_COUNT_PAUSE_S: Final = 2.0  # where no incident waits to be counted
_LOG = logging.getLogger(__name__)
# A separate process with low priority, so that it does not slow down the model served on this machine.
_COMPILE: Final = (
    "import os; os.nice(10); from quantdrift.drift.detectors.protocol import compile_all; compile_all()"
)
PLACES_EVERY_S: Final = 60.0


async def serve(config: Config, secrets: Secrets, stop: Stop) -> int:
    """Run the monitor until `stop`; return its exit code.

    Raises
    ------
    OperatorError
        A port is in use, or the Postgres address cannot be read.
    """
    clock = SystemClock()
    readers = _readers(config, secrets)
    telemetry = Telemetry("quantdrift-monitor", readers)
    telemetry.observe_config("monitor", lambda: config)
    telemetry.observe_exports()
    exporter = (
        OtlpEvents(config.telemetry, secrets, telemetry.resource, partial(alert_page, config))
        if config.telemetry.otlp_endpoint
        else NoCollector()
    )
    try:
        async with Database(secrets.current_dsn) as database, Leadership(secrets.current_dsn) as leadership:
            monitor = MonitorService(
                config=config,
                dsn=secrets.current_dsn,
                database=database,
                leadership=leadership,
                sender=OutboxSender(database, exporter, leadership.fence, config.monitor.max_loss_ratio),
                publish=exporter.export,
                telemetry=telemetry,
                clock=clock,
                stop=stop,
            )
            admin = Admin(
                "monitor.admin",
                config.monitor.admin,
                monitor.ready,
                gate_routes(database, config, secrets.gate_token),
                live=monitor.live,
            )
            await admin.start()
            try:
                await compile_loops(stop)
                spare_collector()
                await monitor.run()
            finally:
                await admin.stop()
    finally:
        exporter.close()
        await asyncio.to_thread(telemetry.close)
    return 0


class MonitorService:
    """The tasks of the process: lead and fold, send events, maintain the database, search slices and sessions, make policies.

    `serve` constructs it with its parts.
    """

    def __init__(
        self,
        *,
        config: Config,
        dsn: Dsn,
        database: Database,
        leadership: Leadership,
        sender: OutboxSender,
        publish: Callable[[LogRecord], str],
        telemetry: Telemetry,
        clock: Clock,
        stop: Stop,
    ) -> None:
        self._config = config
        self._database = database
        self._leadership = leadership
        self._sender = sender
        self._clock = clock
        self._stop = stop
        self._maintained_at: datetime | None = None
        self._thinned_at: datetime | None = None
        self._connected = False
        self._gauges = SliceGauges(clock, config.telemetry.max_slices, hangs=lambda: leadership.hangs)
        self._gauges.register(telemetry)
        self._fold = FoldTurn(
            config=config,
            telemetry=telemetry,
            clock=clock,
            gauges=self._gauges,
            progress=leadership.progress,
        )
        self._shards = ShardLeases(database)
        self._folds_shards = False
        self._unfolded_due_s = 0.0
        self._discoverer = Discoverer(
            config=config,
            dsn=dsn,
            database=database,
            telemetry=telemetry,
            clock=clock,
            stop=stop,
            leads=self._leads,
        )
        self._refits = ClusterFits(config=config, dsn=dsn, clock=clock, stop=stop, leads=self._leads)
        self._session_search = SessionSearch(
            database=database,
            clock=clock,
            stop=stop,
            leads=self._leads,
            wait_s=TURN_S,
            fence=leadership.fence,
        )
        self._places = PlaceKeeper(
            database=database, clock=clock, stop=stop, leads=lambda: self._gauges.leads, wait_s=TURN_S
        )
        self._policy = PolicyMaker(
            config=config,
            database=database,
            telemetry=telemetry,
            clock=clock,
            stop=stop,
            leads=self._leads,
        )
        self._unread_tallies = UnreadTallies(
            config=config,
            database=database,
            writer=Writer(database, clock),
            stop=stop,
            leads=lambda: self._gauges.leads,
        )
        self._auditor = Auditor(
            config=config,
            database=database,
            clock=clock,
            stop=stop,
            leads=self._leads,
            fence=leadership.fence,
            publish=publish,
        )
        self._server_certificates = ServerCertificates(config=config, dsn=dsn, telemetry=telemetry, stop=stop)
        self._alertmanager = AlertmanagerNotifier(
            config=config, database=database, fence=leadership.fence, telemetry=telemetry, clock=clock
        )
        self._webhook = WebhookSender(
            config=config, database=database, fence=leadership.fence, telemetry=telemetry, clock=clock
        )
        self._lag = StreamLag(config, telemetry, clock)
        self._sent = telemetry.counter(EVENTS_SENT)
        self._failed = telemetry.counter(EVENTS_FAILED)

    def ready(self) -> bool:
        """Return whether it leads, or stands by with a connection to the database."""
        return self._connected

    def live(self) -> bool:
        """Return whether it works; false after it gave up the lead, or its shards, because its fold hangs."""
        return not (self._leadership.hangs if self._folds_shards else self._leadership.is_stuck)

    def _leads(self) -> bool:
        return self._gauges.leads and self._leadership.leads

    async def run(self) -> None:
        """Run all tasks until the stop. An error that a person must repair is logged, and its task tries again."""
        turns: dict[str, Callable[[], Awaitable[None]]] = {
            "fold": self._fold_turn,
            "shards": self._shards_turn,
            "outbox": self._outbox_turn,
            "alertmanager": partial(self._notify_turn, self._alertmanager.post_due),
            "webhook": partial(self._notify_turn, self._webhook.send_due),
            "incidents": self._count_turn,
            "maintenance": self._maintain_turn,
            "discovery": self._discoverer.turn,
            "sessions": self._session_search.turn,
            "clusters": self._refits.turn,
            "places": self._places.turn,
            "policy": self._policy.turn,
            "tallies": self._unread_tallies.turn,
            "audit": self._auditor.turn,
            "certificates": self._server_certificates.turn,
        }
        # Not one of the turns: it is cancelled at the end, because an attempt to connect takes seconds.
        watching = asyncio.create_task(
            supervise("watching the stream", partial(self._lag.watch, self._stop), self._stop)
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, turn in turns.items():
                    tasks.create_task(supervise(name, self._with_pauses(name, turn), self._stop))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        with contextlib.suppress(RetryError, OperatorError):
            await self._finish_fold()
        if self._shards.takes_part:
            with contextlib.suppress(RetryError, OperatorError):
                await self._shards.release()
        await self._policy.close()
        await self._unread_tallies.close()
        await self._auditor.close()
        self._alertmanager.close()
        self._webhook.close()

    def _with_pauses(self, name: str, turn: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """Return `turn` with a growing pause after each failure, which is logged in one line; the same one once a minute."""
        backoff = Backoff(TURN_S, _LONGEST_PAUSE_S)
        said: dict[str, float] = {}

        def is_due(error: QuantdriftError) -> bool:
            """Return whether this failure was not logged within the last minute."""
            now_s, text = self._clock.monotonic_s(), str(error)
            for earlier in [each for each, at_s in said.items() if now_s - at_s >= _REPEATED_S]:
                del said[earlier]
            return said.setdefault(text, now_s) == now_s

        async def with_pauses() -> None:
            try:
                await turn()
            except RetryError as error:
                if is_due(error):
                    _LOG.warning("%s: %s; retrying every %.0f s", name, error, _LONGEST_PAUSE_S)
                await self._stop.wait(backoff.next_s())
            except OperatorError as error:
                # A person repairs it while this process waits: a password, a right, the schema, a newer release.
                if is_due(error):
                    _LOG.error("%s: %s; retrying every %.0f s", name, error, _LONGEST_PAUSE_S)
                await self._stop.wait(backoff.next_s())
            else:
                if said:
                    _LOG.info("%s: works again", name)
                    said.clear()
                backoff.reset()

        return with_pauses

    async def _fold_turn(self) -> None:
        begun_s = self._clock.monotonic_s()
        try:
            if not self._connected:
                await check_schema(self._database)
            leads = await self._leadership.acquire()
            self._connected = True
            if leads and not self._gauges.leads:
                _LOG.info("this monitor leads")
            self._gauges.leads = leads
            more = await self._fold_once(leads=leads)
        except BaseException as error:
            # Whatever was not committed is lost: the next turn starts from the database.
            self._fold.forget()
            self._connected = False
            self._gauges.leads = False
            if isinstance(error, OperatorError):
                await (
                    self._leadership.release()
                )  # another monitor may be able to fold, for instance a newer release
            raise
        if not more:
            took_s = self._clock.monotonic_s() - begun_s
            await self._stop.wait(min(max(TURN_S, took_s), _LONGEST_PAUSE_S))

    async def _fold_once(self, *, leads: bool) -> bool:
        """Give numbers to what waits where this monitor leads, and fold its models, up to a limit; return whether more may wait."""
        if leads and self._config.monitor.shards == 1:
            async with self._database.begin() as connection:
                await self._leadership.fence(connection)
                last, more = await self._number(connection)
                committed = await self._fold.fold(
                    connection, await model_numbers(connection), last, more=more
                )
                await sum_up(connection)
            return committed() or more
        more = False
        if leads:
            async with self._database.begin() as connection:
                await self._leadership.fence(connection)
                _, more = await self._number(connection)
                await sum_up(connection)
        held = self._shards.held
        if not held.numbers:
            self._fold.forget()
            self._gauges.clear()
            return more
        async with self._database.begin() as connection:
            now = await numbering(connection)
            # A monitor of another setting, or of a release before, may lead by now.
            is_so = now.by_model and now.shards == held.of
            models = [
                model
                for model, place in (await model_numbers(connection)).items()
                if is_so and place % held.of in held.numbers
            ]
            committed = await self._fold.fold(connection, models, now.fold_seq)
        return committed() or more

    async def _finish_fold(self) -> None:
        """Write what was folded and not written, so that the next monitor does not fold it again."""
        is_alone = self._config.monitor.shards == 1
        if not self._connected or (is_alone and not self._leadership.leads):
            return
        async with self._database.begin() as connection:
            if is_alone:
                await self._leadership.fence(connection)
            await self._fold.finish(connection)
            if is_alone:
                await sum_up(connection)

    async def _number(self, connection: Connection) -> tuple[int, bool]:
        """Assign numbers to new batches; return how far they have numbers, and whether more may wait."""
        shards = self._config.monitor.shards
        numbered = await number(
            connection,
            shards * BATCHES_AT_ONCE,
            timedelta(seconds=self._config.monitor.reorder_s),
            most_rows=shards * ROWS_AT_ONCE,
            shards=shards,
        )
        now_s = self._clock.monotonic_s()
        if now_s >= self._unfolded_due_s:
            self._gauges.shards = await shard_states(connection)
            self._unfolded_due_s = now_s + _UNFOLDED_S
        return numbered

    async def _shards_turn(self) -> None:
        """Say that this monitor folds, and take its part of the shards, as long as it can fold."""
        if self._config.monitor.shards > 1:
            before = self._shards.held
            if self._connected and not self._leadership.hangs:
                held = await self._shards.renew(self._leadership.pid)
            else:
                held = HeldShards()
                if self._shards.takes_part:
                    await self._shards.release()
            self._folds_shards = self._folds_shards or bool(held.numbers)
            if held != before:
                _LOG.info(
                    "this monitor folds %s of %d",
                    f"the shards {', '.join(map(str, sorted(held.numbers)))}" if held.numbers else "no shard",
                    self._config.monitor.shards,
                )
        await self._stop.wait(RENEWED_EVERY_S)

    async def _outbox_turn(self) -> None:
        failed = False
        if self._leads():
            sent, failed = await self._sender.send_waiting()
            self._gauges.n_waiting = self._sender.n_waiting
            self._gauges.oldest_waiting = self._sender.oldest_waiting
            self._sent.add(sent)
            self._failed.add(int(failed))
        if failed:
            raise RetryError("the collector did not accept an event")
        await self._stop.wait(TURN_S)

    async def _count_turn(self) -> None:
        """Count what the incident that waits longest has done; the reading holds no lock that a new leader waits for."""
        if self._leads():
            async with self._database.begin() as connection:
                count = await count_due(connection)
            if count is not None:
                async with self._database.begin() as connection:
                    await self._leadership.fence(connection)
                    await store_count(connection, count)
                return
        await self._stop.wait(_COUNT_PAUSE_S)

    async def _notify_turn(self, notify: Callable[[], Awaitable[None]]) -> None:
        if self._leads():
            await notify()
        await self._stop.wait(TURN_S)

    async def _maintain_turn(self) -> None:
        now = self._clock.now()
        if is_due(self._maintained_at, MAINTENANCE_EVERY, now) and self._leads():
            await maintain_by_two_clocks(self._database, self._config.storage, now)
            self._maintained_at = now
        if is_due(self._thinned_at, THIN_TALLIES_EVERY, now) and self._leads():
            # A fold that is hours behind leaves its tallies for later; those that it left for a day wait for the next start.
            await thin_tallies(self._database, self._thinned_at and self._thinned_at - timedelta(days=1))
            self._thinned_at = now
            await merge_blocks(self._database, now)
        await self._stop.wait(TURN_S)


def _readers(config: Config, secrets: Secrets) -> list[MetricReader]:
    telemetry = config.telemetry
    if not telemetry.otlp_endpoint:
        return []
    exporter = otlp_exporter(OTLPMetricExporter, telemetry, secrets, timeout_s=TIMEOUT_S)
    return [
        PeriodicExportingMetricReader(
            exporter,
            export_interval_millis=None if _EXPORT_VARIABLE in os.environ else EXPORT_S * 1000,
            export_timeout_millis=TIMEOUT_S * 1000,
        )
    ]


async def compile_loops(stop: Stop) -> None:
    """Return when everything is compiled or `stop` is set; immediately where a cache holds the compiled code."""
    if is_complete():
        return
    begun_s = time.monotonic()
    how_often = (
        "once per machine and release" if is_shared() else "at each start: no cache folder is writable"
    )
    _LOG.info(
        "compiling the detectors' loops (%s; some 6 s of a free processor): the first fold waits", how_often
    )
    if is_shared():
        code = await _in_child_process(stop)
    else:
        await asyncio.to_thread(compile_all)
        code = 0
    if stop.is_set():
        return
    if code:
        _LOG.warning("compiling ended with code %d: the detectors' loops are compiled on first use", code)
    else:
        _LOG.info("compiled in %.1f s: folding can begin", time.monotonic() - begun_s)


async def _in_child_process(stop: Stop) -> int:
    process = await asyncio.create_subprocess_exec(
        *ending_with_parent([sys.executable, "-P", "-c", _COMPILE]), env=without_secrets(os.environ)
    )
    ended, asked = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
    await asyncio.wait([ended, asked], return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        process.kill()
    asked.cancel()
    return await ended


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
            self._due_s = self._clock.monotonic_s() + PLACES_EVERY_S
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
