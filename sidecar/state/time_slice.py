"""The time slice that a process on the serving path asks the kernel for: short, so that it runs soon after it wakes up.

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
_ATTRIBUTES: Final = struct.Struct(
    "=IIQiIQQQ"
)  # size, policy, flags, nice, priority, runtime, deadline, period


def ask_for_short_slice() -> bool:
    """Ask for a short time slice for this thread and those that it starts; return whether the kernel took it.

    Nothing depends on it: on other systems, and where a sandbox forbids the call, nothing changes.
    """
    number = _NUMBERS.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
