"""Run a program and stay until it has ended; then end whatever of its process group is left, oneself included.

`guard.py PROGRAM ARGUMENTS`, as the leader of a process group. Some servers leave their workers behind when they are
told to end. SIGTERM is passed on, and after some seconds nothing is waited for any more.
"""

import os
import signal
import subprocess
import sys

_PATIENCE_S = 10


def main() -> None:
    """Run it."""
    child = subprocess.Popen(sys.argv[1:])

    def finish(*_: object) -> None:
        child.terminate()
        signal.alarm(_PATIENCE_S)

    def clear(*_: object) -> None:
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGALRM, clear)
    signal.signal(signal.SIGTERM, finish)
    child.wait()
    clear()


if __name__ == "__main__":
    main()
