"""What the storm breaks: `quantdrift up` on a small disk, with a second shadow, a second monitor, and servers of others."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import asyncpg
import psutil

from benchmarks.storm.exchanges import MODEL, SCANNERS, write_reference
from quantdrift.core.process.child import ending_with_parent
from quantdrift.demo.otlp_receiver import OtlpReceiver

MARK: Final = "QUANTDRIFT_STORM"
"""Environment variable that every process of a storm carries; its value is the storm's directory."""
_DISK_BYTES: Final = 640 << 20
_START_S: Final = 300.0
_STOP_S: Final = 75.0
_AGAIN_S: Final = 0.5
_DATABASE_S: Final = 3.0
_COMMAND_S: Final = 60.0
_PORTS: Final = range(20_000, 32_000)  # below those that the kernel gives to outgoing connections
_N_RELAYS: Final = 2
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

_CONFIG: Final = """\
[sidecar]
workers = {n_relays}
drain_delay_s = 0.0
grace_s = 5.0

[intake]
listen = "127.0.0.1:{intake}"

[stream]
max_bytes = 67_108_864

[capture]
headers = ["x-scanner", "x-request-id"]

[sampling]
rate = 0.9
body_rate = 0.8

[shadow]
threads = 1
ack_wait_s = 20.0

[monitor]
min_groups = 100
discovery = false

[[models]]
name = "{model}"
output = "logits"

[models.budget]
flip = 0.06
divergence = 1.0

[[models.references]]
runtime = "oip-http"
url = "http://127.0.0.1:{reference}"
versions = ["int8-*"]
timeout_s = 5.0

[[slices]]
name = "scanner"
header = "x-scanner"
values = [{scanners}]
"""


class Kept:
    """A process that the storm starts again whenever it ends, as an orchestrator would.

    Parameters
    ----------
    name
        For messages.
    arguments
        Of `python -m`.
    environment
        The complete environment; a change of the attribute counts from the next start on.
    log
        File that its output is appended to.
    servers
        Data directory of the `quantdrift up` whose servers it uses; it is started again when their addresses change.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        environment: Mapping[str, str],
        log: Path,
        servers: Path | None = None,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.environment = dict(environment)
        self._log = log
        self._servers = servers
        self._addresses: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = False
        self.n_starts = 0

    @property
    def process(self) -> psutil.Process | None:
        """The process, if it runs."""
        if self._process is None or self._process.poll() is not None:
            return None
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self._process.pid)
        return None

    def start(self) -> None:
        """Start it if it does not run."""
        self._wanted = True
        if self.process is None:
            self.n_starts += 1
            self._addresses = self._present()
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    ending_with_parent([sys.executable, "-m", *self.arguments]),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.environment,
                    start_new_session=True,
                )

    def again(self) -> None:
        """Start it again if it has ended and was not told to, or if its servers have moved."""
        if not self._wanted:
            return
        if self._process is not None and self._present() != self._addresses:
            self._process.kill()
            self._process.wait()
        self.start()

    def _present(self) -> dict[str, str]:
        """Return the addresses of its servers as they are now, by file."""
        if self._servers is None:
            return {}
        try:
            texts = {file: (self._servers / file).read_text("utf-8").strip() for file in ("dsn", "nats.url")}
        except OSError:
            return self._addresses
        return texts if all(texts.values()) else self._addresses  # empty: written on a full disk

    def away(self) -> None:
        """Kill it and leave it dead until `start`."""
        self._wanted = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, within_s: float) -> None:
        """Ask it to end; kill it after some time."""
        self._wanted = False
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Stack:
    """Everything that runs. Use `running`.

    Parameters
    ----------
    directory
        For all files.
    may_mount
        Put the data directory and the temporary files onto a small file system, which can be filled.
    has_page
        Serve the live page, too.
    has_spares
        Run a second shadow and a second monitor, too.
    variables
        Further environment variables of all processes of the product.
    """

    def __init__(
        self,
        directory: Path,
        *,
        may_mount: bool,
        has_page: bool = False,
        has_spares: bool = True,
        variables: Mapping[str, str] = _NOTHING,
    ) -> None:
        self.directory = directory
        self._disk = directory / "disk"
        self.data = self._disk / "data"
        self.logs = directory / "logs"
        self.collector = OtlpReceiver()
        self.disk_problem = "" if may_mount else "the storm was told not to mount"
        self.n_restarts = 0
        self._kept: dict[str, Kept] = {}
        self._has_page = has_page
        self._spares = ("shadow2", "monitor2") if has_spares else ()
        self._variables = variables
        self.config = directory / "config.toml"
        self._environment: dict[str, str] = {}
        names = (
            "relay",
            "candidate",
            "reference",
            "intake",
            "sidecar",
            "shadow",
            "shadow2",
            "monitor",
            "monitor2",
            "web",
        )
        self.ports = dict(zip(names, _free_ports(len(names)), strict=True))

    # Start and end ---------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the directories, the small disk, the reference and the configuration."""
        for path in (self._disk, self.logs):
            path.mkdir()
        if not self.disk_problem:
            mount = [
                "mount",
                "-t",
                "tmpfs",
                "-o",
                f"size={_DISK_BYTES},mode=0755",
                "quantdrift-storm",
                str(self._disk),
            ]
            done = subprocess.run(mount, capture_output=True, text=True, check=False)
            if done.returncode:
                self.disk_problem = f"this machine may not mount: {done.stderr.strip()}"
        (self._disk / "tmp").mkdir()
        reference = write_reference(self.directory)
        self.config.write_text(
            _CONFIG.format(
                n_relays=_N_RELAYS,
                intake=self.ports["intake"],
                model=MODEL,
                reference=self.ports["reference"],
                scanners=", ".join(f'"{name}"' for name in SCANNERS),
            )
        )
        self.collector.start()
        at = {name: f"127.0.0.1:{port}" for name, port in self.ports.items()}
        environment = self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("QUANTDRIFT")},
            MARK: str(self.directory),
            "TMPDIR": str(self._disk / "tmp"),
            "PYTHONUNBUFFERED": "1",
            "QUANTDRIFT__SIDECAR__LISTEN": at["relay"],
            "QUANTDRIFT__SIDECAR__BACKEND": at["candidate"],
            "QUANTDRIFT__SIDECAR__ADMIN": at["sidecar"],
            "QUANTDRIFT__SHADOW__ADMIN": at["shadow"],
            "QUANTDRIFT__MONITOR__ADMIN": at["monitor"],
            "QUANTDRIFT__TELEMETRY__OTLP_ENDPOINT": self.collector.endpoint,
            "QUANTDRIFT__WEB__LISTEN": at["web"] if self._has_page else "",
            **self._variables,
        }
        second = {
            "QUANTDRIFT__SHADOW__ADMIN": at["shadow2"],
            "QUANTDRIFT__MONITOR__ADMIN": at["monitor2"],
        }
        options = ["--config", str(self.config), "--data", str(self.data)]
        model = ["--model", f"{MODEL}={reference}", "--version", "1", "--listen", at["reference"]]
        plain = {
            name: value
            for name, value in environment.items()
            if not name.startswith("QUANTDRIFT__") and name not in self._variables
        }
        for name, arguments, given in (
            ("candidate", ["benchmarks.storm.candidate", str(self.ports["candidate"])], plain),
            ("reference", ["quantdrift.demo.oip_server", *model], plain),
            ("up", ["quantdrift", "up", *options], environment),
            ("shadow2", ["quantdrift", "shadow", *options], environment | second),
            ("monitor2", ["quantdrift", "monitor", *options], environment | second),
        ):
            servers = self.data if name.endswith("2") else None
            self._kept[name] = Kept(name, arguments, given, self.logs / f"{name}.log", servers)

    async def start(self) -> None:
        """Start everything and wait until all of it is ready.

        Raises
        ------
        TimeoutError
            It does not become ready.
        """
        for name in ("candidate", "reference", "up"):
            self._kept[name].start()
        await self.until(lambda: self.is_ready("sidecar") and self.is_ready("monitor"), _START_S)
        for name in self._spares:
            self._kept[name].start()
        await self.until(self.all_ready, _START_S)

    async def said(self, *command: str) -> str:
        """Return what a command of `quantdrift` prints, as a person would type it beside this stack."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quantdrift", *command),
            *("--config", str(self.config), "--data", str(self.data)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
        )
        try:
            async with asyncio.timeout(_COMMAND_S):
                output, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"no answer within {_COMMAND_S:g} s"
        return output.decode(errors="replace")

    async def keep(self) -> None:
        """Start again what has ended, for ever."""
        while True:
            for kept in self._kept.values():
                kept.again()
            await asyncio.sleep(_AGAIN_S)

    def end(self) -> None:
        """Stop everything, whatever its state is; kill what is left, and unmount the disk."""
        with contextlib.suppress(OSError):
            self.make_room()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.resume()
        for kept in reversed(self._kept.values()):
            kept.stop(_STOP_S if kept.name == "up" else 10.0)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.collector.stop()
        if not self.disk_problem:
            subprocess.run(["umount", "-l", str(self._disk)], capture_output=True, check=False)

    def kept(self, name: str) -> Kept:
        """Return a process that the storm itself started."""
        return self._kept[name]

    # Processes -------------------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Return every live process of this storm, this one not included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                    continue
                if _environment(process.pid, MARK) == str(self.directory):
                    found.append(process)
        return found

    def victims(self, *words: str, children: bool = False) -> list[psutil.Process]:
        """Return the processes whose command line has all `words`, the oldest first.

        Parameters
        ----------
        words
            Each is a part of some argument.
        children
            Their direct children in their place.
        """
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if "-I" not in line[:2] and all(any(word in part for part in line) for word in words):
                    found += process.children() if children else [process]
        with contextlib.suppress(psutil.Error):
            found.sort(key=lambda process: float(process.create_time()))
        return found

    def monitors(self, *, leading: bool) -> list[psutil.Process]:
        """Return the monitors that say that they lead, or that they stand by."""
        found = []
        for name in ("monitor", "monitor2"):
            with contextlib.suppress(OSError, ValueError):
                text = _get(self.ports[name], "/metrics")
                lines = [line for line in text.splitlines() if line.startswith("quantdrift_monitor_leader")]
                if lines and (float(lines[0].split()[-1]) > 0) == leading:
                    found += self.role(name)
        return found

    def role(self, name: str) -> list[psutil.Process]:
        """Return the process of a role: `shadow`, `shadow2`, `monitor`, `monitor2` or `sidecar`."""
        if name in self._kept:
            process = self._kept[name].process
            return [] if process is None else [process]
        extra = {kept.process.pid for kept in self._kept.values() if kept.process is not None}
        return [
            process
            for process in self.victims("quantdrift", "--config")
            if process.pid not in extra and name in _arguments(process)
        ]

    # State -----------------------------------------------------------------------------------------------------------

    def is_ready(self, name: str) -> bool:
        """Return what /readyz of a role says."""
        try:
            _get(self.ports[name], "/readyz")
        except OSError:
            return False
        return True

    def all_ready(self) -> bool:
        """Return whether all roles are ready."""
        return all(self.is_ready(name) for name in ("sidecar", "shadow", "monitor", *self._spares))

    async def until(self, condition: Any, within_s: float) -> None:
        """Wait for a condition.

        Raises
        ------
        TimeoutError
            Not within this time.
        """
        until = time.monotonic() + within_s
        while not await asyncio.to_thread(condition):
            if time.monotonic() > until:
                raise TimeoutError(
                    f"not within {within_s:g} s: {getattr(condition, '__name__', 'a condition')}"
                )
            await asyncio.sleep(0.2)

    async def rows(self, sql: str, *arguments: object) -> list[asyncpg.Record]:
        """Return the rows of a statement.

        Raises
        ------
        OSError, TimeoutError, asyncpg.PostgresError
            The database is away.
        """
        async with asyncio.timeout(_DATABASE_S * 4):
            dsn = (self.data / "dsn").read_text(encoding="utf-8").strip()
            connection = await asyncpg.connect(dsn, timeout=_DATABASE_S)
            try:
                rows: list[asyncpg.Record] = await connection.fetch(sql, *arguments, timeout=_DATABASE_S * 3)
                return rows
            finally:
                connection.terminate()

    # Disk ------------------------------------------------------------------------------------------------------------

    def fill(self) -> int:
        """Fill the small disk to its last byte, and return how many bytes that took."""
        n = 0
        with contextlib.suppress(OSError), (self._disk / "stuffing").open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while written := file.write(bytes(size)):
                        n += written
        return n

    def make_room(self) -> None:
        """Delete what `fill` has written."""
        (self._disk / "stuffing").unlink(missing_ok=True)


@contextlib.contextmanager
def running(*, may_mount: bool, keep: Path | None, has_page: bool = False) -> Iterator[Stack]:
    """Prepare a stack in a directory of its own; end all of it afterwards, in any case.

    Parameters
    ----------
    may_mount, has_page
        As for `Stack`.
    keep
        Directory that the logs are copied to.
    """
    with (
        new_directory() as directory,
        ended(Stack(directory, may_mount=may_mount, has_page=has_page), keep) as stack,
    ):
        yield stack


@contextlib.contextmanager
def new_directory() -> Iterator[Path]:
    """Make a directory that the user of the database server may enter, and remove it afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="qd-storm-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def ended(stack: Stack, keep: Path | None = None) -> Iterator[Stack]:
    """Prepare a stack, and end all of it afterwards, in any case."""
    try:
        stack.prepare()
        yield stack
    finally:
        stack.end()
        if keep is not None:
            shutil.copytree(stack.logs, keep, dirs_exist_ok=True)


def _arguments(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
        text: str = answer.read().decode()
        return text


def _environment(pid: int, name: str) -> str:
    prefix = f"{name}=".encode()
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode()
    return ""


def _free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        ports = []
        for port in random.sample(_PORTS, len(_PORTS)):
            with contextlib.suppress(OSError):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == n:
                return ports
    raise OSError("too few ports are free")
