"""Rows of a made-up week with a release in it: two versions of a model, sessions, directions of changed answers, decisions."""

import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta

import asyncpg
import msgspec
import numpy as np

from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons
from tests.support.storage.report_rows import HOUR, write_tallies

BEGIN = datetime(2026, 11, 16, tzinfo=UTC)
RELEASE = BEGIN + timedelta(days=3, hours=12)
END = BEGIN + timedelta(days=7)
OLD, NEW = "int8-1", "int8-2"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One scanner: its share of the traffic of the old and the new version, and the share of answers that change."""

    value: str
    share: tuple[float, float]
    flip: tuple[float, float]
    verdict: str = "ok"
    reason: str = "inside the budget"


PARTS = (
    Part(value="office", share=(0.55, 0.55), flip=(0.004, 0.004)),
    Part(value="lab", share=(0.2, 0.2), flip=(0.003, 0.003)),
    Part(value="archive", share=(0.15, 0.15), flip=(0.005, 0.07), verdict="firing", reason="evidence 34"),
    Part(value="mobile", share=(0.08, 0.08), flip=(0.03, 0.004)),
    Part(value="fax", share=(0.02, 0.0), flip=(0.004, 0.004)),
    Part(
        value="kiosk",
        share=(0.0, 0.02),
        flip=(0.004, 0.004),
        verdict="unknown",
        reason="only 212 exchanges compared, 300 are needed",
    ),
)


class ReleaseWeek(msgspec.Struct, frozen=True, kw_only=True):
    """What was written: ids as the database gave them, and every row."""

    version_ids: tuple[int, int]
    all_id: int
    slice_ids: dict[str, int]
    rows: list[Comparison]


async def write_release_week(
    dsn: str, *, per_hour: int = 60, seed: int = 7, rollups: bool = True
) -> ReleaseWeek:
    """Write a week in which a release in the middle makes one slice worse and one better."""
    random = np.random.default_rng(seed)
    db = await asyncpg.connect(dsn)
    try:
        versions = [await _version(db, name, at) for name, at in ((OLD, BEGIN), (NEW, RELEASE))]
        all_id = await _slice(db, "all", "true")
        slice_ids = {
            part.value: await _slice(db, f"scanner={part.value}", f'header.x-scanner = "{part.value}"')
            for part in PARTS
        }
        await make_partitions(db, [(BEGIN + timedelta(days=day)).date() for day in range(8)])
        policy = await db.fetchval("insert into policy (epoch, definition) values ('1', '{}') returning id")
        batch = await db.fetchval(
            "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows, skipped, fold_seq)"
            " values ('comparison', 'shadow-1', $2, $1, $2, 1, '{}', 1) returning id",
            BEGIN,
            END,
        )
        rows = []
        for index, (begin, end) in enumerate(((BEGIN, RELEASE), (RELEASE, END))):
            rows += _rows(
                random,
                index,
                begin=begin,
                end=end,
                per_hour=per_hour,
                version=versions[index],
                policy=policy,
                batch=batch,
                all_id=all_id,
                slice_ids=slice_ids,
            )
        await store_comparisons(db, rows)
        if rollups:
            for table, grain in (("rollup_hour", HOUR), ("rollup_day", 24 * HOUR)):
                await _write_rollup(db, table, rows, grain)
        await _verdicts(db, versions, all_id, slice_ids)
        await write_tallies(db, begin=BEGIN, end=END, offered_per_s=per_hour / 900, lost=0.002)
        await db.execute(
            "insert into fold (id, fold_seq, event_time, mass, n_detectors) values (1, 1, $1, 0, 12)", END
        )
    finally:
        await db.close()
    return ReleaseWeek(version_ids=(versions[0], versions[1]), all_id=all_id, slice_ids=slice_ids, rows=rows)


async def _write_rollup(db: asyncpg.Connection, table: str, rows: list[Comparison], grain: timedelta) -> None:
    """Insert the sums of all rows into a roll-up; the exchanges of a session count as one in `weight_sq`."""
    seconds = int(grain.total_seconds())
    keys = [
        (row.model_version_id, slice_id, int(row.captured_at.timestamp()) // seconds * seconds)
        for row in rows
        for slice_id in row.slice_ids
    ]
    groups: dict[tuple[int, int, int], list[Comparison]] = {}
    entries = (row for row in rows for _ in row.slice_ids)
    for key, row in zip(keys, entries, strict=True):
        groups.setdefault(key, []).append(row)
    records = []
    for (version, slice_id, at), group in groups.items():
        w = 1 / group[0].pi1
        values = np.array([row.divergence for row in group])
        place = np.clip(np.floor(64 * np.log(values / 1e-6) / np.log(1e7)), 0, 63).astype(int)
        sessions = np.array(list(Counter(row.group_key for row in group).values()))
        flip, tie = (
            w * sum(bool(value) for value in of)
            for of in zip(*((row.flip, row.tie) for row in group), strict=True)
        )
        weight = w * len(group)
        records.append(
            (
                *(version, slice_id, datetime.fromtimestamp(at, UTC), len(group), len(group), weight),
                *(float(w * w * (sessions**2).sum()), flip, w * sum(row.js or 0.0 for row in group)),
                *(float(w * values.sum()), 0, 0.0, 0.0, *(5 * [weight])),
                *((w * np.bincount(place, minlength=64)).tolist(), tie, weight),
            )
        )
    await db.copy_records_to_table(
        table,
        columns=(
            f"model_version_id slice_id {table.removeprefix('rollup_')} n_items n_groups weight weight_sq flip js divergence"
            " n_infinite topk margin flip_weight topk_weight js_weight divergence_weight margin_weight divergence_bins tie"
            " tie_weight"
        ).split(),
        records=records,
    )


def _rows(
    random: np.random.Generator,
    index: int,
    *,
    begin: datetime,
    end: datetime,
    per_hour: int,
    version: int,
    policy: int,
    batch: int,
    all_id: int,
    slice_ids: dict[str, int],
) -> list[Comparison]:
    seconds = (end - begin).total_seconds()
    n = int(random.poisson(per_hour * seconds / 3600))
    at = np.sort(random.uniform(0, seconds, n))
    shares = np.array([part.share[index] for part in PARTS])
    which = random.choice(len(PARTS), n, p=shares / shares.sum())
    # Sessions of some four exchanges in a row: whoever meets one wrong answer tends to meet another.
    session = np.cumsum(random.random(n) < 0.25)
    luck = random.gamma(0.5, 2.0, int(session.max()) + 1)
    rows = []
    for place in range(n):
        part = PARTS[which[place]]
        flip = bool(random.random() < part.flip[index] * luck[session[place]])
        tie = flip and bool(random.random() < 0.1)
        right = int(random.integers(0, 10))
        wrong = {3: 8, 8: 3, 1: 7}.get(right, int(random.integers(0, 10)))
        divergence = float(random.lognormal(-2.0 if flip else -7.0, 1.0))
        rows.append(
            Comparison(
                captured_at=begin + timedelta(seconds=float(at[place])),
                exchange_id=str(uuid.UUID(int=int.from_bytes(random.bytes(16)), version=4)),
                batch_id=batch,
                model_version_id=version,
                policy_id=policy,
                slice_ids=(all_id, slice_ids[part.value]),
                source="pod-1",
                pi1=0.25,
                group_key=f"{index}-{session[place]}",
                flip=flip,
                tie=tie,
                js=min(divergence / 4, 0.69),
                divergence=divergence,
                detail=msgspec.json.encode(
                    {
                        "candidate_top": (wrong if wrong != right else (right + 1) % 10) if flip else right,
                        "reference_top": right,
                    }
                ).decode(),
            )
        )
    return rows


async def _version(db: asyncpg.Connection, name: str, at: datetime) -> int:
    return int(
        await db.fetchval(
            "insert into model_version (model, candidate_version, reference_digest, reference, first_seen_at)"
            """ values ('digits', $1, $2, '{"precision": "float32"}', $3) returning id""",
            name,
            "5f1d" * 16,
            at,
        )
    )


async def _slice(db: asyncpg.Connection, name: str, predicate: str) -> int:
    return int(
        await db.fetchval(
            "insert into slice (model, predicate, name, definition) values ('digits', $1, $2, '{}') returning id",
            predicate,
            name,
        )
    )


async def _verdicts(
    db: asyncpg.Connection, versions: list[int], all_id: int, slice_ids: dict[str, int]
) -> None:
    onset, opened = RELEASE + timedelta(hours=1), RELEASE + timedelta(hours=9)
    for index, (version, last) in enumerate(zip(versions, (RELEASE, END), strict=True)):
        await db.execute(
            "insert into verdict values ($1, $2, 'ok', 'inside the budget', $3, 400, 1.5, 10, $4, null, $5, $5, 1)",
            version,
            all_id,
            BEGIN,
            '{"flip": {"mean": 0.004, "low": 0.002, "high": 0.007, "budget": 0.02}}',
            last - timedelta(seconds=1),
        )
        for part in PARTS:
            if not part.share[index]:
                continue
            verdict, reason = (part.verdict, part.reason) if index else ("ok", "inside the budget")
            alert = None
            if verdict == "firing":
                alert = await db.fetchval(
                    "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
                    " values ($1, $2, 'firing', 'flip', $3, $4, '{}') returning id",
                    version,
                    slice_ids[part.value],
                    onset,
                    opened,
                )
                await db.execute(
                    "insert into transition (model_version_id, slice_id, alert_id, from_verdict, to_verdict, at, fold_seq,"
                    " details) values ($1, $2, $3, 'ok', 'firing', $4, 1, '{}')",
                    version,
                    slice_ids[part.value],
                    alert,
                    opened,
                )
            await db.execute(
                "insert into verdict values ($1, $2, $3, $4, $5, 400, 1.5, 10, $6, $7, $8, $8, 1)",
                version,
                slice_ids[part.value],
                verdict,
                reason,
                opened if verdict == "firing" else BEGIN,
                '{"flip": {"mean": 0.004, "low": 0.002, "high": 0.007, "budget": 0.02}}',
                alert,
                last - timedelta(seconds=1),
            )
