"""An upgrade step by step: processes of the newest release on the schema of the tree, and those of the tree on a database without it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
from alembic import command
from sqlalchemy import Connection
from sqlalchemy.pool import NullPool

from deploy.released import unpack
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Stream
from quantdrift.core.stream.connection import Queue
from quantdrift.storage.admin.migrate import alembic_config, upgrade
from quantdrift.storage.database import make_engine
from tests.support.monitor.monitor_processes import until
from tests.support.shadow.onnx_models import exchange_of, inputs_of, linear_model, saved

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
[stream]
url = "{nats_url}"
name = "upgrade_order"
[shadow]
admin = "127.0.0.1:0"
threads = 1
batch_delay_s = 0.05
[monitor]
admin = "127.0.0.1:0"
[[models]]
name = "digits"
[[models.references]]
path = "linear.onnx"
versions = ["int8*"]
"""


@pytest.fixture(scope="module")
def release_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the newest release, unpacked from the wheel that its commit builds."""
    try:
        return unpack(tmp_path_factory.mktemp("release_before"))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the commit of the newest release is not here (no git, or a shallow clone): {error}")


def _environment(code: Path, dsn: str) -> dict[str, str]:
    # The code of another directory would have to compile the detectors' loops, for some few exchanges.
    return {**os.environ, "PYTHONPATH": str(code), "QUANTDRIFT_DSN": dsn, "NUMBA_DISABLE_JIT": "1"}


@asynccontextmanager
async def process(*words: str, config: Path, dsn: str, code: Path = ROOT) -> AsyncIterator[Path]:
    """Run `quantdrift WORDS` of the code in a directory; yield the file with its log. It must not end by itself."""
    log = config.parent / f"{'_'.join(words)}.log"
    with log.open("wb") as output:
        running = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "quantdrift",
            *words,
            "-c",
            str(config),
            cwd=code,
            env=_environment(code, dsn),
            stdout=output,
            stderr=output,
        )
    try:
        yield log
        assert running.returncode is None, log.read_text()
    finally:
        if running.returncode is None:
            running.terminate()
            await running.wait()


@pytest.fixture
def config(tmp_path: Path, nats_url: str) -> Path:
    """Return a configuration with one model and its reference."""
    saved(linear_model(), tmp_path / "linear.onnx")
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(nats_url=nats_url))
    return path


@pytest.fixture
def other(tmp_path: Path, config: Path) -> Path:
    """Return the same configuration in a directory of its own, so that two processes have two logs."""
    path = tmp_path / "other" / "config.toml"
    path.parent.mkdir()
    path.write_text(config.read_text())
    return path


async def _publish(nats_url: str, n: int) -> None:
    queue = await Queue.connect(Stream(url=nats_url, name="upgrade_order"), client_name="test")
    for seed in range(n):
        exchange = exchange_of(inputs_of(1, seed=seed))
        await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))
    await queue.close()


def test_revisions_of_a_release_are_never_edited(release_before: Path) -> None:
    """A database that the release made gets nothing that an edited revision would do now."""
    released = release_before / "quantdrift" / "migrations"
    for path in [*released.glob("versions/*.py"), *released.glob("initial/*.py")]:
        now = ROOT / "migrations" / path.relative_to(released)
        assert now.read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), now


async def test_processes_of_the_release_before_work_with_the_new_schema(
    release_before: Path, config: Path, nats_url: str, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Its shadow stores, its monitor folds, its commands and views answer: a roll-out may take as long as it likes."""
    await _publish(nats_url, 3)

    async def folded() -> bool:
        n_folded = (
            "select coalesce(sum(n_rows), 0) from batch where kind = 'comparison' and fold_seq is not null"
        )
        return bool(await record.fetchval(n_folded) == 3)

    async with (
        process("shadow", config=config, dsn=postgres_dsn, code=release_before) as shadow,
        process("monitor", config=config, dsn=postgres_dsn, code=release_before) as monitor,
    ):
        try:
            await until(folded, "the release before has stored and folded", 60)
        except AssertionError as error:
            raise AssertionError(f"{shadow.read_text()}\n{monitor.read_text()}") from error
    assert await record.fetchval("select count(*) from comparison") == 3
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "quantdrift", "slices", "list", "-c", str(config), "--json"],
        cwd=release_before,
        env=_environment(release_before, postgres_dsn),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert "digits" in str(json.loads(done.stdout))
    for view in ("slice_now", "slice_history", "slice_item", "coverage_hour"):
        await record.fetch(f"select * from {view} limit 1")


@pytest.mark.release
async def test_monitors_of_two_releases_never_lead_together(
    release_before: Path, config: Path, other: Path, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Whichever leads goes on leading; the other one takes over when it ends, and the term rises once for each."""
    sessions = (
        "select count(distinct pid) from pg_stat_activity"
        " where application_name = 'quantdrift leader' and datname = current_database()"
    )

    async def term_is(number: int) -> bool:
        return bool(await record.fetchval("select term from leader") == number)

    async def both() -> bool:
        return bool(await record.fetchval(sessions) == 2)

    async def stays(number: int) -> None:
        # Both have tried several times by then: each tries once in a second at least.
        await until(both, "the other monitor stands by", 60)
        tried = "select count(*) from pg_stat_activity where application_name = 'quantdrift leader' and query_start > $1"
        for _ in range(3):
            seen = await record.fetchval("select now()")

            async def tried_again(since: object = seen) -> bool:
                return bool(await record.fetchval(tried, since) >= 2)

            await until(tried_again, "both have tried again", 60)
        assert await term_is(number)

    async with process("monitor", config=other, dsn=postgres_dsn):
        async with process("monitor", config=config, dsn=postgres_dsn, code=release_before):
            # Either may be the first to lead, and only one does.
            await until(lambda: term_is(1), "one leads", 60)
            await stays(1)
            n_led = sum(
                (directory / "monitor.log").read_text().count("this monitor leads")
                for directory in (config.parent, other.parent)
            )
            assert n_led == 1
        before_leads = "this monitor leads" in (config.parent / "monitor.log").read_text()
        await until(lambda: term_is(1 + before_leads), "this release leads", 60)
        async with process("monitor", config=config, dsn=postgres_dsn, code=release_before):
            await stays(1 + before_leads)
    async with process("monitor", config=config, dsn=postgres_dsn, code=release_before):
        await until(lambda: term_is(2 + before_leads), "the release before leads", 60)
        async with process("monitor", config=other, dsn=postgres_dsn):
            await stays(2 + before_leads)
        # The release before still leads: this one waits for it.
        assert await term_is(2 + before_leads)


@pytest.mark.release
async def test_processes_of_this_release_wait_for_its_schema(
    config: Path, nats_url: str, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Shadow and monitor say what to do and wait; after `db upgrade` they work, and nothing was restarted."""

    def down(connection: Connection) -> None:
        settings = alembic_config()
        settings.attributes["connection"] = connection
        command.downgrade(settings, "base")

    engine = make_engine(postgres_dsn, settings={}, poolclass=NullPool)
    async with engine.begin() as connection:
        await connection.run_sync(down)
    await engine.dispose()
    await _publish(nats_url, 1)

    said = "the database has no schema: run `quantdrift db upgrade`"

    async def told(log: Path) -> bool:
        return said in await asyncio.to_thread(log.read_text)

    async def folded() -> bool:
        return bool(await record.fetchval("select count(*) from verdict"))

    async with (
        process("shadow", config=config, dsn=postgres_dsn) as shadow,
        process("monitor", config=config, dsn=postgres_dsn) as monitor,
    ):
        await until(lambda: told(shadow), "the shadow says what to do", 60)
        await until(lambda: told(monitor), "the monitor says what to do", 60)
        await upgrade(postgres_dsn, progress=lambda _: None)
        await until(folded, "both work", 60)
        assert "Traceback" not in shadow.read_text() + monitor.read_text()
