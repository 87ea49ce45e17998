"""A standby of the database: everything that only reads can be pointed at it."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from click.testing import CliRunner
from sqlalchemy import text

from quantdrift.cli.main import main
from quantdrift.core.config.load import Secrets, load
from quantdrift.show.page.server import page_port
from quantdrift.storage.account.flow import flow
from quantdrift.storage.database import Database
from quantdrift.storage.server.postgres import PostgresServer, find_binaries
from quantdrift.storage.server.unprivileged import choose_account
from tests.support.storage.fleet_story import CONFIG_TEXT, write_fleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
_READERS = (
    ("alerts", "list"),
    ("incidents", "list", "--all"),
    ("slices", "list", "--model", "digits"),
    ("slices", "show", "scanner=faint", "--model", "digits"),
    ("triage",),
    ("compare", "--model", "digits", "--from", "int8-1", "--to", "int8-2"),
    ("audit", "list"),
)


@pytest.fixture
def standby(postgres_server: PostgresServer, memory_path: Path) -> Iterator[PostgresServer]:
    """Return a hot standby of `postgres_server`, which holds the traffic of a fleet."""
    asyncio.run(_fill(postgres_server.dsn))
    directory = memory_path / "standby"
    directory.mkdir(mode=0o700)
    binaries = find_binaries()
    account = choose_account(postgres_server.directory, binaries.postgres)
    for path in (memory_path, directory):
        os.chown(path, account.uid, account.gid)
    command = Path(binaries.postgres).with_name("pg_basebackup")
    subprocess.run(
        [
            *account.prefix,
            *(command, "-D", directory / "data", "-R", "-X", "stream", "-c", "fast"),
            *("-d", postgres_server.dsn),
        ],
        check=True,
        cwd="/",
    )
    subprocess.run(["cp", "--archive", postgres_server.directory / "password", directory], check=True)
    with PostgresServer(directory) as server:
        yield server


async def _fill(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        async with Database(dsn) as database:
            await write_fleet(connection, database)
    finally:
        await connection.close()


def _typed(arguments: tuple[str, ...], folder: Path, dsn: str) -> str:
    """Return what a command prints."""
    ran = CliRunner(env={"QUANTDRIFT_DSN": dsn}).invoke(main, [*arguments, "-c", str(folder / "config.toml")])
    assert ran.exit_code == 0, (arguments, ran.output, ran.exception)
    return ran.output


def test_what_only_reads_takes_a_standby(
    postgres_server: PostgresServer, standby: PostgresServer, tmp_path: Path
) -> None:
    """Commands, report and page say there what they say at the primary, what the primary stores arrives, and what writes is refused."""
    (tmp_path / "config.toml").write_text(CONFIG_TEXT)
    for arguments in _READERS:
        at_primary, at_standby = (
            _typed(arguments, tmp_path, server.dsn) for server in (postgres_server, standby)
        )
        assert at_standby == at_primary
    written = _typed(("report", "--week", "--out", str(tmp_path / "report.html")), tmp_path, standby.dsn)
    assert "not recording that it was written: the database is a standby" in written
    assert "digits" in (tmp_path / "report.html").read_text()
    asyncio.run(_look(postgres_server.dsn, standby.dsn, tmp_path))
    ran = CliRunner(env={"QUANTDRIFT_DSN": standby.dsn}).invoke(
        main, ["alerts", "close", "6", "--reason", "known", "-c", str(tmp_path / "config.toml")]
    )
    assert ran.exit_code == 1
    assert "the address leads to a standby" in ran.output


async def _look(primary: str, standby: str, folder: Path) -> None:
    since = datetime.now(UTC) - timedelta(hours=1)
    async with Database(primary) as at_primary, Database(standby) as at_standby:
        async with at_primary.begin() as connection:
            found = await flow(connection, since)
            assert (found.standby_s, found.is_led) == (None, False)
        async with at_primary.begin() as connection:  # as each fold does
            await connection.execute(text("update fold set folded_at = now()"))
        while True:  # until it has arrived
            async with at_standby.begin() as connection:
                found = await flow(connection, since)
            if found.is_led:
                break
        assert found.standby_s is not None
        port = page_port(load(folder / "config.toml"), Secrets(dsn=standby), at_standby)
        number = await port.open(("127.0.0.1", 0))
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{number}") as client:
                for page in ("/", "/slice/1/1", "/incidents", "/alert/1", "/compare?model=digits", "/system"):
                    async with client.get(page) as answer:
                        shown = await answer.text()
                    assert answer.status == 200, page
        finally:
            await port.close()
    assert (
        "was read from a standby of the database, where the last change arrived less than a minute ago"
        in shown
    )
