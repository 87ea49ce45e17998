"""The sampling policy in effect.

It is the monitor's policy while there is a valid one, else the rates of the configuration.

Relay workers, intake and capture process derive the same epoch from the same policy message and time. The
salt belongs to the epoch, so it changes with the rates, and every `EPOCH_S` without a change of rates.

The capture process writes the policy messages to a file next to the hand-off socket, in the directory of this
sidecar, and replaces it atomically. So the other processes need no NATS, and a restarted capture process
finds the policy of its predecessor.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from quantdrift.core.config.schema import SamplingOptions
from quantdrift.core.records import HeaderStratum, Policy
from quantdrift.core.sampling.policy_message import (
    PolicyMessage,
    PolicyRefusal,
    PolicyRefusedError,
    decode_policy_message,
    encode,
    is_central,
)
from quantdrift.core.sampling.rates import (
    EPOCH_S,
    LEAST_RATIO,
    LONGEST_VALID_S,
    digest,
    lowered,
    policy_at,
    policy_of,
)
from quantdrift.sidecar.state.state_file import StateFile

MAX_KNOWN = 16  # policies; an exchange seldom takes longer than one change of policy
_T = TypeVar("_T")
_EARLY_S = 300.0  # how far the monitor's clock may run ahead of this one


class PolicyHistory:
    """The policy message in effect and some earlier ones, which are needed for exchanges drawn under them.

    Parameters
    ----------
    sampling
        The configuration's rates. They are in effect without a policy message. Where `replays_per_s` is 0, only a message
        that lowers all of them by one factor is put into effect, because the shadow does not keep up.
    """

    def __init__(self, sampling: SamplingOptions) -> None:
        self._sampling = sampling
        self._earlier: OrderedDict[str, SamplingOptions] = OrderedDict()
        self._known: OrderedDict[str, PolicyMessage] = OrderedDict()
        self._current: PolicyMessage | None = None

    def reconfigure(self, sampling: SamplingOptions) -> None:
        """Apply another configuration's rates; the earlier ones stay known by their epochs."""
        if sampling == self._sampling:
            return
        _remember(self._earlier, digest(self._sampling), self._sampling)
        self._sampling = sampling
        own = _without_rates(policy_of(sampling, "").header_strata)
        if self._current is not None and _without_rates(self._current.policy.header_strata) != own:
            # Its rates are for other strata; the next message is checked against the new ones.
            self._current = None

    def knows(self, epoch: str) -> bool:
        """Return whether the rates of an epoch are known."""
        name = epoch.partition("-")[2]
        if is_central(epoch):
            return name in self._known
        return name == digest(self._sampling) or name in self._earlier

    @property
    def known(self) -> list[PolicyMessage]:
        """The remembered policy messages, the latest first."""
        return list(reversed(self._known.values()))

    def remember(self, message: PolicyMessage) -> None:
        """Remember a policy message, so that its epochs stay known."""
        _remember(self._known, message.policy.epoch, message)

    def follow(self, message: PolicyMessage | None) -> None:
        """Put a policy message into effect, or with None the configuration's rates.

        The latter also if its strata differ.

        The process that checked the message may have had another configuration, because each process reads
        the files at its own time.
        """
        self._current = None
        if message is not None:
            self.remember(message)
            own = _without_rates(policy_of(self._sampling, "").header_strata)
            if _without_rates(message.policy.header_strata) == own:
                self._current = message

    def active(self, now_s: float) -> PolicyMessage | None:
        """Return the policy message in effect at `now_s`, seconds since 1970, or None."""
        current = self._current
        if current is None or not current.holds(now_s):
            return None
        return current if self._sampling.replays_per_s or _only_lowers(current, self._sampling) else None

    def at(self, now_s: float) -> Policy:
        """Return the policy in effect at `now_s`, seconds since 1970."""
        message = self.active(now_s)
        if message is None:
            return policy_at(self._sampling, now_s)
        period = int(now_s // EPOCH_S)
        return msgspec.structs.replace(message.policy, epoch=f"{period:x}-{message.policy.epoch}")

    def of(self, epoch: str) -> Policy | None:
        """Return the policy of an epoch, or None if its message is no longer remembered."""
        if not is_central(epoch):
            return policy_of(self._earlier.get(epoch.partition("-")[2], self._sampling), epoch)
        message = self._known.get(epoch.partition("-")[2])
        return None if message is None else msgspec.structs.replace(message.policy, epoch=epoch)


def _remember(known: OrderedDict[str, _T], name: str, value: _T) -> None:
    known[name] = value
    known.move_to_end(name)
    while len(known) > MAX_KNOWN:
        known.popitem(last=False)


def check_policy(wire: bytes, sampling: SamplingOptions, now_s: float) -> PolicyMessage:
    """Decode a policy message and return it if it may be put into effect.

    Parameters
    ----------
    wire
        The content of the policy bucket.
    sampling
        The configuration's strata and rates.
    now_s
        Seconds since 1970, UTC.

    Raises
    ------
    RefusedError
        The message is refused; the error has the reason.
    """
    message = decode_policy_message(wire)
    policy = message.policy
    own = policy_of(sampling, "").header_strata
    if _without_rates(policy.header_strata) != _without_rates(own):
        raise PolicyRefusedError(
            PolicyRefusal.STRATA,
            "its header strata are not this configuration's: give sidecars and monitor the same [sampling] and [[slices]]",
        )
    rates = [header.rate for header in policy.header_strata] + [body.rate for body in policy.body_strata]
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        raise PolicyRefusedError(PolicyRefusal.RATES, "a rate is not between 0 and 1")
    if not policy.body_strata or policy.body_strata[-1].where:
        raise PolicyRefusedError(PolicyRefusal.RATES, "it has no base rate")
    least = LEAST_RATIO * min((stratum.rate for stratum in own if stratum.rate > 0), default=0.0)
    if policy.body_strata[-1].rate < least * (sampling.body_rate > 0) or any(
        stratum.rate < LEAST_RATIO * configured.rate
        for stratum, configured in zip(policy.header_strata, own, strict=True)
    ):
        raise PolicyRefusedError(
            PolicyRefusal.RATES, "it leaves nearly nothing of what the configuration samples"
        )
    excluded = {s.name for s in sampling.header_strata if s.rate == 0} | (
        {"default"} if sampling.rate == 0 else set()
    )
    if any(stratum.rate > 0 and stratum.name in excluded for stratum in policy.header_strata):
        raise PolicyRefusedError(
            PolicyRefusal.RATES, "it samples a stratum whose rate is 0 in the configuration"
        )
    if not message.valid_s <= LONGEST_VALID_S:
        raise PolicyRefusedError(
            PolicyRefusal.LASTS, f"it is for {message.valid_s:g} s, and {LONGEST_VALID_S:g} s are allowed"
        )
    if message.issued_at.timestamp() > now_s + _EARLY_S:
        raise PolicyRefusedError(
            PolicyRefusal.EARLY,
            f"issued at {message.issued_at}, in the future: correct the clock of the monitor or of this pod",
        )
    if not message.holds(now_s):
        raise PolicyRefusedError(
            PolicyRefusal.STALE, f"issued at {message.issued_at} for {message.valid_s:g} s"
        )
    return message


def _only_lowers(message: PolicyMessage, sampling: SamplingOptions) -> bool:
    """Return whether a message has the configuration's rates, all times a factor below 1."""
    if not message.lag_factor < 1:
        return False
    own = lowered(policy_of(sampling, message.policy.epoch), message.lag_factor)
    return message.policy == own


def _without_rates(strata: Sequence[HeaderStratum]) -> list[HeaderStratum]:
    return [msgspec.structs.replace(stratum, rate=0.0) for stratum in strata]


NAME = "policy"
_LOG = logging.getLogger(__name__)


class _FileContent(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The policy messages as on the wire, the latest first, and whether the latest is in effect."""

    follow: bool
    messages: tuple[bytes, ...]


class PolicyFile:
    """The policy file, as one process reads or writes it.

    Parameters
    ----------
    path
        The file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._file = StateFile(path, _FileContent)

    def write(self, policy_history: PolicyHistory, *, follow: bool) -> None:
        """Replace the file.

        Raises
        ------
        OSError
            It cannot be written; readers keep their present policy as long as it is valid.
        """
        messages = tuple(encode(message) for message in policy_history.known)
        self._file.write(_FileContent(follow=follow, messages=messages))

    def read(self, policy_history: PolicyHistory, *, with_history: bool = False) -> None:
        """Update `policy_history` from the file, if the file has changed since the last call.

        Without a file the configuration's rates are in effect. A file that cannot be read changes nothing: the present
        policy stays as long as it is valid.

        Parameters
        ----------
        policy_history
            Of this process.
        with_history
            Remember the earlier messages too. A relay worker does not need them: it only draws.
        """
        if not self._file.refresh():
            return
        policy_history.follow(None)
        if (content := self._file.record) is None:
            return
        try:
            if with_history:
                for wire in reversed(content.messages):
                    policy_history.remember(decode_policy_message(wire))
            if content.follow and content.messages:
                policy_history.follow(decode_policy_message(content.messages[0]))
        except PolicyRefusedError as error:
            _LOG.warning(
                "the policy in the file %s is refused, the configuration's rates are in effect: %s",
                self._file.path,
                error,
            )
