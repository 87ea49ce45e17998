"""What the allocation gets: traffic and evidence computed from rows of the database."""

import math

import msgspec
import numpy as np
import pytest

from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate, Verdict
from quantdrift.core.sampling.policy_message import MAX_BYTES, PolicyMessage, encode
from quantdrift.core.sampling.rates import lowered
from quantdrift.drift.evidence.margin import EDGES
from quantdrift.monitor.sampling.demands import (
    POLICY_STRATA,
    draft,
    edges_of,
    header_layout,
    recent_of,
    summary_of,
    surged,
)
from quantdrift.sidecar.state.policy import check_policy
from quantdrift.storage.sampling import (
    Offered,
    RecentItems,
    SignalEvidence,
    SliceWeight,
    TrafficRecord,
)
from tests.support.sidecar.policy_messages import BEGIN, CONFIG, evidence, named

pytestmark = pytest.mark.unit

ALL, FAINT, CLEAR = 1, 2, 3


def record(n: int = 400, signals: tuple[SignalEvidence, ...] = ()) -> TrafficRecord:
    """Return a record of `n` items, every tenth of a faint scan."""
    faint = [number % 10 == 0 for number in range(n)]
    where = {value: (Predicate(key="header.x-scanner", equals=value),) for value in ("faint", "clear")}
    rows = (
        (ALL, "all", (), 1000.0),
        (FAINT, "scanner=faint", where["faint"], 100.0),
        (CLEAR, "scanner=clear", where["clear"], 900.0),
    )
    return TrafficRecord(
        items=RecentItems(
            slice_ids=tuple((ALL, FAINT if one else CLEAR, 99) for one in faint),
            n_items=(1,) * n,
            header_stratum=tuple("x-scanner=faint" if one else "x-scanner=clear" for one in faint),
            pi=(0.25,) * n,
            margin=tuple(0.001 * (number % 1000) for number in range(n)),
            flip=tuple(number % 100 == 0 for number in range(n)),
        ),
        offered=Offered(per_s={"x-scanner=faint": 10.0, "x-scanner=clear": 90.0}, n_sources=2),
        slices=tuple(
            SliceWeight(id=i, model="digits", name=name, where=w, everything=i == ALL, weight=weight)
            for i, name, w, weight in rows
        ),
        signals=signals,
    )


def test_rows_become_arrays_in_the_order_of_strata_and_slices() -> None:
    """A slice that nobody knows is left out; what is not known is not a number."""
    rows = record(20)
    items = msgspec.structs.replace(
        rows.items,
        margin=(None, *rows.items.margin[1:]),
        flip=(None, *rows.items.flip[1:]),
        header_stratum=("gone", *rows.items.header_stratum[1:]),
    )
    recent = recent_of(msgspec.structs.replace(rows, items=items), header_layout(CONFIG))
    assert len(recent.weight) == 19
    assert set(recent.weight) == {4.0}
    assert recent.offered_per_s.tolist() == [0.0, 10.0, 90.0, 0.0]
    assert recent.header.tolist() == [1 if number == 10 else 2 for number in range(1, 20)]
    assert recent.item.tolist() == [number for number in range(19) for _ in range(2)]
    assert recent.slice.tolist() == [s for number in range(1, 20) for s in (0, 1 if number == 10 else 2)]
    assert recent.items_per_s().sum() == pytest.approx(100.0)


def test_margin_bins_end_where_those_of_baselines_do() -> None:
    """Each edge is one of the grid: a rate is one in each of its bins."""
    rng = np.random.default_rng(1)
    edges = edges_of(rng.random(5000), np.ones(5000))
    assert len(edges) >= 3
    assert set(edges) <= set(EDGES)
    assert edges_of(np.full(10, np.nan), np.ones(10)) == ()


def test_a_policy_needs_items_and_offers() -> None:
    """Of too little none is made."""
    assert draft(CONFIG, record(50), None) is None
    silent = msgspec.structs.replace(record(), offered=Offered(per_s={}, n_sources=0))
    assert draft(CONFIG, silent, None) is None


def test_evidence_gets_more_of_the_budget_unless_it_has_paged() -> None:
    """The slice that is suspected; one that fires has been found, and gets what others get."""
    calm = draft(CONFIG, record(), None)
    suspected = draft(CONFIG, record(signals=(evidence(FAINT, 1.0), evidence(CLEAR, 1e-6))), None)
    fires = draft(CONFIG, record(signals=(evidence(FAINT, 1.0, verdict=Verdict.FIRING),)), None)
    unbounded = draft(CONFIG, record(signals=(evidence(FAINT, math.inf),)), None)
    assert calm
    assert suspected
    assert fires
    assert unbounded
    assert suspected.allocation.per_slice_per_s[1] > 1.2 * calm.allocation.per_slice_per_s[1]
    assert fires.allocation.per_slice_per_s.tolist() == calm.allocation.per_slice_per_s.tolist()
    for made in (calm, suspected, unbounded):
        assert 0 < made.allocation.replays_per_s <= CONFIG.sampling.replays_per_s
        assert len(made.allocation.policy.body_strata) <= POLICY_STRATA


def test_the_summary_shows_the_share_of_each_slice() -> None:
    """Most replays first; the shares of the evidence add up to one."""
    made = draft(CONFIG, record(signals=(evidence(FAINT, 1.0), evidence(CLEAR, 1e-4))), None)
    assert made
    told = summary_of(made, epoch="m0", made_at=BEGIN, budget_per_s=10.0)
    assert told.slices[0].name == "all"
    assert {one.name for one in told.slices} == {"all", "scanner=faint", "scanner=clear"}
    assert sum(one.evidence_share for one in told.slices) == pytest.approx(1.0)
    assert [one.traffic_per_s for one in told.slices if one.name == "scanner=faint"] == pytest.approx([10.0])
    assert told.n_items == 400


def test_lag_scales_every_rate_alike_and_back() -> None:
    """Inclusion probabilities and their bounds keep their ratios, bit for bit."""
    policy = Policy(
        epoch="e",
        header_strata=(HeaderStratum(name="default", rate=0.315),),
        body_strata=(
            BodyStratum(name="a", rate=0.1, where=(Predicate(key="header.x-scanner", equals="a"),)),
            BodyStratum(name="default", rate=0.0063),
        ),
    )
    low = lowered(policy, 2.0**-7)
    assert [s.rate for s in low.header_strata] == [0.315 / 128]
    assert [s.rate for s in low.body_strata] == [0.1 / 128, 0.0063 / 128]
    assert lowered(low, 2.0**7) == policy


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({1: 1e-6, 2: 3e-5}, False),
        ({1: 2e-4, 2: 0.0}, True),
        ({3: 2e-4}, True),
        ({3: 5e-5}, False),
        ({}, False),
    ],
)
def test_a_surge_is_a_hundredfold(now: dict[int, float], *, expected: bool) -> None:
    """Of what the slice had, and of what slices had on average."""
    assert surged({1: 1e-6, 2: 1e-6}, now) is expected


def test_a_policy_has_as_many_strata_as_fit_into_a_directive() -> None:
    """Long values cost boosts, never the directive."""
    n = 300
    rows = record()
    slices = tuple(
        SliceWeight(
            id=number,
            model="digits",
            name=f"parameter={number:03d}" + "v" * 200,
            where=(Predicate(key="parameter.p", equals=f"{number:03d}" + "v" * 200),),
            everything=False,
            weight=3.0,
        )
        for number in range(100, 100 + n)
    )
    items = msgspec.structs.replace(
        rows.items, slice_ids=tuple((ALL, 100 + index % n) for index in range(400))
    )
    wide = msgspec.structs.replace(rows, items=items, slices=(rows.slices[0], *slices))
    made = draft(CONFIG, wide, None, n_strata=512)
    assert made
    assert made.allocation.n_unboosted > 0
    assert len(made.allocation.policy.body_strata) > 32
    wire = encode(PolicyMessage(policy=made.allocation.policy, issued_at=BEGIN, valid_s=900.0))
    assert len(wire) <= MAX_BYTES


@pytest.mark.parametrize("before", [0.0, 0.25])
def test_a_policy_is_not_kept_where_the_configuration_bars_or_admits_a_stratum(before: float) -> None:
    """Sidecars would refuse the one for ever; of the other nothing would be taken, and so nothing be missed."""
    strata = tuple(
        msgspec.structs.replace(s, rate=before if s.name == "archive" else s.rate)
        for s in CONFIG.sampling.header_strata
    )
    now = tuple(
        msgspec.structs.replace(s, rate=0.25 - before if s.name == "archive" else s.rate)
        for s in CONFIG.sampling.header_strata
    )
    then, later = (
        msgspec.structs.replace(CONFIG, sampling=msgspec.structs.replace(CONFIG.sampling, header_strata=of))
        for of in (strata, now)
    )
    first = draft(then, record(), None)
    assert first
    again = draft(then, record(), first.allocation.policy)
    assert again
    assert again.allocation.kept
    changed = draft(later, record(), first.allocation.policy)
    assert changed
    assert not changed.allocation.kept
    wire = encode(PolicyMessage(policy=named(changed.allocation.policy), issued_at=BEGIN, valid_s=900.0))
    assert check_policy(wire, later.sampling, BEGIN.timestamp()).valid_s == 900.0
    assert (changed.allocation.policy.header_strata[0].rate > 0) is (before == 0)


def test_a_policy_with_more_strata_than_are_allowed_now_is_not_kept() -> None:
    """Each exchange carries them: where fewer are allowed, the others must go."""
    first = draft(CONFIG, record(), None)
    assert first
    n = len(first.allocation.policy.body_strata)
    assert n > 2
    again = draft(CONFIG, record(), first.allocation.policy, n_strata=n - 1)
    assert again
    assert len(again.allocation.policy.body_strata) < n
