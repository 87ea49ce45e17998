"""Coverage and width of the estimates of shares, means and differences, with people who come back and unequal weights."""

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import beta, t

from quantdrift.facts.arrays import Sample, cluster_sums, shared_sums
from quantdrift.facts.estimate import ClusterSums, Estimate, correlation, difference, ratio
from quantdrift.facts.quantiles import beta_quantile, t_quantile

pytestmark = pytest.mark.statistical

_Z = 1.959963984540054
_PI = np.array((0.02, 0.2, 1.0))
_OFFERED = np.array((0.6, 0.3, 0.1))
_DRAWN = _OFFERED * _PI / (_OFFERED * _PI).sum()
_RUNS = 1000
Floats = NDArray[np.float64]


class Law(NamedTuple):
    """How people send exchanges whose answers change.

    Parameters
    ----------
    sizes
        Exchanges of a person: a number; `any`: 1 to 200, uniformly; `long`: geometric with the mean 40, at most 200.
    weights
        `one`: all are sampled. `people` and `exchanges`: each is sampled with a probability of .02, .2 or 1.
    rate, alike
        Share of changed answers, and the correlation of those of one person.
    n
        People.
    """

    sizes: int | str
    weights: str
    rate: float
    alike: float
    n: int


def _people(random: np.random.Generator, law: Law) -> tuple[Floats, Floats, float]:
    """Draw the weights and the weighted totals of all people, and the largest weight of an exchange."""
    if law.sizes == "any":
        sizes = random.integers(1, 201, law.n)
    elif law.sizes == "long":
        sizes = np.minimum(random.geometric(1 / 40, law.n), 200)
    else:
        sizes = np.full(law.n, int(law.sizes))
    luck = np.full(law.n, law.rate)
    if law.alike:
        strength = 1 / law.alike - 1
        luck = random.beta(law.rate * strength, (1 - law.rate) * strength, law.n)
    if law.weights == "one":
        return sizes.astype(float), random.binomial(sizes, luck).astype(float), 1.0
    if law.weights == "people":
        weight = 1 / _PI[random.choice(3, law.n, p=_DRAWN)]
        return weight * sizes, weight * random.binomial(sizes, luck), float(weight.max())
    counts = random.multinomial(sizes, _DRAWN)
    return counts @ (1 / _PI), random.binomial(counts, luck[:, None]) @ (1 / _PI), 1 / float(_PI[0])


def _sums(weight: Floats, total: Floats, heaviest: float) -> ClusterSums:
    return ClusterSums(
        n=len(weight),
        weight=float(weight.sum()),
        weight_sq=float(weight @ weight),
        total=float(total.sum()),
        total_sq=float(total @ total),
        cross=float(weight @ total),
        heaviest=heaviest,
        largest=float(weight.max()),
    )


def _sandwich(weight: Floats, total: Floats) -> float:
    """Return the width of the normal interval with the variance that statistics packages call cluster-robust."""
    residual = total - total.sum() / weight.sum() * weight
    n = len(weight)
    return 2 * _Z * sqrt(n / (n - 1) * float(residual @ residual)) / float(weight.sum())


def _ends(found: Estimate | None) -> tuple[float, float]:
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def _holds(found: Estimate | None, truth: float) -> bool:
    low, high = _ends(found)
    return low <= truth <= high


@pytest.mark.parametrize(
    "law",
    [
        Law(1, "one", 0.001, 0.0, 30_000),
        Law(1, "one", 0.3, 0.0, 300),
        Law(1, "exchanges", 0.005, 0.0, 25_000),
        Law(1, "exchanges", 0.05, 0.0, 6_000),
        Law(5, "people", 0.01, 0.1, 9_000),
        Law(5, "exchanges", 0.01, 0.7, 9_000),
        Law(40, "one", 0.01, 0.1, 900),
        Law(40, "people", 0.001, 0.0, 7_000),
        Law(40, "exchanges", 0.05, 0.1, 800),
        Law(200, "one", 0.05, 0.7, 1_500),
        Law(200, "exchanges", 0.3, 0.1, 200),
        Law("any", "one", 0.001, 0.1, 8_000),
        Law("any", "exchanges", 0.01, 0.1, 4_000),
        Law("any", "people", 0.3, 0.7, 3_000),
        Law("long", "one", 0.01, 0.7, 8_000),
        Law("long", "exchanges", 0.3, 0.7, 900),
    ],
    ids=lambda law: "-".join(map(str, law)),
)
def test_a_share_holds_the_truth_and_is_hardly_wider_than_the_sandwich_estimator(law: Law) -> None:
    """With enough events 94 to 97 % of 2,000 seeded runs hold it, and on average the interval is at most 1.2 times as wide.

    At a true coverage of 94 or 97 % the counted one leaves the tested range, which is wider by 1.2 points, with a probability of
    1e-2 at most; the seed is fixed. Until here a person counted as one exchange: up to five times as wide, and 100 % held it.
    """
    random = np.random.default_rng(20261124)
    held, widths = 0, []
    for _ in range(_RUNS):
        weight, total, heaviest = _people(random, law)
        found = ratio(_sums(weight, total, heaviest))
        held += _holds(found, law.rate)
        low, high = _ends(found)
        widths.append((high - low) / _sandwich(weight, total))
    print(law, held / _RUNS, np.mean(widths))
    assert 0.928 <= held / _RUNS <= 0.982
    assert np.mean(widths) <= 1.2
