"""The examples of comparators: each is made, checked, replayed, stored and folded."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from quantdrift.cli.main import main
from quantdrift.core.clock import SystemClock
from quantdrift.core.records import Verdict
from quantdrift.monitor.fold.fold import Fold
from quantdrift.shadow.pipeline.assess import Assessor
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from tests.support.shadow.task_examples import NAMES, answers, judge_of, made, prepared

pytestmark = pytest.mark.integration

EVERY = pytest.mark.parametrize("name", NAMES)


def _items(n_items: int, seed: int) -> npt.NDArray[Any]:
    return np.random.default_rng(seed).normal(size=(n_items, 8)).astype(np.float32)


@EVERY
def test_its_configuration_is_sound_and_its_reference_opens(name: str, tmp_path: Path) -> None:
    """As `quantdrift config check --references` says, without a remark about a missing file."""
    path = made(name, tmp_path)
    ran = CliRunner().invoke(main, ["config", "check", "--references", "--config", str(path)])
    assert ran.exit_code == 0, ran.output
    assert "is sound" in ran.output
    assert "sha256" in ran.output
    assert "does not exist" not in ran.output


@EVERY
def test_it_replays_what_is_served(name: str, tmp_path: Path) -> None:
    """What the reference itself would serve does not diverge; with noise on it, items do and flip."""
    _, version_reference = judge_of(made(name, tmp_path))
    rng = np.random.default_rng(11)
    x = _items(12, 10)
    same = answers(version_reference, x)
    off = {key: one + rng.normal(size=one.shape).astype(np.float32) for key, one in same.items()}
    # As large a batch as the candidate's, so that a matrix product rounds as it did.
    equal, noisy = (
        compare_batch([prepared(version_reference, x, one)], most_items=64)[0] for one in (same, off)
    )
    assert isinstance(equal, ReplayResult)
    assert isinstance(noisy, ReplayResult)
    assert not equal.divergences.flip.any()
    assert not equal.divergences.divergence.any()
    assert noisy.divergences.flip.any()
    assert np.count_nonzero(noisy.divergences.divergence) >= 6


@EVERY
async def test_a_drift_of_it_is_stored_and_fires(
    name: str, tmp_path: Path, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Detectors, roll-ups and verdicts know `flip` and `divergence` alone, whatever the task: 400 exchanges suffice."""
    config, version_reference = judge_of(made(name, tmp_path))
    cases = []
    for number in range(400):
        x = _items(1, number)
        wrong = {key: -2 * one for key, one in answers(version_reference, x).items()}
        cases.append(prepared(version_reference, x, wrong, number + 1))
    batch = Assessor(config, "w").assess(cases, datetime.now(UTC))
    assert not batch.quarantined
    async with Database(postgres_dsn) as database:
        written = await Writer(database, SystemClock()).store(batch)
        assert written.n_rows == 400
        async with database.begin() as connection:
            fold = Fold(config, await resume(connection))
            for rows in await claim(connection, fold.position.fold_seq, 1000):
                fold.learn(await load_catalog(connection))
                fold.batch(rows)
            verdicts = fold.verdicts()
            await write(connection, fold.take(), "")
    stored = await record.fetchrow(
        "select count(flip) as flips, count(divergence) as divergences, count(js) as js, count(detail) as details"
        " from comparison"
    )
    js = 400 if name == "classification" else 0
    assert tuple(stored) == (400, 400, js, 400)
    assert Verdict.FIRING in {row.verdict for row in verdicts}
    rolled = await record.fetchrow("select sum(flip_weight) as w, sum(divergence) as d from rollup_hour")
    assert rolled["w"] > 0
    assert rolled["d"] > 0
