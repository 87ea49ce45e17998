"""A small fleet's stored comparisons with known truth, for tests of the fold: seeded, as rows or in Postgres."""

import itertools
import math
import random
from datetime import UTC, datetime, timedelta

import asyncpg
import msgspec

from quantdrift.core.config.schema import Config, Model, Monitor
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate, Side
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from quantdrift.storage.fold_rows import (
    BatchRows,
    Catalog,
    ComparisonRow,
    NoiseRow,
    SliceRow,
    TallyRow,
    VersionRow,
    from_us,
    to_us,
)
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

BEGIN = datetime(2026, 3, 1, 12, tzinfo=UTC)
BEGIN_US = to_us(BEGIN)
SECOND_US = 1_000_000
CONFIG = Config(models=(Model(name="digits"),), monitor=Monitor(min_groups=50))
POLICY = Policy(
    epoch="e1",
    header_strata=(
        HeaderStratum(name="faint", rate=1.0, headers={"x-scanner": "faint"}),
        HeaderStratum(name="default", rate=0.25),
    ),
    body_strata=(BodyStratum(name="default", rate=1.0),),
)
ALL_ID, FAINT_ID, CLEAR_ID = 1, 2, 3
WITH_REFERENCE, WITHOUT_REFERENCE = 1, 2
SPREAD = 1000


def _slice(number: int, value: str) -> SliceRow:
    where = (Predicate(key="header.x-scanner", equals=value),) if value else ()
    return SliceRow(
        id=number,
        model="digits",
        name=f"scanner={value}" if value else "all",
        predicate=f'header.x-scanner = "{value}"' if value else "true",
        where=where,
    )


CATALOG = Catalog(
    versions={
        number: VersionRow(
            id=number,
            model="digits",
            candidate_version=str(number),
            reference_digest=digest,
            first_seen_us=BEGIN_US,
        )
        for number, digest in ((WITH_REFERENCE, "d" * 64), (WITHOUT_REFERENCE, ""))
    },
    slices={
        row.id: row for row in (_slice(ALL_ID, ""), _slice(FAINT_ID, "faint"), _slice(CLEAR_ID, "clear"))
    },
    policies={1: POLICY},
)


def batches(
    n: int,
    *,
    seed: int = 1,
    per_batch: int = 16,
    faint_share: float = 0.3,
    faint_flips: float = 0.08,
    version: int = WITH_REFERENCE,
    tally_every: int = 10,
) -> list[BatchRows]:
    """Return `n` batches: `faint` flips too often, `clear` at 0.1 %; one in `tally_every` batches is a tally.

    Exchanges come five per second and carry one or two items.
    """
    rng = random.Random(seed)
    found = []
    at_us = BEGIN_US
    for number in range(1, n + 1):
        if number % tally_every == 0:
            tallies = tuple(
                TallyRow(
                    source="pod",
                    boot="b" * 32,
                    stratum=stratum,
                    sequence=number,
                    at_us=at_us,
                    offered=number * 100,
                    taken=number * 50,
                    lost=0,
                )
                for stratum in ("default", "faint")
            )
            found.append(
                BatchRows(fold_seq=number, stored_us=at_us + SECOND_US, compares=False, tallies=tallies)
            )
            continue
        rows = []
        for _ in range(per_batch):
            at_us += SECOND_US // 5
            faint = rng.random() < faint_share
            exchange_id = f"{rng.getrandbits(128):032x}"
            rows += [
                ComparisonRow(
                    exchange_id=exchange_id,
                    item=item,
                    captured_us=at_us,
                    model_version_id=version,
                    policy_id=1,
                    slice_ids=(ALL_ID, FAINT_ID if faint else CLEAR_ID),
                    group_key="",
                    pi1=1.0 if faint else 0.25,
                    pi2=1.0,
                    u1=0.0,
                    u2=0.0,
                    candidate_margin=0.5,
                    flip=float(rng.random() < (faint_flips if faint else 0.001)),
                    topk=0.0,
                    js=0.001,
                    divergence=rng.expovariate(1 / 0.001),
                    margin=0.01,
                )
                for item in range(rng.choice((1, 1, 2)))
            ]
        rows.sort(key=lambda row: (row.exchange_id, row.item))
        found.append(BatchRows(fold_seq=number, stored_us=at_us + SECOND_US, comparisons=tuple(rows)))
    return found


def diverging(stream: list[BatchRows], *, every: int) -> list[BatchRows]:
    """Return the same batches with an infinite divergence in each comparison that is number `every` of its batch."""
    return [
        msgspec.structs.replace(
            rows,
            comparisons=tuple(
                msgspec.structs.replace(row, divergence=math.inf) if place % every == 0 else row
                for place, row in enumerate(rows.comparisons)
            ),
        )
        for rows in stream
    ]


def spread(stream: list[BatchRows]) -> list[BatchRows]:
    """Return the same batches with `SPREAD` times the time between exchanges: 300 last 10 days."""

    def at_us(then_us: int) -> int:
        return BEGIN_US + SPREAD * (then_us - BEGIN_US)

    return [
        msgspec.structs.replace(
            rows,
            stored_us=at_us(rows.stored_us),
            comparisons=tuple(
                msgspec.structs.replace(row, captured_us=at_us(row.captured_us)) for row in rows.comparisons
            ),
            tallies=tuple(msgspec.structs.replace(row, at_us=at_us(row.at_us)) for row in rows.tallies),
        )
        for rows in stream
    ]


async def store_catalog(connection: asyncpg.Connection, *, days: int = 1) -> None:
    """Insert versions, slices and the policy under the numbers of `CATALOG`, and the partitions needed."""
    for version in CATALOG.versions.values():
        await connection.execute(
            "insert into model_version (id, model, candidate_version, reference_digest, first_seen_at)"
            " overriding system value values ($1, $2, $3, $4, $5)",
            version.id,
            version.model,
            version.candidate_version,
            version.reference_digest,
            from_us(version.first_seen_us),
        )
    for row in CATALOG.slices.values():
        await connection.execute(
            "insert into slice (id, model, predicate, name, definition) overriding system value"
            " values ($1, $2, $3, $4, $5)",
            row.id,
            row.model,
            row.predicate,
            row.name,
            msgspec.json.encode({"where": row.where}).decode(),
        )
    await connection.execute(
        "insert into policy (id, epoch, definition) overriding system value values (1, 'e1', $1)",
        msgspec.json.encode(POLICY).decode(),
    )
    await make_partitions(connection, [(BEGIN + timedelta(days=day)).date() for day in range(days)])


async def store_batch(connection: asyncpg.Connection, rows: BatchRows) -> None:
    """Insert one batch in one transaction, as a shadow worker would; the monitor gives it its number.

    Without a model, its comparisons are folded in the order in which they were stored, as those of several models are.
    """
    times = [row.captured_us for row in rows.comparisons] + [row.at_us for row in rows.tallies]
    async with connection.transaction():
        batch_id = await connection.fetchval(
            "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows, unreferenced, compared_model)"
            " values ($1, 'w', $2, $3, $4, $5, $6, $7) returning id",
            "comparison" if rows.comparisons else "tally",
            from_us(rows.stored_us),
            from_us(min(times)),
            from_us(max(times)),
            len(times),
            list(rows.unreferenced),
            rows.model or None,
        )
        await store_comparisons(
            connection,
            [
                Comparison(
                    captured_at=from_us(row.captured_us),
                    exchange_id=row.exchange_id,
                    item=row.item,
                    batch_id=batch_id,
                    model_version_id=row.model_version_id,
                    policy_id=row.policy_id,
                    slice_ids=row.slice_ids,
                    pi1=row.pi1,
                    flip=None if row.flip is None else bool(row.flip),
                    topk=None if row.topk is None else bool(row.topk),
                    js=row.js,
                    divergence=row.divergence,
                    margin=row.margin,
                    trace=f"00-{row.exchange_id}-{'1' * 16}-01",
                    latency_s=row.latency_s,
                )
                for row in rows.comparisons
            ],
        )
        await connection.executemany(
            "insert into tally (source, boot, stratum, sequence, at, batch_id, offered, taken, thinned, published,"
            " lost, blind_connections) values ($1, $2, $3, $4, $5, $6, $7, $8, 0, $9, $10, 0)",
            [
                (
                    row.source,
                    row.boot,
                    row.stratum,
                    row.sequence,
                    from_us(row.at_us),
                    batch_id,
                    row.offered,
                    row.taken,
                    row.taken - row.lost,
                    msgspec.json.encode({"queue_full": row.lost}).decode(),
                )
                for row in rows.tallies
            ],
        )
        await connection.executemany(
            "insert into noise (exchange_id, item, side, captured_at, batch_id, model_version_id, policy_id, pi1, pi2,"
            " flip, divergence, slice_ids) values ($1, $2, $3, $4, $5, $6, $7, $8, 1.0, $9, $10, $11)",
            [
                (
                    row.exchange_id,
                    item,
                    row.side.value,
                    from_us(row.captured_us),
                    batch_id,
                    row.model_version_id,
                    row.policy_id,
                    row.pi,
                    None if row.flip is None else bool(row.flip),
                    row.divergence,
                    row.slice_ids,
                )
                for _, items in itertools.groupby(rows.noise, key=lambda row: (row.exchange_id, row.side))
                for item, row in enumerate(items)
            ],
        )


async def fold_stored(database: Database) -> None:
    """Fold what is stored, from the stored state, as a monitor that has just started, with a webhook."""
    async with database.begin() as connection:
        fold = Fold(CONFIG, await resume(connection))
        rows = await claim(connection, fold.position.fold_seq, 100)
        fold.learn(await load_catalog(connection, wanted={1}, known=fold.catalog))
        for batch in rows:
            fold.batch(batch)
        await write(connection, fold.take(), "", webhook=True)


async def store_serving(connection: asyncpg.Connection, version: int, from_s: float, seconds: int) -> None:
    """Store an exchange every ten seconds of a version, and the counts of a sidecar, from so long after the first exchange on."""
    if version not in (1, 2):
        await connection.execute(
            "insert into model_version (id, model, candidate_version, reference_digest, first_seen_at)"
            " overriding system value select $1, model, $2, reference_digest, first_seen_at from model_version where id = 1"
            " on conflict do nothing",
            version,
            str(version),
        )
    (of_one, *_), tally = batches(1), batches(10)[-1]
    for step in range(0, seconds + 1, 10):
        at_us = BEGIN_US + int((from_s + step) * SECOND_US)
        rows = tuple(
            msgspec.structs.replace(
                row,
                exchange_id=f"{version:04x}{at_us:028x}",
                captured_us=at_us,
                model_version_id=version,
                flip=0.0,
            )
            for row in of_one.comparisons[:1]
        )
        await store_batch(connection, msgspec.structs.replace(of_one, stored_us=at_us, comparisons=rows))
        counts = tuple(
            msgspec.structs.replace(row, at_us=at_us, sequence=1_000_000 + int(from_s) + step, boot="c" * 32)
            for row in tally.tallies
        )
        await store_batch(connection, msgspec.structs.replace(tally, stored_us=at_us, tallies=counts))


def with_noise(
    stream: list[BatchRows], rate: float, *, per_batch: int = 40, side: Side = Side.REFERENCE, seed: int = 3
) -> list[BatchRows]:
    """Return the stream with items that were computed again, of which the share `rate` flips."""
    rng = random.Random(seed)
    found = []
    for rows in stream:
        items = tuple(
            NoiseRow(
                exchange_id=f"{rng.getrandbits(128):032x}",
                side=side,
                captured_us=rows.stored_us,
                model_version_id=WITH_REFERENCE,
                policy_id=1,
                pi=0.25 if rng.random() < 0.9 else 1.0,
                flip=float(rng.random() < rate),
                divergence=0.0,
            )
            for _ in range(per_batch if rows.comparisons else 0)
        )
        found.append(msgspec.structs.replace(rows, noise=items))
    return found


def with_pairs(
    stream: list[BatchRows], noise: float, *, slice_id: int = ALL_ID, seed: int = 3, until: int = 10**9
) -> list[BatchRows]:
    """Return the stream in which each exchange is replayed twice, and the second replay is stored with the next batch.

    Parameters
    ----------
    noise
        How often two replays of an item in `slice_id` differ: twice as many items are decided at random by all.
    until
        Number of the batch after which no exchange is replayed twice any more.
    """
    rng = random.Random(seed)
    batches, waiting = [], tuple[NoiseRow, ...]()
    for rows in stream:
        if not rows.comparisons:
            batches.append(rows)
            continue
        pairs = [_decided(row, noise if slice_id in row.slice_ids else 0.0, rng) for row in rows.comparisons]
        compared = tuple(comparison for comparison, _ in pairs)
        batches.append(msgspec.structs.replace(rows, comparisons=compared, noise=waiting))
        waiting = tuple(replayed for _, replayed in pairs) if rows.fold_seq < until else ()
    return batches


def _decided(row: ComparisonRow, noise: float, rng: random.Random) -> tuple[ComparisonRow, NoiseRow]:
    """Return an item and its second replay, some of which are decided at random."""
    differs = 0.0
    if rng.random() < 2 * noise:
        candidate, first, second = (rng.random() < 0.5 for _ in range(3))
        row, differs = msgspec.structs.replace(row, flip=float(candidate != first)), float(first != second)
    return row, second_replay(row, differs)


def second_replay(row: ComparisonRow, differs: float = 0.0) -> NoiseRow:
    """Return the second replay of an item by its reference, and whether it differs from the first."""
    return NoiseRow(
        exchange_id=row.exchange_id,
        side=Side.REFERENCE,
        captured_us=row.captured_us,
        model_version_id=row.model_version_id,
        policy_id=row.policy_id,
        pi=row.pi1 * row.pi2,
        flip=differs,
        divergence=0.0,
        slice_ids=row.slice_ids,
        candidate_flip=row.flip,
        candidate_divergence=row.divergence,
    )


def with_slice_noise(
    stream: list[BatchRows], faint: float, clear: float, *, per_batch: int = 40
) -> list[BatchRows]:
    """Return the stream with items that were computed again, of which these shares flip; three in ten lie in `faint`."""
    n_faint = per_batch * 3 // 10
    parts = ((FAINT_ID, faint, n_faint), (CLEAR_ID, clear, per_batch - n_faint))
    streams = [
        [_in_slice(rows, slice_id) for rows in with_noise(stream, rate, per_batch=n, seed=slice_id)]
        for slice_id, rate, n in parts
    ]
    return [
        msgspec.structs.replace(one, noise=one.noise + other.noise)
        for one, other in zip(*streams, strict=True)
    ]


def _in_slice(rows: BatchRows, slice_id: int) -> BatchRows:
    pi = 1.0 if slice_id == FAINT_ID else 0.25
    items = (msgspec.structs.replace(row, slice_ids=(ALL_ID, slice_id), pi=pi) for row in rows.noise)
    return msgspec.structs.replace(rows, noise=tuple(items))
