"""The texts of an alert, from its event: the page, its advice, its reason, and its explanation sentence by sentence.

The words of the page are in `quantdrift.drift.explain.diagnosis_text`, which the report and `quantdrift triage` use too.
"""

import math
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime

from quantdrift.core.config.schema import Config
from quantdrift.core.diagnosable import NextCommands, next_commands
from quantdrift.core.notation import count_of, from_to, number, percent
from quantdrift.core.records import SHARES, UNVERIFIED, Metric, Predicate, Suspect, Verdict
from quantdrift.core.slices import EVERYTHING
from quantdrift.core.tasks import MEASURES, Measure, Task
from quantdrift.drift.explain import diagnosis_text as words
from quantdrift.drift.explain.damage import DamageCause
from quantdrift.drift.explain.diagnosis import Aggregate, Begin, Decided, Diagnosis, Kind, build_of, causes_of
from quantdrift.drift.explain.mix import FEWEST_AFTER, FEWEST_BEFORE, Z
from quantdrift.facts.status import said
from quantdrift.storage.monitor.alerts import AlertFact
from quantdrift.storage.monitor.events import AlertEvent, Ending, event_of
from quantdrift.storage.monitor.explanation import Explanation

_MOST_MOVED = 6
_DIGITS = 3
_OTHER_SIZE = 1.25  # a smaller change of the mean size of requests is everyday's
INPUT_SHIFT, UNSEEN, TOO_FEW = "input_shift", "unseen", "too_few"
_REASONS = {
    (Metric.FLIP, Kind.BUDGET): "the flip rate {is_} above the budget",
    (Metric.DIVERGENCE, Kind.BUDGET): "the mean divergence {is_} above the budget",
    (Metric.FLIP, Kind.CHANGE): "the flip rate {is_} above its learned baseline",
    (Metric.DIVERGENCE, Kind.TAIL): "the upper tail of the divergence {is_} above its learned baseline",
    (Metric.LATENCY, Kind.BUDGET): "the latency {is_} above the budget",
    (Metric.LATENCY, Kind.GROWTH): "the latency {is_} above its learned baseline",
}
_CAUSES = {
    "damage": "Numeric damage: {subject} rose by {damage} on inputs that are as hard as before, "
    "and by {shift} because the margins changed",
    INPUT_SHIFT: "Input shift: {subject} rose by {shift} because there are more close calls, and by {damage} on "
    "inputs that are as hard as before",
    UNSEEN: "Inputs at margins that did not occur before: {subject} moved by {damage} on inputs that are as hard as "
    "before and by {shift} because the margins changed",
    "both": "More than one cause: {subject} rose by {damage} on inputs that are as hard as before, "
    "and by {shift} because the margins changed",
    "undecided": "Damage and input shift cannot be distinguished yet: {subject} moved by {damage} at equal margins "
    "and by {shift} because the margins changed",
}
_AGGREGATE = {
    "within": "Over all traffic it moved by {move}: its slices changed ({within}), while the mix of traffic moved it "
    "by {mix}",
    UNSEEN: "Over all traffic it moved by {move}: by traffic that is new or was rare before, while its slices changed by "
    "{within} and the mix of the others moved it by {mix}",
    "mix": "Over all traffic it moved by {move}: the traffic is distributed differently over the slices ({mix}), "
    "while within them it moved by {within}",
    "both": "Over all traffic it moved by {move}: {within} within its slices and {mix} by another mix of traffic",
    "undecided": "Over all traffic it moved by {move}, and no part of that rose beyond chance: {within} "
    "within the slices, {mix} by the mix of traffic",
}
# One part is above zero beyond chance, and the others outweigh it.
_AGAINST = "Over all traffic it moved by {move}, although {raised}: {within} within the slices and {mix} by the mix of traffic"
_RAISED = {
    "within": "its slices rose",
    UNSEEN: "traffic that is new or was rare before raised it",
    "mix": "another mix of traffic raised it",
    "both": "more than one part of it rose",
}
RETURNED = "this version serves again, and its alert lasts"
"""Reason of an alert that is open again."""
_NO_PAGE = "a ticket and never a page, because "
UNVERIFIED_SENDERS = (
    f"{_NO_PAGE}nobody checked who sent these exchanges: give that way in a token or a checked user"
)


def over_counts(attribute: str) -> str:
    """Return why an alert of a slice that looks like sessions is no page."""
    return f"{_NO_PAGE}requests that share {attribute} look like sessions and are over-counted: {how_to_declare(attribute)}"


def how_to_declare(attribute: str) -> str:
    """Return what to do so that requests that share an attribute count once."""
    kind, _, name = attribute.partition(".")
    return (
        f'set sampling.sticky_header = "{name}"'
        if kind == "header"
        else "send it as a request header, too, and name that in sampling.sticky_header"
    )


def reason_of(
    kind: str,
    metric: Metric,
    *,
    page: bool,
    is_verified: bool = True,
    suspect: Suspect | None = None,
    doubt: str = "",
) -> str:
    """Return why a slice alerts, as text, from the signal with the most evidence.

    Parameters
    ----------
    kind, metric
        The signal: kind of detector (`budget`, `change`, `tail` or `growth`) and metric.
    page
        Whether the evidence is enough for a page; else the text is that of a ticket.
    is_verified
        Whether it is known who sent the exchanges.
    suspect
        Of a latency, where to look first.
    doubt
        Why the evidence is not enough for a page, however much it is; empty where it can be.
    """
    reason = _REASONS[metric, Kind(kind)].format(is_="is" if page else "seems to be")
    if suspect is not None:
        reason = f"{reason}; {words.ANSWERS[suspect]}: {words.LOOK_FIRST[suspect]}"
    return "; ".join(filter(None, (reason, "" if is_verified else UNVERIFIED_SENDERS, doubt)))


def page(event: AlertEvent) -> str:
    """Return the text of an alert as the person on call reads it: a line for each question, then the details."""
    if event.change.after not in {Verdict.WARNING, Verdict.FIRING}:
        return "\n".join(_ended(event))
    case = diagnosis_of(event)
    lines = [
        f"{words.headline(case)}.",
        *(
            [f"{case.version} serves again, so its alert is open again."]
            if event.change.reason == RETURNED
            else ()
        ),
        *([f"It is {UNVERIFIED_SENDERS}."] if event.slice.version.endswith(UNVERIFIED) else ()),
        *(f"It is {why}." for why in event.change.reason.split("; ") if _is_doubt(why)),
        words.sureness(case),
        words.since(case),
        words.changed(case),
        *_spoilt(event.explanation),
        words.elsewhere(case),
        f"Do first: {words.first_step(case)}",
    ]
    if event.explanation.explains:
        others = ", ".join(event.explanation.explains)
        lines.append(f"It also explains the alerts of {others}: without {case.slice} they vanish.")
    lines = [line for line in lines if line]
    figures = words.decided(case.deciding, f"{case.onset:%Y-%m-%d %H:%M} UTC")
    decided = f"Decided by: {figures}; evidence {number(event.evidence.total)}, {number(event.evidence.threshold)} needed."
    said = {*_related(event.explanation), *_spoilt(event.explanation), *words.news(event.explanation.changes)}
    rest = [sentence for sentence in event.explanation.explanation if sentence not in said]
    details = [*([decided] if figures else []), *rest]
    return "\n".join([*lines, "", "Details", *details] if details else lines)


def _is_doubt(reason: str) -> bool:
    return reason.startswith(_NO_PAGE) and reason != UNVERIFIED_SENDERS


def alert_text(alert: AlertFact, where: Callable[[int], str]) -> str:
    """Return the text of an alert as it stands: first what became of it, then its page, with the alerts of the same cause.

    Parameters
    ----------
    where
        Returns where an alert can be looked at: an address or a command.
    """
    event = event_of(alert.details)
    text = page(event) if event else f"{alert.model} {alert.version}: {alert.slice}: {said(alert.severity)}."
    if lines := over(alert):
        text = "\n".join([*lines, *when_opened(text.split("\n"))])
    return with_related(text, alert, where)


def commands_of(
    config: Config, alert: AlertFact, where: Sequence[Predicate], known: Collection[str], options: str = ""
) -> NextCommands:
    """Return the commands that work for an alert; parameters as in `quantdrift.core.diagnosable.next_commands`."""
    event = event_of(alert.details)
    if alert.metric == Metric.LATENCY:
        return NextCommands()  # they look at answers
    return next_commands(
        config,
        alert_id=alert.id,
        model=alert.model,
        version=alert.version,
        slice_name=alert.slice,
        where=where,
        build=build_of(event.explanation.build, event.slice.task) if event else None,
        known=known,
        options=options,
    )


def over(alert: AlertFact) -> list[str]:
    """Return why an alert is over, in one line that stands before its text; empty while it lasts, or if it has recovered."""
    if alert.closed is not None:
        return [
            f"{alert.closed.by} closed this alert ({alert.closed.at:%Y-%m-%d %H:%M} UTC): {alert.closed.reason}"
        ]
    if alert.ended == Ending.REPLACED:
        known = words.serves_no_more(alert.version, alert.last_seen_at, alert.serving)
        returns = (
            "" if alert.version in alert.serving else f"; it is open again if {alert.version} serves again"
        )
        return [f"{known} This alert is over{returns}."]
    if alert.ended == Ending.RETIRED:
        return ["The slice is not compared any more, so this alert is over."]
    return []


def when_opened(lines: Sequence[str]) -> list[str]:
    """Return the text of an alert that is over: as it was when it opened, without what was to be done then."""
    first, *rest = lines
    return [f"When it opened: {first}", *(line for line in rest if not line.startswith("Do first: "))]


def with_related(text: str, alert: AlertFact, where: Callable[[int], str]) -> str:
    """Return the text of an alert with a line for each alert of the same cause, before its details."""
    lines = []
    if alert.explained_by is not None:
        lines.append(f"Same cause: alert {alert.explained_by} explains this one: {where(alert.explained_by)}")
    lines += [f"Same cause: this one explains alert {other}: {where(other)}" for other in alert.explains]
    head, gap, details = text.partition("\n\n")
    return "\n".join([head, *lines]) + gap + details


def summary(event: AlertEvent) -> str:
    """Return the first line of an alert's text: what is wrong, or that it ended."""
    return page(event).partition("\n")[0]


def advice(event: AlertEvent) -> str:
    """Return what to do about an alert, first and then."""
    if event.change.ended is Ending.REPLACED:
        return "What serves now is watched by itself."
    if event.change.ended is Ending.CLOSED:
        return "The detectors of the slice start from the beginning; a drift that goes on alerts again."
    if event.change.after is Verdict.UNKNOWN:
        return (
            "Nothing: the slice is not compared any more, so its health is unknown."
            " If it comes back, its detectors start from the beginning."
        )
    if event.change.after is Verdict.OK:
        return "Nothing. The slice is within its budget again, shown with the same rigour as the alert."
    text = words.first_step(diagnosis_of(event))
    return f"{text[0].upper()}{text[1:]}"


def diagnosis_of(event: AlertEvent) -> Diagnosis:
    """Return the facts that the texts of an open alert are written from."""
    where, evidence, whole, found = event.slice, event.evidence, event.aggregate, event.explanation
    onset = evidence.onset or datetime.fromtimestamp(0, UTC).isoformat()
    return Diagnosis(
        model=where.model,
        version=where.version,
        slice=where.name,
        page=event.change.after is Verdict.FIRING,
        deciding=Decided(
            task=where.task,
            metric=evidence.metric,
            kind=evidence.detector,
            after=evidence.after,
            n_after=evidence.n_since_onset or 0,
            before=evidence.before,
            budget=evidence.budget,
            noise=evidence.noise or 0.0,
            tail_level=evidence.tail_level,
            tail_before=evidence.tail_before,
            tail_after=evidence.tail_after,
            latency_budget_s=evidence.latency_budget_s,
            suspect=evidence.suspect,
        ),
        begin=Begin(found.begin or Begin.CHANGED),
        n_before=evidence.n_history or 0,
        onset=datetime.fromisoformat(onset),
        whole=Aggregate(
            verdict=whole.verdict,
            mean=whole.mean,
            accepted=whole.accepted,
            itself=where.predicate == EVERYTHING,
        ),
        causes=causes_of(
            found.cause,
            {
                DamageCause.DAMAGE: (found.damage, found.damage_se),
                DamageCause.INPUT_SHIFT: (found.shift, found.shift_se),
                DamageCause.UNSEEN: (found.unseen, found.unseen_se),
            },
        ),
        undecided=found.cause == DamageCause.UNDECIDED,
        changed=found.flips,
        daily=found.daily,
        evidence_ratio=evidence.total / evidence.threshold if evidence.threshold > 0 else None,
        explained_by=found.explained_by or "",
        news=found.changes,
        build=build_of(found.build, where.task),
    )


def _ended(event: AlertEvent) -> list[str]:
    """Return the text of the end of an alert. The recent window still contains the drift, so its mean is left out."""
    where, evidence, change = event.slice, event.evidence, event.change
    if change.ended is Ending.REPLACED:
        at = None if change.last_seen is None else datetime.fromisoformat(change.last_seen)
        serving = change.serving or ()
        return [
            f"{where.model} {words.serves_no_more(where.version, at, serving)} The alert of {where.name} is over.",
            *(
                [
                    f"{where.version} has not recovered in {where.name}: if it serves again, the alert is open again."
                ]
                if where.version not in serving
                else ()
            ),
            f"Do first: nothing. {advice(event)}",
        ]
    if change.ended is Ending.CLOSED:
        return [
            f"{where.model} {where.version}: the alert of {where.name} was {change.reason}.",
            f"Do first: nothing. {advice(event)}",
        ]
    if change.after is Verdict.UNKNOWN:
        return [
            f"{where.model} {where.version}: {where.name} is not compared any more, so its health is not known.",
            "Do first: nothing. If it comes back, it is watched from the beginning.",
        ]
    if evidence.detector == Kind.TAIL:
        well = "its worst outputs are as near to the unquantised model as before"
    elif evidence.metric is Metric.LATENCY:
        well = f"no more exchanges than the accepted {percent(evidence.budget)} take {words.slower(evidence.latency_budget_s)}"
    elif evidence.metric is not Metric.FLIP:
        well = "its outputs are as near to the unquantised model as is accepted"
    elif evidence.detector == Kind.CHANGE:
        well = "no more answers change than before"
    else:
        well = f"no more answers change than the accepted {percent(evidence.budget)}"
    return [
        f"{where.model} {where.version}: {where.name} has recovered: {well}.",
        (
            f"How sure: as sure as the alert was. The evidence of recovery is {number(evidence.total, 3)}, and"
            f" {number(evidence.threshold, 3)} is needed."
        ),
        "Do first: nothing; find out what changed, so that it does not happen again.",
    ]


def _spoilt(explanation: Explanation) -> list[str]:
    """Return what makes the figures doubtful, or is worse than a change of answers."""
    return [*_not_finite(explanation), *_doubt(explanation)]


def _doubt(explanation: Explanation) -> list[str]:
    return [f"Configuration in doubt: {explanation.doubt}."] if explanation.doubt else []


def sentences(explanation: Explanation, metric: Metric, kind: str, task: Task) -> tuple[str, ...]:
    """Return an explanation as sentences.

    Parameters
    ----------
    metric, kind, task
        The metric and kind of detector that decided, and the model's task: they name the measure and its unit.
    """
    measure = MEASURES[task]
    if explanation.unexplained:
        return (f"Not explained: {explanation.unexplained}. The alert itself is valid.",)
    unit = " points" if metric in SHARES or kind == Kind.TAIL else _unit(measure)
    texts = [
        *_related(explanation),
        *_not_finite(explanation),
        *_doubt(explanation),
        *words.news(explanation.changes),
    ]
    if explanation.cause in _CAUSES and explanation.damage is not None and explanation.shift is not None:
        texts.append(
            _CAUSES[explanation.cause].format(
                subject=_subject(metric, kind, measure),
                damage=_amount(explanation.damage, explanation.damage_se, unit=unit),
                shift=_amount(explanation.shift, explanation.shift_se, unit=unit),
            )
            + _unseen(
                explanation.unseen, explanation.unseen_se, "at margins that did not occur before", unit=unit
            )
            + _margins(explanation)
        )
    elif explanation.cause == TOO_FEW and explanation.begin != Begin.FIRST_SEEN:
        texts.append(_too_few(explanation))
    if explanation.divergence_damage is not None and explanation.divergence_shift is not None:
        texts.append(_divergence(explanation, measure))
    if (
        explanation.aggregate_cause in _AGGREGATE
        and explanation.aggregate_within is not None
        and explanation.aggregate_mix is not None
    ):
        texts.append(_over_all_traffic(explanation, unit))
    elif explanation.aggregate_cause == TOO_FEW and explanation.begin != Begin.FIRST_SEEN:
        texts.append(
            "Over all traffic there are too few exchanges before or since the onset to split the move."
        )
    texts += [*_elsewhere(explanation), *_sizes(explanation), *_moved(explanation)]
    n_before = explanation.n_window_before or 0
    # The alert has said how few there were; these may be counted in another window.
    if explanation.compared_with and (explanation.begin != Begin.FIRST_SEEN or n_before >= FEWEST_BEFORE):
        before = count_of(n_before, "exchange")
        texts.append(
            f"Compared with {explanation.compared_with} ({before}, {explanation.n_window_after or 0:,} since)."
        )
    return tuple(texts)


def _divergence(explanation: Explanation, measure: Measure) -> str:
    """Return the sentence on the mean divergence where another measure decided."""
    damage, shift, unseen = (
        (value or 0.0, se)
        for value, se in (
            (explanation.divergence_damage, explanation.divergence_damage_se),
            (explanation.divergence_shift, explanation.divergence_shift_se),
            (explanation.divergence_unseen, explanation.divergence_unseen_se),
        )
    )
    if all(not value or _by_chance(value, se) for value, se in (damage, shift, unseen)):
        return f"Mean {measure.name} did not move beyond chance."
    unit = _unit(measure)
    new = _unseen(*unseen, "at margins that did not occur before", unit=unit)
    return (
        f"Mean {measure.name} moved by {_amount(*damage, unit=unit)} at equal margins and by "
        f"{_amount(*shift, unit=unit)} because the margins changed{new}."
    )


def _over_all_traffic(explanation: Explanation, unit: str) -> str:
    """Return how the mean over all traffic moved; a move that may be chance is not reported, and has no parts."""
    move, raised = explanation.aggregate_move or 0.0, _RAISED.get(explanation.aggregate_cause or "", "")
    if _by_chance(move, explanation.aggregate_move_se):
        parts = (
            (explanation.aggregate_within, explanation.aggregate_within_se, "within its slices"),
            (explanation.aggregate_mix, explanation.aggregate_mix_se, "by another mix of traffic"),
            (
                explanation.aggregate_unseen,
                explanation.aggregate_unseen_se,
                "by traffic that is new or was rare before",
            ),
        )
        seen = [
            f"{_amount(value, se, unit=unit)} {where}"
            for value, se, where in parts
            if value and not _by_chance(value, se)
        ]
        if raised and seen:
            return f"Over all traffic the mean did not move beyond chance, but a part of it did: {', '.join(seen)}."
        return "Over all traffic nothing moved beyond chance."
    text = (_AGAINST if raised and move <= 0 else _AGGREGATE[explanation.aggregate_cause or ""]).format(
        raised=raised,
        move=_amount(move, explanation.aggregate_move_se, unit=unit),
        within=_amount(explanation.aggregate_within or 0.0, explanation.aggregate_within_se, unit=unit),
        mix=_amount(explanation.aggregate_mix or 0.0, explanation.aggregate_mix_se, unit=unit),
    )
    unseen = _unseen(
        explanation.aggregate_unseen,
        explanation.aggregate_unseen_se,
        "traffic that is new or was rare before",
        unit=unit,
    )
    return f"{text}{unseen}."


def _too_few(explanation: Explanation) -> str:
    """Return why no cause is named."""
    return (
        f"Too few exchanges to distinguish damage from input shift: {count_of(explanation.n_window_before or 0, 'exchange')} "
        f"before the onset and {explanation.n_window_after or 0:,} since; {FEWEST_BEFORE} and {FEWEST_AFTER} independent ones "
        "with a margin are needed."
    )


def _unseen(value: float | None, se: float | None, what: str, *, unit: str) -> str:
    """Return the part by unseen traffic; empty where there was none."""
    return "" if not value else f"; {what}: {_amount(value, se, unit=unit)}"


def _related(explanation: Explanation) -> list[str]:
    texts = []
    if explanation.explained_by:
        texts.append(
            f"Explained by the alert of {explanation.explained_by}: without those items this alert vanishes."
        )
    if explanation.explains:
        texts.append(
            f"Explains {', '.join(explanation.explains)}: without this slice, or without it and others that alert, these alerts vanish."
        )
    return texts


def _not_finite(explanation: Explanation) -> list[str]:
    if not explanation.not_finite:
        return []
    earlier = (
        ""
        if explanation.not_finite_before is None
        else f" (before: {percent(explanation.not_finite_before, _DIGITS)})"
    )
    share = f"{percent(explanation.not_finite, _DIGITS)} of the slice's outputs since the onset"
    return [
        f"Invalid outputs: {share} are not a number, infinite or empty{earlier}. Each is a flip and has no divergence."
    ]


def _elsewhere(explanation: Explanation) -> list[str]:
    """Return how fast the traffic outside a slow slice is."""
    if explanation.slow_elsewhere is None:
        return []
    share, n = (
        percent(explanation.slow_elsewhere, _DIGITS),
        count_of(explanation.n_elsewhere or 0, "exchange"),
    )
    return [f"Of all other traffic {share} took longer since the onset ({n})."]


def _sizes(explanation: Explanation) -> list[str]:
    """Return how the size of the requests of a slow slice changed; one that did not change explains nothing."""
    before, after = explanation.items_before, explanation.items_after
    if before is None or after is None or before <= _OTHER_SIZE * after <= _OTHER_SIZE**2 * before:
        return []
    return [
        f"Requests had {number(before, _DIGITS)} items on average before the onset, and {number(after, _DIGITS)} since."
    ]


def _moved(explanation: Explanation) -> list[str]:
    if not explanation.n_measures:
        return []
    compared = f"({explanation.n_measures} compared)"
    # A move that is invisible in the printed digits would read as no move.
    moves = [
        f"{name} from {text[0]} to {text[1]}"
        for name, before, after in zip(
            explanation.moved, explanation.moved_before, explanation.moved_after, strict=True
        )
        if (text := from_to(before, after, _DIGITS))
    ]
    if not moves:
        return [f"No other measure moved beyond chance {compared}."]
    more = f" and {len(moves) - _MOST_MOVED} more" if len(moves) > _MOST_MOVED else ""
    return [f"Other measures that moved {compared}: {', '.join(moves[:_MOST_MOVED])}{more}."]


def _subject(metric: Metric, kind: str, measure: Measure) -> str:
    if kind == Kind.TAIL:
        return "the share of items in the tail"
    return "the flip rate" if metric is Metric.FLIP else f"mean {measure.name}"


def _margins(explanation: Explanation) -> str:
    if explanation.low_margin_before is None or explanation.low_margin_after is None:
        return "."
    text = from_to(100 * explanation.low_margin_before, 100 * explanation.low_margin_after, _DIGITS)
    if text is None:
        return f"; close calls (margin below 0.1) are {percent(explanation.low_margin_after, _DIGITS)} of the slice, as before."
    return f"; close calls (margin below 0.1) were {text[0]} % of the slice and are {text[1]} %."


def _unit(measure: Measure) -> str:
    return f" {measure.unit}" if measure.unit else ""


def _by_chance(value: float, se: float | None) -> bool:
    """Return whether a part may be chance: within 1.96 standard errors of 0, the same bound as for naming causes."""
    return se is not None and not (math.isfinite(se) and abs(value) > Z * se)


def _amount(value: float, se: float | None, *, unit: str) -> str:
    """Return a part of a move as text; the value of one that may be chance is not shown."""
    scale = 100 if unit == " points" else 1
    # A standard error of 0 means that nothing is known of this part.
    error = f"standard error {number(scale * se)}" if se and math.isfinite(se) else ""
    if _by_chance(value, se):
        return f"nothing beyond chance{f' ({error}{unit})' if error else ''}"
    figure = number(scale * value, _DIGITS)
    if figure == "0":
        return "nothing"
    text = f"{'+' if value > 0 else ''}{figure}{unit}"
    return f"{text} ({error})" if error else text
