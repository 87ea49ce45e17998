"""The time from SIGTERM to the end of a sidecar."""

import pytest

from quantdrift.core.config import Sidecar
from quantdrift.sidecar.state.shutdown import Deadlines

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("drain_delay_s", "grace_s"), [(5.0, 25.0), (0.0, 1.0), (24.0, 25.0)])
def test_everybody_has_time_within_the_grace_period(drain_delay_s: float, grace_s: float) -> None:
    """Each deadline lies after the one before it, and the last before the supervisor's own end."""
    deadlines = Deadlines.of(Sidecar(drain_delay_s=drain_delay_s, grace_s=grace_s))
    times = [
        deadlines.accept_s,
        deadlines.drain_s,
        deadlines.handoff_s,
        deadlines.relay_s,
        deadlines.capture_s,
        grace_s,
    ]
    assert deadlines.accept_s == drain_delay_s
    assert times == sorted(set(times))
