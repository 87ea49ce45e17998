"""The systemd units, as systemd itself reads them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

UNITS = Path(__file__).resolve().parents[2] / "deploy/systemd"


def test_systemd_takes_every_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` names options that it does not know, and values that it cannot read."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    for unit in UNITS.iterdir():
        text = unit.read_text(encoding="utf-8").replace("/usr/local/bin/quantdrift", sys.executable)
        (tmp_path / unit.name).write_text(text, encoding="utf-8")

    def verified(*units: Path) -> str:
        command = [analyze, "verify", "--man=no", "--recursive-errors=no", *map(str, units)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    assert verified(*sorted(tmp_path.iterdir())) == ""
    wrong = tmp_path / "wrong.service"
    wrong.write_text((tmp_path / "quantdrift-sidecar.service").read_text().replace("KillMode", "KilMode"))
    assert "KilMode" in verified(wrong)
