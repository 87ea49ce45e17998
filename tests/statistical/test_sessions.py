"""Sessions as observations: correlated requests keep the bound on false alarms only when they count once."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from benchmarks.session_cuts import ROW
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.observations import STEPS, FloatArray, ObservationBlock
from quantdrift.monitor.fold.sessions import Part, Sessions, begin_us

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


SESSION_US = 1_800_000_000


def begun_anew(requests: FloatArray) -> list[tuple[int, Part, Sequence[int]]]:
    """Return what `Sessions` shows of a new version's users in half an hour: of whom, which part, and the numbers of its requests.

    Parameters
    ----------
    requests
        (users, requests) seconds after the version began.
    """
    sessions, parts = Sessions(SESSION_US, version_us=lambda _: 0), []
    n = requests.shape[1]
    for place in np.argsort(requests, axis=None).tolist():
        now_us = int(requests.flat[place] * 1e6)
        row = msgspec.structs.replace(ROW, item=place % n, group_key=f"{place // n}", captured_us=now_us)
        sessions.add([row], now_us)
        parts += sessions.due(now_us)
    parts += sessions.due(3 * SESSION_US)
    return [(int(items[0].group_key), part, [item.item for item in items]) for _, items, part in parts]


def test_the_begins_of_sessions_keep_the_bound_because_each_user_counts_once() -> None:
    """As above, in the first half hour of a version, with half of the flips from users who always flip.

    A mutant begins the next session of a user where a begin is over: it doubles in length with the age of the version, so that a
    user counts up to six times, and the bound breaks.
    """
    rng = np.random.default_rng(11)
    users, n = 640, 12
    requests = np.sort(rng.random((users, 1)) * 300.0 + rng.random((users, n)) * 1_490.0, axis=1)
    parts = begun_anew(requests)
    shown = [(user, items) for user, part, items in parts if part is not Part.AFTER]
    assert sorted(user for user, _ in shown) == list(range(users)), "each user counts once"
    whole = {user for user, part, _ in parts if part is Part.WHOLE}
    n_begun = sum(part is Part.BEGIN for _, part, _ in parts)
    assert abs(len(whole) - users / 2) < 4 * np.sqrt(users) / 2
    assert n_begun + len(whole) == users
    always = rng.random((users, STREAMS)) < M / 2
    flips = rng.random((users, n, STREAMS)) < (M / 2) / (1 - M / 2)
    flips |= always[:, None, :]

    def values(observed: Sequence[tuple[int, Sequence[int]]]) -> FloatArray:
        return np.array([flips[user, items].mean(axis=0) for user, items in observed])

    assert alarmed(values(shown), 4.0 * len(shown)) <= 0.34
    again = []
    for user in range(users):
        left = requests[user]
        while len(left):
            length_us = begin_us(int(left[0] * 1e6), 0, SESSION_US, f"{user}") or SESSION_US
            inside = left * 1e6 < left[0] * 1e6 + length_us
            again.append((user, np.flatnonzero(np.isin(requests[user], left[inside])).tolist()))
            left = left[~inside]
    assert len(again) > 1.5 * users
    assert alarmed(values(again), 4.0 * len(again)) > 0.34
