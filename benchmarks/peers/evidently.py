"""Evidently: its tests of a chunk against a reference, with its own choice of test and thresholds as the default."""

import warnings
from importlib import import_module

import numpy as np

from benchmarks.peers.outcome import Outcome, Streams, chunks, grid, main, outcome, scored, timed

CHUNKS = (1000,)
RUNS = 60  # a test takes milliseconds
_P_VALUES = {"z", "chisquare", "ks"}


def judge(streams: Streams) -> list[Outcome]:
    """Return what each test did at its own threshold and at levels of its score."""
    pandas = import_module("pandas")
    registry = import_module("evidently.legacy.calculations.stattests.registry")
    kinds = import_module("evidently.legacy.core").ColumnType
    kind = kinds.Categorical if streams.binary else kinds.Numerical
    tests = (None, "psi", "z", "chisquare") if streams.binary else (None, "psi", "jensenshannon", "ks")
    runs = streams.values[:RUNS]
    found = []
    for size in CHUNKS:
        parts = chunks(streams, size)
        ends = [end for _, end in parts]
        before = sum(end <= streams.change for end in ends)
        for name in tests:
            spent = timed()
            scores = np.zeros((len(runs), len(parts)))
            drifted = np.zeros(scores.shape, dtype=np.bool_)
            used = str(name)
            for row, run in enumerate(runs):
                reference = pandas.Series(run[: streams.baseline])
                for column, (begin, end) in enumerate(parts):
                    current = pandas.Series(run[begin:end])
                    test = registry.get_stattest(reference, current, kind, name)
                    result = test(reference, current, kind, None)
                    scores[row, column], drifted[row, column] = result.drift_score, result.drifted
                    used = test.name
            if used in _P_VALUES:
                scores = -scores
            method = f"Evidently {used}, chunks of {size}"
            own = [[ends[place] for place in np.flatnonzero(run)] for run in drifted]
            found.append(outcome(streams, method, "default", own, spent_s=spent()))
            found += scored(streams, method, scores, ends, grid(scores, before), spent_s=spent())
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main("evidently", judge)
