"""Output that never makes its process wait: a thread writes what the process hands it, within bounds.

Whoever reads the output of a container, a service or a terminal may stop reading. Then the pipe fills within a moment, and a
process that writes to it directly stands still: a relay worker with all of its connections.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

MOST_BYTES: Final = 1 << 20
"""Output that waits to be written; what comes above it is left out and counted."""
_LAST_S: Final = 1.0

_outputs: dict[int, "BackgroundOutput"] = {}


class BackgroundOutput:
    """The writer of one file descriptor. Use `background`.

    Parameters
    ----------
    descriptor
        1 for stdout, 2 for stderr.
    most_bytes
        As `MOST_BYTES`.

    Attributes
    ----------
    note : callable
        Makes the line that says how many were left out, from its text.
    """

    def __init__(self, descriptor: int, most_bytes: int = MOST_BYTES) -> None:
        self._descriptor = descriptor
        self._most_bytes = most_bytes
        self._lines: deque[bytes] = deque()
        self._n_bytes = 0
        self._n_left_out = 0
        self.note: Callable[[str], str] = str
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name=f"output {descriptor}", daemon=True).start()

    def write(self, text: str | bytes) -> int:
        """Hand over whole lines, and return their length; it never waits for a reader."""
        line = text.encode(errors="backslashreplace") if isinstance(text, str) else text
        with self._changed:
            if self._n_bytes + len(line) > self._most_bytes:
                self._n_left_out += 1
            else:
                self._lines.append(line)
                self._n_bytes += len(line)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Do nothing: `drain` waits, and only at the end of the process."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written, at most `timeout_s`; return whether it is."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._n_bytes and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return not self._n_bytes

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    self._changed.wait()
                line = self._lines.popleft()
            self._write(line)
            with self._changed:
                self._n_bytes -= len(line)
                n_left_out = 0 if self._lines else self._n_left_out
                self._n_left_out -= n_left_out
                self._changed.notify_all()
            if n_left_out:
                self.write(self.note(f"{n_left_out} lines were left out here: nobody read the output") + "\n")

    def _write(self, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError:  # nobody reads it any more, or the disk below it is full
            return


def background(descriptor: int) -> BackgroundOutput:
    """Return the writer of a file descriptor of this process."""
    if descriptor not in _outputs:
        _outputs[descriptor] = BackgroundOutput(descriptor)
    return _outputs[descriptor]


def drain(timeout_s: float = _LAST_S) -> None:
    """Wait until the output of this process is written, at most `timeout_s`: before the process ends."""
    deadline = time.monotonic() + timeout_s
    for output in list(_outputs.values()):
        output.drain(max(0.0, deadline - time.monotonic()))
