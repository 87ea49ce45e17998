"""Delivery of events to the collector, at least once.

The exporter's `export()` is called directly and a row is marked sent only on success: batch processors hide failures
and drop events when their queue overflows. Without a collector rows are marked sent at once; the table `transition`
keeps every event.

Order: events are sent as they were created. The exporter does not distinguish an unreachable collector from one that
refuses a particular event, so after a failure another event is tried, each time a different one. If that one is
accepted and the first fails again, the first was refused: from then on it waits behind all others, and is never given
up. If that one fails too, the collector counts as unreachable, and all events wait in their order.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

import msgspec
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from quantdrift.core.config import Secrets
from quantdrift.core.config.address import read_server_url
from quantdrift.core.config.schema import TelemetryOptions
from quantdrift.core.records import Verdict
from quantdrift.core.telemetry import otlp_exporter
from quantdrift.core.tls import Tls
from quantdrift.facts.events import NoiseEvent
from quantdrift.facts.words.noise import noise_line
from quantdrift.storage.alerts.outbox import WaitingEvent, count_unsent, mark_failed, mark_sent, unsent
from quantdrift.storage.database import Database
from quantdrift.storage.leader import Fence, unfenced

EVENT_NAME = "quantdrift.slice.transition"
NOISE_EVENT_NAME = "quantdrift.noise"
TIMEOUT_S = 5.0
_AT_ONCE = 64
_SEVERITY = {Verdict.FIRING: SeverityNumber.ERROR, Verdict.WARNING: SeverityNumber.WARN}
_LOG = logging.getLogger(__name__)


class EventExporter(Protocol):
    """The sender of one event. It may block, and is called on a separate thread."""

    def send(self, event: WaitingEvent) -> str:
        """Return an empty string if the collector accepted the event, else the reason."""
        ...

    def close(self) -> None:
        """Cancel an export in progress."""
        ...


class NoCollector:
    """The exporter without a collector: it accepts every event, which the table `transition` keeps anyway."""

    def send(self, event: WaitingEvent) -> str:
        """Return an empty string."""
        _LOG.info("event %d is not sent (telemetry.otlp_endpoint is empty); the database keeps it", event.id)
        return ""

    def export(self, _: LogRecord) -> str:
        """Return an empty string."""
        return ""

    def close(self) -> None:
        """Do nothing."""


class OtlpEvents:
    """The exporter to an OpenTelemetry collector, over gRPC.

    Parameters
    ----------
    telemetry
        Names the collector's endpoint.
    secrets
        Headers (tokens) for the collector.
    resource
        Attributes of this process.
    page
        Returns the address of an alert's page; empty if there is none.
    """

    def __init__(
        self,
        telemetry: TelemetryOptions,
        secrets: Secrets,
        resource: Resource,
        page: Callable[[int], str] = lambda _: "",
    ) -> None:
        self._endpoint = telemetry.otlp_endpoint
        is_encrypted = read_server_url(telemetry.otlp_endpoint, "https", "http").is_encrypted
        self._tls = Tls.of_telemetry(telemetry) if is_encrypted else None
        self._resource = resource
        self._page = page
        self._scope = InstrumentationScope("quantdrift")
        self._exporter = otlp_exporter(OTLPLogExporter, telemetry, secrets, timeout_s=TIMEOUT_S)

    def send(self, event: WaitingEvent) -> str:
        """Return an empty string if the collector accepted the event, else the reason."""
        return self.export(log_record(event, "" if event.alert_id is None else self._page(event.alert_id)))

    def export(self, log_record: LogRecord) -> str:
        """Send one record; return as `send`."""
        record = ReadableLogRecord(
            log_record=log_record, resource=self._resource, instrumentation_scope=self._scope
        )
        if self._exporter.export([record]) is LogRecordExportResult.SUCCESS:
            return ""
        why = self._tls.grpc_problem(self._endpoint) if self._tls else ""
        return f"the collector at {self._endpoint} did not accept it{f': {why}' if why else ''}"

    def close(self) -> None:
        """Cancel an export in progress."""
        self._exporter.shutdown()


class OutboxSender:
    """The sender of waiting events from the outbox.

    Parameters
    ----------
    fence
        Asked before each event: a former leader that wakes up must not send what another monitor has sent.
    max_share
        As of `quantdrift.storage.serving.servings`.
    """

    def __init__(
        self,
        database: Database,
        exporter: EventExporter,
        fence: Fence = unfenced,
        max_share: float = 1.0,
    ) -> None:
        self._database = database
        self._exporter = exporter
        self._fence = fence
        self._max_share = max_share
        self._n_probes = 0
        self.n_waiting = 0
        self.oldest_waiting: datetime | None = None

    async def send_waiting(self) -> tuple[int, bool]:
        """Send waiting events; return how many were accepted, and whether the collector seems to be unreachable.

        Raises
        ------
        RetryError
            Postgres is not available, or this monitor does not lead any more. An event that the collector accepted just before is sent again: at least once.
        """
        async with self._database.begin() as connection:
            waiting = await unsent(connection, _AT_ONCE, self._max_share)
        if not waiting:
            self.n_waiting, self.oldest_waiting = 0, None
            return 0, False
        sent, unreachable = 0, False
        while waiting and not unreachable:
            event = waiting.pop(0)
            error = await self._send(event)
            if error:
                self._n_probes += 1
                probe = waiting.pop(self._n_probes % len(waiting)) if waiting else None
                unreachable = probe is None or bool(await self._send(probe))
                if not unreachable:
                    sent += 1
                    error = await self._send(event)
            if error:
                async with self._database.begin() as connection:
                    await mark_failed(connection, event.id, error, refused=not unreachable)
            else:
                sent += 1
        async with self._database.begin() as connection:
            self.n_waiting, self.oldest_waiting = await count_unsent(connection)
        return sent, unreachable

    async def _send(self, event: WaitingEvent) -> str:
        """Return an empty string if the collector accepted the event, which is then marked sent, else the reason."""
        async with self._database.begin() as connection:
            await self._fence(connection)
        error = await asyncio.to_thread(self._exporter.send, event)
        if not error:
            async with self._database.begin() as connection:
                await mark_sent(connection, event.id)
        return error


def log_record(event: WaitingEvent, url: str = "") -> LogRecord:
    """Return the OpenTelemetry event: a name without dynamic parts, flat attributes, and a body for display only.

    Parameters
    ----------
    url
        The address of its alert on the live page; empty: there is none.
    """
    words = {} if event.text is None else event.text.attributes()
    attributes = {
        f"quantdrift.{name}": value
        for name, value in {**event.details, **words, **event.serving.attributes()}.items()
    }
    if event.alert_id is not None:
        attributes["quantdrift.alert_id"] = event.alert_id
    if url:
        attributes["quantdrift.url"] = url
    if event.exceeds is not None:
        severity = SeverityNumber.WARN if event.exceeds else SeverityNumber.INFO
    else:
        assert event.to_verdict is not None
        severity = _SEVERITY.get(event.to_verdict, SeverityNumber.INFO)
    return LogRecord(
        timestamp=event.at_us * 1000,
        observed_timestamp=time.time_ns(),
        severity_number=severity,
        severity_text=severity.name,
        body=f"{_text(event)}\nLive page: {url}" if url else _text(event),
        attributes=attributes,
        event_name=EVENT_NAME if event.exceeds is None else NOISE_EVENT_NAME,
    )


def _text(event: WaitingEvent) -> str:
    if event.exceeds is not None:
        return noise_line(msgspec.convert(event.details, NoiseEvent))
    return event.text.plain() if event.text else f"{event.from_verdict} -> {event.to_verdict}"
