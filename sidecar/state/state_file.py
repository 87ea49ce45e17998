"""Small files by which the processes of a sidecar share state: one process writes, the others poll.

Relay workers import this module, so it must stay light.
"""

import logging
import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from quantdrift.core.clock import Clock, SystemClock

T = TypeVar("T")

_REPEAT_S = 600.0
_LOG = logging.getLogger(__name__)


class StateFile(Generic[T]):
    """A file with one record, as one process reads or writes it.

    It is replaced atomically. A reader notices a change by the file's status alone and then reads it; if it cannot, the
    last record stays, the next `refresh` tries again, and the log names the file, at most every ten minutes.

    Parameters
    ----------
    path
        The file; it need not exist.
    kind
        Type of the record, which msgspec checks.
    required
        Whether a missing file is an error; otherwise it means that there is no record.
    clock
        Limits the warnings; None: the machine's.

    Attributes
    ----------
    path : Path
        As above.
    record : T | None
        The record as of the last refresh; None: there is none.
    """

    def __init__(
        self, path: Path, kind: type[T], *, required: bool = False, clock: Clock | None = None
    ) -> None:
        self.path = path
        self.record: T | None = None
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._required = required
        self._clock = clock or SystemClock()
        self._seen: tuple[int, int, int] | None = None
        self._warned_s = -_REPEAT_S

    def write(self, record: T) -> None:
        """Replace the file atomically.

        Raises
        ------
        OSError
            It cannot be written; readers keep the previous record.
        """
        new = self.path.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(record))
        new.replace(self.path)

    def read(self) -> T:
        """Read the file, and return its record.

        Raises
        ------
        OSError, ValueError, msgspec.MsgspecError
            It is missing, or cannot be read.
        """
        status = self.path.stat()
        self.record = self._decoder.decode(self.path.read_bytes())
        self._seen = _signature(status)
        return self.record

    def refresh(self) -> bool:
        """Read the file if it has changed; return whether `record` was replaced."""
        try:
            if _signature(self.path.stat()) == self._seen:
                return False
            self.read()
        except FileNotFoundError as error:
            if self._required:
                self._warn(error)
                return False
            was_there, self._seen, self.record = self._seen is not None, None, None
            return was_there
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._warn(error)
            return False
        return True

    def _warn(self, error: Exception) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._warned_s >= _REPEAT_S:
            self._warned_s = now_s
            _LOG.warning(
                "the file %s cannot be read, its previous content stays in effect: %s", self.path, error
            )


def _signature(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_ino, status.st_size
