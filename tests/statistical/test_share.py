"""Shares that fall where samples are lost: healthy mixes keep to the bound, and a slice that loses nine tenths is found."""

import numpy as np
import pytest

from quantdrift.drift.evidence.observations import BoolArray, FloatArray
from quantdrift.drift.share import (
    ERROR,
    HISTORY_H,
    KEPT_YOUNG,
    Shares,
    fallen,
    in_window,
    leave_out,
    usable_hours,
)

pytestmark = pytest.mark.statistical

DAYS, SLICES = 7, 20


def mixes(
    rng: np.random.Generator, *, per_hour: float, swing: float, day_to_day: float, pi: float = 1.0
) -> tuple[FloatArray, FloatArray]:
    """Return the mean samples of slices, (SLICES, hours), and of all traffic, (hours,).

    Traffic swings by e^1 around its mean in a day, each share by e^`swing` with a phase of its own, and each day by chance.
    """
    hours = np.arange(24 * DAYS)
    share = np.exp(rng.uniform(np.log(0.002), np.log(0.2), SLICES))[:, None]
    phase = rng.uniform(0, 24, SLICES)[:, None]
    days = np.repeat(rng.normal(0.0, day_to_day, (SLICES, DAYS)), 24, axis=1)
    traffic = per_hour * np.exp(np.sin(2 * np.pi * (hours - 9) / 24))
    return pi * traffic * share * np.exp(swing * np.sin(2 * np.pi * (hours - phase) / 24) + days), traffic


def flagged(rng: np.random.Generator, mean: FloatArray, traffic: FloatArray, *, pi: float = 1.0) -> BoolArray:
    """Return whose share has fallen, (hours, slices), at looks at the end of each hour, as the monitor takes them."""
    n = rng.poisson(mean).astype(np.float64)
    total = rng.poisson(traffic).astype(np.float64)
    usable = np.ones((SLICES, 1), dtype=np.bool_)
    looks = []
    for hour in range(1, len(total)):
        some = slice(max(0, hour + 1 - HISTORY_H), hour + 1)
        shares = Shares(weight=n[:, some] / pi, weight_sq=n[:, some] / pi**2, total=total[some])
        usable = np.concatenate((usable, np.ones((SLICES, 1), dtype=np.bool_)), axis=1)
        found = fallen(shares, usable[:, some], n_slices=SLICES)
        leave_out(usable[:, some], found, np.zeros(HISTORY_H, dtype=np.bool_))
        looks.append(found.fallen)
    return np.array(looks)


@pytest.mark.parametrize(
    ("per_hour", "swing", "day_to_day", "pi"),
    [
        (1_000.0, 1.0, 0.1, 1.0),
        pytest.param(20_000.0, 0.5, 0.1, 1.0, marks=pytest.mark.release),
        pytest.param(200_000.0, 0.5, 0.1, 0.2, marks=pytest.mark.release),
        pytest.param(1_000.0, 0.0, 0.0, 0.5, marks=pytest.mark.release),
    ],
)
def test_healthy_mixes_of_the_day_are_not_flagged(
    per_hour: float, swing: float, day_to_day: float, pi: float
) -> None:
    """Shares that swing 2.7 times (7.4 with little traffic) in a day, days that differ by a tenth: 1 % of versions at most.

    60 versions of 20 slices over a week: none may be flagged in any hour. At the bound itself one of 60 versions would be flagged within
    thirty days with probability 45 %, and here it is a quarter of that time, at one look in 60.
    """
    rng = np.random.default_rng(1010)
    n = 0
    for _ in range(60):
        mean, traffic = mixes(rng, per_hour=per_hour, swing=swing, day_to_day=day_to_day, pi=pi)
        n += int(flagged(rng, mean, traffic, pi=pi).any())
    assert n <= 60 * ERROR


@pytest.mark.parametrize(
    ("per_hour", "within"), [(8_000.0, 2), pytest.param(3_000.0, 6, marks=pytest.mark.release)]
)
def test_a_slice_that_loses_nine_tenths_is_found(per_hour: float, within: int) -> None:
    """2.2 % of the traffic, so that 2 % of the stratum are lost; shares swing 1.6 times in a day.

    From 9 o'clock on. 20 versions, each found within so many hours; and, with enough traffic, still flagged in most hours of the second day,
    because an hour in which the share had fallen is nothing to compare with.
    """
    rng = np.random.default_rng(1011)
    begin = 24 * 3 + 9
    for _ in range(20):
        mean, traffic = mixes(rng, per_hour=per_hour, swing=0.25, day_to_day=0.05)
        swing = mean[0] / traffic
        mean[0] = 0.022 * traffic * swing / swing.mean()
        mean[0, begin:] *= 0.1
        found = flagged(rng, mean, traffic)[begin - 1 :, 0]
        assert found[:within].any()
        assert within > 2 or found[24:48].mean() > 0.5


def test_an_hour_without_losses_may_be_compared_with_although_the_share_had_fallen() -> None:
    """The mix has changed: from then on the smaller share is what there was before."""
    total = np.full(60, 10_000.0)
    weight = np.where(np.arange(60) < 30, 500.0, 100.0)[None]
    shares = Shares(weight=weight, weight_sq=weight, total=total)
    unknown, known = np.zeros(60, dtype=np.bool_), np.ones(60, dtype=np.bool_)
    assert not usable_hours(shares, unknown, n_slices=1)[0, 30:].any()
    assert usable_hours(shares, known, n_slices=1).all()
    assert fallen(shares, usable_hours(shares, unknown, n_slices=1), n_slices=1).fallen.all()
    assert not fallen(shares, usable_hours(shares, known, n_slices=1), n_slices=1).fallen.any()


def test_the_level_of_one_comparison_is_exact() -> None:
    """A window against one block at the border of H0: rejected with at most its level, and not much more rarely.

    100,000 pairs at a level of 5 %: the estimate's standard error is below 0.001.
    """
    rng, n = np.random.default_rng(1012), 100_000
    weight = np.stack((rng.poisson(200.0, n), rng.poisson(KEPT_YOUNG * 200.0, n)), axis=1).astype(np.float64)
    shares = Shares(weight=weight, weight_sq=weight, total=np.array([1e6, 1e6]))
    share = np.mean(in_window(shares, np.ones((n, 2), dtype=np.bool_), 1, 0.05).fallen)
    assert 0.03 <= share <= 0.05
