"""Sums over people and exchanges, in one pass over the comparisons: what `quantdrift.facts.estimate` makes estimates of.

The exchanges of one person (`comparison.group_key`) are one cluster for the whole time that is asked about; an exchange without a
person is a cluster of its own. The items of an exchange in a slice share its weight in equal parts. Rows are added up by their set
of slices first, so a comparison is read once, whatever the number of its slices.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import Interval, RowMapping, TextClause, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Metric
from quantdrift.core.signals import signal_of
from quantdrift.facts.estimate import LEVEL, ClusterSums, Estimate, SharedSums, added, of_groups, ratio
from quantdrift.facts.interval import HIGHEST
from quantdrift.storage.signals import MEASURES

MOST_ROWS: Final = 5_000_000
"""With more of them in a time, sums are taken from the roll-ups, which know people by the hour and in 32 groups."""
STATEMENT_S: Final = 600.0
"""Longest statement of a command that reads so many."""
ROLL_UP: Final = """sum(n_items)::bigint as n_items, sum(n_groups)::bigint as n_exchanges, sum(weight) as weight, sum(weight_sq) as weight_sq,
    sum(least(flip, flip_weight)) as flip, sum(flip_weight) as flip_weight,
    sum(divergence) as divergence, sum(divergence_weight) as divergence_weight, sum(tie) as tie, sum(tie_weight) as tie_weight,
    sum(n_infinite)::bigint as n_infinite, sum(weight * n_items / nullif(n_groups, 0)) as items, max(cap) as cap, max(coalesce(heaviest, 0)) as heaviest,
    sum(coalesce(flip_weight_sq, flip_weight * weight_sq / nullif(weight, 0))) as flip_weight_sq,
    sum(coalesce(flip_sq, least(flip, flip_weight) * weight_sq / nullif(weight, 0))) as flip_total_sq,
    sum(coalesce(flip_cross, least(flip, flip_weight) * weight_sq / nullif(weight, 0))) as flip_cross,
    case when count(divergence_sq) = count(*) then sum(divergence_weight_sq) end as divergence_weight_sq,
    sum(divergence_sq) as divergence_total_sq, sum(divergence_cross) as divergence_cross, array_sum(people) filter (where people is not null) as people"""
"""Aggregates over rows of a roll-up: what `roll_up_of` reads. Of a row without squares an exchange, or a closed session, counts as
one, and the divergence has none."""
_OF_PEOPLE: Final = 67  # numbers of each measure in `rollup_hour.people`
MORE_MEASURES: Final = {**MEASURES, "tie": "c.tie::int"}
# How many groups there are is not known to the planner, which would sort all rows: three times the processor time.
_HASHED: Final = text(
    "select set_config('enable_sort', 'off', true), set_config('enable_incremental_sort', 'off', true),"
    " set_config('work_mem', '64MB', true)"
)
_AS_BEFORE: Final = text(
    "select set_config(name, reset_val || coalesce(unit, ''), true) from pg_settings"
    " where name in ('enable_sort', 'enable_incremental_sort', 'work_mem')"
)
_SIDES: Final = """
        from comparisons(:begin, :end) c
        join unnest(
            cast(:versions as int[]), cast(:begins as timestamptz[]), cast(:ends as timestamptz[]), cast(:caps as double precision[])
        ) as side (id, begin_at, end_at, cap)
            on side.id = c.model_version_id and c.captured_at >= side.begin_at and c.captured_at < side.end_at
        where c.captured_at >= :begin and c.captured_at < :end
"""


class SummedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version with the time of which its comparisons are summed, [begin, end), and the cap of its divergence."""

    version_id: int
    begin: datetime
    end: datetime
    cap: float


class SliceClusters(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one slice of one version, over one bucket or the whole time (`at` is its begin).

    Parameters
    ----------
    n_items, n_exchanges, n_clusters
        Items and exchanges compared, and people; an exchange without a person counts as one.
    weight, items
        Sum of 1 / pi over the exchanges: an estimate of how many came; and over their answers.
    of
        The sums of each measure.
    n_infinite
        Items whose divergence was infinite.
    shared
        By measure, the sums over the people whom both versions have answered; only where two versions are compared.
    product
        Sum over clusters of the product of two measures; only where it was asked for.
    """

    version_id: int
    slice_id: int
    at: datetime
    n_items: int
    n_exchanges: int
    n_clusters: int
    weight: float
    items: float = 0.0
    of: Mapping[str, ClusterSums]
    n_infinite: int = 0
    shared: Mapping[str, SharedSums] = {}
    product: float = 0.0


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the exchanges of one slice, from comparisons or roll-ups.

    Parameters
    ----------
    n_items, n_groups
        Items and exchanges compared.
    weight, weight_sq, items
        Sum of 1 / pi over exchanges, and of its square; a session counts as one in the latter. And the sum over their answers.
    n_infinite
        Items whose divergence was infinite.
    tie, tie_weight
        Weighted sum of the decisions that differ by equal top scores alone, and the weight of those that can.
    cap
        Of a single divergence.
    of
        The sums over people and exchanges of flips and of the divergence. Of a roll-up without squares those of the
        divergence are 0.
    """

    n_items: int = 0
    n_groups: int = 0
    weight: float = 0.0
    weight_sq: float = 0.0
    items: float = 0.0
    n_infinite: int = 0
    tie: float = 0.0
    tie_weight: float = 0.0
    cap: float = HIGHEST
    of: Mapping[str, ClusterSums] = {}

    def __add__(self, other: "Sums") -> "Sums":
        names = {*self.of, *other.of}
        return Sums(
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMMED},
            cap=max(self.cap, other.cap),
            of={name: added(self.of.get(name), other.of.get(name)) for name in names},
        )

    @property
    def n_effective(self) -> float:
        """Kish's effective number of independent exchanges or sessions, weight^2 / weight_sq; 0 where there are none."""
        return self.weight**2 / self.weight_sq if self.weight_sq else 0.0

    def n_effective_of(self, metric: Metric) -> float:
        """Return the part of `n_effective` that has a metric: flip or divergence."""
        return self.n_effective * self.sums_of(metric).weight / self.weight if self.weight else 0.0

    def estimate(self, metric: Metric, level: float = LEVEL) -> Estimate | None:
        """Return the mean of a signal with its interval at a level; None where no item has it."""
        return ratio(self.sums_of(metric), 1.0 if signal_of(metric).is_share else self.cap, level)

    def sums_of(self, metric: Metric) -> ClusterSums:
        """Return the sums over people and exchanges of flips or of the divergence."""
        return self.of.get(metric.value, ClusterSums())


_SUMMED: Final = tuple(name for name in Sums.__struct_fields__ if name not in {"of", "cap"})


# What each step computes of a measure {m}: its rows (or clusters), and the sums of w, w^2, y, y^2 and w y, with y the weight times
# the value. First over rows that are alike, then over sets of slices, over the items of an exchange, and over a person's exchanges.
_OF_ROWS: Final = """
            cast(count({m}) as float8) as {m}_n, sum(w) filter (where {m} is not null) as {m}_w, sum(w * w) filter (where {m} is not null) as {m}_ww,
            coalesce(sum(w * {m}), 0) as {m}_y, sum(w * w * {m} * {m}) as {m}_yy, sum(w * w * {m}) as {m}_wy"""
_OF_SLICE: Final = """
            sum({m}_n) as {m}_n, sum({m}_w) as {m}_w, sum({m}_ww) as {m}_ww, sum({m}_y) as {m}_y, sum({m}_yy) as {m}_yy,
            sum({m}_wy) as {m}_wy"""
_OF_EXCHANGE: Final = """
            case when exchange is null then {m}_n else least({m}_n, 1) end as {m}_n, {m}_w / parts as {m}_w, {m}_y / parts as {m}_y,
            case when exchange is null then {m}_ww else ({m}_w / parts) ^ 2 end as {m}_ww,
            case when exchange is null then {m}_yy else ({m}_y / parts) ^ 2 end as {m}_yy,
            case when exchange is null then {m}_wy else {m}_w / parts * {m}_y / parts end as {m}_wy"""
_OF_CLUSTER: Final = """
            case when group_key = '' then sum({m}_n) else sign(sum({m}_n)) end as {m}_n, sum({m}_w) as {m}_w, sum({m}_y) as {m}_y,
            case when group_key = '' then sum({m}_ww) else sum({m}_w) ^ 2 end as {m}_ww,
            case when group_key = '' then sum({m}_yy) else sum({m}_y) ^ 2 end as {m}_yy,
            case when group_key = '' then sum({m}_wy) else sum({m}_w) * sum({m}_y) end as {m}_wy,
            case when group_key = '' then max(heaviest) else sum({m}_w) end as {m}_largest"""
_OF_ALL: Final = """
            coalesce(sum({m}_n), 0)::bigint as {m}_n, coalesce(sum({m}_w), 0) as {m}_weight, coalesce(sum({m}_ww), 0) as {m}_weight_sq,
            coalesce(sum({m}_y), 0) as {m}_total, coalesce(sum({m}_yy), 0) as {m}_total_sq, coalesce(sum({m}_wy), 0) as {m}_cross,
            max(heaviest) as {m}_heaviest, coalesce(max({m}_largest), 0) as {m}_largest"""
_OF_BOTH: Final = """
            sum(old_{m}_w * new_{m}_w) as {m}_weights, sum(old_{m}_y * new_{m}_w) as {m}_old_total, sum(old_{m}_w * new_{m}_y) as {m}_new_total,
            sum(old_{m}_y * new_{m}_y) as {m}_totals"""
_SUM_NAMES: Final = tuple(name for name in ClusterSums.__struct_fields__ if name != "n_groups")
_SHARED_NAMES: Final = tuple(SharedSums.__struct_fields__)


def statement(
    measures: Mapping[str, str],
    source: str,
    *,
    at: str = ":begin",
    product: tuple[str, str] | None = None,
    is_pair: bool = False,
) -> str:
    """Return the query of the sums of some measures by version, slice and bucket.

    Parameters
    ----------
    measures
        The value of each measure, at least 0, in a row of `comparison c`; NULL where it has none. They are constant texts.
    source
        Its `from` and `where`.
    at
        The bucket of a row.
    product
        Two measures whose products over clusters are summed as well.
    is_pair
        Sum over the people as well whom both versions, `:old` and `:new`, have answered.
    """

    def each(form: str) -> str:
        return ",".join(form.format(m=name) for name in measures)

    values = ", ".join(f"{expression} as {name}" for name, expression in measures.items())
    x, y = product or ("n", "n")
    products = (
        (
            "sum(w * w * {x} * {y})",
            "case when exchange is null then xy else {x}_y / parts * {y}_y / parts end",
            "case when group_key = '' then sum(xy) else sum({x}_y) * sum({y}_y) end",
        )
        if product
        else ("0.0", "0.0", "0.0")
    )
    of_rows, of_exchange, of_cluster = (form.format(x=x, y=y) for form in products)
    # Not a join of the clusters with themselves: Postgres expects few of them, and would compare each with each.
    of_both = ", ".join(
        f"sum({part}) filter (where version_id = :{side}) as {side}_{part}"
        for side in ("old", "new")
        for part in (f"{name}_{sum_}" for name in measures for sum_ in ("w", "y"))
    )
    shared = f"""
    , pair as (select slice_id, {of_both} from cluster where group_key <> '' group by slice_id, group_key)
    , shared as (select slice_id, {each(_OF_BOTH)} from pair group by 1)"""  # noqa: S608 - constant text
    names = [f"max({name}_{field}) as {name}_{field}" for name in measures for field in _SHARED_NAMES]
    return f"""
    with item as (
        select c.model_version_id as version_id, {at} as at, c.slice_ids, c.group_key,
            case when c.n_items > 1 then c.exchange_id end as exchange, 1 / (c.pi1 * c.pi2) as w,
            c.divergence = 'infinity' as is_infinite, {values}
        {source}
    ), combination as (
        select version_id, at, slice_ids, group_key, exchange, cast(count(*) as float8) as n_items, sum(w) as w,
            max(w) as heaviest, cast(count(*) filter (where is_infinite) as float8) as n_infinite, {of_rows} as xy, {each(_OF_ROWS)}
        from item group by 1, 2, 3, 4, 5
    ), sliced as (
        select version_id, slice_id, at, group_key, exchange, sum(n_items) as n_items, sum(w) as w, max(heaviest) as heaviest,
            sum(n_infinite) as n_infinite, sum(xy) as xy, {each(_OF_SLICE)}
        from combination cross join unnest(slice_ids) as of_row (slice_id)
        where cast(:slices as int[]) is null or slice_id = any(cast(:slices as int[]))
        group by 1, 2, 3, 4, 5
    ), exchanged as (
        select version_id, slice_id, at, group_key, n_items, case when exchange is null then n_items else 1 end as n,
            w / parts as w, w as items, heaviest, n_infinite, {of_exchange} as xy, {each(_OF_EXCHANGE)}
        from sliced cross join lateral (select case when exchange is null then 1 else n_items end) as of_exchange (parts)
    ), cluster as (
        select version_id, slice_id, at, group_key, sum(n_items) as n_items, sum(n) as n_exchanges,
            case when group_key = '' then sum(n) else 1 end as n, sum(w) as w, sum(items) as items, max(heaviest) as heaviest,
            sum(n_infinite) as n_infinite, {of_cluster} as xy, {each(_OF_CLUSTER)}
        from exchanged group by 1, 2, 3, 4
    ){shared if is_pair else ""}
    select version_id, slice_id, at, sum(n_items)::bigint as n_items, sum(n_exchanges)::bigint as n_exchanges,
        sum(n)::bigint as n_clusters, sum(w) as weight, sum(items) as items, sum(n_infinite)::bigint as n_infinite,
        sum(xy) as product,
        {each(_OF_ALL)}{"," + ", ".join(names) if is_pair else ""}
    from cluster {"left join shared using (slice_id)" if is_pair else ""} group by 1, 2, 3 order by 1, 2, 3
    """  # noqa: S608 - constant text


async def cluster_sums(
    connection: AsyncConnection,
    sides: Sequence[SummedVersion],
    *,
    slice_ids: Sequence[int] | None = None,
    width: timedelta | None = None,
    measures: Mapping[str, str] = MEASURES,
) -> list[SliceClusters]:
    """Return the sums of some versions by slice, in order.

    Parameters
    ----------
    slice_ids
        Only these slices; None: all.
    width
        Width of a bucket, counted from the earliest begin; None: the whole time is one. A person counts once in each bucket.
    """
    at = "date_bin(:width, c.captured_at, :begin)" if width else "cast(:begin as timestamptz)"
    # Postgres finds a rare slice by its number alone, not by a parameter.
    of_slice = f" and c.slice_ids @> array[{slice_ids[0]:d}]" if slice_ids and len(slice_ids) == 1 else ""
    query = statement(measures, _SIDES + of_slice, at=at)
    return await _read(connection, sides, query, measures, slice_ids, width=width)


async def pair_sums(
    connection: AsyncConnection,
    old: Sequence[SummedVersion],
    new: Sequence[SummedVersion],
    *,
    slice_ids: Sequence[int] | None = None,
) -> list[SliceClusters]:
    """Return the sums of two versions by slice, with those over the people whom both have answered.

    Parameters
    ----------
    old, new
        One version each, with the times that are summed: at least one, and none that overlap.
    """
    query = statement(MEASURES, _SIDES, at="cast(:begin as timestamptz)", is_pair=True)
    ids = {"old": old[0].version_id, "new": new[0].version_id}
    return await _read(connection, (*old, *new), query, MEASURES, slice_ids, **ids)


async def _read(
    connection: AsyncConnection,
    sides: Sequence[SummedVersion],
    query: str,
    measures: Mapping[str, str],
    slice_ids: Sequence[int] | None,
    **values: Any,
) -> list[SliceClusters]:
    if not sides:
        return []
    wanted = {
        "versions": [side.version_id for side in sides],
        "begins": [side.begin for side in sides],
        "ends": [side.end for side in sides],
        "caps": [float(side.cap) for side in sides],
        "begin": min(side.begin for side in sides),
        "end": max(side.end for side in sides),
        "slices": None if slice_ids is None else list(slice_ids),
        **values,
    }
    clause = text(query.replace("::", "\\:\\:"))
    if values.get("width") is None:
        wanted.pop("width", None)
    else:
        clause = clause.bindparams(bindparam("width", type_=Interval))
    return [sums_of(row, measures) for row in await hashed(connection, clause, wanted)]


async def hashed(
    connection: AsyncConnection, query: TextClause, values: Mapping[str, Any]
) -> Sequence[RowMapping]:
    """Return the rows of a query of `statement`, which Postgres answers by hash tables."""
    await connection.execute(_HASHED)
    rows = (await connection.execute(query, values)).mappings().all()
    await connection.execute(_AS_BEFORE)
    return rows


def sums_of(row: RowMapping, measures: Mapping[str, str]) -> SliceClusters:
    """Return a row of a query of `statement` as a record."""
    return SliceClusters(
        version_id=row["version_id"],
        slice_id=row["slice_id"],
        at=row["at"],
        n_items=row["n_items"],
        n_exchanges=row["n_exchanges"],
        n_clusters=row["n_clusters"],
        weight=row["weight"],
        items=row["items"],
        n_infinite=row["n_infinite"],
        of={name: ClusterSums(**_fields(row, name, _SUM_NAMES)) for name in measures},
        shared={
            name: SharedSums(**_fields(row, name, _SHARED_NAMES))
            for name in measures
            if row.get(f"{name}_weights") is not None
        },
        product=row["product"],
    )


def roll_up_of(row: RowMapping) -> dict[str, ClusterSums]:
    """Return the sums of flips and of the divergence of a row of `ROLL_UP`; squares that it lacks are 0."""
    people = row["people"] or ()
    by_measure = {}
    for number, name in enumerate(MEASURES):
        squares: dict[str, Any] = {
            what: row[f"{name}_{what}"] or 0.0 for what in ("weight_sq", "total_sq", "cross")
        }
        sums = ClusterSums(
            n=row["n_exchanges"],
            weight=row[f"{name}_weight"],
            total=row[name],
            heaviest=row["heaviest"],
            **squares,
        )
        by_measure[name] = of_groups(sums, people[number * _OF_PEOPLE : (number + 1) * _OF_PEOPLE])
    return by_measure


def sums_of_clusters(found: SliceClusters, cap: float) -> Sums:
    """Return the sums of comparisons."""
    widest = max((found.of[name] for name in MEASURES), key=lambda sums: sums.weight)
    tie = found.of.get("tie", ClusterSums())
    return Sums(
        n_items=found.n_items,
        n_groups=found.n_exchanges,
        weight=found.weight,
        # Kish's number is that of the clusters that have a value: nearly all of them do.
        weight_sq=widest.weight_sq * (found.weight / widest.weight) ** 2 if widest.weight else 0.0,
        items=found.items,
        tie=tie.total,
        tie_weight=tie.weight,
        n_infinite=found.n_infinite,
        cap=cap,
        of=found.of,
    )


def sums_of_roll_up(row: RowMapping) -> Sums:
    """Return the sums of a row of `ROLL_UP`."""
    return Sums(
        n_items=row["n_items"],
        n_groups=row["n_exchanges"],
        weight=row["weight"],
        weight_sq=row["weight_sq"],
        items=row["items"] or 0.0,
        tie=row["tie"],
        tie_weight=row["tie_weight"],
        n_infinite=row["n_infinite"],
        cap=row["cap"] or HIGHEST,
        of=roll_up_of(row),
    )


def _fields(row: RowMapping, measure: str, names: Sequence[str]) -> dict[str, Any]:
    return {name: row[f"{measure}_{name}"] for name in names}
