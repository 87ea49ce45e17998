"""Delays of the shipped detectors against the oracle, case by case."""

from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.oracle import Oracle, tuned
from benchmarks.plots import Curve
from benchmarks.race import OPERATING_POINT, Contestant, Passages, Ratio, compare, known, learned, race
from benchmarks.streams import BASELINE, FLIPS, HARD, TAIL, Case, Exceedances, Flips, Law, Stream
from benchmarks.usual import EVER_05, WINDOW, Z_05, NeverRestarted, ZTest
from quantdrift.drift.detectors.tail.pooled_histogram import READY
from quantdrift.drift.evidence.observations import FloatArray

N_DETECTORS, SAMPLES_PER_S, PAGES_PER_30_DAYS = 4000, 1.0, 0.1
# Evidence on the sample clock that is 1 / q on the calendar clock: (1 / q) / gamma, gamma = dt / (30 days * N_det).
PRODUCTION = 30 * 86_400 * SAMPLES_PER_S * N_DETECTORS / PAGES_PER_30_DAYS
HORIZON = {case.name: 20_000 for case in (*FLIPS, TAIL, HARD)} | {
    FLIPS[3].name: 60_000,
    FLIPS[4].name: 80_000,
}
CASES = {case.name: case for case in (*FLIPS, TAIL, HARD)}
BEST, NO_GAP = "oracle", "oracle without the gap"
_GRID = np.geomspace(1e2, 1e12, 21)
_ORACLE_GRID = np.linspace(3.0, 15.0, 25)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A contestant in a case.

    Parameters
    ----------
    case, name
        Which.
    ratios
        Oracle's name to the delays at A = 4e6 against it; empty where a contestant has no such point.
    production
        Mean delay and its standard error at the production threshold, where it has one.
    curve
        Over all of its thresholds.
    false_runs
        Share of runs with an alarm before the change at the usual threshold: p < .05 for tests, else as above.
    """

    case: str
    name: str
    ratios: dict[str, Ratio]
    production: tuple[float, float] | None
    curve: Curve
    false_runs: float


def measure(name: str, runs: int, seed: int) -> list[Measured]:
    """Run one case.

    Parameters
    ----------
    name
        Of the case.
    runs
        Side by side.
    seed
        Of the stream.
    """
    case, horizon = CASES[name], HORIZON[name]
    entries: dict[str, tuple[Contestant, Sequence[float]]] = {}
    points: dict[str, float] = {}
    for best, (before, after) in _oracles(case).items():
        points[best] = tuned(before, after)
        entries[best] = Oracle(before, after, runs), _levels(_ORACLE_GRID, points[best])
    for label, contestant in _shipped(case, runs).items():
        entries[label] = contestant, _levels(_GRID, OPERATING_POINT, PRODUCTION)
    if case is FLIPS[0]:
        entries[f"z test, windows of {WINDOW}"] = ZTest(0.01, runs), _levels(np.linspace(2.0, 5.0, 7), Z_05)
        entries["e-process, never restarted"] = NeverRestarted(0.01, runs), _levels(np.log([2e1, 1e3, 1e6]))
    found = race(Stream(case, runs, seed), entries, horizon=horizon)
    measured = []
    for label, raw in found.items():
        passages = msgspec.structs.replace(raw, ready=_ready(label))
        ratios: dict[str, Ratio] = {}
        production = None
        usual = points.get(label, OPERATING_POINT)
        if label not in points and not label.startswith(("z test", "e-process")):
            for best, point in points.items():
                at = _index(found[best], point)
                ratios[best] = compare(passages, _index(passages, OPERATING_POINT), found[best], at, horizon)
            late = np.minimum(passages.delays(_index(passages, PRODUCTION)), horizon)
            production = float(np.nanmean(late)), float(np.nanstd(late) / np.sqrt(np.isfinite(late).sum()))
        elif label.startswith("z test"):
            usual = Z_05
        elif label.startswith("e-process"):
            usual = EVER_05
            at = _index(found[BEST], points[BEST])
            ratios[BEST] = compare(passages, _index(passages, usual), found[BEST], at, horizon)
        curve = curve_of(label, passages, horizon)
        false_runs = float(np.isnan(passages.delays(_index(passages, usual))).mean())
        measured.append(
            Measured(
                case=name,
                name=label,
                ratios=ratios,
                production=production,
                curve=curve,
                false_runs=false_runs,
            )
        )
    return measured


def curve_of(label: str, passages: Passages, horizon: int) -> Curve:
    """Return rates and mean delays over the thresholds at which half of the runs came to the change without an alarm."""
    rates, delays = [], []
    n_groups = 1.0
    for threshold in range(len(passages.thresholds)):
        delay = passages.delays(threshold)
        if np.isnan(delay).mean() > 0.5:
            continue
        n_false, groups = passages.false_rate(threshold)
        n_groups = max(n_groups, groups)
        rates.append(1e6 * n_false / groups)
        delays.append(float(np.nanmean(np.minimum(delay, horizon))))
    return Curve(label=label, rates=rates, delays=delays, style="-", least=1e6 / n_groups)


def _oracles(case: Case) -> dict[str, tuple[Law, Law]]:
    laws: dict[str, tuple[Law, Law]] = {BEST: (case.before, case.after)}
    if case is TAIL:
        laws[NO_GAP] = Exceedances(factor=1.0), Exceedances(factor=3.0)
    return laws


def _shipped(case: Case, runs: int) -> dict[str, Contestant]:
    if not isinstance(case.before, Flips):
        mean = 0.0175 if case is HARD else 0.0165
        return {"tail, tau 0": learned("tail", 0.0, runs), "budget on the mean": known(mean, runs)}
    found: dict[str, Contestant] = {"budget": known(case.before.rate, runs)}
    if case in FLIPS[:2]:
        found["change, tau 0"] = learned("change", 0.0, runs)
        found["change, tau 0.25"] = learned("change", 0.25, runs)
    return found


def _ready(label: str) -> int:
    return READY if label.startswith("tail") else BASELINE if label.startswith("change") else 0


def _levels(grid: FloatArray, *points: float) -> list[float]:
    return sorted({*grid.tolist(), *points})


def _index(passages: Passages, point: float) -> int:
    return int(np.argmin(np.abs(passages.thresholds - point)))
