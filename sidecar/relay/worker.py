"""The process of a relay worker: it accepts clients, relays, observes and hands over samples.

The supervisor starts it as `python -m quantdrift.sidecar.relay.worker`. It imports no aiohttp, NATS, numpy or
OpenTelemetry, so that it stays small.
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
from quantdrift.sidecar.state.counters import MAX_ROWS, Count, Counters, Gauge
from quantdrift.sidecar.state.shutdown import Deadlines

_TICK_S = 1.0
_LAST_S = 0.2  # for the first request of the clients that were accepted last


async def serve(
    live_config_file: LiveConfigFile,
    secrets: Secrets,
    stop: Stop,
    *,
    counters: Counters,
    index: int,
    listening_socket: socket.socket,
    handoff: str,
) -> int:
    """Relay until `stop`, then drain; return the exit code.

    Parameters
    ----------
    live_config_file
        The configuration in effect; read again once a second when it has changed.
    secrets
        Only the salt is used.
    stop
        Asks for the end. New connections are accepted for another `drain_delay_s`. Then each connection is
        closed once it is between exchanges, and the remaining ones some time before `grace_s`.
    counters
        Shared by all processes of the sidecar.
    index
        This worker's slot.
    listening_socket
        Shared with the other workers.
    handoff
        Path of the Unix socket that the capture process listens on. Policy and pause files are in the same
        directory.
    """
    loop = asyncio.get_running_loop()
    slot = counters.slot(index)
    options = live_config_file.current.config.sidecar
    for gauge in (Gauge.OPEN, Gauge.HELD_BYTES, Gauge.QUEUE_BYTES, Gauge.SLOW):
        slot.set(gauge, 0)  # a predecessor in this slot may have been killed
    slot.lose_unfinished(
        len(live_config_file.current.rows), Count.TAKEN, ended=(Count.HANDED,), loss=Loss.TRUNCATED
    )
    sender = FrameSender(handoff, options.handoff_bytes, slot, loop)
    sender.connect()
    directory = Path(handoff).parent
    clock = SystemClock()
    live_scope = LiveScope(
        live_config_file,
        secrets.salt,
        directory,
        send_frame=sender.send,
        slot=slot,
        clock=clock,
        load_shedding=LoadShedding(counters.slot(counters.n_slots - 1), clock),
    )
    backend = read_address(options.backend)
    relay = Relay(backend.host, backend.port, live_scope.scope, loop)
    watchdog = Watchdog(Connection.find_observer_call, lambda: loop.call_soon(relay.stop_observing), loop)
    listener = Listener(listening_socket, relay, resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    async def tick() -> None:
        await ended.wait(_TICK_S)
        if (live_config := live_scope.refresh()) is not None:
            sender.limit_bytes = live_config.config.sidecar.handoff_bytes
        relay.tick()

    ended = Stop()
    ticking = asyncio.create_task(supervise("the tick", tick, ended))
    gc.freeze()  # everything loaded by now stays: the garbage collector can skip it
    watchdog.start()
    listener.open()
    slot.set(Gauge.SERVING, 1)
    await stop.wait()
    deadlines = Deadlines.of(options)
    await asyncio.sleep(deadlines.accept_s)
    slot.set(Gauge.SERVING, 0)
    listener.close()
    await _finish(relay, sender, deadlines)
    watchdog.stop()
    ended.set()
    await ticking
    return 0


async def _finish(relay: Relay, sender: FrameSender, deadlines: Deadlines) -> None:
    try:
        async with asyncio.timeout(deadlines.drain_s - deadlines.accept_s):
            await asyncio.sleep(_LAST_S)
            await relay.drain()
    except TimeoutError:
        relay.abort()
    await sender.finish(deadlines.handoff_s - deadlines.drain_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process that the supervisor started; return its exit code."""
    parser = argparse.ArgumentParser(prog="quantdrift.sidecar.relay.worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--counters-fd", type=int, required=True)
    parser.add_argument("--n-slots", type=int, required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--handoff", required=True)
    args = parser.parse_args(arguments)
    live_config_file = LiveConfigFile(args.config)
    config = live_config_file.current.config
    # Secret files are not read again, and a relay worker does not need the key of hashed attributes.
    secrets = Secrets(salt=os.environ.get("QUANTDRIFT_SAMPLING_SALT", "").encode())
    setup_logs(config.telemetry.log_level, as_json=config.telemetry.log_json, role=f"relay {args.slot}")
    counters = Counters(args.counters_fd, args.n_slots, MAX_ROWS)
    listening_socket = socket.socket(fileno=args.listen_fd)

    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Two files per client: the usual 1024 are soon used up.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))

    async def process(stop: Stop) -> int:
        return await serve(
            live_config_file,
            secrets,
            stop,
            counters=counters,
            index=args.slot,
            listening_socket=listening_socket,
            handoff=args.handoff,
        )

    return run(process, grace_s=Deadlines.of(config.sidecar).relay_s)


if __name__ == "__main__":
    raise SystemExit(main())
