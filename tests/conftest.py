"""Fixtures that every test may use."""

import asyncio
import gc
import logging
import os
import secrets
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest
from hypothesis import HealthCheck, settings

from quantdrift.core.process.nats_server import NatsServer
from quantdrift.demo.otlp_receiver import OtlpReceiver
from quantdrift.storage.admin.migrate import upgrade
from quantdrift.storage.database import Database
from quantdrift.storage.server.postgres import PostgresServer
from tests.support.in_memory import MEMORY, memory_directory
from tests.support.isolation import isolated
from tests.support.schedule import LongestFirst, rank, turned
from tests.support.shared import made_once
from tests.support.storage.databases import Databases, give_rights

if TYPE_CHECKING:
    from tests.support.sidecar.relay_process import Backend

# Seeded by each test's own code, so that CI finds the same twice; nothing of it is timed, because machines differ.
# `make check` and `make test` take `quick`, `make test-release` takes `seeded`; to look further afield: HYPOTHESIS_PROFILE=explore.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("seeded", _UNTIMED, derandomize=True)
settings.register_profile("quick", _UNTIMED, derandomize=True, max_examples=20)
settings.register_profile("explore", _UNTIMED, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "seeded"))

_KINDS = (
    "unit",
    "contract",
    "property",
    "statistical",
    "integration",
    "fault",
    "acceptance",
    "browser",
    "gpu",
    "servers",
)
_FORBIDDEN = pytest.StashKey[list[str]]()
_LOG_LEVEL = pytest.StashKey[int]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return for `-n auto` one process more than there are cores: tests wait a third of their time."""
    return len(os.sched_getaffinity(0)) + 1 if config.option.numprocesses == "auto" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LongestFirst:
    """Share the tests among the processes as `tests.schedule` says, whatever `--dist` says."""
    return LongestFirst(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-release`."""
    parser.addoption("--release", action="store_true", help="run also what only a release needs")


def pytest_configure(config: pytest.Config) -> None:
    """Let several processes share the compilation of the tests, and name what fails when it does.

    No garbage is collected while tests are: that would look at a million objects that stay again and again, for a seventh
    of the time.
    """
    if hasattr(config, "workerinput"):
        gc.disable()
        number, count = config.workerinput["workerid"].removeprefix("gw"), config.workerinput["workercount"]
        config.args = turned(config.args, int(number), count)
    else:
        config.pluginmanager.register(_AtOnce(config))


class _AtOnce:
    """Prints a line for each test that fails; what it failed by comes at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"{report.nodeid} failed ({report.when})", red=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a release needs, and order the tests that several processes share: what takes long comes first."""
    if not config.option.release and (left_out := [*filter(_is_for_releases, items)]):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _is_for_releases(item)]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (rank(item.nodeid), item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    """Leave out of later garbage collections what collecting the tests has made: some million objects that stay."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter delete what it made at its end, so that no library complains of objects that are left."""
    gc.unfreeze()


def _is_for_releases(item: pytest.Item) -> bool:
    return item.get_closest_marker("release") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that has not exactly one mark of its kind."""
    item.stash[_LOG_LEVEL] = logging.getLogger().level
    kinds = [mark.name for mark in item.iter_markers() if mark.name in _KINDS]
    if len(kinds) != 1:
        pytest.fail(f"it is marked {kinds or 'by nothing'}: exactly one of {_KINDS}", pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Keep what a unit test does that it must not, from its fixtures to their end."""
    if item.get_closest_marker("unit") is None:
        return (yield)
    with isolated() as item.stash[_FORBIDDEN]:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a unit test that opened a socket, started a process or imported torch, and any that hides the logs of others."""
    outcome = yield
    root, level = logging.getLogger(), item.stash.get(_LOG_LEVEL, None)
    if level is not None and root.level > level:
        left = logging.getLevelName(root.level)
        root.setLevel(level)
        pytest.fail(
            f"it left the level of the root logger at {left}: tests after it miss log lines", pytrace=False
        )
    if found := item.stash.get(_FORBIDDEN, []):
        pytest.fail(f"a unit test must not do that, mark it integration: {', '.join(found)}", pytrace=False)
    return outcome


@pytest.fixture(scope="session", autouse=True)
def pod_name() -> Iterator[str]:
    """Name the sidecars of this process, and remove the counts that those leave in shared memory which no other one publishes."""
    name = f"quantdrift-tests-{secrets.token_hex(8)}"
    before = os.environ.get("POD_NAME")
    os.environ["POD_NAME"] = name
    yield name
    if before is None:
        del os.environ["POD_NAME"]
    else:
        os.environ["POD_NAME"] = before
    if any(MEMORY.glob("quantdrift-*/*.rows")):
        from tests.support.sidecar.left_counts import remove_left_counts

        remove_left_counts(name)


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """Return the address of a real JetStream server that all tests of this process share.

    Each test uses a stream name of its own, and each stream reserves as much as in production: far more together than
    there is disk, and than is ever used.
    """
    with memory_directory() as parent, NatsServer(parent / "nats", store_bytes=1 << 50) as server:
        yield server.url


@pytest.fixture(scope="session")
def postgres_cluster() -> Iterator[PostgresServer]:
    """Return a real Postgres server that all tests of this process share; its own database is migrated.

    Nobody connects to that database but `databases`, which copies it.
    """
    with memory_directory() as parent, PostgresServer(parent / "postgres", durable=False) as server:
        asyncio.run(upgrade(server.dsn, progress=lambda _: None))
        yield server


@pytest.fixture(scope="session")
def databases(postgres_cluster: PostgresServer) -> Databases:
    """Return what copies databases of that server."""
    return Databases(postgres_cluster.dsn)


@pytest.fixture
async def postgres_dsn(databases: Databases) -> AsyncIterator[str]:
    """Return the address of a fresh database, which is dropped after the test: the newest schema, with the rights of the SQL roles."""
    async with databases.copy(give_rights) as dsn:
        yield dsn


@pytest.fixture
async def record(postgres_dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Return a plain connection to that database."""
    connection = await asyncpg.connect(postgres_dsn)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
async def database(postgres_dsn: str) -> AsyncIterator[Database]:
    """Return that database as shadow worker and monitor see it."""
    async with Database(postgres_dsn) as opened:
        yield opened


@pytest.fixture(scope="session")
def migrated_server() -> Iterator[Path]:
    """Return the directory of a migrated server that has ended; it is copied."""
    with memory_directory() as parent:
        with PostgresServer(parent / "server") as server:
            asyncio.run(upgrade(server.dsn, progress=lambda _: None))
        yield server.directory


@pytest.fixture
def postgres_server(migrated_server: Path) -> Iterator[PostgresServer]:
    """Return a migrated server of the test's own, to be killed and started again.

    Its settings are those of production, also for durability.
    """
    with memory_directory() as parent:
        subprocess.run(["cp", "--archive", migrated_server, parent], check=True)
        with PostgresServer(parent / migrated_server.name) as server:
            yield server


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """Return what `tmp_path` returns, in memory: for tests that start a Postgres server with data of its own."""
    with memory_directory() as parent:
        path = parent / "test"
        path.mkdir(mode=0o700)
        yield path


@pytest.fixture
def backend() -> Iterator["Backend"]:
    """Return an inference server's stand-in that runs; `reply` makes its answers."""
    from tests.support.sidecar.relay_process import running_backend

    with running_backend() as server:
        yield server


@pytest.fixture
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Return a real OTLP collector over gRPC on a free port; `endpoint` says where."""
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def language_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small language model with its tokenizer, both trained once for all processes."""
    import torch

    from examples.generation.make import make

    torch.set_num_threads(
        1
    )  # as where it is trained: two threads wait for each other where others compute too
    return made_once(tmp_path_factory, "language", make)
