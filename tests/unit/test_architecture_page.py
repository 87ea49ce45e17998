"""The architecture page names packages and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\d+\. `([\w/]+): ([\w.]+)` ", PAGE, re.MULTILINE)
MOST_STEPS = 25
_FAULTS = PAGE.partition("## What a fault costs")[2].partition("\n## ")[0]
FAULTS = [line for line in _FAULTS.splitlines() if line.startswith("| ")][1:]
"""The lines of the table of faults, without its head."""


def _defined(module: Path) -> set[str]:
    """Return the functions of a module, and the methods of its classes as `Class.method`."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, functions):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, functions)}
    return names


def test_the_path_of_an_exchange_is_short_and_whole() -> None:
    """It begins at the relay's socket, ends at the report, and can be read in one sitting."""
    assert 15 <= len(STEPS) <= MOST_STEPS
    assert STEPS[0][0].startswith("sidecar/relay/")
    assert STEPS[-1][0].startswith("quantdrift/show/report/")


@pytest.mark.parametrize(("module", "function"), STEPS, ids=lambda text: text)
def test_every_step_of_the_path_exists(module: str, function: str) -> None:
    """The module of a line defines the function that the line names."""
    assert function in _defined(ROOT / f"{module}.py")


def test_every_package_of_the_page_exists_and_none_is_missing() -> None:
    """The table of packages has the folders of the tree."""
    table = PAGE.partition("## The packages")[2].partition("### ")[0]
    named = {
        path.strip("/")
        for line in table.splitlines()
        if line.startswith("| `")
        for path in re.findall(r"`([\w/]+/)`", line.split("|")[1])
    }
    assert all((ROOT / path).is_dir() for path in named)
    groups = ("quantdrift/core", "quantdrift", "sidecar", "shadow")
    folders = {
        str(init.parent.relative_to(ROOT))
        for group in groups
        for init in (ROOT / group).glob("*/__init__.py")
        if not init.parent.is_symlink()
    }
    assert folders - named == set()


@pytest.mark.parametrize("line", FAULTS, ids=lambda line: line.split("|")[1].strip())
def test_every_line_of_the_table_of_faults_names_a_test_that_exists(line: str) -> None:
    """What the page promises is shown by a test, and a test that is renamed is renamed on the page."""
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert len(cells) == 4, "fault, serving traffic, samples, tests"
    assert all(cells)
    named = re.findall(r"`([\w/.]+\.py)::(\w+)`", cells[3])
    assert named, "no test is named"
    for path, name in named:
        assert name in _defined(ROOT / "tests" / path), f"{path} has no {name}"
