"""The different directions that a reference gave of late, in which the neighbours of a vector are looked up."""

import numpy as np
import numpy.typing as npt

from quantdrift.shadow.comparators.classes.classification import top_set
from quantdrift.shadow.comparators.protocol import Flags, Values

ROWS = 64  # directions that are looked up at once: each takes some 40 bytes for each one that is kept

_DECIMALS = 5  # what a float32 product of another number of rows may round otherwise is beyond these
_SAME = 1.0 - 1e-5  # cosine from which on two directions are one: that of a text that many people send


class Reservoir:
    """The last so many directions, in a ring. One thread at a time may use it.

    Parameters
    ----------
    size
        How many are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # In float32: a cosine in more digits finds no other neighbours, and takes several times as long.
        self._ring = np.empty((size, 0), dtype=np.float32)
        self._n_added = 0

    def __len__(self) -> int:
        """Return how many there are."""
        return min(self._n_added, self._size)

    def fits(self, directions: Values) -> bool:
        """Return whether directions : (items, dimensions) have as many dimensions as those that are kept."""
        return bool(directions.shape[1] == self._ring.shape[1])

    def add(self, directions: Values) -> None:
        """Add directions : (items, dimensions), of length 1; the oldest make room. Those of other dimensions go.

        One that is there already is not added: of many equal ones, rounding alone would say which are the nearest.
        """
        if not len(directions):
            return  # nothing can be said of their dimensions
        if not self.fits(directions):
            self._ring, self._n_added = np.empty((self._size, directions.shape[1]), np.float32), 0
        for block in np.array_split(directions.astype(np.float32), -(-len(directions) // ROWS)):
            self._add(block)

    def _add(self, new: npt.NDArray[np.float32]) -> None:
        new = new[~(new @ self._ring[: len(self)].T >= _SAME).any(axis=1)]
        new = new[~np.tril(new @ new.T >= _SAME, -1).any(axis=1)]
        skipped = max(len(new) - self._size, 0)
        places = (self._n_added + np.arange(skipped, len(new))) % self._size
        self._ring[places] = new[skipped:]
        self._n_added += len(new)

    def nearest(self, directions: Values, k: int) -> Flags:
        """Return which of those that are kept are the k nearest to each direction : (items, kept), by cosine.

        Of ones that are equally near to five decimals those that stand first are, the same for every direction.
        """
        cosines: Values = (directions.astype(np.float32) @ self._ring[: len(self)].T).astype(np.float64)
        return top_set(np.round(cosines, _DECIMALS), k)
