"""The gRPC server for Envoy's external processing in observability mode.

It receives exchanges and sends no answers.

If the intake has callers, a stream must have the token of one in its initial metadata, or the connection its certificate. Envoy slows down traffic when its
stream to the processor backs up, so every message is read at once, even if it is discarded. It needs grpcio,
which a base install does not have.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc.aio

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Config
from quantdrift.core.config.address import read_address
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Way
from quantdrift.sidecar.handoff.frame import Origin
from quantdrift.sidecar.intake.callers import Callers, CallersFile
from quantdrift.sidecar.intake.envoy_port import EnvoyPort
from quantdrift.sidecar.intake.envoy_stream import STREAM_BYTES, ExchangeStream, StreamLimits
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.intake.server_tls import ServerTls
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.shutdown import Deadlines

_LOG = logging.getLogger(__name__)
_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
# Open streams of any kind; their memory reaches the limit on buffered bytes long before.
_MAX_STREAMS = 8192
_FIRST_S = 10.0  # from the start of a stream to its first message
_ENVELOPE_BYTES = 1 << 20  # of a message, in addition to the largest body
_KEEPALIVE_MS = 30_000  # the streams of a vanished Envoy end with its connection
_KEEPALIVE_TIMEOUT_MS = 10_000


class ExtProc:
    """Serves any number of Envoys while it is entered.

    Parameters
    ----------
    config
        Configuration of the sidecar.
    token
        The tokens of which a stream must have one, as they were at the start; empty: none is needed, because the port has a
        loopback address. Its exchanges have no caller then, and cannot page.
    gateway
        Receives the exchanges.
    directory
        Directory of this sidecar, for the socket of the gRPC server.

    Raises
    ------
    OperatorError
        On entering: the port cannot be opened.
    """

    def __init__(self, config: Config, token: str, gateway: Gateway, directory: Path) -> None:
        self._address = config.intake.ext_proc
        self._inner = directory / "ext-proc"
        self._gateway = gateway
        current = CallersFile(token, config.intake.token_file, SystemClock())
        self._callers = Callers(current, gateway) if token else None
        self._limits = StreamLimits(config, gateway)
        self._inner.unlink(missing_ok=True)  # of an intake process that was killed
        self._tls = ServerTls.of(config.intake, "h2")
        self._port = EnvoyPort(
            str(self._inner),
            self._limits.unfinished_bytes,
            self._limits.add_unfinished,
            None if self._tls is None else self._tls.context,
        )
        deadlines = Deadlines.of(config.sidecar)
        self._grace_s = deadlines.drain_s - deadlines.accept_s
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=_MAX_STREAMS,
            options=[
                ("grpc.max_receive_message_length", config.sidecar.max_exchange_bytes + _ENVELOPE_BYTES),
                ("grpc.http2.bdp_probe", 0),  # windows would grow to 16 MiB for each stream that nobody reads
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
                # Envoy may ping more often than gRPC allows by default.
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ],
        )
        # Messages are handled as bytes, so that an invalid one is not reported as a gRPC error.
        handler = grpc.stream_stream_rpc_method_handler(self._process)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {"Process": handler}),)
        )

    async def __aenter__(self) -> Self:
        if self._callers is None:
            _LOG.warning(
                "intake.ext_proc has no token, so nobody checks who sends exchanges there: they can open tickets and never"
                " page. Set intake.token_file or QUANTDRIFT_INTAKE_TOKEN"
            )
        self._server.add_insecure_port(f"unix:{self._inner}")
        await self._server.start()
        try:
            address = read_address(self._address)
            await self._port.open(address.host, address.port)
        except OSError as error:
            raise OperatorError(f"intake.ext_proc {self._address} cannot be opened: {error}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._port.stop_accepting()
        await self._server.stop(self._grace_s)
        self._port.close()

    def reconfigure(self, live_config: LiveConfig) -> None:
        """Apply another limit on buffered bytes; the longest message stays."""
        self._limits.reconfigure(live_config.config)

    def tick(self) -> None:
        """Use a changed certificate. Called about once a second."""
        if self._tls is not None:
            self._tls.refresh()

    async def _process(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        origin = Origin(Way.EXT_PROC)
        if self._callers is not None:
            authorization = dict(context.invocation_metadata() or ()).get("authorization", "")
            caller = self._callers.by_header(
                Way.EXT_PROC,
                "the Envoy external processor",
                str(authorization),
                self._port.certificate_of(context.peer()),
            )
            if caller is None:
                return  # without an error, since Envoy would fail requests if the filter does not fail open
            origin = caller
        first = await self._first(messages)
        if not first:
            return
        stream = ExchangeStream(self._gateway, self._limits, origin)
        try:
            if not stream.take(first):
                return
            async for data in messages:
                if not stream.take(data):
                    return
        finally:
            stream.end()

    async def _first(self, messages: AsyncIterator[bytes]) -> bytes:
        """Return the first message of a stream; empty if none comes in time, or there is no memory for the stream."""
        if not self._limits.reserve(STREAM_BYTES):
            self._gateway.count_unobserved()
            return b""
        try:
            async with asyncio.timeout(_FIRST_S):
                return await anext(aiter(messages), b"")
        except TimeoutError:
            return b""
        finally:
            self._limits.release(STREAM_BYTES)
