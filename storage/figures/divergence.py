"""Sums and histograms of divergence over periods of time.

Long windows are summed from the roll-ups. Only windows that `extent` found small are summed from `comparison`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import (
    ARRAY,
    Integer,
    Interval,
    RowMapping,
    Select,
    any_,
    bindparam,
    func,
    literal,
    select,
    text,
)
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute

from quantdrift.core.signals import Signal
from quantdrift.storage import snapshot
from quantdrift.storage.figures.estimates import (
    MORE_MEASURES,
    ROLL_UP,
    SummedVersion,
    cluster_sums,
    sums_of_clusters,
    sums_of_roll_up,
)
from quantdrift.storage.figures.periods import Extent, Grain, SliceBins, SliceSums, SumWindow
from quantdrift.storage.schema.tables import RollupDay, RollupHour
from quantdrift.storage.signals import MEASURES, value_of
from quantdrift.storage.snapshot import SnapshotReader, in_time

N_BINS = 64
MOST_DIVIDED: Final = 200_000
"""Comparisons of a bucket that an onset divides; of more it stays whole."""
_HOUR = timedelta(hours=1)
_EXTENT = text("""
    select least(c.first, o.first) as first, greatest(c.last, o.last) as last, h.first_hour, h.last_hour from (
        select min(captured_at) as first, max(captured_at) as last
        from comparison where captured_at >= :begin and captured_at < :end
    ) as c, (
        select min(case when b.captured_from >= :begin then b.captured_from else inside.first end) as first,
            max(case when b.captured_to < :end then b.captured_to else inside.last end) as last
        from condensed_block b cross join lateral (
            select min(r.captured_at) as first, max(r.captured_at) as last from block_rows(b) r
            where not (b.captured_from >= :begin and b.captured_to < :end) and r.captured_at >= :begin and r.captured_at < :end
        ) inside
        where b.captured_to >= :begin and b.captured_from < :end
    ) as o, (
        select min(hour) as first_hour, max(hour) as last_hour
        from rollup_hour where hour >= :begin and hour < :end
    ) as h
""")
_COUNT = text("""
    select count(*) from (
        select from comparisons(:begin, :end) limit :most
    ) as row
""")
# The items of an exchange in a slice share its weight in equal parts. A value that is NaN is none, as in the roll-ups.
_ITEM_BINS = text("""
    with item as (
        select c.model_version_id, of_row.slice_id, 1 / (c.pi1 * c.pi2) as w, nullif(c.divergence, 'NaN') as divergence,
            count(*) over (partition by c.model_version_id, of_row.slice_id, c.exchange_id) as n
        from comparisons(:begin, :end, cast(:slices as int[])) c cross join unnest(c.slice_ids) as of_row (slice_id)
        where c.model_version_id = any(cast(:versions as int[]))
            and of_row.slice_id = any(cast(:slices as int[]))
    )
    select model_version_id, slice_id, sum(w / n) as weight,
        case when divergence <= 1e-6 then 0 when divergence >= 10 then 63
            else least(63, floor(64 * ln(divergence / 1e-6) / ln(1e7))::int) end as bin
    from item where divergence is not null group by 1, 2, 4
""")
_ROLL_UPS: Final = """
    select model_version_id, slice_id, date_bin(:width, {time}, :begin) as at, {columns} from {table}
    where {time} >= :begin and {time} < :end and model_version_id = any(cast(:versions as int[]))
        and slice_id = any(cast(:slices as int[]))
    group by 1, 2, 3 order by 1, 2, 3
"""
_OF_GRAIN: Final = {
    grain: text(
        _ROLL_UPS.format(
            time=grain.value.removeprefix("rollup_"),
            table=grain.value,
            columns=ROLL_UP.replace("::", "\\:\\:"),
        )
    ).bindparams(bindparam("width", type_=Interval))
    for grain in (Grain.HOUR, Grain.DAY)
}
_SPLIT: Final = text("""
    select captured_at < :split as is_before, width_bucket(divergence, cast(:edges as double precision[])) as bin,
        sum(weight) as weight
    from items(:hour, cast(:hour as timestamptz) + interval '1 hour', array[cast(:slice as integer)])
    where model_version_id = :version and slice_id = :slice and slice_ids @> array[cast(:slice as integer)]
        and divergence <> 'NaN'
    group by 1, 2
""")
EDGES: Final = tuple(1e-6 * 10 ** (7 * n / 64) for n in range(1, 64))
"""Between the bins of a roll-up's histogram of the divergence."""
_BINS: Final = text("""
    select hour < :split as is_before, divergence_bins as bins from rollup_hour
    where model_version_id = :version and slice_id = :slice and hour >= :begin and hour < :end and hour <> :hour
""")


class Divergence(SnapshotReader):
    """Sums of divergence in one snapshot."""

    async def extent(self, begin: datetime, end: datetime, most: int) -> Extent:
        """Return the first and last comparison of a period, and how many there are, counted up to `most`."""
        row = (await self._rows(_EXTENT, begin=begin, end=end))[0]
        first, last = row["first"], row["last"]
        is_whole = not row["first_hour"] or (first is not None and row["first_hour"] + _HOUR >= first)
        # Roll-ups outlive comparisons: of an hour without comparisons only begin and end are known.
        if row["first_hour"] and (first is None or row["first_hour"] + _HOUR < first):
            first = row["first_hour"]
        if row["last_hour"] and (last is None or row["last_hour"] > last):
            last = min(row["last_hour"] + _HOUR, end)
        n_items = await self.count(begin, end, most)
        return Extent(first=first, last=last, n_items=n_items, is_whole=is_whole)

    async def count(self, begin: datetime, end: datetime, most: int) -> int:
        """Return the rows of `comparison` in a period, counted no further than `most`."""
        return int((await self._rows(_COUNT, begin=begin, end=end, most=most))[0]["count"])

    async def sums(
        self, window: SumWindow, width: timedelta, caps: Mapping[int, float], slice_ids: Sequence[int]
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
            sides = [
                SummedVersion(version_id=version, begin=window.begin, end=window.end, cap=cap)
                for version, cap in caps.items()
            ]
            clusters = await cluster_sums(
                self._connection, sides, slice_ids=slice_ids, width=width, measures=MORE_MEASURES
            )
            return [
                SliceSums(
                    version_id=slice_.version_id,
                    slice_id=slice_.slice_id,
                    at=slice_.at,
                    sums=sums_of_clusters(slice_, caps[slice_.version_id]),
                )
                for slice_ in clusters
            ]
        values = {"versions": list(caps), "slices": list(slice_ids), "begin": window.begin, "end": window.end}
        rows = await self._rows(_OF_GRAIN[window.grain], width=width, **values)
        return [
            SliceSums(
                version_id=row["model_version_id"],
                slice_id=row["slice_id"],
                at=row["at"],
                sums=sums_of_roll_up(row),
            )
            for row in rows
        ]

    async def named(
        self, window: SumWindow, width: timedelta, ids: tuple[int, int], signals: Sequence[Signal]
    ) -> list[SliceSums]:
        """Sum signals of plug-ins in a slice of a version over buckets, from single comparisons: no roll-up has them.

        Parameters
        ----------
        window, width
            As for `sums`.
        ids
            The version and the slice.
        """
        named = {f"named_{number}": signal for number, signal in enumerate(signals)}
        clusters = await cluster_sums(
            self._connection,
            [SummedVersion(version_id=ids[0], begin=window.begin, end=window.end, cap=1.0)],
            slice_ids=[ids[1]],
            width=width,
            measures=MEASURES | {name: value_of(signal) for name, signal in named.items()},
        )
        buckets = []
        for of_slice in clusters:
            sums = sums_of_clusters(of_slice, 1.0)
            own = {signal.metric.value: sums.of[name] for name, signal in named.items()}
            buckets.append(
                SliceSums(
                    version_id=ids[0],
                    slice_id=ids[1],
                    at=of_slice.at,
                    sums=msgspec.structs.replace(sums, of={**sums.of, **own}),
                )
            )
        return buckets

    async def divided(
        self, series: Sequence[SliceSums], window: SumWindow, width: timedelta, onset: datetime, cap: float
    ) -> list[SliceSums]:
        """Return the buckets of one slice in a window, in order, that of an onset in two parts.

        It stays whole where its comparisons are deleted, or too many to read.
        """
        later = [bucket for bucket in series if bucket.at > onset]
        around = series[-len(later) - 1] if len(later) < len(series) else None
        if around is None or around.at == onset:
            return list(series)
        stop = window.begin + ((around.at - window.begin) // width + 1) * width
        stop = min([stop, *(bucket.at for bucket in later[:1])])
        if onset >= stop or await self.count(around.at, stop, MOST_DIVIDED) >= MOST_DIVIDED:
            return list(series)
        parts: list[SliceSums] = []
        for begin, end in ((around.at, onset), (onset, stop)):
            part = SumWindow(begin=begin, end=end, grain=Grain.ITEM)
            parts += await self.sums(part, end - begin, {around.version_id: cap}, [around.slice_id])
        if sum(part.sums.n_items for part in parts) < around.sums.n_items:
            return list(series)
        whole = [bucket for bucket in series if bucket is not around]
        return sorted([*whole, *parts], key=lambda bucket: bucket.at)

    async def bins(
        self, window: SumWindow, caps: Mapping[int, float], slice_ids: Sequence[int]
    ) -> list[SliceBins]:
        """Return the weighted divergence histogram of each slice of each version over the window."""
        if window.grain is Grain.ITEM:
            rows = await self._rows(
                _ITEM_BINS,
                begin=window.begin,
                end=window.end,
                versions=list(caps),
                slices=list(slice_ids),
            )
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

    async def _select(self, statement: Select[Any]) -> Sequence[RowMapping]:
        rows: Sequence[RowMapping] = (await self._connection.execute(statement)).mappings().all()
        return rows


def _rollup(grain: Grain) -> tuple[type[RollupHour | RollupDay], InstrumentedAttribute[datetime]]:
    return (RollupHour, RollupHour.hour) if grain is Grain.HOUR else (RollupDay, RollupDay.day)


async def divided_bins(
    connection: AsyncConnection, version_id: int, slice_id: int, times: tuple[datetime, datetime, datetime]
) -> tuple[list[float], list[float]]:
    """Return two weighted histograms of the divergence: 64 bins each, empty without data.

    Parameters
    ----------
    times
        Begin, the time that separates the two, and end. The hour around it is divided by its exchanges, or left out where these
        are too many to read.
    """
    begin, split, end = times
    histograms: tuple[list[float], list[float]] = ([], [])
    hour = split.replace(minute=0, second=0, microsecond=0)
    parameters = {"version": version_id, "slice": slice_id, "begin": begin, "split": split, "end": end}
    for row in (await connection.execute(_BINS, {**parameters, "hour": hour})).mappings():
        sums = histograms[0 if row["is_before"] else 1]
        sums[:] = [a + b for a, b in zip(sums or [0.0] * 64, row["bins"], strict=True)]
    divided = {"version": version_id, "slice": slice_id, "split": split, "hour": hour, "edges": list(EDGES)}

    async def read() -> list[RowMapping]:
        return list((await connection.execute(_SPLIT, divided)).mappings())

    for row in await in_time(connection, read, snapshot.PATIENCE_S) or ():
        sums = histograms[0 if row["is_before"] else 1]
        sums[:] = sums or [0.0] * 64
        sums[row["bin"]] += row["weight"]
    return histograms
