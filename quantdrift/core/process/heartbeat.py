"""The heartbeat of a child process: the time at which its main thread last ran, in memory shared with the parent."""

import os
import struct
import tempfile
import time
from typing import Final, Self

VARIABLE: Final = "QUANTDRIFT_HEARTBEAT"
"""Environment variable with the file descriptor of the shared memory; absent: nobody watches the process."""
EVERY_S: Final = 1.0
"""Time between two beats, far below the time after which a parent replaces a silent child."""
_TIME: Final = struct.Struct("q")


class Heartbeat:
    """The time of the last beat of one process.

    The child writes, the parent reads. The clock is the monotonic one, which all processes of a host share. Nothing
    blocks: a parent that hangs cannot stop the child, and a child that hangs cannot stop the parent.

    Parameters
    ----------
    fd
        The shared memory; a child inherits it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> Self:
        """Return a new one, which has just beaten."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("quantdrift-heartbeat")
        else:  # pragma: no cover - not Linux
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        created = cls(fd)
        created.beat()
        return created

    @classmethod
    def of_parent(cls) -> Self | None:
        """Return the one that the parent watches, or None; the children of this process do not inherit it."""
        fd = os.environ.pop(VARIABLE, "")
        return cls(int(fd)) if fd.isdecimal() else None

    def beat(self) -> None:
        """Record that the process runs now."""
        os.pwrite(self.fd, _TIME.pack(time.monotonic_ns()), 0)

    def age_s(self) -> float:
        """Return the time since the last beat, seconds."""
        return (time.monotonic_ns() - int(_TIME.unpack(os.pread(self.fd, _TIME.size, 0))[0])) / 1e9
