"""The tap: a Python server tells of its own exchanges. The caller never waits, and never sees an error."""

from quantdrift.sidecar.tap.tap import Tap

__all__ = ["Tap"]
