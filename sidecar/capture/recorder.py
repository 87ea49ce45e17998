"""The recorder: it makes the record that leaves the pod from a raw exchange, or says why there is none.

No I/O.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum, auto
from urllib.parse import unquote
from zoneinfo import ZoneInfo

import msgspec

from quantdrift.core.config.schema import Model
from quantdrift.core.config.strata import MODEL
from quantdrift.core.keys import KeyFile
from quantdrift.core.recheck_mark import HEADER, RecheckMarks
from quantdrift.core.records import UNANSWERED, Exchange, Latency, Loss, Policy, Sampling, Way
from quantdrift.core.slices import time_attributes
from quantdrift.core.text import traceparent
from quantdrift.sidecar.capture.attributes import Attributes, KeyedHash, cut
from quantdrift.sidecar.capture.text_attributes import TextAttributes
from quantdrift.sidecar.handoff.frame import RawMeta
from quantdrift.sidecar.protocols import cost, decoder_of
from quantdrift.sidecar.protocols.adapters import load_adapter
from quantdrift.sidecar.protocols.decoder import DecodedRequest, DecodedResponse, Pair, WireContext
from quantdrift.sidecar.protocols.errors import LostError, UnknownModelError
from quantdrift.sidecar.protocols.http_message import Head, parse_head, read_body
from quantdrift.sidecar.sampling.second_phase import SecondPhase, candidate_margin, phase_salt
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Row
from quantdrift.sidecar.state.policy import PolicyHistory
from quantdrift.sidecar.state.routes import Route, Routes

UNVERSIONED = "unversioned"
_VERSION_BYTES = 128
_NO_RESPONSE = Head(start=("", "", ""), headers={})
_BYTES_PER_VALUE = 8  # of the longest exchange, for each value that JSON may hold


class SidecarIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of this sidecar.

    Parameters
    ----------
    source
        Its name in every record.
    version
        Version of the candidate from the environment (a pod label), or empty.
    salt
        Secret of the sampling hashes.
    hmac_key, hmac_keys
        Key of hashed attributes, and the key file that is used in its place, if there is one.
    boot
        Identifier of its start, as in its tallies: 32 hexadecimal digits.
    mark_salt
        The salt that the mark of rechecks is made with. Empty: no mark is valid.
    """

    source: str
    version: str
    salt: bytes
    hmac_key: bytes
    hmac_keys: KeyFile | None = None
    boot: str = ""
    mark_salt: bytes = b""


class RecheckKind(Enum):
    """Whether a request is a recheck, which is not traffic."""

    NO = auto()
    YES = auto()
    FORGED = auto()  # its mark is not valid: it is traffic


class ExchangeHeads(msgspec.Struct, frozen=True, kw_only=True):
    """The heads of an exchange.

    Parameters
    ----------
    request, response
        Their heads.
    route
        What method and path of the request say.
    model
        The model, if the path names it.
    lost
        Why there is no answer to compare; None: there is one.
    """

    request: Head
    response: Head
    route: Route
    model: Model | None
    lost: Loss | None = None

    @property
    def model_name(self) -> str:
        """Name of the model, empty if only the body may name it."""
        return self.model.name if self.model is not None else ""


class ExchangeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The decoded request of an exchange.

    Parameters
    ----------
    heads
        Of the exchange.
    model
        The model that path or body names.
    query
        What the request asks of the model, without its document.
    wire
        What the decoder of the response needs to know.
    attributes
        Those that the configuration keeps.
    n_bytes
        Length of the decoded body.
    """

    heads: ExchangeHeads
    model: Model
    query: DecodedRequest
    wire: WireContext
    attributes: dict[str, str]
    n_bytes: int


class Recorder:
    """Makes records of raw exchanges, in steps: the heads, the request, the record.

    The caller knows the model as soon as a step returns it, also if a later step fails.

    Parameters
    ----------
    live_config
        Models, capture rules, rates, and the names of strata.
    identity
        This sidecar.
    policy_history
        The policies by epoch; None: only the configuration's rates.

    Raises
    ------
    OperatorError
        An adapter or the protocol of a plug-in cannot be loaded, or `capture.text` needs a package that is not installed.
    """

    def __init__(
        self, live_config: LiveConfig, identity: SidecarIdentity, policy_history: PolicyHistory | None = None
    ) -> None:
        config = live_config.config
        self._config = config
        self._rows = live_config.rows
        self._identity = identity
        self._limit = config.sidecar.max_exchange_bytes
        self._time_zone = ZoneInfo(config.capture.time_zone)
        self._routes = Routes(config.capture.protocols, live_config.paths)
        self._decoders = {protocol: decoder_of(protocol) for protocol in config.capture.protocols}
        self._models = {name: model for model in config.models for name in (model.name, *model.aliases)}
        self._adapters = {model.name: load_adapter(model.adapter) for model in config.models if model.adapter}
        keyed_hash = KeyedHash(identity.hmac_key, identity.hmac_keys)
        self._attributes = Attributes(config.capture, keyed_hash)
        self._text_attributes = TextAttributes(config.capture, keyed_hash)
        self._group_hash = keyed_hash if identity.hmac_key else KeyedHash(identity.salt)
        self._policy_history = policy_history or PolicyHistory(config.sampling)
        self._marks = RecheckMarks(identity.mark_salt)
        self._policy: Policy | None = None
        self._second_phase = SecondPhase((), b"")

    def set_rows(self, rows: Sequence[Row]) -> None:
        """Use a longer list of rows; everything else stays."""
        self._rows = tuple(rows)

    def read_heads(
        self, meta: RawMeta, request: bytes | memoryview, response: bytes | memoryview
    ) -> ExchangeHeads:
        """Return the heads of an exchange, whether or not it has an answer to compare.

        Parameters
        ----------
        meta
            The metadata of its frame.
        request, response
            As on the wire, heads included.

        Raises
        ------
        LostError
            The exchange cannot be used; the error has the reason.
        """
        lost, response_head = meta.lost, _NO_RESPONSE
        if lost is None:
            response_head = parse_head(bytes(response[: meta.response_head_bytes]))
            lost = None if 200 <= response_head.status < 300 else Loss.ERROR_STATUS
        with _lost_before(lost):
            request_head = parse_head(bytes(request[: meta.request_head_bytes]))
            route = self._routes.route(request_head.method, request_head.path)
            if route is None:
                raise LostError(Loss.DECODE, "not an inference request")
            model = self._model(unquote(route.model)) if route.model else None
        return ExchangeHeads(
            request=request_head, response=response_head, route=route, model=model, lost=lost
        )

    def surely_keeps(self, meta: RawMeta, heads: ExchangeHeads) -> bool:
        """Return whether `record` would return a record, if decoding succeeds.

        Raises
        ------
        LostError
            The policy of its epoch is not known any more.
        """
        self._policy_of(meta.epoch)
        return self._second_phase.surely_keeps(self._group(heads.request) or meta.id, meta.pi1)

    def read_request(
        self, meta: RawMeta, heads: ExchangeHeads, request: bytes | memoryview
    ) -> ExchangeRequest:
        """Return the decoded request of an exchange, and its model.

        Raises
        ------
        LostError
            The exchange cannot be used; the error has the reason.
        """
        named = heads.model
        wire = WireContext(
            max_bytes=self._limit,
            max_values=self._limit // _BYTES_PER_VALUE,
            model=named,
            adapter=self._adapters.get(named.name) if named else None,
            models=self._models,
        )
        with _lost_before(heads.lost):
            content = read_body(heads.request, bytes(request[meta.request_head_bytes :]), self._limit)
            query = self._decoders[heads.route.protocol].request(heads.request, content, wire)
            model = named or self._model(query.model)
        return ExchangeRequest(
            heads=heads,
            model=model,
            wire=msgspec.structs.replace(wire, model=model),
            # Without the document and its text, which may be large.
            query=msgspec.structs.replace(query, document={}, text={}),
            attributes=self._attributes.pick(heads.request.headers, query.parameters, query.document)
            | self._text_attributes.of_request(heads.route.protocol, query),
            n_bytes=len(content),
        )

    def recheck(self, meta: RawMeta, asked: ExchangeRequest) -> RecheckKind:
        """Return whether a request is a recheck of quantdrift's own, by its mark."""
        mark = asked.heads.request.headers.get(HEADER)
        if mark is None:
            return RecheckKind.NO
        is_valid = self._marks.is_valid(mark, asked.query.inputs, meta.captured_at_ns / 1e9)
        return RecheckKind.YES if is_valid else RecheckKind.FORGED

    def record(
        self, meta: RawMeta, asked: ExchangeRequest, response: bytes | memoryview
    ) -> tuple[Exchange, ...]:
        """Return the record, one for each pair of a stream that is no batch, or none if the second sampling phase drops it.

        Raises
        ------
        LostError
            The exchange cannot be used; the error has the reason.
        """
        heads, model, query = asked.heads, asked.model, asked.query
        if heads.lost is not None:
            raise LostError(heads.lost, "there is no answer")
        cost.check()
        content = read_body(
            heads.response, bytes(response[meta.response_head_bytes :]), self._limit - asked.n_bytes
        )
        protocol = heads.route.protocol
        reply = self._decoders[protocol].response(heads.response, content, query, asked.wire)
        attributes = asked.attributes | self._text_attributes.of_answer(
            protocol, model.task, () if reply.pairs else reply.outputs
        )
        cost.check()
        group = self._group(heads.request)
        policy = self._policy_of(meta.epoch)
        margin = None
        if self._second_phase.needs_margin:
            margin = candidate_margin(reply.outputs, model, protocol)
        captured_at = datetime.fromtimestamp(meta.captured_at_ns / 1e9, UTC)
        all_attributes = {MODEL: model.name, **attributes, **time_attributes(captured_at, self._time_zone)}
        draw = self._second_phase.draw(group or meta.id, meta.pi1, all_attributes, margin)
        if not draw.kept:
            return ()
        exchange = Exchange(
            id=meta.id,
            captured_at=captured_at,
            source=self._identity.source,
            model=model.name,
            version=self._version(
                _version_in_head(model, heads.response)
                or reply.version
                or query.version
                or unquote(heads.route.version),
                model,
            ),
            protocol=protocol,
            inputs=query.inputs,
            outputs=reply.outputs,
            attributes=attributes,
            sampling=Sampling(
                policy=policy,
                header_stratum=self._rows[meta.stratum].stratum,
                body_stratum=draw.stratum,
                pi1=meta.pi1,
                pi2=draw.pi2,
                u1=meta.u1,
                u2=draw.u2,
            ),
            group=group,
            trace=traceparent(heads.request.headers.get("traceparent", "")),
            way=meta.origin.way,
            caller=meta.origin.caller,
            latency=latency_of(meta, reply),
            response_id=cut(reply.response_id, _VERSION_BYTES),
        )
        return tuple(_of_pairs(exchange, reply.pairs)) or (exchange,)

    def _model(self, name: str) -> Model:
        model = self._models.get(name)
        if model is None:
            raise UnknownModelError(name)
        return model

    def _policy_of(self, epoch: str) -> Policy:
        if self._policy is None or self._policy.epoch != epoch:
            policy = self._policy_history.of(epoch)
            if policy is None:
                raise LostError(Loss.CAPTURE_ERROR, f"the policy of epoch {epoch} is not known any more")
            self._policy = policy
            self._second_phase = SecondPhase(policy.body_strata, phase_salt(self._identity.salt, epoch))
        return self._policy

    def _version(self, wire_version: str, model: Model) -> str:
        """Return the version on the wire, else that of the configuration, else that of the environment."""
        version_on_wire = cut(wire_version, _VERSION_BYTES)
        return version_on_wire or model.version or self._identity.version or UNVERSIONED

    def _group(self, request_head: Head) -> str:
        """Return the statistical unit: requests of one user are sampled together and are not independent."""
        name = self._config.sampling.sticky_header
        value = request_head.headers.get(name.lower()) if name else None
        # Without a value there is no group: the relay drew for this exchange alone.
        return self._group_hash(value) if value else ""


def _of_pairs(stream: Exchange, pairs: Sequence[Pair]) -> Iterator[Exchange]:
    """Yield an exchange for each pair of a stream. They were sampled together, so they are one group; no time is known of one pair."""
    for place, pair in enumerate(pairs):
        digest = hashlib.blake2b(f"{stream.id}/{place}".encode(), digest_size=16)
        yield msgspec.structs.replace(
            stream,
            id=digest.hexdigest(),
            inputs=pair.inputs,
            outputs=pair.outputs,
            group=stream.group or stream.id,
            latency=None,
        )


def _version_in_head(model: Model, response: Head) -> str:
    """Return the version that a response header names; empty if the model names none."""
    source, _, name = model.version_from.partition(".")
    return response.headers.get(name.lower(), "") if source == "header" else ""


@contextmanager
def _lost_before(lost: Loss | None) -> Iterator[None]:
    """Give an error in the request of an exchange that is lost already the reason of that loss.

    What is lost of a model that is not configured stays that, unless there was no answer: it is no loss of another model.
    """
    try:
        yield
    except LostError as error:
        if lost is None or (isinstance(error, UnknownModelError) and lost not in UNANSWERED):
            raise
        raise LostError(lost, error.detail) from error


def latency_of(meta: RawMeta, reply: DecodedResponse) -> Latency | None:
    """Return how long the candidate took for an exchange; None if it was not measured.

    Only the relay measures it. A sender of another way in could write anything into its frame.
    """
    if meta.latency_s is None or meta.origin.way is not Way.RELAY:
        return None
    first_s = meta.first_byte_s if reply.is_stream else None
    per_token_s = None
    if first_s is not None and reply.n_tokens > 1:
        per_token_s = (meta.latency_s - first_s) / (reply.n_tokens - 1)
    return Latency(last_byte_s=meta.latency_s, first_token_s=first_s, per_token_s=per_token_s)
