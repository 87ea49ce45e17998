"""The database with millions of comparisons: what a comparison takes to write and on disk, and how long the usual questions take.

    python -m benchmarks.storage [--quick] [--rows N] [--directory DIR]

The embedded Postgres, as durable as in production. The comparisons of 14 days are loaded, with the partitions and indexes that the
product makes, beside the roll-ups that 50 million comparisons leave: the weekly report is read from those, and their number
depends on slices and hours. Then, in the same database:

- `write_ratio`: comparisons a second of the shadow's writer with `storage.write_blocks`, divided by those of a bare COPY of as many rows
  into `comparison`, in turn: batches of 64, one transaction each, one connection each. `write_ratio_1024` is the same with batches of
  1,024, and `write_ratio_rows`, `write_ratio_rows_1024` are the same without the option.
- `bytes_per_comparison_rows`: table, indexes and TOAST for each comparison in a row, after a vacuum; below it, column by column and
  index by index.
- Seconds of the questions, by the product's own functions: the slowest of three, of which the first may read from the disk.
- `bytes_per_comparison_old`: the same of days that are condensed, all but the last three (`storage.condense_after_days`), with the time
  that condensing takes, and the questions of a week of them (`old_...`).
- `bytes_per_comparison`: the same of the last three days with `storage.write_blocks`, merged as the monitor does while they come, and the
  questions of the last week (`blocks_...`), of which the first four days are condensed.
"""

import argparse
import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import asyncpg
import msgspec
import numpy as np

from benchmarks.result import Goal, finish
from benchmarks.stored_rows import (
    BATCH,
    MODEL,
    POLICY,
    RULES,
    SCANNERS,
    VERSION,
    Loaded,
    batch_of,
    exchanges,
    load,
    load_history,
    slice_of,
)
from quantdrift import frames
from quantdrift.core.clock import SystemClock
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, Storage
from quantdrift.core.slices import ValueRules
from quantdrift.report.period import Period
from quantdrift.show.report import page
from quantdrift.storage.admin.migrate import upgrade
from quantdrift.storage.admin.retention import maintain
from quantdrift.storage.comparisons.blocks import Blocks
from quantdrift.storage.comparisons.copy import COLUMNS, Row, columns_of, comparison_columns, rows_of
from quantdrift.storage.comparisons.rows import ComparedExchange
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from quantdrift.storage.exchanges import directions, margins, worst_exchanges
from quantdrift.storage.server.postgres import PostgresServer

LARGE: Final = 1024
"""Rows of a transaction of a worker that replays many items at a time: `shadow.batch_items`; the default is `BATCH`."""
WEEK: Final = timedelta(days=7)
CONDENSED: Final = timedelta(days=3)
ROLLED_UP: Final = 50_000_000
_REPEATS: Final = 3


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much is loaded and written.

    Parameters
    ----------
    rows
        Comparisons.
    tenants
        Slices beside the 39 others.
    sidecars
        Whose tallies are loaded, one every ten seconds for each of two strata.
    rounds, batches
        How often writer and COPY take turns, and the batches of each turn.
    """

    rows: int = 5_000_000
    tenants: int = 961
    sidecars: int = 3
    rounds: int = 15
    batches: int = 40


QUICK: Final = Scale(rows=200_000, rounds=7, batches=20)


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """Rows a second, in the median turn, and the median of the ratios of two turns beside each other."""

    writer: float
    copy: float
    ratio: float


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes for each comparison: all, the table alone, each index, and each column."""

    total: float
    table: float
    indexes: dict[str, float]
    columns: dict[str, float]


class Condensed(msgspec.Struct, frozen=True, kw_only=True):
    """What was put into blocks: how many comparisons, at which rate, bytes for each of them, and the request id of one."""

    n_rows: int
    rows_per_s: float
    bytes_each: float
    request_id: str


async def measure(dsn: str, scale: Scale, directory: Path) -> tuple[dict[str, float], Sizes]:
    """Load and measure; `directory` is where the report goes."""
    begin = time.monotonic()
    await upgrade(dsn, progress=lambda _: None)
    loaded = await load(dsn, n_rows=scale.rows, n_tenants=scale.tenants)
    _say(f"{loaded.n_rows:,} comparisons in {loaded.n_slices} slices after {time.monotonic() - begin:.0f} s")
    await load_history(dsn, n_compared=ROLLED_UP, n_sidecars=scale.sidecars, loaded=loaded)
    _say(f"roll-ups of {ROLLED_UP:,} comparisons and tallies after {time.monotonic() - begin:.0f} s")
    sizes = await sizes_of(dsn)
    end = datetime.now(UTC)
    seconds = await asked(dsn, loaded, end)
    seconds["report_s"] = await report(dsn, end, directory)
    written = {}
    async with Database(dsn) as database:
        for size in (BATCH, LARGE):
            for as_blocks in (True, False):
                written[size, as_blocks] = await write_rates(database, dsn, scale, size, as_blocks=as_blocks)
        await forget_unfolded(dsn)
        old = await condensed(database, dsn)
    _say(f"{old.n_rows:,} comparisons condensed after {time.monotonic() - begin:.0f} s")
    of_old = await asked(dsn, msgspec.structs.replace(loaded, request_id=old.request_id), end - CONDENSED)
    blocks = await in_blocks(dsn)
    _say(f"{blocks.n_rows:,} comparisons in blocks after {time.monotonic() - begin:.0f} s")
    of_blocks = await asked(dsn, msgspec.structs.replace(loaded, request_id=blocks.request_id), end)
    return {
        "rows": float(loaded.n_rows),
        "slices": float(loaded.n_slices),
        "bytes_per_comparison": blocks.bytes_each,
        "bytes_per_comparison_rows": sizes.total,
        "bytes_per_comparison_old": old.bytes_each,
        "condensed_rows_per_s": old.rows_per_s,
        "merged_rows_per_s": blocks.rows_per_s,
        "table_bytes": sizes.table,
        **seconds,
        **{f"old_{name}": value for name, value in of_old.items()},
        **{f"blocks_{name}": value for name, value in of_blocks.items()},
        **{
            f"{name}{'' if as_blocks else '_rows'}{'' if size == BATCH else '_1024'}": value
            for (size, as_blocks), of in written.items()
            for name, value in (
                ("writer_rows_per_s", of.writer),
                ("copy_rows_per_s", of.copy),
                ("write_ratio", of.ratio),
            )
        },
    }, sizes


async def forget_unfolded(dsn: str) -> None:
    """Delete what the writers and COPY have stored: it is of one moment, and none of it is folded."""
    db = await asyncpg.connect(dsn)
    try:
        await db.execute(
            "delete from comparison c where not exists (select from batch b where b.id = c.batch_id and b.fold_seq is not null)"
        )
        await db.execute("delete from batch where fold_seq is null")
        await db.execute("truncate condensed_block")
        await db.execute("vacuum (analyze) comparison")
    finally:
        await db.close()


async def in_blocks(dsn: str) -> Condensed:
    """Store what is in rows as the workers would have with `storage.write_blocks`, and merge it as the monitor does, hour by hour."""
    db = await asyncpg.connect(dsn)
    names = ", ".join(COLUMNS)
    try:
        before = await db.fetchrow(
            "select pg_total_relation_size('condensed_block') as n_bytes, coalesce(sum(n), 0) as n_rows from condensed_block"
        )
        batches = await db.fetch(
            "select batch_id, max(stored_at) as stored_at from comparison group by 1 order by 1"
        )
        merging_s, n_merged, vacuumed = 0.0, 0, None
        for number, (batch_id, stored_at) in enumerate(batches):
            rows = await db.fetch(f"delete from comparison where batch_id = $1 returning {names}", batch_id)  # noqa: S608
            blocks = Blocks(columns_of([tuple(row) for row in rows]))
            await blocks.insert(db, batch_id)
            await db.copy_records_to_table("comparison", records=blocks.few, columns=COLUMNS)
            await db.execute(
                "update condensed_block set condensed_at = $2 where of_batch = $1", batch_id, stored_at
            )
            if vacuumed is None or stored_at - vacuumed >= timedelta(hours=1) or number == len(batches) - 1:
                vacuumed, begin = stored_at, time.monotonic()
                while n := await db.fetchval(
                    "select blocks_merge($1, 65536)", stored_at - timedelta(hours=1)
                ):
                    n_merged += n
                merging_s += time.monotonic() - begin
                await db.execute("vacuum condensed_block")
        await db.execute("vacuum (analyze)")
        n_bytes, n_rows = await db.fetchrow(
            "select pg_total_relation_size('condensed_block'), (select sum(n) from condensed_block)"
        )
        request_id = await db.fetchval(
            "select r.attributes ->> 'header.x-request-id' from (select b from condensed_block b order by captured_to desc limit 1) b"
            " cross join lateral block_rows(b.b) r limit 1"
        )
    finally:
        await db.close()
    n = int(n_rows - before["n_rows"])
    return Condensed(
        n_rows=n,
        rows_per_s=n_merged / max(merging_s, 1e-9),
        bytes_each=(n_bytes - before["n_bytes"]) / n,
        request_id=request_id,
    )


async def sizes_of(dsn: str) -> Sizes:
    """Return where the bytes of the fullest day go."""
    db = await asyncpg.connect(dsn)
    try:
        day = await db.fetchval(
            "select relname from pg_class where relname like 'comparison\\_%' and relkind = 'r' order by reltuples desc limit 1"
        )
        n = await db.fetchval(f"select count(*) from {day}")  # noqa: S608 -- its name comes from the database
        total, table = await db.fetchrow(
            "select pg_total_relation_size($1::text::regclass), pg_table_size($1::text::regclass)", day
        )
        indexes = await db.fetch(
            "select pg_get_indexdef(indexrelid) as name, pg_relation_size(indexrelid) as bytes from pg_index"
            " where indrelid = $1::text::regclass order by 2 desc",
            day,
        )
        names = await db.fetch(
            "select attname from pg_attribute where attrelid = $1::text::regclass and attnum > 0 and not attisdropped",
            day,
        )
        each = ", ".join(f'coalesce(avg(pg_column_size("{row["attname"]}")), 0)' for row in names)
        averages = await db.fetchrow(f"select {each} from (select * from {day} limit 20000) part")  # noqa: S608
    finally:
        await db.close()
    columns = {row["attname"]: float(size) for row, size in zip(names, averages, strict=True)}
    return Sizes(
        total=total / n,
        table=table / n,
        indexes={row["name"].partition(" USING ")[2]: row["bytes"] / n for row in indexes},
        columns=dict(sorted(columns.items(), key=lambda one: -one[1])),
    )


async def condensed(database: Database, dsn: str) -> Condensed:
    """Condense all days but the last ones."""
    db = await asyncpg.connect(dsn)
    try:
        await db.execute(
            "insert into fold (id, fold_seq, event_time, mass, n_detectors) values (1, 1, now(), 0, 0)"
            " on conflict (id) do update set event_time = now()"
        )
        begin = time.monotonic()
        done = await maintain(
            database, Storage(condense_after_days=CONDENSED.days, retention_days=400), datetime.now(UTC)
        )
        took_s = time.monotonic() - begin
        await db.execute("vacuum (analyze) condensed_block")
        n_bytes, n_rows = await db.fetchrow(
            "select pg_total_relation_size('condensed_block'), (select sum(n) from condensed_block)"
        )
        request_id = await db.fetchval(
            "select r.attributes ->> 'header.x-request-id' from condensed_block b cross join lateral block_rows(b) r limit 1"
        )
    finally:
        await db.close()
    return Condensed(
        n_rows=done.n_condensed,
        rows_per_s=done.n_condensed / took_s,
        bytes_each=n_bytes / float(n_rows),
        request_id=request_id,
    )


async def asked(dsn: str, loaded: Loaded, end: datetime) -> dict[str, float]:
    """Return the seconds of each question about the week before `end`, the slowest of three."""
    start = end - WEEK
    named = {
        "frequent": "all",
        "rare_damaged": slice_of("archive"),
        "rare_sound": slice_of("kiosk"),
        "sound_3_percent": slice_of("mobile"),
        "sound_15_percent": slice_of("lab"),
    }
    seconds = {}
    with frames.arrow(dsn) as drift:
        for name, of in named.items():
            seconds[f"worst_{name}_s"] = _slowest(partial(drift.worst, MODEL, slice=of, start=start, end=end))
        for name, of in named.items():
            seconds[f"direction_{name}_s"] = _slowest(
                partial(drift.direction, MODEL, slice=of, start=start, end=end)
            )
        seconds["request_s"] = _slowest(partial(drift.request, loaded.request_id))
        seconds["coverage_s"] = _slowest(partial(drift.coverage, start=start, end=end))
    async with Database(dsn) as database:
        for name, of in named.items():
            version, slice_id = loaded.version_id, loaded.slices[of]
            seconds[f"page_worst_{name}_s"] = await _slowest_read(
                database,
                partial(worst_exchanges, version_id=version, slice_id=slice_id, period=(start, end), most=20),
            )
            for read in (directions, margins):
                seconds[f"page_{read.__name__}_{name}_s"] = await _slowest_read(
                    database, partial(read, version_id=version, slice_id=slice_id, period=(start, end))
                )
    return seconds


async def report(dsn: str, end: datetime, directory: Path) -> float:
    """Return the seconds of a weekly report; `directory` is where it goes."""
    begin = time.monotonic()
    await page.write(
        Config(models=(Model(name=MODEL),)),
        Secrets(dsn=dsn),
        Period.of(kind="week", end=end),
        out=directory / "report.html",
        progress=lambda _: None,
    )
    return time.monotonic() - begin


def _slowest(question: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS):
        begin = time.monotonic()
        question()
        times.append(time.monotonic() - begin)
    return max(times)


async def _slowest_read(database: Database, question: Callable[[Any], Awaitable[Any]]) -> float:
    times = []
    for _ in range(_REPEATS):
        async with database.begin() as connection:
            begin = time.monotonic()
            await question(connection)
            times.append(time.monotonic() - begin)
    return max(times)


async def write_rates(
    database: Database, dsn: str, scale: Scale, size: int, *, as_blocks: bool = False
) -> Written:
    """Let the writer and a bare COPY take turns, `size` rows in each transaction."""
    rng, boot = np.random.default_rng(size), uuid.uuid4().hex
    batches, tenants = max(scale.batches * BATCH // size, 2), scale.tenants
    rules = ValueRules(Config(models=(Model(name=MODEL),), slices=RULES))
    writer = Writer(database, SystemClock(), rules, as_blocks=as_blocks)
    db = await asyncpg.connect(dsn)
    try:
        policy, version = await db.fetchrow(
            "select p.id, v.id from policy p, model_version v where p.epoch = $1", POLICY.epoch
        )
        ids = {
            (row["model"], row["predicate"]): row["id"]
            for row in await db.fetch("select model, predicate, id from slice")
        }

        def copied(compared: list[ComparedExchange]) -> list[Row]:
            slice_ids = {
                id(item.slices): sorted({ids[key.model, key.predicate] for key in item.slices})
                for one in compared
                for item in one.items
            }
            return rows_of(
                comparison_columns(compared, 1, {VERSION: version}, {POLICY.epoch: policy}, slice_ids)
            )

        rates: list[tuple[float, float]] = []
        for number in range(scale.rounds + 1):
            given = [
                batch_of(drawn(rng, size, tenants), 1 + (number * batches + place) * size, boot)
                for place in range(batches)
            ]
            bare = [copied(drawn(rng, size, tenants)) for _ in range(batches)]
            begin = time.monotonic()
            for batch in given:
                await writer.store(batch)
            between = time.monotonic()
            for rows in bare:
                await db.copy_records_to_table("comparison", records=rows, columns=COLUMNS)
            end = time.monotonic()
            if number:  # the first turn opens connections and prepares statements
                rates.append((batches * size / (between - begin), batches * size / (end - between)))
    finally:
        await db.close()
    return Written(
        writer=float(np.median([one for one, _ in rates])),
        copy=float(np.median([one for _, one in rates])),
        ratio=float(np.median([one / other for one, other in rates])),
    )


def drawn(rng: np.random.Generator, size: int, n_tenants: int) -> list[ComparedExchange]:
    """Return the exchanges of one batch, mixed as the traffic is."""
    counts = rng.multinomial(size, [scanner.share for scanner in SCANNERS])
    now = datetime.now(UTC)
    return [
        one
        for scanner, n in zip(SCANNERS, counts, strict=True)
        if n
        for one in exchanges(scanner, now, int(n), rng, n_tenants=n_tenants)
    ]


def goals_of(figures: dict[str, float]) -> list[Goal]:
    """Return the goals beside the figures."""
    seconds = [
        *(f"worst_{name}_s" for name in ("frequent", "rare_damaged", "rare_sound")),
        *(f"direction_{name}_s" for name in ("frequent", "rare_damaged", "rare_sound")),
        "request_s",
        "coverage_s",
    ]
    return [
        Goal(name="write_ratio", value=figures["write_ratio"], bound=0.8, unit="ratio", at_most=False),
        Goal(name="bytes_per_comparison", value=figures["bytes_per_comparison"], bound=300, unit="By"),
        Goal(
            name="bytes_per_comparison_old", value=figures["bytes_per_comparison_old"], bound=180, unit="By"
        ),
        *(
            Goal(name=name, value=figures[name], bound=1.0, unit="s")
            for name in (*seconds, *(f"{days}_{name}" for days in ("old", "blocks") for name in seconds))
        ),
        Goal(name="report_s", value=figures["report_s"], bound=10.0, unit="s"),
    ]


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """Load, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="200,000 comparisons")
    parser.add_argument("--rows", type=int, help="so many comparisons; 5 million need 6 GB of disk")
    parser.add_argument(
        "--directory",
        type=Path,
        help="where the database is made; default: the directory for temporary files",
    )
    given = parser.parse_args()
    scale = QUICK if given.quick else Scale()
    if given.rows:
        scale = msgspec.structs.replace(scale, rows=given.rows)
    _say(f"load average {os.getloadavg()[0]:.1f}; the database is durable as in production")
    begin = time.monotonic()
    with TemporaryDirectory(dir=given.directory) as parent:
        place = Path(parent)
        place.chmod(0o755)  # the server may run under another account
        with PostgresServer(place / "postgres") as server:
            figures, sizes = asyncio.run(measure(server.dsn, scale, place))
    for name, size in sizes.indexes.items():
        print(f"{size:8.1f} B  index {name}")
    for name, size in sizes.columns.items():
        print(f"{size:8.1f} B  {name}")
    for name, value in figures.items():
        print(f"{name:28} {value:,.3f}")
    print(f"load average {os.getloadavg()[0]:.1f}")
    finish("storage", {**figures, "seconds": round(time.monotonic() - begin)}, goals_of(figures))


if __name__ == "__main__":
    main()
