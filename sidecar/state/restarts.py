"""The restarts of child processes: the supervisor counts them, the admin process shows them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from quantdrift.sidecar.state.state_file import StateFile

_NAME = "restarts"


class Restarts:
    """The counts by child and reason, in a file of the sidecar's directory.

    Parameters
    ----------
    directory
        The sidecar's.
    """

    def __init__(self, directory: Path) -> None:
        self._file: StateFile[dict[str, dict[str, int]]] = StateFile(
            directory / _NAME, dict[str, dict[str, int]]
        )
        self._counts: dict[str, dict[str, int]] = {}

    def add(self, child: str, reason: str) -> None:
        """Count a restart; where the file cannot be written, it is shown with the next one that can."""
        reasons = self._counts.setdefault(child, {})
        reasons[reason] = reasons.get(reason, 0) + 1
        with contextlib.suppress(OSError):
            self._file.write(self._counts)

    def read(self) -> Iterator[tuple[str, str, int]]:
        """Yield child, reason and number, as the supervisor has written them last."""
        self._file.refresh()
        for child, reasons in (self._file.record or {}).items():
            for reason, n in reasons.items():
                yield child, reason, n
