"""The targets of the fuzzer hold for what they are begun with."""

import pytest

from tests.fuzz.__main__ import NAMES
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.unit


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_target_takes_its_seeds_and_anything_else(name: str) -> None:
    """Well formed, cut, and empty."""
    target = TARGETS[name]
    for seed in target.seeds:
        for end in range(0, len(seed) + 1, 7):
            target.run(seed[:end])
        target.run(seed)
    target.run(bytes(range(256)))


def test_every_target_can_be_named() -> None:
    """On the command line, without the fuzzer being there."""
    assert set(NAMES) == set(TARGETS)
