"""What leaves through the outbox, in which order, and what one event that is never taken costs the others."""

from collections.abc import AsyncIterator

import asyncpg
import pytest
from sqlalchemy import text

from quantdrift.monitor.outbox import OutboxSender, log_record
from quantdrift.storage.alerts.outbox import WaitingEvent, unsent
from quantdrift.storage.database import Database
from tests.support.monitor.fold_stream import FAINT_ID, store_catalog

pytestmark = pytest.mark.integration


class Collector:
    """Takes events, unless it is away or refuses that one."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.tried: list[int] = []
        self.refused: set[int] = set()
        self.away = False

    def send(self, event: WaitingEvent) -> str:
        """Return an empty text if it takes the event."""
        self.tried.append(event.id)
        if self.away or event.id in self.refused:
            return "no"
        self.taken.append(event.id)
        return ""

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
async def database(postgres_dsn: str) -> AsyncIterator[Database]:
    """Return a record with eight events that wait."""
    connection = await asyncpg.connect(postgres_dsn)
    await store_catalog(connection)
    for number in range(8):
        await connection.execute(
            "with t as (insert into transition (model_version_id, slice_id, from_verdict, to_verdict, at, fold_seq,"
            " details) values (1, $1, 'ok', 'firing', now(), $2, '{}') returning id)"
            " insert into outbox (transition_id) select id from t",
            FAINT_ID,
            number,
        )
    await connection.close()
    async with Database(postgres_dsn) as found:
        yield found


async def _waiting(database: Database) -> list[tuple[int, int]]:
    async with database.begin() as connection:
        return [(event.id, event.attempts) for event in await unsent(connection, 100)]


async def test_events_go_out_in_the_order_they_were_made_also_after_an_outage(database: Database) -> None:
    """While the collector is away nothing is sent or held against an event; afterwards all come in their order."""
    collector = Collector()
    sender = OutboxSender(database, collector)
    collector.away = True
    for _ in range(5):
        assert await sender.send_waiting() == (0, True)
    assert len(collector.tried) == 10  # two in each turn, however many wait
    assert sender.n_waiting == 8
    async with database.begin() as connection:
        oldest = await connection.scalar(text("select created_at from outbox order by id limit 1"))
    assert {sender.oldest_waiting} == {oldest}
    assert [attempts for _, attempts in await _waiting(database)] == [0] * 8
    collector.away = False
    assert await sender.send_waiting() == (8, False)
    assert collector.taken == sorted(collector.taken)
    assert sender.n_waiting == 0
    assert sender.oldest_waiting is None


@pytest.mark.parametrize("poison", [(1,), (1, 2), (1, 2, 3, 8), (4, 5)])
async def test_events_that_are_never_taken_hold_up_no_others(
    database: Database, poison: tuple[int, ...]
) -> None:
    """Refused ones go behind the others within a few turns, stay, and what comes later is sent at once."""
    collector = Collector()
    collector.refused = set(poison)
    sender = OutboxSender(database, collector)
    for _ in range(10):
        await sender.send_waiting()
    assert set(collector.taken) == set(range(1, 9)) - set(poison)
    assert len(collector.taken) == len(set(collector.taken))
    assert {event for event, _ in await _waiting(database)} == set(poison)
    assert sender.n_waiting == len(poison)


async def test_an_event_of_an_older_release_is_sent_all_the_same(database: Database) -> None:
    """A story that lacks what this release tells is no reason to keep it: its text is the bare change."""
    async with database.begin() as connection:
        (event, *_) = await unsent(connection, 1)
    assert log_record(event).body == "ok -> firing"
