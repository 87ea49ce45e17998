"""The past of a slice: its worst exchanges, directions of changed answers, histograms, decisions, and what labels say."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts.speed import Times
from quantdrift.facts.words.amount import class_name
from quantdrift.storage.labels import Outcome, outcomes
from quantdrift.storage.page import queries
from quantdrift.storage.page.now import PATIENCE_S, Fact, in_time, rows
from quantdrift.storage.worst import worst_keys

_FactT = TypeVar("_FactT", bound=msgspec.Struct)
# The end of a period is up to an hour after the last exchange.
# The less is read, the less time it may take: together with what follows, some seconds at worst.
_LOOKED: Final = ((timedelta(days=7), 2.0), (timedelta(days=1), 1.0), (timedelta(hours=2), 0.5))
MOST_DIRECTIONS: Final = 12
_PATIENCE_S: Final = 2.0
"""Longest query of single exchanges."""
_SPLIT: Final = text("""
    select captured_at < :split as is_before, width_bucket(divergence, cast(:edges as double precision[])) as bin,
        sum(weight) as weight
    from item
    where model_version_id = :version and slice_id = :slice and slice_ids @> array[cast(:slice as integer)]
        and captured_at >= :hour and captured_at < cast(:hour as timestamptz) + interval '1 hour' and divergence <> 'NaN'
    group by 1, 2
""")
EDGES: Final = tuple(1e-6 * 10 ** (7 * n / 64) for n in range(1, 64))
"""Between the bins of a roll-up's histogram of the divergence."""
_BINS: Final = text("""
    select hour < :split as is_before, divergence_bins as bins from rollup_hour
    where model_version_id = :version and slice_id = :slice and hour >= :begin and hour < :end and hour <> :hour
""")
_WORST: Final = """
    with {keys}
    select c.captured_at as at, c.exchange_id as exchange, c.item, c.divergence, c.flip, c.tie, c.trace, c.attributes,
        c.detail, c.candidate_margin, c.reference_margin
    from worst w join comparison c using (captured_at, exchange_id, item)
    order by c.flip is not true, c.divergence desc nulls last, c.captured_at limit :most
"""
_EVENTS: Final = text(queries.EVENTS)
_BASELINES: Final = text(queries.BASELINES)
_STEPS: Final = text("""
    select at, from_verdict as before, to_verdict as after, details ->> 'reason' as reason, slice_id from transition
    where alert_id = :id order by id limit 100
""")
_AUDIT: Final = text("""
    select at, actor, action, model, subject, note from audit order by seq desc limit :most
""")


class Exchange(Fact, frozen=True, kw_only=True):
    """A compared item, as it stands in the list of the worst."""

    at: datetime
    exchange: UUID
    item: int
    divergence: float | None
    flip: bool | None
    tie: bool | None
    trace: str
    attributes: dict[str, Any]
    detail: dict[str, Any] | None
    candidate_margin: float | None
    reference_margin: float | None


class Direction(Fact, frozen=True, kw_only=True):
    """One way in which answers of a slice changed: the reference's answer became the candidate's.

    Parameters
    ----------
    reference, candidate
        Names of the classes.
    n, n_tie
        Compared answers that changed so, and how many of these only because scores were equal.
    weight, share
        Requests that they stand for, and their share of all changed answers, in [0, 1].
    """

    reference: str
    candidate: str
    n: int
    n_tie: int
    weight: float = 0.0
    share: float


class MarginBar(Fact, frozen=True, kw_only=True):
    """Items whose unquantised margin lies in one of twenty equal parts of [0, 1]: `bar` is its number, from 1."""

    flip: bool
    bar: int
    n: int
    weight: float


class Event(Fact, frozen=True, kw_only=True):
    """A release or a decision: what happened, to what, who did it and why; values are those of a budget."""

    at: datetime
    kind: str
    subject: str
    who: str
    why: str = ""
    old_value: str | None = None
    new_value: str | None = None


class BaselineNow(Fact, frozen=True, kw_only=True):
    """The baseline of one metric that applies now.

    Parameters
    ----------
    total, share
        Sums over its groups: their quotient is its mean, divided by the metric's cap.
    learned_s
        Of the latency: the seconds that at most 1 % of the exchanges exceeded; None for other metrics.
    """

    metric: str
    source: str
    made_by: str
    made_at: datetime
    from_at: datetime | None
    to_at: datetime | None
    n_groups: int
    total: float | None
    share: float | None
    learned_s: float | None = None

    @property
    def level(self) -> float | None:
        """Its mean, divided by the metric's cap; None: it has no groups."""
        return self.total / self.share if self.total is not None and self.share else None


class Singles(Fact, frozen=True, kw_only=True):
    """What single exchanges show of a slice, over the longest time that can be read while a person waits.

    Parameters
    ----------
    begin
        Of that time; None: even the shortest takes too long.
    worst
        The items whose answer changed or that diverged most.
    directions, margins, times
        None: they take too long.
    """

    begin: datetime | None = None
    worst: tuple[Exchange, ...] = ()
    directions: tuple[Direction, ...] | None = None
    margins: tuple[MarginBar, ...] | None = None
    times: tuple[Times, ...] | None = None


class Step(Fact, frozen=True, kw_only=True):
    """A change of verdict in an alert's timeline."""

    at: datetime
    before: str
    after: str
    reason: str | None
    slice_id: int


class AuditRow(Fact, frozen=True, kw_only=True):
    """An entry of the audit: who changed what, when and why."""

    at: datetime
    actor: str
    action: str
    model: str
    subject: str
    note: str


async def bins(
    connection: AsyncConnection, version_id: int, slice_id: int, times: tuple[datetime, datetime, datetime]
) -> tuple[list[float], list[float]]:
    """Return two weighted histograms of the divergence: 64 bins each, empty without data.

    Parameters
    ----------
    times
        Begin, the time that separates the two, and end. The hour around it is divided by its exchanges, or left out where these
        are too many to read.
    """
    begin, split, end = times
    histograms: tuple[list[float], list[float]] = ([], [])
    hour = split.replace(minute=0, second=0, microsecond=0)
    parameters = {"version": version_id, "slice": slice_id, "begin": begin, "split": split, "end": end}
    for row in (await connection.execute(_BINS, {**parameters, "hour": hour})).mappings():
        sums = histograms[0 if row["is_before"] else 1]
        sums[:] = [a + b for a, b in zip(sums or [0.0] * 64, row["bins"], strict=True)]
    divided = {"version": version_id, "slice": slice_id, "split": split, "hour": hour, "edges": list(EDGES)}

    async def read() -> list[RowMapping]:
        return list((await connection.execute(_SPLIT, divided)).mappings())

    for row in await in_time(connection, read, PATIENCE_S) or ():
        sums = histograms[0 if row["is_before"] else 1]
        sums[:] = sums or [0.0] * 64
        sums[row["bin"]] += row["weight"]
    return histograms


async def worst(
    connection: AsyncConnection,
    version_id: int,
    slice_id: int,
    period: tuple[datetime, datetime],
    *,
    most: int,
) -> list[Exchange]:
    """Return the items whose answer changed, and then those that diverged most."""
    keys = worst_keys(
        slices=f"array[{slice_id:d}]",
        versions=f"array[{version_id:d}]",
        begin=":begin",
        end=":end",
        n=":most",
        changed_first=True,
    )
    query = text(_WORST.format(keys=keys))
    return await rows(connection, Exchange, query, begin=period[0], end=period[1], most=most)


async def singles(
    connection: AsyncConnection,
    version_id: int,
    slice_id: int,
    begin: datetime,
    end: datetime,
    *,
    latency_budget_s: float = 0.0,
    labels: Sequence[str] = (),
) -> Singles:
    """Return the worst exchanges, which answers became which, the margins, and how long answers took."""
    for longest, patience_s in _LOOKED:
        period = (max(begin, end - longest), end)
        read = partial(worst, connection, version_id, slice_id, period, most=20)
        exchanges = await in_time(connection, read, patience_s)
        if exchanges is None:
            continue
        wanted = connection, version_id, slice_id, period
        changed = await in_time(connection, partial(directions, *wanted, labels=labels), _PATIENCE_S)
        bars = await in_time(connection, partial(margins, *wanted), _PATIENCE_S)
        took = await in_time(
            connection, partial(times, *wanted, latency_budget_s=latency_budget_s), _PATIENCE_S
        )
        return Singles(
            begin=period[0],
            worst=tuple(exchanges),
            directions=None if changed is None else tuple(changed),
            margins=None if bars is None else tuple(bars),
            times=None if took is None else tuple(took),
        )
    return Singles()


async def directions(
    connection: AsyncConnection,
    version_id: int,
    slice_id: int,
    period: tuple[datetime, datetime],
    *,
    labels: Sequence[str] = (),
    most: int = MOST_DIRECTIONS,
) -> list[Direction]:
    """Return which answer became which, the most frequent change first; nothing for tasks that choose no class.

    `labels` are the names of the classes.
    """
    by_number = await _of_slice(
        connection, Direction, queries.DIRECTIONS, period, version=version_id, slice=slice_id, most=most
    )
    return [
        msgspec.structs.replace(
            direction,
            reference=class_name(labels, int(direction.reference)),
            candidate=class_name(labels, int(direction.candidate)),
        )
        for direction in by_number
    ]


async def margins(
    connection: AsyncConnection, version_id: int, slice_id: int, period: tuple[datetime, datetime]
) -> list[MarginBar]:
    """Return how sure the reference was of answers that changed, and of those that did not, of the newest 200,000 items."""
    return await _of_slice(connection, MarginBar, queries.MARGINS, period, version=version_id, slice=slice_id)


async def times(
    connection: AsyncConnection,
    version_id: int,
    slice_id: int,
    period: tuple[datetime, datetime],
    *,
    latency_budget_s: float = 0.0,
) -> list[Times]:
    """Return how long the candidate took, of the newest 20,000 exchanges; nothing where no time was measured."""
    budget_us = round(1e6 * latency_budget_s)
    return await _of_slice(
        connection, Times, queries.TIMES, period, version=version_id, slice=slice_id, budget=budget_us
    )


async def _of_slice(
    connection: AsyncConnection,
    kind: type[_FactT],
    query: str,
    period: tuple[datetime, datetime],
    **keys: int,
) -> list[_FactT]:
    """Return the rows of a query as it stands on the page: Postgres finds a rare slice by its number alone, not by a parameter."""
    begin, end = period
    filled = queries.filled(query, **keys, begin=begin, end=end)
    result = (await connection.exec_driver_sql(filled)).mappings()
    return [msgspec.convert(dict(row), kind, strict=False) for row in result]


async def happenings(
    connection: AsyncConnection, version_id: int, slice_id: int, begin: datetime, end: datetime
) -> list[Event]:
    """Return the releases of the model and the decisions about the slice in a time, in order; the first 200."""
    wanted = {"version": version_id, "slice": slice_id, "begin": begin, "end": end}
    return await rows(connection, Event, _EVENTS, **wanted)


async def baselines(connection: AsyncConnection, version_id: int, slice_id: int) -> dict[str, BaselineNow]:
    """Return the learned or accepted baseline that applies now, by metric."""
    records = await rows(connection, BaselineNow, _BASELINES, version=version_id, slice=slice_id)
    return {baseline.metric: baseline for baseline in records}


async def truth(
    connection: AsyncConnection, version_id: int, slice_id: int, begin: datetime, end: datetime
) -> Outcome | None:
    """Return what true labels say of a slice, None without labels or where they take too long to read."""
    of_slice = await in_time(
        connection,
        partial(outcomes, connection, [version_id], begin, end, slice_id=slice_id),
        _PATIENCE_S,
    )
    return of_slice[0] if of_slice else None


async def steps(connection: AsyncConnection, alert_id: int) -> list[Step]:
    """Return the timeline of an alert."""
    return await rows(connection, Step, _STEPS, id=alert_id)


async def audit(connection: AsyncConnection, most: int) -> list[AuditRow]:
    """Return the newest entries of the audit."""
    return await rows(connection, AuditRow, _AUDIT, most=most)
