"""The records that processes exchange, and their enums.

The sidecar writes them, JetStream transports them, the shadow and the monitor read them. They are frozen, and
`quantdrift.core.codec` defines their only wire form.
"""

from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import msgspec

from quantdrift.core.plugins import Extensible


class Verdict(StrEnum):
    """The monitor's assessment of one slice of one candidate version."""

    OK = "ok"
    WARNING = "warning"  # opens a ticket
    FIRING = "firing"  # pages
    UNKNOWN = "unknown"  # too little data, too much loss, or no reference: never silently green


class Metric(Extensible):
    """A divergence between candidate and reference, per item, or a figure of the candidate alone; every one is >= 0.

    `quantdrift.core.signals` has a record of each that is watched. Plug-ins add signals.
    """

    FLIP = "flip"  # 1 where the decision differs, else 0: of a classifier the top class
    TOPK = "topk"  # 1 where the set of the k top classes differs, else 0
    JS = "js"  # Jensen-Shannon divergence in nats, at most ln 2
    DIVERGENCE = (
        "divergence"  # the graded one of the model's task, may be infinite: of a classifier KL in nats
    )
    MARGIN = "margin"  # absolute change of the gap between the two top probabilities, in [0, 1]
    LATENCY = (
        "latency"  # of the candidate alone: 1 where it took longer than `models.budget.latency_p99_s`, else 0
    )
    CHANGED_TOKENS = "changed-tokens"  # of generated text: share of the positions of an answer at which the likeliest token differs
    BROKEN = "broken-answers"  # of generated text: 1 where it is empty, breaks the form that was asked for, or has another value
    SLOW_START = "slow-starts"  # of streamed text: 1 where the first token took longer than `models.budget.first_token_p99_s`, else 0
    SLOW_TOKENS = "slow-tokens"  # of streamed text: 1 where each further token took longer than `models.budget.per_token_p99_s`, else 0
    FAR_TOKENS = "far-tokens"  # of generated text: share of the positions of an answer that diverge by more than `models.budget.divergence_p99`
    UNLIKELY = "unlikely-tokens"  # of sampled text: how far its tokens are among the least likely 5 % of the reference, 0.05 if both are equal

    @classmethod
    def group(cls) -> str:
        """Return the group of entry points that adds signals."""
        return "quantdrift.signals"


class Suspect(StrEnum):
    """Where to look first when the candidate is slow."""

    MODEL = "model"  # the answers have drifted too: what was deployed, the model or its engine
    ENGINE = "engine"  # the answers have not drifted, and all traffic together is too slow: the engine, the machine, the load
    TRAFFIC = "traffic"  # the answers have not drifted, and all traffic together is fast enough: the requests
    UNKNOWN = "unknown"  # too little is compared to say


class Side(StrEnum):
    """The model whose noise is measured, which is how much its output differs when it computes the same again."""

    REFERENCE = "reference"
    CANDIDATE = "candidate"


class Protocol(Extensible):
    """An inference protocol between clients and server that quantdrift can read."""

    OIP_REST = "oip-v2-rest"  # Open Inference v2 over HTTP: JSON and the binary tensor extension
    OIP_GRPC = "oip-v2-grpc"  # ModelInfer
    OIP_GRPC_STREAM = "oip-v2-grpc-stream"  # ModelStreamInfer
    KSERVE_V1 = "kserve-v1"
    TORCHSERVE = "torchserve"
    OPENAI_CHAT = "openai-chat"
    OPENAI_COMPLETIONS = "openai-completions"
    OPENAI_EMBEDDINGS = "openai-embeddings"
    OPENAI_RESPONSES = "openai-responses"
    ANTHROPIC_MESSAGES = "anthropic-messages"
    OLLAMA_CHAT = "ollama-chat"
    OLLAMA_GENERATE = "ollama-generate"
    GENERATE = "generate"  # the generate endpoints of Triton and KServe


GENERATED: Final = frozenset(
    {
        Protocol.OPENAI_CHAT,
        Protocol.OPENAI_COMPLETIONS,
        Protocol.OPENAI_RESPONSES,
        Protocol.ANTHROPIC_MESSAGES,
        Protocol.OLLAMA_CHAT,
        Protocol.OLLAMA_GENERATE,
        Protocol.GENERATE,
    }
)
"""Protocols in which text is generated. Their exchanges are recorded in the form of OpenAI's chat or completions."""


class TextAttribute(StrEnum):
    """What a sidecar can say of a chat, a completion or a text to embed: a word of a short list, never the text."""

    LANGUAGE = "language"
    SCRIPT = "script"
    PROMPT_LENGTH = "prompt_length"
    ANSWER_LENGTH = "answer_length"
    TURNS = "turns"
    TOOLS = "tools"
    JSON = "json"
    REASONING = "reasoning"
    CODE = "code"
    SYSTEM = "system"  # a keyed hash


class Way(StrEnum):
    """How an exchange came in."""

    RELAY = "relay"  # the serving path itself
    TAP = "tap"
    INTAKE = "intake"
    KSERVE_LOGGER = "kserve_logger"
    EXT_PROC = "ext_proc"


UNVERIFIED: Final = " (unverified)"
"""The end of the name of a version whose exchanges came from senders that nobody has checked. It has slices, detectors and
baselines of its own: what such senders say changes nothing in the version without this end, and pages nobody."""


class Loss(StrEnum):
    """Why a request that the first phase chose did not reach the stream.

    The order is the layout of the shared counters: append, never reorder.
    """

    HELD_BYTES = "held_bytes"  # relay: it would exceed the memory limit
    TRUNCATED = "truncated"  # relay: the connection ended during it, not by the client
    OBSERVER_ERROR = "observer_error"  # relay: the observer raised an error and dropped it
    CAPTURE_DOWN = "capture_down"  # relay: there was no capture process
    CAPTURE_BEHIND = "capture_behind"  # relay: the capture process is too slow
    ERROR_STATUS = "error_status"  # capture: the candidate answered with an error
    UNKNOWN_MODEL = "unknown_model"  # capture: no such model in the configuration
    DECODE = "decode"  # capture: the bytes are not what the protocol says
    SHARED_MEMORY = "shared_memory"  # capture: its tensors were in shared memory
    SEQUENCE = "sequence"  # capture: one request of a stateful sequence cannot be replayed alone
    TOO_LARGE = "too_large"  # above sidecar.max_exchange_bytes; capture: above the stream's payload limit
    RATE_CAP = "rate_cap"  # relay, intake or capture: the local cap on exchanges per second
    BYTE_CAP = "byte_cap"  # relay, intake or capture: the local cap on egress bytes per second
    QUEUE_FULL = "queue_full"  # capture: the stream is too slow and the local queue is full
    STREAM_FULL = "stream_full"  # capture: the stream is full and refused it
    PUBLISH = "publish"  # capture: the stream could not be reached or did not acknowledge in time
    CAPTURE_ERROR = "capture_error"  # capture: an error of our own
    FRAMING = "framing"  # relay: the observer lost the framing of its connection during it
    UNPAIRED = "unpaired"  # intake: the other half did not arrive in time, or could not be assigned
    METADATA = "metadata"  # capture: neither the wire nor the configuration gives names or shapes
    PROCESS_ENDED = (
        "process_ended"  # relay, intake or capture: the process, or the socket, that had it is gone
    )
    TOO_COSTLY = "too_costly"  # capture: decoding it takes too much processor time
    UNOBSERVED = "unobserved"  # relay: its connection was not observed; how many there were is an estimate
    NO_KEY = "no_key"  # capture: it must be encrypted, and the key cannot be read
    CLIENT_ABORT = "client_abort"  # relay: the client left before the answer was complete


UNANSWERED: Final = frozenset((Loss.ERROR_STATUS, Loss.CLIENT_ABORT))
"""Reasons of requests that got no answer to compare: counted, and no loss of the model's answers."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One named tensor as it was on the wire.

    Parameters
    ----------
    name
        The tensor's name in the protocol.
    datatype
        Open Inference datatype: BOOL, UINT8..64, INT8..64, FP16, BF16, FP32, FP64 or BYTES.
    shape
        Dimensions, row-major.
    data
        Elements, little-endian, row-major, unpadded. BOOL is one byte; each BYTES element has its length before
        it as an unsigned 32-bit integer.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class HeaderStratum(msgspec.Struct, frozen=True, kw_only=True):
    """A header stratum: requests that the relay recognises before decoding, with their own sampling rate.

    Parameters
    ----------
    name
        Name of the stratum. `default` is the one of requests that match no other.
    headers
        Header names, in lower case, with the exact value that each must have. Empty: every request matches.
    rate
        Share of its requests to capture, from 0 to 1.
    method
        HTTP method that a request must have. Empty: any.
    path_prefix
        Prefix that the path must have. Empty: any.
    """

    name: str
    rate: float
    headers: dict[str, str] = {}
    method: str = ""
    path_prefix: str = ""


class Predicate(msgspec.Struct, frozen=True, kw_only=True):
    """A condition on one attribute or one feature of an item.

    Parameters
    ----------
    key
        `header.NAME`, `parameter.NAME`, `json.PATH` for attributes; `feature.NAME` for numbers.
    equals
        The value that an attribute must have; None if `low` and `high` are used.
    low, high
        The half-open interval [low, high) that a feature must lie in; None is unbounded. With `equals` and both of
        these None: any value without its own slice.
    """

    key: str
    equals: str | None = None
    low: float | None = None
    high: float | None = None


class BodyStratum(msgspec.Struct, frozen=True, kw_only=True):
    """A body stratum: exchanges that are recognised after decoding. Strata may overlap; the largest rate applies.

    Parameters
    ----------
    name
        Name of the stratum. `default` contains every exchange.
    where
        Conditions that must all be true: on attributes, on `model`, on `feature.candidate_margin`. Empty: every exchange.
    rate
        Share of all its exchanges to keep, from 0 to 1; it is limited by what the first phase captured.
    """

    name: str
    rate: float
    where: tuple[Predicate, ...] = ()


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling rates of one epoch.

    The total inclusion probability of an exchange is the smaller of two rates: that of the first header stratum that
    matches, and the largest of the body strata that match.

    Parameters
    ----------
    epoch
        Identifies the rates and the salt together; changes at least daily.
    header_strata
        First phase, in order: the first that matches decides; the last is `default`.
    body_strata
        Second phase; the last is `default`, the base rate of every exchange.
    """

    epoch: str
    header_strata: tuple[HeaderStratum, ...]
    body_strata: tuple[BodyStratum, ...]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How this exchange was sampled: policy, strata, probabilities and random numbers.

    Parameters
    ----------
    policy
        The complete rates in effect, so that an exchange can be interpreted without other data.
    header_stratum, body_stratum
        Names of the strata it fell into.
    pi1, pi2
        Inclusion probabilities of the phases; their product is the total one.
    u1, u2
        Random numbers of the phases in [0, 1): sampled because u1 < pi1 and u2 < pi2. To thin to a smaller, constant
        probability, use the same numbers.
    """

    policy: Policy
    header_stratum: str
    body_stratum: str
    pi1: float
    pi2: float
    u1: float
    u2: float

    @property
    def pi(self) -> float:
        """The total inclusion probability, in (0, 1]."""
        return self.pi1 * self.pi2


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """How long the candidate took for one exchange, as the relay saw it: from the last byte of the request on, in seconds.

    The time in which the request waits at the server, and the network between relay and server, are part of it.

    Parameters
    ----------
    last_byte_s
        Until the last byte of the response.
    first_token_s
        Of a stream: until the first byte of its content.
    per_token_s
        Of a stream whose tokens are counted: from the first byte to the last, for each token after the first.
    """

    last_byte_s: float
    first_token_s: float | None = None
    per_token_s: float | None = None


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One captured request with the candidate's response.

    Parameters
    ----------
    id
        32 hexadecimal digits, created at capture. Ids of clients are attributes.
    captured_at
        When the response was complete; aware, UTC. Immutable: the database is partitioned by it.
    source
        The sidecar that sampled it (pod name).
    model, version
        The candidate, as the configuration and the wire name it.
    protocol
        Name of the decoder that read it.
    inputs, outputs
        The tensors of the request and of the response.
    attributes
        Allow-listed headers, request parameters and JSON values, keyed `header.NAME`, `parameter.NAME`,
        `json.PATH`. Personal values are HMACed already.
    sampling
        How it was sampled.
    group
        Statistical unit that it belongs to: a session key (HMACed), or empty if it is its own unit.
    trace
        W3C `traceparent` of the production request, or empty.
    way
        How it came in.
    caller
        Who sent it, as the sidecar has checked it: a name in `intake.token_file`, or the user of a tap. Empty: nobody was
        checked.
    latency
        How long the candidate took; None: it was not measured, as for every way in but the relay.
    response_id
        The id that a server of language models gave its response; empty: it gave none.
    """

    id: str
    captured_at: datetime
    source: str
    model: str
    version: str
    protocol: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    sampling: Sampling
    attributes: dict[str, str] = {}
    group: str = ""
    trace: str = ""
    way: Way = Way.RELAY
    caller: str = ""
    latency: Latency | None = None
    response_id: str = ""

    @property
    def is_verified(self) -> bool:
        """Whether it is known who sent it: the relay saw it on the serving path, or the caller proved its identity."""
        return self.way is Way.RELAY or bool(self.caller)

    @property
    def stored_version(self) -> str:
        """The version that it is stored and judged under.

        A client may choose the version in a path: no verified exchange gets the end of an unverified one by that.
        """
        version = self.version
        while version.endswith(UNVERIFIED):
            version = version.removesuffix(UNVERIFIED)
        return version if self.is_verified else f"{version}{UNVERIFIED}"


class ExemplarKind(StrEnum):
    """Why an exchange is kept as an exemplar."""

    DAMAGED = "damaged"  # its answer changes, or its divergence is above the budget: the worst ones, not a fair sample
    RANDOM = "random"  # drawn with a known probability, whatever its answer is


class ExemplarItem(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one item of an exemplar.

    Parameters
    ----------
    index
        Number of the item in the exchange, from 0.
    flip, divergence
        As in `Metric`; None: undefined.
    """

    index: int
    flip: bool | None = None
    divergence: float | None = None


class Exemplar(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange that is kept with its payload, because it stands for a slice.

    Parameters
    ----------
    kind
        Why it is kept.
    slice
        Name of the slice.
    exchange
        The exchange as it was compared; its outputs are the served ones.
    items
        The items that belong to the slice.
    reference
        The outputs of the reference, for all items of the exchange.
    reference_digest
        SHA-256 of the reference, in hexadecimal digits.
    probability
        With which a random one was drawn from the compared exchanges of the slice, in (0, 1]; None: it is a damaged one,
        which was chosen and not drawn.
    compared_at
        When it was compared; aware, UTC.
    """

    kind: ExemplarKind
    slice: str
    exchange: Exchange
    items: tuple[ExemplarItem, ...]
    reference: tuple[Tensor, ...]
    reference_digest: str
    probability: float | None
    compared_at: datetime

    @property
    def pi(self) -> float | None:
        """Probability that an exchange of the slice was sampled and then drawn; None for a damaged one."""
        return None if self.probability is None else self.exchange.sampling.pi * self.probability


class ModelCount(msgspec.Struct, frozen=True, kw_only=True):
    """Exact counts of one model in one header stratum, of the requests that name their model.

    Parameters
    ----------
    taken
        Chosen by the first phase.
    lost
        Taken requests that were lost, by reason.
    published
        Taken requests that the stream has acknowledged.
    row
        Row of the sidecar's table of counts, as in the numbers of its exchanges; -1: they have no numbers.
    numbered
        The last number given to an exchange. It exceeds `published` if some are lost or in flight.
    thinned
        Of the taken, left out by the second phase.
    unknown
        Exchanges that named this model while it was not configured: a part of the stratum's `unknown_model`, not of
        `taken` here. Counted since the capture process started, and for a bounded number of names.
    configured
        Whether the sidecar is configured to capture it, or was since its start: what it loses without a model may be of
        this one. False: it is not, or the sidecar is older than this field.
    """

    taken: int
    lost: dict[Loss, int] = {}
    published: int = 0
    row: int = -1
    numbered: int = 0
    thinned: int = 0
    unknown: int = 0
    configured: bool = False


class StratumCount(msgspec.Struct, frozen=True, kw_only=True):
    """Exact counts of one header stratum since the sidecar started.

    Parameters
    ----------
    stratum
        Name of the header stratum.
    offered
        Inference requests seen on the wire.
    taken
        Offered requests that the first phase chose.
    thinned
        Taken requests that the second phase left out; not a loss, because the probability is known.
    published
        Taken requests that the stream has acknowledged.
    lost
        Taken requests that were lost, by reason. `taken = thinned + published + sum(lost) + still in flight`.
    models
        Taken and lost requests whose model is known, by model. Where requests were taken whose model is not known, each
        configured model has an entry.
    """

    stratum: str
    offered: int
    taken: int
    thinned: int
    published: int
    lost: dict[Loss, int] = {}
    models: dict[str, ModelCount] = {}


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration and the local pause of a process, as it reports them itself for the audit.

    Parameters
    ----------
    digest
        SHA-256 of all options that differ from their default, in hexadecimal digits.
    options
        These options by name, without credentials and contents of files; long values as their SHA-256.
    pause
        What is paused at this process alone, by its admin port or its file; None: nothing.
    """

    digest: str
    options: dict[str, Any]
    pause: dict[str, Any] | None = None


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """All counts of one sidecar, cumulative since its start, so that a lost tally loses no count.

    Parameters
    ----------
    source
        The sidecar (pod name).
    boot
        32 hexadecimal digits, created when the sidecar's supervisor starts; counts then begin at zero.
    sequence
        Number of the tally within the boot; rises by one.
    at
        When the counts were read; aware, UTC.
    strata
        One entry per header stratum.
    blind_connections
        Connections whose framing was lost and whose traffic is therefore not counted.
    final
        Whether it is the last one of the boot: no process of it is left, and every taken request is published, thinned
        or lost.
    state
        Configuration and pause of the sidecar; None: it is older than this field, or ended before this tally was made.
    relay_cpu_s
        Processor time that the relay workers have used since they serve, all together; None: as `state`.
    """

    source: str
    boot: str
    sequence: int
    at: datetime
    strata: tuple[StratumCount, ...]
    blind_connections: int
    final: bool = False
    state: ProcessState | None = None
    relay_cpu_s: float | None = None
