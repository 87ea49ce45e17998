"""Whose batch is replayed next, for any shares and costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.shadow.pipeline.fair_share import QUANTUM_S, FairShare, ShareTerms

pytestmark = pytest.mark.property

SHARES = st.lists(st.floats(0.1, 10), min_size=2, max_size=4)
COSTS = st.floats(0.001, 3.0)


def _names(n: int) -> list[str]:
    return [f"m{index}" for index in range(n)]


@given(shares=SHARES, data=st.data())
def test_replay_time_divides_as_the_shares(shares: list[float], data: st.DataObject) -> None:
    """Where all have something waiting, none is further from its due than a round and two batches of each."""
    names = _names(len(shares))
    bounds = [data.draw(COSTS) for _ in names]
    costs = {
        name: data.draw(st.lists(st.floats(0.0005, bound), min_size=5, max_size=5))
        for name, bound in zip(names, bounds, strict=True)
    }
    fair_share = FairShare({name: ShareTerms(share=share) for name, share in zip(names, shares, strict=True)})
    spent = dict.fromkeys(names, 0.0)
    for name in names:
        fair_share.put(name)
    for number in range(400):
        ready = fair_share.take(0.0, among=names)
        assert ready is not None
        took = costs[ready.model][number % 5]
        spent[ready.model] += took
        fair_share.correct_charge(ready, took, 1)
        fair_share.put(ready.model)
    per_share = [spent[name] / share for name, share in zip(names, shares, strict=True)]
    slack = [(QUANTUM_S * share + 2 * bound) / share for share, bound in zip(shares, bounds, strict=True)]
    assert max(per_share) - min(per_share) <= 2 * max(slack)


@given(ratio=st.floats(0.01, 1), costs=st.lists(COSTS, min_size=1, max_size=30))
def test_a_budget_is_kept(ratio: float, costs: list[float]) -> None:
    """Over any time a model takes its ratio of it, a second's worth and one batch at most, and loses no time either."""
    fair_share = FairShare({"capped": ShareTerms(max_ratio=ratio)})
    now_s, spent_s = 0.0, 0.0
    for cost in costs:
        fair_share.put("capped")
        while (ready := fair_share.take(now_s, among=["capped"])) is None:
            wait_s = fair_share.wait_s(now_s)
            assert wait_s is not None
            assert 0 < wait_s <= (max(costs) + 1) / ratio
            now_s += wait_s
        assert spent_s <= ratio * (now_s + 1) + 1e-6
        fair_share.correct_charge(ready, cost, 1)
        spent_s += cost
        now_s += cost
    assert now_s <= sum(costs) / ratio + sum(costs)


@given(rate=st.floats(10, 1000), tokens=st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_a_budget_in_tokens_is_kept(rate: float, tokens: list[int]) -> None:
    """Over any time a model reads its rate of tokens, a second's worth and one batch at most, however little time a batch takes."""
    fair_share = FairShare({"capped": ShareTerms(max_tokens_per_s=rate)})
    now_s, n_read = 0.0, 0
    for of_batch in tokens:
        fair_share.put("capped")
        while (ready := fair_share.take(now_s, among=["capped"])) is None:
            wait_s = fair_share.wait_s(now_s)
            assert wait_s is not None
            assert wait_s > 0
            now_s += wait_s
        assert n_read <= rate * (now_s + 1) + 1e-3
        fair_share.correct_charge(ready, 0.001, 1, of_batch)
        n_read += of_batch
    assert now_s <= sum(tokens) / rate + 1e-3


@given(shares=SHARES, cost=COSTS)
def test_who_waits_alone_is_served_at_once(shares: list[float], cost: float) -> None:
    """However much it has had: nobody else wants it."""
    names = _names(len(shares))
    fair_share = FairShare({name: ShareTerms(share=share) for name, share in zip(names, shares, strict=True)})
    for _ in range(20):
        fair_share.put("m0")
        ready = fair_share.take(0.0, among=names)
        assert ready is not None
        assert ready.model == "m0"
        fair_share.correct_charge(ready, cost, 1)


def test_a_model_without_a_name_waits_with_the_others() -> None:
    """One that is not configured has the default share; one that may not be taken now is passed over."""
    fair_share = FairShare({"known": ShareTerms(share=2.0)})
    fair_share.put("unheard-of")
    assert fair_share.take(0.0, among=["known"]) is None
    ready = fair_share.take(0.0, among=["unheard-of"])
    assert ready is not None
    assert fair_share.take(0.0, among=["unheard-of"]) is None
    assert fair_share.wait_s(0.0) is None
