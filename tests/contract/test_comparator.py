"""What every comparator must do."""

import pytest

from quantdrift.testing.comparators import ComparatorSuite
from tests.support.shadow.comparator_cases import CASES

pytestmark = pytest.mark.contract


class TestComparator(ComparatorSuite):
    """Each built-in task; plug-ins derive from the same suite."""

    cases = CASES
