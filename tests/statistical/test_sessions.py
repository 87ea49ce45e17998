"""Sessions as observations: correlated requests keep the bound on false alarms only when they count once."""

import numpy as np
import pytest

from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.observations import STEPS, FloatArray, ObservationBlock

pytestmark = pytest.mark.statistical

M, ITEMS, STREAMS = 0.01, 10, 200


def alarmed(values: FloatArray, threshold: float) -> float:
    """Return the share of streams (steps, streams) that pass the threshold, on the sample clock."""
    states = np.tile(
        BUDGET.fresh(budget=M, scale=1.0, weighted=False, mass=0.0, at_us=0), (values.shape[1], 1)
    )
    hit = np.zeros(values.shape[1], dtype=bool)
    for first in range(0, len(values), STEPS):
        x = values[first : first + STEPS]
        at = np.broadcast_to(np.arange(first + 1.0, first + 1.0 + len(x))[:, None], x.shape)
        block = ObservationBlock(
            x=np.stack((x, np.ones_like(x)), axis=-1), seen=np.ones(x.shape, dtype=bool), mass=at, at_us=at
        )
        path = BUDGET.run(states, block)
        hit |= (path.page >= threshold).any(axis=0)
        states = path.stopped(np.full(len(states), len(x) - 1))
    return float(hit.mean())


def test_users_who_always_differ_break_the_bound_unless_their_session_counts_once() -> None:
    """One user in a hundred flips on every request, the mean is at its budget of 1 %.

    200 seeded streams of 640 sessions with 10 requests each. As 6,400 exchanges nine streams in ten alarm at a
    threshold where 1 in 4 may; as 640 sessions at most 1 in 4 do (binomial: above 0.34 with P < 0.003 if it were so).
    """
    rng = np.random.default_rng(3)
    users = (rng.random((640, STREAMS)) < M).astype(np.float64)
    assert alarmed(users, 4.0 * 640) <= 0.34
    assert alarmed(np.repeat(users, ITEMS, axis=0), 4.0 * 640 * ITEMS) > 0.9
