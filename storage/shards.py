"""The shards of the models: which monitor folds which of them.

A monitor takes part as long as it says so: its row of `monitor_process` counts for `LEASE_S` after it last did, by the server's clock, and
only while its session lasts, so that a monitor that was killed is missed at once. Each gets its part of the shards (`part_of`): one
that has more gives the last ones up, one that has less takes those that nobody has. With one monitor it has all of them.

A lease saves work, and does not make it right: two monitors that both believe to have a shard fold its models one after the other, since
each locks the rows of `model_fold` and begins from what it finds there.
"""

import os
import secrets
import socket
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.storage.database import Database
from quantdrift.storage.fold.models import model_numbers
from quantdrift.storage.fold.read import unfolded
from quantdrift.storage.fold_rows import ShardState
from quantdrift.storage.leader import LEASE_S

RENEWED_EVERY_S: Final = 2.0
_SAY: Final = text("""
    insert into monitor_process (name, pid, seen_at)
    values (:name, (select pid from pg_stat_activity where pid = cast(:pid as integer)), clock_timestamp())
    on conflict (name) do update set pid = excluded.pid, seen_at = excluded.seen_at
""")
_MISS: Final = text("""
    delete from monitor_process m where m.seen_at < clock_timestamp() - cast(:lease as interval)
        or (m.pid is not null and not exists (select from pg_stat_activity a where a.pid = m.pid))
""")
_MAKE: Final = text("""
    insert into shard (number, holder) select n, '' from generate_series(0, cast(:shards as integer) - 1) n on conflict do nothing
""")
_LOCK: Final = text("select number, holder from shard where number < :shards order by number for update")
_MONITORS: Final = text("select name from monitor_process order by name")
_SHARDS: Final = text("select shards from fold where id = 1")
_TAKE: Final = text(
    "update shard set holder = :name, since = now() where number = any(cast(:numbers as integer[])) and holder <> :name"
)
_GIVE_UP: Final = text(
    "update shard set holder = '' where holder = :name and not (number = any(cast(:numbers as integer[])))"
)
_LEAVE: Final = text("delete from monitor_process where name = :name")
_LEADER: Final = text("select holder from leader where id = 1")
_HOLDERS: Final = text("""
    select s.number, coalesce(m.name, '') as holder from fold f
    join shard s on s.number < f.shards left join monitor_process m on m.name = s.holder and m.seen_at >= now() - cast(:lease as interval)
    where f.id = 1 and f.shards > 1 order by s.number
""")


class HeldShards(msgspec.Struct, frozen=True, kw_only=True):
    """The shards that a monitor folds, `of` so many."""

    numbers: frozenset[int] = frozenset()
    of: int = 1


class ShardLeases:
    """The leases of one monitor.

    Parameters
    ----------
    lease_s
        As `LEASE_S`.

    Attributes
    ----------
    name
        Of this monitor among the others.
    held
        What it folds.
    takes_part
        Whether it may have shards, now or soon.
    """

    def __init__(self, database: Database, *, lease_s: float = LEASE_S) -> None:
        self._database = database
        self._lease = timedelta(seconds=lease_s)
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.held = HeldShards()
        self.takes_part = False

    async def renew(self, pid: int | None) -> HeldShards:
        """Say that this monitor runs, and take its part of the shards; return what it has now.

        Parameters
        ----------
        pid
            Server process of a session that lasts as long as this process; None: there is none.

        Raises
        ------
        RetryError
            Postgres is not available: the same call may succeed later.
        """
        self.takes_part = True
        async with self._database.begin() as connection:
            shards = int(await connection.scalar(_SHARDS) or 1)
            await connection.execute(_MAKE, {"shards": shards})
            rows = (await connection.execute(_LOCK, {"shards": shards})).all()
            await connection.execute(_SAY, {"name": self.name, "pid": pid})
            await connection.execute(_MISS, {"lease": self._lease})
            monitors = (await connection.scalars(_MONITORS)).all()
            mine = [row.number for row in rows if row.holder == self.name]
            free = [row.number for row in rows if row.holder not in monitors]
            numbers = part_of(self.name, monitors, mine, free, shards)
            await connection.execute(_GIVE_UP, {"name": self.name, "numbers": numbers})
            await connection.execute(_TAKE, {"name": self.name, "numbers": numbers})
        self.held = HeldShards(numbers=frozenset(numbers), of=shards)
        return self.held

    async def release(self) -> None:
        """Give everything up, so that others take it at once.

        Raises
        ------
        RetryError
            Postgres is not available: others take it when the lease ends.
        """
        self.held = HeldShards()
        async with self._database.begin() as connection:
            await connection.execute(_GIVE_UP, {"name": self.name, "numbers": []})
            await connection.execute(_LEAVE, {"name": self.name})
        self.takes_part = False


def part_of(
    name: str, monitors: Sequence[str], mine: Sequence[int], free: Collection[int], shards: int
) -> list[int]:
    """Return the shards that a monitor has from now on.

    Each monitor has as many as any other, or one more: those whose names come first.

    Parameters
    ----------
    monitors
        All of them, in order.
    mine, free
        Shards that it has, and those that nobody has.
    """
    place = list(monitors).index(name)
    n = shards // len(monitors) + (place < shards % len(monitors))
    kept = sorted(mine)[:n]
    return sorted([*kept, *sorted(free)[: n - len(kept)]])


async def shard_states(connection: AsyncConnection) -> list[ShardState]:
    """Return the state of each shard; of one shard, the monitor that leads folds it."""
    shards = int(await connection.scalar(_SHARDS) or 1)
    if shards == 1:
        by_number = {0: str(await connection.scalar(_LEADER) or "")}
    else:
        rows = (await connection.execute(_HOLDERS, {"lease": timedelta(seconds=LEASE_S)})).all()
        by_number = dict.fromkeys(range(shards), "") | {row.number: row.holder for row in rows}
    numbers = await model_numbers(connection)
    states = {number: ShardState(number=number, holder=holder) for number, holder in by_number.items()}
    for model, (n, oldest) in (await unfolded(connection)).items():
        # What is of no model are tallies, which each shard folds: the first stands for all.
        state = states[numbers.get(model, 0) % shards]
        states[state.number] = msgspec.structs.replace(
            state, n_unfolded=state.n_unfolded + n, oldest=min(oldest, state.oldest or oldest)
        )
    return list(states.values())
