"""When learned slices are fitted again."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from quantdrift.core.config.schema import Config, Model
from quantdrift.monitor.discovery.clusters import due
from quantdrift.storage.slices.clusters import Space

pytestmark = pytest.mark.unit

NOW = datetime(2031, 6, 15, tzinfo=UTC)
CONFIG = Config(models=(Model(name="digits", embedding="pool"),))
SPACE = Space(
    model="digits",
    reference_digest="d",
    space="pool",
    n_vectors=500,
    last_at=NOW,
    fitted_at=NOW - timedelta(days=7),
    fitted_to=NOW - timedelta(days=7),
    fitted_n=2_000,
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"fitted_at": None, "fitted_to": None}, True),
        ({"n_vectors": 499}, False),
        ({"fitted_at": NOW - timedelta(days=6.9)}, False),
        ({"fitted_at": NOW - timedelta(hours=1), "fitted_n": 250}, True),
        ({"fitted_at": NOW - timedelta(hours=1), "fitted_n": 251}, False),
        ({"fitted_at": NOW - timedelta(hours=1), "fitted_n": 2_000, "n_vectors": 9_000}, False),
        ({"last_at": NOW - timedelta(days=7)}, False),
        ({"space": "layer of last year"}, False),
        ({"model": "letters"}, False),
    ],
    ids=[
        "due",
        "first",
        "few",
        "early",
        "twice as many",
        "not twice",
        "enough",
        "nothing new",
        "other space",
        "other model",
    ],
)
def test_a_space_is_due_with_enough_that_is_new_after_long_enough(
    *, changes: dict[str, Any], expected: bool
) -> None:
    """And only while the configuration names it."""
    space = msgspec.structs.replace(SPACE, **changes)
    assert (due(CONFIG, [space], NOW, least_vectors=500) == [space]) is expected
