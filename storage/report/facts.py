"""The facts that `quantdrift.storage.report.reading` returns: typed, frozen, and without SQL."""

from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from quantdrift.core.records import Metric, Verdict
from quantdrift.storage.figures.estimates import Sums


class _Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A row, or a sum of rows, of the database."""


class Grain(StrEnum):
    """The table that a sum is taken from."""

    ITEM = "comparison"  # exact borders, for short windows
    HOUR = "rollup_hour"
    DAY = "rollup_day"

    @property
    def words(self) -> str:
        """What people read of it."""
        return {"comparison": "single answers", "rollup_hour": "hourly sums", "rollup_day": "daily sums"}[
            self.value
        ]


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


class Example(_Fact, frozen=True, kw_only=True):
    """An example exchange of an alert; `trace` is its traceparent or empty, `detail` has its other measures."""

    exchange_id: str
    item: int
    captured_at: datetime
    flip: bool | None
    divergence: float | None
    trace: str
    detail: dict[str, Any] | None = None


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
