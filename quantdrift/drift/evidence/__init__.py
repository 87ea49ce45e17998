"""The common parts of all detectors: groups, the calendar clock, state, onset, recovery and intervals."""
