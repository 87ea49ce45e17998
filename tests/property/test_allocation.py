"""The sampling policy: what holds for whatever was seen."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.config.strata import MARGIN
from quantdrift.core.records import Predicate
from quantdrift.core.sampling.inclusion import smallest_rate
from quantdrift.drift.sampling.allocation import SamplingBudget, Spread, allocate
from quantdrift.drift.sampling.boosts import Boosts
from quantdrift.drift.sampling.stratification import bins_of, falling
from quantdrift.sidecar.sampling.second_phase import SecondPhase
from tests.support.monitor.known_traffic import EDGES, LAYOUT, WHERES, World, world

pytestmark = pytest.mark.property

OFFERED = 100.0


@given(
    these=st.builds(world, st.integers(0, 1000), st.just(120), close=st.booleans()),
    budget=st.builds(
        SamplingBudget,
        replays_per_s=st.floats(0.01, 300),
        taken_per_s=st.sampled_from([math.inf, 5.0, 60.0]),
        spread=st.sampled_from(Spread),
        n_strata=st.sampled_from([1, 5, 256]),
    ),
    evidence=st.dictionaries(st.sampled_from(sorted(WHERES)), st.floats(0, 20)),
)
def test_a_policy_keeps_its_promises(
    these: World, budget: SamplingBudget, evidence: dict[str, float]
) -> None:
    """By the sidecar's own decision on each exchange.

    The replays are those that were promised and inside the budget, and so is what the relays hand over; every
    exchange that can be taken is, with at least the c of each of its slices and margin bins; a smaller margin never
    has the smaller rate; no header stratum takes more than any of its items may get; and the numbers can be read
    back from the policy.
    """
    recent = these.recent(np.ones(len(these.margin)), OFFERED)
    made = allocate(recent, these.demands(OFFERED, evidence), LAYOUT, budget, epoch="e")
    policy = made.policy
    total = these.totals(policy)

    assert len(policy.body_strata) <= budget.n_strata
    # A slice that this world happens to lack has no traffic, so nothing is set aside for it.
    assert total.mean() * OFFERED == pytest.approx(made.replays_per_s)
    assert made.replays_per_s <= budget.replays_per_s * (1 + 1e-9)
    assert made.taken_per_s <= budget.taken_per_s * (1 + 1e-9)
    assert (total[these.header != 1] > 0).all()
    assert (total[these.header == 1] == 0).all()

    bins = bins_of(these.margin, EDGES)
    lows, highs = [None, *EDGES], [*EDGES, None]
    for where in WHERES.values():
        inside = (these.inside(where) > 0) & (total > 0)
        assert (smallest_rate(where, policy) <= total[inside] * (1 + 1e-12)).all()
        for h, (low, high) in enumerate(zip(lows, highs, strict=True)):
            bound = smallest_rate((*where, Predicate(key=MARGIN, low=low, high=high)), policy)
            assert (bound <= total[inside & (bins == h)] * (1 + 1e-12)).all()

    for index, attributes in enumerate(these.attributes[:10]):
        pi1 = policy.header_strata[these.header[index]].rate
        by_margin = [
            SecondPhase(policy.body_strata, b"s").draw("k", pi1, attributes, margin).pi2
            for margin in (0.0, 0.1, 0.9, None)
        ]
        assert by_margin == sorted(by_margin, reverse=True)

    wheres = {where: name for name, where in WHERES.items() if name != "mean<0"}
    read = Boosts(names=tuple(wheres.values()), wheres=tuple(wheres), layout=LAYOUT).read(policy)
    assert read is not None
    assert (np.diff(read.boost, axis=1) <= 0).all()
    assert read.envelope[0] <= max(read.base, read.boost.max())


@given(
    rows=st.lists(
        st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 1)), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    )
)
def test_falling_rows_are_the_isotonic_regression(rows: list[list[tuple[float, float]]]) -> None:
    """As scikit-learn's, and weighted means stay."""
    from sklearn.isotonic import isotonic_regression  # a second of processor time

    table = np.array(rows)
    values, weights = table[..., 0], table[..., 1]
    found = falling(values, weights)
    for value, weight, row in zip(values, weights, found, strict=True):
        expected = isotonic_regression(value, sample_weight=weight, increasing=False)
        np.testing.assert_allclose(row, expected, atol=1e-9)
        assert (row * weight).sum() == pytest.approx((value * weight).sum(), abs=1e-9)
