"""The bulk writer with a real Postgres."""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import Any

import asyncpg
import msgspec
import pytest

from quantdrift.core.clock import ManualClock, SystemClock
from quantdrift.core.config.schema import Storage
from quantdrift.core.errors import QuarantineReason, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Latency, Loss, Policy, Side, StratumCount, Tally, Way
from quantdrift.core.slices import SliceKey, everything
from quantdrift.core.stream.numbering import Numbered
from quantdrift.shadow.pipeline.store import until_stored
from quantdrift.storage.admin.retention import maintain
from quantdrift.storage.comparisons.rows import (
    ComparedExchange,
    ComparedItem,
    ConfigWarningRow,
    NoiseItem,
    Quarantined,
    StoreBatch,
    Unreferenced,
    VersionKey,
    Written,
)
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from tests.support.shadow.onnx_models import POLICY, exchange_of, inputs_of

pytestmark = pytest.mark.integration

VERSION = VersionKey(model="digits", candidate_version="int8", reference_digest="d" * 64)
ALL = everything("digits")


def _item(**changes: Any) -> ComparedItem:
    item = ComparedItem(
        slices=(ALL,),
        features={"feature.mean": 0.5},
        flip=True,
        topk=False,
        js=0.25,
        divergence=float("inf"),
        margin=0.125,
        candidate_margin=0.5,
        reference_margin=0.625,
        detail='{"candidate_top":1,"reference_top":2}',
    )
    return msgspec.structs.replace(item, **changes)


def _compared(
    sequence: int, *, n_items: int = 1, captured_at: datetime | None = None, **changes: Any
) -> ComparedExchange:
    exchange = exchange_of(
        inputs_of(n_items), captured_at=captured_at, attributes={"header.x-scanner": "faint"}
    )
    return ComparedExchange(
        stream_sequence=sequence,
        payload=b"wire",
        exchange=exchange,
        version=VERSION,
        items=tuple(_item(**changes) for _ in range(n_items)),
    )


def _batch(**parts: Any) -> StoreBatch:
    return StoreBatch(
        worker="w",
        at=datetime.now(UTC),
        references={VERSION.reference_digest: '{"path":"reference.onnx"}'},
        provenance='{"runtime":"linear"}',
        **parts,
    )


async def test_a_batch_is_stored_whole(database: Database, record: asyncpg.Connection) -> None:
    """Every value comes back, what rows point to is there, and one batch row says how many there are."""
    slices = (ALL, SliceKey(model="digits", name="scanner=faint", predicate='header.x-scanner = "faint"'))
    compared = _compared(7, n_items=3, slices=slices)
    written = await Writer(database, SystemClock()).store(_batch(compared=(compared,)))
    assert written.n_rows == 3
    batch = await record.fetchrow("select * from batch")
    assert (batch["kind"], batch["n_rows"], batch["worker"], batch["fold_seq"]) == (
        "comparison",
        3,
        "w",
        None,
    )
    assert batch["captured_from"] == batch["captured_to"] == compared.exchange.captured_at
    assert msgspec.json.decode(batch["provenance"]) == {"runtime": "linear"}
    row = await record.fetchrow("select * from comparison where item = 2")
    assert row["exchange_id"] == uuid.UUID(compared.exchange.id)
    assert (row["n_items"], row["flip"], row["topk"], row["divergence"]) == (3, True, False, float("inf"))
    assert (row["js"], row["margin"], row["pi1"], row["pi2"]) == (0.25, 0.125, 0.5, 1.0)
    assert msgspec.json.decode(row["attributes"]) == {"header.x-scanner": "faint"}
    assert msgspec.json.decode(row["features"]) == {"feature.mean": 0.5}
    assert msgspec.json.decode(row["detail"])["reference_top"] == 2
    assert row["batch_id"] == batch["id"]
    names = await record.fetch("select name from slice where id = any($1::int[])", row["slice_ids"])
    assert {name["name"] for name in names} == {"all", "scanner=faint"}
    version = await record.fetchrow("select * from model_version where id = $1", row["model_version_id"])
    assert version["reference_digest"] == VERSION.reference_digest
    assert msgspec.json.decode(version["reference"]) == {"path": "reference.onnx"}
    definition = await record.fetchval("select definition from policy where id = $1", row["policy_id"])
    assert msgspec.json.decode(definition, type=Policy) == POLICY


async def test_the_newest_look_at_a_reference_replaces_the_one_before(
    database: Database, record: asyncpg.Connection
) -> None:
    """A look replaces the one before, also where it found nothing; other models' stay."""
    writer = Writer(database, SystemClock())
    seen = ConfigWarningRow(
        model="digits", reference_digest="5f", option="output_kind", doubt="they are probabilities"
    )
    other = msgspec.structs.replace(seen, model="scans")
    await writer.store(_batch(compared=(_compared(7),), doubts=(other, seen)))
    mended = msgspec.structs.replace(seen, option="", doubt="")
    await writer.store(_batch(compared=(_compared(8),), doubts=(mended,)))
    rows = await record.fetch("select model, reference_digest, option, doubt from doubt order by model")
    assert [tuple(row) for row in rows] == [
        ("digits", "5f", "", ""),
        ("scans", "5f", "output_kind", "they are probabilities"),
    ]


async def test_one_statement_stores_the_same_as_a_transaction(
    database: Database, record: asyncpg.Connection
) -> None:
    """The ids of the first batch are new, and it takes a transaction; the second one has the same values and is one statement.

    Both come with second computations of earlier items.
    """
    odd = "\"},{\\' 零"
    own = {"exchange_id", "batch_id", "stored_at", "is_one_statement"}
    slices = tuple(
        SliceKey(model="digits", name=f"s={value}", predicate=f's = "{value}"') for value in ("", odd, "NULL")
    )
    undefined: dict[str, Any] = dict.fromkeys(
        ("flip", "topk", "js", "divergence", "margin", "candidate_margin", "reference_margin", "detail")
    )
    now = datetime.now(UTC)
    compared = [_compared(1, n_items=3, slices=(ALL, *slices)), _compared(2, slices=(ALL,), **undefined)]
    first = msgspec.structs.replace(
        compared[0].exchange,
        attributes={"header.x-odd": odd},
        source=odd,
        group=odd,
        trace="",
        way=Way.INTAKE,
        caller="door",
        latency=Latency(last_byte_s=0.25, first_token_s=0.125),
    )
    compared[0] = msgspec.structs.replace(compared[0], exchange=first)
    again = NoiseItem(
        captured_at=now,
        exchange_id="",
        item=1,
        side=Side.CANDIDATE,
        version=VERSION,
        policy=POLICY,
        pi1=0.5,
        pi2=1.0,
        flip=True,
        divergence=float("inf"),
        slices=(slices[1], ALL),
    )
    unknown = msgspec.structs.replace(again, side=Side.REFERENCE, flip=None, divergence=None, slices=(ALL,))
    writer, boot, rows, repeated = Writer(database, SystemClock()), str(uuid.uuid4()), [], []
    for number in range(2):
        batch = tuple(
            msgspec.structs.replace(
                one,
                exchange=msgspec.structs.replace(
                    one.exchange, id=uuid.uuid4().hex, captured_at=now + timedelta(milliseconds=place)
                ),
            )
            for place, one in enumerate(compared)
        )
        numbered = tuple(Numbered(boot=boot, row=0, number=1 + 2 * number + place) for place in range(2))
        noise_id = uuid.uuid4()
        noise = tuple(msgspec.structs.replace(one, exchange_id=noise_id.hex) for one in (again, unknown))
        written = await writer.store(_batch(compared=batch, numbered=numbered, replay_s=0.5, noise=noise))
        assert written == Written(n_rows=4)
        of_noise = await record.fetch("select * from noise where exchange_id = $1 order by side", noise_id)
        repeated.append([{k: v for k, v in row.items() if k not in own} for row in of_noise])
        rows.append(
            await record.fetch(
                """
                select c.*, to_jsonb(b.*) - array['id', 'stored_at'] as of_batch, c.cmin = b.cmin as is_one_statement
                from comparison c join batch b on b.id = c.batch_id
                where c.exchange_id = any($1::uuid[]) order by c.captured_at, c.item
                """,
                [one.exchange.id for one in batch],
            )
        )
    before, after = ([{k: v for k, v in row.items() if k not in own} for row in part] for part in rows)
    assert after == before
    assert [{row["is_one_statement"] for row in part} for part in rows] == [{False}, {True}]
    numbers = await record.fetchval("select numbers::text from arrival where boot = $1", uuid.UUID(boot))
    assert numbers == "{[1,5)}"
    assert repeated[0] == repeated[1]
    assert len(repeated[0]) == 2


async def test_an_id_that_means_something_else_by_now_is_not_used(
    database: Database, record: asyncpg.Connection
) -> None:
    """A failover may lose a slice and hand its id out again: the writer finds the slice by its name again, and makes it if need be."""
    faint = SliceKey(model="digits", name="s=faint", predicate='s = "faint"')
    writer = Writer(database, SystemClock())
    for number in range(2):
        await writer.store(_batch(compared=(_compared(number, slices=(ALL, faint)),)))
    await record.execute("update slice set predicate = 's = \"other\"' where name = 's=faint'")
    last = _compared(2, slices=(ALL, faint))
    assert (await writer.store(_batch(compared=(last,)))).n_rows == 1
    named = "select array_agg(predicate order by predicate) from slice where id = any($1::int[])"
    ids = await record.fetchval(
        "select slice_ids from comparison where exchange_id = $1", uuid.UUID(last.exchange.id)
    )
    assert await record.fetchval(named, ids) == sorted([ALL.predicate, faint.predicate])


async def test_storing_again_changes_nothing(database: Database, record: asyncpg.Connection) -> None:
    """A redelivered batch leaves no row and no batch; a mixed one adds what is new, and says how many that is."""
    first, second = _compared(1, n_items=2), _compared(2)
    writer = Writer(database, SystemClock())
    await writer.store(_batch(compared=(first,)))
    again = await Writer(database, SystemClock()).store(_batch(compared=(first,)))
    mixed = await writer.store(_batch(compared=(first, second, second)))
    assert (again.n_rows, mixed.n_rows) == (0, 1)
    assert await record.fetchval("select count(*) from comparison") == 3
    assert [row["n_rows"] for row in await record.fetch("select n_rows from batch order by id")] == [2, 1]
    assert await record.fetchval("select count(*) from model_version") == 1


async def test_workers_that_are_given_the_same_exchanges_store_each_once(
    database: Database, record: asyncpg.Connection
) -> None:
    """Redelivered while the first worker still stores, in any order and any mixture: every batch row tells the truth."""
    known = [_compared(n, n_items=1 + n % 3) for n in range(40)]
    random = Random(7)
    outcomes: list[Written | None] = []

    async def work(batches: list[list[ComparedExchange]]) -> None:
        writer, stop = Writer(database, SystemClock()), Stop()
        for batch in batches:
            write = partial(writer.store, _batch(compared=tuple(batch)))
            outcomes.append(await until_stored(write, stop, limit_s=30, failed=lambda: None))

    await asyncio.gather(
        *(work([random.sample(known, random.randint(1, 20)) for _ in range(10)]) for _ in range(3)),
        work([known[::-1]]),
    )
    n_items = sum(len(compared.items) for compared in known)
    assert await record.fetchval("select count(*) from comparison") == n_items
    assert sum(outcome.n_rows for outcome in outcomes if outcome) == n_items
    wrong = """
        select count(*) from batch b
        where n_rows = 0 or n_rows <> (select count(*) from comparison c where c.batch_id = b.id)
    """
    assert await record.fetchval(wrong) == 0


async def test_a_failed_transaction_leaves_nothing(database: Database, record: asyncpg.Connection) -> None:
    """What is no inclusion probability breaks the COPY: nothing of the batch stays, and no id is remembered."""
    good, bad = _compared(1), _compared(2)
    sampling = msgspec.structs.replace(bad.exchange.sampling, pi1=2.0)
    exchange = msgspec.structs.replace(bad.exchange, sampling=sampling)
    writer = Writer(database, SystemClock())
    with pytest.raises(asyncpg.CheckViolationError):
        await writer.store(_batch(compared=(good, msgspec.structs.replace(bad, exchange=exchange))))
    for table in ("comparison", "batch", "slice", "model_version", "policy"):
        assert await record.fetchval(f"select count(*) from {table}") == 0, table
    assert (await writer.store(_batch(compared=(good,)))).n_rows == 1


async def test_what_no_partition_takes_is_quarantined(database: Database, record: asyncpg.Connection) -> None:
    """Exchanges of days without a partition are set aside `too_late`, once; the others are stored."""
    old = _compared(1, n_items=2, captured_at=datetime.now(UTC) - timedelta(days=400))
    new = _compared(2)
    writer = Writer(database, SystemClock())
    for n_rows in (1, 0):
        written = await writer.store(_batch(compared=(old, new)))
        assert (written.n_rows, written.unplaced) == (n_rows, {0: QuarantineReason.TOO_LATE})
    row = await record.fetchrow("select * from quarantine")
    assert (row["reason"], row["stream_sequence"], row["payload"]) == ("too_late", 1, b"wire")
    assert row["exchange_id"] == uuid.UUID(old.exchange.id)
    batch = await record.fetchrow("select n_rows, skipped from batch")
    assert (batch["n_rows"], msgspec.json.decode(batch["skipped"])) == (1, {"too_late": 1})


async def test_what_is_captured_in_the_future_is_set_aside_as_that(
    database: Database, record: asyncpg.Connection
) -> None:
    """A sidecar's clock that is a month ahead is named as the reason."""
    early = _compared(1, captured_at=datetime.now(UTC) + timedelta(days=40))
    written = await Writer(database, SystemClock()).store(_batch(compared=(early, _compared(2))))
    assert (written.n_rows, written.unplaced) == (1, {0: QuarantineReason.TOO_EARLY})
    row = await record.fetchrow("select reason, detail from quarantine")
    assert row["reason"] == "too_early"
    assert "40 days ahead" in row["detail"]


@pytest.mark.parametrize("days", [-1, 0, 1])
async def test_a_partition_that_nobody_made_is_no_fault_of_the_exchange(
    database: Database, record: asyncpg.Connection, days: int
) -> None:
    """With the monitor away for too long the days run out: exchanges wait, and are stored once it is back."""
    at = datetime.now(UTC) + timedelta(days=days)
    await record.execute(f"drop table comparison_{at:%Y%m%d}")
    compared = _compared(1, captured_at=at)
    writer = Writer(database, SystemClock())
    with pytest.raises(RetryError, match="db upgrade"):
        await writer.store(_batch(compared=(compared,)))
    assert await record.fetchval("select count(*) from quarantine") == 0
    await maintain(database, Storage(), datetime.now(UTC))
    assert (await writer.store(_batch(compared=(compared,)))).n_rows == 1


async def test_ids_that_a_failover_lost_are_made_again(
    database: Database, record: asyncpg.Connection
) -> None:
    """A standby that lacked the last transactions took over: what they made is made again, whatever its id."""
    faint = SliceKey(model="digits", name="scanner=faint", predicate='header.x-scanner = "faint"')
    writer = Writer(database, SystemClock())
    await writer.store(_batch(compared=(_compared(1, slices=(faint,)),)))
    await record.execute("truncate comparison, batch, slice, model_version, policy restart identity cascade")
    await record.execute(
        "insert into slice (model, predicate, name, definition) values ('digits', 'other', 'other', '{}')"
    )
    await writer.store(_batch(compared=(_compared(2, slices=(faint,)),)))
    names = await record.fetch("select s.name from comparison c join slice s on s.id = any(c.slice_ids)")
    assert [row["name"] for row in names] == ["scanner=faint"]
    found = "select count(*) from comparison c join model_version v on v.id = c.model_version_id"
    assert await record.fetchval(f"{found} join policy p on p.id = c.policy_id") == 1


async def test_a_new_stream_s_messages_are_set_aside_as_well(
    database: Database, record: asyncpg.Connection
) -> None:
    """A stream that was wiped counts from 1 again: another message under an old sequence is not taken for it."""
    old = Quarantined(stream_sequence=1, payload=b"old", reason=QuarantineReason.DECODE, detail="no exchange")
    new = msgspec.structs.replace(old, payload=b"new")
    writer = Writer(database, SystemClock())
    for aside in (old, old, new, new):
        await writer.store(_batch(quarantined=(aside,)))
    payloads = await record.fetch("select payload from quarantine order by id")
    assert [row["payload"] for row in payloads] == [b"old", b"new"]
    skipped = await record.fetch("select skipped from batch")
    assert [msgspec.json.decode(row["skipped"]) for row in skipped] == 2 * [{"decode": 1}]


async def test_more_rows_than_a_statement_takes_are_stored(
    database: Database, record: asyncpg.Connection
) -> None:
    """Postgres takes 32,767 values at once; thousands of strata, and of messages set aside, are more."""
    strata = tuple(
        StratumCount(stratum=f"s{n}", offered=1, taken=0, thinned=0, published=0) for n in range(3000)
    )
    tally = Tally(
        source="pod", boot="f" * 32, sequence=1, at=datetime.now(UTC), strata=strata, blind_connections=0
    )
    writer = Writer(database, SystemClock())
    assert (await writer.store_tallies("w", [tally])).n_rows == 3000
    aside = tuple(
        Quarantined(stream_sequence=n, payload=b"", reason=QuarantineReason.DECODE, detail="")
        for n in range(5000)
    )
    await writer.store(_batch(quarantined=aside))
    assert (
        await record.fetchval("select (skipped ->> 'decode')::int from batch where skipped <> '{}'") == 5000
    )


async def test_what_is_skipped_is_counted_by_reason(database: Database, record: asyncpg.Connection) -> None:
    """Quarantined messages count once however often they come; a version without a reference becomes known."""
    key = VersionKey(model="digits", candidate_version="new", reference_digest="")
    aside = Quarantined(
        stream_sequence=5, payload=b"?", reason=QuarantineReason.DECODE, detail="not an\0 exchange"
    )
    missing = Unreferenced(version=key, captured_at=datetime(2026, 1, 2, tzinfo=UTC))
    writer = Writer(database, SystemClock())
    await writer.store(_batch(quarantined=(aside,), unreferenced=(missing, missing)))
    await writer.store(_batch(quarantined=(aside,)))
    batch = await record.fetchrow("select * from batch")
    assert msgspec.json.decode(batch["skipped"]) == {"decode": 1, "no_reference": 2}
    assert (batch["n_rows"], batch["captured_from"]) == (0, missing.captured_at)
    version = await record.fetchrow("select id, reference_digest from model_version")
    assert (version["reference_digest"], batch["unreferenced"]) == ("", [version["id"]])
    assert await record.fetchval("select detail from quarantine") == "not an exchange"


async def test_tallies_are_stored_once(database: Database, record: asyncpg.Connection) -> None:
    """A tally has one row per stratum and comes in a batch of its own kind; the second time nothing happens."""
    strata = tuple(
        StratumCount(stratum=name, offered=9, taken=5, thinned=1, published=3, lost={Loss.DECODE: 1})
        for name in ("faint", "default")
    )
    tally = Tally(
        source="pod", boot="f" * 32, sequence=3, at=datetime.now(UTC), strata=strata, blind_connections=2
    )
    later = msgspec.structs.replace(tally, sequence=4)
    writer = Writer(database, SystemClock())
    assert (await writer.store_tallies("w", [tally])).n_rows == 2
    assert (await writer.store_tallies("w", [tally])).n_rows == 0
    assert (await writer.store_tallies("w", [tally, later])).n_rows == 2
    batches = await record.fetch("select kind, n_rows from batch order by id")
    assert [tuple(batch) for batch in batches] == [("tally", 2), ("tally", 2)]
    row = await record.fetchrow("select * from tally where stratum = 'faint' and sequence = 4")
    assert msgspec.json.decode(row["lost"]) == {"decode": 1}
    assert row["blind_connections"] == 2


async def test_payloads_of_a_flood_are_left_out(
    database: Database, record: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the hourly allowance messages are set aside without their payload; an hour later it is there again."""
    monkeypatch.setattr("quantdrift.storage.comparisons.writer.PAYLOAD_BYTES_PER_HOUR", 5)
    clock = ManualClock(datetime.now(UTC))
    writer = Writer(database, clock)
    for sequence in range(3):
        aside = Quarantined(
            stream_sequence=sequence, payload=b"four", reason=QuarantineReason.DECODE, detail="no exchange"
        )
        await writer.store(_batch(quarantined=(aside,)))
        clock.advance(1800)
    payloads = await record.fetch("select payload from quarantine order by stream_sequence")
    assert [row["payload"] for row in payloads] == [b"four", None, b"four"]
