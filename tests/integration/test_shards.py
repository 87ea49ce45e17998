"""Models folded in shards: the same results in any of them, and leases that spread over the monitors that run."""

import asyncio
import json
import random
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.telemetry import Telemetry
from quantdrift.monitor.fold.fold import Fold
from quantdrift.monitor.fold_turn import LONGEST_UNWRITTEN_S, FoldTurn
from quantdrift.monitor.gauges import SliceGauges
from quantdrift.storage.database import Database
from quantdrift.storage.fold.models import model_numbers, sum_up
from quantdrift.storage.fold.read import claim, load_catalog, number, numbering, resume
from quantdrift.storage.fold.write import write
from quantdrift.storage.shards import ShardLeases, part_of, shard_states
from tests.support.monitor.model_streams import CONFIG, fill
from tests.support.monitor.monitor_processes import connected
from tests.support.storage.databases import Databases

pytestmark = pytest.mark.integration
_SHARDS = 3
_REORDER = timedelta(seconds=CONFIG.monitor.reorder_s)
_QUERIES = {
    "model_fold": "select model, number, fold_seq, event_time, exchange_time, mass, n_detectors from model_fold order by 1",
    "model_span": "select model, from_at, last_at from model_span order by 1, 2",
    "detector": "select * from detector order by 1, 2, 3, 4",
    "verdict": "select model_version_id, slice_id, verdict, reason, since, n_groups, evidence, threshold, estimate, last_at, updated_at,"
    " fold_seq from verdict order by 1, 2",
    "transition": "select model_version_id, slice_id, from_verdict, to_verdict, at, fold_seq, details from transition"
    " order by model_version_id, fold_seq, slice_id",
    "alert": "select model_version_id, slice_id, severity, metric, onset_at, opened_at, resolved_at, ended from alert"
    " order by model_version_id, opened_at, slice_id",
    "incident": "select model_version_id, began_at, opened_at, ended_at, state from incident order by 1, 2",
    "rollup_hour": "select model_version_id, slice_id, hour, n_items, n_groups, round(weight::numeric, 6), round(flip::numeric, 6)"
    " from rollup_hour order by 1, 2, 3",
    "serving": "select * from serving order by 1",
    "baseline": "select model_version_id, slice_id, metric, kind, source, n_groups, content, fold_seq from baseline order by 1, 2, 3, 4, 8",
}
# Numbers that Postgres gives in the order of writing.
_NUMBERS = ("incident", "explained_by_id", "explains_ids")


CLOCK = ManualClock(datetime(2026, 3, 1, tzinfo=UTC))


def folding() -> FoldTurn:
    """Return what folds, as a monitor that has just started. By `CLOCK`, which stands still, no turn is written because of its time."""
    return FoldTurn(
        config=CONFIG,
        telemetry=Telemetry("test", []),
        clock=CLOCK,
        gauges=SliceGauges(CLOCK, 100),
        progress=lambda: None,
    )


async def number_next(database: Database, most: int = 10_000, shards: int = _SHARDS) -> bool:
    """Assign numbers to the next batches; return whether more may wait for one."""
    async with database.begin() as connection:
        _, more = await number(connection, most, _REORDER, most_rows=10**9, shards=shards)
        await sum_up(connection)
    return more


async def fold_shards(database: Database, turn: FoldTurn, numbers: Collection[int]) -> bool:
    """Fold what has a number in some shards; return whether more may wait."""
    async with database.begin() as connection:
        known = await model_numbers(connection)
        models = [model for model, number in known.items() if number % _SHARDS in numbers]
        committed = await turn.fold(connection, models, (await numbering(connection)).fold_seq)
    return committed()


async def fold_alone(database: Database, turn: FoldTurn, most: int = 10_000) -> None:
    """Give numbers, fold and write as a monitor that folds all models, in one transaction."""
    CLOCK.advance(LONGEST_UNWRITTEN_S)
    async with database.begin() as connection:
        last, _ = await number(connection, most, _REORDER, most_rows=10**9)
        committed = await turn.fold(connection, await model_numbers(connection), last)
        await sum_up(connection)
    committed()


async def waiting(database: Database) -> int:
    """Return how many batches are not folded."""
    async with database.begin() as connection:
        return sum(state.n_unfolded for state in await shard_states(connection))


async def result(record: asyncpg.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Return what was derived, without numbers that follow the order of writing."""
    found = {name: [tuple(row) for row in await record.fetch(query)] for name, query in _QUERIES.items()}
    found["transition"] = [(*row[:-1], _without_numbers(row[-1])) for row in found["transition"]]
    return found


def _without_numbers(details: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(details).items() if name not in _NUMBERS}


async def test_a_model_has_the_same_rows_in_any_shard(databases: Databases) -> None:
    """Bit for bit: folded as one process does, and as three that lag, are killed with turns that are not written, and take each other's shards over."""
    async with databases.copy(fill) as dsn, Database(dsn) as database, connected(dsn) as record:
        turn = folding()
        while await waiting(database):
            await fold_alone(database, turn)
        expected = await result(record)
    rng = random.Random(3)
    async with databases.copy(fill) as dsn, Database(dsn) as database, connected(dsn) as record:
        turns = [folding() for _ in range(_SHARDS)]
        while await waiting(database):
            await number_next(database, most=rng.randrange(1, 40))
            for shard in rng.sample(range(_SHARDS), rng.randrange(_SHARDS)):
                turn = rng.choice(turns)
                if rng.random() < 0.2:
                    turn.forget()  # another process that begins from what is stored
                if rng.random() < 0.5:
                    CLOCK.advance(LONGEST_UNWRITTEN_S)  # the turn is written
                await fold_shards(database, turn, [shard])
        for shard, turn in enumerate(turns):
            CLOCK.advance(LONGEST_UNWRITTEN_S)
            await fold_shards(database, turn, [shard])  # what is of other models is noted as folded, too
        found = await result(record)
    for name, rows in expected.items():
        assert found[name] == rows, name
    assert {row[0] for row in expected["alert"]} == {1, 2, 3}
    assert len(expected["model_span"]) == _SHARDS
    assert any(row[4] == "imported" and row[-1] == 1 for row in expected["baseline"])


async def test_what_is_sent_is_written_with_its_turn_and_the_rest_where_it_is_due(
    databases: Databases,
) -> None:
    """While no time passes, a turn without an alert is not written, and one with an alert is, with all before it; so is the rest at the end."""
    stored = "select coalesce(min(fold_seq), 0) from model_fold"
    async with databases.copy(fill) as dsn, Database(dsn) as database, connected(dsn) as record:
        turn = folding()
        ends: list[tuple[int, int]] = []
        more = True
        while more:
            async with database.begin() as connection:
                last, more = await number(connection, 7, _REORDER, most_rows=10**9)
                committed = await turn.fold(connection, await model_numbers(connection), last, more=True)
                await sum_up(connection)
            committed()
            ends.append((last, await record.fetchval(stored)))
        for row in await record.fetch(
            "select t.fold_seq from outbox o join transition t on t.id = o.transition_id order by 1"
        ):
            last, written = next(end for end in ends if end[0] >= row["fold_seq"])
            assert written == last
        assert sum(written < last for last, written in ends) > len(ends) / 2
        last, written = ends[-1]
        assert written < last
        async with database.begin() as connection:
            await turn.finish(connection)
        assert await record.fetchval(stored) == last
        assert await record.fetchval("select count(*) from outbox") >= 3


async def test_a_release_that_knows_one_position_may_fold_in_between(databases: Databases) -> None:
    """In a roll-out, or after one that was undone: nothing is folded twice or left out, and models go on from where that release was."""
    async with databases.copy(fill) as dsn, Database(dsn) as database, connected(dsn) as record:
        await fold_alone(database, folding(), most=60)
        async with database.begin() as connection:
            fold = Fold(CONFIG, await resume(connection))
            batches = await claim(connection, fold.position.fold_seq, 100, _REORDER)
            fold.learn(await load_catalog(connection))
            for rows in batches:
                fold.batch(rows)
            await write(connection, fold.take(), "")
            assert not (await numbering(connection)).by_model
        n_detectors = await record.fetchval("select n_detectors from fold")
        await number_next(database, most=1, shards=1)
        assert await record.fetch("select from model_fold where n_detectors is not null") == []
        await fold_alone(database, folding(), most=1)
        assert await record.fetchval("select sum(n_detectors) from model_fold") == n_detectors > 0
        turn = folding()
        while await waiting(database):
            await fold_alone(database, turn)
        await fold_alone(database, turn)  # models that are silent: what waits for a later capture
        counted = await record.fetch(
            "select model_version_id, sum(n_items) from rollup_hour r join slice s on s.id = r.slice_id where predicate = 'true'"
            " group by 1 order by 1"
        )
        stored = await record.fetch("select model_version_id, count(*) from comparison group by 1 order by 1")
        assert [tuple(row) for row in counted] == [tuple(row) for row in stored]


@pytest.mark.parametrize("n_monitors", [1, 2, 3, 5])
async def test_shards_spread_over_the_monitors_that_run(database: Database, n_monitors: int) -> None:
    """Each has as many as any other, or one more; one that comes gets its part, and one that leaves gives it up."""
    while await number_next(database, shards=4):
        pass
    monitors = [ShardLeases(database) for _ in range(n_monitors)]
    for _ in range(2):  # what one has too much of is given up before another one takes it
        for monitor in monitors:
            await monitor.renew(None)
    held = [monitor.held.numbers for monitor in monitors]
    assert sorted(number for numbers in held for number in numbers) == [0, 1, 2, 3]
    assert max(map(len, held)) - min(map(len, held)) <= 1
    await monitors[0].release()
    for monitor in monitors[1:]:
        await monitor.renew(None)
    for monitor in monitors[1:]:
        await monitor.renew(None)
    async with database.begin() as connection:
        states = await shard_states(connection)
    assert {state.holder for state in states} == {
        monitor.name for monitor in monitors[1 : 4 + 1]
    } or n_monitors == 1
    assert n_monitors > 1 or {state.holder for state in states} == {""}


async def test_a_monitor_whose_session_is_gone_has_no_shard(
    postgres_dsn: str, database: Database, record: asyncpg.Connection
) -> None:
    """At once, and not when its lease ends; one that only hangs loses its shards when the lease ends."""
    await number_next(database)
    killed, hanging, other = (ShardLeases(database, lease_s=5.0) for _ in range(3))
    session = await asyncpg.connect(postgres_dsn)
    assert len((await killed.renew(session.get_server_pid())).numbers) == _SHARDS
    assert not (await other.renew(record.get_server_pid())).numbers
    session.terminate()
    async with asyncio.timeout(60):
        while len((await other.renew(record.get_server_pid())).numbers) < _SHARDS:
            await asyncio.sleep(0.02)
    await hanging.renew(None)
    await other.renew(None)
    assert len((await hanging.renew(None)).numbers) in {1, 2}
    await record.execute(
        "update monitor_process set seen_at = seen_at - interval '6 s' where name = $1", hanging.name
    )
    assert len((await other.renew(None)).numbers) == _SHARDS


def test_parts_are_whole_and_nearly_equal() -> None:
    """Whatever the numbers of monitors and shards; a monitor keeps what it has as far as its part goes."""
    for n_monitors in range(1, 7):
        monitors = [f"m{number}" for number in range(n_monitors)]
        for shards in range(1, 9):
            free, parts = set(range(shards)), []
            for name in monitors:
                parts.append(part_of(name, monitors, [], free, shards))
                free -= set(parts[-1])
            assert not free
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert part_of("a", ["a", "b"], [1, 3], [0, 2], 4) == [1, 3]
    assert part_of("a", ["a", "b"], [1, 2, 3], [], 4) == [1, 2]
