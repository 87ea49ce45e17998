"""A monitor that dies while several fold, each its part of the models."""

import asyncio
from pathlib import Path

import asyncpg
import pytest

from tests.support.commands import started
from tests.support.monitor.fold_stream import store_batch
from tests.support.monitor.model_streams import MODELS, fill_catalog, streams
from tests.support.monitor.monitor_processes import connected, running_monitor, until
from tests.support.storage.databases import Databases

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
_MORE_MODELS = "".join(f'[[models]]\nname = "{name}"\n' for name in MODELS[1:])


async def _holders(record: asyncpg.Connection) -> dict[int, str]:
    rows = await record.fetch(
        "select s.number, s.holder from shard s join monitor_process m on m.name = s.holder"
    )
    return {row["number"]: row["holder"] for row in rows}


async def _waiting(record: asyncpg.Connection) -> set[str]:
    """Return the models of which stored batches are not folded."""
    rows = await record.fetch(
        "select distinct f.model from model_fold f join batch b on b.compared_model = f.model"
        " where b.fold_seq is null or b.fold_seq > f.fold_seq"
    )
    return {row["model"] for row in rows}


async def test_only_the_models_of_a_monitor_that_dies_wait_and_another_one_takes_them_over(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two monitors share the shards; the one that does not lead is killed -9, and the other one folds everything, as if alone."""
    monkeypatch.setenv("QUANTDRIFT__MONITOR__SHARDS", "2")
    stream = streams(60)
    async with (
        databases.copy(fill_catalog) as dsn,
        connected(dsn) as record,
        running_monitor(dsn, tmp_path, notify=_MORE_MODELS) as one,
        running_monitor(dsn, tmp_path, notify=_MORE_MODELS) as two,
    ):

        async def both_fold() -> bool:
            return len(set((await _holders(record)).values())) == 2

        async def all_is_folded() -> bool:
            folded = await record.fetchval("select count(distinct model_version_id) from detector")
            return folded == len(MODELS) and not await _waiting(record)

        await until(both_fold, "each monitor folds a shard")
        half = len(stream) // 2
        for rows in stream[:half]:
            await store_batch(record, rows)
        await until(all_is_folded, "both have folded what was stored")
        said = await asyncio.to_thread(
            started, "status", "-c", "config.toml", directory=tmp_path, QUANTDRIFT_DSN=dsn
        )
        assert "2 shards of models, folded by 2 monitors; " in said.stdout
        leader = await record.fetchval("select holder from leader")
        victim = two if leader.endswith(f":{one.pid}") else one
        left = next(holder for holder in (await _holders(record)).values() if f":{victim.pid}:" not in holder)
        victim.kill()
        await victim.wait()
        for rows in stream[half:]:
            await store_batch(record, rows)
        await until(all_is_folded, "the other one has folded the rest")
        assert await _holders(record) == {0: left, 1: left}
        assert await record.fetchval("select holder from leader") == leader

        async def all_counts() -> bool:
            counted = await record.fetch(
                "select model_version_id, sum(n_items) from rollup_hour r join slice s on s.id = r.slice_id"
                " where predicate = 'true' group by 1 order by 1"
            )
            stored = await record.fetch(
                "select model_version_id, count(*) from comparison group by 1 order by 1"
            )
            return [tuple(row) for row in counted] == [tuple(row) for row in stored]

        await until(all_counts, "nothing was folded twice, or left out")
