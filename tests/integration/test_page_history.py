"""What the slice page shows over time: an onset divides its hour and its bucket, and the query of a plot gives its points."""

from datetime import UTC, datetime, timedelta
from itertools import product
from uuid import UUID

import asyncpg
import pytest

from quantdrift.core.records import Metric
from quantdrift.core.signals import signal_of
from quantdrift.show.page.slice_history import ShownPeriod, history_sql
from quantdrift.show.page.slice_history import history as past_of
from quantdrift.show.trends import trend
from quantdrift.storage.database import Database
from quantdrift.storage.figures.divergence import EDGES, Divergence, divided_bins
from quantdrift.storage.figures.periods import Grain, SumWindow
from tests.support.monitor.fold_stream import FAINT_ID, store_catalog
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons
from tests.support.storage.release_rows import END as WEEK_END
from tests.support.storage.release_rows import RELEASE, write_release_week

pytestmark = pytest.mark.integration
BEGIN = datetime(2031, 6, 15, 12, 5, tzinfo=UTC)
PARTS_OF_WEEK = ("archive", "mobile", "kiosk")
ONSET = BEGIN + timedelta(minutes=20)
END = BEGIN + timedelta(minutes=40)


async def _stored(record: asyncpg.Connection) -> tuple[int, int]:
    """Store an exchange each ten seconds, which differs from the onset on; return version and slice."""
    await store_catalog(record)
    await make_partitions(record, [BEGIN.date()])
    n = int((END - BEGIN) / timedelta(seconds=10))
    times = [BEGIN + timedelta(seconds=10 * number) for number in range(n)]
    await store_comparisons(
        record,
        [
            Comparison(
                captured_at=at,
                exchange_id=UUID(int=number),
                batch_id=1,
                model_version_id=1,
                slice_ids=(FAINT_ID,),
                flip=at >= ONSET,
                divergence=0.5 if at >= ONSET else 1e-5,
            )
            for number, at in enumerate(times)
        ],
    )
    return 1, FAINT_ID


async def test_no_damage_is_drawn_before_the_onset(database: Database, record: asyncpg.Connection) -> None:
    """Neither in the histograms nor in the line, although all of it lies in one hour."""
    version, slice_id = await _stored(record)
    async with database.begin() as connection:
        before, after = await divided_bins(connection, version, slice_id, (BEGIN, ONSET, END))
        divergence, width = Divergence(connection), timedelta(minutes=7)
        window = SumWindow(begin=BEGIN, end=END, grain=Grain.ITEM)
        whole = await divergence.sums(window, width, {version: 1.0}, [slice_id])
        points = await divergence.divided(whole, window, width, ONSET, 1.0)
        again = await divergence.divided(points, window, width, ONSET, 1.0)
        twice = await divergence.divided(points, window, width, ONSET - timedelta(minutes=1), 1.0)
    damaged = [place for place, edge in enumerate(EDGES, start=1) if edge >= 0.1]
    assert sum(before) == sum(after) == 120
    assert not any(before[place] for place in damaged)
    assert sum(after[place] for place in damaged) == 120
    for is_since, share in ((False, 0.0), (True, 1.0)):
        flips = [point.sums.of["flip"] for point in points if (point.at >= ONSET) is is_since]
        assert {flip.total / flip.weight for flip in flips} == {share}
    assert sum(point.sums.n_items for point in points) == 240
    assert len(points) == len(whole) + 1
    assert again == points  # an onset at which a bucket begins divides nothing
    assert [point.sums.n_items for point in twice[2:5]] == [30, 6, 6]
    assert sum(point.sums.n_items for point in twice) == 240


@pytest.mark.parametrize("metric", [Metric.FLIP, Metric.DIVERGENCE])
async def test_the_query_of_a_plot_gives_a_row_for_each_point(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, metric: Metric
) -> None:
    """Points of several buckets, of a bucket that an onset divides, and of hours, days and minutes: the means are those drawn."""
    week = await write_release_week(postgres_dsn)
    version, onset = week.version_ids[1], RELEASE + timedelta(hours=13, minutes=20)
    hour, day = timedelta(hours=1), timedelta(days=1)
    periods = [
        ShownPeriod.rolled_up(WEEK_END - 7 * day, WEEK_END, 6 * hour),
        ShownPeriod.rolled_up(WEEK_END - 30 * day, WEEK_END, day),
        ShownPeriod.rolled_up(WEEK_END - 4 * day, WEEK_END, hour),
        ShownPeriod.fine(RELEASE + 4 * hour, RELEASE + 27 * hour),
    ]
    seen = set[str]()
    for part, period, since in product(PARTS_OF_WEEK, periods, (None, onset)):
        assert period is not None
        slice_id = week.slice_ids[part]
        async with database.begin() as connection:
            buckets = await past_of(connection, version, slice_id, period, cap=1.0, onset=since)
        assert buckets
        grid = period.grid(buckets, RELEASE, WEEK_END)
        drawn = trend(metric, buckets, grid, onsets=[] if since is None else [since])
        query = history_sql(signal_of(metric), period, drawn, since, 1.0, version=version, slice=slice_id)
        rows = await record.fetch(query)
        assert [row[metric.value] for row in rows] == pytest.approx([point.mean for point in drawn.points])
        assert [row["at"] for row in rows] == sorted({row["at"] for row in rows})
        seen |= {"joined"} if drawn.width > period.width else {"alone"}
        seen |= {"divided"} if "union all" in query else set()
        seen |= {"left out"} if drawn.left_out else set()
        assert (since is None) == (not drawn.cuts)
    assert seen == {"joined", "alone", "divided", "left out"}
