"""Options of the shadow worker, the monitor, the search for slices, telemetry and the report."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from quantdrift.core.config.section import Section, about


class Provider(StrEnum):
    """Where the reference runs."""

    AUTO = "auto"  # CUDA where it really is there, else CPU; said in the log
    CUDA = "cuda"  # refuse to start without it
    TENSORRT = "tensorrt"  # the same, for ONNX references; PyTorch takes CUDA
    CPU = "cpu"


class WebhookFormat(StrEnum):
    """What is sent to a webhook."""

    JSON = "json"  # the whole change, signed, for a program
    SLACK = "slack"  # a message of Slack's Block Kit
    TEAMS = "teams"  # a message with an Adaptive Card


class Shadow(Section, frozen=True, kw_only=True):
    """The worker that replays exchanges through the FP32 reference."""

    provider: Annotated[
        Provider,
        about(
            "Device: `auto`, `cuda`, `tensorrt` or `cpu`. `cuda` and `tensorrt` refuse to start "
            "without a GPU."
        ),
    ] = Provider.AUTO
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
    batch_items: Annotated[
        int,
        about(
            "Most items in one replay. A larger batch costs less time per item, and results come later.", ge=1
        ),
    ] = 64
    batch_delay_s: Annotated[
        float,
        about(
            "Longest wait for a batch to fill. Where the reference is quick, a batch has more than `batch_items`: up "
            "to 512 items, as many as are replayed in half of this time.",
            "s",
            gt=0,
        ),
    ] = 0.5
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
            "Share of exchanges that are replayed a second time, in another batch, to measure the noise of the reference. 0: none.",
            ge=0,
            le=1,
        ),
    ] = 0.01
    ca_file: Annotated[
        str,
        about(
            "CA certificates (PEM) that verify the servers of references, copies and rechecks (https://, grpcs://). Empty: the system's."
        ),
    ] = ""
    certificate_file: Annotated[str, about("Client certificate (PEM) for these servers. Empty: none.")] = ""
    key_file: Annotated[
        str, about("Key (PEM, no passphrase) of the client certificate. Empty: it is in certificate_file.")
    ] = ""
    admin: Annotated[str, about("Address of /livez and /metrics, HOST:PORT.")] = "127.0.0.1:9465"


class Monitor(Section, frozen=True, kw_only=True):
    """Detection and alerts: how many false alerts to accept, and when a slice counts as unknown."""

    pages_per_30_days: Annotated[
        float,
        about(
            "Expected number of false pages in 30 days, for the whole fleet: an upper bound. Falsely confirmed "
            "discovered slices are bounded by the same number.",
            gt=0,
            le=30,
        ),
    ] = 0.1
    tickets_per_30_days: Annotated[
        float,
        about(
            "Expected number of false tickets in 30 days, for the whole fleet: an upper bound. Tickets come earlier than pages and are more often wrong.",
            gt=0,
            le=300,
        ),
    ] = 1.0
    min_groups: Annotated[
        int, about("A slice with fewer compared exchanges is `unknown`, never `ok`.", "exchanges", ge=1)
    ] = 300
    max_loss_ratio: Annotated[
        float,
        about(
            "A slice with a larger share of lost samples is `unknown`, because the lost ones may hide a drift.",
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
    reorder_s: Annotated[
        float,
        about(
            "Exchanges are folded in the order of their capture, and wait this long for earlier ones. An exchange that comes "
            "later is folded at a random later moment. Set it to the time by which replays differ, from the fetch to the database.",
            "s",
            ge=0.5,
            le=300,
        ),
    ] = 5.0
    shards: Annotated[
        int,
        about(
            "Number of parts into which the models are divided, by their names, so that several monitors fold at a time, each the parts "
            "that it gets. 1: the monitor that leads folds all. With more, run as many monitors. A model is never divided.",
            ge=1,
            le=64,
        ),
    ] = 1
    tolerance: Annotated[
        float,
        about(
            "How far a slice may exceed its learned baseline without an alert (tau): 0.25 is 25 %. "
            "Larger means fewer alerts from seasons, and later ones.",
            ge=0,
            le=4,
        ),
    ] = 0.25
    discovery: Annotated[
        bool,
        about(
            "Search every night for slices where divergence concentrates. What it finds is tested on later "
            "traffic. `quantdrift slices search` searches at any time."
        ),
    ] = True
    n_clusters: Annotated[
        int,
        about(
            "Clusters of the inputs of each model that sets `embedding`: each becomes a slice. More of them are "
            "finer, and each has less traffic.",
            ge=2,
            le=64,
        ),
    ] = 16
    stale_after_s: Annotated[
        float, about("A slice with no comparison for this long is `unknown`.", "s", gt=0)
    ] = 21_600.0
    admin: Annotated[
        str,
        about(
            "Address of /livez, /metrics and /gate, HOST:PORT. On another host than this machine's loopback address /gate needs "
            "gate_token_file."
        ),
    ] = "127.0.0.1:9466"
    gate_token_file: Annotated[
        str,
        about(
            "File with one token, or one `NAME sha256:HEX [until=TIME] [MODEL ...]` a line, with which programs that roll out a model ask "
            "/gate for verdicts. It is read again for each request. Empty: none, and only a loopback address answers."
        ),
    ] = ""
    gate_max_age_s: Annotated[
        float,
        about("/gate promotes and rolls back by no verdict that is older.", "s", gt=0),
    ] = 86_400.0


class Notify(Section, frozen=True, kw_only=True):
    """Where the monitor sends alerts without Prometheus: to Alertmanager, and to a webhook of your own."""

    alertmanager: Annotated[
        tuple[str, ...],
        about(
            "Addresses of Alertmanager (API v2), every one of a cluster, e.g. https://alertmanager:9093; http:// on this machine, "
            "http+plaintext:// elsewhere. Empty: none."
        ),
    ] = ()
    alertmanager_headers_file: Annotated[
        str, about("File with `name=value` lines that are sent to Alertmanager, such as tokens. Empty: none.")
    ] = ""
    webhook_url: Annotated[
        str,
        about("Address that gets each change of an alert by POST, as `webhook_format` says. Empty: none."),
    ] = ""
    webhook_format: Annotated[
        WebhookFormat,
        about(
            "What it gets: `json`, a signed document for a program, or a message for the incoming webhook of a chat: `slack` or `teams`."
        ),
    ] = WebhookFormat.JSON
    webhook_key_file: Annotated[
        str,
        about(
            "Key file (`quantdrift keys new FILE`) whose current key signs what is sent to webhook_url. A chat needs none."
        ),
    ] = ""
    webhook_headers_file: Annotated[
        str, about("File with `name=value` lines that are sent to webhook_url, such as tokens. Empty: none.")
    ] = ""
    runbook_url: Annotated[
        str,
        about("Address of your runbook (https://...), which every alert carries. Empty: alerts carry none."),
        Meta(pattern=r"^(|https?://\S+)$"),
    ] = ""
    ca_file: Annotated[
        str,
        about(
            "CA certificates (PEM) that verify Alertmanager and the webhook (https://). Empty: the system's."
        ),
    ] = ""
    certificate_file: Annotated[str, about("Client certificate (PEM) for them. Empty: none.")] = ""
    key_file: Annotated[
        str, about("Key (PEM, no passphrase) of the client certificate. Empty: it is in certificate_file.")
    ] = ""


class TelemetryOptions(Section, frozen=True, kw_only=True):
    """OpenTelemetry: alerts as events, gauges and replay spans over OTLP (gRPC); logs on stderr."""

    otlp_endpoint: Annotated[
        str,
        about(
            "Address of the collector (gRPC), e.g. https://otel-collector:4317; http:// on this machine, "
            "http+plaintext:// elsewhere. Empty: alerts are in Postgres and /metrics only."
        ),
    ] = ""
    ca_file: Annotated[
        str,
        about(
            "CA certificates (PEM) that verify the collector (https://). Empty: the public ones that the gRPC library contains."
        ),
    ] = ""
    certificate_file: Annotated[str, about("Client certificate (PEM) for the collector. Empty: none.")] = ""
    key_file: Annotated[
        str, about("Key (PEM, no passphrase) of the client certificate. Empty: it is in certificate_file.")
    ] = ""
    otlp_headers_file: Annotated[
        str,
        about("File with `name=value` lines that are sent to the collector, such as tokens. Empty: none."),
    ] = ""
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
    evaluations: Annotated[
        bool,
        about(
            "Send an event `gen_ai.evaluation.result` for each compared answer of a language model, as a child of the client's span. Needs "
            "`otlp_endpoint`, and `traceparent` in requests."
        ),
    ] = False
    log_level: Annotated[
        str,
        about("Least level of log lines: `debug`, `info`, `warning` or `error`."),
        Meta(pattern="^(debug|info|warning|error)$"),
    ] = "info"
    log_json: Annotated[bool, about("Write each log line as one JSON object, for log collectors.")] = False
