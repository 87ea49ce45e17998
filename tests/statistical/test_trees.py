"""How often a diagnosis of decision trees accuses a column: of a candidate that is rounded alike everywhere, and of one with a range that ends early."""

from pathlib import Path

import pytest

from quantdrift.core.config.schema import Model, OutputKind, Reference
from quantdrift.facts.diagnosis import Diagnosis
from quantdrift.release.diagnose.blame import diagnose
from quantdrift.release.diagnose.samples import comparison
from quantdrift.release.trees import TreeCopy
from tests.support.shadow.trees import drawn_forest, drawn_rows, on_grid, save_forest

pytestmark = pytest.mark.statistical

MODEL = Model(
    name="m",
    output="probabilities",
    output_kind=OutputKind.PROBABILITIES,
    references=(Reference(path="r.onnx"),),
)
RUNS = 24


def _diagnosed(folder: Path, seed: int, *, highest: float | None) -> Diagnosis:
    forest = drawn_forest(seed)
    rounded = on_grid(forest, 12) if highest is None else on_grid(forest, 200, highest, column=0)
    copy = TreeCopy(save_forest(rounded, folder / "c.onnx"), save_forest(forest, folder / "r.onnx"))
    rows = drawn_rows(1_500, seed + 1_000)
    inside = rows if highest is None else rows[rows[:, 0] > highest]
    return diagnose(copy, comparison(MODEL, copy), {"x": inside}, budget=0.01, seed=seed)


def test_a_candidate_that_is_rounded_alike_in_all_columns_accuses_none(tmp_path: Path) -> None:
    """At most 5 % of diagnoses: more than 6 of 24 come in 2 of 10,000 runs at that rate."""
    found = [_diagnosed(tmp_path, seed, highest=None) for seed in range(RUNS)]
    assert all(one.flips > one.budget for one in found)
    assert sum(bool(one.blamed) for one in found) <= 6


def test_a_range_that_ends_early_is_found(tmp_path: Path) -> None:
    """In the slice beyond its end; no other column is named first."""
    found = [_diagnosed(tmp_path, seed, highest=0.6) for seed in range(RUNS // 2)]
    damaged = [one for one in found if one.flips > 2 * one.budget]
    assert len(damaged) >= RUNS // 4
    named = [one.blamed[0].site for one in damaged if one.blamed]
    assert set(named) == {"T:column 0"}
    assert len(named) >= 0.8 * len(damaged)
