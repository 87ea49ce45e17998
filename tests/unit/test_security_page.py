"""The threat model names tests that exist, in every line that claims a protection."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def _lines(section: str) -> list[str]:
    lines = PAGE.partition(f"## {section}")[2].partition("\n## ")[0].splitlines()
    return [line for line in lines if line.startswith("| ")][1:]


LINES = _lines("Who may attack")
ATTACKS = _lines("Forty attacks")


def _all_exist(tests: str) -> None:
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", tests)
    assert named, "it names no test"
    for file, function in named:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert not function or function in {getattr(node, "name", "") for node in tree.body}, function


@pytest.mark.parametrize("line", LINES)
def test_every_protection_names_a_test_that_exists(line: str) -> None:
    """A line without a test says in bold that nothing stops the attempt."""
    _, _, _, protection, tests, _ = line.split("|")
    if "**nothing**" in protection:
        return
    _all_exist(tests)


@pytest.mark.parametrize("line", ATTACKS)
def test_every_attack_of_the_review_has_a_test_that_exists(line: str) -> None:
    """Each test is named by its function: a whole file says nothing of one attack."""
    tests = line.split("|")[3]
    assert tests.count("`") == 2 * tests.count("::test_")
    _all_exist(tests)


def test_none_of_the_forty_attacks_is_left_out() -> None:
    """They have the numbers of the review."""
    assert [int(line.split("|")[1]) for line in ATTACKS] == list(range(1, 41))


def test_the_threat_model_is_a_table_of_some_length() -> None:
    """An empty table would pass the test above."""
    assert len(LINES) >= 15
