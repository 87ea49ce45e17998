"""The first screen of report and live page: is a version good enough, how much changed, whom it hits, and what is not known."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

from quantdrift.core.notation import capital, count_of, duration, estimated, listed, moment, percent
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.signals import DetectorKind, signal_of
from quantdrift.facts.cost import money_of
from quantdrift.facts.estimate import Estimate
from quantdrift.facts.figures import Figure
from quantdrift.facts.words.amount import rate_of
from quantdrift.facts.words.ending import ENDS

MOST: Final = 3
"""Slices, changes or steps that a line names."""
_FIRST: Final = {
    Verdict.FIRING: "Open the alert: it says what to do now.",
    Verdict.WARNING: "Nothing tonight. The owner of the model looks at the slice tomorrow.",
    Verdict.OK: "Nothing.",
    Verdict.UNKNOWN: "Look at the page System: it shows where the traffic stops.",
}
NOTHING_COMPARED: Final = "nothing was compared yet"


class SliceShare(msgspec.Struct, frozen=True, kw_only=True):
    """How much changed in a slice.

    Parameters
    ----------
    where
        Its name, or `all traffic`.
    share
        Of changed answers; None: not measured.
    n_answers
        Compared.
    budget
        Accepted share of changed answers; None or 0: none.
    changed
        Changed answers a day, or so far; None: not known.
    n_people
        People with a changed answer on the last day, at least; 0: none is known.
    traffic
        Share of the slice in the traffic; None: not known, or it is all of it.
    """

    where: str
    share: Estimate | None
    n_answers: int
    budget: float | None = None
    changed: Figure | None = None
    n_people: int = 0
    traffic: float | None = None


def name_of(slice_: str, predicate: str) -> str:
    """Return what a slice is called in a sentence."""
    return "all traffic" if predicate == "true" else slice_


def wrong(title: str, measure: tuple[Metric, bool] | None, *, part_of_time: bool = False) -> str:
    """Return what is wrong with a version.

    Parameters
    ----------
    measure
        What decided, and whether its budget did, or a learned baseline; None: it is not known, or not the same in all slices.
    part_of_time
        Whether the whole time that is shown is within the budget.
    """
    text = f"{title} has drifted"
    if measure is not None:
        metric, by_budget = measure
        for kind, watched in signal_of(metric).kinds.items():
            if (kind is DetectorKind.BUDGET) is by_budget:
                text = watched.wrong.format(title=title)
    return f"for a part of the time {text}" if part_of_time else text


def answer(
    verdict: Verdict, title: str, names: Sequence[str], *, what: str = "", n_unknown: int = 0, why: str = ""
) -> str:
    """Return whether a version is good enough, in one sentence.

    Parameters
    ----------
    verdict
        The worst of its slices.
    names
        The slices that alert.
    what
        What is wrong, as `wrong` has it.
    n_unknown, why
        Slices of which it is not known, and the reason for all traffic, if that is one of them.
    """
    where = f"in {names[0]}" if len(names) == 1 else f"in {len(names)} slices"
    if verdict is Verdict.FIRING:
        return f"No, not everywhere: {where} {what or wrong(title, None)}."
    if verdict is Verdict.WARNING:
        return f"Perhaps not everywhere: {where} {title} shows first signs of drift."
    if verdict is Verdict.OK:
        rest = (
            f" that is known. {count_of(n_unknown, 'slice')} {_are(n_unknown)} not known yet"
            if n_unknown
            else ""
        )
        return f"Yes: {title} is good enough. It is within its budget in every slice{rest}."
    if why:
        return f"Not known if {title} is good enough: {why}."
    return f"Not known if {title} is good enough everywhere: {count_of(n_unknown, 'slice')} {_are(n_unknown)} not known yet."


def first_step(verdict: Verdict) -> str:
    """Return what to do first."""
    return _FIRST[verdict]


def affected(slices: Sequence[SliceShare]) -> str:
    """Return how many answers changed in some slices."""
    texts = [_affected(entry) for entry in slices if entry.share is not None]
    return sentence(some(texts, "slice")) if texts else "Not known."


def _affected(entry: SliceShare) -> str:
    assert entry.share is not None
    budget = f" (budget: {percent(entry.budget)})" if entry.budget else ""
    changed = entry.changed
    a_day = f", some {estimated(changed.value):,} {rate_of(changed)}" if changed and changed.value else ""
    people = (
        f", for at least {count_of(entry.n_people, 'person', 'people')} on the last day"
        if entry.n_people
        else ""
    )
    traffic = "" if entry.traffic is None else f" ({percent(entry.traffic)} of the traffic)"
    return (
        f"in {entry.where}{traffic} {percent(entry.share.mean)} of the answers changed{budget}{a_day}{people}"
    )


def confidence(entry: SliceShare | None, *, alerts: bool) -> str:
    """Return how certain the share of a slice is; `alerts`: whether it alerts."""
    if entry is None or entry.share is None or entry.share.low is None or entry.share.high is None:
        return "Not known: too little was compared."
    alert = (
        "Almost certain, this is not chance: the false-positive rate has a bound, however often one looks. "
        if alerts
        else ""
    )
    return (
        f"{alert}Of {entry.where}, {count_of(entry.n_answers, 'answer')} {_were(entry.n_answers)} compared with the FP32 model's:"
        f" the true share that changed is between {percent(entry.share.low)} and {percent(entry.share.high)} (95 % confidence)."
    )


def people(n: int) -> str:
    """Return how many people got a changed answer on the last day."""
    if n:
        return f"At least {count_of(n, 'person', 'people')} got a changed answer on the last day."
    return (
        "Nobody is known to have got a changed answer on the last day: no answer changed, or the requests name no person"
        " (option sampling.sticky_header)."
    )


def not_known(
    version: str,
    *,
    n_unknown: int = 0,
    unlabelled: str = "",
    n_gaps: int = 0,
    gaps: timedelta = timedelta(),
    n_lost: int = 0,
    lost: float = 0.0,
) -> str:
    """Return what a report cannot say.

    Parameters
    ----------
    n_unknown
        Slices that are not known.
    unlabelled
        What only labels would tell.
    n_gaps, gaps
        Times in which nothing was compared, and how long they are together.
    n_lost, lost
        Sampled exchanges that were lost, and their share.
    """
    texts = []
    if n_unknown:
        texts.append(
            f"how {count_of(n_unknown, 'slice')} of {version} {_are(n_unknown)}: too little was compared, or too much was lost"
        )
    if unlabelled:
        texts.append(unlabelled)
    if n_gaps:
        texts.append(
            f"what happened in {count_of(n_gaps, 'gap')} of {duration(gaps)}{' together' if n_gaps > 1 else ''}, in which nothing was compared"
        )
    if n_lost:
        texts.append(f"{count_of(n_lost, 'sampled exchange')} that {_were(n_lost)} lost ({percent(lost)})")
    return sentence("; ".join(texts)) if texts else "Nothing that this report would need."


def alert_line(
    *,
    version: str,
    where: str,
    metric: Metric,
    begin: datetime,
    end: datetime | None,
    ended: str,
    share: Figure | None,
) -> str:
    """Return an alert in one line: when, where, how much, and how it ended."""
    until = "" if end is None else f"{end:%H:%M} UTC" if end.date() == begin.date() else moment(end)
    when = f"Since {moment(begin)}" if end is None else f"{begin:%Y-%m-%d %H:%M} to {until}"
    if share is None:
        what = signal_of(metric).moved
    else:
        interval = (
            ""
            if share.low is None or share.high is None
            else f" (95 %: {percent(share.low)} to {percent(share.high)})"
        )
        what = f"{percent(share.value)} of answers changed{interval}"
    return f"{when}, {where} of {version}: {what}; {over(end, ended)}."


def over(end: datetime | None, ended: str) -> str:
    """Return whether an alert is over, and why."""
    return "still open" if end is None else ENDS.get(ended, "resolved")


def owners(steps: Sequence[tuple[str, str, str]], *, n_unknown: int) -> str:
    """Return the first step for the owner of each alert that is open, with its model and slice."""
    texts = [f"the owner of {model}, for {name}: {step.rstrip('.')}" for model, name, step in steps]
    if texts:
        return sentence(some(texts, "alert"))
    if n_unknown:
        return (
            "The operator of quantdrift: see below why slices are not known, and have more of them compared."
        )
    return "Nothing."


def other(share: Estimate | None, drifted: Sequence[str]) -> str:
    """Return what is left to say of a version beside the one that was seen last: how much changed, and where it drifted."""
    if share is None:
        return "nothing of it was compared in this period."
    where = f"; it drifted in {listed(drifted, MOST)}" if drifted else ""
    return f"{percent(share.mean)} of its answers changed{where}."


def costs(figures: Sequence[Figure]) -> str:
    """Return what changed answers and replays cost."""
    texts = [
        f"{money_of(cost)} for {f'changed answers of {cost.of.version}' if cost.of.version else 'replays'}"
        for cost in figures
    ]
    return sentence("; ".join(texts))


def some(texts: Sequence[str], noun: str) -> str:
    """Return the first few of some texts, and how many more there are."""
    more = f"; {count_of(len(texts) - MOST, f'more {noun}')}" if len(texts) > MOST else ""
    return "; ".join(texts[:MOST]) + more


def sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop."""
    return f"{capital(text)}."


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


def _were(n: int) -> str:
    return "was" if n == 1 else "were"
