"""Gauges of what waits in the stream: exchanges of each model, bytes, and the age of the oldest.

Every monitor and every shadow worker exports them, so that the lag is visible while no worker runs, while no monitor
leads and while Postgres is away. All of them show the same values: take the maximum over processes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Final

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.backoff import Backoff
from quantdrift.core.process.run import Stop
from quantdrift.core.stream.backlog import Backlog, read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.telemetry import STREAM_AGE, STREAM_BYTES, STREAM_WAITING, Labels, Telemetry

LOOK_S: Final = 15.0
SHOWN_S: Final = 60.0
"""Without an answer of NATS for so long the gauges disappear: an old value would look like a stream that is read."""
_MOST_LOOKS: Final = 10_000  # nearly two days
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
_LOG = logging.getLogger(__name__)


class StreamLag:
    """Looks at the stream and shows what waits in it.

    Parameters
    ----------
    config
        The stream, and the models that are shown with 0 while nothing of them waits.
    """

    def __init__(self, config: Config, telemetry: Telemetry, clock: Clock) -> None:
        self._stream = config.stream
        self._clock = clock
        self._backlog: Backlog | None = None
        self._looked_s = 0.0
        self._oldest_s = 0.0
        self._looks: list[tuple[float, int]] = []
        self._models = {model.name for model in config.models}
        telemetry.observe(STREAM_WAITING, self._waiting)
        telemetry.observe(STREAM_BYTES, lambda: [(backlog.n_bytes, {}) for backlog in self._shown()])
        telemetry.observe(STREAM_AGE, lambda: [(self._oldest_s, {}) for _ in self._shown()])

    async def look(self, queue: Queue) -> None:
        """Look once.

        Raises
        ------
        RetryError
            NATS is not available.
        """
        backlog = await read_backlog(queue)
        self._models.update(backlog.by_model)
        self._backlog, self._looked_s = backlog, self._clock.monotonic_s()
        self._looks = grown(self._looks, backlog, self._looked_s)
        self._oldest_s = age(self._looks, backlog, self._looked_s)

    async def look_and_wait(self, queue: Queue, stop: Stop) -> None:
        """Look once through a connection that others use too, and wait for the next look."""
        with contextlib.suppress(RetryError):
            await self.look(queue)
        await stop.wait(LOOK_S)

    async def watch(self, stop: Stop) -> None:
        """Look through a connection of its own until `stop`; a NATS server that is away is logged once."""
        backoff, is_logged = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), False
        queue: Queue | None = None
        try:
            while not stop.is_set():
                try:
                    if queue is None:
                        queue = await Queue.connect(
                            self._stream, client_name="quantdrift-lag", role=NatsRole.MONITOR
                        )
                    await self.look(queue)
                except (RetryError, OperatorError) as error:
                    if not is_logged:
                        _LOG.warning("cannot read the stream backlog: %s", error)
                    is_logged = True
                    await stop.wait(backoff.next_s())
                else:
                    is_logged = False
                    backoff.reset()
                    await stop.wait(LOOK_S)
        finally:
            if queue is not None:
                await asyncio.shield(queue.close())

    def _shown(self) -> list[Backlog]:
        backlog = self._backlog
        if backlog is None or self._clock.monotonic_s() - self._looked_s > SHOWN_S:
            return []
        return [backlog]

    def _waiting(self) -> Iterable[tuple[float, Labels]]:
        for backlog in self._shown():
            for model in sorted(self._models):
                yield backlog.by_model.get(model, 0), {"model": model}


def age(looks: list[tuple[float, int]], backlog: Backlog, at_s: float) -> float:
    """Return the age of the oldest message that waits, to the accuracy of a look.

    It was stored after the last look at which the stream had not grown so far; NATS may keep older messages that are done.
    """
    looked_s, n_ever = looks[0]
    is_later = n_ever <= backlog.n_done and backlog.n_messages
    return min(backlog.oldest_s, at_s - looked_s) if is_later else backlog.oldest_s


def grown(looks: list[tuple[float, int]], backlog: Backlog, at_s: float) -> list[tuple[float, int]]:
    """Return the looks, as time and number of messages ever stored, back to the last one before the oldest message that waits."""
    if looks and backlog.n_ever < looks[-1][1]:
        looks = []  # another stream
    before = [index for index, (_, n_ever) in enumerate(looks) if n_ever <= backlog.n_done]
    kept = looks[before[-1] :] if before else looks
    if kept and kept[-1][1] == backlog.n_ever:
        kept = kept[:-1]
    return [*kept, (at_s, backlog.n_ever)][-_MOST_LOOKS:]
