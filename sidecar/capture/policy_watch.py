"""Follows the policy bucket: what it holds is judged, followed or refused, and told to the relay workers."""

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
from quantdrift.core.sampling.policy_message import DIRECTIVE, PolicyMessage, Refusal, RefusedError
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.keyvalue import KeyValue
from quantdrift.sidecar.state.counters import POLICY_REFUSALS, Gauge, Slot
from quantdrift.sidecar.state.pause import PauseSource, write_pause
from quantdrift.sidecar.state.policy import PolicyFile, PolicyHistory, check_policy

_TICK_S = 1.0
_LOG = logging.getLogger(__name__)


class PolicyWatcher:
    """The capture process's part in the policy's way.

    Parameters
    ----------
    config
        Its own rates are what a directive is judged by.
    policy_history
        What the recorder tells epochs from.
    policy_file
        Where the relay workers look.
    slot
        Counts of the capture process.
    clock
        Tells the time.
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
        policy_file.read(policy_history, with_history=True)  # a predecessor may have posted it
        self.tick()

    def reconfigure(self, config: Config) -> None:
        """Judge by another configuration; what was refused or followed is judged anew."""
        self._config = config
        if self._wire is not None:
            self.handle_policy(self._wire)

    def handle_policy(self, wire: bytes | None) -> None:
        """Deal with what the bucket holds now.

        A refused directive leaves the configuration's rates in force. Nothing at all changes nothing: the last
        directive is followed until it lapses.
        """
        if wire is None:
            return
        self._wire = wire
        try:
            message = check_policy(wire, self._config.sampling, self._now_s())
        except RefusedError as error:
            _LOG.warning("the monitor's policy is refused, the configuration's rates hold: %s", error)
            self._refuse(error.refusal)
        else:
            self._policy_history.follow(message)
            self._write_policy_file(message)
        self.tick()

    def tick(self) -> None:
        """Note what is in force now; called about once a second, because directives lapse."""
        now_s = self._now_s()
        message = self._policy_history.active(now_s)
        if message is None and self._epoch:
            _LOG.warning("no policy of the monitor is in force: the configuration's rates hold")
            if self._has_expired(now_s):
                self._refuse(Refusal.STALE)
        epoch = message.policy.epoch if message else ""
        if epoch != self._epoch:
            self._slot.adjust(Gauge.POLICY_CHANGES)
            if message is not None:
                _LOG.info("following the monitor's policy %s", epoch)
        self._epoch = epoch
        self._slot.set(Gauge.POLICY_ISSUED_S, int(message.issued_at.timestamp()) if message else 0)

    async def run(self, queue: Callable[[], Queue | None], stop: Stop) -> None:
        """Follow the bucket until cancelled, from when the configuration wants that.

        Parameters
        ----------
        queue
            Returns the connection, or None while there is none.
        stop
            Ends the waiting.
        """
        # A configuration that is taken over may want it later.
        while not self._config.sampling.central or (connection := queue()) is None:
            if await stop.wait(_TICK_S):
                return
        async with aclosing(KeyValue(connection, self._config.stream).watch(DIRECTIVE)) as entries:
            async for entry in entries:
                self.handle_policy(None if entry is None else entry.value)

    async def run_pause(self, queue: Callable[[], Queue | None], stop: Stop, directory: Path) -> None:
        """Follow the pause bucket until cancelled, and tell the other processes what it holds.

        Parameters
        ----------
        queue, stop
            As for `run`.
        directory
            Where they look.
        """
        while (connection := queue()) is None:
            if await stop.wait(_TICK_S):
                return
        bucket = KeyValue(connection, self._config.stream, purpose=PAUSE)
        async with aclosing(bucket.watch(PAUSE)) as entries:
            async for entry in entries:
                self.handle_pause(None if entry is None else entry.value, directory)

    def handle_pause(self, wire: bytes | None, directory: Path) -> None:
        """Deal with what the pause bucket holds now.

        Nothing at all changes nothing: a bucket that a server has not found again yet looks like one that is not there,
        and who resumes says so.

        Raises
        ------
        OSError
            The other processes cannot be told.
        """
        if wire is None:
            return
        try:
            pause = decode_pause(wire)
        except PauseError as error:
            _LOG.warning("the fleet's pause is unreadable, what held goes on: %s", error)
            return
        write_pause(directory, PauseSource.FLEET, pause)
        _LOG.info("the fleet's pause: %s", _describe(pause))

    def _has_expired(self, now_s: float) -> bool:
        known = self._policy_history.known
        sampling = self._config.sampling
        return bool(known) and sampling.central and not sampling.paused and not known[0].holds(now_s)

    def _refuse(self, refusal: Refusal) -> None:
        self._slot.adjust(POLICY_REFUSALS[refusal])
        self._policy_history.follow(None)
        self._write_policy_file(None)

    def _write_policy_file(self, message: PolicyMessage | None) -> None:
        try:
            self._policy_file.write(self._policy_history, follow=message is not None)
        except (OSError, ValueError) as error:  # ValueError: too long as we would write it
            _LOG.warning("the relay workers cannot be told of the policy: %s", error)

    def _now_s(self) -> float:
        return self._clock.now().timestamp()


def _describe(pause: Pause) -> str:
    if pause.everything is not None:
        return f"everything, by {pause.everything.by}"
    return ", ".join(sorted(pause.models)) or "nothing"
