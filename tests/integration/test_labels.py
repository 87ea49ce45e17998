"""True labels: loaded from files, matched to compared items, and what they say of each slice."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quantdrift.storage.database import Database
from quantdrift.storage.labels import outcomes
from tests.support.commands import invoked
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

pytestmark = pytest.mark.integration

NOW = datetime.now(UTC)
CONFIG = """
[[models]]
name = "digits"
labels = ["zero", "one", "two"]
"""


def exchange(number: int, candidate: int, reference: int, **columns: Any) -> Comparison:
    """Return an exchange with the request id r<number>."""
    return Comparison(
        captured_at=NOW - timedelta(hours=1),
        exchange_id=f"00000000-0000-0000-0000-{number:012d}",
        batch_id=1,
        model_version_id=1,
        attributes=json.dumps({"header.x-request-id": f"r{number}"}),
        detail=json.dumps({"candidate_top": candidate, "reference_top": reference}),
        trace=f"00-{number:032x}-0000000000000001-01",
        **columns,
    )


@pytest.fixture
async def dsn(record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path) -> str:
    """Return the address of a database with six exchanges; of the third there are two items, of the fourth weight 2."""
    await record.execute("""
        insert into model_version (model, candidate_version, reference_digest) values ('digits', 'int8', 'abc');
        insert into slice (model, predicate, name, definition) values
            ('digits', 'true', 'all', '{}'), ('digits', 'header.x-scanner = "faint"', 'scanner=faint', '{}');
    """)
    await make_partitions(record, [(NOW - timedelta(hours=1)).date()])
    rows = [
        exchange(1, 1, 1),
        exchange(2, 2, 1, slice_ids=(1, 2)),
        exchange(3, 1, 2, n_items=2),
        exchange(3, 1, 1, n_items=2, item=1),
        exchange(4, 0, 1, pi1=0.5, slice_ids=(1, 2)),
        exchange(5, 1, 1),
    ]
    await store_comparisons(record, rows)
    (tmp_path / "config.toml").write_text(CONFIG)
    return postgres_dsn


async def labels(dsn: str, directory: Path, *words: str) -> tuple[int, str]:
    """Run `quantdrift labels` and return its exit code and what it prints."""
    done = await invoked("labels", *words, config=directory / "config.toml", dsn=dsn)
    return done.returncode, done.stdout + done.stderr
