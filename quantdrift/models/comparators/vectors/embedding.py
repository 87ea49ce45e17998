"""The comparator for embeddings: one vector for each item.

With p the reference's and q the candidate's vector:

- `divergence` = 1 - cos(p, q), the cosine distance, without a unit, in [0, 2]; 0 where both point the same way.
- `flip` = 1 where it is above the tolerance.

In `detail`:

- `norm_ratio` = |q| / |p|, above 0: 1 if the length is kept, which the angle does not show.
- `neighbour_overlap`: of the k vectors nearest to p (by cosine to five decimals, exact search) among the reference's last
  different vectors, the share that is also among the k nearest to q, in [0, 1]; 1 if a search would find the same ones. It
  measures how well an embedding is kept locally (Venna et al., Information retrieval perspective to nonlinear
  dimensionality reduction, Journal of Machine Learning Research, 2010, on neighbourhood recall and precision, which are
  equal for sets of one size). It is undefined until there are ten times k vectors.

All items of a batch are looked up among the vectors from before the batch, and added afterwards, so neither their order nor
the other items of the batch matter. Each shadow process has its own vectors and starts with none.

A vector with a value that is not finite, of length 0, or without values has no direction: it is not finite. If it is the
candidate's, it is a flip and all else is undefined; if it is the reference's, everything is undefined.

Lengths and directions are computed with scaling, so that nothing overflows.
"""

import numpy as np
import numpy.typing as npt

from quantdrift.models.comparators.classes.classification import top_set
from quantdrift.models.comparators.numbers import pair_of
from quantdrift.models.comparators.protocol import Divergences, Flags, Values
from quantdrift.models.tensors.arrays import Array, output_error

ROWS = 64  # directions searched at once: each takes some 40 bytes for each kept one
_DECIMALS = 5  # float32 products of different numbers of rows differ only beyond these
_SAME = (
    1.0 - 1e-5
)  # cosine from which on two directions count as one: repeated inputs, such as a frequent text


def length(vectors: Values) -> Values:
    """Return the Euclidean length of each vector of (items, dimensions); infinite if it overflows float64."""
    largest = np.abs(vectors).max(axis=1, initial=0.0)
    scale = np.where(largest > 0, largest, 1.0)
    with np.errstate(over="ignore"):
        lengths: Values = scale * np.sqrt(((vectors / scale[:, np.newaxis]) ** 2).sum(axis=1))
    return lengths


def direction(vectors: Values) -> Values:
    """Return vectors of (items, dimensions) scaled to length 1; zero vectors stay zero."""
    largest = np.abs(vectors).max(axis=1, initial=0.0, keepdims=True)
    scaled = vectors / np.where(largest > 0, largest, 1.0)
    size = np.sqrt((scaled**2).sum(axis=1, keepdims=True))
    directions: Values = scaled / np.where(size > 0, size, 1.0)
    return directions


def distance(candidate: Values, reference: Values) -> Values:
    """Return 1 - cos of the angle between directions : (items,), in [0, 2].

    It is computed as |u - v|^2 / 2, which is the same for vectors of length 1, is exactly 0 for equal ones, and does not
    lose small angles to rounding.
    """
    distances: Values = np.minimum(((candidate - reference) ** 2).sum(axis=1) / 2, 2.0)
    return distances


ENOUGH = 10  # times k: with fewer vectors the nearest ones are not near


RESERVOIR = 1024
"""Last vectors of the reference, 4 bytes a dimension each: a hundred times the neighbours that are looked up."""
TOLERANCE = 0.05
"""Cosine distance of a flip where `models.tolerance` is not given."""
NEIGHBOURS = 10
"""Vectors that are looked up for each side: as many as a search shows first."""


class EmbeddingComparator:
    """Compares vectors. Not thread-safe: it keeps the reference's last vectors.

    Parameters
    ----------
    tolerance
        An item flips when the cosine distance, 0 to 2, exceeds this.
    neighbours
        How many nearest vectors of the reference are looked up for each side.
    reservoir
        Number of the reference's latest vectors among which neighbours are searched.
    """

    def __init__(
        self, *, tolerance: float = TOLERANCE, neighbours: int = NEIGHBOURS, reservoir: int = RESERVOIR
    ) -> None:
        self._tolerance, self._neighbours = tolerance, neighbours
        self._reservoir = Reservoir(reservoir)

    def compare(self, candidate: Array, reference: Array) -> Divergences:
        """Return the divergence of each item.

        Parameters
        ----------
        candidate, reference
            (items, dimensions).

        Raises
        ------
        QuarantineError
            Reason `output`: they are not such vectors, or their shapes differ.
        """
        for array in (candidate, reference):
            if array.ndim != 2:
                raise output_error(
                    f"an output of shape {list(array.shape)} is not [items, dimensions]: an embedding is one vector for "
                    "each item. Have the model pool its tokens, or set task `tensor`"
                )
        pair = pair_of(candidate, reference, "[items, dimensions]")
        q_length, p_length = length(pair.candidate), length(pair.reference)
        q_finite, p_finite = pair.candidate_finite & (q_length > 0), pair.reference_finite & (p_length > 0)
        both = q_finite & p_finite
        q, p = direction(pair.candidate), direction(pair.reference)
        distances = distance(q, p)
        flip = np.where(q_finite, distances > self._tolerance, True).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            ratio = q_length / np.where(p_finite, p_length, 1.0)
        divergences = Divergences(
            flip=np.where(p_finite, flip, np.nan),
            divergence=np.where(both, distances, np.nan),
            candidate_finite=q_finite,
            reference_finite=p_finite,
            detail={
                "norm_ratio": np.where(both, ratio, np.nan),
                "neighbour_overlap": np.where(both, self._overlap(q, p), np.nan),
            },
        )
        self._reservoir.add(p[p_finite])
        return divergences

    def _overlap(self, q: Values, p: Values) -> Values:
        """Return the share of neighbours that both sides have in common : (items,)."""
        k = self._neighbours
        if not self._reservoir.fits(p) or len(self._reservoir) < ENOUGH * k:
            return np.full(len(p), np.nan)
        share = np.empty(len(p))
        for begin in range(0, len(p), ROWS):
            some = np.s_[begin : begin + ROWS]
            common = self._reservoir.nearest(q[some], k) & self._reservoir.nearest(p[some], k)
            share[some] = common.sum(axis=1) / k
        return share


class Reservoir:
    """The last `size` different directions, in a ring buffer. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        # In float32: more digits find the same neighbours, and take several times as long.
        self._ring = np.empty((size, 0), dtype=np.float32)
        self._n_added = 0

    def __len__(self) -> int:
        """Return the number of kept directions."""
        return min(self._n_added, self._size)

    def fits(self, directions: Values) -> bool:
        """Return whether directions : (items, dimensions) have as many dimensions as the kept ones."""
        return bool(directions.shape[1] == self._ring.shape[1])

    def add(self, directions: Values) -> None:
        """Add directions : (items, dimensions), of length 1, in place of the oldest.

        If their dimensions differ from the kept ones', those are dropped. A direction that is already kept is not added: among
        many equal ones, rounding would decide which are the nearest.
        """
        if not len(directions):
            return  # without rows the dimensions mean nothing
        if not self.fits(directions):
            self._ring, self._n_added = np.empty((self._size, directions.shape[1]), np.float32), 0
        for block in np.array_split(directions.astype(np.float32), -(-len(directions) // ROWS)):
            self._add(block)

    def _add(self, new: npt.NDArray[np.float32]) -> None:
        new = new[~(new @ self._ring[: len(self)].T >= _SAME).any(axis=1)]
        new = new[~np.tril(new @ new.T >= _SAME, -1).any(axis=1)]
        skipped = max(len(new) - self._size, 0)
        slots = (self._n_added + np.arange(skipped, len(new))) % self._size
        self._ring[slots] = new[skipped:]
        self._n_added += len(new)

    def nearest(self, directions: Values, k: int) -> Flags:
        """Return whether each kept direction is among the k nearest to each of `directions` : (items, kept), by cosine.

        Among directions that are equally near to five decimals the first ones count, the same for every item.
        """
        cosines: Values = (directions.astype(np.float32) @ self._ring[: len(self)].T).astype(np.float64)
        return top_set(np.round(cosines, _DECIMALS), k)
