"""A small OTLP collector: takes logs, metrics and spans over gRPC and keeps them in memory.

It stands where a real OpenTelemetry collector would: `python -m quantdrift.demo.otlp_receiver 127.0.0.1:4317` prints
every alert event that it is sent.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, Self

import grpc
import msgspec
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One log event as it came over the wire.

    Parameters
    ----------
    name
        Its `event_name`.
    severity
        OpenTelemetry severity number: 9 INFO, 13 WARN, 17 ERROR.
    body
        Text for people.
    time_unix_nano
        When it happened, in nanoseconds since 1970.
    attributes, resource
        Flat attributes of the event and of who sent it.
    parent
        Trace id and span id that it belongs to, in hexadecimal digits; empty: none.
    """

    name: str
    severity: int
    body: str
    time_unix_nano: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    parent: tuple[str, str] = ("", "")


class DataPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One data point of a gauge or a sum.

    Parameters
    ----------
    name
        The instrument.
    value
        The reading.
    attributes, resource
        Flat attributes of the reading and of who sent it.
    """

    name: str
    value: float
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """One span.

    Parameters
    ----------
    name
        Of the span.
    links
        Trace ids, in hexadecimal digits, of the spans that it is linked to.
    seconds
        How long it took.
    attributes
        Flat.
    """

    name: str
    links: tuple[str, ...]
    seconds: float
    attributes: dict[str, Any]


class OtlpReceiver:
    """A gRPC server for OTLP logs, metrics and spans.

    `events`, `metrics` and `spans` only grow; they may be read from any thread. Used as a context manager it listens
    inside the block.

    Parameters
    ----------
    address
        HOST:PORT; port 0 takes a free one, which `port` and `endpoint` say after `start`.
    on_event
        Called with each event, on a thread of the server.
    """

    def __init__(self, address: str = "127.0.0.1:0", on_event: Callable[[Event], None] | None = None) -> None:
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.events: list[Event] = []
        self.metrics: list[DataPoint] = []
        self.spans: list[Replay] = []
        self._on_event = on_event
        self._changed = threading.Condition()
        self._server: Any = None

    @property
    def endpoint(self) -> str:
        """What `telemetry.otlp_endpoint` must say."""
        return f"http://{self.host}:{self.port}"

    def start(self) -> Self:
        """Open the port; a receiver that was stopped opens the same one again."""
        # Without port sharing a port that is taken is an error instead of half of the traffic.
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=4), options=(("grpc.so_reuseport", 0),)
        )
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(  # type: ignore[no-untyped-call]
            _Logs(self), self._server
        )
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(  # type: ignore[no-untyped-call]
            _Metrics(self), self._server
        )
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            _Traces(self), self._server
        )
        self.port = self._server.add_insecure_port(f"{self.host}:{self.port}")
        self._server.start()
        return self

    def stop(self) -> None:
        """Close the port. What was received stays."""
        if self._server is not None:
            self._server.stop(grace=None).wait()
            self._server = None

    def wait_for(self, predicate: Callable[["OtlpReceiver"], bool], timeout: float) -> bool:
        """Wait until `predicate(self)` holds or `timeout` seconds passed; return whether it holds."""
        with self._changed:
            return self._changed.wait_for(lambda: predicate(self), timeout)

    def take(
        self, events: Sequence[Event] = (), points: Sequence[DataPoint] = (), spans: Sequence[Replay] = ()
    ) -> None:
        """Keep what came in and wake those who wait."""
        with self._changed:
            self.events.extend(events)
            self.metrics.extend(points)
            self.spans.extend(spans)
            self._changed.notify_all()
        if self._on_event is not None:
            for event in events:
                self._on_event(event)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Logs(logs_service_pb2_grpc.LogsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the generated interface
        events = [
            Event(
                name=record.event_name,
                severity=record.severity_number,
                body=record.body.string_value,
                time_unix_nano=record.time_unix_nano,
                attributes=_plain(record.attributes),
                resource=_plain(group.resource.attributes),
                parent=(record.trace_id.hex(), record.span_id.hex()),
            )
            for group in request.resource_logs
            for scope in group.scope_logs
            for record in scope.log_records
        ]
        self._receiver.take(events)
        return logs_service_pb2.ExportLogsServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the generated interface
        points = [
            DataPoint(
                name=metric.name,
                value=point.as_double if point.HasField("as_double") else float(point.as_int),
                attributes=_plain(point.attributes),
                resource=_plain(group.resource.attributes),
            )
            for group in request.resource_metrics
            for scope in group.scope_metrics
            for metric in scope.metrics
            for point in (*metric.gauge.data_points, *metric.sum.data_points)
        ]
        self._receiver.take(points=points)
        return metrics_service_pb2.ExportMetricsServiceResponse()


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the generated interface
        spans = [
            Replay(
                name=span.name,
                links=tuple(link.trace_id.hex() for link in span.links),
                seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                attributes=_plain(span.attributes),
            )
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        self._receiver.take(spans=spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(entry) for entry in value.array_value.values]
    return getattr(value, kind) if kind else None


def main() -> int:
    """Print every event until interrupted."""
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:4317"
    with OtlpReceiver(address, lambda event: print(event.severity, event.body, event.attributes)) as receiver:
        print(f"listening on {receiver.endpoint}")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
