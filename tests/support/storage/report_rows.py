"""Rows of a made-up week for the report's tests: seeded, written with SQL, and kept in memory as the truth."""

import uuid
from datetime import UTC, datetime, timedelta
from functools import cache
from math import log

import asyncpg
import msgspec
import numpy as np

from tests.support.monitor.alert_cases import event_with
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

START = datetime(2026, 11, 16, 9, 0, tzinfo=UTC)
CAP = 2.0
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)

PAGED = {"changed": 0.053, "changed_low": 0.031, "changed_high": 0.083, "n_answers": 254}
"""What the alerts of the made-up weeks said when they paged."""

_Sums = dict[datetime, list[float]]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One scanner's share of the traffic, the rate it is sampled at, and how its flips go."""

    value: str
    share: float
    pi: float = 1.0
    flip: float = 0.003
    flip_after: float | None = None
    verdict: str = "ok"
    reason: str = "inside the budget"


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A compared item, as it was inserted."""

    at: datetime
    exchange: str
    item: int
    n_items: int
    part: int
    pi: float
    flip: bool
    js: float
    divergence: float


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """What was written: ids as the database gave them."""

    version_id: int
    all_id: int
    slice_ids: list[int]
    items: list[Item]
    alert_id: int | None


PARTS = (
    Part(value="clean", share=0.56),
    Part(
        value="faint",
        share=0.1,
        pi=1.0,
        flip=0.004,
        flip_after=0.055,
        verdict="firing",
        reason="evidence 34",
    ),
    Part(value="gain", share=0.2, flip=0.006),
    Part(value="negative", share=0.1, flip=0.002),
    Part(
        value="offset",
        share=0.04,
        flip=0.002,
        verdict="unknown",
        reason="only 212 exchanges compared, 300 are needed",
    ),
)


def make_items(
    parts: tuple[Part, ...], *, begin: datetime, end: datetime, drift_at: datetime, per_s: float, seed: int
) -> list[Item]:
    """Draw compared items: exchanges of 1 to 3 items, each exchange of one scanner."""
    random = np.random.default_rng(seed)
    seconds = (end - begin).total_seconds()
    n = int(random.poisson(per_s * seconds))
    at_s = np.sort(random.uniform(0, seconds, n))
    shares = np.array([part.share for part in parts])
    which = random.choice(len(parts), n, p=shares / shares.sum())
    items = []
    for offset, index in zip(at_s, which, strict=True):
        part = parts[index]
        if random.random() >= part.pi:
            continue
        at = begin + timedelta(seconds=float(offset))
        drifted = part.flip_after is not None and at >= drift_at
        rate = part.flip_after if drifted and part.flip_after is not None else part.flip
        size = int(random.choice([1, 1, 1, 2, 3]))
        exchange = str(uuid.UUID(int=int.from_bytes(random.bytes(16)), version=4))
        for item in range(size):
            flip = bool(random.random() < rate)
            divergence = float(random.lognormal(-4.2 if flip else (-5.8 if drifted else -7.5), 1.1))
            if random.random() < 2e-4:
                divergence = float("inf")
            items.append(
                Item(
                    at=at,
                    exchange=exchange,
                    item=item,
                    n_items=size,
                    part=int(index),
                    pi=part.pi,
                    flip=flip,
                    js=min(divergence / 4, log(2)),
                    divergence=divergence,
                )
            )
    return items


async def write_frame(
    db: asyncpg.Connection, parts: tuple[Part, ...], *, model: str = "digits", version: str = "int8-7"
) -> tuple[int, int, list[int]]:
    """Insert version and slices; return the ids of the version, of `all` and of each part."""
    version_id = await db.fetchval(
        "insert into model_version (model, candidate_version, reference_digest, reference) values ($1, $2, $3, $4) returning id",
        model,
        version,
        "5f1d" * 16,
        '{"precision": "float32+bfloat16"}',
    )
    ids = []
    for name, predicate in [
        ("all", "true"),
        *((f"scanner={part.value}", f'header.x-scanner = "{part.value}"') for part in parts),
    ]:
        ids.append(
            await db.fetchval(
                "insert into slice (model, predicate, name, definition) values ($1, $2, $3, '{}')"
                " on conflict (model, predicate) do update set name = excluded.name returning id",
                model,
                predicate,
                name,
            )
        )
    return version_id, ids[0], ids[1:]


async def write_items(
    db: asyncpg.Connection, items: list[Item], *, version_id: int, all_id: int, slice_ids: list[int]
) -> None:
    """Insert comparisons with their batch and policy."""
    await make_partitions(db, [item.at.date() for item in items])
    policy = await db.fetchval(
        "insert into policy (epoch, definition) values ($1, '{}') returning id", str(version_id)
    )
    batch = await db.fetchval(
        "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows, skipped, fold_seq)"
        " values ('comparison', 'shadow-1', $2, $1, $2, $3, $4, $5) returning id",
        items[0].at,
        items[-1].at,
        len(items),
        '{"no_reference": 41}',
        version_id,
    )
    await store_comparisons(
        db,
        [
            Comparison(
                captured_at=item.at,
                exchange_id=item.exchange,
                item=item.item,
                batch_id=batch,
                model_version_id=version_id,
                policy_id=policy,
                slice_ids=(all_id, slice_ids[item.part]),
                n_items=item.n_items,
                source="pod-1",
                header_stratum="faint" if item.part == 1 else "default",
                pi1=item.pi,
                flip=item.flip,
                js=item.js,
                divergence=item.divergence,
                trace="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            )
            for item in items
        ],
    )


def rollup(items: list[Item], parts: list[int] | None, *, grain: timedelta) -> _Sums:
    """Sum items of `parts` (None: all) per bucket: the columns of a roll-up after its keys, bins last."""
    groups: dict[tuple[datetime, str], list[Item]] = {}
    for item in items:
        if parts is None or item.part in parts:
            at = datetime.fromtimestamp(
                item.at.timestamp() // grain.total_seconds() * grain.total_seconds(), UTC
            )
            groups.setdefault((at, item.exchange), []).append(item)
    found: _Sums = {}
    for (at, _), group in groups.items():
        sums = found.setdefault(at, [0.0] * (9 + 64))
        n, w = len(group), 1 / group[0].pi
        for place, value in enumerate(
            (
                n,
                1,
                w,
                w * w,
                w * sum(item.flip for item in group) / n,
                w * sum(item.js for item in group) / n,
                w * sum(min(item.divergence, CAP) for item in group) / n,
                sum(item.divergence == float("inf") for item in group),
            )
        ):
            sums[place] += value
        for item in group:
            position = 64 * log(max(item.divergence, 1e-9) / 1e-6) / log(1e7) if item.divergence < 10 else 63
            sums[9 + min(63, max(0, int(position)))] += w / n
    return found


async def write_rollup(
    db: asyncpg.Connection, name: str, version_id: int, slice_id: int, sums: _Sums
) -> None:
    """Insert the sums of one slice into `rollup_hour` or `rollup_day`."""
    time = name.removeprefix("rollup_")
    await db.copy_records_to_table(
        name,
        columns=(
            f"model_version_id slice_id {time} n_items n_groups weight weight_sq flip js divergence n_infinite topk margin"
            " flip_weight topk_weight js_weight divergence_weight margin_weight divergence_bins"
        ).split(),
        records=[
            (
                version_id,
                slice_id,
                at,
                int(s[0]),
                int(s[1]),
                *s[2:7],
                int(s[7]),
                0.0,
                0.0,
                *(5 * [s[2]]),
                s[9:],
            )
            for at, s in sums.items()
        ],
    )


async def write_tallies(
    db: asyncpg.Connection,
    *,
    begin: datetime,
    end: datetime,
    offered_per_s: float,
    lost: float,
    stratum: str = "default",
) -> None:
    """Insert a sidecar's cumulative counts, one every five minutes: it began ten minutes before `begin`."""
    batch = await db.fetchval(
        "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows)"
        " values ('tally', 'shadow-1', $2, $1, $2, 1) returning id",
        begin,
        end,
    )
    records = []
    at, sequence = begin - 10 * MINUTE, 0
    while at < end:
        offered = int(offered_per_s * 300 * sequence)
        taken = offered // 2
        gone = int(taken * lost)
        records.append(
            (
                "pod-1",
                uuid.uuid5(uuid.NAMESPACE_OID, str(begin)),
                stratum,
                sequence,
                at,
                batch,
                offered,
                taken,
                0,
                taken - gone,
                msgspec.json.encode({"queue_full": gone // 3, "rate_cap": gone - gone // 3}).decode(),
                2,
            )
        )
        at, sequence = at + 5 * MINUTE, sequence + 1
    await db.copy_records_to_table(
        "tally",
        columns=[
            "source",
            "boot",
            "stratum",
            "sequence",
            "at",
            "batch_id",
            "offered",
            "taken",
            "thinned",
            "published",
            "lost",
            "blind_connections",
        ],
        records=records,
    )


async def write_verdicts(
    db: asyncpg.Connection,
    parts: tuple[Part, ...],
    *,
    version_id: int,
    all_id: int,
    slice_ids: list[int],
    onset: datetime,
    opened: datetime,
    at: datetime,
) -> int | None:
    """Insert verdicts as of `at`, and alert and transitions of the parts that warn or fire; return the last alert."""
    alert = None
    named = [
        (all_id, "ok", "inside the budget"),
        *((slice_id, part.verdict, part.reason) for slice_id, part in zip(slice_ids, parts, strict=True)),
    ]
    for slice_id, verdict, reason in named:
        mine = None
        if verdict in {"firing", "warning"}:
            model, version, name, predicate = await db.fetchrow(
                "select v.model, v.candidate_version, s.name, s.predicate from model_version v, slice s"
                " where v.id = $1 and s.id = $2",
                version_id,
                slice_id,
            )
            event = event_with(
                model=model,
                version=version,
                slice=name,
                predicate=predicate,
                verdict=verdict,
                onset=onset.isoformat(),
                **PAGED,
            )
            mine = alert = await db.fetchval(
                "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
                " values ($1, $2, $3, 'flip', $4, $5, '{}') returning id",
                version_id,
                slice_id,
                verdict,
                onset,
                opened,
            )
            await db.execute(
                "insert into transition (model_version_id, slice_id, alert_id, from_verdict, to_verdict, at, fold_seq,"
                " details) values ($1, $2, $3, 'ok', $4, $5, 1, $6)",
                version_id,
                slice_id,
                mine,
                verdict,
                opened,
                msgspec.json.encode(event.attributes()).decode(),
            )
        await db.execute(
            "insert into verdict values ($1, $2, $3, $4, $5, 400, 1.5, 10, $6, $7, $8, $8, 1)",
            version_id,
            slice_id,
            verdict,
            reason,
            opened,
            '{"flip": {"mean": 0.004, "low": 0.002, "high": 0.007, "budget": 0.01}}',
            mine,
            at,
        )
    return alert


@cache
def _short_rows(parts: tuple[Part, ...], seed: int) -> tuple[list[Item], dict[tuple[str, int], _Sums]]:
    """Return the items of the short story, and their roll-ups by table and part (-1: all)."""
    end, drift_at = START + 90 * MINUTE, START + 50 * MINUTE
    items = make_items(parts, begin=START, end=end, drift_at=drift_at, per_s=1.5, seed=seed)
    rollups = {
        (name, index): rollup(items, None if index < 0 else [index], grain=grain)
        for name, grain in (("rollup_hour", HOUR), ("rollup_day", 24 * HOUR))
        for index in range(-1, len(parts))
    }
    return items, rollups


async def write_short_story(dsn: str, *, seed: int = 7, parts: tuple[Part, ...] = PARTS) -> Story:
    """Write ninety minutes in which `faint` drifts after fifty and pages after sixty-two."""
    end, onset = START + 90 * MINUTE, START + 50 * MINUTE
    items, rollups = _short_rows(parts, seed)
    db = await asyncpg.connect(dsn)
    try:
        version_id, all_id, slice_ids = await write_frame(db, parts)
        await write_items(db, items, version_id=version_id, all_id=all_id, slice_ids=slice_ids)
        for (name, index), sums in rollups.items():
            await write_rollup(db, name, version_id, [*slice_ids, all_id][index], sums)
        alert = await write_verdicts(
            db,
            parts,
            version_id=version_id,
            all_id=all_id,
            slice_ids=slice_ids,
            onset=onset,
            opened=START + 62 * MINUTE,
            at=end,
        )
        await write_tallies(db, begin=START, end=end, offered_per_s=3, lost=0.002)
        await db.execute(
            "insert into fold (id, fold_seq, event_time, mass, n_detectors) values (1, 1, $1, 0, 12)", end
        )
        await db.execute(
            "insert into quarantine (stream_sequence, digest, model, quarantined_at, reason, detail)"
            " select n, '', 'digits', $1, 'schema', 'input `x` has shape [1, 7], [-1, 64] is expected'"
            " from generate_series(1, 3) n",
            START + 5 * MINUTE,
        )
    finally:
        await db.close()
    return Story(version_id=version_id, all_id=all_id, slice_ids=slice_ids, items=items, alert_id=alert)


async def write_explained(dsn: str, story: Story) -> None:
    """Explain the short story's alert, and let a ticket on all traffic stand that it explains."""
    faint = story.slice_ids[1]
    onset = (START + 50 * MINUTE).isoformat()
    page = event_with(
        version="int8-7",
        onset=onset,
        after=0.055,
        n_since_onset=254,
        n_history=400,
        cause="damage",
        damage=0.05,
        damage_se=0.006,
        shift=0.001,
        shift_se=0.004,
        explains=["all"],
        explains_ids=[story.all_id],
    )
    ticket = event_with(
        version="int8-7",
        slice="all",
        predicate="true",
        verdict="warning",
        onset=onset,
        explained_by="scanner=faint",
        explained_by_id=faint,
    )
    db = await asyncpg.connect(dsn)
    try:
        await db.execute(
            "update alert set details = $2 where slice_id = $1",
            faint,
            msgspec.json.encode(page.attributes()).decode(),
        )
        await db.execute(
            "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
            " values ($1, $2, 'warning', 'flip', $3, $4, $5)",
            story.version_id,
            story.all_id,
            START + 50 * MINUTE,
            START + 70 * MINUTE,
            msgspec.json.encode(ticket.attributes()).decode(),
        )
    finally:
        await db.close()


async def write_week(dsn: str, *, n_slices: int, seed: int = 11) -> Story:
    """Write a week of roll-ups alone, without a single comparison: the second slice drifts on the fourth day."""
    random = np.random.default_rng(seed)
    parts = tuple(
        Part(
            value=f"s{index:03}",
            share=1 / n_slices,
            flip=0.004,
            flip_after=0.04 if index == 1 else None,
            verdict="firing" if index == 1 else "ok",
        )
        for index in range(n_slices)
    )
    begin, drift_at = START.replace(hour=0), START.replace(hour=0) + 3 * 24 * HOUR
    db = await asyncpg.connect(dsn)
    try:
        version_id, all_id, slice_ids = await write_frame(db, parts)
        total: _Sums = {}
        for part, slice_id in zip(parts, slice_ids, strict=True):
            hours = {}
            for hour in range(7 * 24):
                at = begin + hour * HOUR
                rate = part.flip_after if part.flip_after and at >= drift_at else part.flip
                n = int(random.poisson(60))
                bins = random.multinomial(n, [1 / 20] * 20)
                sums = [n, n, 2.0 * n, 4.0 * n, 2.0 * random.binomial(n, rate), 0.001 * n, 0.004 * n, 0, 0.0]
                sums += [0.0] * 20 + [2.0 * float(weight) for weight in bins] + [0.0] * 24
                hours[at] = [float(value) for value in sums]
                total[at] = [a + b for a, b in zip(total.get(at, [0.0] * 73), hours[at], strict=True)]
            await write_rollup(db, "rollup_hour", version_id, slice_id, hours)
        await write_rollup(db, "rollup_hour", version_id, all_id, total)
        alert = await write_verdicts(
            db,
            parts,
            version_id=version_id,
            all_id=all_id,
            slice_ids=slice_ids,
            onset=drift_at,
            opened=drift_at + 9 * HOUR,
            at=begin + 7 * 24 * HOUR,
        )
        await write_tallies(db, begin=begin, end=begin + 7 * 24 * HOUR, offered_per_s=10, lost=0.01)
    finally:
        await db.close()
    return Story(version_id=version_id, all_id=all_id, slice_ids=slice_ids, items=[], alert_id=alert)
