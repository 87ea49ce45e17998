"""Alibi Detect: the online Fisher test for flips, the online Cramer-von-Mises test for divergences.

They need an expected run time (ERT) and windows; there are no defaults. Thresholds come from simulating more streams
than the ERT, twice the largest window long: some ten seconds at an ERT of 500, and an ERT of 400,000, let alone four
million, is out of reach. The second test is slower still and gets one window and a smaller reference.
"""

import contextlib
import sys
import warnings
from importlib import import_module

import numpy as np

from benchmarks.peers.outcome import Outcome, Streams, main, outcome, timed

ERT = 500.0
RUNS = 3
HEALTHY, DRIFTED = 3000, 3000  # groups around the change that are looked at: each takes up to a millisecond


def judge(streams: Streams) -> list[Outcome]:
    """Return what the detector does; after an alarm its windows are emptied, as its makers say."""
    cd = import_module("alibi_detect.cd")
    kind = cd.FETDriftOnline if streams.binary else cd.CVMDriftOnline
    windows, n_bootstraps, n_reference = ([50, 200], 1500, 5000) if streams.binary else ([100], 800, 1000)
    begin, end = streams.change - HEALTHY, streams.change + DRIFTED
    spent = timed()
    alarms = []
    for run in streams.values[:RUNS]:
        values = run.astype(np.bool_) if streams.binary else run
        import_module("numpy.random").seed(1)  # it draws from the global generator
        with contextlib.redirect_stdout(sys.stderr):
            detector = kind(values[:n_reference], ERT, windows, n_bootstraps=n_bootstraps, verbose=False)
        marks = []
        for place in range(begin, end):
            if detector.predict(values[place : place + 1])["data"]["is_drift"]:
                marks.append(place + 1)
                detector.reset_state()
        alarms.append(marks)
    setting = f"ERT {ERT:.0f}, windows {windows}"
    return [outcome(streams, f"Alibi Detect {kind.__name__}", setting, alarms, begin=begin, spent_s=spent())]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main("alibi-detect", judge)
