"""The figures of each slice, episode and version, from the facts that were read. Pure."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from statistics import median

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.links import alert_page, slice_page, trace_link
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.slices import EVERYTHING
from quantdrift.core.tasks import Task
from quantdrift.core.text import plain
from quantdrift.facts.estimate import Estimate
from quantdrift.facts.explanation import FEWEST_BEFORE, Kind
from quantdrift.facts.interval import (
    HIGHEST,
    LOWEST,
    N_BINS,
    excess,
    quantile,
    shortfall,
)
from quantdrift.facts.status import ALERTS, RANK, worst
from quantdrift.facts.words.details import DECIDED
from quantdrift.facts.words.ending import AFTER
from quantdrift.facts.words.text import AlertText, Step
from quantdrift.report.figures import (
    EpisodeFigures,
    ExampleFigures,
    Gap,
    ModelFigures,
    SliceFigures,
    SpreadRow,
)
from quantdrift.report.wording import headline, moment, speed_sentence
from quantdrift.storage.page.history import Times
from quantdrift.storage.page.now import Saved
from quantdrift.storage.report.facts import (
    Direction,
    Episode,
    Example,
    SliceBins,
    SliceName,
    SliceSums,
    Sums,
    VerdictFact,
    Version,
)

QUANTILES = (0.5, 0.95, 0.99, 0.999)
SHORTFALL = 0.99  # the mean of the divergence above this quantile is shown

EDGES = (0.001, 0.01, 0.1, 1.0)
"""Between the ranges of the divergence that are shown before and after an onset."""

_USUAL_GROUPS = 20  # with fewer exchanges per bucket, an empty bucket is chance and not a gap
Key = tuple[int, int]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Sums and divergence histogram of one slice over one window."""

    sums: Sums
    bins: tuple[float, ...]


class EpisodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An episode with the sums before and after its onset; None: nothing was compared."""

    episode: Episode
    before: Measured | None
    after: Measured | None
    all_before: Measured | None
    all_after: Measured | None
    examples: tuple[Example, ...]
    directions: tuple[Direction, ...] = ()


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts read from the database about the slices of all versions.

    Parameters
    ----------
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
    days
        Per version the days of the period in which it was compared.
    times, learned_s, saved
        Per version how long its answers took at the end of the period, and what 99 % did not exceed when that was learned; and
        what an item cost with reference and candidate.
    people
        Sessions or people with a changed answer on the last day of data, among the sampled requests.
    """

    versions: tuple[Version, ...]
    slices: Mapping[int, SliceName]
    totals: Mapping[Key, Sums]
    bins: Mapping[Key, tuple[float, ...]]
    verdicts: Mapping[Key, VerdictFact]
    episodes: tuple[EpisodeFacts, ...]
    days: Mapping[int, float] = {}
    times: Mapping[int, Times] = {}
    learned_s: Mapping[int, float] = {}
    saved: tuple[Saved, ...] = ()
    people: Mapping[Key, int] = {}


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


def models(config: Config, facts: Facts) -> tuple[ModelFigures, ...]:
    """Return every version that was compared or alerted in the period, worst first."""
    figures = [_model(config, facts, version) for version in facts.versions]
    return tuple(
        sorted(
            (model for model in figures if model is not None),
            key=lambda model: (RANK[model.status], model.model, -model.version_id),
        )
    )


def episodes(config: Config, facts: Facts) -> tuple[EpisodeFigures, ...]:
    """Return the alerts, pages first, with figures and next steps; each is followed by the alerts it explains."""
    versions = {version.id: version for version in facts.versions}
    return grouped(
        [_episode(config, facts, versions[entry.episode.version_id], entry) for entry in facts.episodes]
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


def ranked(config: Config, facts: Facts, version: Version) -> list[int]:
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


def _model(config: Config, facts: Facts, version: Version) -> ModelFigures | None:
    own_episodes = [entry for entry in facts.episodes if entry.episode.version_id == version.id]
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
        status=_status(entries, alerts),
        headline=headline(
            f"{version.model} {version.candidate_version}",
            others,
            aggregate if aggregate and aggregate.n_exchanges else None,
            alerts,
        ),
        n_slices=len(others),
        n_unknown=sum(entry.verdict is Verdict.UNKNOWN for entry in others),
        aggregate=aggregate,
        slices=others,
        speed=speed_sentence(
            facts.times.get(version.id),
            [
                one
                for one in facts.saved
                if (one.model, one.version) == (version.model, version.candidate_version)
            ],
            config.budget(version.model).latency_p99_s,
            facts.learned_s.get(version.id),
        ),
    )


def _status(entries: Sequence[SliceFigures], alerts: Sequence[EpisodeFigures]) -> Verdict:
    return worst([*(alert.severity for alert in alerts), *(entry.verdict for entry in entries)])


def _slices(config: Config, facts: Facts, version: Version) -> list[SliceFigures]:
    keys = {key for key in (*facts.totals, *facts.verdicts) if key[0] == version.id}
    everything = next(
        (sums for key, sums in facts.totals.items() if key[0] == version.id and _is_all(facts, key)), Sums()
    )
    entries = [_slice(config, facts, version, key, everything) for key in keys if key[1] in facts.slices]
    return sorted(
        entries,
        key=lambda entry: (
            min(RANK[entry.verdict], RANK[Verdict.UNKNOWN]),
            -max(excess(entry.flip, entry.flip_budget), excess(entry.divergence, entry.divergence_budget)),
            entry.name,
        ),
    )


def _is_all(facts: Facts, key: Key) -> bool:
    return key[1] in facts.slices and facts.slices[key[1]].predicate == EVERYTHING


def _slice(config: Config, facts: Facts, version: Version, key: Key, everything: Sums) -> SliceFigures:
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
    budgets, noise = (fact.budgets, fact.noise) if fact else ({}, {})
    n_divergence = sums.n_effective_of(Metric.DIVERGENCE)
    return SliceFigures(
        slice_id=key[1],
        name=name.name,
        predicate=name.predicate,
        verdict=verdict,
        reason=reason,
        n_items=sums.n_items,
        n_exchanges=sums.n_groups,
        n_effective=sums.n_effective,
        traffic_share=min(sums.weight / everything.weight, 1.0) if everything.weight else None,
        flip=sums.estimate(Metric.FLIP, accepted.cap, bins),
        divergence=sums.estimate(Metric.DIVERGENCE, accepted.cap, bins),
        js=sums.estimate(Metric.JS, accepted.cap, bins),
        flip_budget=budgets.get(Metric.FLIP, accepted.flip),
        divergence_budget=budgets.get(Metric.DIVERGENCE, accepted.divergence),
        n_infinite=sums.n_infinite,
        tail=tuple(quantile(bins, p, n_divergence) for p in QUANTILES),
        shortfall=shortfall(bins, SHORTFALL, n_divergence),
        tie=sums.tie / sums.tie_weight if sums.tie_weight else None,
        per_day=sums.weight / days if (days := facts.days.get(version.id)) else None,
        n_people=facts.people.get(key, 0),
        flip_noise=noise.get(Metric.FLIP, 0.0),
        divergence_noise=noise.get(Metric.DIVERGENCE, 0.0),
        page_url=slice_page(config, *key),
    )


def _episode(config: Config, facts: Facts, version: Version, entry: EpisodeFacts) -> EpisodeFigures:
    episode, name = entry.episode, facts.slices[entry.episode.slice_id]
    accepted = config.budget(version.model)
    fact = facts.verdicts.get((version.id, episode.slice_id))
    default = {Metric.FLIP: accepted.flip, Metric.DIVERGENCE: accepted.divergence}.get(episode.metric)
    budget = fact.budgets.get(episode.metric, default) if fact else default

    def estimate(measured: Measured | None, metric: Metric = episode.metric) -> Estimate | None:
        if measured is None or metric not in {Metric.FLIP, Metric.JS, Metric.DIVERGENCE}:
            return None
        return measured.sums.estimate(metric, accepted.cap, measured.bins)

    all_traffic = next(
        (verdict for key, verdict in facts.verdicts.items() if key[0] == version.id and _is_all(facts, key)),
        None,
    )
    n_before = entry.before.sums.n_groups if entry.before else 0
    enough = n_before >= FEWEST_BEFORE  # the mean of fewer is too uncertain to compare with
    before, after = estimate(entry.before) if enough else None, estimate(entry.after)
    if episode.metric is Metric.LATENCY and episode.event is not None:
        # The sums have no times: these are the shares that decided.
        shares = episode.event.evidence.before, episode.event.evidence.after
        before, after = (
            None if share is None else Estimate(mean=share, low=None, high=None) for share in shares
        )
    flip_after = estimate(entry.after, Metric.FLIP)
    share_before = _share(entry.before, entry.all_before)
    share_after = _share(entry.after, entry.all_after)
    aggregate = estimate(entry.all_after)
    aggregate_verdict = all_traffic.verdict if all_traffic else Verdict.UNKNOWN
    aggregate_accepted = _accepted(all_traffic, episode.metric, default)
    event = episode.event
    words = episode.words or AlertText(headline="", do_now=(Step(text="Look at its examples."),))
    figures = [line for line in words.details if line.startswith(DECIDED)]
    return EpisodeFigures(
        alert_id=episode.id,
        page_url=alert_page(config, episode.id),
        findings=tuple(plain(one) for one in episode.findings),
        model=version.model,
        version=version.candidate_version,
        slice_id=episode.slice_id,
        slice=name.name,
        predicate=name.predicate,
        severity=episode.severity,
        task=task_of(config, version.model),
        metric=episode.metric,
        headline=words.headline,
        decided="".join(figures).removeprefix(DECIDED).rstrip("."),
        by_budget=event is None or event.evidence.detector == Kind.BUDGET,
        onset_at=episode.onset_at,
        opened_at=episode.opened_at,
        resolved_at=episode.resolved_at,
        ended=episode.ended,
        before=before,
        after=after,
        n_before=n_before,
        n_after=entry.after.sums.n_groups if entry.after else 0,
        flip_after=flip_after,
        budget=budget,
        share_before=share_before if enough else None,
        share_after=share_after,
        aggregate=aggregate,
        aggregate_verdict=aggregate_verdict,
        aggregate_accepted=aggregate_accepted,
        explanation=(*map(str, words.lines), *(line for line in words.details if line not in figures)),
        explained_by=event.explanation.explained_by if event else None,
        explained_by_id=event.explanation.explained_by_id if event else None,
        explains=event.explanation.explains if event else (),
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
        spread=_spread(entry.before if enough else None, entry.after),
        advice=(AFTER.get(episode.ended, AFTER["recovered"]),)
        if episode.resolved_at is not None
        else tuple(map(str, (*words.do_now, *words.tomorrow))),
    )


def _spread(before: Measured | None, after: Measured | None) -> tuple[SpreadRow, ...]:
    """Return how the divergence is spread before and after, in ranges of a factor of ten; empty without a histogram."""
    if after is None or sum(after.bins) <= 0:
        return ()

    def shares(measured: Measured | None) -> list[float] | None:
        if measured is None or sum(measured.bins) <= 0:
            return None
        found = [0.0] * (len(EDGES) + 1)
        for index, weight in enumerate(measured.bins):
            middle = LOWEST * (HIGHEST / LOWEST) ** ((index + 0.5) / N_BINS)
            found[bisect_left(EDGES, middle)] += weight / sum(measured.bins)
        return found

    old, new = shares(before), shares(after) or []
    return tuple(
        SpreadRow(
            low=EDGES[index - 1] if index else None,
            high=EDGES[index] if index < len(EDGES) else None,
            before=old[index] if old else None,
            after=value,
        )
        for index, value in enumerate(new)
    )


def _accepted(fact: VerdictFact | None, metric: Metric, default: float | None) -> float | None:
    """Return the accepted mean of a metric, noise allowance included."""
    budget = fact.budgets.get(metric, default) if fact else default
    return None if budget is None else budget + (fact.noise.get(metric, 0.0) if fact else 0.0)


def _decided_verdict(verdict: Verdict, episodes: Sequence[EpisodeFigures]) -> str:
    """Return the figures that decided the verdict of a slice, if it alerts or an alert of it ended in the period."""
    if verdict in ALERTS:
        return next((episode.decided for episode in episodes if episode.resolved_at is None), "")
    ends = [episode.resolved_at for episode in episodes if episode.resolved_at is not None]
    return f"its alert ended {moment(max(ends))}; the figures include the time of the alert" if ends else ""


def _share(part: Measured | None, all_traffic: Measured | None) -> float | None:
    if part is None or all_traffic is None or not all_traffic.sums.weight:
        return None
    return min(part.sums.weight / all_traffic.sums.weight, 1.0)
