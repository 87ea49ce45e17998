"""The heartbeats of child processes, and the judgement of their parent whether a child hangs.

A child counts its beats where the parent can read them; a count, not a time: the parent compares it with its own progress.

A process that is merely slow must not be killed, so time counts only as far as the parent itself runs: it looks every
`LOOK_S`, and whatever the clock says between two looks, at most `_MOST_CREDIT_S` of it count against a child. After a
paused container, a suspended machine or a long scheduling delay the child has as much time as before. A child that waits
for a processor is not judged before it has used `_LOOP_CPU_S` of processor time without a heartbeat.
"""

import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self

VARIABLE: Final = "QUANTDRIFT_HEARTBEAT"
"""Environment variable with the file descriptor of the shared memory; absent: nobody watches the process."""
EVERY_S: Final = 0.5
"""Time between two beats of an event loop, far below the time after which a parent replaces a silent child."""
LOOK_S: Final = 0.5
"""Time between two looks of the parent."""
_STARTING_HUNG_S: Final = 60.0  # at least, until the first beat: imports on a busy machine with a cold disk
_MOST_CREDIT_S: Final = 2 * LOOK_S
# The relay's watchdog interrupts an observer that used between 2 and 4 s of processor time: it acts first.
_LOOP_CPU_S: Final = 6.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_COUNT: Final = struct.Struct("q")


class Heartbeat:
    """The beats of one process, in memory that it shares with its parent.

    The child counts, the parent reads. Nothing blocks: a parent that hangs cannot stop the child, and a child that hangs
    cannot stop the parent.

    Parameters
    ----------
    fd
        The shared memory; a child inherits it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> Self:
        """Return a new one, without a beat."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("quantdrift-heartbeat")
        else:  # pragma: no cover - not Linux
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        created = cls(fd)
        created.reset()
        return created

    @classmethod
    def of_parent(cls) -> Self | None:
        """Return the one that the parent watches, or None; the children of this process do not inherit it."""
        fd = os.environ.pop(VARIABLE, "")
        return cls(int(fd)) if fd.isdecimal() else None

    @property
    def beats(self) -> int:
        """Beats since the start of the process."""
        return int(_COUNT.unpack(os.pread(self.fd, _COUNT.size, 0))[0])

    def beat(self) -> None:
        """Count a beat: the process runs."""
        self._write(self.beats + 1)

    def reset(self) -> None:
        """Forget the beats of a process that has ended."""
        self._write(0)

    def _write(self, beats: int) -> None:
        os.pwrite(self.fd, _COUNT.pack(beats), 0)


class Watched(Protocol):
    """A child process."""

    @property
    def pid(self) -> int | None:
        """Process id; None while it does not run."""


class KernelState(NamedTuple):
    """What the kernel says of a process: the letter of `ps` for its main thread, and its processor time."""

    letter: str
    cpu_s: float


def process_state(pid: int) -> KernelState | None:
    """Return the state of a process; None where there is no /proc, or no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return KernelState(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)


class HangWatch:
    """The parent's judgement of one child process.

    Parameters
    ----------
    child
        The process.
    beats
        Returns the beats of the process since its start.

    Attributes
    ----------
    silent_s : float
        Time without a beat, as far as the parent itself ran.
    """

    def __init__(self, child: Watched, beats: Callable[[], int]) -> None:
        self._child = child
        self._beats = beats
        self._seen: tuple[int | None, int] = (None, 0)
        self.silent_s = 0.0
        self._cpu_s = 0.0

    def look(self, elapsed_s: float, hung_s: float) -> str:
        """Return why the child hangs, such as "waited without end and gave no heartbeat for 10 s"; empty if it does not.

        Parameters
        ----------
        elapsed_s
            Time since the last call.
        hung_s
            After so long without a beat it hangs; before its first beat, after 60 s at least.
        """
        seen = (self._child.pid, self._beats())
        pid, beats = seen
        if seen != self._seen or pid is None:
            self._seen, self.silent_s = seen, 0.0
            state = None if pid is None else process_state(pid)
            self._cpu_s = state.cpu_s if state else 0.0
            return ""
        self.silent_s += min(elapsed_s, _MOST_CREDIT_S)
        if self.silent_s < (hung_s if beats else max(hung_s, _STARTING_HUNG_S)):
            return ""
        return _reason(process_state(pid), self._cpu_s, self.silent_s)


def _reason(state: KernelState | None, cpu_before_s: float, silent_s: float) -> str:
    silent = f"gave no heartbeat for {silent_s:.0f} s"
    if state is None:
        return silent
    if state.letter in "Tt":
        return f"was stopped by a signal or a debugger and {silent}"
    if state.letter == "D":
        return ""  # it waits for a disk, and SIGKILL would wait as well
    used_s = state.cpu_s - cpu_before_s
    if state.letter == "R":
        return f"used {used_s:.0f} s of processor time and {silent}" if used_s >= _LOOP_CPU_S else ""
    return f"waited without end and {silent}"
