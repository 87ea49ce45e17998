"""The configurations that are there to be copied."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from quantdrift.cli.main import main
from tests.support.plugin_packages import EXAMPLE, link_example

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(
    {*ROOT.glob("deploy/**/config.toml"), *ROOT.glob("examples/**/*.toml")} - {EXAMPLE / "pyproject.toml"}
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_configuration_to_be_copied_is_sound(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`quantdrift config check` says so, adapters included, and with the plug-in of the examples installed."""
    link_example(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ran = CliRunner().invoke(main, ["config", "check", "--no-references", "--config", str(path)])
    assert ran.exit_code == 0, ran.output
    assert "is sound" in ran.output


def test_there_is_one_for_each_kind_of_server() -> None:
    """Each stands in a directory of its own."""
    assert {"triton", "kserve", "torchserve", "openai"} <= {path.parent.name for path in CONFIGS}


def test_the_check_reports_an_adapter_that_cannot_be_loaded(tmp_path: Path) -> None:
    """Before a sidecar is started with it."""
    path = tmp_path / "config.toml"
    path.write_text('[[models]]\nname = "m"\nadapter = "no.such:Adapter"\n')
    ran = CliRunner().invoke(main, ["config", "check", "--config", str(path)])
    assert ran.exit_code == 2
    assert "no.such:Adapter" in ran.output
