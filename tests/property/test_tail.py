"""The tail detector's bits: the same in any company, in any split and after a store; shards add up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantdrift.drift.detectors.tail import pooled_histogram
from quantdrift.drift.detectors.tail.quantile import N_BINS
from quantdrift.drift.evidence.observations import STEPS, FloatArray, ObservationBlock
from quantdrift.drift.evidence.state import dump_state, load_state
from tests.support.monitor.change_streams import block
from tests.support.monitor.tail_streams import TAIL, learned

pytestmark = pytest.mark.property


def mixed(rng: np.random.Generator, steps: int, n: int) -> FloatArray:
    """Return groups of one to twelve items, now and then an infinite one."""
    found = np.zeros((steps, n, N_BINS))
    for step in range(steps):
        for row in range(n):
            n_items = int(rng.integers(1, 13))
            places = np.where(rng.random(n_items) < 0.02, N_BINS - 1, rng.integers(20, 45, n_items))
            np.add.at(found[step, row], places, 1 / n_items)
    return found


def starts(seed: int, n: int) -> FloatArray:
    """Return states of every stage: learning, live, frozen, and some of them alerting."""
    states = learned(np.random.default_rng(seed), n, 200, tau=0.25, bound=0.3)
    for row, state in enumerate(states):
        if row % 4 == 0:
            states[row] = TAIL.fresh(tau=0.1, scale=1.0, mass=0.0, at_us=0)
        if row % 4 == 2:
            TAIL.freeze(state)
        if row % 4 == 3 or row % 8 == 0:
            TAIL.alarmed(state, page=row % 3 == 0)
    return states


def part(whole: ObservationBlock, steps: slice, rows: slice) -> ObservationBlock:
    """Return some steps of some signals."""
    return ObservationBlock(
        x=whole.x[steps, rows],
        seen=whole.seen[steps, rows],
        mass=whole.mass[steps, rows],
        at_us=whole.at_us[steps, rows],
    )


@given(seed=st.integers(0, 2**32), steps=st.integers(1, STEPS), n=st.integers(2, 9))
@settings(max_examples=25, deadline=None)
def test_company_does_not_change_the_bits(seed: int, steps: int, n: int) -> None:
    """A signal run alone ends, at any step, in the same bits as among others of every stage."""
    rng = np.random.default_rng(seed)
    states, whole = starts(seed, n), block(mixed(rng, steps, n))
    whole = ObservationBlock(x=whole.x, seen=rng.random((steps, n)) < 0.8, mass=whole.mass, at_us=whole.at_us)
    stop = rng.integers(0, steps, n)
    together = TAIL.run(states, whole).stopped(stop)
    for row in range(n):
        only = slice(row, row + 1)
        alone = TAIL.run(states[only], part(whole, slice(None), only)).stopped(stop[only])
        assert alone.tobytes() == together[only].tobytes()


@given(seed=st.integers(0, 2**32), cut=st.integers(1, STEPS - 1))
@settings(max_examples=25, deadline=None)
def test_neither_another_split_nor_a_store_changes_the_bits(seed: int, cut: int) -> None:
    """A block in two parts, and with a dump and load between them, ends in the bits of the whole."""
    n = 8
    states, whole = starts(seed, n), block(mixed(np.random.default_rng(seed), STEPS, n))
    at_once = TAIL.run(states, whole).stopped(np.full(n, STEPS - 1))
    half = TAIL.run(states, part(whole, slice(cut), slice(None))).stopped(np.full(n, cut - 1))
    stored = np.stack([load_state("tail", dump_state("tail", state), TAIL.size) for state in half])
    rest = part(whole, slice(cut, None), slice(None))
    in_two = TAIL.run(half, rest).stopped(np.full(n, STEPS - cut - 1))
    assert in_two.tobytes() == at_once.tobytes()
    assert TAIL.run(stored, rest).stopped(np.full(n, STEPS - cut - 1)).tobytes() == in_two.tobytes()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_baselines_of_shards_add_up_to_that_of_the_whole_stream(seed: int) -> None:
    """Groups dealt to three shards and pooled make the same baseline as one stream, to the rounding of fractions."""
    rng = np.random.default_rng(seed)
    values = mixed(rng, STEPS, 1)
    dealt = rng.integers(0, 3, STEPS)
    whole = ObservationBlock(
        x=values, seen=np.ones((STEPS, 1), dtype=bool), mass=block(values).mass, at_us=block(values).at_us
    )
    blank = TAIL.fresh(tau=0.0, scale=1.0, mass=0.0, at_us=0)[None]

    def content(seen: FloatArray) -> pooled_histogram.TailBaseline:
        given_ = ObservationBlock(x=whole.x, seen=seen[:, None] > 0, mass=whole.mass, at_us=whole.at_us)
        return TAIL.content(TAIL.run(blank, given_).stopped(np.array([STEPS - 1]))[0])

    pooled = pooled_histogram.pool([content((dealt == shard).astype(np.float64)) for shard in range(3)])
    once = content(np.ones(STEPS))
    assert pooled.n_groups == once.n_groups == STEPS
    np.testing.assert_allclose(pooled.counts, once.counts, rtol=1e-12, atol=1e-12)
