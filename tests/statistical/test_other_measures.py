"""How often the list of other measures that moved contains a measure that did not."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from quantdrift.drift.explain.moves import LEVEL, MeasuredItems, moves

pytestmark = pytest.mark.statistical

N_MEASURES = 20
N_RUNS = 200
Draw = Callable[[np.random.Generator, tuple[int, int]], npt.NDArray[np.float64]]


def _window(rng: np.random.Generator, draw: Draw, n: int) -> MeasuredItems:
    """Return a window of `n` exchanges with unequal weights, of one to three items that are alike."""
    cluster = np.repeat(np.arange(n), rng.integers(1, 4, n))
    of_clusters = draw(rng, (N_MEASURES, n))
    return MeasuredItems(
        weight=rng.choice([1.0, 2.0, 4.0], n)[cluster] / np.bincount(cluster)[cluster],
        cluster=cluster,
        values={f"m{number}": of_clusters[number][cluster] for number in range(N_MEASURES)},
    )


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, shape: rng.normal(size=shape),
        lambda rng, shape: rng.exponential(size=shape),
        lambda rng, shape: (rng.random(shape) < 0.002).astype(float),
        lambda rng, shape: (rng.random(shape) < 0.05).astype(float),
        lambda rng, shape: (rng.random(shape) < 0.5).astype(float),
    ],
    ids=["normal", "exponential", "1 of 500", "1 of 20", "half"],
)
@pytest.mark.parametrize(
    ("n_before", "n_after"),
    [
        (1_000, 10),
        pytest.param(100, 30, marks=pytest.mark.release),
        pytest.param(30, 300, marks=pytest.mark.release),
    ],
)
def test_few_alerts_name_what_did_not_move(draw: Draw, n_before: int, n_after: int) -> None:
    """Twenty measures of which none moved, rare, skewed and discrete ones among them, in windows of any size.

    The bound is one alert in a thousand that names any: two of 200 come by chance once in fifty such tests.
    """
    rng = np.random.default_rng(17)
    named = sum(
        bool(moves(_window(rng, draw, n_before), _window(rng, draw, n_after)).found) for _ in range(N_RUNS)
    )
    assert named <= 1 + LEVEL * N_RUNS


def test_what_moved_is_named() -> None:
    """A measure that trebled, among nineteen that stayed, in a window of 120: at least 95 times of 100."""
    rng = np.random.default_rng(18)
    n_found = 0
    for _ in range(100):
        before = _window(rng, lambda rng, shape: rng.exponential(size=shape), 1_000)
        after = _window(rng, lambda rng, shape: rng.exponential(size=shape), 120)
        moved = {**after.values, "m3": 3 * after.values["m3"]}
        found = moves(before, MeasuredItems(weight=after.weight, cluster=after.cluster, values=moved)).found
        n_found += [one.name for one in found] == ["m3"]
    assert n_found >= 95


def test_what_rounding_moves_is_not_named() -> None:
    """A measure that is 1 in each item, in windows whose means differ by the rounding of their sums."""
    constant = {"overlap": np.ones(300), "moved": np.zeros(300)}
    before = MeasuredItems(weight=np.ones(300), cluster=np.arange(300), values=constant)
    after = MeasuredItems(
        weight=np.ones(300),
        cluster=np.arange(300),
        values={"overlap": np.full(300, 1 + 4e-16), "moved": np.ones(300)},
    )
    assert [move.name for move in moves(before, after).found] == ["moved"]
