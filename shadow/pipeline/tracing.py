"""OpenTelemetry spans of replays, linked to the production traces of their exchanges.

A production trace thus shows whether and when its request was replayed. A span may be dropped: the pipeline never waits
for a collector.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Protocol, Self

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags

from quantdrift.core.config import Secrets
from quantdrift.core.config.schema import TelemetryOptions
from quantdrift.core.telemetry import otlp_exporter
from quantdrift.shadow.replay.exchange import PreparedExchange

NAME = "quantdrift.replay"
MOST_LINKS = 128  # of a span; the SDK's limit
_TIMEOUT_S = 5.0
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


class Spans(Protocol):
    """Records replays as spans. It never waits and never raises."""

    def replayed(self, prepared: Sequence[PreparedExchange], begin_ns: int, end_ns: int) -> None:
        """Record the replay of a batch; both times are in nanoseconds since 1970."""

    def close(self) -> None:
        """Send the spans that wait; takes a few seconds at most."""


class NoSpans:
    """Records nothing: no collector is configured."""

    def replayed(self, prepared: Sequence[PreparedExchange], begin_ns: int, end_ns: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class OtlpSpans:
    """Sends one span for each candidate version of a batch to an OpenTelemetry collector over gRPC."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("quantdrift")

    @classmethod
    def to(cls, telemetry: TelemetryOptions, secrets: Secrets, resource: Resource) -> Self:
        """Return a recorder that sends to the configured collector; `secrets` holds its headers (tokens)."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415 - an extra
            OTLPSpanExporter,
        )

        exporter = otlp_exporter(OTLPSpanExporter, telemetry, secrets, timeout_s=_TIMEOUT_S)
        provider = TracerProvider(resource=resource, sampler=ALWAYS_ON, shutdown_on_exit=False)
        provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=256, max_export_batch_size=64)
        )
        return cls(provider)

    def replayed(self, prepared: Sequence[PreparedExchange], begin_ns: int, end_ns: int) -> None:
        """Send a span for each candidate version in the batch, linked to the traces of its exchanges."""
        versions = dict.fromkeys((entry.exchange.model, entry.exchange.version) for entry in prepared)
        for model, version in versions:
            of_version = [
                entry
                for entry in prepared
                if (entry.exchange.model, entry.exchange.version) == (model, version)
            ]
            span = self._tracer.start_span(
                NAME,
                kind=SpanKind.CONSUMER,
                links=list(_links(of_version)),
                start_time=begin_ns,
                attributes={
                    "quantdrift.model": model,
                    "quantdrift.version": version,
                    "quantdrift.exchanges": len(of_version),
                    "quantdrift.items": sum(entry.n_items for entry in of_version),
                },
            )
            span.end(end_ns)

    def close(self) -> None:
        """Send the spans that wait; takes a few seconds at most."""
        self._provider.force_flush(int(_TIMEOUT_S * 1000))
        self._provider.shutdown()


def _links(prepared: Iterable[PreparedExchange]) -> Iterable[Link]:
    n_links = 0
    for entry in prepared:
        match = _TRACEPARENT.fullmatch(entry.exchange.trace)
        if match is None or n_links == MOST_LINKS:
            continue
        context = SpanContext(
            trace_id=int(match[1], 16),
            span_id=int(match[2], 16),
            is_remote=True,
            trace_flags=TraceFlags(int(match[3], 16)),
        )
        if context.is_valid:
            n_links += 1
            yield Link(context, {"quantdrift.exchange": entry.exchange.id})
