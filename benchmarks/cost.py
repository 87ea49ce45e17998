"""What detection costs: time per group of a slice, through the shipped watch, and bytes of state."""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.race import OBSERVE, Shipped, known, learned
from benchmarks.streams import Divergences, Flips, Law
from quantdrift.drift.detectors.protocol import DETECTORS, LEARNERS
from quantdrift.drift.evidence.observations import STEPS, FloatArray, IntArray
from quantdrift.drift.watch import Groups, Series, SignalKey, SliceWatch, Thresholds, advance

BATCH_ITEMS = 64  # of the shadow's default
SHARES = np.geomspace(1.0, 0.005, 40)  # of the traffic, slices of a small fleet
THRESHOLDS = Thresholds(page=10.0, ticket=1.0)
_LEARNED = 12_000  # groups at least
_GAMMA = 1e-9
_LAWS: dict[str, Law] = {"flip": Flips(rate=0.005), "divergence": Divergences()}


def signals() -> list[SignalKey]:
    """Return the signals of a slice with flips and divergences, as `quantdrift.monitor.fold.groups` has them."""
    wanted = (("flip", "budget"), ("divergence", "budget"), ("flip", "change"), ("divergence", "tail"))
    return [SignalKey(metric, kind) for metric, kind in wanted if kind in DETECTORS]


def live_state(key: SignalKey) -> FloatArray:
    """Return the state of a signal that takes part."""
    rng = np.random.default_rng(7)
    one: Shipped = known(0.02, 1) if key.kind == "budget" else learned(key.kind, 0.25, 1)
    if key.kind in LEARNERS:
        n = 0
        while n < _LEARNED or not DETECTORS[key.kind].live(one.states[0]):
            one.follow(np.minimum(_LAWS[key.metric].draw(rng, (STEPS, 1)), 1.0))
            n += STEPS
    state: FloatArray = one.states[0]
    DETECTORS[key.kind].arm(state, mass=0.0, at_us=0)
    return state


def fleet_us(keys: Sequence[SignalKey], batches: int) -> float:
    """Return microseconds per group and slice in batches of 64 exchanges, as the fold gives them.

    Parameters
    ----------
    keys
        The signals of every slice.
    batches
        How many are timed, after as many that are not.
    """
    rng = np.random.default_rng(8)
    given = [rng.binomial(BATCH_ITEMS, SHARES) for _ in range(2 * batches)]
    return _timed(keys, given)


def wide_us(keys: Sequence[SignalKey], slices: int, batches: int) -> float:
    """Return the same with 32 groups of each of many slices at once: what a backlog could give."""
    return _timed(keys, [np.full(slices, STEPS) for _ in range(2 * batches)])


def state_bytes() -> int:
    """Return the largest state of any registered detector."""
    return max(8 * detector.size for detector in DETECTORS.values())


def _timed(keys: Sequence[SignalKey], given: Sequence[IntArray]) -> float:
    rng = np.random.default_rng(9)
    fresh = {key: live_state(key) for key in keys}
    watches = [SliceWatch(states={key: state.copy() for key, state in fresh.items()}) for _ in given[0]]
    spent, n = [], []
    mass = 0.0
    for counts in given:
        groups = []
        for count in counts:
            steps = np.arange(1.0, count + 1)
            series = {
                key: Series(
                    x=OBSERVE[key.kind](np.minimum(_LAWS[key.metric].draw(rng, (count, 1)), 1.0))[:, 0]
                )
                for key in keys
            }
            groups.append(Groups(order=steps, mass=mass + steps * _GAMMA, at_us=steps, series=series))
        mass += BATCH_ITEMS * _GAMMA
        begin = time.process_time()
        advance(watches, groups, THRESHOLDS)
        for watch in watches:
            for key, state in watch.states.items():
                DETECTORS[key.kind].tend(state, mass=mass, at_us=0)
        spent.append(time.process_time() - begin)
        n.append(int(counts.sum()))
    half = len(given) // 2
    # Processor time, and the median batch: other processes on the machine hardly count.
    return float(np.median(np.array(spent[half:]) / np.array(n[half:]))) * 1e6
