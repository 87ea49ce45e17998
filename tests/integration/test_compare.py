"""`quantdrift compare`: two versions of a model from a real database."""

import asyncio
import contextlib
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pyarrow as pa
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from sqlalchemy import event
from sqlalchemy.engine import Engine

from quantdrift import frames
from quantdrift.cli.main import main
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Metric
from quantdrift.facts.estimate import Change, Estimate
from quantdrift.facts.figures import Figure
from quantdrift.report.compare import compare
from quantdrift.report.figures import ComparedSlice, VersionComparison
from quantdrift.storage.database import Database
from quantdrift.storage.figures.estimates import STATEMENT_S
from quantdrift.storage.figures.periods import Grain
from quantdrift.storage.snapshot import Connection, reading
from tests.support.commands import invoked
from tests.support.storage.databases import Databases
from tests.support.storage.release_rows import END, NEW, OLD, RELEASE, ReleaseWeek, write_release_week

pytestmark = pytest.mark.integration

CONFIG = Config(models=(Model(name="digits"),))


async def _fill(dsn: str) -> ReleaseWeek:
    return await write_release_week(dsn, per_hour=100, seed=9)


@pytest.fixture
async def postgres_dsn(databases: Databases) -> AsyncIterator[str]:
    """Return the address of a database with a week that has a release, which is dropped after the test."""
    async with databases.copy(_fill) as dsn:
        yield dsn


@pytest.fixture
async def week(databases: Databases, postgres_dsn: str) -> ReleaseWeek:
    """Return that week."""
    del postgres_dsn
    return await databases.filled(_fill)


@pytest.fixture
async def connection(postgres_dsn: str, week: ReleaseWeek) -> AsyncIterator[Connection]:
    """Return a snapshot of that week."""
    del week
    async with (
        Database(postgres_dsn, statement_timeout_s=STATEMENT_S) as database,
        reading(database) as found,
    ):
        yield found


def _named(found: VersionComparison) -> dict[str, ComparedSlice]:
    return {entry.name.removeprefix("scanner="): entry for entry in found.slices}


async def test_the_worst_slice_comes_first_and_what_one_version_lacks_is_named(
    connection: Connection,
) -> None:
    """The slice that the release made worse is first, the better one is last, and slices of one version are apart."""
    found = await compare(connection, CONFIG, old=OLD, new=NEW)
    assert found.model == "digits"
    assert found.slices[0].name == "scanner=archive"
    assert found.slices[0].change is Change.WORSE
    assert found.slices[-1].name == "scanner=mobile"
    assert found.slices[-1].change is Change.BETTER
    assert (found.only_old, found.only_new) == (("scanner=fax",), ("scanner=kiosk",))
    assert found.warning == ""
    assert {found.old.source, found.new.source} == {Grain.ITEM}
    assert found.old.end <= RELEASE
    assert found.new.end <= END


@pytest.mark.release
async def test_the_sums_over_sessions_are_those_of_the_rows(
    connection: Connection, week: ReleaseWeek
) -> None:
    """Means, exchanges and sessions of a slice are those that Python counts in the rows that were written."""
    found = _named(await compare(connection, CONFIG, old=OLD, new=NEW))["archive"]
    for side, version in ((found.old, week.version_ids[0]), (found.new, week.version_ids[1])):
        rows = [
            row
            for row in week.rows
            if row.model_version_id == version and week.slice_ids["archive"] in row.slice_ids
        ]
        sessions = defaultdict(list)
        for row in rows:
            sessions[row.group_key].append(row)
        assert (side.n_exchanges, side.n_clusters) == (len(rows), len(sessions))
        assert side.flip is not None
        assert side.divergence is not None
        assert side.flip.value == pytest.approx(sum(bool(row.flip) for row in rows) / len(rows))
        cap = CONFIG.budget("digits").cap
        assert side.divergence.value == pytest.approx(
            sum(min(row.divergence or 0.0, cap) for row in rows) / len(rows)
        )
        assert side.flip.low is not None
        assert side.flip.low < side.flip.value


@pytest.mark.release
async def test_a_frame_gives_the_figures_of_the_command(connection: Connection, postgres_dsn: str) -> None:
    """Shares, divergences and differences with their intervals: those of `compare`, from the rows, for every slice."""
    found = await compare(connection, CONFIG, old=OLD, new=NEW)
    with frames.arrow(postgres_dsn) as drift:
        items = pa.concat_tables(
            [
                drift.items("digits", slice=entry.name, start=RELEASE - timedelta(days=30), end=END)
                for entry in found.slices
            ]
        )
    of, by = (
        ["candidate_version", "slice"],
        {Metric.FLIP: 1.0, Metric.DIVERGENCE: CONFIG.budget("digits").cap},
    )
    for metric, cap in by.items():
        shares = {
            (row["candidate_version"], row["slice"]): row
            for row in frames.estimate(items, value=metric, by=of, cap=cap).to_pylist()
        }
        differences = {
            row["slice"]: row
            for row in frames.difference(
                items, of[0], OLD, NEW, value=metric, by="slice", cap=cap
            ).to_pylist()
        }
        for entry in found.slices:
            for version, side in ((OLD, entry.old), (NEW, entry.new)):
                row = shares[version, entry.name]
                assert (row["n"], row["n_clusters"]) == (side.n_exchanges, side.n_clusters)
                assert _numbers(row["mean"], row["low"], row["high"]) == _numbers_of(getattr(side, metric))
            row = differences[entry.name]
            assert _numbers(row["difference"], row["low"], row["high"]) == _numbers_of(getattr(entry, metric))


def _numbers(*values: float) -> Any:
    return pytest.approx(values, rel=1e-9, abs=1e-12)


def _numbers_of(measured: Figure | Estimate | None) -> tuple[float | None, ...]:
    assert measured is not None
    found = measured.estimate if isinstance(measured, Figure) else measured
    return found.mean, found.low, found.high


async def test_large_versions_are_compared_by_their_roll_ups(connection: Connection) -> None:
    """With more comparisons than a report reads, both sides come from the roll-ups, with the same means and order."""
    exact = _named(await compare(connection, CONFIG, old=OLD, new=NEW))
    found = await compare(connection, CONFIG, old=OLD, new=NEW, most=10)
    assert {found.old.source, found.new.source} == {Grain.HOUR}
    assert found.slices[0].name == "scanner=archive"
    for name, entry in _named(found).items():
        for side, other in ((entry.old, exact[name].old), (entry.new, exact[name].new)):
            assert side.n_exchanges == other.n_exchanges
            assert side.n_clusters is None
            assert side.flip is not None
            assert other.flip is not None
            assert side.flip.value == pytest.approx(other.flip.value)


@pytest.mark.release
async def test_different_references_are_told(
    connection: Connection, record: asyncpg.Connection, postgres_dsn: str
) -> None:
    """Two versions that were compared with different references get a warning, since the references may differ."""
    del connection
    await record.execute(
        "update model_version set reference_digest = $1 where candidate_version = $2", "a" * 64, NEW
    )
    async with (
        Database(postgres_dsn, statement_timeout_s=STATEMENT_S) as database,
        reading(database) as fresh,
    ):
        found = await compare(fresh, CONFIG, old=OLD, new=NEW)
    assert "different references" in found.warning


async def test_an_unknown_version_or_model_is_refused_with_the_known_ones(connection: Connection) -> None:
    """The error says which option is wrong, and which versions and models are known."""
    refused: list[tuple[dict[str, str], str]] = [
        (
            {"old": OLD, "new": "int8-9"},
            "--to: no version `int8-9` of digits is known. Known versions, newest first: int8-2, int8-1",
        ),
        ({"old": "x", "new": NEW}, "--from: no version `x`"),
        ({"old": OLD, "new": OLD}, "give two versions"),
        ({"old": OLD, "new": NEW, "model": "digit"}, "did you mean `digits`"),
    ]
    for wanted, message in refused:
        with pytest.raises(OperatorError, match=re.escape(message)):
            await compare(connection, CONFIG, **wanted)  # type: ignore[arg-type]


async def test_the_command_prints_the_worst_first_and_all_figures_as_json(
    week: ReleaseWeek, postgres_dsn: str, tmp_path: Path
) -> None:
    """The text begins with what the comparison shows; --json has every figure; version names are completed."""
    del week
    (tmp_path / "config.toml").write_text('[[models]]\nname = "digits"\n')

    def typed(*arguments: str) -> str:
        done = invoked(*arguments, directory=tmp_path, QUANTDRIFT_DSN=postgres_dsn)
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = await asyncio.to_thread(typed, "compare", "--from", OLD, "--to", NEW)
    assert await asyncio.to_thread(typed, "compare") == text, "the two versions that were seen last"
    assert text.startswith(
        f"digits {NEW} is worse than {OLD} in 1 of 4 slices: scanner=archive, and better in 1."
    )
    assert "only in int8-1: scanner=fax" in text
    assert text.index("scanner=archive  worse") < text.index("scanner=mobile   better")
    figures = json.loads(await asyncio.to_thread(typed, "compare", "--from", OLD, "--to", NEW, "--json"))
    assert figures["slices"][0]["change"] == "worse"
    assert figures["slices"][0]["flip"]["low"] > 0

    def completed(arguments: list[str], begun: str) -> set[str]:
        with contextlib.chdir(tmp_path), CliRunner(env={"QUANTDRIFT_DSN": postgres_dsn}).isolation():
            shell = ShellComplete(main, {}, "quantdrift", "_QUANTDRIFT_COMPLETE")
            return {item.value for item in shell.get_completions(arguments, begun)}

    assert await asyncio.to_thread(completed, ["compare", "--from"], "int") == {OLD, NEW}
    assert await asyncio.to_thread(completed, ["compare", "--model"], "") == {"digits"}
    assert await asyncio.to_thread(completed, ["compare", "--data", "absent", "--from"], "zz") == set()


@pytest.mark.release
async def test_a_version_that_no_fold_has_reached_is_compared_and_folded_ones_are_not_searched(
    week: ReleaseWeek, record: asyncpg.Connection, postgres_dsn: str
) -> None:
    """Without verdicts a version's window comes from its comparisons; with them no statement reads them all."""
    statements: list[str] = []

    def note(*arguments: object) -> None:
        statements.append(str(arguments[2]))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        async with (
            Database(postgres_dsn, statement_timeout_s=STATEMENT_S) as database,
            reading(database) as first,
        ):
            known = await compare(first, CONFIG, old=OLD, new=NEW)
        assert not any("min(c.captured_at)" in statement for statement in statements)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    await record.execute("delete from verdict where model_version_id = $1", week.version_ids[1])
    async with (
        Database(postgres_dsn, statement_timeout_s=STATEMENT_S) as database,
        reading(database) as second,
    ):
        found = await compare(second, CONFIG, old=OLD, new=NEW)
    assert found.new.end == known.new.end
    assert [entry.name for entry in found.slices] == [entry.name for entry in known.slices]
