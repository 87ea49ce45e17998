"""The sampling policy that the monitor sends to the sidecars, and its summary for people.

Both are records in the policy bucket: MessagePack after a two-byte header as in `quantdrift.core.codec`, kind and schema
version. Both have a size limit, and a reader refuses unknown kinds and versions.
"""

import hashlib
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from quantdrift.core.errors import QuantdriftError
from quantdrift.core.records import Policy
from quantdrift.core.text import misfit

VERSION = 1
MAX_BYTES = 65_536  # every exchange contains its policy: a larger one would cost more than the samples
POLICY_KEY = "directive"
SUMMARY_KEY = "account"
_MARK = "m"  # not a hexadecimal digit, so that no epoch of configured rates has it here


class PolicyRefusal(StrEnum):
    """Why a sidecar refuses a policy message."""

    UNREADABLE = "unreadable"  # not a policy message of a known version, or too long
    STALE = "stale"  # not confirmed for `valid_s`
    EARLY = "early"  # issued in the future: the clock of the monitor or of this machine is wrong
    STRATA = "strata"  # its header strata differ from the configured ones
    RATES = "rates"  # not probabilities, more than 0 where the configuration has 0, (nearly) 0 elsewhere, or no base rate
    LASTS = "lasts"  # valid for longer than any policy is, or for a time that is no number


class PolicyRefusedError(QuantdriftError):
    """A policy message is refused, and the configured rates apply.

    Parameters
    ----------
    refusal
        The reason, counted in metrics.
    detail
        What was wrong, in words.
    """

    def __init__(self, refusal: PolicyRefusal, detail: str) -> None:
        super().__init__(f"{refusal.value}: {detail}")
        self.refusal = refusal
        self.detail = detail


class PolicyMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that the sidecars apply.

    Parameters
    ----------
    policy
        The rates, already multiplied by `lag_factor`. Its epoch is `name_of(policy)`; a sidecar prefixes the time.
    issued_at
        When it was created or last confirmed; aware, UTC.
    valid_s
        Time after `issued_at` at which it expires.
    lag_factor
        Factor on every rate because the shadow lags: a power of two, at most 1.
    """

    policy: Policy
    issued_at: datetime
    valid_s: float
    lag_factor: float = 1.0

    def holds(self, now_s: float) -> bool:
        """Return whether it is still valid at `now_s`, seconds since 1970."""
        return now_s < self.issued_at.timestamp() + self.valid_s


class PlannedSlice(msgspec.Struct, frozen=True, kw_only=True):
    """The planned sampling of one slice.

    Parameters
    ----------
    traffic_per_s
        Offered items per second.
    replays_per_s
        Replayed items per second.
    evidence_share
        Share of all evidence, by which half of the budget is allocated.
    """

    model: str
    name: str
    traffic_per_s: float
    replays_per_s: float
    evidence_share: float


class PolicySummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures behind a policy, for people.

    Parameters
    ----------
    epoch
        Name of the policy.
    made_at
        When its rates were computed.
    budget_per_s
        Budget, items replayed per second.
    replays_per_s, taken_per_s
        Planned items replayed and exchanges sampled by relays per second, before `lag_factor`.
    n_items
        Number of recent items used.
    n_unboosted
        Slices that are not boosted because of the limit on body strata.
    n_slices
        Number of all slices; `slices` has only those with the most replays.
    """

    epoch: str
    made_at: datetime
    budget_per_s: float
    replays_per_s: float
    taken_per_s: float
    n_items: int
    n_unboosted: int
    n_slices: int
    slices: tuple[PlannedSlice, ...]


_KINDS: dict[type, bytes] = {PolicyMessage: b"D", PolicySummary: b"A"}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {kind: msgspec.msgpack.Decoder(kind) for kind in _KINDS}


def name_of(policy: Policy) -> str:
    """Return a name derived from the rates of a policy: equal names mean equal rates."""
    rates = msgspec.json.encode([policy.header_strata, policy.body_strata])
    return _MARK + hashlib.blake2b(rates, digest_size=6).hexdigest()


def is_central(epoch: str) -> bool:
    """Return whether an epoch of an exchange belongs to a policy of the monitor."""
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
        raise ValueError(f"{len(wire)} bytes exceed the limit of {MAX_BYTES} for a policy")
    return wire


def decode_policy_message(wire: bytes) -> PolicyMessage:
    """Return the policy message in `wire`.

    Raises
    ------
    RefusedError
        It has another kind or an unknown version, is too long or damaged, or its name does not match its rates.
    """
    message: PolicyMessage = _decode(PolicyMessage, wire)
    if message.policy.epoch != name_of(message.policy):
        raise PolicyRefusedError(PolicyRefusal.UNREADABLE, "its name does not match its rates")
    if message.issued_at.tzinfo is None:
        raise PolicyRefusedError(PolicyRefusal.UNREADABLE, "its time has no zone")
    return message


def decode_policy_summary(wire: bytes) -> PolicySummary:
    """Return the policy summary in `wire`.

    Raises
    ------
    RefusedError
        It cannot be read.
    """
    summary: PolicySummary = _decode(PolicySummary, wire)
    return summary


def _decode(kind: type, wire: bytes) -> Any:
    if len(wire) > MAX_BYTES:
        raise PolicyRefusedError(
            PolicyRefusal.UNREADABLE, f"{len(wire)} bytes exceed the limit of {MAX_BYTES}"
        )
    if wire[:1] != _KINDS[kind]:
        raise PolicyRefusedError(
            PolicyRefusal.UNREADABLE, f"not a {kind.__name__.lower()} (kind byte {wire[:1]!r})"
        )
    if wire[1:2] != bytes((VERSION,)):
        raise PolicyRefusedError(
            PolicyRefusal.UNREADABLE,
            f"schema version {list(wire[1:2])} is not {VERSION}: upgrade the sidecars before the monitor",
        )
    try:
        return _DECODERS[kind].decode(memoryview(wire)[2:])
    except msgspec.MsgspecError as error:
        raise PolicyRefusedError(PolicyRefusal.UNREADABLE, misfit(error)) from error
