"""True labels: loaded from files, matched to compared items, and what they say of each slice."""

import asyncio
import csv
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quantdrift.facts.estimate import Estimate, difference
from quantdrift.storage.database import Database
from quantdrift.storage.labels import outcomes
from tests.support.commands import invoked
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

pytestmark = pytest.mark.integration

NOW = datetime.now(UTC)
CONFIG = """
[[models]]
name = "digits"
labels = ["zero", "one", "two"]
"""


def exchange(number: int, candidate: int, reference: int, **columns: Any) -> Comparison:
    """Return an exchange with the request id r<number>."""
    return Comparison(
        captured_at=NOW - timedelta(hours=1),
        exchange_id=f"00000000-0000-0000-0000-{number:012d}",
        batch_id=1,
        model_version_id=1,
        attributes=json.dumps({"header.x-request-id": f"r{number}"}),
        detail=json.dumps({"candidate_top": candidate, "reference_top": reference}),
        trace=f"00-{number:032x}-0000000000000001-01",
        **columns,
    )


@pytest.fixture
async def dsn(record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path) -> str:
    """Return the address of a database with six exchanges; of the third there are two items, of the fourth weight 2."""
    await record.execute("""
        insert into model_version (model, candidate_version, reference_digest) values ('digits', 'int8', 'abc');
        insert into slice (model, predicate, name, definition) values
            ('digits', 'true', 'all', '{}'), ('digits', 'header.x-scanner = "faint"', 'scanner=faint', '{}');
    """)
    await make_partitions(record, [(NOW - timedelta(hours=1)).date()])
    rows = [
        exchange(1, 1, 1),
        exchange(2, 2, 1, slice_ids=(1, 2)),
        exchange(3, 1, 2, n_items=2),
        exchange(3, 1, 1, n_items=2, item=1),
        exchange(4, 0, 1, pi1=0.5, slice_ids=(1, 2)),
        exchange(5, 1, 1),
    ]
    await store_comparisons(record, rows)
    (tmp_path / "config.toml").write_text(CONFIG)
    return postgres_dsn


async def labels(dsn: str, directory: Path, *words: str) -> tuple[int, str]:
    """Run `quantdrift labels` and return its exit code and what it prints."""
    done = await asyncio.to_thread(invoked, "labels", *words, directory=directory, QUANTDRIFT_DSN=dsn)
    return done.returncode, done.stdout + done.stderr


async def stored(dsn: str) -> list[tuple[Any, ...]]:
    """Return exchange, item, label and who was right, in order."""
    connection = await asyncpg.connect(dsn)
    try:
        rows = await connection.fetch(
            "select right(exchange_id::text, 1)::int, item, label, candidate_right, reference_right from label order by 1, 2"
        )
    finally:
        await connection.close()
    return [tuple(row) for row in rows]


async def test_labels_find_their_items_by_a_recorded_attribute(dsn: str, tmp_path: Path) -> None:
    """By names and numbers; what finds nothing, has no label or an unknown class is told, and the rest is loaded."""
    (tmp_path / "truth.csv").write_text(
        "header.x-request-id,label,item\nr1,one,\nr2,1,0\nr3,2,0\nr3,one,1\nr9,one,0\nr5,,0\nr4,seven,0\n,one,0\nr4\n"
    )
    code, said = await labels(dsn, tmp_path, "load", "truth.csv", "--by", "header.x-request-id")
    assert code == 0, said
    assert await stored(dsn) == [
        (1, 0, "one", True, True),
        (2, 0, "1", False, True),
        (3, 0, "2", False, True),
        (3, 1, "one", True, True),
    ]
    assert "4 items of digits are labelled, from 5 rows" in said
    assert "1 rows found no compared item, such as r9" in said
    for part in ("1 without a label", "the class seven, which", "2 without a key"):
        assert part in said


async def test_a_file_that_is_loaded_again_replaces_its_labels(dsn: str, tmp_path: Path) -> None:
    """A corrected label counts, once; each load is in the audit with the user, without any key."""
    for label in ("two", "one"):
        (tmp_path / "truth.csv").write_text(f"key,label\n{1:032x},{label}\n")
        assert (await labels(dsn, tmp_path, "load", "truth.csv", "--by", "trace"))[0] == 0
    assert await stored(dsn) == [(1, 0, "one", True, True)]
    connection = await asyncpg.connect(dsn)
    entries = await connection.fetch("select model, after from audit where action = 'labels load'")
    await connection.close()
    expected = {"file": "truth.csv", "by": "trace", "rows": 1, "labelled": 1}
    assert [(row["model"], json.loads(row["after"])) for row in entries] == [("digits", expected)] * 2


async def test_a_parquet_file_may_say_who_was_right(dsn: str, tmp_path: Path) -> None:
    """For models whose answers are no classes: the file has both judgements, and the items are found by exchange id."""
    table = pa.table(
        {
            "exchange": [f"00000000-0000-0000-0000-{number:012d}" for number in (4, 5)],
            "candidate_right": [False, True],
            "reference_right": [True, False],
        }
    )
    pq.write_table(table, tmp_path / "truth.parquet")
    code, said = await labels(dsn, tmp_path, "load", "truth.parquet", "--by", "exchange", "--json")
    assert code == 0, said
    assert json.loads(said)["loaded"]["labelled"] == 2
    assert await stored(dsn) == [(4, 0, None, False, True), (5, 0, None, True, False)]


@pytest.mark.usefixtures("dsn")
async def test_what_the_labels_say_is_weighed_by_session(
    record: asyncpg.Connection, database: Database
) -> None:
    """By hand: r2 and r4 (weight 2) are harmed, of r3 one item of two is helped; r5 is wrong on both sides."""
    sides = {2: (False, True), 3: (True, False), 4: (False, True), 5: (False, False)}
    for number, (candidate, reference) in sides.items():
        await record.execute(
            "insert into label select captured_at, exchange_id, item, 1, null, $2, $3, now() from comparison"
            " where exchange_id = $1 and item = 0",
            f"00000000-0000-0000-0000-{number:012d}",
            candidate,
            reference,
        )
    await record.execute(
        "insert into label select captured_at, exchange_id, item, 1, null, true, true, now() from comparison where item = 1"
    )
    await record.execute("update comparison set group_key = 'user' where exchange_id::text ~ '(2|5)$'")
    async with database.begin() as connection:
        found = await outcomes(connection, [1], NOW - timedelta(hours=2), NOW)
    everything, faint = found
    assert (everything.slice, everything.n_items, everything.n_clusters) == ("all", 5, 3)
    assert everything.harm.weight == 5.0  # 1 for each of r2, r3 and r5, 2 for r4
    assert everything.harm.weight_sq == 2.0**2 + 1.0 + 2.0**2  # r2 and r5 are one session
    assert (everything.harm.total, everything.help.total, everything.both_wrong.total) == (3.0, 0.5, 1.0)
    assert everything.harm.total_sq == 1.0 + 2.0**2
    assert everything.harm.cross == 2.0 * 1.0 + 2.0 * 2.0
    assert (faint.slice, faint.n_items, faint.harm.total, faint.harm.weight) == ("scanner=faint", 2, 3.0, 3.0)


async def test_show_says_where_the_candidate_loses_accuracy(
    record: asyncpg.Connection, dsn: str, tmp_path: Path
) -> None:
    """Forty harmed answers of eighty in one slice are named as a loss; without labels it says how to load some."""
    assert "No item of digits of the last 7 days has a label" in (await labels(dsn, tmp_path, "show"))[1]
    rows = [
        exchange(100 + number, 0 if number % 2 else 1, 1, slice_ids=(1, 2) if number < 80 else (1,))
        for number in range(80)
    ]
    await store_comparisons(record, rows)
    lines = [f"r{100 + number},1" for number in range(80)]
    (tmp_path / "truth.csv").write_text("\n".join(["key,label", *lines]))
    assert (await labels(dsn, tmp_path, "load", "truth.csv", "--by", "header.x-request-id"))[0] == 0
    code, said = await labels(dsn, tmp_path, "show")
    assert code == 0
    (line,) = [line for line in said.splitlines() if line.startswith("scanner=faint")]
    assert "less accurate than the reference" in line
    assert "50.0 (37.5 to 61.7)" in line
    entry = json.loads((await labels(dsn, tmp_path, "show", "--json"))[1])["slices"][0]
    assert entry["loss"]["low"] > 0.3
    assert entry["help"]["mean"] == 0.0


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("", (), "is empty"),
        ("id,label\na,1\n", (), "no column `trace` or `key`: it has id, label. Name it with --key-column"),
        ("key,truth\na,1\n", (), "neither a column `label` nor both"),
        ("key,label\na,seven\n", (), "the class seven, which"),
        ("key,label\na,1\n", ("--model", "tippo"), "no model `tippo` is configured: digits"),
        ("\xff\xfe", (), "no column"),
    ],
)
async def test_a_file_that_cannot_be_used_says_why(
    dsn: str, tmp_path: Path, text: str, words: tuple[str, ...], message: str
) -> None:
    """Nothing is stored, and the exit code asks for a person."""
    (tmp_path / "truth.csv").write_text(text)
    code, said = await labels(dsn, tmp_path, "load", "truth.csv", "--by", "trace", *words)
    assert (code, await stored(dsn)) == (2, [])
    assert message in said


def test_a_loss_is_the_harm_less_the_help_with_the_interval_of_two_cells() -> None:
    """By hand, where one of the two always holds the correlation is -1: the distances add up. Else it is that of the labels."""
    half = Estimate(mean=0.5, low=0.4, high=0.6)
    found = difference(half, half, -1.0)
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.0, -0.2, 0.2))
    nothing = Estimate(mean=0.0, low=0.0, high=0.1)
    found = difference(nothing, Estimate(mean=0.2, low=0.1, high=0.3))
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.2 - 0.02**0.5, 0.3))


async def test_the_report_answers_whether_accuracy_was_lost(
    record: asyncpg.Connection, dsn: str, tmp_path: Path
) -> None:
    """On its first screen in one sentence, and by slice below it; without labels it says nothing of them."""
    words = ("report", "--format", "md", "--out", "report.md", "--from")
    since = (NOW - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%S")

    async def report() -> str:
        done = await asyncio.to_thread(invoked, *words, since, directory=tmp_path, QUANTDRIFT_DSN=dsn)
        assert done.returncode == 0, done.stderr
        return await asyncio.to_thread((tmp_path / "report.md").read_text)

    assert "labels" not in await report()
    rows = [exchange(100 + number, 0 if number % 2 else 1, 1, slice_ids=(1, 2)) for number in range(80)]
    await store_comparisons(record, rows)
    lines = [f"r{100 + number},1" for number in range(80)]
    (tmp_path / "truth.csv").write_text("\n".join(["key,label", *lines]))
    assert (await labels(dsn, tmp_path, "load", "truth.csv", "--by", "header.x-request-id"))[0] == 0
    page = await report()
    assert (
        "**Was accuracy lost**: Yes: 80 true labels show that in all traffic 50 % fewer answers are right than with the reference (38 % to 62 %)."
        in page
    )
    assert "## True labels: digits int8" in page
    assert (
        "| scanner=faint | less accurate than the reference | 50.0 (37.5 to 61.7) | 50.0 (38.3 to 61.7) |"
        in page
    )


async def test_the_changed_answers_that_were_drawn_say_what_a_change_costs(
    record: asyncpg.Connection, dsn: str, tmp_path: Path
) -> None:
    """Twelve of 40 changed answers of 200, of which nine became wrong: a loss of 20 % of 0.75. Labels that came stay apart.

    What is asked again before it is labelled is the same; what was drawn for a slice says nothing of all traffic.
    """
    rows = [exchange(100 + n, int(n < 40), 0, flip=n < 40, slice_ids=(1, 2)) for n in range(200)]
    rows += [exchange(400 + n, 0, 0, slice_ids=(1,)) for n in range(50)]
    await store_comparisons(record, rows)
    command = ("wanted", "--slice", "scanner=faint", "--n", "12", "--out", "wanted.csv")
    code, said = await labels(dsn, tmp_path, *command)
    assert code == 0, said
    assert "12 changed answers of scanner=faint, digits int8, drawn at random." in said
    assert "quantdrift labels load wanted.csv --by exchange" in said
    with (tmp_path / "wanted.csv").open(newline="") as file:
        drawn = list(csv.DictReader(file))
    assert {(row["reference"], row["candidate"], row["drawn_for"], row["label"]) for row in drawn} == {
        ("zero", "one", "2", "")
    }
    assert all(100 <= int(row["exchange"][-3:]) < 140 and row["request_id"][0] == "r" for row in drawn)
    again = json.loads((await labels(dsn, tmp_path, *command[:-2], "--json"))[1])
    assert [one["exchange_id"] for one in again["wanted"]] == [row["exchange"] for row in drawn]
    code, said = await labels(dsn, tmp_path, *command)
    assert (code, "wanted.csv exists: somebody may have filled it in" in said) == (2, True)

    for number, row in enumerate(drawn):
        row["label"] = "zero" if number < 9 else "two"
    with (tmp_path / "wanted.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(drawn[0]))
        writer.writeheader()
        writer.writerows(drawn)
    assert (
        "12 items of digits are labelled"
        in (await labels(dsn, tmp_path, "load", "wanted.csv", "--by", "exchange"))[1]
    )
    found = json.loads((await labels(dsn, tmp_path, "show", "--json"))[1])["slices"]
    (faint,) = found
    assert (faint["slice"], faint["n_items"], faint["is_drawn"], faint["both_wrong"]) == (
        "scanner=faint",
        12,
        True,
        None,
    )
    assert faint["loss"]["mean"] == pytest.approx(0.2 * 0.75)
    assert 0.03 < faint["loss"]["low"] < faint["loss"]["high"] < 0.25
    said = (await labels(dsn, tmp_path, "show"))[1]
    assert "12 drawn" in said
    again = json.loads((await labels(dsn, tmp_path, *command[:-2], "--json"))[1])
    assert {one["exchange_id"] for one in again["wanted"]}.isdisjoint(row["exchange"] for row in drawn)

    lines = [f"r{400 + n},0" for n in range(50)] + [f"{drawn[0]['request_id']},0"]
    (tmp_path / "truth.csv").write_text("\n".join(["key,label", *lines]))
    assert (await labels(dsn, tmp_path, "load", "truth.csv", "--by", "header.x-request-id"))[0] == 0
    found = json.loads((await labels(dsn, tmp_path, "show", "--json"))[1])["slices"]
    assert {(one["slice"], one["n_items"], one["is_drawn"]) for one in found} == {
        ("scanner=faint", 12, True),
        ("all", 51, False),
    }


async def test_wanted_labels_of_nothing_say_so(dsn: str, tmp_path: Path) -> None:
    """No such slice, no such version, no changed answer."""
    assert (
        "digits has no slice `scanner=fain`"
        in (await labels(dsn, tmp_path, "wanted", "--slice", "scanner=fain"))[1]
    )
    assert (
        "no version `int4` of digits was compared yet"
        in (await labels(dsn, tmp_path, "wanted", "--version", "int4"))[1]
    )
    code, said = await labels(dsn, tmp_path, "wanted")
    assert (code, said.strip()) == (
        0,
        "No changed answer of all of digits int8 of the last 7 days is without a drawn label.",
    )
