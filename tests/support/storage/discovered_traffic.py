"""Seeded comparisons for the tests of discovered slices, written with SQL: which scanner flips how often, and when."""

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import msgspec
import numpy as np

from quantdrift.core.records import BodyStratum, HeaderStratum, Metric, Policy, Predicate
from quantdrift.drift.discovery.confirmation import N_BETS
from quantdrift.storage.schema.slice_tables import DiscoveryStatus
from quantdrift.storage.slices.discovery import DiscoveryRow
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

NOW = datetime(2026, 11, 16, 3, 0, tzinfo=UTC)
DAY = timedelta(days=1)
POLICY = Policy(
    epoch="e1",
    header_strata=(HeaderStratum(name="default", rate=1.0),),
    body_strata=(BodyStratum(name="default", rate=1.0),),
)
FAINT = Predicate(key="header.x-scanner", equals="faint")
SHARES = {"clean": 0.6, "gain": 0.3, "faint": 0.1}


def discovery(**changes: Any) -> DiscoveryRow:
    """Return a candidate that was frozen at `NOW`."""
    row = DiscoveryRow(
        id=1,
        model="digits",
        predicate='header.x-scanner = "faint"',
        name="x-scanner=faint",
        where=(FAINT,),
        status=DiscoveryStatus.CANDIDATE,
        model_version_id=1,
        metric=Metric.FLIP,
        found_mean=0.1,
        overall_mean=0.01,
        found_share=0.1,
        null_mean=0.02,
        scale=1.0,
        log_threshold=7.0,
        log_wealth=(0.0,) * N_BETS,
        first_found_at=NOW,
        frozen_at=NOW,
        tested_at=NOW,
    )
    return msgspec.structs.replace(row, **changes)


async def write_version(db: asyncpg.Connection, version: str = "int8-7", model: str = "digits") -> int:
    """Insert a version with a reference, the slice `all` and the policy; return the version's id."""
    version_id = await db.fetchval(
        "insert into model_version (model, candidate_version, reference_digest) values ($1, $2, $3) returning id",
        model,
        version,
        "5f1d" * 16,
    )
    await db.execute(
        "insert into slice (model, predicate, name, definition) values ($1, 'true', 'all', '{\"where\": []}')"
        " on conflict do nothing",
        model,
    )
    await db.execute(
        "insert into policy (epoch, definition) values ($1, $2) on conflict do nothing",
        POLICY.epoch,
        msgspec.json.encode(POLICY).decode(),
    )
    return int(version_id)


async def write_traffic(
    db: asyncpg.Connection,
    version_id: int,
    *,
    begin: datetime,
    end: datetime,
    n: int,
    flips: Mapping[str, float],
    seed: int,
    weekend: float = 1.0,
    key: str = FAINT.key,
    shares: Mapping[str, float] = SHARES,
) -> None:
    """Insert n exchanges of one item each, spread evenly, and their hourly roll-ups; others flip at 0.3 %.

    On Saturdays and Sundays (UTC) all flip `weekend` times as often.
    """
    rng = np.random.default_rng(seed)
    scanners = rng.choice(list(shares), n, p=list(shares.values()))
    await make_partitions(db, [(begin + day * DAY).date() for day in range((end - begin).days + 2)])
    times = [begin + (end - begin) * (index / n) for index in range(n)]
    batch = await db.fetchval(
        "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows)"
        " values ('comparison', 'w', $2, $1, $2, $3) returning id",
        begin,
        end,
        n,
    )
    policy = await db.fetchval("select id from policy")
    everything = await db.fetchval("select id from slice where predicate = 'true'")
    season = np.array([weekend if at.weekday() >= 5 else 1.0 for at in times])
    flipped = rng.random(n) < season * np.array([flips.get(scanner, 0.003) for scanner in scanners])
    contrast = rng.normal(1.0, 0.3, n)
    rows = [
        Comparison(
            captured_at=times[index],
            exchange_id=uuid.UUID(int=int.from_bytes(rng.bytes(16)), version=4),
            batch_id=batch,
            model_version_id=version_id,
            policy_id=policy,
            slice_ids=(everything,),
            u1=float(rng.random()),
            u2=float(rng.random()),
            flip=bool(flipped[index]),
            divergence=float(rng.lognormal(-9, 1)),
            attributes=msgspec.json.encode({key: str(scanners[index])}).decode(),
            features=msgspec.json.encode({"feature.contrast": float(contrast[index])}).decode(),
        )
        for index in range(n)
    ]
    await store_comparisons(db, rows)
    await db.execute(
        "insert into rollup_hour (model_version_id, slice_id, hour, n_items, n_groups, weight, weight_sq, flip, topk,"
        " js, divergence, margin, flip_weight, topk_weight, js_weight, divergence_weight, margin_weight, n_infinite, divergence_bins)"
        " select $1, $2, date_trunc('hour', captured_at), count(*), count(*), count(*), count(*),"
        " 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, '{}' from comparison"
        " where model_version_id = $1 and captured_at >= $3 and captured_at < $4 group by 3"
        " on conflict do nothing",
        version_id,
        everything,
        begin,
        end,
    )
