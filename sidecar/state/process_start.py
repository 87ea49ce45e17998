"""The start of a child process of the sidecar: what the supervisor gives it, and what every child makes of it.

Relay workers import this module, so it must stay light.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import msgspec

from quantdrift.core.logs import setup_logs
from quantdrift.core.process.heartbeat import EVERY_S
from quantdrift.sidecar.state.config import LiveConfigFile
from quantdrift.sidecar.state.counters import MAX_ROWS, Counters, Gauge

BEHIND_NICE: Final = 5
"""Niceness of the processes that are not on the serving path."""


def source_of(environment: Mapping[str, str]) -> str:
    """Return the name of this sidecar: its pod, or else its host."""
    return environment.get("POD_NAME") or socket.gethostname()


class ProcessStart(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor gives a child process: the one argument of its command, as JSON.

    Secrets are not in it, since other users can read the arguments of a process; it gets them by a descriptor.

    Parameters
    ----------
    name
        Name of the process in logs.
    config
        Path of the file with the configuration in effect.
    counters_fd, n_slots
        File descriptor of the shared counters, and the number of their slots.
    slot
        The slot of this process.
    handoff
        Path of the Unix socket between the relay and the capture process. Policy and pause files are in the same
        directory.
    listen_fd
        The socket that this process listens on: the relay's port, the intake's, or the hand-off; None: it has none.
    tap_fd, kserve_fd
        The Unix socket of taps and the socket of KServe's logger, for the intake process.
    boot
        Id of this start of the sidecar, for the capture process: 32 hexadecimal digits.
    counts
        File of the shared counters, for the capture process, which removes it at the end; empty: there is none.
    supervisor
        Process id of the supervisor.
    listen
        The relay's address as configured, for a relay worker.
    """

    name: str
    config: str
    counters_fd: int
    n_slots: int
    slot: int
    handoff: str
    listen_fd: int | None = None
    tap_fd: int | None = None
    kserve_fd: int | None = None
    boot: str = ""
    counts: str = ""
    supervisor: int = 0
    listen: str = ""

    @property
    def argument(self) -> str:
        """The argument of the command."""
        return msgspec.json.encode(self).decode()

    @property
    def fds(self) -> tuple[int, ...]:
        """The file descriptors that the process inherits."""
        fds = (self.counters_fd, self.listen_fd, self.tap_fd, self.kserve_fd)
        return tuple(fd for fd in fds if fd is not None)

    @property
    def directory(self) -> Path:
        """Directory of this sidecar, with the policy and pause files."""
        return Path(self.handoff).parent


class ChildProcess:
    """A child process of the supervisor, seen from inside: its part of the shared state.

    Attributes
    ----------
    start : ProcessStart
        What the supervisor gave.
    live_config_file : LiveConfigFile
        The configuration in effect.
    counters : Counters
        The counters of all processes.
    slot : Slot
        This process's own.
    """

    def __init__(self, start: ProcessStart) -> None:
        self.start = start
        self.live_config_file = LiveConfigFile(Path(start.config))
        self.counters = Counters(start.counters_fd, start.n_slots, MAX_ROWS)
        self.slot = self.counters.slot(start.slot)

    def beat(self) -> None:
        """Count a heartbeat now and every `EVERY_S`, by which the supervisor sees that the event loop turns."""
        self.slot.adjust(Gauge.BEATS)
        asyncio.get_running_loop().call_later(EVERY_S, self.beat)

    @classmethod
    def begin(cls, arguments: Sequence[str] | None = None, *, serves: bool = False) -> Self:
        """Return this process, with its logs set up.

        Parameters
        ----------
        arguments
            Of its command; None: those of this process.
        serves
            Whether it is on the serving path. All others give way to it, and to the model, where processors are scarce.
        """
        if arguments is None and not serves:
            os.nice(BEHIND_NICE)  # before any thread: each inherits it
        (argument,) = sys.argv[1:] if arguments is None else arguments
        child = cls(msgspec.json.decode(argument, type=ProcessStart))
        telemetry = child.live_config_file.current.config.telemetry
        setup_logs(telemetry.log_level, as_json=telemetry.log_json, role=child.start.name)
        return child
