"""The supervisor's judgement whether a child process hangs, from the heartbeats that it counts in shared memory.

A process that is merely slow must not be killed, so time counts only as far as the supervisor itself runs: it looks every
`LOOK_S`, and whatever the clock says between two looks, at most `_MOST_CREDIT_S` of it count against a child. After a
paused container, a suspended machine or a long scheduling delay the child has as much time as before. A child that waits
for a processor is not judged before it has used `_LOOP_CPU_S` of processor time without a heartbeat.
"""

import os
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from quantdrift.sidecar.state.counters import Gauge, Slot

LOOK_S: Final = 0.5
LATE_S: Final = 5.0
"""After so long without a heartbeat a child does not count as serving: /readyz and /livez turn red if no other does."""
WORKER_HUNG_S: Final = 10.0
"""After so long without a heartbeat a relay worker or the intake is replaced."""
CAPTURE_HUNG_S: Final = 30.0
"""The same for the capture process: it delays no request, but loses what it has queued when it is killed."""
_STARTING_HUNG_S: Final = 60.0  # until the first heartbeat: imports on a busy machine with a cold disk
_MOST_CREDIT_S: Final = 2 * LOOK_S
# The relay's watchdog interrupts an observer that used between 2 and 4 s of processor time: it acts first.
_LOOP_CPU_S: Final = 6.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class ProcessState(NamedTuple):
    """What the kernel says of a process: the letter of `ps` for its main thread, and its processor time."""

    letter: str
    cpu_s: float


class Watched(Protocol):
    """A child process."""

    @property
    def pid(self) -> int | None:
        """Process id; None while it does not run."""

    def replace(self, why: str) -> None:
        """Kill it, so that it is started again."""


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process; None where there is no /proc, or no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return ProcessState(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)


class Heartbeat:
    """The supervisor's view of one child process.

    Parameters
    ----------
    child
        The process.
    slot
        Its counters.
    hung_s
        After so long without a heartbeat it hangs.
    """

    def __init__(self, child: Watched, slot: Slot, hung_s: float) -> None:
        self._child = child
        self._slot = slot
        self._hung_s = hung_s
        self._seen: tuple[int | None, int] = (None, 0)
        self._silent_s = 0.0
        self._cpu_s = 0.0

    @property
    def serves(self) -> bool:
        """Whether it accepts connections, and gave a heartbeat within the last `LATE_S`."""
        return bool(self._slot.gauge(Gauge.SERVING)) and not self._slot.gauge(Gauge.LATE)

    def look(self, elapsed_s: float) -> str:
        """Return why the child hangs; empty if it does not.

        Parameters
        ----------
        elapsed_s
            Time since the last call.
        """
        seen = (self._child.pid, self._slot.gauge(Gauge.BEATS))
        pid, beats = seen
        if seen != self._seen or pid is None:
            self._seen, self._silent_s = seen, 0.0
            state = None if pid is None else process_state(pid)
            self._cpu_s = state.cpu_s if state else 0.0
            self._slot.set(Gauge.LATE, 0)
            return ""
        self._silent_s += min(elapsed_s, _MOST_CREDIT_S)
        self._slot.set(Gauge.LATE, int(self._silent_s >= LATE_S))
        if self._silent_s < (self._hung_s if beats else _STARTING_HUNG_S):
            return ""
        return _reason(process_state(pid), self._cpu_s, self._silent_s)

    def replace(self, why: str) -> None:
        """Kill the child, so that it is started again."""
        self._child.replace(why)


def _reason(state: ProcessState | None, cpu_before_s: float, silent_s: float) -> str:
    silent = f"gave no heartbeat for {silent_s:.0f} s"
    if state is None:
        return f"{silent} and was killed"
    if state.letter in "Tt":
        return f"was stopped by a signal or a debugger, {silent} and was killed"
    if state.letter == "D":
        return ""  # it waits for a disk, and SIGKILL would wait as well
    used_s = state.cpu_s - cpu_before_s
    if state.letter == "R":
        looping = f"{silent} while it used {used_s:.0f} s of processor time, and was killed"
        return looping if used_s >= _LOOP_CPU_S else ""
    return f"waited without end, {silent} and was killed"
