"""The report of a back-test, with names in place of ids: as a record for JSON, and as text."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from quantdrift.core.notation import number
from quantdrift.core.records import Metric
from quantdrift.monitor.fold.slice_state import Key
from quantdrift.monitor.planning.alerts import Alert, Match, Pairing
from quantdrift.monitor.planning.backtest import Breach, Findings
from quantdrift.storage.fold.history import HistoryExtent
from quantdrift.storage.fold_rows import Catalog, from_us

_WORDS = {
    Match.SAME: "same",
    Match.EARLIER: "earlier",
    Match.LATER: "later",
    Match.NEW: "new",
    Match.MISSED: "MISSED",
    Match.STRONGER: "page, was ticket",
    Match.WEAKER: "ticket, was page",
}
_MOST_NAME = 44


class ReportedAlert(msgspec.Struct, frozen=True, kw_only=True):
    """The times of an alert: `paged` is None for a ticket, `ended` for an open alert."""

    metric: str
    onset: datetime
    opened: datetime
    paged: datetime | None
    ended: datetime | None


class ReportedPair(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded alert and the one under test; `later_s` is negative where the latter was earlier."""

    model: str
    version: str
    slice: str
    match: Match
    later_s: float | None
    recorded: ReportedAlert | None
    tested: ReportedAlert | None


class ReportedBreach(msgspec.Struct, frozen=True, kw_only=True):
    """A slice above its budget over the whole period that the policy under test never alerted on."""

    model: str
    version: str
    slice: str
    metric: Metric
    mean: float
    low: float
    budget: float
    n_effective: float
    alerted_in_record: bool


class BacktestReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report.

    Parameters
    ----------
    begin, end
        Earliest and latest capture that was folded.
    first_fold, last_fold
        First and last `fold_seq`.
    complete
        Whether it began with the first batch ever folded; else detectors began empty in the middle of the history.
    identical
        Whether it made exactly the recorded changes of verdict.
    n_items, n_missing
        Comparisons folded, and stored ones that have been deleted since.
    pages_recorded, pages_tested, tickets_recorded, tickets_tested
        Alerts that paged, and those that remained tickets.
    alerts
        Every alert of either side, in the order in which they opened.
    breaches
        Slices above their budget without an alert.
    notes
        Limits of the comparison.
    """

    begin: datetime
    end: datetime
    first_fold: int
    last_fold: int
    complete: bool
    identical: bool
    n_items: int
    n_missing: int
    pages_recorded: int
    pages_tested: int
    tickets_recorded: int
    tickets_tested: int
    alerts: tuple[ReportedPair, ...]
    breaches: tuple[ReportedBreach, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """Return the report as text for people."""
        lines = [
            f"folded {self.n_items:,} comparisons, fold {self.first_fold:,} to {self.last_fold:,}",
            f"from {_minute(self.begin)} to {_minute(self.end)} UTC",
            f"pages    {self.pages_recorded} recorded, {self.pages_tested} under test",
            f"tickets  {self.tickets_recorded} recorded, {self.tickets_tested} under test",
        ]
        if self.identical:
            lines.append("Every change of verdict is as recorded.")
        if self.alerts:
            lines += ["", *_table(self.alerts)]
        if self.breaches:
            lines += ["", "Above their budget over the whole period, without an alert under test:"]
            lines += [f"  {_breach(breach)}" for breach in self.breaches]
        if self.notes:
            lines += ["", "Notes:", *(f"  - {note}" for note in self.notes)]
        return "\n".join(lines)


def build_report(
    findings: Findings, extent: HistoryExtent, catalog: Catalog, notes: Sequence[str]
) -> BacktestReport:
    """Return the report of a back-test.

    Parameters
    ----------
    notes
        Notes of the caller; they come first.
    """
    recorded = [pairing.recorded for pairing in findings.pairings if pairing.recorded]
    tested = [pairing.tested for pairing in findings.pairings if pairing.tested]
    return BacktestReport(
        begin=extent.begin,
        end=extent.end,
        first_fold=extent.first,
        last_fold=extent.last,
        complete=extent.complete,
        identical=findings.identical,
        n_items=findings.n_items,
        n_missing=findings.n_missing,
        pages_recorded=sum(alert.paged_us is not None for alert in recorded),
        pages_tested=sum(alert.paged_us is not None for alert in tested),
        tickets_recorded=sum(alert.paged_us is None for alert in recorded),
        tickets_tested=sum(alert.paged_us is None for alert in tested),
        alerts=tuple(_pair(pairing, catalog) for pairing in findings.pairings),
        breaches=tuple(_reported_breach(breach, catalog) for breach in findings.breaches),
        notes=(*notes, *_limits(findings, extent)),
    )


def named(key: Key, catalog: Catalog) -> tuple[str, str, str]:
    """Return model, candidate version and slice of a key, by name."""
    version, slice_ = catalog.versions[key[0]], catalog.slices[key[1]]
    return version.model, version.candidate_version, slice_.name


def _limits(findings: Findings, extent: HistoryExtent) -> list[str]:
    notes = []
    if not extent.complete:
        notes.append(
            f"history before {_minute(extent.begin)} is not folded (outside --from, or deleted after "
            "storage.retention_days): detectors start empty there, so alerts soon after it may differ for that "
            "reason alone, and baselines are learned again"
        )
    if findings.n_missing:
        notes.append(
            f"{findings.n_missing:,} comparisons of this period were deleted after storage.retention_days"
        )
    return notes


def _pair(pairing: Pairing, catalog: Catalog) -> ReportedPair:
    model, version, slice_name = named(pairing.key, catalog)
    return ReportedPair(
        model=model,
        version=version,
        slice=slice_name,
        match=pairing.match,
        later_s=pairing.later_s,
        recorded=_reported_alert(pairing.recorded),
        tested=_reported_alert(pairing.tested),
    )


def _reported_alert(alert: Alert | None) -> ReportedAlert | None:
    if alert is None:
        return None
    return ReportedAlert(
        metric=alert.metric,
        onset=from_us(alert.onset_us),
        opened=from_us(alert.opened_us),
        paged=None if alert.paged_us is None else from_us(alert.paged_us),
        ended=None if alert.ended_us is None else from_us(alert.ended_us),
    )


def _reported_breach(breach: Breach, catalog: Catalog) -> ReportedBreach:
    model, version, slice_name = named(breach.key, catalog)
    return ReportedBreach(
        model=model,
        version=version,
        slice=slice_name,
        metric=breach.metric,
        mean=breach.mean,
        low=breach.low,
        budget=breach.budget,
        n_effective=breach.n_effective,
        alerted_in_record=breach.recorded,
    )


def _table(alerts: Sequence[ReportedPair]) -> list[str]:
    names = [f"{alert.model} {alert.version}, {alert.slice}" for alert in alerts]
    width = min(max(len(name) for name in names), _MOST_NAME)
    rows = [f"{'slice':<{width}}  {'recorded':<24} {'under test':<24} difference"]
    for name, alert in zip(names, alerts, strict=True):
        rows.append(
            f"{name:<{width}}  {_when(alert.recorded):<24} {_when(alert.tested):<24} {_difference(alert)}".rstrip()
        )
    return rows


def _when(alert: ReportedAlert | None) -> str:
    if alert is None:
        return "-"
    return f"ticket {_minute(alert.opened)}" if alert.paged is None else f"page {_minute(alert.paged)}"


def _difference(pair: ReportedPair) -> str:
    verb = _WORDS[pair.match]
    if not pair.later_s:
        return verb
    length = _length(abs(pair.later_s))
    if pair.match in {Match.EARLIER, Match.LATER}:
        return f"{length} {verb}"
    return f"{verb}, {length} {'later' if pair.later_s > 0 else 'earlier'}"


def _length(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return (
        f"{seconds / 3600:.1f} h"
        if seconds < 172_800
        else f"{seconds / timedelta(days=1).total_seconds():.1f} d"
    )


def _breach(breach: ReportedBreach) -> str:
    recorded = "alert recorded" if breach.alerted_in_record else "no alert recorded either"
    return (
        f"{breach.model} {breach.version}, {breach.slice}: {breach.metric} {number(breach.mean, 3)}, at least {number(breach.low, 3)}, "
        f"budget {number(breach.budget, 3)} ({recorded})"
    )


def _minute(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}"
