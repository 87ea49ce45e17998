"""Handwritten digits as five scanners see them: scikit-learn's bundled set under five acquisition conditions."""

from enum import StrEnum
from typing import Self

import msgspec
import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

SIDE = 8
N_TRAIN = 1_078
"""Images the models may learn and calibrate from; the other 719 are only ever sent as traffic."""

_NOISE = 0.03  # sensor noise, as a share of full scale
_SPLIT_SEED = 2026

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


class Scanner(StrEnum):
    """Who sends a scan, and so under which condition it was acquired."""

    OFFICE = "office"  # clean pages
    LAB = "lab"  # an amplified sensor: gain x1.5 to x2.5
    MICROFILM = "microfilm"  # negatives
    MOBILE = "mobile"  # stray light: an offset of 0.3 to 0.8
    ARCHIVE = "archive"  # faded ink: 1.3 to 4 % of the usual contrast


class Scans(msgspec.Struct, frozen=True, kw_only=True):
    """A set of digit images before acquisition.

    Parameters
    ----------
    images
        (image, row, column), float64 in [0, 1]: the ink.
    labels
        (image,), int64 in 0..9: the digit that was written.
    """

    images: NDArray[np.float64]
    labels: Labels

    @classmethod
    def bundled(cls) -> tuple[Self, Self]:
        """Return scikit-learn's 1,797 digits as (for training and calibration, held out)."""
        from sklearn.datasets import load_digits  # noqa: PLC0415 - a second of imports, for its users alone

        digits = load_digits()
        order = default_rng(_SPLIT_SEED).permutation(len(digits.target))
        images, labels = digits.images[order] / 16.0, digits.target[order].astype(np.int64)
        return (
            cls(images=images[:N_TRAIN], labels=labels[:N_TRAIN]),
            cls(images=images[N_TRAIN:], labels=labels[N_TRAIN:]),
        )

    def draw(self, scanner: Scanner, n: int, rng: Generator) -> tuple[Images, Labels]:
        """Scan `n` pages, drawn with replacement.

        Each is moved by up to one column and gets noise of its own, so hardly any two scans are equal.

        Parameters
        ----------
        scanner
            The acquisition condition.
        n
            How many.
        rng
            The only source of randomness.

        Returns
        -------
        images : (n, 1, 8, 8), float32
        labels : (n,), int64
        """
        chosen = rng.integers(len(self.labels), size=n)
        columns = (np.arange(SIDE) + rng.integers(-1, 2, (n, 1)))[:, None, :] + 1
        wide = np.pad(self.images[chosen], ((0, 0), (0, 0), (1, 1)))
        ink = np.take_along_axis(wide, np.broadcast_to(columns, (n, SIDE, SIDE)), axis=2)
        ink = np.clip(ink + rng.normal(0.0, _NOISE, ink.shape), 0.0, 1.0)
        acquired = _acquire(scanner, ink, rng)
        return acquired[:, None].astype(np.float32), self.labels[chosen]


def _acquire(scanner: Scanner, ink: NDArray[np.float64], rng: Generator) -> NDArray[np.float64]:
    def level(low: float, high: float) -> NDArray[np.float64]:
        return rng.uniform(low, high, (len(ink), 1, 1))

    match scanner:
        case Scanner.OFFICE:
            return ink
        case Scanner.LAB:
            return ink * level(1.5, 2.5)
        case Scanner.MICROFILM:
            return 1.0 - ink
        case Scanner.MOBILE:
            return ink + level(0.3, 0.8)
        case Scanner.ARCHIVE:
            return ink * level(0.013, 0.04)
