"""From facts to figures: what is said of each slice, episode and version. Pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from math import log
from statistics import median

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.notation import number
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.slices import EVERYTHING
from quantdrift.core.tasks import Task
from quantdrift.drift.explain.diagnosis import Decided, Kind
from quantdrift.drift.explain.diagnosis_text import decided
from quantdrift.drift.explain.mix import FEWEST_BEFORE
from quantdrift.report.advice import advise, trace_link
from quantdrift.report.figures import EpisodeFigures, ExampleFigures, Gap, ModelFigures, SliceFigures
from quantdrift.report.interval import Estimate, excess, mean_of_bins, quantile, share, shortfall
from quantdrift.report.wording import headline, moment
from quantdrift.storage.report.facts import (
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
SHORTFALL = 0.99  # the mean of what lies above it is told

_RANK = {Verdict.FIRING: 0, Verdict.WARNING: 1}
_USUAL_GROUPS = 20  # below so many exchanges per bucket an empty one is chance, no gap
Key = tuple[int, int]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of one slice over one window, with the divergence histogram of the same."""

    sums: Sums
    bins: tuple[float, ...]


class EpisodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An episode with what was summed before and after its onset; None: nothing was compared."""

    episode: Episode
    before: Measured | None
    after: Measured | None
    all_before: Measured | None
    all_after: Measured | None
    examples: tuple[Example, ...]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of the record for the slices of all versions.

    Parameters
    ----------
    versions, slices
        Every one that may be named.
    totals
        Sums over the whole period.
    bins
        divergence histograms over the whole period, of the slices that are shown.
    verdicts
        At the end of the period.
    episodes
        Open at some time of it, pages first.
    """

    versions: tuple[Version, ...]
    slices: Mapping[int, SliceName]
    totals: Mapping[Key, Sums]
    bins: Mapping[Key, tuple[float, ...]]
    verdicts: Mapping[Key, VerdictFact]
    episodes: tuple[EpisodeFacts, ...]


def task_of(config: Config, model: str) -> Task:
    """Return what a model gives; classes where the configuration does not name it any more."""
    found = config.model(model)
    return found.task if found else Task.CLASSIFICATION


def by_key(entries: Sequence[SliceSums]) -> dict[Key, Sums]:
    """Return sums over a whole window by version and slice."""
    return {(entry.version_id, entry.slice_id): entry.sums for entry in entries}


def bins_by_key(entries: Sequence[SliceBins]) -> dict[Key, tuple[float, ...]]:
    """Return histograms by version and slice."""
    return {(entry.version_id, entry.slice_id): entry.bins for entry in entries}


def models(config: Config, facts: Facts) -> tuple[ModelFigures, ...]:
    """Return every version that was compared or alerted in the period, worst first."""
    found = [_model(config, facts, version) for version in facts.versions]
    order = [Verdict.FIRING, Verdict.WARNING, Verdict.UNKNOWN, Verdict.OK]
    return tuple(
        sorted(
            (model for model in found if model is not None),
            key=lambda model: (order.index(model.status), model.model, -model.version_id),
        )
    )


def episodes(config: Config, facts: Facts) -> tuple[EpisodeFigures, ...]:
    """Return the alerts, pages first, with what moved and what to do; each is followed by those it explains."""
    versions = {version.id: version for version in facts.versions}
    told = [_episode(config, facts, versions[entry.episode.version_id], entry) for entry in facts.episodes]
    return folded(told)


def folded(told: Sequence[EpisodeFigures]) -> tuple[EpisodeFigures, ...]:
    """Return alerts in their order, but those that another one of the same version explains behind that one."""
    at = {(one.model, one.version, one.slice_id): one.alert_id for one in reversed(told)}
    under = {
        one.alert_id: at.get((one.model, one.version, one.explained_by_id))
        for one in told
        if one.explained_by_id is not None
    }
    found: dict[int, EpisodeFigures] = {}

    def put(one: EpisodeFigures, *, below: bool) -> None:
        if one.alert_id in found:
            return
        found[one.alert_id] = msgspec.structs.replace(one, folded=below)
        for other in told:
            if under.get(other.alert_id) == one.alert_id:
                put(other, below=True)

    for one in told:
        if under.get(one.alert_id) is None:
            put(one, below=False)
    for one in told:
        put(one, below=False)
    return tuple(found.values())


def ranked(config: Config, facts: Facts, version: Version) -> list[int]:
    """Return the slices of a version beside the aggregate, worst first: firing, warning, then by excess."""
    return [entry.slice_id for entry in _slices(config, facts, version) if entry.predicate != EVERYTHING]


def gaps(points: Sequence[SliceSums], begin: datetime, end: datetime, width: timedelta) -> tuple[Gap, ...]:
    """Return stretches of whole buckets without a comparison, where so few as none is no chance.

    Parameters
    ----------
    points
        Buckets of the aggregates of all versions, empty ones left out.
    begin, end
        Where to look: from the first capture to the end of the period.
    width
        Of a bucket.
    """
    groups: dict[datetime, int] = {}
    for point in points:
        groups[point.at] = groups.get(point.at, 0) + point.sums.n_groups
    if not groups or median(groups.values()) < _USUAL_GROUPS:
        return ()
    found, known = [], begin
    for at in [*sorted(groups), end]:
        if at - known >= width:
            found.append(Gap(begin=known, end=at))
        known = max(known, at + width)
    return tuple(found)


def _model(config: Config, facts: Facts, version: Version) -> ModelFigures | None:
    mine = [entry for entry in facts.episodes if entry.episode.version_id == version.id]
    if not mine and not any(key[0] == version.id for key in facts.totals):
        return None
    alerts = [_episode(config, facts, version, entry) for entry in mine]
    entries = [
        msgspec.structs.replace(
            entry,
            decided=_beside_verdict(entry.verdict, [one for one in alerts if one.slice_id == entry.slice_id]),
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
    )


def _status(entries: Sequence[SliceFigures], alerts: Sequence[EpisodeFigures]) -> Verdict:
    said = {alert.severity for alert in alerts} | {entry.verdict for entry in entries}
    for verdict in (Verdict.FIRING, Verdict.WARNING):
        if verdict in said:
            return verdict
    return Verdict.OK if entries and Verdict.UNKNOWN not in said else Verdict.UNKNOWN


def _slices(config: Config, facts: Facts, version: Version) -> list[SliceFigures]:
    keys = {key for key in (*facts.totals, *facts.verdicts) if key[0] == version.id}
    everything = next(
        (sums for key, sums in facts.totals.items() if key[0] == version.id and _is_all(facts, key)), Sums()
    )
    entries = [_slice(config, facts, version, key, everything) for key in keys if key[1] in facts.slices]
    return sorted(
        entries,
        key=lambda entry: (
            _RANK.get(entry.verdict, 2),
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
    said = facts.verdicts.get(key)
    verdict, reason = (
        (said.verdict, said.reason) if said else (Verdict.UNKNOWN, "not judged by the monitor yet")
    )
    if not version.reference_digest:
        verdict, reason = Verdict.UNKNOWN, "this version has no reference"
    elif not sums.n_groups and verdict is Verdict.OK:
        verdict, reason = Verdict.UNKNOWN, "nothing was compared in this period"
    name = facts.slices[key[1]]
    budgets, noise = (said.budgets, said.noise) if said else ({}, {})
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
        flip=_estimate(Metric.FLIP, sums, bins, accepted.cap),
        divergence=_estimate(Metric.DIVERGENCE, sums, bins, accepted.cap),
        js=_estimate(Metric.JS, sums, bins, accepted.cap),
        flip_budget=budgets.get(Metric.FLIP, accepted.flip),
        divergence_budget=budgets.get(Metric.DIVERGENCE, accepted.divergence),
        n_infinite=sums.n_infinite,
        tail=tuple(quantile(bins, p, n_divergence) for p in QUANTILES),
        shortfall=shortfall(bins, SHORTFALL, n_divergence),
        flip_noise=noise.get(Metric.FLIP, 0.0),
        divergence_noise=noise.get(Metric.DIVERGENCE, 0.0),
    )


def _episode(config: Config, facts: Facts, version: Version, entry: EpisodeFacts) -> EpisodeFigures:
    episode, name = entry.episode, facts.slices[entry.episode.slice_id]
    accepted = config.budget(version.model)
    said = facts.verdicts.get((version.id, episode.slice_id))
    default = {Metric.FLIP: accepted.flip, Metric.DIVERGENCE: accepted.divergence}.get(episode.metric)
    budget = said.budgets.get(episode.metric, default) if said else default
    noise = said.noise.get(episode.metric, 0.0) if said else 0.0

    def estimate(measured: Measured | None, metric: Metric = episode.metric) -> Estimate | None:
        if measured is None or metric not in {Metric.FLIP, Metric.JS, Metric.DIVERGENCE}:
            return None
        return _estimate(metric, measured.sums, measured.bins, accepted.cap)

    whole = next(
        (fact for key, fact in facts.verdicts.items() if key[0] == version.id and _is_all(facts, key)), None
    )
    n_before = entry.before.sums.n_groups if entry.before else 0
    enough = n_before >= FEWEST_BEFORE  # fewer are no mean to compare with
    before, after = estimate(entry.before) if enough else None, estimate(entry.after)
    flip_after = estimate(entry.after, Metric.FLIP)
    share_before = _share(entry.before, entry.all_before)
    share_after = _share(entry.after, entry.all_after)
    return EpisodeFigures(
        alert_id=episode.id,
        model=version.model,
        version=version.candidate_version,
        slice_id=episode.slice_id,
        slice=name.name,
        predicate=name.predicate,
        severity=episode.severity,
        task=task_of(config, version.model),
        metric=episode.metric,
        decided=_decided(episode, task_of(config, version.model), budget),
        by_budget=episode.deciding.detector == Kind.BUDGET,
        onset_at=episode.onset_at,
        opened_at=episode.opened_at,
        resolved_at=episode.resolved_at,
        before=before,
        after=after,
        n_before=n_before,
        n_after=entry.after.sums.n_groups if entry.after else 0,
        flip_after=flip_after,
        budget=budget,
        share_before=share_before if enough else None,
        share_after=share_after,
        aggregate=estimate(entry.all_after),
        aggregate_verdict=whole.verdict if whole else Verdict.UNKNOWN,
        aggregate_accepted=_accepted(whole, episode.metric, default),
        explanation=episode.explanation.explanation,
        explained_by=episode.explanation.explained_by,
        explained_by_id=episode.explanation.explained_by_id,
        explains=episode.explanation.explains,
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
        advice=advise(
            episode,
            name,
            version,
            before=before,
            n_before=n_before,
            budget=None if budget is None else budget + noise,
            flips=flip_after,
            flip_budget=_accepted(said, Metric.FLIP, accepted.flip),
            share_before=share_before,
            share_after=share_after,
        ),
    )


def _accepted(said: VerdictFact | None, metric: Metric, default: float | None) -> float | None:
    """Return what is accepted of a metric, noise included."""
    budget = said.budgets.get(metric, default) if said else default
    return None if budget is None else budget + (said.noise.get(metric, 0.0) if said else 0.0)


def _decided(episode: Episode, task: Task, budget: float | None) -> str:
    """Return what decided an alert, in figures from its onset until it decided."""
    told = episode.deciding
    found = Decided(
        task=task,
        metric=episode.metric,
        kind=told.detector,
        after=told.after,
        n_after=told.n_since_onset or 0,
        before=told.before if told.n_history is not None else None,
        budget=budget if told.budget is None else told.budget,
        noise=told.noise,
        tail_level=told.tail_level,
        tail_before=told.tail_before,
        tail_after=told.tail_after,
    )
    if told.n_since_onset is None or not (text := decided(found, "the onset")):
        return ""
    evidence = (
        ""
        if told.evidence is None or told.threshold is None
        else f"; evidence {number(told.evidence)}, {number(told.threshold)} needed"
    )
    return f"{text}{evidence}"


def _beside_verdict(verdict: Verdict, episodes: Sequence[EpisodeFigures]) -> str:
    """Return what decided the verdict of a slice, where that is an alert or the end of one in the period."""
    if verdict in _RANK:
        return next((one.decided for one in episodes if one.resolved_at is None), "")
    ends = [one.resolved_at for one in episodes if one.resolved_at is not None]
    return f"its alert ended {moment(max(ends))}; the figures hold the time of the alert too" if ends else ""


def _estimate(metric: Metric, sums: Sums, bins: Sequence[float], cap: float) -> Estimate | None:
    mean, n = sums.mean(metric), sums.n_effective_of(metric)
    if metric is Metric.DIVERGENCE:
        return mean_of_bins(mean, bins, n, cap)
    return share(mean, n, top=1.0 if metric is Metric.FLIP else log(2))


def _share(part: Measured | None, whole: Measured | None) -> float | None:
    if part is None or whole is None or not whole.sums.weight:
        return None
    return min(part.sums.weight / whole.sums.weight, 1.0)
