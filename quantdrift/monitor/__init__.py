"""The one process that folds comparisons into detectors and owns the alert life cycle."""
