"""The pause of sampling in this sidecar: by the fleet's bucket in NATS, through the socket of the switch, or by a file.

Two files are in the directory of this sidecar, next to the hand-off socket: the capture process writes the
fleet's pause, and the admin process writes that of this sidecar (`pause_switch`). Every process reads both once
a second. Relay workers import this module, so it must stay light.
"""

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import msgspec

from quantdrift.core.sampling.pause import MAX_BYTES, MOST_MODELS, Order, Pause, encode
from quantdrift.sidecar.state.state_file import StateFile

_FILE_BYTES = MAX_BYTES // 2  # leaves space for what is paused through the socket


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
    StateFile(directory / source, Pause).write(pause)


class PauseFiles:
    """The pause files, as one process reads them.

    Parameters
    ----------
    directory
        Where the files are; they need not exist.
    """

    def __init__(self, directory: Path) -> None:
        self._files = {source: StateFile(directory / source, Pause) for source in PauseSource}

    def refresh(self) -> Paused:
        """Read files that have changed; return what is paused now."""
        for file in self._files.values():
            file.refresh()
        now = datetime.now(UTC)
        in_force = [self.of(source).at(now) for source in PauseSource]
        return Paused(
            any(pause.everything is not None for pause in in_force),
            frozenset(name for pause in in_force for name in pause.models),
        )

    def of(self, source: PauseSource) -> Pause:
        """Return the pause of a source, as of the last refresh."""
        return self._files[source].record or Pause()


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
    pause = Pause(models=dict.fromkeys(names[: MOST_MODELS + 1], order))
    if not names or len(pause.models) > MOST_MODELS or len(encode(pause)) > _FILE_BYTES:
        return Pause(everything=order)
    return pause
