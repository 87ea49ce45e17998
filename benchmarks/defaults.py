"""What the shipped defaults find, and how long that takes: tolerance 0.25, and the threshold of production.

    python -m benchmarks.defaults [--quick]

A fleet of 4,000 signals with 0.1 false pages in 30 days, as `benchmarks.detection`. The traffic of a slice decides how much of that each of its
exchanges has, so the threshold in exchanges grows with it: by the logarithm, less than one might think. Learned baselines are changed as soon as
they are live, and long after. A run misses where it has not paged within 30,000 exchanges of the change.

Beside the flips stands what is missed by an oracle. It is told both rates and the law, and not when: its evidence is the sum, over all moments of
the change, of the likelihood of the past at the rate before, over that at the lowest rate from which the later one is no change.
"""

import argparse
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from benchmarks.delays import PRODUCTION
from benchmarks.race import known, learned
from benchmarks.result import finish
from quantdrift.core.config.schema import Monitor
from quantdrift.drift.evidence.observations import FloatArray

PER_DAY: Final = (1_000, 10_000, 100_000)
HORIZON: Final = 30_000
BUDGET_M: Final = 0.01
_DAY_S: Final = 86_400
_SECOND_US: Final = 1_000_000
_PART: Final = 500
_WEEK, _BAD = 7, 2
_NIGHT = 1 / 3
Draw = Callable[[np.random.Generator, tuple[int, int]], FloatArray]


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What changes.

    Parameters
    ----------
    name
        A few words.
    kind
        Of the detector: `budget`, `change` or `tail`.
    n_before
        Exchanges before the change, of which the baseline is learned.
    before, after
        Return values of a shape.
    """

    name: str
    kind: str
    n_before: int
    before: Draw
    after: Draw


def _flips(rate: float) -> Draw:
    return lambda rng, shape: (rng.random(shape) < rate).astype(np.float64)


def _pareto(index: float) -> Draw:
    return lambda rng, shape: 1e-3 * rng.random(shape) ** (-1.0 / index)


def _log_normal(factor: float) -> Draw:
    """Return values of which those above the 99 % quantile are `factor` times as large."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
        x = np.exp(rng.normal(size=shape) - 6.0)
        return np.where(x > np.exp(2.326 - 6.0), factor * x, x)

    return draw


def _pareto_above(index: float) -> Draw:
    """Return values of which the largest 1 % are of a Pareto law that begins where they do."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
        x, edge = np.exp(rng.normal(size=shape) - 6.0), np.exp(2.326 - 6.0)
        return np.where(x > edge, edge * rng.random(shape) ** (-1.0 / index), x)

    return draw


def _pareto_top(index: float) -> Draw:
    """Return values of which the largest 5 % are of a Pareto law, and the others log-normal."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
        x, edge = np.exp(1.1 * rng.normal(size=shape) - 5.72), np.exp(1.1 * 1.645 - 5.72)
        return np.where(x > edge, edge * rng.random(shape) ** (-1.0 / index), x)

    return draw


FLIPS: Final = ((0.01, 0.02), (0.01, 0.03), (0.02, 0.04), (0.02, 0.06), (0.01, 0.05))
_SOON, _LATER, _TAIL_SOON = 6_000, 40_000, 32_000
EFFECTS: Final = (
    *(
        Effect(
            name=f"{100 * rate:g} % against a budget of 1 %",
            kind="budget",
            n_before=0,
            before=_flips(0.0),
            after=_flips(rate),
        )
        for rate in (0.015, 0.02, 0.03, 0.05)
    ),
    *(
        Effect(
            name=f"{100 * before:g} to {100 * after:g} %, {how}",
            kind="change",
            n_before=n,
            before=_flips(before),
            after=_flips(after),
        )
        for before, after in FLIPS
        for how, n in (("soon after live", _SOON), ("after 40,000", _LATER))
    ),
    *(
        Effect(name=name, kind="tail", n_before=_TAIL_SOON, before=before, after=after)
        for name, before, after in (
            ("the largest 1 % three times as large", _log_normal(1.0), _log_normal(3.0)),
            ("the largest 1 % twice as large", _log_normal(1.0), _log_normal(2.0)),
            ("all values of a Pareto law, index 2.6 to 1.6", _pareto(2.6), _pareto(1.6)),
            ("the largest 5 % of a Pareto law, index 2.6 to 1.6", _pareto_top(2.6), _pareto_top(1.6)),
            ("the largest 1 % of a Pareto law, index 2.6 to 1.6", _pareto_above(2.6), _pareto_above(1.6)),
            ("the largest 1 % of a Pareto law, index 2.6 to 1.2", _pareto_above(2.6), _pareto_above(1.2)),
        )
    ),
)


def delays(effect: Effect, runs: int, *, seed: int) -> dict[int, FloatArray]:
    """Return per traffic of a day and run the exchanges from the change to the page; infinite if there is none in `HORIZON`."""
    rng = np.random.default_rng(seed)
    # A tail takes what it knows of less than whole weeks for a part of a season: its baseline is of 32 days.
    apart_us = (_DAY_S // PER_DAY[0] if effect.kind == "tail" else 1) * _SECOND_US
    detector = (
        known(BUDGET_M, runs)
        if effect.kind == "budget"
        else learned(effect.kind, Monitor().tolerance, runs, apart_us=apart_us)
    )
    for first in range(0, effect.n_before, _PART):
        detector.follow(effect.before(rng, (min(_PART, effect.n_before - first), runs)))
    delays_of = {per_day: np.full(runs, np.inf) for per_day in PER_DAY}
    for first in range(0, HORIZON, _PART):
        path = detector.follow(effect.after(rng, (_PART, runs)))
        for per_day, passed in delays_of.items():
            hit = path >= PRODUCTION * per_day / _DAY_S
            step = np.where(hit.any(axis=0), first + hit.argmax(axis=0) + 1.0, np.inf)
            np.minimum(passed, step, out=passed)
        if np.isfinite(delays_of[max(PER_DAY)]).all():
            break
    return delays_of


def oracle_missed(before: float, after: float, n_before: int, runs: int, *, seed: int) -> dict[int, float]:
    """Return per traffic of a day the share of runs in which somebody who is told both rates, and not when, does not page."""
    rng, least = np.random.default_rng(seed), after / (1.0 + Monitor().tolerance)
    evidence = np.full(runs, -np.inf)
    if least > before:
        won = np.log(before / least), np.log((1.0 - before) / (1.0 - least))
        for run in range(runs):
            flips = rng.random(n_before + HORIZON) < np.repeat((before, after), (n_before, HORIZON))
            evidence[run] = np.logaddexp.reduce(np.cumsum(np.where(flips, *won)))
    return {per_day: float((evidence < np.log(PRODUCTION * per_day / _DAY_S)).mean()) for per_day in PER_DAY}


def bad_times(runs: int, rate: float, *, night: bool, seed: int) -> FloatArray:
    """Return per run the day of the page of a learned baseline at 1,000 a day, of ten weeks in which flips are 2.5 times as many at bad times.

    These are two days of seven, from six in the evening on, or eight hours of each night, from ten on. It was learned in six weeks. `rate`: of the other
    times, and before.
    """
    rng, day_n = np.random.default_rng(seed), PER_DAY[0]
    apart_us = _DAY_S * _SECOND_US // day_n
    detector, days = (
        learned("change", Monitor().tolerance, runs, apart_us=apart_us),
        np.full(runs, np.inf),
    )
    for _ in range(6 * _WEEK):
        detector.follow(_flips(rate)(rng, (day_n, runs)))
    hours = np.arange(day_n) / day_n
    for day in range(10 * _WEEK):
        bad = (hours + 2 / 24) % 1.0 < _NIGHT if night else (day + hours - 0.75) % _WEEK < _BAD
        today = rng.random((day_n, runs)) < rate * np.where(bad, 2.5, 1.0)[:, None]
        hit = detector.follow(today.astype(np.float64)) >= PRODUCTION * day_n / _DAY_S
        np.minimum(days, np.where(hit.any(axis=0), day + 1.0, np.inf), out=days)
    return days


def main(*, quick: bool, seed: int = 274) -> None:
    """Measure, print a table, and end with one line of JSON."""
    figures: dict[str, float | int | str | None] = {}
    print("| change | " + " | ".join(f"{per_day:,} a day" for per_day in PER_DAY) + " |")
    print("|---|" + "---|" * len(PER_DAY))
    for effect in EFFECTS:
        cells = []
        for per_day, waited in delays(effect, 8 if quick else 48, seed=seed).items():
            missed, median = float(np.isinf(waited).mean()), float(np.median(waited))
            figures[f"{effect.name}: missed, {per_day} a day"] = missed
            figures[f"{effect.name}: median delay, {per_day} a day"] = median if np.isfinite(median) else None
            took = f"{median:,.0f} ({median / per_day:.2g} days)" if np.isfinite(median) else "not found"
            cells.append(took + (f", {missed:.0%} missed" if missed else ""))
        print(f"| {effect.name} | " + " | ".join(cells) + " |", flush=True)
    for before, after in FLIPS:
        missed_of = oracle_missed(before, after, _SOON, 40 if quick else 400, seed=seed)
        name = f"{100 * before:g} to {100 * after:g} %, soon after live"
        figures |= {
            f"{name}: missed by the oracle, {per_day} a day": lost for per_day, lost in missed_of.items()
        }
        print(
            f"{name}: the oracle misses " + ", ".join(f"{lost:.0%}" for lost in missed_of.values()),
            flush=True,
        )
    for rate, night in ((0.01, False), (0.02, False), (0.01, True)):
        days = bad_times(8 if quick else 24, rate, night=night, seed=seed)
        when = "eight hours of each night" if night else "two bad days of seven"
        name = f"{when}, {100 * rate:g} to {250 * rate:g} %"
        shares = {weeks: float((days <= weeks * _WEEK).mean()) for weeks in (4, 10)}
        figures |= {f"{name}: found in {weeks} weeks": share for weeks, share in shares.items()}
        print(
            f"{name}, {PER_DAY[0]:,} a day: {shares[4]:.0%} found in four weeks, {shares[10]:.0%} in ten",
            flush=True,
        )
    finish("defaults", figures, [])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    main(quick=parser.parse_args().quick)
