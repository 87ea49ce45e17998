"""Snapshots in the middle of a stream with infinite divergences: bit for bit, or not the same detector.

A store that rounds is put to the same check, which must reject it.
"""

from collections.abc import Callable

import numpy as np
import pytest

from quantdrift.drift.detectors.protocol import DETECTORS
from quantdrift.drift.evidence.header import N_TOTAL
from quantdrift.drift.evidence.observations import STEPS, FloatArray
from quantdrift.drift.evidence.state import dump_state, load_state
from tests.support.monitor.detectors import after, given, phases

pytestmark = pytest.mark.statistical

Kept = Callable[[str, FloatArray], FloatArray]


def shipped(kind: str, state: FloatArray) -> FloatArray:
    """Return a state from its binary form."""
    return load_state(kind, dump_state(kind, state), len(state))


def in_single_precision(_: str, state: FloatArray) -> FloatArray:
    """Return a state whose store has four bytes for a number."""
    return state.astype("<f4").astype(np.float64)


def in_fifteen_digits(_: str, state: FloatArray) -> FloatArray:
    """Return a state whose store writes numbers as people do: two digits short of what tells all of them apart."""
    return np.array([float(f"{value:.15g}") for value in state])


def without_its_count(kind: str, state: FloatArray) -> FloatArray:
    """Return a state from a store that keeps all but how many groups there were."""
    kept = state.copy()
    kept[N_TOTAL] = 0.0
    return shipped(kind, kept)


def infinite(seed: int, n: int) -> FloatArray:
    """Return divergences of n signals over a block, (STEPS, n), one in twenty infinite."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random((STEPS, n)) < 0.05, np.inf, rng.exponential(0.005, (STEPS, n)))


def same_bits(kind: str, kept: Kept) -> bool:
    """Return whether six blocks with a snapshot after each end in the bits of six without one."""
    detector, states = DETECTORS[kind], phases(kind)
    whole, resumed = states.copy(), states.copy()
    for turn in range(6):
        block = given(kind, infinite(turn, len(states)), first=turn * STEPS)
        whole, resumed = after(detector, whole, block), after(detector, resumed, block)
        assert np.isfinite(whole).all()
        resumed = np.stack([kept(kind, state) for state in resumed])
    return whole.tobytes() == resumed.tobytes()


@pytest.mark.parametrize("kind", sorted(DETECTORS))
@pytest.mark.parametrize("kept", [shipped, in_single_precision, in_fifteen_digits, without_its_count])
def test_a_snapshot_amid_infinite_divergences_is_bit_exact(kind: str, kept: Kept) -> None:
    """Every number of the state is finite, and what resumes from the store goes on as if it had never stopped."""
    assert same_bits(kind, kept) == (kept is shipped)
