"""What is known of a slice beside its evidence, and the verdict that follows.

From evidence, counts and time to a verdict with its reason.
"""

from collections.abc import Mapping

import msgspec

from quantdrift.core.config.schema import Monitor
from quantdrift.core.notation import count_of
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.slices import ALL
from quantdrift.drift.evidence.clock import MICROSECONDS
from quantdrift.drift.evidence.header import SCALE, M
from quantdrift.drift.evidence.interval import Estimate
from quantdrift.drift.watch import Phase, Survey, Thresholds
from quantdrift.monitor.fold.inclusion import Rates
from quantdrift.monitor.fold.loss import LossCounts, RecentCounts
from quantdrift.monitor.fold.noise import NoiseFloors
from quantdrift.monitor.fold.slice_state import Key, SliceState
from quantdrift.monitor.fold.versions import VersionActivity
from quantdrift.storage.monitor.rows import Catalog

LEAST_LOST = 5  # a lost request or two among a handful taken is no pattern
# From here on the evidence grows too fast for chance: it is a few nats, some dozens of exchanges, from a ticket.
UNDECIDED_FROM = 1e-3
ALERTS = {Phase.FIRING: Verdict.FIRING, Phase.WARNING: Verdict.WARNING}
SUPERSEDED = "superseded: another version of this model is compared, and this one no more"
RETIRED = "retired: nothing was compared for 30 days"
LOST = "loss: too many of its samples were lost in the last hour"
UNNAMED = "the evidence is enough to alert; which signal has the most of it is not recorded"
NO_REFERENCE = "no reference: map this version to one in models.references"


class VerdictLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a slice is `unknown`; see the options of the same names in `[monitor]`."""

    min_groups: int
    max_loss_ratio: float
    stale_after_s: float


class SliceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a slice.

    Parameters
    ----------
    phase
        What the evidence says.
    evidence_ratio
        Evidence over its paging threshold.
    n_groups
        Exchanges compared so far.
    silent_s
        Event time since its last comparison.
    counts
        Of the header strata that its items may fall into, over the recent hour.
    superseded
        Whether its candidate version has been silent while another one of the model was compared.
    n_missing
        Exchanges that its learned baselines lack; 0 where they are complete.
    alarm
        Why it alerts, as was said at the alarm; empty where that is not known.
    noise
        Why noise is too much to say anything; empty where it is not.
    """

    phase: Phase
    evidence_ratio: float
    n_groups: int
    silent_s: float
    counts: RecentCounts
    superseded: bool = False
    alarm: str = ""
    n_missing: int = 0
    noise: str = ""


def judge(standing: SliceStatus, limits: VerdictLimits) -> tuple[Verdict, str]:
    """Return the verdict and why, in words.

    An alert lasts until its slice has shown to be inside the budget again: what makes others `unknown` does not hide
    it. Otherwise whatever could hide drift makes the slice `unknown`, never `ok`.
    """
    if alert := ALERTS.get(standing.phase):
        return alert, standing.alarm or UNNAMED
    if doubt := _doubt(standing, limits):
        return Verdict.UNKNOWN, doubt
    if standing.n_missing:
        return (
            Verdict.OK,
            f"no evidence against its budget; its baseline needs some {_more(_round(standing.n_missing))}",
        )
    return Verdict.OK, "no evidence against its budget or its baseline"


def _doubt(standing: SliceStatus, limits: VerdictLimits) -> str:
    """Return what could hide drift, or nothing."""
    if standing.superseded:
        return SUPERSEDED
    missing = limits.min_groups - standing.n_groups
    if missing > 0:
        return f"needs {_more(missing)}"
    counts = standing.counts
    if counts.missing >= LEAST_LOST and counts.missing > limits.max_loss_ratio * counts.taken:
        return _expired(counts) if counts.expired > counts.lost else LOST
    if standing.silent_s > limits.stale_after_s and counts.offered > 0:
        return "stale: there is traffic and no comparison"
    if not standing.noise and standing.evidence_ratio >= UNDECIDED_FROM:
        return "undecided: the evidence is growing and not enough to alert yet"
    return standing.noise


def _expired(counts: RecentCounts) -> str:
    # What expired in the last hour may have been taken before it.
    share = 100 * counts.expired / max(counts.taken, counts.missing)
    return (
        f"loss: {share:.0f} % of this model's samples of the last hour expired in the stream before they were replayed:"
        " the shadow is too slow or was away; add workers or raise stream.max_age_s"
    )


def _more(n: int) -> str:
    return count_of(n, "more exchange")


def _round(n: int) -> int:
    """Return `n` to two significant digits: the reason is no counter."""
    return int(float(f"{n:.2g}"))


# Of its states, of loss, whether its version was replaced, why noise is too much, whether it has been silent for long.
Basis = tuple[Survey, RecentCounts, bool, str, bool]
_NOTHING = RecentCounts(offered=0, taken=0, lost=0)


class Verdicts:
    """Judges slices by evidence, loss, silence and succession.

    Parameters
    ----------
    monitor
        Limits.
    thresholds
        When evidence is an alarm.
    ledger, rates, succession, noise
        What is known of loss, of sampling, of the versions and of their noise.

    Attributes
    ----------
    catalog
        What the numbers stand for.
    """

    def __init__(
        self,
        monitor: Monitor,
        *,
        thresholds: Thresholds,
        ledger: LossCounts,
        rates: Rates,
        succession: VersionActivity,
        noise: NoiseFloors,
    ) -> None:
        self.catalog = Catalog(versions={}, slices={}, policies={})
        self._thresholds = thresholds
        self._limits = VerdictLimits(
            min_groups=monitor.min_groups,
            max_loss_ratio=monitor.max_loss_ratio,
            stale_after_s=monitor.stale_after_s,
        )
        self._ledger = ledger
        self._rates = rates
        self._succession = succession
        self._noise = noise
        self._of_version: dict[int, tuple[bool, str]] = {}
        self._counts: dict[tuple[tuple[str, ...], str], RecentCounts] = {}

    def look(self) -> None:
        """Look at the versions and the tallies again: what was known of them may have changed."""
        self._of_version, self._counts = {}, {}

    def superseded(self, key: Key) -> bool:
        """Return whether another version has replaced that of `key`."""
        return self._known(key[0])[0]

    def _known(self, version_id: int) -> tuple[bool, str]:
        """Return whether a version has been replaced, and why its noise is too much to say anything."""
        found = self._of_version.get(version_id)
        if found is None:
            found = self._of_version[version_id] = (
                self._succession.superseded(version_id, self.catalog),
                self._noise.too_much(version_id),
            )
        return found

    def _recent(self, strata: tuple[str, ...], model: str) -> RecentCounts:
        found = self._counts.get((strata, model))
        if found is None:
            found = self._counts[strata, model] = self._ledger.recent(strata, model)
        return found

    def basis(self, entry: SliceState, now_us: int) -> Basis:
        """Return what a verdict on a slice rests on; while that is the same, so is the verdict."""
        version_id, slice_id = entry.key
        survey = entry.watch.survey()
        counts = _NOTHING
        if survey.policy_id in self.catalog.policies:
            rates = self._rates.of(self.catalog, slice_id, survey.policy_id)
            counts = self._recent(rates.strata, self.catalog.versions[version_id].model)
        superseded, noise = self._known(version_id)
        silent_s = (now_us - entry.last_us) / MICROSECONDS
        return survey, counts, superseded, noise, silent_s > self._limits.stale_after_s

    def verdict(self, entry: SliceState, phase: Phase, now_us: int) -> tuple[Verdict, str]:
        """Return what is said of a slice in `phase`, and why."""
        survey, counts, superseded, noise, _ = self.basis(entry, now_us)
        standing = SliceStatus(
            phase=phase,
            evidence_ratio=survey.total / entry.watch.page_threshold(self._thresholds),
            n_groups=survey.n_groups,
            silent_s=(now_us - entry.last_us) / MICROSECONDS,
            counts=counts,
            superseded=superseded,
            n_missing=survey.missing,
            noise=noise,
            alarm=entry.reason if entry.said is ALERTS.get(phase) else "",
        )
        return judge(standing, self._limits)

    def aggregate(
        self, entries: Mapping[Key, SliceState], version_id: int, metric: Metric, now_us: int
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
