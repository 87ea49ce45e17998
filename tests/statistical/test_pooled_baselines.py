"""Baselines of the tail that siblings lend to a slice with too little of its own, when their tails are not the same.

Four siblings of 12,000 groups, whose divergences differ by a factor, as each states. Every simulation is seeded and
states its failure probability.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from quantdrift.drift.detectors.tail import pooled_histogram
from quantdrift.drift.detectors.tail.pooled_histogram import TailBaseline
from quantdrift.drift.detectors.tail.quantile import N_BINS, tail_bin
from quantdrift.drift.evidence.observations import STEPS
from tests.support.monitor.change_streams import block
from tests.support.monitor.tail_streams import HEALTHY, STRETCHED, TAIL, baseline, last, observed

pytestmark = pytest.mark.statistical

ALIKE, UNLIKE = (1.0, 1.0, 1.0, 1.0), (0.6, 0.8, 1.0, 1.3)
STREAMS, N = 20, 4096
Pool = Callable[[Sequence[TailBaseline]], TailBaseline]


def as_it_is(contents: Sequence[TailBaseline]) -> TailBaseline:
    """Return the siblings' counts together with the tolerance of one of them: as if they were all the same."""
    return msgspec.structs.replace(pooled_histogram.pool(contents), tau=contents[0].tau)


def alarms(siblings: Sequence[float], own: float, threshold: float, *, pool: Pool, stretched: bool) -> float:
    """Return the share of streams that alarm within N groups of divergences times `own`, each with its own siblings."""
    rng = np.random.default_rng(1)
    states = []
    for _ in range(STREAMS):
        counts = [
            np.bincount(tail_bin(one * HEALTHY.draw(rng, (12_000,))), minlength=N_BINS) for one in siblings
        ]
        pooled = pool([baseline(one.astype(np.float64), tau=0.25) for one in counts])
        states.append(TAIL.from_content(pooled, scale=1.0, mass=0.0, at_us=0))
    now, alarmed = np.stack(states), np.zeros(STREAMS, dtype=bool)
    law = STRETCHED if stretched else HEALTHY
    for first in range(0, N, STEPS):
        x = own * law.draw(rng, (STEPS, STREAMS))
        path = TAIL.run(now, block(observed(tail_bin(x)), first=first))
        hit = (path.page >= threshold).any(axis=0)
        alarmed |= hit
        now = last(path)
        now[hit] = states[0]  # evidence that nobody resets would grow without end
        if alarmed.all():
            break
    return float(alarmed.mean())


@pytest.mark.parametrize(
    ("siblings", "own"), [(ALIKE, 1.0), (UNLIKE, 0.6), (UNLIKE, 1.3)], ids=["alike", "lightest", "heaviest"]
)
def test_a_slice_like_any_of_its_siblings_stays_inside_the_bound(
    siblings: tuple[float, ...], own: float
) -> None:
    """P(alarm within n) <= 1/4 at A = 4 n; 20 streams, more than 0.65 of them has P < 1e-4 were it attained."""
    assert alarms(siblings, own, 4.0 * N, pool=pooled_histogram.pool, stretched=False) <= 0.65


def test_siblings_taken_for_the_same_break_the_bound() -> None:
    """The heaviest of them alarms in every stream on a pool whose tolerance was not widened."""
    assert alarms(UNLIKE, 1.3, 4.0 * N, pool=as_it_is, stretched=False) > 0.65


@pytest.mark.parametrize(("siblings", "own"), [(ALIKE, 1.0), (UNLIKE, 1.3)], ids=["alike", "heaviest"])
def test_a_stretched_tail_is_still_found(siblings: tuple[float, ...], own: float) -> None:
    """The top 1 % times three, at A = 4e6: in nine of ten streams within 4,096 groups.

    Medians seen: 670 groups on siblings that are alike (590 on a baseline of its own), 1,020 for the heaviest of
    siblings that are not; for one in their middle 3,300, and the lightest is not found.
    """
    assert alarms(siblings, own, 4e6, pool=pooled_histogram.pool, stretched=True) >= 0.9


def test_the_tolerance_is_widened_by_what_siblings_differ_and_by_little_else() -> None:
    """By less than 1.5 for the noise of 12,000 groups, by 1.8 and more where the heaviest is 1.3 times the others.

    A single sibling is not widened at all, nor are some that are too short to tell.
    """
    rng = np.random.default_rng(2)

    def contents(siblings: Sequence[float], n: int) -> list[TailBaseline]:
        return [
            baseline(
                np.bincount(tail_bin(one * HEALTHY.draw(rng, (n,))), minlength=N_BINS).astype(np.float64),
                tau=0.25,
            )
            for one in siblings
        ]

    assert 1.25 <= pooled_histogram.pool(contents(ALIKE, 12_000)).tau + 1 < 1.25 * 1.5
    assert pooled_histogram.pool(contents(UNLIKE, 12_000)).tau + 1 > 1.25 * 1.8
    assert pooled_histogram.pool(contents((1.3,), 12_000)).tau == pytest.approx(0.25)
    assert pooled_histogram.pool(contents(UNLIKE, 20)).tau == pytest.approx(0.25)
    blank = baseline(np.zeros(N_BINS), tau=0.25)
    assert pooled_histogram.pool([blank, blank]).tau == 0.25
