"""Candidates of decision trees: what each site restores, and which files are refused."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from quantdrift.core.config.schema import Model, OutputKind, Reference
from quantdrift.core.errors import OperatorError
from quantdrift.facts.diagnosis import Cause, Diagnosis
from quantdrift.release.diagnose.blame import diagnose
from quantdrift.release.diagnose.samples import comparison
from quantdrift.release.sites import SwitchableCopy, outputs_of, session_of
from quantdrift.release.trees import TreeCopy, copy_of_onnx
from tests.support.shadow.trees import Forest, drawn_forest, drawn_rows, on_grid, save_forest

pytestmark = pytest.mark.integration

MODEL = Model(
    name="m",
    output="probabilities",
    output_kind=OutputKind.PROBABILITIES,
    references=(Reference(path="r.onnx"),),
)
FOREST = drawn_forest(1)
ROWS = {"x": drawn_rows(400, 1)}


def _copy(folder: Path, candidate: Forest, reference: Forest = FOREST) -> TreeCopy:
    files = (
        save_forest(forest, folder / name) for forest, name in ((candidate, "c.onnx"), (reference, "r.onnx"))
    )
    return TreeCopy(*files, columns=["age", "income"])


def _diagnosed(copy: TreeCopy, rows: np.ndarray, seed: int = 1) -> Diagnosis:
    return diagnose(copy, comparison(MODEL, copy), {"x": rows}, budget=0.01, seed=seed)


def test_sites_in_fp32_lead_from_the_candidate_to_the_reference(tmp_path: Path) -> None:
    """With none the candidate's bits, with all the reference's; columns have the names that they were given."""
    rounded = on_grid(FOREST, 12)
    rounded["class_weights"] = np.asarray(rounded["class_weights"]).astype(np.float16).astype(np.float64)
    copy = _copy(tmp_path, rounded)
    assert {site.name for site in copy.sites} == {
        "T:age", "T:income", "T:column 2", "T:column 3", "T:column 4", "T:column 5", "V:leaves",
    }  # fmt: skip
    assert copy.outputs == ("probabilities",)
    own, other = (
        outputs_of(session_of(str(tmp_path / name), name, 1), copy.outputs, ROWS)
        for name in ("c.onnx", "r.onnx")
    )
    for computed, expected in (
        (copy.run(ROWS), own),
        (copy.served(ROWS), own),
        (copy.run(ROWS, copy.everywhere), other),
        (copy.expected(ROWS), other),
    ):
        assert np.array_equal(computed["probabilities"], expected["probabilities"])
    assert not np.array_equal(own["probabilities"], other["probabilities"])


def test_a_site_in_fp32_has_the_thresholds_of_the_reference_and_changes_no_others(tmp_path: Path) -> None:
    """In the file that a repair writes."""
    copy = _copy(tmp_path, on_grid(FOREST, 12))
    repaired = copy.in_fp32(["T:income"])
    values = np.array(onnx.helper.get_attribute_value(_attribute(repaired, "nodes_values")))
    columns, is_leaf = FOREST["nodes_featureids"], FOREST["nodes_modes"] == "LEAF"
    of_income = (columns == 1) & ~is_leaf
    assert np.allclose(values[of_income], FOREST["nodes_values"][of_income])
    assert np.allclose(values[~of_income], on_grid(FOREST, 12)["nodes_values"][~of_income])


def _attribute(model: onnx.ModelProto, name: str) -> onnx.AttributeProto:
    return next(attribute for attribute in model.graph.node[0].attribute if attribute.name == name)


def test_trees_in_another_order_are_the_same_trees(tmp_path: Path) -> None:
    """Converters list them as they like."""
    shuffled = {}
    for name, values in on_grid(FOREST, 12).items():
        trees = np.asarray(values).reshape(20, -1)
        shuffled[name] = trees[::-1].ravel()
    copy = _copy(tmp_path, shuffled)
    everywhere = copy.run(ROWS, copy.everywhere)["probabilities"]
    assert np.allclose(everywhere, copy.expected(ROWS)["probabilities"], atol=1e-6)
    assert not np.allclose(copy.run(ROWS)["probabilities"], everywhere, atol=1e-3)


def test_a_range_that_ends_too_early_is_named_with_what_it_cuts_off(tmp_path: Path) -> None:
    """Thresholds above 0.6 are 0.6, so that the slice above it takes other ways."""
    copy = _copy(tmp_path, on_grid(FOREST, 200, highest=0.6, column=0))
    rows = drawn_rows(3_000, 2)
    found = _diagnosed(copy, rows[rows[:, 0] > 0.6])
    assert found.causes == (Cause.THRESHOLDS,)
    (blamed,) = found.blamed
    assert blamed.site == "T:age"
    assert blamed.heals > 0.7
    assert blamed.values is not None
    above = int(((FOREST["nodes_featureids"] == 0) & (FOREST["nodes_values"] > 0.62)).sum())
    assert above <= blamed.values.n_far <= above + 10
    assert blamed.values.high == pytest.approx(0.6)
    assert blamed.values.reference_high > 0.9
    assert blamed.values.rounding < 0.02


def test_leaves_in_few_bits_are_named(tmp_path: Path) -> None:
    """All leaves are one site."""
    coarse = FOREST | {"class_weights": np.where(FOREST["class_weights"] > 1.2, 0.0, FOREST["class_weights"])}
    found = _diagnosed(_copy(tmp_path, coarse), drawn_rows(1_500, 3))
    assert found.causes == (Cause.LEAVES,)
    assert [blamed.site for blamed in found.blamed] == ["V:leaves"]


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (drawn_forest(2), "has other trees than the reference"),
        (drawn_forest(1, n_trees=19), "has other trees than the reference"),
        (FOREST, "nothing of it is rounded"),
    ],
)
def test_files_that_tell_nothing_are_refused(tmp_path: Path, candidate: Forest, words: str) -> None:
    """With the reason."""
    with pytest.raises(OperatorError, match=words):
        _copy(tmp_path, candidate)


def test_the_form_of_the_file_chooses_the_copy(tmp_path: Path) -> None:
    """Trees are told by their operators; another file is asked for its pairs."""
    reference = save_forest(FOREST, tmp_path / "r.onnx")
    assert isinstance(
        copy_of_onnx(save_forest(on_grid(FOREST, 12), tmp_path / "c.onnx"), reference), TreeCopy
    )
    with pytest.raises(OperatorError, match="cannot be read"):
        copy_of_onnx(tmp_path / "none.onnx", reference)
    assert not issubclass(TreeCopy, SwitchableCopy)
