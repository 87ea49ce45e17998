"""A relay's connection between two ends that keep what is written to them: no socket, no loop, no time."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

from quantdrift.sidecar.relay.connection import Relay, RelayedConnection
from quantdrift.sidecar.state.counters import Gauge
from tests.support.sidecar.relay_rig import Bench


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False

    def write(self, data: Any) -> None:
        """Keep it."""
        self.written += data

    def is_closing(self) -> bool:
        """Say whether it was closed."""
        return self.closing

    def close(self) -> None:
        """Close it."""
        self.closing = True

    abort = close

    def write_eof(self) -> None:
        """Say that no more comes."""

    def pause_reading(self) -> None:
        """Read on: the test decides what comes."""

    def resume_reading(self) -> None:
        """Read on."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Never be full."""

    def get_write_buffer_size(self) -> int:
        """Never wait."""
        return 0


class Loop:
    """Connects to no backend: the test does."""

    def create_task(self, work: Coroutine[Any, Any, None]) -> "Loop":
        """Start nothing."""
        work.close()
        return self

    def cancel(self) -> None:
        """Be a task that is not needed any more."""


def relayed(
    bench: Bench, steps: list[tuple[bool, bytes]], connected_at: int
) -> tuple[bytes, bytes, RelayedConnection]:
    """Send `steps` through a connection whose backend is there at a step; return what came out of both ends."""
    relay = Relay("h", 1, bench.scope, cast("asyncio.AbstractEventLoop", Loop()))
    connection = RelayedConnection(relay)
    client, backend = Wire(), Wire()
    connection.client.connection_made(client)
    for index, (from_client, chunk) in enumerate(steps):
        if connection.backend.transport is None and (index >= connected_at or not from_client):
            connection.backend.connection_made(backend)
        (connection.client if from_client else connection.backend).data_received(chunk)
    if connection.backend.transport is None:
        connection.backend.connection_made(backend)
    return backend.written, client.written, connection


def check_forwarding(steps: list[tuple[bool, bytes]], connected_at: int) -> None:
    """Send `steps`, close both ends, and assert that all bytes passed, no observer failed and no memory is in use."""
    bench = Bench()
    to_backend, to_client, connection = relayed(bench, steps, connected_at)
    assert to_backend == b"".join(chunk for from_client, chunk in steps if from_client)
    assert to_client == b"".join(chunk for from_client, chunk in steps if not from_client)
    connection.backend.eof_received()
    connection.client.connection_lost(None)
    connection.backend.connection_lost(None)
    assert bench.slot.gauge(Gauge.OBSERVER_ERRORS) == 0
    assert bench.slot.gauge(Gauge.BLIND) <= 1
    assert bench.balance() == bench.slot.gauge(Gauge.HELD_BYTES) == bench.slot.gauge(Gauge.OPEN) == 0
