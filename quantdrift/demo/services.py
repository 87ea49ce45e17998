"""The demo's child processes: started on free ports, logged to files, and ended in order whatever happens."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import msgspec

from quantdrift.demo.model import CANDIDATE, NAME

VERSION, SECOND_VERSION, REPAIRED_VERSION = "int8-1", "int8-2", "int8-1-repaired"
SCANNER_HEADER = "x-scanner"
_GRACE_S = 60.0
_READY_S = 240.0  # a busy machine imports for a minute
_TAIL_LINES = 12


class ServiceError(RuntimeError):
    """A child process did not do what the demo needs; the message holds the end of its log."""


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """Free TCP ports, one for each listener."""

    model: int
    sidecar: int
    sidecar_admin: int
    shadow_admin: int
    monitor_admin: int
    page: int

    @classmethod
    def free(cls) -> "Ports":
        """Return ports that nobody used a moment ago."""
        with ExitStack() as sockets:
            taken = {}
            for name in cls.__struct_fields__:
                listener = sockets.enter_context(socket.socket())
                listener.bind(("127.0.0.1", 0))
                taken[name] = listener.getsockname()[1]
        return cls(**taken)

    def overrides(self, otlp_endpoint: str) -> dict[str, str]:
        """Return the environment that puts quantdrift onto these ports."""
        section = "QUANTDRIFT__"
        return {
            f"{section}SIDECAR__LISTEN": f"127.0.0.1:{self.sidecar}",
            f"{section}SIDECAR__BACKEND": f"127.0.0.1:{self.model}",
            f"{section}SIDECAR__ADMIN": f"127.0.0.1:{self.sidecar_admin}",
            f"{section}SHADOW__ADMIN": f"127.0.0.1:{self.shadow_admin}",
            f"{section}MONITOR__ADMIN": f"127.0.0.1:{self.monitor_admin}",
            f"{section}WEB__LISTEN": f"127.0.0.1:{self.page}",
            f"{section}TELEMETRY__OTLP_ENDPOINT": otlp_endpoint,
            "OTEL_METRIC_EXPORT_INTERVAL": "2000",  # in milliseconds, so that gauges are fresh on the screen
        }

    def admin(self) -> tuple[int, ...]:
        """Return the ports that answer /readyz."""
        return (self.sidecar_admin, self.shadow_admin, self.monitor_admin)


class StartedProcess:
    """A process that was started here.

    Parameters
    ----------
    name
        For messages.
    process
        Running.
    log
        File that takes its stdout and stderr.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name, self._process, self._log = name, process, log

    async def finish(self, codes: Sequence[int] = (0,)) -> None:
        """Wait for its end.

        Raises
        ------
        ServiceError
            Its exit code is none of `codes`.
        """
        if (code := await self._process.wait()) not in codes:
            raise ServiceError(f"{self.name} ended with {code}; the end of {self._log}:\n{self._tail()}")

    async def ready(self, ports: Sequence[int], path: str) -> None:
        """Wait until `path` answers 200 on each of the local `ports`.

        Raises
        ------
        ServiceError
            The process ended or took too long.
        """
        timeout = aiohttp.ClientTimeout(total=2)
        deadline = asyncio.get_running_loop().time() + _READY_S
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for port in ports:
                while not await _answers(session, f"http://127.0.0.1:{port}{path}"):
                    if self._process.returncode is not None:
                        await self.finish()
                        raise ServiceError(f"{self.name} ended before it was ready:\n{self._tail()}")
                    if asyncio.get_running_loop().time() > deadline:
                        raise ServiceError(
                            f"{self.name} was not ready after {_READY_S:g} s; the end of {self._log}:\n{self._tail()}"
                        )
                    await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL after a grace period."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_GRACE_S):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


@asynccontextmanager
async def child(
    name: str,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    output: Path | None = None,
) -> AsyncIterator[StartedProcess]:
    """Run `python -m ARGUMENTS` inside the block; it is ended when the block is left in any way.

    Parameters
    ----------
    name
        For messages.
    arguments
        Of the interpreter, after `-m`.
    log
        Takes stderr, and stdout unless there is `output`.
    environment
        Is added to that of this process.
    output
        Takes stdout.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", *arguments]
    if setpriv := shutil.which("setpriv"):  # a demo that is killed takes its children along
        command = [setpriv, "--pdeathsig", "TERM", *command]
    with ExitStack() as files:
        sink = files.enter_context(log.open("wb"))
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=files.enter_context(output.open("wb")) if output else sink,
            stderr=sink,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,  # Ctrl-C reaches the demo alone, which ends the others in order
        )
    running = StartedProcess(name, process, log)
    try:
        yield running
    finally:
        await asyncio.shield(running.stop())


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """What runs while the demo does.

    Parameters
    ----------
    ports
        Where.
    config
        The configuration file that is in force.
    data
        Data directory of `quantdrift up`.
    environment
        Overrides that every quantdrift command needs to find the same services.
    """

    ports: Ports
    config: Path
    data: Path
    environment: dict[str, str]

    async def release(self, version: str, file: Path, routes: Mapping[str, Path] | None = None) -> None:
        """Let the inference server serve another version from now on.

        Parameters
        ----------
        version, file
            The version with its file.
        routes
            A file of its own for each of these scanners.

        Raises
        ------
        ServiceError
            The server cannot load it.
        """
        routed = [
            {"header": SCANNER_HEADER, "value": scanner, "file": str(path)}
            for scanner, path in (routes or {}).items()
        ]
        body = {"parameters": {"version": version, "file": str(file), "routes": routed}}
        url = f"http://127.0.0.1:{self.ports.model}/v2/repository/models/{NAME}/load"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            if response.status != 200:
                raise ServiceError(f"the inference server cannot load {version}: {await response.text()}")

    @property
    def dsn(self) -> str:
        """The Postgres address."""
        return (self.data / "dsn").read_text(encoding="utf-8").strip()


@asynccontextmanager
async def services(out: Path, otlp_endpoint: str) -> AsyncIterator[Services]:
    """Run the inference server and `quantdrift up` inside the block.

    Parameters
    ----------
    out
        Holds `config.toml` and `models/`; takes `data/` and `logs/`.
    otlp_endpoint
        Where alerts are sent.

    Raises
    ------
    ServiceError
        One of them does not get ready.
    """
    ports = Ports.free()
    config, data, environment = out / "config.toml", out / "data", ports.overrides(otlp_endpoint)
    server = [
        "quantdrift.demo.oip_server",
        *("--model", f"{NAME}={out / 'models' / CANDIDATE}"),
        *("--version", VERSION),
        *("--listen", f"127.0.0.1:{ports.model}"),
    ]
    up = ["quantdrift", "up", "--config", str(config), "--data", str(data)]
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(
            child("the inference server", server, out / "logs" / "server.log")
        )
        started = await stack.enter_async_context(
            child("quantdrift up", up, out / "logs" / "quantdrift.log", environment)
        )
        await served.ready([ports.model], "/v2/health/ready")
        await started.ready(ports.admin(), "/readyz")
        yield Services(ports=ports, config=config, data=data, environment=environment)


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def command_output(running: Services, out: Path, *words: str, codes: Sequence[int] = (0,)) -> str:
    """Run `quantdrift WORDS` on what is running, and return what it prints; its exit code is one of `codes`."""
    name = " ".join(word for word in words[:2] if word.isalpha())
    log = out / "logs" / f"{name.replace(' ', '-')}.log"
    output = log.with_suffix(".txt")
    where = ["--config", str(running.config), "--data", str(running.data)]
    command = ["quantdrift", *words, *where]
    async with child(
        f"quantdrift {name}", command, log, running.environment, output=output
    ) as running_command:
        await running_command.finish(codes)
    return output.read_text(encoding="utf-8").strip()


@asynccontextmanager
async def background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` while the block runs; its failure ends the block."""
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            yield
            task.cancel()
    except BaseExceptionGroup as failures:  # the first is the cause, the others followed from it
        raise failures.exceptions[0] from failures


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the directory while the block runs; raises `ServiceError` if another demo does."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ServiceError(f"another demo writes to {out}: give --out another directory") from error
        yield
