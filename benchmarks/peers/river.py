"""river: ADWIN, Page-Hinkley, KSWIN, and the detectors for 0 / 1 streams, fed one value after the other."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.peers.outcome import Outcome, Streams, main, outcome, timed

SLOW_RUNS = {"KSWIN": 3, "HDDMA": 10, "HDDMW": 10}
KSWIN_GROUPS = 2000  # before the change and twice after it: it takes half a millisecond for each
_Make = Callable[[], Any]


def _settings(*, binary: bool, spread: float) -> list[tuple[str, str, _Make]]:
    drift, flips = import_module("river.drift"), import_module("river.drift.binary")
    made: list[tuple[str, str, _Make]] = [
        ("ADWIN", "default", drift.ADWIN),
        *(("ADWIN", f"delta={d:g}", lambda d=d: drift.ADWIN(delta=d)) for d in (1e-4, 1e-6, 1e-8, 1e-10)),
        ("PageHinkley", "default", drift.PageHinkley),
        *(
            (
                "PageHinkley",
                f"threshold={h * spread:g}, up",
                lambda h=h: drift.PageHinkley(delta=0.05 * spread, threshold=h * spread, mode="up"),
            )
            for h in (25, 50, 75, 100, 150, 200)
        ),
        ("KSWIN", "default", lambda: drift.KSWIN(seed=1)),
        (
            "KSWIN",
            "alpha=1e-6, window 1000 / 300",
            lambda: drift.KSWIN(alpha=1e-6, window_size=1000, stat_size=300, seed=1),
        ),
    ]
    if not binary:
        return made
    return [
        *made,
        ("DDM", "default", flips.DDM),
        *(("DDM", f"drift_threshold={t}", lambda t=t: flips.DDM(drift_threshold=t)) for t in (4, 5, 6)),
        ("EDDM", "default", flips.EDDM),
        *(("EDDM", f"beta={b}", lambda b=b: flips.EDDM(beta=b, alpha=b + 0.02)) for b in (0.7, 0.5)),
        ("FHDDM", "default", flips.FHDDM),
        (
            "FHDDM",
            "window 1000, confidence 1e-3",
            lambda: flips.FHDDM(sliding_window_size=1000, confidence_level=1e-3),
        ),
        ("HDDMA", "default", flips.HDDMA),
        *(
            (
                name,
                f"confidence={c:g}",
                lambda make=make, c=c: make(drift_confidence=c, warning_confidence=2 * c),
            )
            for name, make in (("HDDMA", flips.HDDMA), ("HDDMW", flips.HDDMW))
            for c in (1e-5, 1e-7)
        ),
        ("HDDMW", "default", flips.HDDMW),
    ]


def judge(streams: Streams) -> list[Outcome]:
    """Return what each detector did at each setting; after an alarm it is made anew, as river's own do."""
    found = []
    spread = float(streams.values[:, : streams.baseline].std())
    for method, setting, make in _settings(binary=streams.binary, spread=spread):
        runs = streams.values[: SLOW_RUNS.get(method, len(streams.values))]
        begin, end = 0, runs.shape[1]
        if method == "KSWIN":
            begin, end = streams.change - KSWIN_GROUPS, streams.change + 2 * KSWIN_GROUPS
        spent = timed()
        alarms = []
        for run in runs:
            detector, marks = make(), []
            for place, x in enumerate(run[begin:end].tolist()):
                detector.update(int(x) if streams.binary else x)
                if detector.drift_detected:
                    marks.append(begin + place + 1)
            alarms.append(marks)
        start = max(begin, streams.baseline)
        found.append(outcome(streams, method, setting, alarms, begin=start, spent_s=spent()))
    return found


if __name__ == "__main__":
    main("river", judge)
