"""Whose rates hold: the monitor's directive while one is there, else the configuration's. No I/O.

The relay workers and the capture process each hold one of these, and derive the same epoch from the same directive
and time. The salt belongs to the epoch, so it changes with the rates, and every `epoch_s` without them.

The file in which the capture process tells the relay workers which policy to follow.

It lies next to the hand-off socket, in a directory of this sidecar alone, and is replaced whole: a reader sees the
last one or the one before. A relay worker needs no NATS for it, and a capture process that is started anew finds
what its predecessor had told.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from quantdrift.core.config.schema import Sampling
from quantdrift.core.records import HeaderStratum, Policy
from quantdrift.core.sampling.policy_message import (
    PolicyMessage,
    Refusal,
    RefusedError,
    decode_policy_message,
    encode,
    is_central,
)
from quantdrift.core.sampling.rates import digest, policy_at, policy_of

MOST_KNOWN = 16  # an exchange is seldom under way while more than one policy is replaced
_T = TypeVar("_T")
_EARLY_S = 300.0  # how far the monitor's clock may run ahead of this one


class PolicyHistory:
    """The directive in force, and some before it: exchanges drawn under them are still on their way.

    Parameters
    ----------
    sampling
        The configuration's rates, which hold while there is no directive, or `paused`, or not `central`.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._earlier: OrderedDict[str, Sampling] = OrderedDict()
        self._known: OrderedDict[str, PolicyMessage] = OrderedDict()
        self._current: PolicyMessage | None = None

    def reconfigure(self, sampling: Sampling) -> None:
        """Go over to another configuration's rates; the earlier ones are still told by their epochs."""
        if sampling == self._sampling:
            return
        _put(self._earlier, digest(self._sampling), self._sampling)
        self._sampling = sampling
        own = _unrated(policy_of(sampling, "").header_strata)
        if self._current is not None and _unrated(self._current.policy.header_strata) != own:
            self._current = None  # it has rates for other strata: the next one is judged by these

    def knows(self, epoch: str) -> bool:
        """Return whether the rates of an epoch are told from what it was drawn by."""
        name = epoch.partition("-")[2]
        if is_central(epoch):
            return name in self._known
        return name == digest(self._sampling) or name in self._earlier

    @property
    def known(self) -> list[PolicyMessage]:
        """Directives whose epochs are still told, the latest first."""
        return list(reversed(self._known.values()))

    def remember(self, directive: PolicyMessage) -> None:
        """Be able to tell its epochs."""
        _put(self._known, directive.policy.epoch, directive)

    def follow(self, directive: PolicyMessage | None) -> None:
        """Follow it from now on; None: the configuration's rates hold, and so they do where its strata are others.

        Who has judged it may have had another configuration: files are looked at by each process in its own time.
        """
        self._current = None
        if directive is not None:
            self.remember(directive)
            own = _unrated(policy_of(self._sampling, "").header_strata)
            if _unrated(directive.policy.header_strata) == own:
                self._current = directive

    def in_force(self, now_s: float) -> PolicyMessage | None:
        """Return the directive that is followed at `now_s`, seconds since 1970, or None."""
        current = self._current
        if current is None or self._sampling.paused or not self._sampling.central:
            return None
        return current if current.holds(now_s) else None

    def at(self, now_s: float) -> Policy:
        """Return the policy in force at `now_s`, seconds since 1970."""
        directive = self.in_force(now_s)
        if directive is None:
            return policy_at(self._sampling, now_s)
        period = int(now_s // self._sampling.epoch_s)
        return msgspec.structs.replace(directive.policy, epoch=f"{period:x}-{directive.policy.epoch}")

    def of(self, epoch: str) -> Policy | None:
        """Return the policy of an epoch, or None: its directive is forgotten."""
        if not is_central(epoch):
            return policy_of(self._earlier.get(epoch.partition("-")[2], self._sampling), epoch)
        directive = self._known.get(epoch.partition("-")[2])
        return None if directive is None else msgspec.structs.replace(directive.policy, epoch=epoch)


def _put(known: OrderedDict[str, _T], name: str, value: _T) -> None:
    known[name] = value
    known.move_to_end(name)
    while len(known) > MOST_KNOWN:
        known.popitem(last=False)


def judged(wire: bytes, sampling: Sampling, now_s: float) -> PolicyMessage:
    """Return the directive in `wire`, which may be followed.

    Parameters
    ----------
    wire
        What the policy bucket holds.
    sampling
        The configuration's strata and rates.
    now_s
        Seconds since 1970, UTC.

    Raises
    ------
    RefusedError
        It may not; the reason is in it.
    """
    directive = decode_policy_message(wire)
    policy = directive.policy
    own = policy_of(sampling, "").header_strata
    if _unrated(policy.header_strata) != _unrated(own):
        raise RefusedError(
            Refusal.STRATA,
            "its header strata are not this configuration's: give sidecars and monitor the same [sampling] and [[slices]]",
        )
    rates = [header.rate for header in policy.header_strata] + [body.rate for body in policy.body_strata]
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        raise RefusedError(Refusal.RATES, "a rate is not from 0 to 1")
    if not policy.body_strata or policy.body_strata[-1].where:
        raise RefusedError(Refusal.RATES, "it has no base rate")
    barred = {s.name for s in sampling.header_strata if s.rate == 0} | (
        {"default"} if sampling.rate == 0 else set()
    )
    if any(stratum.rate > 0 and stratum.name in barred for stratum in policy.header_strata):
        raise RefusedError(Refusal.RATES, "it takes what the configuration takes nothing of")
    if directive.issued_at.timestamp() > now_s + _EARLY_S:
        raise RefusedError(Refusal.EARLY, f"issued at {directive.issued_at}: a clock is wrong")
    if not directive.holds(now_s):
        raise RefusedError(Refusal.STALE, f"issued at {directive.issued_at} for {directive.valid_s:g} s")
    return directive


def _unrated(strata: Sequence[HeaderStratum]) -> list[HeaderStratum]:
    return [msgspec.structs.replace(stratum, rate=0.0) for stratum in strata]


NAME = "policy"
_LOG = logging.getLogger(__name__)


class _Notice(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Directives as on the wire, the latest first, and whether that one is to be followed."""

    follow: bool
    directives: tuple[bytes, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Notice)


class PolicyFile:
    """One process's view of the file.

    Parameters
    ----------
    path
        The file; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    def post(self, directives: PolicyHistory, *, follow: bool) -> None:
        """Replace it.

        Raises
        ------
        OSError
            It cannot be written; readers go on with what they have, for as long as that is valid.
        """
        notice = _Notice(follow=follow, directives=tuple(encode(known) for known in directives.known))
        new = self._path.with_suffix(".new")
        new.write_bytes(_ENCODER.encode(notice))
        new.replace(self._path)

    def read(self, directives: PolicyHistory, *, whole: bool = False) -> None:
        """Have `directives` follow what it says, if it has changed since the last call.

        Parameters
        ----------
        directives
            Of this process.
        whole
            Remember the earlier ones too: a relay worker draws and never looks back.
        """
        try:
            status = self._path.stat()
        except OSError:
            seen = None
        else:
            seen = (status.st_mtime_ns, status.st_ino, status.st_size)
        if seen == self._seen:
            return
        raw = b""
        if seen is not None:
            try:
                raw = self._path.read_bytes()
            except OSError as error:  # too many open files, say: the next call tries again
                _LOG.warning("the policy cannot be read, what was followed goes on: %s", error)
                return
        self._seen = seen
        directives.follow(None)
        if seen is not None:
            self._take(raw, directives, whole=whole)

    def _take(self, raw: bytes, directives: PolicyHistory, *, whole: bool) -> None:
        try:
            notice = _DECODER.decode(raw)
            if whole:
                for wire in reversed(notice.directives):
                    directives.remember(decode_policy_message(wire))
            if notice.follow and notice.directives:
                directives.follow(decode_policy_message(notice.directives[0]))
        except (msgspec.MsgspecError, RefusedError):
            _LOG.exception("%s is unreadable: the configuration's rates hold", self._path)
