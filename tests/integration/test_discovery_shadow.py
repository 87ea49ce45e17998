"""A confirmed slice reaches the shadow worker, and what it compares from then on lies in it."""

import asyncio
import time
import uuid
from pathlib import Path

import asyncpg
import numpy as np
import pytest

from quantdrift.core.codec import encode
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Capture, Config, Model, Provider, Reference, Shadow, Slice, Stream
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Predicate
from quantdrift.core.slices import slice_of
from quantdrift.core.stream.connection import Queue
from quantdrift.shadow.worker import serve
from quantdrift.storage.database import Database
from quantdrift.storage.schema.slice_tables import DiscoveryStatus
from quantdrift.storage.slices.discovery import StoredRow, load_state, store_round
from tests.support.shadow.onnx_models import exchange_of, inputs_of, linear_model, saved
from tests.support.storage.discovered_traffic import NOW, discovery, write_version

pytestmark = pytest.mark.integration

DEADLINE_S = 30.0
WHERE = (
    Predicate(key="feature.norm", low=1.0),
    Predicate(key="header.x-site", equals="s3"),  # recorded, and no rule's
)


def _config(tmp_path: Path, nats_url: str) -> Config:
    path = str(saved(linear_model(), tmp_path / "linear.onnx"))
    return Config(
        stream=Stream(url=nats_url, name=f"t{uuid.uuid4().hex[:8]}"),
        shadow=Shadow(provider=Provider.CPU, threads=1, batch_delay_s=0.05, admin="127.0.0.1:0"),
        models=(Model(name="digits", references=(Reference(path=path),)),),
        capture=Capture(headers=("x-site",)),
        slices=(Slice(name="norm", feature="norm", edges=(1.0,)),),
    )


async def test_later_items_carry_the_id_of_a_confirmed_slice(
    tmp_path: Path, nats_url: str, postgres_dsn: str
) -> None:
    """Both conditions must hold; the id is that of the slice that the confirmation made."""
    config, key = _config(tmp_path, nats_url), slice_of("digits", WHERE)
    record = await asyncpg.connect(postgres_dsn)
    version = await write_version(record)
    async with Database(postgres_dsn) as database, database.begin() as connection:
        standing = await load_state(connection, NOW)
        row = discovery(
            id=0,
            predicate=key.predicate,
            name=key.name,
            where=key.where,
            status=DiscoveryStatus.CONFIRMED,
            model_version_id=version,
            confirmed_at=NOW,
        )
        confirmed = StoredRow(row=row, reason="confirmed")
        await store_round(connection, after=standing.mark, discoveries=[confirmed], searches=[])
    slice_id = await record.fetchval("select slice_id from discovery")
    large, small = np.full((1, 4), 2.0, np.float32), np.full((1, 4), 0.1, np.float32)
    exchanges = [
        exchange_of(large, attributes={"header.x-site": "s3"}),
        exchange_of(small, attributes={"header.x-site": "s3"}),
        exchange_of(large, attributes={"header.x-site": "s4"}),
        exchange_of(inputs_of(1)),
    ]
    stop = Stop()
    worker = asyncio.create_task(serve(config, Secrets(dsn=postgres_dsn), stop))
    queue = await Queue.connect(config.stream, client_name="test")
    try:
        for exchange in exchanges:
            await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))
        deadline_s = time.monotonic() + DEADLINE_S
        while await record.fetchval("select count(*) from comparison") < len(exchanges):
            assert time.monotonic() < deadline_s, "not compared in time"
            await asyncio.sleep(0.02)
    finally:
        stop.set()
        await queue.close()
        assert await asyncio.wait_for(worker, DEADLINE_S) == 0
    inside = await record.fetch(
        "select exchange_id::text from comparison where $1 = any(slice_ids)", slice_id
    )
    await record.close()
    assert [one["exchange_id"].replace("-", "") for one in inside] == [exchanges[0].id]
