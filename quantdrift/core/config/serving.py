"""Options of NATS, Postgres, the sidecar, capture, the intake and sampling."""

import re
from typing import Annotated

from msgspec import Meta

from quantdrift.core.config.address import ServerUrl, read_server_url
from quantdrift.core.config.section import GIB, MIB, Section, about
from quantdrift.core.records import BodyStratum, HeaderStratum, Protocol, TextAttribute


class Stream(Section, frozen=True, kw_only=True):
    """NATS JetStream, which carries exchanges from the sidecars to the shadow workers."""

    url: Annotated[
        str,
        about(
            "Address of the NATS server, or several separated by commas: tls:// with TLS, nats:// on this machine, "
            "nats+plaintext:// without TLS elsewhere. `quantdrift up` starts a server of its own."
        ),
    ] = "nats://127.0.0.1:4222"
    credentials_file: Annotated[
        str,
        about(
            "NATS credentials (.creds), or the key of a user (.nk), such as `quantdrift setup nats` creates. "
            "Empty: the server asks for none."
        ),
    ] = ""
    url_file: Annotated[
        str,
        about(
            "File with this address instead of `url`, for one with a password or token. It is read for each "
            "connection, so that a new password needs no restart. Empty: `url`."
        ),
    ] = ""
    ca_file: Annotated[
        str,
        about("CA certificates (PEM) that verify the server; requires TLS. Empty: the system's."),
    ] = ""
    certificate_file: Annotated[str, about("Client certificate (PEM); requires TLS. Empty: none.")] = ""
    key_file: Annotated[
        str, about("Key (PEM, no passphrase) of the client certificate. Empty: it is in certificate_file.")
    ] = ""
    payload_key_file: Annotated[
        str,
        about(
            "Key file (`quantdrift keys new`) that encrypts exchanges in the stream and in the quarantine. Sidecars and "
            "shadow need it, and read it again when it changes. Empty: they are not encrypted."
        ),
    ] = ""
    name: Annotated[
        str,
        about("Prefix of streams and subjects. Two installations on one NATS cluster need different ones."),
        Meta(pattern=r"^[A-Za-z0-9_-]+$"),
    ] = "quantdrift"
    max_age_s: Annotated[
        float,
        about(
            "How long an exchange may wait for a shadow worker. After that NATS deletes it, "
            "payload included.",
            "s",
            gt=0,
        ),
    ] = 3600.0
    max_bytes: Annotated[
        int,
        about(
            "Disk space for waiting exchanges. When it is full, new ones are refused and counted.",
            "bytes",
            gt=0,
        ),
    ] = 2 * GIB
    exemplar_bytes: Annotated[
        int,
        about(
            "Disk space for exemplars of all slices, if a model keeps them. When it is full, the oldest go, of whatever slice they are.",
            "bytes",
            ge=MIB,
        ),
    ] = 256 * MIB
    replicas: Annotated[
        int,
        about(
            "Copies of each stream in the NATS cluster. With 3 the loss of one server loses nothing.",
            ge=1,
            le=5,
        ),
    ] = 1

    @property
    def address(self) -> str:
        """The servers without any credentials that stand in the URL: for logs and messages."""
        return re.sub(r"//[^@/,]*@", "//", self.url)

    @property
    def servers(self) -> list[ServerUrl]:
        """The servers of `url`.

        Raises
        ------
        AddressError
            One of them is not the URL of a NATS server.
        """
        return [read_server_url(server, "nats", "tls", "ws", "wss") for server in self.url.split(",")]

    @property
    def requires_tls(self) -> bool:
        """Whether plaintext is refused: one address or one file that asks for TLS makes it the rule for every server."""
        files = self.ca_file or self.certificate_file or self.key_file
        return bool(files) or any(
            server.strip().lower().startswith(("tls://", "wss://")) for server in self.url.split(",")
        )


class Storage(Section, frozen=True, kw_only=True):
    """Postgres, the database of results. Its address is a secret: QUANTDRIFT_DSN, or a file. Sidecars never read it."""

    dsn_file: Annotated[
        str, about("File with the Postgres address (postgresql://...). Empty: the variable QUANTDRIFT_DSN.")
    ] = ""
    retention_days: Annotated[
        int,
        about(
            "Comparisons, batches and tallies are deleted after this time; sums and alerts stay for history_days.",
            "days",
            ge=2,
        ),
    ] = 35
    history_days: Annotated[
        int,
        about(
            "Hourly and daily sums, resolved alerts, changes of verdict, sent events, records of reports, and slices and "
            "versions that lost their place are deleted after this time, or after retention_days if that is longer. "
            "Open alerts and waiting events stay.",
            "days",
            ge=2,
        ),
    ] = 400
    condense_after_days: Annotated[
        int,
        about(
            "Comparisons of UTC days that are older are kept a thousand in a row, which takes a fifth of the space, and single old ones are "
            "found more slowly. At least 3; 0: never.",
            "days",
            ge=0,
        ),
    ] = 0
    write_blocks: Annotated[
        bool,
        about(
            "A shadow worker stores the comparisons of a batch in one row of condensed_block in place of a row of comparison for each, which "
            "takes a quarter of the space and half of the time; the leading monitor merges them to a thousand in a row later. Single comparisons "
            "are found more slowly. Set it once all workers, monitors and pages have this release."
        ),
    ] = False
    quarantine_days: Annotated[
        int, about("How long the payload of a quarantined exchange is kept.", "days", ge=1)
    ] = 1


class Sidecar(Section, frozen=True, kw_only=True):
    """The relay next to the inference server. These bounds limit its memory, whatever clients do."""

    listen: Annotated[
        str,
        about("Address that clients connect to, HOST:PORT. Empty: no relay, only the inputs of [intake]."),
    ] = "0.0.0.0:8000"
    backend: Annotated[str, about("Address of the inference server, HOST:PORT.")] = "127.0.0.1:8001"
    admin: Annotated[
        str,
        about(
            "Address of /metrics, /livez, /readyz and of /pause, which shows what is paused, HOST:PORT. It is served by a process of "
            "its own. 0.0.0.0 lets a Prometheus scrape from outside."
        ),
    ] = "127.0.0.1:9464"
    probes: Annotated[
        str,
        about(
            "Address that answers /livez and /readyz and nothing else, HOST:PORT, for probes from outside, such as a "
            "kubelet's. It is served by the supervisor. Empty: only the admin port answers them."
        ),
    ] = ""
    workers: Annotated[
        int,
        about("Relay processes that share the port: one for each core that may be used.", ge=1, le=32),
    ] = 1
    drain_delay_s: Annotated[
        float,
        about(
            "How long new connections are accepted after SIGTERM, until load balancers have "
            "removed the endpoint.",
            "s",
            ge=0,
        ),
    ] = 5.0
    grace_s: Annotated[
        float,
        about(
            "Time from SIGTERM to the end of the process. Keep it below the pod's termination grace period.",
            "s",
            gt=0,
        ),
    ] = 25.0
    max_connections: Annotated[
        int,
        about(
            "Most connections that one relay worker observes at a time; idle ones give way to those that send a request. "
            "Where all are busy, requests of further ones are relayed and counted as lost.",
            ge=1,
        ),
    ] = 512
    max_exchange_bytes: Annotated[
        int,
        about(
            "Largest request and response, together, that is captured; larger ones are lost and counted as `too_large`. Images in JSON "
            "need more than the default, and then the container needs more memory: `quantdrift config check` prints how much.",
            "bytes",
            ge=1024,
        ),
    ] = 2 * MIB
    max_held_bytes: Annotated[
        int,
        about(
            "Memory of one relay worker for unfinished exchanges, at least twice "
            "max_exchange_bytes. Each of the two queues behind it may take half as much. 0: eight times max_exchange_bytes.",
            "bytes",
            ge=0,
        ),
    ] = 0
    pause_file: Annotated[
        str,
        about(
            "While this file exists nothing is sampled, or nothing of the models that its lines "
            "name. Empty: none. It needs no NATS; `quantdrift pause` stops a whole fleet."
        ),
    ] = ""
    tally_interval_s: Annotated[
        float, about("Time between two publications of the sidecar's counts.", "s", gt=0)
    ] = 10.0

    @property
    def held_bytes(self) -> int:
        """Memory of one relay worker for unfinished exchanges."""
        return self.max_held_bytes or 8 * self.max_exchange_bytes

    @property
    def handoff_bytes(self) -> int:
        """Most that waits between a relay worker, or the intake, and the capture process.

        An exchange waits there for less time than it takes to complete, so half of `held_bytes` is enough.
        """
        return self.held_bytes // 2

    @property
    def queue_bytes(self) -> int:
        """Most that waits in the capture process for the stream to acknowledge: as much as can come in at once."""
        return self.held_bytes // 2


class Capture(Section, frozen=True, kw_only=True):
    """What is recorded of an exchange in addition to its tensors. Nothing else leaves the pod."""

    protocols: Annotated[
        tuple[Protocol, ...],
        about("Protocols of the servers behind the sidecar. Other requests are relayed and not counted."),
    ] = tuple(Protocol)
    headers: Annotated[
        tuple[str, ...],
        about("Request headers to record, in lower case, as `header.NAME`. All others are dropped."),
    ] = ("x-request-id",)
    parameters: Annotated[tuple[str, ...], about("Request parameters to record, as `parameter.NAME`.")] = ()
    json: Annotated[
        tuple[str, ...], about("Paths in the request's JSON to record, e.g. `a.b.0`, as `json.PATH`.")
    ] = ()
    text: Annotated[
        tuple[TextAttribute, ...],
        about(
            "What to record of chats, completions and texts to embed, as `text.NAME`, each a word of a short list: `language` (needs the "
            "extra `language`), `script`, `prompt_length`, `answer_length`, `turns`, `tools`, `json`, `reasoning`, `code`, and `system`, the "
            "keyed hash of the system prompt."
        ),
    ] = ()
    hmac: Annotated[
        tuple[str, ...],
        about(
            "Of these attributes only a keyed hash is recorded, e.g. `header.x-user`. Equal "
            "values have equal hashes."
        ),
    ] = ()
    hmac_key_file: Annotated[
        str,
        about(
            "File with the key of that hash: a key file (`quantdrift keys new`), whose keys can be replaced, or any "
            "text. Empty: QUANTDRIFT_HMAC_KEY. Required when `hmac` names anything, or `text` names `system`."
        ),
    ] = ""
    time_zone: Annotated[
        str,
        about(
            "Time zone in which slices by time count days and hours. Name that of the people who send the "
            "requests, e.g. `Europe/Berlin`."
        ),
    ] = "UTC"

    @property
    def hashed(self) -> tuple[str, ...]:
        """The attributes of which only a keyed hash is recorded."""
        return (*self.hmac, *(["text.system"] if TextAttribute.SYSTEM in self.text else []))


class Intake(Section, frozen=True, kw_only=True):
    """Other inputs than the relay; none of them is on the serving path. They share these bounds."""

    listen: Annotated[
        str,
        about("Address of the HTTP intake, HOST:PORT (POST /v1/exchanges). Empty: off."),
    ] = ""
    token_file: Annotated[
        str,
        about(
            "File of the callers: one token, or lines of NAME sha256:HEX [until=TIME] [MODEL ...], where "
            "cert:IDENTITY (a name in a client certificate) or uid:NUMBER (the user of a tap) may stand in place of "
            "the hash of a token. It is read again when it changes. Empty: QUANTDRIFT_INTAKE_TOKEN. Without a token `listen` answers 401, and `ext_proc` must "
            "be a loopback address; what it receives can then open tickets, and never page."
        ),
    ] = ""
    certificate_file: Annotated[
        str,
        about(
            "Certificate (PEM, with those of its authorities) of the ports of the intake: `listen`, `kserve_logger` and "
            "`ext_proc` then speak TLS only. It is read again when it changes. Empty: no TLS."
        ),
    ] = ""
    key_file: Annotated[str, about("Key of `certificate_file` (PEM, without a password).")] = ""
    client_ca_file: Annotated[
        str,
        about(
            "Certificates (PEM) of the authorities that sign the certificates of callers: a caller with a certificate "
            "whose name is in `token_file` as cert:IDENTITY needs no token. The ports then speak TLS 1.3. It is read "
            "again when it changes. Empty: callers need a token."
        ),
    ] = ""
    kserve_logger: Annotated[
        str,
        about(
            "Address of the sink of KServe's logger, HOST:PORT (POST /kserve/TOKEN, or POST / with a bearer token). "
            "Empty: off. Needs a token."
        ),
    ] = ""
    ext_proc: Annotated[
        str,
        about(
            "Address of the Envoy external processor (gRPC, observability mode), HOST:PORT. "
            "Empty: off. Needs the extra `ext-proc`, and a token unless it is a loopback address."
        ),
    ] = ""
    tap: Annotated[str, about("Path of the Unix socket for taps in Python servers. Empty: off.")] = ""
    tap_uids: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=2**32 - 2)], ...],
        about(
            "User ids of servers with a tap that may report on all models, beside the user of the sidecar; a line "
            "with uid:NUMBER in `token_file` binds a user to models. Taps of other users that the mode of "
            "the socket lets in can open tickets, and never page."
        ),
    ] = ()
    pair_window_s: Annotated[
        float,
        about(
            "How long a request waits for its response, or the other way round, before it counts as lost.",
            "s",
            gt=0,
            le=600,
        ),
    ] = 30.0
    max_pending_bytes: Annotated[
        int, about("Memory for exchanges whose second half has not come yet.", "bytes", ge=1024)
    ] = 64 * MIB


class SamplingOptions(Section, frozen=True, kw_only=True):
    """Which exchanges are captured. Every probability is known and recorded, and results are weighted by it."""

    rate: Annotated[
        float,
        about("Share of requests to capture where no header stratum matches (first phase).", ge=0, le=1),
    ] = 0.01
    body_rate: Annotated[
        float,
        about(
            "Share of all requests that are kept after decoding (second phase); it is limited by what `rate` captured. 1: all captured ones are kept.",
            ge=0,
            le=1,
        ),
    ] = 1.0
    sticky_header: Annotated[
        str,
        about(
            "Header that names the user: a user is sampled as a whole or not at all, and counts "
            "as one observation. Empty: each request is sampled by itself."
        ),
    ] = ""
    replays_per_s: Annotated[
        float,
        about(
            "Items per second that the whole fleet may replay. The monitor divides them among the slices, and sidecars follow. 0: the rates of this section apply.",
            "1/s",
            ge=0,
        ),
    ] = 0.0
    max_exchanges_per_s: Annotated[
        float,
        about(
            "Most exchanges per second that one sidecar sends, whatever the rates are. What is above is lost and counted as `rate_cap`.",
            "1/s",
            gt=0,
        ),
    ] = 200.0
    max_bytes_per_s: Annotated[
        int,
        about(
            "Most bytes per second that one sidecar sends. What is above is lost and counted as `byte_cap`.",
            "bytes/s",
            gt=0,
        ),
    ] = 32 * MIB
    header_strata: Annotated[
        tuple[HeaderStratum, ...],
        about("Rates by method, path and headers; the first match decides. Raise the rate of what is rare."),
    ] = ()
    body_strata: Annotated[
        tuple[BodyStratum, ...],
        about(
            "Shares of all requests, above body_rate, by what is known after decoding; the "
            "largest match decides."
        ),
    ] = ()


class LoadOptions(Section, frozen=True, kw_only=True):
    """Which endpoints `quantdrift load` may drive past their capacity."""

    targets: Annotated[
        tuple[
            Annotated[
                str, Meta(pattern=r"^(https|http(\+plaintext)?|grpcs|grpc(\+plaintext)?)://[^/?#@\s]+/?$")
            ],
            ...,
        ],
        about(
            "Endpoints that a load test may drive, such as `http://127.0.0.1:8000`. Any other one is refused, unless `--allow` names it. "
            "A load test takes an endpoint beyond what it can do: name none that serves production."
        ),
    ] = ()
