"""An example of every kind of detector, and whether one keeps to finite, nonnegative numbers."""

from collections.abc import Callable

import msgspec
import numpy as np

from quantdrift.drift.detectors import budget
from quantdrift.drift.detectors.change import run
from quantdrift.drift.detectors.growth import EDGES, LatencyBaseline
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, DETECTORS, GROWTH, TAIL, Detector
from quantdrift.drift.detectors.tail import pooled_histogram
from quantdrift.drift.detectors.tail.quantile import tail_bin
from quantdrift.drift.evidence.observations import STEPS, FloatArray, ObservationBlock
from tests.support.monitor import change_streams, tail_streams

PATHS = ("page", "page_mass", "ticket", "ticket_mass", "recovery")
PAGES = {
    "budget": budget.PAGE,
    "change": run.PAGE,
    "tail": pooled_histogram.PAGE,
    "growth": budget.PAGE,
}  # evidence of each bet, in a state


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to put a kind to the test.

    Parameters
    ----------
    live
        Returns the state of a signal that takes part.
    learning
        Returns that of one that does not yet, or None where there is no such thing.
    shown
        Returns what one-item groups with values x, (steps, N), show: (steps, N, width).
    apart_us
        Time between two groups: some baselines need more than a number of groups.
    """

    live: Callable[[], FloatArray]
    learning: Callable[[], FloatArray] | None
    shown: Callable[[FloatArray], FloatArray]
    apart_us: int = 1_000_000


def _budget() -> FloatArray:
    return BUDGET.fresh(budget=0.01, scale=1.0, weighted=False, mass=0.0, at_us=0)


def _change() -> FloatArray:
    return CHANGE.from_content(change_streams.baseline(6000, 60, tau=0.25), scale=1.0, mass=0.0, at_us=0)


def _tail() -> FloatArray:
    found: FloatArray = tail_streams.learned(np.random.default_rng(1), 1, 30_000, tau=0.25)[0]
    return found


def _growth() -> FloatArray:
    counts = times(np.linspace(0.0, 0.02, 5000)[:, None])[:, 0, 1:].sum(axis=0)
    known = LatencyBaseline(counts=tuple(counts.tolist()), n_groups=5000, growth=2.0, learned_s=0.02)
    return GROWTH.from_content(known, scale=1.0, mass=0.0, at_us=0)


def times(x: FloatArray) -> FloatArray:
    """Return what groups of one exchange show that took x seconds, (steps, N): (steps, N, width), with weights of 1."""
    found: FloatArray = np.zeros((*x.shape, GROWTH.width))
    found[..., 0] = 1.0
    bins = np.searchsorted(EDGES, x, side="right") + 1
    np.put_along_axis(found, bins[..., None], 1.0, axis=-1)
    return found


def pairs(x: FloatArray) -> FloatArray:
    """Return values and weights of 1, (steps, N, 2), with what is above 1 clipped."""
    found: FloatArray = np.stack((np.minimum(x, 1.0), np.ones(x.shape)), axis=-1)
    return found


EXAMPLES: dict[str, Example] = {
    "budget": Example(live=_budget, learning=None, shown=pairs),
    "change": Example(
        live=_change,
        learning=lambda: CHANGE.fresh(scale=1.0, mass=0.0, at_us=0),
        shown=lambda x: change_streams.observed(np.minimum(x, 1.0)),
    ),
    "tail": Example(
        live=_tail,
        learning=lambda: TAIL.fresh(tau=0.25, scale=1.0, mass=0.0, at_us=0),
        shown=lambda x: tail_streams.observed(tail_bin(x)),
    ),
    "growth": Example(
        live=_growth,
        learning=lambda: GROWTH.fresh(tau=1.0, scale=1.0, mass=0.0, at_us=0),
        shown=times,
        apart_us=60_000_000,
    ),
}


def given(kind: str, x: FloatArray, *, first: int = 0, gamma: float = 1e-9) -> ObservationBlock:
    """Return groups of one item with values x, (steps, N), a second apart or what the kind needs."""
    example = EXAMPLES[kind]
    return change_streams.block(example.shown(x), first=first, gamma=gamma, second_us=example.apart_us)


def phases(kind: str) -> FloatArray:
    """Return states of every stage: watching, warned, firing, and learning where there is such a thing."""
    detector, example = DETECTORS[kind], EXAMPLES[kind]
    states = [example.live() for _ in range(3)]
    detector.alarmed(states[1], page=False)
    detector.alarmed(states[2], page=True)
    if example.learning:
        states += [example.learning(), example.learning()]
        detector.alarmed(states[4], page=True)
    return np.stack(states)


def after(detector: Detector, states: FloatArray, block: ObservationBlock) -> FloatArray:
    """Return the states at the end of a block."""
    return detector.run(states, block).stopped(np.full(len(states), len(block.seen) - 1))


def mixed(seed: int, n: int) -> FloatArray:
    """Return values of n signals over a whole block, some of them 1."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random((STEPS, n)) < 0.05, 1.0, rng.exponential(0.005, (STEPS, n)))


def sound(detector: Detector, states: FloatArray, shown: FloatArray) -> bool:
    """Return whether 30 blocks that all show the same, (steps, N, width), leave finite, nonnegative numbers alone.

    Resolve and alarms included: an alarm resets what has passed 1e9, as a watch would long before. Arithmetic that
    leaves the numbers is as unsound as a number that is none.
    """
    first = 0
    try:
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            for _ in range(30):
                path = detector.run(
                    states, change_streams.block(shown, first=first, gamma=1e-9, second_us=1_000_000)
                )
                hit = path.page >= 1e9
                states = path.stopped(np.where(hit.any(axis=0), hit.argmax(axis=0), STEPS - 1))
                values = (*(getattr(path, name) for name in PATHS), states[:, PAGES[detector.kind]])
                if not np.isfinite(states).all() or any((one < 0).any() for one in values):
                    return False
                for row in np.flatnonzero(hit.any(axis=0)):
                    detector.alarmed(states[row], page=True)
                first += STEPS
                for state in states:
                    detector.tend(state, mass=first * 1e-9, at_us=first * 1_000_000)
    except FloatingPointError:
        return False
    return bool(np.isfinite(states).all())
