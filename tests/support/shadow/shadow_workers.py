"""A shadow worker as tests configure and run it: small batches, one thread, and a stream of its own."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from quantdrift.core.codec import encode
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, Provider, Shadow, Stream
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Exchange
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.shadow.worker import serve

DEADLINE_S = 60.0


def worker_config(nats_url: str, models: Iterable[Model], **shadow: Any) -> Config:
    """Return a configuration with these models, and these options of `[shadow]` beside those of tests."""
    options: dict[str, Any] = {
        "provider": Provider.CPU,
        "threads": 1,
        "nice": 0,
        "batch_items": 8,
        "batch_delay_s": 0.05,
        "admin": "127.0.0.1:0",
    }
    return Config(
        stream=Stream(url=nats_url, name=f"t{uuid.uuid4().hex[:8]}"),
        shadow=Shadow(**options | shadow),
        models=tuple(models),
    )


async def published(config: Config, exchanges: Iterable[Exchange]) -> Queue:
    """Put exchanges into the stream, and return it."""
    queue = await Queue.connect(config.stream, client_name="test")
    await queue.ensure()
    for exchange in exchanges:
        await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))
    return queue


@asynccontextmanager
async def serving(config: Config, dsn: str) -> AsyncIterator[Queue]:
    """Run a worker inside the block; yield a queue to publish to; at the end the worker must end with 0."""
    queue = await Queue.connect(config.stream, client_name="test")
    stop = Stop()
    worker = asyncio.create_task(serve(config, Secrets(dsn=dsn), stop))
    try:
        yield queue
    finally:
        stop.set()
        await queue.close()
        assert await asyncio.wait_for(worker, DEADLINE_S) == 0


async def work_off(config: Config, dsn: str, exchanges: Iterable[Exchange]) -> None:
    """Put exchanges into the stream, and run a worker until it is empty; it must end well."""
    queue, stop = await published(config, exchanges), Stop()
    worker = asyncio.create_task(serve(config, Secrets(dsn=dsn), stop))
    until_s = time.monotonic() + DEADLINE_S
    while (await read_backlog(queue)).n_messages:
        assert time.monotonic() < until_s, "the worker has not finished in time"
        await asyncio.sleep(0.02)
    stop.set()
    await queue.close()
    assert await asyncio.wait_for(worker, DEADLINE_S) == 0
