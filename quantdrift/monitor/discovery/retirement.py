"""The decision to retire a confirmed discovered slice, with its reason as text. Pure.

A slice is **quiet** when over the last `retire_days`

1. it has been monitored all the time, no alert of it was open, and no evidence is growing against it now;
2. for flips and for the capped divergence, where it has any, the upper bound of its mean is not above
   `max(budget, least_ratio * mean of the rest of the traffic)`, the level that a candidate must be shown to
   exceed;
3. no single candidate version is proved to be above that level.

The bounds are those of `quantdrift.drift.evidence.bound`, at `DELTA` each, from the hourly sums: all versions that were compared
together, weighted, with Kish's effective number of exchanges. With that number they are approximate, and exchanges of one
session count as several. A slice with too little traffic is not quiet: it stays until nothing was compared in it for 30
days while other exchanges of the model were (**unseen**), or until a person retires it. A slice that the configuration
also declares needs no place among the discovered ones (**declared**): it is still watched.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

from quantdrift.core.config.schema import Budget, Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import number
from quantdrift.core.records import Metric
from quantdrift.core.signals import WATCHED, budget_of, cap_of, is_judged
from quantdrift.core.slices import is_declared
from quantdrift.drift.discovery.confirmation import null_mean
from quantdrift.drift.evidence.bound import upper_bound
from quantdrift.monitor.discovery.limits import LIMITS, DiscoveryLimits
from quantdrift.monitor.fold.verdict import UNDECIDED_FROM
from quantdrift.storage.schema.slice_tables import DiscoveryStatus
from quantdrift.storage.slices.confirmed import ConfirmedSums, SlicePeriod, VersionSums
from quantdrift.storage.slices.discovery import DiscoveryRow, StoredRow

DELTA: Final = 0.05
UNSEEN: Final = timedelta(days=30)  # as long as a detector without an observation lives


def reason_to_retire(
    row: DiscoveryRow,
    watched: SlicePeriod | None,
    config: Config,
    budget: Budget,
    now: datetime,
    *,
    compared: bool,
    limits: DiscoveryLimits = LIMITS,
) -> str:
    """Return the reason to retire a confirmed slice, as text; empty where there is none.

    Parameters
    ----------
    row
        A confirmed slice.
    watched
        Its sums over the last `retire_days`; None where nothing was compared.
    budget
        Budget of the model.
    compared
        Whether any exchange of the model was compared lately: while the shadow is down nothing is compared, which is
        no reason to retire a slice.
    """
    since = row.confirmed_at or row.frozen_at
    if is_declared(config, row.key):
        return "declared: the configuration declares this slice, which is still watched and needs no place"
    if compared and now - max(row.seen_at or row.frozen_at, since) >= UNSEEN:
        return f"unseen: nothing was compared in it for {UNSEEN.days} days"
    period = timedelta(days=limits.retire_days)
    if not period or now - since < period or watched is None:
        return ""
    if watched.alerted or watched.evidence_ratio >= UNDECIDED_FROM:
        return ""
    texts = [
        _quiet(metric, watched.versions, budget, limits) for metric in WATCHED if is_judged(metric, budget)
    ]
    if not any(texts) or None in texts:
        return ""
    return f"quiet for {limits.retire_days} days: " + "; ".join(text for text in texts if text)


def retired_by_hand(row: DiscoveryRow, config: Config, reason: str) -> StoredRow:
    """Return a discovery as retired by a person: it is neither monitored nor tested until it is restored.

    Raises
    ------
    OperatorError
        It is retired by hand already, or the configuration declares it.
    """
    if row.status is DiscoveryStatus.RETIRED and row.held:
        raise OperatorError(f"`{row.name}` is retired by hand already")
    if is_declared(config, row.key):
        raise OperatorError(f"`{row.name}` is declared in [[slices]]: take it out of the configuration")
    return StoredRow(
        row=msgspec.structs.replace(row, status=DiscoveryStatus.RETIRED, held=True, waits_since=None),
        reason=reason or "by hand",
    )


def restored(
    row: DiscoveryRow,
    rows: Sequence[DiscoveryRow],
    now: datetime,
    reason: str,
    *,
    limits: DiscoveryLimits = LIMITS,
) -> StoredRow:
    """Return a retired discovery as restored by a person.

    A discovery that was a slice is one again, with its id and a place; its detectors start empty. One that never was a
    slice may be found again by a search.

    Parameters
    ----------
    limits
        `most_slices`.
    reason
        The person's reason; may be empty.

    Raises
    ------
    OperatorError
        It is not retired, or there is no free place.
    """
    if row.status is not DiscoveryStatus.RETIRED:
        raise OperatorError(f"`{row.name}` is not retired: it is {row.status.value}")
    back = msgspec.structs.replace(row, held=False)
    if row.slice_id is None:
        return StoredRow(
            row=msgspec.structs.replace(back, status=DiscoveryStatus.EXPIRED, expired_at=now),
            reason=reason or "may be found again",
        )
    n_confirmed = sum(
        other.status is DiscoveryStatus.CONFIRMED and other.model == row.model for other in rows
    )
    if n_confirmed >= limits.most_slices:
        raise OperatorError(
            f"{n_confirmed} discovered slices of {row.model} are monitored, and there is no place for more:"
            " retire another one first"
        )
    return StoredRow(
        row=msgspec.structs.replace(back, status=DiscoveryStatus.CONFIRMED, confirmed_at=now),
        reason=reason or "restored",
    )


def _quiet(
    metric: Metric, versions: Sequence[VersionSums], budget: Budget, limits: DiscoveryLimits
) -> str | None:
    """Return as text that a metric is quiet; empty where the slice does not have it, None where that is not shown."""
    cap, accepted = cap_of(metric, budget), budget_of(metric, budget)
    with_traffic = [version for version in versions if version.inside.weight_of(metric) > 0]
    if not with_traffic:
        return ""

    def bound(some_versions: Sequence[VersionSums]) -> float:
        return null_mean(accepted, _rest(metric, some_versions) / cap, limits.least_ratio)

    sums = ConfirmedSums.together(version.inside for version in with_traffic)
    mean, high = _mean(metric, sums) / cap, _high(metric, sums, cap)
    if high > bound(with_traffic) or any(
        _low(metric, version.inside, cap) > bound([version]) for version in with_traffic
    ):
        return None
    return (
        f"mean {metric.value} {number(mean * cap, 3)}, at most {number(high * cap, 3)}, below the level of"
        f" {number(bound(with_traffic) * cap, 3)}"
    )


def _mean(metric: Metric, sums: ConfirmedSums) -> float:
    return sums.of(metric) / sums.weight_of(metric)


def _rest(metric: Metric, versions: Sequence[VersionSums]) -> float:
    """Return the mean over the rest of the traffic; 0 where there is none."""
    weight = sum(
        version.everything.weight_of(metric) - version.inside.weight_of(metric) for version in versions
    )
    total = sum(version.everything.of(metric) - version.inside.of(metric) for version in versions)
    return max(total / weight, 0.0) if weight > 0 else 0.0


def _high(metric: Metric, sums: ConfirmedSums, cap: float) -> float:
    n = _effective(metric, sums)
    return upper_bound(min(_mean(metric, sums) / cap, 1.0) * n, n, DELTA)


def _low(metric: Metric, sums: ConfirmedSums, cap: float) -> float:
    n = _effective(metric, sums)
    return 1.0 - upper_bound((1.0 - min(_mean(metric, sums) / cap, 1.0)) * n, n, DELTA)


def _effective(metric: Metric, sums: ConfirmedSums) -> float:
    """Return Kish's effective number of the exchanges that have the metric."""
    if sums.weight_sq <= 0 or sums.weight <= 0:
        return 0.0
    return sums.weight**2 / sums.weight_sq * sums.weight_of(metric) / sums.weight
