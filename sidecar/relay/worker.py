"""The process of a relay worker: it accepts clients, relays, observes and hands over samples.

The supervisor starts it as `python -m quantdrift.sidecar.relay.worker`. It imports no aiohttp, NATS, numpy or
OpenTelemetry, so that it stays small.
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Secrets
from quantdrift.core.config.address import read_address
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.passed_secrets import variables
from quantdrift.core.process.run import Stop, run, supervise
from quantdrift.sidecar.handoff.sender import FrameSender
from quantdrift.sidecar.relay.connection import Relay, RelayedConnection
from quantdrift.sidecar.relay.listener import Listener
from quantdrift.sidecar.relay.observing.live_scope import LiveScope
from quantdrift.sidecar.state.counters import Gauge
from quantdrift.sidecar.state.orphans import ORPHANED, Orphan
from quantdrift.sidecar.state.process_start import ChildProcess
from quantdrift.sidecar.state.shutdown import Deadlines

_TICK_S = 1.0
_LOG = logging.getLogger(__name__)
STUCK_CPU_S = 2.0
_MAX_INTERRUPTS = 3


async def serve(child: ChildProcess, secrets: Secrets, stop: Stop) -> int:
    """Relay until `stop`, then drain; return the exit code.

    Parameters
    ----------
    child
        This process. Its listening socket is shared with the other workers.
    secrets
        Only the salt is used.
    stop
        Asks for the end. New connections are accepted for another `drain_delay_s`. Then each connection is
        closed once it is between exchanges, and the remaining ones some time before `grace_s`.
    """
    loop = asyncio.get_running_loop()
    child.beat()
    slot = child.slot
    options = child.live_config_file.current.config.sidecar
    live_scope = LiveScope(child, secrets.salt, SystemClock())
    backend = read_address(options.backend)
    relay = Relay(backend.host, backend.port, live_scope.scope, loop)
    watchdog = Watchdog(
        RelayedConnection.find_observer_call, lambda: loop.call_soon(relay.stop_observing), loop
    )
    listening_socket = socket.socket(fileno=child.start.listen_fd)
    listener = Listener(listening_socket, relay, resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    orphan: Orphan | None = None

    def orphaned() -> None:
        nonlocal orphan
        if orphan is None:  # the signal may come more than once
            orphan = Orphan(
                listening_socket,
                end_orphan,
                lambda: (slot.gauge(Gauge.CONNECTIONS), slot.gauge(Gauge.OPEN)),
            )

    def end_orphan(*, taken_over: bool) -> None:
        if not stop.is_set():
            stop.why = "no client was connected"
            if taken_over:
                stop.why = "a new supervisor's workers have the port"
                listener.leave()
            os.kill(os.getpid(), signal.SIGTERM)

    loop.add_signal_handler(ORPHANED, orphaned)

    async def tick() -> None:
        await ended.wait(_TICK_S)
        live_scope.refresh()
        relay.tick()
        slot.set(Gauge.RELAY_CPU_US, cpu_before_us + time.process_time_ns() // 1000)

    # A worker that takes the place of another one goes on from its count; starting Python does not belong to any request.
    cpu_before_us = slot.gauge(Gauge.RELAY_CPU_US) - time.process_time_ns() // 1000
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
    await _finish(relay, live_scope.sender, deadlines)
    watchdog.stop()
    ended.set()
    await ticking
    return 0


async def _finish(relay: Relay, sender: FrameSender, deadlines: Deadlines) -> None:
    try:
        async with asyncio.timeout(deadlines.drain_s - deadlines.accept_s):
            await relay.drain()
    except TimeoutError:
        relay.abort()
    await sender.finish(deadlines.handoff_s - deadlines.drain_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process that the supervisor started; return its exit code."""
    child = ChildProcess.begin(arguments, serves=True)
    config = child.live_config_file.current.config
    # Secret files are not read again, and a relay worker does not need the key of hashed attributes.
    secrets = Secrets(salt=variables().get("QUANTDRIFT_SAMPLING_SALT", "").encode())

    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Two files per client: the usual 1024 are soon used up.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    return run(lambda stop: serve(child, secrets, stop), grace_s=Deadlines.of(config.sidecar).relay_s)


class StuckError(QuantdriftError):
    """An observer ran for too long."""


class Watchdog:
    """Raises `StuckError` in an observer that is found in the same call twice in a row, because that blocks the event loop.

    Observers read bounded input in one pass, so none should ever get stuck. If one does, the relay goes on as if the observer
    had raised. A call that never returns to the interpreter cannot be interrupted; observers make no such call. The watchdog
    knows what is at fault, so it acts before the supervisor (`core.process.heartbeat`), which replaces a worker that hangs
    anywhere else, and no connection breaks.

    It measures CPU time, so an observer is not slow because the machine is busy. One per process, on the main
    thread.

    Parameters
    ----------
    find_observer_call
        Returns the stack frame, at or above the given one, that has called an observer and catches whatever
        it raises; None if there is none.
    on_repeated
        Called when observers got stuck too often: the cause is a fault that many connections meet.
    loop
        The event loop to watch.
    cpu_s
        CPU time between two checks while the loop is blocked.
    """

    def __init__(
        self,
        find_observer_call: Callable[[FrameType | None], FrameType | None],
        on_repeated: Callable[[], object],
        loop: asyncio.AbstractEventLoop,
        cpu_s: float = STUCK_CPU_S,
    ) -> None:
        self._find_observer_call = find_observer_call
        self._seen: FrameType | None = None
        self._on_repeated = on_repeated
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._cpu_s = cpu_s
        self._n_interrupts = 0

    def start(self) -> None:
        """Start watching."""
        signal.signal(signal.SIGVTALRM, self._check)
        self._restart()

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_IGN)

    def _restart(self) -> None:
        self._seen = None
        signal.setitimer(signal.ITIMER_VIRTUAL, self._cpu_s, self._cpu_s)
        self._timer = self._loop.call_later(self._cpu_s / 4, self._restart)

    def _check(self, _: int, frame: FrameType | None) -> None:
        caller = self._find_observer_call(frame)
        if caller is None or caller is not self._seen:
            self._seen = caller
            return
        self._seen = None
        self._n_interrupts += 1
        if self._n_interrupts == _MAX_INTERRUPTS:
            _LOG.error(
                "observers got stuck %d times: this relay worker no longer observes connections, until it restarts",
                _MAX_INTERRUPTS,
            )
            self._on_repeated()
        raise StuckError(f"an observer ran for more than {self._cpu_s:g} s of CPU time")


if __name__ == "__main__":
    raise SystemExit(main())
