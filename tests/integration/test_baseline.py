"""Baselines on a real record: learned, inherited, accepted, frozen and imported, by the command that people type."""

import asyncio
import json
import random
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from sqlalchemy import text

from quantdrift.core.config.schema import Budget, Model
from quantdrift.core.errors import OperatorError
from quantdrift.monitor.baselines.decisions import DecisionScope, accept, freeze_or_keep
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.audit import Action
from quantdrift.storage.baselines import BaselineDecision, decide, rows_since
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, load_catalog, refold, resume
from quantdrift.storage.fold.write import write
from quantdrift.storage.fold_rows import BatchRows, DetectorRow, Position, Snapshot, Source, TransitionRow
from tests.support.commands import invoked
from tests.support.monitor.fold_stream import (
    ALL_ID,
    BEGIN,
    BEGIN_US,
    CONFIG,
    FAINT_ID,
    SECOND_US,
    batches,
    store_batch,
    store_catalog,
)

pytestmark = pytest.mark.integration

TEMPLATE = batches(1)[0].comparisons[0]
FILE = '[[models]]\nname = "digits"\nbudget = { flip = 0.1 }\n'
WIDE = msgspec.structs.replace(CONFIG, models=(Model(name="digits", budget=Budget(flip=0.1)),))


@pytest.fixture
async def record(record: asyncpg.Connection) -> asyncpg.Connection:
    """Return a connection to a fresh record."""
    await store_catalog(record, days=3)
    return record


async def stored(
    record: asyncpg.Connection,
    n: int,
    *,
    first: int,
    version: int = 1,
    flips: float = 0.02,
    slices: tuple[int, ...] = (ALL_ID, FAINT_ID),
) -> None:
    """Store `n` exchanges of the faint scanner, or of other slices, 500 to a batch."""
    rng = random.Random(first)
    for begin in range(first, first + n, 500):
        rows = tuple(
            msgspec.structs.replace(
                TEMPLATE,
                exchange_id=f"{number:032x}",
                item=0,
                captured_us=BEGIN_US + number * SECOND_US,
                model_version_id=version,
                slice_ids=slices,
                pi1=1.0,
                flip=float(rng.random() < flips),
                divergence=rng.expovariate(1 / 0.001),
            )
            for number in range(begin, min(begin + 500, first + n))
        )
        await store_batch(record, BatchRows(fold_seq=0, stored_us=rows[-1].captured_us, comparisons=rows))


async def folded(database: Database) -> tuple[Fold, tuple[TransitionRow, ...]]:
    """Fold what is new, as a monitor that has just started."""
    async with database.begin() as connection:
        fold = Fold(WIDE, await resume(connection))
        found = await claim(connection, fold.position.fold_seq, 1000)
        fold.learn(await load_catalog(connection))
        for rows in found:
            fold.batch(rows)
        outcome = fold.take()
        await write(connection, outcome, "")
    return fold, outcome.transitions


async def typed(dsn: str, directory: Path, *arguments: str, group: str = "baseline") -> tuple[int, str, str]:
    """Run `quantdrift GROUP ...` as a person would; return exit code and what it said."""
    (directory / "config.toml").write_text(FILE)
    who = {"QUANTDRIFT_DSN": dsn, "USER": "ada", "LOGNAME": "ada"}
    done = await asyncio.to_thread(invoked, group, *arguments, directory=directory, **who)
    return done.returncode, done.stdout, done.stderr


async def listed(dsn: str, directory: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the newest baseline of each signal."""
    code, out, err = await typed(dsn, directory, "list", "--json", *arguments)
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)
    return found


async def refolded(database: Database) -> dict[tuple[int, int, str, str], bytes]:
    """Return the states after folding the whole record again."""
    async with database.begin() as connection:
        last = await connection.scalar(text("select fold_seq from fold"))
        again = Fold(WIDE, Snapshot(position=Position()))
        again.learn(await load_catalog(connection))
        for rows in await refold(connection, 1, last):
            again.batch(rows)
    return _states(again.take().detectors)


async def states(database: Database) -> dict[tuple[int, int, str, str], bytes]:
    """Return the states in the record."""
    async with database.begin() as connection:
        return _states((await resume(connection)).detectors)


def _states(rows: Iterable[DetectorRow]) -> dict[tuple[int, int, str, str], bytes]:
    return {(row.model_version_id, row.slice_id, row.metric, row.kind): row.state for row in rows}


async def test_the_life_of_a_baseline(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path
) -> None:
    """Learned after 5,000 exchanges, inherited by the next version, accepted by a person; folded again it is the same."""
    code, out, _ = await typed(postgres_dsn, tmp_path, "list")
    assert (code, "No baselines yet" in out) == (0, True)
    await stored(record, 6000, first=0)
    await folded(database)
    learned = {(row["slice"], row["kind"]): row for row in await listed(postgres_dsn, tmp_path)}
    assert learned.keys() == {("all", "change"), ("scanner=faint", "change")}
    one = learned["scanner=faint", "change"]
    assert (one["source"], one["made_by"], one["version"]) == ("learned", "monitor", "1")
    assert 5000 <= one["n_groups"] <= 6000
    before = await record.fetchval("select n_detectors from fold")

    code, out, err = await typed(postgres_dsn, tmp_path, "show", "scanner=faint", group="slices")
    assert code == 0, err
    shown = {line[2:21].strip(): line for line in out.splitlines()}
    assert " a budget of 10 % " in shown["flip budget"]
    assert " a budget of 0.02 nat " in shown["divergence budget"]
    assert " a baseline of 6,000 exchanges " in shown["flip change"]
    assert " learning; needs about 4,000 more exchanges  -" in shown["divergence tail"]
    assert shown["mean above p99"].endswith("]")
    assert " nat [" in shown["p99"]
    assert (
        len({shown[name].index(word) for name, word in (("flip budget", "a b"), ("divergence tail", "le"))})
        == 1
    )
    assert "of all signals together; pages at 1" in out
    code, out, err = await typed(postgres_dsn, tmp_path, group="triage")
    assert (code, "none of 2 slices" in out) == (0, True), err
    code, _, err = await typed(postgres_dsn, tmp_path, "--model", "digit", group="triage")
    assert (code, "did you mean `digits`?" in err) == (2, True), err

    # The next version flips more than the one before: it is measured against its predecessor, live at once.
    await record.execute("update model_version set reference_digest = 'e' where id = 2")
    await stored(record, 500, first=6000, version=2, flips=0.04)
    await folded(database)
    heir = {row["slice"]: row for row in await listed(postgres_dsn, tmp_path, "--version", "2")}[
        "scanner=faint"
    ]
    assert (heir["source"], heir["from_version"]) == ("inherited", "1")
    # Four signals on each of two slices; the tails still learn.
    assert (
        await record.fetchval("select n_detectors from fold") == before
    )  # those of the version that it replaced count no more

    code, out, err = await typed(postgres_dsn, tmp_path, "accept", "--model", "digits", "--version", "2")
    assert (code, "nothing was stored" in err, "needs about" in out) == (2, True, True)
    await stored(record, 6000, first=6500, version=2, flips=0.04)
    await folded(database)
    arguments = (
        "--model",
        "digits",
        "--version",
        "2",
        "--slice",
        "scanner=faint",
        "--reason",
        "labels agree",
    )
    code, out, err = await typed(postgres_dsn, tmp_path, "accept", *arguments)
    assert code == 0, err
    assert "1 of 2 signals have a new baseline" in out
    (waiting,) = [row for row in await listed(postgres_dsn, tmp_path) if row["fold_seq"] is None]
    assert (waiting["source"], waiting["made_by"], waiting["reason"]) == (
        "accepted",
        "quantdrift",
        "labels agree",
    )
    assert waiting["n_groups"] == 6500
    await stored(record, 500, first=12_500, version=2, flips=0.04)
    await folded(database)
    accepted = await record.fetchrow("select * from baseline where source = 'accepted'")
    assert accepted["fold_seq"] is not None

    await decided(database, record, postgres_dsn, tmp_path)


async def decided(database: Database, record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path) -> None:
    """Freeze, import a budget, and fold the whole record again."""
    code, _, err = await typed(postgres_dsn, tmp_path, "keep", "--model", "digits", "--version", "2")
    assert (code, "no alert has set aside exchanges of the selected signals of digits 2" in err) == (
        2,
        True,
    ), err
    code, out, err = await typed(postgres_dsn, tmp_path, "freeze", "--model", "digits", "--version", "2")
    # The tails are ready, too: they learned on from the version before.
    assert (code, "4 signals frozen" in out) == (0, True), err
    frozen = [one for one in await listed(postgres_dsn, tmp_path) if one["source"] == "frozen"]
    assert min(one["n_groups"] for one in frozen) > 5000
    figures = tmp_path / "offline.json"
    figures.write_text('[{"slice": "scanner=faint", "metric": "flip", "upper": 0.08, "n": 4000}]')
    code, out, err = await typed(
        postgres_dsn, tmp_path, "import", str(figures), "--model", "digits", "--version", "2"
    )
    assert (code, "0.08" in out) == (0, True), err
    figures.write_text('[{"slice": "all", "metric": "flip", "upper": null}]')
    code, out, err = await typed(
        postgres_dsn, tmp_path, "import", str(figures), "--model", "digits", "--version", "2"
    )
    assert code == 0, err
    code, out, err = await typed(postgres_dsn, tmp_path, "list", "--version", "2")
    (back,) = [line for line in out.splitlines() if "back to the configuration" in line]
    assert " imported: 0.08 (waits for the monitor) 4,000 " in " ".join(out.split())
    assert " -  " in back
    await stored(record, 500, first=13_000, version=2, flips=0.04)
    await folded(database)
    budgets = await record.fetch(
        "select model_version_id, budget from detector where slice_id = $1 and metric = 'flip' and kind = 'budget'"
        " order by 1",
        FAINT_ID,
    )
    assert [row["budget"] for row in budgets] == [0.1, 0.08]

    # The record folded again from nothing ends in the same states, decisions included.
    assert await refolded(database) == await states(database)


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ('[{"slice": "nowhere", "metric": "flip", "upper": 0.1}]', "no slice `nowhere`"),
        ('[{"slice": "all", "metric": "js", "upper": 0.1}]', "`js` has no budget"),
        ('[{"slice": "all", "metric": "flip", "upper": 1.5}]', "is not between"),
        ('[{"slice": "all", "metric": "flip", "uper": 0.1}]', "not a list of objects"),
        ("{}", "not a list of objects"),
        ("[]", "no figure to import: nothing was recorded"),
    ],
)
async def test_figures_that_are_no_budget_are_refused_whole(
    record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path, figures: str, says: str
) -> None:
    """Exit code 2, a message that says what is wrong, and nothing recorded."""
    file = tmp_path / "offline.json"
    file.write_text(figures)
    code, _, err = await typed(
        postgres_dsn, tmp_path, "import", str(file), "--model", "digits", "--version", "1"
    )
    assert (code, says in err) == (2, True), err
    assert await record.fetchval("select count(*) from baseline") == 0


async def test_a_tail_is_pooled_from_slices_that_have_one(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path
) -> None:
    """A sibling with too few exchanges itself is refused by name; with enough it stands in, and says from how many."""
    await stored(record, 1000, first=0)
    await folded(database)
    arguments = ("accept", "--model", "digits", "--slice", "scanner=faint", "--pool", "all")
    code, _, err = await typed(postgres_dsn, tmp_path, *arguments)
    assert (code, "all cannot be pooled: each of them needs 10,000 exchanges" in err) == (2, True), err
    await stored(record, 9500, first=1000, slices=(ALL_ID,))
    await folded(database)
    code, out, err = await typed(postgres_dsn, tmp_path, *arguments)
    assert code == 0, err
    assert "1 of 2 signals have a new baseline" in out
    row = await record.fetchrow("select * from baseline where source = 'accepted'")
    assert (row["kind"], json.loads(row["content"])["n_groups"]) == ("tail", 10_500)


@pytest.mark.release
async def test_what_the_monitor_could_not_follow_is_refused_by_name(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path
) -> None:
    """A version that it has not seen, has no reference for or watches no more: nothing is recorded, and why is said."""

    async def accepted(version: str = "1", *slices: str) -> list[tuple[str, str, bool]]:
        scope = DecisionScope(model="digits", version=version, slices=slices)
        found = await accept(database, WIDE, scope, since=None, until=None, progress=lambda _: None)
        return [(one.slice, one.kind, one.recorded) for one in found]

    await stored(record, 500, first=0)
    with pytest.raises(OperatorError, match="not folded digits 1 yet: 500 comparisons wait"):
        await accepted()
    with pytest.raises(OperatorError, match=r"has no reference.*Versions with one: 1"):
        await accepted("2")
    await stored(record, 5500, first=500)
    await folded(database)
    # One slice has been silent for 30 days, the other has not.
    await record.execute("update detector set retired_at = now() where slice_id = $1", FAINT_ID)
    assert await accepted() == [
        ("all", "tail", False),
        ("all", "change", True),
        ("scanner=faint", "tail", False),
        ("scanner=faint", "change", False),
    ]
    with pytest.raises(OperatorError, match="has a baseline and is still watched"):
        await freeze_or_keep(
            database, DecisionScope(model="digits", slices=("scanner=faint",)), Source.FROZEN
        )
    code, out, err = await typed(
        postgres_dsn, tmp_path, "accept", "--model", "digits", "--slice", "scanner=faint"
    )
    assert (code, "watches none of these signals of digits" in err) == (2, True), err
    assert out.count("not watched, not accepted") == 2
    decided = await record.fetch("select slice_id, kind from baseline where source <> 'learned'")
    assert [tuple(row) for row in decided] == [(ALL_ID, "change")]


@pytest.mark.usefixtures("record")
async def test_what_is_not_there_is_named_with_what_is(postgres_dsn: str, tmp_path: Path) -> None:
    """A wrong model, version or slice is answered with those that there are."""
    for arguments, says in (
        (("--model", "digit"), "models: digits"),
        (("--model", "digits", "--version", "9"), "versions: 1"),
        (("--model", "digits", "--slice", "x"), "slices: all, scanner=faint, scanner=clear"),
    ):
        code, _, err = await typed(postgres_dsn, tmp_path, "keep", *arguments)
        assert (code, says in err) == (2, True), err
    code, out, err = await typed(postgres_dsn, tmp_path, "list", "--model", "digit")
    assert (code, "models: digits" in err) == (2, True), err
    code, out, err = await typed(postgres_dsn, tmp_path, "list", "--model", "digits")
    assert (code, "No such baselines yet" in out) == (0, True), err


async def test_a_decision_about_the_baseline_in_force_has_no_content(
    database: Database, record: asyncpg.Connection
) -> None:
    """As the schema says: null, not a JSON null, which `content is not null` would take for a baseline."""
    decision = BaselineDecision(
        model_version_id=1,
        slice_id=ALL_ID,
        metric="flip",
        kind="change",
        source=Source.FROZEN,
        made_by="ada",
        reason="",
        from_at=None,
        to_at=None,
        n_groups=0,
        from_version_id=None,
        content=None,
    )
    async with database.begin() as connection:
        await decide(connection, [decision], Action.BASELINE_FREEZE, model="digits", note="")
    assert await record.fetchval("select content is null from baseline")


async def test_an_exchange_longer_than_a_page_is_read_whole(
    database: Database, record: asyncpg.Connection
) -> None:
    """It comes in one part, as every exchange does, and no part is empty; with the values of its named signals."""
    rows = tuple(
        msgspec.structs.replace(
            TEMPLATE, exchange_id=f"{number:032x}", item=item, captured_us=BEGIN_US + number * SECOND_US
        )
        for number, n_items in ((1, 12_000), (2, 1))
        for item in range(n_items)
    )
    await store_batch(record, BatchRows(fold_seq=0, stored_us=rows[-1].captured_us, comparisons=rows))
    async with database.begin() as connection:
        await claim(connection, 0, 10)
        await connection.execute(text("update comparison set detail = '{\"unlikely\": 0.2}' where item = 7"))
        found = rows_since(connection, 1, [ALL_ID], BEGIN, BEGIN + timedelta(hours=1))
        parts = [part async for part in found]
    assert [len(part) for part in parts] == [12_001]
    assert parts[0][7].signals == {"unlikely-tokens": 0.2}
    assert parts[0][8].signals == {}
