"""What changed answers and replays cost, from a real database."""

from datetime import timedelta

import asyncpg
import pytest

from quantdrift.facts.cost import Prices
from quantdrift.facts.estimate import Estimate
from quantdrift.facts.figures import Figure, FigureName, Subject, Window, WindowName
from quantdrift.storage.cost import changed_cost, lost_costs, replay_times
from quantdrift.storage.database import Database
from quantdrift.storage.figures.figures import SeenVersion
from tests.support.storage.release_rows import END, NEW, RELEASE, ReleaseWeek, write_release_week

pytestmark = pytest.mark.integration


@pytest.fixture
async def week(postgres_dsn: str) -> ReleaseWeek:
    """Return a week with a release in Postgres."""
    return await write_release_week(postgres_dsn, per_hour=20, seed=3, rollups=False)


def _share(weight: float) -> Figure:
    return Figure(
        name=FigureName.CHANGED_SHARE,
        value=0.5,
        n=1,
        weight=weight,
        window=Window(name=WindowName.PERIOD, begin=RELEASE, end=END),
        of=Subject(model="digits", version=NEW, slice="all"),
        as_of=END,
    )


async def test_each_changed_answer_costs_what_its_customer_is_worth(
    week: ReleaseWeek, record: asyncpg.Connection, postgres_dsn: str
) -> None:
    """The sum over the changed answers of the window, each with the worth of its attribute or else the price of a request."""
    await record.execute(
        "update comparison set attributes = jsonb_build_object('header.x-customer',"
        " case when item = 0 and extract(second from captured_at)::int % 2 = 0 then 'acme' else 'birch' end)"
    )
    worth = await record.fetchval(
        "select sum(1 / (pi1 * pi2) * case attributes ->> 'header.x-customer' when 'acme' then 40 else 3 end)"
        " from comparison where model_version_id = $1 and flip",
        week.version_ids[1],
    )
    weight = await record.fetchval(
        "select sum(1 / (pi1 * pi2)) from comparison where model_version_id = $1", week.version_ids[1]
    )
    prices = Prices(
        currency="EUR", per_request=3.0, attribute="header.x-customer", by_value={"acme": 40.0, "cedar": 9.0}
    )
    async with Database(postgres_dsn) as database, database.begin() as connection:
        cost = await changed_cost(
            connection, prices, _share(weight), version_id=week.version_ids[1], slice_id=week.all_id
        )
        nothing = await changed_cost(
            connection, Prices(currency=""), _share(weight), version_id=week.version_ids[1], slice_id=1
        )
    assert nothing is None
    assert cost is not None
    assert cost.value == pytest.approx(worth)
    assert cost.low is not None
    assert cost.high is not None
    assert 0 < cost.low < cost.value < cost.high
    assert cost.unit == "EUR"


async def test_lost_accuracy_costs_the_requests_that_it_made_wrong(
    record: asyncpg.Connection, postgres_dsn: str
) -> None:
    """Loss x requests x what a changed answer is worth on average; a gain is below 0, and without a price there is none."""
    week = await write_release_week(postgres_dsn, per_hour=20, seed=3)
    number, archive = week.version_ids[1], week.slice_ids["archive"]
    await record.execute(
        "update comparison set attributes = jsonb_build_object('header.x-customer',"
        " case when extract(second from captured_at)::int % 2 = 0 then 'acme' else 'birch' end)"
    )
    rows = await record.fetch(
        "select slice_id, sum(1 / (pi1 * pi2)) as requests, sum(w.worth / (pi1 * pi2)) filter (where flip)"
        " / sum(1 / (pi1 * pi2)) filter (where flip) as worth from comparison"
        " cross join lateral (select case attributes ->> 'header.x-customer' when 'acme' then 40 else 3 end as worth) w"
        " cross join lateral unnest(slice_ids) as of_row (slice_id) where model_version_id = $1 group by 1",
        number,
    )
    product = {row["slice_id"]: row["requests"] * (row["worth"] or 3.0) for row in rows}
    version = SeenVersion(id=number, model="digits", version=NEW, first_at=RELEASE, last_at=END)
    window = Window(name=WindowName.PERIOD, begin=RELEASE, end=END)
    losses = {
        week.all_id: Estimate(mean=0.02, low=0.01, high=0.03),
        archive: Estimate(mean=-0.1, low=-0.2, high=0.0),
    }
    prices = Prices(currency="EUR", per_request=3.0, attribute="header.x-customer", by_value={"acme": 40.0})
    async with Database(postgres_dsn) as database, database.begin() as connection:
        costs = await lost_costs(connection, prices, version, window, losses)
        assert await lost_costs(connection, Prices(currency=""), version, window, losses) == {}
    assert costs.keys() == losses.keys()
    for slice_id, cost in costs.items():
        mean, low, high = losses[slice_id].mean, losses[slice_id].low, losses[slice_id].high
        expected = tuple(product[slice_id] * part for part in (mean, low or 0.0, high or 0.0))
        assert (cost.value, cost.low, cost.high) == pytest.approx(expected, rel=1e-9)
        assert (cost.name, cost.unit) == (FigureName.COST, "EUR")


async def test_replays_are_counted_by_model_with_the_time_of_the_device(
    week: ReleaseWeek, record: asyncpg.Connection, postgres_dsn: str
) -> None:
    """The batches that were stored in the time; one whose duration is not known counts as long as the others."""
    await record.execute(
        "update batch set n_rows = 60, replay_s = 3, compared_model = 'digits' where kind = 'comparison'"
    )
    await record.execute(
        "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows, skipped, fold_seq, compared_model)"
        " select kind, worker, stored_at, captured_from, captured_to, 20, '{}', null, compared_model from batch where kind = 'comparison'"
    )
    async with Database(postgres_dsn) as database, database.begin() as connection:
        times = await replay_times(connection, END, END + timedelta(seconds=1))
        before = await replay_times(connection, END - timedelta(days=1), END)
    assert before == {}
    assert (times["digits"].n, times["digits"].n_timed, times["digits"].seconds) == (80, 60, 3.0)
    assert times["digits"].seconds_of_all == pytest.approx(4.0)
    del week
