"""Discovered slices in the database: their state, and the changes of a round, written in one transaction."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import RowMapping, insert, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import RetryError
from quantdrift.core.records import Metric, Predicate
from quantdrift.core.slices import SliceKey
from quantdrift.storage.database import Database
from quantdrift.storage.locks import lock
from quantdrift.storage.schema.slice_tables import (
    DiscoveryChangeTable,
    DiscoverySearchTable,
    DiscoveryStatus,
    DiscoveryTable,
)

_SEEN_WITHIN: Final = timedelta(days=1)

_VERSIONS: Final = text("""
    select v.id, v.model, v.candidate_version from model_version v
    where v.reference_digest <> '' and exists (
        select from rollup_hour h join slice s on s.id = h.slice_id
        where h.model_version_id = v.id and s.predicate = 'true' and h.hour >= :since
    )
    order by v.model, v.id
""")
_DISCOVERIES: Final = text("""
    select d.*, coalesce((select max(v.last_at) from verdict v where v.slice_id = d.slice_id), d.confirmed_at)
        as seen_at
    from discovery d order by d.id
""")
# The table `slice` has the declared slices, those that the shadow assigned, and the discovered ones.
_SLICES: Final = text("""
    select s.model, s.name, s.predicate, s.definition from slice s
    where not exists (
        select from discovery d where d.slice_id = s.id and (d.status = 'expired' or d.status = 'retired' and not d.held)
    )
    order by s.id
""")
# Code that changes the status of a discovered slice holds this lock, so that no decision uses an old status.
_ACTIVE: Final = text("""
    select s.model, s.name, s.predicate, s.definition
    from discovery d join slice s on s.id = d.slice_id where d.status = 'confirmed' order by d.id
""")

_MARK: Final = text("""
    select (select max(searched_at) from discovery_search), (select max(tested_at) from discovery),
        (select coalesce(max(id), 0) from discovery_change)
""")
MONITOR: Final = "monitor"  # `made_by` of changes that no person made


Mark = tuple[datetime | None, datetime | None, int]


class DiscoveryRow(msgspec.Struct, frozen=True, kw_only=True):
    """A discovered slice; columns as in `discovery`, `seen_at` is when it last had traffic. `id` 0: not stored yet."""

    id: int = 0
    model: str
    predicate: str
    name: str
    where: tuple[Predicate, ...]
    status: DiscoveryStatus
    slice_id: int | None = None
    model_version_id: int
    metric: Metric
    found_mean: float
    overall_mean: float
    found_share: float
    null_mean: float
    scale: float
    log_threshold: float
    log_evidence: float = 0.0
    log_wealth: tuple[float, ...]
    n_groups: int = 0
    n_found: int = 1
    first_found_at: datetime
    frozen_at: datetime
    tested_at: datetime
    confirmed_at: datetime | None = None
    expired_at: datetime | None = None
    waits_since: datetime | None = None
    held: bool = False
    seen_at: datetime | None = None

    @property
    def key(self) -> SliceKey:
        """The slice that it is, or may become."""
        return SliceKey(model=self.model, name=self.name, predicate=self.predicate, where=self.where)

    @property
    def ended(self) -> bool:
        """Whether it is neither monitored nor tested, and a search may find it again."""
        return self.status in {DiscoveryStatus.EXPIRED, DiscoveryStatus.RETIRED} and not self.held

    @property
    def evidence_ratio(self) -> float:
        """Largest evidence over the threshold: confirmed at 1."""
        return math.exp(min(self.log_evidence - self.log_threshold, 700.0))


class StoredRow(msgspec.Struct, frozen=True, kw_only=True):
    """A discovery that a round has changed or found.

    Parameters
    ----------
    row
        The discovery after the change.
    reason
        Why its status has changed, as text; empty where it has not.
    """

    row: DiscoveryRow
    reason: str = ""


class SearchRow(msgspec.Struct, frozen=True, kw_only=True):
    """A search of one version; columns as in `discovery_search`."""

    model_version_id: int
    searched_at: datetime
    allowance: float
    n_items: int
    n_scored: int
    n_found: int
    n_frozen: int
    n_left_out: int


class SearchedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate version with a reference and with traffic."""

    id: int
    model: str
    candidate_version: str


class DiscoveryState(msgspec.Struct, frozen=True, kw_only=True):
    """The stored state before a round.

    Parameters
    ----------
    versions
        Versions that were compared within the last day.
    discoveries
        All discoveries, by id.
    slices
        Known slices by model, without discoveries that have ended.
    mark
        A value that changes with every round and every decision of a person: time of the last search, time up to which
        anything was tested, and id of the newest change of status.
    """

    versions: tuple[SearchedVersion, ...]
    discoveries: tuple[DiscoveryRow, ...]
    slices: dict[str, tuple[SliceKey, ...]]
    mark: Mark

    @property
    def searched_at(self) -> datetime | None:
        """When anything was last searched."""
        return self.mark[0]


async def load_state(connection: AsyncConnection, now: datetime) -> DiscoveryState:
    """Return the stored state at `now`."""
    versions = (await connection.execute(_VERSIONS, {"since": now - _SEEN_WITHIN})).mappings().all()
    slices: dict[str, list[SliceKey]] = {}
    for key in await _slices(connection, _SLICES):
        slices.setdefault(key.model, []).append(key)
    return DiscoveryState(
        versions=tuple(SearchedVersion(**row) for row in versions),
        discoveries=await load_discoveries(connection),
        slices={model: tuple(of_model) for model, of_model in slices.items()},
        mark=await _mark(connection),
    )


async def load_discoveries(connection: AsyncConnection) -> tuple[DiscoveryRow, ...]:
    """Return every discovered slice, by id."""
    rows = (await connection.execute(_DISCOVERIES)).mappings()
    return tuple(_discovery(row) for row in rows)


async def active_slices(database: Database) -> list[SliceKey]:
    """Return the confirmed slices of all models, by discovery.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    async with database.begin() as connection:
        return await _slices(connection, _ACTIVE)


async def last_searched(database: Database) -> datetime | None:
    """Return when anything was last searched, or None.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    async with database.begin() as connection:
        return (await _mark(connection))[0]


async def store_round(
    connection: AsyncConnection,
    *,
    after: Mark,
    discoveries: Iterable[StoredRow],
    searches: Sequence[SearchRow],
) -> None:
    """Write the changes of a round, in the caller's transaction; a confirmed slice gets a row of `slice`.

    Parameters
    ----------
    after
        `DiscoveryState.mark` that the round began with.
    discoveries
        New or changed ones.
    searches
        One for each version searched.

    Raises
    ------
    RetryError
        Another round was written since, or a person has decided: nothing is written, for the same exchanges must not
        be counted twice.
    """
    await take_turn(connection)
    if await _mark(connection) != after:
        raise RetryError("the discovered slices were changed in the meantime")
    for stored in discoveries:
        await store(connection, stored, made_by=MONITOR)
    for search in searches:
        values = msgspec.structs.asdict(search)
        await connection.execute(
            upsert(DiscoverySearchTable)
            .values(values)
            .on_conflict_do_update(index_elements=[DiscoverySearchTable.model_version_id], set_=values)
        )


async def take_turn(connection: AsyncConnection) -> None:
    """Take the lock on changes of discovered slices, until the transaction ends."""
    await lock(connection, "discovery_lock")


async def store(
    connection: AsyncConnection, stored: StoredRow, *, made_by: str, before: DiscoveryRow | None = None
) -> None:
    """Write one discovery, and its change of status if there is a reason.

    Parameters
    ----------
    connection
        In a transaction that called `take_turn`.
    stored
        New or changed.
    made_by
        The user of the database who changed it, or `monitor`.
    before
        The row as it was: only what differs is written, because a person may change less than the monitor.
    """
    row = stored.row
    if row.status is DiscoveryStatus.CONFIRMED and row.slice_id is None:
        row = msgspec.structs.replace(row, slice_id=await _slice_id(connection, row))
    discovery_id = await _store(connection, row, before)
    if stored.reason:
        await connection.execute(
            insert(DiscoveryChangeTable).values(
                discovery_id=discovery_id, status=row.status.value, made_by=made_by, reason=stored.reason
            )
        )


async def _mark(connection: AsyncConnection) -> Mark:
    result = await connection.execute(_MARK)
    searched_at, tested_at, changed = result.one()
    return searched_at, tested_at, changed


async def _slice_id(connection: AsyncConnection, row: DiscoveryRow) -> int:
    values = {
        "model": row.model,
        "predicate": row.predicate,
        "name": row.name,
        "definition": msgspec.json.encode({"where": row.where}).decode(),
    }
    await connection.execute(
        text("""
            insert into slice (model, predicate, name, definition)
            values (:model, :predicate, :name, cast(:definition as jsonb)) on conflict do nothing
        """),
        values,
    )
    slice_id = await connection.scalar(
        text("select id from slice where model = :model and predicate = :predicate"),
        {"model": row.model, "predicate": row.predicate},
    )
    assert isinstance(slice_id, int)
    return slice_id


def _values(row: DiscoveryRow) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.structs.asdict(row)
    for derived in ("id", "seen_at"):
        del values[derived]
    return values | {
        "definition": {"where": msgspec.to_builtins(values.pop("where"))},
        "status": row.status.value,
        "metric": row.metric.value,
        "log_wealth": list(row.log_wealth),
    }


async def _store(connection: AsyncConnection, row: DiscoveryRow, before: DiscoveryRow | None) -> int:
    values = _values(row)
    if before is not None:
        old = _values(before)
        values = {name: value for name, value in values.items() if value != old[name]}
    if row.id:
        await connection.execute(update(DiscoveryTable).where(DiscoveryTable.id == row.id).values(values))
        return row.id
    return (
        await connection.execute(insert(DiscoveryTable).values(values).returning(DiscoveryTable.id))
    ).scalar_one()


async def _slices(connection: AsyncConnection, statement: Any) -> list[SliceKey]:
    return [
        SliceKey(
            model=row["model"],
            name=row["name"],
            predicate=row["predicate"],
            where=msgspec.convert(row["definition"].get("where", []), tuple[Predicate, ...]),
        )
        for row in (await connection.execute(statement)).mappings()
    ]


def _discovery(row: RowMapping) -> DiscoveryRow:
    values: Mapping[str, Any] = {key: row[key] for key in DiscoveryRow.__struct_fields__ if key in row}
    return DiscoveryRow(
        **{
            **values,
            "where": msgspec.convert(row["definition"]["where"], tuple[Predicate, ...]),
            "status": DiscoveryStatus(row["status"]),
            "metric": Metric(row["metric"]),
            "log_wealth": tuple(row["log_wealth"]),
        }
    )
