"""The onset of a drift where newer exchanges were folded first."""

import numpy as np
import pytest

from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.observations import GroupSequence

pytestmark = pytest.mark.unit


def test_an_onset_is_dated_by_capture_where_newer_exchanges_came_first() -> None:
    """After an outage the clock of the fold stands at the newest capture; what came late and changed began when it was captured."""
    n_healthy, n_late = 200, 20
    captured_us = np.arange(1.0, n_healthy + 2 * n_late + 1)
    at_us = captured_us.copy()
    at_us[n_healthy:] = newest_us = (
        1_000.0  # one that is newer came before the rest, first healthy and then not
    )
    flips = (np.arange(len(at_us)) >= n_healthy + n_late).astype(float)
    state = BUDGET.fresh(budget=0.01, scale=1.0, weighted=False, mass=0.0, at_us=0)
    x = np.stack([flips, np.ones_like(flips)], axis=1)
    BUDGET.follow(
        state[None],
        GroupSequence(
            ends=np.array([len(flips)]),
            x=x,
            seen=np.ones(len(flips), dtype=np.bool_),
            mass=at_us * 1e-9,
            at_us=at_us,
            captured_us=captured_us,
        ),
    )
    assert BUDGET.moved(state).onset_us == captured_us[n_healthy + n_late] < newest_us
