"""`quantdrift plan`, as typed and without a database."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quantdrift.cli.main import main

pytestmark = pytest.mark.unit

CONFIG = """
[capture]
headers = ["x-scanner"]
[sampling]
rate = 0.05
[[models]]
name = "digits"
[[slices]]
name = "scanner"
header = "x-scanner"
[[slices]]
name = "contrast"
feature = "contrast"
edges = [0.05]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a configuration file with an open and a declared family of slices."""
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


def _plan(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", "--config", str(config), *arguments], env={"QUANTDRIFT_DSN": ""})


@pytest.mark.slow
def test_people_read_a_table_and_what_cannot_be_observed(config: Path) -> None:
    """A slice that is too rare at this rate comes with the rate that it needs."""
    done = _plan(
        config,
        "--rps",
        "100",
        "--slice",
        "scanner=faint=2%",
        "--slice",
        "scanner=ghost=0.00001",
        "--gpu-ms-per-replay",
        "8",
    )
    assert done.exit_code == 0, done.output
    assert "5 replays/s, 0.04 GPU" in done.output
    assert "changed answers from 1.00% (the budget) to 3.00%" in done.output
    assert "NOT OBSERVABLE" in done.output
    assert "scanner=ghost: sample it at" in done.output
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_generated_text_is_planned_by_its_tokens(config: Path) -> None:
    """A long answer changes somewhere under any quantisation, so the shift is that of changed tokens, against their budget."""
    text = config.read_text(encoding="utf-8").replace(
        'name = "digits"', 'name = "digits"\ntask = "generation"', 1
    )
    config.write_text(text, encoding="utf-8")
    done = _plan(config, "--rps", "100", "--shift", "2")
    assert done.exit_code == 0, done.output
    shift = (
        "tokens that are other ones than the FP32 model would say first from 15.00% (the budget) to 30.00%"
    )
    assert f"to detect: {shift}" in done.output
    assert "an answer counts by how much of it differs" in done.output


def test_what_is_rarer_than_one_a_day_is_not_called_nothing(config: Path) -> None:
    """A quarter of a request a day, and its share, are said as they are."""
    done = _plan(config, "--rps", "1", "--slice", "scanner=ghost=0.000003", "--horizon", "5")
    assert done.exit_code == 0, done.output
    (row, told) = (line for line in done.output.splitlines() if line.strip().startswith("scanner=ghost"))
    assert " 0.0003% " in row
    assert "samples a day and gets 0.26 requests: merge it with other slices" in told


def test_busy_traffic_is_printed_without_exponents(config: Path) -> None:
    """No powers of ten and no delay of no minutes: thousands are apart, and less than a minute is in seconds."""
    done = _plan(config, "--rps", "1279.346", "--shift", "10")
    assert done.exit_code == 0, done.output
    assert "model digits: 1,279 requests/s" in done.output
    (row,) = (line for line in done.output.splitlines() if line.startswith("all "))
    assert "  230,282  " in row
    assert row.endswith(" s")
    assert "0 min" not in done.output


@pytest.mark.slow
def test_a_very_rare_slice_has_no_exponent_in_the_table(config: Path) -> None:
    """A share of 3 in a hundred million is written out."""
    done = _plan(config, "--rps", "1", "--slice", "scanner=ghost=0.00000003", "--horizon", "5")
    assert done.exit_code == 0, done.output
    assert "0.000003%" in done.output
    assert not re.search(r"\de[+-]\d", done.output), done.output


def test_machines_read_json_and_slices_may_be_crossed(config: Path) -> None:
    """The parts of a crossed slice are joined by ` & `; a GPU share is a replay budget."""
    done = _plan(
        config,
        "--rps",
        "100",
        "--slice",
        "scanner=faint & contrast<0.05=1%",
        "--slice",
        "contrast<0.05=0.1",
        "--gpu-share",
        "0.01",
        "--gpu-ms-per-replay",
        "5",
        "--allocate",
        "--shift",
        "5",
        "--json",
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["slice"] for one in found["slices"]] == [
        "all",
        "scanner=faint & contrast<0.05",
        "contrast<0.05",
    ]
    assert found["shifted"] == pytest.approx(0.05)
    assert found["allocated"]
    assert 0 < found["replays_per_s"] <= 2.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "QUANTDRIFT_DSN"),
        (("--slice", "scanner=faint=1%"), "--slice and --stratum need --rps"),
        (("--rps", "1", "--from-record"), "give the traffic by --rps"),
        (("--rps", "1", "--model", "digit"), "did you mean `digits`"),
        (("--rps", "1", "--slice", "scaner=faint=1%"), "no slice `scaner=faint`"),
        (("--rps", "1", "--slice", "contrast<0.5=1%"), "did you mean `contrast<0.05`"),
        (("--rps", "1", "--slice", "scanner=faint"), "is not NAME=SHARE"),
        (("--rps", "1", "--slice", "scanner=faint=2"), "is not NAME=SHARE"),
        (("--rps", "1", "--stratum", "rare=1%"), "no header stratum `rare`"),
        (("--rps", "inf"), "inf and nan are not allowed"),
        (("--rps", "1", "--shift", "nan"), "inf and nan are not allowed"),
        (("--rps", "1", "--allocate"), "--allocate needs a budget"),
        (("--rps", "1", "--gpu-share", "0.1"), "--gpu-share needs --gpu-ms-per-replay"),
        (("--from-record",), "QUANTDRIFT_DSN"),
    ],
)
def test_what_does_not_fit_together_is_said_in_a_sentence(
    config: Path, arguments: tuple[str, ...], said: str
) -> None:
    """Exit code 2, the nearest name where there is one."""
    done = _plan(config, *arguments)
    assert done.exit_code == 2, done.output
    assert said in done.output
