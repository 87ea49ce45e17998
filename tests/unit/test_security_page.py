"""The threat model names tests that exist, in every line that claims a protection."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
LINES = [
    line
    for line in PAGE.partition("## Who may attack")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| ")
][1:]


@pytest.mark.parametrize("line", LINES)
def test_every_protection_names_a_test_that_exists(line: str) -> None:
    """A line without a test says in bold that nothing stops the attempt."""
    _, _, _, protection, tests, _ = line.split("|")
    if "**nothing**" in protection:
        return
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", tests)
    assert named, "it names no test"
    for file, function in named:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert not function or function in {getattr(node, "name", "") for node in tree.body}, function


def test_the_threat_model_is_a_table_of_some_length() -> None:
    """An empty table would pass the test above."""
    assert len(LINES) >= 15
