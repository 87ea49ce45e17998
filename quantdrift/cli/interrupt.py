"""Ctrl-C: it ends every command without a traceback, with exit code 130.

While a command loads its packages, which takes up to a second, and while Python shuts down, it ends the process at once. In
between it raises `KeyboardInterrupt`, so that a command can close what it opened. Processes that stop in order take over
the signal themselves (`quantdrift.core.process.run`), and so does a command that has something to record before it ends.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130  # as a shell reports a process that SIGINT ended


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def leave_on_interrupt() -> None:
    """End the process at once on Ctrl-C, unless its parent had the signal ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` inside the block."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _leave)
