"""`quantdrift stream drop` on real servers: what it drops, what it says, and what the counts are afterwards."""

import asyncio
import json
import secrets
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import Stream
from quantdrift.core.records import ModelCount, StratumCount, Tally
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.numbering import Numbered
from quantdrift.storage.account.expiries import count_expired
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from tests.support.commands import invoked

pytestmark = pytest.mark.integration

BOOT = "f" * 32


@pytest.fixture
def stream(nats_url: str, tmp_path: Path) -> Stream:
    """Return a stream of this test's own, with models `wines` and `grapes` in the configuration of its folder."""
    name = f"t-{secrets.token_hex(6)}"
    (tmp_path / "config.toml").write_text(
        f'[stream]\nname = "{name}"\nurl = "{nats_url}"\n[[models]]\nname = "wines"\n[[models]]\nname = "grapes"\n'
    )
    return Stream(url=nats_url, name=name)


def _publish(stream: Stream, **n: int) -> None:
    """Publish numbered exchanges of some models."""

    async def run() -> None:
        queue = await Queue.connect(stream, client_name="test")
        for row, (model, count) in enumerate(n.items()):
            for number in range(1, count + 1):
                numbered = Numbered(boot=BOOT, row=row, number=number)
                await queue.publish_exchange(model, f"{model}-{number}", b"payload", numbered)
        await queue.close()

    asyncio.run(run())


def _waiting(stream: Stream) -> dict[str, int]:
    async def run() -> dict[str, int]:
        queue = await Queue.connect(stream, client_name="test")
        try:
            return (await read_backlog(queue)).by_model
        finally:
            await queue.close()

    return asyncio.run(run())


def _count(dsn: str, **n: int) -> None:
    """Store the tally of what was published, and count what has left the stream unread, as a shadow worker does."""

    async def run() -> None:
        models = {
            model: ModelCount(taken=count, published=count, row=row, numbered=count)
            for row, (model, count) in enumerate(n.items())
        }
        total = sum(n.values())
        counts = StratumCount(
            stratum="default", offered=total, taken=total, thinned=0, published=total, lost={}, models=models
        )
        now = datetime.now(UTC)
        tally = Tally(source="pod", boot=BOOT, sequence=1, at=now, strata=(counts,), blind_connections=0)
        async with Database(dsn) as database:
            await Writer(database, SystemClock()).store_tallies("w", [tally], [now])
            await count_expired(database, "w", datetime.now(UTC))

    asyncio.run(run())


def test_what_waits_of_a_model_is_dropped_counted_and_audited(
    postgres_dsn: str, stream: Stream, tmp_path: Path
) -> None:
    """The other model keeps what waits; the account has it as left unread, and status says that a person dropped it."""
    _publish(stream, wines=3, grapes=2)
    command = ("stream", "drop", "--model", "wines", "--yes", "--reason", "load test", "--json")
    done = invoked(*command, directory=tmp_path, QUANTDRIFT_DSN=postgres_dsn)
    assert json.loads(done.stdout) == {"dropped": {"wines": 3}, "audited": True}
    assert _waiting(stream) == {"grapes": 2}

    async def entries() -> list[tuple[str, str, str, str]]:
        db = await asyncpg.connect(postgres_dsn)
        try:
            return [
                tuple(row)
                for row in await db.fetch(
                    "select action, model, after::text, note from audit where action like 'stream%'"
                )
            ]
        finally:
            await db.close()

    assert asyncio.run(entries()) == [("stream drop", "wines", '{"n": 3}', "load test")]
    _count(postgres_dsn, wines=3)
    shown = json.loads(invoked("status", "--json", directory=tmp_path, QUANTDRIFT_DSN=postgres_dsn).stdout)
    (wines,) = [model for model in shown["models"] if model["model"] == "wines"]
    assert (wines["steps"]["dropped"]["total"], wines["steps"]["expired"]["total"]) == (3, 0)
    assert (wines["account"]["expired"], wines["account"]["in_stream"], wines["not_accounted_for"]) == (
        3,
        0,
        0,
    )
    text = invoked("status", directory=tmp_path, QUANTDRIFT_DSN=postgres_dsn).stdout
    assert "lost: dropped from the stream" in text
    assert "expired in the stream before" not in text


def test_nothing_is_dropped_before_somebody_says_yes(
    postgres_dsn: str, stream: Stream, tmp_path: Path
) -> None:
    """Without an answer it ends; an unknown model is refused with the nearest name; with nothing waiting it says so."""
    variables = {"QUANTDRIFT_DSN": postgres_dsn}
    assert invoked("stream", "drop", directory=tmp_path, **variables).stdout == (
        "Nothing waits in the stream: nothing was dropped.\n"
    )
    _publish(stream, wines=3)
    asked = invoked("stream", "drop", directory=tmp_path, **variables)
    assert asked.returncode == 1
    assert "Drop 3 exchanges (3 of `wines`), the oldest of which waits for" in asked.stdout
    refused = invoked("stream", "drop", "--model", "wine", "--yes", directory=tmp_path, **variables)
    assert (refused.returncode, "nothing of a model `wine` waits" in refused.stderr) == (2, True)
    assert _waiting(stream) == {"wines": 3}
