"""The present state: versions, their slices with verdicts and traffic, and what is not looked at."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import TextClause, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts.figures import Figure
from quantdrift.facts.speed import ItemTimes
from quantdrift.facts.status import WORST_FIRST
from quantdrift.storage import cost
from quantdrift.storage.cost import ReplayTime
from quantdrift.storage.database import Database
from quantdrift.storage.figures.figures import SliceFigures, Version, last_day, people_affected
from quantdrift.storage.labels import Outcome, outcomes
from quantdrift.storage.page import queries

Connection = AsyncConnection
"""A transaction that `reading` opens."""
_T = TypeVar("_T")
PATIENCE_S: Final = 0.4
"""Longest query of single exchanges on the overview, which has two of them."""
_CANCELED: Final = "57014"  # SQLSTATE query_canceled
# Worst first: what pages, what may, what nobody knows, then the rest by evidence.
ORDER: Final = f"array_position({WORST_FIRST}, n.verdict), n.evidence_ratio desc nulls last, n.slice"
_STATE: Final = text(
    "select (select fold_seq from fold) as fold, (select max(id) from alert) as alert,"
    " (select max(seq) from audit) as audit"
)
_VERSIONS: Final = text("""
    select v.id, v.model, v.candidate_version as version, v.reference_digest as reference, v.first_seen_at as first_at,
        max(n.last_at) as last_at, min(n.since) filter (where n.verdict = 'firing') as firing_since,
        min(n.since) filter (where n.predicate = 'true') as since,
        max(n.verdict) filter (where n.predicate = 'true') as whole,
        max(n.reason) filter (where n.predicate = 'true') as reason,
        max(n.slice_id) filter (where n.predicate = 'true') as all_id,
        count(n.slice_id) filter (where n.verdict = 'firing') as n_firing,
        count(n.slice_id) filter (where n.verdict = 'warning') as n_warning,
        count(n.slice_id) filter (where n.verdict = 'unknown') as n_unknown,
        count(n.slice_id) as n_slices, max(s.last_at) as seen_at, max(s.replaced_at) as replaced_at
    from model_version v left join slice_now n on n.model_version_id = v.id left join serving s on s.model_version_id = v.id
    group by v.id order by v.model, max(n.last_at) desc nulls last, v.id desc limit 500
""")
_SLICES: Final = text(f"""
    select n.slice_id, n.slice, n.predicate, n.verdict, n.reason, n.since, n.n_groups, n.evidence_ratio,
        n.flip_mean, n.flip_low, n.flip_high, n.flip_budget, n.divergence_mean, n.divergence_low, n.divergence_high,
        n.divergence_budget, n.alert_id, n.onset_at, n.last_at, n.flip_missing, count(*) over () as n_found
    from slice_now n
    where n.model_version_id = :version and (:verdict = '' or n.verdict = :verdict)
        and (:words = '' or strpos(lower(n.slice || ' ' || n.predicate), lower(:words)) > 0)
        and (not :parts or n.predicate <> 'true')
    order by {ORDER} limit :most offset :first
""")  # noqa: S608 - a constant
_CHANGES: Final = text("""
    select t.slice_id, t.from_verdict as before, t.to_verdict as after, t.at from transition t
    where t.model_version_id = :version and t.slice_id = any(:slices) and t.at >= :begin order by t.slice_id, t.at, t.id
""")
_REASONS: Final = text("""
    select n.reason, count(*) as n, (array_agg(n.slice order by n.n_groups desc))[1:3] as slices from slice_now n
    where n.model_version_id = :version and n.verdict = 'unknown' group by 1 order by 2 desc limit 5
""")

_REPLAYS: Final = text("""
    with minute as (
        select provenance ->> 'runtime' as runtime, provenance ->> 'version' as version, provenance ->> 'provider' as provider,
            provenance ->> 'device' as device, date_trunc('minute', stored_at) as at, sum(n_rows) as n,
            sum(replay_s) as seconds, sum(n_rows) filter (where replay_s is not null) as n_timed,
            array_agg(distinct worker) as workers, max(extract(epoch from stored_at - captured_from)) as longest_s
        from batch where kind = 'comparison' and stored_at >= :begin and n_rows > 0 group by 1, 2, 3, 4, 5
    )
    select coalesce(runtime, '') as runtime, coalesce(version, '') as version, coalesce(provider, '') as provider,
        coalesce(device, '') as device, cast(sum(n) as bigint) as n, cast(max(n) as bigint) as n_busiest,
        max(longest_s) as longest_s, sum(seconds) as seconds, cast(coalesce(sum(n_timed), 0) as bigint) as n_timed,
        (select count(distinct w) from minute m cross join unnest(m.workers) as w
         where (m.runtime, m.version, m.provider, m.device) is not distinct from
             (minute.runtime, minute.version, minute.provider, minute.device)) as n_workers
    from minute group by minute.runtime, minute.version, minute.provider, minute.device order by 5 desc
""")
# Counts are cumulative since a boot, so the last one minus the first one is what came between. The processor time is that of
# the whole sidecar, and stands beside each of its strata.
_RELAYS: Final = text("""
    with counted as (
        select source, boot, stratum, max(offered) - min(offered) as offered, max(relay_cpu_s) - min(relay_cpu_s) as cpu_s,
            min(at) as begin, max(at) as last
        from tally where at >= :begin and relay_cpu_s is not null group by 1, 2, 3
    ), started as (
        select source, sum(offered) as offered, max(cpu_s) as cpu_s, max(last) as last,
            extract(epoch from max(last) - min(begin)) as span_s
        from counted group by source, boot
    )
    select source, cast(sum(offered) as bigint) as n, sum(cpu_s) as cpu_s, cast(sum(span_s) as double precision) as span_s,
        max(last) as last
    from started group by 1 having sum(span_s) > 0 order by sum(cpu_s) desc, 1 limit 50
""")


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A row that the page shows."""


class VersionNow(Fact, frozen=True, kw_only=True):
    """A version of a model, with the verdicts on its slices.

    Parameters
    ----------
    whole, reason, since
        Verdict on all of its traffic, why, and since when; None: nothing was folded yet.
    firing_since
        When the first of its slices that fire began to.
    all_id
        The slice of all traffic.
    seen_at, replaced_at
        Capture time of its newest exchange, and when it was found that another version serves instead; None: not known, and it
        serves.
    """

    id: int
    model: str
    version: str
    reference: str
    first_at: datetime
    last_at: datetime | None
    firing_since: datetime | None
    since: datetime | None
    whole: str | None
    reason: str | None
    all_id: int | None
    n_firing: int
    n_warning: int
    n_unknown: int
    n_slices: int
    seen_at: datetime | None = None
    replaced_at: datetime | None = None

    @property
    def verdict(self) -> str:
        """The worst verdict on it: a single slice that fires makes it `firing`; `unknown` where nothing is known."""
        if self.n_firing:
            return "firing"
        if self.n_warning:
            return "warning"
        return self.whole or "unknown"


class SliceNow(Fact, frozen=True, kw_only=True):
    """A slice with its verdict: the columns of the view `slice_now`."""

    slice_id: int
    slice: str
    predicate: str
    verdict: str
    reason: str
    since: datetime
    n_groups: int
    evidence_ratio: float | None
    flip_mean: float | None
    flip_low: float | None
    flip_high: float | None
    flip_budget: float | None
    divergence_mean: float | None
    divergence_low: float | None
    divergence_high: float | None
    divergence_budget: float | None
    alert_id: int | None
    onset_at: datetime | None
    last_at: datetime | None
    flip_missing: int | None
    n_found: int


class SingleFacts(Fact, frozen=True, kw_only=True):
    """What single exchanges say of slices of one version.

    Parameters
    ----------
    people
        Those with a changed answer on the last day, by slice; a slice without one is left out. None: not known.
    outcomes
        What true labels say of the last seven days, by slice; no entry without labels.
    unread
        What took too long to read: `people`, `labels`.
    """

    people: dict[int, Figure] | None = None
    outcomes: dict[int, Outcome] = {}
    unread: tuple[str, ...] = ()


class Replays(Fact, frozen=True, kw_only=True):
    """What one kind of replica of the references did in a time.

    Parameters
    ----------
    runtime, version, provider, device
        What ran the references; empty: the batches do not say it.
    n, n_busiest
        Items replayed and stored, in the whole time and in its busiest minute.
    longest_s
        Longest time from a capture to the stored comparison, seconds.
    n_workers
        Workers that stored them.
    seconds, n_timed
        Seconds in which the references computed, and the items of that time; None: no batch says it.
    """

    runtime: str
    version: str
    provider: str
    device: str
    n: int
    n_busiest: int
    longest_s: float
    n_workers: int
    seconds: float | None
    n_timed: int


class RelayTime(Fact, frozen=True, kw_only=True):
    """The processor time of one sidecar's relay workers between its first and its last counts of a time.

    Parameters
    ----------
    source
        The sidecar.
    n
        Inference requests that were offered between them.
    cpu_s, span_s
        Processor time of the workers, all together, and how long it took, seconds.
    last
        When the last ones were read.
    """

    source: str
    n: int
    cpu_s: float
    span_s: float
    last: datetime


class Change(Fact, frozen=True, kw_only=True):
    """A change of a slice's verdict."""

    slice_id: int
    before: str
    after: str
    at: datetime


class Unknown(Fact, frozen=True, kw_only=True):
    """Slices whose health is not known, by reason, with the names of some."""

    reason: str
    n: int
    slices: tuple[str, ...]


async def in_time(
    connection: AsyncConnection, read: Callable[[], Awaitable[_T]], timeout_s: float
) -> _T | None:
    """Return what `read` reads with `connection`, None if one of its statements takes too long.

    The transaction goes on either way.
    """
    try:
        async with connection.begin_nested():
            await connection.execute(text(f"set local statement_timeout = {int(1000 * timeout_s)}"))
            result = await read()
            await connection.execute(text("set local statement_timeout to default"))
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", "") != _CANCELED:
            raise
        return None
    return result


@asynccontextmanager
async def reading(database: Database) -> AsyncIterator[AsyncConnection]:
    """Open a transaction that reads one state of the database and can change nothing; errors as `Database.begin`."""
    async with database.begin() as connection:
        await connection.execute(text("set transaction isolation level repeatable read, read only"))
        yield connection


async def rows(
    connection: AsyncConnection, kind: type[_T], statement: TextClause, **parameters: Any
) -> list[_T]:
    """Return the rows of a statement as records."""
    result = (await connection.execute(statement, parameters)).mappings()
    return [msgspec.convert(dict(row), kind, strict=False) for row in result]


async def state(connection: AsyncConnection) -> str:
    """Return a text that changes whenever something that the page shows has changed."""
    row = (await connection.execute(_STATE)).one()
    return ".".join(str(value or 0) for value in row)


async def versions(connection: AsyncConnection) -> list[VersionNow]:
    """Return every version by model, that with the newest traffic first."""
    return await rows(connection, VersionNow, _VERSIONS)


async def traffic(
    connection: AsyncConnection, version: VersionNow, as_of: datetime, slice_ids: Sequence[int] = ()
) -> dict[int, SliceFigures]:
    """Return the figures of each slice of a version in the last day with data; intervals count the people of `slice_ids`."""
    of = seen(version)
    return {} if of is None else await last_day(connection, of, as_of, slice_ids=slice_ids)


def seen(version: VersionNow) -> Version | None:
    """Return a version as figures are of it; None: nothing of it was folded yet."""
    if version.last_at is None:
        return None
    return Version(
        id=version.id,
        model=version.model,
        version=version.version,
        first_at=version.first_at,
        last_at=version.last_at,
    )


async def slices(
    connection: AsyncConnection,
    version_id: int,
    *,
    words: str = "",
    verdict: str = "",
    most: int = 100,
    first: int = 0,
    parts: bool = False,
) -> list[SliceNow]:
    """Return slices of a version, worst first.

    Parameters
    ----------
    words, verdict
        Only slices with these words in their name or condition, and with this verdict; empty: all.
    parts
        Leave out the slice of all traffic.
    """
    return await rows(
        connection,
        SliceNow,
        _SLICES,
        version=version_id,
        words=words,
        verdict=verdict,
        most=most,
        first=first,
        parts=parts,
    )


async def changes(
    connection: AsyncConnection, version_id: int, slice_ids: list[int], begin: datetime
) -> dict[int, list[Change]]:
    """Return the changes of verdict of slices since `begin`, in order."""
    by_slice: dict[int, list[Change]] = {}
    for change in await rows(connection, Change, _CHANGES, version=version_id, slices=slice_ids, begin=begin):
        by_slice.setdefault(change.slice_id, []).append(change)
    return by_slice


async def unknowns(connection: AsyncConnection, version_id: int) -> list[Unknown]:
    """Return why the health of slices is not known, the most frequent reasons first."""
    return await rows(connection, Unknown, _REASONS, version=version_id)


async def affected(
    connection: AsyncConnection, version: VersionNow, as_of: datetime, slice_ids: Sequence[int]
) -> tuple[dict[int, Figure] | None, bool]:
    """Return how many people got a changed answer on the last day, by slice, and whether it was read in time.

    None: it took too long, or no request names its person.
    """
    of = seen(version)

    async def read() -> tuple[dict[int, Figure] | None]:
        return (None if of is None else await people_affected(connection, of, as_of, slice_ids=slice_ids),)

    result = await in_time(connection, read, PATIENCE_S)
    return (None, False) if result is None else (result[0], True)


async def single_facts(
    connection: AsyncConnection, version: VersionNow, as_of: datetime, slice_ids: Sequence[int]
) -> SingleFacts:
    """Return what single exchanges say of slices of a version, as far as it can be read quickly."""
    if version.last_at is None:
        return SingleFacts()
    end = version.last_at + timedelta(microseconds=1)
    only = slice_ids[0] if len(slice_ids) == 1 else 0
    people, is_read = await affected(connection, version, as_of, slice_ids)
    outcome = partial(outcomes, connection, [version.id], end - timedelta(days=7), end, slice_id=only)
    labels = await in_time(connection, outcome, PATIENCE_S)
    return SingleFacts(
        people=people,
        outcomes={slice_outcome.slice_id: slice_outcome for slice_outcome in labels or ()},
        unread=tuple(
            name for name, read in (("people", is_read), ("labels", labels is not None)) if not read
        ),
    )


async def item_times_quickly(
    connection: AsyncConnection, begin: datetime, end: datetime
) -> list[ItemTimes] | None:
    """Return the same as `item_times`; None: it takes too long to read."""
    return await in_time(connection, partial(item_times, connection, begin, end), PATIENCE_S)


async def item_times(connection: AsyncConnection, begin: datetime, end: datetime) -> list[ItemTimes]:
    """Return how long an item took on each side, by version and device, in the newest 500 batches of a time."""
    result = (
        await connection.exec_driver_sql(queries.filled(queries.ITEM_TIMES, begin=begin, end=end))
    ).mappings()
    return [msgspec.convert(dict(row), ItemTimes, strict=False) for row in result]


async def replays(connection: AsyncConnection, begin: datetime) -> list[Replays]:
    """Return what was replayed since `begin`, by runtime and device, the busiest first."""
    return await rows(connection, Replays, _REPLAYS, begin=begin)


async def replay_times(connection: AsyncConnection, begin: datetime, end: datetime) -> dict[str, ReplayTime]:
    """Return how long references computed in a time, by model; empty where it takes too long to read."""
    return await in_time(connection, partial(cost.replay_times, connection, begin, end), PATIENCE_S) or {}


async def relays(connection: AsyncConnection, begin: datetime) -> list[RelayTime]:
    """Return what the relays of 50 sidecars used since `begin`, the busiest first; empty where it takes too long to read."""
    read = partial(rows, connection, RelayTime, _RELAYS, begin=begin)
    return await in_time(connection, read, PATIENCE_S) or []
