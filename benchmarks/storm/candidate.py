"""The candidate's server: answers the requests of the storm and does nothing else, as cheaply as possible.

python -m benchmarks.storm.candidate PORT
"""

import asyncio
import re
import sys
from typing import Final

from benchmarks.storm.exchanges import LENGTH, Exchanges

_ID: Final = re.compile(rb'"id":"([\d-]+)"')


class _Connection(asyncio.Protocol):
    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            length = LENGTH.search(self._received[:end])
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self._received) < size:
                return
            message, self._received = self._received[:size], self._received[size:]
            name = _ID.search(message)
            assert self._transport is not None
            if name is None:
                self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            else:
                self._transport.write(self._exchanges.answer(name[1].decode()))


async def _serve(port: int) -> None:
    exchanges = Exchanges()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(exchanges), "127.0.0.1", port, backlog=128)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
