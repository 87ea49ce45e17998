"""The options of what replays, judges and tells."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from quantdrift.core.config.section import Section, about


class Provider(StrEnum):
    """Where the reference runs."""

    AUTO = "auto"  # CUDA where it really is there, else CPU; said in the log
    CUDA = "cuda"  # refuse to start without it
    TENSORRT = "tensorrt"  # the same, for ONNX references; PyTorch takes CUDA
    CPU = "cpu"


class Shadow(Section, frozen=True, kw_only=True):
    """The worker that replays exchanges through the reference."""

    provider: Annotated[
        Provider,
        about("`auto`, `cuda`, `tensorrt` or `cpu`. `cuda` and `tensorrt` refuse to start without a device."),
    ] = Provider.AUTO
    allow_fallback: Annotated[
        bool, about("With `cuda` and `tensorrt`: replay on what there is, and say so in the log.")
    ] = False
    gpu_bytes: Annotated[
        int,
        about(
            "Most GPU memory of all references of this worker, shared out evenly. What CUDA itself takes, some 500 MB, "
            "comes on top. 0: no limit.",
            "bytes",
            ge=0,
        ),
    ] = 0
    engine_cache: Annotated[
        str,
        about(
            "Directory where TensorRT keeps the engines it has built, which takes minutes; nobody else may write there. "
            "Empty: they are built at each start."
        ),
    ] = ""
    threads: Annotated[
        int, about("CPU threads of the reference. 0: as many as there are cores.", ge=0, le=256)
    ] = 0
    nice: Annotated[int, about("How far the worker steps back for others on its host.", ge=0, le=19)] = 10
    batch_items: Annotated[int, about("Most items in one replay. Larger is faster and later.", ge=1)] = 64
    batch_delay_s: Annotated[
        float, about("Longest wait for a batch to fill: bounds how stale a comparison is.", "s", gt=0)
    ] = 0.5
    fetch_bytes: Annotated[
        int, about("Most taken from the stream at once. NATS disconnects far above 16 MB.", "bytes", gt=0)
    ] = 16_000_000
    reference_memory_bytes: Annotated[
        int,
        about(
            "Memory for references, and what they compute in. Above it the one that was used longest ago is closed, and "
            "opened again when it is needed. 0: all stay open.",
            "bytes",
            ge=0,
        ),
    ] = 0
    max_deliveries: Annotated[
        int, about("Tries before an exchange that is never finished is quarantined.", ge=2, le=20)
    ] = 5
    ack_wait_s: Annotated[
        float,
        about(
            "After this an exchange that a worker took is given to another; a replay ten times as long is a hang.",
            "s",
            gt=1,
        ),
    ] = 60.0
    noise_share: Annotated[
        float,
        about(
            "Share of exchanges that are replayed again in another batch, for the noise of the reference. 0: none.",
            ge=0,
            le=1,
        ),
    ] = 0.01
    grace_s: Annotated[float, about("From SIGTERM to the end: the batch in hand is finished.", "s", gt=0)] = (
        25.0
    )
    admin: Annotated[str, about("Address of /livez and /metrics, HOST:PORT.")] = "127.0.0.1:9465"


class Monitor(Section, frozen=True, kw_only=True):
    """The fold, the detectors, and when somebody is woken."""

    interval_s: Annotated[float, about("How often new batches are folded.", "s", gt=0)] = 2.0
    pages_per_30_days: Annotated[
        float,
        about("Expected false pages per 30 days for the whole fleet. A bound, not a p-value.", gt=0, le=30),
    ] = 0.1
    tickets_per_30_days: Annotated[
        float, about("The same for tickets: earlier, and oftener wrong.", gt=0, le=300)
    ] = 1.0
    min_groups: Annotated[
        int, about("Below so many compared exchanges a slice is `unknown`, never `ok`.", "exchanges", ge=1)
    ] = 300
    max_loss_ratio: Annotated[
        float,
        about("Above this share of lost samples a slice is `unknown`: loss may hide drift.", gt=0, le=1),
    ] = 0.05
    session_s: Annotated[
        float,
        about(
            "With sticky_header: what a user sends within this time is one observation.", "s", gt=0, le=86400
        ),
    ] = 1800.0
    tolerance: Annotated[
        float,
        about(
            "tau: how far a learned baseline may be exceeded, for seasons. 0.25 is 25 %; larger is later.",
            ge=0,
            le=4,
        ),
    ] = 0.25
    noise_bound: Annotated[
        float,
        about(
            "Above this share of the budget the noise of a reference is an event, and its slices are `unknown`.",
            gt=0,
            le=10,
        ),
    ] = 0.5
    stale_after_s: Annotated[
        float, about("A slice without a comparison for so long is `unknown`.", "s", gt=0)
    ] = 21_600.0
    policy_s: Annotated[
        float,
        about(
            "How often the sampling policy is looked at anew (sampling.replays_per_s).", "s", ge=1, le=3600
        ),
    ] = 300.0
    policy_valid_s: Annotated[
        float,
        about(
            "How long sidecars follow a policy that nobody confirms; at least twice policy_s.",
            "s",
            ge=60,
            le=86400,
        ),
    ] = 900.0
    policy_strata: Annotated[
        int,
        about(
            "Most body strata of a policy. Every exchange carries them, some 160 bytes each.", ge=1, le=512
        ),
    ] = 64
    grace_s: Annotated[float, about("From SIGTERM to the end: the fold in hand is finished.", "s", gt=0)] = (
        25.0
    )
    admin: Annotated[str, about("Address of /livez and /metrics, HOST:PORT.")] = "127.0.0.1:9466"


class Discovery(Section, frozen=True, kw_only=True):
    """The nightly search for slices on which divergence concentrates. What it finds is tested on later traffic."""

    enabled: Annotated[bool, about("Search. `quantdrift slices search` works without it too.")] = True
    every_s: Annotated[
        float, about("Time between two searches of the leading monitor.", "s", ge=3600, le=2_592_000)
    ] = 86_400.0
    days: Annotated[int, about("How far back a search looks.", "days", ge=1, le=90)] = 7
    most_rows: Annotated[
        int,
        about(
            "Most items that a search, or the tests of a night, look at; of more a random part. Some 1.5 kB each.",
            "items",
            ge=1000,
            le=1_000_000,
        ),
    ] = 50_000
    most_conditions: Annotated[
        int,
        about(
            "Most single conditions that a search joins; those with the most divergence. Time is in its square.",
            ge=2,
            le=2000,
        ),
    ] = 256
    depth: Annotated[int, about("Most conditions of a slice.", ge=1, le=3)] = 2
    least_share: Annotated[
        float, about("Smallest share of a model's traffic that is a slice.", gt=0, lt=1)
    ] = 0.005
    least_ratio: Annotated[
        float,
        about("A slice counts where its mean divergence is above so many times that of all traffic.", ge=1),
    ] = 1.5
    most_candidates: Annotated[
        int, about("Most candidates of a model that are tested at a time.", ge=1, le=200)
    ] = 20
    most_slices: Annotated[
        int, about("Most discovered slices of a model that are monitored; further ones wait.", ge=1, le=200)
    ] = 20
    false_per_30_days: Annotated[
        float,
        about("Expected false confirmations per 30 days for all models together. A bound.", gt=0, le=30),
    ] = 0.1
    expire_days: Annotated[
        int, about("A candidate that is not confirmed in so long expires.", "days", ge=1, le=365)
    ] = 14
    retire_days: Annotated[
        int,
        about(
            "A confirmed slice that was no worse than the rest for so long is monitored no more. 0: never so.",
            "days",
            ge=0,
            le=365,
        ),
    ] = 30
    limit_s: Annotated[float, about("Longest a round of tests and searches may take.", "s", gt=0)] = 900.0


class Clusters(Section, frozen=True, kw_only=True):
    """Learned slices: clusters of the inputs of every model that names an `embedding`, and what is new to them."""

    enabled: Annotated[bool, about("False: nothing is sampled, fitted or assigned.")] = True
    n_clusters: Annotated[int, about("Most clusters of a model.", ge=2, le=64)] = 16
    most_ids: Annotated[
        int,
        about("Most clusters a model ever has, refits included; what comes later shares one.", ge=2, le=1000),
    ] = 128
    refit_days: Annotated[
        float, about("How often the monitor fits anew. 0: only `quantdrift slices fit`.", "days", ge=0)
    ] = 7.0
    sample_share: Annotated[
        float, about("Share of compared items whose vector is stored for the fit.", gt=0, le=1)
    ] = 0.05
    least_vectors: Annotated[int, about("Below so many vectors nothing is fitted.", ge=100)] = 2_000
    most_vectors: Annotated[
        int, about("Most vectors kept of a model, the newest; a fit takes at most 64 MiB of them.", ge=100)
    ] = 20_000
    novelty_quantile: Annotated[
        float,
        about("At most 1 minus this share of ordinary traffic is expected to be called novel.", ge=0.9, lt=1),
    ] = 0.995


class Telemetry(Section, frozen=True, kw_only=True):
    """OpenTelemetry: alerts as events, gauges and spans of the replay over OTLP (gRPC), logs on stderr."""

    otlp_endpoint: Annotated[
        str,
        about("Collector, e.g. http://otel-collector:4317. Empty: alerts stay in Postgres and /metrics."),
    ] = ""
    otlp_headers_file: Annotated[
        str, about("File with `name=value` lines sent to the collector (tokens). Empty: none.")
    ] = ""
    export_interval_s: Annotated[float, about("How often gauges are exported.", "s", gt=0)] = 15.0
    resource: Annotated[
        dict[str, str],
        about("Resource attributes on everything exported, e.g. deployment.environment.name."),
    ] = msgspec.field(default_factory=dict)
    max_slices: Annotated[
        int,
        about(
            "Slices exported as gauges, firing and worst first; the rest stays in Postgres.", ge=1, le=1500
        ),
    ] = 200
    trace_url: Annotated[
        str, about("Link to a production trace, with {trace_id}. Shown with example exchanges.")
    ] = ""
    log_level: Annotated[
        str, about("debug, info, warning or error."), Meta(pattern="^(debug|info|warning|error)$")
    ] = "info"
    log_json: Annotated[bool, about("One JSON object per log line, for collectors.")] = False


class Report(Section, frozen=True, kw_only=True):
    """The weekly report."""

    directory: Annotated[str, about("Where `quantdrift report` writes.")] = "reports"
    title: Annotated[str, about("Heading of the page.")] = "Quantisation drift"
