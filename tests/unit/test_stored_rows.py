"""The rows of `comparison`, column by column, of exchanges of every sort."""

import pytest

from tests.support.shadow.stored_rows import GOLDEN, stored_rows

pytestmark = pytest.mark.unit


def test_the_rows_of_a_batch_stay_as_they_are() -> None:
    """Whatever makes the worker quicker changes no column of any row: as written before it was made quicker."""
    assert stored_rows() == GOLDEN.read_text("utf-8")
