"""The words of an alert: what it says when it opens, gets worse or ends.

The lines are for somebody who is woken at night and is no statistician: what is wrong, how many answers, how certain that is, since
when, what changed then, how all other traffic is, and what to do now. Statistics are in the details.
"""

from typing import Final

from quantdrift.core.notation import capital, count_of, estimated, number, percent
from quantdrift.core.records import UNVERIFIED, Metric, Suspect
from quantdrift.core.signals import DetectorKind, SignalForm, signal_of
from quantdrift.core.slices import EVERYTHING
from quantdrift.facts.events import AggregateState, AlertEvent
from quantdrift.facts.explanation import Begin, DamageCause
from quantdrift.facts.words.details import details
from quantdrift.facts.words.ending import ended
from quantdrift.facts.words.happened import SINCE, began
from quantdrift.facts.words.model import full_precision, slower
from quantdrift.facts.words.steps import LOOK_FIRST, Ways, do_now, tomorrow
from quantdrift.facts.words.text import AlertText, Line

_PLAIN_RATIO: Final = 1.1  # below it, "times as far" would say nothing
_LARGEST_RATIO: Final = 1_000.0
_NO_WAYS: Final = Ways()
_CHANGED: Final = {
    DamageCause.DAMAGE: "the model answers worse on inputs that are as hard as before (numeric damage)",
    DamageCause.INPUT_SHIFT: "more inputs are close calls (input shift)",
    DamageCause.UNSEEN: "there are inputs of a kind that did not come before",
}
_ONE_CAUSE: Final = {
    DamageCause.DAMAGE: " The inputs did not get harder.",
    DamageCause.INPUT_SHIFT: " On inputs that are as hard as before, the model answers as before.",
    DamageCause.UNSEEN: " There is nothing to compare them with.",
}
_ANSWERS: Final = {
    Suspect.MODEL: "its answers have drifted, too",
    Suspect.ENGINE: "its answers have not drifted, and all traffic together is too slow",
    Suspect.TRAFFIC: "its answers have not drifted, and all traffic together is fast enough",
    Suspect.UNKNOWN: "it is not known yet if its answers have drifted, or if all traffic together is too slow",
}
RETURNED: Final = "this version serves again, and its alert lasts"
"""Reason of an alert that is open again."""
_NO_PAGE: Final = "a ticket and never a page, because "
UNVERIFIED_SENDERS: Final = (
    f"{_NO_PAGE}nobody checked who sent these exchanges: give that way in a token or a checked user"
)


def text_of(event: AlertEvent, ways: Ways = _NO_WAYS) -> AlertText:
    """Return the text of an alert.

    Parameters
    ----------
    ways
        What can be done about this slice in this installation.
    """
    if not event.is_open:
        return ended(event)
    explanation, version = event.explanation, event.slice.version
    lines = [
        Line(text=f"{version} serves again, so its alert is open again.")
        if event.change.reason == RETURNED
        else None,
        Line(text=f"It is {UNVERIFIED_SENDERS}.") if version.endswith(UNVERIFIED) else None,
        *(Line(text=f"It is {why}.") for why in event.change.reason.split("; ") if _is_doubt(why)),
        _how_many(event),
        Line(label="Which inputs", text=f"{explanation.sets_apart}.") if explanation.sets_apart else None,
        Line(label="Confidence", text=_confidence(event)),
        Line(label=SINCE, text=_since(event)),
        Line(label="What changed", text=_what_changed(event)),
        _invalid(event),
        Line(label="Doubt about the configuration", text=f"{explanation.doubt}.")
        if explanation.doubt
        else None,
        _elsewhere(event),
        Line(
            label="Also alerts",
            text=f"{', '.join(explanation.explains)}. Without {event.slice.name} that would not alert.",
        )
        if explanation.explains
        else None,
    ]
    return AlertText(
        headline=f"{event.slice.model} {version}: {finding(event)}.",
        lines=tuple(line for line in lines if line is not None),
        do_now=do_now(event, ways),
        tomorrow=tomorrow(event, ways),
        details=details(event),
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
    """Return why a slice alerts, from the signal with the most evidence.

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
    reason = signal_of(metric).kinds[DetectorKind(kind)].reason.format(is_="is" if page else "seems to be")
    if suspect is not None:
        reason = f"{reason}; {_ANSWERS[suspect]}: {LOOK_FIRST[suspect]}"
    return "; ".join(filter(None, (reason, "" if is_verified else UNVERIFIED_SENDERS, doubt)))


def _is_doubt(reason: str) -> bool:
    return reason.startswith(_NO_PAGE) and reason != UNVERIFIED_SENDERS


def finding(event: AlertEvent) -> str:
    """Return what is wrong and where: the measure that decided, beside its budget."""
    evidence, where = event.evidence, _where(event)
    form = evidence.signal.form
    if form is SignalForm.SLOW:
        share = "more exchanges" if evidence.after is None else f"{percent(evidence.after)} of exchanges"
        return f"{share} in {where} took {slower(evidence.latency_budget_s)}{_budget(event)}"
    if form in {SignalForm.DIVERGENCE, SignalForm.SHARE}:
        if form is SignalForm.SHARE:
            moved = _more(event, where)
        else:
            moved = _tail(event, where) if evidence.detector == DetectorKind.TAIL else _far(event, where)
        also = event.explanation.changed
        return moved if also is None else f"{moved}; {percent(also)} of answers changed"
    said_share = _share(event)
    if said_share is None:
        return f"more answers in {where} changed than the budget allows"
    changed, text = said_share
    if evidence.detector == DetectorKind.CHANGE:
        before = (
            "more than its learned baseline"
            if evidence.before is None
            else f"{percent(evidence.before)} before"
        )
        return f"{text} of answers in {where} changed, {before}{_budget(event)}"
    if changed <= event.limit:
        whole = f"{percent(changed)} in all since then, budget: {_allowed(event)}"
        return f"for a part of the time more answers in {where} changed than the budget allows ({whole})"
    return f"{text} of answers in {where} changed{_budget(event)}"


def _more(event: AlertEvent, where: str) -> str:
    """Return what share of the things of a signal does what it names, beside its budget or what was before."""
    evidence, signal = event.evidence, event.evidence.signal
    what = f"{signal.things} in {where} {signal.verb}"
    if evidence.detector == DetectorKind.TAIL:
        if evidence.tail_level is None or evidence.tail_after is None:
            return f"in the worst outputs more {what} than before"
        were = "" if evidence.tail_before is None else f", {percent(evidence.tail_before)} before"
        return f"in {percent(evidence.tail_after)} of outputs{were}, more than {percent(evidence.tail_level)} of {what}"
    share = f"more {what}" if evidence.after is None else f"{percent(evidence.after)} of {what}"
    if evidence.detector != DetectorKind.CHANGE:
        return f"{share}{_budget(event)}"
    before = (
        "more than its learned baseline" if evidence.before is None else f"{percent(evidence.before)} before"
    )
    return f"{share}, {before}{_budget(event)}"


def _share(event: AlertEvent) -> tuple[float, str] | None:
    """Return the share of changed answers that the first line names, and its words.

    A share that was taken when an alert opened is too high, because it opened: the lower end is said wherever it is beyond what the
    share is compared with.
    """
    evidence, explanation = event.evidence, event.explanation
    share = evidence.after if explanation.changed is None else explanation.changed
    if share is None:
        return None
    least = event.limit if evidence.detector != DetectorKind.CHANGE else evidence.before
    low = explanation.changed_low
    if low is not None and least is not None and least < low < share:
        return low, f"at least {percent(low)}"
    return share, percent(share)


def _how_many(event: AlertEvent) -> Line | None:
    """Return how many answers changed when the alert opened; None where that is not known."""
    explanation = event.explanation
    share, n = explanation.changed, explanation.n_answers
    if share is None or not n:
        return None
    people = (
        "" if explanation.n_people is None else f" of {count_of(explanation.n_people, 'person', 'people')}"
    )
    opened = "it paged" if event.pages else "the ticket opened"
    low = explanation.changed_low
    least = (
        f" Such a first number is often too high: the true share is at least {percent(low)}."
        if low and low < share
        else ""
    )
    # A ticket and its page a minute later name different rates: each says which minutes it is of.
    basis = f"{explanation.basis} before {opened}" if explanation.basis else "at the rate since the onset"
    a_day = (
        f" That is some {count_of(estimated(event.daily), 'changed answer')} a day, {basis}."
        if event.daily >= 1
        else ""
    )
    return Line(
        label="How many",
        text=f"{percent(share)} of {count_of(n, 'answer')}{people} when {opened}.{a_day}{least}",
    )


def _confidence(event: AlertEvent) -> str:
    """Return how certain it is that this is not chance, and what the alert does not mean."""
    kind, signal = event.evidence.detector, event.evidence.signal
    if signal.is_about_speed:
        load = (
            " It means slower than before, not over a budget: more load makes answers slower, too."
            if kind == DetectorKind.GROWTH
            else ""
        )
        return f"likely, not certain. Slow answers open a ticket and never page.{load}"
    if not signal.pages:
        return "likely, not certain. This signal opens a ticket and never pages."
    certain = (
        "almost certain, this is not chance."
        if event.pages
        else "likely, not certain. This is a ticket; more evidence would page."
    )
    return (
        certain
        if kind == DetectorKind.BUDGET
        else f"{certain} It means worse than before. It does not mean over the budget."
    )


def _since(event: AlertEvent) -> str:
    """Return since when, and what is known of the time before."""
    at = moment(event)
    match event.begin:
        case Begin.NEW_VERSION:
            return f"about {at} (estimated), when version {event.slice.version} was new."
        case Begin.FIRST_SEEN:
            return f"not known. Too little was compared before {at} to say if it was better then."
        case Begin.OLDER:
            return f"before {at}. It was above the budget before then already, so the fault is older than the alert."
    evidence = event.evidence
    before = ""
    if (
        evidence.signal.form is SignalForm.CHANGED
        and evidence.detector == DetectorKind.BUDGET
        and evidence.before is not None
    ):
        before = f" Before that, {percent(evidence.before)} of answers changed."
    return f"{began(at)}{before}"


def moment(event: AlertEvent) -> str:
    """Return the estimated onset."""
    return "not known" if event.onset is None else f"{event.onset:%Y-%m-%d %H:%M} UTC"


def _what_changed(event: AlertEvent) -> str:
    """Return what changed around the onset, as far as is known."""
    explanation = event.explanation
    causes = explanation.causes
    news = f" New at about that time: {'; '.join(explanation.changes)}." if explanation.changes else ""
    version = f"the version ({event.slice.version} is new)" if event.begin is Begin.NEW_VERSION else ""
    if causes:
        several = "several things: " if len(causes) > 1 else ""
        more = _ONE_CAUSE[causes[0]] if len(causes) == 1 else ""
        changed = f"{several}{', and '.join(_CHANGED[cause] for cause in causes)}"
        return f"{version}{'; ' if version else ''}{changed}.{more}{news}"
    if version:
        return f"{version}.{news}"
    if explanation.cause == DamageCause.UNDECIDED:
        return f"not known yet. The data cannot tell worse answers from harder inputs.{news}"
    if news:
        return news.removeprefix(" New at about that time: ")
    few = " There is too little data from before." if event.begin is Begin.FIRST_SEEN else ""
    return f"not known.{few}"


def _invalid(event: AlertEvent) -> Line | None:
    share, before = event.explanation.not_finite, event.explanation.not_finite_before
    if not share:
        return None
    earlier = "" if before is None else f" (before: {percent(before, 3)})"
    return Line(
        label="Invalid outputs",
        text=(
            f"{percent(share, 3)} of the slice's outputs since the onset are not a number, infinite or empty{earlier}."
            " Each of them counts as a changed answer."
        ),
    )


def _elsewhere(event: AlertEvent) -> Line | None:
    """Return how all traffic is; of a slow model how its answers are. None where the alert is about all traffic."""
    evidence, whole = event.evidence, event.aggregate
    signal = evidence.signal
    if signal.is_about_speed:
        answers = _ANSWERS[evidence.suspect or Suspect.UNKNOWN]
        return Line(text=f"{capital(answers)}.")
    verb = f" of {signal.things} {signal.verb}" if signal.things else " changed"
    mean = f" ({percent(whole.mean)}{verb})" if signal.is_share and whole.mean is not None else ""
    match event.whole:
        case AggregateState.ITSELF:
            return None
        case AggregateState.FINE:
            text = f"within its budget{mean}"
        case AggregateState.UNKNOWN:
            text = f"not known if it is within its budget{mean}"
        case AggregateState.ALERTING:
            text = f"alerts, too{mean}"
        case AggregateState.QUIET if whole.mean is not None and whole.accepted is not None:
            figures = (
                f" ({percent(whole.mean)}{verb}, budget: {percent(whole.accepted)})"
                if signal.is_share
                else ""
            )
            text = f"above its budget, too{figures}, but without an alert yet"
        case _:
            text = f"does not alert{mean}"
    return Line(label="All traffic", text=f"{text}.")


def _where(event: AlertEvent) -> str:
    if event.slice.predicate == EVERYTHING:
        return "all traffic"
    mostly = event.explanation.mostly
    return f"{event.slice.name} (mostly {mostly})" if mostly else event.slice.name


def _allowed(event: AlertEvent) -> str:
    noise = event.evidence.noise
    return f"{percent(event.evidence.budget)}{f', and {percent(noise)} more for noise' if noise else ''}"


def _budget(event: AlertEvent) -> str:
    return f" (budget: {_allowed(event)})"


def _far(event: AlertEvent, where: str) -> str:
    """Return how far outputs are from those of the reference."""
    after, limit, of = event.evidence.after, event.limit, f"those of {full_precision(event)}"
    ratio = after / limit if after is not None and limit > 0 else None
    if ratio is None or ratio < _PLAIN_RATIO:
        return f"outputs in {where} are further from {of} than the budget allows"
    times = f"{number(ratio)} times" if ratio < _LARGEST_RATIO else "more than a thousand times"
    return f"outputs in {where} are {times} as far from {of} as the budget allows"


def _tail(event: AlertEvent, where: str) -> str:
    evidence, of = event.evidence, f"those of {full_precision(event)}"
    if evidence.tail_level is not None and evidence.tail_after is not None:
        were = "" if evidence.tail_before is None else f", {percent(evidence.tail_before)} were before"
        return f"{percent(evidence.tail_after)} of outputs in {where} are far from {of}{were}"
    before, after = evidence.before, evidence.after
    if after is None or not before or after < _PLAIN_RATIO * before:
        return f"the worst outputs in {where} are further from {of} than before"
    return f"the worst outputs in {where} are {number(after / before)} times as far from {of} as before"
