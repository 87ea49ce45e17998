"""What production traces show of quantdrift: spans of replays that link to them, and evaluations of generated answers.

A production trace thus shows whether and when its request was replayed, and whether its answer changed. A span or an evaluation
may be dropped: the pipeline never waits for a collector.
"""

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, Self

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

from quantdrift.core.config import Secrets
from quantdrift.core.config.schema import TelemetryOptions
from quantdrift.core.telemetry import otlp_exporter
from quantdrift.shadow.pipeline.genai import genai_attributes, usage_attributes
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.storage.comparisons.rows import ComparedExchange, ComparedItem

NAME = "quantdrift.replay"
EVALUATION: Final = "gen_ai.evaluation.result"
"""Name of the events of OpenTelemetry's conventions for generative AI, https://github.com/open-telemetry/semantic-conventions-genai."""
MOST_LINKS = 128  # of a span; the SDK's limit
_TIMEOUT_S = 5.0
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


class Spans(Protocol):
    """Records replays as spans. It never waits and never raises."""

    def replayed(self, prepared: Sequence[PreparedExchange], begin_ns: int, end_ns: int) -> None:
        """Record the replay of a batch; both times are in nanoseconds since 1970."""

    def compared(self, exchanges: Iterable[ComparedExchange]) -> None:
        """Record whether generated answers changed, and how far they are from the reference."""

    def close(self) -> None:
        """Send the spans that wait; takes a few seconds at most."""


class NoSpans:
    """Records nothing: no collector is configured."""

    def replayed(self, prepared: Sequence[PreparedExchange], begin_ns: int, end_ns: int) -> None:
        """Do nothing."""

    def compared(self, exchanges: Iterable[ComparedExchange]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class OtlpSpans:
    """Sends one span for each candidate version of a batch to an OpenTelemetry collector over gRPC, and evaluations if they are wanted.

    Parameters
    ----------
    evaluations
        Sends `gen_ai.evaluation.result`; None: nobody asked for it.
    """

    def __init__(self, provider: TracerProvider, evaluations: LoggerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("quantdrift")
        self._log_provider = evaluations
        self._logger = None if evaluations is None else evaluations.get_logger("quantdrift")

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
        if not telemetry.evaluations:
            return cls(provider)
        from opentelemetry.exporter.otlp.proto.grpc._log_exporter import (  # noqa: PLC0415 - an extra
            OTLPLogExporter,
        )

        evaluations = LoggerProvider(resource=resource, shutdown_on_exit=False)
        log_exporter = otlp_exporter(OTLPLogExporter, telemetry, secrets, timeout_s=_TIMEOUT_S)
        evaluations.add_log_record_processor(
            # A single batch: at the end a collector that does not answer is waited for once.
            BatchLogRecordProcessor(log_exporter, max_queue_size=512, max_export_batch_size=512)
        )
        return cls(provider, evaluations)

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

    def compared(self, exchanges: Iterable[ComparedExchange]) -> None:
        """Send an event for each measure of each generated answer whose request had a trace, as a child of its span."""
        if self._logger is None:
            return
        for compared in exchanges:
            exchange = compared.exchange
            genai = genai_attributes(exchange)
            parent = _context(exchange.trace)
            if not genai or (parent is None and not exchange.response_id):
                continue
            subject: dict[str, Any] = {
                **genai,
                **usage_attributes(exchange),
                **({"gen_ai.response.id": exchange.response_id} if exchange.response_id else {}),
                "quantdrift.model": exchange.model,
                "quantdrift.version": exchange.version,
                "quantdrift.exchange": exchange.id,
            }
            for item in compared.items:
                for evaluation in _evaluations(item):
                    self._logger.emit(
                        LogRecord(
                            timestamp=time.time_ns(),
                            context=Context()
                            if parent is None
                            else set_span_in_context(NonRecordingSpan(parent)),
                            severity_number=SeverityNumber.INFO,
                            event_name=EVALUATION,
                            attributes=subject | evaluation,
                        )
                    )

    def close(self) -> None:
        """Send what waits; takes a few seconds at most."""
        self._provider.force_flush(int(_TIMEOUT_S * 1000))
        self._provider.shutdown()
        if self._log_provider is not None:
            self._log_provider.shutdown()


def _evaluations(item: ComparedItem) -> Iterator[dict[str, Any]]:
    if item.flip is not None:
        yield {
            "gen_ai.evaluation.name": "quantdrift.changed",
            "gen_ai.evaluation.score.value": float(item.flip),
            "gen_ai.evaluation.score.label": "changed" if item.flip else "same",
        }
    if item.divergence is not None and math.isfinite(item.divergence):
        yield {
            "gen_ai.evaluation.name": "quantdrift.divergence",
            "gen_ai.evaluation.score.value": item.divergence,
        }


def _links(prepared: Iterable[PreparedExchange]) -> Iterator[Link]:
    n_links = 0
    for entry in prepared:
        context = _context(entry.exchange.trace)
        if context is not None and n_links < MOST_LINKS:
            n_links += 1
            yield Link(context, {"quantdrift.exchange": entry.exchange.id})


def _context(trace: str) -> SpanContext | None:
    """Return the span that a `traceparent` names; None where it names none."""
    match = _TRACEPARENT.fullmatch(trace)
    if match is None:
        return None
    context = SpanContext(
        trace_id=int(match[1], 16),
        span_id=int(match[2], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match[3], 16)),
    )
    return context if context.is_valid else None
