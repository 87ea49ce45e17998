"""A relay worker's process: accepts on the socket it inherited, relays, observes, hands over.

The supervisor starts it as `python -m quantdrift.sidecar.relay.worker`. It is kept small: no aiohttp, NATS, numpy or OpenTelemetry.
"""

import argparse
import asyncio
import gc
import os
import resource
import socket
from collections.abc import Sequence
from pathlib import Path

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Secrets
from quantdrift.core.config.address import read_address
from quantdrift.core.logs import setup_logs
from quantdrift.core.process.run import Stop, run, supervise
from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.sender import FrameSender
from quantdrift.sidecar.relay.connection import Connection, Relay
from quantdrift.sidecar.relay.listener import Listener
from quantdrift.sidecar.relay.observing.live_scope import LiveScope
from quantdrift.sidecar.relay.watchdog import Watchdog
from quantdrift.sidecar.sampling.load_shedding import LoadShedding
from quantdrift.sidecar.state.config import LiveConfigFile
from quantdrift.sidecar.state.counters import MOST_ROWS, Count, Counters, Gauge
from quantdrift.sidecar.state.shutdown import Deadlines

_TICK_S = 1.0
_LAST_S = 0.2  # for the first request of those who have come in last


async def serve(
    settlement: LiveConfigFile,
    secrets: Secrets,
    stop: Stop,
    *,
    counters: Counters,
    index: int,
    listener: socket.socket,
    handoff: str,
) -> int:
    """Relay until `stop`, then drain; return the exit code.

    Parameters
    ----------
    settlement
        What holds; looked at once a second.
    secrets
        Of the sidecar.
    stop
        Asks for the end. For `drain_delay_s` new connections are still accepted; then a connection is closed once it
        is between exchanges, and what is left some time before `grace_s`.
    counters
        Of all processes of the sidecar.
    index
        This worker's slot of them.
    listener
        Listening socket, shared with the other workers.
    handoff
        Path of the Unix socket that the capture process listens on; beside it lies what the monitor wants followed.
    """
    loop = asyncio.get_running_loop()
    slot = counters.slot(index)
    bounds = settlement.settled.config.sidecar
    for gauge in (Gauge.OPEN, Gauge.HELD_BYTES, Gauge.QUEUE_BYTES, Gauge.SLOW):
        slot.set(gauge, 0)  # a predecessor may have been killed
    slot.settle(len(settlement.settled.rows), Count.TAKEN, ended=(Count.HANDED,), loss=Loss.TRUNCATED)
    handout = FrameSender(handoff, bounds.handoff_bytes, slot, loop)
    handout.connect()
    directory = Path(handoff).parent
    clock = SystemClock()
    phase = LiveScope(
        settlement,
        secrets.salt,
        directory,
        offer=handout.offer,
        slot=slot,
        clock=clock,
        gate=LoadShedding(counters.slot(counters.n_slots - 1), clock),
    )
    backend = read_address(bounds.backend)
    relay = Relay(backend.host, backend.port, phase.scope, loop)
    watchdog = Watchdog(Connection.observing, lambda: loop.call_soon(relay.look_away), loop)
    door = Listener(listener, relay, resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    async def tick() -> None:
        await ended.wait(_TICK_S)
        if (settled := phase.look()) is not None:
            handout.limit_bytes = settled.config.sidecar.handoff_bytes
        relay.tick()

    ended = Stop()
    ticking = asyncio.create_task(supervise("the tick", tick, ended))
    gc.freeze()  # what is there by now stays: the collector need not look at it again
    watchdog.start()
    door.open()
    slot.set(Gauge.SERVING, 1)
    await stop.wait()
    deadlines = Deadlines.of(bounds)
    await asyncio.sleep(deadlines.accept_s)
    slot.set(Gauge.SERVING, 0)
    door.close()
    await _finish(relay, handout, deadlines)
    watchdog.stop()
    ended.set()
    await ticking
    return 0


async def _finish(relay: Relay, handout: FrameSender, deadlines: Deadlines) -> None:
    try:
        async with asyncio.timeout(deadlines.drain_s - deadlines.accept_s):
            await asyncio.sleep(_LAST_S)
            await relay.drain()
    except TimeoutError:
        relay.abort()
    await handout.finish(deadlines.handout_s - deadlines.drain_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process that the supervisor started; return its exit code."""
    parser = argparse.ArgumentParser(prog="quantdrift.sidecar.relay.worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--counters-fd", type=int, required=True)
    parser.add_argument("--n-slots", type=int, required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--handoff", required=True)
    given = parser.parse_args(arguments)
    settlement = LiveConfigFile(given.config)
    config = settlement.settled.config
    # No file is read anew, and it need not know the key of hashed attributes.
    secrets = Secrets(salt=os.environ.get("QUANTDRIFT_SAMPLING_SALT", "").encode())
    setup_logs(config.telemetry.log_level, as_json=config.telemetry.log_json, role=f"relay {given.slot}")
    counters = Counters(given.counters_fd, given.n_slots, MOST_ROWS)
    listener = socket.socket(fileno=given.listen_fd)

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, most)
    )  # two files per client: the usual 1024 are soon gone

    async def process(stop: Stop) -> int:
        return await serve(
            settlement,
            secrets,
            stop,
            counters=counters,
            index=given.slot,
            listener=listener,
            handoff=given.handoff,
        )

    return run(process, grace_s=Deadlines.of(config.sidecar).relay_s)


if __name__ == "__main__":
    raise SystemExit(main())
