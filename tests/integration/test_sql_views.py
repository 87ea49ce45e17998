"""The SQL views for the common questions."""

import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import numpy as np
import pytest

from quantdrift.facts.estimate import ClusterSums, of_groups, ratio
from quantdrift.storage.database import Database
from quantdrift.storage.figures.divergence import Divergence
from quantdrift.storage.figures.periods import Grain, SumWindow
from quantdrift.storage.snapshot import reading
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

pytestmark = pytest.mark.integration

HOUR = datetime(2031, 6, 15, 9, tzinfo=UTC)
ESTIMATE = {
    "flip": {"mean": 0.054, "low": 0.03, "high": 0.08, "budget": 0.01},
    "divergence": {"mean": 0.5, "low": 0.2, "high": 0.9, "budget": 0.05},
}


@pytest.fixture
async def record(record: asyncpg.Connection) -> asyncpg.Connection:
    """Return a connection to a record with one candidate version, its aggregate and one slice."""
    await record.execute("""
        insert into model_version (model, candidate_version, reference_digest) values ('digits', 'int8', 'abc');
        insert into slice (model, predicate, name, definition) values
            ('digits', 'true', 'all', '{}'), ('digits', 'header.x-scanner = "faint"', 'scanner=faint', '{}');
    """)
    return record


async def verdict(
    record: asyncpg.Connection, slice_id: int, said: str, estimate: Any, alert_id: int | None
) -> None:
    """Store what is said of a slice."""
    await record.execute(
        "insert into verdict values (1, $1, $2, 'because', $3, 500, 40, 80, $4, $5, $3, $3, 7)",
        slice_id,
        said,
        HOUR,
        json.dumps(estimate),
        alert_id,
    )


async def test_slice_now_shows_a_slice_with_its_aggregate(record: asyncpg.Connection) -> None:
    """One row says how bad the slice is, by what measure, since when, and that the average looks fine."""
    await record.execute(
        "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
        " values (1, 2, 'firing', 'flip', $1, $2, '{}')",
        HOUR - timedelta(hours=2),
        HOUR,
    )
    await verdict(
        record, 1, "ok", {"flip": {"mean": 0.002, "low": 0.001, "high": 0.004, "budget": 0.01}}, None
    )
    await verdict(record, 2, "firing", ESTIMATE, 1)
    aggregate, slice_ = await record.fetch("select * from slice_now order by slice_id")
    assert dict(slice_) == {
        "model": "digits",
        "candidate_version": "int8",
        "reference_digest": "abc",
        "slice": "scanner=faint",
        "predicate": 'header.x-scanner = "faint"',
        "verdict": "firing",
        "reason": "because",
        "since": HOUR,
        "n_groups": 500,
        "evidence_ratio": 0.5,
        "flip_mean": 0.054,
        "flip_low": 0.03,
        "flip_high": 0.08,
        "flip_budget": 0.01,
        "divergence_mean": 0.5,
        "divergence_low": 0.2,
        "divergence_high": 0.9,
        "divergence_budget": 0.05,
        "all_verdict": "ok",
        "all_flip_mean": 0.002,
        "all_divergence_mean": None,
        "alert_id": 1,
        "onset_at": HOUR - timedelta(hours=2),
        "last_at": HOUR,
        "updated_at": HOUR,
        "model_version_id": 1,
        "slice_id": 2,
        "flip_missing": None,
        "divergence_missing": None,
        "flip_n": None,
        "divergence_n": None,
        "window_days": None,
        "requests_day": None,
        "changed_day": None,
        "people_day": None,
        "serving": None,
        "replaced_by": None,
        "seen_at": None,
        "changed_share_day": None,
        "changed_share_day_low": None,
        "changed_share_day_high": None,
    }
    assert (aggregate["slice"], aggregate["all_flip_mean"], aggregate["alert_id"]) == ("all", 0.002, None)


async def test_slice_now_shows_what_nothing_is_known_of(record: asyncpg.Connection) -> None:
    """A verdict without an estimate, without an aggregate beside it, is a row of nulls, not a missing one."""
    await verdict(record, 2, "unknown", {}, None)
    row = await record.fetchrow("select * from slice_now")
    assert row is not None
    assert (row["verdict"], row["flip_mean"], row["all_verdict"]) == ("unknown", None, None)


async def test_slice_now_shows_how_much_evidence_an_interval_lacks(record: asyncpg.Connection) -> None:
    """Where an interval would hold every value, its ends are null and the exchanges that are missing stand in their place."""
    await verdict(record, 2, "unknown", {"flip": {"mean": 0.0, "budget": 0.01, "missing": 5}}, None)
    row = await record.fetchrow("select * from slice_now")
    assert row is not None
    assert (row["flip_mean"], row["flip_low"], row["flip_high"], row["flip_missing"]) == (0.0, None, None, 5)


async def test_slice_now_shows_the_window_and_the_day(record: asyncpg.Connection) -> None:
    """Of 400 requests of the last 24 hours 40 changed; the window has 60 exchanges, of 30 a day; two sessions had a changed answer.

    Hours before, answers that stayed the same, requests without a session and other slices count for nothing.
    """
    await make_partitions(record, [HOUR.date() - timedelta(days=1), HOUR.date()])
    estimate = {"flip": {"mean": 0.1, "budget": 0.01, "n": 60}, "divergence": {"budget": 0.05, "n": 40}}
    await verdict(record, 2, "ok", estimate, None)
    hourly = ROLLUP.replace("rollup_day (day", "rollup_hour (hour").replace("100, 100", "15, 15")
    for hours, weight, flip in ((0, 100.0, 10.0), (23, 300.0, 30.0), (24, 5000.0, 5000.0)):
        await record.execute(hourly, HOUR - timedelta(hours=hours), 1, 2, weight, weight, flip, 0.0)
    keys = [
        ("ann", 1, True, 2),
        ("ann", 2, True, 2),
        ("bob", 23 * 60, True, 2),
        ("cleo", 23 * 60 + 1, True, 2),
        ("dan", 3, False, 2),
        ("", 4, True, 2),
        ("eve", 5, True, 1),
    ]
    rows = [
        Comparison(
            captured_at=HOUR - timedelta(minutes=minutes),
            exchange_id=f"00000000-0000-0000-0000-{number:012d}",
            batch_id=1,
            model_version_id=1,
            slice_ids=(slice_id,),
            group_key=key,
            flip=flip,
        )
        for number, (key, minutes, flip, slice_id) in enumerate(keys)
    ]
    await store_comparisons(record, rows)
    row = await record.fetchrow("select * from slice_now")
    assert row is not None
    names = ("flip_n", "divergence_n", "window_days", "requests_day", "changed_day", "people_day")
    assert [row[name] for name in names] == [60, 40, 2.0, 400.0, 40.0, 2]


async def test_the_days_of_a_window_count_a_session_as_one(record: asyncpg.Connection) -> None:
    """Of 2,000 exchanges 500 sessions were made, so the 400 exchanges of a day are 100 of them: a window of 200 spans two days."""
    await verdict(record, 2, "ok", {"flip": {"mean": 0.1, "budget": 0.01, "n": 200}}, None)
    daily = ROLLUP.replace("100, 100", "2000, 2000")
    await record.execute(daily, HOUR - timedelta(days=1), 1, 2, 2000.0, 2000.0, 20.0, 0.0)
    hourly = ROLLUP.replace("rollup_day (day", "rollup_hour (hour").replace("100, 100", "400, 400")
    await record.execute(hourly, HOUR, 1, 2, 400.0, 400.0, 4.0, 0.0)
    assert await record.fetchval("select window_days from slice_now") == pytest.approx(2.0)


@pytest.mark.parametrize(
    "where", ["", "where model_version_id = 1", "where model_version_id = 1 and slice_id = 2"]
)
async def test_slice_now_reads_no_traffic_for_a_query_that_needs_none(
    record: asyncpg.Connection, where: str
) -> None:
    """A query of verdicts reads neither roll-ups nor comparisons: the joins for the day are left out."""
    lines = await record.fetch(
        f"explain select slice, verdict, flip_mean, flip_n, alert_id from slice_now {where}"
    )
    plan = "\n".join(line[0] for line in lines)
    assert "verdict" in plan
    assert "rollup" not in plan
    assert "comparison" not in plan


async def test_slice_item_weighs_an_exchange_once_in_each_of_its_slices(
    record: asyncpg.Connection, database: Database
) -> None:
    """Of an exchange of three items taken with 1/10 two lie in the slice: 5 each there, 10/3 each in the aggregate.

    Means with these weights are those of the report, and 1 / (pi1 * pi2) for each item is not.
    """
    await make_partitions(record, [HOUR.date()])
    one, other = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"
    rows = [
        Comparison(captured_at=HOUR, exchange_id=one, item=0, batch_id=1, model_version_id=1, slice_ids=(1, 2),
                   n_items=3, pi1=0.2, pi2=0.5, flip=True, tie=True, divergence=0.1),
        Comparison(captured_at=HOUR, exchange_id=one, item=1, batch_id=1, model_version_id=1, slice_ids=(1, 2),
                   n_items=3, pi1=0.2, pi2=0.5, flip=True, tie=False, divergence=0.1),
        Comparison(captured_at=HOUR, exchange_id=one, item=2, batch_id=1, model_version_id=1, slice_ids=(1,),
                   n_items=3, pi1=0.2, pi2=0.5, flip=False, tie=False, divergence=0.1),
        Comparison(captured_at=HOUR, exchange_id=other, item=0, batch_id=1, model_version_id=1, slice_ids=(1, 2),
                   pi1=0.2, pi2=1.0, flip=False, tie=False, divergence=0.3),
    ]  # fmt: skip
    await store_comparisons(record, rows)
    found = await record.fetch(
        "select slice, item, weight from slice_item where exchange_id = $1 and captured_at >= $2 order by slice_id, item",
        one,
        HOUR,
    )
    assert [(row["slice"], row["item"]) for row in found] == [
        ("all", 0),
        ("all", 1),
        ("all", 2),
        ("scanner=faint", 0),
        ("scanner=faint", 1),
    ]
    assert [row["weight"] for row in found] == pytest.approx([10 / 3] * 3 + [5.0] * 2)
    means = await record.fetch("""
        select slice_id, sum(weight * flip::int) / sum(weight) as flip, sum(weight * tie::int) / sum(weight) as tie
        from slice_item group by 1 order by 1
    """)
    window = SumWindow(begin=HOUR, end=HOUR + timedelta(hours=1), grain=Grain.ITEM)
    async with reading(database) as connection:
        sums = await Divergence(connection).sums(window, timedelta(hours=1), {1: 2.0}, [1, 2])
    for row, entry in zip(means, sums, strict=True):
        assert row["flip"] == pytest.approx(entry.sums.of["flip"].total / entry.sums.of["flip"].weight)
        assert row["tie"] == pytest.approx(entry.sums.tie / entry.sums.tie_weight)
    assert means[1]["flip"] == pytest.approx(10 / 15)


async def test_the_report_counts_a_session_once_in_what_its_intervals_rest_on(
    record: asyncpg.Connection, database: Database
) -> None:
    """Ten exchanges of one session and ten of none: the session's weight is 10, so 20^2 / (10^2 + 10) are left."""
    await make_partitions(record, [HOUR.date()])
    rows = [
        Comparison(
            captured_at=HOUR + timedelta(seconds=number),
            exchange_id=f"00000000-0000-0000-0000-{number:012d}",
            batch_id=1,
            model_version_id=1,
            group_key="user" if number < 10 else "",
            flip=number < 10,
            divergence=0.1,
        )
        for number in range(20)
    ]
    await store_comparisons(record, rows)
    window = SumWindow(begin=HOUR, end=HOUR + timedelta(hours=1), grain=Grain.ITEM)
    async with reading(database) as connection:
        (entry,) = await Divergence(connection).sums(window, timedelta(hours=1), {1: 2.0}, [1])
    assert (entry.sums.n_groups, entry.sums.weight) == (20, 20.0)
    assert entry.sums.weight_sq == 10.0**2 + 10
    assert entry.sums.n_effective == pytest.approx(20**2 / 110)


async def test_the_report_gives_a_value_that_is_not_a_number_no_part(
    record: asyncpg.Connection, database: Database
) -> None:
    """Of two exchanges with a divergence of 0.5 and NaN the sums are those of the first alone, as in the roll-ups."""
    await make_partitions(record, [HOUR.date()])
    rows = [
        Comparison(
            captured_at=HOUR,
            exchange_id=f"00000000-0000-0000-0000-{number:012d}",
            batch_id=1,
            model_version_id=1,
            flip=True,
            js=value,
            divergence=value,
        )
        for number, value in enumerate((0.5, math.nan))
    ]
    await store_comparisons(record, rows)
    window = SumWindow(begin=HOUR, end=HOUR + timedelta(hours=1), grain=Grain.ITEM)
    async with reading(database) as connection:
        (entry,) = await Divergence(connection).sums(window, timedelta(hours=1), {1: 2.0}, [1])
        (bins,) = await Divergence(connection).bins(window, {1: 2.0}, [1])
    divergence = entry.sums.of["divergence"]
    assert (divergence.total, divergence.weight) == (0.5, 1.0)
    assert (entry.sums.of["flip"].total, entry.sums.n_items, entry.sums.n_infinite) == (2.0, 2, 0)
    assert sum(bins.bins) == 1.0


async def test_slice_history_has_the_intervals_of_the_report(record: asyncpg.Connection) -> None:
    """Of 160 exchanges half of the weight has an answer, a quarter a divergence: each interval is that of its sums, with its people."""
    random = np.random.default_rng(3)
    people = [np.array([*random.exponential(1.0, 64), 30.0, 3.0, 3.0]) for _ in range(2)]
    await record.execute(
        "insert into rollup_hour (hour, model_version_id, slice_id, n_items, n_groups, weight, weight_sq, flip, topk, js, divergence,"
        " margin, flip_weight, topk_weight, js_weight, divergence_weight, margin_weight, n_infinite, divergence_bins, cap,"
        " flip_weight_sq, flip_sq, flip_cross, divergence_weight_sq, divergence_sq, divergence_cross, heaviest, people)"
        " values ($1, 1, 2, 160, 160, 160, 160, 8, 0, 0, 0.4, 0, 80, 0, 0, 40, 0, 0, $2, 2, 90, 9, 8, 50, 4, 3, 2, $3)",
        HOUR,
        [0.0] * 64,
        [float(number) for number in np.concatenate(people)],
    )
    await verdict(record, 2, "ok", ESTIMATE, None)
    row = await record.fetchrow("select * from slice_history")
    assert row is not None
    squares = {"flip": (80.0, 90.0, 8.0, 9.0, 8.0), "divergence": (40.0, 50.0, 0.4, 4.0, 3.0)}
    for (name, (weight, weight_sq, total, total_sq, cross)), group in zip(
        squares.items(), people, strict=True
    ):
        sums = ClusterSums(
            n=160,
            weight=weight,
            weight_sq=weight_sq,
            total=total,
            total_sq=total_sq,
            cross=cross,
            heaviest=2.0,
        )
        wanted = ratio(of_groups(sums, list(group)), 2.0 if name == "divergence" else 1.0)
        assert wanted is not None
        assert (row[f"{name}_low"], row[f"{name}_high"]) == pytest.approx(
            (wanted.low, wanted.high), rel=1e-12
        )
    assert (row["flip_budget"], row["divergence_budget"]) == (0.01, 0.05)


async def test_slice_history_weighs_the_traffic_not_the_sample(record: asyncpg.Connection) -> None:
    """Means are sums over weights; the aggregate of the same hour and the slice's share stand beside them."""
    insert = (
        "insert into rollup_hour (hour, model_version_id, slice_id, n_items, n_groups, weight, weight_sq, flip, topk,"
        " js, divergence, margin, flip_weight, topk_weight, js_weight, divergence_weight, margin_weight, n_infinite, divergence_bins)"
        " values ($1, 1, $2, 30, 20, $3, $4, $5, 4, 2, 1, 3, $3, $3, $3, $3, $3, 1, '{}')"
    )
    await record.execute(insert, HOUR, 1, 1000.0, 25_000.0, 10.0)
    await record.execute(insert, HOUR, 2, 40.0, 100.0, 2.0)
    await record.execute("update rollup_hour set tie = 0.5, tie_weight = 40 where slice_id = 2")
    await record.execute(insert, HOUR + timedelta(hours=1), 2, 0.0, 0.0, 0.0)
    row = await record.fetchrow("select * from slice_history where slice_id = 2 order by hour limit 1")
    assert row is not None
    assert dict(row) == {
        "hour": HOUR,
        "model": "digits",
        "candidate_version": "int8",
        "reference_digest": "abc",
        "slice": "scanner=faint",
        "predicate": 'header.x-scanner = "faint"',
        "n_items": 30,
        "n_groups": 20,
        "n_eff": 16.0,
        "weight": 40.0,
        "traffic_ratio": 0.04,
        "flip": 0.05,
        "topk": 0.1,
        "js": 0.05,
        "divergence": 0.025,
        "margin": 0.075,
        "n_infinite": 1,
        "all_flip": 0.01,
        "all_topk": 0.004,
        "all_js": 0.002,
        "all_divergence": 0.001,
        "all_margin": 0.003,
        "model_version_id": 1,
        "slice_id": 2,
        "tie": 0.0125,
        "all_tie": None,
        "flip_low": pytest.approx(0.00021, abs=1e-5),
        "flip_high": pytest.approx(0.3256, abs=1e-4),
        "divergence_low": None,
        "divergence_high": None,
        "flip_budget": None,
        "divergence_budget": None,
    }
    empty = await record.fetchrow("select * from slice_history order by hour desc limit 1")
    assert empty is not None
    assert (empty["flip"], empty["n_eff"], empty["all_flip"]) == (None, None, None)


@pytest.fixture
async def tallied(record: asyncpg.Connection) -> asyncpg.Connection:
    """Return a record with tallies of two boots over three hours; those of the second hour came late or never."""
    await record.execute(
        "insert into batch (kind, worker, captured_from, captured_to, n_rows) values ('tally', 'w', now(), now(), 1)"
    )
    insert = "insert into tally values ('pod', $1, 'default', $2, $3, 1, $4, $5, $6, $7, $8, $2)"
    for boot, sequence, minutes, counts, lost in (
        ("a", 1, 10, (100, 50, 5, 40), {"decode": 5}),
        ("a", 2, 50, (300, 150, 15, 130), {"decode": 5}),
        ("a", 9, 130, (900, 450, 45, 390), {"decode": 6, "publish": 9}),
        ("b", 1, 150, (10, 10, 0, 10), {}),
    ):
        at = HOUR + timedelta(minutes=minutes)
        await record.execute(insert, boot * 32, sequence, at, *counts, json.dumps(lost))
    return record


async def test_coverage_hour_counts_what_was_added_per_hour(tallied: asyncpg.Connection) -> None:
    """Cumulative counts become hourly ones: across boots, missing tallies and reasons that appear late."""
    rows = await tallied.fetch("select * from coverage_hour order by hour")
    wanted = [
        (HOUR, 2, 1, 300, 150, 15, 130, 5, {"decode": 5}, 2),
        (HOUR + timedelta(hours=2), 2, 2, 610, 310, 30, 270, 10, {"decode": 1, "publish": 9}, 8),
    ]
    columns = ("n_tallies", "n_boots", "offered", "taken", "thinned", "published", "n_lost")
    assert [
        (row["hour"], *(row[name] for name in columns), json.loads(row["lost"]), row["blind_connections"])
        for row in rows
    ] == wanted
    for row in rows:
        assert row["taken"] == row["thinned"] + row["published"] + row["n_lost"]


async def test_coverage_hour_adds_up_to_the_last_tallies(tallied: asyncpg.Connection) -> None:
    """Nothing is counted twice or dropped at the borders of hours."""
    assert await tallied.fetchval("select sum(offered) from coverage_hour") == 900 + 10


async def test_a_condition_on_the_hour_bounds_the_work(tallied: asyncpg.Connection) -> None:
    """The condition reaches the tallies before they are summed: a day does not cost a month."""
    plan = await tallied.fetch("explain select * from coverage_hour where hour >= '2031-06-15 11:00+00'")
    lines = [line[0] for line in plan]
    scan = next(
        n
        for n, line in enumerate(lines)
        if "on tally" in line and "tally t" not in line and "now_" not in line
    )
    assert any("date_bin" in line and ">=" in line for line in lines[scan : scan + 3]), "\n".join(lines)


async def test_item_has_all_that_is_known_of_an_item_in_each_slice(record: asyncpg.Connection) -> None:
    """The weights are those of slice_item; classes, scores, request id and trace are columns, and -1 is no class."""
    await make_partitions(record, [HOUR.date()])
    one, other = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"
    detail = {
        "candidate_top": 8,
        "reference_top": 3,
        "candidate_scores": [[8, 0.6]],
        "reference_scores": [[3, 0.5]],
    }
    rows = [
        Comparison(captured_at=HOUR, exchange_id=one, item=item, batch_id=1, model_version_id=1,
                   slice_ids=(1, 2) if item < 2 else (1,), n_items=3, pi1=0.2, pi2=0.5, flip=True, divergence=0.1,
                   topk=True, js=0.02, margin=0.3,
                   group_key="user", attributes='{"header.x-request-id": "r1"}', detail=json.dumps(detail),
                   trace="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
        for item in range(3)
    ]  # fmt: skip
    rows.append(
        Comparison(
            captured_at=HOUR,
            exchange_id=other,
            batch_id=1,
            model_version_id=1,
            pi1=0.2,
            detail='{"candidate_top": -1}',
        )
    )
    await store_comparisons(record, rows)
    found = await record.fetch("select * from item order by exchange_id, slice_id, item")
    assert [row["weight"] for row in found] == pytest.approx([10 / 3] * 3 + [5.0] * 2 + [5.0])
    first, last = found[0], found[-1]
    assert (first["model"], first["slice"], first["candidate_class"], first["reference_class"]) == (
        "digits",
        "all",
        8,
        3,
    )
    assert (first["topk"], first["js"], first["margin"]) == (True, 0.02, 0.3)
    assert (first["request_id"], first["trace_id"]) == ("r1", "4bf92f3577b34da6a3ce929d0e0e4736")
    assert (first["candidate_scores"], first["group_key"]) == ("[[8, 0.6]]", "user")
    assert (last["request_id"], last["trace_id"], last["candidate_class"], last["reference_class"]) == (
        None,
    ) * 4
    assert last["group_key"] == other


ROLLUP = (
    "insert into rollup_day (day, model_version_id, slice_id, n_items, n_groups, weight, weight_sq, flip, topk, js, divergence,"
    " margin, flip_weight, topk_weight, js_weight, divergence_weight, margin_weight, n_infinite, divergence_bins)"
    " values ($1, $2, $3, 100, 100, $4, $5, $6, 0, 0, $7, 0, $4, $4, $4, $4, $4, 0, '{}')"
)


async def test_slice_day_has_the_interval_the_budget_and_the_requests(record: asyncpg.Connection) -> None:
    """By hand: 5 % of 100 equal exchanges of weight 10 have an interval of 1.6 to 11.4 %."""
    day = HOUR.replace(hour=0)
    await record.execute(ROLLUP, day, 1, 1, 4000.0, 40_000.0, 40.0, 20.0)
    await record.execute(ROLLUP, day, 1, 2, 1000.0, 10_000.0, 50.0, 10.0)
    await verdict(record, 2, "firing", ESTIMATE, None)
    row = await record.fetchrow("select * from slice_day where slice = 'scanner=faint'")
    assert row is not None
    assert (row["n_eff"], row["requests"], row["traffic_ratio"], row["changed"]) == (
        100.0,
        1000.0,
        0.25,
        50.0,
    )
    assert [row[name] for name in ("flip", "flip_low", "flip_high")] == pytest.approx(
        [0.05, 0.0158, 0.1143], abs=1e-4
    )
    assert (row["flip_budget"], row["divergence"], row["divergence_budget"]) == (0.01, 0.01, 0.05)
    assert (row["all_flip"], row["all_divergence"]) == (0.01, 0.005)


@pytest.mark.parametrize("flipped", [0.0, 5.0, 50.0])
async def test_the_interval_of_a_day_rests_on_the_items_that_have_an_answer(
    record: asyncpg.Connection, flipped: float
) -> None:
    """Of 1,000 exchanges 50 have an answer: mean, interval and changed answers are of these, within 0 and 1, also at the ends."""
    day = HOUR.replace(hour=0)
    await record.execute(ROLLUP, day, 1, 2, 1000.0, 1000.0, flipped, 10.0)
    await record.execute("update rollup_day set flip_weight = 50")
    row = await record.fetchrow("select * from slice_day")
    # Of a row without squares every exchange has the mean weight, and an item changed or not.
    wanted = ratio(
        ClusterSums(n=100, weight=50.0, weight_sq=50.0, total=flipped, total_sq=flipped, cross=flipped)
    )
    assert row is not None
    assert wanted is not None
    assert (row["n_eff"], row["flip"], row["changed"]) == (1000.0, flipped / 50, flipped)
    assert (row["flip_low"], row["flip_high"]) == pytest.approx((wanted.low, wanted.high), rel=1e-12)
    assert 0 <= row["flip_low"] <= row["flip"] <= row["flip_high"] <= 1
    await record.execute("update rollup_day set flip_weight = 0, flip = 0, weight_sq = 0")
    row = await record.fetchrow("select * from slice_day")
    assert row is not None
    assert [row[name] for name in ("changed", "flip", "flip_low", "flip_high", "divergence_low")] == [
        None
    ] * 5


async def test_release_compare_sets_each_version_beside_the_one_before(record: asyncpg.Connection) -> None:
    """The first version has none before it; a slice without data in one of the two is left out."""
    await record.execute(
        "insert into model_version (model, candidate_version, reference_digest, first_seen_at)"
        " values ('digits', 'int8-2', 'abc', now() + interval '1 hour')"
    )
    day = HOUR.replace(hour=0)
    await record.execute(ROLLUP, day, 1, 1, 1000.0, 10_000.0, 10.0, 20.0)
    await record.execute(ROLLUP, day, 1, 2, 1000.0, 10_000.0, 10.0, 20.0)
    await record.execute(ROLLUP, day, 2, 1, 1000.0, 10_000.0, 50.0, 10.0)
    (row,) = await record.fetch("select * from release_compare")
    assert (row["before_version"], row["version"], row["slice"], row["n_before"], row["n"]) == (
        "int8",
        "int8-2",
        "all",
        100,
        100,
    )
    assert (row["flip_before"], row["flip"], row["flip_difference"]) == pytest.approx((0.01, 0.05, 0.04))
    assert row["divergence_difference"] == pytest.approx(-0.01)


async def test_not_observed_names_what_nobody_looked_at(record: asyncpg.Connection) -> None:
    """Of 1,000 requests 800 were not sampled, 50 left out and 10 lost; one slice has no verdict, two exchanges none of theirs."""
    await record.execute(
        "insert into batch (id, kind, worker, captured_from, captured_to, n_rows) overriding system value"
        " values (1, 'tally', 'w', now(), now(), 1)"
    )
    await record.execute(
        "insert into tally (source, boot, stratum, sequence, at, batch_id, offered, taken, thinned, published, lost,"
        " blind_connections) values ('pod', gen_random_uuid(), 'default', 1, now(), 1, 1000, 200, 50, 140,"
        " '{\"queue_full\": 10}', 0)"
    )
    await record.execute(
        "insert into quarantine (stream_sequence, digest, model, reason, detail, payload)"
        " values (1, 'a', 'digits', 'schema', '', ''), (2, 'b', 'digits', 'schema', '', '')"
    )
    await verdict(record, 2, "unknown", {}, None)
    await record.execute("update verdict set last_at = now()")
    rows = await record.fetch(
        "select model, slice, stratum, what, reason, requests, share from not_observed order by what, reason"
    )
    assert [tuple(row) for row in rows] == [
        (None, None, "default", "left out", "the sampling policy", 50, 0.05),
        (None, None, "default", "lost", "queue_full", 10, 0.01),
        ("digits", "scanner=faint", None, "no verdict", "because", None, None),
        ("digits", None, None, "not comparable", "schema", 2, None),
        (None, None, "default", "not sampled", "the sampling rate", 800, 0.8),
    ]


async def test_not_observed_names_the_model_and_a_time_of_ones_own(record: asyncpg.Connection) -> None:
    """What was lost or left out once its model was known has its name; `not_observed_in` counts what was added in the time asked for.

    One sidecar has run for three days: of its 1,000 requests 400 came in the last 24 hours. 10 were lost then, 4 of them of `digits`.
    """
    await record.execute(
        "insert into batch (id, kind, worker, captured_from, captured_to, n_rows) overriding system value"
        " values (1, 'tally', 'w', now(), now(), 1), (2, 'tally', 'w', now(), now(), 1);"
        " update batch set stored_at = now() - interval '2 days' where id = 1"
    )
    insert = (
        "insert into tally (source, boot, stratum, sequence, at, batch_id, offered, taken, thinned, published, lost, models,"
        " blind_connections) values ('pod', $1, 'default', $2, now() - make_interval(hours => $3), $4, $5, $5, $6, 0, $7, $8, 0)"
    )
    boot = "a" * 32
    for sequence, hours, batch, offered, thinned, lost, models in (
        (1, 48, 1, 600, 20, {"decode": 5}, {"digits": {"taken": 500, "thinned": 20, "lost": {"decode": 3}}}),
        (
            2,
            1,
            2,
            1000,
            50,
            {"decode": 15, "publish": 2},
            {
                "digits": {"taken": 900, "thinned": 40, "lost": {"decode": 7, "publish": 2}},
                "cats": {"unknown": 3},
            },
        ),
    ):
        await record.execute(
            insert, boot, sequence, hours, batch, offered, thinned, json.dumps(lost), json.dumps(models)
        )
    await record.execute(
        "insert into expiry (batch_id, boot, counts_row, source, stratum, model, n)"
        " values (1, $1, 0, 'pod', 'default', 'digits', 7), (2, $1, 0, 'pod', 'default', 'digits', 1)",
        boot,
    )

    async def counted(source: str) -> list[tuple[Any, ...]]:
        rows = await record.fetch(
            f"select what, reason, model, requests, share from {source} order by what, reason, model"
        )
        return [tuple(row) for row in rows]

    assert await counted("not_observed") == [
        ("expired", "no worker replayed it in time", "digits", 1, 1 / 400),
        ("left out", "the sampling policy", "digits", 20, 20 / 400),
        ("left out", "the sampling policy", None, 10, 10 / 400),
        ("lost", "decode", "digits", 4, 4 / 400),
        ("lost", "decode", None, 6, 6 / 400),
        ("lost", "publish", "digits", 2, 2 / 400),
    ]
    assert await counted("not_observed_in('7 days')") == [
        ("expired", "no worker replayed it in time", "digits", 8, 8 / 1000),
        ("left out", "the sampling policy", "digits", 40, 40 / 1000),
        ("left out", "the sampling policy", None, 10, 10 / 1000),
        ("lost", "decode", "digits", 7, 7 / 1000),
        ("lost", "decode", None, 8, 8 / 1000),
        ("lost", "publish", "digits", 2, 2 / 1000),
    ]
    assert await counted("not_observed_in('1 minute')") == [
        ("expired", "no worker replayed it in time", "digits", 1, None)
    ]


async def test_change_log_has_escalations_and_policies(record: asyncpg.Connection) -> None:
    """An acknowledgement that ended because the alert became worse is there with the reason, and sampling rates with those before."""
    await record.execute(
        "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
        " values (1, 2, 'firing', 'flip', now(), now(), '{}');"
        " insert into alert_action (alert_id, action, reason) values (1, 'ack', 'known'), (1, 'escalate', 'it pages now');"
        """ insert into policy (epoch, definition) values ('e1', '{"rate": 1}'), ('e2', '{"rate": 2}')"""
    )
    rows = await record.fetch(
        "select who, what, model, subject, before, after, why from change_log"
        " where what in ('alert escalate', 'policy') order by what, subject"
    )
    assert [tuple(row) for row in rows] == [
        ("monitor", "alert escalate", "digits", "alert 1", None, None, "it pages now"),
        ("traffic", "policy", "", "epoch e1", None, '{"rate": 1}', ""),
        ("traffic", "policy", "", "epoch e2", '{"rate": 1}', '{"rate": 2}', ""),
    ]


async def test_change_log_has_people_releases_and_learned_baselines(record: asyncpg.Connection) -> None:
    """Who, what and why, in one place."""
    await record.execute("select audit_add('pause', 'digits', 'all', null, '{\"until\": 1}', 'a load test')")
    await record.execute(
        "insert into baseline (model_version_id, slice_id, metric, kind, source, made_by, reason, n_groups)"
        " values (1, 2, 'flip', 'change', 'learned', 'monitor', '', 500), (1, 2, 'flip', 'change', 'accepted', 'ann', 'ok', 500)"
    )
    rows = await record.fetch(
        "select who, what, model, subject, why from change_log where what <> 'db upgrade' order by what"
    )
    assert tuple(rows[0]) == (
        "monitor",
        "baseline learned",
        "digits",
        "scanner=faint flip change",
        "",
    )
    assert [tuple(row)[1:] for row in rows[1:]] == [
        ("pause", "digits", "all", "a load test"),
        ("release", "digits", "int8", ""),
    ]
