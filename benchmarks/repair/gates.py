"""The gate's errors and its need of samples, on drawn streams of flips.

- `gate_false_pass_at_budget`: the share of streams with a mean at the budget itself that pass within so many groups, looked at
  after each one. The bound says at most 5 %.
- `gate_samples_clean`: groups without a flip until a pass at a budget of 1 %.
- `gate_samples_fail_p90`: groups until nine of ten candidates with 5.4 % flips have failed, at the same budget, as one of
  `_N_QUESTIONS` questions.
"""

from typing import Final

import msgspec
import numpy as np

from benchmarks.result import Goal
from quantdrift.drift.evidence.observations import BoolArray, FloatArray
from quantdrift.drift.gate import Question, Trial, trials

_BUDGET: Final = 0.01
_BROKEN: Final = 0.054
_N_QUESTIONS: Final = 1
_STEPS: Final = 2000
_LONGEST: Final = 2000


class GateFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the gate did.

    Parameters
    ----------
    streams
        Streams at the budget.
    false_pass
        Share of them that passed.
    clean
        Groups without a flip until a pass.
    fail_median, fail_p90
        Groups until a failure at 5.4 % flips.
    """

    streams: int
    false_pass: float
    clean: int
    fail_median: float
    fail_p90: float

    def goals(self) -> list[Goal]:
        """Return the three goals."""
        return [
            Goal(name="gate_false_pass_at_budget", value=self.false_pass, bound=0.05, unit="ratio"),
            Goal(name="gate_samples_clean", value=self.clean, bound=400, unit="samples"),
            Goal(name="gate_samples_fail_p90", value=self.fail_p90, bound=250, unit="samples"),
        ]


def gate_figures(*, quick: bool = False, seed: int = 1) -> GateFigures:
    """Return the figures of 2,000 streams; `quick`: of 400."""
    rng, streams = np.random.default_rng(seed), 400 if quick else 2000
    passed = [_trial().after(_drawn(rng, _BUDGET, _STEPS)).passed is not None for _ in range(streams)]
    clean = _trial().after(_groups(np.zeros(_LONGEST, dtype=np.bool_))).passed
    assert clean is not None
    failed = [_trial().after(_drawn(rng, _BROKEN, _LONGEST)).failed for _ in range(streams)]
    ends = [float("inf") if stop is None else stop.n for stop in failed]
    median, p90 = np.quantile(ends, [0.5, 0.9], method="higher").tolist()
    return GateFigures(
        streams=streams,
        false_pass=float(np.mean(passed)),
        clean=clean.n,
        fail_median=median,
        fail_p90=p90,
    )


def _trial() -> Trial:
    return trials([Question.flips(_BUDGET)] * _N_QUESTIONS)[0]


def _drawn(rng: np.random.Generator, share: float, steps: int) -> FloatArray:
    return _groups(rng.random(steps) < share)


def _groups(flips: BoolArray) -> FloatArray:
    return np.stack((~flips, flips), axis=1).astype(np.float64)
