"""Histograms of the divergence over tokens, and the quantiles of their sums."""

import math
from collections import Counter

import numpy as np
import pytest

from quantdrift.core.token_histogram import counts_of, histogram, quantiles_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_of_a_sum_are_those_of_all_tokens(seed: int) -> None:
    """Within 22 %, however the tokens are divided into answers; the quantile of a sample is a value that occurred, so nothing is left to chance."""
    rng = np.random.default_rng(seed)
    answers = [10 ** rng.normal(-3, 1.2, size=rng.integers(1, 200)) for _ in range(300)]
    pooled: Counter[int] = Counter()
    for answer in answers:
        pooled.update(counts_of(histogram(answer.tolist())))
    tokens = np.sort(np.concatenate(answers))
    found = quantiles_of(pooled, pooled.total())
    assert found is not None
    assert found.tokens == len(tokens)
    for share, value in ((0.5, found.median), (0.99, found.p99), (0.999, found.p999)):
        assert value == pytest.approx(tokens[math.ceil(share * len(tokens)) - 1], rel=0.22)


def test_the_ends_have_bins_of_their_own() -> None:
    """What is next to nothing is 0, what has no limit is in the highest bin, and what is not known is in none."""
    assert histogram([0.0, 1e-7, math.nan, math.inf, 1e9]) == "0:2 49:2"
    assert quantiles_of({}, 0) is None
    found = quantiles_of({0: 999.0, 49: 1.0}, 1000)
    assert found is not None
    assert (found.median, found.p99) == (0.0, 0.0)
