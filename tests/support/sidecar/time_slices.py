"""The time slice of a process, from /proc."""

import platform
import re
from pathlib import Path


def time_slice_ns(pid: int) -> int | None:
    """Return the time slice of a process; None where the kernel has none that a process may choose, or does not show it."""
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    if release is None or (int(release[1]), int(release[2])) < (6, 12):
        return None
    try:
        found = re.search(r"se\.slice\s*:\s*(\d+)", Path(f"/proc/{pid}/sched").read_text(encoding="ascii"))
    except OSError:
        return None
    return int(found[1]) if found else None
