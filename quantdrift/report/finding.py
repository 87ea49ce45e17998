"""The figures of each slice, episode and version, from the facts that were read. Pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from statistics import median

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.links import alert_page, slice_page, trace_link
from quantdrift.core.notation import moment
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.signals import DetectorKind, SignalForm, signal_names, signal_of
from quantdrift.core.slices import EVERYTHING
from quantdrift.core.tasks import Task
from quantdrift.core.text import plain
from quantdrift.core.token_histogram import TokenBins
from quantdrift.facts.figures import Figure, Scope, Served, Subject, period
from quantdrift.facts.interval import excess, quantile, shortfall
from quantdrift.facts.speed import ItemTimes, Times
from quantdrift.facts.status import ALERTS, RANK, Serving, worst
from quantdrift.facts.words.details import DECIDED
from quantdrift.facts.words.ending import AFTER
from quantdrift.facts.words.happened import SINCE
from quantdrift.facts.words.speed import speed
from quantdrift.report.figures import (
    EpisodeFigures,
    ExampleFigures,
    Gap,
    ModelFigures,
    ReportedSlice,
)
from quantdrift.storage.alerts.alerts import AlertFact
from quantdrift.storage.exchanges import Direction, Example
from quantdrift.storage.figures.estimates import Sums
from quantdrift.storage.figures.figures import AlertFigures, SliceFigures, of_slice
from quantdrift.storage.figures.periods import SliceBins, SliceSums
from quantdrift.storage.slices.verdicts import SliceName, VerdictFact
from quantdrift.storage.versions import Version

QUANTILES = (0.5, 0.95, 0.99, 0.999)
SHORTFALL = 0.99  # the mean of the divergence above this quantile is shown

_USUAL_GROUPS = 20  # with fewer exchanges per bucket, an empty bucket is chance and not a gap
Key = tuple[int, int]


class EpisodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that was open in the period, what was found about it, and what is measured of its slice."""

    alert: AlertFact
    findings: tuple[str, ...] = ()
    figures: AlertFigures
    examples: tuple[Example, ...]
    directions: tuple[Direction, ...] = ()


class PeriodFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts read from the database about the slices of all versions.

    Parameters
    ----------
    begin, end
        The period.
    versions, slices
        All that the report may name.
    totals
        Sums over the whole period.
    bins
        Divergence histograms over the whole period, of the slices that are shown.
    verdicts
        At the end of the period.
    episodes
        Episodes that were open at some time of the period, pages first.
    served
        Per version the time in which there is data of it.
    times, learned_s, items
        Per version how long its answers took at the end of the period, and what 99 % did not exceed when that was learned; and
        how long an item took with reference and candidate.
    divergences
        Per version of generated text the name of the divergence that its newest answers have.
    tokens
        Of generated text the divergence of the newest tokens, of the slices that are drawn and of all traffic.
    people
        How many people got a changed answer on the last day of data.
    serving
        Whether versions serve, and are paused, by model and version.
    served_last
        The versions that served at the end of the period; that with the newest comparison, where it is not known.
    """

    begin: datetime
    end: datetime
    versions: tuple[Version, ...]
    slices: Mapping[int, SliceName]
    totals: Mapping[Key, Sums]
    bins: Mapping[Key, tuple[float, ...]]
    verdicts: Mapping[Key, VerdictFact]
    episodes: tuple[EpisodeFacts, ...]
    served: Mapping[int, Served] = {}
    times: Mapping[int, Times] = {}
    learned_s: Mapping[int, float] = {}
    items: tuple[ItemTimes, ...] = ()
    divergences: Mapping[int, str] = {}
    tokens: Mapping[Key, TokenBins] = {}
    people: Mapping[Key, Figure] = {}
    serving: Mapping[tuple[str, str], Serving] = {}
    served_last: frozenset[int] = frozenset()

    def everything(self) -> frozenset[int]:
        """Return the slices of all traffic, one for each model."""
        return frozenset(id_ for id_, name in self.slices.items() if name.predicate == EVERYTHING)

    def figures_of(self, version: Version, slice_id: int, unit: str) -> SliceFigures:
        """Return what is measured of a slice over the period; `unit` is that of the model's divergence."""
        keys = ((version.id, id_) for id_, name in self.slices.items() if name.predicate == EVERYTHING)
        everything = next((self.totals[key] for key in keys if key in self.totals), Sums())
        of = Subject(model=version.model, version=version.candidate_version, slice=self.slices[slice_id].name)
        scope = Scope(window=period(self.begin, self.end), of=of, as_of=self.end)
        sums, served = self.totals.get((version.id, slice_id), Sums()), self.served.get(version.id)
        return of_slice(scope, sums, everything, served, unit)


def task_of(config: Config, model: str) -> Task:
    """Return the task of a model; classification where the configuration does not name it any more."""
    configured = config.model(model)
    return configured.task if configured else Task.CLASSIFICATION


def by_key(entries: Sequence[SliceSums]) -> dict[Key, Sums]:
    """Return sums over a whole window by version and slice."""
    return {(entry.version_id, entry.slice_id): entry.sums for entry in entries}


def bins_by_key(entries: Sequence[SliceBins]) -> dict[Key, tuple[float, ...]]:
    """Return histograms by version and slice."""
    return {(entry.version_id, entry.slice_id): entry.bins for entry in entries}


def models(config: Config, facts: PeriodFacts) -> tuple[ModelFigures, ...]:
    """Return every version that was compared or alerted in the period, worst first."""
    figures = [_model(config, facts, version) for version in facts.versions]
    return tuple(
        sorted(
            (model for model in figures if model is not None),
            key=lambda model: (RANK[model.status], model.model, -model.version_id),
        )
    )


def episodes(config: Config, facts: PeriodFacts) -> tuple[EpisodeFigures, ...]:
    """Return the alerts, pages first, with figures and next steps; each is followed by the alerts it explains."""
    versions = {version.id: version for version in facts.versions}
    return grouped(
        [_episode(config, facts, versions[entry.alert.version_id], entry) for entry in facts.episodes]
    )


def grouped(episodes: Sequence[EpisodeFigures]) -> tuple[EpisodeFigures, ...]:
    """Return alerts in their order, but each explained alert directly after the one of its version that explains it."""
    ids = {
        (episode.model, episode.version, episode.slice_id): episode.alert_id for episode in reversed(episodes)
    }
    parents = {
        episode.alert_id: ids.get((episode.model, episode.version, episode.explained_by_id))
        for episode in episodes
        if episode.explained_by_id is not None
    }
    ordered: dict[int, EpisodeFigures] = {}

    def put(episode: EpisodeFigures, *, explained: bool) -> None:
        if episode.alert_id in ordered:
            return
        ordered[episode.alert_id] = msgspec.structs.replace(episode, folded=explained)
        for other in episodes:
            if parents.get(other.alert_id) == episode.alert_id:
                put(other, explained=True)

    for episode in episodes:
        if parents.get(episode.alert_id) is None:
            put(episode, explained=False)
    # Two alerts that explain each other have no root: they are listed in their order.
    for episode in episodes:
        put(episode, explained=False)
    return tuple(ordered.values())


def ranked(config: Config, facts: PeriodFacts, version: Version) -> list[int]:
    """Return the slices of a version besides the aggregate, worst first: firing, warning, then by excess."""
    return [entry.slice_id for entry in _slices(config, facts, version) if entry.predicate != EVERYTHING]


def gaps(points: Sequence[SliceSums], begin: datetime, end: datetime, width: timedelta) -> tuple[Gap, ...]:
    """Return spans of whole buckets without a comparison, if buckets usually hold enough for that to be no chance.

    Parameters
    ----------
    points
        Buckets of the aggregates of all versions, empty ones left out.
    begin, end
        From the first capture to the end of the period.
    width
        Width of a bucket.
    """
    groups: dict[datetime, int] = {}
    for point in points:
        groups[point.at] = groups.get(point.at, 0) + point.sums.n_groups
    if not groups or median(groups.values()) < _USUAL_GROUPS:
        return ()
    spans, covered_until = [], begin
    for at in [*sorted(groups), end]:
        if at - covered_until >= width:
            spans.append(Gap(begin=covered_until, end=at))
        covered_until = max(covered_until, at + width)
    return tuple(spans)


def _model(config: Config, facts: PeriodFacts, version: Version) -> ModelFigures | None:
    own_episodes = [entry for entry in facts.episodes if entry.alert.version_id == version.id]
    if not own_episodes and not any(key[0] == version.id for key in facts.totals):
        return None
    alerts = [_episode(config, facts, version, entry) for entry in own_episodes]
    entries = [
        msgspec.structs.replace(
            entry,
            decided=_decided_verdict(
                entry.verdict, [alert for alert in alerts if alert.slice_id == entry.slice_id]
            ),
        )
        for entry in _slices(config, facts, version)
    ]
    aggregate = next((entry for entry in entries if entry.predicate == EVERYTHING), None)
    others = tuple(entry for entry in entries if entry.predicate != EVERYTHING)
    return ModelFigures(
        version_id=version.id,
        model=version.model,
        version=version.candidate_version,
        reference_digest=version.reference_digest,
        task=task_of(config, version.model),
        precision=version.precision,
        doubt=version.doubt,
        serving=facts.serving.get((version.model, version.candidate_version), Serving()),
        served_last=version.id in facts.served_last,
        status=_status(entries, alerts),
        n_slices=len(others),
        n_unknown=sum(entry.verdict is Verdict.UNKNOWN for entry in others),
        aggregate=aggregate,
        slices=others,
        speed=speed(
            facts.times.get(version.id),
            [
                times
                for times in facts.items
                if (times.model, times.version) == (version.model, version.candidate_version)
            ],
            config.budget(version.model).latency_p99_s,
            facts.learned_s.get(version.id),
        ),
        divergence_is=facts.divergences.get(version.id, ""),
    )


def _status(entries: Sequence[ReportedSlice], alerts: Sequence[EpisodeFigures]) -> Verdict:
    return worst([*(alert.severity for alert in alerts), *(entry.verdict for entry in entries)])


def _slices(config: Config, facts: PeriodFacts, version: Version) -> list[ReportedSlice]:
    keys = {key for key in (*facts.totals, *facts.verdicts) if key[0] == version.id}
    entries = [_slice(config, facts, version, key) for key in keys if key[1] in facts.slices]
    return sorted(
        entries,
        key=lambda entry: (
            min(RANK[entry.verdict], RANK[Verdict.UNKNOWN]),
            -max(excess(entry.flip, entry.flip_budget), excess(entry.divergence, entry.divergence_budget)),
            entry.name,
        ),
    )


def _is_all(facts: PeriodFacts, key: Key) -> bool:
    return key[1] in facts.slices and facts.slices[key[1]].predicate == EVERYTHING


def _slice(config: Config, facts: PeriodFacts, version: Version, key: Key) -> ReportedSlice:
    sums = facts.totals.get(key, Sums())
    bins = facts.bins.get(key, ())
    accepted = config.budget(version.model)
    fact = facts.verdicts.get(key)
    verdict, reason = (
        (fact.verdict, fact.reason) if fact else (Verdict.UNKNOWN, "the monitor has not folded it yet")
    )
    if not version.reference_digest:
        verdict, reason = Verdict.UNKNOWN, "this version has no reference"
    elif not sums.n_groups and verdict is Verdict.OK:
        verdict, reason = Verdict.UNKNOWN, "nothing was compared in this period"
    name = facts.slices[key[1]]
    budgets, noise, recent = (fact.budgets, fact.noise, fact.recent) if fact else ({}, {}, {})
    named = signal_names()
    n_divergence = sums.n_effective_of(Metric.DIVERGENCE)
    return ReportedSlice(
        slice_id=key[1],
        name=name.name,
        predicate=name.predicate,
        verdict=verdict,
        reason=reason,
        n_items=sums.n_items,
        n_exchanges=sums.n_groups,
        n_effective=sums.n_effective,
        figures=facts.figures_of(version, key[1], config.measure(version.model).unit),
        people=facts.people.get(key),
        flip_budget=budgets.get(Metric.FLIP, accepted.flip),
        divergence_budget=budgets.get(Metric.DIVERGENCE, accepted.divergence),
        n_infinite=sums.n_infinite,
        tail=tuple(quantile(bins, p, n_divergence) for p in QUANTILES),
        shortfall=shortfall(bins, SHORTFALL, n_divergence),
        tokens=facts.tokens[key].quantiles if key in facts.tokens else None,
        tie=sums.tie / sums.tie_weight if sums.tie_weight else None,
        flip_noise=noise.get(Metric.FLIP, 0.0),
        divergence_noise=noise.get(Metric.DIVERGENCE, 0.0),
        page_url=slice_page(config, *key),
        signals={metric: mean for metric, mean in recent.items() if metric in named},
        signal_budgets={metric: budget for metric, budget in budgets.items() if metric in named},
    )


def _episode(config: Config, facts: PeriodFacts, version: Version, entry: EpisodeFacts) -> EpisodeFigures:
    alert, name = entry.alert, facts.slices[entry.alert.slice_id]
    accepted = config.budget(version.model)
    metric, fact = Metric(alert.metric), facts.verdicts.get((version.id, alert.slice_id))
    signal = signal_of(metric)
    default = None if signal.form is SignalForm.SLOW else signal.budget(accepted)
    all_traffic = next(
        (verdict for key, verdict in facts.verdicts.items() if key[0] == version.id and _is_all(facts, key)),
        None,
    )
    event, words = alert.event, alert.words
    figures = [line for line in words.details if line.startswith(DECIDED)]
    return EpisodeFigures(
        alert_id=alert.id,
        page_url=alert_page(config, alert.id),
        findings=tuple(plain(text) for text in entry.findings),
        model=version.model,
        version=version.candidate_version,
        slice_id=alert.slice_id,
        slice=name.name,
        predicate=name.predicate,
        severity=Verdict(alert.severity),
        task=task_of(config, version.model),
        metric=metric,
        headline=words.headline,
        decided="".join(figures).removeprefix(DECIDED).rstrip("."),
        by_budget=event is None or event.evidence.detector == DetectorKind.BUDGET,
        onset_at=alert.onset_at,
        opened_at=alert.opened_at,
        resolved_at=alert.resolved_at,
        ended=alert.ended,
        when_paged=entry.figures.when_paged,
        now=entry.figures.now,
        budget=fact.budgets.get(metric, default) if fact else default,
        aggregate_verdict=all_traffic.verdict if all_traffic else Verdict.UNKNOWN,
        since=words.answer(SINCE),
        explanation=tuple(str(line) for line in words.lines if line.label != SINCE),
        details=tuple(line for line in words.details if line not in figures),
        explained_by=event.explanation.explained_by if event else None,
        explained_by_id=event.explanation.explained_by_id if event else None,
        explains=event.explanation.explains if event else (),
        divergence_is=(event.explanation.divergence_is or "") if event else "",
        examples=tuple(
            ExampleFigures(
                exchange_id=example.exchange_id,
                item=example.item,
                captured_at=example.captured_at,
                flip=example.flip,
                divergence=example.divergence,
                trace_url=trace_link(config.telemetry.trace_url, example.trace),
                detail=example.detail or {},
            )
            for example in entry.examples
        ),
        directions=entry.directions,
        do_now=() if alert.resolved_at is not None else tuple(map(str, words.do_now)),
        tomorrow=(AFTER.get(alert.ended, AFTER["recovered"]),)
        if alert.resolved_at is not None
        else tuple(map(str, words.tomorrow)),
    )


def _decided_verdict(verdict: Verdict, episodes: Sequence[EpisodeFigures]) -> str:
    """Return the figures that decided the verdict of a slice, if it alerts or an alert of it ended in the period."""
    if verdict in ALERTS:
        return next((episode.decided for episode in episodes if episode.resolved_at is None), "")
    ends = [episode.resolved_at for episode in episodes if episode.resolved_at is not None]
    return f"its alert ended {moment(max(ends))}; the figures include the time of the alert" if ends else ""
