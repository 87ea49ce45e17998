"""What the weekly report reads from the database."""

from collections.abc import AsyncIterator
from datetime import timedelta

import asyncpg
import pytest

from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Metric, Verdict
from quantdrift.storage.account.coverage import Coverage
from quantdrift.storage.alerts.alerts import alerts_between
from quantdrift.storage.alerts.timeline import alert_counts
from quantdrift.storage.database import Database
from quantdrift.storage.exchanges import examples_of
from quantdrift.storage.figures.divergence import Divergence
from quantdrift.storage.figures.estimates import Sums
from quantdrift.storage.figures.periods import Grain, SumWindow
from quantdrift.storage.report_runs import record_run
from quantdrift.storage.slices.verdicts import verdicts_at
from quantdrift.storage.snapshot import Connection, judged_until, reading
from tests.support.storage.report_rows import (
    CAP,
    HOUR,
    MINUTE,
    START,
    Story,
    rollup,
    write_short_story,
    write_tallies,
)

pytestmark = pytest.mark.integration

END = START + 90 * MINUTE
DAY = START.replace(hour=0)


@pytest.fixture
async def story(postgres_dsn: str) -> Story:
    """Return ninety minutes of comparisons in Postgres."""
    return await write_short_story(postgres_dsn)


@pytest.fixture
async def connection(postgres_dsn: str, story: Story) -> AsyncIterator[Connection]:
    """Return a snapshot of the story."""
    del story
    async with Database(postgres_dsn) as database, reading(database) as found:
        yield found


def _close(found: Sums, sums: list[float]) -> None:
    flip, divergence = found.sums_of(Metric.FLIP), found.sums_of(Metric.DIVERGENCE)
    values = [found.n_items, found.n_groups, found.weight, found.weight_sq, flip.total, divergence.total]
    assert [*values, found.n_infinite] == pytest.approx([*sums[:5], *sums[6:8]], rel=1e-9)
    assert [flip.weight, divergence.weight] == pytest.approx(2 * [sums[2]], rel=1e-9)


def _mean(sums: Sums, metric: Metric) -> float | None:
    estimate = sums.estimate(metric)
    return None if estimate is None else estimate.mean


@pytest.mark.parametrize(
    "window",
    [
        SumWindow(begin=START, end=END, grain=Grain.ITEM),
        SumWindow(begin=START, end=START + 2 * HOUR, grain=Grain.HOUR),
        SumWindow(begin=DAY, end=DAY + 24 * HOUR, grain=Grain.DAY),
    ],
    ids=lambda window: window.grain.value,
)
async def test_every_grain_sums_to_the_same(connection: Connection, story: Story, window: SumWindow) -> None:
    """Comparisons and both roll-ups give the sums and histograms that were computed apart from the database."""
    wanted = [story.all_id, story.slice_ids[1]]
    caps = {story.version_id: CAP}
    sums = await Divergence(connection).sums(window, window.end - window.begin, caps, wanted)
    bins = await Divergence(connection).bins(window, caps, wanted)
    assert [entry.slice_id for entry in sums] == wanted
    for entry, histogram, parts in zip(sums, bins, (None, [1]), strict=True):
        (known,) = rollup(story.items, parts, grain=24 * HOUR).values()
        assert entry.at == window.begin
        _close(entry.sums, known)
        assert histogram.bins == pytest.approx(known[9:], rel=1e-9)


async def test_buckets_begin_with_the_window_and_add_up(connection: Connection, story: Story) -> None:
    """Ten-minute buckets hold what their items hold, none is outside, and their sum is the whole."""
    window = SumWindow(begin=START, end=END, grain=Grain.ITEM)
    caps, width = {story.version_id: CAP}, 10 * MINUTE
    found = await Divergence(connection).sums(window, width, caps, [story.slice_ids[2]])
    known = rollup(story.items, [2], grain=width)
    assert [point.at for point in found] == sorted(known)
    for point in found:
        _close(point.sums, known[point.at])


async def test_weights_undo_unequal_probabilities(postgres_dsn: str, story: Story) -> None:
    """A group counts 1 / pi: halving pi1 doubles weight and sums, quadruples weight_sq, and leaves means alone."""
    db = await asyncpg.connect(postgres_dsn)
    await db.execute("update comparison set pi1 = pi1 / 2")
    await db.close()
    window = SumWindow(begin=START, end=END, grain=Grain.ITEM)
    async with Database(postgres_dsn) as database, reading(database) as connection:
        caps = {story.version_id: CAP}
        (found,) = await Divergence(connection).sums(window, END - START, caps, [story.all_id])
    (known,) = rollup(story.items, None, grain=24 * HOUR).values()
    assert found.sums.weight == pytest.approx(2 * known[2])
    assert found.sums.weight_sq == pytest.approx(4 * known[3])
    assert _mean(found.sums, Metric.FLIP) == pytest.approx(known[4] / known[2])
    assert found.sums.n_effective == pytest.approx(known[1])


async def test_extent_is_exact_and_counts_no_further_than_asked(connection: Connection, story: Story) -> None:
    """First and last capture are those of the items; the count stops at the limit."""
    found = await Divergence(connection).extent(START, END, 1000)
    assert (found.first, found.last) == (story.items[0].at, story.items[-1].at)
    assert found.n_items == 1000
    nothing = await Divergence(connection).extent(END + 48 * HOUR, END + 49 * HOUR, 1000)
    assert (nothing.first, nothing.last, nothing.n_items) == (None, None, 0)


async def test_extent_knows_hours_whose_comparisons_are_gone(postgres_dsn: str, story: Story) -> None:
    """Roll-ups outlive comparisons, and still say from when to when there was data."""
    db = await asyncpg.connect(postgres_dsn)
    await db.execute("delete from comparison where captured_at < $1", START + HOUR)
    await db.close()
    async with Database(postgres_dsn) as database, reading(database) as connection:
        found = await Divergence(connection).extent(DAY, DAY + 24 * HOUR, 10)
    assert (found.first, found.last) == (START, story.items[-1].at)


async def test_verdicts_are_those_of_the_end_of_the_period(connection: Connection, story: Story) -> None:
    """Before the page, the slice was ok; the reason of that time is not made up."""
    faint = story.slice_ids[1]
    now = {said.slice_id: said for said in await verdicts_at(connection, END, [story.version_id])}
    then = {
        said.slice_id: said for said in await verdicts_at(connection, START + 60 * MINUTE, [story.version_id])
    }
    assert (now[faint].verdict, now[faint].reason) == (Verdict.FIRING, "evidence 34")
    assert (then[faint].verdict, then[faint].reason) == (Verdict.OK, "")
    assert now[faint].budgets == {Metric.FLIP: 0.01}


async def test_an_alert_belongs_to_every_period_it_was_open_in(postgres_dsn: str, story: Story) -> None:
    """Opened before or resolved after: it is told; what was resolved after the period is told as open."""
    db = await asyncpg.connect(postgres_dsn)
    await db.execute("update alert set resolved_at = $1", START + 80 * MINUTE)
    await db.close()
    versions = [story.version_id]
    async with Database(postgres_dsn) as database, reading(database) as connection:
        (whole,) = await alerts_between(connection, START, END, versions)
        (early,) = await alerts_between(connection, START, START + 70 * MINUTE, versions)
        (late,) = await alerts_between(connection, START + 75 * MINUTE, END, versions)
        assert await alerts_between(connection, START + 81 * MINUTE, END, versions) == []
        assert await alerts_between(connection, START, START + 62 * MINUTE, versions) == []
        changes = [
            await alert_counts(connection, begin, END, versions)
            for begin in (START, START + 62 * MINUTE, START + 63 * MINUTE)
        ]
    assert whole.resolved_at == late.resolved_at == START + 80 * MINUTE
    assert early.resolved_at is None
    assert [found.pages for found in changes] == [1, 1, 0]


async def test_examples_are_flipped_and_of_the_slice(connection: Connection, story: Story) -> None:
    """The examples of a slice show what is wrong with it."""
    found = await examples_of(
        connection,
        START + 50 * MINUTE,
        END,
        version=story.version_id,
        slice_id=story.slice_ids[1],
        flips=False,
        most=3,
    )
    known = {(item.exchange, item.item) for item in story.items if item.part == 1 and item.flip}
    assert len(found) == 3
    assert {(example.exchange_id, example.item) for example in found} <= known
    every = await examples_of(
        connection,
        START + 50 * MINUTE,
        END,
        version=story.version_id,
        slice_id=story.slice_ids[1],
        flips=True,
        most=10_000,
    )
    assert every
    assert all(example.flip for example in every)


async def test_counts_of_a_period_are_the_difference_of_cumulative_ones(
    connection: Connection, story: Story
) -> None:
    """What a sidecar counted before the period does not count."""
    strata, fleet = await Coverage(connection).strata(START, END, by_stratum=True)
    default = next(stratum for stratum in strata if stratum.stratum == "default")
    # Statements every 5 minutes: the last before START is number 1, the last before END number 19.
    assert default.offered == 18 * 900
    assert default.taken == 18 * 450
    assert default.taken == default.published + sum(default.lost.values())
    assert set(default.lost) == {"queue_full", "rate_cap"}
    assert (fleet.sources, fleet.boots, fleet.blind_connections) == (1, 1, 0)
    assert sum(stratum.compared or 0 for stratum in strata) == len({item.exchange for item in story.items})


async def test_a_sidecar_that_started_again_is_counted_from_zero(postgres_dsn: str, story: Story) -> None:
    """A second boot in the period adds all of its counts; its strata are not mixed up with the first."""
    del story
    db = await asyncpg.connect(postgres_dsn)
    await write_tallies(db, begin=START + 40 * MINUTE, end=END, offered_per_s=1, lost=0, stratum="default")
    await db.close()
    async with Database(postgres_dsn) as database, reading(database) as connection:
        strata, fleet = await Coverage(connection).strata(START, END, by_stratum=False)
    assert sum(stratum.offered for stratum in strata) == 18 * 900 + 11 * 300
    assert (fleet.sources, fleet.boots, fleet.blind_connections) == (1, 2, 2)
    assert all(stratum.compared is None for stratum in strata)


async def test_counts_after_a_long_silence_begin_where_the_last_ones_ended(
    postgres_dsn: str, story: Story
) -> None:
    """A sidecar that was not heard of for hours before the period counts from its last word, however old."""
    del story
    db = await asyncpg.connect(postgres_dsn)
    await db.execute("delete from tally where at >= $1 and at < $2", START - 2 * MINUTE, START + 30 * MINUTE)
    await db.execute("update tally set at = at - interval '5 hours' where at < $1", START)
    await db.close()
    async with Database(postgres_dsn) as database, reading(database) as connection:
        strata, _ = await Coverage(connection).strata(START, END, by_stratum=False)
    (default,) = (stratum for stratum in strata if stratum.stratum == "default")
    assert default.offered == 18 * 900


async def test_what_has_no_divergence_does_not_dilute_the_mean(postgres_dsn: str, story: Story) -> None:
    """Outputs that are no distribution have no KL: the mean is that of the others, and without others there is none."""
    window, caps = SumWindow(begin=START, end=END, grain=Grain.ITEM), {story.version_id: CAP}
    faint = story.slice_ids[1]

    async def measured() -> Sums:
        async with Database(postgres_dsn) as database, reading(database) as connection:
            (found,) = await Divergence(connection).sums(window, window.end - window.begin, caps, [faint])
            bins = await Divergence(connection).bins(window, caps, [faint])
        assert sum(sum(entry.bins) for entry in bins) == pytest.approx(
            found.sums.sums_of(Metric.DIVERGENCE).weight
        )
        return found.sums

    db = await asyncpg.connect(postgres_dsn)
    await db.execute(
        "update comparison set divergence = null, js = null where item > 0 and $1 = any(slice_ids)", faint
    )
    some = await measured()
    await db.execute("update comparison set divergence = null, js = null where $1 = any(slice_ids)", faint)
    none = await measured()
    await db.close()
    mine = [item for item in story.items if item.part == 1]
    first = [item for item in mine if item.item == 0]
    part = [1 / item.n_items for item in first]
    expected = sum(w * min(item.divergence, CAP) for w, item in zip(part, first, strict=True)) / sum(part)
    assert _mean(some, Metric.DIVERGENCE) == pytest.approx(expected)
    assert some.n_effective_of(Metric.DIVERGENCE) == pytest.approx(some.n_effective * sum(part) / some.weight)
    assert some.n_effective_of(Metric.FLIP) == pytest.approx(some.n_effective)
    assert (_mean(none, Metric.DIVERGENCE), none.n_effective_of(Metric.DIVERGENCE)) == (None, 0.0)
    assert _mean(none, Metric.FLIP) == _mean(some, Metric.FLIP)


async def test_losses_after_publishing_are_counted_by_reason(connection: Connection) -> None:
    """What the shadow read but did not compare, and what it set aside."""
    (skipped,) = await Coverage(connection).skipped(START, END)
    (quarantined,) = await Coverage(connection).quarantined(START, END)
    assert (skipped.reason, skipped.n) == ("no_reference", 41)
    assert (quarantined.reason, quarantined.n) == ("schema", 3)
    assert "[1, 7]" in quarantined.detail
    assert await Coverage(connection).quarantined(END, END + HOUR) == []
    assert await Coverage(connection).quarantined(START, END, "another") == []
    assert await judged_until(connection) == END


async def test_a_snapshot_does_not_change_while_it_is_read(postgres_dsn: str, story: Story) -> None:
    """Rows that are written while a report is being read are not in it, not even in part."""
    async with Database(postgres_dsn) as database, reading(database) as connection:
        before = await Divergence(connection).count(START, END, 100_000)
        db = await asyncpg.connect(postgres_dsn)
        await db.execute("delete from comparison")
        await db.close()
        assert await Divergence(connection).count(START, END, 100_000) == before == len(story.items)


async def test_a_database_without_tables_says_what_to_do(postgres_dsn: str) -> None:
    """Before the first upgrade there is nothing to read, and the message names the command."""
    db = await asyncpg.connect(postgres_dsn)
    await db.execute("drop table report_run")
    await db.close()
    async with Database(postgres_dsn) as database:
        with pytest.raises(OperatorError, match="quantdrift db upgrade"):
            async with reading(database):
                pass


async def test_a_run_is_recorded_with_its_figures(postgres_dsn: str) -> None:
    """`report_run` keeps what was said, for later reports and for people."""
    async with Database(postgres_dsn) as database:
        number = await record_run(
            database,
            kind="week",
            begin=START,
            end=START + timedelta(days=7),
            path="a.html",
            figures={"n": [1]},
        )
    db = await asyncpg.connect(postgres_dsn)
    row = await db.fetchrow(
        "select kind, from_at, path, figures ->> 'n' as n from report_run where id = $1", number
    )
    await db.close()
    assert row is not None
    assert tuple(row) == ("week", START, "a.html", "[1]")
