"""The local switch: pauses sampling in this sidecar, at its admin port or by a file, without NATS.

What is paused in this sidecar: by the fleet's bucket, by hand at the admin port, or by a file. No NATS is needed.

Two files lie next to the hand-off socket, in a directory of this sidecar alone: one that the capture process writes for
the fleet, one that the supervisor writes for this sidecar. Every process of it looks at both once a second.
"""

import logging
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import msgspec

from quantdrift.core.sampling.pause import MAX_BYTES, MOST_MODELS, Order, Pause, PauseError, decode, encode

_FILE_BYTES = MAX_BYTES // 2  # so that there is room for what is said at the admin port
_LOG = logging.getLogger(__name__)


class PauseSource(StrEnum):
    """Who says so; also the name of the file."""

    FLEET = "paused-fleet"
    HERE = "paused-here"


class Paused(msgspec.Struct, frozen=True):
    """What is in force: everything, or models by name."""

    everything: bool = False
    models: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Return whether anything is paused."""
        return self.everything or bool(self.models)


def post(directory: Path, source: PauseSource, pause: Pause) -> None:
    """Replace what a source says.

    Raises
    ------
    OSError
        It cannot be written; what was said before holds.
    """
    path = directory / source
    new = path.with_suffix(".new")
    new.write_bytes(encode(pause))
    new.replace(path)


class PauseFiles:
    """A process's view of both files.

    Parameters
    ----------
    directory
        Where they lie; they need not be there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pauses: dict[PauseSource, Pause] = {}
        self._seen: dict[PauseSource, tuple[int, int, int]] = {}

    def look(self) -> Paused:
        """Return what is in force now. What cannot be read says what it said before."""
        for source in PauseSource:
            self._read(source)
        now = datetime.now(UTC)
        in_force = [pause.at(now) for pause in self._pauses.values()]
        return Paused(
            any(pause.everything is not None for pause in in_force),
            frozenset(name for pause in in_force for name in pause.models),
        )

    def of(self, source: PauseSource) -> Pause:
        """Return what a source says, as of the last look."""
        return self._pauses.get(source, Pause())

    def _read(self, source: PauseSource) -> None:
        path = self._directory / source
        try:
            status = path.stat()
            seen = (status.st_mtime_ns, status.st_ino, status.st_size)
            if seen == self._seen.get(source):
                return
            self._pauses[source] = decode(path.read_bytes())
            self._seen[source] = seen
        except FileNotFoundError:
            self._pauses.pop(source, None)
            self._seen.pop(source, None)
        except (OSError, PauseError) as error:
            _LOG.warning("%s cannot be read, what it said before holds: %s", path, error)


def by_file(path: Path, now: datetime) -> Pause:
    """Return what a file that an operator has put there pauses: the models that its lines name, or everything.

    Parameters
    ----------
    path
        `sidecar.pause_file`. Where it is missing nothing is paused; where it is empty or unreadable, or names more
        models than a pause holds, everything is.
    now
        Aware; stamps the orders.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return Pause()
    except (OSError, UnicodeDecodeError):
        lines = []
    order = Order(by=str(path), at=now)
    names = [line for line in lines if line and not line.startswith("#")]
    found = Pause(models=dict.fromkeys(names[: MOST_MODELS + 1], order))
    if not names or len(found.models) > MOST_MODELS or len(encode(found)) > _FILE_BYTES:
        return Pause(everything=order)
    return found
