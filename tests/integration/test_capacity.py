"""The sizes that docs/how-to/operate.md gives for planning, measured in a database that was just filled."""

import re
from pathlib import Path

import asyncpg
import pytest

from benchmarks.storage import sizes_of
from benchmarks.stored_rows import load, load_history
from quantdrift.storage.database import Database
from tests.support.monitor.fold_stream import batches, fold_stored, store_batch, store_catalog

pytestmark = pytest.mark.integration

GUIDE = Path(__file__).resolve().parents[2] / "docs/how-to/operate.md"
ROWS = 42_000  # 3,000 on each day: the first pages of an index then weigh little


def _said() -> dict[str, float]:
    """Return what the guide says of each table, bytes for a row."""
    lines = re.findall(
        r"^\| database: ([a-z ]+) \| ([0-9.]+) kB for each", GUIDE.read_text(), flags=re.MULTILINE
    )
    return {name: 1000 * float(size) for name, size in lines}


async def _bytes(connection: asyncpg.Connection, table: str) -> float:
    """Return how much a row takes with its indexes and TOAST."""
    return float(
        await connection.fetchval(
            f"select pg_total_relation_size('{table}')::float8 / (select count(*) from {table})"
        )
    )


@pytest.mark.release
async def test_a_row_of_each_table_takes_what_the_guide_says(
    postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Within a third: half of the truth fills a disk in half of the time that somebody planned for."""
    loaded = await load(postgres_dsn, n_rows=ROWS, n_tenants=5, per_scanner=40)
    await load_history(postgres_dsn, n_compared=1_000_000, n_sidecars=2, loaded=loaded, tally_s=60)
    measured = {
        "comparisons": (await sizes_of(postgres_dsn)).total,
        "tallies": await _bytes(record, "tally"),
        "hourly sums": await _bytes(record, "rollup_hour"),
    }
    said = _said()
    assert {name: round(size / said[name], 2) for name, size in measured.items()} == {
        name: pytest.approx(1.0, abs=1 / 3) for name in measured
    }


async def test_a_detector_takes_what_the_guide_says(record: asyncpg.Connection, database: Database) -> None:
    """Without the pages of a table that has a few rows: what one row holds."""
    await store_catalog(record)
    for rows in batches(60):
        await store_batch(record, rows)
    await fold_stored(database)
    size = await record.fetchval("select avg(pg_column_size(detector.*))::float8 from detector")
    assert size / _said()["detectors"] == pytest.approx(1.0, abs=1 / 3)
