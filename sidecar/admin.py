"""The process of the sidecar's admin port: /metrics, the pause switch, /livez and /readyz.

The supervisor starts it as `python -m quantdrift.sidecar.admin`. It reads the shared counters and has no part in serving
or capturing: strangers who reach its port, and whatever ends it, cost nothing but the answers of this port.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from quantdrift.core.clock import SystemClock
from quantdrift.core.process.admin import Admin
from quantdrift.core.process.run import Stop, run, supervise
from quantdrift.core.process.states import STATES_FILE, observe_states
from quantdrift.core.telemetry import CONFIG_REFUSED, PAUSED, RELOADS, RESTARTS, Labels, Telemetry
from quantdrift.sidecar.state.counters import Counters, Gauge
from quantdrift.sidecar.state.metrics import observe
from quantdrift.sidecar.state.pause_switch import PauseSwitch
from quantdrift.sidecar.state.process_start import ChildProcess
from quantdrift.sidecar.state.readiness import Readiness, supervisor_slot
from quantdrift.sidecar.state.restarts import Restarts

_POLL_S = 1.0
_GRACE_S = 2.0


async def serve(child: ChildProcess, stop: Stop) -> int:
    """Serve the admin port until `stop`; return the exit code.

    Parameters
    ----------
    child
        This process, with the listening socket.
    """
    child.beat()
    counters, live_config_file = child.counters, child.live_config_file
    config = live_config_file.current.config
    telemetry = Telemetry("quantdrift-sidecar")
    observe(telemetry, counters, lambda: live_config_file.current, SystemClock())
    restarts = Restarts(child.start.directory)
    telemetry.observe(
        RESTARTS,
        lambda: [(float(n), {"child": name, "reason": reason}) for name, reason, n in restarts.read()],
    )
    telemetry.observe(RELOADS, lambda: _reloads(counters))
    refused = supervisor_slot(counters)
    telemetry.observe(CONFIG_REFUSED, lambda: [(float(refused.gauge(Gauge.CONFIG_REFUSED)), {})])
    telemetry.observe_config("sidecar", lambda: live_config_file.current.config)
    switch = PauseSwitch(child.start.directory, config.sidecar.pause_file, config.sidecar.admin)
    telemetry.observe(PAUSED, switch.gauge)
    if states := os.environ.get(STATES_FILE):
        observe_states(telemetry, Path(states))
    readiness = Readiness(counters)
    listener = socket.socket(fileno=child.start.listen_fd)
    admin = Admin(
        "sidecar.admin",
        config.sidecar.admin,
        readiness.ready,
        switch.routes(),
        live=readiness.live,
        listener=listener,
    )
    await admin.start()

    async def refresh() -> None:
        await stop.wait(_POLL_S)
        live_config_file.refresh()

    await asyncio.gather(switch.run(stop), supervise("reading the configuration", refresh, stop))
    await admin.stop()
    telemetry.close()
    return 0


def _reloads(counters: Counters) -> Iterable[tuple[float, Labels]]:
    slot = supervisor_slot(counters)
    results = (("taken_over", Gauge.RELOADS), ("refused", Gauge.RELOADS_REFUSED))
    return [(float(slot.gauge(gauge)), {"result": result}) for result, gauge in results]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process that the supervisor started; return its exit code."""
    child = ChildProcess.begin(arguments)

    async def process(stop: Stop) -> int:
        # Ctrl-C reaches the whole process group, but this process answers until the supervisor ends it.
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return await serve(child, stop)

    return run(process, grace_s=_GRACE_S)


if __name__ == "__main__":
    raise SystemExit(main())
