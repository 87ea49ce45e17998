"""Groups of more than one item, and samples whose policy differs from pod to pod or changes with time.

Nothing drifts here. Every simulation is seeded and states its failure probability; each claim is put to a wrong way
of doing it as well, which the same check must reject.
"""

from collections.abc import Callable

import numpy as np
import pytest

from quantdrift.core.config.strata import MARGIN
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.core.sampling.inclusion import smallest_rate
from quantdrift.drift.detectors.change.baseline import Baseline
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS
from quantdrift.drift.detectors.tail.quantile import tail_bin
from quantdrift.drift.evidence.group import group_value
from quantdrift.drift.evidence.margin import EDGES, N_BINS, margin_bin
from quantdrift.drift.evidence.observations import STEPS, FloatArray, IntArray, ObservationBlock
from tests.support.monitor import tail_streams
from tests.support.monitor.change_streams import CHANGE, SURE, baseline, block, observed
from tests.support.monitor.tail_streams import HEALTHY, TAIL

pytestmark = pytest.mark.statistical

M = 0.01
STREAMS = 96
SLACK = 0.2  # more than four standard errors of a share of 1/4 of 96 streams: P < 1e-4
Draw = Callable[[int], ObservationBlock]


def alarms(kind: str, states: FloatArray, draw: Draw, n: int, factor: float = 1.0) -> float:
    """Return the share of streams that alarm within n groups at A = `factor` * 4 n on the sample clock."""
    alarmed = np.zeros(len(states), dtype=bool)
    start = states
    for first in range(0, n, STEPS):
        path = DETECTORS[kind].run(states, draw(first))
        hit = (path.page >= factor * 4.0 * n).any(axis=0)
        alarmed |= hit
        states = path.stopped(np.full(len(states), STEPS - 1))
        states[hit] = start[hit]  # evidence that nobody resets would grow without end
    return float(alarmed.mean())


def budget_states(*, weighted: bool) -> FloatArray:
    """Return signals with a budget of 1 %."""
    one = BUDGET.fresh(budget=M, scale=1.0, weighted=weighted, mass=0.0, at_us=0)
    return np.tile(one, (STREAMS, 1))


def pairs(vx: FloatArray, v: FloatArray, first: int) -> ObservationBlock:
    """Return values and weights, (steps, streams) each, as a block."""
    return block(np.stack((vx, v), axis=-1), first=first)


POLICIES = (
    (0.5, 0.25),
    (1.0, 0.05),
)  # of two pods: probability of a flipping item's stratum, and of the other's


@pytest.mark.parametrize("rule", ["each with its own c", "one c for all, weights cut at 1"])
def test_epochs_that_are_mixed_across_pods_stay_inside_the_bound(rule: str) -> None:
    """Half of the items are of a stratum that flips at 2 % and is boosted, the others never flip: 1 %, the budget.

    Pods change to the next policy at times of their own, so that their epochs are mixed. Each group has the c and
    pi of its own: P(alarm within n) <= 1/4 at A = 4 n, n = 2,048. With one c for all weights that pass 1 are cut.
    """
    rng = np.random.default_rng(1)

    def draw(first: int) -> ObservationBlock:
        shape = (STEPS, STREAMS)
        policy = (rng.random(shape) < 0.5).astype(int)
        flipping, other = (np.array([one[part] for one in POLICIES])[policy] for part in (0, 1))
        chosen = rng.random(shape) < flipping / (flipping + other)  # given that it was taken
        pi = np.where(chosen, flipping, other)
        c = np.minimum(flipping, other) if rule.startswith("each") else np.full(shape, 0.5)
        x = (rng.random(shape) < 0.02) & chosen
        v = np.minimum(c / pi, 1.0)
        return pairs(v * x, v, first)

    share = alarms("budget", budget_states(weighted=True), draw, 2048)
    assert (share <= 0.25 + SLACK) == rule.startswith("each")


def test_a_group_of_another_policy_than_it_says_is_refused() -> None:
    """With the c of the other pod's policy v is above 1, which the group's value refuses by name."""
    for own, other in (POLICIES, POLICIES[::-1]):
        assert 0 < group_value([1.0], [own[1]], min(own), 1).v <= 1
        if min(other) > min(own):
            with pytest.raises(ValueError, match="above 1"):
                group_value([1.0], [own[1]], min(other), 1)


@pytest.mark.parametrize("whole", [True, False], ids=["groups", "items as if independent"])
@pytest.mark.parametrize("kind", ["change", "tail"])
def test_items_of_one_group_are_one_observation(kind: str, *, whole: bool) -> None:
    """Groups of eight items that are all alike, against a baseline of such: n = 512 groups, A = 4 n.

    As eight observations each, they are far more extreme than a baseline of as many independent ones allows.
    """
    rng, n_items, n = np.random.default_rng(2), 8, 512
    if kind == "change":
        events = rng.binomial(750, 0.05, STREAMS) * (1 if whole else n_items)
        n_known = 750 * (1 if whole else n_items)
        states = np.stack(
            [
                CHANGE.from_content(baseline(n_known, float(k), tau=0.0), scale=1.0, mass=0.0, at_us=0)
                for k in events
            ]
        )
    else:
        states = tail_streams.learned(rng, STREAMS, 1000, tau=0.0, bound=1.0)
        if not whole:
            states = np.stack(
                [
                    TAIL.from_content(
                        tail_streams.baseline(
                            np.array(TAIL.content(one).counts) * n_items, tau=0.0, bound=1.0
                        ),
                        scale=1.0,
                        mass=0.0,
                        at_us=0,
                    )
                    for one in states
                ]
            )
    times = 1 if whole else n_items

    def draw(first: int) -> ObservationBlock:
        shape = (STEPS // times, STREAMS)
        if kind == "change":
            shown = observed((rng.random(shape) < 0.05).astype(np.float64))
        else:
            shown = tail_streams.observed(tail_bin(HEALTHY.draw(rng, shape)))
        return block(np.repeat(shown, times, axis=0), first=first)

    share = alarms(kind, states, draw, n * times)
    assert (share <= 0.25 + SLACK) == whole


# A slice whose policy changes: boosts of small margins come when the first flips have been seen there.
EDGE = EDGES[8]
PLAIN = Policy(
    epoch="a",
    header_strata=(HeaderStratum(name="default", rate=1.0),),
    body_strata=(BodyStratum(name="default", rate=0.1),),
)
BOOSTED = Policy(
    epoch="b",
    header_strata=PLAIN.header_strata,
    body_strata=(
        BodyStratum(name="close", rate=0.4, where=(Predicate(key=MARGIN, high=EDGE),)),
        *PLAIN.body_strata,
    ),
)
MARGINS, SHARES = np.array([0.5 * EDGE, 2 * EDGE]), np.array([0.1, 0.9])
SCALES, FLIPS = np.array([6.0, 1.0]), np.array([0.2, 0.02])  # divergences and flips at these margins
BINS = np.array([margin_bin(float(one)) for one in MARGINS])


def rates(policy: Policy, *, by_margin: bool) -> FloatArray:
    """Return with which probability items of each margin are seen by a detector without weights."""
    wheres = (
        (Predicate(key=MARGIN, low=0.0, high=None if place == N_BINS - 1 else EDGES[place]),)
        for place in BINS
    )
    return np.array([smallest_rate(where if by_margin else (), policy) for where in wheres])


def places(rng: np.random.Generator, policy: Policy, shape: tuple[int, ...], *, by_margin: bool) -> IntArray:
    """Return which margin each item that is seen has."""
    seen = SHARES * rates(policy, by_margin=by_margin)
    return rng.choice(2, shape, p=seen / seen.sum())


@pytest.mark.parametrize("by_margin", [False, True], ids=["one rate for the slice", "a rate per margin bin"])
def test_a_tail_without_strata_sees_all_of_its_slice_with_one_rate(*, by_margin: bool) -> None:
    """A boost of small margins, where divergences are large, comes after the baseline: n = 4,096, tau = 0.25.

    Thinned to the smallest rate of the slice nothing has changed: <= 1/4 at A = 4 n. Thinned to that of its margin
    bin an item's chance depends on the epoch, the mix of margins moves with the policy, and most streams alarm.
    """
    rng = np.random.default_rng(3)

    def bins(policy: Policy, shape: tuple[int, ...]) -> IntArray:
        scale = SCALES[places(rng, policy, shape, by_margin=by_margin)]
        return tail_bin(scale * HEALTHY.draw(rng, shape))

    states = np.stack(
        [
            TAIL.from_content(
                tail_streams.baseline(
                    np.bincount(bins(PLAIN, (12_000,)), minlength=TAIL.width).astype(np.float64), tau=0.25
                ),
                scale=1.0,
                mass=0.0,
                at_us=0,
            )
            for _ in range(32)
        ]
    )
    share = alarms(
        "tail",
        states,
        lambda first: block(tail_streams.observed(bins(BOOSTED, (STEPS, 32))), first=first),
        4096,
    )
    assert (share <= 0.25 + 0.35) == (not by_margin)


WHOLE, INSIDE, WEIGHTED = "edge between strata", "edge inside a stratum", "edge inside a stratum, weighted"


@pytest.mark.parametrize(
    "rule",
    [
        WHOLE,
        pytest.param(INSIDE, marks=pytest.mark.release),
        pytest.param(WEIGHTED, marks=pytest.mark.release),
    ],
)
def test_a_rate_per_margin_bin_is_harmless_where_its_edges_are_those_of_the_strata(rule: str) -> None:
    """The same boost, seen by the detector of change, which tells margins apart: <= 1/4 at A = 4 n, tau = 0.25.

    Only while no testing stratum holds margins of two rates: where all items are in one, the policy is a change,
    unless items count by the slice's smallest rate over that of their bin.
    """
    rng, n = np.random.default_rng(4), 4096
    where = BINS if rule == WHOLE else np.full(2, SURE)
    share, total = np.zeros(N_BINS), np.zeros(N_BINS)
    np.add.at(share, where, 20_000 * SHARES)
    np.add.at(total, where, 20_000 * SHARES * FLIPS)
    known = Baseline(share=tuple(share), total=tuple(total), n_groups=20_000, tau=0.25).settled()
    assert len(known.bounds) == len(set(where.tolist()))
    states = np.tile(CHANGE.from_content(known, scale=1.0, mass=0.0, at_us=0), (STREAMS, 1))
    seen = rates(BOOSTED, by_margin=True)
    counts = seen.min() / seen if rule == WEIGHTED else np.ones(2)

    def draw(first: int) -> ObservationBlock:
        place = places(rng, BOOSTED, (STEPS, STREAMS), by_margin=True)
        x = (rng.random(place.shape) < FLIPS[place]).astype(np.float64)
        return block(observed(x, where[place]) * counts[place][..., None], first=first)

    assert (alarms("change", states, draw, n) <= 0.25 + SLACK) == (rule != INSIDE)
