"""Every instrument of quantdrift, declared once: name, unit and meaning.

Names carry no unit and no `_total`; units are UCUM. A pure number has an annotation (`{verdict}`) for its unit, not
`1`: of that some ways into Prometheus make a suffix `_ratio`, and others none. A role asks for its instruments here and nowhere else.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource

from quantdrift.core.config.load import Secrets


class Kind(StrEnum):
    """How an instrument is fed."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    OBSERVED_COUNTER = "observed counter"
    OBSERVED_GAUGE = "observed gauge"


class Instrument(msgspec.Struct, frozen=True):
    """A declaration."""

    name: str
    kind: Kind
    unit: str
    description: str


_C, _H, _OC, _OG = Kind.COUNTER, Kind.HISTOGRAM, Kind.OBSERVED_COUNTER, Kind.OBSERVED_GAUGE

# The sidecar: read from the shared counters.
OFFERED = Instrument("quantdrift.sidecar.offered", _OC, "{request}", "Inference requests seen, by stratum.")
TAKEN = Instrument(
    "quantdrift.sidecar.taken", _OC, "{request}", "Chosen by the first sampling phase, by stratum."
)
THINNED = Instrument(
    "quantdrift.sidecar.thinned", _OC, "{request}", "Let go by the second phase, by stratum."
)
PUBLISHED = Instrument(
    "quantdrift.sidecar.published", _OC, "{request}", "Acknowledged by the stream, by stratum."
)
LOST = Instrument(
    "quantdrift.sidecar.lost", _OC, "{request}", "Taken but lost, by stratum, model and reason."
)
IGNORED = Instrument(
    "quantdrift.sidecar.ignored", _OC, "{request}", "Requests that are no inference, or quantdrift's own."
)
EARLY = Instrument(
    "quantdrift.sidecar.early", _OC, "{request}", "Calls of taps before they knew any rates: not taken in."
)
INTAKE_REFUSED = Instrument(
    "quantdrift.sidecar.intake.refused",
    _OC,
    "{call}",
    "Calls of the intake that are refused, by reason: no_token, wrong_token, or off for a way in that is not on.",
)
CONNECTIONS = Instrument("quantdrift.sidecar.connections", _OC, "{connection}", "Connections accepted.")
OPEN_CONNECTIONS = Instrument(
    "quantdrift.sidecar.open_connections", _OG, "{connection}", "Connections open now."
)
BLIND = Instrument(
    "quantdrift.sidecar.blind_connections", _OC, "{connection}", "Connections no longer observed."
)
UNOBSERVED = Instrument(
    "quantdrift.sidecar.unobserved_connections",
    _OC,
    "{connection}",
    "Connections beyond sidecar.max_connections: relayed, not observed.",
)
ACCEPT_PAUSES = Instrument(
    "quantdrift.sidecar.accept_pauses",
    _OC,
    "{pause}",
    "Times that clients waited to be accepted because a relay worker had no files left.",
)
SLOW = Instrument(
    "quantdrift.sidecar.slow_peers", _OG, "{peer}", "Clients and backend connections that do not read now."
)
BACKEND_FAILED = Instrument(
    "quantdrift.sidecar.backend_failures", _OC, "{connection}", "Connections the backend did not accept."
)
OBSERVER_ERRORS = Instrument(
    "quantdrift.sidecar.observer_errors", _OC, "{error}", "Times an observer raised."
)
FORWARDED = Instrument("quantdrift.sidecar.forwarded", _OC, "By", "Bytes passed through, both directions.")
HELD = Instrument("quantdrift.sidecar.held", _OG, "By", "Held for unfinished exchanges.")
QUEUED = Instrument("quantdrift.sidecar.queued", _OG, "By", "Waiting for hand-off or for the stream.")
QUEUE_LIMIT = Instrument("quantdrift.sidecar.queue_limit", _OG, "By", "Bound of what may be held and wait.")
RESTARTS = Instrument("quantdrift.sidecar.restarts", _C, "{restart}", "Children started anew, by child.")
PAUSED = Instrument(
    "quantdrift.sidecar.paused", _OG, "{pause}", "1 while sampling is paused: of everything, or of a model."
)
RELOADS = Instrument(
    "quantdrift.sidecar.reloads", _C, "{reload}", "Changed configurations, by result: taken_over or refused."
)
POLICY_CENTRAL = Instrument(
    "quantdrift.sidecar.policy.central",
    _OG,
    "{policy}",
    "1 while the monitor's sampling policy is followed, 0 while the configuration's rates hold.",
)
POLICY_AGE = Instrument(
    "quantdrift.sidecar.policy.age",
    _OG,
    "s",
    "Age of the monitor's policy that is followed; absent while the configuration's rates hold.",
)
POLICY_CHANGES = Instrument(
    "quantdrift.sidecar.policy.changes", _OC, "{change}", "Times that other rates came into force."
)
POLICY_REFUSED = Instrument(
    "quantdrift.sidecar.policy.refused",
    _OC,
    "{policy}",
    "Policies of the monitor that are not followed, by reason.",
)

# The shadow.
COMPARED = Instrument(
    "quantdrift.shadow.compared", _C, "{exchange}", "Exchanges compared and stored, by model."
)
SKIPPED = Instrument(
    "quantdrift.shadow.skipped", _C, "{exchange}", "Read but not compared, by model and reason."
)
EXPIRED = Instrument(
    "quantdrift.shadow.expired",
    _C,
    "{exchange}",
    "Expired in the stream before they were replayed, by model and stratum, as this worker found.",
)
REPLAY_TIME = Instrument("quantdrift.shadow.replay.duration", _H, "s", "Time of one replay batch, by model.")
STEP_TIME = Instrument(
    "quantdrift.shadow.step.duration",
    _H,
    "s",
    "Time of one batch in each step, from pull to acknowledge, by step.",
)
BATCH_ITEMS = Instrument(
    "quantdrift.shadow.batch.items", _H, "{item}", "Items in one replay batch, by model."
)
STALENESS = Instrument("quantdrift.shadow.staleness", _H, "s", "From capture to stored comparison, by model.")
STORE_ERRORS = Instrument(
    "quantdrift.shadow.store_errors", _C, "{error}", "Transactions that will be tried again."
)
SLICE_OVERFLOW = Instrument(
    "quantdrift.shadow.slice_overflow",
    _C,
    "{item}",
    "Items in `other`: more values than max_values, by model.",
)
CANARIES = Instrument(
    "quantdrift.shadow.canary_checks",
    _C,
    "{check}",
    "Times a reference was held to its canaries, by model and outcome: reproduced or failed.",
)

VECTORS = Instrument(
    "quantdrift.shadow.vectors",
    _C,
    "{vector}",
    "Vectors chosen for learned slices, by model and outcome: stored, over_cap or failed.",
)
OWN_ANSWERS = Instrument(
    "quantdrift.shadow.own_answers",
    _C,
    "{answer}",
    "Answers that a reference was to give itself, by model and outcome: done, unforced, unable, late or failed.",
)
NOISE_ITEMS = Instrument(
    "quantdrift.shadow.noise",
    _C,
    "{item}",
    "Items chosen to be computed again, by model, side and outcome: measured, failed or left_out.",
)
DOUBTS = Instrument(
    "quantdrift.shadow.doubts",
    _C,
    "{doubt}",
    "Options that a reference's outputs speak against, once each, by model and option; the log says why.",
)

# The monitor.
FOLDED = Instrument("quantdrift.monitor.folded", _C, "{batch}", "Batches folded.")
FOLD_TIME = Instrument("quantdrift.monitor.fold.duration", _H, "s", "Time of one fold.")
LEADER = Instrument("quantdrift.monitor.leader", _OG, "{leader}", "1 where this process leads, else 0.")
EVENTS_SENT = Instrument("quantdrift.monitor.events", _C, "{event}", "Alert events the collector took.")
EVENTS_FAILED = Instrument(
    "quantdrift.monitor.event_failures", _C, "{event}", "Exports that will be tried again."
)
EXPLANATIONS = Instrument(
    "quantdrift.monitor.explanations",
    _C,
    "{alert}",
    "Alerts that were to be explained, by outcome: explained, late, failed or left_out; all of them go out.",
)
OUTBOX = Instrument("quantdrift.monitor.outbox", _OG, "{event}", "Events waiting for the collector.")
PROGRESS_AGE = Instrument(
    "quantdrift.progress.age",
    _OG,
    "s",
    "Age of the last folded capture, by model: the heartbeat to alert on.",
)
VERDICT = Instrument(
    "quantdrift.slice.verdict",
    _OG,
    "{verdict}",
    "0 ok, 1 unknown, 2 warning, 3 firing, by model, version and slice.",
)
EVIDENCE = Instrument(
    "quantdrift.slice.evidence",
    _OG,
    "{threshold}",
    "Evidence over its paging threshold: 1 pages, by model, version, slice.",
)
DIVERGENCE = Instrument(
    "quantdrift.slice.divergence",
    _OG,
    "{divergence}",
    "Mean divergence of the recent window, by model, version, slice, metric.",
)
NOISE = Instrument(
    "quantdrift.noise.high",
    _OG,
    "{budget}",
    "Upper bound of the mean noise over the budget, by model, version, side (reference or candidate) and metric.",
)
NOISY = Instrument(
    "quantdrift.noise.exceeded",
    _OG,
    "{side}",
    "1 while noise is shown to be above monitor.noise_bound of the budget, by model, version, side and metric.",
)
SLICES_LEFT_OUT = Instrument(
    "quantdrift.slice.left_out", _OG, "{slice}", "Slices not exported because of telemetry.max_slices."
)

# The sampling policy, made by the leading monitor.
POLICY_PUBLISHED = Instrument(
    "quantdrift.monitor.policy.published",
    _C,
    "{policy}",
    "Policies given to the sidecars, confirmations included.",
)
LAG_FACTOR = Instrument(
    "quantdrift.monitor.policy.lag_factor",
    _OG,
    "{rate}",
    "What every sampling rate is multiplied by because the shadow lags: 1 is not at all.",
)
STREAM_LOAD = Instrument(
    "quantdrift.monitor.stream.load",
    _OG,
    "{limit}",
    "Share of the stream's limits that is used or about to be; at 0.5 the rates are halved.",
)
REPLAYS_PLANNED = Instrument(
    "quantdrift.monitor.replays.planned", _OG, "{item}", "Items per second that the policy means to replay."
)
REPLAYS_MEASURED = Instrument(
    "quantdrift.monitor.replays.measured",
    _OG,
    "{item}",
    "Items per second that were replayed and stored lately.",
)

# The search for slices.
SEARCH_TIME = Instrument(
    "quantdrift.discovery.duration", _H, "s", "Time of one round of searches and of tests of candidates."
)
DISCOVERED = Instrument(
    "quantdrift.discovery.slices", _C, "{slice}", "Discovered slices, by model and what became of them."
)
DISCOVERY_OVERFLOW = Instrument(
    "quantdrift.discovery.overflow",
    _C,
    "{slice}",
    "What a limit of [discovery] left out or keeps waiting: slices, conditions, and items of policies that are gone.",
)

Labels = Mapping[str, str]
Read = Callable[[], Iterable[tuple[float, Labels]]]


class Telemetry:
    """A role's meter.

    Parameters
    ----------
    service
        `service.name`, e.g. `quantdrift-shadow`.
    resource
        More resource attributes.
    readers
        Exporting readers beside Prometheus.
    """

    def __init__(self, service: str, resource: Labels, readers: Sequence[MetricReader] = ()) -> None:
        self.resource = Resource.create({"service.name": service, **resource})
        self._provider = MeterProvider(
            metric_readers=[PrometheusMetricReader(), *readers],
            resource=self.resource,
            shutdown_on_exit=False,
        )
        self._meter: Meter = self._provider.get_meter("quantdrift")

    def counter(self, instrument: Instrument) -> Counter:
        """Return the counter that `instrument` declares."""
        _expect(instrument, Kind.COUNTER)
        return self._meter.create_counter(instrument.name, instrument.unit, instrument.description)

    def histogram(self, instrument: Instrument) -> Histogram:
        """Return the histogram that `instrument` declares."""
        _expect(instrument, Kind.HISTOGRAM)
        return self._meter.create_histogram(instrument.name, instrument.unit, instrument.description)

    def observe(self, instrument: Instrument, read: Read) -> None:
        """Have `read` called at each collection; it yields values with their attributes."""

        def callback(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, dict(labels)) for value, labels in read()]

        if instrument.kind is Kind.OBSERVED_COUNTER:
            self._meter.create_observable_counter(
                instrument.name, [callback], instrument.unit, instrument.description
            )
        else:
            _expect(instrument, Kind.OBSERVED_GAUGE)
            self._meter.create_observable_gauge(
                instrument.name, [callback], instrument.unit, instrument.description
            )

    def close(self) -> None:
        """Export what is left and end."""
        self._provider.shutdown()


def _expect(instrument: Instrument, kind: Kind) -> None:
    if instrument.kind is not kind:
        raise TypeError(f"{instrument.name} is declared as a {instrument.kind}")


def grpc_headers(secrets: Secrets) -> dict[str, str]:
    """Return the collector's headers as gRPC wants them: names in lower case."""
    return {name.lower(): value for name, value in secrets.otlp_headers.items()}
