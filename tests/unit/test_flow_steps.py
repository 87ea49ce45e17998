"""How far exchanges came, from counts that do not reach to the same moment."""

import pytest

from quantdrift.storage.account.flow import FlowStep, _at_least

pytestmark = pytest.mark.unit


def test_what_was_compared_was_sampled_though_the_sidecars_have_not_said_so_yet() -> None:
    """A step is never smaller than a later one; where no sidecar has ever told its counts, it stays at nothing."""
    compared = FlowStep(recent=93_955, total=93_955)
    sampled = _at_least(FlowStep(recent=93_866, total=120_000), compared)
    assert (sampled.recent, sampled.total) == (93_955, 120_000)
    assert _at_least(FlowStep(), compared) == FlowStep()
