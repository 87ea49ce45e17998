"""Samples that the stream forgets before a worker is done with them: counted once, and told of."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import asyncpg
import msgspec
import pytest

from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, Reference, SamplingOptions
from quantdrift.core.errors import RetryError
from quantdrift.core.process.nats_server import NatsServer
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Exchange
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.consume import Delivery
from quantdrift.core.stream.tallies import read_tally
from quantdrift.shadow.worker import serve
from quantdrift.storage.account.coverage import Coverage
from quantdrift.storage.account.expiries import count_expired, note_numbers
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import refold, resume
from tests.support.monitor.monitor_processes import connected, until
from tests.support.shadow.numbered import Sending, sending
from tests.support.shadow.onnx_models import exchange_of, inputs_of, linear_model, saved
from tests.support.shadow.shadow_workers import DEADLINE_S, worker_config

pytestmark = pytest.mark.fault

LONG_S = 3600.0
CONFIG = """
[stream]
url = "{stream.url}"
name = "{stream.name}"
[shadow]
provider = "cpu"
threads = 1
batch_items = 8
ack_wait_s = 2.0
admin = "127.0.0.1:0"
[monitor]
min_groups = 50
admin = "127.0.0.1:0"
[[models]]
name = "slow"
references = [{{ path = "{reference}", versions = ["int8*"] }}]
[[models]]
name = "calm"
references = [{{ path = "{reference}", versions = ["int8*"] }}]
"""
N_BEFORE, N_AWAY = 60, 40
REASON = (
    "loss: 40 % of this model's samples of the last hour left the stream before they were replayed: the shadow is"
    " too slow or was away, or a person dropped them; add workers or raise stream.max_age_s"
)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers of this process count often."""
    monkeypatch.setattr("quantdrift.shadow.pipeline.tallies._COUNT_S", 0.1)


@pytest.fixture
def config(tmp_path: Path, nats_url: str) -> Config:
    """Return two models, one of which will have a gap, and limits that a test can reach."""
    path = str(saved(linear_model(), tmp_path / "linear.onnx"))
    models = [
        Model(name=name, references=(Reference(path=path, versions=("int8*",)),)) for name in ("slow", "calm")
    ]
    found = worker_config(nats_url, models, ack_wait_s=2.0)
    return msgspec.structs.replace(
        found,
        sampling=SamplingOptions(max_exchanges_per_s=1e6),
    )


def some(n: int, model: str = "slow") -> list[Exchange]:
    """Return exchanges of a model that its reference agrees with."""
    return [exchange_of(inputs_of(1, seed), model=model) for seed in range(n)]


@asynccontextmanager
async def working(config: Config, dsn: str) -> AsyncIterator[None]:
    """Run a shadow worker; see that it ends well."""
    stop = Stop()
    worker = asyncio.create_task(serve(config, Secrets(dsn=dsn), stop))
    try:
        yield
    finally:
        stop.set()
        assert await asyncio.wait_for(worker, DEADLINE_S) == 0


@asynccontextmanager
async def process(
    config: Config, dsn: str, directory: Path, role: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a role in a process of its own, which does not outlive the block."""
    path = directory / "config.toml"
    path.write_text(CONFIG.format(stream=config.stream, reference=config.models[0].references[0].path))
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "quantdrift", role, "-c", str(path), env={**os.environ, "QUANTDRIFT_DSN": dsn}
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def expire(config: Config) -> None:
    """Have everything that waits in the stream grow too old, and wait until the server has forgotten it."""
    for max_age_s in (1.0, LONG_S):
        stream = msgspec.structs.replace(config.stream, max_age_s=max_age_s)
        queue = await Queue.connect(stream, client_name="test")
        await queue.ensure()
        if max_age_s < LONG_S:
            await until(lambda queue=queue: _empty(queue), "the stream has forgotten what waited")  # type: ignore[misc]
        await queue.close()


async def _empty(queue: Queue) -> bool:
    return not (await read_backlog(queue)).n_messages


async def until_compared(record: asyncpg.Connection, n: int) -> None:
    """Wait until so many exchanges are compared."""

    async def there() -> bool:
        return bool(await record.fetchval("select count(*) >= $1 from comparison", n))

    await until(there, f"{n} exchanges are compared")


async def counted(record: asyncpg.Connection) -> dict[str, int]:
    """Return what expired, by model, as far as it is counted."""
    rows = await record.fetch("select model, sum(n)::int as n from expiry group by 1 having sum(n) <> 0")
    return {row["model"]: row["n"] for row in rows}


async def until_checked(record: asyncpg.Connection, sequence: int, n_sidecars: int = 1) -> None:
    """Wait until this tally of each sidecar, and all before, was held against what the workers are done with."""

    async def there() -> bool:
        n_told = await record.fetchval(
            "select count(distinct boot) from tally where sequence >= $1", sequence
        )
        n_due = await record.fetchval("select count(*) from arrival where due and model is not null")
        return bool(n_told >= n_sidecars and not n_due)

    await until(there, "everything is checked")


async def said(record: asyncpg.Connection) -> dict[str, tuple[str, str]]:
    """Return verdict and reason of each model's slice `all`."""
    rows = await record.fetch(
        "select s.model, v.verdict, v.reason from verdict v join slice s on s.id = v.slice_id where s.name = 'all'"
    )
    return {row["model"]: (row["verdict"], row["reason"]) for row in rows}


async def test_what_expires_while_the_shadow_is_away_makes_its_model_unknown(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """Exactly what expired is counted, of its model alone, whatever restarts; the report's counts hold it."""
    async with connected(postgres_dsn) as record, sending(config) as sidecar:
        async with working(config, postgres_dsn):
            await sidecar.send([*some(N_BEFORE), *some(N_BEFORE, "calm")])
            await until_compared(record, 2 * N_BEFORE)
            await until_checked(record, await sidecar.tally())
        assert await counted(record) == {}
        await sidecar.send(some(N_AWAY))
        await sidecar.tally()
        await expire(config)
        for _ in range(2):  # the second one finds nothing new
            async with working(config, postgres_dsn):
                await sidecar.send(some(1, "calm"))
                await until_checked(record, await sidecar.tally())
            assert await counted(record) == {"slow": N_AWAY}
        async with process(config, postgres_dsn, tmp_path, "monitor"):

            async def judged() -> bool:
                verdicts = await said(record)
                return (
                    verdicts.get("slow") == ("unknown", REASON) and verdicts.get("calm", ("", ""))[0] == "ok"
                )

            await until(judged, "what expired is judged, and the model beside it")
        async with Database(postgres_dsn) as database, database.begin() as connection:
            now = await record.fetchval("select now()")
            (stratum,), _ = await Coverage(connection).strata(
                now - timedelta(hours=1), now + timedelta(hours=1), by_stratum=True
            )
            # A monitor that is started anew, and one that folds all of it again, know the same.
            known = (await resume(connection)).expiries
            last = await record.fetchval("select max(fold_seq) from batch")
            again = [one for rows in await refold(connection, 1, last) for one in rows.expiries]
        assert stratum.models == {"slow": {"expired": N_AWAY}}
        assert stratum.compared is not None
        assert stratum.taken == stratum.lost["expired"] + stratum.compared == 2 * N_BEFORE + N_AWAY + 2
        assert list(known) == again
        assert [(one.stratum, one.model, one.n) for one in again] == [("default", "slow", N_AWAY)]
        assert await record.fetchval("select sum(n_expired) from coverage_hour") == N_AWAY


@pytest.mark.release
async def test_what_expires_while_no_worker_runs_is_seen_by_the_monitor(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """No worker comes back: the monitor stores the tallies, counts what expired, and makes its model unknown."""
    async with connected(postgres_dsn) as record, sending(config) as sidecar:
        async with working(config, postgres_dsn):
            await sidecar.send([*some(N_BEFORE), *some(N_BEFORE, "calm")])
            await until_compared(record, 2 * N_BEFORE)
            await until_checked(record, await sidecar.tally())
        await sidecar.send(some(N_AWAY))
        await sidecar.tally()
        await expire(config)
        async with process(config, postgres_dsn, tmp_path, "monitor"):

            async def judged() -> bool:
                return (await said(record)).get("slow") == ("unknown", REASON)

            await until(judged, "the monitor says what expired")
        assert await counted(record) == {"slow": N_AWAY}
        assert (await said(record))["calm"][0] == "ok"


async def test_what_expires_before_any_worker_ever_ran_is_counted(config: Config, postgres_dsn: str) -> None:
    """Of two sidecars, one of which has ended; nothing of theirs was ever fetched."""
    queue = await Queue.connect(config.stream, client_name="test")
    async with connected(postgres_dsn) as record, sending(config, "stays") as stays:
        async with sending(config, "ends") as ends:
            await asyncio.gather(*(_sent(one, 7) for one in (stays, ends)))
        await expire(config)
        assert await _empty(queue)
        async with working(config, postgres_dsn):
            await until_checked(record, 1, n_sidecars=2)
        rows = await record.fetch("select source, stratum, model, n from expiry order by source")
    await queue.close()
    assert [tuple(row) for row in rows] == [("ends", "default", "slow", 7), ("stays", "default", "slow", 7)]


async def _sent(sidecar: Sending, n: int) -> None:
    await sidecar.send(some(n))
    await sidecar.tally()


async def test_a_worker_that_is_killed_neither_doubles_nor_loses_a_count(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """Killed in the middle of its work: what was compared is compared, and all the rest has expired."""
    n_sent = 400
    async with connected(postgres_dsn) as record, sending(config) as sidecar:
        await sidecar.send(some(n_sent))
        await sidecar.tally()
        async with process(config, postgres_dsn, tmp_path, "shadow") as worker:
            await until_compared(record, 20)
            worker.kill()
        await expire(config)
        async with working(config, postgres_dsn):
            await until_checked(record, 1)
        n_compared = await record.fetchval("select count(*) from comparison")
        assert await counted(record) == ({"slow": n_sent - n_compared} if n_compared < n_sent else {})


class Stage:
    """The record and both streams, moved by hand where a worker would be too quick to be looked at.

    Parameters
    ----------
    queue, database
        As of a worker.
    """

    def __init__(self, queue: Queue, database: Database) -> None:
        self.queue = queue
        self.database = database
        self.total = 0

    async def take_tallies(self) -> int:
        """Store the tallies that have come; return how many."""
        consumer = await self.queue.consumer("tally", ack_wait_s=30)
        found = await consumer.fetch(10, max_bytes=1 << 20, timeout_s=0)
        if found:
            tallies = [read_tally(one.data) for one in found]
            writer = Writer(self.database, _Clock())
            await writer.store_tallies("w", tallies, [one.streamed_at for one in found])
        for one in found:
            await one.ack()
        return len(found)

    async def fetch(self, n: int) -> list[Delivery]:
        """Take exchanges of the model `slow` in hand."""
        found: list[Delivery] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(found) < n:
                with contextlib.suppress(RetryError):  # the server may be on its way back
                    consumer = await self.queue.consumer("exchange", ack_wait_s=30.0, model="slow")
                    found += await consumer.fetch(n - len(found), max_bytes=1 << 20, timeout_s=0.5)
                await asyncio.sleep(0.02)
        return found

    async def work_off(self) -> None:
        """Be done with everything that waits."""

        async def empty() -> bool:
            with contextlib.suppress(RetryError):
                if await _empty(self.queue):
                    return True
                consumer = await self.queue.consumer("exchange", ack_wait_s=30.0, model="slow")
                found = await consumer.fetch(10, max_bytes=1 << 20, timeout_s=0.5)
                await self.note(found)
                for one in found:
                    await one.ack()
            return False

        await until(empty, "everything is worked off")

    async def note(self, deliveries: Iterable[Delivery]) -> None:
        """Be done with exchanges, as far as the record is concerned."""
        async with self.database.begin() as connection:
            await note_numbers(connection, [one.numbered for one in deliveries if one.numbered is not None])

    async def count(self, *, at_once: int = 1) -> int:
        """Count, in several workers at once; return what has expired by now.

        The stream's own time stands in for the moment a little later at which a worker would look.
        """
        gone_until = (await read_backlog(self.queue)).gone_until
        assert gone_until is not None
        found = await asyncio.gather(
            *(count_expired(self.database, f"w{number}", gone_until) for number in range(at_once))
        )
        self.total += sum(one.n for of_worker in found for one in of_worker)
        return self.total


class _Clock:
    def now(self) -> datetime:
        raise NotImplementedError

    def monotonic_s(self) -> float:
        return 0.0


@asynccontextmanager
async def staged(config: Config, dsn: str) -> AsyncIterator[Stage]:
    """Open a stage."""
    queue = await Queue.connect(config.stream, client_name="test")
    await queue.ensure()
    try:
        async with Database(dsn) as database:
            yield Stage(queue, database)
    finally:
        await queue.close()


async def test_nothing_is_counted_while_samples_wait_or_are_in_hand(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """Whichever comes first, tally or sample, delivered once or again, through the kill of the stream's server."""
    with NatsServer(tmp_path / "nats") as server:
        config = msgspec.structs.replace(
            config, stream=msgspec.structs.replace(config.stream, url=server.url)
        )
        async with staged(config, postgres_dsn) as stage, sending(config) as sidecar:
            await sidecar.send(some(10))
            await stage.note(await _acked(stage, 4))  # before their tally
            assert await stage.count() == 0
            await sidecar.tally()
            assert await stage.take_tallies() == 1
            assert await stage.count() == 0  # six wait
            in_hand = await stage.fetch(3)
            assert await stage.count() == 0
            await stage.note(in_hand[:2])
            assert await stage.count() == 0  # stored, not acknowledged: they come again
            for one in in_hand:
                await one.nak(0)
            again = await stage.fetch(6)
            assert {one.n_delivered for one in again} == {1, 2}
            await stage.note(again)
            for one in again:
                await one.ack()
            assert await stage.count() == 0
            server.kill()  # it may have forgotten what was acknowledged last
            server.start()
            await stage.work_off()
            assert await stage.count() == 0
            await sidecar.send(some(5))
            await sidecar.tally()
            assert await stage.take_tallies() == 1
            await stage.work_off()
            await sidecar.send(some(3))
            assert await stage.count(at_once=3) == 0
            assert await stage.queue.models() == {
                "slow"
            }  # the three wait; the tallies are older than they are


async def _acked(stage: Stage, n: int) -> list[Delivery]:
    found = await stage.fetch(n)
    for one in found:
        await one.ack()
    return found


async def test_a_stored_sample_whose_acknowledgements_were_lost_is_no_poison(
    config: Config, postgres_dsn: str
) -> None:
    """Delivered too often, one was finished and one never was: the second alone is quarantined, and both count once."""
    async with (
        connected(postgres_dsn) as record,
        staged(config, postgres_dsn) as stage,
        sending(config) as sidecar,
    ):
        await sidecar.send(some(2))
        deliveries = await stage.fetch(2)
        finished = min(deliveries, key=lambda one: one.sequence)
        await stage.note([finished])
        for _ in range(config.shadow.max_deliveries):
            for one in deliveries:
                await one.nak(0)
            deliveries = await stage.fetch(2)
        for one in deliveries:
            await one.nak(0)
        async with working(config, postgres_dsn):

            async def empty() -> bool:
                return await _empty(stage.queue)

            await until(empty, "both are finished")
            await until_checked(record, await sidecar.tally())
        rows = await record.fetch("select stream_sequence, reason from quarantine")
        assert [tuple(row) for row in rows] == [(finished.sequence + 1, "poison")]
        assert await record.fetchval("select numbers::text from arrival") == "{[1,3)}"


async def test_each_expiry_counts_once_however_many_workers_count(config: Config, postgres_dsn: str) -> None:
    """Purged samples are as gone as expired ones; one that a worker had in hand meanwhile is taken back."""
    async with staged(config, postgres_dsn) as stage, sending(config) as sidecar:
        await sidecar.send(some(10))
        await sidecar.tally()
        await stage.take_tallies()
        in_hand = await stage.fetch(3)
        await expire(config)
        assert await stage.count(at_once=5) == 10
        assert await stage.count(at_once=5) == 10
        await stage.note(in_hand)
        await stage.note(in_hand)
        assert await stage.count(at_once=5) == 7
        await sidecar.send(some(6))
        await sidecar.tally()
        await stage.take_tallies()
        assert await stage.count() == 7
        client = await stage.queue.live()
        await client.jetstream().purge_stream(config.stream.name)
        assert await stage.count(at_once=5) == 13


async def test_many_gaps_are_closed_and_the_count_stays(
    config: Config, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shadow that has been too slow for days leaves a short row, and what it leaves out is not counted again."""
    monkeypatch.setattr("quantdrift.storage.account.expiries._MOST_RANGES", 3)
    async with (
        staged(config, postgres_dsn) as stage,
        sending(config) as sidecar,
        connected(postgres_dsn) as record,
    ):
        for n_expired in (10, 20):
            await sidecar.send(some(20))
            await sidecar.tally()
            await stage.take_tallies()
            await stage.note((await stage.fetch(20))[::2])
            await expire(config)
            assert await stage.count() == n_expired
            assert await stage.count() == n_expired
        assert await record.fetchval("select numbers::text from arrival") == "{[1,41)}"
