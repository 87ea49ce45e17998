"""The scans that the demo sends."""

import numpy as np
import pytest
from numpy.random import default_rng

from quantdrift.demo.scans import N_TRAIN, Scanner, Scans

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def sets() -> tuple[Scans, Scans]:
    """Give the pages to learn from and those that are held out."""
    return Scans.bundled()


def test_no_page_is_both_learnt_from_and_sent(sets: tuple[Scans, Scans]) -> None:
    """The split takes every image once."""
    learnable, held_out = sets
    assert len(learnable.labels) == N_TRAIN
    assert len(learnable.labels) + len(held_out.labels) == 1_797
    assert set(held_out.labels.tolist()) == set(range(10))


@pytest.mark.parametrize("scanner", Scanner)
def test_scans_have_the_shape_that_the_model_takes(scanner: Scanner, sets: tuple[Scans, Scans]) -> None:
    """Every scanner gives float32 images of one channel and the digits that were written."""
    images, labels = sets[1].draw(scanner, 7, default_rng(1))
    assert images.shape == (7, 1, 8, 8)
    assert images.dtype == np.float32
    assert labels.shape == (7,)
    assert np.isfinite(images).all()


@pytest.mark.parametrize("scanner", Scanner)
def test_the_same_seed_gives_the_same_scans(scanner: Scanner, sets: tuple[Scans, Scans]) -> None:
    """Nothing but the generator decides."""
    first, second = (sets[0].draw(scanner, 20, default_rng(5)) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_traffic_hardly_ever_repeats_a_scan(sets: tuple[Scans, Scans]) -> None:
    """2,000 scans of 719 pages are 2,000 different images."""
    images, _ = sets[1].draw(Scanner.OFFICE, 2_000, default_rng(2))
    assert len({image.tobytes() for image in images}) == 2_000


def test_each_scanner_has_its_own_range(sets: tuple[Scans, Scans]) -> None:
    """Only the archive's pages lie in a few hundredths of the range, so only they are lost in a coarse step."""
    peak = {
        scanner: float(sets[1].draw(scanner, 500, default_rng(3))[0].max(axis=(1, 2, 3)).mean())
        for scanner in Scanner
    }
    assert peak[Scanner.ARCHIVE] < 0.05
    assert all(peak[scanner] > 0.9 for scanner in Scanner if scanner is not Scanner.ARCHIVE)
    assert peak[Scanner.LAB] > 2.0
