"""Child processes that die with their owner, however it died."""

import os
import signal
import sys
from collections.abc import Sequence

# Runs before the program in the child's place: no Python code may run between fork and exec of a threaded parent.
# argv: parent's pid, signal, program, its arguments. A parent that died meanwhile is noticed by its pid.
_LEASH = """\
import ctypes, os, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, int(sys.argv[2]), 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[3], sys.argv[3:])
"""


def leashed(command: Sequence[str], number: signal.Signals = signal.SIGTERM) -> list[str]:
    """Return the command that runs `command`, under the same process id, and is sent a signal when its owner ends.

    The kernel (Linux: PR_SET_PDEATHSIG; elsewhere there is no leash) means the owner's thread: start children from
    a thread that lives as long as the process, which is the main thread.

    Parameters
    ----------
    command
        Absolute path of the program, then its arguments.
    number
        The signal.
    """
    return [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), str(int(number)), *command]
