"""Samples that are not lost at random: 90 % of a small slice, all its changed answers among them, 3.6 % of its stratum."""

from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import aiohttp
import asyncpg
import msgspec
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.records import (
    BodyStratum,
    HeaderStratum,
    Loss,
    ModelCount,
    Policy,
    Predicate,
    StratumCount,
    Tally,
    Verdict,
)
from quantdrift.monitor.fold.fold import Fold
from quantdrift.show.page.server import page_port
from quantdrift.storage.account.flow import flow
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from quantdrift.storage.fold.circumstances import read_share_hours
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

pytestmark = pytest.mark.integration

MODEL, ALL_ID, SMALL_ID, VERSION_ID = "digits", 1, 2, 1
CONFIG: Final = Config(models=(Model(name=MODEL),))
PER_HOUR, OF_SLICE = 7_000, 280
N_LOST = OF_SLICE * 9 // 10
BATCH = 1_000
POLICY = Policy(
    epoch="e1",
    header_strata=(HeaderStratum(name="default", rate=1.0),),
    body_strata=(BodyStratum(name="default", rate=1.0),),
)


class Watched:
    """A record, and a monitor that folds it."""

    def __init__(self, database: Database, record: asyncpg.Connection) -> None:
        self._database, self._record = database, record
        self._n = 0
        self._fold: Fold | None = None

    async def begin(self, first: datetime) -> None:
        """Store versions, slices and the policy."""
        execute = self._record.execute
        await make_partitions(self._record, [(first + timedelta(hours=h)).date() for h in range(5)])
        await execute(
            "insert into policy (id, epoch, definition) overriding system value values (1, 'e1', $1)",
            msgspec.json.encode(POLICY).decode(),
        )
        await execute(
            "insert into model_version (id, model, candidate_version, reference_digest, first_seen_at)"
            " overriding system value values ($1, $2, '1', $3, $4)",
            VERSION_ID,
            MODEL,
            "d" * 64,
            first,
        )
        where = (Predicate(key="header.x-scanner", equals="small"),)
        for number, name, predicate, of in (
            (ALL_ID, "all", "true", ()),
            (SMALL_ID, "scanner=small", 'header.x-scanner = "small"', where),
        ):
            await execute(
                "insert into slice (id, model, predicate, name, definition) overriding system value values ($1, $2, $3, $4, $5)",
                number,
                MODEL,
                predicate,
                name,
                msgspec.json.encode({"where": of}).decode(),
            )

    async def compare(
        self, begin: datetime, end: datetime, *, n: int, n_small: int, differs: bool = False
    ) -> None:
        """Store comparisons, evenly over a time; those of the small slice come evenly among them, and may all differ."""
        for first in range(0, n, BATCH):
            times = [begin + (end - begin) * k / n for k in range(first, min(first + BATCH, n))]
            batch = await self._record.fetchval(
                "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows)"
                " values ('comparison', 'w', $1, $2, $1, $3) returning id",
                times[-1],
                times[0],
                len(times),
            )
            rows = []
            for at in times:
                self._n += 1
                place = self._n % n
                small = place * n_small // n != (place + 1) * n_small // n
                rows.append(
                    Comparison(
                        captured_at=at,
                        exchange_id=UUID(int=self._n),
                        batch_id=batch,
                        model_version_id=VERSION_ID,
                        slice_ids=(ALL_ID, SMALL_ID) if small else (ALL_ID,),
                        flip=small and differs,
                        divergence=float(small and differs),
                    )
                )
            await store_comparisons(self._record, rows)

    async def count(self, taken: int, lost: int, at: datetime, *, sequence: int) -> None:
        """Store a sidecar's counts since its start."""
        reasons = {Loss.PUBLISH: lost}
        stratum = StratumCount(
            stratum="default",
            offered=taken,
            taken=taken,
            thinned=0,
            published=taken - lost,
            lost=reasons,
            models={MODEL: ModelCount(taken=taken, published=taken - lost, lost=reasons)},
        )
        tally = Tally(
            source="pod", boot="f" * 32, sequence=sequence, at=at, strata=(stratum,), blind_connections=0
        )
        await Writer(self._database, SystemClock()).store_tallies("w", [tally])

    def missing(self) -> str:
        """Return why samples of the small slice may be missing."""
        assert self._fold is not None
        return self._fold.state.missing.reason(MODEL, SMALL_ID)

    async def fold(self) -> dict[int, tuple[Verdict, str]]:
        """Fold what is new, ask for the shares in the next turn, and return the stored verdicts by slice."""
        for _ in range(2):
            async with self._database.begin() as connection:
                fold = self._fold = self._fold or Fold(CONFIG, await resume(connection))
                batches = await claim(connection, fold.position.fold_seq, 1000)
                fold.learn(await load_catalog(connection))
                fold.note_shares(await read_share_hours(connection, fold.share_question()))
                for batch in batches:
                    fold.batch(batch)
                await write(connection, fold.take(), "")
        stored = await self._record.fetch("select slice_id, verdict, reason from verdict")
        return {row["slice_id"]: (Verdict(row["verdict"]), row["reason"]) for row in stored}


@pytest.fixture
async def watched(database: Database, record: asyncpg.Connection) -> Watched:
    """Return a record of three hours, the last one up to now; in the last one 90 % of the slice are lost."""
    found, verdicts = await three_hours(database, record)
    assert {verdict for verdict, _ in verdicts.values()} == {Verdict.OK}
    return found


async def three_hours(
    database: Database, record: asyncpg.Connection, *, differs: bool = False
) -> tuple[Watched, dict[int, tuple[Verdict, str]]]:
    """Return the same with its verdicts before the last hour; the answers of the small slice may differ all the time."""
    now = datetime.now(UTC)
    hour = now.replace(minute=0, second=0, microsecond=0)
    found = Watched(database, record)
    await found.begin(hour - timedelta(hours=3))
    for before in (3, 2):
        begin = hour - timedelta(hours=before)
        await found.compare(begin, begin + timedelta(hours=1), n=PER_HOUR, n_small=OF_SLICE, differs=differs)
    await found.count(2 * PER_HOUR, 0, hour - timedelta(hours=1), sequence=1)
    verdicts = await found.fold()
    await found.compare(
        hour - timedelta(hours=1), now, n=PER_HOUR - N_LOST, n_small=OF_SLICE - N_LOST, differs=differs
    )
    return found, verdicts


async def shown(database: Database, dsn: str) -> str:
    """Return the live page of the slice, as the server sends it."""
    port = page_port(CONFIG, Secrets(dsn=dsn), database)
    number = await port.open(("127.0.0.1", 0))
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{number}/slice/{VERSION_ID}/{SMALL_ID}") as answer,
        ):
            assert answer.status == 200
            return await answer.text()
    finally:
        await port.close()


async def test_a_slice_that_loses_nine_tenths_is_unknown_although_its_stratum_loses_little(
    watched: Watched, database: Database, postgres_dsn: str
) -> None:
    """Its verdict, the page and `status` say what is missing; all traffic stays ok."""
    now = datetime.now(UTC)
    await watched.count(3 * PER_HOUR, N_LOST, now, sequence=2)
    verdicts = await watched.fold()
    assert verdicts[ALL_ID][0] is Verdict.OK
    verdict, reason = verdicts[SMALL_ID]
    assert verdict is Verdict.UNKNOWN
    assert reason.startswith("samples missing: its share of the samples fell from 4 % to 0.4")
    assert "while 3.6 % of all samples were lost, so up to 9" in reason
    assert "samples missing: its share of the samples fell" in await shown(database, postgres_dsn)
    async with database.begin() as connection:
        counts = await flow(connection, now - timedelta(hours=2), max_share=0.05)
    of_model = next(of for of in counts.models.values() if of.model == MODEL)
    assert (of_model.n_lossy, of_model.loss) == (1, reason)


async def test_missing_samples_do_not_hide_an_alert(database: Database, record: asyncpg.Connection) -> None:
    """A slice that fires and then loses nine tenths of its samples goes on firing, and says why it paged."""
    watched, before = await three_hours(database, record, differs=True)
    assert before[SMALL_ID][0] is Verdict.FIRING
    await watched.count(3 * PER_HOUR, N_LOST, datetime.now(UTC), sequence=2)
    verdict, reason = (await watched.fold())[SMALL_ID]
    assert verdict is Verdict.FIRING
    assert reason == before[SMALL_ID][1]
    assert watched.missing().startswith("samples missing")


@pytest.mark.release
async def test_a_share_that_falls_without_losses_is_a_change_of_the_mix(watched: Watched) -> None:
    """The same samples, and nothing is missing: the slice has less traffic, and what is compared of it says what it says."""
    await watched.count(3 * PER_HOUR - N_LOST, 0, datetime.now(UTC), sequence=2)
    assert {verdict for verdict, _ in (await watched.fold()).values()} == {Verdict.OK}


@pytest.mark.release
async def test_few_losses_do_not_explain_a_fall(watched: Watched) -> None:
    """Six lost requests cannot have been 250 of the slice."""
    await watched.count(3 * PER_HOUR - N_LOST + 6, 6, datetime.now(UTC), sequence=2)
    assert {verdict for verdict, _ in (await watched.fold()).values()} == {Verdict.OK}
