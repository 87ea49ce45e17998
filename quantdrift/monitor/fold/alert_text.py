"""An explanation in words: one sentence per finding, the most telling first."""

import math

from quantdrift.core.notation import count_of, from_to, number, percent
from quantdrift.core.records import Metric
from quantdrift.core.tasks import MEASURES, Measure, Task
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, TAIL
from quantdrift.drift.explain import diagnosis_text
from quantdrift.drift.explain.diagnosis import Aggregate, Begin, Whole
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
    "and by {shift} because of other margins",
    INPUT_SHIFT: "Input shift: {subject} rose by {shift} because there are more close calls, and by {damage} on "
    "inputs that are as hard as before",
    UNSEEN: "Inputs at margins that were not there before: {subject} moved by {damage} on inputs that are as hard as "
    "before and by {shift} because of other margins",
    "both": "More than one cause: {subject} rose by {damage} on inputs that are as hard as before, "
    "and by {shift} because of other margins",
    "undecided": "Damage or input shift cannot be told apart yet: {subject} moved by {damage} at equal margins "
    "and by {shift} by other margins",
}
_AGGREGATE = {
    "within": "Over all traffic it moved by {move}: its slices changed ({within}), while the mix of traffic moved it "
    "by {mix}",
    UNSEEN: "Over all traffic it moved by {move}: by traffic that is new or was rare before, while its slices changed by "
    "{within} and the mix of the others moved it by {mix}",
    "mix": "Over all traffic it moved by {move}: the traffic is spread over the slices in another way ({mix}), "
    "while within them it moved by {within}",
    "both": "Over all traffic it moved by {move}: {within} within its slices and {mix} by another mix of traffic",
    "undecided": "Over all traffic it moved by {move}, and no part of that rose beyond chance: {within} "
    "within the slices, {mix} by the mix of traffic",
}
# One part is surely above zero, and the others outweigh it.
_AGAINST = "Over all traffic it moved by {move}, although {raised}: {within} within the slices and {mix} by the mix of traffic"
_RAISED = {
    "within": "its slices rose",
    UNSEEN: "traffic that is new or was rare before raised it",
    "mix": "another mix of traffic raised it",
    "both": "more than one part of it rose",
}
_ADVICE = {
    "damage": "It is numeric damage: these inputs reach a range or need a resolution that quantisation gave away. "
    "Calibrate again with them, or use finer (per-channel) quantisation or higher precision in the sensitive layers: "
    "calibration alone moves ranges and adds no resolution. Measure with labels which of them helps.",
    INPUT_SHIFT: "It is input shift: the inputs moved towards the decision boundary and the model does there what it "
    "always did. Ask who sends them; a flip on a close call is not by itself an error, so label a handful.",
    UNSEEN: "It shows on inputs that were not there before, so nothing tells what the model always did on them. Ask "
    "who sends them, label a handful, and have them in the calibration set and the evaluation.",
    "both": "It has more than one cause: look at who sends these inputs, calibrate again with them or use finer "
    "(per-channel) quantisation, and measure with labels.",
}
_GUESS = {
    Metric.DIVERGENCE: "Divergence of the whole output distribution points to numeric damage (range or resolution lost).",
    Metric.FLIP: "Flips with little divergence are inputs near the decision boundary; with it, numeric damage.",
}
_GUESS_ELSE = "The outputs themselves moved, which points to numeric damage (range or resolution lost)."
_MEND = (
    "Most often the calibration set lacked this slice: calibrate again with it, or use finer (per-channel) "
    "quantisation; measure with labels."
)


_WHOLE = {
    Whole.FINE: "Route this slice to the unquantised model while you look",
    Whole.QUIET: "Look at this slice first, then at the others",
    Whole.UNKNOWN: "Look at this slice first",
    Whole.ALERTING: "Look at the whole candidate version first",
}


def reason_of(kind: str, metric: Metric, *, page: bool) -> str:
    """Return why a slice alerts, in words, by the signal that has the most evidence.

    Parameters
    ----------
    kind, metric
        The signal: `budget`, `change` or `tail`, and what it watches.
    page
        Whether it is beyond doubt; else a ticket.
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
    """Return what the person on call does next, in a few sentences.

    Parameters
    ----------
    metric
        What decided.
    task
        What the model gives.
    aggregate
        All of the version's traffic.
    onset
        Its estimate, ISO 8601.
    begin, n_before
        How the slice stood before the onset, and the exchanges that tells of.
    version
        The candidate version.
    cause
        Damage, input shift or inputs that are new, where it is known and decided.
    explained_by
        A smaller slice that alerts and explains this alert.
    """
    if explained_by:
        where = f"Look at {explained_by} first: without it nothing is left of this alert."
    elif aggregate.stands is Whole.ITSELF:
        where = "This alert is about all traffic: look at the whole candidate version."
    else:
        stands = diagnosis_text.aggregate(aggregate, metric, _unit(MEASURES[task]).strip())
        where = f"{_WHOLE[aggregate.stands]}: {stands}."
    if begin is Begin.CHANGED:
        first = f"Look for what changed around {onset}."
    else:
        first = diagnosis_text.first_step(begin, version, n_before, cause)
    guess = _GUESS.get(metric, _GUESS[Metric.FLIP]) if task is Task.CLASSIFICATION else _GUESS_ELSE
    what = _ADVICE.get(cause or "") or f"{guess} {_MEND}"
    return f"{where} {first} {what}"


def sentences(found: Explanation, metric: Metric, kind: str, task: Task) -> tuple[str, ...]:
    """Return an explanation in words.

    Parameters
    ----------
    found
        The explanation.
    metric, kind, task
        Metric and kind of detector that decided, and what the model gives: they name the measure and its unit.
    """
    measure = MEASURES[task]
    if found.unexplained:
        return (f"Not explained: {found.unexplained}. The alert itself is as sound as any.",)
    unit = " points" if metric is Metric.FLIP or kind == TAIL.kind else _unit(measure)
    said = [
        *_folded(found),
        *_not_finite(found),
        *([f"In doubt: {found.doubt}."] if found.doubt else []),
        *(f"New around the onset: {change}." for change in found.changes),
    ]
    if found.cause in _CAUSES and found.damage is not None and found.shift is not None:
        said.append(
            _CAUSES[found.cause].format(
                subject=_subject(metric, kind, measure),
                damage=_amount(found.damage, found.damage_se, unit=unit),
                shift=_amount(found.shift, found.shift_se, unit=unit),
            )
            + _unseen(found.unseen, found.unseen_se, "at margins that were not there before", unit=unit)
            + _margins(found)
        )
    elif found.cause == TOO_FEW:
        said.append(_too_few(found))
    if found.divergence_damage is not None and found.divergence_shift is not None:
        said.append(_divergence(found, measure))
    if (
        found.aggregate_cause in _AGGREGATE
        and found.aggregate_within is not None
        and found.aggregate_mix is not None
    ):
        said.append(_over_all_traffic(found, unit))
    elif found.aggregate_cause == TOO_FEW:
        said.append("Of all traffic there are too few exchanges before or since the onset to split its move.")
    said += _moved(found)
    if found.compared_with:
        before = count_of(found.n_window_before or 0, "exchange")
        said.append(f"Held against {found.compared_with} ({before}, {found.n_window_after or 0:,} since).")
    return tuple(said)


def _divergence(found: Explanation, measure: Measure) -> str:
    """Return how the mean divergence moved where another measure decided."""
    damage, shift, unseen = (
        (value or 0.0, se)
        for value, se in (
            (found.divergence_damage, found.divergence_damage_se),
            (found.divergence_shift, found.divergence_shift_se),
            (found.divergence_unseen, found.divergence_unseen_se),
        )
    )
    if all(not value or _by_chance(value, se) for value, se in (damage, shift, unseen)):
        return f"Mean {measure.name} did not move beyond chance."
    unit = _unit(measure)
    new = _unseen(*unseen, "at margins that were not there before", unit=unit)
    return (
        f"Mean {measure.name} moved by {_amount(*damage, unit=unit)} at equal margins and by "
        f"{_amount(*shift, unit=unit)} by other margins{new}."
    )


def _over_all_traffic(found: Explanation, unit: str) -> str:
    """Return how the mean over all traffic moved; a move that chance may have made is told as none, without its parts."""
    move, raised = found.aggregate_move or 0.0, _RAISED.get(found.aggregate_cause or "", "")
    if _by_chance(move, found.aggregate_move_se):
        parts = (
            (found.aggregate_within, found.aggregate_within_se, "within its slices"),
            (found.aggregate_mix, found.aggregate_mix_se, "by another mix of traffic"),
            (found.aggregate_unseen, found.aggregate_unseen_se, "by traffic that is new or was rare before"),
        )
        seen = [
            f"{_amount(value, se, unit=unit)} {where}"
            for value, se, where in parts
            if value and not _by_chance(value, se)
        ]
        although = f", although {raised}: {', '.join(seen)}" if raised and seen else ""
        return f"Over all traffic nothing moved beyond chance{although}."
    told = (_AGAINST if raised and move <= 0 else _AGGREGATE[found.aggregate_cause or ""]).format(
        raised=raised,
        move=_amount(move, found.aggregate_move_se, unit=unit),
        within=_amount(found.aggregate_within or 0.0, found.aggregate_within_se, unit=unit),
        mix=_amount(found.aggregate_mix or 0.0, found.aggregate_mix_se, unit=unit),
    )
    unseen = _unseen(
        found.aggregate_unseen,
        found.aggregate_unseen_se,
        "traffic that is new or was rare before",
        unit=unit,
    )
    return f"{told}{unseen}."


def _too_few(found: Explanation) -> str:
    """Return why nothing is named."""
    return (
        f"Too few to tell damage from input shift: {count_of(found.n_window_before or 0, 'exchange')} of the slice "
        f"before the onset and {found.n_window_after or 0:,} since; {FEWEST_BEFORE} and {FEWEST_AFTER} independent ones "
        "with a margin are needed."
    )


def _unseen(value: float | None, se: float | None, what: str, *, unit: str) -> str:
    """Return what is neither; nothing where there was no such traffic."""
    return "" if not value else f"; {what}: {_amount(value, se, unit=unit)}"


def _folded(found: Explanation) -> list[str]:
    said = []
    if found.explained_by:
        said.append(
            f"Explained by {found.explained_by}, which alerts too: without its items nothing is left of this alert."
        )
    if found.explains:
        said.append(f"Explains {', '.join(found.explains)}: without this slice nothing is left of them.")
    return said


def _not_finite(found: Explanation) -> list[str]:
    if not found.not_finite:
        return []
    earlier = (
        "" if found.not_finite_before is None else f" (before: {percent(found.not_finite_before, _DIGITS)})"
    )
    share = f"{percent(found.not_finite, _DIGITS)} of the slice's outputs since the onset"
    return [
        f"No numbers: {share} are not a number, infinite or empty{earlier}. Each is a flip and has no divergence."
    ]


def _moved(found: Explanation) -> list[str]:
    if not found.n_measures:
        return []
    others = count_of(found.n_measures, "other measure")
    # A move that six digits do not show is none to anybody who reads it.
    moves = [
        f"{name} from {told[0]} to {told[1]}"
        for name, before, after in zip(found.moved, found.moved_before, found.moved_after, strict=True)
        if (told := from_to(before, after, _DIGITS))
    ]
    if not moves:
        return [f"Beside it nothing moved beyond chance, of {others}."]
    more = f" and {len(moves) - _MOST_MOVED} more" if len(moves) > _MOST_MOVED else ""
    return [f"Beside it moved {', '.join(moves[:_MOST_MOVED])}{more}, of {others}."]


def _subject(metric: Metric, kind: str, measure: Measure) -> str:
    if kind == TAIL.kind:
        return "the share of items in the tail"
    return "the flip rate" if metric is Metric.FLIP else f"mean {measure.name}"


def _margins(found: Explanation) -> str:
    if found.low_margin_before is None or found.low_margin_after is None:
        return "."
    told = from_to(100 * found.low_margin_before, 100 * found.low_margin_after, _DIGITS)
    if told is None:
        return f"; close calls (margin below 0.1) are {percent(found.low_margin_after, _DIGITS)} of the slice, as before."
    return f"; close calls (margin below 0.1) were {told[0]} % of the slice and are {told[1]} %."


def _unit(measure: Measure) -> str:
    return f" {measure.unit}" if measure.unit else ""


def _by_chance(value: float, se: float | None) -> bool:
    """Return whether a part may be chance: within 1.96 standard errors of nothing, the bound by which causes are named."""
    return se is not None and not (math.isfinite(se) and abs(value) > Z * se)


def _amount(value: float, se: float | None, *, unit: str) -> str:
    """Return a part of a move; one that may be chance is no finding, and its digits are not told."""
    scale = 100 if unit == " points" else 1
    # An error of 0 is that of a part of which nothing is known.
    error = f"standard error {number(scale * se)}" if se and math.isfinite(se) else ""
    if _by_chance(value, se):
        return f"nothing beyond chance{f' ({error}{unit})' if error else ''}"
    figure = number(scale * value, _DIGITS)
    if figure == "0":
        return "nothing"
    told = f"{'+' if value > 0 else ''}{figure}{unit}"
    return f"{told} ({error})" if error else told
