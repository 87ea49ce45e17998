"""`examples/tabular`: decision trees of customers, from the export to the repair, as its README types it."""

import json
import os
import shutil
from pathlib import Path

import pytest

from examples.tabular.make import HALF, LIBRARIES, ROUNDED, make
from tests.support.commands import invoked

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
BAD = "income>=90000"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the models with LightGBM."""
    folder = tmp_path_factory.mktemp("tabular")
    make(folder)
    return folder


def _judged(folder: Path, candidate: str) -> dict[str, str]:
    """Return the gate's verdict on each slice."""
    done = invoked("gate", candidate, "--inputs", "recorded.npz", "--json", directory=folder)
    assert done.returncode in {0, 3}, done.stderr
    decision = json.loads(done.stdout)
    return {answer["slice"]: answer["verdict"] for answer in decision["slices"]}


def test_the_configuration_fits_the_models(made: Path) -> None:
    """Output, its kind and the columns of slices, as `config check` compares them with the file."""
    done = invoked("config", "check", directory=made)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "region=3" in done.stdout
    assert "savings missing>=0.5" in done.stdout


def test_the_gate_finds_the_slice_that_rounding_damages_and_passes_what_is_sound(made: Path) -> None:
    """Thresholds whose range ends before large incomes fail for the rich, and leaves in FP16 nowhere."""
    verdicts = _judged(made, ROUNDED)
    assert verdicts[BAD] == "fail"
    assert verdicts["income<20000"] == verdicts["income[20000,90000)"] == "pass"
    assert set(_judged(made, HALF).values()) == {"pass"}


def test_diagnose_names_the_column_and_repair_keeps_its_thresholds(made: Path) -> None:
    """The file that it writes passes the gate; the advice of no step fits networks only."""
    options = ("--slice", BAD, "--candidate", ROUNDED, "--inputs", "recorded.npz")
    done = invoked("diagnose", *options, directory=made)
    assert done.returncode == 0, done.stderr
    assert "Cause: thresholds." in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("T:")]
    assert row.startswith("T:income")
    assert "are cut off: they lie in" in row
    assert "multiplications" not in done.stdout
    assert "ranges" not in done.stdout
    repaired = made / "repaired"
    done = invoked("repair", *options, "--out", str(repaired), directory=made)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in FP32: T:income" in done.stdout
    assert "decision trees have no activation ranges" in done.stdout
    (file,) = repaired.glob("*-fp32-sites.onnx")
    assert set(_judged(made, os.path.relpath(file, made)).values()) == {"pass"}
    assert file.stat().st_size == pytest.approx((made / ROUNDED).stat().st_size, rel=0.01)


@pytest.mark.release
def test_a_forest_of_scikit_learn_goes_the_same_way(tmp_path: Path) -> None:
    """By skl2onnx."""
    make(tmp_path, LIBRARIES[1])
    assert _judged(tmp_path, ROUNDED)[BAD] == "fail"
    options = ("--slice", BAD, "--candidate", ROUNDED, "--inputs", "recorded.npz")
    done = invoked("diagnose", *options, "--json", directory=tmp_path)
    assert [site["site"] for site in json.loads(done.stdout)["blamed"]][:1] == ["T:income"]
    shutil.rmtree(tmp_path)
