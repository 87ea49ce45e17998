"""What is stored of a person is found, and erased: in every table and in the stream, and of nobody else."""

import asyncio
import json
import secrets
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import nats
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Capture, Config, Slice, Stream
from quantdrift.core.errors import QuarantineReason
from quantdrift.core.records import Exchange
from quantdrift.core.slices import SliceAssigner, ValueRules
from quantdrift.core.stream.connection import Queue
from quantdrift.monitor.fold.fold import Fold
from quantdrift.sidecar.capture.attributes import every_hash
from quantdrift.storage.comparisons.rows import (
    ComparedExchange,
    ComparedItem,
    Quarantined,
    StoreBatch,
    VersionKey,
)
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from quantdrift.storage.fold_rows import ComparisonRow
from quantdrift.storage.privacy import (
    CLOSED,
    OF_AN_EXCHANGE,
    REDACTED,
    WITHOUT_VALUES,
    Search,
    WantedData,
    slices_wait,
    text_columns,
)
from quantdrift.storage.schema.tables import Base
from tests.support.commands import invoked
from tests.support.monitor.fold_stream import CONFIG as WATCH
from tests.support.monitor.fold_stream import FAINT_ID, batches, store_batch, store_catalog
from tests.support.shadow.onnx_models import exchange_of, inputs_of
from tests.support.storage.comparisons import condense

pytestmark = pytest.mark.integration

CANARY, NEIGHBOUR = 'cana"ry-7f31@example.org', "cana"
ENTRIES = "select count(*) from audit where action = 'privacy erase'"
KEY = b"a key of the sidecars"
((HASH,), (OTHER_HASH,)) = every_hash(CANARY, KEY), every_hash(NEIGHBOUR, KEY)
CONFIG = Config(
    capture=Capture(headers=("x-user", "x-person", "x-scanner"), hmac=("header.x-person",)),
    slices=(
        Slice(name="user", header="x-user", max_values=20),
        Slice(name="scanner", header="x-scanner", values=("faint",)),
    ),
)
TEXT = """
[[models]]
name = "digits"
[capture]
headers = ["x-user", "x-person", "x-request-id", "x-scanner"]
hmac = ["header.x-person"]
[[slices]]
name = "user"
header = "x-user"
max_values = 20
[[slices]]
name = "scanner"
header = "x-scanner"
values = ["faint"]
[stream]
url = "{url}"
name = "{name}"
"""
TRACE = "00-{}-00f067aa0ba902b7-01"


def exchange(user: str, request_id: str = "") -> Exchange:
    """Return an exchange of a user, with a trace of its own."""
    attributes = {"header.x-user": user, "header.x-person": every_hash(user, KEY)[0]}
    if request_id:
        attributes["header.x-request-id"] = request_id
    made = exchange_of(inputs_of(1), attributes=attributes)
    return msgspec.structs.replace(
        made, trace=TRACE.format(secrets.token_hex(16)), group=f"group of {made.id}"
    )


def compared(one: Exchange) -> ComparedExchange:
    """Return an exchange with what it was compared to."""
    item = ComparedItem(
        slices=tuple(SliceAssigner(CONFIG, "digits").assign(one.attributes, {})),
        features={},
        flip=True,
        topk=False,
        js=0.0,
        divergence=0.0,
        margin=0.0,
        candidate_margin=0.5,
        reference_margin=0.5,
        detail=json.dumps({"word": one.attributes["header.x-user"]}),
    )
    return ComparedExchange(
        stream_sequence=1,
        payload=b"",
        exchange=one,
        version=VersionKey(model="digits", candidate_version="int8", reference_digest="d" * 64),
        items=(item,),
    )


def quarantined(sequence: int, payload: bytes, one: Exchange | None) -> Quarantined:
    """Return a message that could not be compared."""
    return Quarantined(
        stream_sequence=sequence,
        payload=payload,
        reason=QuarantineReason.DECODE,
        detail="unreadable",
        exchange_id=one.id if one else None,
        model="digits",
        captured_at=None,
    )


class Installation:
    """A database and a stream with exchanges of two people, and everything that is made of them."""

    def __init__(self, record: asyncpg.Connection, queue: Queue, directory: Path, dsn: str, url: str) -> None:
        self.record, self.queue, self.directory, self.dsn, self.url = record, queue, directory, dsn, url
        self.mine = [exchange(CANARY, f"request-{number}") for number in range(3)]
        self.others = [exchange(NEIGHBOUR, f"request-{number}-b") for number in range(3)]

    async def fill(self) -> None:
        """Store something of both in each place."""
        async with Database(self.dsn) as database:
            writer = Writer(database, SystemClock(), ValueRules(CONFIG))
            await writer.store(
                StoreBatch(
                    worker="w",
                    at=datetime.now(UTC),
                    references={"d" * 64: "{}"},
                    compared=tuple(compared(one) for one in (*self.mine[:2], *self.others[:2])),
                    quarantined=(
                        quarantined(1, encode(self.mine[2]), self.mine[2]),
                        quarantined(2, b"broken " + CANARY.encode(), None),
                        quarantined(3, encode(self.others[2]), self.others[2]),
                    ),
                )
            )
        slices = {
            row["name"]: row["id"]
            for row in await self.record.fetch("select id, name from slice order by id")
        }
        for number, (user, mine) in enumerate(((CANARY, self.mine), (NEIGHBOUR, self.others))):
            await self._derived(user, mine[0], slices[f"user={user}"], number)
        for one in (self.mine[0], self.others[0]):
            await self.queue.publish_exchange("digits", one.id, encode(one))
        await self.queue.publish_exchange("digits", "broken", b"broken " + CANARY.encode())

    async def _derived(self, user: str, one: Exchange, slice_id: int, number: int) -> None:
        trace = one.trace.split("-")[1]
        quoted = user.replace('"', '\\"')
        details = json.dumps(
            {
                "slice": f"user={user}",
                "predicate": f'header.x-user = "{quoted}"',
                "text": f'user={user} (header.x-user = "{quoted}") flips more; see {one.id}.',
                "examples": [one.id, "0" * 32],
                "traces": [f"https://traces/{trace}"],
                "hashed": every_hash(user, KEY)[0],
                user: 1,
            }
        )
        record = self.record
        await record.execute(
            "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
            " values (1, $1, 'firing', 'flip', now(), now(), $2)",
            slice_id,
            details,
        )
        transition = await record.fetchval(
            "insert into transition (model_version_id, slice_id, from_verdict, to_verdict, at, fold_seq, details)"
            " values (1, $1, 'ok', 'firing', now(), 1, $2) returning id",
            slice_id,
            details,
        )
        await record.execute(
            "insert into outbox (transition_id, last_error) values ($1, $2)",
            transition,
            f"refused user={user}",
        )
        await record.execute(
            "insert into verdict values (1, $1, 'firing', $2, now(), 5, 4, 8, '{}', null, now(), now(), 7)",
            slice_id,
            f"user={user} flips",
        )
        await record.execute(
            "insert into slice_change (slice_id, status, made_by, reason, fold_seq) values ($1, 'admitted', 'shadow', $2, 1)",
            slice_id,
            f"seen: {user}",
        )
        await record.execute(
            "insert into value_share (model, source, places, counted_at, total, error, counts, reserved)"
            " values ('digits', 'header.x-user', 20, now(), 2, 0, $1, $2) on conflict (model, source) do update"
            " set counts = value_share.counts || excluded.counts, reserved = value_share.reserved || excluded.reserved",
            json.dumps(
                [
                    {
                        "predicate": f'header.x-user = "{quoted}"',
                        "name": f"user={user}",
                        "where": [{"key": "header.x-user", "equals": user}],
                        "weight": 1.0,
                    }
                ]
            ),
            [user],
        )
        await record.execute(
            "insert into report_run (kind, from_at, to_at, path, figures) values ('week', now(), now(), $1, $2)",
            f"/reports/{number}.html",
            json.dumps(
                {"findings": [{"slice": f"user={user}", "examples": [{"exchange_id": _dashed(one.id)}]}]}
            ),
        )
        await record.execute(
            "insert into gate_run (model, candidate, alpha, answers) values ('digits', $1, 0.05, $2)",
            f"sha256:aa user={user}=sha256:bb",
            json.dumps([{"slice": f"user={user}", "verdict": "pass"}, {"slice": "all", "verdict": "pass"}]),
        )
        await record.execute(
            "select gate_end(max(id), 'pass', 0, max(answers::text)::jsonb, '{}', $1) from gate_run",
            f"user={user}",
        )
        await record.execute(
            "insert into noise (exchange_id, item, side, captured_at, batch_id, model_version_id, policy_id, pi1, pi2, flip)"
            " values ($1, 0, 'reference', now(), 1, 1, 1, 1, 1, true)",
            one.id,
        )
        await record.execute(
            "insert into embedding values (now(), $1, 0, 'digits', 'd', 'logits', 1, '\\x00000000')", one.id
        )
        await record.execute(
            "insert into label select captured_at, exchange_id, item, model_version_id, '7', true, false, now() from comparison"
            " where exchange_id = $1",
            one.id,
        )
        item = ComparisonRow(
            exchange_id=_dashed(one.id),
            item=0,
            captured_us=0,
            model_version_id=1,
            policy_id=1,
            slice_ids=(1,),
            group_key="g",
            pi1=1,
            pi2=1,
            u1=0,
            u2=0,
            candidate_margin=None,
            flip=1,
            topk=None,
            js=None,
            divergence=None,
            margin=None,
        )
        await record.execute(
            "insert into session values (1, 1, $1, now(), $2, 1)",
            f"g{number}",
            msgspec.msgpack.encode([item]),
        )

    async def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `quantdrift privacy ARGUMENTS`."""
        return await asyncio.to_thread(
            invoked,
            "privacy",
            *arguments,
            directory=self.directory,
            QUANTDRIFT_DSN=self.dsn,
            QUANTDRIFT_HMAC_KEY=KEY.decode(),
            **variables,
        )

    async def erase(self, key: str, value: str) -> dict[str, Any]:
        """Erase, and return the JSON."""
        done = await self.run("erase", key, value, "--yes", "--json", "--reason", "ticket 4711")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    async def places_with(self, *words: str) -> set[str]:
        """Return the tables, and `stream`, in which one of these words is, as text or as bytes."""
        tables = [
            row[0]
            for row in await self.record.fetch("select tablename from pg_tables where schemaname = 'public'")
        ]
        forms = [form for word in words for form in _forms(word)]
        found = {
            table
            for table in tables
            if await self.record.fetchval(
                f'select exists (select from "{table}" t, unnest($1::text[]) w where strpos(t::text, w) > 0)',
                forms,
            )
        }
        if any(word.encode() in data for data in await self.waiting() for word in words):
            found.add("stream")
        return found

    async def waiting(self) -> list[bytes]:
        """Return what waits in the stream."""
        client = await nats.connect(self.url)
        jetstream, name = client.jetstream(), self.queue.stream_name("exchange")
        info = await jetstream.stream_info(name)
        waiting: list[bytes] = []
        sequence = 1
        while sequence <= info.state.last_seq and len(waiting) < info.state.messages:
            message = await jetstream.get_msg(name, seq=sequence, subject=f"{name}.>", next=True)
            waiting.append(message.data or b"")
            sequence = (message.seq or 0) + 1
        await client.close()
        return waiting


def _dashed(exchange_id: str) -> str:
    parts = exchange_id[:8], exchange_id[8:12], exchange_id[12:16], exchange_id[16:20], exchange_id[20:]
    return "-".join(parts)


def _forms(word: str) -> list[str]:
    """Return a word as it can look in a row as text: in JSON, in JSON in a row, and in bytes."""
    forms = [word]
    for _ in range(3):
        forms += [form.replace("\\", "\\\\").replace('"', mark) for form in forms for mark in ('\\"', '""')]
    return [*dict.fromkeys(forms), word.encode().hex()]


@pytest.fixture
async def installation(record: asyncpg.Connection, nats_url: str, postgres_dsn: str, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Return one with something of both people in each place."""
    name = f"t-{secrets.token_hex(6)}"
    (tmp_path / "config.toml").write_text(TEXT.format(url=nats_url, name=name))
    queue = await Queue.connect(Stream(url=nats_url, name=name), client_name="test")
    try:
        made = Installation(record, queue, tmp_path, postgres_dsn, nats_url)
        await made.fill()
        await record.execute("update slice_change set fold_seq = 1")
        yield made
    finally:
        await queue.close()


async def monitor_applies(record_dsn: str) -> None:
    """Take over the changes of slices as the monitor does, until cancelled."""
    connection = await asyncpg.connect(record_dsn)
    try:
        while True:
            await connection.execute("update slice_change set fold_seq = 2 where fold_seq is null")
            await asyncio.sleep(0.05)
    finally:
        await connection.close()


HOLDING = {
    "alert",
    "comparison",
    "gate_run",
    "gate_verdict",
    "outbox",
    "quarantine",
    "report_run",
    "slice",
    "slice_change",
    "stream",
    "transition",
    "value_share",
    "verdict",
}


@pytest.mark.parametrize("condensed", [False, True])
async def test_every_trace_of_a_value_goes_and_the_neighbour_stays(
    installation: Installation, *, condensed: bool
) -> None:
    """Erased by a value that is a slice: no table and no message has the value, its hash or an id of its exchanges."""
    if condensed:
        await installation.record.execute("update batch set fold_seq = 1")
        assert await condense(installation.record) == 4
    mine = [CANARY, *(form for one in installation.mine for form in (one.id, _dashed(one.id)))]
    mine += [one.trace.split("-")[1] for one in installation.mine]
    theirs = [OTHER_HASH, *(one.id for one in installation.others)]
    before = await installation.places_with(*mine, HASH)
    holding = HOLDING - {"comparison"} | {"condensed_block"} if condensed else HOLDING
    assert before - {name for name in before if name.startswith("comparison_")} >= holding | {
        "noise",
        "embedding",
        "label",
        "session",
    }
    neighbours = await installation.places_with(*theirs, *map(_dashed, theirs[1:]))
    applying = asyncio.create_task(monitor_applies(installation.dsn))
    try:
        erased = await installation.erase("any", CANARY)
    finally:
        applying.cancel()
    counts = {place["place"]: place["n"] for place in erased["erased"]}
    assert counts["comparison"] == 2
    assert counts["stream"] == 2
    assert await installation.places_with(*mine, HASH) == set()
    after = await installation.places_with(*theirs, *map(_dashed, theirs[1:]))
    if condensed:  # what is left of a block is in rows again
        neighbours = neighbours - {"condensed_block"} | {
            name for name in after if name.startswith("comparison")
        }
    assert after == neighbours
    assert (
        await installation.record.fetchval("select count(*) from slice where name = $1", f"user={NEIGHBOUR}")
        == 1
    )
    kept = "select count(*) from comparisons('-infinity', 'infinity')"
    assert await installation.record.fetchval(kept) == 2
    assert len(await installation.waiting()) == 1
    again = await installation.erase("any", CANARY)
    assert again["erased"] == []
    entries = await installation.record.fetch(
        "select * from audit where action = 'privacy erase' order by seq"
    )
    assert [json.loads(entry["after"])["status"] for entry in entries] == ["begun", "erased"]
    assert entries[0]["note"] == "ticket 4711"


async def test_without_a_monitor_the_command_says_that_something_may_come(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1: nobody has ended the slice of the value yet, and its last change of verdict would name it."""
    monkeypatch.setattr("quantdrift.cli.admin.privacy._SETTLE_S", 0.3)
    done = await installation.run("erase", "header.x-user", CANARY, "--yes")
    assert done.returncode == 1
    assert "the monitor may still have" in done.stderr
    assert await installation.places_with(CANARY) == set()


def test_every_table_is_decided_on() -> None:
    """A new table is in no set of the erasure: decide whether it holds rows, texts, or nothing of an exchange."""
    sets = (set(OF_AN_EXCHANGE), set(REDACTED), set(WITHOUT_VALUES))
    assert sum(map(len, sets)) == len(set.union(*sets))
    assert set.union(*sets) == set(Base.metadata.tables)
    named = {column.name for table in REDACTED for column in Base.metadata.tables[table].columns}
    assert named >= CLOSED
    assert all(text_columns(table) for table in REDACTED)


async def test_an_exchange_in_hand_of_a_worker_does_not_come_back(installation: Installation) -> None:
    """A worker stores, after the first pass, what it had fetched before it, and makes the slice of the value again.

    The second pass erases both.
    """
    one = installation.mine[0]
    consumer = await installation.queue.consumer("exchange", ack_wait_s=30, model="digits")
    deliveries = await consumer.fetch(3, max_bytes=1_000_000, timeout_s=5)
    assert len(deliveries) == 3
    applying = asyncio.create_task(monitor_applies(installation.dsn))
    erasing = asyncio.create_task(installation.erase("header.x-user", CANARY))
    async with asyncio.timeout(60):
        while not await installation.record.fetchval(ENTRIES):
            await asyncio.sleep(0.02)
        while await installation.places_with(CANARY):
            await asyncio.sleep(0.02)
        async with Database(installation.dsn) as database:
            writer = Writer(database, SystemClock(), ValueRules(CONFIG))
            late = StoreBatch(worker="late", at=datetime.now(UTC), references={}, compared=(compared(one),))
            await writer.store(late)
        for delivery in deliveries:
            await delivery.ack()
        erased = await erasing
    applying.cancel()
    assert {place["place"]: place["n"] for place in erased["erased"]}["comparison"] == 3
    assert await installation.places_with(CANARY, one.id, _dashed(one.id)) == set()
    assert erased["left"] == []


async def test_find_by_each_key_shows_no_content(installation: Installation) -> None:
    """A request id, a hashed attribute, a trace and an exchange: where, how many and when, and no value of them."""
    one = installation.mine[0]
    for key, value, n in (
        ("header.x-request-id", "request-0", 1),
        ("header.x-person", CANARY, 2),
        ("trace", one.trace, 1),
        ("exchange", _dashed(one.id), 1),
        ("header.x-user", CANARY, 2),
    ):
        shown = await installation.run("find", key, value, "--json")
        assert shown.returncode == 0, shown.stderr
        places = {place["place"]: place for place in json.loads(shown.stdout)["found"]}
        assert places["comparison"]["n"] == n, key
        assert places["stream"]["n"] >= 1
        assert places["alert"]["n"] == 1
        assert json.loads(shown.stdout)["report_files"] == ["/reports/0.html"]
        for secret in (CANARY, HASH, "7f31", one.id):
            assert secret not in shown.stdout + shown.stderr
    table = await installation.run("find", "header.x-request-id", "request-0")
    assert table.stdout.splitlines()[0].split() == ["place", "rows", "oldest", "(UTC)", "newest", "(UTC)"]
    assert "backups of Postgres and of NATS" in table.stdout
    assert await installation.places_with(one.id)


async def test_a_request_id_takes_its_own_exchange_alone(installation: Installation) -> None:
    """Erased by a request id: other exchanges of the same person stay, and so does the slice of the person."""
    await installation.erase("header.x-request-id", "request-1")
    assert await installation.places_with(installation.mine[1].id, _dashed(installation.mine[1].id)) == set()
    assert await installation.record.fetchval("select count(*) from comparison") == 3
    assert (
        await installation.record.fetchval("select count(*) from slice where name = $1", f"user={CANARY}")
        == 1
    )
    assert await installation.record.fetchval("select count(*) from slice where lapsed_at is not null") == 0


async def test_the_value_can_come_from_standard_input_and_a_person_can_say_no(
    installation: Installation,
) -> None:
    """`-` reads the value; without `--yes` an answer is needed, and `n` erases nothing."""
    from click.testing import CliRunner

    from quantdrift.cli.main import main

    def typed(words: list[str], typed_in: str) -> tuple[int, str]:
        config = ["--config", str(installation.directory / "config.toml")]
        done = CliRunner(
            env={"QUANTDRIFT_DSN": installation.dsn, "QUANTDRIFT_HMAC_KEY": KEY.decode()}
        ).invoke(main, ["privacy", *words, *config], input=typed_in)
        return done.exit_code, done.output

    code, output = await asyncio.to_thread(typed, ["find", "header.x-person", "-"], f"{CANARY}\n")
    assert (code, "comparison" in output) == (0, True), output
    code, output = await asyncio.to_thread(typed, ["erase", "header.x-person", CANARY], "n\n")
    assert code == 1
    assert "This cannot be undone" in output
    assert await installation.record.fetchval("select count(*) from comparison") == 4
    assert await installation.record.fetchval(ENTRIES) == 0
    code, output = await asyncio.to_thread(typed, ["erase", "header.x-person", "-"], f"{CANARY}\n")
    assert (code, "--yes" in output) == (2, True)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("user", "ada", "`user` is unknown"),
        ("exchange", "17", "32 hexadecimal digits"),
        ("header.x-user", "", "the value is empty"),
        ("header.x-scanner", "faint", "belongs to no person"),
        ("any", "firing", "a word that the tables use"),
        ("header.x-user", "digits", "a word that the tables use"),
        ("header.x-user", "ticket", "--reason contains the value"),
    ],
)
async def test_what_cannot_be_erased_is_refused(
    installation: Installation, key: str, value: str, word: str
) -> None:
    """Exit code 2 and a reason; nothing is searched."""
    done = await installation.run("erase", key, value, "--yes", "--reason", "ticket 4711")
    assert (done.returncode, word in done.stderr) == (2, True)


async def test_a_hashed_attribute_needs_the_key(installation: Installation) -> None:
    """Without it the value could only be searched as it is, and nothing would be found: an error in place of that."""
    done = await asyncio.to_thread(
        invoked,
        "privacy",
        "find",
        "header.x-person",
        CANARY,
        directory=installation.directory,
        QUANTDRIFT_DSN=installation.dsn,
    )
    assert (done.returncode, "QUANTDRIFT_HMAC_KEY" in done.stderr) == (2, True)


async def test_the_monitor_ends_the_slice_and_what_it_still_writes_goes_with_the_second_pass(
    database: Database, record: asyncpg.Connection
) -> None:
    """A fold with an open alert on the slice of the value: it ends, and the fold does not stumble over the new name."""
    await store_catalog(record)
    fold: Fold | None = None

    async def folded() -> set[int]:
        nonlocal fold
        async with database.begin() as connection:
            if fold is None:
                fold = Fold(WATCH, await resume(connection))
            rows = await claim(connection, fold.position.fold_seq, 64)
            fold.learn(await load_catalog(connection))
            for batch in rows:
                fold.batch(batch)
            await write(connection, fold.take(), "")
            return {row.slice_id for row in fold.verdicts()}

    async def found(*, erase: bool) -> dict[str, int]:
        wanted = WantedData(key="header.x-scanner", values=("faint",))
        return {place.place: place.n for place in await Search(database, wanted).run(erase=erase)}

    stream = batches(150)
    for batch in stream[:60]:
        await store_batch(record, batch)
    assert FAINT_ID in await folded()
    assert (await found(erase=True)).items() >= {"slice": 1, "transition": 2}.items()
    assert await found(erase=False) == {}
    async with database.begin() as connection:
        assert await slices_wait(connection)
    for batch in stream[60:70]:
        await store_batch(record, batch)
    assert FAINT_ID not in await folded()
    assert await record.fetchval("select count(*) from alert where resolved_at is null") == 0
    async with database.begin() as connection:
        assert not await slices_wait(connection)
    await found(erase=True)
    assert await found(erase=False) == {}
    async with database.begin() as connection:
        assert (await resume(connection)).lapsed == (FAINT_ID,)
