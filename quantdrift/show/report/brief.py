"""The first screen: the questions of somebody who decides, with the answers of each model. Pure."""

from collections.abc import Sequence
from datetime import timedelta

from quantdrift.core.notation import moment
from quantdrift.core.records import UNVERIFIED, Verdict
from quantdrift.core.signals import WATCHED, signal_of
from quantdrift.facts.incidents import Incident
from quantdrift.facts.status import ALERTS, RANK, answering, worst
from quantdrift.facts.words import first_screen, labels
from quantdrift.facts.words.first_screen import SliceShare, name_of
from quantdrift.facts.words.incident import headline
from quantdrift.report.figures import (
    Brief,
    BriefLine,
    CoverageFigures,
    EpisodeFigures,
    LabelFigures,
    Mark,
    ModelFigures,
    ReportedSlice,
    VersionComparison,
)
from quantdrift.report.gathering import Gathered


def briefs(
    models: Sequence[ModelFigures], episodes: Sequence[EpisodeFigures], gathered: Gathered
) -> tuple[Brief, ...]:
    """Return one brief for each model, the worst first: that of its worst version of those that serve."""
    model_briefs = []
    for name in dict.fromkeys(model.model for model in models):
        own = sorted(
            (model for model in models if model.model == name),
            key=lambda model: (not model.served_last, -model.version_id),
        )
        current = answering(own, _now, serves=lambda model: model.served_last)
        alerts = [entry for entry in episodes if entry.model == name]
        others = [model for model in own if model is not current and not model.version.endswith(UNVERIFIED)]
        model_briefs.append(
            Brief(
                model=name,
                version=current.version,
                status=_now(current),
                answer=answer(current, alerts),
                incidents=_incidents(
                    [incident for incident in gathered.incidents if incident.model == name], alerts
                ),
                lines=_lines(current, alerts, gathered),
                others=tuple(
                    BriefLine(
                        question=f"{model.version} ({model.serving.words})", answer=_other(model, alerts)
                    )
                    for model in others
                ),
            )
        )
    return tuple(sorted(model_briefs, key=lambda brief: (RANK[brief.status], brief.model)))


def _now(model: ModelFigures) -> Verdict:
    """Return the worst verdict at the end of the period: an alert that ended in it does not count."""
    return worst(entry.verdict for entry in (model.aggregate, *model.slices) if entry is not None)


def _alerting(model: ModelFigures) -> list[ReportedSlice]:
    return [
        entry for entry in (*model.slices, model.aggregate) if entry is not None and entry.verdict in ALERTS
    ]


def answer(model: ModelFigures, alerts: Sequence[EpisodeFigures]) -> str:
    """Return whether a version is good enough, in one sentence, and if not, by the measure that decided; `alerts` are of its model."""
    alerting, whole, title = _alerting(model), model.aggregate, f"{model.model} {model.version}"
    by_slice = {
        entry.slice_id: entry
        for entry in alerts
        if entry.version == model.version and entry.resolved_at is None
    }
    of = [(entry, by_slice.get(entry.slice_id)) for entry in alerting]
    measures = {None if alert is None else (alert.metric, alert.by_budget) for _, alert in of}
    measure = measures.pop() if len(measures) == 1 else None
    # An alert is about the time since its onset, the figures below are of the whole period.
    is_within = measure in {(metric, True) for metric in WATCHED} and all(
        _is_within(entry, alert) for entry, alert in of if alert is not None
    )
    return first_screen.answer(
        _now(model),
        title,
        [name_of(entry.name, entry.predicate) for entry in alerting],
        what=first_screen.wrong(title, measure, part_of_time=is_within),
        n_unknown=model.n_unknown,
        why=whole.reason if whole is not None and whole.verdict is Verdict.UNKNOWN else "",
    )


def _is_within(entry: ReportedSlice, alert: EpisodeFigures) -> bool:
    """Return whether what is shown of the whole period is within the budget that was left."""
    shown, budget, noise = (
        (entry.flip, entry.flip_budget, entry.flip_noise)
        if signal_of(alert.metric).is_share
        else (entry.divergence, entry.divergence_budget, entry.divergence_noise)
    )
    return shown is not None and budget is not None and shown.mean <= budget + noise


def _share(entry: ReportedSlice) -> SliceShare:
    return SliceShare(
        where=name_of(entry.name, entry.predicate),
        share=entry.flip,
        n_answers=entry.n_items,
        budget=entry.flip_budget,
        changed=entry.figures.changed,
        n_people=round(entry.people.value) if entry.people else 0,
        traffic=None if entry.predicate == "true" else entry.figures.share,
    )


def _lines(
    model: ModelFigures, episodes: Sequence[EpisodeFigures], gathered: Gathered
) -> tuple[BriefLine, ...]:
    marks = [mark for mark in gathered.marks if mark.model in {"", model.model}]
    comparisons = [figures for figures in gathered.comparisons if figures.model == model.model]
    key = model.model, model.version
    labels = next((figures for figures in gathered.labels if (figures.model, figures.version) == key), None)
    bad, whole = list(map(_share, _alerting(model))), model.aggregate
    entries = [entry for entry in (whole, *model.slices) if entry is not None]
    is_listed = whole is None or whole.verdict in ALERTS
    steps = [
        (entry.model, entry.slice, entry.do_now[0])
        for entry in episodes
        if entry.version == model.version and entry.resolved_at is None and entry.do_now and not entry.folded
    ]
    lines = [
        (
            "How many answers",
            first_screen.affected(bad if is_listed or whole is None else [*bad, _share(whole)]),
        ),
        (
            "Confidence",
            first_screen.confidence(
                bad[0] if bad else None if whole is None else _share(whole), alerts=bool(bad)
            ),
        ),
        ("People", first_screen.people(max((share.n_people for share in map(_share, entries)), default=0))),
        ("What changed", _changed(marks, comparisons)),
        ("Not known", _not_known(model, labels, gathered.coverage)),
        ("What to do", first_screen.owners(steps, n_unknown=model.n_unknown)),
    ]
    if labels is not None:
        lines.insert(3, ("Was accuracy lost", labels.sentence))
    if costs := [cost for cost in gathered.costs if cost.of.model == model.model]:
        lines.append(("Cost", first_screen.costs(costs)))
    if model.doubt:
        lines.insert(0, ("Careful", f"The figures may mislead: {model.doubt}."))
    return tuple(BriefLine(question=question, answer=answer) for question, answer in lines)


def _incidents(incidents: Sequence[Incident], episodes: Sequence[EpisodeFigures]) -> tuple[str, ...]:
    """Return one line for each incident, and for each alert that no incident has and no alert explains."""
    texts = [headline(incident) for incident in incidents]
    covered = {alert for incident in incidents for alert in incident.alerts}
    alone = [entry for entry in episodes if entry.alert_id not in covered and not entry.folded]
    return (*texts, *map(_alert_line, alone))


def _alert_line(episode: EpisodeFigures) -> str:
    text = first_screen.alert_line(
        version=episode.version,
        where=name_of(episode.slice, episode.predicate),
        metric=episode.metric,
        begin=episode.onset_at,
        end=episode.resolved_at,
        ended=episode.ended,
        share=episode.share,
    )
    return " ".join([text, *(finding for finding in episode.findings if finding.startswith("Repair: "))][:2])


def _not_known(model: ModelFigures, found: LabelFigures | None, coverage: CoverageFigures) -> str:
    whole, n_lost = model.aggregate, sum(loss.n for loss in coverage.losses)
    is_changed = whole is not None and whole.flip is not None and whole.flip.mean > 0
    return first_screen.not_known(
        model.version,
        n_unknown=model.n_unknown,
        unlabelled=labels.not_labelled(model.version) if found is None and is_changed else "",
        n_gaps=len(coverage.gaps),
        gaps=sum((gap.end - gap.begin for gap in coverage.gaps), timedelta()),
        n_lost=n_lost,
        lost=n_lost / max(coverage.taken, 1),
    )


def _changed(marks: Sequence[Mark], comparisons: Sequence[VersionComparison]) -> str:
    # The newest first, releases before the rest: processes report each new configuration, which seldom explains a drift.
    marks = sorted(marks, key=lambda mark: mark.kind == "release")[::-1]
    texts = [f"{mark.what} ({moment(mark.at)}{f', {mark.who}' if mark.who else ''})" for mark in marks]
    newest = f" {comparisons[-1].sentence}" if comparisons else ""
    text = (
        first_screen.sentence(first_screen.some(texts, "change"))
        if texts
        else "No release and no decision is known."
    )
    return text + newest


def _other(model: ModelFigures, episodes: Sequence[EpisodeFigures]) -> str:
    if model.served_last:
        return answer(model, episodes)
    bad = [
        name_of(entry.slice, entry.predicate)
        for entry in episodes
        if entry.version == model.version and not entry.folded
    ]
    share = None if model.aggregate is None else model.aggregate.flip
    return first_screen.other(share, list(dict.fromkeys(bad)))
