"""The tap: it records the exchanges of a Python server from within.

The caller never waits and never sees an error.
"""

from quantdrift.sidecar.tap.tap import Tap

__all__ = ["Tap"]
