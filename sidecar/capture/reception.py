"""Takes frames from the relay workers over the Unix socket. It always reads: nothing may back up into a relay."""

import asyncio
import logging
import socket
from collections.abc import Callable

from quantdrift.core.config.schema import MIB, Sidecar
from sidecar.handoff import HEAD_BYTES, RawMeta, lengths, parse

_LOG = logging.getLogger(__name__)

_BUFFER_BYTES = MIB
_META_BYTES = 4096
_QUIET_S = 0.25

Handle = Callable[[RawMeta, memoryview, memoryview], None]


class Reception:
    """Reads the frames of any number of relay workers and hands each to `handle`.

    Parameters
    ----------
    sidecar
        Bounds the length of a frame.
    handle
        Called with meta, request and response on the loop. Its ValueError says that the frames are out of step.
    """

    def __init__(self, sidecar: Sidecar, handle: Handle) -> None:
        self._limit = sidecar.max_exchange_bytes + 2 * sidecar.max_header_bytes + _META_BYTES
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._readers: set[asyncio.Task[None]] = set()
        self._n_frames = 0

    async def start(self, listener: socket.socket) -> None:
        """Accept connections on `listener`, which listens already."""
        self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=_BUFFER_BYTES)

    async def finish(self, timeout_s: float) -> None:
        """Accept no more, read what has been sent, and close: when it is quiet, at the latest after `timeout_s`."""
        if self._server is not None:
            self._server.close()
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        n_before = -1
        while self._readers and n_before != self._n_frames and loop.time() < until:
            n_before = self._n_frames
            await asyncio.wait(self._readers, timeout=_QUIET_S)
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            await self._read(reader)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the relay worker ended; its supervisor starts another
        except ValueError:
            _LOG.exception("a relay worker's frames are out of step: closing its connection")
        finally:
            self._readers.discard(task)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            n_rest, n_meta = lengths(await reader.readexactly(HEAD_BYTES))
            if not 0 <= n_meta <= min(n_rest, _META_BYTES) or n_rest > self._limit:
                raise ValueError(f"a frame of {n_rest} bytes with {n_meta} of meta")
            self._handle(*parse(n_meta, await reader.readexactly(n_rest)))
            self._n_frames += 1
            await asyncio.sleep(0)  # buffered frames come without a pause: the publisher must run, too
