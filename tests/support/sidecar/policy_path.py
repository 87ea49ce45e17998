"""A sidecar's parts of the policy's way, without its processes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Config
from quantdrift.core.process.run import Stop
from quantdrift.core.sampling.policy_message import PolicyMessage
from quantdrift.core.sampling.rates import policy_at
from quantdrift.core.stream.connection import Queue
from quantdrift.sidecar.capture.policy_watch import PolicyWatcher
from quantdrift.sidecar.sampling.first_phase import ExchangeIds, Sampler
from quantdrift.sidecar.state.counters import Counters, Slot
from quantdrift.sidecar.state.policy import PolicyFile, PolicyHistory


class Pod:
    """Follower, file, and a relay worker's sampler."""

    def __init__(self, directory: Path, config: Config, clock: ManualClock) -> None:
        directory.mkdir(exist_ok=True)
        self.config, self.clock = config, clock
        self.slot: Slot = Counters.create(1, 1).slot(0)
        self.directives = PolicyHistory(config.sampling)
        self.follower = PolicyWatcher(
            config, self.directives, PolicyFile(directory / "policy"), self.slot, clock
        )
        self._notice, self._relayed = PolicyFile(directory / "policy"), PolicyHistory(config.sampling)
        self.sampler = Sampler(config.sampling, b"shared", ExchangeIds(), self._now_s(), self._relayed)

    def tick(self) -> None:
        """Do what relay worker and capture process do once a second."""
        self.follower.tick()
        self._notice.read(self._relayed)
        self.sampler.refresh(self._now_s())

    def follows(self, given: PolicyMessage) -> bool:
        """Return whether both phases are under this directive."""
        self.tick()
        wanted = given.policy.header_strata
        now_s = self._now_s()
        return self.directives.at(now_s).header_strata == self._relayed.at(now_s).header_strata == wanted

    def is_local(self) -> bool:
        """Return whether both phases are under the configuration's rates."""
        self.tick()
        now_s = self._now_s()
        return self.directives.at(now_s) == self._relayed.at(now_s) == policy_at(self.config.sampling, now_s)

    def takes(self, user: int) -> bool:
        """Return whether the relay worker takes a user's request."""
        head = b"POST /v2/models/digits/infer HTTP/1.1\r\nX-User: %d\r\n\r\n" % user
        return self.sampler.draw(b"POST", b"/v2/models/digits/infer", head, 0, len(head)).taken

    def _now_s(self) -> float:
        return self.clock.now().timestamp()


@contextlib.asynccontextmanager
async def following(pod: Pod, queue: Queue) -> AsyncIterator[None]:
    """Let a pod follow the bucket inside the block."""
    task = asyncio.create_task(pod.follower.run(lambda: queue, Stop()))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
