"""What an installation holds, where nobody works in a checkout."""

import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def test_every_package_is_installed() -> None:
    """They are listed by hand: one that is left out is there in a checkout, and missing everywhere else."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    roots = {package.partition(".")[0] for package in listed}
    there = {
        ".".join(path.relative_to(ROOT).parent.parts)
        for root in roots
        for path in (ROOT / root).rglob("__init__.py")
    }
    assert set(listed) == there
