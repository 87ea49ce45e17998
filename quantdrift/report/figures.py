"""Everything a report says, as records: the page shows them, `--json` prints them, `report_run` keeps them."""

from collections import Counter
from datetime import datetime
from typing import Any

import msgspec

from quantdrift.core.records import Metric, Verdict
from quantdrift.core.slices import EVERYTHING
from quantdrift.core.tasks import Task
from quantdrift.drift.explain.diagnosis import Aggregate
from quantdrift.report.interval import Estimate, Quantile
from quantdrift.report.period import PeriodKind
from quantdrift.storage.report.facts import Fleet, ReasonCount, StratumCounts


class _Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A part of what a report says."""


class SliceFigures(_Figures, frozen=True, kw_only=True):
    """One slice over the whole period.

    Parameters
    ----------
    slice_id, name, predicate
        Which one.
    verdict, reason
        What the monitor said at the end of the period, and why.
    n_items, n_exchanges, n_effective
        Items and exchanges compared, and the effective number of exchanges under the weights.
    traffic_share
        Estimated share of the model's exchanges; None where nothing was compared.
    flip
        Share of exchanges whose decision changed (mean over items).
    divergence, js
        Mean of the model's graded divergence, capped per item, and of a classifier's JS in nats.
    flip_budget, divergence_budget
        What the owner accepts.
    flip_noise, divergence_noise
        What is added to that because reference or candidate differ from themselves.
    n_infinite
        Items whose divergence was infinite.
    tail
        p50, p95, p99 and p99.9 of the divergence; None where there is too little data for that one.
    shortfall
        Mean of the divergence above its p99; None where there is no p99.
    decided
        What decided its verdict, where that is an alert or the end of one: the other figures are of the whole period.
    """

    slice_id: int
    name: str
    predicate: str
    verdict: Verdict
    reason: str
    n_items: int
    n_exchanges: int
    n_effective: float
    traffic_share: float | None
    flip: Estimate | None
    divergence: Estimate | None
    js: Estimate | None
    flip_budget: float | None
    divergence_budget: float | None
    n_infinite: int
    tail: tuple[Quantile | None, ...]
    shortfall: Quantile | None = None
    flip_noise: float = 0.0
    divergence_noise: float = 0.0
    decided: str = ""


class ExampleFigures(_Figures, frozen=True, kw_only=True):
    """An exchange that shows the drift; `trace_url` is empty where none is configured or recorded.

    `detail` is what its comparator measured beside the two, by name, as in `comparison.detail`.
    """

    exchange_id: str
    item: int
    captured_at: datetime
    flip: bool | None
    divergence: float | None
    trace_url: str
    detail: dict[str, Any] = {}


class EpisodeFigures(_Figures, frozen=True, kw_only=True):
    """An alert that was open in the period.

    Parameters
    ----------
    alert_id, model, version, slice_id, slice, predicate
        Which one.
    severity, task, metric
        The highest so far, what the model gives, and what moved.
    onset_at, opened_at, resolved_at
        Estimated begin, alert and end; None where it was open at the end of the period.
    decided
        What decided: the figures from the onset until the alert, and what they were held against; empty where a release
        before this one did not tell.
    before, after
        The metric in up to 24 hours before the onset, and from the onset to the end of the episode or period; `before` is
        None below 30 exchanges.
    n_before, n_after
        Exchanges compared in each.
    flip_after
        Share of changed decisions in the latter.
    budget
        What the owner accepts.
    share_before, share_after
        Estimated share of the model's exchanges.
    aggregate, aggregate_verdict, aggregate_accepted
        The same metric on all exchanges from the onset on, what was said of them at the end of the period, and what is
        accepted of them, noise included.
    explanation
        Why it alerts, in sentences; empty where nothing was told.
    explained_by, explains
        The smaller alerting slice without which nothing is left of it, and larger ones of which nothing is left
        without it.
    folded
        Whether it is told under the alert that explains it.
    by_budget
        Whether it was decided by the budget of the metric's mean, and not by what was learned.
    examples, advice
        Exchanges that show it, and what to do next.
    """

    alert_id: int
    model: str
    version: str
    slice_id: int
    slice: str
    predicate: str
    severity: Verdict
    task: Task = Task.CLASSIFICATION
    metric: Metric
    onset_at: datetime
    opened_at: datetime
    resolved_at: datetime | None
    decided: str = ""
    by_budget: bool = True
    before: Estimate | None
    after: Estimate | None
    n_before: int = 0
    n_after: int
    flip_after: Estimate | None = None
    budget: float | None
    share_before: float | None
    share_after: float | None
    aggregate: Estimate | None
    aggregate_verdict: Verdict
    aggregate_accepted: float | None = None
    explanation: tuple[str, ...] = ()
    explained_by: str | None = None
    explained_by_id: int | None = None
    explains: tuple[str, ...] = ()
    folded: bool = False
    examples: tuple[ExampleFigures, ...]
    advice: tuple[str, ...]

    @property
    def whole(self) -> Aggregate:
        """All of the version's traffic beside it."""
        return Aggregate(
            verdict=self.aggregate_verdict,
            mean=self.aggregate.mean if self.aggregate else None,
            accepted=self.aggregate_accepted,
            itself=self.predicate == EVERYTHING,
        )


class ModelFigures(_Figures, frozen=True, kw_only=True):
    """One candidate version.

    Parameters
    ----------
    version_id, model, version, reference_digest
        Which one; the digest is empty where it has no reference.
    task
        What it gives.
    precision
        Of the reference: `float32`, what else is declared, or `unverified`; empty where it is not known.
    doubt
        What the reference's outputs say against the configuration, as of the last look; empty: nothing.
    status
        The worst that was said in the period: firing, warning, unknown or ok.
    headline
        One sentence in plain words.
    n_slices, n_unknown
        Slices watched beside the aggregate, and how many of these are unknown.
    aggregate
        The slice `all`; None where nothing was compared.
    slices
        The others, worst first.
    """

    version_id: int
    model: str
    version: str
    reference_digest: str
    task: Task = Task.CLASSIFICATION
    precision: str = ""
    doubt: str = ""
    status: Verdict
    headline: str
    n_slices: int
    n_unknown: int
    aggregate: SliceFigures | None
    slices: tuple[SliceFigures, ...]


class Gap(_Figures, frozen=True, kw_only=True):
    """A stretch in which nothing was compared."""

    begin: datetime
    end: datetime


class Unreferenced(_Figures, frozen=True, kw_only=True):
    """A candidate version without a reference: unknown for as long as it serves."""

    model: str
    version: str
    first_seen_at: datetime


class CoverageFigures(_Figures, frozen=True, kw_only=True):
    """What was seen and what was lost, of all models.

    Parameters
    ----------
    strata
        Exact counts by header stratum.
    skipped
        Exchanges read but not compared, by reason.
    quarantined
        Exchanges set aside, by reason.
    unreferenced
        Versions without a reference.
    gaps
        Stretches without a comparison.
    fleet
        The sidecars.
    judged_until
        Capture time up to which the monitor has judged; None where it never has.
    """

    strata: tuple[StratumCounts, ...]
    skipped: tuple[ReasonCount, ...]
    quarantined: tuple[ReasonCount, ...]
    unreferenced: tuple[Unreferenced, ...]
    gaps: tuple[Gap, ...]
    fleet: Fleet
    judged_until: datetime | None

    @property
    def taken(self) -> int:
        """Exchanges taken by the first phase."""
        return sum(stratum.taken for stratum in self.strata)

    @property
    def losses(self) -> tuple[ReasonCount, ...]:
        """Lost exchanges by reason, most first."""
        total: Counter[str] = Counter()
        for stratum in self.strata:
            total.update(stratum.lost)
        order = sorted(total.items(), key=lambda entry: (-entry[1], entry[0]))
        return tuple(ReasonCount(reason=reason, n=n) for reason, n in order)

    @property
    def model_losses(self) -> "tuple[ModelLoss, ...]":
        """Lost exchanges of which the model is known, by model, stratum and reason, most first."""
        found = [
            ModelLoss(model=model, stratum=stratum.stratum, reason=reason, n=n)
            for stratum in self.strata
            for model, lost in stratum.models.items()
            for reason, n in lost.items()
        ]
        return tuple(sorted(found, key=lambda one: (-one.n, one.model, one.stratum, one.reason)))


class ModelLoss(_Figures, frozen=True, kw_only=True):
    """Lost exchanges of one model in one header stratum, for one reason."""

    model: str
    stratum: str
    reason: str
    n: int


class ReportFigures(_Figures, frozen=True, kw_only=True):
    """The whole report.

    Parameters
    ----------
    kind, begin, end
        The period asked for.
    generated_at, path
        When it was written, and where.
    source, bucket_s
        Table the sums are read from, and seconds of one point of the plots; empty and 0 without data.
    first_at, last_at
        Earliest and latest capture in the period.
    n_offered, n_compared
        Requests seen on the wire, and exchanges compared.
    n_slices
        Slices watched beside the aggregates.
    n_pages, n_tickets
        Alerts that paged in the period, and those that warned in it and had not paged by its end.
    models, episodes, n_episodes_left_out, coverage
        The parts.
    """

    kind: PeriodKind
    begin: datetime
    end: datetime
    generated_at: datetime
    path: str
    source: str
    bucket_s: float
    first_at: datetime | None
    last_at: datetime | None
    n_offered: int
    n_compared: int
    n_slices: int
    n_pages: int
    n_tickets: int
    models: tuple[ModelFigures, ...]
    episodes: tuple[EpisodeFigures, ...]
    n_episodes_left_out: int
    coverage: CoverageFigures

    def silence(self) -> str:
        """Return what is said where no version can be told of."""
        if self.first_at is not None:
            return "Comparisons are stored, but the monitor has not summed them yet: nothing can be said."
        return "Nothing was compared in this period, so nothing can be said: silence is not health."

    def headlines(self) -> list[str]:
        """Return one sentence on each version, or that nothing can be said."""
        return [model.headline for model in self.models] or [self.silence()]
