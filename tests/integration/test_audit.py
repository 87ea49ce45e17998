"""The audit: nobody can say who he is, no entry can be changed unnoticed, and no audited action happens without its entry."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from opentelemetry._logs import LogRecord

from quantdrift.core.clock import Clock, ManualClock, SystemClock
from quantdrift.core.codec import encode as encode_record
from quantdrift.core.config.schema import Config, Model, SamplingOptions, Stream
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.process_state import StateReports
from quantdrift.core.records import StratumCount, Tally
from quantdrift.core.sampling.pause import KEY, Order, Pause, encode
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.keyvalue import Entry as BucketEntry
from quantdrift.core.stream.keyvalue import KeyValue
from quantdrift.core.stream.tallies import read_tally
from quantdrift.monitor.audit import MOST_OF_ONE, MOST_REPORTED, Auditor
from quantdrift.storage.audit import Action, ChainHead, add, entries, newest, verify
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from quantdrift.storage.leader import unfenced
from quantdrift.storage.schema.roles import MONITOR, OPERATOR, PAGE, READER, REPORT, ROLES, SHADOW, apply
from quantdrift.storage.schema.slice_tables import DiscoveryStatus
from quantdrift.storage.slices.discovery import StoredRow, store
from tests.support.commands import invoked
from tests.support.storage.databases import Databases
from tests.support.storage.discovered_traffic import NOW, discovery, write_version

pytestmark = pytest.mark.integration

Login = Callable[..., Awaitable[str]]
FILE = '[[models]]\nname = "digits"\n'


@pytest.fixture
async def postgres_dsn(databases: Databases) -> AsyncIterator[str]:
    """Return the address of a database without roles: to apply them makes an entry. It is dropped after the test."""
    async with databases.copy() as dsn:
        yield dsn


@pytest.fixture
async def login(postgres_dsn: str) -> Login:
    """Apply the roles; return what makes a user in one of them and returns its address."""
    await apply(postgres_dsn)

    async def user_in(role: str, name: str = "") -> str:
        place, _, database = postgres_dsn.rpartition("/")
        user = f"{name or role}_{database}"
        connection = await asyncpg.connect(postgres_dsn)
        await connection.execute(f"create user {user} password 'p' in role {role}")
        await connection.close()
        return f"postgresql://{user}:p@{place.rpartition('@')[2]}/{database}"

    return user_in


@pytest.fixture
async def chain(database: Database, record: asyncpg.Connection) -> asyncpg.Connection:
    """Return a connection of the owner to a database with six entries."""
    for number in range(2, 7):
        async with database.begin() as connection:
            after = {"ratio": number / 7, "name": 'ä"\n: -', "none": None, "more": [1.50, 1e300]}
            assert (
                await add(connection, Action.PAUSE, before={}, after=after, note=f"note {number}") == number
            )
    return record


async def changed(record: asyncpg.Connection, statement: str) -> None:
    """Change the table as its owner can: without its triggers."""
    await record.execute(
        f"alter table audit disable trigger all; {statement}; alter table audit enable trigger all"
    )


async def problems(database: Database, head: str = "") -> list[tuple[int, str]]:
    """Return what a verification finds."""
    async with database.begin() as connection:
        verified = await verify(connection, ChainHead.parse(head) if head else None)
    return [(finding.seq, finding.problem) for finding in verified.findings]


async def listed(database: Database) -> list[tuple[str, str, str, str, Any, Any, str]]:
    """Return every entry after that of the first upgrade."""
    async with database.begin() as connection:
        return [
            (one.actor, one.action, one.model, one.subject, one.before, one.after, one.note)
            for one in (await entries(connection))[1:]
        ]


async def quantdrift(
    dsn: str, directory: Path, *arguments: str, config: str = FILE, **more: str
) -> tuple[int, str, str]:
    """Run a command with a configuration and an address of Postgres."""
    (directory / "config.toml").write_text(config)
    variables = {"QUANTDRIFT_DSN": dsn, "USER": "eve", "LOGNAME": "eve", **more}
    done = await asyncio.to_thread(invoked, *arguments, directory=directory, **variables)
    return done.returncode, done.stdout, done.stderr


async def a_discovered_slice(database: Database, record: asyncpg.Connection) -> None:
    """Store a confirmed slice with the id 2."""
    await write_version(record)
    row = discovery(id=0, status=DiscoveryStatus.CONFIRMED, confirmed_at=NOW)
    async with database.begin() as connection:
        await store(connection, StoredRow(row=row, reason="so the test says"), made_by="monitor")


@pytest.mark.parametrize("role", ROLES)
async def test_no_role_can_write_change_or_remove_an_entry(login: Login, role: str) -> None:
    """Neither directly, nor by locking the table."""
    connection = await asyncpg.connect(await login(role))
    for statement in (
        "insert into audit values (99, now(), 'ada', 'pause', '', '', null, null, '', '')",
        "update audit set actor = 'ada'",
        "delete from audit",
        "truncate audit",
        "do $$ begin lock table audit in exclusive mode; end $$",
        "alter table audit disable trigger all",
        "create or replace function audit_refuse() returns trigger language plpgsql as 'begin return new; end'",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement)
    await connection.close()


MAY_SAY = {
    MONITOR: {Action.CONFIGURATION, Action.PAUSE_SEEN, Action.PAUSE_LOCAL, Action.SLICES_FIT},
    OPERATOR: set(Action)
    - {
        *(Action.CONFIGURATION, Action.PAUSE_SEEN, Action.PAUSE_LOCAL, Action.SLICES_FIT, Action.GATE),
        *(Action.PRIVACY_ERASE, Action.SETUP_POSTGRES, Action.DB_UPGRADE),
    },
}
MAY_SAY[PAGE] = MAY_SAY[OPERATOR]


@pytest.mark.parametrize("role", ROLES)
async def test_a_forged_erasure_and_what_else_a_role_does_not_do_is_refused(login: Login, role: str) -> None:
    """Each role adds what its commands do, and nothing in the words of others: no erasure, no verdict of a gate."""
    connection = await asyncpg.connect(await login(role))
    allowed = set()
    for action in [*Action, "anything"]:
        try:
            await connection.execute(
                "select audit_add($1, 'digits', 'ticket 4711', null, '{}', 'on request')", action
            )
        except asyncpg.InsufficientPrivilegeError:
            continue
        allowed.add(action)
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute("select audit_write('pause', '', '', null, null, '')")
    await connection.close()
    assert allowed == MAY_SAY.get(role, set())


@pytest.mark.parametrize(
    "entry",
    [
        "'pause', '', '', null, null, repeat('x', 20 * 1024 * 1024)",
        "'pause', '', '', null, to_jsonb(repeat('x', 20 * 1024 * 1024)), ''",
        "'pause', '', repeat('x', 20 * 1024 * 1024), null, null, ''",
        "'pause', repeat('x', 20 * 1024 * 1024), '', null, null, ''",
    ],
)
async def test_an_entry_of_twenty_mebibytes_is_refused(login: Login, entry: str) -> None:
    """Nobody can remove it, and every page of the audit would have it."""
    connection = await asyncpg.connect(await login(OPERATOR))
    with pytest.raises(asyncpg.ProgramLimitExceededError, match="longer than allowed"):
        await connection.execute(f"select audit_add({entry})")
    await connection.close()


async def test_a_state_that_is_too_long_is_kept_without_its_longest_part(database: Database) -> None:
    """A configuration of very many models does not stop the monitor: the entry says what was left out."""
    async with database.begin() as connection:
        state = {"digest": "d", "options": {str(n): "x" * 100 for n in range(5000)}}
        await add(connection, Action.CONFIGURATION, after=state)
    (*_, (_, _, _, _, _, after, _)) = await listed(database)
    assert after["digest"] == "d"
    assert after["options"].startswith("left out: ")


async def test_who_and_when_come_from_the_server(
    login: Login, database: Database, record: asyncpg.Connection
) -> None:
    """A user cannot take another name by a role, a setting, a text, or tables and functions of the same name."""
    dsn = await login(MONITOR, "eve")
    connection = await asyncpg.connect(dsn)
    user = await connection.fetchval("select session_user::text")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute("set session authorization quantdrift")
    await connection.execute(f"set role {MONITOR}")
    await connection.execute("set application_name = 'ada'")
    await record.execute(f"grant create on schema public to {MONITOR}")  # as releases before did
    await connection.execute("""
        create function public.sha256(bytea) returns bytea language sql as $$ select ''::bytea $$;
        create function public.clock_timestamp() returns timestamptz language sql as $$ select '2000-01-01'::timestamptz $$;
        create temporary table audit (like public.audit);
        set search_path = public, pg_temp, pg_catalog
    """)
    await connection.execute("select public.audit_add('slices fit', '', 'ada', null, null, 'by ada')")
    await connection.close()
    async with database.begin() as opened:
        (*_, last) = await entries(opened)
    assert (last.actor, last.note) == (user, "by ada")
    assert abs((datetime.now(UTC) - last.at).total_seconds()) < 600
    assert await problems(database) == []


@pytest.mark.parametrize("statement", ["update audit set note = 'x'", "delete from audit", "truncate audit"])
async def test_the_owner_is_refused_as_well(chain: asyncpg.Connection, statement: str) -> None:
    """By a trigger, also where a session pretends to be a replica; only who removes it can go on."""
    await chain.execute("set session_replication_role = replica")
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="never changed or deleted"):
        await chain.execute(statement)


@pytest.mark.parametrize(
    ("statement", "first", "problem"),
    [
        ("update audit set note = 'x' where seq = 4", 4, "entry 4 was changed"),
        ("update audit set actor = 'ada' where seq = 2", 2, "entry 2 was changed"),
        ("update audit set at = at + interval '1 microsecond' where seq = 3", 3, "entry 3 was changed"),
        ("update audit set after = null where seq = 6", 6, "entry 6 was changed"),
        ("update audit set before = null where seq = 5", 5, "entry 5 was changed"),
        ("update audit set hash = sha256('') where seq = 4", 4, "entry 4 was changed"),
        ("delete from audit where seq = 4", 4, "entry 4 is missing"),
        ("delete from audit where seq in (1, 2)", 1, "entries 1 to 2 are missing"),
        ("delete from audit where seq = 4; update audit set seq = seq - 1 where seq > 4", 4, "entry 4 was changed"),
        ("with one as (update audit set seq = -seq where seq in (3, 4) returning 1) select count(*) from one; update audit set seq = 7 + seq where seq < 0", 3, "entry 3 was changed"),
        ("insert into audit select 7, at, actor, action, model, subject, before, after, note, hash from audit where seq = 6", 7, "entry 7 was changed"),
        ("insert into audit select -7, at, actor, action, model, subject, before, after, note, hash from audit where seq = 6", -7, "numbers begin with 1"),
    ],
)  # fmt: skip
async def test_what_the_owner_changes_is_found_at_its_entry(
    chain: asyncpg.Connection, database: Database, statement: str, first: int, problem: str
) -> None:
    """With the triggers switched off: the first place that is named is the one that was touched."""
    assert await problems(database) == []
    await changed(chain, statement)
    (seq, text), *_ = await problems(database)
    assert (seq, problem in text) == (first, True), text


async def test_a_cut_tail_and_a_chain_that_was_written_again_are_found_by_a_head_kept_elsewhere(
    chain: asyncpg.Connection, database: Database
) -> None:
    """Also when new entries have taken the numbers of the removed ones."""
    async with database.begin() as connection:
        head = str((await verify(connection)).head)
    assert head.startswith("6:")
    assert await problems(database, head) == []
    await changed(chain, "delete from audit where seq > 4")
    assert await problems(database) == []
    assert await problems(database, head) == [(5, "entries 5 to 6 are missing")]
    for _ in range(3):
        async with database.begin() as connection:
            await add(connection, Action.RESUME)
    assert await problems(database) == []
    ((seq, text),) = await problems(database, head)
    assert (seq, "another hash than when its head was kept" in text) == (6, True)
    with pytest.raises(OperatorError, match="is not a head of the audit"):
        ChainHead.parse("6:xyz")


async def test_concurrent_writers_keep_the_chain(postgres_dsn: str, database: Database) -> None:
    """Each waits for the transaction before, sees its entry, and leaves no gap when one is rolled back."""

    async def write(number: int) -> None:
        async with Database(postgres_dsn, pool_size=1) as own:
            for turn in range(5):
                async with own.begin() as connection:
                    await add(connection, Action.PAUSE, note=f"{number} {turn}")
                    if turn == 2:
                        await connection.rollback()

    await asyncio.gather(*(write(number) for number in range(6)))
    assert await problems(database) == []
    async with database.begin() as connection:
        verified = await verify(connection)
        own_order: dict[str, list[str]] = {}
        for one in (await entries(connection))[1:]:
            writer, turn = one.note.split()
            own_order.setdefault(writer, []).append(turn)
    assert verified.n == verified.head.seq == 1 + 6 * 4
    assert list(own_order.values()) == [["0", "1", "3", "4"]] * 6


async def test_commands_write_one_entry_each_with_the_databases_user(
    login: Login, database: Database, record: asyncpg.Connection, tmp_path: Path, nats_url: str
) -> None:
    """Whatever the environment says of the user; the person's reason is a note."""
    await a_discovered_slice(database, record)
    dsn = await login(OPERATOR, "anna")
    anna = dsn.partition("//")[2].partition(":")[0]
    config = f'[stream]\nurl = "{nats_url}"\nname = "t-{secrets.token_hex(6)}"\n{FILE}'
    for arguments in (
        ("slices", "retire", "2", "--reason", "a load test"),
        ("slices", "restore", "2"),
        ("pause", "--reason", "\x1b[31mred"),
        ("resume", "--reason", "done"),
    ):
        code, _, err = await quantdrift(dsn, tmp_path, *arguments, config=config)
        assert code == 0, err
        assert "warning" not in err
    assert [one[:4] for one in await listed(database)][1:] == [
        (anna, "slices retire", "digits", "slice 2"),
        (anna, "slices restore", "digits", "slice 2"),
        (anna, "pause", "", ""),
        (anna, "resume", "", ""),
    ]
    *_, retired, restored, paused, resumed = await listed(database)
    assert retired[4:] == ({"status": "confirmed"}, {"status": "retired"}, "a load test")
    assert restored[4:] == ({"status": "retired"}, {"status": "confirmed"}, "")
    assert paused[5]["everything"]["by"] == anna
    assert (resumed[4], resumed[5]) == (paused[5], {"everything": None, "models": {}})
    async with database.begin() as connection:
        assert await newest(connection, [Action.SETUP_POSTGRES]) is not None
    code, out, _ = await quantdrift(dsn, tmp_path, "audit", "list", "--by", anna)
    assert (code, out.count(anna) >= 4, "\x1b" in out) == (0, True, False)
    code, out, _ = await quantdrift(dsn, tmp_path, "audit", "list", "--action", "slices retire", "--json")
    assert [one["note"] for one in json.loads(out)] == ["a load test"]
    code, out, _ = await quantdrift(dsn, tmp_path, "audit", "list", "--since", "2999-01-01")
    assert (code, out) == (0, "There are no such entries.\n")


async def test_an_action_whose_entry_cannot_be_written_does_not_happen(
    login: Login, database: Database, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """The command says which right is missing, and the slice stays as it was."""
    await a_discovered_slice(database, record)
    dsn = await login(MONITOR)
    await record.execute(f"revoke execute on function audit_add from {MONITOR}")
    code, _, err = await quantdrift(dsn, tmp_path, "slices", "retire", "2")
    assert (code, "permission denied for function audit_add" in err) == (2, True), err
    assert await record.fetchval("select status from discovery") == "confirmed"
    assert await record.fetchval("select count(*) from discovery_change where status = 'retired'") == 0


async def test_verify_says_what_is_wrong_with_an_exit_code(
    chain: asyncpg.Connection, postgres_dsn: str, tmp_path: Path
) -> None:
    """A reader may verify; the printed head is what the next call takes."""
    code, out, err = await quantdrift(postgres_dsn, tmp_path, "audit", "verify")
    assert code == 0, err
    head = out.splitlines()[-1]
    assert out.startswith("6 entries, none changed or missing")
    assert (await quantdrift(postgres_dsn, tmp_path, "audit", "verify", "--from-head", head))[0] == 0
    await changed(chain, "update audit set actor = 'ada' where seq = 3")
    code, out, err = await quantdrift(postgres_dsn, tmp_path, "audit", "verify")
    assert (code, "entry 3 was changed" in out, "from entry 3 on" in err) == (2, True, True)
    code, out, _ = await quantdrift(postgres_dsn, tmp_path, "audit", "verify", "--json")
    assert (code, json.loads(out)["findings"][0]["seq"]) == (2, 3)


@pytest.mark.parametrize("role", [READER, REPORT])
async def test_readers_can_list_and_verify(login: Login, tmp_path: Path, role: str) -> None:
    """An auditor needs no right to change anything."""
    dsn = await login(role)
    for command in ("list", "verify"):
        code, _, err = await quantdrift(dsn, tmp_path, "audit", command)
        assert code == 0, err
    code, _, err = await quantdrift(await login(SHADOW), tmp_path, "audit", "verify")
    assert (code, "permission denied" in err) == (2, True)


def auditor(database: Database, config: Config, sent: list[LogRecord], clock: Clock | None = None) -> Auditor:
    """Return what the leading monitor runs."""

    def publish(record: LogRecord) -> str:
        sent.append(record)
        return ""

    return Auditor(
        config=config,
        database=database,
        clock=clock or SystemClock(),
        stop=Stop(),
        leads=lambda: True,
        fence=unfenced,
        publish=publish,
    )


async def test_a_pause_without_postgres_gets_its_entry_from_the_monitor(
    database: Database, tmp_path: Path, nats_url: str
) -> None:
    """It takes effect at once; the entry says what was seen, and that the name in it is the command's word."""
    name = f"t-{secrets.token_hex(6)}"
    config = f'[stream]\nurl = "{nats_url}"\nname = "{name}"\n{FILE}'
    away = "postgresql://u:canary@127.0.0.1:1/x"
    code, out, err = await quantdrift(away, tmp_path, "pause", "--reason", "fire", config=config)
    assert (code, "everything" in out) == (0, True), err
    assert "writes no entry into the audit" in err
    assert "canary" not in err
    stream = Stream(url=nats_url, name=name)
    watch = auditor(database, Config(stream=stream), [])
    queue = await Queue.connect(stream, client_name="test")
    found = await KeyValue(queue, stream, purpose=KEY).get(KEY)
    await queue.close()
    assert found is not None
    await watch.look(found)
    assert len(await listed(database)) == 0  # its command may be about to commit
    for _ in range(3):
        await watch.look(found)
    again = auditor(database, Config(stream=stream), [])  # as after a restart, or another leader
    for _ in range(3):
        await again.look(found)
    (seen,) = await listed(database)
    assert seen[:4] == ("quantdrift", "pause seen", "", "revision 1")
    assert seen[5]["everything"]["by"] == "NATS user quantdrift"
    assert seen[5]["everything"]["reason"] == "fire"


async def test_a_pause_that_nats_refuses_leaves_no_entry(
    database: Database, postgres_dsn: str, tmp_path: Path, nats_url: str
) -> None:
    """The entry is part of a transaction that ends after NATS has stored the pause."""
    name = f"t-{secrets.token_hex(6)}"
    stream = Stream(url=nats_url, name=name)
    queue = await Queue.connect(stream, client_name="test")
    bucket = KeyValue(queue, stream, purpose=KEY)
    for n_bytes in (60_000, 10):
        with contextlib.suppress(RetryError):  # until there is no room
            for number in range(1000):
                await bucket.put(f"filler-{n_bytes}-{number}", b"x" * n_bytes)
    await queue.close()
    config = f'[stream]\nurl = "{nats_url}"\nname = "{name}"\n{FILE}'
    code, _, err = await quantdrift(postgres_dsn, tmp_path, "pause", config=config)
    assert (code, "try again" in err, "warning" in err) == (1, True, False), err
    assert await listed(database) == []


async def test_a_pause_that_borrows_the_entry_of_another_one_is_seen(database: Database) -> None:
    """Who writes to NATS alone cannot name an entry that belongs to something else, nor an old one."""
    watch = auditor(database, Config(), [])
    order = Order(by="anna", at=datetime(2026, 1, 1, tzinfo=UTC))
    paused = Pause(everything=order)
    async with database.begin() as connection:
        first = await add(connection, Action.RESUME, after=Pause().state())
        second = await add(connection, Action.PAUSE, before=Pause().state(), after=paused.state())
    states = [
        (msgspec.structs.replace(paused, audit=second), 0),  # the honest one
        (Pause(audit=first), 1),  # an old entry of the same state
        (Pause(everything=order, models={"digits": order}, audit=second), 2),  # another state
        (msgspec.structs.replace(paused, audit=second), 3),  # back to what an old entry said
    ]
    for revision, (pause, n_seen) in enumerate(states, 1):
        for _ in range(2):
            await watch.look(BucketEntry(value=encode(pause), revision=revision))
        assert [one[1] for one in await listed(database)].count("pause seen") == n_seen
    for _ in range(2):
        await watch.look(BucketEntry(value=b"what an attacker wrote", revision=9))
    assert (await listed(database))[-1][5] == {"unreadable_bytes": 22}


async def test_the_monitor_adds_its_configuration_once_and_says_what_changed(database: Database) -> None:
    """A monitor with the same options adds nothing; the digest and the changed options are named, no secret is."""
    first = Config(models=(Model(name="digits"),), stream=Stream(url="nats://u:canary@h:1"))
    for config in (first, first, msgspec.structs.replace(first, models=(Model(name="digits", share=0.5),))):
        await auditor(database, config, []).record_config()
    one, other = await listed(database)
    assert one[1:5] == ("configuration", "", "monitor", None)
    assert other[5]["changed"] == ["models.digits.share"]
    assert other[4] == {"digest": one[5]["digest"], "options": {}}
    assert "canary" not in json.dumps([one[5], other[5]])


def report_of(source: str, sequence: int, rate: float, pause: Pause | None = None) -> Tally:
    """Return a tally of a sidecar that says its configuration and its pause."""
    config = Config(sampling=SamplingOptions(rate=rate), stream=Stream(url="nats://u:canary@h:1"))
    return Tally(
        source=source,
        boot="b" * 32,
        sequence=sequence,
        at=datetime(2099, 1, 1, tzinfo=UTC),  # its clock is wrong: that of the stream counts
        strata=(),
        blind_connections=0,
        state=StateReports(lambda: config, lambda: pause or Pause()).take(),
    )


async def test_a_sidecar_that_changes_or_pauses_by_itself_gets_its_entries_from_the_monitor(
    login: Login, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """The shadow stores what its tallies say, and has no right to the audit; the monitor writes what changed, by what process."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    paused = Pause(everything=Order(by="the admin port", at=at))
    told = [
        (report_of("pod-1", 1, 0.1), 1),
        (report_of("pod-1", 2, 0.1), 1),  # nothing has changed
        (report_of("pod-2", 1, 0.1), 1),  # another pod of the same deployment
        (report_of("pod-1", 3, 0.2, paused), 3),
        (report_of("pod-1", 4, 0.2), 4),  # goes on
        (report_of("pod-3", 1, 0.3), 5),  # a new pod with a new configuration
        (msgspec.structs.replace(report_of("pod-1", 5, 0.9), state=None), 5),  # an old release
    ]
    dsns = await login(SHADOW), await login(MONITOR)
    async with Database(dsns[0]) as shadow, Database(dsns[1]) as monitor:
        writer, watch = Writer(shadow, SystemClock()), auditor(monitor, Config(), [])
        for second, (tally, n_entries) in enumerate(told):
            wire = read_tally(encode_record(tally))
            await writer.store_tallies("w", [wire], [at + timedelta(seconds=second)])
            for _ in range(2):
                await watch.record_reports()
            assert len(await listed(database)) == n_entries + 1, second  # and that of `setup postgres`
        # One that comes late, after a newer one.
        await writer.store_tallies("w", [told[0][0]], [at])
        await watch.record_reports()
    (_, first, changed, began, ended, new) = await listed(database)
    user = dsns[0].partition("//")[2].partition(":")[0]
    assert first[1:5] == ("configuration", "", "sidecar pod-1", None)
    assert first[6] == f"no person is known: reported by the process itself, stored by {user}"
    assert first[5]["options"] == {"sampling.rate": 0.1, "stream.url": "nats://(not shown)"}
    assert changed[5] == {
        "digest": changed[5]["digest"],
        "changed": ["sampling.rate"],
        "options": {"sampling.rate": 0.2},
    }
    assert changed[4] == {"digest": first[5]["digest"], "options": {"sampling.rate": 0.1}}
    assert (began[1], began[3], began[4], began[5]["everything"]["by"]) == (
        "pause local",
        "sidecar pod-1",
        None,
        "the admin port",
    )
    assert (ended[1], ended[4], ended[5]) == ("pause local", began[5], None)
    assert (new[3], new[5]["compared_with"], new[5]["options"]) == (
        "sidecar pod-3",
        "sidecar pod-1",
        {"sampling.rate": 0.3},
    )
    assert "canary" not in str(await listed(database))
    assert "do not reach the audit" not in caplog.text


async def test_a_sidecar_that_changes_all_the_time_does_not_fill_the_audit(database: Database) -> None:
    """So many entries in an hour, of the newest states; the next hour goes on."""
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    writer, watch = Writer(database, clock), auditor(database, Config(), [], clock)
    for round_ in range(MOST_REPORTED // 20 + 2):
        tallies = [
            report_of(f"pod-{number}", round_, 0.001 * (20 * round_ + number + 1)) for number in range(20)
        ]
        clock.advance(1)
        await writer.store_tallies("w", tallies)
        await watch.record_reports()
    assert len(await listed(database)) == MOST_REPORTED
    clock.advance(3600)
    await watch.record_reports()
    assert len(await listed(database)) == MOST_REPORTED + 20


async def test_one_sidecar_that_changes_all_the_time_does_not_delay_the_others(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets so many entries in an hour and one warning; another one gets its entry at once, and the newest state follows."""
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    writer, watch = Writer(database, clock), auditor(database, Config(), [], clock)
    for sequence in range(1, MOST_OF_ONE + 6):
        clock.advance(1)
        await writer.store_tallies("w", [report_of("restless", sequence, 0.01 * sequence)])
        await watch.record_reports()
    assert len(await listed(database)) == MOST_OF_ONE
    assert caplog.text.count("sidecar restless has reported 20 changes") == 1
    await writer.store_tallies("w", [report_of("calm", 1, 0.9)])
    await watch.record_reports()
    assert (await listed(database))[-1][3] == "sidecar calm"
    clock.advance(3600)
    await watch.record_reports()
    newest_entry = (await listed(database))[-1]
    assert (newest_entry[3], newest_entry[5]["options"]) == (
        "sidecar restless",
        {"sampling.rate": 0.01 * (MOST_OF_ONE + 5)},
    )
    assert len(await listed(database)) == MOST_OF_ONE + 2


async def test_counts_are_stored_where_the_shadow_may_not_report(
    login: Login, record: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """After an upgrade whose `setup postgres` nobody has run yet: one warning, and the account stays true."""
    dsn = await login(SHADOW)
    await record.execute(f"revoke all on process_report from {SHADOW}")
    stratum = StratumCount(stratum="default", offered=1, taken=1, thinned=0, published=1)
    async with Database(dsn) as shadow:
        writer = Writer(shadow, SystemClock())
        for sequence in (1, 2):
            tally = msgspec.structs.replace(report_of("pod", sequence, 0.1), strata=(stratum,))
            assert (await writer.store_tallies("w", [tally])).n_rows == 1
    assert caplog.text.count("do not reach the audit") == 1


async def test_the_head_goes_to_the_collector_and_says_when_the_chain_is_broken(
    chain: asyncpg.Connection, database: Database
) -> None:
    """So that an owner who writes the history again is found by the collector's copy."""
    sent: list[LogRecord] = []
    watch = auditor(database, Config(), sent)
    head = str((await watch.publish_head()).head)
    await changed(chain, "update audit set note = '' where seq = 2")
    await watch.publish_head()
    assert [(one.event_name, one.severity_text) for one in sent] == [
        ("quantdrift.audit.head", "INFO"),
        ("quantdrift.audit.head", "ERROR"),
    ]
    assert [one.attributes for one in sent] == [
        {"quantdrift.head": head, "quantdrift.n": 6, "quantdrift.intact": intact} for intact in (True, False)
    ]


async def test_an_upgrade_that_was_interrupted_before_its_entry_adds_it_later(
    postgres_dsn: str, chain: asyncpg.Connection, database: Database
) -> None:
    """One entry for each new revision of the schema, however often the command runs."""
    from quantdrift.storage.admin.migrate import head, upgrade

    for _ in range(2):
        await upgrade(postgres_dsn, progress=lambda _: None)
    assert len(await listed(database)) == 5
    await changed(chain, "delete from audit")
    for _ in range(2):
        await upgrade(postgres_dsn, progress=lambda _: None)
    async with database.begin() as connection:
        (only,) = await entries(connection)
    assert (only.action, only.before, only.after) == ("db upgrade", None, {"revision": head()})
