"""`quantdrift status` on real servers: what it counts, what it says blocks, and how it ends."""

import asyncio
import contextlib
import json
import re
import secrets
import subprocess
import threading
import tomllib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import Stream
from quantdrift.core.process.admin import Admin
from quantdrift.core.records import Loss, ModelCount, StratumCount, Tally
from quantdrift.core.stream.backlog import read_waiting
from quantdrift.core.stream.connection import Queue
from quantdrift.storage.comparisons.rows import ConfigWarningRow
from quantdrift.storage.comparisons.writer import Writer, write_doubts
from quantdrift.storage.database import Database
from quantdrift.storage.leader import Leadership
from tests.support.commands import invoked
from tests.support.sidecar.relay_process import free_port
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

pytestmark = pytest.mark.integration


_ROLES = ("sidecar", "shadow", "monitor")


@pytest.fixture
def status(
    postgres_dsn: str, nats_url: str, tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return the command on a database and a stream of the test's own, with model `wines` configured."""
    ports = [free_port() for _ in range(3)]
    (tmp_path / "wines.onnx").touch()
    (tmp_path / "config.toml").write_text(
        f'[sidecar]\nadmin = "127.0.0.1:{ports[0]}"\n[shadow]\nadmin = "127.0.0.1:{ports[1]}"\n'
        f'[monitor]\nadmin = "127.0.0.1:{ports[2]}"\n[stream]\nname = "t-{secrets.token_hex(6)}"\n'
        '[[models]]\nname = "wines"\nbudget.latency_p99_s = 0.25\n[[models.references]]\npath = "wines.onnx"\nversions = ["*"]\n'
    )

    def called(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        given = {"QUANTDRIFT_DSN": postgres_dsn, "QUANTDRIFT__STREAM__URL": nats_url} | variables
        return invoked("status", *arguments, directory=tmp_path, **given)

    return called


async def _store(dsn: str, *counts: tuple[timedelta, StratumCount]) -> None:
    """Store tallies of one sidecar, so long ago."""
    async with Database(dsn) as database:
        writer = Writer(database, SystemClock())
        now = datetime.now(UTC)
        for sequence, (before, count) in enumerate(counts, start=1):
            tally = Tally(
                source="pod",
                boot="f" * 32,
                sequence=sequence,
                at=now - before,
                strata=(count,),
                blind_connections=0,
            )
            await writer.store_tallies("w", [tally])


async def _compare(dsn: str, n: int, *, folded: bool, before: timedelta = timedelta(minutes=5)) -> None:
    """Store comparisons of model `wines` so long ago, folded or waiting since then."""
    db = await asyncpg.connect(dsn)
    try:
        version = await db.fetchval(
            "insert into model_version (model, candidate_version, reference_digest) values ('wines', '1', 'd')"
            " on conflict (model, candidate_version, reference_digest) do update set model = 'wines' returning id"
        )
        at = datetime.now(UTC) - before
        batch = await db.fetchval(
            "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows, fold_seq, compared_model)"
            " values ('comparison', 'w', $1, $1, $1, $2, $3, 'wines') returning id",
            at,
            n,
            1 if folded else None,
        )
        await make_partitions(db, [at.date()])
        rows = [
            Comparison(
                captured_at=at,
                exchange_id=f"{batch:08d}-0000-0000-0000-{k:012d}",
                batch_id=batch,
                model_version_id=version,
                latency_s=0.5 if k == 0 else 0.1,
            )
            for k in range(n)
        ]
        await store_comparisons(db, rows)
        if folded:
            await db.execute("insert into fold (id, fold_seq, mass, n_detectors) values (1, 1, 0, 0)")
    finally:
        await db.close()


def _count(offered: int, **models: ModelCount) -> StratumCount:
    lost = {Loss.UNKNOWN_MODEL: n} if (n := sum(one.unknown for one in models.values())) else {}
    taken = sum(one.taken + one.unknown for one in models.values())
    return StratumCount(
        stratum="default", offered=offered, taken=taken, thinned=0, published=taken, lost=lost, models=models
    )


def _options(directory: Path) -> dict[str, Any]:
    return tomllib.loads((directory / "config.toml").read_text())


@contextlib.contextmanager
def _beside(work: Callable[[], contextlib.AbstractAsyncContextManager[None]]) -> Iterator[None]:
    """Enter `work` on an event loop in another thread: commands run outside of any loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(step: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(step, loop).result()

    entered = work()
    try:
        call(entered.__aenter__())
        try:
            yield
        finally:
            call(entered.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.asynccontextmanager
async def _answering(directory: Path) -> AsyncIterator[None]:
    """Open the admin port of each role, whose process is ready."""
    addresses = {role: _options(directory)[role]["admin"] for role in _ROLES}
    ports = [Admin(f"{role}.admin", address, lambda: True) for role, address in addresses.items()]
    for port in ports:
        await port.start()
    yield
    for port in ports:
        await port.stop()


@contextlib.asynccontextmanager
async def _working(directory: Path, dsn: str, nats_url: str) -> AsyncIterator[None]:
    """Lead as a monitor does, and ask for exchanges of `wines` as a shadow worker does."""
    leadership = Leadership(dsn)
    stream = Stream(url=nats_url, name=_options(directory)["stream"]["name"])
    queue = await Queue.connect(stream, client_name="test")
    try:
        assert await leadership.acquire()
        consumer = await queue.consumer("exchange", ack_wait_s=60, model="wines")
        reading = asyncio.create_task(consumer.fetch(1, max_bytes=1000, timeout_s=600))
        while not (await read_waiting(queue, ["wines"]))["wines"].is_read:
            await asyncio.sleep(0.02)
        yield
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        await leadership.release()
        await queue.close()


def test_parts_that_work_and_do_not_answer_here_are_noted(
    status: Callable[..., subprocess.CompletedProcess[str]], postgres_dsn: str, nats_url: str, tmp_path: Path
) -> None:
    """Whoever leads, reads from NATS or sends counts works; where nothing shows that, the part is missing."""
    asyncio.run(_store(postgres_dsn, (timedelta(seconds=20), _count(1_500, wines=ModelCount(taken=130)))))
    asyncio.run(_compare(postgres_dsn, 28, folded=True))
    at = {role: _options(tmp_path)[role]["admin"] for role in _ROLES}
    signs = ("counts of a sidecar come", "a shadow worker reads from NATS", "a monitor leads")
    noted = [
        f"  - the {role} does not answer at {at[role]} ({role}.admin), and {sign}: it runs elsewhere, or has another address"
        for role, sign in zip(_ROLES, signs, strict=True)
    ]
    with _beside(lambda: _working(tmp_path, postgres_dsn, nats_url)):
        done = status()
    head = done.stdout.partition("\n\n")[0].splitlines()
    assert (done.returncode, head) == (0, ["Nothing blocks, but:", *noted])
    done = status()
    blocked, _, rest = done.stdout.partition("\n\nAlso:\n")
    assert (done.returncode, blocked.splitlines()) == (
        1,
        [
            "Blocked:",
            *(
                f"  - no {role} answers at {at[role]} ({role}.admin), and {sign}: start `quantdrift {role}`"
                for role, sign in (("shadow", "none reads from NATS"), ("monitor", "none leads"))
            ),
        ],
    )
    assert rest.partition("\n\n")[0].splitlines() == noted[:1]


def test_what_the_shadow_found_to_contradict_is_shown(
    status: Callable[..., subprocess.CompletedProcess[str]], postgres_dsn: str, tmp_path: Path
) -> None:
    """Of references in use alone, until a worker has checked again and found nothing."""

    async def found(digest: str, doubt: str) -> None:
        async with Database(postgres_dsn) as database, database.begin() as connection:
            row = ConfigWarningRow(
                model="wines", reference_digest=digest, option="models.output_kind", doubt=doubt
            )
            await write_doubts(connection, [row], datetime.now(UTC))

    asyncio.run(_store(postgres_dsn, (timedelta(seconds=20), _count(1_500, wines=ModelCount(taken=130)))))
    asyncio.run(_compare(postgres_dsn, 28, folded=True))
    asyncio.run(found("of another", "not in use"))
    with _beside(lambda: _answering(tmp_path)):
        assert status().stdout.startswith("Everything flows.\n")
        asyncio.run(found("d", "its outputs look like probabilities: set models.output_kind"))
        done = status()
        assert (done.returncode, done.stdout.partition("\n\n")[0].splitlines()) == (
            0,
            [
                "Nothing blocks, but:",
                "  - figures of model `wines` may mislead: its outputs look like probabilities: set models.output_kind",
            ],
        )
        asyncio.run(found("d", ""))
        assert status().stdout.startswith("Everything flows.\n")


def test_how_fast_exchanges_come_and_leave_is_measured(
    status: Callable[..., subprocess.CompletedProcess[str]], postgres_dsn: str
) -> None:
    """Over two minutes: from the counts of the sidecars, and from what was stored."""
    asyncio.run(
        _store(
            postgres_dsn,
            (timedelta(seconds=600), _count(9, wines=ModelCount(taken=9, published=9))),
            (timedelta(seconds=60), _count(9, wines=ModelCount(taken=1_000, published=1_000))),
            (timedelta(seconds=10), _count(9, wines=ModelCount(taken=3_400, published=3_400))),
        )
    )
    asyncio.run(_compare(postgres_dsn, 500, folded=False, before=timedelta(seconds=10)))
    (wines,) = json.loads(status("--json").stdout)["models"]
    rates = wines["steps"]["rates"]
    assert rates["coming"] == pytest.approx(48.0, rel=1e-3)
    assert 0 < rates["leaving"] <= 500 / 10


def test_replays_have_a_cost_where_the_device_has_a_price(
    status: Callable[..., subprocess.CompletedProcess[str]], postgres_dsn: str, tmp_path: Path
) -> None:
    """Seven seconds at 360 EUR an hour; without a price no line and no field is called a cost."""

    async def took(seconds: float) -> None:
        db = await asyncpg.connect(postgres_dsn)
        try:
            await db.execute("update batch set replay_s = $1", seconds)
        finally:
            await db.close()

    asyncio.run(_compare(postgres_dsn, 28, folded=True))
    asyncio.run(took(7.0))
    assert "cost" not in status().stdout + status("--json").stdout
    with (tmp_path / "config.toml").open("a") as file:
        file.write('[cost]\ncurrency = "EUR"\ndevice_hour = 360\n')
    (wines,) = json.loads(status("--json").stdout)["models"]
    assert (wines["replay_cost"]["value"], wines["replay_cost"]["unit"]) == (pytest.approx(0.7), "EUR")
    assert re.search(r"^  cost of replays +about 0.7 EUR", status().stdout, re.MULTILINE)


def test_everything_flows_ends_with_0(
    status: Callable[..., subprocess.CompletedProcess[str]], postgres_dsn: str, tmp_path: Path
) -> None:
    """Counts before the period are in the total alone; what was compared and folded is counted too."""
    before = _count(1_000, wines=ModelCount(taken=100))
    asyncio.run(
        _store(
            postgres_dsn,
            (timedelta(hours=2), before),
            (timedelta(seconds=20), _count(1_500, wines=ModelCount(taken=130, thinned=2))),
        )
    )
    asyncio.run(_compare(postgres_dsn, 28, folded=True))
    with _beside(lambda: _answering(tmp_path)):
        done, text = status("--json"), status().stdout
    found: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, found["blockers"], found["notes"]) == (0, [], []), done.stdout
    (wines,) = found["models"]
    steps = wines["steps"]
    assert [steps[name]["recent"] for name in ("offered", "captured", "thinned", "compared", "folded")] == [
        500,
        30,
        2,
        28,
        28,
    ]
    assert (steps["offered"]["total"], steps["captured"]["total"]) == (1_500, 130)
    assert wines["waiting"] == {"n_messages": 0, "n_delivered": 0, "is_read": False, "read_at": None}
    assert text.startswith("Everything flows.\n")
    assert re.search(r"^  captured +30 +130  +\d+ s ago$", text, re.MULTILINE)
    assert re.search(r"^  replayed and compared +28 +28 ", text, re.MULTILINE)
    assert steps["latency"] == {"n": 28, "median_s": 0.1, "p99_s": 0.5, "learned_s": None}
    assert (
        "\n  answers of the candidate: half within 0.1 s, 99 % within 0.5 s (budget 0.25 s)\n" in f"{text}\n"
    )


def test_samples_that_nothing_says_of_are_counted_by_model(
    status: Callable[..., subprocess.CompletedProcess[str]], postgres_dsn: str
) -> None:
    """What a sidecar had that is silent since, and what has left the stream with nobody having finished it."""
    wines = ModelCount(taken=100, published=60, thinned=5, lost={Loss.DECODE: 3}, row=0, numbered=61)
    count = StratumCount(
        stratum="default",
        offered=900,
        taken=110,
        thinned=5,
        published=60,
        lost={Loss.DECODE: 3, Loss.HELD_BYTES: 10},
        models={"wines": wines},
    )
    asyncio.run(_store(postgres_dsn, (timedelta(minutes=10), count)))
    found: dict[str, Any] = json.loads(status("--json").stdout)
    (of_wines,) = found["models"]
    assert of_wines["account"] == {
        "taken": 100,
        "thinned": 5,
        "lost": 3,
        "expired": 0,
        "finished": 0,
        "in_stream": 60,
        "in_sidecar": 0,
        "unaccounted": 32,
    }
    assert of_wines["strata"] == {"default": of_wines["account"]}
    assert of_wines["not_accounted_for"] == found["not_accounted_for"] == 92
    assert (found["account"]["taken"], found["account"]["lost"]) == (110, 13)
    assert re.search(r"^  not accounted for +92 *$", status().stdout, re.MULTILINE)


def test_what_blocks_is_said_first_and_ends_with_1(
    status: Callable[..., subprocess.CompletedProcess[str]], postgres_dsn: str, nats_url: str, tmp_path: Path
) -> None:
    """A misspelt model, exchanges that nobody reads, and comparisons that nobody folds."""
    count = _count(900, wines=ModelCount(taken=99), wine=ModelCount(taken=0, unknown=801))
    asyncio.run(_store(postgres_dsn, (timedelta(seconds=20), count)))
    asyncio.run(_compare(postgres_dsn, 3, folded=False))
    name = (tmp_path / "config.toml").read_text().partition('name = "')[2].partition('"')[0]

    async def publish() -> None:
        queue = await Queue.connect(Stream(url=nats_url, name=name), client_name="test")
        await queue.publish_exchange("wines", "id-1", b"payload")
        await queue.close()

    asyncio.run(publish())
    done = status()
    assert done.returncode == 1
    head = done.stdout.partition("\n\n")[0].splitlines()
    assert head == [
        "Blocked:",
        (
            "  - saw model `wine` 801 times in the last 1h, which is not configured (did you mean `wines`?); configured:"
            " `wines`. Correct models.name, or add a [[models]]"
        ),
        "  - no shadow worker reads model `wines` from the stream: 1 exchange waits. Start `quantdrift shadow`",
        (
            "  - no monitor has folded anything yet; 3 comparisons of model `wines` wait: start `quantdrift monitor`"
        ),
    ]


def test_a_pause_at_one_sidecar_blocks(
    status: Callable[..., subprocess.CompletedProcess[str]], postgres_dsn: str
) -> None:
    """With the sidecar, who, and since when; it ends with 1."""

    async def report() -> None:
        record = await asyncpg.connect(postgres_dsn)
        await record.execute(
            "insert into process_report (role, source, reported_at, digest, options, pause)"
            """ values ('sidecar', 'pod-7', now(), 'd', '{}', '{"models": {"wines": {"by": "ann", "at": "2026-11-01T10:00:00Z"}}}')"""
        )
        await record.close()

    asyncio.run(report())
    done = status()
    assert done.returncode == 1
    assert (
        "sampling is paused at sidecar pod-7 alone, by ann since 2026-11-01 10:00 UTC: `quantdrift resume --local`"
        in done.stdout
    )
    assert json.loads(status("--json").stdout)["flows"] is False


def test_parts_that_are_away_are_lines_and_no_errors(
    status: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Nothing runs: one line for each part, with its address and without a password or a traceback."""
    ports = [free_port(), free_port()]
    done = status(
        QUANTDRIFT_DSN=f"postgresql://u:secret@127.0.0.1:{ports[0]}/d",
        QUANTDRIFT__STREAM__URL=f"nats://127.0.0.1:{ports[1]}",
    )
    assert done.returncode == 1
    assert (
        f"  - Postgres at 127.0.0.1:{ports[0]} does not answer (connection refused): nothing is stored and nothing is folded\n"
        f"  - NATS at nats://127.0.0.1:{ports[1]} is not reachable: connection refused" in done.stdout
    )
    assert "no sidecar answers at 127.0.0.1:" in done.stdout
    assert "secret" not in done.stdout + done.stderr
    done = status("--data", str(tmp_path / "none"))
    assert done.stdout.splitlines()[1] == (
        f"  - no `quantdrift up` runs with the data directory {tmp_path / 'none'}: start it"
    )
    (tmp_path / "config.toml").write_text("[sidecar]\nno_such_option = 1\n")
    assert status().returncode == 2
