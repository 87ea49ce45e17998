"""A move and its parts: exact, whatever the windows hold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.drift.evidence.margin import N_BINS
from quantdrift.drift.explain.damage import strata
from quantdrift.drift.explain.mix import LEAST, MixItems, MixSplit, MoveCause, MovePart, split
from quantdrift.facts.explanation import FEWEST_AFTER, FEWEST_BEFORE

pytestmark = pytest.mark.property
CELLS = 4


@st.composite
def samples(draw: st.DrawFn) -> MixItems:
    """Return a window of up to 120 items with weights between 1 and 100."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, 120))
    return MixItems(
        x=rng.exponential(size=n) if draw(st.booleans()) else (rng.random(n) < 0.2).astype(np.float64),
        weight=10.0 ** rng.uniform(0, 2, n),
        cell=rng.integers(0, draw(st.integers(1, CELLS)), n),
        cluster=rng.integers(0, n, n),
    )


@given(before=samples(), after=samples())
def test_the_parts_add_up_to_the_move(before: MixItems, after: MixItems) -> None:
    """Nothing is left over, and no error is negative or not a number."""
    found = split(before, after, CELLS)
    assert found is not None
    parts = (found.within, found.mix, found.unseen)
    assert sum(part.value for part in parts) == pytest.approx(found.move.value, abs=1e-9)
    assert found.after - found.before == pytest.approx(found.move.value, abs=1e-9)
    assert all(part.se >= 0 for part in (found.move, *parts))
    assert -1e-9 <= found.unmatched <= 1 + 1e-9


@given(window=samples())
def test_a_window_has_not_moved_from_itself(window: MixItems) -> None:
    """All parts are nothing."""
    found = split(window, window, CELLS)
    assert found is not None
    assert found.within.value == pytest.approx(0, abs=1e-9)
    assert found.mix.value == pytest.approx(0, abs=1e-9)
    assert found.unseen.value == pytest.approx(0, abs=1e-9)


@given(before=samples(), after=samples(), scale=st.floats(0.1, 10))
def test_neither_the_names_of_the_cells_nor_the_scale_of_the_weights_matter(
    before: MixItems, after: MixItems, scale: float
) -> None:
    """Weights are relative; cells are a partition."""
    other = [
        MixItems(x=one.x, weight=scale * one.weight, cell=CELLS - 1 - one.cell, cluster=one.cluster)
        for one in (before, after)
    ]
    one, two = split(before, after, CELLS), split(other[0], other[1], CELLS)
    assert one is not None
    assert two is not None
    for name in ("move", "within", "mix", "unseen"):
        first, second = getattr(one, name), getattr(two, name)
        assert first.value == pytest.approx(second.value, rel=1e-6, abs=1e-9)
        if math.isfinite(first.se):
            assert first.se == pytest.approx(second.se, rel=1e-6, abs=1e-9)


def _split(*figures: tuple[float, float], n: tuple[int, int] = (FEWEST_BEFORE, FEWEST_AFTER)) -> MixSplit:
    """Return a split with these parts, within, mix and unseen, and their errors."""
    within, mix, unseen = (MovePart(value=value, se=se) for value, se in figures)
    move = MovePart(value=within.value + mix.value + unseen.value, se=0.1)
    return MixSplit(
        before=0,
        after=move.value,
        move=move,
        within=within,
        mix=mix,
        unseen=unseen,
        unmatched=0,
        n_before=n[0],
        n_after=n[1],
    )


NONE = (0.0, 0.0)


@pytest.mark.parametrize(
    ("within", "mix", "unseen", "cause"),
    [
        ((1.0, 0.1), (0.0, 0.1), NONE, MoveCause.WITHIN),
        ((0.0, 0.1), (1.0, 0.1), NONE, MoveCause.MIX),
        (NONE, (0.1, 0.1), (1.0, 0.1), MoveCause.UNSEEN),
        ((1.0, 0.1), (0.9, 0.1), NONE, MoveCause.BOTH),
        ((1.0, 0.1), NONE, (0.9, 0.1), MoveCause.BOTH),
        ((1.0, 0.1), (0.2, 0.05), NONE, MoveCause.WITHIN),
        ((1.0, 0.9), (0.5, 0.9), NONE, MoveCause.UNDECIDED),
        ((1.0, 0.1), (1.5, 0.9), NONE, MoveCause.UNDECIDED),
        ((1.0, 0.1), NONE, (1.5, 0.9), MoveCause.UNDECIDED),
        ((1.0, math.inf), NONE, NONE, MoveCause.UNDECIDED),
        ((1.0, 0.0), NONE, NONE, MoveCause.UNDECIDED),
        ((-1.0, 0.1), (-1.0, 0.1), NONE, MoveCause.UNDECIDED),
    ],
)
def test_a_cause_is_named_where_a_part_has_surely_risen(
    within: tuple[float, float], mix: tuple[float, float], unseen: tuple[float, float], cause: MoveCause
) -> None:
    """Also a larger part that is not sure keeps the other from being the cause, and no error of 0 is believed."""
    assert _split(within, mix, unseen).cause is cause


@pytest.mark.parametrize("n", [(FEWEST_BEFORE - 1, 1000), (1000, FEWEST_AFTER - 1)])
def test_a_handful_on_one_side_names_no_cause(n: tuple[int, int]) -> None:
    """However sure the figures look."""
    assert _split((1.0, 0.01), NONE, NONE, n=n).cause is MoveCause.TOO_FEW


@given(st.lists(st.integers(0, 100), min_size=N_BINS, max_size=N_BINS), st.integers(0, 2**32 - 1))
def test_strata_are_neighbours_in_order(before: list[int], seed: int) -> None:
    """Numbers rise by at most one along the margin and begin at 0."""
    after = np.random.default_rng(seed).random(N_BINS)
    found = strata(np.array(before), after)
    assert found[0] == 0
    assert set(np.diff(found)) <= {0, 1}


def test_close_calls_that_were_never_seen_stay_apart_from_sure_ones() -> None:
    """With the sure ones in one stratum they would be taken for damage; thin bins without traffic are merged."""
    before, after = np.zeros(N_BINS, dtype=np.int64), np.zeros(N_BINS)
    before[-1], after[0], after[-1] = 10 * LEAST, 0.5, 0.5
    apart = strata(before, after)
    assert apart[0] != apart[-1]
    after[0] = 0.001
    together = strata(before, after)
    assert together[0] == together[-1]


def test_few_close_calls_are_pooled_with_adjacent_bins_and_never_with_sure_ones() -> None:
    """Across a gap a few of them stay apart; beside others that were seen they share their stratum."""
    before, after = np.zeros(N_BINS, dtype=np.int64), np.zeros(N_BINS)
    before[3], before[-1] = LEAST - 5, 10 * LEAST
    after[3], after[-1] = 0.5, 0.5
    apart = strata(before, after)
    assert apart[3] != apart[-1]
    before[1], after[1] = LEAST, 0.2
    beside = strata(before, after)
    assert beside[1] == beside[3] != beside[-1]
