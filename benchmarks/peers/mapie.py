"""MAPIE: its risk monitoring, alarm where a confidence sequence's lower end passes a threshold (Podkopaev and Ramdas).

The sequence starts when monitoring does and is never started again: its delay grows with the healthy time before.
The default threshold is the upper bound of the reference's risk plus 0.05; tuned, it is given the healthy rate itself.
"""

import warnings
from importlib import import_module

import numpy as np

from benchmarks.peers.outcome import Outcome, Streams, main, outcome, timed

RUNS = 10  # the bound is calculated anew for every group, some 100 us each
UPTIMES = (0, 2500, 10_000)  # healthy groups before the change
AFTER = 12_000


def judge(streams: Streams) -> list[Outcome]:
    """Return what the rule did, per time of being up; it takes 0 / 1 values alone."""
    if not streams.binary:
        return []
    monitoring = import_module("mapie.exchangeability_testing").RiskMonitoring
    values = streams.values[:RUNS].astype(np.int64)
    rate = float(streams.values[:, : streams.baseline].mean())
    found = []
    for uptime in UPTIMES:
        begin = streams.change - uptime
        spent = timed()
        default: list[list[int]] = []
        tuned: list[list[int]] = []
        for run in values:
            reference, live = run[: streams.baseline], run[begin : streams.change + AFTER]
            monitor = monitoring("accuracy", warn=False).compute_threshold(
                np.zeros_like(reference), reference
            )
            monitor.update(np.zeros_like(live), live)
            lower = monitor.online_risk_lower_bound_sequence_history
            for alarms, threshold in ((default, monitor.threshold), (tuned, rate)):
                over = np.flatnonzero(lower > threshold)
                alarms.append([begin + int(over[0]) + 1] if len(over) else [])
        for setting, alarms in (("default", default), ("threshold = healthy rate", tuned)):
            name = f"MAPIE RiskMonitoring, up for {uptime}"
            found.append(outcome(streams, name, setting, alarms, begin=begin, spent_s=spent()))
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main("mapie", judge)
