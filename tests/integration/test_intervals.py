"""The interval of a mean in the database, and in the library: one number."""

import asyncpg
import numpy as np
import pytest

from quantdrift.facts.estimate import N_GROUPS, ClusterSums, of_groups, ratio

pytestmark = pytest.mark.integration


def _random_sums(random: np.random.Generator) -> tuple[ClusterSums, list[float], float]:
    """Draw exchanges of people and of nobody, whose values are flips or up to a cap, with the sums of their groups."""
    n = int(random.integers(1, 400))
    cap = float(random.choice([1.0, 2.0, 10.0]))
    rate = float(random.choice([0.0, 0.001, 0.05, 0.4, 0.7, 1.0]))
    value = cap * (random.random(n) < rate) * random.choice([1.0, random.random()])
    w = 1 / random.choice([0.02, 0.3, 1.0], n)
    y = w * value
    who = random.integers(-1, 40, n)
    sums = ClusterSums(
        n=n,
        weight=float(w.sum()),
        weight_sq=float(w @ w),
        total=float(y.sum()),
        total_sq=float(y @ y),
        cross=float(w @ y),
        heaviest=float(w.max()),
    )
    if random.random() < 0.3:
        return sums, [], cap
    has, group = who >= 0, who % N_GROUPS
    people = [
        *np.bincount(group[has], w[has], minlength=N_GROUPS),
        *np.bincount(group[has], y[has], minlength=N_GROUPS),
        float(w[has] @ w[has]),
        float(y[has] @ y[has]),
        float(w[has] @ y[has]),
    ]
    return sums, [float(number) for number in people], cap


async def test_the_database_and_the_library_give_one_interval(record: asyncpg.Connection) -> None:
    """Of 500 seeded draws, with people and without, rare and frequent, each end is the same to the twelfth digit."""
    random = np.random.default_rng(33)
    n_with_ends = 0
    for _ in range(500):
        sums, people, cap = _random_sums(random)
        wanted = ratio(of_groups(sums, people), cap)
        ends = await record.fetchval(
            "select mean_interval($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            sums.n,
            sums.weight,
            sums.weight_sq,
            sums.total,
            sums.total_sq,
            sums.cross,
            sums.heaviest,
            people or None,
            cap,
        )
        assert wanted is not None
        assert ends == pytest.approx([wanted.low, wanted.high], rel=1e-12, abs=1e-15)
        n_with_ends += wanted.high != wanted.low
    assert n_with_ends > 400


async def test_arrays_are_added_and_summed_by_element(record: asyncpg.Connection) -> None:
    """An array that is null counts as nothing, so hours without people leave those of others as they are."""
    assert await record.fetchval("select array_added(array[1, 2]::float8[], array[3, 4])") == [4, 6]
    assert await record.fetchval("select array_added(null, array[3, 4]::float8[])") == [3, 4]
    summed = "select array_sum(a) from (values (array[1, 2]::float8[]), (null), (array[10, 20])) as each (a)"
    assert await record.fetchval(summed) == [11, 22]
    assert await record.fetchval("select array_sum(a) from (values (null::float8[])) as each (a)") is None


async def test_nothing_has_no_interval(record: asyncpg.Connection) -> None:
    """Neither an empty hour nor a row of an earlier release, whose squares are null."""
    assert await record.fetchval("select mean_interval(0, 0, 0, 0, 0, 0, 0)") is None
    assert await record.fetchval("select mean_interval(5, 5, null, 1, null, null, null)") is None
