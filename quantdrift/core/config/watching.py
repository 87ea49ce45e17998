"""Options of the shadow worker, the monitor, the search for slices, telemetry and the report."""

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
    """The worker that replays exchanges through the FP32 reference."""

    provider: Annotated[
        Provider,
        about(
            "Device: `auto`, `cuda`, `tensorrt` or `cpu`. `cuda` and `tensorrt` refuse to start "
            "without a GPU."
        ),
    ] = Provider.AUTO
    allow_fallback: Annotated[
        bool,
        about(
            "With `cuda` and `tensorrt`: use the next best device when there is none, with a "
            "warning in the log."
        ),
    ] = False
    gpu_bytes: Annotated[
        int,
        about(
            "GPU memory for all references of this worker, divided evenly. CUDA itself takes some "
            "500 MB more. 0: no limit.",
            "bytes",
            ge=0,
        ),
    ] = 0
    engine_cache: Annotated[
        str,
        about(
            "Directory for engines that TensorRT has built, which takes minutes. Nobody else may "
            "write there. Empty: build at each start."
        ),
    ] = ""
    threads: Annotated[int, about("CPU threads of the reference. 0: one for each core.", ge=0, le=256)] = 0
    nice: Annotated[
        int,
        about(
            "Niceness of the process: 0 is normal, 19 leaves the CPU to everything else on the host.",
            ge=0,
            le=19,
        ),
    ] = 10
    batch_items: Annotated[
        int, about("Most items in one replay. Larger batches are faster and later.", ge=1)
    ] = 64
    batch_delay_s: Annotated[float, about("Longest wait for a batch to fill.", "s", gt=0)] = 0.5
    reference_memory_bytes: Annotated[
        int,
        about(
            "Memory for loaded references. Above it the least recently used one is closed, and "
            "loaded again when it is needed. 0: all stay loaded.",
            "bytes",
            ge=0,
        ),
    ] = 0
    max_deliveries: Annotated[
        int,
        about("An exchange that was tried this many times and never finished is quarantined.", ge=2, le=20),
    ] = 5
    ack_wait_s: Annotated[
        float,
        about(
            "An exchange that a worker has not finished after this time goes to another worker. A "
            "replay ten times as long counts as hanging.",
            "s",
            gt=1,
        ),
    ] = 60.0
    noise_share: Annotated[
        float,
        about(
            "Share of exchanges that are replayed twice, in another batch, to measure the noise "
            "of the reference. 0: none.",
            ge=0,
            le=1,
        ),
    ] = 0.01
    grace_s: Annotated[
        float, about("Time from SIGTERM to the end of the process, to finish the current batch.", "s", gt=0)
    ] = 25.0
    admin: Annotated[str, about("Address of /livez and /metrics, HOST:PORT.")] = "127.0.0.1:9465"


class Monitor(Section, frozen=True, kw_only=True):
    """Detection and alerts: how many false alerts to accept, and when a slice counts as unknown."""

    interval_s: Annotated[float, about("How often new results are read.", "s", gt=0)] = 2.0
    pages_per_30_days: Annotated[
        float,
        about("Expected number of false pages in 30 days, for the whole fleet: an upper bound.", gt=0, le=30),
    ] = 0.1
    tickets_per_30_days: Annotated[
        float, about("The same for tickets, which come earlier and are more often wrong.", gt=0, le=300)
    ] = 1.0
    min_groups: Annotated[
        int, about("With fewer compared exchanges a slice is `unknown`, never `ok`.", "exchanges", ge=1)
    ] = 300
    max_loss_ratio: Annotated[
        float,
        about(
            "With a larger share of lost samples a slice is `unknown`: what is lost may hide a drift.",
            gt=0,
            le=1,
        ),
    ] = 0.05
    session_s: Annotated[
        float,
        about(
            "With sampling.sticky_header: requests of one user within this time are one observation.",
            "s",
            gt=0,
            le=86400,
        ),
    ] = 1800.0
    tolerance: Annotated[
        float,
        about(
            "Tau: how far a slice may exceed its learned baseline without an alert; 0.25 is 25 %. "
            "Larger means fewer alerts from seasons, and later ones.",
            ge=0,
            le=4,
        ),
    ] = 0.25
    noise_bound: Annotated[
        float,
        about(
            "When a reference's noise exceeds this share of a budget, an event is sent and its "
            "slices are `unknown`.",
            gt=0,
            le=10,
        ),
    ] = 0.5
    stale_after_s: Annotated[
        float, about("A slice with no comparison for this long is `unknown`.", "s", gt=0)
    ] = 21_600.0
    grace_s: Annotated[
        float, about("Time from SIGTERM to the end of the process, to finish the current batch.", "s", gt=0)
    ] = 25.0
    admin: Annotated[str, about("Address of /livez and /metrics, HOST:PORT.")] = "127.0.0.1:9466"


class Discovery(Section, frozen=True, kw_only=True):
    """The nightly search for slices where divergence concentrates. What it finds is tested on later traffic."""

    enabled: Annotated[
        bool, about("Search every night. `quantdrift slices search` works without it too.")
    ] = True
    most_rows: Annotated[
        int,
        about(
            "Most items that a search, or the tests of a night, read, some 1.5 kB each; of more, "
            "a random part.",
            "items",
            ge=1000,
            le=1_000_000,
        ),
    ] = 50_000
    least_share: Annotated[
        float, about("Smallest share of a model's traffic that can be a slice.", gt=0, lt=1)
    ] = 0.005
    least_ratio: Annotated[
        float,
        about(
            "A slice is reported when its mean divergence is at least this many times that of all traffic.",
            ge=1,
        ),
    ] = 1.5
    most_slices: Annotated[
        int, about("Most discovered slices of a model that are monitored; further ones wait.", ge=1, le=200)
    ] = 20
    false_per_30_days: Annotated[
        float,
        about(
            "Expected number of falsely confirmed slices in 30 days, for all models together: an "
            "upper bound.",
            gt=0,
            le=30,
        ),
    ] = 0.1
    retire_days: Annotated[
        int,
        about(
            "A discovered slice that was no worse than the rest for this long is no longer "
            "monitored. 0: never.",
            "days",
            ge=0,
            le=365,
        ),
    ] = 30


class Clusters(Section, frozen=True, kw_only=True):
    """Learned slices: clusters of the inputs of each model that sets `embedding`, and inputs unlike any of them."""

    enabled: Annotated[bool, about("False: no vectors are stored, and no item is assigned to a cluster.")] = (
        True
    )
    n_clusters: Annotated[int, about("Most clusters of a model.", ge=2, le=64)] = 16
    refit_days: Annotated[
        float,
        about("How often the monitor fits the clusters. 0: only `quantdrift slices fit` does.", "days", ge=0),
    ] = 7.0
    sample_share: Annotated[
        float, about("Share of compared items whose vector is stored for the next fit.", gt=0, le=1)
    ] = 0.05
    novelty_quantile: Annotated[
        float,
        about(
            "At most 1 minus this share of ordinary inputs is expected to be called novel by mistake.",
            ge=0.9,
            lt=1,
        ),
    ] = 0.995


class Telemetry(Section, frozen=True, kw_only=True):
    """OpenTelemetry: alerts as events, gauges and replay spans over OTLP (gRPC); logs on stderr."""

    otlp_endpoint: Annotated[
        str,
        about(
            "Address of the collector, e.g. http://otel-collector:4317. Empty: alerts are in "
            "Postgres and /metrics only."
        ),
    ] = ""
    otlp_headers_file: Annotated[
        str,
        about("File with `name=value` lines that are sent to the collector, such as tokens. Empty: none."),
    ] = ""
    export_interval_s: Annotated[float, about("How often gauges are exported.", "s", gt=0)] = 15.0
    resource: Annotated[
        dict[str, str],
        about("Resource attributes of everything exported, e.g. deployment.environment.name."),
    ] = msgspec.field(default_factory=dict)
    max_slices: Annotated[
        int,
        about(
            "Most slices exported as gauges: firing ones first, then those with the most "
            "evidence. All are in Postgres.",
            ge=1,
            le=1500,
        ),
    ] = 200
    trace_url: Annotated[
        str,
        about(
            "Link to a trace of your system, with {trace_id}; shown next to example exchanges. Empty: none."
        ),
    ] = ""
    log_level: Annotated[
        str, about("`debug`, `info`, `warning` or `error`."), Meta(pattern="^(debug|info|warning|error)$")
    ] = "info"
    log_json: Annotated[bool, about("One JSON object for each log line, for log collectors.")] = False


class Report(Section, frozen=True, kw_only=True):
    """The weekly report."""

    directory: Annotated[str, about("Where `quantdrift report` writes.")] = "reports"
    title: Annotated[str, about("Heading of the page.")] = "Quantisation drift"
