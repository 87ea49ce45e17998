"""The instruments for whoever operates the processes: published by model, ages of queues, stages and the outbox."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Config, Model, SamplingOptions
from quantdrift.core.records import Latency, Protocol
from quantdrift.core.telemetry import Telemetry
from quantdrift.monitor.gauges import SliceGauges
from quantdrift.shadow.pipeline.metrics import MOST_VERSIONS, BatchStep, ShadowMetrics
from quantdrift.sidecar.admin import observe
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import MAX_ROWS, Count, Counters, Gauge
from quantdrift.storage.comparisons.rows import ComparedExchange, StoreBatch, VersionKey, Written
from quantdrift.storage.fold_rows import ShardState
from tests.support.shadow.onnx_models import exchange_of, inputs_of

pytestmark = pytest.mark.unit

Readings = dict[str, dict[tuple[str, ...], float]]


class Meter:
    """A meter whose instruments a test reads."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.telemetry = Telemetry("test", [self._reader])

    def read(self) -> Readings:
        """Return each instrument's values by their attributes."""
        data = self._reader.get_metrics_data()
        assert data is not None
        return {
            metric.name: {
                tuple(str(value) for value in (point.attributes or {}).values()): (
                    point.count if isinstance(point, HistogramDataPoint) else point.value
                )
                for point in metric.data.data_points
                if isinstance(point, HistogramDataPoint | NumberDataPoint)
            }
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def meter() -> Iterator[Meter]:
    """Return a meter of the test's own."""
    meter = Meter()
    yield meter
    meter.telemetry.close()


@pytest.fixture
def clock() -> ManualClock:
    """Return a clock that stands."""
    return ManualClock(datetime(2026, 3, 1, tzinfo=UTC))


def test_published_exchanges_are_counted_by_model_and_the_oldest_that_waits_has_an_age(
    meter: Meter, clock: ManualClock
) -> None:
    """They can be compared with what the shadow counts by model; their sum by stratum is what it was."""
    live = LiveConfig.of(
        Config(sampling=SamplingOptions(rate=1.0), models=(Model(name="a"), Model(name="b")))
    )
    counters = Counters.create(1, MAX_ROWS)
    slot = counters.slot(0)
    observe(meter.telemetry, counters, lambda: live, clock)
    rows = live.rows_by_model
    for model, n in (("a", 3), ("b", 2), ("", 1)):
        slot.add(rows[model][0], Count.TAKEN, n)
        slot.add(rows[model][0], Count.PUBLISHED, n)
    assert meter.read()["quantdrift.sidecar.published"] == {
        ("default", "a"): 3,
        ("default", "b"): 2,
        ("default", ""): 1,
    }
    assert meter.read()["quantdrift.sidecar.queue.age"] == {(): 0}
    slot.set(Gauge.QUEUED_SINCE_S, int(clock.now().timestamp()))
    clock.advance(7)
    assert meter.read()["quantdrift.sidecar.queue.age"] == {(): 7}


def test_a_worker_says_how_many_models_it_reads(meter: Meter, clock: ManualClock) -> None:
    """Those that it leaves to other workers are not among them."""
    metrics = ShadowMetrics(meter.telemetry, clock)
    for model in ("a", "b"):
        metrics.reads(model, does=True)
    metrics.reads("a", does=False)
    assert meter.read()["quantdrift.shadow.models_read"] == {(): 1}


def test_the_oldest_batch_of_each_stage_has_an_age(meter: Meter, clock: ManualClock) -> None:
    """A batch that hangs in a stage is seen while it hangs, not only after it has ended."""
    metrics = ShadowMetrics(meter.telemetry, clock)
    metrics.entered(1, BatchStep.ASSEMBLE)
    clock.advance(2)
    metrics.entered(1, BatchStep.REPLAY)
    metrics.entered(2, BatchStep.REPLAY)
    clock.advance(5)
    metrics.entered(2, BatchStep.STORE)
    clock.advance(1)
    ages = {"assemble": 0, "replay": 6, "compare": 0, "store": 1}
    assert meter.read()["quantdrift.shadow.stage.age"] == {(stage,): age for stage, age in ages.items()}
    metrics.left(1)
    metrics.left(2)
    assert set(meter.read()["quantdrift.shadow.stage.age"].values()) == {0}


def test_the_times_of_answers_are_histograms_by_model_and_version(clock: ManualClock) -> None:
    """In buckets that tell milliseconds apart, and for a bounded number of versions: clients may choose them."""
    reader = InMemoryMetricReader()
    telemetry = Telemetry("test", [reader])
    metrics = ShadowMetrics(telemetry, clock)
    took = Latency(last_byte_s=0.004, first_token_s=0.002)
    compared = [answered(str(n), took) for n in range(MOST_VERSIONS + 5)] + [answered("0", None)]
    batch = StoreBatch(worker="w", at=clock.now(), compared=tuple(compared))
    metrics.stored(batch, Written(n_rows=len(compared)))
    data = reader.get_metrics_data()
    assert data is not None
    found: dict[str, dict[object, HistogramDataPoint]] = {
        metric.name: {
            (point.attributes or {})["version"]: point
            for point in metric.data.data_points
            if isinstance(point, HistogramDataPoint)
        }
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        if metric.name.startswith("quantdrift.candidate")
    }
    telemetry.close()
    assert found.keys() == {"quantdrift.candidate.latency", "quantdrift.candidate.first_token"}
    of_version = found["quantdrift.candidate.latency"]
    assert len(of_version) == MOST_VERSIONS + 1
    assert (of_version["0"].count, of_version["(other)"].count) == (1, 5)
    assert [end for end in of_version["0"].explicit_bounds if 0.002 < end < 0.006] == [0.0025, 0.005]


def test_the_times_of_streams_of_text_have_the_names_of_the_conventions(
    meter: Meter, clock: ManualClock
) -> None:
    """By operation, provider and model, so that dashboards of language models show them; other protocols have none."""
    metrics = ShadowMetrics(meter.telemetry, clock)
    took = Latency(last_byte_s=1.5, first_token_s=0.5, per_token_s=0.25)
    other = answered("1", took)
    text = msgspec.structs.replace(
        other, exchange=msgspec.structs.replace(other.exchange, protocol=Protocol.ANTHROPIC_MESSAGES)
    )
    metrics.stored(StoreBatch(worker="w", at=clock.now(), compared=(other, text)), Written(n_rows=2))
    found = meter.read()
    labels = ("chat", "anthropic", text.exchange.model)
    assert found["gen_ai.server.time_to_first_token"] == {labels: 1}
    assert found["gen_ai.server.time_per_output_token"] == {labels: 1}


def answered(version: str, took: Latency | None) -> ComparedExchange:
    """Return a compared exchange of a version that the candidate took so long for."""
    exchange = msgspec.structs.replace(exchange_of(inputs_of(1), version=version), latency=took)
    return ComparedExchange(
        stream_sequence=1,
        payload=b"",
        exchange=exchange,
        version=VersionKey(model=exchange.model, candidate_version=version, reference_digest="r"),
        items=(),
    )


def test_the_oldest_event_that_waits_has_an_age_at_the_leader(meter: Meter, clock: ManualClock) -> None:
    """A collector that is away for long shows as an age; a standby shows nothing of the outbox, and 0 as leader."""
    gauges = SliceGauges(clock, 10)
    gauges.register(meter.telemetry)
    found = meter.read()
    assert found["quantdrift.monitor.leader"] == {(): 0}
    assert "quantdrift.monitor.outbox.age" not in found
    gauges.leads, gauges.n_waiting, gauges.oldest_waiting = True, 4, clock.now() - timedelta(minutes=5)
    found = meter.read()
    assert found["quantdrift.monitor.leader"] == {(): 1}
    assert found["quantdrift.monitor.outbox"] == {(): 4}
    assert found["quantdrift.monitor.outbox.age"] == {(): 300}
    gauges.n_waiting, gauges.oldest_waiting = 0, None
    assert meter.read()["quantdrift.monitor.outbox.age"] == {(): 0}


def test_what_waits_for_the_fold_has_a_number_and_an_age_at_the_leader(
    meter: Meter, clock: ManualClock
) -> None:
    """A leader that does not keep up is seen before its verdicts are half an hour old."""
    gauges = SliceGauges(clock, 10)
    gauges.register(meter.telemetry)
    gauges.shards = (
        ShardState(number=0, holder="one", n_unfolded=7, oldest=clock.now() - timedelta(minutes=2)),
        ShardState(number=1),
    )
    assert "quantdrift.monitor.unfolded" not in meter.read()
    gauges.leads = True
    found = meter.read()
    first, second = ("0",), ("1",)
    assert found["quantdrift.monitor.unfolded"] == {first: 7, second: 0}
    assert found["quantdrift.monitor.unfolded.age"] == {first: 120, second: 0}
    assert found["quantdrift.monitor.shard.held"] == {first: 1, second: 0}


def test_every_process_has_an_instance_of_its_own(meter: Meter) -> None:
    """Two monitors that export to one collector do not overwrite each other's gauges."""
    assert str(meter.telemetry.resource.attributes["service.instance.id"]).count(":") == 1
