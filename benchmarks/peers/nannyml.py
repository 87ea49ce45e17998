"""NannyML: univariate drift of chunks against a reference, with its own thresholds as the default."""

import os
import warnings
from importlib import import_module

import numpy as np

from benchmarks.peers.outcome import Outcome, Streams, chunks, grid, main, outcome, scored, timed

CHUNK = 1000
RUNS = 60  # a run takes a tenth of a second and more


def judge(streams: Streams) -> list[Outcome]:
    """Return what each method did at its own threshold (three deviations over the reference's chunks) and at levels."""
    pandas, nannyml = import_module("pandas"), import_module("nannyml")
    methods = (
        ["jensen_shannon", "chi2", "l_infinity"]
        if streams.binary
        else ["jensen_shannon", "kolmogorov_smirnov", "wasserstein"]
    )
    kind = (
        {"treat_as_categorical": ["x"], "categorical_methods": methods}
        if streams.binary
        else {"continuous_methods": methods}
    )
    runs = streams.values[:RUNS]
    parts = chunks(streams, CHUNK)
    ends = [end for _, end in parts]
    before = sum(end <= streams.change for end in ends)
    scores = {method: np.zeros((len(runs), len(parts))) for method in methods}
    alerts = {method: np.zeros((len(runs), len(parts)), dtype=np.bool_) for method in methods}
    spent = timed()
    for row, run in enumerate(runs):
        column = run.astype(np.int64) if streams.binary else run  # categories are whole numbers
        calculator = nannyml.UnivariateDriftCalculator(column_names=["x"], chunk_size=CHUNK, **kind)
        calculator.fit(pandas.DataFrame({"x": column[: streams.baseline]}))
        result = calculator.calculate(pandas.DataFrame({"x": column[parts[0][0] : parts[-1][1]]}))
        table = result.filter(period="analysis").to_df()
        for method in methods:
            scores[method][row] = table["x", method, "value"].to_numpy(dtype=np.float64)
            alerts[method][row] = table["x", method, "alert"].to_numpy(dtype=np.bool_)
    found = []
    for method in methods:
        name = f"NannyML {method}, chunks of {CHUNK}"
        own = [[ends[place] for place in np.flatnonzero(run)] for run in alerts[method]]
        found.append(outcome(streams, name, "default", own, spent_s=spent() / len(methods)))
        levels = grid(scores[method], before)
        found += scored(streams, name, scores[method], ends, levels, spent_s=spent() / len(methods))
    return found


if __name__ == "__main__":
    os.environ["NML_DISABLE_USAGE_LOGGING"] = "1"
    warnings.filterwarnings("ignore")
    main("nannyml", judge)
