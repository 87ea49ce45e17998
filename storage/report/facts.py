"""The facts that `quantdrift.storage.report.reading` returns: typed, frozen, and without SQL."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from math import log
from typing import Any

import msgspec

from quantdrift.core.records import Metric, Verdict
from quantdrift.facts.estimate import LEVEL, ClusterSums, Estimate, added, ratio
from quantdrift.facts.events import AlertEvent
from quantdrift.facts.interval import mean_of_bins, share
from quantdrift.facts.words.text import AlertText


class _Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A row, or a sum of rows, of the database."""


class Grain(StrEnum):
    """The table that a sum is taken from."""

    ITEM = "comparison"  # exact borders, for short windows
    HOUR = "rollup_hour"
    DAY = "rollup_day"


class Window(_Fact, frozen=True, kw_only=True):
    """A half-open range of capture time, and the table it is read from.

    Parameters
    ----------
    begin, end
        Aware; on whole hours or days where `grain` is one of the roll-ups.
    grain
        The table.
    """

    begin: datetime
    end: datetime
    grain: Grain


class Version(_Fact, frozen=True, kw_only=True):
    """A candidate version with its reference; digest and precision of it are empty where it has none.

    `doubt` is what that reference's outputs say against the configuration; empty: nothing.
    """

    id: int
    model: str
    candidate_version: str
    reference_digest: str
    precision: str = ""
    doubt: str = ""
    first_seen_at: datetime


class SliceName(_Fact, frozen=True, kw_only=True):
    """A slice with its name and predicate."""

    id: int
    model: str
    name: str
    predicate: str


class Extent(_Fact, frozen=True, kw_only=True):
    """The amount of data in a period.

    Parameters
    ----------
    first, last
        Earliest and latest capture, as exactly as the database still has it; None where nothing was compared.
    n_items
        Rows of `comparison` in it, counted no further than the caller's limit.
    is_whole
        Whether they reach back as far as the roll-ups do: comparisons are deleted first.
    """

    first: datetime | None
    last: datetime | None
    n_items: int
    is_whole: bool = True


class Sums(_Fact, frozen=True, kw_only=True):
    """Sums over the exchanges of one slice; a mean is the sum divided by the weight of the items with that metric.

    Parameters
    ----------
    n_items, n_groups
        Items and exchanges compared.
    weight, weight_sq
        Sum of 1 / pi over exchanges, and of its square; a session counts as one in the latter.
    flip, js, divergence
        Weighted sums over items, each with an equal part of its exchange's weight; divergence is capped per item at the
        model's `budget.cap`, js in nats.
    flip_weight, js_weight, divergence_weight
        The part of `weight` with that metric: outputs that are not a distribution have no JS.
    n_infinite
        Items whose divergence was infinite.
    tie, tie_weight
        As flip and its weight, of decisions that differ by equal top scores alone.
    of
        The sums over people and exchanges by measure. Of a roll-up they are of flips and of the divergence, whose squares are 0
        before revision 0033.
    """

    n_items: int = 0
    n_groups: int = 0
    weight: float = 0.0
    weight_sq: float = 0.0
    flip: float = 0.0
    js: float = 0.0
    divergence: float = 0.0
    flip_weight: float = 0.0
    js_weight: float = 0.0
    divergence_weight: float = 0.0
    n_infinite: int = 0
    tie: float = 0.0
    tie_weight: float = 0.0
    of: Mapping[str, ClusterSums] = {}

    def __add__(self, other: "Sums") -> "Sums":
        names = {*self.of, *other.of}
        return Sums(
            **{name: getattr(self, name) + getattr(other, name) for name in SUMMED},
            of={name: added(self.of.get(name), other.of.get(name)) for name in names},
        )

    @property
    def n_effective(self) -> float:
        """Kish's effective number of independent exchanges or sessions, weight^2 / weight_sq; 0 where there are none."""
        return self.weight**2 / self.weight_sq if self.weight_sq else 0.0

    def mean(self, metric: Metric) -> float | None:
        """Return the weighted mean over exchanges of flip, js or divergence; None where no item has that metric."""
        total, weight = self._of(metric)
        return total / weight if weight else None

    def n_effective_of(self, metric: Metric) -> float:
        """Return the part of `n_effective` with that metric: flip, js or divergence."""
        return self.n_effective * self._of(metric)[1] / self.weight if self.weight else 0.0

    def estimate(
        self, metric: Metric, cap: float, bins: Sequence[float] = (), level: float = LEVEL
    ) -> Estimate | None:
        """Return the mean of flip, js or divergence with its interval; None where no item has that metric.

        Of what `of` lacks only Kish's number is known, in which all exchanges of a session count as one: the interval is wider.

        Parameters
        ----------
        cap
            Of a single divergence.
        bins
            Histogram of the divergence, for the interval of a roll-up's.
        level
            Probability with which the interval holds the truth.
        """
        top = {Metric.FLIP: 1.0, Metric.JS: log(2.0), Metric.DIVERGENCE: cap}[metric]
        sums = self.of.get(metric.value)
        if sums is not None and sums.weight_sq > 0:
            return ratio(sums, top, level)
        mean, n = self.mean(metric), self.n_effective_of(metric)
        if metric is Metric.DIVERGENCE:
            return mean_of_bins(mean, bins, n, cap, level)
        return share(mean, n, top, level)

    def _of(self, metric: Metric) -> tuple[float, float]:
        return {
            Metric.FLIP: (self.flip, self.flip_weight),
            Metric.JS: (self.js, self.js_weight),
            Metric.DIVERGENCE: (self.divergence, self.divergence_weight),
        }[metric]


SUMMED = tuple(name for name in Sums.__struct_fields__ if name != "of")
"""The fields of `Sums` that are numbers, and columns of the roll-ups."""


class SliceSums(_Fact, frozen=True, kw_only=True):
    """Sums of one slice of one version, over one bucket or a whole window (`at` is its begin)."""

    version_id: int
    slice_id: int
    at: datetime
    sums: Sums


class VersionSpan(_Fact, frozen=True, kw_only=True):
    """The time in which a version was compared: the begin of its first hour and the end of its last one."""

    version_id: int
    first: datetime
    last: datetime


class SliceBins(_Fact, frozen=True, kw_only=True):
    """Weighted histogram of the divergence: 64 log-spaced bins from 1e-6 to 10, ends open."""

    version_id: int
    slice_id: int
    bins: tuple[float, ...]


class VerdictFact(_Fact, frozen=True, kw_only=True):
    """The verdict of a slice at the end of the period.

    Parameters
    ----------
    reason
        In words.
    budgets
        Accepted mean by metric, as the monitor wrote it; may lack some.
    noise
        The allowance for noise that was added to the budget, if there was one.
    """

    version_id: int
    slice_id: int
    verdict: Verdict
    reason: str
    since: datetime
    budgets: dict[Metric, float]
    noise: dict[Metric, float] = {}


class Episode(_Fact, frozen=True, kw_only=True):
    """An alert that was open at some time of the period, with its event, and what it said when it was written.

    `ended` says why it was over by the end of the period, as in `alert.ended`. `findings` are the cause, the best repair and the
    gate's verdict, in words, as far as commands have found them.
    """

    id: int
    version_id: int
    slice_id: int
    severity: Verdict
    metric: Metric
    onset_at: datetime
    opened_at: datetime
    resolved_at: datetime | None
    ended: str = ""
    event: AlertEvent | None = None
    words: AlertText | None = None
    findings: tuple[str, ...] = ()


class Example(_Fact, frozen=True, kw_only=True):
    """An example exchange of an alert; `trace` is its traceparent or empty, `detail` has its other measures."""

    exchange_id: str
    item: int
    captured_at: datetime
    flip: bool | None
    divergence: float | None
    trace: str
    detail: dict[str, Any] | None = None


class Direction(_Fact, frozen=True, kw_only=True):
    """One way in which answers of a slice changed: the reference's answer became the candidate's.

    Parameters
    ----------
    share
        Of all changed answers, weighted, in [0, 1].
    n, n_tie
        Compared items that changed so, and how many of these only because scores were equal.
    """

    reference: str
    candidate: str
    share: float
    n: int
    n_tie: int


class Decision(_Fact, frozen=True, kw_only=True):
    """An entry of the audit: what a person decided, about what, and why; `model` is empty where it is no single one."""

    at: datetime
    actor: str
    action: str
    model: str
    subject: str
    note: str


class Changes(_Fact, frozen=True, kw_only=True):
    """The number of alerts in the period: those that paged, and those that remained tickets."""

    pages: int
    tickets: int


class StratumCounts(_Fact, frozen=True, kw_only=True):
    """Counts of one header stratum over the period, summed over sidecars.

    Parameters
    ----------
    compared
        Exchanges compared; None where the period is too large to count them by stratum.
    lost
        Taken exchanges that were lost, by reason; `expired` are part of the published ones as well.
    models
        Lost exchanges by model and reason, if the request named its model.
    """

    stratum: str
    offered: int
    taken: int
    thinned: int
    published: int
    compared: int | None
    lost: dict[str, int]
    models: dict[str, dict[str, int]] = {}


class ReasonCount(_Fact, frozen=True, kw_only=True):
    """Exchanges by reason, with one detail as an example (or empty)."""

    reason: str
    n: int
    detail: str = ""


class Fleet(_Fact, frozen=True, kw_only=True):
    """The sidecars of the period.

    Parameters
    ----------
    sources, boots
        Sidecars that published tallies, and their starts.
    blind_connections
        Connections that went unseen.
    """

    sources: int
    boots: int
    blind_connections: int
