"""The states of the processes that `quantdrift up` runs, in a file that other processes read."""

import fcntl
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from quantdrift.core.telemetry import UP_RESTARTS, UP_RUNNING, Labels, Telemetry

STATES: Final = "processes.json"
"""File in the data directory of `quantdrift up` with the `PartState` of each process, by name."""
STATES_FILE: Final = "QUANTDRIFT_PROCESSES"
"""Variable with the path of this file, for the sidecar, which exports it: it runs whatever else is down."""


class PartState(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a process works; `since` and `why` say when and why it went down, if it did.

    `restarts` is how often it was started again, by reason: `exit_1`, the name of a signal, or `not_started`. `address` is
    that of its admin port, HOST:PORT; empty: it has none. `starts` is how often it was started.
    """

    works: bool
    since: datetime | None = None
    why: str = ""
    restarts: dict[str, int] = {}
    address: str = ""
    starts: int = 0


def up_runs(data: Path) -> bool | None:
    """Return whether a `quantdrift up` uses the data directory; None if that cannot be found out."""
    try:
        with (data / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def read_states(file: Path) -> dict[str, PartState]:
    """Return the states by name of the process; none if the file is missing or cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, PartState])
    except (OSError, msgspec.MsgspecError):
        return {}


def observe_states(telemetry: Telemetry, file: Path) -> None:
    """Export the states in a file, which is read at each collection."""

    def running() -> Iterable[tuple[float, Labels]]:
        for name, state in read_states(file).items():
            yield float(state.works), {"process": name}

    def restarts() -> Iterable[tuple[float, Labels]]:
        for name, state in read_states(file).items():
            for reason, n in state.restarts.items():
                yield n, {"process": name, "reason": reason}

    telemetry.observe(UP_RUNNING, running)
    telemetry.observe(UP_RESTARTS, restarts)
