"""The monitor: the process that folds comparisons into detectors and opens, escalates and ends alerts."""
