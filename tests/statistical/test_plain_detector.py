"""The shipped detectors compared with an independent one in plain loops, on random weighted streams."""

import numpy as np
import pytest

from quantdrift.drift.detectors import budget as fields
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence import header
from quantdrift.drift.evidence.group import group_value
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.watch import Groups, Series, SignalKey, SliceWatch, Thresholds, advance
from tests.statistical.reference_detector import Signal, Slice

pytestmark = pytest.mark.statistical

FLIP, KL = SignalKey("flip", "budget"), SignalKey("divergence", "budget")
THRESHOLDS = Thresholds(page=10.0, ticket=1.0)


def _stream(seed: int, n: int, c: float) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return x (n, 2), pi (n,), seen (n, 2) and mass (n,): calm, drifted, calm, drifted, calm; bursts and pauses."""
    rng = np.random.default_rng(seed)
    part = np.arange(n) * 5 // n
    bad = part % 2 == 1
    flip = (rng.random(n) < np.where(bad, 0.08, 0.0)).astype(float)
    divergence = np.minimum(rng.exponential(np.where(bad, 0.05, 0.0005)), 1.0)
    pi = rng.choice([c, 0.5, 1.0], n)
    seen = np.stack((np.ones(n), (rng.random(n) < 0.8).astype(float)), axis=1)
    gamma = rng.choice([0.0, 1e-9, 1e-7, 1e-4], n, p=[0.3, 0.4, 0.2999, 0.0001])
    return np.stack((flip, divergence), axis=1), pi, seen, np.cumsum(gamma)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.release) for seed in range(2, 6))]
)
def test_it_agrees_with_plain_loops_through_alarms_resets_and_recoveries(seed: int) -> None:
    """Two signals, weights v = c / pi, missing observations, mass in bursts: evidence to 1e-9, changes at the same groups.

    The groups come in batches of random size, so that alarms fall on the first and the last of a run too.
    """
    n, c, rng = 12_000, 0.2, np.random.default_rng(1000 + seed)
    budgets = (0.01, 0.01 if seed % 2 else 0.02)
    x, pi, seen, mass = _stream(seed, n, c)
    weighted = seed % 3 != 0
    watch = SliceWatch()
    for key, m in zip((FLIP, KL), budgets, strict=True):
        watch.add(key, BUDGET.fresh(budget=m, scale=1.0, weighted=weighted, mass=0.0, at_us=0))
    plain = Slice([Signal(m, 0.1 if weighted else 0.15, 0.0) for m in budgets], 10.0, 1.0)
    changes: list[tuple[int, str]] = []
    expected: list[tuple[int, str]] = []
    begin = 0
    while begin < n:
        end = min(begin + int(rng.choice([1, 2, 31, 32, 33, 200])), n)
        part = slice(begin, end)
        values = [
            [group_value([float(x[step, signal])], [float(pi[step])], c, 1) for step in range(begin, end)]
            for signal in range(2)
        ]
        series = {
            key: Series(
                x=np.array([[one.vx, one.v] for one in values[signal]]),
                seen=seen[part, signal] > 0,
            )
            for signal, key in enumerate((FLIP, KL))
        }
        steps = np.arange(begin, end, dtype=float)
        groups = Groups(order=steps, mass=mass[part], at_us=steps, series=series)
        changes += [(change.order, change.after.value) for change in advance([watch], [groups], THRESHOLDS)]
        for step in range(begin, end):
            for number, signal in enumerate(plain.signals):
                if seen[step, number]:
                    v = c / pi[step]
                    signal.see(v * x[step, number], v, float(mass[step]))
            if after := plain.settle(float(mass[step])):
                expected.append((step, after))
        for key, signal in zip((FLIP, KL), plain.signals, strict=True):
            state = watch.states[key]
            np.testing.assert_allclose(state[fields.PAGE], signal.page, rtol=1e-9, atol=1e-280)
            np.testing.assert_allclose(state[fields.TICKET], signal.ticket, rtol=1e-9, atol=1e-280)
            np.testing.assert_allclose(state[header.PAGE_MASS], signal.page_mass, rtol=1e-9, atol=1e-18)
            np.testing.assert_allclose(state[header.TICKET_MASS], signal.ticket_mass, rtol=1e-9, atol=1e-18)
            np.testing.assert_allclose(state[fields.MIRROR], np.minimum(signal.mirror, 1e30), rtol=1e-9)
        begin = end
    assert changes == expected
    assert {"warning", "firing", "watching"} <= {after for _, after in changes}
