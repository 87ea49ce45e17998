"""The diagnosis of an alert as text, for the alert and the report. Nothing is decided here."""

from quantdrift.core.notation import count_of, number, percent
from quantdrift.core.records import Metric
from quantdrift.core.tasks import MEASURES
from quantdrift.drift.explain.diagnosis import Aggregate, AggregateState, Begin, Decided, Kind
from quantdrift.drift.explain.mix import FEWEST_BEFORE

_CAUSES = {
    "unseen": "its inputs are of a kind that it did not receive before, so there is nothing to compare with. Find out"
    " who sends them.",
    "input_shift": "it behaves as before, and its inputs moved towards the decision boundary. Find out who sends them;"
    " calibrating again does not change the inputs.",
}
_CAUSE_ELSE = (
    "its inputs or its serving environment changed. Check whether the calibration set contains inputs like those that"
    " this slice receives now."
)


def decided(deciding: Decided, since: str) -> str:
    """Return what decided an alert as one clause: the value since the onset and the value it is compared with.

    Parameters
    ----------
    since
        The onset, as words that follow `since`.
    """
    if deciding.kind == Kind.TAIL:
        return _tail(deciding, since)
    if deciding.after is None:
        return ""
    share = deciding.metric is Metric.FLIP
    observed = (
        f"{percent(deciding.after)} of decisions changed"
        if share
        else f"mean {_amount(deciding, deciding.after)}"
    )
    observed = f"{observed} since {since} ({count_of(deciding.n_after, 'exchange')})"
    if deciding.kind == Kind.CHANGE:
        before = "" if deciding.before is None else f", {_value(deciding, deciding.before)} before"
        return f"{observed}{before}"
    if deciding.budget is None:
        return observed
    noise = f" and {_value(deciding, deciding.noise)} for noise" if deciding.noise else ""
    return f"{observed}, {_value(deciding, deciding.budget)} accepted{noise}"


def aggregate(all_traffic: Aggregate, metric: Metric, unit: str) -> str:
    """Return the state of the aggregate as a clause, for use after `while` or alone."""
    at = "" if all_traffic.mean is None else f" at {_plain(metric, all_traffic.mean, unit)}"
    match all_traffic.state:
        case AggregateState.FINE:
            return f"the aggregate is fine{at}"
        case AggregateState.UNKNOWN:
            return f"it is not known whether the aggregate is within its budget{f' ({at.strip()})' if at else ''}"
        case AggregateState.QUIET if all_traffic.mean is not None and all_traffic.accepted is not None:
            return f"the aggregate{at} is above its budget of {_plain(metric, all_traffic.accepted, unit)} too, without an alert yet"
        case AggregateState.QUIET:
            return f"the aggregate does not alert{at and f' ({at.strip()})'}"
        case AggregateState.ALERTING:
            return f"the aggregate drifts too{at}"
    return "this is the aggregate"


def first_step(begin: Begin, version: str, n_before: int, cause: str | None) -> str:
    """Return where to look first, by the state of the slice before the onset.

    Parameters
    ----------
    version
        Name of the candidate version.
    n_before
        Exchanges of the slice that were compared before the onset.
    cause
        `DamageCause` of the move, where it is known.
    """
    match begin:
        case Begin.NEW_VERSION:
            return (
                f"The version is new ({version} was first seen within an hour of the estimated onset): compare it with"
                " the version that served before, and roll back if that one is better."
            )
        case Begin.FIRST_SEEN:
            known = count_of(n_before, "exchange") if n_before else "no exchange"
            return (
                f"The slice has no history before the drift ({known} before the estimated onset, {FEWEST_BEFORE} are"
                " needed to compare): it may have been as bad from its first exchange. Compare it with the version"
                " that served before, if there was one, and roll back if that one is better."
            )
        case Begin.OLDER:
            return "The slice was above its budget already before the estimated onset: the fault is older than the alert."
        case Begin.CHANGED:
            return (
                f"The version did not change ({version}, one reference throughout):"
                f" {_CAUSES.get(cause or '', _CAUSE_ELSE)}"
            )


def _tail(deciding: Decided, since: str) -> str:
    name = MEASURES[deciding.task].name
    if deciding.tail_level is not None and deciding.tail_after is not None:
        before = "" if deciding.tail_before is None else f", {percent(deciding.tail_before)} before"
        level = _value(deciding, deciding.tail_level)
        return (
            f"{percent(deciding.tail_after)} of outputs have a {name} above {level} since {since}"
            f" ({count_of(deciding.n_after, 'exchange')}){before}"
        )
    if deciding.after is None:
        return ""
    before = "" if deciding.before is None else f", {_value(deciding, deciding.before)} before"
    return f"p99 of {_amount(deciding, deciding.after)} since {since} ({count_of(deciding.n_after, 'exchange')}){before}"


def _amount(deciding: Decided, value: float) -> str:
    return f"{MEASURES[deciding.task].name} {_value(deciding, value)}"


def _value(deciding: Decided, value: float) -> str:
    return _plain(deciding.metric, value, MEASURES[deciding.task].unit)


def _plain(metric: Metric, value: float, unit: str) -> str:
    return percent(value) if metric is Metric.FLIP else f"{number(value)} {unit}".rstrip()
