"""What every comparator must do."""

import pytest

from quantdrift.core.tasks import Task
from quantdrift.testing.comparators import ComparatorSuite
from tests.support.shadow.comparator_cases import CASES

pytestmark = pytest.mark.contract


class TestComparator(ComparatorSuite):
    """Each built-in task; plug-ins derive from the same suite."""

    cases = CASES


def test_every_task_has_a_case() -> None:
    """What the suite does not run, the suite does not prove."""
    assert {task for task in Task if not any(case.name.startswith(task) for case in CASES)} == set()
