"""Streams of groups for the change detector: margins and values as it observes them, on the sample clock."""

import numpy as np

from quantdrift.drift.detectors.change.baseline import Baseline
from quantdrift.drift.detectors.change.detector import ChangeDetector
from quantdrift.drift.evidence.margin import N_BINS
from quantdrift.drift.evidence.observations import STEPS, FloatArray, IntArray, ObservationBlock

CHANGE = ChangeDetector()
SURE = N_BINS - 1  # the bin of large margins


def observed(x: FloatArray, bins: IntArray | int = SURE) -> FloatArray:
    """Return what groups of one item each show, (steps, N, width): value and margin bin, both (steps, N)."""
    found = np.zeros((*x.shape, CHANGE.width))
    step, row = np.indices(x.shape)
    found[step, row, bins] = 1.0
    found[step, row, np.asarray(bins) + N_BINS] = x
    return found


def block(x: FloatArray, *, first: int = 0, gamma: float = 1.0, second_us: int = 1) -> ObservationBlock:
    """Return groups, (steps, N, width), as a block; group t has mass (first + t + 1) * gamma."""
    shape = x.shape[:2]
    steps = np.arange(first + 1, first + 1 + len(x), dtype=np.float64)[:, None]
    return ObservationBlock(
        x=x,
        seen=np.ones(shape, dtype=bool),
        mass=np.broadcast_to(steps * gamma, shape),
        at_us=np.broadcast_to(steps * second_us, shape),
    )


def baseline(n: int, events: float, *, tau: float, bins: IntArray | int = SURE) -> Baseline:
    """Return a settled baseline of n groups whose items and events lie evenly in some margin bins."""
    even = np.zeros(N_BINS)
    even[bins] = 1.0 / np.size(bins)
    return Baseline(share=tuple(n * even), total=tuple(events * even), n_groups=n, tau=tau).settled()


def learned(n: int, events: IntArray, *, tau: float) -> FloatArray:
    """Return live states, one for each number of events among n groups of a baseline."""
    known = {
        int(k): CHANGE.from_content(baseline(n, float(k), tau=tau), scale=1.0, mass=0.0, at_us=0)
        for k in np.unique(events)
    }
    return np.stack([known[int(k)] for k in events])


def first_passages(
    states: FloatArray, rate: FloatArray | float, n: int, threshold: float, seed: int
) -> FloatArray:
    """Return per stream of flips at `rate` the group at which evidence first reaches `threshold`, else infinity."""
    rng = np.random.default_rng(seed)
    found = np.full(len(states), np.inf)
    for first in range(0, n, STEPS):
        x = (rng.random((STEPS, len(states))) < rate).astype(np.float64)
        path = CHANGE.run(states, block(observed(x), first=first))
        hit = path.page >= threshold
        found = np.minimum(found, np.where(hit.any(axis=0), first + hit.argmax(axis=0) + 1.0, np.inf))
        states = path.stopped(np.full(len(states), STEPS - 1))
    return found


def baseline_of(groups: FloatArray, *, since_us: int, until_us: int) -> Baseline:
    """Return the baseline of observed groups, (n, width), with strata and bounds however few they are."""
    sums = groups.sum(axis=0)
    learning = Baseline(
        share=tuple(map(float, sums[:N_BINS])),
        total=tuple(map(float, sums[N_BINS:])),
        n_groups=len(groups),
        since_us=since_us,
        until_us=until_us,
    )
    return learning.settled()
