"""How several processes share the tests (pytest-xdist): file by file, and what takes long first.

A file goes to one process, so that what its tests share is made once. Some directories go to one process as a whole:
each real server then starts once, and the demo's models are trained once. What is short comes last, so that all processes
end at about the same time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling

# What takes minutes first, what takes milliseconds last; tests that wait for processes beside tests that only compute.
# What is in none of these directories comes before all.
ORDER: Final = (
    "acceptance",
    "servers",
    "statistical",
    "quantised",
    "fault",
    "integration",
    "browser",
    "contract",
    "property",
    "unit",
    "gpu",
)
_WHOLE: Final = ("tests/acceptance/", "tests/servers/", "tests/quantised/")


def part(test: str) -> str:
    """Return what goes to one process together with a test: its file, or a directory.

    Parameters
    ----------
    test
        The test's id: `tests/unit/test_backtest_alerts.py::test_...`.
    """
    return next((directory for directory in _WHOLE if test.startswith(directory)), test.partition("::")[0])


def rank(test: str) -> int:
    """Return when a test is begun: lower ranks first, equal ones as they were collected."""
    directory = [*test.split("/"), ""][1]
    return ORDER.index(directory) if directory in ORDER else -1


def turned(arguments: Sequence[str], process: int, processes: int) -> list[str]:
    """Return the test files of some directories, for each process from another one on; other arguments as they are.

    Pytest compiles a test file where no compiled one is there, which takes most of the time of collecting in a fresh
    clone. All processes collect all files: in one order, each would compile each of them.
    """
    if not all(map(Path.is_dir, map(Path, arguments))):
        return [*arguments]
    files = [str(path) for argument in arguments for path in sorted(Path(argument).rglob("test_*.py"))]
    first = len(files) * process // processes
    return [*files[first:], *files[:first]]


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Hands out one part after another, in the order of the tests, to whichever process is idle."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False  # not by the number of tests, which says little
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return part(nodeid)
