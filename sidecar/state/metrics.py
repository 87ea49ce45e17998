"""The sidecar's instruments, read from the shared counters at each collection."""

from collections import Counter
from collections.abc import Callable, Iterable

from quantdrift.core import telemetry as t
from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Config
from quantdrift.core.records import StratumCount
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import INTAKE_DENIALS, POLICY_REFUSALS, Counters, Gauge

_TOTALS = {
    t.IGNORED: Gauge.IGNORED,
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
    t.UNOBSERVED: Gauge.UNOBSERVED,
    t.UNSEEN_REQUESTS: Gauge.UNSEEN_REQUESTS,
    t.ACCEPT_PAUSES: Gauge.ACCEPT_PAUSES,
    t.SLOW: Gauge.SLOW,
    t.UNSTORED: Gauge.UNSTORED_S,
    t.RECHECKS: Gauge.RECHECKS,
    t.FORGED_MARKS: Gauge.FORGED_MARKS,
}


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
    relays = sidecar.workers * (sidecar.max_held_bytes + sidecar.handoff_bytes)
    return relays + config.intake.max_pending_bytes + sidecar.handoff_bytes + sidecar.queue_bytes


def _policy_ages(counters: Counters, clock: Clock) -> Iterable[tuple[float, t.Labels]]:
    issued_s = counters.gauge(Gauge.POLICY_ISSUED_S)
    return [(max(0.0, clock.now().timestamp() - issued_s), {})] if issued_s else []


def _total(counters: Counters, gauge: Gauge) -> t.Read:
    def read() -> Iterable[tuple[float, t.Labels]]:
        return [(counters.gauge(gauge), {})]

    return read
