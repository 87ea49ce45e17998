"""The gRPC server for Envoy's external processing in observability mode.

It receives exchanges and sends no answers.

If the intake has a token, a stream must have it in its initial metadata. Envoy slows down traffic when its
stream to the processor backs up, so every message is read at once, even if it is discarded. It needs grpcio,
which a base install does not have.
"""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import grpc.aio

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Config
from quantdrift.core.errors import OperatorError
from quantdrift.sidecar.intake.callers import Callers, Token
from quantdrift.sidecar.intake.envoy_stream import Stream, StreamLimits
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.shutdown import Deadlines

_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
# Open streams of any kind; sampled ones reach the limit on buffered bytes long before.
_MAX_STREAMS = 8192
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
        The token that a stream must have, as it was at the start; empty: none is needed, because the port has a loopback address.
    gateway
        Receives the exchanges.

    Raises
    ------
    OperatorError
        On entering: the port cannot be opened.
    """

    def __init__(self, config: Config, token: str, gateway: Gateway) -> None:
        self._address = config.intake.ext_proc
        self._gateway = gateway
        current = Token(token, config.intake.token_file, SystemClock())
        self._callers = Callers(current, gateway) if token else None
        self._limits = StreamLimits(config, gateway)
        deadlines = Deadlines.of(config.sidecar)
        self._grace_s = deadlines.drain_s - deadlines.accept_s
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=_MAX_STREAMS,
            options=[
                ("grpc.max_receive_message_length", config.sidecar.max_exchange_bytes + _ENVELOPE_BYTES),
                ("grpc.so_reuseport", 0),  # a port in use is an error
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
        try:
            self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise OperatorError(f"intake.ext_proc {self._address} cannot be opened: {error}") from error
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(self._grace_s)

    def reconfigure(self, live_config: LiveConfig) -> None:
        """Apply another limit on buffered bytes; the longest message stays."""
        self._limits.reconfigure(live_config.config)

    async def _process(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        if self._callers is not None:
            authorization = dict(context.invocation_metadata() or ()).get("authorization", "")
            if not self._callers.has_token("the Envoy external processor", str(authorization)):
                return  # without an error, since Envoy would fail requests if the filter does not fail open
        stream = Stream(self._gateway, self._limits)
        try:
            async for data in messages:
                if not stream.take(data):
                    return
        finally:
            stream.end()
