"""The watcher of the policy bucket.

It checks policies and pauses, and writes them for the other processes.
"""

import logging
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Config
from quantdrift.core.process.run import Stop
from quantdrift.core.sampling.pause import KEY as PAUSE
from quantdrift.core.sampling.pause import Pause, PauseError
from quantdrift.core.sampling.pause import decode as decode_pause
from quantdrift.core.sampling.policy_message import (
    POLICY_KEY,
    PolicyMessage,
    PolicyRefusal,
    PolicyRefusedError,
)
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.keyvalue import KeyValue
from quantdrift.sidecar.state.counters import POLICY_REFUSALS, Gauge, Slot
from quantdrift.sidecar.state.pause import PauseSource, write_pause
from quantdrift.sidecar.state.policy import PolicyFile, PolicyHistory, check_policy

_TICK_S = 1.0
_OF_OTHERS = (PolicyRefusal.STRATA, PolicyRefusal.RATES, PolicyRefusal.STALE)
"""Why a policy is refused that a monitor with a replay budget made: where this sidecar has none, that is no fault."""
_LOG = logging.getLogger(__name__)


class PolicyWatcher:
    """Watches the policy and pause buckets, and puts accepted messages into effect in this sidecar.

    Parameters
    ----------
    config
        A policy message must fit its strata and rates.
    policy_history
        Shared with the recorder, which looks epochs up in it.
    policy_file
        The file from which the other processes read the policy.
    slot
        Counters of the capture process.
    clock
        Tells whether a policy is valid.
    """

    def __init__(
        self, config: Config, policy_history: PolicyHistory, policy_file: PolicyFile, slot: Slot, clock: Clock
    ) -> None:
        self._config = config
        self._policy_history = policy_history
        self._policy_file = policy_file
        self._slot = slot
        self._clock = clock
        self._epoch = ""
        self._wire: bytes | None = None
        policy_file.read(policy_history, with_history=True)  # a predecessor may have written it
        self.tick()

    def reconfigure(self, config: Config) -> None:
        """Apply another configuration; the last message is checked again."""
        self._config = config
        if self._wire is not None:
            self.handle_policy(self._wire)

    def handle_policy(self, wire: bytes | None) -> None:
        """Handle the present content of the policy bucket.

        After a refused message the configuration's rates are in effect. An empty bucket changes nothing: the
        last message stays in effect until it expires.
        """
        if wire is None:
            return
        self._wire = wire
        try:
            message = check_policy(wire, self._config.sampling, self._now_s())
        except PolicyRefusedError as error:
            if not self._config.sampling.replays_per_s and error.refusal in _OF_OTHERS:
                self._policy_history.follow(None)
                self._write_policy_file(None)
            else:
                _LOG.warning(
                    "the monitor's policy is refused, the configuration's rates are in effect: %s", error
                )
                self._refuse(error.refusal)
        else:
            self._policy_history.follow(message)
            self._write_policy_file(message)
        self.tick()

    def tick(self) -> None:
        """Update the counters for the policy in effect.

        Called about once a second, because messages expire.
        """
        now_s = self._now_s()
        message = self._policy_history.active(now_s)
        if message is None and self._epoch:
            if self._has_caught_up():
                _LOG.info("the shadow keeps up again: the configuration's rates are used")
            else:
                _LOG.warning("no policy of the monitor is in effect: the configuration's rates are used")
            if self._has_expired(now_s):
                self._refuse(PolicyRefusal.STALE)
        epoch = message.policy.epoch if message else ""
        if epoch != self._epoch:
            self._slot.adjust(Gauge.POLICY_CHANGES)
            if message is not None and message.lag_factor < 1:
                _LOG.warning(
                    "the shadow does not keep up: every sampling rate is multiplied by %g (policy %s of the monitor)",
                    message.lag_factor,
                    epoch,
                )
            elif message is not None:
                _LOG.info("the monitor's policy %s is in effect", epoch)
        self._epoch = epoch
        self._slot.set(Gauge.POLICY_ISSUED_S, int(message.issued_at.timestamp()) if message else 0)

    async def run(self, queue: Callable[[], Queue | None], stop: Stop) -> None:
        """Watch the policy bucket until cancelled: without a replay budget, too, the monitor may lower the rates.

        Parameters
        ----------
        queue
            Returns the connection to NATS, or None while there is none.
        stop
            Ends the wait for a connection.
        """
        while (connection := queue()) is None:
            if await stop.wait(_TICK_S):
                return
        async with aclosing(KeyValue(connection, self._config.stream).watch(POLICY_KEY)) as entries:
            async for entry in entries:
                self.handle_policy(None if entry is None else entry.value)

    async def run_pause(self, queue: Callable[[], Queue | None], stop: Stop, directory: Path) -> None:
        """Watch the pause bucket until cancelled, and write its content for the other processes.

        Parameters
        ----------
        queue, stop
            As for `run`.
        directory
            Directory of the pause files.
        """
        while (connection := queue()) is None:
            if await stop.wait(_TICK_S):
                return
        bucket = KeyValue(connection, self._config.stream, purpose=PAUSE)
        async with aclosing(bucket.watch(PAUSE)) as entries:
            async for entry in entries:
                self.handle_pause(None if entry is None else entry.value, directory)

    def handle_pause(self, wire: bytes | None, directory: Path) -> None:
        """Handle the present content of the pause bucket.

        An empty bucket changes nothing: a bucket that the server has not loaded yet looks empty, too, and
        resuming writes an explicit message.

        Raises
        ------
        OSError
            The file for the other processes cannot be written.
        """
        if wire is None:
            return
        try:
            pause = decode_pause(wire)
        except PauseError as error:
            _LOG.warning("the fleet's pause is invalid, the previous one stays in effect: %s", error)
            return
        write_pause(directory, PauseSource.FLEET, pause)
        _LOG.info("paused by the fleet: %s", _describe(pause))

    def _has_expired(self, now_s: float) -> bool:
        messages = self._policy_history.known
        has_budget = self._config.sampling.replays_per_s > 0
        return bool(messages) and (has_budget or messages[0].lag_factor < 1) and not messages[0].holds(now_s)

    def _has_caught_up(self) -> bool:
        """Return whether the rates were only lowered for a while, and the monitor has ended that."""
        messages = self._policy_history.known
        return not self._config.sampling.replays_per_s and bool(messages) and messages[0].lag_factor == 1.0

    def _refuse(self, refusal: PolicyRefusal) -> None:
        self._slot.adjust(POLICY_REFUSALS[refusal])
        self._policy_history.follow(None)
        self._write_policy_file(None)

    def _write_policy_file(self, message: PolicyMessage | None) -> None:
        try:
            self._policy_file.write(self._policy_history, follow=message is not None)
        except (OSError, ValueError) as error:  # ValueError: the message is too long when encoded
            _LOG.warning("the policy file for the relay workers cannot be written: %s", error)

    def _now_s(self) -> float:
        return self._clock.now().timestamp()


def _describe(pause: Pause) -> str:
    if pause.everything is not None:
        return f"everything, by {pause.everything.by}"
    return ", ".join(sorted(pause.models)) or "nothing"
