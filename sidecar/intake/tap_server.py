"""The Unix socket of the taps.

It sends them the rates in effect, counts their calls and forwards their exchanges. The kernel says which user a tap runs
as. The file of callers binds users to models. Exchanges of another user than those in it, that of the sidecar, and those in
`intake.tap_uids` have no caller, and cannot page.
"""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from quantdrift.core.process.run import Stop, supervise
from quantdrift.core.records import Way
from quantdrift.sidecar.handoff.frame import HEAD_BYTES, Origin
from quantdrift.sidecar.intake.callers import CallersFile
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.tap.wire import HEAD, Counts, MessageKind, Rates, message

_LOG = logging.getLogger(__name__)
_TICK_S = 0.5
_META_BYTES = 4096
_COUNTS_BYTES = 1 << 20
_HEADS_BYTES = 1 << 20  # of heads and JSON parts, in addition to tensors
_CONNECTIONS = 128  # one for each process of a server
_BUFFER_BYTES = 1 << 17  # of a connection; asyncio keeps up to twice as much
_PIECE_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_COUNTS = msgspec.msgpack.Decoder(Counts)


class TapServer:
    """Serves any number of taps while it is entered.

    It always reads, so that data never backs up into a server.

    Parameters
    ----------
    gateway
        Receives the exchanges.
    listener
        Unix stream socket that taps connect to.
    callers
        The users that are bound to models.
    rates
        Returns the rates in effect.
    live_config
        For the rows of the table of counts. A tap may still count strata that the configuration no longer
        has.
    """

    def __init__(
        self,
        gateway: Gateway,
        listener: socket.socket,
        callers: CallersFile,
        rates: Callable[[], Rates],
        live_config: LiveConfig,
    ) -> None:
        self._gateway = gateway
        self._callers = callers
        self._listener = listener
        self._current_rates = rates
        self._rates = rates()
        self._longest_bytes = 0
        self._unverified: set[int] = set()  # users that were logged
        self.reconfigure(live_config)
        self._writers: set[asyncio.StreamWriter] = set()
        self._readers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._tick_task: asyncio.Task[None] | None = None
        self._ended = Stop()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, sock=self._listener, limit=_BUFFER_BYTES)
        self._tick_task = asyncio.create_task(supervise("sending rates to taps", self._tick, self._ended))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        assert self._tick_task is not None
        self._server.close()
        self._ended.set()
        await self._tick_task
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def reconfigure(self, live_config: LiveConfig) -> None:
        """Use other rows; taps get the new rates within half a second."""
        self._uids = frozenset({os.geteuid(), *live_config.config.intake.tap_uids})
        self._n_rows = len(live_config.rows)
        self._rows = {row.stratum: index for index, row in enumerate(live_config.rows) if not row.model}
        self._limit_bytes = live_config.config.intake.max_pending_bytes
        # A lower limit is not enforced at once, because taps do not know it yet.
        self._longest_bytes = max(self._longest_bytes, live_config.config.sidecar.max_exchange_bytes)

    def tick(self) -> None:
        """Do nothing: rates are sent more often than once a second."""

    async def _tick(self) -> None:
        await self._ended.wait(_TICK_S)
        rates = self._current_rates()
        if rates != self._rates:
            self._rates = rates
            for writer in self._writers:
                writer.write(message(MessageKind.RATES, rates))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._readers) >= _CONNECTIONS:
            _LOG.warning(
                "closing a new connection to intake.tap: %d taps are connected already", _CONNECTIONS
            )
            writer.close()
            return
        self._gateway.count_tap()
        self._readers.add(task)
        self._writers.add(writer)
        try:
            writer.write(message(MessageKind.RATES, self._rates))
            await self._read(reader, writer, _uid_of(writer))
        except (asyncio.IncompleteReadError, OSError):
            pass  # the server ended or was killed
        except (ValueError, msgspec.MsgspecError) as error:
            _LOG.warning("closing the connection of a tap, whose messages are out of step: %s", error)
        finally:
            self._readers.discard(task)
            self._writers.discard(writer)
            writer.close()

    def _origin(self, uid: int) -> Origin:
        """Return who sends an exchange, by the configuration in effect now."""
        if (caller := self._callers.find_user(uid)) is not None:
            return Origin(Way.TAP, caller.name, caller.models)
        if uid in self._uids and not self._callers.names_user(uid):
            return Origin(Way.TAP, f"uid {uid}")
        if uid not in self._unverified:
            self._unverified.add(uid)
            _LOG.warning(
                "a tap runs as user %d, which neither intake.tap_uids nor intake.token_file (NAME uid:%d MODEL) names, or whose"
                " line has expired: its exchanges can open tickets and never page",
                uid,
                uid,
            )
        return Origin(Way.TAP)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, uid: int) -> None:
        while True:
            limit = self._longest_bytes + _META_BYTES + _HEADS_BYTES
            length, kind = HEAD.unpack(await reader.readexactly(HEAD.size))
            if not 1 <= length <= limit:
                raise ValueError(f"a message of {length} bytes")
            if kind == MessageKind.EXCHANGE:
                await self._exchange(reader, length - 1, self._origin(uid))
                await asyncio.sleep(
                    0
                )  # buffered messages arrive without a pause, and the hand-off must run, too
            elif kind == MessageKind.COUNTS:
                if length > _COUNTS_BYTES:
                    raise ValueError(f"counts of {length} bytes")
                counts = _COUNTS.decode(await reader.readexactly(length - 1))
                self._gateway.add_counts(counts, self._rows)
                writer.write(message(MessageKind.ACK, counts.number))
            else:
                raise ValueError(f"a message of kind {kind}")

    async def _exchange(self, reader: asyncio.StreamReader, n_bytes: int, origin: Origin) -> None:
        """Read a frame and forward it; without memory for it, read it to its end and count it as lost."""
        if not self._gateway.reserve(n_bytes, self._limit_bytes):
            start = await reader.readexactly(min(n_bytes, HEAD_BYTES + _META_BYTES))
            self._gateway.lose_frame(start, self._n_rows)
            n_left = n_bytes - len(start)
            while n_left:
                n_left -= len(await reader.readexactly(min(n_left, _PIECE_BYTES)))
            return
        try:
            self._gateway.forward_frame(await reader.readexactly(n_bytes), self._n_rows, origin)
        finally:
            self._gateway.add_held_bytes(-n_bytes)


def _uid_of(writer: asyncio.StreamWriter) -> int:
    """Return the user of the process at the other end, as the kernel knows it."""
    peer = writer.get_extra_info("socket")
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid) & 0xFFFFFFFF
