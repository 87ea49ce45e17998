"""Coverage and width of the estimates of shares, means and differences, with people who come back and unequal weights."""

from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import beta

from quantdrift.facts.arrays import Sample, cluster_sums, shared_sums
from quantdrift.facts.estimate import (
    N_GROUPS,
    ClusterSums,
    Estimate,
    SharedSums,
    correlation,
    difference,
    of_groups,
    ratio,
)
from quantdrift.report.labels import LabelledSlice, labelled
from quantdrift.storage.labels import Drawn, LabelOutcome

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
    if law.weights == "one" and law.sizes == 1:
        return np.ones(law.n), (random.random(law.n) < luck).astype(float), 1.0
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
        pytest.param(Law(1, "one", 0.001, 0.0, 30_000), marks=pytest.mark.release),
        Law(1, "one", 0.3, 0.0, 300),
        pytest.param(Law(1, "exchanges", 0.02, 0.0, 8_000), marks=pytest.mark.release),
        pytest.param(Law(1, "exchanges", 0.05, 0.0, 6_000), marks=pytest.mark.release),
        Law(5, "people", 0.01, 0.1, 9_000),
        pytest.param(Law(5, "exchanges", 0.01, 0.7, 9_000), marks=pytest.mark.release),
        Law(40, "one", 0.01, 0.1, 900),
        Law(40, "people", 0.001, 0.0, 7_000),
        Law(40, "exchanges", 0.05, 0.1, 800),
        Law(200, "one", 0.05, 0.7, 1_500),
        Law(200, "exchanges", 0.3, 0.1, 200),
        pytest.param(Law("any", "one", 0.001, 0.1, 8_000), marks=pytest.mark.release),
        pytest.param(Law("any", "exchanges", 0.01, 0.1, 4_000), marks=pytest.mark.release),
        Law("any", "people", 0.3, 0.7, 3_000),
        Law("long", "one", 0.01, 0.7, 8_000),
        Law("long", "exchanges", 0.3, 0.7, 900),
    ],
    ids=lambda law: "-".join(map(str, law)),
)
def test_a_share_holds_the_truth_and_is_hardly_wider_than_the_sandwich_estimator(law: Law) -> None:
    """With enough events 94 to 97 % of 1,000 seeded runs hold it, and on average the interval is at most 1.2 times as wide.

    At a true coverage of 94 or 97 % the counted one leaves the tested range, which is wider by 1.2 points, with a probability of
    6e-2 at most; the seed is fixed.
    """
    random = np.random.default_rng(20261124)
    held, widths = 0, []
    for _ in range(_RUNS):
        weight, total, heaviest = _people(random, law)
        found = ratio(_sums(weight, total, heaviest))
        held += _holds(found, law.rate)
        low, high = _ends(found)
        widths.append((high - low) / _sandwich(weight, total))
    assert 0.928 <= held / _RUNS <= 0.982
    assert np.mean(widths) <= 1.2


@pytest.mark.parametrize(
    ("law", "least"),
    [
        (Law(1, "one", 0.001, 0.0, 1_000), 0.928),
        (Law(1, "exchanges", 0.002, 0.0, 2_000), 0.928),
        (Law(5, "people", 0.005, 0.1, 300), 0.928),
        (Law("long", "exchanges", 0.01, 0.3, 150), 0.928),
        (Law("any", "one", 0.001, 0.7, 300), 0.87),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, Law) else "",
)
def test_few_events_do_not_make_the_interval_too_narrow(law: Law, least: float) -> None:
    """With less than ten effective events at least 94 % of 1,000 seeded runs hold the truth, but for one law.

    At a true coverage of 95 % fewer than 92.8 % are counted with a probability of 2e-3; the seed is fixed. The last law has
    a third of one person with changes on average, and 89 % hold it: one person says nothing of how alike others are.
    """
    random = np.random.default_rng(7)
    held = sum(_holds(ratio(_sums(*_people(random, law))), law.rate) for _ in range(_RUNS))
    assert held / _RUNS >= least


def _grouped(random: np.random.Generator, weight: Floats, total: Floats, heaviest: float) -> ClusterSums:
    """Return what a roll-up knows of people: their sums in random groups, and the squares of exchanges, here a hundredth of theirs.

    So small squares of exchanges never replace those that the groups give.
    """
    group = random.integers(0, N_GROUPS, len(weight))
    squares = [float(weight @ weight) / 100, float(total @ total) / 100, float(weight @ total) / 100]
    sums = ClusterSums(
        n=len(weight),
        weight=float(weight.sum()),
        weight_sq=squares[0],
        total=float(total.sum()),
        total_sq=squares[1],
        cross=squares[2],
        heaviest=heaviest,
    )
    w, y = (np.bincount(group, one, minlength=N_GROUPS) for one in (weight, total))
    return of_groups(sums, [float(number) for number in (*w, *y, *squares)])


@pytest.mark.release
@pytest.mark.parametrize(
    "law",
    [
        Law(1, "one", 0.3, 0.0, 300),
        Law(5, "people", 0.01, 0.1, 9_000),
        Law(40, "one", 0.01, 0.1, 900),
        Law(40, "exchanges", 0.05, 0.1, 800),
        Law(200, "one", 0.05, 0.7, 1_500),
        Law("any", "exchanges", 0.01, 0.1, 4_000),
        Law("any", "people", 0.3, 0.7, 3_000),
        Law("long", "one", 0.01, 0.7, 8_000),
    ],
    ids=lambda law: "-".join(map(str, law)),
)
def test_random_groups_of_people_hold_the_truth_and_are_hardly_wider_than_people(law: Law) -> None:
    """With 20 events and more 93 to 98 % of 1,000 seeded runs hold it, and the mean width is at most 1.15 times that from people.

    The tested range is wider by 1.5 points on each side: the counted coverage leaves it with a probability of 4e-2 at most where the true
    one is at an end; the seed is fixed.
    """
    random = np.random.default_rng(33)
    held, widths = 0, []
    for _ in range(_RUNS):
        weight, total, heaviest = _people(random, law)
        low, high = _ends(ratio(_grouped(random, weight, total, heaviest)))
        held += low <= law.rate <= high
        alone_low, alone_high = _ends(ratio(_sums(weight, total, heaviest)))
        widths.append((high - low) / (alone_high - alone_low))
    assert 0.915 <= held / _RUNS <= 0.995
    assert np.mean(widths) <= 1.15


def test_groups_merge_over_hours_and_count_who_comes_back() -> None:
    """The same people in ten hours: the groups of all hours together give the interval of the people, and not that of ten times as many."""
    random = np.random.default_rng(34)
    weight = random.integers(1, 20, 500).astype(float)
    total = random.binomial(weight.astype(int), random.beta(0.5, 9.5, 500)).astype(float)
    group = random.integers(0, N_GROUPS, 500)
    w, y = (np.bincount(group, one, minlength=N_GROUPS) for one in (weight, total))
    of_hour = np.array([*w, *y, weight.sum(), total.sum(), total.sum()], dtype=float)
    merged = 10 * of_hour
    exchanges = float(10 * weight.sum())
    changed = float(10 * total.sum())
    sums = ClusterSums(
        n=int(exchanges),
        weight=exchanges,
        weight_sq=exchanges,
        total=changed,
        total_sq=changed,
        cross=changed,
        heaviest=1.0,
    )
    low, high = _ends(ratio(of_groups(sums, [float(number) for number in merged])))
    of_people = _ends(ratio(_sums(10 * weight, 10 * total, 1.0)))
    apart = _ends(ratio(sums))
    assert (high - low) / (of_people[1] - of_people[0]) == pytest.approx(1.0, abs=0.3)
    assert high - low > 3 * (apart[1] - apart[0])


def test_a_share_without_people_is_clopper_and_pearsons() -> None:
    """Equal weights, one exchange each, 30 of 400 changed: the exact interval of SciPy, with Student's t in place of z."""
    flips = np.zeros(400)
    flips[:30] = 1.0
    low, high = _ends(ratio(_sums(np.ones(400), flips, 1.0)))
    assert low == pytest.approx(float(beta.ppf(0.025, 30, 371)), rel=0.01)
    assert high == pytest.approx(float(beta.ppf(0.975, 31, 370)), rel=0.01)
    assert _ends(ratio(_sums(np.ones(400), np.zeros(400), 1.0))) == pytest.approx(
        (0.0, 1 - 0.025 ** (1 / 400))
    )
    low, high = _ends(ratio(_sums(np.ones(400), np.ones(400), 1.0)))
    assert (low, high) == pytest.approx((0.025 ** (1 / 400), 1.0))


def test_the_rare_large_value_has_room_in_the_interval_of_a_mean() -> None:
    """Five values in 1,000 at 2 nat among tiny ones, 400 exchanges: 93 % of 1,000 runs hold the mean; a normal interval 86 %."""
    random = np.random.default_rng(5)
    truth, cap, held, normal = 0.005 * 2.0 + 0.995 * 0.001, 2.0, 0, 0
    for _ in range(_RUNS):
        value = np.where(random.random(400) < 0.005, 2.0, random.exponential(0.001, 400))
        held += _holds(ratio(_sums(np.ones(400), value, 1.0), cap), truth)
        half = _Z * value.std() / 20
        normal += abs(value.mean() - truth) <= half
    assert held / _RUNS >= 0.93
    assert normal / _RUNS < 0.93


@pytest.mark.parametrize("both", [0.0, 0.5, 1.0])
def test_a_difference_counts_people_whom_both_versions_have_answered(both: float) -> None:
    """Some or all people are on both sides, with the same luck: 93.2 to 97.8 % of 800 seeded runs hold the difference.

    At a true coverage of 94.5 or 96.5 % the counted one leaves that range with a probability of 6e-2 at most. Without the
    correlation nearly all runs would hold it where all people are on both sides.
    """
    random = np.random.default_rng(20261125)
    held, runs, n = 0, 800, 500
    for _ in range(runs):
        luck = random.beta(0.05 * 4, 0.95 * 4, 2 * n)
        sides = []
        for worse, first in ((1.0, 0), (0.7, round(n * (1 - both)))):
            people = np.arange(first, first + n)
            cluster = np.repeat(people, random.integers(1, 20, n))
            value = (random.random(len(cluster)) < worse * luck[cluster]).astype(np.float64)
            sides.append(Sample(value, np.ones(len(cluster)), cluster, np.arange(len(cluster))))
        old, new = (cluster_sums(side) for side in sides)
        found = difference(ratio(old), ratio(new), correlation(old, new, shared_sums(*sides)))
        held += _holds(found, -0.3 * 0.05)
    assert 0.932 <= held / runs <= 0.978


def _sides(harm: Floats, helped: Floats) -> dict[str, Any]:
    """Return the sums of labelled answers, each of another person."""
    each = np.ones(len(harm))
    sums = {name: _sums(each, value, 1.0) for name, value in (("harm", harm), ("help", helped))}
    return {
        "n_items": len(harm),
        "n_clusters": len(harm),
        **sums,
        "both_wrong": _sums(each, np.zeros(len(harm)), 1.0),
        "help_and_harm": SharedSums(
            weights=float(len(harm)), old_total=float(helped.sum()), new_total=float(harm.sum()), totals=0.0
        ),
    }


def _labelled(**more: Any) -> LabelledSlice:
    found = labelled(LabelOutcome(model_version_id=1, slice_id=1, slice="all", **more))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("changed", "harm", "helped", "n"),
    [
        pytest.param(0.01, 0.8, 0.05, 50, marks=pytest.mark.release),
        (0.01, 0.5, 0.3, 50),
        pytest.param(0.05, 0.6, 0.2, 50, marks=pytest.mark.release),
        pytest.param(0.2, 0.3, 0.3, 200, marks=pytest.mark.release),
        pytest.param(0.01, 0.1, 0.7, 100, marks=pytest.mark.release),
    ],
)
def test_labels_of_drawn_changed_answers_hold_the_loss(
    changed: float, harm: float, helped: float, n: int
) -> None:
    """20,000 compared answers, `n` of the changed ones labelled: 93.2 to 97.8 % of 1,000 seeded runs hold the loss of accuracy.

    At a true coverage of 94.5 or 96.5 % the counted one leaves that range with a probability of 6e-2 at most.
    """
    random = np.random.default_rng(26)
    truth, held = changed * (harm - helped), 0
    for _ in range(_RUNS):
        n_changed = random.binomial(20_000, changed)
        fate = random.random(min(n, n_changed))
        sides = _sides((fate < harm).astype(float), (fate > 1 - helped).astype(float))
        flips = np.zeros(20_000)
        flips[:n_changed] = 1.0
        drawn = Drawn(changed=_sums(np.ones(20_000), flips, 1.0), **sides)
        held += _holds(_labelled(drawn=drawn).loss, truth)
    assert 0.932 <= held / _RUNS <= 0.978


@pytest.mark.release
def test_fifty_drawn_labels_say_as_much_as_ten_thousand_that_came_by_themselves() -> None:
    """Of 1 % changed answers, of which 80 % became wrong and 5 % right: the mean width of 200 seeded runs is at most as large."""
    random = np.random.default_rng(27)
    widths = []
    for _ in range(200):
        flips = (random.random(100_000) < 0.01).astype(float)
        fate = random.random(100_000)
        harm, helped = flips * (fate < 0.8), flips * (fate > 0.95)
        came = _labelled(**_sides(harm[:10_000], helped[:10_000]))
        chosen = np.flatnonzero(flips)[:50]
        drawn = Drawn(changed=_sums(np.ones(100_000), flips, 1.0), **_sides(harm[chosen], helped[chosen]))
        few = _labelled(drawn=drawn)
        widths.append([high - low for low, high in map(_ends, (few.loss, came.loss))])
    few_width, came_width = np.mean(widths, axis=0)
    assert few_width <= came_width
