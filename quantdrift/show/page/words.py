"""The words of the pages: durations, people and what to do."""

from collections.abc import Callable
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

from quantdrift.core.notation import duration, estimated, percent
from quantdrift.facts import incidents
from quantdrift.report.labels import LabelledSlice
from quantdrift.storage.page.history import Event

ACTIONS: Final = incidents.ACTIONS
"""What was done about an alert."""
ENDS: Final = incidents.ENDINGS
"""Why alerts are over."""
METRICS: Final = MappingProxyType(
    {"flip": "changed answers", "divergence": "divergence", "latency": "slow answers"}
)
"""What the metrics are."""
PARTS: Final = MappingProxyType(
    {
        "answer": "the end of the answer",
        "first token": "the first token, of streams",
        "further token": "each further token, of streams",
    }
)
"""The ends of the times that the relay measures."""


def last(span: timedelta) -> str:
    """Return a span as it stands after `the last`: `7 days`, and `day` for one."""
    return duration(span).removeprefix("1 ")


def since(at: datetime | None, now: datetime) -> str:
    """Return how long ago something was: `for 3 hours`."""
    return "" if at is None else f"for {duration(max(timedelta(), now - at))}"


def span(begin: datetime, end: datetime) -> str:
    """Return how long a time is: `3 hours`."""
    return duration(max(timedelta(), end - begin))


def about(n: float) -> str:
    """Return a large number as people say it: two digits, `about 1,200`."""
    if n < 10:
        return f"{n:.0f}" if n >= 1 or not n else "less than 1"
    return f"about {estimated(n):,}"


def event(found: Event) -> str:
    """Return in a few words what happened: `int8-7 released`, `budget.flip 0.01 to 0.02`."""
    if found.kind == "release":
        return f"{found.subject} released"
    if found.kind == "onset":
        return "onset (estimated)"
    if found.kind == "alert":
        return f"{found.subject} opened"
    if found.kind == "budget":
        option = found.subject.rpartition(".budget.")[2]
        return f"budget {option}: {found.old_value or 'default'} to {found.new_value or 'default'}"
    what, _, how = found.kind.partition(" ")
    if what == "alert":
        return f"{found.subject} {ACTIONS.get(how, how)}"
    metric = METRICS.get(found.subject.partition(" ")[0], found.subject)
    return f"baseline {how}: {metric}"


def accuracy(found: LabelledSlice) -> str:
    """Return what true labels say: `a loss of accuracy of 4.1 % (2 % to 6 %)`."""
    loss = found.loss
    if loss.low is None or loss.high is None:
        return f"not known: {found.n_items:,} labelled items are too few"
    ends = (loss.low, loss.high) if loss.mean >= 0 else (-loss.high, -loss.low)
    kind = "loss" if loss.mean >= 0 else "gain"
    clear = "" if ends[0] > 0 else ", so no clear difference"
    return (
        f"a {kind} of accuracy of {percent(abs(loss.mean))} ({percent(ends[0])} to {percent(ends[1])}){clear}"
    )


def labels(found: LabelledSlice) -> str:
    """Return what true labels say in a few words, for a cell of a table."""
    if found.loss.low is None or found.loss.high is None:
        return "too few labels"
    if found.loss.low > 0:
        return "labels: less accurate"
    return "labels: more accurate" if found.loss.high < 0 else "labels: no clear difference"


def scores(given: Any, label: Callable[[int], str]) -> str:
    """Return the highest scores of an answer: `seven 71 %, one 20 %`; empty if it has none."""
    try:
        return ", ".join(f"{label(int(index))} {percent(float(score))}" for index, score in given or ())
    except (TypeError, ValueError):  # of another version
        return ""


def join(names: list[str], most: int = 3) -> str:
    """Return names as a sentence has them: `a, b and 4 more`."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
