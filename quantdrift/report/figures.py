"""The figures of a report as records: the page shows them, `--json` prints them, the table `report_run` keeps them."""

from collections import Counter
from datetime import datetime
from typing import Any

import msgspec

from quantdrift.core.notation import count_of, moment, percent
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.signals import signal_of
from quantdrift.core.tasks import MEASURES, Measure, Task
from quantdrift.core.text import Table
from quantdrift.core.token_histogram import TokenQuantiles
from quantdrift.facts.estimate import Change, Difference, Estimate, change_of
from quantdrift.facts.figures import Figure, shown
from quantdrift.facts.incidents import Incident
from quantdrift.facts.interval import Quantile
from quantdrift.facts.status import Serving
from quantdrift.facts.words.amount import measured, signed
from quantdrift.facts.words.comparison import compared, comparison_head
from quantdrift.facts.words.labels import lost
from quantdrift.report.labels import LabelledSlice
from quantdrift.report.period import PeriodKind
from quantdrift.storage.account.coverage import Fleet, ReasonCount, StratumCounts
from quantdrift.storage.exchanges import Direction
from quantdrift.storage.figures.figures import SliceFigures
from quantdrift.storage.figures.periods import Grain


class _Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records that make up a report."""


class ReportedSlice(_Figures, frozen=True, kw_only=True):
    """One slice over the whole period.

    Parameters
    ----------
    verdict, reason
        The monitor's verdict at the end of the period, and its reason.
    n_items, n_exchanges, n_effective
        Items and exchanges compared, and the effective number of exchanges under the weights; a session counts as one.
    figures
        What is measured over the period.
    people
        People with a changed answer on the last day of data; None: none is known.
    flip_budget, divergence_budget
        Accepted means.
    flip_noise, divergence_noise
        Allowance added to the budget because reference or candidate differ from themselves.
    tie
        Share of exchanges whose decision differs only because several entries share the largest score of a side; None for
        tasks that choose no entry.
    n_infinite
        Items whose divergence was infinite.
    tail
        p50, p95, p99 and p99.9 of the divergence; None where there is too little data for that quantile.
    shortfall
        Mean of the divergence above its p99; None where there is no p99.
    tokens
        Of generated text the quantiles of the divergence over the tokens of its newest 5,000 answers; None: it is no text, or not drawn.
    decided
        The figures that decided its verdict, where that is an alert or the end of one. The other figures are of the
        whole period.
    page_url
        Its address on the live page; empty if `web.url` is not set.
    signals, signal_budgets
        Of the signals that plug-ins add: the mean over the detector's window at the end of the period, and the accepted mean.
    """

    slice_id: int
    name: str
    predicate: str
    verdict: Verdict
    reason: str
    n_items: int
    n_exchanges: int
    n_effective: float
    figures: SliceFigures
    people: Figure | None = None
    flip_budget: float | None
    divergence_budget: float | None
    n_infinite: int
    tail: tuple[Quantile | None, ...]
    shortfall: Quantile | None = None
    tokens: TokenQuantiles | None = None
    flip_noise: float = 0.0
    divergence_noise: float = 0.0
    tie: float | None = None
    decided: str = ""
    page_url: str = ""
    signals: dict[Metric, Estimate] = {}
    signal_budgets: dict[Metric, float] = {}

    @property
    def signal_lines(self) -> tuple[str, ...]:
        """Share, interval and budget of each signal of a plug-in: `share of boxes that moved, lately: 5.2 % [3.9, 6.8] (budget: 1 %)`."""
        return tuple(
            f"share of {signal_of(metric).name}, lately: {measured(metric, self.signals.get(metric), '')} (budget: {percent(budget)})"
            for metric, budget in self.signal_budgets.items()
        )

    @property
    def flip(self) -> Estimate | None:
        """Share of answers whose decision changed."""
        return self.figures.changed_share.estimate if self.figures.changed_share else None

    @property
    def divergence(self) -> Estimate | None:
        """Mean of the model's graded divergence."""
        return self.figures.divergence.estimate if self.figures.divergence else None


class ExampleFigures(_Figures, frozen=True, kw_only=True):
    """An example exchange of an alert; `trace_url` is empty where no trace is configured or recorded.

    `detail` holds the comparator's other measures by name, as in `comparison.detail`.
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
    severity, task, metric
        The highest severity so far, the model's task, and the metric that moved.
    onset_at, opened_at, resolved_at, ended
        Estimated onset, alert and end; None where it was open at the end of the period. Why it was over, as in `alert.ended`.
    headline
        What the alert said first when it was written.
    decided
        The figures that decided, from the onset until the alert, and what they were compared with; empty where the
        alert does not hold them.
    when_paged, now
        The share of changed answers when it was written, and what is measured in the newest hours before the end of the period.
    budget
        The accepted mean of the metric.
    since
        Since when, and what is known of the time before.
    aggregate_verdict
        That of all traffic at the end of the period.
    explanation, details
        Why it alerts, in sentences, and the statistics behind that; empty where it was not explained.
    explained_by, explains
        The smaller alerting slice that explains this alert (without its items no excess is left), and the larger
        ones that this alert explains.
    folded
        Whether it is listed under the alert that explains it.
    by_budget
        Whether the budget of the metric's mean decided, and not a learned baseline.
    examples
        Example exchanges.
    do_now, tomorrow
        At most three steps for whoever is woken, none once the alert is over; and what is for the owner of the model.
    directions
        Which answers became which, the most frequent first.
    findings
        The cause, the best repair and the gate's verdict, in words, as far as commands have found them.
    page_url
        The address of the alert on the live page; empty if `web.url` is not set.
    divergence_is
        Of generated text: the name of the divergence that the alert's answers have; empty: as of the task.
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
    ended: str = ""
    headline: str = ""
    decided: str = ""
    by_budget: bool = True
    when_paged: Figure | None
    now: SliceFigures | None
    budget: float | None
    since: str = ""
    aggregate_verdict: Verdict
    explanation: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    explained_by: str | None = None
    explained_by_id: int | None = None
    explains: tuple[str, ...] = ()
    folded: bool = False
    findings: tuple[str, ...] = ()
    examples: tuple[ExampleFigures, ...]
    do_now: tuple[str, ...] = ()
    tomorrow: tuple[str, ...] = ()
    directions: tuple[Direction, ...] = ()
    page_url: str = ""
    divergence_is: str = ""

    @property
    def measure(self) -> Measure:
        """What the divergences of its answers are."""
        measure = MEASURES[self.task]
        return msgspec.structs.replace(measure, name=self.divergence_is or measure.name)

    @property
    def share(self) -> Figure | None:
        """The share of changed answers when it was written, else the newest one."""
        return self.when_paged or (self.now.changed_share if self.now else None)


class ModelFigures(_Figures, frozen=True, kw_only=True):
    """One candidate version.

    Parameters
    ----------
    reference_digest
        Empty where it has no reference.
    precision
        Precision of the reference: `float32`, another declared precision, or `unverified`; empty if it is not known.
    doubt
        How the reference's outputs contradict the configuration, as last checked; empty if they do not.
    serving
        Whether it serves, and is paused, when the report is written.
    served_last
        Whether it served at the end of the period.
    status
        The worst verdict in the period: firing, warning, unknown or ok.
    n_slices, n_unknown
        Slices watched besides the aggregate, and how many of these are unknown.
    aggregate
        The slice `all`; None where nothing was compared.
    slices
        The others, worst first.
    speed
        How long its answers took on the last day, and what an item cost the reference, as a sentence; empty: no time was
        measured.
    divergence_is
        Of generated text: the name of the divergence that its newest answers have, KL, regret or both; empty: as of the task.
    """

    version_id: int
    model: str
    version: str
    reference_digest: str
    task: Task = Task.CLASSIFICATION
    precision: str = ""
    doubt: str = ""
    serving: Serving = Serving()
    served_last: bool = False
    status: Verdict
    n_slices: int
    n_unknown: int
    aggregate: ReportedSlice | None
    slices: tuple[ReportedSlice, ...]
    speed: str = ""
    divergence_is: str = ""

    @property
    def measure(self) -> Measure:
        """What its divergences are."""
        measure = MEASURES[self.task]
        return msgspec.structs.replace(measure, name=self.divergence_is or measure.name)


class Gap(_Figures, frozen=True, kw_only=True):
    """A time span in which nothing was compared."""

    begin: datetime
    end: datetime


class UnreferencedVersion(_Figures, frozen=True, kw_only=True):
    """A candidate version without a reference: its verdict is unknown as long as it serves."""

    model: str
    version: str
    first_seen_at: datetime


class CoverageFigures(_Figures, frozen=True, kw_only=True):
    """Counts of seen and lost exchanges, over all models.

    Parameters
    ----------
    strata
        Exact counts by header stratum.
    skipped
        Exchanges read but not compared, by reason.
    quarantined
        Quarantined exchanges, by reason.
    gaps
        Time spans without a comparison.
    judged_until
        Capture time up to which the monitor has folded; None where it has folded nothing.
    """

    strata: tuple[StratumCounts, ...]
    skipped: tuple[ReasonCount, ...]
    quarantined: tuple[ReasonCount, ...]
    unreferenced: tuple[UnreferencedVersion, ...]
    gaps: tuple[Gap, ...]
    fleet: Fleet
    judged_until: datetime | None

    @property
    def taken(self) -> int:
        """Exchanges sampled by the first phase."""
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
        """Lost exchanges whose model is known, by model, stratum and reason, most first."""
        losses = [
            ModelLoss(model=model, stratum=stratum.stratum, reason=reason, n=n)
            for stratum in self.strata
            for model, lost in stratum.models.items()
            for reason, n in lost.items()
        ]
        return tuple(sorted(losses, key=lambda loss: (-loss.n, loss.model, loss.stratum, loss.reason)))


class ModelLoss(_Figures, frozen=True, kw_only=True):
    """Lost exchanges of one model in one header stratum, for one reason."""

    model: str
    stratum: str
    reason: str
    n: int


class SideFigures(_Figures, frozen=True, kw_only=True):
    """One slice in one version.

    Parameters
    ----------
    n_items, n_exchanges, n_clusters
        Answers and exchanges compared, and the people that they belong to; an exchange without a person is one of its own. None:
        the roll-ups do not hold it.
    weight
        Estimated requests that they stand for.
    flip, divergence
        Figures of the window of this side; None where nothing was measured.
    """

    n_items: int = 0
    n_exchanges: int
    n_clusters: int | None
    weight: float = 0.0
    flip: Figure | None
    divergence: Figure | None


class ComparedSlice(_Figures, frozen=True, kw_only=True):
    """One slice in both versions.

    Parameters
    ----------
    change
        Worse where one of the two differences is above 0 with an adjusted p-value of at most .05, better where none is and one is
        below. Where nothing differs, any of all slices is named with a probability of at most 5 %.
    flip, divergence
        New minus old, with a 95 % interval for one look, and the p-value among the differences of all slices.
    """

    slice_id: int
    name: str
    predicate: str
    change: Change
    old: SideFigures
    new: SideFigures
    flip: Difference | None
    divergence: Difference | None

    @property
    def shown(self) -> str:
        """The change in words: with what changed, where the divergence alone says so."""
        if self.change is Change.UNCLEAR or change_of(self.flip) is self.change:
            return self.change.value
        return f"{self.change.value}: outputs {'further from' if self.change is Change.WORSE else 'closer to'} the reference"


class ComparedVersion(_Figures, frozen=True, kw_only=True):
    """A version, the window that is compared, and what it was read from.

    Parameters
    ----------
    label
        What tells it from the other side: the version, else the model or the period.
    n_answers, n_people
        Compared in the window; people only where requests say who sends them.
    """

    version_id: int
    model: str = ""
    version: str
    label: str = ""
    n_answers: int = 0
    n_people: int | None = None
    reference_digest: str
    first_seen_at: datetime
    begin: datetime
    end: datetime
    source: Grain

    @property
    def basis(self) -> str:
        """What its figures rest on: the window, the answers, and what was summed."""
        people = "" if self.n_people is None else f" of {count_of(self.n_people, 'person', 'people')}"
        name = self.version if self.label in {"", self.version} else f"{self.model} {self.version}"
        return (
            f"{name}: {moment(self.begin)} to {moment(self.end)}, {count_of(self.n_answers, 'answer')}{people},"
            f" from {self.source.words}"
        )


class VersionComparison(_Figures, frozen=True, kw_only=True):
    """Two candidate versions of one model.

    Parameters
    ----------
    aggregate
        All traffic; None where one of the two has none.
    slices
        The slices with data in both, worst first.
    only_old, only_new
        Names of the slices with data in one of the two alone.
    warning
        Why the two may not be comparable; empty if nothing is known.
    not_in
        Times that were left out on both sides.
    cost
        What the difference over all traffic costs in the window of the new side: its requests times the difference times what a request
        with a changed answer is worth; None without a price.
    divergence_is
        Of generated text: the name of the divergence that the answers of both sides have; empty: as of the task.
    """

    model: str
    task: Task
    old: ComparedVersion
    new: ComparedVersion
    aggregate: ComparedSlice | None
    slices: tuple[ComparedSlice, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    warning: str = ""
    not_in: tuple[Gap, ...] = ()
    cost: Figure | None = None
    divergence_is: str = ""

    @property
    def sentence(self) -> str:
        """What the comparison shows."""
        whole = self.aggregate
        shares = (
            (whole.old.flip.value, whole.new.flip.value)
            if whole and whole.old.flip and whole.new.flip
            else None
        )
        return compared(
            f"{self.model} {self.new.label or self.new.version}",
            self.old.label or self.old.version,
            [(entry.name, entry.change) for entry in self.slices],
            None if whole is None else whole.change,
            shares,
        )

    def table(self, most: int) -> Table:
        """Return a row for all traffic and for each slice, at most `most` of them."""
        old, new = (side.label or side.version for side in (self.old, self.new))
        measure = MEASURES[self.task]
        unit = f", {measure.unit}" if measure.unit else ""
        name = self.divergence_is or measure.name
        rows = tuple(
            (
                entry.name,
                entry.shown,
                *("-" if side.flip is None else str(shown(side.flip)) for side in (entry.old, entry.new)),
                *(
                    "-" if difference is None else signed(metric, difference)
                    for metric, difference in (
                        (Metric.FLIP, entry.flip),
                        (Metric.DIVERGENCE, entry.divergence),
                    )
                ),
                f"{entry.old.n_exchanges:,} / {entry.new.n_exchanges:,}",
            )
            for entry in (self.aggregate, *self.slices[:most])
            if entry is not None
        )
        return Table(comparison_head(old, new, f"{name}{unit}"), rows)


class Mark(_Figures, frozen=True, kw_only=True):
    """A release, or a decision of a person, in the period: marked in each plot of its model and listed.

    Parameters
    ----------
    kind
        release or decision.
    model
        Empty: it concerns all models.
    who, why
        Of a decision, as in the audit; empty where it is not known.
    """

    at: datetime
    kind: str
    model: str
    what: str
    who: str = ""
    why: str = ""


class BriefLine(_Figures, frozen=True, kw_only=True):
    """One question of somebody who decides, with its answer in words."""

    question: str
    answer: str


class Brief(_Figures, frozen=True, kw_only=True):
    """The first screen on one model: the worst of the versions that served at the end of the period.

    Parameters
    ----------
    answer
        Whether the model is still good enough, in one sentence.
    incidents
        One line for each incident of the period, of every version.
    others
        One sentence for each other version of the period, those that served at its end first; its question has the version, and
        whether it serves.
    """

    model: str
    version: str
    status: Verdict
    answer: str
    lines: tuple[BriefLine, ...]
    incidents: tuple[str, ...] = ()
    others: tuple[BriefLine, ...] = ()


class LabelFigures(_Figures, frozen=True, kw_only=True):
    """What true labels of the period say of one version; slices with the clearest loss of accuracy first."""

    model: str
    version: str
    slices: tuple[LabelledSlice, ...]

    @property
    def sentence(self) -> str:
        """Whether accuracy was lost, and where."""
        return lost([(entry.slice, entry.n_items, entry.loss) for entry in self.slices])


class Replays(_Figures, frozen=True, kw_only=True):
    """How much was replayed in the period, and how much for a million requests; None: not known."""

    n: int
    per_million: float | None


class ReportFigures(_Figures, frozen=True, kw_only=True):
    """The whole report.

    Parameters
    ----------
    kind, begin, end
        The reported period.
    source, bucket_s
        Table the sums are read from, and width of one point of the plots in seconds; empty and 0 without data.
    first_at, last_at
        Earliest and latest capture in the period.
    n_offered, n_compared
        Requests seen on the wire, and exchanges compared.
    n_slices
        Slices watched besides the aggregates.
    n_pages, n_tickets
        Alerts that paged in the period, and those that warned in it and had not paged by its end.
    briefs
        The first screen, one for each model, the worst first.
    marks
        Releases and decisions in the period, oldest first.
    comparisons
        Each version that was released in the period with the one that served before.
    labels
        What true labels say, by version; versions without a label are left out.
    replays
        How much was replayed.
    costs
        What changed answers cost by version, and what replays cost by model (no version); empty without prices.
    incidents
        Those that overlap the period, open ones first.
    """

    kind: PeriodKind
    begin: datetime
    end: datetime
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
    briefs: tuple[Brief, ...] = ()
    marks: tuple[Mark, ...] = ()
    comparisons: tuple[VersionComparison, ...] = ()
    replays: Replays | None = None
    costs: tuple[Figure, ...] = ()
    labels: tuple[LabelFigures, ...] = ()
    incidents: tuple[Incident, ...] = ()

    def silence(self) -> str:
        """Return the sentence for a report without any version."""
        if self.first_at is not None:
            return "Comparisons are stored, but the monitor has not processed them yet: health is unknown."
        return "Nothing was compared in this period: health is unknown, not good."

    def headlines(self) -> list[str]:
        """Return the answer on each model, its incidents and its other versions; without a version, the sentence of `silence`."""
        lines = []
        for brief in self.briefs:
            lines += [brief.answer, *(f"Incident: {line}" for line in brief.incidents)]
            lines += [f"{brief.model} {line.question}: {line.answer}" for line in brief.others]
        return lines or [self.silence()]
