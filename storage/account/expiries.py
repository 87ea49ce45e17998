"""Counts of exchanges that expired in the stream, each counted once, from the numbers in the exchanges.

A tally says how many exchanges of a row the stream had accepted, and the last number by then. Once all messages that the
stream stored before the tally have left it, the numbers among these that no worker has finished are lost unread: they
expired, or were purged. Workers record numbers in the transaction that stores the results of the exchanges, so that
neither a kill nor a second delivery changes the count.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Tally
from quantdrift.core.stream.numbering import Numbered
from quantdrift.storage.database import Database
from quantdrift.storage.locks import try_lock

EXPIRED: Final = "expired"  # among the reasons of losses
# Between the clocks of a cluster: the two streams may have different leaders. To be subtracted from `gone_until`.
SKEW: Final = timedelta(seconds=1)
_MOST_RANGES: Final = 1_000

# Rows are locked in one order everywhere, so that two workers never wait for each other.
_NOTE: Final = """
    insert into arrival (boot, counts_row, numbers)
    select cast(boot as uuid), counts_row, cast(numbers as int8multirange)
    from unnest(cast({boots} as text[]), cast({rows} as int[]), cast({numbers} as text[])) one (boot, counts_row, numbers)
    order by 1, 2
    on conflict (boot, counts_row) do update set numbers = arrival.numbers + excluded.numbers, due = true
"""
NOTE_NEW: Final = f"{_NOTE} where not arrival.numbers && excluded.numbers"
"""Records numbers, and leaves out the rows of which one is recorded already; `boots`, `rows` and `numbers` are expressions."""
_NAMED: Final = {"boots": ":boots", "rows": ":rows", "numbers": ":numbers"}
_NOTE_AGAIN: Final = text(_NOTE.format(**_NAMED))
_NOTE_NEW: Final = text(NOTE_NEW.format(**_NAMED))
_FINISHED: Final = text("""
    select one.place
    from unnest(cast(:boots as text[]), cast(:rows as int[]), cast(:numbers as bigint[]))
        with ordinality one (boot, counts_row, number, place)
    join arrival a on a.boot = cast(one.boot as uuid) and a.counts_row = one.counts_row and a.numbers @> one.number
""")
_NAME: Final = text("""
    insert into arrival (boot, counts_row, source, stratum, model)
    select cast(one.boot as uuid), one.counts_row, one.source, one.stratum, one.model
    from unnest(
        cast(:boots as text[]), cast(:rows as int[]), cast(:sources as text[]), cast(:strata as text[]),
        cast(:models as text[])
    ) one (boot, counts_row, source, stratum, model)
    order by 1, 2
    on conflict (boot, counts_row) do update set
        source = excluded.source, stratum = excluded.stratum, model = excluded.model, due = true
    where not arrival.due or arrival.model is null
""")
_CUTS: Final = text("""
    select a.boot::text, a.counts_row, a.source, a.stratum, a.model, cut.sequence, cut.published, cut.numbered
    from arrival a cross join lateral (
        select t.sequence, coalesce((t.models -> a.model ->> 'published')::bigint, 0) as published,
            coalesce((t.models -> a.model ->> 'numbered')::bigint, 0) as numbered
        from tally t
        where t.source = a.source and t.boot = a.boot and t.stratum = a.stratum and t.sequence >= a.checked
            and t.streamed_at < :gone_until
        order by t.sequence desc limit 1
    ) cut
    where a.due and a.model is not null
    order by a.boot, a.counts_row
    for update of a
""")
# In a statement of its own: it sees what was committed before the locks were there.
_CHECK: Final = text("""
    with cut as (
        select cast(boot as uuid) as boot, counts_row, sequence, published, numbered
        from unnest(
            cast(:boots as text[]), cast(:rows as int[]), cast(:sequences as bigint[]), cast(:published as bigint[]),
            cast(:numbered as bigint[])
        ) one (boot, counts_row, sequence, published, numbered)
    ), found as (
        select a.boot, a.counts_row, cut.sequence, cut.numbered, a.expired as before, a.closed,
            coalesce((
                select sum(upper(one) - lower(one))
                from unnest(a.numbers * int8multirange(int8range(1, cut.numbered + 1))) one
            ), 0)::bigint as done,
            cut.published, (select count(*) from unnest(a.numbers)) > :most_ranges as is_long
        from arrival a join cut using (boot, counts_row)
    ), counted as (
        select *, greatest(published - (done - closed), 0) as total from found
    )
    update arrival a set
        expired = c.total,
        checked = c.sequence,
        due = exists (
            select from tally t where t.source = a.source and t.boot = a.boot and t.stratum = a.stratum
                and t.sequence > c.sequence
        ),
        numbers = case when c.is_long then a.numbers + int8multirange(int8range(1, c.numbered + 1)) else a.numbers end,
        closed = case when c.is_long then c.closed + c.numbered - c.done else c.closed end
    from counted c where a.boot = c.boot and a.counts_row = c.counts_row
    returning a.boot::text, a.counts_row, c.total - c.before as n
""")
_BATCH: Final = text("""
    insert into batch (kind, worker, captured_from, captured_to, n_rows)
    values ('tally', :worker, :at, :at, :n_rows) returning id
""")
_COUNT: Final = text("""
    insert into expiry (batch_id, boot, counts_row, source, stratum, model, n)
    values (:batch_id, cast(:boot as uuid), :counts_row, :source, :stratum, :model, :n)
""")


class Expired(msgspec.Struct, frozen=True, kw_only=True):
    """The growth of a count; negative where exchanges counted as expired arrived after all."""

    stratum: str
    model: str
    n: int


def arrival_rows(numbered: Iterable[Numbered]) -> tuple[list[str], list[int], list[str]]:
    """Return the numbers by row of `arrival`, in the order in which rows are locked: starts of sidecars, rows, and numbers of each."""
    by_row: dict[tuple[str, int], set[int]] = {}
    for message in numbered:
        by_row.setdefault((message.boot, message.row), set()).add(message.number)
    # In one order everywhere, so that two workers never wait for each other.
    keys = sorted(by_row)
    return (
        [boot for boot, _ in keys],
        [row for _, row in keys],
        [_multirange(sorted(by_row[k])) for k in keys],
    )


async def note_numbers(connection: AsyncConnection, numbered: Iterable[Numbered]) -> bool:
    """Record the exchanges that a worker has finished, with any result; return whether some of them may be recorded already.

    A transaction that has recorded one of them is waited for, and no other one can record them before the end of this one.
    """
    boots, rows, numbers = arrival_rows(numbered)
    if not rows:
        return False
    values = {"boots": boots, "rows": rows, "numbers": numbers}
    if (await connection.execute(_NOTE_NEW, values)).rowcount == len(rows):
        return False
    await connection.execute(_NOTE_AGAIN, values)
    return True


async def finished_before(connection: AsyncConnection, numbered: Iterable[Numbered]) -> frozenset[Numbered]:
    """Return those of some exchanges that a worker has finished in an earlier transaction."""
    asked = sorted({*numbered})
    if not asked:
        return frozenset()
    rows = await connection.execute(
        _FINISHED,
        {
            "boots": [message.boot for message in asked],
            "rows": [message.row for message in asked],
            "numbers": [message.number for message in asked],
        },
    )
    return frozenset(asked[row.place - 1] for row in rows)


async def note_tallies(connection: AsyncConnection, tallies: Iterable[Tally]) -> None:
    """Record what the rows are for, and that there is a new tally to compare them with; call it after storing the tallies."""
    named = {
        (tally.boot.lower(), of.row): (tally.source, stratum.stratum, model)
        for tally in tallies
        for stratum in tally.strata
        for model, of in stratum.models.items()
        if of.row >= 0 and of.published
    }
    if not named:
        return
    sources, strata, models = zip(*named.values(), strict=True)
    await connection.execute(
        _NAME,
        {
            "boots": [boot for boot, _ in named],
            "rows": [row for _, row in named],
            "sources": list(sources),
            "strata": list(strata),
            "models": list(models),
        },
    )


async def count_expired(database: Database, worker: str, gone_until: datetime) -> Sequence[Expired]:
    """Count expired exchanges, and return the growth of the counts; empty while another process counts.

    Parameters
    ----------
    worker
        Name of this process.
    gone_until
        Messages that the stream stored before this time have left it. It must be read from the stream before this call:
        the exchanges that workers have finished by then are in the database.

    Raises
    ------
    RetryError
        Postgres is not available: nothing has changed.
    """
    async with database.begin() as connection:
        if not await try_lock(connection, "arrival"):
            return ()
        cuts = (await connection.execute(_CUTS, {"gone_until": gone_until})).all()
        if not cuts:
            return ()
        checked = await connection.execute(
            _CHECK,
            {
                "boots": [cut.boot for cut in cuts],
                "rows": [cut.counts_row for cut in cuts],
                "sequences": [cut.sequence for cut in cuts],
                "published": [cut.published for cut in cuts],
                "numbered": [cut.numbered for cut in cuts],
                "most_ranges": _MOST_RANGES,
            },
        )
        grown = {(row.boot, row.counts_row): row.n for row in checked if row.n}
        if not grown:
            return ()
        batch_id = await connection.scalar(_BATCH, {"worker": worker, "at": gone_until, "n_rows": len(grown)})
        rows = [
            {
                "batch_id": batch_id,
                "boot": cut.boot,
                "counts_row": cut.counts_row,
                "source": cut.source,
                "stratum": cut.stratum,
                "model": cut.model,
                "n": grown[cut.boot, cut.counts_row],
            }
            for cut in cuts
            if (cut.boot, cut.counts_row) in grown
        ]
        await connection.execute(_COUNT, rows)
    return [Expired(stratum=row["stratum"], model=row["model"], n=row["n"]) for row in rows]


def _multirange(numbers: Sequence[int]) -> str:
    """Return distinct numbers in rising order, as a Postgres multirange."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return "{" + ",".join(f"[{low},{high})" for low, high in runs) + "}"
