"""What the pages say is to be installed, against what `quantdrift up` runs."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent.parent
PAGES = ("docs/quick-start.md", "docs/how-to/install.md")


def _packages(extras: set[str], declared: dict[str, list[str]]) -> set[str]:
    """Return the packages that some extras bring, by name."""
    packages, waiting = set(), set(extras)
    seen: set[str] = set()
    while waiting:
        extra = waiting.pop()
        seen.add(extra)
        for requirement in declared[extra]:
            name, _, own = requirement.partition("[")
            if name == "quantdrift":
                waiting |= {*own.partition("]")[0].split(",")} - seen
            else:
                packages.add(re.split(r"[\[><=;! ]", requirement)[0])
    return packages


@pytest.mark.parametrize("page", PAGES)
def test_what_is_installed_without_a_gpu_runs_every_part_of_up(page: str) -> None:
    """Whoever follows the page has the servers, the monitor, the report and the live page, and no PyTorch."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    needed = _packages({"cpu", "monitor", "report", "web", "embedded"}, declared)
    shown = re.findall(r"'\.\[(cpu,[a-z,]+)\]'", (ROOT / page).read_text())
    brought = [_packages(set(extras.split(",")), declared) for extras in shown]
    assert brought
    assert not any(needed - packages for packages in brought)
    assert "torch" not in brought[0]
