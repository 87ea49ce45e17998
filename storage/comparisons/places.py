"""The places of values that clients choose, where batches are stored: the database decides, for all shadow workers.

A value without a row gets a place while there is a free one. Without a free place its items count as `(other)`, and its
weight is counted: the leading monitor gives places by these weights.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.admission import COUNTERS_PER_PLACE, MOST_VERSIONS, ShareSketch
from quantdrift.core.records import UNVERIFIED, Predicate
from quantdrift.core.slices import OTHER, SliceKey, ValueRules
from quantdrift.storage.comparisons.rows import ComparedExchange, StoreBatch, VersionKey
from quantdrift.storage.database import Database

_MOST_WEIGHTS: Final = 4_096
"""Slices whose weights are kept before they are added to those of their sources."""
VERSION: Final = "version"
"""The source of the shares of a model's versions; sources of slices contain a dot or a colon."""

OF_SOURCE: Final = """
    s.model = :model and not exists (select from discovery d where d.slice_id = s.id)
        and case when right(:source, 2) = ': ' then starts_with(s.name, :source) and s.name <> :source || '(other)'
            else jsonb_array_length(s.definition -> 'where') = 1 and s.definition -> 'where' -> 0 ->> 'key' = :source
                and s.definition -> 'where' -> 0 ->> 'equals' is not null end
"""
"""Condition of the slices `s` of an attribute, or of a crossed rule. What a search found has places of its own."""
_N_SLICES: Final = text(
    f"select count(*) from slice s where s.lapsed_at is null and {OF_SOURCE}"  # noqa: S608 - a constant
)
_KNOWN_SLICES: Final = text("""
    select s.model, s.predicate,
        s.lapsed_at is null or exists (select from discovery d where d.slice_id = s.id and d.status = 'confirmed')
            as has_place
    from slice s join unnest(cast(:models as text[]), cast(:predicates as text[])) wanted (model, predicate)
        on s.model = wanted.model and s.predicate = wanted.predicate
""")
_BACK: Final = text("""
    with back as (
        update slice set lapsed_at = null
        where model = :model and predicate = any(cast(:names as text[])) and lapsed_at is not null returning id
    )
    insert into slice_change (slice_id, status, made_by, reason)
    select id, 'admitted', 'shadow', 'seen again, and a place is free' from back order by id
""")
_KNOWN_VERSIONS: Final = text("""
    select candidate_version, bool_or(lapsed_at is null) as has_place from model_version
    where model = :model and candidate_version = any(cast(:names as text[])) group by 1
    union all
    select unnest(reserved), true from value_share where model = :model and source = 'version'
""")
_N_VERSIONS: Final = text("""
    select count(*) from (
        select candidate_version from model_version
        where model = :model and lapsed_at is null and candidate_version <> :other
        union select unnest(reserved) from value_share where model = :model and source = 'version'
    ) taken
""")
_VERSIONS_BACK: Final = text("""
    update model_version set lapsed_at = null
    where model = :model and candidate_version = any(cast(:names as text[])) and lapsed_at is not null
""")
_LOCK: Final = text("select from value_share where model = :model and source = :source for update")
_BEGIN: Final = text("""
    insert into value_share (model, source, places, counted_at, total, error, counts, reserved)
    values (:model, :source, :places, now(), 0, 0, '[]', '{}') on conflict do nothing
""")
_READ: Final = text("""
    select places, counted_at, total, error, counts, reserved, now() as now from value_share
    where model = :model and source = :source for update
""")
_WRITE: Final = text("""
    update value_share set places = :places, counted_at = now(), total = :total, error = :error,
        counts = cast(:counts as jsonb), reserved = cast(:reserved as text[])
    where model = :model and source = :source
""")


class SharesRow(msgspec.Struct, kw_only=True):
    """A row of `value_share`, locked, with its weights as of now.

    Parameters
    ----------
    model, source, places
        As in the table.
    shares
        The weights.
    keys
        Of each value in the sketch, the slice that it is or would be; of a version, a key without conditions.
    reserved
        Versions that were given a place and have no row yet.
    now
        Time of the transaction.
    """

    model: str
    source: str
    places: int
    shares: ShareSketch
    keys: dict[str, SliceKey]
    reserved: list[str]
    now: datetime


async def read_shares(connection: AsyncConnection, model: str, source: str) -> SharesRow | None:
    """Return the weights of a source after decay, and lock them; None: nothing was counted of it."""
    row = (await connection.execute(_READ, {"model": model, "source": source})).mappings().one_or_none()
    if row is None:
        return None
    shares = ShareSketch(
        COUNTERS_PER_PLACE * row["places"],
        {entry["predicate"]: entry["weight"] for entry in row["counts"]},
        row["total"],
        row["error"],
    )
    shares.decay(row["now"] - row["counted_at"])
    return SharesRow(
        model=model,
        source=source,
        places=row["places"],
        shares=shares,
        keys={
            entry["predicate"]: SliceKey(
                model=model,
                name=entry["name"],
                predicate=entry["predicate"],
                where=msgspec.convert(entry["where"], tuple[Predicate, ...]),
            )
            for entry in row["counts"]
        },
        reserved=list(row["reserved"]),
        now=row["now"],
    )


async def write_shares(connection: AsyncConnection, row: SharesRow) -> None:
    """Store the weights that were read in this transaction and changed."""
    counts = [
        {
            "predicate": value,
            "name": row.keys[value].name,
            "where": msgspec.to_builtins(row.keys[value].where),
            "weight": weight,
        }
        for value, weight in row.shares.counts.items()
    ]
    await connection.execute(
        _WRITE,
        {
            "model": row.model,
            "source": row.source,
            "places": row.places,
            "total": row.shares.total,
            "error": row.shares.error,
            "counts": json.dumps(counts),
            "reserved": row.reserved,
        },
    )


class Places:
    """The places of values, as one shadow worker sees them: it asks the database for places and counts weights.

    Parameters
    ----------
    rules
        The rules whose slices are made of values.
    """

    def __init__(self, rules: ValueRules) -> None:
        self._rules = rules
        self._counted: dict[tuple[str, str], _Counted] = {}
        self._weights: dict[int, float] = {}
        self._keys: dict[int, SliceKey] = {}

    def is_ruled(self, key: SliceKey) -> bool:
        """Return whether a slice is made of a value that clients choose: it needs a place."""
        return self._rules.of(key) is not None

    async def slices(
        self, connection: AsyncConnection, keys: Iterable[SliceKey]
    ) -> dict[tuple[str, str], SliceKey]:
        """Return for each slice, by model and predicate, the slice that its items are stored under.

        Values without a place get one while there is a free one.
        """
        by_id = {(key.model, key.predicate): key for key in keys}
        ruled = {name: rule for name, key in by_id.items() if (rule := self._rules.of(key)) is not None}
        if not ruled:
            return by_id
        rows = await connection.execute(
            _KNOWN_SLICES,
            {"models": [model for model, _ in ruled], "predicates": [predicate for _, predicate in ruled]},
        )
        placed = {(row.model, row.predicate) for row in rows if row.has_place}
        wanting: dict[tuple[str, str, int], list[str]] = {}
        for name, rule in ruled.items():
            if name not in placed:
                wanting.setdefault((rule.model, rule.source, rule.most), []).append(name[1])
        for (model, source, most), names in sorted(wanting.items()):
            free = await self._free(connection, _N_SLICES, {"model": model, "source": source}, most)
            admitted = sorted(names)[:free]
            if admitted:
                await connection.execute(_BACK, {"model": model, "names": admitted})
                placed.update((model, name) for name in admitted)
        return {
            name: key if name in placed or name not in ruled else ruled[name].other(key)
            for name, key in by_id.items()
        }

    async def versions(
        self, connection: AsyncConnection, keys: Collection[VersionKey]
    ) -> dict[VersionKey, VersionKey]:
        """Return for each version the one that its items are stored under; otherwise as for slices."""
        placed: dict[str, set[str]] = {}
        for model in sorted({key.model for key in keys}):
            named = {key.candidate_version for key in keys if key.model == model}
            names = sorted(named - {OTHER, OTHER + UNVERIFIED})
            rows = await connection.execute(_KNOWN_VERSIONS, {"model": model, "names": names})
            placed[model] = {row.candidate_version for row in rows if row.has_place}
            wanting = [name for name in names if name not in placed[model]]
            if wanting:
                counted = {"model": model, "other": OTHER}
                free = await self._free(connection, _N_VERSIONS, counted, MOST_VERSIONS)
                if admitted := wanting[:free]:
                    await connection.execute(_VERSIONS_BACK, {"model": model, "names": admitted})
                    placed[model].update(admitted)
        return {
            key: key
            if key.candidate_version in placed[key.model]
            else msgspec.structs.replace(
                key,
                candidate_version=OTHER + (UNVERIFIED if key.candidate_version.endswith(UNVERIFIED) else ""),
            )
            for key in keys
        }

    async def _free(self, connection: AsyncConnection, count: Any, what: Mapping[str, str], most: int) -> int:
        """Return the number of free places; if there are any, no other worker can take them until the commit."""
        if int(await connection.scalar(count, what) or 0) >= most:
            return 0
        row = {"model": what["model"], "source": what.get("source", VERSION)}
        await connection.execute(_BEGIN, {**row, "places": most})
        await connection.execute(_LOCK, row)  # readers may lock no row
        return max(most - int(await connection.scalar(count, what) or 0), 0)

    def count(self, batch: StoreBatch) -> None:
        """Count the weights of a batch that was stored."""
        versions: dict[tuple[str, str], float] = {}
        combinations: dict[int, float] = {}
        for compared in batch.compared:
            each = 1.0 / _pi(compared)
            of_version = compared.exchange.model, compared.version.candidate_version
            versions[of_version] = versions.get(of_version, 0.0) + len(compared.items) * each
            for item in compared.items:
                name = id(item.slices)
                combinations[name] = combinations.get(name, 0.0) + each
        weights, keys = self._weights, self._keys
        for name, of_combination in batch.combinations.items():
            weight = combinations[name]
            for key in of_combination:
                # By identity, which is quicker than by content: an entry keeps its slice alive, so that no other object gets its id.
                place = id(key)
                if place in weights:
                    weights[place] += weight
                else:
                    weights[place] = weight
                    keys[place] = key
        if len(weights) > _MOST_WEIGHTS:
            self._sum_up()
        for (model, candidate), weight in versions.items():
            self._of(model, VERSION, MOST_VERSIONS).add(
                SliceKey(model=model, name=candidate, predicate=candidate), weight
            )
        for case in batch.unreferenced:
            version = case.version.candidate_version
            self._of(case.version.model, VERSION, MOST_VERSIONS).add(
                SliceKey(model=case.version.model, name=version, predicate=version), 1.0
            )

    def _sum_up(self) -> None:
        """Add the weights of slices to those of their sources."""
        for place, key in self._keys.items():
            if (rule := self._rules.of(key)) is not None:
                self._of(key.model, rule.source, rule.most).add(key, self._weights[place])
        self._weights, self._keys = {}, {}

    async def flush(self, database: Database) -> None:
        """Add what was counted since the last call to the table; what cannot be stored is kept for the next call.

        Raises
        ------
        RetryError, OperatorError
            As `Database.begin`.
        """
        self._sum_up()
        for (model, source), counted in sorted(self._counted.items()):
            async with database.begin() as connection:
                what = {"model": model, "source": source, "places": counted.most}
                await connection.execute(_BEGIN, what)
                row = await read_shares(connection, model, source)
                assert row is not None
                row.places = counted.most
                row.shares.n_counters = COUNTERS_PER_PLACE * counted.most
                row.shares.merge(counted.shares)
                row.keys |= counted.keys
                await write_shares(connection, row)
            del self._counted[model, source]

    def _of(self, model: str, source: str, most: int) -> "_Counted":
        counted = self._counted.get((model, source))
        if counted is None:
            counted = self._counted[model, source] = _Counted(most)
        return counted


class _Counted:
    """What a worker has counted of a source since it was last stored."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.shares = ShareSketch(COUNTERS_PER_PLACE * most)
        self.keys: dict[str, SliceKey] = {}

    def add(self, key: SliceKey, weight: float) -> None:
        self.shares.add(key.predicate, weight)
        self.keys[key.predicate] = key
        if len(self.keys) > 2 * len(self.shares.counts) + 1:
            self.keys = {value: self.keys[value] for value in self.shares.counts}


def _pi(compared: ComparedExchange) -> float:
    return compared.exchange.sampling.pi1 * compared.exchange.sampling.pi2
