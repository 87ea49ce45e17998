"""The sampling policy on its way from the monitor to the sidecars, and the account of why it is as it is.

Both are records of the policy bucket, MessagePack behind a two-byte header as in `quantdrift.core.codec`: kind, then
schema version. Both are bounded in size, and a reader refuses what it does not know by name.
"""

import hashlib
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from quantdrift.core.errors import QuantdriftError
from quantdrift.core.records import Policy

VERSION = 1
MAX_BYTES = 65_536  # every exchange carries its policy: a larger one would cost more than what it samples
DIRECTIVE = "directive"
ACCOUNT = "account"
_MARK = "m"  # no hexadecimal digit: an epoch of the configuration's own rates never has it here


class Refusal(StrEnum):
    """Why a sidecar does not follow a directive."""

    UNREADABLE = "unreadable"  # no directive of a version that is known here, or longer than one may be
    STALE = "stale"  # nobody has confirmed it for `valid_s`
    EARLY = "early"  # issued in the future: the monitor's clock or this one is wrong
    STRATA = "strata"  # other header strata than the configuration's
    RATES = "rates"  # no probabilities, more than 0 where the configuration says 0, or no base rate


class RefusedError(QuantdriftError):
    """A directive is not followed; the configuration's rates hold.

    Parameters
    ----------
    refusal
        One of the closed set that is counted.
    detail
        What was wrong, in words.
    """

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(f"{refusal.value}: {detail}")
        self.refusal = refusal
        self.detail = detail


class PolicyMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that the monitor wants to be followed.

    Parameters
    ----------
    policy
        The rates, already lowered by `lag_factor`. Its epoch is `name_of` it; a sidecar puts the time before that.
    issued_at
        When it was made or last confirmed; aware, UTC.
    valid_s
        For how long from then on it is followed.
    lag_factor
        What every rate was multiplied by because the shadow lags: a power of two, at most 1.
    """

    policy: Policy
    issued_at: datetime
    valid_s: float
    lag_factor: float = 1.0

    def holds(self, now_s: float) -> bool:
        """Return whether it is still to be followed at `now_s`, seconds since 1970."""
        return now_s < self.issued_at.timestamp() + self.valid_s


class SliceShare(msgspec.Struct, frozen=True, kw_only=True):
    """What a slice gets, as planned.

    Parameters
    ----------
    model, name
        The slice.
    traffic_per_s
        Its offered items per second.
    replays_per_s
        Of these, replayed.
    evidence_share
        Its share of all evidence, which half of the budget follows.
    """

    model: str
    name: str
    traffic_per_s: float
    replays_per_s: float
    evidence_share: float


class PolicySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Why a policy is as it is, for people.

    Parameters
    ----------
    epoch
        Name of the policy that it tells of.
    made_at
        When its rates were worked out.
    budget_per_s
        Items per second that might be replayed.
    replays_per_s, taken_per_s
        Items that will be, and exchanges that relays hand over, before the lag's factor.
    n_items
        Recent items that it was worked out from.
    n_unboosted
        Slices that could be boosted and are not: there would be too many body strata.
    n_slices
        All slices; `slices` may be fewer.
    slices
        Those with the most replays.
    """

    epoch: str
    made_at: datetime
    budget_per_s: float
    replays_per_s: float
    taken_per_s: float
    n_items: int
    n_unboosted: int
    n_slices: int
    slices: tuple[SliceShare, ...]


_KINDS: dict[type, bytes] = {PolicyMessage: b"D", PolicySummary: b"A"}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {kind: msgspec.msgpack.Decoder(kind) for kind in _KINDS}


def name_of(policy: Policy) -> str:
    """Return the name that the rates of a policy have everywhere: two with the same name have the same rates."""
    rates = msgspec.json.encode([policy.header_strata, policy.body_strata])
    return _MARK + hashlib.blake2b(rates, digest_size=6).hexdigest()


def is_central(epoch: str) -> bool:
    """Return whether an epoch, as exchanges state it, is of a directive."""
    return epoch.partition("-")[2].startswith(_MARK)


def encode(record: PolicyMessage | PolicySummary) -> bytes:
    """Return the record's wire form.

    Raises
    ------
    ValueError
        It is longer than `MAX_BYTES`.
    """
    wire = _KINDS[type(record)] + bytes((VERSION,)) + _ENCODER.encode(record)
    if len(wire) > MAX_BYTES:
        raise ValueError(f"{len(wire)} bytes are more than the {MAX_BYTES} that a policy may have")
    return wire


def decode_policy_message(wire: bytes) -> PolicyMessage:
    """Return the directive in `wire`.

    Raises
    ------
    RefusedError
        It is none that can be read: another kind, an unknown version, too long, or its name is not its rates'.
    """
    directive: PolicyMessage = _decode(PolicyMessage, wire)
    if directive.policy.epoch != name_of(directive.policy):
        raise RefusedError(Refusal.UNREADABLE, "its rates are not those that its name stands for")
    if directive.issued_at.tzinfo is None:
        raise RefusedError(Refusal.UNREADABLE, "its time has no zone")
    return directive


def decode_policy_summary(wire: bytes) -> PolicySummary:
    """Return the account in `wire`.

    Raises
    ------
    RefusedError
        It is none that can be read.
    """
    account: PolicySummary = _decode(PolicySummary, wire)
    return account


def _decode(kind: type, wire: bytes) -> Any:
    if len(wire) > MAX_BYTES:
        raise RefusedError(Refusal.UNREADABLE, f"{len(wire)} bytes are more than {MAX_BYTES}")
    if wire[:1] != _KINDS[kind]:
        raise RefusedError(Refusal.UNREADABLE, f"not a {kind.__name__.lower()} (kind byte {wire[:1]!r})")
    if wire[1:2] != bytes((VERSION,)):
        raise RefusedError(
            Refusal.UNREADABLE,
            f"schema version {list(wire[1:2])} is not {VERSION}: upgrade the sidecars before the monitor",
        )
    try:
        return _DECODERS[kind].decode(memoryview(wire)[2:])
    except msgspec.MsgspecError as error:
        raise RefusedError(Refusal.UNREADABLE, str(error)) from error
