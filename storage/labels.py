"""True labels: which side was right about a compared item. What is loaded, and the sums over the people of each slice."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

import asyncpg
import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts.estimate import ClusterSums, SharedSums
from quantdrift.storage import snapshot
from quantdrift.storage.audit import Action, add
from quantdrift.storage.comparisons.point import of_labels
from quantdrift.storage.figures.estimates import (
    SliceClusters,
    SummedVersion,
    cluster_sums,
    hashed,
    statement,
    sums_of,
)
from quantdrift.storage.snapshot import in_time

EXCHANGE: Final = "exchange"
TRACE: Final = "trace"
MOST_NAMED: Final = 5  # unmatched keys that are named
_COLUMNS: Final = ("n", "key", "item", "label", "class", "candidate_right", "reference_right", "drawn_for")
_STAGE: Final = """
    create temp table given (
        n bigint, key text, item smallint, label text, class int, candidate_right boolean, reference_right boolean,
        drawn_for int
    ) on commit drop
"""
_KEYS: Final = {EXCHANGE: "c.exchange_id::text", TRACE: "split_part(c.trace, '-', 2)"}
_ATTRIBUTE: Final = "c.attributes ->> cast(:by as text)"
_MATCHED: Final = """
    create temp table matched (
        n bigint, captured_at timestamptz, exchange_id uuid, item smallint, model_version_id int, label text, drawn_for int,
        candidate_right boolean, reference_right boolean
    ) on commit drop
"""
_MATCH: Final = """
    insert into matched
    select distinct on (c.captured_at, c.exchange_id, c.item)
        g.n, c.captured_at, c.exchange_id, c.item, c.model_version_id, g.label, g.drawn_for,
        coalesce(g.candidate_right, (c.detail ->> 'candidate_top')::int = g.class) as candidate_right,
        coalesce(g.reference_right, (c.detail ->> 'reference_top')::int = g.class) as reference_right
    from given g
    join {rows} on {key} = g.key and c.item = g.item
    join model_version v on v.id = c.model_version_id and v.model = :model
    where c.captured_at >= :since
    order by c.captured_at, c.exchange_id, c.item, g.n desc
"""
# In two statements: an index finds those of `comparison`.
_ROWS: Final = (
    "comparison c",
    "(select r.* from condensed_block b cross join lateral block_rows(b) r where b.captured_to >= :since) c",
)
_STORE: Final = """
    insert into label (
        captured_at, exchange_id, item, model_version_id, label, candidate_right, reference_right, drawn_for, as_it_came
    )
    select captured_at, exchange_id, item, model_version_id, label, candidate_right, reference_right, drawn_for, drawn_for is null
    from matched where candidate_right is not null and reference_right is not null
    on conflict (captured_at, exchange_id, item) do update set label = excluded.label,
        candidate_right = excluded.candidate_right, reference_right = excluded.reference_right, loaded_at = now(),
        drawn_for = coalesce(excluded.drawn_for, label.drawn_for), as_it_came = label.as_it_came or excluded.as_it_came
"""
_COUNTS: Final = text("""
    select count(*) as matched,
        count(*) filter (where candidate_right is null or reference_right is null) as undecided from matched
""")
_UNMATCHED: Final = text("""
    with unmatched as (
        select n, key from given where not exists (select from matched where matched.n = given.n)
    )
    select (select count(*) from unmatched) as n, array(select key from unmatched order by n limit :most) as named
""")
_MEASURES: Final = {
    "harm": "(l.reference_right and not l.candidate_right)::int",
    "help": "(l.candidate_right and not l.reference_right)::int",
    "both_wrong": "(not l.candidate_right and not l.reference_right)::int",
}
_LABELLED: Final = f"""
        from label l {of_labels(":begin", ":end")}
        where l.captured_at >= :begin and l.captured_at < :end and l.model_version_id = any(cast(:versions as int[]))
"""
_OUTCOMES: Final = statement(
    _MEASURES,
    f"{_LABELLED} and l.as_it_came",
    at="cast(:begin as timestamptz)",
    product=("help", "harm"),
)
_DRAWN: Final = statement(
    _MEASURES,
    f"{_LABELLED} and c.flip and l.drawn_for = any(cast(:drawn_for as int[]))",
    at="cast(:begin as timestamptz)",
    product=("help", "harm"),
)
# A number of each item that says nothing about it and never changes: who takes the smallest ones of a slice draws at random,
# and draws for two slices agree about the items of both.
_NUMBER: Final = "md5(c.exchange_id::text || ':' || c.item::text)"
_WANTED: Final = f"""
    select c.captured_at, c.exchange_id::text as exchange_id, c.item, c.model_version_id, c.trace, c.attributes ->> :header as request_id,
        (c.detail ->> 'reference_top')::int as reference, (c.detail ->> 'candidate_top')::int as candidate
    from comparisons(:begin, :end, array[cast(:slice as int)], true) c
    left join label l on l.captured_at = c.captured_at and l.exchange_id = c.exchange_id and l.item = c.item
    where c.model_version_id = :version and c.slice_ids @> array[cast(:slice as int)] and c.flip and l.drawn_for is null
    order by {_NUMBER} limit :n
"""  # noqa: S608 - constant text
_DRAWS: Final = text("""
    select s.id, s.predicate = 'true' as is_all from slice s where s.id in (
        select drawn_for from label where captured_at >= :begin and captured_at < :end
            and model_version_id = any(cast(:versions as int[]))
    )
""")
_CHANGED: Final = {"flip": "c.flip::int"}
_NAMES: Final = text("select id, name from slice where id = any(cast(:slices as int[]))")


class LabelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a file of labels.

    Parameters
    ----------
    n
        Its number in the file.
    key
        What finds the exchange.
    item
        Index of the item in the exchange.
    label
        The true class as written, or None.
    number
        Number of that class, from 0, or None.
    candidate_right, reference_right
        Which side was right, where the file says it; None: the class says it.
    drawn_for
        Slice for which it was drawn (`draw`); None: the label came by itself.
    """

    n: int
    key: str
    item: int = 0
    label: str | None = None
    number: int | None = None
    candidate_right: bool | None = None
    reference_right: bool | None = None
    drawn_for: int | None = None


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the rows of a file.

    Parameters
    ----------
    rows
        That could be read.
    labelled
        Items that have a label now. A row labels every exchange that its key finds.
    undecided
        Items that were found and have no answer to compare with the label.
    unmatched
        Rows that found no compared item: their requests were not sampled, or are older than what is kept.
    unmatched_keys
        Some of their keys.
    """

    rows: int
    labelled: int
    undecided: int
    unmatched: int
    unmatched_keys: tuple[str, ...]


class _Sides(msgspec.Struct, frozen=True, kw_only=True):
    """Which side was right about labelled items, as sums over people and exchanges.

    Parameters
    ----------
    n_items, n_clusters
        Labelled items, and their people; an exchange without a person counts as one.
    harm
        Items that the reference answers rightly and the candidate wrongly.
    help
        Items that the candidate answers rightly and the reference wrongly.
    both_wrong
        Items that neither answers rightly.
    help_and_harm
        The products of the two over clusters.
    """

    n_items: int = 0
    n_clusters: int = 0
    harm: ClusterSums = ClusterSums()
    help: ClusterSums = ClusterSums()
    both_wrong: ClusterSums = ClusterSums()
    help_and_harm: SharedSums = SharedSums()


class Drawn(_Sides, frozen=True, kw_only=True):
    """What the labels of drawn changed answers of a slice say.

    Parameters
    ----------
    changed
        The share of changed answers among all that were compared in the same time.
    """

    changed: ClusterSums


class LabelOutcome(_Sides, frozen=True, kw_only=True):
    """What the labels say of one slice of one version.

    Parameters
    ----------
    drawn
        What those say that were drawn for somebody to label (`draw`); the other sums are of those that came by themselves.
    """

    model_version_id: int
    slice_id: int
    slice: str
    drawn: Drawn | None = None


class WantedLabel(msgspec.Struct, frozen=True, kw_only=True):
    """A changed answer of which a label is wanted.

    Parameters
    ----------
    exchange_id, item
        What it is, as in `comparison`.
    request_id
        The recorded header that names the request; None: it was not recorded.
    trace
        The traceparent, as the client sent it; empty if it sent none.
    reference, candidate
        Classes of the two answers; None for tasks without classes.
    """

    captured_at: datetime
    exchange_id: str
    item: int
    model_version_id: int
    request_id: str | None
    trace: str
    reference: int | None
    candidate: int | None


async def draw(
    connection: AsyncConnection,
    *,
    version_id: int,
    slice_id: int,
    begin: datetime,
    end: datetime,
    n: int,
    header: str,
) -> list[WantedLabel]:
    """Draw `n` changed answers of a slice at random, each with the same probability; asked again, the same until they are labelled.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    values = {"version": version_id, "slice": slice_id, "begin": begin, "end": end, "n": n, "header": header}
    rows = (await connection.execute(text(_WANTED.replace("::", "\\:\\:")), values)).mappings()
    return [WantedLabel(**dict(row) | {"trace": row["trace"] or ""}) for row in rows]


async def load(
    connection: AsyncConnection,
    rows: Sequence[LabelRow],
    *,
    model: str,
    by: str,
    since: datetime,
    source: str,
    identity: str = "",
) -> Loaded:
    """Store the labels of the compared items that the keys find, in place of what they had, and write the audit.

    Parameters
    ----------
    by
        `exchange`, `trace`, or the name of a recorded attribute such as `header.x-request-id`.
    since
        Only exchanges captured from here on are looked at.
    source
        Name of the file, for the audit.
    identity
        The person whom the web server has authenticated; empty: the database user.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    await connection.execute(text(_STAGE))
    driver: asyncpg.Connection = (await connection.get_raw_connection()).driver_connection
    records = [
        (
            row.n,
            row.key,
            row.item,
            row.label,
            row.number,
            row.candidate_right,
            row.reference_right,
            row.drawn_for,
        )
        for row in rows
    ]
    await driver.copy_records_to_table("given", records=records, columns=_COLUMNS)
    await connection.execute(text("analyze given"))
    await connection.execute(text(_MATCHED))
    match = _MATCH.replace("{key}", _KEYS.get(by, _ATTRIBUTE)).replace("::", "\\:\\:")
    values: dict[str, Any] = {"model": model, "since": since}
    for kept_in in _ROWS:
        statement = text(match.replace("{rows}", kept_in))
        await connection.execute(statement, values if by in _KEYS else {**values, "by": by})
    await connection.execute(text(_STORE))
    counts = (await connection.execute(_COUNTS)).one()
    unmatched = (await connection.execute(_UNMATCHED, {"most": MOST_NAMED})).one()
    loaded = Loaded(
        rows=len(rows),
        labelled=counts.matched - counts.undecided,
        undecided=counts.undecided,
        unmatched=unmatched.n,
        unmatched_keys=tuple(unmatched.named),
    )
    after: dict[str, Any] = {"file": source, "by": by, "rows": loaded.rows, "labelled": loaded.labelled}
    if identity:
        after["identity"] = identity
    await add(connection, Action.LABELS_LOAD, model=model, after=after)
    return loaded


async def outcomes(
    connection: AsyncConnection, versions: Sequence[int], begin: datetime, end: datetime, *, slice_id: int = 0
) -> list[LabelOutcome]:
    """Return what the labels of [begin, end) say of each slice of some versions; slices without a label are left out.

    Parameters
    ----------
    slice_id
        Only of this slice; 0: of all.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    values = {"begin": begin, "end": end, "versions": list(versions)}
    came = {
        (sums.version_id, sums.slice_id): sums
        for sums in await _sums(connection, _OUTCOMES, values, [slice_id] if slice_id else None)
    }
    drawn = await _drawn(connection, values, slice_id)
    if not came and not drawn:
        return []
    names = {
        row.id: row.name
        for row in await connection.execute(_NAMES, {"slices": [of_slice for _, of_slice in (*came, *drawn)]})
    }
    return [
        LabelOutcome(
            model_version_id=key[0],
            slice_id=key[1],
            slice=names[key[1]],
            drawn=drawn.get(key),
            **_fields(came[key]) if key in came else {},
        )
        for key in sorted({*came, *drawn})
    ]


async def _sums(
    connection: AsyncConnection, query: str, values: Mapping[str, Any], slices: Sequence[int] | None
) -> list[SliceClusters]:
    rows = await hashed(connection, text(query.replace("::", "\\:\\:")), {**values, "slices": slices})
    return [sums_of(row, _MEASURES) for row in rows]


async def _drawn(
    connection: AsyncConnection, values: Mapping[str, Any], slice_id: int
) -> dict[tuple[int, int], Drawn]:
    """Return what the drawn labels say, by version and slice.

    What was drawn for all traffic is a fair draw of each slice; what was drawn for one slice says nothing of the others. Draws of
    several times count as one: what a change costs is taken to be the same in all of the time that is asked about.
    """
    rows = (await connection.execute(_DRAWS, values)).all()
    everything = [row.id for row in rows if row.is_all]
    own = [row.id for row in rows if not row.is_all and slice_id in {0, row.id}]
    drawn_sums: dict[tuple[int, int], SliceClusters] = {}
    for draws, slices in (
        *(((everything, [slice_id] if slice_id else None),) if everything else ()),
        *(([slice_, *everything], [slice_]) for slice_ in own),
    ):
        sums = await _sums(connection, _DRAWN, {**values, "drawn_for": draws}, slices)
        drawn_sums |= {(slice_.version_id, slice_.slice_id): slice_ for slice_ in sums}
    if not drawn_sums:
        return {}
    sides = [
        SummedVersion(version_id=version, begin=values["begin"], end=values["end"], cap=1.0)
        for version in sorted({version for version, _ in drawn_sums})
    ]
    of_slices = sorted({slice_ for _, slice_ in drawn_sums})
    changed = {
        (slice_.version_id, slice_.slice_id): slice_.of["flip"]
        for slice_ in await cluster_sums(connection, sides, slice_ids=of_slices, measures=_CHANGED)
    }
    return {
        key: Drawn(changed=changed[key], **_fields(slice_))
        for key, slice_ in drawn_sums.items()
        if key in changed
    }


def _fields(one: SliceClusters) -> dict[str, Any]:
    return {
        "n_items": one.n_items,
        "n_clusters": one.n_clusters,
        "harm": one.of["harm"],
        "help": one.of["help"],
        "both_wrong": one.of["both_wrong"],
        "help_and_harm": SharedSums(
            weights=one.of["harm"].weight_sq,
            old_total=one.of["help"].cross,
            new_total=one.of["harm"].cross,
            totals=float(one.product),
        ),
    }


async def outcome_of_slice(
    connection: AsyncConnection, version_id: int, slice_id: int, begin: datetime, end: datetime
) -> LabelOutcome | None:
    """Return what true labels say of a slice, None without labels or where they take too long to read."""
    of_slice = await in_time(
        connection,
        partial(outcomes, connection, [version_id], begin, end, slice_id=slice_id),
        snapshot.PAST_PATIENCE_S,
    )
    return of_slice[0] if of_slice else None
