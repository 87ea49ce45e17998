"""The words for an alert: for the page, `quantdrift triage` and the report. Nothing is decided here.

The lines are for somebody who is woken at night and is no statistician: what is wrong in whole words, how sure that is,
since when, what changed then, how all other traffic is, and what to do first. Figures in other units than per cent are
in the details that follow them.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from quantdrift.core.notation import count_of, estimated, number, percent
from quantdrift.core.records import SHARES, Metric, Suspect
from quantdrift.core.tasks import MEASURES, Build
from quantdrift.drift.explain.damage import DamageCause
from quantdrift.drift.explain.diagnosis import Aggregate, AggregateState, Begin, Decided, Diagnosis, Kind
from quantdrift.drift.explain.mix import FEWEST_BEFORE

_PLAIN_RATIO: Final = 1.1  # below it, "times as far" would say nothing
_LARGEST_RATIO: Final = 1_000.0
_CHANGED = {
    DamageCause.DAMAGE: "the model answers worse where the inputs are as hard as before (numeric damage)",
    DamageCause.INPUT_SHIFT: "more inputs are close calls (input shift)",
    DamageCause.UNSEEN: "there are inputs of a kind that did not come before",
}
_ONE_CAUSE = {
    DamageCause.DAMAGE: ", and the inputs did not get harder",
    DamageCause.INPUT_SHIFT: "; where the inputs are as hard as before the model answers as before",
    DamageCause.UNSEEN: ", so there is nothing to compare them with",
}
ANSWERS: Final = {
    Suspect.MODEL: "its answers have drifted as well",
    Suspect.ENGINE: "its answers have not drifted, and all traffic together is too slow",
    Suspect.TRAFFIC: "its answers have not drifted, and all traffic together is fast enough",
    Suspect.UNKNOWN: "it is not known yet whether its answers have drifted, or whether all traffic together is too slow",
}
"""What is known of a slow candidate's answers."""
LOOK_FIRST: Final = {
    Suspect.MODEL: "look at what was deployed, the model and its engine",
    Suspect.ENGINE: "look at the engine, the machine and the load; if only some slices are slow, at their requests",
    Suspect.TRAFFIC: "look at the requests of this slice, such as their size",
    Suspect.UNKNOWN: "look at the load, then at what was deployed",
}
_AGAIN: Final = {
    Build.NETWORK: (
        "calibrate again with inputs of this slice, or quantise more finely (per channel, or with higher precision in the"
        " sensitive layers), and measure with labels which of them helps"
    ),
    Build.TREES: (
        "quantise thresholds and leaf values in finer steps, with inputs of this slice among the data that sets them, and measure"
        " with labels whether that helps"
    ),
    Build.LANGUAGE: (
        "quantise again with prompts of this slice among those that calibrate, or with more bits, and measure with judged answers"
        " which of them helps"
    ),
    Build.OTHER: (
        "quantise again with inputs of this slice, or with higher precision, and measure with labels which of them helps"
    ),
}
"""How to make a better candidate."""


def serves_no_more(version: str, last_seen: datetime | None, serving: Sequence[str]) -> str:
    """Return that a version serves no more, when it was last seen, and what serves now.

    Parameters
    ----------
    last_seen
        Capture time of its newest exchange; None: not known.
    serving
        The versions that serve now; with `version` among them it is compared with another reference now.
    """
    at = "" if last_seen is None else f" {last_seen:%Y-%m-%d %H:%M} UTC"
    if version in serving:
        return f"{version} is compared with another reference now{f'; with this one last{at}' if at else ''}."
    seen = f"{version} serves no more{f': it was last seen{at}' if at else ''}."
    if not serving:
        return seen
    now = f"{', '.join(serving[:-1])} and {serving[-1]} serve" if len(serving) > 1 else f"{serving[0]} serves"
    return f"{seen} {now} now."


def headline(case: Diagnosis) -> str:
    """Return what is wrong, in whole words, with model and version before it."""
    return f"{case.model} {case.version}: {finding(case)}"


def finding(case: Diagnosis) -> str:
    """Return what is wrong, in whole words: the measure that decided, what is accepted, and how many answers a day."""
    deciding = case.deciding
    where = "all traffic" if case.whole.itself else case.slice
    if deciding.metric is not Metric.FLIP:
        return _finding_of_another_measure(case, where)
    if deciding.after is None:
        return f"more answers in {where} changed than are accepted"
    seen = f"{percent(deciding.after)} of answers in {where} changed"
    daily = "" if case.daily is None else _daily(case.daily * deciding.after, ": some {} a day", "answer")
    if deciding.kind != Kind.CHANGE:
        if deciding.budget is not None and deciding.after <= deciding.budget + deciding.noise:
            whole_time = f"{percent(deciding.after)} in all since then{_accepted(deciding)}"
            return f"answers in {where} changed more often than is accepted for a part of the time ({whole_time})"
        return f"{seen}{_accepted(deciding)}{daily}"
    before = (
        "more than its learned baseline"
        if deciding.before is None
        else f"{percent(deciding.before)} did before"
    )
    limit = None if deciding.budget is None else deciding.budget + deciding.noise
    within = f" ({percent(limit)} is accepted)" if limit is not None else ""
    return f"{seen}, {before}{within}{daily}"


def _finding_of_another_measure(case: Diagnosis, where: str) -> str:
    """Return what is wrong where the share of changed answers did not decide."""
    deciding = case.deciding
    if deciding.metric is Metric.LATENCY:
        share = "more exchanges" if deciding.after is None else f"{percent(deciding.after)} of exchanges"
        return f"{share} in {where} took {slower(deciding.latency_budget_s)}{_accepted(deciding)}{_answers(case)}"
    if deciding.kind == Kind.TAIL:
        return f"{_tail_finding(deciding, where)}{_answers(case)}"
    return f"outputs in {where} are {_far(deciding)} from those of the unquantised model {_than(deciding)}{_answers(case)}"


def sureness(case: Diagnosis) -> str:
    """Return how sure it is that this is not chance."""
    if case.deciding.metric is Metric.LATENCY:
        timed = f"{count_of(case.deciding.n_after, 'exchange')} since then"
        learned = (
            " The time is compared with what was learned of this slice, not with a budget: more load makes it longer, too."
            if case.deciding.kind == Kind.GROWTH
            else ""
        )
        return f"How sure: likely, and not certain ({timed}). A slow model opens a ticket and never a page.{learned}"
    n = count_of(case.deciding.n_after, "answer")
    verb = "was" if case.deciding.n_after == 1 else "were"
    compared = f"{n} {verb} compared with the unquantised model since then"
    ratio = case.evidence_ratio
    if not case.page:
        sure = f"likely, and not certain: this is a ticket, and more evidence would page. {compared}."
    elif ratio is None or ratio < _PLAIN_RATIO:
        sure = f"very sure. {compared}, and the evidence is enough for a page."
    else:
        times = f"{number(ratio)} times" if ratio < _LARGEST_RATIO else "more than a thousand times"
        sure = f"very sure. {compared}, and the evidence is {times} what a page needs."
    if case.deciding.kind == Kind.BUDGET:
        return f"How sure: {sure}"
    what = "The worst outputs are" if case.deciding.kind == Kind.TAIL else "The slice is"
    return f"How sure: {sure} {what} compared with what was learned before, not with the budget."


def since(case: Diagnosis) -> str:
    """Return since when, and what is known of the time before."""
    at = f"{case.onset:%Y-%m-%d %H:%M} UTC"
    match case.begin:
        case Begin.NEW_VERSION:
            return f"Since: about {at} (estimated), when version {case.version} was new: it was first seen within an hour of then."
        case Begin.FIRST_SEEN:
            known = (
                "No answer of this slice was"
                if not case.n_before
                else f"Only {count_of(case.n_before, 'answer')} of this slice {'was' if case.n_before == 1 else 'were'}"
            )
            return (
                f"Since: perhaps its first answer. {known} compared before {at}, and {FEWEST_BEFORE} are needed to say that"
                " anything changed."
            )
        case Begin.OLDER:
            return f"Since: before {at}: it was above its budget already before the estimated onset, so the fault is older than the alert."
        case Begin.CHANGED:
            return f"Since: about {at} (estimated){_before(case.deciding)}."


def changed(case: Diagnosis) -> str:
    """Return what changed around the onset, as far as is known."""
    news = f" New since about then: {'; '.join(case.news)}." if case.news else ""
    version = f"the version ({case.version} is new)" if case.begin is Begin.NEW_VERSION else ""
    if case.causes:
        known = ", and ".join(_CHANGED[cause] for cause in case.causes)
        more = _ONE_CAUSE[case.causes[0]] if len(case.causes) == 1 else ""
        several = "several things: " if len(case.causes) > 1 else ""
        return f"What changed: {version}{'; ' if version else ''}{several}{known}{more}.{news}"
    if version:
        return f"What changed: {version}.{news}"
    if case.undecided:
        return f"What changed: not known yet: worse answers and harder inputs cannot be told apart.{news}"
    if case.news:
        return f"What changed:{news[len(' New since about then:') :]}"
    if case.begin is Begin.CHANGED:
        return "What changed: not known."
    return "What changed: not known, because too little from before can be compared with."


def slower(limit_s: float | None) -> str:
    """Return what counts as slow, as words that follow `took`."""
    return "longer than the latency budget" if limit_s is None else f"longer than {number(limit_s)} s"


def news(changes: Iterable[str]) -> list[str]:
    """Return the sentences of an explanation on what is new; `changed` says the same in one line."""
    return [f"New around the onset: {change}." for change in changes]


def elsewhere(case: Diagnosis) -> str:
    """Return how all traffic of the version is, empty where the alert is about it; of a slow model how its answers are."""
    if case.deciding.metric is Metric.LATENCY:
        answers = ANSWERS[case.deciding.suspect or Suspect.UNKNOWN]
        return f"{answers[0].upper()}{answers[1:]}."
    return _all_traffic(case)


def _all_traffic(case: Diagnosis) -> str:
    whole = case.whole
    share = case.deciding.metric is Metric.FLIP
    mean = f" ({percent(whole.mean)} changed)" if share and whole.mean is not None else ""
    match whole.state:
        case AggregateState.ITSELF:
            return ""
        case AggregateState.FINE:
            return f"All traffic together: within its budget{mean}."
        case AggregateState.UNKNOWN:
            return f"All traffic together: not known whether it is within its budget{mean}."
        case AggregateState.ALERTING:
            return f"All traffic together: alerts too{mean}."
    if whole.mean is None or whole.accepted is None:
        return f"All traffic together: does not alert{mean}."
    figures = f" ({percent(whole.mean)} changed, {percent(whole.accepted)} is accepted)" if share else ""
    return f"All traffic together: above its budget too{figures}, without an alert yet."


def first_step(case: Diagnosis) -> str:
    """Return what to do first, and then."""
    if case.explained_by:
        return f"look at {case.explained_by}: without its answers this alert vanishes."
    if case.deciding.metric is Metric.LATENCY:
        return f"{LOOK_FIRST[case.deciding.suspect or Suspect.UNKNOWN]}."
    whole = case.whole.itself or case.whole.state is AggregateState.ALERTING
    part = "the traffic" if whole else case.slice
    match case.begin:
        case Begin.NEW_VERSION:
            return (
                f"compare version {case.version} with the one that served before, and roll back if that one is better."
                f" Then {_AGAIN[case.build]}."
            )
        case Begin.FIRST_SEEN:
            return (
                "compare it with the version that served before, if there was one, and roll back if that one is better."
                f" Else send {part} to the unquantised model, and {_AGAIN[case.build]}."
            )
    return _cure(case, part)


def _cure(case: Diagnosis, part: str) -> str:
    """Return what to do about a slice with a history."""
    if case.causes == (DamageCause.INPUT_SHIFT,):
        return (
            "find out who sends these inputs, and label a few: a changed answer to a close call is not always wrong."
            " Calibrating again does not change the inputs."
        )
    if case.causes == (DamageCause.UNSEEN,):
        return "find out who sends these inputs, and label a few. Then add them to the calibration set and to the evaluation."
    route = f"send {part} to the unquantised model until this is fixed"
    if case.causes == (DamageCause.DAMAGE,):
        return f"{route}. Then {_AGAIN[case.build]}."
    if case.causes:
        return f"{route}, and find out who sends these inputs. Then {_AGAIN[case.build]}."
    if case.begin is Begin.OLDER:
        return f"{route}. Then {_AGAIN[case.build]}."
    return (
        "look for what changed about then: inputs, servers, preprocessing. Until it is found, "
        f"send {part} to the unquantised model. If nothing is found, the calibration set most often lacked such inputs:"
        f" {_AGAIN[case.build]}."
    )


def _accepted(deciding: Decided) -> str:
    if deciding.budget is None:
        return ""
    noise = f", and {percent(deciding.noise)} more for noise" if deciding.noise else ""
    return f", {percent(deciding.budget)} is accepted{noise}"


def _far(deciding: Decided) -> str:
    """Return how far outputs are from the reference, in words that a `than` or an `as` follows."""
    ratio = _ratio(deciding)
    if ratio is None or ratio < _PLAIN_RATIO:
        return "further"
    return f"{number(ratio)} times as far" if ratio < _LARGEST_RATIO else "more than a thousand times as far"


def _than(deciding: Decided) -> str:
    ratio = _ratio(deciding)
    return "than is accepted" if ratio is None or ratio < _PLAIN_RATIO else "as is accepted"


def _ratio(deciding: Decided) -> float | None:
    limit = (deciding.budget or 0.0) + deciding.noise
    return deciding.after / limit if deciding.after is not None and limit > 0 else None


def _tail_finding(deciding: Decided, where: str) -> str:
    if deciding.tail_level is not None and deciding.tail_after is not None:
        before = "" if deciding.tail_before is None else f", {percent(deciding.tail_before)} were before"
        return f"{percent(deciding.tail_after)} of outputs in {where} are far from those of the unquantised model{before}"
    if deciding.after is None or not deciding.before or deciding.after < _PLAIN_RATIO * deciding.before:
        return f"the worst outputs in {where} are further from those of the unquantised model than before"
    return f"the worst outputs in {where} are {number(deciding.after / deciding.before)} times as far from those of the unquantised model as before"


def _answers(case: Diagnosis) -> str:
    """Return how many answers changed, where another measure decided; empty where that is not known."""
    if case.changed is None:
        return ""
    daily = "" if case.daily is None else _daily(case.daily * case.changed, ", some {} a day")
    return f"; {percent(case.changed)} of answers changed{daily}"


def _daily(n: float, form: str, noun: str = "") -> str:
    """Return a number of answers a day with two significant digits; empty below one."""
    if n < 1:
        return ""
    rounded = estimated(n)
    return form.format(count_of(rounded, noun) if noun else f"{rounded:,}")


def _before(deciding: Decided) -> str:
    if deciding.before is None or deciding.metric is not Metric.FLIP or deciding.kind == Kind.CHANGE:
        return ""
    return f"; {percent(deciding.before)} changed before"


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
    took = f"took {slower(deciding.latency_budget_s)}"
    observed = (
        f"{percent(deciding.after)} of exchanges {took}"
        if deciding.metric is Metric.LATENCY
        else f"{percent(deciding.after)} of answers changed"
        if deciding.metric is Metric.FLIP
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
    return percent(value) if metric in SHARES else f"{number(value)} {unit}".rstrip()
