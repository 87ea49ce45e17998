"""True labels: which side was right about a compared item. What is loaded, and the sums over the people of each slice."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import asyncpg
import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts.estimate import ClusterSums, SharedSums
from quantdrift.storage.audit import Action, add
from quantdrift.storage.estimates import hashed, statement, sums_of

EXCHANGE: Final = "exchange"
TRACE: Final = "trace"
MOST_NAMED: Final = 5  # unmatched keys that are named
_COLUMNS: Final = ("n", "key", "item", "label", "class", "candidate_right", "reference_right")
_STAGE: Final = """
    create temp table given (
        n bigint, key text, item smallint, label text, class int, candidate_right boolean, reference_right boolean
    ) on commit drop
"""
_KEYS: Final = {EXCHANGE: "c.exchange_id::text", TRACE: "split_part(c.trace, '-', 2)"}
_ATTRIBUTE: Final = "c.attributes ->> cast(:by as text)"
_MATCH: Final = """
    create temp table matched on commit drop as
    select distinct on (c.captured_at, c.exchange_id, c.item)
        g.n, c.captured_at, c.exchange_id, c.item, c.model_version_id, g.label,
        coalesce(g.candidate_right, (c.detail ->> 'candidate_top')::int = g.class) as candidate_right,
        coalesce(g.reference_right, (c.detail ->> 'reference_top')::int = g.class) as reference_right
    from given g
    join comparison c on {key} = g.key and c.item = g.item
    join model_version v on v.id = c.model_version_id and v.model = :model
    where c.captured_at >= :since
    order by c.captured_at, c.exchange_id, c.item, g.n desc
"""
_STORE: Final = """
    insert into label (captured_at, exchange_id, item, model_version_id, label, candidate_right, reference_right)
    select captured_at, exchange_id, item, model_version_id, label, candidate_right, reference_right from matched
    where candidate_right is not null and reference_right is not null
    on conflict (captured_at, exchange_id, item) do update set label = excluded.label,
        candidate_right = excluded.candidate_right, reference_right = excluded.reference_right, loaded_at = now()
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
_OUTCOMES: Final = statement(
    _MEASURES,
    """
        from label l join comparison c using (captured_at, exchange_id, item)
        where l.captured_at >= :begin and l.captured_at < :end and l.model_version_id = any(cast(:versions as int[]))
    """,
    at="cast(:begin as timestamptz)",
    product=("help", "harm"),
)
_NAMES: Final = text("select id, name from slice where id = any(cast(:slices as int[]))")


class Row(msgspec.Struct, frozen=True, kw_only=True):
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
    """

    n: int
    key: str
    item: int = 0
    label: str | None = None
    number: int | None = None
    candidate_right: bool | None = None
    reference_right: bool | None = None


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


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the labels say of one slice of one version, as sums over people and exchanges.

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

    model_version_id: int
    slice_id: int
    slice: str
    n_items: int
    n_clusters: int
    harm: ClusterSums
    help: ClusterSums
    both_wrong: ClusterSums
    help_and_harm: SharedSums = SharedSums()


async def load(
    connection: AsyncConnection,
    rows: Sequence[Row],
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
        (row.n, row.key, row.item, row.label, row.number, row.candidate_right, row.reference_right)
        for row in rows
    ]
    await driver.copy_records_to_table("given", records=records, columns=_COLUMNS)
    await connection.execute(text("analyze given"))
    match = text(_MATCH.replace("{key}", _KEYS.get(by, _ATTRIBUTE)).replace("::", "\\:\\:"))
    values: dict[str, Any] = {"model": model, "since": since}
    await connection.execute(match, values if by in _KEYS else {**values, "by": by})
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
) -> list[Outcome]:
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
    values = {
        "begin": begin,
        "end": end,
        "versions": list(versions),
        "slices": [slice_id] if slice_id else None,
    }
    rows = await hashed(connection, text(_OUTCOMES.replace("::", "\\:\\:")), values)
    found = [sums_of(row, _MEASURES) for row in rows]
    names = {
        row.id: row.name
        for row in await connection.execute(_NAMES, {"slices": [one.slice_id for one in found]})
    }
    return [
        Outcome(
            model_version_id=one.version_id,
            slice_id=one.slice_id,
            slice=names[one.slice_id],
            n_items=one.n_items,
            n_clusters=one.n_clusters,
            harm=one.of["harm"],
            help=one.of["help"],
            both_wrong=one.of["both_wrong"],
            help_and_harm=SharedSums(
                weights=one.of["harm"].weight_sq,
                old_total=one.of["help"].cross,
                new_total=one.of["harm"].cross,
                totals=float(one.product),
            ),
        )
        for one in found
    ]
