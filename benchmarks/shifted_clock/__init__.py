"""A wall clock that a benchmark or a test moves under running processes, while their monotonic clock stays as it is.

A library in C, loaded before all others (LD_PRELOAD), moves what Python, OpenSSL and Postgres read. NATS asks the kernel itself: its
processes keep the real time, and `python/sitecustomize.py` moves what NATS says on the way into a Python process. What NATS does by its
own clock stays real: when a message expires (`stream.max_age_s`), and how long it waits for an acknowledgement.

Processes with the same file jump together. Another process, such as the test itself, has the real time.
"""

import mmap
import os
import struct
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_SHIFT: Final = struct.Struct("=q")


class ShiftedClock:
    """The clock of all processes that are started with `environment`. It needs a C compiler (`cc`) and Linux.

    Parameters
    ----------
    directory
        For its two files; other users may read it.
    name
        Of the file with the shift: two clocks may share a directory.

    Raises
    ------
    OSError
        There is no compiler, or it does not work.
    """

    def __init__(self, directory: Path, name: str = "shift") -> None:
        library, self._path = directory / "clock.so", directory / name
        if not library.exists():
            command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_HERE / "clock.c")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"the C compiler does not make the shifted clock: {done.stderr.strip()}")
        self._path.write_bytes(_SHIFT.pack(0))
        self._path.chmod(0o644)  # the database server may run as another user
        with self._path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), _SHIFT.size)
        self._library = library

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment, and its children with it."""
        paths = [str(_HERE / "python"), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        return {
            "LD_PRELOAD": str(self._library),
            "SHIFTED_CLOCK": str(self._path),
            "PYTHONPATH": os.pathsep.join(paths),
        }

    @property
    def shift(self) -> timedelta:
        """How far ahead of the real time it is."""
        return timedelta(microseconds=_SHIFT.unpack(self._mapped[: _SHIFT.size])[0] // 1000)

    @shift.setter
    def shift(self, shift: timedelta) -> None:
        self._mapped[: _SHIFT.size] = _SHIFT.pack(round(shift.total_seconds() * 1e6) * 1000)

    def now(self) -> datetime:
        """Return what its processes take for the time."""
        return datetime.now(UTC) + self.shift
