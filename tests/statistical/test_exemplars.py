"""Random exemplars are a fair sample of their slice, whatever its traffic and its damage do.

Seeds are fixed: each test states with which probability another seed would fail.
"""

from datetime import UTC, datetime

import numpy as np
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.records import ExemplarKind
from quantdrift.core.stream.config import EXEMPLARS_EACH
from quantdrift.shadow.pipeline.exemplars import Chooser, DamageLimits
from tests.support.shadow.compared_exchanges import compared_of, item_of

pytestmark = pytest.mark.statistical

FLIPPED, FINE = compared_of(item_of(flip=True)), compared_of(item_of())
N_STREAMS = 300


def test_the_weighted_number_of_random_exemplars_is_unbiased_in_a_burst_of_damage() -> None:
    """In 300 streams with bursts of ten times the traffic, of which half flips, weights give flips and exchanges back.

    Another seed fails with a probability of about 1e-4 (4 standard errors, twice).
    """
    rng = np.random.default_rng(17)
    errors = np.empty((N_STREAMS, 2))
    for stream in range(N_STREAMS):
        clock = ManualClock(datetime(2026, 11, 23, tzinfo=UTC))
        chooser = Chooser({"digits": DamageLimits(divergence=0.5)}, clock, rng.random)
        true, found = np.zeros(2), np.zeros(2)
        for minute in range(60):
            burst = 20 <= minute < 25
            n = int(rng.poisson(40 if burst else 4))
            clock.advance(60.0)
            flips = rng.random(n) < (0.5 if burst else 0.05)
            if not n:
                continue
            true += flips.sum(), n
            for one in chooser.choose([FLIPPED if flip else FINE for flip in flips]):
                if one.kind is ExemplarKind.RANDOM:
                    assert one.probability is not None
                    found += np.array([one.compared is FLIPPED, 1.0]) / one.probability
        errors[stream] = (found - true) / true.mean()
    mean, error = errors.mean(axis=0), errors.std(axis=0, ddof=1) / np.sqrt(N_STREAMS)
    assert (np.abs(mean) < 4 * error).all(), (mean, error)


@pytest.mark.parametrize("per_second", [0.01, 1.0, 20.0])
def test_at_any_rate_some_64_an_hour_are_drawn_at_most(per_second: float) -> None:
    """A slice that has less keeps everything. Another seed fails with a probability below 1e-4."""
    rng = np.random.default_rng(23)
    clock = ManualClock(datetime(2026, 11, 23, tzinfo=UTC))
    chooser = Chooser({"digits": DamageLimits(divergence=0.5)}, clock, rng.random)
    hours, drawn, seen = 4, 0, 0
    for _ in range(hours * 360):
        clock.advance(10.0)
        if n := int(rng.poisson(10 * per_second)):
            seen += n
            drawn += len(list(chooser.choose([FINE] * n)))
    expected = min(
        seen, (hours + 1) * EXEMPLARS_EACH
    )  # one more of the first batches, before the rate is known
    assert drawn <= expected + 5 * np.sqrt(expected)
    assert drawn >= min(seen, hours * EXEMPLARS_EACH) - 5 * np.sqrt(hours * EXEMPLARS_EACH)
