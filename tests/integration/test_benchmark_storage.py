"""`python -m benchmarks.storage`, in small: what it loads is what the product stores, and every question is asked."""

from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import msgspec
import pytest

from benchmarks.storage import (
    CONDENSED,
    Scale,
    asked,
    condensed,
    forget_unfolded,
    goals_of,
    in_blocks,
    report,
    sizes_of,
    write_rates,
)
from benchmarks.stored_rows import DAYS, SCANNERS, load, load_history, slice_of
from quantdrift.storage.database import Database

pytestmark = pytest.mark.integration

SCALE = Scale(rows=2_800, tenants=5, sidecars=1, rounds=1, batches=2)


async def test_it_loads_what_it_says_asks_every_question_and_writes_both_ways(
    postgres_dsn: str, record: asyncpg.Connection, database: Database, tmp_path: Path
) -> None:
    """Rows on every day, each in five slices of its own attributes; no figure that has a goal is missing."""
    loaded = await load(postgres_dsn, n_rows=SCALE.rows, n_tenants=SCALE.tenants, per_scanner=40)
    assert loaded.n_rows == SCALE.rows
    assert await record.fetchval("select count(distinct captured_at::date) from comparison") == DAYS
    assert await record.fetchval("select count(*) from comparison where cardinality(slice_ids) <> 5") == 0
    by_slice = await record.fetch(
        "select slice, count(*) as n from item where slice like 'scanner=%' group by 1"
    )
    counts = {row["slice"]: row["n"] for row in by_slice}
    by_header = await record.fetch(
        "select attributes ->> 'header.x-scanner' as name, count(*) as n from comparison group by 1"
    )
    assert counts == {slice_of(row["name"]): row["n"] for row in by_header}
    assert sum(counts.values()) == SCALE.rows
    for scanner in SCANNERS[:4]:
        assert abs(counts[slice_of(scanner.name)] / SCALE.rows - scanner.share) < 0.05
    assert (
        await record.fetchval(
            "select count(*) from comparison c where not exists (select from batch where id = c.batch_id)"
        )
        == 0
    )

    await load_history(
        postgres_dsn, n_compared=100_000, n_sidecars=SCALE.sidecars, loaded=loaded, tally_s=600
    )
    of_slice = await record.fetchval("select count(*) from rollup_day where slice_id = 1")
    assert of_slice == DAYS
    sizes = await sizes_of(postgres_dsn)
    assert sizes.total > sizes.table > sum(sizes.columns.values()) > 0
    assert {name.partition(" ")[0] for name in sizes.indexes} == {"btree", "gin", "hash"}

    end = datetime.now(UTC)
    figures = {"bytes_per_comparison_rows": sizes.total, **await asked(postgres_dsn, loaded, end)}
    figures["report_s"] = await report(postgres_dsn, end, tmp_path)
    assert "archive" in (tmp_path / "report.html").read_text()
    before = await record.fetchval("select count(*) from comparison")
    written = await write_rates(database, postgres_dsn, SCALE, 64)
    assert (
        await record.fetchval("select count(*) from comparison") == before + 2 * (1 + SCALE.rounds) * 2 * 64
    )
    assert min(written.writer, written.copy, written.ratio) > 0
    of_blocks = await write_rates(database, postgres_dsn, SCALE, 64, as_blocks=True)
    assert await record.fetchval("select sum(n) from condensed_block") == (1 + SCALE.rounds) * 2 * 64
    assert min(of_blocks.writer, of_blocks.copy, of_blocks.ratio) > 0
    await forget_unfolded(postgres_dsn)
    n_rows = await record.fetchval("select count(*) from comparisons('-infinity', 'infinity')")
    assert n_rows == SCALE.rows
    old = await condensed(database, postgres_dsn)
    assert SCALE.rows / 2 < old.n_rows < SCALE.rows
    assert await record.fetchval("select count(*) from comparisons('-infinity', 'infinity')") == n_rows
    figures["bytes_per_comparison_old"] = old.bytes_each
    of_old = await asked(
        postgres_dsn, msgspec.structs.replace(loaded, request_id=old.request_id), end - CONDENSED
    )
    figures |= {f"old_{name}": value for name, value in of_old.items()}
    blocks = await in_blocks(postgres_dsn)
    assert blocks.n_rows > 0
    assert await record.fetchval("select count(*) from comparisons('-infinity', 'infinity')") == n_rows
    figures["bytes_per_comparison"] = blocks.bytes_each
    of_new = await asked(postgres_dsn, msgspec.structs.replace(loaded, request_id=blocks.request_id), end)
    figures |= {f"blocks_{name}": value for name, value in of_new.items()}
    assert all(goal.value > 0 for goal in goals_of({**figures, "write_ratio": written.ratio}))
