"""The folded batches in the order of the fold, for a back-test. Nothing is ever written.

Each read is a short read-only transaction of its own: a back-test of weeks blocks neither the vacuum nor retention.
Numbered batches do not change any more, so the reads need no common snapshot.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import RowMapping, TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Verdict
from quantdrift.facts.events import AlertEvent, event_of
from quantdrift.storage.database import Database
from quantdrift.storage.fold.models import read_spans
from quantdrift.storage.fold.read import read_catalog, refold
from quantdrift.storage.fold_rows import BatchRows, Catalog, to_us

BATCHES_AT_ONCE: Final = 64

# Retention deletes old batches except those with a sidecar's last tally: the history to fold begins after the
# last gap.
_KEPT: Final = """
    with placed as (
        select fold_seq, fold_seq - lag(fold_seq) over (order by fold_seq) as step
        from batch where fold_seq is not null
    ), kept as (
        select max(fold_seq) filter (where step is null or step > 1) as first, max(fold_seq) as last from placed
    )
"""
_EXTENT: Final = text(f"""
    {_KEPT}, wanted as (
        select min(b.fold_seq) as first, max(b.fold_seq) as last from batch b, kept
        where b.fold_seq >= kept.first and b.captured_to >= coalesce(:begin, b.captured_to)
            and b.captured_from < coalesce(:end, b.captured_from + interval '1 day')
    )
    select w.first, w.last, min(b.captured_from) as begin_at, max(b.captured_to) as end_at,
        coalesce(sum(b.n_rows) filter (where b.kind = 'comparison'), 0) as n_items
    from wanted w join batch b on b.fold_seq between w.first and w.last group by 1, 2
""")  # noqa: S608 - constants
_TRANSITIONS: Final = text("""
    (
        select * from (
            select distinct on (model_version_id, slice_id) * from transition where fold_seq < :first
            order by model_version_id, slice_id, fold_seq desc, id desc
        ) before where to_verdict in ('warning', 'firing')
    )
    union all (select * from transition where fold_seq between :first and :last)
    order by fold_seq, id
""")


class HistoryExtent(msgspec.Struct, frozen=True, kw_only=True):
    """The batches that can be folded again.

    Parameters
    ----------
    first, last
        `fold_seq` of the first and the last batch; without a gap between them.
    begin, end
        Earliest and latest capture in them.
    n_items
        Comparisons that were stored with them.
    """

    first: int
    last: int
    begin: datetime
    end: datetime
    n_items: int

    @property
    def complete(self) -> bool:
        """Whether it begins with the first batch ever folded, before which the fold's state is empty."""
        return self.first == 1


class StoredTransition(msgspec.Struct, frozen=True, kw_only=True):
    """A stored change of verdict; `event` is None where none was sent."""

    model_version_id: int
    slice_id: int
    from_verdict: Verdict
    to_verdict: Verdict
    at_us: int
    fold_seq: int
    event: AlertEvent | None


class History:
    """Reads of stored batches and transitions, in the order of the fold."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def extent(self, begin: datetime | None, end: datetime | None) -> HistoryExtent:
        """Return the batches that are kept of a period; None leaves an end open.

        Raises
        ------
        OperatorError
            No batch of the period is kept, or the database has no tables.
        RetryError
            Postgres is not available.
        """
        async with self._reading() as connection:
            rows = await _rows(connection, _EXTENT, begin=begin, end=end)
            if not rows:
                folded = await connection.scalar(text("select max(fold_seq) from batch"))
        if not rows:
            raise OperatorError(
                "the database has no folded batches of this period: widen --from and --to; batches older than "
                "storage.retention_days are deleted"
                if folded
                else "the database has no folded batches yet: check that a monitor runs on it"
            )
        (row,) = rows
        return HistoryExtent(
            first=row["first"],
            last=row["last"],
            begin=row["begin_at"],
            end=row["end_at"],
            n_items=int(row["n_items"]),
        )

    async def catalog(self) -> Catalog:
        """Return every version, slice and policy."""
        async with self._reading() as connection:
            return await read_catalog(connection)

    async def spans(self) -> dict[str, list[tuple[int, int]]]:
        """Return from when until when each model shares the allowance."""
        async with self._reading() as connection:
            return await read_spans(connection)

    async def batches(
        self, extent: HistoryExtent, at_once: int = BATCHES_AT_ONCE
    ) -> AsyncIterator[list[BatchRows]]:
        """Yield the batches of an extent in the order of the fold, up to `at_once` at a time.

        Raises
        ------
        OperatorError
            Retention has deleted some of them since `extent` was read.
        """
        for first in range(extent.first, extent.last + 1, at_once):
            last = min(first + at_once - 1, extent.last)
            async with self._reading() as connection:
                rows = await refold(connection, first, last)
            if len(rows) != last - first + 1:
                raise OperatorError(
                    f"retention has just deleted batches between {first} and {last}: begin later with --from"
                )
            yield rows

    async def transitions(self, extent: HistoryExtent) -> list[StoredTransition]:
        """Return the changes of verdict of an extent, preceded by the last earlier one of each slice that alerted then."""
        async with self._reading() as connection:
            rows = await _rows(connection, _TRANSITIONS, first=extent.first, last=extent.last)
        return [
            StoredTransition(
                model_version_id=row["model_version_id"],
                slice_id=row["slice_id"],
                from_verdict=Verdict(row["from_verdict"]),
                to_verdict=Verdict(row["to_verdict"]),
                at_us=to_us(row["at"]),
                fold_seq=row["fold_seq"],
                event=event_of(row["details"]),
            )
            for row in rows
        ]

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        async with self._database.begin() as connection:
            await connection.execute(text("set transaction isolation level repeatable read, read only"))
            yield connection


async def _rows(
    connection: AsyncConnection, statement: TextClause, **parameters: Any
) -> Sequence[RowMapping]:
    return (await connection.execute(statement, parameters)).mappings().all()
