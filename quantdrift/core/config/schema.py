"""Every option: its type, default, bounds, unit, and why one would change it.

This module is the single source: the loader validates with it, `config.toml` and the reference page are
generated from it.
"""

import re
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quantdrift.core.records import BodyStratum, HeaderStratum

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def _about(text: str, unit: str = "", **bounds: Any) -> Meta:
    return Meta(description=text, extra={"unit": unit}, **bounds)


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the configuration: unknown keys are refused."""


class Stream(_Section, frozen=True, kw_only=True):
    """NATS JetStream, which carries exchanges from the sidecars to the shadow workers."""

    url: Annotated[
        str, _about("Server, or several separated by commas. `quantdrift up` starts one of its own.")
    ] = "nats://127.0.0.1:4222"
    credentials_file: Annotated[str, _about("NATS credentials (.creds). Empty: none are needed.")] = ""
    name: Annotated[
        str,
        _about("Prefix of streams and subjects. Change it to keep two installations apart on one cluster."),
        Meta(pattern=r"^[A-Za-z0-9_-]+$"),
    ] = "quantdrift"
    max_age_s: Annotated[
        float,
        _about(
            "How long captured payloads may wait for a shadow. Also how long they exist at all.", "s", gt=0
        ),
    ] = 3600.0
    max_bytes: Annotated[
        int,
        _about(
            "Disk for waiting exchanges. When it is full, new ones are refused and counted.", "bytes", gt=0
        ),
    ] = 2 * GIB
    replicas: Annotated[
        int, _about("Copies in the NATS cluster. 3 survives the loss of a server.", ge=1, le=5)
    ] = 1
    publish_timeout_s: Annotated[
        float, _about("How long a sidecar waits for an acknowledgement before it tries once more.", "s", gt=0)
    ] = 5.0

    @property
    def address(self) -> str:
        """The servers without any credentials that stand in the URL: for logs and messages."""
        return re.sub(r"//[^@/,]*@", "//", self.url)


class Storage(_Section, frozen=True, kw_only=True):
    """Postgres, the record. The address is a secret: QUANTDRIFT_DSN, or a file."""

    dsn_file: Annotated[
        str, _about("File that holds the Postgres address. Empty: QUANTDRIFT_DSN. A sidecar never reads it.")
    ] = ""
    pool_size: Annotated[int, _about("Connections per process.", ge=2, le=64)] = 4
    statement_timeout_s: Annotated[
        float, _about("Longest statement before Postgres cancels it.", "s", gt=0)
    ] = 30.0
    partitions_ahead_days: Annotated[
        int,
        _about("Daily partitions made in advance: how long the monitor may be away.", "days", ge=2, le=90),
    ] = 14
    retention_days: Annotated[
        int,
        _about("Comparisons, batches and tallies older than this are dropped; roll-ups stay.", "days", ge=2),
    ] = 35
    quarantine_days: Annotated[
        int, _about("How long a quarantined exchange keeps its payload.", "days", ge=1)
    ] = 1


class Sidecar(_Section, frozen=True, kw_only=True):
    """The relay beside the inference pod. Bounds here bound its memory whatever clients do."""

    listen: Annotated[str, _about("Address the clients connect to, HOST:PORT.")] = "0.0.0.0:8000"
    backend: Annotated[str, _about("The inference server behind it, HOST:PORT.")] = "127.0.0.1:8001"
    admin: Annotated[str, _about("Address of /livez, /readyz and /metrics, HOST:PORT.")] = "0.0.0.0:9464"
    source: Annotated[
        str, _about("Name of this sidecar in every record. Empty: POD_NAME, else the host name.")
    ] = ""
    workers: Annotated[
        int,
        _about("Relay processes on one listening socket. One per core that serving can spare.", ge=1, le=32),
    ] = 1
    backlog: Annotated[int, _about("Connections the kernel may hold before they are accepted.", ge=16)] = 1024
    drain_delay_s: Annotated[
        float, _about("After SIGTERM the port stays open so long: endpoint removal takes time.", "s", ge=0)
    ] = 5.0
    grace_s: Annotated[
        float, _about("From SIGTERM to the end. Keep it below the pod's termination grace period.", "s", gt=0)
    ] = 25.0
    max_header_bytes: Annotated[
        int,
        _about("Longest message head that is still observed; longer ones pass unobserved.", "bytes", ge=1024),
    ] = 64 * KIB
    max_exchange_bytes: Annotated[
        int, _about("Largest request and response, together, that is held for capture.", "bytes", ge=1024)
    ] = 16 * MIB
    max_held_bytes: Annotated[
        int, _about("Most that one relay worker holds for unfinished exchanges.", "bytes", ge=1024)
    ] = 128 * MIB
    handoff_bytes: Annotated[
        int, _about("Most that waits between a relay worker and the capture process.", "bytes", ge=1024)
    ] = 64 * MIB
    queue_bytes: Annotated[
        int, _about("Most that waits in the capture process for the stream to acknowledge.", "bytes", ge=1024)
    ] = 64 * MIB
    tally_interval_s: Annotated[float, _about("How often exact counts are published.", "s", gt=0)] = 10.0


class Capture(_Section, frozen=True, kw_only=True):
    """What is recorded about an exchange beside its tensors. Nothing else leaves the pod."""

    headers: Annotated[
        tuple[str, ...],
        _about("Request headers recorded as `header.NAME`, lower case. All others are dropped."),
    ] = ("x-request-id",)
    parameters: Annotated[tuple[str, ...], _about("Request parameters recorded as `parameter.NAME`.")] = ()
    json: Annotated[
        tuple[str, ...], _about("Paths into the request's JSON part, as `a.b.0`, recorded as `json.PATH`.")
    ] = ()
    hmac: Annotated[
        tuple[str, ...],
        _about("Attributes recorded only as a keyed hash, e.g. `header.x-user`: equal values stay equal."),
    ] = ()
    hmac_key_file: Annotated[
        str, _about("Key of that hash. Empty: QUANTDRIFT_HMAC_KEY. Needed as soon as `hmac` names anything.")
    ] = ""
    max_value_bytes: Annotated[
        int, _about("Attribute values are cut to this length.", "bytes", ge=8, le=4096)
    ] = 256


class Sampling(_Section, frozen=True, kw_only=True):
    """Which exchanges are taken. Every probability is known, stored, and undone by weighting."""

    rate: Annotated[
        float, _about("Share of requests taken where no header stratum matches (first phase).", ge=0, le=1)
    ] = 0.01
    body_rate: Annotated[
        float,
        _about(
            "Base rate after decoding (second phase): at least this share of everything, as far as the first phase takes it.",
            ge=0,
            le=1,
        ),
    ] = 1.0
    sticky_header: Annotated[
        str,
        _about(
            "Header whose value decides: one user is taken whole or not at all, and is one observation. Empty: every request anew."
        ),
    ] = ""
    epoch_s: Annotated[
        float,
        _about(
            "The salt changes this often, so that a sticky sample is no fixed panel.", "s", ge=60, le=86400
        ),
    ] = 86400.0
    paused: Annotated[bool, _about("Take nothing. Counting goes on.")] = False
    central: Annotated[
        bool,
        _about("Follow the monitor's policy while there is one; the rates here hold while there is none."),
    ] = True
    replays_per_s: Annotated[
        float,
        _about(
            "Items per second that the monitor spreads over fleet and slices. 0: it makes no policy, and the rates here hold.",
            "1/s",
            ge=0,
        ),
    ] = 0.0
    max_exchanges_per_s: Annotated[
        float, _about("Hard local cap, whatever the rates say. Above it: lost, `rate_cap`.", "1/s", gt=0)
    ] = 200.0
    max_bytes_per_s: Annotated[
        int, _about("Hard local cap on what leaves the pod. Above it: lost, `byte_cap`.", "bytes/s", gt=0)
    ] = 32 * MIB
    header_strata: Annotated[
        tuple[HeaderStratum, ...],
        _about("Rates by method, path and headers; the first that matches decides. Boost here what is rare."),
    ] = ()
    body_strata: Annotated[
        tuple[BodyStratum, ...],
        _about(
            "Total rates by what is known after decoding, above body_rate; the largest that matches decides."
        ),
    ] = ()


class Provider(StrEnum):
    """Where the reference runs."""

    AUTO = "auto"  # CUDA where it really is there, else CPU; said in the log
    CUDA = "cuda"  # refuse to start without it
    CPU = "cpu"


class Shadow(_Section, frozen=True, kw_only=True):
    """The worker that replays exchanges through the reference."""

    provider: Annotated[
        Provider, _about("`auto`, `cuda` or `cpu`. `cuda` refuses to start without a device.")
    ] = Provider.AUTO
    threads: Annotated[
        int, _about("CPU threads of the reference. 0: as many as there are cores.", ge=0, le=256)
    ] = 0
    nice: Annotated[int, _about("How far the worker steps back for others on its host.", ge=0, le=19)] = 10
    batch_items: Annotated[int, _about("Most items in one replay. Larger is faster and later.", ge=1)] = 64
    batch_delay_s: Annotated[
        float, _about("Longest wait for a batch to fill: bounds how stale a comparison is.", "s", gt=0)
    ] = 0.5
    fetch_bytes: Annotated[
        int, _about("Most taken from the stream at once. NATS disconnects far above 16 MB.", "bytes", gt=0)
    ] = 16_000_000
    max_deliveries: Annotated[
        int, _about("Tries before an exchange that is never finished is quarantined.", ge=2, le=20)
    ] = 5
    ack_wait_s: Annotated[
        float,
        _about(
            "After this an exchange that a worker took is given to another; a replay ten times as long is a hang.",
            "s",
            gt=1,
        ),
    ] = 60.0
    grace_s: Annotated[
        float, _about("From SIGTERM to the end: the batch in hand is finished.", "s", gt=0)
    ] = 25.0
    admin: Annotated[str, _about("Address of /livez and /metrics, HOST:PORT.")] = "127.0.0.1:9465"


class Monitor(_Section, frozen=True, kw_only=True):
    """The fold, the detectors, and when somebody is woken."""

    interval_s: Annotated[float, _about("How often new batches are folded.", "s", gt=0)] = 2.0
    pages_per_30_days: Annotated[
        float,
        _about("Expected false pages per 30 days for the whole fleet. A bound, not a p-value.", gt=0, le=30),
    ] = 0.1
    tickets_per_30_days: Annotated[
        float, _about("The same for tickets: earlier, and oftener wrong.", gt=0, le=300)
    ] = 1.0
    min_groups: Annotated[
        int, _about("Below so many compared exchanges a slice is `unknown`, never `ok`.", "exchanges", ge=1)
    ] = 300
    max_loss_ratio: Annotated[
        float,
        _about("Above this share of lost samples a slice is `unknown`: loss may hide drift.", gt=0, le=1),
    ] = 0.05
    session_s: Annotated[
        float,
        _about(
            "With sticky_header: what a user sends within this time is one observation.", "s", gt=0, le=86400
        ),
    ] = 1800.0
    tolerance: Annotated[
        float,
        _about(
            "tau: how far a learned baseline may be exceeded, for seasons. 0.25 is 25 %; larger is later.",
            ge=0,
            le=4,
        ),
    ] = 0.25
    stale_after_s: Annotated[
        float, _about("A slice without a comparison for so long is `unknown`.", "s", gt=0)
    ] = 21_600.0
    policy_s: Annotated[
        float,
        _about(
            "How often the sampling policy is looked at anew (sampling.replays_per_s).", "s", ge=1, le=3600
        ),
    ] = 300.0
    policy_valid_s: Annotated[
        float,
        _about(
            "How long sidecars follow a policy that nobody confirms; at least twice policy_s.",
            "s",
            ge=60,
            le=86400,
        ),
    ] = 900.0
    policy_strata: Annotated[
        int,
        _about(
            "Most body strata of a policy. Every exchange carries them, some 160 bytes each.", ge=1, le=512
        ),
    ] = 64
    grace_s: Annotated[float, _about("From SIGTERM to the end: the fold in hand is finished.", "s", gt=0)] = (
        25.0
    )
    admin: Annotated[str, _about("Address of /livez and /metrics, HOST:PORT.")] = "127.0.0.1:9466"


class Discovery(_Section, frozen=True, kw_only=True):
    """The nightly search for slices on which divergence concentrates. What it finds is tested on later traffic."""

    enabled: Annotated[bool, _about("Search. `quantdrift slices search` works without it too.")] = True
    every_s: Annotated[
        float, _about("Time between two searches of the leading monitor.", "s", ge=3600, le=2_592_000)
    ] = 86_400.0
    days: Annotated[int, _about("How far back a search looks.", "days", ge=1, le=90)] = 7
    most_rows: Annotated[
        int,
        _about(
            "Most items that a search, or the tests of a night, look at; of more a random part. Some 1.5 kB each.",
            "items",
            ge=1000,
            le=1_000_000,
        ),
    ] = 50_000
    most_conditions: Annotated[
        int,
        _about(
            "Most single conditions that a search joins; those with the most divergence. Time is in its square.",
            ge=2,
            le=2000,
        ),
    ] = 256
    depth: Annotated[int, _about("Most conditions of a slice.", ge=1, le=3)] = 2
    least_share: Annotated[
        float, _about("Smallest share of a model's traffic that is a slice.", gt=0, lt=1)
    ] = 0.005
    least_ratio: Annotated[
        float,
        _about("A slice counts where its mean divergence is above so many times that of all traffic.", ge=1),
    ] = 1.5
    most_candidates: Annotated[
        int, _about("Most candidates of a model that are tested at a time.", ge=1, le=200)
    ] = 20
    most_slices: Annotated[
        int, _about("Most discovered slices of a model that are monitored; further ones wait.", ge=1, le=200)
    ] = 20
    false_per_30_days: Annotated[
        float,
        _about("Expected false confirmations per 30 days for all models together. A bound.", gt=0, le=30),
    ] = 0.1
    expire_days: Annotated[
        int, _about("A candidate that is not confirmed in so long expires.", "days", ge=1, le=365)
    ] = 14
    limit_s: Annotated[float, _about("Longest a round of tests and searches may take.", "s", gt=0)] = 900.0


class Telemetry(_Section, frozen=True, kw_only=True):
    """OpenTelemetry: alerts as events and gauges over OTLP (gRPC), logs on stderr."""

    otlp_endpoint: Annotated[
        str,
        _about("Collector, e.g. http://otel-collector:4317. Empty: alerts stay in Postgres and /metrics."),
    ] = ""
    otlp_headers_file: Annotated[
        str, _about("File with `name=value` lines sent to the collector (tokens). Empty: none.")
    ] = ""
    export_interval_s: Annotated[float, _about("How often gauges are exported.", "s", gt=0)] = 15.0
    resource: Annotated[
        dict[str, str],
        _about("Resource attributes on everything exported, e.g. deployment.environment.name."),
    ] = {}
    max_slices: Annotated[
        int,
        _about(
            "Slices exported as gauges, firing and worst first; the rest stays in Postgres.", ge=1, le=1500
        ),
    ] = 200
    trace_url: Annotated[
        str, _about("Link to a production trace, with {trace_id}. Shown with example exchanges.")
    ] = ""
    log_level: Annotated[
        str, _about("debug, info, warning or error."), Meta(pattern="^(debug|info|warning|error)$")
    ] = "info"
    log_json: Annotated[bool, _about("One JSON object per log line, for collectors.")] = False


class Report(_Section, frozen=True, kw_only=True):
    """The weekly report."""

    directory: Annotated[str, _about("Where `quantdrift report` writes.")] = "reports"
    title: Annotated[str, _about("Heading of the page.")] = "Quantisation drift"


class Clusters(_Section, frozen=True, kw_only=True):
    """Learned slices: clusters of the inputs of every model that names an `embedding`, and what is new to them."""

    enabled: Annotated[bool, _about("False: nothing is sampled, fitted or assigned.")] = True
    n_clusters: Annotated[int, _about("Most clusters of a model.", ge=2, le=64)] = 16
    most_ids: Annotated[
        int,
        _about(
            "Most clusters a model ever has, refits included; what comes later shares one.", ge=2, le=1000
        ),
    ] = 128
    refit_days: Annotated[
        float, _about("How often the monitor fits anew. 0: only `quantdrift slices fit`.", "days", ge=0)
    ] = 7.0
    sample_share: Annotated[
        float, _about("Share of compared items whose vector is stored for the fit.", gt=0, le=1)
    ] = 0.05
    least_vectors: Annotated[int, _about("Below so many vectors nothing is fitted.", ge=100)] = 2_000
    most_vectors: Annotated[
        int, _about("Most vectors kept of a model, the newest; a fit takes at most 64 MiB of them.", ge=100)
    ] = 20_000
    novelty_quantile: Annotated[
        float,
        _about(
            "At most 1 minus this share of ordinary traffic is expected to be called novel.", ge=0.9, lt=1
        ),
    ] = 0.995


class OutputKind(StrEnum):
    """What the classification output holds."""

    LOGITS = "logits"  # unnormalised
    PROBABILITIES = "probabilities"


class Reference(_Section, frozen=True, kw_only=True):
    """An FP32 reference and the candidate versions that were made from it."""

    path: Annotated[str, _about("ONNX file, relative to this configuration file.")]
    versions: Annotated[
        tuple[str, ...],
        _about("Candidate versions it answers for, with shell wildcards: `7`, `int8-*`, `*`."),
    ] = ("*",)
    allow_reduced_precision: Annotated[
        tuple[str, ...],
        _about("Reduced-precision element types accepted in the graph, e.g. `float16`. Empty: strict FP32."),
    ] = ()


class Budget(_Section, frozen=True, kw_only=True):
    """How much divergence the owner of a model accepts, as means over exchanges."""

    flip: Annotated[float, _about("Share of exchanges whose top class may change.", ge=1e-5, lt=1)] = 0.01
    kl: Annotated[float, _about("Mean Kullback-Leibler divergence from the reference.", "nat", ge=1e-5)] = (
        0.02
    )
    kl_cap: Annotated[
        float,
        _about("Single divergences count at most this much: a quantised zero gives infinity.", "nat", gt=0),
    ] = 2.0


class Model(_Section, frozen=True, kw_only=True):
    """A served model, its references and its budget."""

    name: Annotated[str, _about("The name on the wire."), Meta(min_length=1)]
    version: Annotated[
        str,
        _about(
            "Candidate version where the wire does not tell it. Empty: MODEL_VERSION, else `unversioned`."
        ),
    ] = ""
    output: Annotated[
        str, _about("Output tensor that is compared. Empty: the first one both sides have.")
    ] = ""
    output_kind: Annotated[OutputKind, _about("`logits` or `probabilities`.")] = OutputKind.LOGITS
    top_k: Annotated[int, _about("Size of the set of top classes that is compared.", ge=1, le=100)] = 5
    embedding: Annotated[
        str,
        _about(
            "Output or layer of the reference whose vectors make learned slices, or `features`: those of [[slices]]. Empty: none."
        ),
    ] = ""
    batched: Annotated[bool, _about("The first dimension counts items. False: an exchange is one item.")] = (
        True
    )
    references: tuple[Reference, ...] = ()
    budget: Budget = Budget()


class Slice(_Section, frozen=True, kw_only=True):
    """A sub-distribution: by attribute (`header`, `parameter`, `json`), by `feature`, or the `cross` of others."""

    name: Annotated[str, _about("Shown in alerts; values or bins are appended."), Meta(min_length=1)]
    model: Annotated[str, _about("Model it applies to. Empty: every model.")] = ""
    header: Annotated[str, _about("Slice by this request header (must be in capture.headers).")] = ""
    parameter: Annotated[str, _about("Slice by this request parameter (must be in capture.parameters).")] = ""
    json: Annotated[str, _about("Slice by this JSON path (must be in capture.json).")] = ""
    values: Annotated[
        tuple[str, ...], _about("Values that are slices of their own. Empty: each value as it is seen.")
    ] = ()
    max_values: Annotated[
        int,
        _about(
            "Most values followed where `values` is empty, or combinations of a cross; the rest share `other`.",
            ge=1,
            le=1000,
        ),
    ] = 32
    feature: Annotated[
        str,
        _about("Slice by this input feature: length, rank, size, norm, mean, contrast or missing."),
        Meta(pattern="^(|length|rank|size|norm|mean|contrast|missing)$"),
    ] = ""
    input: Annotated[str, _about("Input tensor the feature is taken of. Empty: the first.")] = ""
    edges: Annotated[tuple[float, ...], _about("Bin edges, rising: n edges make n + 1 slices.")] = ()
    cross: Annotated[
        tuple[str, ...],
        _about("Names of two or more other slices: each combination that is seen, up to max_values of them."),
    ] = ()


class Config(_Section, frozen=True, kw_only=True):
    """The whole configuration."""

    stream: Stream = Stream()
    storage: Storage = Storage()
    sidecar: Sidecar = Sidecar()
    capture: Capture = Capture()
    sampling: Sampling = Sampling()
    shadow: Shadow = Shadow()
    monitor: Monitor = Monitor()
    discovery: Discovery = Discovery()
    telemetry: Telemetry = Telemetry()
    report: Report = Report()
    clusters: Clusters = Clusters()
    models: tuple[Model, ...] = ()
    slices: tuple[Slice, ...] = ()

    def model(self, name: str) -> Model | None:
        """Return the model called `name`, or None."""
        return next((model for model in self.models if model.name == name), None)
