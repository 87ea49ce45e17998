"""Single exchanges of a slice: the worst, the directions of changed answers, margins, times; who got them, and what labels say."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts.figures import Figure
from quantdrift.facts.speed import Times
from quantdrift.facts.words.amount import class_name
from quantdrift.storage import queries, snapshot
from quantdrift.storage.comparisons.point import at_key
from quantdrift.storage.figures.figures import people_affected
from quantdrift.storage.labels import LabelOutcome, outcomes
from quantdrift.storage.snapshot import in_time, rows
from quantdrift.storage.versions import VersionNow, seen
from quantdrift.storage.worst import worst_keys

_T = TypeVar("_T", bound=msgspec.Struct)
# The end of a period is up to an hour after the last exchange.
# The less is read, the less time it may take: together with what follows, some seconds at worst.
_LOOKED: Final = ((timedelta(days=7), 2.0), (timedelta(days=1), 1.0), (timedelta(hours=2), 0.5))
MOST_DIRECTIONS: Final = 12
_WORST: Final = f"""
    with {{keys}}
    select c.captured_at as at, c.exchange_id as exchange, c.item, c.divergence, c.flip, c.tie, c.trace, c.attributes,
        c.detail, c.candidate_margin, c.reference_margin
    from worst w {at_key("w")}
    order by c.flip is not true, c.divergence desc nulls last, c.captured_at limit :most
"""  # noqa: S608 - constants
_EXAMPLES = text("""
    select exchange_id::text, item, captured_at, flip, divergence, trace, detail
    from comparisons(:begin, :end, array[cast(:slice as int)], :flips)
    where model_version_id = :version and slice_ids @> array[cast(:slice as int)] and (flip or not :flips)
    order by flip desc nulls last, divergence desc nulls last, captured_at desc limit :most
""")


class SingleFacts(msgspec.Struct, frozen=True, kw_only=True):
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
    outcomes: dict[int, LabelOutcome] = {}
    unread: tuple[str, ...] = ()


class WorstItem(msgspec.Struct, frozen=True, kw_only=True):
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


class Direction(msgspec.Struct, frozen=True, kw_only=True):
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


class MarginBar(msgspec.Struct, frozen=True, kw_only=True):
    """Items whose unquantised margin lies in one of twenty equal parts of [0, 1]: `bar` is its number, from 1."""

    flip: bool
    bar: int
    n: int
    weight: float


class Singles(msgspec.Struct, frozen=True, kw_only=True):
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
    worst: tuple[WorstItem, ...] = ()
    directions: tuple[Direction, ...] | None = None
    margins: tuple[MarginBar, ...] | None = None
    times: tuple[Times, ...] | None = None


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """An example exchange of an alert; `trace` is its traceparent or empty, `detail` has its other measures."""

    exchange_id: str
    item: int
    captured_at: datetime
    flip: bool | None
    divergence: float | None
    trace: str
    detail: dict[str, Any] | None = None


async def worst_exchanges(
    connection: AsyncConnection,
    version_id: int,
    slice_id: int,
    period: tuple[datetime, datetime],
    *,
    most: int,
) -> list[WorstItem]:
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
    return await rows(connection, WorstItem, query, begin=period[0], end=period[1], most=most)


async def single_exchanges(
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
        read = partial(worst_exchanges, connection, version_id, slice_id, period, most=20)
        exchanges = await in_time(connection, read, patience_s)
        if exchanges is None:
            continue
        wanted = connection, version_id, slice_id, period
        changed = await in_time(
            connection, partial(directions, *wanted, labels=labels), snapshot.PAST_PATIENCE_S
        )
        bars = await in_time(connection, partial(margins, *wanted), snapshot.PAST_PATIENCE_S)
        took = await in_time(
            connection, partial(times, *wanted, latency_budget_s=latency_budget_s), snapshot.PAST_PATIENCE_S
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
    kind: type[_T],
    query: str,
    period: tuple[datetime, datetime],
    **keys: int,
) -> list[_T]:
    """Return the rows of a query as it stands on the page: Postgres finds a rare slice by its number alone, not by a parameter."""
    begin, end = period
    filled = queries.filled(query, **keys, begin=begin, end=end)
    result = (await connection.exec_driver_sql(filled)).mappings()
    return [msgspec.convert(dict(row), kind, strict=False) for row in result]


async def affected(
    connection: AsyncConnection, version: VersionNow, as_of: datetime, slice_ids: Sequence[int]
) -> tuple[dict[int, Figure] | None, bool]:
    """Return how many people got a changed answer on the last day, by slice, and whether it was read in time.

    None: it took too long, or no request names its person.
    """
    of = seen(version)

    async def read() -> tuple[dict[int, Figure] | None]:
        return (None if of is None else await people_affected(connection, of, as_of, slice_ids=slice_ids),)

    result = await in_time(connection, read, snapshot.PATIENCE_S)
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
    labels = await in_time(connection, outcome, snapshot.PATIENCE_S)
    return SingleFacts(
        people=people,
        outcomes={slice_outcome.slice_id: slice_outcome for slice_outcome in labels or ()},
        unread=tuple(
            name for name, read in (("people", is_read), ("labels", labels is not None)) if not read
        ),
    )


async def examples_of(
    connection: AsyncConnection,
    begin: datetime,
    end: datetime,
    *,
    version: int,
    slice_id: int,
    flips: bool,
    most: int,
) -> list[Example]:
    """Return exchanges of a slice in a short window, flipped ones first, then by divergence.

    Parameters
    ----------
    flips
        Only flipped ones: the examples of an alert that flips decided.
    """
    wanted = {"begin": begin, "end": end, "version": version, "slice": slice_id, "flips": flips}
    return await rows(connection, Example, _EXAMPLES, **wanted, most=most)
