"""The search for undeclared sessions over a real database: what is stored, and when it makes a slice unknown."""

import json
import uuid
from datetime import timedelta

import asyncpg
import numpy as np
import pytest

from benchmarks.bursts import bursts
from quantdrift.core.clock import SystemClock
from quantdrift.core.process.run import Stop
from quantdrift.drift.dependence import LOOK, MOST_KEYS
from quantdrift.monitor.session_search import SessionSearch, evidence_after
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import load_catalog
from quantdrift.storage.fold.undeclared_sessions import ExchangeOutcome
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons
from tests.support.storage.discovered_traffic import NOW, write_version

pytestmark = pytest.mark.integration


async def _store(record: asyncpg.Connection, version: int, *, alike: float, n: int, seed: int) -> None:
    """Store a batch of n exchanges with a user, a request id and a scanner."""
    rng = np.random.default_rng(seed)
    users, divergence = bursts(rng, n, alike=alike)
    await make_partitions(record, [NOW.date()])
    batch = await record.fetchval(
        "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows)"
        " values ('comparison', 'w', $1, $1, $1, $2) returning id",
        NOW,
        n,
    )
    everything = await record.fetchval("select id from slice where predicate = 'true'")
    await store_comparisons(
        record,
        [
            Comparison(
                captured_at=NOW + timedelta(hours=seed % 10, seconds=place),
                exchange_id=uuid.UUID(int=int.from_bytes(rng.bytes(16)), version=4),
                batch_id=batch,
                model_version_id=version,
                slice_ids=(everything,),
                divergence=float(divergence[place]),
                attributes=json.dumps(
                    {
                        "header.x-request-id": str(place),
                        "header.x-scanner": "abc"[place % 3],
                        "header.x-user": f"{seed}-{user}",
                    }
                ),
            )
            for place, user in enumerate(users)
        ],
    )


async def test_users_whose_requests_are_alike_are_found_and_named(
    database: Database, record: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a sound version nothing is found; after a restart nothing is tested twice."""
    bad, sound = await write_version(record), await write_version(record, "int8-8")
    search = SessionSearch(
        database=database, clock=SystemClock(), stop=Stop(), leads=lambda: True, wait_s=1.0
    )
    await search.look()
    for seed in range(2):
        await _store(record, bad, alike=0.4, n=1000, seed=seed)
        await _store(record, sound, alike=0.0, n=1000, seed=seed + 10)
        await search.look()
    rows = await record.fetch("select * from undeclared_session order by model_version_id")
    assert [(row["model_version_id"], row["attribute"], row["n_exchanges"]) for row in rows] == [
        (bad, "header.x-user", 2000),
        (sound, "header.x-user", 2000),
    ]
    assert rows[0]["found_at"] is not None
    assert rows[0]["log_evidence"] > rows[0]["log_threshold"]
    assert rows[1]["found_at"] is None
    async with database.begin() as connection:
        catalog = await load_catalog(connection)
    everything = await record.fetchval("select id from slice where predicate = 'true'")
    assert catalog.undeclared_sessions == {(bad, everything): "header.x-user"}
    (warning,) = [one.getMessage() for one in caplog.records if "sessions" in one.getMessage()]
    assert warning.startswith(
        "model digits, version int8-7, slice all: looks like sessions: requests that share header"
    )
    again = SessionSearch(database=database, clock=SystemClock(), stop=Stop(), leads=lambda: True, wait_s=1.0)
    await again.look()
    await again.look()
    assert await record.fetchval("select max(n_exchanges) from undeclared_session") == 2000


def test_no_version_is_tested_on_more_attributes_than_the_bound_is_shared_out_over() -> None:
    """Those of earlier looks go on; of the others as many as there is room for in all looks together."""
    users, divergence = bursts(np.random.default_rng(1), LOOK, alike=0.0)
    rows = [
        ExchangeOutcome(
            model_version_id=1,
            exchange_id=str(place),
            captured_at=NOW,
            slice_ids=(1,),
            attributes={f"header.x-{number:02}": user for number in range(20)},
            outcome=float(divergence[place]),
        )
        for place, user in enumerate(users)
    ]
    known = {f"header.x-{number:02}" for number in range(19, 19 - MOST_KEYS + 1, -1)}
    assert len(known) == MOST_KEYS - 1
    names = [row.attribute for row in evidence_after(rows, {}, known, {1})]
    assert len(names) == MOST_KEYS
    assert known < set(names)
