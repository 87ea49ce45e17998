"""The signals: what is watched of a model's comparisons, against which budget, and what people read of it. One record for each.

The fold, the explanation of an alert, its words, the page, the report and the configuration read the records. A package adds one by an
entry point in `quantdrift.signals`: a value in [0, 1] of each item that its comparator gives, whose mean has a budget.
"""

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Final, Protocol

import msgspec

from quantdrift.core.plugins import record_of
from quantdrift.core.records import Metric

SLOW_SHARE: Final = 0.01
"""Share of the exchanges that may take longer than a latency budget, or than what was learned: both are 99 % quantiles."""
_DETAIL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ModelBudget(Protocol):
    """What the records read of `[models.budget]`."""

    @property
    def flip(self) -> float:
        """Share of changed answers."""

    @property
    def divergence(self) -> float:
        """Mean divergence."""

    @property
    def cap(self) -> float:
        """What a single divergence counts at most."""

    @property
    def signals(self) -> Mapping[str, float]:
        """Means of named signals."""

    @property
    def watch(self) -> tuple[str, ...]:
        """Which of `flip` and `divergence` are judged; empty: both."""


class DetectorKind(StrEnum):
    """Kind of a detector; the names are those in `quantdrift.drift.detectors.protocol`."""

    BUDGET = "budget"  # against the owner's budget
    CHANGE = "change"  # of a share, against its learned baseline
    TAIL = "tail"  # of the upper tail of a mean, against its learned baseline
    GROWTH = "growth"  # of the latency, against its learned baseline


OF_STREAMS: Final = (Metric.SLOW_START, Metric.SLOW_TOKENS)
"""How fast streamed text comes. The shadow judges each answer, against `models.budget.first_token_p99_s` and `per_token_p99_s`."""


class SignalForm(StrEnum):
    """What the mean of a signal is: its sentences follow from that."""

    CHANGED = "changed"  # the share of answers whose decision changed
    DIVERGENCE = "divergence"  # the mean of the task's graded divergence, in its unit
    SLOW = "slow"  # the share of exchanges that took longer than a limit: of the candidate alone
    SHARE = "share"  # the mean of a value in [0, 1], shown in per cent


class WatchedBy(msgspec.Struct, frozen=True, kw_only=True):
    """How a detector of one kind follows a signal.

    Parameters
    ----------
    reason
        Why a slice alerts; `{is_}` is filled.
    wrong
        What is wrong with a version, `{title}`.
    option
        In `[models.budget]`: it is watched where this is not 0. Empty: always.
    """

    reason: str
    wrong: str
    option: str = ""


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """What is watched of a model, and how it is called.

    Parameters
    ----------
    metric
        Its name in the database and in events.
    form
        What its mean is.
    column, detail
        Where `comparison` has its value of an item: a column, or a number in `detail`.
    kinds
        The detectors that follow it.
    budget, cap
        Of a model's budget, in the signal's unit: the accepted mean, and the largest value that a single item counts with.
    pages
        Whether its evidence can page. Else it opens tickets.
    has_sums
        Whether roll-ups, the floors of noise and the search for slices have it.
    title
        Of a plot, followed by `in` and the slice.
    name
        What it is, in a list.
    moved
        What happened, in one line about an alert without figures.
    equal
        Its mean where candidate and reference agree.
    things, verb
        Of `SHARE`: the mean is the share of these that do this.
    """

    metric: Metric
    form: SignalForm
    column: str = ""
    detail: str = ""
    kinds: Mapping[DetectorKind, WatchedBy]
    budget: Callable[[ModelBudget], float]
    cap: Callable[[ModelBudget], float] = lambda _: 1.0
    pages: bool = True
    has_sums: bool = False
    title: str
    name: str
    moved: str
    things: str = ""
    verb: str = ""
    equal: float = 0.0

    @property
    def is_about_speed(self) -> bool:
        """Whether it is about how fast the candidate answers, of which inputs and outputs explain nothing."""
        return self.form is SignalForm.SLOW or self.metric in OF_STREAMS

    @property
    def is_share(self) -> bool:
        """Whether its mean is a share, which is shown in per cent."""
        return self.form is not SignalForm.DIVERGENCE

    def is_asked(self, kind: str, budget: ModelBudget) -> bool:
        """Return whether a model's budget asks for a detector of this kind."""
        if self.detail:
            return kind in self.kinds and is_watched(self.metric.value, budget.signals)
        if self.has_sums and not is_judged(self.metric, budget):
            return False
        watched = self.kinds.get(DetectorKind(kind))
        return watched is not None and (not watched.option or bool(getattr(budget, watched.option)))


class SignalPlugin(msgspec.Struct, frozen=True, kw_only=True):
    """A signal of a package: the mean of a value in [0, 1] of each item, against a budget.

    Its texts are those of a share: "12 % of `things` in store=north `verb` (budget: 1 %)".

    Parameters
    ----------
    detail
        Name of the value in the `detail` of the comparator's divergences: from 0 to 1, more is worse. An item without it, or with NaN, is
        not counted.
    things
        What there is a share of, in the plural: `forecast intervals`.
    verb
        What this share does: `miss those of the reference`.
    pages
        Whether its evidence can page. Else it opens tickets.
    equal
        Its mean where candidate and reference agree: 0, unless chance decides some of it. A budget must be above it.
    """

    detail: str
    things: str
    verb: str
    pages: bool = True
    equal: float = 0.0

    def __post_init__(self) -> None:
        if not _DETAIL.fullmatch(self.detail):
            raise ValueError(
                f"`detail` is {self.detail!r}: a name has letters, digits and `_`, and does not begin with a digit"
            )
        if not self.things.strip() or not self.verb.strip():
            raise ValueError("`things` and `verb` must not be empty: they are the words of its alerts")
        if not 0.0 <= self.equal < 1.0:
            raise ValueError(
                f"`equal` is {self.equal:g}: it is a mean of values from 0 to 1, and must be below 1"
            )


@cache
def _share(metric: Metric, plugin: SignalPlugin, *, is_learned: bool = False) -> Signal:
    """Return the record of a share; `is_learned` adds the detectors that compare it with what it was before."""
    what = f"{plugin.things} that {plugin.verb}"
    said, things, verb = _escaped(what), _escaped(plugin.things), _escaped(plugin.verb)
    learned = {
        DetectorKind.CHANGE: WatchedBy(
            reason=f"the share of {said} {{is_}} above its learned baseline",
            wrong=f"more {things} of {{title}} {verb} than before",
        ),
        DetectorKind.TAIL: WatchedBy(
            reason=f"the upper tail of the share of {said} {{is_}} above its learned baseline",
            wrong=f"the worst outputs of {{title}} have more {things} that {verb} than before",
        ),
    }
    return Signal(
        metric=metric,
        form=SignalForm.SHARE,
        detail=plugin.detail,
        budget=lambda budget: budget.signals.get(metric.value, 1.0),
        pages=plugin.pages,
        title=f"{what[0].upper()}{what[1:]}",
        name=what,
        moved=f"more {plugin.things} {plugin.verb}",
        things=plugin.things,
        verb=plugin.verb,
        equal=plugin.equal,
        kinds={
            DetectorKind.BUDGET: WatchedBy(
                reason=f"the share of {said} {{is_}} above the budget",
                wrong=f"more {things} of {{title}} {verb} than the budget allows",
            ),
            **(learned if is_learned else {}),
        },
    )


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


BUILT_IN: Final = (
    Signal(
        metric=Metric.FLIP,
        form=SignalForm.CHANGED,
        column="flip",
        budget=lambda budget: budget.flip,
        has_sums=True,
        title="Changed answers",
        name="changed answers",
        moved="answers changed",
        kinds={
            DetectorKind.BUDGET: WatchedBy(
                reason="the share of changed answers {is_} above the budget",
                wrong="more answers of {title} changed than the budget allows",
            ),
            DetectorKind.CHANGE: WatchedBy(
                reason="the share of changed answers {is_} above its learned baseline",
                wrong="more answers of {title} changed than before",
            ),
        },
    ),
    Signal(
        metric=Metric.DIVERGENCE,
        form=SignalForm.DIVERGENCE,
        column="divergence",
        budget=lambda budget: budget.divergence,
        cap=lambda budget: budget.cap,
        has_sums=True,
        title="Mean divergence",
        name="divergence",
        moved="outputs moved",
        kinds={
            DetectorKind.BUDGET: WatchedBy(
                reason="the mean divergence {is_} above the budget",
                wrong="outputs of {title} are further from the FP32 model's than the budget allows",
            ),
            DetectorKind.TAIL: WatchedBy(
                reason="the upper tail of the divergence {is_} above its learned baseline",
                wrong="the worst outputs of {title} are further from the FP32 model's than before",
            ),
        },
    ),
    Signal(
        metric=Metric.LATENCY,
        form=SignalForm.SLOW,
        column="latency_s",
        budget=lambda _: SLOW_SHARE,
        pages=False,
        title="Slow answers",
        name="slow answers",
        moved="answers were slow",
        kinds={
            DetectorKind.BUDGET: WatchedBy(
                reason="the latency {is_} above the budget",
                wrong="more requests to {title} take longer than the budget allows",
                option="latency_p99_s",
            ),
            DetectorKind.GROWTH: WatchedBy(
                reason="the latency {is_} above its learned baseline",
                wrong="more requests to {title} take longer than before",
                option="latency_growth",
            ),
        },
    ),
    _share(
        Metric.CHANGED_TOKENS,
        SignalPlugin(
            detail="changed_tokens",
            things="tokens",
            verb="are other ones than the FP32 model would say first",
        ),
    ),
    _share(
        Metric.FAR_TOKENS,
        SignalPlugin(
            detail="far_tokens",
            things="tokens",
            verb="diverge by more than models.budget.divergence_p99 allows",
        ),
    ),
    _share(
        Metric.BROKEN,
        SignalPlugin(
            detail="broken",
            things="answers",
            verb="are broken: empty, repetitive, not in the form that was asked for, or with another value",
        ),
    ),
    _share(
        Metric.SLOW_START,
        SignalPlugin(
            detail="slow_start",
            things="streamed answers",
            verb="begin later than models.budget.first_token_p99_s allows",
            pages=False,
        ),
    ),
    _share(
        Metric.SLOW_TOKENS,
        SignalPlugin(
            detail="slow_tokens",
            things="streamed answers",
            verb="take longer for each further token than models.budget.per_token_p99_s allows",
            pages=False,
        ),
    ),
    _share(
        Metric.UNLIKELY,
        SignalPlugin(
            detail="unlikely",
            things="sampled tokens",
            verb="are among the 5 % that the FP32 model would say least",
            equal=0.05,
        ),
        is_learned=True,
    ),
)
"""Quantdrift's own."""
LEARNED: Final = tuple(
    signal.metric for signal in BUILT_IN if {DetectorKind.CHANGE, DetectorKind.TAIL} & set(signal.kinds)
)
"""The metrics with a learned baseline that a person can accept, freeze or keep."""
WATCHED: Final = tuple(signal.metric for signal in BUILT_IN if signal.has_sums)
"""The metrics that roll-ups, the floors of noise and the search for slices have, in this order."""
_BY_METRIC: Final[Mapping[str, Signal]] = {signal.metric.value: signal for signal in BUILT_IN}


def is_judged(metric: Metric, budget: ModelBudget) -> bool:
    """Return whether a metric that roll-ups have is judged, or only recorded."""
    return not budget.watch or metric.value in budget.watch


def simulated_signal(budget: ModelBudget) -> Signal:
    """Return the signal whose shift a plan simulates: changed answers, or what a model is judged by in their place."""
    if is_judged(Metric.FLIP, budget):
        return signal_of(Metric.FLIP)
    is_of_tokens = is_watched(Metric.CHANGED_TOKENS.value, budget.signals)
    return signal_of(Metric.CHANGED_TOKENS if is_of_tokens else Metric.DIVERGENCE)


def is_watched(name: str, budgets: Mapping[str, float]) -> bool:
    """Return whether a named signal has a budget."""
    return budgets.get(name, 0.0) > 0.0


def signal_of(metric: str) -> Signal:
    """Return the record of a signal by its metric; of one whose package this process does not know, one that names it.

    Raises
    ------
    OperatorError
        The package of the plug-in cannot be imported.
    """
    signal = _BY_METRIC.get(metric)
    if signal is not None:
        return signal
    name = Metric(metric)
    plugin = record_of(name, SignalPlugin)
    # Of a record in the database whose plug-in this process does not know.
    return _share(name, plugin or SignalPlugin(detail="unknown", things="answers", verb=f"show {name}"))


def signal_names() -> list[str]:
    """Return the names of the signals whose values comparators give by name: our own, and those of packages. Nothing is imported."""
    own = {metric.value for metric in Metric}
    of_packages = sorted(name for name in Metric.names() if name not in own)
    return [*(signal.metric.value for signal in BUILT_IN if signal.detail), *of_packages]


def named_signals() -> list[Signal]:
    """Return the signals whose values comparators give by name; raises `OperatorError` where a package cannot be imported."""
    return [signal_of(name) for name in signal_names()]


def cap_of(metric: str, budget: ModelBudget) -> float:
    """Return what one unit of the clipped signal is in the metric's own unit."""
    return signal_of(metric).cap(budget)


def budget_of(metric: str, budget: ModelBudget) -> float:
    """Return the accepted mean of the clipped signal, over its cap."""
    signal = signal_of(metric)
    return signal.budget(budget) / signal.cap(budget)
