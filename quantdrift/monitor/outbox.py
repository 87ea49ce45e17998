"""Sends events to the collector, at least once.

The exporter's `export()` is called directly and a row is marked sent on success alone: batch processors swallow
failures and drop what overflows. Without a collector rows are marked sent at once; `transition` keeps every event.

Order: events go out as they were made. The exporter does not tell a collector that is away from one that refuses this
very event, so after a failure another event is tried, each time a different one. If that one is taken and the first
fails again, it was refused: from then on it waits behind all others, and is never given up. If that one fails too, the
collector is taken to be away, and all wait in their order.
"""

import asyncio
import logging
from typing import Protocol

import msgspec
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from quantdrift.core.config import Secrets
from quantdrift.core.config.schema import Telemetry
from quantdrift.core.records import Verdict
from quantdrift.core.telemetry import grpc_headers
from quantdrift.monitor.fold.alert_event import AlertEvent, summary
from quantdrift.monitor.fold.noise import noise_summary
from quantdrift.storage.database import Database
from quantdrift.storage.monitor.outbox import WaitingEvent, count_unsent, mark_failed, mark_sent, unsent

EVENT_NAME = "quantdrift.slice.transition"
NOISE_EVENT_NAME = "quantdrift.noise"
TIMEOUT_S = 5.0
_AT_ONCE = 64
_SEVERITY = {Verdict.FIRING: SeverityNumber.ERROR, Verdict.WARNING: SeverityNumber.WARN}
_LOG = logging.getLogger(__name__)


class EventExporter(Protocol):
    """What sends one event. It may block, and is called on a thread of its own."""

    def send(self, event: WaitingEvent) -> str:
        """Return an empty text if the collector took the event, else why not."""
        ...

    def close(self) -> None:
        """Give up what is going on."""
        ...


class NoCollector:
    """Takes every event: `transition` holds it already, and nobody else is to be told."""

    def send(self, event: WaitingEvent) -> str:
        """Return that all is well."""
        _LOG.info("no collector: event %d stays in the record", event.id)
        return ""

    def close(self) -> None:
        """Do nothing."""


class OtlpEvents:
    """Sends events to an OpenTelemetry collector over gRPC.

    Parameters
    ----------
    telemetry
        Where the collector is.
    secrets
        Headers (tokens) for it.
    resource
        Who sends.
    """

    def __init__(self, telemetry: Telemetry, secrets: Secrets, resource: Resource) -> None:
        self._endpoint = telemetry.otlp_endpoint
        self._resource = resource
        self._scope = InstrumentationScope("quantdrift")
        self._exporter = OTLPLogExporter(
            endpoint=telemetry.otlp_endpoint, headers=grpc_headers(secrets), timeout=TIMEOUT_S
        )

    def send(self, event: WaitingEvent) -> str:
        """Return an empty text if the collector took the event, else why not."""
        record = ReadableLogRecord(
            log_record=log_record(event), resource=self._resource, instrumentation_scope=self._scope
        )
        if self._exporter.export([record]) is LogRecordExportResult.SUCCESS:
            return ""
        return f"{self._endpoint} did not take it"

    def close(self) -> None:
        """Give up what is going on."""
        self._exporter.shutdown()


class OutboxSender:
    """Empties the outbox.

    Parameters
    ----------
    database
        The record.
    exporter
        What sends.
    """

    def __init__(self, database: Database, exporter: EventExporter) -> None:
        self._database = database
        self._exporter = exporter
        self._n_probes = 0
        self.n_waiting = 0

    async def send_waiting(self) -> tuple[int, bool]:
        """Send what waits; return how many were taken, and whether the collector seems to be away.

        Raises
        ------
        RetryError
            Postgres is away. An event that the collector took just before is sent again: at least once.
        """
        async with self._database.begin() as connection:
            waiting = await unsent(connection, _AT_ONCE)
        sent, away = 0, False
        while waiting and not away:
            event = waiting.pop(0)
            error = await self._send(event)
            if error:
                self._n_probes += 1
                probe = waiting.pop(self._n_probes % len(waiting)) if waiting else None
                away = probe is None or bool(await self._send(probe))
                if not away:
                    sent += 1
                    error = await self._send(event)
            if error:
                async with self._database.begin() as connection:
                    await mark_failed(connection, event.id, error, refused=not away)
            else:
                sent += 1
        async with self._database.begin() as connection:
            self.n_waiting = await count_unsent(connection)
        return sent, away

    async def _send(self, event: WaitingEvent) -> str:
        """Return an empty text if the collector took the event, which is then noted, else why not."""
        error = await asyncio.to_thread(self._exporter.send, event)
        if not error:
            async with self._database.begin() as connection:
                await mark_sent(connection, event.id)
        return error


def log_record(event: WaitingEvent) -> LogRecord:
    """Return the OpenTelemetry event: a name without dynamic parts, flat attributes, the text for display only."""
    if event.exceeds is not None:
        severity = SeverityNumber.WARN if event.exceeds else SeverityNumber.INFO
    else:
        assert event.to_verdict is not None
        severity = _SEVERITY.get(event.to_verdict, SeverityNumber.INFO)
    return LogRecord(
        timestamp=event.at_us * 1000,
        severity_number=severity,
        severity_text=severity.name,
        body=_text(event),
        attributes={f"quantdrift.{name}": value for name, value in event.details.items()},
        event_name=EVENT_NAME if event.exceeds is None else NOISE_EVENT_NAME,
    )


def _text(event: WaitingEvent) -> str:
    if event.exceeds is not None:
        return noise_summary(event.details)
    try:
        return summary(msgspec.convert(event.details, AlertEvent))
    except msgspec.ValidationError:  # written by a release that told less: its attributes say what they say
        return f"{event.from_verdict} -> {event.to_verdict}"
