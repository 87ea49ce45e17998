"""`quantdrift backtest` and `quantdrift plan` on a record that a monitor made, as typed."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from tests.support.commands import invoked, started
from tests.support.monitor.fold_stream import batches, store_batch, store_catalog
from tests.support.monitor.monitor_processes import folded, record_of, running_monitor, stop_monitor, until

pytestmark = pytest.mark.acceptance

N_BATCHES = 100


@pytest.fixture
async def record(postgres_dsn: str, tmp_path: Path) -> AsyncIterator[asyncpg.Connection]:
    """Return a record that a monitor, killed once and started again, has folded; its configuration lies beside."""
    connection = await asyncpg.connect(postgres_dsn)
    await store_catalog(connection)
    stream = batches(N_BATCHES)

    async def all_folded() -> bool:
        return await folded(connection) == stored

    stored = 0
    for part in (stream[:40], stream[40:]):
        for rows in part:
            await store_batch(connection, rows)
        stored += len(part)
        async with running_monitor(postgres_dsn, tmp_path) as process:
            await until(all_folded, "everything is folded")
            if part[0].fold_seq > 1:
                assert await stop_monitor(process) == 0
    yield connection
    await connection.close()


async def _quantdrift(dsn: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(invoked, *arguments, directory=directory, QUANTDRIFT_DSN=dsn)


@pytest.mark.release
async def test_a_backtest_repeats_history_and_shows_another_configuration(
    postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """The same configuration makes the same changes of verdict; another misses what it accepts.

    `plan` takes traffic, shares and the number of detectors from it. Nothing is written.
    """
    before = await record_of(record)
    done = started("backtest", "--json", directory=tmp_path, QUANTDRIFT_DSN=postgres_dsn)
    assert done.returncode == 0, done.stderr
    same = json.loads(done.stdout)
    assert same["identical"]
    assert same["complete"]
    assert (same["first_fold"], same["last_fold"]) == (1, N_BATCHES)
    assert same["pages_recorded"] == same["pages_tested"] == 1
    assert [(one["slice"], one["match"], one["later_s"]) for one in same["alerts"]] == [
        ("scanner=faint", "same", 0.0)
    ]
    assert same["alerts"][0]["recorded"] == same["alerts"][0]["tested"]

    tolerant = ("--set", "models.digits.budget.flip=0.3", "--set", "sampling.rate=1")
    done = await _quantdrift(postgres_dsn, tmp_path, "backtest", *tolerant, "--plot", "tolerant.svg")
    assert done.returncode == 0, done.stderr
    assert "scanner=faint" in done.stdout
    assert "MISSED" in done.stdout
    assert "sampling.rate has no effect here" in done.stdout
    picture = (tmp_path / "tolerant.svg").read_text()
    assert "<svg" in picture
    assert "digits 1, scanner=faint: flip" in picture

    strict = ("--set", "models.digits.budget.flip=0.005", "--from", "2026-03-01T12:01:00")
    done = await _quantdrift(postgres_dsn, tmp_path, "backtest", *strict, "--plot", "strict.svg")
    assert done.returncode == 0, done.stderr
    assert "detectors start empty there" in done.stdout
    assert (tmp_path / "strict.svg").read_text().startswith("<svg ")

    done = await _quantdrift(postgres_dsn, tmp_path, "plan", "--from-record", "--days", "36500", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {one["slice"] for one in found["slices"]} == {"all", "scanner=faint", "scanner=clear"}
    assert found["n_detectors"] == await record.fetchval("select n_detectors from fold")
    assert found["requests_per_s"] > 0
    assert await record_of(record) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "digit"), "did you mean `digits`"),
        (("--set", "monitor.pages=1"), "did you mean `pages_per_30_days`"),
        (("--plot", "a.bmp"), "ends in .svg"),
        (("--days", "1", "--from", "2026-01-01"), "give --days, or --from and --to"),
        (("--to", "2020-01-01"), "the database has no folded batches yet"),
    ],
)
async def test_a_command_that_cannot_be_run_ends_with_one_sentence(
    postgres_dsn: str, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    """Exit code 2 and no traceback, on a record that knows a model and has folded nothing."""
    connection = await asyncpg.connect(postgres_dsn)
    await store_catalog(connection)
    if "--model" in arguments:
        await store_batch(connection, batches(1)[0])
        await connection.execute("update batch set fold_seq = 1")
    await connection.close()
    (tmp_path / "config.toml").write_text('[[models]]\nname = "digits"\n')
    done = await _quantdrift(postgres_dsn, tmp_path, "backtest", *arguments)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
