"""An explanation in words: one sentence per finding, the most telling first."""

from quantdrift.core.records import Metric, Verdict
from quantdrift.core.task import MEASURES, Measure, Task
from quantdrift.drift.detector import CHANGE, TAIL
from quantdrift.drift.mix import FEWEST_AFTER, FEWEST_BEFORE
from storage.explained import Explanation

_MOST_MOVED = 6
_SE_TOLD = 100  # digits of a figure far below its standard error say nothing
INPUT_SHIFT, UNSEEN, TOO_FEW = "input_shift", "unseen", "too_few"
_REASONS = {
    (True, CHANGE.kind): "the flip rate is above its learned baseline",
    (True, TAIL.kind): "the upper tail of the divergence is above its learned baseline",
    (True, ""): "the mean divergence is above the budget",
    (False, CHANGE.kind): "the flip rate seems to be above its learned baseline",
    (False, TAIL.kind): "the upper tail of the divergence seems to be above its learned baseline",
    (False, ""): "the mean divergence seems to be above the budget",
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
    UNSEEN: "Over all traffic it moved by {move}: by traffic that is new, while its slices changed by {within} and the "
    "mix of the others moved it by {mix}",
    "mix": "Over all traffic it moved by {move}: the traffic is spread over the slices in another way ({mix}), "
    "while within them it moved by {within}",
    "both": "Over all traffic it moved by {move}: {within} within its slices and {mix} by another mix of traffic",
    "undecided": "Over all traffic it moved by {move}, which cannot be told from chance or be split: {within} "
    "within the slices, {mix} by the mix of traffic",
}
# One part is surely above zero, and the others outweigh it.
_AGAINST = "Over all traffic it moved by {move}, although {raised}: {within} within the slices and {mix} by the mix of traffic"
_RAISED = {
    "within": "its slices rose",
    UNSEEN: "traffic that is new raised it",
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


def reason_of(kind: str, *, page: bool) -> str:
    """Return why a slice alerts, in words, by the kind of detector that has the most evidence.

    Parameters
    ----------
    kind
        `budget`, `change` or `tail`.
    page
        Whether it is beyond doubt; else a ticket.
    """
    return _REASONS.get((page, kind), _REASONS[page, ""])


def advice(
    metric: Metric,
    task: Task,
    aggregate: Verdict,
    onset: str,
    *,
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
        The verdict over all of the version's traffic.
    onset
        Its estimate, ISO 8601.
    cause
        Damage, input shift or inputs that are new, where it is known and decided.
    explained_by
        A smaller slice that alerts and explains this alert.
    """
    where = (
        "The aggregate is fine: route this slice to the unquantised model while you look."
        if aggregate is Verdict.OK
        else "The aggregate is not fine either: look at the whole candidate version first."
    )
    if explained_by:
        where = f"Look at {explained_by} first: without it nothing is left of this alert."
    guess = _GUESS.get(metric, _GUESS[Metric.FLIP]) if task is Task.CLASSIFICATION else _GUESS_ELSE
    what = _ADVICE.get(cause or "") or f"{guess} {_MEND}"
    return f"{where} Look for what changed around {onset}. {what}"


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
    if found.cause and found.damage is not None and found.shift is not None:
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
        said.append(
            f"Mean {measure.name} moved by "
            f"{_amount(found.divergence_damage, found.divergence_damage_se, unit=_unit(measure))} at equal margins and by "
            f"{_amount(found.divergence_shift, found.divergence_shift_se, unit=_unit(measure))} by other margins"
            + _unseen(
                found.divergence_unseen,
                found.divergence_unseen_se,
                "at margins that were not there before",
                unit=_unit(measure),
            )
            + "."
        )
    if found.aggregate_cause and found.aggregate_within is not None and found.aggregate_mix is not None:
        move, raised = found.aggregate_move or 0.0, _RAISED.get(found.aggregate_cause, "")
        said.append(
            (_AGAINST if raised and move <= 0 else _AGGREGATE[found.aggregate_cause]).format(
                raised=raised,
                move=_amount(move, None, unit=unit),
                within=_amount(found.aggregate_within, found.aggregate_within_se, unit=unit),
                mix=_amount(found.aggregate_mix, found.aggregate_mix_se, unit=unit),
            )
            + _unseen(
                found.aggregate_unseen,
                found.aggregate_unseen_se,
                "traffic that was not there before",
                unit=unit,
            )
            + "."
        )
    elif found.aggregate_cause == TOO_FEW:
        said.append("Of all traffic there are too few exchanges before or since the onset to split its move.")
    said += _moved(found)
    if found.compared_with:
        since = f"{found.n_window_after or 0:,} since"
        said.append(
            f"Held against {found.compared_with} ({found.n_window_before or 0:,} exchanges, {since})."
        )
    return tuple(said)


def _too_few(found: Explanation) -> str:
    """Return why nothing is named."""
    return (
        f"Too few to tell damage from input shift: {found.n_window_before or 0} exchanges of the slice before the "
        f"onset and {found.n_window_after or 0} since; {FEWEST_BEFORE} and {FEWEST_AFTER} independent ones "
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
    earlier = "" if found.not_finite_before is None else f" (before: {100 * found.not_finite_before:.3g} %)"
    share = f"{100 * found.not_finite:.3g} % of the slice's outputs since the onset"
    return [
        f"No numbers: {share} are not a number, infinite or empty{earlier}. Each is a flip and has no divergence."
    ]


def _moved(found: Explanation) -> list[str]:
    if not found.n_measures:
        return []
    if not found.moved:
        return [f"Beside it nothing moved beyond chance, of {found.n_measures} other measures."]
    told = [
        f"{name} from {before:.3g} to {after:.3g}"
        for name, before, after in zip(found.moved, found.moved_before, found.moved_after, strict=True)
    ][:_MOST_MOVED]
    more = len(found.moved) - len(told)
    others = f" and {more} more" if more else ""
    return [f"Beside it moved {', '.join(told)}{others}, of {found.n_measures} other measures."]


def _subject(metric: Metric, kind: str, measure: Measure) -> str:
    if kind == TAIL.kind:
        return "the share of items in the tail"
    return "the flip rate" if metric is Metric.FLIP else f"mean {measure.name}"


def _margins(found: Explanation) -> str:
    if found.low_margin_before is None or found.low_margin_after is None:
        return "."
    return (
        f"; close calls (margin below 0.1) were {100 * found.low_margin_before:.3g} % of the slice and are "
        f"{100 * found.low_margin_after:.3g} %."
    )


def _unit(measure: Measure) -> str:
    return f" {measure.unit}" if measure.unit else ""


def _amount(value: float, se: float | None, *, unit: str) -> str:
    scale = 100 if unit == " points" else 1
    error = "" if se is None else f" (standard error {scale * se:.2g})"
    if se and abs(value) < se / _SE_TOLD:
        value = 0.0
    return f"{scale * value:+.3g}{unit}{error}"
