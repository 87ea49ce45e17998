"""A relay in front of a real server that records the bytes that clients send."""

import asyncio
import contextlib


class RecordingRelay:
    """Forwards connections to a local port and records what clients send.

    Parameters
    ----------
    to
        Port of the server; it may be set later.
    """

    def __init__(self, to: int = 0) -> None:
        self.to = to
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.port = 0
        self.sent = b""
        self.n_connections = 0

    async def start(self) -> None:
        """Listen, on the port of before if there was one."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close every connection."""
        if self._server is not None:
            self._server.close()
        for _turn in range(5):  # connections that were accepted just now get their task
            await asyncio.sleep(0)
        for end in self._ends:
            end.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect to the server and forward both directions until both have ended."""
        there, out = await asyncio.open_connection("127.0.0.1", self.to)
        try:
            await asyncio.gather(self._pump(reader, out, kept=True), self._pump(there, writer, kept=False))
        finally:
            out.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        self._ends.append(writer)
        self._tasks.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self.forward(reader, writer)
        finally:
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, kept: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if kept:
                    self.sent += data
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
