"""The reservoir of a reference's last different directions, for the search of a vector's neighbours."""

import numpy as np
import numpy.typing as npt

from quantdrift.models.comparators.classes.classification import top_set
from quantdrift.models.comparators.protocol import Flags, Values

ROWS = 64  # directions searched at once: each takes some 40 bytes for each kept one

_DECIMALS = 5  # float32 products of different numbers of rows differ only beyond these
_SAME = (
    1.0 - 1e-5
)  # cosine from which on two directions count as one: repeated inputs, such as a frequent text


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
