"""`quantdrift compare` over periods, over models, without a holiday, and with a price."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest

from quantdrift.core.config.schema import Config, Cost, Model
from quantdrift.core.errors import OperatorError
from quantdrift.facts.figures import FigureName
from quantdrift.report.compare import Sides, compare, compare_models, compare_periods, cut
from quantdrift.storage.database import Database
from quantdrift.storage.figures.estimates import STATEMENT_S
from quantdrift.storage.snapshot import reading
from tests.support.commands import invoked
from tests.support.storage.release_rows import BEGIN, NEW, OLD, RELEASE, ReleaseWeek, write_release_week

pytestmark = pytest.mark.integration

CONFIG = Config(models=(Model(name="digits"),), cost=Cost(currency="EUR", value_per_request=2.0))
DAY = timedelta(days=1)


@pytest.fixture
async def week(postgres_dsn: str) -> ReleaseWeek:
    """Return a small week with a release in Postgres."""
    return await write_release_week(postgres_dsn, per_hour=15, seed=4)


def _flips(week: ReleaseWeek, version: int, begin: datetime, end: datetime) -> tuple[int, float]:
    rows = [
        row.flip
        for row in week.rows
        if row.model_version_id == week.version_ids[version] and begin <= row.captured_at < end
    ]
    return len(rows), sum(map(bool, rows)) / len(rows)


async def test_two_periods_of_a_version_are_compared_without_a_day(
    week: ReleaseWeek, postgres_dsn: str
) -> None:
    """Counts and shares are those of the rows of each period, less the day that is left out; overlapping periods are refused."""
    old, new, left_out = (BEGIN, BEGIN + 2 * DAY), (BEGIN + 2 * DAY, RELEASE), (BEGIN + DAY, BEGIN + 2 * DAY)
    async with (
        Database(postgres_dsn, statement_timeout_s=STATEMENT_S) as database,
        reading(database) as connection,
    ):
        found = await compare_periods(connection, CONFIG, old=old, new=new, version=OLD, not_in=(left_out,))
        with pytest.raises(OperatorError, match="overlap"):
            await compare_periods(connection, CONFIG, old=old, new=(BEGIN + DAY, RELEASE))
        with pytest.raises(OperatorError, match="both periods"):
            await compare_periods(connection, CONFIG, old=old, new=(RELEASE, RELEASE + DAY))
    assert found.aggregate is not None
    sides = (found.aggregate.old, (BEGIN, BEGIN + DAY)), (found.aggregate.new, new)
    for side, (begin, end) in sides:
        n, share = _flips(week, 0, begin, end)
        assert (side.n_items, side.n_exchanges) == (n, n)
        assert side.flip is not None
        assert side.flip.value == pytest.approx(share)
    assert (found.old.version, found.new.version) == (OLD, OLD)
    assert found.old.label != found.new.label
    assert found.old.end <= BEGIN + DAY


async def test_two_models_are_compared_in_the_same_hours_by_their_predicates(
    week: ReleaseWeek, record: asyncpg.Connection, postgres_dsn: str
) -> None:
    """The new version becomes another model with slices of its own, which served at the same time."""
    new = week.version_ids[1]
    await record.execute(
        "update model_version set model = 'letters', first_seen_at = $2 where id = $1", new, BEGIN
    )
    await record.execute(
        "insert into slice (model, predicate, name, definition) select 'letters', predicate, name, '{}' from slice"
    )
    await record.execute(
        "update comparison set captured_at = captured_at - $2::interval, slice_ids = (select array_agg(l.id order by l.id)"
        " from slice d join slice l using (predicate) where d.id = any(slice_ids) and l.model = 'letters' and d.model = 'digits')"
        " where model_version_id = $1",
        new,
        RELEASE - BEGIN,
    )
    await record.execute("delete from verdict")
    async with (
        Database(postgres_dsn, statement_timeout_s=STATEMENT_S) as database,
        reading(database) as connection,
    ):
        within = Sides(begin=BEGIN, end=BEGIN + DAY)
        found = await compare_models(
            connection, CONFIG, old=("digits", ""), new=("letters", NEW), within=within
        )
    assert (found.old.label, found.new.label) == (f"digits {OLD}", f"letters {NEW}")
    assert {entry.name for entry in found.slices} == {
        f"scanner={name}" for name in ("office", "lab", "archive", "mobile")
    }
    assert found.aggregate is not None
    assert found.aggregate.old.n_items == _flips(week, 0, BEGIN, BEGIN + DAY)[0]
    assert found.aggregate.new.n_items == _flips(week, 1, RELEASE, RELEASE + DAY)[0]


async def test_the_difference_has_a_cost_where_a_request_has_a_price(
    week: ReleaseWeek, postgres_dsn: str
) -> None:
    """Requests of the new side, times the difference, times the value; without a price there is none."""
    del week
    async with (
        Database(postgres_dsn, statement_timeout_s=STATEMENT_S) as database,
        reading(database) as connection,
    ):
        found = await compare(connection, CONFIG, old=OLD, new=NEW)
        unpriced = await compare(connection, Config(models=CONFIG.models), old=OLD, new=NEW)
    assert found.aggregate is not None
    assert found.aggregate.flip is not None
    assert found.cost is not None
    assert unpriced.cost is None
    assert (found.cost.name, found.cost.unit) == (FigureName.COST, "EUR")
    assert found.cost.value == pytest.approx(2.0 * found.aggregate.flip.mean * found.aggregate.new.weight)


async def test_the_command_leaves_out_a_local_day_and_prints_both_windows_with_counts(
    week: ReleaseWeek, postgres_dsn: str, tmp_path: Path
) -> None:
    """A day of Auckland is another one than in UTC; each window has its answers; wrong times and zones are refused in words."""
    del week
    (tmp_path / "config.toml").write_text(
        '[[models]]\nname = "digits"\n[cost]\ncurrency = "EUR"\nvalue_per_request = 2\n'
    )

    def typed(*arguments: str) -> tuple[int, str]:
        done = invoked("compare", *arguments, directory=tmp_path, QUANTDRIFT_DSN=postgres_dsn)
        return done.returncode, done.stdout + done.stderr

    periods = (
        "--old-from",
        "2026-11-16",
        "--old-to",
        "2026-11-18",
        "--from",
        "2026-11-18",
        "--to",
        "2026-11-20",
    )
    code, text = await asyncio.to_thread(
        typed, *periods, "--not-in", "2026-11-17", "--timezone", "Pacific/Auckland"
    )
    assert code == 0, text
    assert "left out: 2026-11-16 11:00 UTC to 2026-11-17 11:00 UTC" in text
    assert "answers, from single answers" in text
    assert "cost of the difference in the window of the new side: about" in text
    code, text = await asyncio.to_thread(typed, *periods, "--json")
    assert code == 0, text
    entry = json.loads(text)["aggregate"]
    assert 0 < entry["flip"]["p"] <= entry["flip"]["p_adjusted"] <= 1
    for wrong, message in (
        (("--from", "a"), "give two versions"),
        ((*periods, "--timezone", "Mars"), "is not a time zone"),
        ((*periods, "--not-in", "tomorrow"), "is not a time"),
        (("--from", "2026-11-18", "--to", "2026-11-17", *periods[:4]), "--from is not before --to"),
        (("--with-model", "letters"), "--with-model needs --model"),
    ):
        code, text = await asyncio.to_thread(typed, *wrong)
        assert code in {1, 2}
        assert message in text


def test_what_is_left_of_a_time_without_others() -> None:
    """Parts at both ends, in the middle, outside, and all of it."""
    at = [datetime(2026, 11, day, tzinfo=UTC) for day in range(1, 7)]
    assert cut((at[0], at[5]), ()) == ((at[0], at[5]),)
    assert cut((at[0], at[5]), [(at[1], at[2]), (at[3], at[4])]) == (
        (at[0], at[1]),
        (at[2], at[3]),
        (at[4], at[5]),
    )
    assert cut((at[1], at[3]), [(at[0], at[2])]) == ((at[2], at[3]),)
    assert cut((at[1], at[3]), [(at[4], at[5])]) == ((at[1], at[3]),)
    assert cut((at[1], at[3]), [(at[0], at[5])]) == ()
