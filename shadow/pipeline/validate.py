"""The decoding and validation of stream messages: what a sidecar may send, so that Postgres and the monitor can work with it.

A sidecar runs beside a model, and its key can be stolen. So nothing in a message is taken on trust: a message that breaks a
rule is quarantined with a reason, and others are not affected. The bounds are far above what a sidecar sends.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

import msgspec

from quantdrift.core.codec import decode_exchange
from quantdrift.core.config.schema import Capture, Slice
from quantdrift.core.config.strata import MAX_VALUE_BYTES
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import Exchange, Policy, Sampling
from quantdrift.core.text import are_plain, plain, traceparent

_ID: Final = re.compile(r"[0-9a-fA-F]{32}")
_HASH: Final = re.compile(
    r"(?:k[0-9a-f]{8}:)?[0-9a-f]{32}"
)  # the id of a key in a key file is before its hashes
_LONGEST_NAME: Final = 1024
_BYTES_OF_CHARACTER: Final = 4  # at most, in UTF-8
_MOST_ATTRIBUTES: Final = 256
_MOST_TENSORS: Final = 256
_MOST_DIMENSIONS: Final = 32
_MOST_ELEMENTS: Final = 1 << 40
_MOST_STRATA: Final = 1024
_MOST_PREDICATES: Final = 64
_REMEMBERED: Final = 256  # tensors
_LEAST_PI: Final = 1e-9
"""Below it one exchange would stand for more than a billion, and decide every weighted figure alone."""
FUTURE: Final = timedelta(hours=1)
"""How far the clock of a sidecar may be ahead of the stream's."""


class StreamedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the stream says of a message, which its content must agree with.

    Parameters
    ----------
    model
        Model of the subject it was published to.
    streamed_at
        When the stream stored it, by the server's clock.
    """

    model: str
    streamed_at: datetime


class AttributeRules(msgspec.Struct, frozen=True, kw_only=True):
    """The attributes that the shadow's own configuration lets in. Nothing else is stored or compared.

    Parameters
    ----------
    recorded
        Keys that may be there.
    hashed
        Keys of which only a keyed hash may be there.
    """

    recorded: frozenset[str]
    hashed: frozenset[str]

    @classmethod
    def of(cls, capture: Capture, slices: Iterable[Slice]) -> "AttributeRules":
        """Return the rules of a configuration."""
        lists: dict[str, Sequence[str]] = {
            "header": capture.headers,
            "parameter": capture.parameters,
            "json": capture.json,
            "text": capture.text,
        }
        recorded = {f"{kind}.{name}" for kind, names in lists.items() for name in names}
        recorded |= {
            f"{kind}.{name}" for rule in slices for kind in lists if (name := getattr(rule, kind, ""))
        }
        return cls(recorded=frozenset(recorded), hashed=frozenset(capture.hashed))

    def dropped(self, attributes: Mapping[str, str]) -> frozenset[str]:
        """Return the keys that may not be there, or whose value is no hash and must be one."""
        if attributes.keys() <= self.recorded and self.hashed.isdisjoint(attributes):
            return frozenset()
        return frozenset(
            key
            for key, value in attributes.items()
            if key not in self.recorded or (key in self.hashed and not _HASH.fullmatch(value))
        )


class PolicyCheck:
    """Checks sampling policies. The one before, which most exchanges share, is not checked again."""

    def __init__(self) -> None:
        self._sound: Policy | None = None

    def __call__(self, policy: Policy) -> None:
        """Refuse rates that are none, and texts that the database cannot store: the monitor reads every policy.

        Raises
        ------
        QuarantineError
            Reason `decode` or `limits`.
        """
        if policy != self._sound:
            _check_policy(policy)
            self._sound = policy


def read_exchange(
    wire: bytes, envelope: StreamedMessage | None = None, check_policy: PolicyCheck | None = None
) -> Exchange:
    """Return the exchange in `wire`, with texts that are safe to store and to show.

    Parameters
    ----------
    envelope
        What the stream says of it; None: it did not come through a stream.
    check_policy
        Remembers the policy of the exchange before; None: its policy is checked in any case.

    Raises
    ------
    QuarantineError
        Reason `decode`: it is not an exchange, or its id, time, policy or sampling probabilities are invalid. Reason
        `subject`: it says another model than the stream. Reason `limits`: it is longer, or has more parts, than any
        sidecar sends. Reason `too_early`: it was captured in the future.
    """
    exchange = decode_exchange(wire)
    if not _ID.fullmatch(exchange.id):
        raise _decode("its id is not 32 hexadecimal digits")
    if exchange.captured_at.tzinfo is None:
        raise _decode("its capture time has no time zone")
    if envelope is not None:
        _check_envelope(exchange, envelope)
    _check_sizes(exchange)
    sampling = exchange.sampling
    (check_policy or PolicyCheck())(sampling.policy)
    if not (0 < sampling.pi1 <= 1 and 0 < sampling.pi2 <= 1):
        raise _decode(f"its inclusion probabilities are {sampling.pi1:g} and {sampling.pi2:g}")
    if min(sampling.pi1, sampling.pi2) < _LEAST_PI:
        raise _limits(f"its inclusion probabilities are {sampling.pi1:g} and {sampling.pi2:g}")
    if not (0 <= sampling.u1 < sampling.pi1 and 0 <= sampling.u2 < sampling.pi2):
        raise _decode(
            f"its draws, {sampling.u1:g} and {sampling.u2:g}, do not lie below its inclusion probabilities,"
            f" {sampling.pi1:g} and {sampling.pi2:g}"
        )
    texts = (exchange.source, exchange.model, exchange.version, exchange.group, exchange.caller)
    strata = (sampling.header_stratum, sampling.body_stratum)
    if (
        exchange.captured_at.tzinfo is UTC
        and are_plain((*texts, *strata, *exchange.attributes, *exchange.attributes.values()))
        and traceparent(exchange.trace) == exchange.trace
    ):
        return exchange
    return msgspec.structs.replace(
        exchange,
        captured_at=exchange.captured_at.astimezone(UTC),
        source=plain(exchange.source),
        model=plain(exchange.model),
        version=plain(exchange.version),
        group=plain(exchange.group),
        attributes={plain(key): plain(value) for key, value in exchange.attributes.items()},
        trace=traceparent(exchange.trace),
        caller=plain(exchange.caller),
        sampling=_clean_sampling(sampling),
    )


def _clean_sampling(sampling: Sampling) -> Sampling:
    return msgspec.structs.replace(
        sampling,
        header_stratum=plain(sampling.header_stratum),
        body_stratum=plain(sampling.body_stratum),
    )


def _decode(detail: str) -> QuarantineError:
    return QuarantineError(QuarantineReason.DECODE, detail)


def _check_envelope(exchange: Exchange, envelope: StreamedMessage) -> None:
    if exchange.model != envelope.model:
        raise QuarantineError(
            QuarantineReason.SUBJECT, "it says another model than the subject that it was published to"
        )
    if exchange.captured_at - envelope.streamed_at > FUTURE:
        raise QuarantineError(
            QuarantineReason.TOO_EARLY,
            "it was captured more than an hour after the stream got it: correct the clock of its machine",
        )


def _check_sizes(exchange: Exchange) -> None:
    names = (
        exchange.source,
        exchange.model,
        exchange.version,
        exchange.protocol,
        exchange.group,
        exchange.trace,
        exchange.caller,
        *exchange.attributes,
    )
    _check_texts(names)
    _check_number("attributes", exchange.attributes, _MOST_ATTRIBUTES)
    for value in exchange.attributes.values():
        if _BYTES_OF_CHARACTER * len(value) > MAX_VALUE_BYTES < len(value.encode()):
            raise _limits(f"a value of its attributes is longer than {MAX_VALUE_BYTES} bytes")
    for tensors in (exchange.inputs, exchange.outputs):
        _check_number("tensors", tensors, _MOST_TENSORS)
        for tensor in tensors:
            _check_tensor(tensor.name, tensor.datatype, tensor.shape)


@lru_cache(maxsize=_REMEMBERED)
def _check_tensor(name: str, datatype: str, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that no sidecar sends; that most exchanges have the same ones is why sound ones are remembered."""
    _check_texts((name, datatype))
    _check_number("dimensions", shape, _MOST_DIMENSIONS)
    if math.prod(abs(size) or 1 for size in shape) > _MOST_ELEMENTS:
        raise _limits("the shape of a tensor is larger than any tensor")


def _check_policy(policy: Policy) -> None:
    _check_number("strata", (*policy.header_strata, *policy.body_strata), _MOST_STRATA)
    texts = [policy.epoch]
    for header in policy.header_strata:
        _check_number("headers", header.headers, _MOST_PREDICATES)
        texts += [header.name, header.method, header.path_prefix, *header.headers, *header.headers.values()]
    for body in policy.body_strata:
        _check_number("conditions", body.where, _MOST_PREDICATES)
        texts += [
            body.name,
            *(part for condition in body.where for part in (condition.key, condition.equals or "")),
        ]
        if not all(
            math.isfinite(end)
            for condition in body.where
            for end in (condition.low, condition.high)
            if end is not None
        ):
            raise _decode("a condition of its policy has a bound that is no number")
    _check_texts(texts)
    if any(plain(part) != part for part in texts):
        raise _decode("its policy has a control character")
    rates = [
        *(stratum.rate for stratum in policy.header_strata),
        *(stratum.rate for stratum in policy.body_strata),
    ]
    if not all(0 <= rate <= 1 for rate in rates):
        raise _decode("a rate of its policy does not lie between 0 and 1")


def _check_texts(texts: Sequence[str]) -> None:
    if len("".join(texts)) > _LONGEST_NAME < max(map(len, texts)):  # together they are shorter, nearly always
        raise _limits(f"a name in it is longer than {_LONGEST_NAME} characters")


def _check_number(what: str, parts: Collection[object], most: int) -> None:
    if len(parts) > most:
        raise _limits(f"it has more than {most} {what}")


def _limits(detail: str) -> QuarantineError:
    return QuarantineError(QuarantineReason.LIMITS, detail)
