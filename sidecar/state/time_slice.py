"""The time slice of a process on the serving path: short, so that it runs soon after it wakes up.

Linux 6.12 and later divide a processor by deadlines (EEVDF): of the processes that have waited for their share, the one
whose slice ends first runs first. A relay worker runs for some 50 us for each message, far less than the usual slice of about 3 ms.
With a short slice it comes before processes that compute all the time, such as the model, capture or a busy
neighbour. Its share of the processor stays the same: it takes nothing from them, and needs no right. Older kernels ignore it.

Source: sched_setattr(2); Stoica and Abdel-Wahab, Earliest eligible virtual deadline first, 1995.
"""

import ctypes
import os
import platform
import struct
from typing import Final

_SLICE_NS: Final = 100_000  # the kernel's least
_NUMBERS: Final = {"x86_64": 314, "aarch64": 274}
"""Numbers of the system call, for which the C library has no function before glibc 2.41."""
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""Size, policy, flags, niceness, priority, slice, deadline, period."""


def give_short_slice(pid: int) -> bool:
    """Give a child that has just begun, and the threads that it starts, a short time slice; return whether the kernel took it.

    Nothing depends on it: on other systems, and where a sandbox forbids the call, nothing changes. The supervisor does it,
    so that a relay worker need not load what it takes.
    """
    number = _NUMBERS.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        return False
    try:
        policy, nice = os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)
    except OSError:  # it has ended already
        return False
    if policy != os.SCHED_OTHER:
        return False
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, nice, 0, _SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, pid, attributes, 0) == 0)
