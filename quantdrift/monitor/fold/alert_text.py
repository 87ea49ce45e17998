"""The texts of an alert: its reason, its explanation (one sentence per finding, most important first) and advice."""

import math

from quantdrift.core.notation import count_of, from_to, number, percent
from quantdrift.core.records import Metric
from quantdrift.core.tasks import MEASURES, Measure, Task
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, TAIL
from quantdrift.drift.explain import diagnosis_text
from quantdrift.drift.explain.diagnosis import Aggregate, AggregateState, Begin
from quantdrift.drift.explain.mix import FEWEST_AFTER, FEWEST_BEFORE, Z
from quantdrift.storage.monitor.explanation import Explanation

_MOST_MOVED = 6
_DIGITS = 3
INPUT_SHIFT, UNSEEN, TOO_FEW = "input_shift", "unseen", "too_few"
_REASONS = {
    (Metric.FLIP, BUDGET.kind): "the flip rate {is_} above the budget",
    (Metric.DIVERGENCE, BUDGET.kind): "the mean divergence {is_} above the budget",
    (Metric.FLIP, CHANGE.kind): "the flip rate {is_} above its learned baseline",
    (Metric.DIVERGENCE, TAIL.kind): "the upper tail of the divergence {is_} above its learned baseline",
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
_ADVICE = {
    "damage": "It is numeric damage: these inputs need a range or a resolution that quantisation removed. "
    "Calibrate again with them, or use finer (per-channel) quantisation or higher precision in the sensitive layers: "
    "calibration alone moves ranges and adds no resolution. Measure with labels which of them helps.",
    INPUT_SHIFT: "It is input shift: the inputs moved towards the decision boundary, where the model behaves as "
    "before. Find out who sends them; a flip on a close call is not necessarily an error, so label a few.",
    UNSEEN: "It appears on inputs that did not occur before, so there is nothing to compare with. Find out who sends "
    "them, label a few, and add them to the calibration set and the evaluation.",
    "both": "It has more than one cause: find out who sends these inputs, calibrate again with them or use finer "
    "(per-channel) quantisation, and measure with labels.",
}
_GUESS = {
    Metric.DIVERGENCE: "Divergence of the whole output distribution points to numeric damage (range or resolution lost).",
    Metric.FLIP: "Flips with little divergence are inputs near the decision boundary; with it, numeric damage.",
}
_GUESS_ELSE = "The outputs themselves moved, which points to numeric damage (range or resolution lost)."
_REMEDY = (
    "Most often the calibration set lacked this slice: calibrate again with it, or use finer (per-channel) "
    "quantisation; measure with labels."
)
_WHERE = {
    AggregateState.FINE: "Route this slice to the unquantised model while you investigate",
    AggregateState.QUIET: "Look at this slice first, then at the others",
    AggregateState.UNKNOWN: "Look at this slice first",
    AggregateState.ALERTING: "Look at the whole candidate version first",
}


def reason_of(kind: str, metric: Metric, *, page: bool) -> str:
    """Return why a slice alerts, as text, from the signal with the most evidence.

    Parameters
    ----------
    kind, metric
        The signal: kind of detector (`budget`, `change` or `tail`) and metric.
    page
        Whether the evidence is enough for a page; else the text is that of a ticket.
    """
    return _REASONS[metric, kind].format(is_="is" if page else "seems to be")


def advice(
    metric: Metric,
    task: Task,
    aggregate: Aggregate,
    onset: str,
    *,
    begin: Begin,
    n_before: int,
    version: str = "",
    cause: str | None = None,
    explained_by: str | None = None,
) -> str:
    """Return the next steps for the person on call, in a few sentences.

    Parameters
    ----------
    metric
        The metric that decided.
    onset
        The estimated onset, ISO 8601.
    begin, n_before
        The state of the slice before the onset, and its exchanges compared there.
    cause
        Damage, input shift or unseen inputs, where the cause is known and decided.
    explained_by
        Name of a smaller alerting slice that explains this alert.
    """
    if explained_by:
        where = f"Look at {explained_by} first: without those items this alert vanishes."
    elif aggregate.state is AggregateState.ITSELF:
        where = "This alert is about all traffic: look at the whole candidate version."
    else:
        state = diagnosis_text.aggregate(aggregate, metric, _unit(MEASURES[task]).strip())
        where = f"{_WHERE[aggregate.state]}: {state}."
    if begin is Begin.CHANGED:
        first = f"Look for what changed around {onset}."
    else:
        first = diagnosis_text.first_step(begin, version, n_before, cause)
    guess = _GUESS.get(metric, _GUESS[Metric.FLIP]) if task is Task.CLASSIFICATION else _GUESS_ELSE
    what = _ADVICE.get(cause or "") or f"{guess} {_REMEDY}"
    return f"{where} {first} {what}"


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
    unit = " points" if metric is Metric.FLIP or kind == TAIL.kind else _unit(measure)
    texts = [
        *_related(explanation),
        *_not_finite(explanation),
        *([f"Configuration in doubt: {explanation.doubt}."] if explanation.doubt else []),
        *(f"New around the onset: {change}." for change in explanation.changes),
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
    elif explanation.cause == TOO_FEW:
        texts.append(_too_few(explanation))
    if explanation.divergence_damage is not None and explanation.divergence_shift is not None:
        texts.append(_divergence(explanation, measure))
    if (
        explanation.aggregate_cause in _AGGREGATE
        and explanation.aggregate_within is not None
        and explanation.aggregate_mix is not None
    ):
        texts.append(_over_all_traffic(explanation, unit))
    elif explanation.aggregate_cause == TOO_FEW:
        texts.append(
            "Over all traffic there are too few exchanges before or since the onset to split the move."
        )
    texts += _moved(explanation)
    if explanation.compared_with:
        before = count_of(explanation.n_window_before or 0, "exchange")
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
        although = f", although {raised}: {', '.join(seen)}" if raised and seen else ""
        return f"Over all traffic nothing moved beyond chance{although}."
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
    if kind == TAIL.kind:
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
