"""From a raw exchange to the record that leaves the pod, or to the reason why none does. No I/O."""

from datetime import UTC, datetime

import msgspec

from quantdrift.core.config.schema import Config, Model
from quantdrift.core.records import Exchange, Loss, Policy, Sampling, Tensor
from sidecar.capture.attributes import Attributes, cut, keyed_hash
from sidecar.capture.thinning import Thinning, candidate_margin, phase_salt
from sidecar.directives import Directives
from sidecar.handoff import RawMeta
from sidecar.protocols.lost import LostError
from sidecar.protocols.message import Head, parse_head, read_body
from sidecar.protocols.oip import (
    JSON_LENGTH,
    PROTOCOL,
    Response,
    Target,
    decode_request,
    decode_response,
    parse_target,
)

UNVERSIONED = "unversioned"
_TRACE_BYTES = 128
_VERSION_BYTES = 128
_BYTES_PER_VALUE = 8  # of the longest exchange, for each value in a JSON part


class Origin(msgspec.Struct, frozen=True, kw_only=True):
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
    """

    source: str
    version: str
    salt: bytes
    hmac_key: bytes


class Recorder:
    """Makes records of raw exchanges.

    Parameters
    ----------
    config
        Models, capture rules and rates.
    origin
        This sidecar.
    directives
        What epochs are told from; without it they are the configuration's.
    """

    def __init__(self, config: Config, origin: Origin, directives: Directives | None = None) -> None:
        self._config = config
        self._origin = origin
        self._models = {model.name: model for model in config.models}
        self._attributes = Attributes(config.capture, origin.hmac_key)
        self._directives = directives or Directives(config.sampling)
        self._policy: Policy | None = None
        self._thinning = Thinning((), b"")

    def record(
        self, meta: RawMeta, request: bytes | memoryview, response: bytes | memoryview
    ) -> Exchange | None:
        """Return the record, or None where the second sampling phase let the exchange go.

        Parameters
        ----------
        meta
            What the relay knows of it.
        request, response
            As on the wire, heads included.

        Raises
        ------
        LostError
            It cannot be used; the reason is in it.
        """
        answer = parse_head(bytes(response[: meta.response_head_bytes]))
        if not 200 <= answer.status < 300:
            raise LostError(Loss.ERROR_STATUS, f"status {answer.status}")
        asked = parse_head(bytes(request[: meta.request_head_bytes]))
        target = parse_target(asked.method, asked.path)
        if target is None:
            raise LostError(Loss.DECODE, "no Open Inference request")
        model = self._models.get(target.model)
        if model is None:
            raise LostError(Loss.UNKNOWN_MODEL, "no such model in the configuration")
        inputs, attributes, n_bytes = self._request(asked, request[meta.request_head_bytes :])
        reply = self._response(answer, response[meta.response_head_bytes :], n_bytes)

        group = self._group(asked)
        policy = self._policy_of(meta.epoch)
        margin = candidate_margin(reply.outputs, model) if self._thinning.needs_margin else None
        thinned = self._thinning.thin(group or meta.id, meta.pi1, attributes, margin)
        if not thinned.kept:
            return None
        return Exchange(
            id=meta.id,
            captured_at=datetime.fromtimestamp(meta.captured_at_ns / 1e9, UTC),
            source=self._origin.source,
            model=model.name,
            version=self._version(reply.version, target, model),
            protocol=PROTOCOL,
            inputs=inputs,
            outputs=reply.outputs,
            attributes=attributes,
            sampling=Sampling(
                policy=policy,
                header_stratum=policy.header_strata[meta.stratum].name,
                body_stratum=thinned.stratum,
                pi1=meta.pi1,
                pi2=thinned.pi2,
                u1=meta.u1,
                u2=thinned.u2,
            ),
            group=group,
            trace=cut(asked.headers.get("traceparent", ""), _TRACE_BYTES),
        )

    def _request(self, head: Head, raw: bytes | memoryview) -> tuple[tuple[Tensor, ...], dict[str, str], int]:
        """Return inputs, attributes and the content's length; the decoded document is gone by then: it is large."""
        limit = self._config.sidecar.max_exchange_bytes
        body = read_body(head, bytes(raw), limit)
        query = decode_request(head.headers.get(JSON_LENGTH), body, limit // _BYTES_PER_VALUE)
        attributes = self._attributes.pick(head.headers, query.parameters, query.document)
        return query.inputs, attributes, len(body)

    def _response(self, head: Head, raw: bytes | memoryview, n_request_bytes: int) -> Response:
        limit = self._config.sidecar.max_exchange_bytes
        body = read_body(head, bytes(raw), limit - n_request_bytes)
        return decode_response(head.headers.get(JSON_LENGTH), body, limit // _BYTES_PER_VALUE)

    def _policy_of(self, epoch: str) -> Policy:
        if self._policy is None or self._policy.epoch != epoch:
            policy = self._directives.of(epoch)
            if policy is None:
                raise LostError(Loss.CAPTURE_ERROR, f"the policy of epoch {epoch} is not known any more")
            self._policy = policy
            self._thinning = Thinning(policy.body_strata, phase_salt(self._origin.salt, epoch))
        return self._policy

    def _version(self, answered: str, target: Target, model: Model) -> str:
        """Return the first that is told: by the response, the path, the configuration, the environment."""
        told = cut(answered or target.version, _VERSION_BYTES)
        return told or model.version or self._origin.version or UNVERSIONED

    def _group(self, asked: Head) -> str:
        """Return the statistical unit: requests of one user are taken together and are not independent."""
        name = self._config.sampling.sticky_header
        value = asked.headers.get(name.lower()) if name else None
        # Without a value it is nobody's: the relay drew for the exchange alone.
        return keyed_hash(self._origin.hmac_key or self._origin.salt, value) if value else ""
