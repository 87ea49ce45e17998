"""From a raw exchange to the record that leaves the pod, or to the reason why none does. No I/O."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from urllib.parse import unquote

import msgspec

from quantdrift.core.config.schema import Model
from quantdrift.core.config.strata import MODEL
from quantdrift.core.records import Exchange, Loss, Policy, Sampling
from quantdrift.sidecar.capture.attributes import Attributes, cut, keyed_hash
from quantdrift.sidecar.handoff.frame import RawMeta
from quantdrift.sidecar.protocols import DECODERS
from quantdrift.sidecar.protocols.adapters import load_adapter
from quantdrift.sidecar.protocols.decoder import WireContext
from quantdrift.sidecar.protocols.errors import LostError, UnknownModelError
from quantdrift.sidecar.protocols.http_message import Head, parse_head, read_body
from quantdrift.sidecar.sampling.second_phase import SecondPhase, candidate_margin, phase_salt
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Row
from quantdrift.sidecar.state.policy import PolicyHistory
from quantdrift.sidecar.state.routes import Route, Routes

UNVERSIONED = "unversioned"
_TRACE_BYTES = 128
_VERSION_BYTES = 128
_BYTES_PER_VALUE = 8  # of the longest exchange, for each value in a JSON part


class SidecarIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What this sidecar knows of itself.

    Parameters
    ----------
    source
        Its name in every record.
    version
        The environment's candidate version (pod label), or empty.
    salt
        Secret of the sampling hashes.
    hmac_key
        Key of hashed attributes.
    boot
        Its start, as in its tallies: 32 hexadecimal digits.
    """

    source: str
    version: str
    salt: bytes
    hmac_key: bytes
    boot: str = ""


class Recorder:
    """Makes records of raw exchanges.

    Parameters
    ----------
    live_config
        Models, capture rules and rates, and the strata's names.
    origin
        This sidecar.
    policy_history
        What epochs are told from; without it they are the configuration's.

    Attributes
    ----------
    model : str
        Of the exchange that was looked at last, as far as it was known; empty: not at all.

    Raises
    ------
    OperatorError
        A model's adapter cannot be had.
    """

    def __init__(
        self, live_config: LiveConfig, origin: SidecarIdentity, policy_history: PolicyHistory | None = None
    ) -> None:
        config = live_config.config
        self.model = ""
        self._config = config
        self._rows = live_config.rows
        self._origin = origin
        self._limit = config.sidecar.max_exchange_bytes
        self._routes = Routes(config.capture.protocols)
        self._models = {model.name: model for model in config.models}
        self._adapters = {model.name: load_adapter(model.adapter) for model in config.models if model.adapter}
        self._attributes = Attributes(config.capture, origin.hmac_key)
        self._policy_history = policy_history or PolicyHistory(config.sampling)
        self._policy: Policy | None = None
        self._thinning = SecondPhase((), b"")

    def know(self, rows: Sequence[Row]) -> None:
        """Go over to a longer list of what rows are for; everything else stays."""
        self._rows = tuple(rows)

    def record(
        self,
        meta: RawMeta,
        request: bytes | memoryview,
        response: bytes | memoryview,
        paused: AbstractSet[str] = frozenset(),
    ) -> Exchange | None:
        """Return the record, or None where the second sampling phase or a pause let the exchange go.

        Parameters
        ----------
        meta
            What the relay knows of it.
        request, response
            As on the wire, heads included.
        paused
            Models that are paused.

        Raises
        ------
        LostError
            It cannot be used; the reason is in it.
        """
        answer, asked, route, named = self._heads(meta, request, response)
        decoder = DECODERS[route.protocol]
        if self.model in paused:
            return None
        wire = WireContext(
            max_bytes=self._limit,
            max_values=self._limit // _BYTES_PER_VALUE,
            model=named,
            adapter=self._adapters.get(named.name) if named else None,
        )
        content = read_body(asked, bytes(request[meta.request_head_bytes :]), self._limit)
        query = decoder.request(asked, content, wire)
        model = wire.model or self._model(query.model)
        self.model = model.name
        if self.model in paused:
            return None
        attributes = self._attributes.pick(asked.headers, query.parameters, query.document)
        query = msgspec.structs.replace(query, document={})  # it is large
        wire = msgspec.structs.replace(wire, model=model)
        raw = bytes(response[meta.response_head_bytes :])
        reply = decoder.response(answer, read_body(answer, raw, self._limit - len(content)), query, wire)

        group = self._group(asked)
        policy = self._policy_of(meta.epoch)
        margin = None
        if self._thinning.needs_margin:
            margin = candidate_margin(reply.outputs, model, route.protocol)
        thinned = self._thinning.thin(group or meta.id, meta.pi1, {MODEL: model.name, **attributes}, margin)
        if not thinned.kept:
            return None
        return Exchange(
            id=meta.id,
            captured_at=datetime.fromtimestamp(meta.captured_at_ns / 1e9, UTC),
            source=self._origin.source,
            model=model.name,
            version=self._version(reply.version or query.version or unquote(route.version), model),
            protocol=route.protocol,
            inputs=query.inputs,
            outputs=reply.outputs,
            attributes=attributes,
            sampling=Sampling(
                policy=policy,
                header_stratum=self._rows[meta.stratum].stratum,
                body_stratum=thinned.stratum,
                pi1=meta.pi1,
                pi2=thinned.pi2,
                u1=meta.u1,
                u2=thinned.u2,
            ),
            group=group,
            trace=cut(asked.headers.get("traceparent", ""), _TRACE_BYTES),
        )

    def surely_keeps(
        self,
        meta: RawMeta,
        request: bytes | memoryview,
        response: bytes | memoryview,
        paused: AbstractSet[str] = frozenset(),
    ) -> bool:
        """Return whether `record` would return a record, unless what it decodes cannot be used. Errors are its, too."""
        _, asked, _, _ = self._heads(meta, request, response)
        if paused and (not self.model or self.model in paused):
            return False
        self._policy_of(meta.epoch)
        return self._thinning.surely_keeps(self._group(asked) or meta.id, meta.pi1)

    def _heads(
        self, meta: RawMeta, request: bytes | memoryview, response: bytes | memoryview
    ) -> tuple[Head, Head, Route, Model | None]:
        """Return the heads of answer and request, the route, and the model where the path names it."""
        answer = parse_head(bytes(response[: meta.response_head_bytes]))
        if not 200 <= answer.status < 300:
            raise LostError(Loss.ERROR_STATUS, f"status {answer.status}")
        asked = parse_head(bytes(request[: meta.request_head_bytes]))
        route = self._routes.route(asked.method, asked.path)
        if route is None:
            raise LostError(Loss.DECODE, "no inference request")
        named = self._model(unquote(route.model)) if route.model else None
        self.model = named.name if named is not None else ""
        return answer, asked, route, named

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
            self._thinning = SecondPhase(policy.body_strata, phase_salt(self._origin.salt, epoch))
        return self._policy

    def _version(self, wired: str, model: Model) -> str:
        """Return the first that is told: on the wire, by the configuration, by the environment."""
        told = cut(wired, _VERSION_BYTES)
        return told or model.version or self._origin.version or UNVERSIONED

    def _group(self, asked: Head) -> str:
        """Return the statistical unit: requests of one user are taken together and are not independent."""
        name = self._config.sampling.sticky_header
        value = asked.headers.get(name.lower()) if name else None
        # Without a value it is nobody's: the relay drew for the exchange alone.
        return keyed_hash(self._origin.hmac_key or self._origin.salt, value) if value else ""
