"""What is known of a slice beside its evidence, and the verdict that follows."""

from collections.abc import Mapping

from quantdrift.core.config.schema import Monitor
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.slices import ALL
from quantdrift.drift.clock import MICROSECONDS
from quantdrift.drift.interval import Estimate
from quantdrift.drift.signal import SCALE, M
from quantdrift.drift.watch import Phase, Thresholds
from quantdrift.monitor.entry import Entry, Key
from quantdrift.monitor.judge import ALERTS, Limits, Standing, judge
from quantdrift.monitor.ledger import Counts, Ledger
from quantdrift.monitor.noise import NoiseFloors
from quantdrift.monitor.rates import Rates
from quantdrift.monitor.succession import Succession
from quantdrift.storage.monitor.rows import Catalog

_NOTHING = Counts(offered=0, taken=0, lost=0)


class Appraisal:
    """Judges slices by evidence, loss, silence and succession.

    Parameters
    ----------
    monitor
        Limits and thresholds.
    ledger, rates, succession, noise
        What is known of loss, of sampling, of the versions and of their noise.

    Attributes
    ----------
    catalog
        What the numbers stand for.
    thresholds
        When evidence is an alarm.
    """

    def __init__(
        self, monitor: Monitor, ledger: Ledger, rates: Rates, succession: Succession, noise: NoiseFloors
    ) -> None:
        self.catalog = Catalog(versions={}, slices={}, policies={})
        self.thresholds = Thresholds(
            page=1.0 / monitor.pages_per_30_days, ticket=1.0 / monitor.tickets_per_30_days
        )
        self._limits = Limits(
            min_groups=monitor.min_groups,
            max_loss_ratio=monitor.max_loss_ratio,
            stale_after_s=monitor.stale_after_s,
        )
        self._ledger = ledger
        self._rates = rates
        self._succession = succession
        self._noise = noise

    def superseded(self, key: Key) -> bool:
        """Return whether another version has replaced that of `key`."""
        return self._succession.superseded(key[0], self.catalog)

    def verdict(self, entry: Entry, phase: Phase, now_us: int) -> tuple[Verdict, str]:
        """Return what is said of a slice in `phase`, and why."""
        counts, policy_id = _NOTHING, entry.policy_id
        if policy_id in self.catalog.policies:
            rates = self._rates.of(self.catalog, entry.verdict.slice_id, policy_id)
            model = self.catalog.versions[entry.verdict.model_version_id].model
            counts = self._ledger.recent(rates.strata, model)
        standing = Standing(
            phase=phase,
            evidence_ratio=entry.watch.evidence() / entry.watch.page_threshold(self.thresholds),
            n_groups=entry.n_groups,
            silent_s=(now_us - entry.last_us) / MICROSECONDS,
            counts=counts,
            superseded=self._succession.superseded(entry.verdict.model_version_id, self.catalog),
            n_missing=entry.missing,
            noise=self._noise.too_much(entry.verdict.model_version_id),
            alarm=entry.verdict.reason if entry.verdict.verdict is ALERTS.get(phase) else "",
        )
        return judge(standing, self._limits)

    def aggregate(
        self, entries: Mapping[Key, Entry], version_id: int, metric: Metric, now_us: int
    ) -> tuple[Verdict, Estimate | None, float | None]:
        """Return the verdict over all of a version's traffic, its estimate of `metric`, and what is accepted with noise."""
        model = self.catalog.versions[version_id].model
        for row in self.catalog.slices.values():
            entry = entries.get((version_id, row.id))
            if row.model == model and row.name == ALL and not row.where and entry is not None:
                state = entry.state(metric)
                accepted = None if state is None else float(state[M] * state[SCALE])
                return self.verdict(entry, entry.watch.phase, now_us)[0], entry.recent(metric), accepted
        return Verdict.UNKNOWN, None, None
