"""The relay before a real server, with a wiretap on both sides of it and a real stream behind it."""

import asyncio
import contextlib
import itertools
import json
import re
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quantdrift.core.codec import decode_exchange
from quantdrift.core.config.schema import Stream
from quantdrift.core.records import Exchange, Loss
from quantdrift.core.stream.connection import Queue
from tests.servers.wiretap import Wiretap, wiretap
from tests.support.sidecar.relay_process import DEADLINE_S, SidecarProcess, sidecar, wait

MARK = "x-test"  # the header by which a test finds its own exchanges


class Passage:
    """The way from `port` through a wiretap, the relay and a second wiretap to a server's port `direct`.

    Parameters
    ----------
    front, back
        The wiretaps.
    relay
        The sidecar between them.
    stream
        Where it publishes.
    """

    def __init__(self, front: Wiretap, relay: SidecarProcess, back: Wiretap, stream: Stream) -> None:
        self._front, self._relay, self._back = front, relay, back
        self._stream = stream
        self._held: list[Exchange] = []

    @property
    def port(self) -> int:
        """Where clients of the relay connect."""
        return self._front.port

    @property
    def direct(self) -> int:
        """Where the server itself listens."""
        return self._back.target

    def lost(self, reason: str) -> float:
        """Return how many exchanges were lost for this reason."""
        return self._relay.count("quantdrift_sidecar_lost_total", reason=reason)

    def offered(self) -> float:
        """Return how many requests were taken for inference."""
        return self._relay.count("quantdrift_sidecar_offered_total")

    def captured(self, mark: str, n: int = 1) -> list[Exchange]:
        """Return the `n` exchanges of the requests with this value of the header, as the stream holds them."""
        return asyncio.run(self._captured(mark, n))

    async def _captured(self, mark: str, n: int) -> list[Exchange]:
        queue = await Queue.connect(self._stream, client_name="test")
        until = time.monotonic() + DEADLINE_S
        try:
            consumer = await queue.consumer("exchange", ack_wait_s=DEADLINE_S)
            while len(found := self._of(mark)) < n:
                assert time.monotonic() < until, f"{len(found)} of {n} captured; lost: {self._lost()}"
                for delivery in await consumer.fetch(1, max_bytes=10**8, timeout_s=0.5):
                    self._held.append(decode_exchange(delivery.data))
                    await delivery.ack()
        finally:
            await queue.close()
        return found

    def _of(self, mark: str) -> list[Exchange]:
        return [exchange for exchange in self._held if exchange.attributes.get(f"header.{MARK}") == mark]

    def _lost(self) -> dict[str, float]:
        return {reason: n for reason in Loss if (n := self.lost(reason))}

    def check(self) -> list[tuple[bytes, bytes]]:
        """Demand that the relay has changed, added and held back no byte of any connection since the last time.

        Returns
        -------
        list
            What each connection carried up and down.
        """
        wait(lambda: self._front.closed() and self._back.closed(), "all connections are over")
        carried, behind = self._front.take(), self._back.take()
        for before, after in itertools.zip_longest(carried, behind):
            assert before == after, f"a connection before the relay:\n{before}\nand behind it:\n{after}"
        return carried


@contextlib.contextmanager
def passage(
    directory: Path, target: int, nats_url: str, models: Sequence[dict[str, Any]]
) -> Iterator[Passage]:
    """Run a relay that takes every exchange with these models before a server's port."""
    stream = Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}")
    directory.mkdir(exist_ok=True)
    with (
        wiretap(target) as back,
        sidecar(
            directory,
            back.port,
            STREAM__URL=stream.url,
            STREAM__NAME=stream.name,
            SIDECAR__MAX_EXCHANGE_BYTES=16_777_216,
            SAMPLING__RATE=1.0,
            CAPTURE__HEADERS=json.dumps([MARK]),
            MODELS=json.dumps(models),
        ) as relay,
        wiretap(relay.port) as front,
    ):
        yield Passage(front, relay, back, stream)


def talk(port: int, request: bytes) -> bytes:
    """Send a request that asks for the connection's end, and return everything that comes back."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
        client.sendall(request)
        while data := client.recv(65_536):
            answer += data
    return answer


def without_date(answer: bytes) -> bytes:
    """Return a response without the value of its header Date: two answers may fall into different seconds."""
    return re.sub(rb"(?im)^(date: )[^\r]*", rb"\1", answer, count=1)
