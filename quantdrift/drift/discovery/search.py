"""Search for slices on which divergence concentrates: conjunctions of conditions on attributes and features.

A lattice search after SliceLine (Sagadeeva, Boehm, SIGMOD 2021, "SliceLine: fast, linear-algebra-based slice finding
for ML model debugging"). Level 1 holds one condition each: an attribute has a value, or a feature lies in a quantile
bin, below an edge or above one. Level d joins a slice of level d - 1 with a condition on another key. A slice S with
share s of the traffic has the score

    alpha * (low_S / mean_all - 1) - (1 - alpha) * (1 / s - 1),        alpha = 0.99

and is a candidate where its score is positive, `low_S` is above the bound of the later test, and it is large enough.
Differences from the paper: items count with their sampling weights; `low_S` is the mean minus two standard errors, so
that a few flips do not win by chance; alpha is 0.99 and not 0.95, because a slice of 1 % matters here. Two levels are
complete. From the third level on, the slices to be joined are pruned by the paper's bound on the score of their parts,
and then to the `BEAM` best by this bound.

Slices are chosen one by one, the best first, each as general as the data allow: a condition is dropped if the mean without
it is not lower by more than three standard errors (many conditions were tried). The others are scored again on the items
outside the slices chosen so far (sequential covering), so that ten descriptions of the same slice are one result.

A search proves nothing: it has compared thousands of slices. `quantdrift.drift.discovery.confirmation` tests its results
on later traffic only.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from quantdrift.core.records import Metric, Predicate
from quantdrift.drift.discovery.conditions import conditions_of
from quantdrift.drift.discovery.items import SearchItems
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray

ALPHA = 0.99
ERRORS = 2.0  # standard errors below the mean
NARROWER = 3.0  # standard errors that a further condition must add
BEAM = 128
POOL = 1000
N_BINS = 10
SAME = 0.9  # share of the items of two slices that are in both: from here on they count as the same slice
_SUMS = 6
_N, _W, _W2, _WX, _W2X, _W2XX = range(_SUMS)

Indices = tuple[int, ...]


class SearchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a search.

    Parameters
    ----------
    depth
        Most conditions of a slice, 1 to 3.
    least_share
        Smallest share of the traffic, in (0, 1).
    least_items
        Fewest items.
    most_conditions
        Most conditions that are joined; those with the most divergence are used.
    most_found
        Most slices.
    n_bins
        Quantile bins of a feature.
    """

    depth: int = 2  # with 3, 50,000 items take twenty seconds instead of six
    least_share: float = 0.005
    least_items: int = 100
    most_conditions: int = 256  # the time is in its square: some six seconds for 50,000 items
    most_found: int = 20
    n_bins: int = N_BINS


class FoundSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice on which divergence concentrates in the items searched; means are over the metric's cap.

    Parameters
    ----------
    where
        Its conditions, by key.
    metric
        The divergence that concentrates.
    mean, low
        Weighted mean in the slice, and the mean minus two standard errors. Both are biased upwards, because the slice was
        chosen from the same data.
    overall
        Weighted mean over everything.
    bound
        The level that the mean must exceed.
    share
        Weighted share of the traffic.
    n_items
        Number of items in the slice.
    score
        See this module.
    """

    where: tuple[Predicate, ...]
    metric: Metric
    mean: float
    low: float
    overall: float
    bound: float
    share: float
    n_items: int
    score: float


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search.

    Parameters
    ----------
    found
        Slices, in the order they were taken.
    n_items
        Items searched.
    n_scored
        Slices looked at.
    n_left_out
        Conditions, values and slices that the limits left out.
    """

    found: tuple[FoundSlice, ...]
    n_items: int
    n_scored: int
    n_left_out: int


class GivenUpError(Exception):
    """The search stopped, because `give_up` asked for it."""


def search(
    items: SearchItems,
    bounds: Mapping[Metric, float],
    limits: SearchLimits,
    give_up: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """Return the slices on which divergence concentrates.

    Parameters
    ----------
    items
        The items to search. The time is proportional to items times the square of `most_conditions`, and the memory to
        items times `most_conditions` times 4 bytes.
    bounds
        By metric, the mean over its cap that a slice must exceed.
    give_up
        Called repeatedly; the search ends once it returns True.

    Raises
    ------
    GivenUpError
        It was.
    """
    lattice = _Lattice(items, bounds, limits, give_up)
    lattice.descend()
    return SearchResult(
        found=tuple(lattice.take()),
        n_items=len(items),
        n_scored=lattice.n_scored,
        n_left_out=lattice.n_left_out + items.n_left_out,
    )


def overlap(left: BoolArray, right: BoolArray) -> float:
    """Return the share of the items of either slice that lie in both; 1 where neither has any."""
    either = int((left | right).sum())
    return int((left & right).sum()) / either if either else 1.0


class _Signal:
    """One metric: its sums over a slice, and the score of the sums."""

    def __init__(self, items: SearchItems, metric: Metric, bound: float, limits: SearchLimits) -> None:
        self.metric, self.bound, self.limits = metric, bound, limits
        signal = items.signals[metric]
        seen = ~np.isnan(signal)
        x = np.where(seen, signal, 0.0)
        w = np.where(seen, items.weight, 0.0)
        w = w / (w.sum() / max(int(seen.sum()), 1) or 1.0)
        # float32 holds whole conditions of 50,000 items to some 1e-6, and halves memory and time.
        self.columns = np.stack(
            (seen.astype(float), w, w * w, w * x, w * w * x, w * w * x * x), axis=1
        ).astype(np.float32)
        total = self.columns.sum(axis=0, dtype=np.float64)
        self.weight = float(total[_W])
        self.overall = float(total[_WX] / total[_W]) if total[_W] > 0 else 0.0
        square = float((w * x * x).sum() / total[_W]) if total[_W] > 0 else 0.0
        self.variance = max(square - self.overall**2, 0.0)
        self.largest = float(x.max(initial=0.0))

    def judge(self, sums: FloatArray) -> FloatArray:
        """Return (..., 4): score (minus infinity where it is no candidate), mean, low and share, of sums (..., 6)."""
        weight = np.maximum(sums[..., _W], 1e-12)
        mean = sums[..., _WX] / weight
        own = sums[..., _W2XX] - 2 * mean * sums[..., _W2X] + mean * mean * sums[..., _W2]
        # For a slice with little variation, the variation of all items is used.
        error = np.sqrt(np.maximum(own, self.variance * sums[..., _W2])) / weight
        low = mean - ERRORS * error
        share = weight / max(self.weight, 1e-12)
        score = self._score(low, share)
        large = (share >= self.limits.least_share) & (sums[..., _N] >= self.limits.least_items)
        score = np.where(large & (low > self.bound) & (score > 0), score, -np.inf)
        return np.stack((score, mean, low, share), axis=-1)

    def most(self, sums: FloatArray) -> FloatArray:
        """Return the paper's upper bound on the score of any large enough slice inside one with these sums, (...)."""
        mass, weight = sums[..., _WX], np.maximum(sums[..., _W], 1e-12)
        least = self.limits.least_share * self.weight
        # The score in the size of the part is highest at an end, or where all the divergence just fits.
        sizes = np.stack(
            (np.broadcast_to(least, weight.shape), weight, mass / max(self.largest, 1e-12)), axis=-1
        )
        sizes = np.clip(sizes, least, np.maximum(weight, least)[..., None])
        mean = np.minimum(mass[..., None] / sizes, self.largest)
        most: FloatArray = self._score(mean, sizes / max(self.weight, 1e-12)).max(axis=-1)
        return np.where(weight >= least, most, -np.inf)

    def _score(self, mean: FloatArray, share: FloatArray) -> FloatArray:
        score: FloatArray = ALPHA * (mean / max(self.overall, 1e-12) - 1) - (1 - ALPHA) * (
            1 / np.maximum(share, 1e-12) - 1
        )
        return score


class _Lattice:
    """The slices of one search, as indices in the list of conditions."""

    def __init__(
        self,
        items: SearchItems,
        bounds: Mapping[Metric, float],
        limits: SearchLimits,
        give_up: Callable[[], bool],
    ) -> None:
        self._limits, self._give_up = limits, give_up
        self._signals = [
            _Signal(items, metric, bound, limits)
            for metric, bound in bounds.items()
            if metric in items.signals
        ]
        columns = [signal.columns for signal in self._signals]
        self._columns = np.concatenate(columns, axis=1) if columns else np.zeros((len(items), 0), np.float32)
        conditions, sums = [], []
        for condition, holds in conditions_of(items, limits.least_share, limits.n_bins):
            if give_up():
                raise GivenUpError
            conditions.append(condition)
            sums.append(self._columns[holds].sum(axis=0, dtype=np.float64))
        first = np.array(sums).reshape(len(conditions), len(self._signals), _SUMS)
        chosen = self._weightiest(first)
        self.n_left_out = len(conditions) - len(chosen)
        self.n_scored = 0
        self._conditions = [conditions[index] for index in chosen]
        self._keys = np.array([condition.key for condition in self._conditions], dtype=object)
        # Only the conditions being joined are in memory.
        self._members = np.zeros((len(items), len(chosen)), dtype=np.float32)
        for index, condition in enumerate(self._conditions):
            self._members[:, index] = items.members((condition,))
        self._first = first[chosen]
        self._pool: dict[tuple[int, Indices], float] = {}  # (signal, slice) to score

    def descend(self) -> None:
        """Score every level of the lattice."""
        level: list[Indices] = [(index,) for index in range(len(self._conditions))]
        self._offer(level, self._first)
        for depth in range(2, self._limits.depth + 1):
            parents, level, sums = level, [], []
            for parent in parents:
                if self._give_up():
                    raise GivenUpError
                inside = np.flatnonzero(self._holds(parent))
                others = self._others(parent)
                if len(inside) < self._limits.least_items or not len(others):
                    continue
                level += [tuple(sorted((*parent, int(other)))) for other in others]
                sums.append(self._sums(inside, others))
            if not level:
                return
            level_sums = np.concatenate(sums)
            self._offer(level, level_sums)
            if depth < self._limits.depth:
                level = self._prune(level, level_sums)

    def take(self) -> list[FoundSlice]:
        """Return the slices found, the best first, each scored on the items outside the ones before it."""
        slices: list[FoundSlice] = []
        free = np.ones(len(self._members), dtype=bool)
        while self._pool:
            if self._give_up():
                raise GivenUpError
            scored = {entry: self._judge(*entry, free) for entry in self._pool}
            self._pool = {entry: float(verdict[0]) for entry, verdict in scored.items() if verdict[0] > 0}
            if not self._pool:
                break
            if len(slices) == self._limits.most_found:
                self.n_left_out += 1  # and all narrower slices
                break
            best = max(self._pool, key=lambda entry: (self._pool[entry], -len(entry[1]), entry))
            signal, indices = self._generalise(best, scored, free)
            score, mean, low, share = (float(value) for value in self._judge(signal, indices, free))
            holds = self._holds(indices)
            slices.append(
                FoundSlice(
                    where=tuple(
                        sorted((self._conditions[p] for p in indices), key=lambda condition: condition.key)
                    ),
                    metric=self._signals[signal].metric,
                    mean=mean,
                    low=low,
                    overall=self._signals[signal].overall,
                    bound=self._signals[signal].bound,
                    share=share,
                    n_items=int((holds & free).sum()),
                    score=score,
                )
            )
            free &= ~holds
        return slices

    def _weightiest(self, sums: FloatArray) -> IntArray:
        """Return the indices, rising, of the conditions with the most divergence of either metric."""
        if not sums.size:
            return np.zeros(0, dtype=np.intp)
        overall = np.array([max(signal.overall, 1e-12) for signal in self._signals])
        mass = (sums[:, :, _WX] / overall).max(axis=1)
        return np.sort(np.argsort(-mass, kind="stable")[: self._limits.most_conditions])

    def _offer(self, level: Sequence[Indices], sums: FloatArray) -> None:
        """Put the candidates of a level into the pool, which keeps the best."""
        self.n_scored += len(level)
        for index, signal in enumerate(self._signals):
            score = signal.judge(sums[:, index])[:, 0]
            self._pool |= {
                (index, level[row]): float(score[row]) for row in np.flatnonzero(score > 0).tolist()
            }
        if len(self._pool) > POOL:
            best = sorted(self._pool, key=lambda entry: (-self._pool[entry], entry))
            self.n_left_out += len(best) - POOL
            self._pool = {entry: self._pool[entry] for entry in best[:POOL]}

    def _prune(self, level: Sequence[Indices], sums: FloatArray) -> list[Indices]:
        """Return the slices whose parts may score, the most promising ones, each once."""
        most = np.max([signal.most(sums[:, i]) for i, signal in enumerate(self._signals)], axis=0)
        promising: dict[Indices, float] = {
            level[row]: float(most[row]) for row in np.flatnonzero(most > 0).tolist()
        }
        best = sorted(promising, key=lambda indices: (-promising[indices], indices))
        self.n_left_out += max(len(best) - BEAM, 0)
        return best[:BEAM]

    def _generalise(
        self, entry: tuple[int, Indices], scored: Mapping[tuple[int, Indices], FloatArray], free: BoolArray
    ) -> tuple[int, Indices]:
        """Remove every condition that the data do not require."""
        signal, indices = entry
        while len(indices) > 1:
            _, mean, low, _ = (float(value) for value in scored[signal, indices])
            least = mean - NARROWER / ERRORS * (mean - low)
            wider = {
                (signal, shorter): verdict
                for shorter in itertools.combinations(indices, len(indices) - 1)
                if (verdict := self._judge(signal, shorter, free))[0] > 0 and verdict[1] >= least
            }
            if not wider:
                break
            signal, indices = max(wider, key=lambda child: float(wider[child][0]))
            scored = wider
        return signal, indices

    def _judge(self, signal: int, indices: Indices, free: BoolArray) -> FloatArray:
        inside = np.flatnonzero(self._holds(indices) & free)
        sums = self._signals[signal].columns[inside].sum(axis=0, dtype=np.float64)
        return self._signals[signal].judge(sums)

    def _others(self, parent: Indices) -> IntArray:
        """Return the conditions to join with `parent`: of other keys, and for pairs each pair once."""
        other_key = ~np.isin(self._keys, [self._keys[index] for index in parent])
        if len(parent) == 1:
            other_key[: parent[0] + 1] = False
        return np.flatnonzero(other_key)

    def _holds(self, indices: Indices) -> BoolArray:
        holds: BoolArray = self._members[:, indices[0]] > 0
        for index in indices[1:]:
            holds = holds & (self._members[:, index] > 0)
        return holds

    def _sums(self, rows: IntArray, conditions: IntArray) -> FloatArray:
        """Return (conditions, signals, 6) sums over `rows`."""
        total = self._members[rows][:, conditions].T @ self._columns[rows]
        return total.reshape(len(conditions), len(self._signals), _SUMS).astype(np.float64)
