"""Fixtures that every test may use."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest
from hypothesis import HealthCheck, settings

from examples.otlp_receiver import OtlpReceiver
from quantdrift.core.process.nats_server import NatsServer
from quantdrift.storage.admin.migrate import upgrade
from quantdrift.storage.server.postgres import PostgresServer
from quantdrift.storage.server.temporary import throwaway_server

# Seeded by each test's own code, so that CI finds the same twice; nothing of it is timed, because machines differ. To
# look further afield: HYPOTHESIS_PROFILE=explore.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("seeded", _UNTIMED, derandomize=True)
settings.register_profile("explore", _UNTIMED, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "seeded"))


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a real JetStream server that all tests of this process share.

    Each test uses a stream name of its own, and each stream reserves as much as in production: far more together than
    there is disk, and than is ever used.
    """
    with NatsServer(tmp_path_factory.mktemp("nats"), store_bytes=1 << 50) as server:
        yield server.url


@pytest.fixture(scope="session")
def postgres_cluster() -> Iterator[PostgresServer]:
    """Return a real Postgres server that all tests of this process share; its own database is migrated.

    Nobody connects to that database but `postgres_dsn`, which copies it.
    """
    with throwaway_server() as server:
        asyncio.run(upgrade(server.dsn, progress=lambda _: None))
        yield server


_NUMBER = itertools.count()


@pytest.fixture
async def postgres_dsn(postgres_cluster: PostgresServer) -> AsyncIterator[str]:
    """Return the address of a fresh database with the newest schema, which is dropped after the test."""
    template = postgres_cluster.dsn.rpartition("/")[2]
    base = postgres_cluster.dsn.rpartition("/")[0]
    name = f"test_{os.getpid()}_{next(_NUMBER)}"
    admin = await asyncpg.connect(f"{base}/postgres")
    try:
        await admin.execute(f"create database {name} template {template}")
        yield f"{base}/{name}"
        await admin.execute(f"drop database {name} with (force)")
    finally:
        await admin.close()


@pytest.fixture
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """Return a migrated server of the test's own, to be killed and started again.

    It keeps its promises about durability, as in production.
    """
    with PostgresServer(tmp_path_factory.mktemp("postgres") / "server") as server:
        asyncio.run(upgrade(server.dsn, progress=lambda _: None))
        yield server


@pytest.fixture
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Return a real OTLP collector over gRPC on a free port; `endpoint` says where."""
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def language_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small language model with its tokenizer, both trained here."""
    from examples.generation.make import make

    return make(tmp_path_factory.mktemp("language"))
