"""Reads and writes of clusterings and of the vectors they are fitted to, and the deletion of old ones."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import RowMapping, text
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.clusters import Clustering, dump_clustering, load_clustering
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.slices import is_describing
from quantdrift.storage.admin.retention import in_chunks
from quantdrift.storage.comparisons.rows import VectorRow
from quantdrift.storage.database import Database
from quantdrift.storage.schema import slice_tables as tables

MOST_BYTES: Final = 64 * 2**20
_NEWEST: Final = text("""
    select distinct on (model, reference_digest, space) id, model, version, reference_digest, space, content, made_at, made_by, n_vectors, from_at, to_at, clusters
    from clustering
    where :model in ('', model) and :digest in ('', reference_digest) and :space in ('', space)
    order by model, reference_digest, space, id desc
""")
_SPACES: Final = text("""
    with recursive known as (
        (select model, reference_digest, space from embedding order by 1, 2, 3 limit 1)
        union all
        select n.* from known k cross join lateral (
            select e.model, e.reference_digest, e.space from embedding e
            where (e.model, e.reference_digest, e.space) > (k.model, k.reference_digest, k.space)
            order by 1, 2, 3 limit 1
        ) n
    )
    select known.*, (
        select count(*) from embedding e
        where (e.model, e.reference_digest, e.space) = (known.model, known.reference_digest, known.space)
    ) as n_vectors, (
        select max(e.captured_at) from embedding e
        where (e.model, e.reference_digest, e.space) = (known.model, known.reference_digest, known.space)
    ) as last_at, newest.made_at as fitted_at, newest.to_at as fitted_to, coalesce(newest.n_vectors, 0) as fitted_n
    from known left join lateral (
        select c.made_at, c.to_at, c.n_vectors from clustering c
        where (c.model, c.reference_digest, c.space) = (known.model, known.reference_digest, known.space)
        order by c.id desc limit 1
    ) newest on true
    order by 1, 2, 3
""")
_WIDTH: Final = text("""
    select octet_length(vector) from embedding
    where model = :model and reference_digest = :digest and space = :space
    order by captured_at desc limit 1
""")
# A vector whose `comparison` row was deleted by retention is kept, without a description.
_SAMPLE: Final = text("""
    with e as materialized (
        select * from embedding
        where model = :model and reference_digest = :digest and space = :space and octet_length(vector) = :n_bytes
        order by captured_at desc, exchange_id, item limit :most
    ), old as materialized (
        select r.* from (select min(captured_at) as first, max(captured_at) as last from e) of
        join condensed_block b on b.captured_to >= of.first and b.captured_from <= of.last
        cross join lateral block_rows(b) r
        where (r.captured_at, r.exchange_id, r.item) in (select captured_at, exchange_id, item from e)
    )
    select e.captured_at, e.exchange_id::text as exchange_id, e.item, e.pi, e.vector,
        coalesce(c.attributes, o.attributes, '{}') as attributes, coalesce(c.features, o.features, '{}') as features,
        coalesce(c.slice_ids, o.slice_ids, '{}') as slice_ids
    from e
    left join comparison c on c.captured_at = e.captured_at and c.exchange_id = e.exchange_id and c.item = e.item
    left join old o on o.captured_at = e.captured_at and o.exchange_id = e.exchange_id and o.item = e.item
    order by e.captured_at, e.exchange_id, e.item
""")
_NAMES: Final = text("""
    select id, name from slice
    where model = :model and predicate <> 'true' and not (definition -> 'where' -> 0 ->> 'key' = any(:learned))
""")
_USED: Final = text("""
    select coalesce(max(version), 0) as version, coalesce(max(next_id), 1) as next_id
    from clustering where model = :model
""")
_OLD_VECTORS: Final = """
    delete from embedding where (captured_at, exchange_id, item) in (
        select captured_at, exchange_id, item from embedding where captured_at < :before limit :chunk
    )
"""
_SURPLUS: Final = text("""
    select captured_at from embedding
    where model = :model and reference_digest = :digest and space = :space
    order by captured_at desc offset :most limit 1
""")
_SURPLUS_VECTORS: Final = """
    delete from embedding where (captured_at, exchange_id, item) in (
        select captured_at, exchange_id, item from embedding
        where model = :model and reference_digest = :digest and space = :space and captured_at <= :before
        limit :chunk
    )
"""
# Comparisons that refer to an older clustering are deleted by then; the newest of each space stays, however old.
_OLD_CLUSTERINGS: Final = """
    delete from clustering where id in (
        select c.id from clustering c
        where c.made_at < :before and exists (
            select from clustering n
            where (n.model, n.reference_digest, n.space) = (c.model, c.reference_digest, c.space)
                and n.id > c.id and n.made_at < :before
        )
        limit :chunk
    )
"""


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of one space: a model, reference and kind of features.

    Parameters
    ----------
    model, reference_digest, space
        Model, reference and space of the vectors.
    n_vectors, last_at
        How many there are, and when the newest was captured.
    fitted_at, fitted_to, fitted_n
        When their newest clustering was made, the newest vector it was fitted to, and to how many; None and 0 before the first.
    """

    model: str
    reference_digest: str
    space: str
    n_vectors: int
    last_at: datetime
    fitted_at: datetime | None
    fitted_to: datetime | None
    fitted_n: int


class Vectors(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The sample of a space, one row per item, by capture time.

    Parameters
    ----------
    vectors : (n, width)
        Float32.
    pi : (n,)
        Total inclusion probabilities, float64.
    exchanges
        Ids of the exchanges.
    slices
        Names of the declared, binned, crossed and discovered slices of each item.
    attributes
        Recorded attributes of each item.
    features
        Features of the inputs of each item that describe clusters, by `describing_key`.
    from_at, to_at
        Capture times of the first and the last; None where there is none.
    """

    vectors: npt.NDArray[np.float32]
    pi: npt.NDArray[np.float64]
    exchanges: list[str]
    slices: list[tuple[str, ...]]
    attributes: list[dict[str, str]]
    from_at: datetime | None
    to_at: datetime | None
    features: list[dict[str, float]] = []


class Stored(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A stored clustering with its origin.

    Parameters
    ----------
    made_at, made_by
        Time of the fit, and the user of the database who asked for it, or `monitor`.
    from_at, to_at, n_vectors
        The rows it was fitted to.
    clusters
        Its clusters as described then, as JSON objects.
    """

    clustering: Clustering
    made_at: datetime
    made_by: str
    from_at: datetime
    to_at: datetime
    n_vectors: int
    clusters: list[dict[str, Any]]


async def newest_id(database: Database) -> int:
    """Return the id of the newest fit of any model, 0 where there is none.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    async with database.begin() as connection:
        return int(
            (await connection.execute(text("select coalesce(max(id), 0) from clustering"))).scalar_one()
        )


async def newest_clusterings(
    database: Database,
    model: str = "",
    *,
    digest: str = "",
    space: str = "",
    unreadable: Callable[[str, OperatorError], None] | None = None,
) -> list[Stored]:
    """Return the newest clustering of every reference and space, of one model or of all.

    Parameters
    ----------
    database
        The record.
    model, digest, space
        Only these; all where left out.
    unreadable
        Called with the name of a clustering that cannot be read, and the reason; it is then left out.

    Raises
    ------
    RetryError
        Postgres is not available.
    OperatorError
        A clustering is damaged or of another version of quantdrift, and there is no `unreadable`.
    """
    key = {"model": model, "digest": digest, "space": space}
    async with database.begin() as connection:
        rows = (await connection.execute(_NEWEST, key)).mappings().all()
    clusterings = []
    for row in rows:
        try:
            clustering = load_clustering(bytes(row["content"]))
        except OperatorError as error:
            if unreadable is None:
                raise
            unreadable(_named(row), error)
            continue
        names = ("made_at", "made_by", "from_at", "to_at", "n_vectors", "clusters")
        clusterings.append(Stored(clustering=clustering, **{name: row[name] for name in names}))
    return clusterings


def _named(row: RowMapping) -> str:
    """Return the name of a row's clustering for messages."""
    return f"{row['model']}, version {row['version']} in `{row['space']}` of reference {row['reference_digest'][:12]}"


async def keep_vectors(database: Database, rows: Sequence[VectorRow]) -> None:
    """Store vectors, each once.

    Raises
    ------
    RetryError
        Postgres is not available or busy: nothing is stored.
    """
    if not rows:
        return
    async with database.begin() as connection:
        await connection.execute(
            upsert(tables.EmbeddingTable).on_conflict_do_nothing(),
            [msgspec.structs.asdict(row) for row in rows],
        )


async def spaces(connection: AsyncConnection) -> list[Space]:
    """Return every space that has vectors."""
    rows = (await connection.execute(_SPACES)).mappings().all()
    return [Space(**row) for row in rows]


async def load_vectors(
    connection: AsyncConnection, space: Space, *, most: int, learned: Sequence[str]
) -> Vectors:
    """Return the newest vectors of a space, at most `most` and at most `MOST_BYTES` of them.

    Vectors of another width than the newest one's are left out.

    Parameters
    ----------
    space
        Which.
    most
        Most rows.
    learned
        Keys of predicates whose slices describe nothing: those that are learned themselves.
    """
    key = {"model": space.model, "digest": space.reference_digest, "space": space.space}
    n_bytes = (await connection.execute(_WIDTH, key)).scalar() or 4
    rows: Sequence[RowMapping] = (
        (
            await connection.execute(
                _SAMPLE, {**key, "n_bytes": n_bytes, "most": min(most, MOST_BYTES // max(n_bytes, 1))}
            )
        )
        .mappings()
        .all()
    )
    named = await connection.execute(_NAMES, {"model": space.model, "learned": list(learned)})
    names = {int(row.id): str(row.name) for row in named}
    vectors = np.frombuffer(b"".join(bytes(row["vector"]) for row in rows), "<f4").astype(np.float32)
    return Vectors(
        vectors=vectors.reshape(len(rows), n_bytes // 4),
        pi=np.array([row["pi"] for row in rows], dtype=np.float64),
        exchanges=[row["exchange_id"] for row in rows],
        slices=[tuple(names[slice_id] for slice_id in row["slice_ids"] if slice_id in names) for row in rows],
        attributes=[row["attributes"] for row in rows],
        features=[
            {key: value for key, value in row["features"].items() if is_describing(key)} for row in rows
        ],
        from_at=rows[0]["captured_at"] if rows else None,
        to_at=rows[-1]["captured_at"] if rows else None,
    )


async def used(connection: AsyncConnection, model: str) -> tuple[int, int]:
    """Return the newest version of a model's clusterings, 0 before the first, and the next free cluster id."""
    row = (await connection.execute(_USED, {"model": model})).one()
    return int(row.version), int(row.next_id)


async def store_clustering(
    connection: AsyncConnection, clustering: Clustering, clusters: str, *, vectors: Vectors, made_by: str
) -> None:
    """Store a fit.

    Parameters
    ----------
    clustering
        With a version that the model has not used.
    clusters
        Their description, as the text of a JSON array.
    vectors
        Vectors that the clustering was fitted to; not empty.
    made_by
        The user of the database who asked for the fit, or `monitor`.

    Raises
    ------
    RetryError
        Somebody else stored that version meanwhile.
    """
    version = await connection.scalar(
        upsert(tables.ClusteringTable)
        .values(
            model=clustering.model,
            version=clustering.version,
            reference_digest=clustering.reference_digest,
            space=clustering.space,
            made_by=made_by,
            from_at=vectors.from_at,
            to_at=vectors.to_at,
            n_vectors=len(vectors.vectors),
            next_id=clustering.next_id,
            clusters=msgspec.json.decode(clusters),
            content=dump_clustering(clustering),
        )
        .on_conflict_do_nothing()
        .returning(tables.ClusteringTable.id)
    )
    if version is None:
        raise RetryError(
            f"version {clustering.version} of the clustering of {clustering.model} was stored by another process"
        )


async def prune(database: Database, *, before: datetime, most: int) -> int:
    """Delete old and surplus vectors, and clusterings that no comparison refers to; return the number of deleted vectors.

    Parameters
    ----------
    before
        Older ones go.
    most
        The newest of each space that are kept; the vectors of one exchange are deleted together.

    Raises
    ------
    RetryError
        Postgres is not available or busy: what was done stays done.
    """
    n_rows = await in_chunks(database, _OLD_VECTORS, {"before": before})
    async with database.begin() as connection:
        known_spaces = await spaces(connection)
    for space in known_spaces:
        key = {"model": space.model, "digest": space.reference_digest, "space": space.space}
        async with database.begin() as connection:
            border = (await connection.execute(_SURPLUS, {**key, "most": most})).scalar()
        if border is not None:
            n_rows += await in_chunks(database, _SURPLUS_VECTORS, {**key, "before": border})
    await in_chunks(database, _OLD_CLUSTERINGS, {"before": before})
    return n_rows
