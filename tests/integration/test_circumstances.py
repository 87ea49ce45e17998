"""What is so now beside the batches: a pause and a quarantine make verdicts `unknown` at once, and `status` says both."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from quantdrift.core.records import Verdict
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.audit import Action, add
from quantdrift.storage.database import Database
from quantdrift.storage.fold.circumstances import read_circumstances
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from tests.support.monitor.fold_stream import CONFIG, FAINT_ID, batches, store_batch, store_catalog
from tests.support.monitor.folds import quiet

pytestmark = pytest.mark.integration
SINCE = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
ORDER = {"by": "the admin port", "at": SINCE.isoformat()}


class Monitored:
    """A record that a monitor has folded."""

    def __init__(self, database: Database, record: asyncpg.Connection) -> None:
        self._database, self._record = database, record
        self._fold: Fold | None = None

    async def verdict(self, max_share: float = 0.05) -> tuple[Verdict, str]:
        """Fold what is new, take over what is so now, and return the stored verdict on the slice."""
        async with self._database.begin() as connection:
            if self._fold is None:
                self._fold = Fold(CONFIG, await resume(connection))
            rows = await claim(connection, self._fold.position.fold_seq, 1000)
            self._fold.learn(await load_catalog(connection))
            self._fold.note(await read_circumstances(connection, max_share))
            for batch in rows:
                self._fold.batch(batch)
            await write(connection, self._fold.take(), "")
        stored = await self._record.fetchrow(
            "select verdict, reason from verdict where slice_id = $1", FAINT_ID
        )
        assert stored is not None
        return Verdict(stored["verdict"]), stored["reason"]

    async def report(self, source: str, pause: dict[str, Any] | None) -> None:
        """Store what a sidecar reports of itself."""
        await self._record.execute(
            "insert into process_report (role, source, reported_at, digest, options, pause)"
            " values ('sidecar', $1, now(), 'd', '{}', $2) on conflict (role, source) do update set pause = excluded.pause",
            source,
            None if pause is None else json.dumps(pause),
        )


@pytest.fixture
async def monitored(database: Database, record: asyncpg.Connection) -> Monitored:
    """Return a record in which the slice is ok."""
    await store_catalog(record, days=40)
    for rows in quiet(100):
        await store_batch(record, rows)
    found = Monitored(database, record)
    assert (await found.verdict())[0] is Verdict.OK
    return found


async def test_a_pause_at_the_only_sidecar_shows_at_once_and_ends_at_once(monitored: Monitored) -> None:
    """By whom and since when; nothing new was folded meanwhile."""
    await monitored.report("pod", {"everything": ORDER, "models": {}})
    assert await monitored.verdict() == (
        Verdict.UNKNOWN,
        (
            f"paused: sampling was paused at sidecar pod by the admin port since {SINCE:%Y-%m-%d %H:%M} UTC;"
            " `quantdrift resume` ends it"
        ),
    )
    await monitored.report("pod", {"models": {"another": ORDER}})
    assert (await monitored.verdict())[0] is Verdict.OK
    await monitored.report("pod", {"models": {"digits": ORDER}})
    assert (await monitored.verdict())[0] is Verdict.UNKNOWN
    await monitored.report("pod", {"models": "201 models", "sha256": "sha256:0"})
    assert "by somebody (too many models to name)" in (await monitored.verdict())[1]
    await monitored.report("pod", None)
    assert (await monitored.verdict())[0] is Verdict.OK


async def test_a_pause_of_the_fleet_shows_from_its_audit_entry(
    monitored: Monitored, database: Database
) -> None:
    """Until somebody resumes, or its time is over."""
    over = {**ORDER, "until": (SINCE + timedelta(minutes=1)).isoformat()}
    for after, expected in (
        ({"everything": {**ORDER, "by": "alice", "reason": "load test"}}, Verdict.UNKNOWN),
        ({"everything": over}, Verdict.OK),
        ({"models": {"digits": ORDER}}, Verdict.UNKNOWN),
        ({"models": {}}, Verdict.OK),
    ):
        async with database.begin() as connection:
            await add(connection, Action.PAUSE, subject="all models", after=after)
        verdict, reason = await monitored.verdict()
        assert verdict is expected, reason
        if "everything" in after and expected is Verdict.UNKNOWN:
            assert reason.startswith("paused: sampling was paused by alice since")
            assert "(load test)" in reason


async def test_a_pause_at_few_of_many_sidecars_is_none_of_the_model(monitored: Monitored) -> None:
    """As many as may lose their samples: one of thirty is, two of thirty are not."""
    for number in range(30):
        await monitored.report(f"pod-{number}", None)
    await monitored.report("pod-1", {"everything": ORDER})
    assert (await monitored.verdict())[0] is Verdict.OK
    await monitored.report("pod-2", {"everything": ORDER})
    verdict, reason = await monitored.verdict()
    assert verdict is Verdict.UNKNOWN
    assert "at 2 of 30 sidecars" in reason


async def test_what_could_not_be_compared_counts_as_lost(
    monitored: Monitored, record: asyncpg.Connection
) -> None:
    """Of this model, in the last hour; the verdict has the share and the most frequent reason."""
    insert = (
        "insert into quarantine (stream_sequence, digest, model, quarantined_at, reason, detail)"
        " select n, sha256(n::text::bytea), $1, now() - $2::interval, $3, '' from generate_series($4::int, $5::int) n"
    )
    await record.execute(insert, "other", timedelta(0), "schema", 1, 500)
    await record.execute(insert, "digits", timedelta(hours=2), "schema", 501, 1000)
    assert (await monitored.verdict())[0] is Verdict.OK
    await record.execute(insert, "digits", timedelta(minutes=5), "schema", 1001, 1060)
    await record.execute(insert, "digits", timedelta(minutes=5), "output", 1061, 1077)
    assert await monitored.verdict() == (
        Verdict.UNKNOWN,
        (
            "loss: 77 % of this model's samples of the last hour could not be compared, most of them because of `schema`; see"
            " `quantdrift status`"
        ),
    )


async def test_an_alert_stays_and_says_that_nothing_is_compared(
    database: Database, record: asyncpg.Connection
) -> None:
    """A doubt never silences; the words end with the pause, and come only once however often it is judged."""
    await store_catalog(record, days=40)
    for rows in batches(300, faint_share=0.3):
        await store_batch(record, rows)
    found = Monitored(database, record)
    verdict, before = await found.verdict()
    assert verdict is Verdict.FIRING
    await found.report("pod", {"everything": ORDER})
    for _ in range(2):
        verdict, reason = await found.verdict()
        assert verdict is Verdict.FIRING
        assert reason.startswith(
            f"{before}; nothing is compared now, because sampling was paused at sidecar pod by"
        )
        assert reason.count("paused") == 1
    await found.report("pod", None)
    assert await found.verdict() == (Verdict.FIRING, before)
