"""Sums and histograms of divergence over periods of time.

Long windows are summed from the roll-ups. Only windows that `extent` found small are summed from `comparison`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ARRAY,
    Integer,
    Interval,
    RowMapping,
    Select,
    TextClause,
    any_,
    bindparam,
    func,
    literal,
    select,
    text,
)
from sqlalchemy.orm import InstrumentedAttribute

from quantdrift.storage.report.facts import Extent, Grain, SliceBins, SliceSums, Sums, Window
from quantdrift.storage.report.snapshot import SnapshotReader
from quantdrift.storage.schema.tables import RollupDay, RollupHour

N_BINS = 64
_HOUR = timedelta(hours=1)

_EXTENT = text("""
    select c.first, c.last, h.first_hour, h.last_hour from (
        select min(captured_at) as first, max(captured_at) as last
        from comparison where captured_at >= :begin and captured_at < :end
    ) as c, (
        select min(hour) as first_hour, max(hour) as last_hour
        from rollup_hour where hour >= :begin and hour < :end
    ) as h
""")

_COUNT = text("""
    select count(*) from (
        select from comparison where captured_at >= :begin and captured_at < :end limit :most
    ) as row
""")

# A group is one exchange: its items in the slice share one inclusion probability, and its weight in equal parts. The
# exchanges of a session are correlated, at worst all alike: in the square of the weights they count as one. A value that is
# NaN is none, as in the roll-ups.
GROUPS = """
    with item as (
        select c.model_version_id, s.slice_id, c.exchange_id, date_bin(:width, c.captured_at, :begin) as at,
            1 / (c.pi1 * c.pi2) as w, c.flip::int as flip, c.tie::int as tie, nullif(c.js, 'NaN') as js,
            case when c.group_key = '' then c.exchange_id::text else c.policy_id || ' ' || c.group_key end as session,
            case when d.value is not null then least(d.value, m.cap) end as divergence, d.value as raw_divergence
        from comparison c
        cross join lateral (select nullif(c.divergence, 'NaN') as value) d
        join unnest(cast(:versions as int[]), cast(:caps as double precision[])) as m (id, cap) on m.id = c.model_version_id
        cross join unnest(c.slice_ids) as s (slice_id)
        where c.captured_at >= :begin and c.captured_at < :end and s.slice_id = any(cast(:slices as int[]))
    )
"""

_ITEM_SUMS = text(f"""
    {GROUPS}, one as (
        select model_version_id, slice_id, at, session, exchange_id, count(*) as n, max(w) as w, max(w) / count(*) as part,
            sum(flip) as flip, sum(tie) as tie, count(tie) as n_tie, sum(js) as js, sum(divergence) as divergence, count(flip) as n_flip, count(js) as n_js,
            count(divergence) as n_divergence, count(*) filter (where raw_divergence = 'infinity') as n_infinite
        from item group by 1, 2, 3, 4, 5
    ), of_session as (
        select model_version_id, slice_id, at, sum(n) as n_items, count(*) as n_groups, sum(w) as weight,
            sum(part * flip) as flip, sum(part * tie) as tie, sum(part * js) as js, sum(part * divergence) as divergence,
            sum(part * n_flip) as flip_weight, sum(part * n_tie) as tie_weight, sum(part * n_js) as js_weight,
            sum(part * n_divergence) as divergence_weight, sum(n_infinite) as n_infinite
        from one group by 1, 2, 3, session
    )
    select model_version_id, slice_id, at, sum(n_items) as n_items, sum(n_groups) as n_groups, sum(weight) as weight,
        sum(weight * weight) as weight_sq, coalesce(sum(flip), 0) as flip, coalesce(sum(tie), 0) as tie,
        coalesce(sum(js), 0) as js, coalesce(sum(divergence), 0) as divergence, sum(flip_weight) as flip_weight,
        sum(tie_weight) as tie_weight, sum(js_weight) as js_weight, sum(divergence_weight) as divergence_weight,
        sum(n_infinite) as n_infinite
    from of_session group by 1, 2, 3 order by 1, 2, 3
""")  # noqa: S608 - constant text

_ITEM_BINS = text(f"""
    {GROUPS}, sized as (
        select *, count(*) over (partition by model_version_id, slice_id, exchange_id) as n from item
    )
    select model_version_id, slice_id, sum(w / n) as weight,
        case when raw_divergence <= 1e-6 then 0 when raw_divergence >= 10 then 63
            else least(63, floor(64 * ln(raw_divergence / 1e-6) / ln(1e7))::int) end as bin
    from sized where raw_divergence is not null group by 1, 2, 4
""")  # noqa: S608 - constant text


class Divergence(SnapshotReader):
    """Sums of divergence in one snapshot."""

    async def extent(self, begin: datetime, end: datetime, most: int) -> Extent:
        """Return the first and last comparison of a period, and how many there are, counted up to `most`."""
        row = (await self._rows(_EXTENT, begin=begin, end=end))[0]
        first, last = row["first"], row["last"]
        # Roll-ups outlive comparisons: of an hour without comparisons only begin and end are known.
        if row["first_hour"] and (first is None or row["first_hour"] + _HOUR < first):
            first = row["first_hour"]
        if row["last_hour"] and (last is None or row["last_hour"] > last):
            last = min(row["last_hour"] + _HOUR, end)
        return Extent(first=first, last=last, n_items=await self.count(begin, end, most))

    async def count(self, begin: datetime, end: datetime, most: int) -> int:
        """Return the rows of `comparison` in a period, counted no further than `most`."""
        return int((await self._rows(_COUNT, begin=begin, end=end, most=most))[0]["count"])

    async def sums(
        self, window: Window, width: timedelta, caps: Mapping[int, float], slice_ids: Sequence[int]
    ) -> list[SliceSums]:
        """Sum each slice of each version over buckets.

        Parameters
        ----------
        window
            The window to sum over.
        width
            Width of a bucket, counted from the window's begin; the window's own length gives one bucket.
        caps
            Version to the model's `budget.cap`; these versions are read.
        slice_ids
            These slices are read.
        """
        if window.grain is Grain.ITEM:
            rows = await self._items(_ITEM_SUMS, window, width, caps, slice_ids)
        else:
            table, time = _rollup(window.grain)
            at = func.date_bin(literal(width, Interval), time, window.begin).label("at")
            rows = await self._select(
                select(
                    table.model_version_id,
                    table.slice_id,
                    at,
                    *(func.sum(getattr(table, name)).label(name) for name in Sums.__struct_fields__),
                )
                .where(
                    time >= window.begin,
                    time < window.end,
                    table.model_version_id.in_(list(caps)),
                    table.slice_id == any_(literal(list(slice_ids), ARRAY(Integer))),
                )
                .group_by(table.model_version_id, table.slice_id, text("at"))
                .order_by(table.model_version_id, table.slice_id, text("at"))
            )
        return [
            SliceSums(
                version_id=row["model_version_id"],
                slice_id=row["slice_id"],
                at=row["at"],
                sums=_sums(row),
            )
            for row in rows
        ]

    async def bins(
        self, window: Window, caps: Mapping[int, float], slice_ids: Sequence[int]
    ) -> list[SliceBins]:
        """Return the weighted divergence histogram of each slice of each version over the window."""
        if window.grain is Grain.ITEM:
            rows = await self._items(_ITEM_BINS, window, window.end - window.begin, caps, slice_ids)
        else:
            table, time = _rollup(window.grain)
            each = (
                func.unnest(table.divergence_bins)
                .table_valued("weight", with_ordinality="bin")
                .render_derived()
            )
            rows = await self._select(
                select(
                    table.model_version_id,
                    table.slice_id,
                    (each.c.bin - 1).label("bin"),
                    func.sum(each.c.weight).label("weight"),
                )
                .select_from(table)
                .join(each, literal(True))
                .where(
                    time >= window.begin,
                    time < window.end,
                    table.model_version_id.in_(list(caps)),
                    table.slice_id == any_(literal(list(slice_ids), ARRAY(Integer))),
                )
                .group_by(table.model_version_id, table.slice_id, each.c.bin)
            )
        weights: defaultdict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0] * N_BINS)
        for row in rows:
            weights[row["model_version_id"], row["slice_id"]][int(row["bin"])] = float(row["weight"])
        return [
            SliceBins(version_id=version, slice_id=slice_id, bins=tuple(bins))
            for (version, slice_id), bins in sorted(weights.items())
        ]

    async def _items(
        self,
        statement: TextClause,
        window: Window,
        width: timedelta,
        caps: Mapping[int, float],
        slice_ids: Sequence[int],
    ) -> Sequence[RowMapping]:
        return await self._rows(
            statement.bindparams(bindparam("width", type_=Interval)),
            begin=window.begin,
            end=window.end,
            width=width,
            versions=list(caps),
            caps=[float(cap) for cap in caps.values()],
            slices=list(slice_ids),
        )

    async def _select(self, statement: Select[Any]) -> Sequence[RowMapping]:
        rows: Sequence[RowMapping] = (await self._connection.execute(statement)).mappings().all()
        return rows


def _rollup(grain: Grain) -> tuple[type[RollupHour | RollupDay], InstrumentedAttribute[datetime]]:
    return (RollupHour, RollupHour.hour) if grain is Grain.HOUR else (RollupDay, RollupDay.day)


def _sums(row: RowMapping) -> Sums:
    return Sums(
        n_items=int(row["n_items"]),
        n_groups=int(row["n_groups"]),
        weight=float(row["weight"]),
        weight_sq=float(row["weight_sq"]),
        flip=float(row["flip"]),
        js=float(row["js"]),
        divergence=float(row["divergence"]),
        flip_weight=float(row["flip_weight"]),
        js_weight=float(row["js_weight"]),
        divergence_weight=float(row["divergence_weight"]),
        tie=float(row["tie"]),
        tie_weight=float(row["tie_weight"]),
        n_infinite=int(row["n_infinite"]),
    )
