"""The sampling policy: who gets which share of the replays."""

import math

import msgspec
import numpy as np
import pytest

from quantdrift.core.records import HeaderStratum, Policy, Predicate
from quantdrift.drift.sampling.allocation import (
    HEADROOM,
    Allocation,
    Demand,
    Recent,
    SamplingBudget,
    Spread,
    allocate,
    urgency,
)
from quantdrift.drift.sampling.boosts import Layout
from quantdrift.drift.sampling.stratification import (
    GRID,
    Profile,
    bins_of,
    margin_edges,
    profile_of,
    rounded_down,
)
from tests.support.monitor.known_traffic import EDGES, HEADERS, LAYOUT, world

pytestmark = pytest.mark.unit

SHARES = (0.5, 0.4, 0.1)
PLAIN = Layout(header_strata=(HeaderStratum(name="default", rate=1.0),), edges=())


def parts(
    *,
    shares: tuple[float, ...] = SHARES,
    evidence: tuple[float, ...] = (),
    key: str = "json.k",
    **budget: object,
) -> Allocation:
    """Return the allocation to disjoint slices of 100 items/s in all, 10 replays/s, without margins."""
    counts = [round(1000 * share) for share in shares]
    n = sum(counts)
    slice_ = np.repeat(np.arange(len(shares)), counts)
    recent = Recent(
        weight=np.full(n, 7.0),
        n_items=np.ones(n),
        header=np.zeros(n, dtype=np.intp),
        margin=np.full(n, np.nan),
        flip=np.zeros(n),
        item=np.arange(n),
        slice=slice_,
        offered_per_s=np.array([100.0]),
    )
    demands = [
        Demand(
            name=f"k={s}",
            where=(Predicate(key=key, equals=str(s)),),
            traffic_per_s=100.0 * share,
            evidence=evidence[s] if evidence else 0.0,
        )
        for s, share in enumerate(shares)
    ]
    given = {"replays_per_s": 10.0, "taken_per_s": math.inf, "spread": Spread.EQUAL}
    spent = SamplingBudget(**{**given, **budget})  # type: ignore[arg-type]
    return allocate(recent, demands, PLAIN, spent, epoch="e")


def test_without_evidence_every_slice_is_replayed_alike() -> None:
    """Spread equally: whatever its traffic, up to one step of the grid; and the budget is used."""
    made = parts()
    assert made.per_slice_per_s.max() <= 1.3 * made.per_slice_per_s.min()
    assert 0.8 * 10 * HEADROOM <= made.replays_per_s <= 10 * HEADROOM


def test_by_the_root_of_traffic_large_slices_get_more() -> None:
    """In proportion to the square root."""
    made = parts(spread=Spread.ROOT)
    expected = np.sqrt(SHARES) / np.sqrt(SHARES).sum()
    assert made.per_slice_per_s / made.replays_per_s == pytest.approx(expected, rel=0.2)


def test_half_follows_the_evidence() -> None:
    """The only slice with evidence gets that half and its part of the other one."""
    made = parts(evidence=(0.0, 500.0, 0.0))
    assert made.per_slice_per_s / made.replays_per_s == pytest.approx([1 / 6, 4 / 6, 1 / 6], rel=0.2)


def test_a_trace_of_evidence_moves_little() -> None:
    """A hundredth of a nat in one slice is no reason to send half of the replays there."""
    assert parts(evidence=(0.0, 0.0, 0.01)).per_slice_per_s == pytest.approx(parts().per_slice_per_s, rel=0.3)


def test_what_a_small_slice_cannot_use_goes_to_the_others() -> None:
    """A slice with fewer items than its share is taken whole, and the budget is used all the same."""
    made = parts(shares=(0.59, 0.40, 0.01), evidence=(0.0, 0.0, 9.0))
    assert made.per_slice_per_s[2] == pytest.approx(1.0)
    assert made.replays_per_s >= 0.8 * 10 * HEADROOM


def test_with_more_budget_than_traffic_everything_is_taken() -> None:
    """Every rate is 1."""
    made = parts(replays_per_s=1000.0)
    assert made.replays_per_s == pytest.approx(100.0)
    assert made.policy.header_strata[0].rate == made.policy.body_strata[-1].rate == 1.0


def test_a_slice_that_capture_cannot_recognise_gets_the_base_rate() -> None:
    """Its share goes there; no body stratum names it."""
    made = parts(key="feature.mean")
    assert [stratum.name for stratum in made.policy.body_strata] == ["default"]
    assert made.policy.body_strata[0].rate == pytest.approx(0.1, rel=0.25)


def test_rates_are_preferred_numbers() -> None:
    """Ten to the decade: small changes of what was seen change no rate."""
    made = parts()
    rates = [stratum.rate for stratum in made.policy.body_strata]
    for rate in (*rates, made.policy.header_strata[0].rate):
        assert np.isclose(GRID, rate, rtol=1e-12).any()


WORLD = world(1)
OFFERED = 100.0
RENAMED = HeaderStratum(name="a is 2", rate=1.0, headers={"x-a": "2"})
SPENT = SamplingBudget(replays_per_s=10.0, taken_per_s=math.inf)


def made_of(
    evidence: dict[str, float] | None = None,
    *,
    budget: SamplingBudget = SPENT,
    previous: Policy | None = None,
    layout: Layout = LAYOUT,
) -> Allocation:
    """Return the allocation to the little world."""
    recent = WORLD.recent(np.ones(len(WORLD.margin)), OFFERED)
    return allocate(
        recent, WORLD.demands(OFFERED, evidence or {}), layout, budget, epoch="new", previous=previous
    )


def test_a_policy_is_kept_while_it_is_good_enough() -> None:
    """The same again, and somewhat more evidence, change nothing: not even the epoch."""
    first = made_of({"a=2": 2.0}).policy
    for evidence in (2.0, 2.4):
        again = made_of({"a=2": evidence}, previous=msgspec.structs.replace(first, epoch="old"))
        assert again.kept
        assert again.policy.epoch == "old"


def test_a_policy_is_replaced_when_a_slice_needs_more() -> None:
    """Strong evidence elsewhere, other margin bins, and a smaller budget each ask for another one."""
    first = made_of({"k=1": 20.0}).policy
    assert not made_of({"a=1": 20.0}, previous=first).kept
    assert not made_of(
        {"k=1": 20.0}, budget=SamplingBudget(replays_per_s=5.0, taken_per_s=math.inf), previous=first
    ).kept
    assert not made_of({"k=1": 20.0}, layout=Layout(header_strata=HEADERS, edges=(0.1,)), previous=first).kept
    assert not made_of(
        {"k=1": 20.0}, layout=Layout(header_strata=(RENAMED, *HEADERS[1:]), edges=EDGES), previous=first
    ).kept


def test_a_boost_of_a_slice_that_is_gone_is_not_kept() -> None:
    """Nobody would ask for it any more."""
    first = made_of({"a=1": 20.0}).policy
    recent = WORLD.recent(np.ones(len(WORLD.margin)), OFFERED)
    alone = msgspec.structs.replace(recent, slice=recent.item[:0], item=recent.item[:0])
    demands = [Demand(name="all", where=(), traffic_per_s=OFFERED)]
    assert not allocate(alone, demands, LAYOUT, SPENT, epoch="new", previous=first).kept


def test_a_header_stratum_that_takes_nothing_is_left_alone() -> None:
    """The operator's 0 is not a rate to improve on."""
    rates = {stratum.name: stratum.rate for stratum in made_of().policy.header_strata}
    assert rates["off"] == 0.0
    assert rates["default"] > 0


def test_the_envelope_is_what_the_stratums_items_may_get_at_most() -> None:
    """Boosts of other header values do not raise it."""
    policy = made_of({"a=1": 50.0}).policy
    most = max(b.rate for b in policy.body_strata if not any(p.equals == "2" for p in b.where))
    others = max(
        b.rate
        for b in policy.body_strata
        if not any(p.key == "header.x-a" and p.equals == "1" for p in b.where)
    )
    assert policy.header_strata[0].rate == most
    assert policy.header_strata[2].rate == others < most


def test_the_capture_processes_are_given_no_more_than_they_can_decode() -> None:
    """The largest envelopes give way, and the replays stay inside their budget."""
    free = made_of({"k=1": 9.0})
    bound = made_of({"k=1": 9.0}, budget=SamplingBudget(replays_per_s=10.0, taken_per_s=20.0))
    assert bound.taken_per_s <= 20.0 < free.taken_per_s
    assert bound.replays_per_s <= 10.0
    assert WORLD.totals(bound.policy).mean() * OFFERED == pytest.approx(bound.replays_per_s)


def test_there_are_no_more_body_strata_than_allowed() -> None:
    """Slices with evidence keep their boosts longest."""
    small = made_of({"k=1": 9.0}, budget=SamplingBudget(replays_per_s=10.0, taken_per_s=math.inf, n_strata=4))
    assert len(small.policy.body_strata) <= 4
    assert small.n_unboosted > 0
    assert any(stratum.name.startswith("k=1") for stratum in small.policy.body_strata)
    assert small.replays_per_s >= 0.7 * made_of({"k=1": 9.0}).replays_per_s


def test_a_slice_that_the_sample_does_not_show_is_paid_for_from_its_traffic() -> None:
    """It may come back: its samples are set aside."""
    recent = WORLD.recent(np.ones(len(WORLD.margin)), OFFERED)
    rare = Demand(name="k=9", where=(Predicate(key="json.k", equals="9"),), traffic_per_s=1.0, evidence=50.0)
    made = allocate(recent, [*WORLD.demands(OFFERED, {}), rare], LAYOUT, SPENT, epoch="e")
    rate = max(stratum.rate for stratum in made.policy.body_strata if stratum.name.startswith("k=9"))
    seen = WORLD.totals(made.policy).mean() * OFFERED
    assert made.replays_per_s == pytest.approx(seen + rate)
    assert rate > 0.5


def test_slices_with_the_same_conditions_share_a_boost() -> None:
    """Two models' slices by the same header are one condition for the sidecar: their shares add up."""
    recent = WORLD.recent(np.ones(len(WORLD.margin)), OFFERED)
    twice = [*WORLD.demands(OFFERED, {"k=1": 5.0}), *WORLD.demands(OFFERED, {})]
    policy = allocate(recent, twice, LAYOUT, SPENT, epoch="e").policy
    names = [stratum.name for stratum in policy.body_strata]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "budget",
    [SamplingBudget(replays_per_s=0.0, taken_per_s=1.0), SamplingBudget(replays_per_s=1.0, taken_per_s=0.0)],
)
def test_an_empty_budget_is_refused(budget: SamplingBudget) -> None:
    """To take nothing is to pause."""
    with pytest.raises(ValueError, match="pause"):
        made_of(budget=budget)


def test_negative_evidence_is_refused() -> None:
    """It would take samples from others."""
    with pytest.raises(ValueError, match="not be negative"):
        made_of({"k=1": -1.0})


def test_urgency_counts_from_what_an_undrifted_slice_has() -> None:
    """Evidence as large as the mass it was given says nothing; neither does a detector without mass."""
    assert urgency(1e-6, 1e-5) == urgency(1e-5, 1e-5) == urgency(1.0, 0.0) == 0.0
    assert urgency(math.e**3 * 1e-5, 1e-5) == pytest.approx(3.0)


def test_where_flips_are_at_small_margins_rates_fall_with_the_margin() -> None:
    """Within a boost they fall by at most the floor allows; where flips are anywhere they are the same."""
    share = np.tile([0.1, 0.9], (2, 1))
    shape = Profile(share=share, flip=np.array([[0.1, 1e-9], [0.01, 0.01]])).shape
    assert shape[0] == pytest.approx([7.3, 0.3], rel=0.01)
    assert shape[1] == pytest.approx([1.0, 1.0])


def test_rates_never_rise_with_the_margin() -> None:
    """Where flips are at large margins the shape is flat: an exchange is drawn by its smallest margin."""
    shape = Profile(share=np.array([[0.1, 0.9]]), flip=np.array([[0.001, 0.1]])).shape
    assert shape[0] == pytest.approx([1.0, 1.0])


def test_a_full_bin_leaves_its_rest_to_the_others() -> None:
    """The mean over the slice's traffic stays what was asked for."""
    profile = Profile(share=np.array([[0.1, 0.9]]), flip=np.array([[0.1, 1e-9]]))
    for mean in (0.01, 0.2, 0.5, 0.99, 1.0):
        rates = profile.spread(np.array([mean]))
        assert (profile.share * rates).sum() == pytest.approx(mean)
        assert rates.max() <= 1.0


def test_a_slice_with_few_items_is_taken_to_be_like_the_rest() -> None:
    """One flip among three items is no flip rate of a third; a thousand items speak for themselves."""
    bins = np.zeros(10_003, dtype=np.intp)
    owner = np.concatenate((np.zeros(10_000), np.ones(3))).astype(np.intp)
    flip = np.concatenate((np.arange(10_000) % 100 == 0, [1, 0, np.nan])).astype(np.float64)
    found = profile_of(bins, flip, np.ones(10_003), owner, (3, 2))
    assert found.flip[0, 0] == pytest.approx(0.01, rel=0.01)
    assert 0.01 < found.flip[1, 0] < 0.04
    assert found.flip[2, 0] == pytest.approx(0.01, rel=0.05)
    assert found.share.sum(axis=1) == pytest.approx(np.ones(3))


def test_margin_edges_are_weighted_quantiles_on_the_grid() -> None:
    """Without margins there are none, and items without one are in the last bin."""
    margin = np.linspace(0.001, 1.0, 1000)
    assert margin_edges(margin, np.ones(1000)) == (0.0100, 0.0250, 0.1, 0.25)
    assert margin_edges(margin, np.where(margin < 0.5, 1e-9, 1.0)) == (0.5, 0.63)
    assert margin_edges(np.full(3, np.nan), np.ones(3)) == ()
    assert list(bins_of(np.array([0.0, 0.05, 0.3, np.nan]), EDGES)) == [0, 1, 2, 2]


def test_rounding_goes_down_and_keeps_grid_numbers() -> None:
    """What is on the grid stays; below the smallest number is nothing."""
    rates = np.array([1.0, 0.99, 0.08, 0.0799, 1e-9, 1e-10, 0.0])
    assert rounded_down(rates) == pytest.approx([1.0, 0.8, 0.08, 0.063, 1e-9, 0.0, 0.0])
    assert (rounded_down(GRID) == GRID).all()


def test_before_anything_was_compared_there_is_a_policy_too() -> None:
    """Slices count with their known traffic, so the budget holds."""
    none = np.zeros(0)
    empty = Recent(
        weight=none,
        n_items=none,
        header=none.astype(np.intp),
        margin=none,
        flip=none,
        item=none.astype(np.intp),
        slice=none.astype(np.intp),
        offered_per_s=np.array([50.0, 0.0, 50.0]),
    )
    made = allocate(empty, WORLD.demands(OFFERED, {}), LAYOUT, SPENT, epoch="e")
    assert made.policy.body_strata[-1].rate > 0
    assert 0 < WORLD.totals(made.policy).mean() * OFFERED <= made.replays_per_s <= 10.0
