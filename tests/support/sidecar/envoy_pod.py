"""A sidecar whose only way in is Envoy's external processing."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from quantdrift.core.codec import decode_exchange
from quantdrift.core.config.schema import Stream
from quantdrift.core.records import Exchange, Loss
from quantdrift.core.stream.connection import Queue
from tests.support.sidecar.relay_process import DEADLINE_S, SidecarProcess, free_port, sidecar, wait

FAINT = {"x-scanner": "faint"}
LIMIT_BYTES = 1 << 20
_STRATA = '[{"name": "faint", "rate": 1.0, "headers": {"x-scanner": "faint"}}]'


class Pod:
    """A running sidecar, and what its stream holds.

    Parameters
    ----------
    running
        The sidecar.
    port
        Of its external processor.
    stream
        Where it publishes.
    """

    def __init__(self, running: SidecarProcess, port: int, stream: Stream) -> None:
        self.running, self.port, self._stream = running, port, stream

    def count(self, name: str, **labels: str) -> float:
        """Return a counter of the sidecar."""
        return self.running.count(f"quantdrift_sidecar_{name}_total", **labels)

    def lost(self, reason: str) -> float:
        """Return how many were lost for this reason."""
        return self.count("lost", reason=reason)

    def balance(self) -> float:
        """Return how many were taken, and neither published nor lost."""
        return self.count("taken") - self.count("published") - sum(self.lost(reason) for reason in Loss)

    def begin(self, tell: Callable[[], object]) -> None:
        """Tell until something is published, so that every process has found the next; leave nothing unread."""
        before = self.count("published")

        def arrives() -> bool:
            tell()
            return self.count("published") > before

        wait(arrives, "one is published")
        wait(lambda: self.balance() == 0, "all are accounted for")
        self.stored(int(self.count("published") - before))

    def intake(self) -> psutil.Process:
        """Return the intake process that runs now."""
        return next(
            c for c in self.running.root.children() if "quantdrift.sidecar.intake.process" in c.cmdline()
        )

    def stored(self, n: int) -> list[Exchange]:
        """Return the next `n` exchanges of the stream."""

        async def read() -> list[Exchange]:
            queue = await Queue.connect(self._stream, client_name="test")
            found: list[Exchange] = []
            try:
                consumer = await queue.consumer("exchange", ack_wait_s=60)
                async with asyncio.timeout(DEADLINE_S):
                    while len(found) < n:
                        for delivery in await consumer.fetch(n - len(found), max_bytes=10**8, timeout_s=0.5):
                            found.append(decode_exchange(delivery.data))
                            await delivery.ack()
            finally:
                await queue.close()
            return found

        return asyncio.run(read())


@contextlib.contextmanager
def pod(directory: Path, nats_url: str, **options: object) -> Iterator[Pod]:
    """Run a sidecar that takes everything of `faint` and nothing else."""
    stream, port = Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}"), free_port()
    given = {
        "SIDECAR__LISTEN": "",
        "SIDECAR__MAX_EXCHANGE_BYTES": LIMIT_BYTES,
        "STREAM__URL": nats_url,
        "STREAM__NAME": stream.name,
        "INTAKE__EXT_PROC": f"127.0.0.1:{port}",
        "CAPTURE__HEADERS": '["x-scanner"]',
        "SAMPLING__RATE": 0,
        "SAMPLING__HEADER_STRATA": _STRATA,
        "SAMPLING__MAX_EXCHANGES_PER_S": 100_000,
        "MODELS": '[{"name": "digits"}]',
        **options,
    }
    with sidecar(directory, 0, **given) as running:
        yield Pod(running, port, stream)
