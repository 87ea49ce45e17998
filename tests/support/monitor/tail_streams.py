"""Streams of groups for the tail detector: divergences as it observes them, and baselines drawn from them."""

import numpy as np

from benchmarks.streams import Divergences
from quantdrift.drift.detectors.tail.detector import TailDetector
from quantdrift.drift.detectors.tail.pooled_histogram import TailBaseline
from quantdrift.drift.detectors.tail.quantile import N_BINS, tail_bin
from quantdrift.drift.evidence.observations import STEPS, FloatArray, IntArray, ObservationBlock
from quantdrift.drift.evidence.run import BlockRun
from tests.support.monitor.change_streams import block

TAIL = TailDetector()
HEALTHY, STRETCHED = Divergences(), Divergences(factor=3.0)


def observed(bins: IntArray) -> FloatArray:
    """Return what groups of one item each show, (steps, N, bins), from their bins (steps, N)."""
    weights = np.zeros((*bins.shape, N_BINS))
    np.put_along_axis(weights, bins[..., None], 1.0, axis=-1)
    return weights


def baseline(counts: FloatArray, *, tau: float, bound: float = 0.0) -> TailBaseline:
    """Return a baseline with these weights per bin; a bound, the same for every bin, lets it be live at any length."""
    return TailBaseline(
        counts=tuple(counts.tolist()),
        n_groups=round(float(counts.sum())),
        bound=(bound,) * N_BINS if bound else (),
        n_bound=1 if bound else 0,
        tau=tau,
    )


def learned(rng: np.random.Generator, n: int, n_groups: int, *, tau: float, bound: float = 0.0) -> FloatArray:
    """Return n live states, each with a baseline of its own, drawn from healthy divergences."""
    states = []
    for _ in range(n):
        counts = np.bincount(tail_bin(HEALTHY.draw(rng, (n_groups,))), minlength=N_BINS).astype(np.float64)
        known = baseline(counts, tau=tau, bound=bound)
        states.append(TAIL.from_content(known, scale=1.0, mass=0.0, at_us=0))
    return np.stack(states)


def given(rng: np.random.Generator, stream: Divergences, n: int, first: int) -> ObservationBlock:
    """Return a block of one-item groups of n signals on the sample clock."""
    return block(observed(tail_bin(stream.draw(rng, (STEPS, n)))), first=first)


def last(path: BlockRun) -> FloatArray:
    """Return the states at the end of a whole block."""
    return path.stopped(np.full(path.page.shape[1], STEPS - 1))
