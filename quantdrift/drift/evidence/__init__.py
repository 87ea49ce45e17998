"""What all detectors share: groups, the calendar clock, state, onset, recovery and intervals."""
