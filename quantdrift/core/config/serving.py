"""The options of what runs beside a model, and of the way to the record."""

import re
from typing import Annotated

from msgspec import Meta

from quantdrift.core.config.section import GIB, MIB, Section, about
from quantdrift.core.records import BodyStratum, HeaderStratum, Protocol


class Stream(Section, frozen=True, kw_only=True):
    """NATS JetStream, which carries exchanges from the sidecars to the shadow workers."""

    url: Annotated[
        str,
        about(
            "Server, or several separated by commas. With tls:// nothing is sent before the TLS handshake. "
            "`quantdrift up` starts one of its own."
        ),
    ] = "nats://127.0.0.1:4222"
    credentials_file: Annotated[str, about("NATS credentials (.creds). Empty: none are needed.")] = ""
    ca_file: Annotated[
        str,
        about(
            "Authorities (PEM) that must have signed the server's certificate; asks for TLS. Empty: the system's."
        ),
    ] = ""
    certificate_file: Annotated[
        str, about("Certificate (PEM) that is shown to the server; asks for TLS. Empty: none.")
    ] = ""
    key_file: Annotated[
        str, about("Key (PEM, no passphrase) of that certificate. Empty: it stands in certificate_file.")
    ] = ""
    name: Annotated[
        str,
        about("Prefix of streams and subjects. Change it to keep two installations apart on one cluster."),
        Meta(pattern=r"^[A-Za-z0-9_-]+$"),
    ] = "quantdrift"
    max_age_s: Annotated[
        float,
        about(
            "How long captured payloads may wait for a shadow. Also how long they exist at all.", "s", gt=0
        ),
    ] = 3600.0
    max_bytes: Annotated[
        int,
        about(
            "Disk for waiting exchanges. When it is full, new ones are refused and counted.", "bytes", gt=0
        ),
    ] = 2 * GIB
    replicas: Annotated[
        int, about("Copies in the NATS cluster. 3 survives the loss of a server.", ge=1, le=5)
    ] = 1

    @property
    def address(self) -> str:
        """The servers without any credentials that stand in the URL: for logs and messages."""
        return re.sub(r"//[^@/,]*@", "//", self.url)

    @property
    def requires_tls(self) -> bool:
        """Whether plaintext is refused: one address or one file that asks for TLS makes it the rule for every server."""
        files = self.ca_file or self.certificate_file or self.key_file
        return bool(files) or any(
            one.strip().lower().startswith(("tls://", "wss://")) for one in self.url.split(",")
        )


class Storage(Section, frozen=True, kw_only=True):
    """Postgres, the record. The address is a secret: QUANTDRIFT_DSN, or a file."""

    dsn_file: Annotated[
        str, about("File that holds the Postgres address. Empty: QUANTDRIFT_DSN. A sidecar never reads it.")
    ] = ""
    ca_file: Annotated[
        str,
        about(
            "Authorities (PEM) that must have signed the server's certificate; without sslmode in the address it "
            "means verify-full. Empty: sslrootcert in the address, or the system's."
        ),
    ] = ""
    certificate_file: Annotated[
        str,
        about(
            "Certificate (PEM) that is shown to the server; asks for TLS as ca_file does. Empty: sslcert in the address, "
            "or none."
        ),
    ] = ""
    key_file: Annotated[
        str,
        about(
            "Key (PEM, no passphrase) of that certificate. Empty: sslkey in the address, or it stands in certificate_file."
        ),
    ] = ""
    pool_size: Annotated[int, about("Connections per process.", ge=2, le=64)] = 4
    statement_timeout_s: Annotated[
        float, about("Longest statement before Postgres cancels it.", "s", gt=0)
    ] = 30.0
    retention_days: Annotated[
        int,
        about("Comparisons, batches and tallies older than this are dropped; roll-ups stay.", "days", ge=2),
    ] = 35
    quarantine_days: Annotated[
        int, about("How long a quarantined exchange keeps its payload.", "days", ge=1)
    ] = 1
    superseded_days: Annotated[
        int,
        about(
            "How long baselines keep their content, and detectors their row, once in force no more; at least"
            " retention_days.",
            "days",
            ge=2,
        ),
    ] = 90


class Sidecar(Section, frozen=True, kw_only=True):
    """The relay beside the inference pod. Bounds here bound its memory whatever clients do."""

    listen: Annotated[
        str, about("Address the clients connect to, HOST:PORT. Empty: no relay, only the ways of [intake].")
    ] = "0.0.0.0:8000"
    backend: Annotated[str, about("The inference server behind it, HOST:PORT.")] = "127.0.0.1:8001"
    admin: Annotated[str, about("Address of /livez, /readyz and /metrics, HOST:PORT.")] = "0.0.0.0:9464"
    source: Annotated[
        str, about("Name of this sidecar in every record. Empty: POD_NAME, else the host name.")
    ] = ""
    workers: Annotated[
        int,
        about("Relay processes on one listening socket. One per core that serving can spare.", ge=1, le=32),
    ] = 1
    drain_delay_s: Annotated[
        float, about("After SIGTERM the port stays open so long: endpoint removal takes time.", "s", ge=0)
    ] = 5.0
    grace_s: Annotated[
        float, about("From SIGTERM to the end. Keep it below the pod's termination grace period.", "s", gt=0)
    ] = 25.0
    max_connections: Annotated[
        int,
        about(
            "Connections that one relay worker observes at the same time; those beyond it pass unobserved.",
            ge=1,
        ),
    ] = 2048
    max_exchange_bytes: Annotated[
        int, about("Largest request and response, together, that is held for capture.", "bytes", ge=1024)
    ] = 16 * MIB
    max_held_bytes: Annotated[
        int,
        about(
            "Memory of one relay worker for unfinished exchanges. Half as much again may wait between it and the capture "
            "process, and half as much in the capture process. At least twice max_exchange_bytes.",
            "bytes",
            ge=1024,
        ),
    ] = 128 * MIB
    pause_file: Annotated[
        str,
        about(
            "While this file is there nothing is sampled, or nothing of the models that its lines name. Empty: none. "
            "Needs no NATS; `quantdrift pause` stops the whole fleet."
        ),
    ] = ""
    tally_interval_s: Annotated[float, about("How often exact counts are published.", "s", gt=0)] = 10.0

    @property
    def handoff_bytes(self) -> int:
        """Most that waits between a relay worker, or the intake, and the capture process.

        An exchange waits there for less time than it takes to complete, so half of `max_held_bytes` is enough.
        """
        return self.max_held_bytes // 2

    @property
    def queue_bytes(self) -> int:
        """Most that waits in the capture process for the stream to acknowledge: as much as can come in at once."""
        return self.max_held_bytes // 2


class Capture(Section, frozen=True, kw_only=True):
    """What is recorded about an exchange beside its tensors. Nothing else leaves the pod."""

    protocols: Annotated[
        tuple[Protocol, ...],
        about("What the servers behind the sidecar speak. Other requests pass uncounted."),
    ] = tuple(Protocol)
    headers: Annotated[
        tuple[str, ...],
        about("Request headers recorded as `header.NAME`, lower case. All others are dropped."),
    ] = ("x-request-id",)
    parameters: Annotated[tuple[str, ...], about("Request parameters recorded as `parameter.NAME`.")] = ()
    json: Annotated[
        tuple[str, ...], about("Paths into the request's JSON part, as `a.b.0`, recorded as `json.PATH`.")
    ] = ()
    hmac: Annotated[
        tuple[str, ...],
        about("Attributes recorded only as a keyed hash, e.g. `header.x-user`: equal values stay equal."),
    ] = ()
    hmac_key_file: Annotated[
        str, about("Key of that hash. Empty: QUANTDRIFT_HMAC_KEY. Needed as soon as `hmac` names anything.")
    ] = ""


class Intake(Section, frozen=True, kw_only=True):
    """Ways in beside the relay, none of them on the serving path. A bound here is shared by all of them."""

    listen: Annotated[
        str,
        about(
            "Address of the HTTP intake, HOST:PORT: POST /v1/exchanges, and the KServe logger's sink where it is on. "
            "Empty: off."
        ),
    ] = ""
    token_file: Annotated[
        str,
        about(
            "File with the token that callers of `listen` and `ext_proc` must give. Empty: QUANTDRIFT_INTAKE_TOKEN. Without "
            "either, `listen` answers 401 and `ext_proc` is at a loopback address."
        ),
    ] = ""
    kserve_logger: Annotated[
        bool,
        about(
            "Take the events of KServe's logger in on `listen`: POST /kserve/TOKEN, or POST / with the bearer token."
        ),
    ] = False
    ext_proc: Annotated[
        str,
        about(
            "Address of the Envoy external processor (gRPC, observability mode), HOST:PORT. Empty: off. Needs the "
            "extra `ext-proc`, and the token where the address is not a loopback address."
        ),
    ] = ""
    tap: Annotated[
        str, about("Path of the Unix socket that taps in Python servers write to. Empty: off.")
    ] = ""
    pair_window_s: Annotated[
        float, about("How long one half of a pair waits for the other before it is lost.", "s", gt=0, le=600)
    ] = 30.0
    max_pending_bytes: Annotated[
        int, about("Most that is held of exchanges that are not complete.", "bytes", ge=1024)
    ] = 64 * MIB


class Sampling(Section, frozen=True, kw_only=True):
    """Which exchanges are taken. Every probability is known, stored, and undone by weighting."""

    rate: Annotated[
        float, about("Share of requests taken where no header stratum matches (first phase).", ge=0, le=1)
    ] = 0.01
    body_rate: Annotated[
        float,
        about(
            "Base rate after decoding (second phase): at least this share of everything, as far as the first phase takes it.",
            ge=0,
            le=1,
        ),
    ] = 1.0
    sticky_header: Annotated[
        str,
        about(
            "Header whose value decides: one user is taken whole or not at all, and is one observation. Empty: every request anew."
        ),
    ] = ""
    paused: Annotated[bool, about("Take nothing. Counting goes on.")] = False
    central: Annotated[
        bool,
        about("Follow the monitor's policy while there is one; the rates here hold while there is none."),
    ] = True
    replays_per_s: Annotated[
        float,
        about(
            "Items per second that the monitor spreads over fleet and slices. 0: it makes no policy, and the rates here hold.",
            "1/s",
            ge=0,
        ),
    ] = 0.0
    max_exchanges_per_s: Annotated[
        float, about("Hard local cap, whatever the rates say. Above it: lost, `rate_cap`.", "1/s", gt=0)
    ] = 200.0
    max_bytes_per_s: Annotated[
        int, about("Hard local cap on what leaves the pod. Above it: lost, `byte_cap`.", "bytes/s", gt=0)
    ] = 32 * MIB
    header_strata: Annotated[
        tuple[HeaderStratum, ...],
        about("Rates by method, path and headers; the first that matches decides. Boost here what is rare."),
    ] = ()
    body_strata: Annotated[
        tuple[BodyStratum, ...],
        about(
            "Total rates by what is known after decoding, above body_rate; the largest that matches decides."
        ),
    ] = ()
