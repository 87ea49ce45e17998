"""The past: a slice over time, its worst exchanges, directions of changed answers, alerts, and two versions side by side."""

from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts.estimate import ClusterSums, Estimate, ratio
from quantdrift.facts.interval import HIGHEST
from quantdrift.facts.speed import Times
from quantdrift.storage.estimates import ROLL_UP, Side, cluster_sums, roll_up_of
from quantdrift.storage.labels import Outcome, outcomes
from quantdrift.storage.monitor.alerts import DETAILS, LAST_EVENT
from quantdrift.storage.page import queries
from quantdrift.storage.page.now import PATIENCE_S, Fact, in_time, rows
from quantdrift.storage.worst import worst_keys

_FactT = TypeVar("_FactT", bound=msgspec.Struct)
# The end of a period is up to an hour after the last exchange.
# The less is read, the less time it may take: together with what follows, some seconds at worst.
_LOOKED: Final = ((timedelta(days=7), 2.0), (timedelta(days=1), 1.0), (timedelta(hours=2), 0.5))
_PATIENCE_S: Final = 2.0
"""Longest query of single exchanges."""
_ROLLED: Final = """
    select {at} as at, {columns} from {table}
    where model_version_id = :version and slice_id = :slice and {time} >= :begin and {time} < :end group by 1 order by 1
"""
_HOURS, _DAYS = (
    text(_ROLLED.format(at=at, columns=ROLL_UP, table=f"rollup_{time}", time=time).replace("::", "\\:\\:"))
    for time, at in (("hour", "date_bin(:width, hour, timestamptz '2000-01-01')"), ("day", "day"))
)
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
_ALERTS: Final = f"""
    select a.id, a.model_version_id as version_id, a.slice_id, v.model, v.candidate_version as version, s.name as slice,
        s.predicate, a.severity, a.metric, a.onset_at, a.opened_at, coalesce(a.resolved_at, c.made_at) as resolved_at, {DETAILS} as details,
        case when c.made_at is not null then 'closed' else coalesce(a.ended, '') end as ended,
        (
            select max(b.id) from alert b
            where b.model_version_id = a.model_version_id and b.slice_id = cast(a.details ->> 'explained_by_id' as int)
                and (b.resolved_at is null or b.resolved_at >= a.opened_at)
        ) as explained_by
    from alert a join model_version v on v.id = a.model_version_id join slice s on s.id = a.slice_id {LAST_EVENT}
    left join lateral (
        select made_at from alert_action where alert_id = a.id and action = 'close' order by id desc limit 1
    ) c on true
"""  # noqa: S608 - constants
_LIST: Final = text(
    f"{_ALERTS} where (:version = 0 or (a.model_version_id = :version and a.slice_id = :slice))"
    " order by coalesce(a.resolved_at, c.made_at) is not null, a.severity, a.details ->> 'explained_by_id' is not null,"
    " a.opened_at desc, a.id desc limit :most"
)
_ALERT: Final = text(f"{_ALERTS} where a.id = :id")
_EXPLAINING: Final = text(
    f"select id, explained_by from ({_ALERTS} where a.id = any(:ids)) o where explained_by is not null"  # noqa: S608 - a constant
)
_STEPS: Final = text("""
    select at, from_verdict as before, to_verdict as after, details ->> 'reason' as reason, slice_id from transition
    where alert_id = :id order by id limit 100
""")
_AUDIT: Final = text("""
    select at, actor, action, model, subject, note from audit order by seq desc limit :most
""")


class Sums(Fact, frozen=True, kw_only=True):
    """The sums of a slice over one bucket of time.

    Parameters
    ----------
    n
        Answers compared.
    weight
        Estimated requests.
    of
        The sums over people and exchanges of flips and of the divergence.
    cap
        Of a single divergence; None where it is not known, as its interval is not.
    """

    at: datetime
    n: int
    weight: float
    of: dict[str, ClusterSums]
    cap: float | None = None

    def estimate(self, metric: str) -> Estimate | None:
        """Return the mean of flips (`flip`) or of the divergence with its interval; None where there is none."""
        return ratio(self.of[metric], 1.0 if metric == "flip" else self.cap or HIGHEST)


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
    """Changed answers from one class of the reference to another one of the candidate."""

    reference: int
    candidate: int
    tie: bool
    n: int
    weight: float


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
    why: str
    old_value: str | None
    new_value: str | None


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


class AlertRow(Fact, frozen=True, kw_only=True):
    """An alert; `details` is the flat form of its event.

    Parameters
    ----------
    resolved_at
        When it ended, or a person closed it; None while it lasts.
    ended
        Why it is over, as in `alert.ended`; empty while it lasts, or where that is not known.
    explained_by
        The alert that explains it; None: there is none.
    """

    id: int
    version_id: int
    slice_id: int
    model: str
    version: str
    slice: str
    predicate: str
    severity: str
    metric: str
    onset_at: datetime
    opened_at: datetime
    resolved_at: datetime | None
    details: dict[str, Any]
    ended: str = ""
    explained_by: int | None = None


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


async def history(
    connection: AsyncConnection,
    version_id: int,
    slice_id: int,
    begin: datetime,
    end: datetime,
    *,
    width: timedelta,
) -> list[Sums]:
    """Return a slice over time, in buckets of `width`: whole hours below a day, else days."""
    parameters: dict[str, Any] = {"version": version_id, "slice": slice_id, "begin": begin, "end": end}
    statement = _DAYS
    if width < timedelta(days=1):
        statement = _HOURS
        parameters["width"] = width
    return [
        Sums(at=row["at"], n=row["n_items"], weight=row["weight"], of=roll_up_of(row), cap=row["cap"])
        for row in (await connection.execute(statement, parameters)).mappings()
    ]


async def minutes(
    connection: AsyncConnection,
    version_id: int,
    slice_id: int,
    times: tuple[datetime, datetime, datetime],
    *,
    width: timedelta,
    cap: float,
) -> list[Sums] | None:
    """Return a slice over a time that is shorter than roll-ups can show, from single exchanges; None: too many to read.

    Parameters
    ----------
    times
        Begin, a time at which one bucket ends and the next begins, and end.
    cap
        Of the divergence.
    """
    begin, base, end = times
    side = Side(version_id=version_id, begin=begin, end=end, cap=cap)
    read = partial(cluster_sums, connection, [side], slice_ids=[slice_id], width=width, origin=base)
    found = await in_time(connection, read, PATIENCE_S)
    if found is None:
        return None
    return [Sums(at=one.at, n=one.n_items, weight=one.weight, of=dict(one.of), cap=cap) for one in found]


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
    found: tuple[list[float], list[float]] = ([], [])
    hour = split.replace(minute=0, second=0, microsecond=0)
    parameters = {"version": version_id, "slice": slice_id, "begin": begin, "split": split, "end": end}
    for row in (await connection.execute(_BINS, {**parameters, "hour": hour})).mappings():
        sums = found[0 if row["is_before"] else 1]
        sums[:] = [a + b for a, b in zip(sums or [0.0] * 64, row["bins"], strict=True)]
    divided = {"version": version_id, "slice": slice_id, "split": split, "hour": hour, "edges": list(EDGES)}

    async def read() -> list[RowMapping]:
        return list((await connection.execute(_SPLIT, divided)).mappings())

    for row in await in_time(connection, read, PATIENCE_S) or ():
        sums = found[0 if row["is_before"] else 1]
        sums[:] = sums or [0.0] * 64
        sums[row["bin"]] += row["weight"]
    return found


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
) -> Singles:
    """Return the worst exchanges, which answers became which, the margins, and how long answers took."""
    for longest, patience_s in _LOOKED:
        period = (max(begin, end - longest), end)
        read = partial(worst, connection, version_id, slice_id, period, most=20)
        found = await in_time(connection, read, patience_s)
        if found is None:
            continue
        wanted = connection, version_id, slice_id, period
        changed = await in_time(connection, partial(directions, *wanted), _PATIENCE_S)
        bars = await in_time(connection, partial(margins, *wanted), _PATIENCE_S)
        took = await in_time(
            connection, partial(times, *wanted, latency_budget_s=latency_budget_s), _PATIENCE_S
        )
        return Singles(
            begin=period[0],
            worst=tuple(found),
            directions=None if changed is None else tuple(changed),
            margins=None if bars is None else tuple(bars),
            times=None if took is None else tuple(took),
        )
    return Singles()


async def directions(
    connection: AsyncConnection, version_id: int, slice_id: int, period: tuple[datetime, datetime]
) -> list[Direction]:
    """Return which answer became which, the most frequent change first."""
    return await _of_slice(
        connection, Direction, queries.DIRECTIONS, period, version=version_id, slice=slice_id
    )


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
    found = (await connection.exec_driver_sql(filled)).mappings()
    return [msgspec.convert(dict(row), kind, strict=False) for row in found]


async def happenings(
    connection: AsyncConnection, version_id: int, slice_id: int, begin: datetime, end: datetime
) -> list[Event]:
    """Return the releases of the model and the decisions about the slice in a time, in order; the first 200."""
    wanted = {"version": version_id, "slice": slice_id, "begin": begin, "end": end}
    return await rows(connection, Event, _EVENTS, **wanted)


async def baselines(connection: AsyncConnection, version_id: int, slice_id: int) -> dict[str, BaselineNow]:
    """Return the learned or accepted baseline that applies now, by metric."""
    found = await rows(connection, BaselineNow, _BASELINES, version=version_id, slice=slice_id)
    return {one.metric: one for one in found}


async def truth(
    connection: AsyncConnection, version_id: int, slice_id: int, begin: datetime, end: datetime
) -> Outcome | None:
    """Return what true labels say of a slice, None without labels or where they take too long to read."""
    found = await in_time(
        connection,
        partial(outcomes, connection, [version_id], begin, end, slice_id=slice_id),
        _PATIENCE_S,
    )
    return found[0] if found else None


async def alerts(
    connection: AsyncConnection, *, version_id: int = 0, slice_id: int = 0, most: int = 100
) -> list[AlertRow]:
    """Return alerts, open ones first; of one slice if it is given."""
    return await rows(connection, AlertRow, _LIST, version=version_id, slice=slice_id, most=most)


async def explaining(connection: AsyncConnection, alert_ids: list[int]) -> dict[int, int]:
    """Return the alert that explains each of some alerts; those that none explains are left out."""
    found = await connection.execute(_EXPLAINING, {"ids": alert_ids})
    return {row.id: row.explained_by for row in found}


async def alert(connection: AsyncConnection, alert_id: int) -> AlertRow | None:
    """Return an alert, None if there is none with this number."""
    found = await rows(connection, AlertRow, _ALERT, id=alert_id)
    return found[0] if found else None


async def steps(connection: AsyncConnection, alert_id: int) -> list[Step]:
    """Return the timeline of an alert."""
    return await rows(connection, Step, _STEPS, id=alert_id)


async def audit(connection: AsyncConnection, most: int) -> list[AuditRow]:
    """Return the newest entries of the audit."""
    return await rows(connection, AuditRow, _AUDIT, most=most)
