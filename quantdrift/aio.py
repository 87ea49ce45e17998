"""The functions of `quantdrift` for code that runs in an event loop: each has the same parameters and is awaited.

They run in a thread, call `progress` in the event loop, and end soon after their task is cancelled.
"""

from typing import Any, Generic, TypeVar

from quantdrift.release import compare as _compare
from quantdrift.release import connect as _connect
from quantdrift.release import plan as _plan
from quantdrift.release.blocking import in_thread
from quantdrift.release.diagnose import diagnose as _diagnose
from quantdrift.release.gate import gate as _gate
from quantdrift.release.load_test import load as _load
from quantdrift.release.quantise import quantise as _quantise
from quantdrift.release.repair import repair as _repair
from quantdrift.release.setting import File

__all__ = ["Connection", "compare", "connect", "diagnose", "gate", "load", "plan", "quantise", "repair"]

FrameT = TypeVar("FrameT")

compare = in_thread(_compare.compare)
diagnose = in_thread(_diagnose.diagnose)
gate = in_thread(_gate.gate)
load = in_thread(_load.load)
plan = in_thread(_plan.plan)
quantise = in_thread(_quantise.quantise)
repair = in_thread(_repair.repair)


class Connection(Generic[FrameT]):
    """The database of one address, as `quantdrift.Connection`: `figures`, `incidents` and `items` are awaited."""

    def __init__(self, connection: "_connect.Connection[FrameT]") -> None:
        self.figures = in_thread(connection.figures)
        self.incidents = in_thread(connection.incidents)
        self.items = in_thread(connection.items)


def connect(dsn: str, *, library: _connect.Library = "pandas", config: File | None = None) -> Connection[Any]:
    """Return what a database knows; parameters and errors as of `quantdrift.connect`."""
    return Connection(_connect.connect(dsn, library=library, config=config))
