"""Estimates that are shown: how wide their intervals are, how often they miss, and how far they are off.

    python -m benchmarks.estimates [--quick]

- `interval_width_over_clopper_pearson`: width of the recent window's interval over that of Clopper and Pearson's exact one,
  which holds at one look only; the largest ratio over windows of 1,000 to 2,000 exchanges and flip rates of 0.5 to 10 %.
- `severity_lower_over_cp`: the lower end that an alert shows as its severity over Clopper and Pearson's, mean over streams
  of 200 to 1,000 exchanges with 3 to 20 % flips.
- `weighted_width_over_wald`: the same width over that of Wald's interval by strata whose traffic shares and flip rates are
  known, with inclusion probabilities of 0.01 to 1; the largest ratio over the cases for which Wald's normal approximation is
  meant: at least five flips are expected in the stratum that is sampled least. `weighted_width_over_wald_few` is that of the
  others, where Wald's interval is too narrow. `width_over_wald_rare_0.1` and so on is the mean ratio where a tenth of the traffic has
  that rate and the rest 1: few exchanges of the smallest rate are in a window, and each could weigh much.
- `window_missed`: share of windows whose interval misses the mean at any look (to be at most 5 %), and
  `rolling_missed`: share of streams in which any window of ten does, which nobody promises.
- `sessions_used`: share of the replayed sessions that count in the slice of all traffic, with weights, under a default rate of
  0.01 beside a stratum at 1; `sessions_used_plain`: of those of the lowest rate, where a detector has no weights.
- `incidents_of_two_stores`: mean number of incidents where two of a city's six stores are damaged and all three alert.
- `estimate_bias`: how far the mean that `slice_now` shows at full hours lies from the truth where replays follow the
  evidence; and `estimate_bias_unweighted`: what it would be by v = c / pi, as if c were the same in all policies.
"""

import argparse
import math

import numpy as np
from scipy.stats import beta

from benchmarks.result import Goal, finish
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy
from quantdrift.core.sampling.inclusion import second_rate
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence import interval
from quantdrift.drift.evidence.interval import WeightedEstimate
from quantdrift.drift.evidence.observations import FloatArray, ObservationBlock
from quantdrift.drift.evidence.window import RECENT_GROUPS
from quantdrift.drift.explain.overlap import SliceItems, explaining
from quantdrift.monitor.fold.inclusion import RememberedRates
from quantdrift.storage.fold_rows import Catalog, SliceRow

Figures = dict[str, float | int | str | None]
SEED = 45
# Traffic shares and inclusion probabilities of strata, and their flip rates.
STRATA = (
    ((0.9, 0.09, 0.01), (0.01, 0.1, 1.0)),
    ((0.99, 0.01), (0.01, 1.0)),
    ((0.9, 0.1), (0.01, 1.0)),
    ((0.8, 0.2), (0.1, 1.0)),
    ((0.5, 0.3, 0.2), (0.01, 0.1, 1.0)),
)
RATES = ((0.01, 0.01, 0.01), (0.05, 0.05, 0.05), (0.01, 0.02, 0.05), (0.05, 0.02, 0.01))
_LEAST_FLIPS = 5  # by the usual rule for normal approximations of a rate
_MOST_RATE = 0.2
_RARE_FLIPS, _LEAST_EVENTS = 0.05, 10.0
RARE_RATES = (0.3, 0.1, 0.03, 0.01)
_Z = 1.959963984540054


def clopper_pearson(hits: float, n: float) -> tuple[float, float]:
    """Return the exact 95 % interval of a rate at one look."""
    low = beta.ppf(0.025, hits, n - hits + 1) if hits > 0 else 0.0
    high = beta.ppf(0.975, hits + 1, n - hits) if hits < n else 1.0
    return float(low), float(high)


def estimate_of(x: FloatArray, v: FloatArray | None = None) -> WeightedEstimate:
    """Return mean and interval of a window with these values and weights, (n,)."""
    sums, weight = np.zeros(interval.SUMS), np.ones(len(x)) if v is None else v
    for value, of_it in zip((weight * x).tolist(), weight.tolist(), strict=True):
        interval.advance(sums, of_it, value)
    found = interval.estimate(sums)
    assert found is not None
    return found


def width_over_clopper_pearson() -> float:
    """Return the largest ratio over windows and rates; nothing is drawn."""
    ratios = []
    for n in (1000, 1250, 1500, 1750, 2000):
        for rate in (0.005, 0.01, 0.02, 0.05, 0.1):
            hits = round(n * rate)
            found = estimate_of((np.arange(n) < hits).astype(float))
            low, high = clopper_pearson(hits, n)
            ratios.append((found.high - found.low) / (high - low))
    return max(ratios)


def severity_over_clopper_pearson(streams: int) -> float:
    """Return the mean ratio of lower ends over seeded streams."""
    rng = np.random.default_rng(SEED)
    ours, theirs = [], []
    for _ in range(streams):
        n, rate = int(rng.integers(200, 1001)), float(np.exp(rng.uniform(math.log(0.03), math.log(0.2))))
        hits = int(rng.binomial(n, rate))
        low, _ = clopper_pearson(hits, n)
        if low > 0:
            ours.append(estimate_of(rng.permutation(np.arange(n) < hits).astype(float)).low / low)
            theirs.append(low)
    return float(np.mean(ours))


def width_over_wald(streams: int, n: int = 2000) -> tuple[float, float]:
    """Return the largest mean ratio over the cases with at least five expected flips in the first stratum, and the others'."""
    ratios: tuple[list[float], list[float]] = ([], [])
    for case, (shares, pi) in enumerate(STRATA):
        share, rate_of = np.array(shares), np.array(pi)
        taken = share * rate_of / (share @ rate_of)
        for flips in np.array(RATES)[:, : len(shares)]:
            wald = 2 * _Z * math.sqrt(float((share**2 * flips * (1 - flips) / (n * taken)).sum()))
            rng = np.random.default_rng([SEED, case])
            widths = []
            for _ in range(streams):
                stratum = rng.choice(len(share), n, p=taken)
                x = (rng.random(n) < flips[stratum]).astype(float)
                found = estimate_of(x, rate_of.min() / rate_of[stratum])
                widths.append(found.high - found.low)
            few = int(n * taken[0] * flips[0] < _LEAST_FLIPS)
            ratios[few].append(float(np.mean(widths)) / wald)
    return max(ratios[0]), max(ratios[1])


def width_where_the_least_rate_is_rare(streams: int, least: float, n: int = 2000) -> float:
    """Return the mean ratio where nine tenths of the traffic is sampled at 1 and the rest at `least`; at least ten effective events.

    Wald's interval is that of the ratio, from the same sample. 5 % flips.
    """
    rng, ratios = np.random.default_rng([SEED, round(1e3 * least)]), []
    for _ in range(streams):
        w = np.where(rng.random(n) < 0.9 / (0.9 + 0.1 * least), 1.0, 1.0 / least)
        x = (rng.random(n) < _RARE_FLIPS).astype(float)
        mean = float(w @ x / w.sum())
        wald = 2 * _Z * math.sqrt(n / (n - 1) * float(w**2 @ (x - mean) ** 2)) / float(w.sum())
        if (w @ x) ** 2 >= _LEAST_EVENTS * (w**2 @ x):
            found = estimate_of(x, least * w)
            ratios.append((found.high - found.low) / wald)
    return float(np.mean(ratios))


def missed(streams: int, rate: float, windows: int = 10) -> tuple[float, float]:
    """Return the share of windows of 2,000 groups, and of streams of ten windows, that miss the mean at any look.

    A look is after every 20 groups. Half of the groups weigh a tenth; it is in the others that the flips are.
    """
    rng = np.random.default_rng([SEED, round(1e6 * rate)])
    failed = np.zeros((streams, windows), dtype=bool)
    for stream in range(streams):
        for window in range(windows):
            sums = np.zeros(interval.SUMS)
            rare = rng.random(2 * RECENT_GROUPS) < 0.1 / 1.1
            x = (rng.random(2 * RECENT_GROUPS) < np.where(rare, 2 * rate, 0.0)).astype(float)
            v = np.where(rare, 1.0, 0.1)
            for begin in range(0, len(x), 20):
                for group in range(begin, begin + 20):
                    interval.advance(sums, v[group], v[group] * x[group])
                found = interval.estimate(sums)
                assert found is not None
                failed[stream, window] |= not found.low <= rate <= found.high
    return float(failed.mean()), float(failed.any(axis=1).mean())


def bias(streams: int, *, hours: int = 60, weighted: bool = True, rate: float = 0.01) -> tuple[float, float]:
    """Return the relative bias of the mean that is shown at full hours, with its standard error.

    Each stream has 4,000 exchanges an hour and a base rate of 1 %, which rises with the logarithm of the evidence beyond
    its allowance, up to 20 %, as the sampling policy's does; the flip rate never changes. The first 15 hours do not count.
    """
    rng = np.random.default_rng(SEED)
    fresh = BUDGET.fresh(budget=rate, scale=1.0, weighted=False, mass=0.0, at_us=0)
    states = np.tile(fresh, (streams, 1))
    pi, mass = np.full(streams, 0.01), 0.0
    looks: list[list[float]] = []
    for hour in range(hours):
        n = rng.binomial(4000, pi)
        shape = (int(n.max()), streams)
        mass += 1 / (720 * 100)
        x = (rng.random(shape) < rate).astype(float)
        values = np.stack((x, np.ones(shape), np.broadcast_to(pi if weighted else 1.0, shape)), axis=-1)
        block = ObservationBlock(
            x=values,
            seen=np.arange(shape[0])[:, None] < n,
            mass=np.full(shape, mass),
            at_us=np.full(shape, 3.6e9 * hour),
        )
        states = BUDGET.run(states, block).stopped(np.full(streams, shape[0] - 1))
        for state in states:
            BUDGET.tend(state, mass=mass, at_us=0)
        beyond = np.maximum(np.log(np.maximum(BUDGET.evidences(states), 1e-300) / mass), 0.0)
        pi = np.minimum(0.01 * (1.0 + 20.0 * beyond**2), _MOST_RATE)
        if hour >= 15:
            found = [BUDGET.recent(state) for state in states]
            looks.append([math.nan if one is None else one.mean for one in found])
    means = np.nanmean(np.array(looks), axis=0) / rate - 1.0
    return float(means.mean()), float(means.std(ddof=1) / math.sqrt(streams))


def sessions_used(n: int = 100_000) -> tuple[float, float]:
    """Return the shares of replayed sessions that are used with and without weights."""
    strata = (
        HeaderStratum(name="gold", rate=1.0, headers={"x-a": "g"}),
        HeaderStratum(name="default", rate=0.01),
    )
    policy = Policy(epoch="1-m", header_strata=strata, body_strata=(BodyStratum(name="default", rate=1.0),))
    place = SliceRow(id=1, model="m", name="all", predicate="true", where=())
    rates = RememberedRates().of(Catalog(versions={}, slices={1: place}, policies={1: policy}), 1, 1)
    rng = np.random.default_rng(SEED)
    n_replayed = n_weighted = n_low = n_plain = 0
    for u1, u2 in rng.random((n, 2)).tolist():
        for pi1 in (1.0, 0.01):
            if u1 < pi1:
                n_replayed += 1
                n_weighted += u2 < second_rate(rates.sure, pi1)
                n_low += pi1 < 1.0
                second = second_rate(rates.sure, pi1)
                n_plain += pi1 < 1.0 and u1 < rates.smallest / second and u2 < second
    return n_weighted / n_replayed, n_plain / n_low


def incidents(runs: int) -> float:
    """Return how many incidents there are: those of the stores, and that of the city where they do not explain it."""
    rng, n = np.random.default_rng(SEED), 0
    for _ in range(runs):
        store = rng.integers(0, 6, 3000)
        x = (rng.random(3000) < np.where(store < 2, 0.1, 0.005)).astype(float)
        items = SliceItems(x=x, weight=np.ones(3000), cluster=np.arange(3000))
        others = {number: np.asarray(store == number) for number in range(2)}
        sizes = {number: (float(inside.sum()), False) for number, inside in others.items()} | {
            2: (3000.0, False)
        }
        n += 2 + (not explaining(items, 0.01, others, sizes, 2))
    return n / runs


def measure(*, quick: bool) -> Figures:
    """Return all figures; within some ten seconds if `quick`."""
    weighted = bias(1200 if quick else 4000)
    unweighted = bias(300 if quick else 1000, weighted=False)
    window, rolling = missed(20 if quick else 200, 0.01)
    used, used_plain = sessions_used(10_000 if quick else 100_000)
    enough, few = width_over_wald(20 if quick else 200)
    return {
        "interval_width_over_clopper_pearson": width_over_clopper_pearson(),
        "severity_lower_over_cp": severity_over_clopper_pearson(200 if quick else 2000),
        "weighted_width_over_wald": enough,
        "weighted_width_over_wald_few": few,
        **{
            f"width_over_wald_rare_{least:g}": width_where_the_least_rate_is_rare(20, least)
            for least in RARE_RATES
        },
        "sessions_used": used,
        "sessions_used_plain": used_plain,
        "incidents_of_two_stores": incidents(50 if quick else 500),
        "window_missed": window,
        "rolling_missed": rolling,
        "estimate_bias": abs(weighted[0]),
        "estimate_bias_se": weighted[1],
        "estimate_bias_unweighted": unweighted[0],
    }


def goals(figures: Figures) -> list[Goal]:
    """Return the goals of these figures."""
    bounds = (
        ("interval_width_over_clopper_pearson", 1.5, "ratio", True),
        ("severity_lower_over_cp", 0.6, "ratio", False),
        ("weighted_width_over_wald", 2.0, "ratio", True),
        ("sessions_used", 0.99, "1", False),
        ("incidents_of_two_stores", 2.05, "{incident}", True),
        ("window_missed", 0.05, "1", True),
        ("estimate_bias", 0.02, "1", True),
    )
    return [
        Goal(name=name, value=float(figures[name] or 0.0), bound=bound, unit=unit, at_most=at_most)
        for name, bound, unit, at_most in bounds
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="some seconds, with wide errors")
    found = measure(quick=parser.parse_args().quick)
    for name, value in found.items():
        print(f"  {name:<40} {value:.4g}")
    finish("estimates", found, goals(found))
