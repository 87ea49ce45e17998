"""The first screen: the questions of somebody who decides, answered in words for each model. Pure."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from quantdrift.core.notation import count_of, estimated, percent
from quantdrift.core.records import UNVERIFIED, Metric, Verdict
from quantdrift.facts.figures import FigureName
from quantdrift.facts.incidents import Incident, headline
from quantdrift.facts.status import ALERTS, RANK, worst
from quantdrift.report.figures import (
    Brief,
    BriefLine,
    CoverageFigures,
    EpisodeFigures,
    LabelFigures,
    Mark,
    ModelFigures,
    SliceFigures,
    VersionComparison,
)
from quantdrift.report.wording import compared_sentence, duration, ended, labels_sentence, moment

_MOST = 3  # slices, changes or steps that a line names
_ANSWERS = {
    Verdict.OK: "Yes: {title} is good enough. It is within its budget in every slice.",
    Verdict.WARNING: "Perhaps not everywhere: {where} {title} shows first signs of drift.",
    Verdict.FIRING: "No, not everywhere: {where} {what}.",
    Verdict.UNKNOWN: "Not known: too little of {title} was compared to say that it is good enough everywhere.",
}


# What an alert says, by the measure that decided and whether a budget did, or a learned baseline.
_DECIDED = {
    (Metric.FLIP, True): "more answers of {title} changed than the budget allows",
    (Metric.FLIP, False): "more answers of {title} changed than before",
    (
        Metric.DIVERGENCE,
        True,
    ): "outputs of {title} are further from the FP32 model's than the budget allows",
    (
        Metric.DIVERGENCE,
        False,
    ): "the worst outputs of {title} are further from the FP32 model's than before",
    (Metric.LATENCY, True): "more requests to {title} take longer than the budget allows",
    (Metric.LATENCY, False): "more requests to {title} take longer than before",
}
_SEVERAL = "{title} has drifted"


def briefs(
    models: Sequence[ModelFigures],
    episodes: Sequence[EpisodeFigures],
    serving: Mapping[str, int],
    marks: Sequence[Mark],
    comparisons: Sequence[VersionComparison],
    *,
    coverage: CoverageFigures,
    incidents: Sequence[Incident] = (),
    labels: Sequence[LabelFigures] = (),
) -> tuple[Brief, ...]:
    """Return one brief for each model, the worst first; the version with the newest comparison serves now."""
    found = []
    for name in dict.fromkeys(model.model for model in models):
        own = [model for model in models if model.model == name]
        current = next((model for model in own if model.version_id == serving.get(name)), None) or max(
            own, key=lambda model: model.version_id
        )
        open_alerts = [
            entry
            for entry in episodes
            if (entry.model, entry.version) == (name, current.version) and entry.resolved_at is None
        ]
        replaced = [model for model in own if model is not current and not model.version.endswith(UNVERIFIED)]
        found.append(
            Brief(
                model=name,
                version=current.version,
                status=_now(current),
                answer=answer(current, open_alerts),
                incidents=_incidents(
                    [one for one in incidents if one.model == name],
                    [entry for entry in episodes if entry.model == name],
                ),
                lines=_lines(
                    current,
                    [entry for entry in episodes if entry.model == name],
                    [mark for mark in marks if mark.model in {"", name}],
                    [one for one in comparisons if one.model == name],
                    labels=next(
                        (one for one in labels if (one.model, one.version) == (name, current.version)), None
                    ),
                    coverage=coverage,
                ),
                replaced=tuple(
                    BriefLine(
                        question=model.version,
                        answer=_replaced(
                            model,
                            [
                                entry
                                for entry in episodes
                                if (entry.model, entry.version) == (name, model.version)
                            ],
                        ),
                    )
                    for model in replaced
                ),
            )
        )
    return tuple(sorted(found, key=lambda brief: (RANK[brief.status], brief.model)))


def _now(model: ModelFigures) -> Verdict:
    """Return the worst verdict at the end of the period: an alert that ended in it does not count."""
    return worst(entry.verdict for entry in (model.aggregate, *model.slices) if entry is not None)


def _alerting(model: ModelFigures) -> list[SliceFigures]:
    return [
        entry for entry in (*model.slices, model.aggregate) if entry is not None and entry.verdict in ALERTS
    ]


def answer(model: ModelFigures, open_alerts: Sequence[EpisodeFigures]) -> str:
    """Return whether a version is good enough, in one sentence, and if not, by the measure that decided."""
    alerting = _alerting(model)
    title = f"{model.model} {model.version}"
    where = f"in {_name(alerting[0])}" if len(alerting) == 1 else f"in {len(alerting)} slices"
    return _ANSWERS[_now(model)].format(title=title, where=where, what=_decided(alerting, open_alerts, title))


def _decided(alerting: Sequence[SliceFigures], open_alerts: Sequence[EpisodeFigures], title: str) -> str:
    """Return what is wrong; of slices that alert for different reasons only that they do."""
    by_slice = {entry.slice_id: entry for entry in open_alerts}
    of = [(entry, by_slice.get(entry.slice_id)) for entry in alerting]
    measures = {None if alert is None else (alert.metric, alert.by_budget) for _, alert in of}
    measure = measures.pop() if len(measures) == 1 else None
    text = _DECIDED.get(measure, _SEVERAL).format(title=title) if measure else _SEVERAL.format(title=title)
    # An alert is about the time since its onset, the figures below are of the whole period.
    is_within = measure in {(Metric.FLIP, True), (Metric.DIVERGENCE, True)} and all(
        _is_within(entry, alert) for entry, alert in of if alert is not None
    )
    return f"for a part of the time {text}" if is_within else text


def _is_within(entry: SliceFigures, alert: EpisodeFigures) -> bool:
    """Return whether what is shown of the whole period is within the budget that was left."""
    shown, budget, noise = (
        (entry.flip, entry.flip_budget, entry.flip_noise)
        if alert.metric is Metric.FLIP
        else (entry.divergence, entry.divergence_budget, entry.divergence_noise)
    )
    return shown is not None and budget is not None and shown.mean <= budget + noise


def _name(entry: SliceFigures) -> str:
    return "all traffic" if entry.predicate == "true" else entry.name


def _listed(texts: Sequence[str], noun: str) -> str:
    more = f"; {count_of(len(texts) - _MOST, f'more {noun}')}" if len(texts) > _MOST else ""
    return "; ".join(texts[:_MOST]) + more


def _lines(
    model: ModelFigures,
    episodes: Sequence[EpisodeFigures],
    marks: Sequence[Mark],
    comparisons: Sequence[VersionComparison],
    *,
    labels: LabelFigures | None,
    coverage: CoverageFigures,
) -> tuple[BriefLine, ...]:
    bad = _alerting(model)
    open_now = [
        episode for episode in episodes if episode.version == model.version and episode.resolved_at is None
    ]
    lines = [
        ("How many answers", _how_many(model, bad)),
        ("Confidence", _confidence(model, bad)),
        ("People", _people(model)),
        ("What changed", _changed(marks, comparisons)),
        ("Not known", _not_known(model, labels, coverage)),
        ("What to do", _who(model, open_now)),
    ]
    if labels is not None:
        lines.insert(3, ("Was accuracy lost", labels_sentence(labels)))
    if model.doubt:
        lines.insert(0, ("Careful", f"The figures may mislead: {model.doubt}."))
    return tuple(BriefLine(question=question, answer=answer) for question, answer in lines)


def _incidents(incidents: Sequence[Incident], episodes: Sequence[EpisodeFigures]) -> tuple[str, ...]:
    """Return one line for each incident, and for each alert that no incident has and no alert explains."""
    texts = [headline(one) for one in incidents]
    covered = {alert for one in incidents for alert in one.alerts}
    alone = [entry for entry in episodes if entry.alert_id not in covered and not entry.folded]
    return (*(f"{text[0].upper()}{text[1:]}" for text in texts), *map(_alert_line, alone))


def _alert_line(episode: EpisodeFigures) -> str:
    """Return an alert of the period in one line: when, where, how much, and how it ended."""
    begin, until = episode.onset_at, episode.resolved_at
    same_day = until is not None and until.date() == begin.date()
    end = "" if until is None else f" to {until:%H:%M} UTC" if same_day else f" to {moment(until)}"
    when = f"Since {moment(begin)}" if until is None else f"{begin:%Y-%m-%d %H:%M}{end}"
    where = "all traffic" if episode.predicate == "true" else episode.slice
    share = episode.share
    if share is None:
        what = "outputs moved" if episode.metric is Metric.DIVERGENCE else "answers were slow"
    else:
        of = (
            f" (95 %: {percent(share.low)} to {percent(share.high)})"
            if share.low is not None and share.high is not None
            else ""
        )
        what = f"{percent(share.value)} of answers changed{of}"
    repair = next((text for text in episode.findings if text.startswith("Repair: ")), "")
    return f"{when}, {where} of {episode.version}: {what}; {ended(episode)}.{f' {repair}' if repair else ''}"


def _how_many(model: ModelFigures, bad: Sequence[SliceFigures]) -> str:
    texts = [text for entry in bad if (text := _affected(entry))]
    if model.aggregate is not None and not any(entry.predicate == "true" for entry in bad):
        texts.append(_affected(model.aggregate))
    text = _listed([text for text in texts if text], "slice")
    return f"{text[0].upper()}{text[1:]}." if text else "Not known."


def _affected(entry: SliceFigures) -> str:
    if entry.flip is None:
        return ""
    changed = entry.figures.changed
    a_day = (
        f", some {estimated(changed.value):,} {'a day' if changed.name is FigureName.CHANGED_PER_DAY else 'so far'}"
        if changed and changed.value
        else ""
    )
    people = (
        f", on the last day for at least {count_of(round(entry.people.value), 'person', 'people')}"
        if entry.people
        else ""
    )
    budget = f" (budget: {percent(entry.flip_budget)})" if entry.flip_budget else ""
    traffic = f" ({percent(entry.figures.share)} of the traffic)" if entry.predicate != "true" else ""
    return (
        f"in {_name(entry)}{traffic} {percent(entry.flip.mean)} of the answers changed{budget}{a_day}{people}"
    )


def _confidence(model: ModelFigures, bad: Sequence[SliceFigures]) -> str:
    entry = bad[0] if bad else model.aggregate
    if entry is None or entry.flip is None or entry.flip.low is None or entry.flip.high is None:
        return "Not known: too little was compared."
    alert = (
        "Almost certain, this is not chance: the false-positive rate has a bound, however often one looks. "
        if bad
        else ""
    )
    return (
        f"{alert}Of {_name(entry)}, {count_of(entry.n_items, 'answer')} {'was' if entry.n_items == 1 else 'were'} compared with the"
        " FP32 model's: the true share"
        f" that changed is between {percent(entry.flip.low)} and {percent(entry.flip.high)} (95 % confidence)."
    )


def _people(model: ModelFigures) -> str:
    entries = [entry for entry in (model.aggregate, *model.slices) if entry is not None]
    n = max((round(entry.people.value) for entry in entries if entry.people), default=0)
    if n:
        return f"At least {count_of(n, 'person', 'people')} got a changed answer on the last day."
    return (
        "Nobody is known to have got a changed answer on the last day: no answer changed, or the requests name no person"
        " (option sampling.sticky_header)."
    )


def _not_known(model: ModelFigures, labels: LabelFigures | None, coverage: CoverageFigures) -> str:
    texts = []
    if model.n_unknown:
        texts.append(
            f"How {count_of(model.n_unknown, 'slice')} of {model.version} are: too little was compared, or too much was lost"
        )
    if labels is None and model.aggregate is not None and model.aggregate.flip and model.aggregate.flip.mean:
        texts.append(f"whether the changed answers of {model.version} are wrong: none of them has a label")
    if coverage.gaps:
        hours = sum((gap.end - gap.begin for gap in coverage.gaps), timedelta())
        texts.append(
            f"what happened in {count_of(len(coverage.gaps), 'gap')} of {duration(hours)} together, in which nothing was compared"
        )
    lost = sum(loss.n for loss in coverage.losses)
    if lost:
        texts.append(
            f"{count_of(lost, 'sampled exchange')} that were lost ({percent(lost / max(coverage.taken, 1))})"
        )
    if not texts:
        return "Nothing that this report would need."
    text = "; ".join(texts)
    return f"{text[0].upper()}{text[1:]}."


def _changed(marks: Sequence[Mark], comparisons: Sequence[VersionComparison]) -> str:
    # The newest first, releases before the rest: processes report each new configuration, which seldom explains a drift.
    marks = [
        *(mark for mark in marks if mark.kind != "release"),
        *(mark for mark in marks if mark.kind == "release"),
    ]
    texts = [f"{mark.what} ({moment(mark.at)}{f', {mark.who}' if mark.who else ''})" for mark in marks]
    newest = f" {compared_sentence(comparisons[-1])}" if comparisons else ""
    return (
        f"{_listed(texts[::-1], 'change')}." if texts else "No release and no decision is known."
    ) + newest


def _who(model: ModelFigures, open_now: Sequence[EpisodeFigures]) -> str:
    steps = [
        f"the owner of {entry.model}, for {entry.slice}: {entry.advice[0].rstrip('.')}"
        for entry in open_now
        if entry.advice and not entry.folded
    ]
    if steps:
        text = f"{_listed(steps, 'alert')}."
        return text[0].upper() + text[1:]
    if model.n_unknown:
        return "Whoever runs quantdrift: see below why slices are unknown, and have more of them compared."
    return "Nothing."


def _replaced(model: ModelFigures, episodes: Sequence[EpisodeFigures]) -> str:
    whole = model.aggregate
    if whole is None or whole.flip is None:
        return "nothing of it was compared in this period."
    bad = list(
        dict.fromkeys(
            "all traffic" if entry.predicate == "true" else entry.slice
            for entry in episodes
            if not entry.folded
        )
    )
    drifted = f"; it drifted in {_listed(bad, 'slice')}" if bad else ""
    return f"{percent(whole.flip.mean)} of its answers changed{drifted}."
