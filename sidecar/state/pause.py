"""The pause of sampling in this sidecar: by the fleet's bucket in NATS, at the admin port, or by a file.

Two files are in the directory of this sidecar, next to the hand-off socket: the capture process writes the
fleet's pause, and the supervisor writes that of this sidecar (`pause_switch`). Every process reads both once
a second. Relay workers import this module, so it must stay light.
"""

import logging
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import msgspec

from quantdrift.core.sampling.pause import MAX_BYTES, MOST_MODELS, Order, Pause, PauseError, decode, encode

_FILE_BYTES = MAX_BYTES // 2  # leaves space for what is paused at the admin port
_LOG = logging.getLogger(__name__)


class PauseSource(StrEnum):
    """The source of a pause, and the name of its file."""

    FLEET = "paused-fleet"
    HERE = "paused-here"


class Paused(msgspec.Struct, frozen=True):
    """What is paused at present: everything, or models by name."""

    everything: bool = False
    models: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Return whether anything is paused."""
        return self.everything or bool(self.models)


def write_pause(directory: Path, source: PauseSource, pause: Pause) -> None:
    """Replace the pause of a source, atomically.

    Raises
    ------
    OSError
        The file cannot be written; the previous pause stays.
    """
    path = directory / source
    new = path.with_suffix(".new")
    new.write_bytes(encode(pause))
    new.replace(path)


class PauseFiles:
    """The pause files, as one process reads them.

    Parameters
    ----------
    directory
        Where the files are; they need not exist.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pauses: dict[PauseSource, Pause] = {}
        self._seen: dict[PauseSource, tuple[int, int, int]] = {}

    def refresh(self) -> Paused:
        """Read files that have changed; return what is paused now.

        An unreadable file keeps its previous content.
        """
        for source in PauseSource:
            self._read(source)
        now = datetime.now(UTC)
        in_force = [pause.at(now) for pause in self._pauses.values()]
        return Paused(
            any(pause.everything is not None for pause in in_force),
            frozenset(name for pause in in_force for name in pause.models),
        )

    def of(self, source: PauseSource) -> Pause:
        """Return the pause of a source, as of the last refresh."""
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
            _LOG.warning(
                "the pause file %s cannot be read, its previous content stays in effect: %s", path, error
            )


def read_pause_file(path: Path, now: datetime) -> Pause:
    """Return the pause that an operator's file asks for: the models that its lines name, or everything.

    Parameters
    ----------
    path
        `sidecar.pause_file`. A missing file pauses nothing. A file that is empty or unreadable, or that names
        more models than a pause can hold, pauses everything.
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
