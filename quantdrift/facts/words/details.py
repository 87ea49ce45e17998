"""The details of an alert, for the record: what decided, with its statistics, and why, sentence by sentence."""

import math
from collections.abc import Callable
from typing import Final

import msgspec

from quantdrift.core.notation import count_of, from_to, moment, number, percent
from quantdrift.core.signals import DetectorKind, Signal, SignalForm
from quantdrift.core.tasks import MEASURES, Measure
from quantdrift.facts.events import AlertEvent
from quantdrift.facts.explanation import FEWEST_AFTER, FEWEST_BEFORE, Begin, DamageCause, Explanation, Z
from quantdrift.facts.words.model import slower

DECIDED: Final = "Decided by: "
"""Begins the line with the figures that decided."""
_MOST_MOVED: Final = 6
_DIGITS: Final = 3
_OTHER_SIZE: Final = 1.25  # a smaller change of the mean size of requests is everyday's
_CAUSES: Final = {
    DamageCause.DAMAGE: "Numeric damage: {subject} rose by {damage} on inputs that are as hard as before, "
    "and by {shift} because the margins changed",
    DamageCause.INPUT_SHIFT: "Input shift: {subject} rose by {shift} because there are more close calls, and by {damage} on "
    "inputs that are as hard as before",
    DamageCause.UNSEEN: "Inputs at margins that did not occur before: {subject} moved by {damage} on inputs that are as hard as "
    "before and by {shift} because the margins changed",
    DamageCause.BOTH: "More than one cause: {subject} rose by {damage} on inputs that are as hard as before, "
    "and by {shift} because the margins changed",
    DamageCause.UNDECIDED: "Damage and input shift cannot be distinguished yet: {subject} moved by {damage} at equal margins "
    "and by {shift} because the margins changed",
}
_AGGREGATE: Final = {
    "within": "Over all traffic it moved by {move}: its slices changed ({within}), while the mix of traffic moved it "
    "by {mix}",
    "unseen": "Over all traffic it moved by {move}: by traffic that is new or was rare before, while its slices changed by "
    "{within} and the mix of the others moved it by {mix}",
    "mix": "Over all traffic it moved by {move}: the traffic is distributed differently over the slices ({mix}), "
    "while within them it moved by {within}",
    "both": "Over all traffic it moved by {move}: {within} within its slices and {mix} by another mix of traffic",
    "undecided": "Over all traffic it moved by {move}, and the data do not show yet what moved it",
}
# One part is above zero beyond chance, and the others outweigh it.
_AGAINST: Final = "Over all traffic it moved by {move}, although {raised}: {within} within the slices and {mix} by the mix of traffic"
_RAISED: Final = {
    "within": "its slices rose",
    "unseen": "traffic that is new or was rare before raised it",
    "mix": "another mix of traffic raised it",
    "both": "more than one part of it rose",
}


def details(event: AlertEvent) -> tuple[str, ...]:
    """Return the statistics of an alert that opens or escalates."""
    evidence, explanation = event.evidence, event.explanation
    measure = _measure(event)
    figures = decided(event)
    needed = f"evidence {number(evidence.total)}, {number(evidence.threshold)} needed"
    texts = [f"{DECIDED}{figures}; {needed}."] if figures else []
    if explanation.unexplained:
        return (*texts, f"Not explained: {explanation.unexplained}. The alert itself is valid.")
    signal, kind = evidence.signal, evidence.detector
    unit = " points" if signal.is_share or kind == DetectorKind.TAIL else _unit(measure)
    cause = DamageCause(explanation.cause) if explanation.cause in set(DamageCause) else None
    if cause in _CAUSES and explanation.damage is not None and explanation.shift is not None:
        texts.append(
            _CAUSES[cause].format(
                subject=_subject(signal, kind, measure),
                damage=_amount(explanation.damage, explanation.damage_se, unit=unit),
                shift=_amount(explanation.shift, explanation.shift_se, unit=unit),
            )
            + _unseen(
                explanation.unseen, explanation.unseen_se, "at margins that did not occur before", unit=unit
            )
            + _margins(explanation)
        )
    elif cause is DamageCause.TOO_FEW and event.begin is not Begin.FIRST_SEEN:
        texts.append(_too_few(explanation))
    if explanation.divergence_damage is not None and explanation.divergence_shift is not None:
        texts.append(_divergence(explanation, measure))
    if (
        explanation.aggregate_cause in _AGGREGATE
        and explanation.aggregate_within is not None
        and explanation.aggregate_mix is not None
    ):
        texts.append(_over_all_traffic(explanation, unit))
    elif explanation.aggregate_cause == DamageCause.TOO_FEW and event.begin is not Begin.FIRST_SEEN:
        texts.append("All traffic: too few exchanges before or since the onset to say what moved it.")
    texts += [*_elsewhere(explanation), *_sizes(explanation), *_moved(explanation)]
    n_before = explanation.n_window_before or 0
    # The alert has said that there is too little from before; this may be another window.
    if explanation.compared_with and (event.begin is not Begin.FIRST_SEEN or n_before >= FEWEST_BEFORE):
        before = count_of(n_before, "exchange")
        texts.append(
            f"Compared with {explanation.compared_with} ({before}, {explanation.n_window_after or 0:,} since)."
        )
    return tuple(texts)


def decided(event: AlertEvent) -> str:
    """Return what decided as one clause: the value since the onset and the value it is compared with; empty: not known."""
    evidence, measure = event.evidence, _measure(event)
    signal = evidence.signal
    since = "the onset" if event.onset is None else moment(event.onset)
    since = f"since {since} ({count_of(evidence.n_since_onset or 0, 'observation')})"

    def value(number_: float) -> str:
        return percent(number_) if signal.is_share else f"{number(number_)}{_unit(measure)}"

    if evidence.detector == DetectorKind.TAIL:
        return _tail(event, since, value)
    if evidence.after is None:
        return ""
    match signal.form:
        case SignalForm.SLOW:
            observed = f"{percent(evidence.after)} of exchanges took {slower(evidence.latency_budget_s)}"
        case SignalForm.CHANGED:
            observed = f"{percent(evidence.after)} of answers changed"
        case SignalForm.SHARE:
            observed = f"{percent(evidence.after)} of {signal.things} {signal.verb}"
        case SignalForm.DIVERGENCE:
            observed = f"mean {measure.name} {value(evidence.after)}"
    observed = f"{observed} {since}"
    if evidence.detector == DetectorKind.CHANGE:
        return observed if evidence.before is None else f"{observed}, {value(evidence.before)} before"
    noise = f", and {value(evidence.noise)} more for noise" if evidence.noise else ""
    return f"{observed}, budget {value(evidence.budget)}{noise}"


def _measure(event: AlertEvent) -> Measure:
    """Return what the divergence of an alert's answers is."""
    measure = MEASURES[event.slice.task]
    return msgspec.structs.replace(measure, name=event.explanation.divergence_is or measure.name)


def _tail(event: AlertEvent, since: str, value: Callable[[float], str]) -> str:
    evidence, name = event.evidence, _measure(event).name
    if evidence.signal.form is SignalForm.SHARE:
        name = f"share of {evidence.signal.name}"
    if evidence.tail_level is not None and evidence.tail_after is not None:
        before = "" if evidence.tail_before is None else f", {percent(evidence.tail_before)} before"
        above = f"{percent(evidence.tail_after)} of outputs have a {name} above {value(evidence.tail_level)}"
        return f"{above} {since}{before}"
    if evidence.after is None:
        return ""
    before = "" if evidence.before is None else f", {value(evidence.before)} before"
    return f"p99 of {name} {value(evidence.after)} {since}{before}"


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


def _subject(signal: Signal, kind: str, measure: Measure) -> str:
    if kind == DetectorKind.TAIL:
        return "the share of items in the tail"
    if signal.form is SignalForm.DIVERGENCE:
        return f"mean {measure.name}"
    return f"the share of {signal.name}"


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
