"""One reader for each model, so that a model with a flood fills its own part of the stream and nobody else's."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from quantdrift.core.errors import RetryError
from quantdrift.core.process import Stop, supervise
from quantdrift.shadow.meters import Health
from quantdrift.shadow.reader import Reader

_LOG = logging.getLogger(__name__)
_LOOK_S = 2.0


class Readers:
    """Reads the exchanges of every model: of those that are configured, and of others as they appear in the stream.

    What is not configured has no reference; it is read to be counted.

    Parameters
    ----------
    models
        Names of those that are configured.
    found
        Tells of which models exchanges wait.
    make
        Makes the reader of a model. While it raises `RetryError` exchanges of that model wait in the stream, and it is tried
        again; others are read.
    health
        Told that the stream answers: without any model nobody else asks it.
    stop
        Whether the process is to end.
    """

    def __init__(
        self,
        *,
        models: Iterable[str],
        found: Callable[[], Awaitable[Iterable[str]]],
        make: Callable[[str], Awaitable[Reader]],
        health: Health,
        stop: Stop,
    ) -> None:
        self._models = frozenset(models)
        self._found = found
        self._make = make
        self._health = health
        self._stop = stop
        self._readers: dict[str, Reader] = {}

    async def run(self) -> None:
        """Read until the end is asked for, and pass on what waited for its batch to fill."""
        begun: frozenset[str] = frozenset()
        async with asyncio.TaskGroup() as group:
            while not self._stop.is_set():
                for model in sorted(await self._wanted() - begun):
                    group.create_task(self._read(model))
                    begun |= {model}
                await self._stop.wait(_LOOK_S)
        for reader in self._readers.values():
            await reader.flush()

    async def _read(self, model: str) -> None:
        while not self._stop.is_set():
            try:
                reader = await self._make(model)
            except RetryError as error:
                _LOG.warning("exchanges of %s are not read yet: %s", model, error)
                await self._stop.wait(_LOOK_S)
                continue
            self._readers[model] = reader
            await supervise(f"reading {model}", reader.read_once, self._stop)

    async def _wanted(self) -> frozenset[str]:
        try:
            found = await self._found()
        except RetryError as error:
            _LOG.debug("%s", error)
            return self._models
        self._health.stream_answered()
        return self._models.union(found)
