"""Seeded streams with a change at a known place, for everybody who is to be compared on the same ones."""

import math

import msgspec
import numpy as np

from quantdrift.drift.evidence.observations import STEPS, FloatArray

BASELINE = 5_000  # groups that a learned baseline is made of
LIVE = 20_000  # healthy groups after it, then the change
TAIL_HISTORY = 40_000  # a tail baseline of 30,000 is the least for its outermost bets
_MEDIAN, _Z97, _Z99 = 0.01, 1.8807936081512509, 2.3263478740408408
_HARD_SHARE, _HARD_SPREAD = 0.01, 0.5


class Flips(msgspec.Struct, frozen=True, kw_only=True):
    """Independent 0 / 1 values.

    Parameters
    ----------
    rate
        P(1).
    """

    rate: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        """Return values."""
        return (rng.random(shape) < self.rate).astype(np.float64)

    def log_density(self, x: FloatArray) -> FloatArray:
        """Return the log probability of each value."""
        return np.where(x > 0, math.log(self.rate), math.log1p(-self.rate))


class Divergences(msgspec.Struct, frozen=True, kw_only=True):
    """Divergences of a quantised model, in nats: log-normal around 0.01, the largest 1 % of them times `factor`.

    At factor 3 the mean goes from 0.016 to 0.020: 0.02 to two decimals in both.

    Parameters
    ----------
    factor
        What the values above the 99 % quantile are multiplied by, at least 1.
    """

    factor: float = 1.0

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        """Return values."""
        z = rng.standard_normal(shape)
        return _MEDIAN * np.exp(z) * np.where(z > _Z99, self.factor, 1.0)

    def log_density(self, x: FloatArray) -> FloatArray:
        """Return the log density of each value over that of the logarithm, up to a constant."""
        z = np.log(x / _MEDIAN)
        moved = z - math.log(self.factor)
        body = np.where(z <= _Z99, -0.5 * z * z, -np.inf)
        return np.where(moved > _Z99, -0.5 * moved * moved, body)


class Exceedances(msgspec.Struct, frozen=True, kw_only=True):
    """The same divergences, but whatever lies below three times the 99 % quantile is told as one and the same.

    Multiplying the largest 1 % by three leaves a gap below that level, where no value can come any more. No real
    drift does so. A detector that knows of the gap forgets everything at each value in it; this one does not look.

    Parameters
    ----------
    factor
        1 before the change, 3 after it.
    """

    factor: float = 1.0

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        """Return values."""
        return Divergences(factor=self.factor).draw(rng, shape)

    def log_density(self, x: FloatArray) -> FloatArray:
        """Return the log density of each value over that of the logarithm, or of being below the level."""
        level = _Z99 + math.log(3.0)
        high = 0.5 * math.erfc((_Z99 if self.factor > 1 else level) / math.sqrt(2))
        density = Divergences(factor=self.factor).log_density(x) - 0.5 * math.log(2 * math.pi)
        return np.where(np.log(x / _MEDIAN) > level, density, math.log1p(-high))


class Hard(msgspec.Struct, frozen=True, kw_only=True):
    """Divergences among which one in a hundred is of a hard kind: log-normal around 0.1 instead of 0.01.

    Where the hard kind's are multiplied by 3, no gap is left; the mean goes from 0.017 to 0.020 nats.

    Parameters
    ----------
    factor
        What those of the hard kind are multiplied by.
    """

    factor: float = 1.0

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        """Return values."""
        hard = rng.random(shape) < _HARD_SHARE
        z = rng.standard_normal(shape)
        return np.where(hard, 10 * _MEDIAN * self.factor * np.exp(_HARD_SPREAD * z), _MEDIAN * np.exp(z))

    def log_density(self, x: FloatArray) -> FloatArray:
        """Return the log density of each value over that of the logarithm, up to a constant."""
        z = np.log(x / _MEDIAN)
        hard = (z - math.log(10 * self.factor)) / _HARD_SPREAD
        mixed = (1 - _HARD_SHARE) * np.exp(-0.5 * z * z)
        return np.asarray(np.log(mixed + _HARD_SHARE / _HARD_SPREAD * np.exp(-0.5 * hard * hard)))


class Thickening(msgspec.Struct, frozen=True, kw_only=True):
    """Divergences that are log-normal around 0.01 up to their 97th percentile, and fall by a power of themselves above.

    A smaller index thickens the tail everywhere above the percentile, and leaves no gap.

    Parameters
    ----------
    index
        Of the power: the share above t times the percentile is 3 % times t to minus this.
    """

    index: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        """Return values."""
        x = _MEDIAN * np.exp(rng.standard_normal(shape))
        beyond = rng.exponential(1.0 / self.index, shape)
        return np.where(x > _MEDIAN * math.exp(_Z97), _MEDIAN * np.exp(_Z97 + beyond), x)

    def log_density(self, x: FloatArray) -> FloatArray:
        """Return the log density of each value over that of the logarithm, up to a constant."""
        z = np.log(x / _MEDIAN)
        tail = math.log(0.03 * math.sqrt(2 * math.pi) * self.index) - self.index * (z - _Z97)
        return np.where(z > _Z97, tail, -0.5 * z * z)


Law = Flips | Divergences | Exceedances | Hard | Thickening


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A change from one law to another.

    Parameters
    ----------
    name
        What is printed.
    before, after
        The laws.
    change
        Groups before the change.
    """

    name: str
    before: Law
    after: Law
    change: int = BASELINE + LIVE


FLIPS = tuple(
    Case(name=f"flips {low:g} -> {high:g} %", before=Flips(rate=low / 100), after=Flips(rate=high / 100))
    for low, high in ((1, 3), (1, 5), (0.2, 2), (0.2, 0.6), (1, 1.5))
)
TAIL = Case(
    name="tail: largest 1 % x3", before=Divergences(), after=Divergences(factor=3.0), change=TAIL_HISTORY
)
HARD = Case(name="tail: hard 1 % x3", before=Hard(), after=Hard(factor=3.0), change=TAIL_HISTORY)


class Stream:
    """Runs of a case side by side, block after block; the same seed gives the same values.

    Parameters
    ----------
    case
        What is drawn.
    runs
        How many.
    seed
        Of all of them.
    """

    def __init__(self, case: Case, runs: int, seed: int) -> None:
        self.case = case
        self.runs = runs
        self.first = 0
        self._rng = np.random.default_rng(seed)

    def block(self) -> FloatArray:
        """Return the next (STEPS, runs) values; a change inside a block is at its exact place."""
        shape = (STEPS, self.runs)
        healthy = min(max(self.case.change - self.first, 0), STEPS)
        self.first += STEPS
        if healthy == STEPS:
            return self.case.before.draw(self._rng, shape)
        drifted = self.case.after.draw(self._rng, (STEPS - healthy, self.runs))
        return np.concatenate((self.case.before.draw(self._rng, (healthy, self.runs)), drifted))

    def values(self, n: int) -> FloatArray:
        """Return the next n values of every run, (runs, n); n is a multiple of STEPS."""
        return np.concatenate([self.block() for _ in range(n // STEPS)]).T.copy()
