"""Figures of slices: a view, a plot and a figure of one name are one number, and what stands beside a status."""

from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import numpy as np
import pytest

from quantdrift.core.records import Metric
from quantdrift.facts.figures import FigureName, WindowName, last_day
from quantdrift.facts.interval import HIGHEST
from quantdrift.facts.status import Serves
from quantdrift.storage.database import Database
from quantdrift.storage.figures import figures
from quantdrift.storage.figures.divergence import Divergence
from quantdrift.storage.figures.periods import Grain, SumWindow
from quantdrift.storage.serving import servings

pytestmark = pytest.mark.integration
LAST = datetime(2031, 6, 15, 9, 40, tzinfo=UTC)
HOUR = timedelta(hours=1)
FIRST = LAST - 30 * HOUR
NAMES = [
    "hour",
    "model_version_id",
    "slice_id",
    "n_items",
    "n_groups",
    "weight",
    "weight_sq",
    "flip",
    "topk",
    "js",
    "divergence",
    "margin",
    "flip_weight",
    "topk_weight",
    "js_weight",
    "divergence_weight",
    "margin_weight",
    "n_infinite",
    "divergence_bins",
    "cap",
    "flip_weight_sq",
    "flip_sq",
    "flip_cross",
    "divergence_weight_sq",
    "divergence_sq",
    "divergence_cross",
    "heaviest",
    "people",
]


def _row(random: np.random.Generator, at: datetime, slice_id: int, *, people: bool) -> dict[str, Any]:
    """Draw an hour of 1 to 200 exchanges whose squares are of single exchanges, of 40 people if anybody is named."""
    n = int(random.integers(1, 200))
    w = 1 / random.choice([0.1, 0.5, 1.0], n)
    values = {
        "flip": (random.random(n) < 0.05).astype(float),
        "divergence": np.minimum(random.exponential(0.1, n), 2.0),
    }
    groups = random.integers(0, 32, 40)[random.integers(0, 40, n)]
    sums: list[float] = []
    row: dict[str, Any] = dict.fromkeys(
        ("topk", "js", "margin", "topk_weight", "js_weight", "margin_weight"), 0.0
    )
    row |= {
        "hour": at,
        "model_version_id": 1,
        "slice_id": slice_id,
        "n_items": n,
        "n_groups": n,
        "n_infinite": 0,
    }
    row |= {
        "weight": w.sum(),
        "weight_sq": w @ w,
        "divergence_bins": [0.0] * 64,
        "cap": 2.0,
        "heaviest": w.max(),
    }
    for name, value in values.items():
        y = w * value
        row |= {name: y.sum(), f"{name}_weight": w.sum(), f"{name}_weight_sq": w @ w}
        row |= {f"{name}_sq": y @ y, f"{name}_cross": w @ y}
        sums += [
            *np.bincount(groups, w, minlength=32).tolist(),
            *np.bincount(groups, y, minlength=32).tolist(),
            float(w @ w),
            float(y @ y),
            float(w @ y),
        ]
    row["people"] = [float(number) for number in sums] if people else None
    return {name: float(value) if isinstance(value, np.floating) else value for name, value in row.items()}


@pytest.fixture
async def record(record: asyncpg.Connection) -> asyncpg.Connection:
    """Return a record with two slices over 30 hours: people are named in some hours of the first one."""
    await record.execute(f"""
        insert into model_version (model, candidate_version, reference_digest, first_seen_at)
            values ('digits', 'int8-1', 'abc', '{FIRST.isoformat()}'), ('digits', 'int8-2', 'abc', '{LAST.isoformat()}');
        insert into slice (model, predicate, name, definition) values
            ('digits', 'true', 'all', '{{}}'), ('digits', 'x', 'scanner=faint', '{{}}');
        insert into verdict select 1, id, 'ok', 'because', now(), 500, 0, 80, '{{}}', null, now(), now(), 7 from slice;
    """)
    random = np.random.default_rng(44)
    begin = FIRST.replace(minute=0)
    hours = [begin + number * HOUR for number in range(31)]
    rows = [
        _row(random, at, slice_id, people=slice_id == 1 and bool(at.hour % 3))
        for at in hours
        for slice_id in (1, 2)
    ]
    await record.copy_records_to_table(
        "rollup_hour", columns=NAMES, records=[[row[name] for name in NAMES] for row in rows]
    )
    return record


VERSION = figures.SeenVersion(id=1, model="digits", version="int8-1", first_at=FIRST, last_at=LAST)


async def test_a_view_and_a_figure_of_one_name_are_one_number(
    database: Database, record: asyncpg.Connection
) -> None:
    """The share of the last day with its interval, over hours with people and without: slice_now, and what pages show."""
    async with database.begin() as connection:
        found = await figures.last_day(connection, VERSION, LAST)
    rows = await record.fetch("select * from slice_now order by slice_id")
    assert [row["slice_id"] for row in rows] == sorted(found) == [1, 2]
    for row in rows:
        share = found[row["slice_id"]].changed_share
        assert share is not None
        assert (share.name, share.window) == (FigureName.CHANGED_SHARE, last_day(LAST))
        view = [row[f"changed_share_day{end}"] for end in ("", "_low", "_high")]
        assert view == pytest.approx([share.value, share.low, share.high], rel=1e-12)


async def test_a_point_of_a_plot_is_the_row_of_the_view(
    database: Database, record: asyncpg.Connection
) -> None:
    """Hour for hour, flips and divergence."""
    async with database.begin() as connection:
        window = SumWindow(begin=FIRST.replace(minute=0) - HOUR, end=LAST, grain=Grain.HOUR)
        points = await Divergence(connection).sums(window, HOUR, {1: HIGHEST}, [1])
    rows = await record.fetch("select * from slice_history where slice_id = 1 order by hour")
    assert len(rows) == len(points) == 31
    for row, point in zip(rows, points, strict=True):
        for metric in (Metric.FLIP, Metric.DIVERGENCE):
            estimate = point.sums.estimate(metric)
            assert estimate is not None
            view = [row[metric], row[f"{metric}_low"], row[f"{metric}_high"]]
            assert view == pytest.approx([estimate.mean, estimate.low, estimate.high], rel=1e-12)


async def test_rates_of_a_day_are_over_the_time_with_data(
    database: Database, record: asyncpg.Connection
) -> None:
    """Requests of 23 hours and 40 minutes, not of 24 hours of the clock; a slice is the part of the answers that it has."""
    async with database.begin() as connection:
        found = await figures.last_day(connection, VERSION, LAST)
    sums = await record.fetch(
        "select slice_id, sum(weight) as weight, sum(weight * n_items / n_groups) as items from rollup_hour where hour >= $1"
        " group by 1 order by 1",
        LAST.replace(minute=0) - 23 * HOUR,
    )
    days = (23 + 40 / 60) / 24
    assert found[1].requests.value == pytest.approx(sums[0]["weight"] / days)
    share = sums[1]["items"] / sums[0]["items"]
    assert found[2].share == pytest.approx(min(share, 1.0))
    assert found[2].requests.value == pytest.approx(sums[0]["weight"] * min(share, 1.0) / days)
    changed, part = found[2].changed, found[2].changed_share
    assert changed is not None
    assert part is not None
    assert changed.value == pytest.approx(found[2].requests.value * part.value)
    assert found[2].basis == "at the rate of the last 23 hours"


async def test_after_one_request_there_is_a_count_and_no_rate(
    database: Database, record: asyncpg.Connection
) -> None:
    """One request is not 86,400 a day."""
    await record.execute("delete from rollup_hour where hour < $1", LAST.replace(minute=0))
    await record.execute("update rollup_hour set n_items = 1, n_groups = 1, weight = 1")
    version = figures.SeenVersion(id=1, model="digits", version="int8-1", first_at=LAST, last_at=LAST)
    async with database.begin() as connection:
        found = await figures.last_day(connection, version, LAST)
    assert (found[1].requests.name, found[1].requests.value) == (FigureName.REQUESTS, 1.0)
    assert found[1].basis == "so far"


async def test_now_is_the_newest_hours_with_a_hundred_answers(
    database: Database, record: asyncpg.Connection
) -> None:
    """It begins with an hour of the clock and names itself."""
    rows = await record.fetch(
        "select hour, n_items from rollup_hour where slice_id = 2 order by hour desc limit 24"
    )
    n, begin = 0, LAST
    for row in rows:
        if n >= 100:
            break
        n, begin = n + row["n_items"], row["hour"]
    async with database.begin() as connection:
        found = await figures.now(connection, VERSION, 2, LAST)
    assert found is not None
    assert found.changed_share is not None
    window = found.changed_share.window
    assert (window.name, window.begin, window.end) == (WindowName.NOW, begin, LAST)
    assert found.n == n


async def test_beside_a_status_stands_whether_the_version_serves(
    database: Database, record: asyncpg.Connection
) -> None:
    """A version that was replaced, by which one; the other one serves, and is silent once nothing of it is seen."""
    await record.execute(
        "insert into serving values (1, now() - interval '1 hour', 1, 10, now(), null), (2, now(), 1, 10, null, null)"
    )
    async with database.begin() as connection:
        beside = await servings(connection, 0.5)
    assert beside["digits", "int8-1"].words == "replaced by int8-2"
    assert beside["digits", "int8-2"].words == "serving"
    row = await record.fetchrow("select serving, replaced_by from slice_now where slice_id = 2")
    assert row is not None
    assert tuple(row) == ("replaced", "int8-2")
    await record.execute(
        "update serving set last_at = now() - interval '11 minutes' where model_version_id = 2"
    )
    async with database.begin() as connection:
        silent = (await servings(connection, 0.5))["digits", "int8-2"]
    assert silent.serves is Serves.SILENT
    assert silent.words.startswith("silent since ")
