"""The case of an alert in words, for the alert and the report: verdicts and cases are given, never worked out here."""

from quantdrift.core.notation import count_of, number, percent
from quantdrift.core.records import Metric
from quantdrift.core.tasks import MEASURES
from quantdrift.drift.explain.diagnosis import Aggregate, Begin, Decided, Kind, Whole
from quantdrift.drift.explain.mix import FEWEST_BEFORE

_CAUSES = {
    "unseen": "its inputs are of a kind that was not there before, so nothing tells what it always did on them. Ask who"
    " sends them.",
    "input_shift": "it does what it always did, and its inputs moved towards the decision boundary. Ask who sends them;"
    " to calibrate again will not bring them back.",
}
_CAUSE_ELSE = "its inputs did, or what serves it. See whether the calibration set holds inputs as this slice has them now."


def decided(found: Decided, since: str) -> str:
    """Return what decided an alert, in one clause: what was seen since the onset beside what it is held against.

    Parameters
    ----------
    found
        The deciding signal.
    since
        The onset in words that go after `since`.
    """
    if found.kind == Kind.TAIL:
        return _tail(found, since)
    if found.after is None:
        return ""
    share = found.metric is Metric.FLIP
    seen = f"{percent(found.after)} of decisions changed" if share else f"mean {_amount(found, found.after)}"
    seen = f"{seen} since {since} ({count_of(found.n_after, 'exchange')})"
    if found.kind == Kind.CHANGE:
        before = "" if found.before is None else f", {_value(found, found.before)} before"
        return f"{seen}{before}"
    if found.budget is None:
        return seen
    noise = f" and {_value(found, found.noise)} for noise" if found.noise else ""
    return f"{seen}, {_value(found, found.budget)} accepted{noise}"


def aggregate(found: Aggregate, metric: Metric, unit: str) -> str:
    """Return how all traffic stands, as a clause that goes after `while` or stands alone."""
    at = "" if found.mean is None else f" at {_plain(metric, found.mean, unit)}"
    match found.stands:
        case Whole.FINE:
            return f"the aggregate is fine{at}"
        case Whole.UNKNOWN:
            return f"it is not known whether the aggregate is within its budget{f' ({at.strip()})' if at else ''}"
        case Whole.QUIET if found.mean is not None and found.accepted is not None:
            return f"the aggregate{at} is above its budget of {_plain(metric, found.accepted, unit)} too, without an alert yet"
        case Whole.QUIET:
            return f"the aggregate does not alert{at and f' ({at.strip()})'}"
        case Whole.ALERTING:
            return f"the aggregate drifts too{at}"
    return "this is the aggregate"


def first_step(begin: Begin, version: str, n_before: int, cause: str | None) -> str:
    """Return where to look first, by how the slice stood before the onset.

    Parameters
    ----------
    begin
        The case.
    version
        The candidate version.
    n_before
        Exchanges of the slice that were compared before the onset.
    cause
        `DamageCause` of the move, where it is known.
    """
    match begin:
        case Begin.NEW_VERSION:
            return (
                f"The version is new ({version} came within an hour of the estimated onset): compare with the one that"
                " served before, and go back to it if that one is better."
            )
        case Begin.FIRST_SEEN:
            known = count_of(n_before, "exchange") if n_before else "no exchange"
            return (
                f"The slice has no history before the drift ({known} before the estimated onset, of {FEWEST_BEFORE} that"
                " a comparison takes): it may have been as bad from its first exchange. Compare with the version"
                " that served before, if there was one, and go back to it if that one is better."
            )
        case Begin.OLDER:
            return "The slice was above its budget before the estimated onset already: the fault is older than the alert."
        case Begin.CHANGED:
            return (
                f"The version did not change ({version}, one reference throughout):"
                f" {_CAUSES.get(cause or '', _CAUSE_ELSE)}"
            )


def _tail(found: Decided, since: str) -> str:
    name = MEASURES[found.task].name
    if found.tail_level is not None and found.tail_after is not None:
        before = "" if found.tail_before is None else f", {percent(found.tail_before)} before"
        level = _value(found, found.tail_level)
        return (
            f"{percent(found.tail_after)} of outputs have a {name} above {level} since {since}"
            f" ({count_of(found.n_after, 'exchange')}){before}"
        )
    if found.after is None:
        return ""
    before = "" if found.before is None else f", {_value(found, found.before)} before"
    return (
        f"p99 of {_amount(found, found.after)} since {since} ({count_of(found.n_after, 'exchange')}){before}"
    )


def _amount(found: Decided, value: float) -> str:
    return f"{MEASURES[found.task].name} {_value(found, value)}"


def _value(found: Decided, value: float) -> str:
    return _plain(found.metric, value, MEASURES[found.task].unit)


def _plain(metric: Metric, value: float, unit: str) -> str:
    return percent(value) if metric is Metric.FLIP else f"{number(value)} {unit}".rstrip()
