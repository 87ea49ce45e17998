"""The clients: HTTP/1.1 connections that are kept open, at a constant rate, without a second try of any request."""

import asyncio
import time
from enum import StrEnum
from random import Random
from typing import Final

import msgspec

from benchmarks.storm.exchanges import DRIFTING, LENGTH, N_ITEMS, SCANNERS, Asked, Exchanges

ANSWER_S: Final = 5.0
"""A client gives up after this time."""
_LAST: Final = b"Connection: close\r\n"  # the only thing that a sidecar writes itself: in the last response of a connection
DRIFTING_SHARE: Final = 0.15
# The share of flips over all slices is the same before the drift and after it, so that one slice alone has changed.
FLIPS: Final = 0.24  # of the drifting slice, from the onset on; of all others none
_SOUND_FLIPS: Final = DRIFTING_SHARE * FLIPS  # of every slice, before the onset


class Cause(StrEnum):
    """What a client saw of a request that failed."""

    REFUSED = "connection refused"
    CLOSED = "connection lost"
    SILENT = "no answer"
    DIFFERENT = "other bytes"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A request without its answer.

    Parameters
    ----------
    asked
        The request.
    began_s, ended_s
        When it was sent, and when the client gave up, on the monotonic clock.
    cause
        What the client saw.
    connection
        Index of the client.
    """

    asked: Asked
    began_s: float
    ended_s: float
    cause: Cause
    connection: int


class Traffic:
    """The clients and what they saw.

    Attributes
    ----------
    answered
        Requests that were answered with exactly the right bytes, but for a `Connection: close`: the numbers.
    failures
        All others that were sent.
    drifts_from_s
        From this time on the slice drifts, on the monotonic clock.
    last_answered_s, served_from_s
        When a request was last answered, and when the newest of those that were answered was sent.
    """

    def __init__(self, port: int, *, seed: int, rate_per_s: float, n_connections: int) -> None:
        self._port = port
        self._random = Random(seed)
        self._pause_s = 1 / rate_per_s
        self._n_connections = n_connections
        self._exchanges = Exchanges()
        self._number = 0
        self._due_s = 0.0
        self.drifts_from_s = float("inf")
        self.answered: set[int] = set()
        self.failures: list[Failure] = []
        self.last_answered_s = 0.0
        self.served_from_s = 0.0
        self.longest_s = 0.0
        self._ends = False

    @property
    def n_sent(self) -> int:
        """Requests that were sent so far."""
        return len(self.answered) + len(self.failures)

    async def run(self) -> None:
        """Send until `end` was called; it may be called again afterwards."""
        self._ends, self._due_s = False, time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._n_connections):
                tasks.create_task(self._client(index))

    def end(self) -> None:
        """Send no further request."""
        self._ends = True

    async def until_answered(self, since_s: float, *, within_s: float) -> bool:
        """Wait until a request has been answered after a time; return whether that happened."""
        until = time.monotonic() + within_s
        while self.last_answered_s <= since_s:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.02)
        return True

    def _next(self) -> Asked:
        number, self._number = self._number, self._number + 1
        others = [name for name in SCANNERS if name != DRIFTING]
        is_drifting = self._random.random() < DRIFTING_SHARE
        scanner = DRIFTING if is_drifting else self._random.choice(others)
        draw, item = self._random.random(), self._random.randrange(N_ITEMS)
        share = _SOUND_FLIPS
        if time.monotonic() >= self.drifts_from_s:
            share = FLIPS if is_drifting else 0.0
        return Asked(
            number=number,
            item=item,
            scanner=scanner,
            flips=draw < share,
        )

    async def _client(self, index: int) -> None:
        connection = _Connection(self._port, self._exchanges)
        while not self._ends:
            now = time.monotonic()
            self._due_s = max(self._due_s + self._pause_s, now - 1.0)  # what was missed is not caught up
            await asyncio.sleep(max(0.0, self._due_s - now))
            if self._ends:
                break
            asked, began_s = self._next(), time.monotonic()
            cause = await connection.ask(asked)
            ended_s = time.monotonic()
            if cause is None:
                self.answered.add(asked.number)
                self.last_answered_s = ended_s
                self.served_from_s = max(self.served_from_s, began_s)
                self.longest_s = max(self.longest_s, ended_s - began_s)
            else:
                self.failures.append(
                    Failure(asked=asked, began_s=began_s, ended_s=ended_s, cause=cause, connection=index)
                )
        connection.close()


class _Connection:
    """A connection that is kept open, and opened again for the next request after it failed."""

    def __init__(self, port: int, exchanges: Exchanges) -> None:
        self._port = port
        self._exchanges = exchanges
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, asked: Asked) -> Cause | None:
        """Send one request once; return None if the answer is right to the byte."""
        cause: Cause | None
        try:
            async with asyncio.timeout(ANSWER_S):
                cause = await self._ask(asked)
        except TimeoutError:
            cause = Cause.SILENT
        except ConnectionRefusedError:
            cause = Cause.REFUSED
        except (OSError, EOFError):
            cause = Cause.CLOSED
        if cause is not None:
            self.close()
        return cause

    def close(self) -> None:
        """Close it."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _ask(self, asked: Asked) -> Cause | None:
        if self._streams is not None and (self._streams[0].at_eof() or self._streams[1].is_closing()):
            self.close()  # it ended before this request began: a client of HTTP/1.1 connects again
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(self._exchanges.request(asked))
        head = await reader.readuntil(b"\r\n\r\n")
        length = LENGTH.search(head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        if (last := head.replace(_LAST, b"", 1)) != head:
            self.close()  # as HTTP/1.1 demands: the sidecar ends
        return None if last + body == self._exchanges.answer(asked.id) else Cause.DIFFERENT
