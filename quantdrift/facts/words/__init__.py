"""The sentences that people read about drift, from typed facts. Surfaces choose sentences; none writes one."""
