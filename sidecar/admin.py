"""The process of the sidecar's admin port: /metrics, the pause switch, /livez and /readyz.

The supervisor starts it as `python -m quantdrift.sidecar.admin`. It reads the shared counters and has no part in serving
or capturing: strangers who reach its port, and whatever ends it, cost nothing but the answers of this port.
"""

import asyncio
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from quantdrift.core import telemetry as t
from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.config.schema import Config
from quantdrift.core.process.admin import Admin
from quantdrift.core.process.run import Stop, run, supervise
from quantdrift.core.process.states import STATES_FILE, observe_states
from quantdrift.core.records import StratumCount
from quantdrift.core.telemetry import CONFIG_REFUSED, PAUSED, RELOADS, RESTARTS, Labels, Telemetry
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import INTAKE_DENIALS, POLICY_REFUSALS, Counters, Gauge
from quantdrift.sidecar.state.pause_switch import PauseSwitch
from quantdrift.sidecar.state.process_start import ChildProcess
from quantdrift.sidecar.state.readiness import Readiness, supervisor_slot
from quantdrift.sidecar.state.restarts import Restarts

_POLL_S = 1.0
_GRACE_S = 2.0
_TOTALS = {
    t.IGNORED: Gauge.IGNORED,
    t.UNKNOWN_POSTS: Gauge.UNKNOWN_POSTS,
    t.CONNECTIONS: Gauge.CONNECTIONS,
    t.OPEN_CONNECTIONS: Gauge.OPEN,
    t.BLIND: Gauge.BLIND,
    t.BACKEND_FAILED: Gauge.BACKEND_FAILED,
    t.OBSERVER_ERRORS: Gauge.OBSERVER_ERRORS,
    t.FORWARDED: Gauge.FORWARDED_BYTES,
    t.HELD: Gauge.HELD_BYTES,
    t.QUEUED: Gauge.QUEUE_BYTES,
    t.POLICY_CHANGES: Gauge.POLICY_CHANGES,
    t.EARLY: Gauge.EARLY,
    t.TAP_CONNECTIONS: Gauge.TAP_CONNECTIONS,
    t.UNOBSERVED: Gauge.UNOBSERVED,
    t.UNSEEN_REQUESTS: Gauge.UNSEEN_REQUESTS,
    t.ACCEPT_PAUSES: Gauge.ACCEPT_PAUSES,
    t.SLOW: Gauge.SLOW,
    t.UNSTORED: Gauge.UNSTORED_S,
    t.RECHECKS: Gauge.RECHECKS,
    t.FORGED_MARKS: Gauge.FORGED_MARKS,
}


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


def observe(
    telemetry: t.Telemetry, counters: Counters, live_config: Callable[[], LiveConfig], clock: Clock
) -> None:
    """Register the sidecar's instruments, which read `counters` at each collection.

    Parameters
    ----------
    telemetry
        The meter of the supervisor.
    counters
        Written by the other processes.
    live_config
        Returns the configuration in effect: the rows of the counters, and the limits that add up to the queue
        limit.
    clock
        For the age of the policy.
    """
    for instrument, gauge in _TOTALS.items():
        telemetry.observe(instrument, _total(counters, gauge))

    def counts() -> tuple[StratumCount, ...]:
        return counters.strata(live_config().rows)

    telemetry.observe(t.OFFERED, lambda: [(c.offered, {"stratum": c.stratum}) for c in counts()])
    telemetry.observe(t.TAKEN, lambda: [(c.taken, {"stratum": c.stratum}) for c in counts()])
    telemetry.observe(t.THINNED, lambda: [(c.thinned, {"stratum": c.stratum}) for c in counts()])
    telemetry.observe(t.PUBLISHED, lambda: [published for c in counts() for published in _published(c)])
    telemetry.observe(t.RELAY_CPU, lambda: [(counters.gauge(Gauge.RELAY_CPU_US) / 1e6, {})])
    telemetry.observe(t.QUEUE_AGE, lambda: [(_queue_age_s(counters, clock), {})])
    telemetry.observe(t.LOST, lambda: [lost for c in counts() for lost in _lost(c)])
    telemetry.observe(t.QUEUE_LIMIT, lambda: [(_limit(live_config().config), {})])
    telemetry.observe(
        t.POLICY_REFUSED,
        lambda: [
            (counters.gauge(gauge), {"reason": reason.value}) for reason, gauge in POLICY_REFUSALS.items()
        ],
    )
    telemetry.observe(
        t.INTAKE_REFUSED,
        lambda: [
            (counters.gauge(gauge), {"reason": reason.value}) for reason, gauge in INTAKE_DENIALS.items()
        ],
    )
    telemetry.observe(t.POLICY_CENTRAL, lambda: [(float(counters.gauge(Gauge.POLICY_ISSUED_S) > 0), {})])
    telemetry.observe(t.POLICY_AGE, lambda: _policy_ages(counters, clock))


def _published(count: StratumCount) -> Iterable[tuple[float, t.Labels]]:
    """Return the published exchanges of a stratum by model; the label `model` is empty where it was not known."""
    without_model = count.published
    for model, model_count in count.models.items():
        without_model -= model_count.published
        yield model_count.published, {"stratum": count.stratum, "model": model}
    if without_model or not count.models:
        yield without_model, {"stratum": count.stratum, "model": ""}


def _queue_age_s(counters: Counters, clock: Clock) -> float:
    since_s = counters.gauge(Gauge.QUEUED_SINCE_S)
    return max(0.0, clock.now().timestamp() - since_s) if since_s else 0.0


def _lost(count: StratumCount) -> Iterable[tuple[float, t.Labels]]:
    """Return the losses of a stratum by model and reason.

    The label `model` is empty where it was not known.
    """
    without_model = Counter(count.lost)
    for model, model_count in count.models.items():
        without_model.subtract(model_count.lost)
        for loss, n in model_count.lost.items():
            yield n, {"stratum": count.stratum, "model": model, "reason": loss.value}
    for loss, n in without_model.items():
        if n:
            yield n, {"stratum": count.stratum, "model": "", "reason": loss.value}


def _limit(config: Config) -> int:
    sidecar = config.sidecar
    relays = sidecar.workers * (sidecar.held_bytes + sidecar.handoff_bytes)
    return relays + config.intake.max_pending_bytes + sidecar.handoff_bytes + sidecar.queue_bytes


def _policy_ages(counters: Counters, clock: Clock) -> Iterable[tuple[float, t.Labels]]:
    issued_s = counters.gauge(Gauge.POLICY_ISSUED_S)
    return [(max(0.0, clock.now().timestamp() - issued_s), {})] if issued_s else []


def _total(counters: Counters, gauge: Gauge) -> t.Read:
    def read() -> Iterable[tuple[float, t.Labels]]:
        return [(counters.gauge(gauge), {})]

    return read


if __name__ == "__main__":
    raise SystemExit(main())
