"""Every OpenTelemetry instrument of quantdrift: name, unit and meaning.

Names have no unit and no `_total`; units are UCUM. The unit of a pure number is an annotation (`{verdict}`), not `1`: some
Prometheus exporters turn `1` into a suffix `_ratio`, others do not. No instrument is declared anywhere else.
"""

import contextlib
import logging
import os
import socket
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource

from quantdrift.core.config.address import read_server_url
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, TelemetryOptions
from quantdrift.core.config.state import shared_digest
from quantdrift.core.errors import OperatorError
from quantdrift.core.keys import is_key_file, read_keys
from quantdrift.core.tls import Tls, certificate_ends

_LOG = logging.getLogger(__name__)


class InstrumentKind(StrEnum):
    """Kind of an instrument; an observed one is read at each collection."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    OBSERVED_COUNTER = "observed counter"
    OBSERVED_GAUGE = "observed gauge"


class Instrument(msgspec.Struct, frozen=True):
    """Declaration of an instrument."""

    name: str
    kind: InstrumentKind
    unit: str
    description: str
    buckets: tuple[float, ...] = ()


_C, _H, _OC, _OG = (
    InstrumentKind.COUNTER,
    InstrumentKind.HISTOGRAM,
    InstrumentKind.OBSERVED_COUNTER,
    InstrumentKind.OBSERVED_GAUGE,
)

# Upper ends of buckets for times of answers, in seconds: at most 1.5 to 2.5 times the one before.
_ANSWER_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 15.0, 25.0, 50.0, 100.0),
)

# The sidecar: read from the shared counters.
OFFERED = Instrument("quantdrift.sidecar.offered", _OC, "{request}", "Inference requests seen, by stratum.")
TAKEN = Instrument(
    "quantdrift.sidecar.taken", _OC, "{request}", "Requests chosen by the first sampling phase, by stratum."
)
THINNED = Instrument(
    "quantdrift.sidecar.thinned",
    _OC,
    "{request}",
    "Chosen requests that the second phase left out on purpose, by stratum.",
)
PUBLISHED = Instrument(
    "quantdrift.sidecar.published",
    _OC,
    "{request}",
    "Exchanges acknowledged by the stream, by stratum and model.",
)
LOST = Instrument(
    "quantdrift.sidecar.lost", _OC, "{request}", "Exchanges taken but lost, by stratum, model and reason."
)
IGNORED = Instrument(
    "quantdrift.sidecar.ignored",
    _OC,
    "{request}",
    "Requests that are not inference, or that quantdrift sent itself.",
)
UNKNOWN_POSTS = Instrument(
    "quantdrift.sidecar.unknown_posts",
    _OC,
    "{request}",
    "POST requests of paths that no protocol of capture.protocols decodes; part of quantdrift.sidecar.ignored.",
)
EARLY = Instrument(
    "quantdrift.sidecar.early",
    _OC,
    "{request}",
    "Calls of taps that came before any sampling rates were known; not sampled.",
)
TAP_CONNECTIONS = Instrument(
    "quantdrift.sidecar.tap.connections",
    _OC,
    "{connection}",
    "Connections of taps accepted: one for each process of a server, and one more each time that it connects again.",
)
INTAKE_REFUSED = Instrument(
    "quantdrift.sidecar.intake.refused",
    _OC,
    "{call}",
    "Calls that the intake refused, by reason: no_token, wrong_token or wrong_certificate; and exchanges of a model that the caller may not"
    " report on: model.",
)
RECHECKS = Instrument(
    "quantdrift.sidecar.rechecks",
    _OC,
    "{request}",
    "Sampled requests that quantdrift itself sent to the candidate; they are not traffic.",
)
FORGED_MARKS = Instrument(
    "quantdrift.sidecar.forged_marks",
    _OC,
    "{request}",
    "Sampled requests with the header x-quantdrift-recheck and no valid mark; they are recorded as traffic.",
)
CONNECTIONS = Instrument("quantdrift.sidecar.connections", _OC, "{connection}", "Connections accepted.")
OPEN_CONNECTIONS = Instrument(
    "quantdrift.sidecar.open_connections", _OG, "{connection}", "Connections open now."
)
BLIND = Instrument(
    "quantdrift.sidecar.blind_connections",
    _OC,
    "{connection}",
    "Connections that are relayed but no longer observed.",
)
UNOBSERVED = Instrument(
    "quantdrift.sidecar.unobserved_connections",
    _OC,
    "{connection}",
    "Connections that found sidecar.max_connections others busy: relayed, not observed.",
)
UNSEEN_REQUESTS = Instrument(
    "quantdrift.sidecar.unobserved_requests",
    _OC,
    "{request}",
    "Requests on connections that are not observed, at least: counted as offered, and lost as unobserved.",
)
ACCEPT_PAUSES = Instrument(
    "quantdrift.sidecar.accept_pauses",
    _OC,
    "{pause}",
    "Times that a relay worker ran out of file descriptors, so that clients waited to be accepted.",
)
RELAY_CPU = Instrument(
    "quantdrift.sidecar.relay.cpu",
    _OC,
    "s",
    "Processor time of the relay workers since they serve, for everything they do.",
)
SLOW = Instrument(
    "quantdrift.sidecar.slow_peers",
    _OG,
    "{peer}",
    "Clients and backend connections that currently do not read.",
)
BACKEND_FAILED = Instrument(
    "quantdrift.sidecar.backend_failures", _OC, "{connection}", "Connections that the backend did not accept."
)
OBSERVER_ERRORS = Instrument(
    "quantdrift.sidecar.observer_errors", _OC, "{error}", "Exceptions of protocol observers."
)
FORWARDED = Instrument("quantdrift.sidecar.forwarded", _OC, "By", "Bytes relayed, both directions.")
HELD = Instrument("quantdrift.sidecar.held", _OG, "By", "Memory held for unfinished exchanges.")
QUEUED = Instrument(
    "quantdrift.sidecar.queued", _OG, "By", "Data that waits for the hand-off to capture or for the stream."
)
QUEUE_LIMIT = Instrument(
    "quantdrift.sidecar.queue_limit", _OG, "By", "Limit of held and queued data together."
)
RESTARTS = Instrument(
    "quantdrift.sidecar.restarts",
    _OC,
    "{restart}",
    "Restarts of child processes, by process and reason: hung, exit_ and the exit code, or the signal that ended it.",
)
UNSTORED = Instrument(
    "quantdrift.sidecar.stream.unstored",
    _OG,
    "s",
    "Time between the first and the last exchange that NATS, though connected, did not store; 0 once it stores one.",
)
PAUSED = Instrument(
    "quantdrift.sidecar.paused", _OG, "{pause}", "1 while sampling is paused, for all models or for one."
)
RELOADS = Instrument(
    "quantdrift.sidecar.reloads",
    _OC,
    "{reload}",
    "Reloads of a changed configuration, by result: taken_over or refused.",
)
CONFIG_REFUSED = Instrument(
    "quantdrift.sidecar.config_refused",
    _OG,
    "{file}",
    "1 while the configuration files were refused: the last accepted configuration is in effect, also after a restart.",
)
POLICY_CENTRAL = Instrument(
    "quantdrift.sidecar.policy.central",
    _OG,
    "{policy}",
    "1 while the monitor's sampling policy is in effect, 0 while the configured rates are.",
)
POLICY_AGE = Instrument(
    "quantdrift.sidecar.policy.age",
    _OG,
    "s",
    "Age of the monitor's policy in effect; absent while the configured rates are in effect.",
)
POLICY_CHANGES = Instrument(
    "quantdrift.sidecar.policy.changes", _OC, "{change}", "Changes of the sampling rates in effect."
)
POLICY_REFUSED = Instrument(
    "quantdrift.sidecar.policy.refused",
    _OC,
    "{policy}",
    "Policies of the monitor that were refused, by reason.",
)

QUEUE_AGE = Instrument(
    "quantdrift.sidecar.queue.age",
    _OG,
    "s",
    "Age of the oldest exchange that waits in the capture process for the stream to acknowledge it; 0: none waits.",
)

# Sidecar, shadow and monitor.
CONFIG = Instrument(
    "quantdrift.config",
    _OG,
    "{configuration}",
    "1, with process and digest as labels: that of [sampling], [capture], [[models]] and [[slices]], which all processes must have alike.",
)

EXPORT_FAILURES = Instrument(
    "quantdrift.export.failures",
    _OC,
    "{export}",
    "Exports that the collector did not take, by signal (logs, metrics or traces); the log says why once an hour.",
)

CERTIFICATE = Instrument(
    "quantdrift.certificate.remaining",
    _OG,
    "s",
    "Time until a certificate ends, by process and option, and `server of` an option where a server has shown it; of a file of authorities the one that lasts longest. Below 0: it has ended.",
)

KEY_AGE = Instrument(
    "quantdrift.key.age",
    _OG,
    "s",
    "Time since the key in use of a key file was put to use, by process and option: a key has no end, and is replaced by `quantdrift keys rotate`.",
)

# The processes of `quantdrift up`, exported by its sidecar.
UP_RUNNING = Instrument(
    "quantdrift.up.running",
    _OG,
    "{process}",
    "1 while a process of `quantdrift up` works, else 0, by process: sidecar, postgres, nats, db upgrade, shadow, monitor.",
)
UP_RESTARTS = Instrument(
    "quantdrift.up.restarts",
    _OC,
    "{restart}",
    "Restarts by `quantdrift up`, by process and reason: exit_ and the exit code, a signal, or not_started.",
)

# The stream, as every monitor and shadow worker sees it: take the maximum over processes.
STREAM_WAITING = Instrument(
    "quantdrift.stream.waiting",
    _OG,
    "{exchange}",
    "Exchanges in the stream that no worker has finished, by model; absent for a minute without an answer of NATS.",
)
STREAM_BYTES = Instrument(
    "quantdrift.stream.stored", _OG, "By", "Bytes of the waiting exchanges; the limit is stream.max_bytes."
)
STREAM_AGE = Instrument(
    "quantdrift.stream.age",
    _OG,
    "s",
    "Age of the oldest waiting exchange; at stream.max_age_s it expires unread. 0: none waits.",
)

# The shadow.
STAGE_AGE = Instrument(
    "quantdrift.shadow.stage.age",
    _OG,
    "s",
    "How long the oldest batch is in a stage, waiting included, by stage: assemble, replay, compare or store; 0: none is.",
)
MODELS_READ = Instrument(
    "quantdrift.shadow.models_read",
    _OG,
    "{model}",
    "Models whose exchanges this worker reads; those of the others are read by other workers.",
)
COMPARED = Instrument(
    "quantdrift.shadow.compared", _C, "{exchange}", "Exchanges compared and stored, by model."
)
SKIPPED = Instrument(
    "quantdrift.shadow.skipped", _C, "{exchange}", "Exchanges read but not compared, by model and reason."
)
ATTRIBUTES_DROPPED = Instrument(
    "quantdrift.shadow.attributes.dropped",
    _C,
    "{attribute}",
    "Attributes of exchanges that the shadow's configuration does not record, or that are no hash and must be one, by model.",
)
EXPIRED = Instrument(
    "quantdrift.shadow.expired",
    _C,
    "{exchange}",
    "Exchanges that expired in the stream before they were replayed, by model and stratum, as counted by this worker.",
)
REPLAY_TIME = Instrument(
    "quantdrift.shadow.replay.duration", _H, "s", "Duration of one replay batch, by model."
)
STEP_TIME = Instrument(
    "quantdrift.shadow.step.duration",
    _H,
    "s",
    "Duration of each processing step of a batch, from pull to acknowledge, by step.",
)
BATCH_ITEMS = Instrument(
    "quantdrift.shadow.batch.items", _H, "{item}", "Items in one replay batch, by model."
)
STALENESS = Instrument(
    "quantdrift.shadow.staleness",
    _H,
    "s",
    "Time from capture to the stored comparison, by model; of each eighth exchange.",
)
LATENCY = Instrument(
    "quantdrift.candidate.latency",
    _H,
    "s",
    "Time of the candidate from the last byte of the request to the last byte of the response, as the relay saw it, by model and"
    " version. Of the compared samples, which are not weighted: where strata have different rates, take shares from the database.",
    _ANSWER_S,
)
FIRST_TOKEN = Instrument(
    "quantdrift.candidate.first_token",
    _H,
    "s",
    "Of streams, time from the last byte of the request to the first byte of the response, by model and version.",
    _ANSWER_S,
)
PER_TOKEN = Instrument(
    "quantdrift.candidate.per_token",
    _H,
    "s",
    "Of streams whose tokens are counted, time for each token after the first, by model and version.",
    _ANSWER_S,
)
# Names, attributes and buckets of https://github.com/open-telemetry/semantic-conventions-genai.
GENAI_FIRST_TOKEN = Instrument(
    "gen_ai.server.time_to_first_token",
    _H,
    "s",
    "As `quantdrift.candidate.first_token`, of generated text, by the names of OpenTelemetry's conventions for generative AI.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GENAI_PER_TOKEN = Instrument(
    "gen_ai.server.time_per_output_token",
    _H,
    "s",
    "As `quantdrift.candidate.per_token`, of generated text, by the names of OpenTelemetry's conventions for generative AI.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
STORE_ERRORS = Instrument(
    "quantdrift.shadow.store_errors", _C, "{error}", "Failed transactions, each of which is retried."
)
SLICE_OVERFLOW = Instrument(
    "quantdrift.shadow.slice_overflow",
    _C,
    "{item}",
    "Items counted in a slice `(other)` because their value has no place among max_values, by model.",
)
CANARIES = Instrument(
    "quantdrift.shadow.canary_checks",
    _C,
    "{check}",
    "Checks of a reference against its canaries, by model and outcome: reproduced or failed.",
)

VECTORS = Instrument(
    "quantdrift.shadow.vectors",
    _C,
    "{vector}",
    "Vectors selected for learned slices, by model and outcome: stored, over_cap or failed.",
)
EXEMPLARS = Instrument(
    "quantdrift.shadow.exemplars",
    _C,
    "{exemplar}",
    "Exemplars, by model and outcome: stored, or not kept because of too_large, full, unavailable, late, refused, no_key or datatype;"
    " with `busy`, exchanges that were not looked at because earlier ones were still being stored.",
)
OWN_ANSWERS = Instrument(
    "quantdrift.shadow.own_answers",
    _C,
    "{answer}",
    "Free-running answers asked of a reference, by model and outcome: done, unforced, unable, late or failed.",
)
NOISE_ITEMS = Instrument(
    "quantdrift.shadow.noise",
    _C,
    "{item}",
    "Items selected for a repeated computation, by model, side and outcome: measured, failed or left_out.",
)
DOUBTS = Instrument(
    "quantdrift.shadow.doubts",
    _C,
    "{doubt}",
    "Configured options that a reference's outputs contradict, once each, by model and option; the log says why.",
)

# The monitor.
FOLDED = Instrument("quantdrift.monitor.folded", _C, "{batch}", "Batches folded.")
UNFOLDED = Instrument(
    "quantdrift.monitor.unfolded",
    _OG,
    "{batch}",
    "Stored batches that are not folded yet, by `shard`. Of the monitor that leads.",
)
UNFOLDED_AGE = Instrument(
    "quantdrift.monitor.unfolded.age",
    _OG,
    "s",
    "Age of the oldest stored batch that waits for the fold, by `shard`; 0: none waits. Of the monitor that leads.",
)
SHARD_HELD = Instrument(
    "quantdrift.monitor.shard.held",
    _OG,
    "1",
    "1 if a monitor folds the models of a `shard`, else 0. Of the monitor that leads.",
)
FOLD_TIME = Instrument("quantdrift.monitor.fold.duration", _H, "s", "Duration of one fold.")
LEADER = Instrument("quantdrift.monitor.leader", _OG, "{leader}", "1 if this process is the leader, else 0.")
EVENTS_SENT = Instrument(
    "quantdrift.monitor.events", _C, "{event}", "Alert events that the collector accepted."
)
EVENTS_FAILED = Instrument(
    "quantdrift.monitor.event_failures",
    _C,
    "{event}",
    "Failed exports of alert events, each of which is retried.",
)
NOTIFIED = Instrument(
    "quantdrift.monitor.notifications",
    _C,
    "{notification}",
    "Notifications that a receiver accepted, by receiver (alertmanager or webhook).",
)
NOTIFY_FAILED = Instrument(
    "quantdrift.monitor.notification_failures",
    _C,
    "{notification}",
    "Notifications that a receiver did not accept, each of which is retried, by receiver and reason (unreachable, timeout,"
    " tls, refused, unavailable or setup).",
)
EXPLANATIONS = Instrument(
    "quantdrift.monitor.explanations",
    _C,
    "{alert}",
    "Alerts to be explained, by outcome: explained, late, failed or left_out. Every alert is sent, explained or not.",
)
OUTBOX = Instrument("quantdrift.monitor.outbox", _OG, "{event}", "Alert events that wait to be exported.")
OUTBOX_AGE = Instrument(
    "quantdrift.monitor.outbox.age", _OG, "s", "Age of the oldest alert event that waits; 0: none waits."
)
PROGRESS_AGE = Instrument(
    "quantdrift.progress.age",
    _OG,
    "s",
    "Age of the last folded capture, by model; alert on it as the heartbeat.",
)
VERDICT = Instrument(
    "quantdrift.slice.verdict",
    _OG,
    "{verdict}",
    "Verdict: 0 ok, 1 unknown, 2 warning, 3 firing, by model, version and slice.",
)
MITIGATED = Instrument(
    "quantdrift.slice.mitigated",
    _OG,
    "{mitigation}",
    "Whether nobody gets the answers of a slice that alerts any more, by model, version and slice: 0 people do, 1 its requests are routed"
    " away, 2 a person said so.",
)
SERVING = Instrument(
    "quantdrift.version.serving",
    _OG,
    "{state}",
    "Whether a version serves, by model and version: 0 it does, 1 another version of the model replaced it (replaced_by), 2 it is silent:"
    " nothing of it was seen for ten times its usual gap, at least ten minutes.",
)
VERSION_PAUSED = Instrument(
    "quantdrift.version.paused",
    _OG,
    "{pause}",
    "1 while the sampling of a version's model is paused, everywhere or at more of its sidecars than monitor.max_loss_ratio, else 0, by model"
    " and version.",
)
EVIDENCE = Instrument(
    "quantdrift.slice.evidence",
    _OG,
    "{threshold}",
    "Evidence divided by the paging threshold (1 pages), by model, version and slice.",
)
DIVERGENCE = Instrument(
    "quantdrift.slice.divergence",
    _OG,
    "{divergence}",
    "Mean divergence of the recent window, by model, version, slice and metric.",
)
NOISE = Instrument(
    "quantdrift.noise.high",
    _OG,
    "{budget}",
    "Upper bound of the mean noise, divided by the budget, by model, version, side (reference or candidate) and metric.",
)
NOISY = Instrument(
    "quantdrift.noise.exceeded",
    _OG,
    "{side}",
    "1 while noise is shown to exceed half of the budget, by model, version, side and metric.",
)
SLICES_LEFT_OUT = Instrument(
    "quantdrift.slice.left_out", _OG, "{slice}", "Slices not exported because of telemetry.max_slices."
)

# The sampling policy, computed by the leading monitor.
POLICY_PUBLISHED = Instrument(
    "quantdrift.monitor.policy.published",
    _C,
    "{policy}",
    "Policies published to the sidecars, including confirmations of the current one.",
)
LAG_FACTOR = Instrument(
    "quantdrift.monitor.policy.lag_factor",
    _OG,
    "{rate}",
    "Factor on every sampling rate because the shadow lags; 1: no lag.",
)
STREAM_LOAD = Instrument(
    "quantdrift.monitor.stream.load",
    _OG,
    "{limit}",
    "Share of the stream's limits that is used or will be soon; at 0.5 the rates are halved.",
)
REPLAYS_PLANNED = Instrument(
    "quantdrift.monitor.replays.planned", _OG, "{item}", "Items per second that the policy plans to replay."
)
REPLAYS_MEASURED = Instrument(
    "quantdrift.monitor.replays.measured",
    _OG,
    "{item}",
    "Items per second that were recently replayed and stored.",
)

# The search for slices.
SEARCH_TIME = Instrument(
    "quantdrift.discovery.duration", _H, "s", "Duration of one round of slice searches and candidate tests."
)
DISCOVERED = Instrument(
    "quantdrift.discovery.slices", _C, "{slice}", "Discovered slices, by model and outcome."
)
DISCOVERY_OVERFLOW = Instrument(
    "quantdrift.discovery.overflow",
    _C,
    "{slice}",
    "Slices and conditions that a limit left out or delays, and items left out because their policy was deleted.",
)

_SIGNALS: Final = {"OTLPLogExporter": "logs", "OTLPMetricExporter": "metrics", "OTLPSpanExporter": "traces"}
_failures: Counts[str] = Counts()  # of the exporters of this process, which are made before its instruments

Labels = Mapping[str, str]
Read = Callable[[], Iterable[tuple[float, Labels]]]


class Telemetry:
    """The OpenTelemetry meter of a process.

    Parameters
    ----------
    service
        `service.name`, e.g. `quantdrift-shadow`.
    readers
        Metric readers in addition to Prometheus.
    """

    def __init__(self, service: str, readers: Sequence[MetricReader] = ()) -> None:
        instance = f"{os.environ.get('POD_NAME') or socket.gethostname()}:{os.getpid()}"
        self.resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._provider = MeterProvider(
            metric_readers=[PrometheusMetricReader(), *readers],
            resource=self.resource,
            shutdown_on_exit=False,
        )
        self._meter: Meter = self._provider.get_meter("quantdrift")
        self._server_certificates: dict[str, datetime] = {}

    def counter(self, instrument: Instrument) -> Counter:
        """Return the counter that `instrument` declares."""
        _expect(instrument, InstrumentKind.COUNTER)
        return self._meter.create_counter(instrument.name, instrument.unit, instrument.description)

    def histogram(self, instrument: Instrument) -> Histogram:
        """Return the histogram that `instrument` declares."""
        _expect(instrument, InstrumentKind.HISTOGRAM)
        return self._meter.create_histogram(
            instrument.name,
            instrument.unit,
            instrument.description,
            explicit_bucket_boundaries_advisory=instrument.buckets or None,
        )

    def observe(self, instrument: Instrument, read: Read) -> None:
        """Register `read`, which is called at each collection and yields values with their attributes."""

        def callback(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, dict(labels)) for value, labels in read()]

        if instrument.kind is InstrumentKind.OBSERVED_COUNTER:
            self._meter.create_observable_counter(
                instrument.name, [callback], instrument.unit, instrument.description
            )
        else:
            _expect(instrument, InstrumentKind.OBSERVED_GAUGE)
            self._meter.create_observable_gauge(
                instrument.name, [callback], instrument.unit, instrument.description
            )

    def observe_config(self, process: str, config: Callable[[], Config]) -> None:
        """Export the digest of a configuration, which is read at each collection; the same object as long as it is the same."""
        of: Config | None = None
        digest = ""

        def read() -> Iterable[tuple[float, Labels]]:
            nonlocal of, digest
            if (now := config()) is not of:
                of, digest = now, shared_digest(now)
            return [(1.0, {"process": process, "digest": digest})]

        self.observe(CONFIG, read)
        self.observe(CERTIFICATE, lambda: _certificates(process, config(), self._server_certificates))
        self.observe(KEY_AGE, lambda: _key_ages(process, config()))

    def note_server_certificate(self, option: str, end: datetime) -> None:
        """Note when the certificate ends that a server has shown: `server of` and the option with its address."""
        self._server_certificates[option] = end

    def observe_exports(self) -> None:
        """Export how many exports of this process have failed."""
        self.observe(
            EXPORT_FAILURES, lambda: [(n, {"signal": signal}) for signal, n in list(_failures.items())]
        )

    def close(self) -> None:
        """Export the remaining data and shut down."""
        self._provider.shutdown()


def _certificates(
    process: str, config: Config, of_servers: Mapping[str, datetime]
) -> Iterable[tuple[float, Labels]]:
    now_s = time.time()
    for option, end in (*certificate_ends(config), *of_servers.items()):
        yield end.timestamp() - now_s, {"process": process, "option": option}


def _key_ages(process: str, config: Config) -> Iterable[tuple[float, Labels]]:
    now = datetime.now(UTC)
    for option, since in keys_since(config, now):
        yield (now - since).total_seconds(), {"process": process, "option": option}


def keys_since(config: Config, now: datetime) -> Iterator[tuple[str, datetime]]:
    """Yield since when the key in use of each key file of a configuration is used, with its option.

    Files that cannot be read are left out, and so is a key of hashed attributes that is a plain text.
    """
    for option, file in (
        ("stream.payload_key_file", config.stream.payload_key_file),
        ("capture.hmac_key_file", config.capture.hmac_key_file),
    ):
        with contextlib.suppress(OSError, OperatorError):
            if file and is_key_file(content := Path(file).read_bytes()):
                yield option, read_keys(content, option, file).current(now).used_from


def _expect(instrument: Instrument, kind: InstrumentKind) -> None:
    if instrument.kind is not kind:
        raise TypeError(f"{instrument.name} is declared as a {instrument.kind}")


def otlp_exporter(
    exporter: type[Any], telemetry: TelemetryOptions, secrets: Secrets, *, timeout_s: float
) -> Any:
    """Return an OTLP (gRPC) exporter to the configured collector.

    It reads the collector's headers for each export and the certificates for each new channel, so that renewed ones need no
    restart. The library reads them once. Its environment variables for TLS (OTEL_EXPORTER_OTLP_INSECURE and the others) have
    no effect, because one of them would allow plaintext to an https:// address.

    Parameters
    ----------
    exporter
        The library's exporter of logs, metrics or spans.
    telemetry
        Names the collector and the certificates.
    secrets
        The headers, and their file.
    timeout_s
        Longest export, with its retries.

    Raises
    ------
    OperatorError
        The address is not allowed, or a file of a certificate cannot be used.
    """
    server = read_server_url(telemetry.otlp_endpoint, "https", "http")
    if problem := server.problem("telemetry.otlp_endpoint"):
        raise OperatorError(problem)
    tls = Tls.of_telemetry(telemetry)

    class Exporter(exporter):  # type: ignore[misc]  # the base is an argument
        def _initialize_channel_and_stub(self) -> None:
            if server.is_encrypted:
                try:
                    self._credentials = tls.grpc_credentials()
                except OperatorError as error:  # the former certificates may still be good
                    _LOG.warning("%s", error)
            super()._initialize_channel_and_stub()

        def export(self, *arguments: Any, **options: Any) -> Any:
            self._headers = tuple(secrets.current_otlp_headers().items())
            result = super().export(*arguments, **options)
            if result.name != "SUCCESS":
                _failures[signal] += 1
            return result

    signal = _SIGNALS[exporter.__name__]
    _failures[signal] += 0  # a series from the start: an increase is seen

    return Exporter(
        endpoint=server.url,
        insecure=not server.is_encrypted,
        credentials=tls.grpc_credentials() if server.is_encrypted else None,
        headers=secrets.current_otlp_headers(),
        timeout=timeout_s,
        # A proxy from the environment would get what is meant for this machine, in plaintext.
        channel_options=() if server.is_encrypted else (("grpc.enable_http_proxy", 0),),
    )
