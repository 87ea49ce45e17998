"""Supervisor of `quantdrift up`: runs sidecar, servers, migration, shadow, monitor and page, and restarts them.

The sidecar starts first and serves even if the rest fails. It needs only the address of NATS, which is chosen before any
server runs. The embedded servers, the migration, shadow and monitor are restarted without limit. Each is its own
process, so that none of them can block this one.

A sidecar takes a changed configuration itself. Shadow, monitor and page read theirs at their start, so they are restarted.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from quantdrift.cli.run.embedded import Report
from quantdrift.cli.run.embedded_nats import access, nats_variables
from quantdrift.cli.run.embedded_postgres import address_file
from quantdrift.cli.run.outage import LastError, Outage
from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.config.address import read_address
from quantdrift.core.config.schema import Config, Stream
from quantdrift.core.config.state import changed_options, config_state
from quantdrift.core.config.web import TOKEN_VARIABLE
from quantdrift.core.data_directory import embedded_address, key_directory
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.logs import logs_json
from quantdrift.core.notation import listed
from quantdrift.core.output import background
from quantdrift.core.passed_secrets import variables, without_secrets
from quantdrift.core.process.child import INSTANCE, INSTANCE_HEADER, Child
from quantdrift.core.process.heartbeat import LOOK_S, VARIABLE, HangWatch, Heartbeat
from quantdrift.core.process.kept_config import keep
from quantdrift.core.process.nats_server import ENCRYPTION, make_encryption, server_url
from quantdrift.core.process.run import GRACE_S, Stop, supervise
from quantdrift.core.process.states import STATES, STATES_FILE, PartState, read_states, up_runs
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.text import in_one_line, plain
from quantdrift.sidecar.state.config import FileWatch, merge

_LOG = logging.getLogger(__name__)
_ROLES: Final = (
    "sidecar",
    "shadow",
    "monitor",
)  # what must work; also the order in which they stop: the source first
_PAGE: Final = "web"
PARTS: Final = (*_ROLES, _PAGE)
"""The processes that `quantdrift up` can start again on request."""
_OPERATOR: Final = 2  # a process's exit code when a person must act
_NEEDED: Final = {
    "sidecar": {"QUANTDRIFT_HMAC_KEY", "QUANTDRIFT_INTAKE_TOKEN", "QUANTDRIFT_SAMPLING_SALT"},
    "shadow": {"QUANTDRIFT_DSN", "QUANTDRIFT_REFERENCE_TOKEN", "QUANTDRIFT_SAMPLING_SALT"},
    "monitor": {"QUANTDRIFT_DSN"},
    _PAGE: {"QUANTDRIFT_DSN", TOKEN_VARIABLE},
    "db upgrade": {"QUANTDRIFT_DSN"},
    "setup postgres": {"QUANTDRIFT_DSN"},
}
_SECRETS: Final = frozenset().union(*_NEEDED.values())
_POLL_S: Final = 0.1
_SLOW_POLL_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_SIDECAR_PAUSE_S: Final = 2.0
_STEADY_S: Final = 30.0
_KILLED_S: Final = 5.0
_PAGE_GRACE_S: Final = 2.0
SERVERS_GRACE_S: Final = 25.0
"""Time for the servers to stop after sidecar, shadow and monitor have."""
SILENT_S: Final = {
    "postgres": 300.0,
    "nats": 120.0,
    "shadow": 300.0,
    "monitor": 120.0,
    "sidecar": 120.0,
    _PAGE: 60.0,
}
"""Time without a heartbeat after which a process counts as hung, and is replaced.

The heartbeats of shadow, monitor and sidecar come from their event loops. Models are loaded, detectors compiled and
batches folded in other threads, so these times need to cover only what holds Python's global lock: reading a large
model may, for minutes. Those of the processes around Postgres and NATS come between two checks of the server; creating
a data directory and a start after a crash come before the first check.
"""
_PORTS: Final = range(20_000, 32_000)
_TRIES: Final = 100
_MOST_CHARACTERS: Final = 500  # of the names of options in a log line
_CONFIG_POLL_S: Final = 1.0
_REQUEST: Final = "restart"  # file in the data directory: names of processes to be started again
_REQUEST_POLL_S: Final = 0.1
_REQUEST_S: Final = 60.0
_AT_START: Final = frozenset(
    {
        "storage.dsn_file",
        "stream.name",
        "stream.url",
        "stream.url_file",
        "stream.credentials_file",
        "web.exemplars",
    }
)
"""Options by which this process chooses its servers: no part takes them before it is restarted itself."""
_OPERATOR_FILE: Final = "QUANTDRIFT__WEB__OPERATOR_DSN_FILE"


async def serve(config_path: Path, config: Config, data: Path, only: tuple[str, ...], stop: Stop) -> int:
    """Run sidecar, shadow and monitor, and every server that is not configured, until `stop`.

    Parameters
    ----------
    data
        Directory of the embedded servers; its files `dsn` and `nats.url` give their addresses to other commands.
    only
        Processes to start; empty: all.
    stop
        Stops sidecar, shadow, monitor, then the servers.

    Returns
    -------
    int
        0, or 2 if the sidecar cannot start with its configuration.

    Raises
    ------
    OperatorError
        Another `up` uses the same data directory, or it cannot be created.
    """
    os.umask(0o077)  # keys and captured traffic: what it and its processes write is for their user alone
    with _exclusive(data):
        return await _UpSupervisor(config_path, config, data, only, stop).run()


def ask_restart(data: Path, names: Sequence[str]) -> None:
    """Ask the `quantdrift up` that uses a data directory to start processes again, and wait until it has.

    Raises
    ------
    OperatorError
        None uses it, or it does not run such a process.
    RetryError
        It has not done it within a minute.
    """
    if not up_runs(data):
        raise OperatorError(
            f"no `quantdrift up` runs with the data directory {data}: give its own with --data"
        )
    before = read_states(data / STATES)
    if unknown := [name for name in names if name not in before]:
        raise OperatorError(
            f"the `quantdrift up` of {data} runs no {unknown[0]}; it runs {', '.join(name for name in PARTS if name in before)}"
        )
    new = data / f"{_REQUEST}.{secrets.token_hex(4)}"
    try:
        new.write_bytes(msgspec.json.encode(names))
        new.replace(data / _REQUEST)
    except OSError as error:
        raise OperatorError(f"{new} cannot be written: {error.strerror}") from error
    until_s = time.monotonic() + _REQUEST_S
    while True:
        states = read_states(data / STATES)
        waiting = [name for name in names if name not in states or states[name].starts <= before[name].starts]
        if not waiting:
            return
        if time.monotonic() > until_s:
            raise RetryError(
                f"{', '.join(waiting)} was not started again within {_REQUEST_S:g} s: see the log of `quantdrift up`"
            )
        time.sleep(_REQUEST_POLL_S)


@contextmanager
def _exclusive(data: Path) -> Iterator[None]:
    try:
        try:
            lock = (data / "lock").open(
                "r"
            )  # an existing one needs no room on the disk, nor the right to write
        except FileNotFoundError:
            data.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = (data / "lock").open("w")
    except OSError as error:
        raise OperatorError(
            f"the data directory {data} cannot be used ({error.strerror}): give another one with --data"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OperatorError(
                f"another `quantdrift up` uses {data}: give another directory with --data"
            ) from error
        yield


class _Upgrade(msgspec.Struct, frozen=True):
    applied: tuple[str, ...]


class _Process:
    """A process that is restarted whenever it ends, with its state: working, or down since when and why.

    Parameters
    ----------
    module, arguments, environment, final
        As for `Child`.
    clock
        Measures outages.
    on_stdout
        Called with each line of its stdout; None: the lines go to our stdout.
    on_start
        Called at each start; returns HOST:PORT where this process answers, as it is configured then.

    Attributes
    ----------
    address : str
        What `on_start` returned.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        clock: Clock,
        final: int | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
        on_start: Callable[[], str] = lambda: "",
    ) -> None:
        self.name = name
        self.address = ""
        self.is_up = False
        self._on_start = on_start
        self._n_starts = 0
        self._why_restarted = ""
        self._clock = clock
        self._heartbeat = Heartbeat.create()
        self._last_error = LastError()
        self._restarts: Counter[str] = Counter()
        self._shows_output_from_s = 0.0
        longest_pause_s = _LONGEST_PAUSE_S
        on_output = {1: on_stdout or _say, 2: self._pass_on}
        orphan = signal.SIGTERM
        if name == "sidecar":
            # If this process is killed, so is the sidecar's supervisor. Its relay workers go on serving without it, and
            # the next `quantdrift up` takes the port over from them. A SIGTERM would close the port.
            orphan = signal.SIGKILL
            # The sidecar inherits our output: the serving path must never wait for this process to read.
            longest_pause_s, on_output = _SIDECAR_PAUSE_S, {}
        self._outage = Outage(name, longest_pause_s, clock)
        self.child = Child(
            name,
            module,
            arguments,
            environment={**environment, VARIABLE: str(self._heartbeat.fd)},
            fds=(self._heartbeat.fd,),
            orphan=orphan,
            final=final,
            longest_pause_s=longest_pause_s,
            on_start=self._begun,
            on_restart=self._forget_beats,
            on_end=self._ended,
            on_output=on_output,
        )
        self._hang_watch = HangWatch(self.child, lambda: self._heartbeat.beats)
        self._running: asyncio.Task[int] | None = None

    def start(self) -> "asyncio.Task[int]":
        """Run it, and restart it whenever it ends, until `end`."""
        self._running = asyncio.create_task(self.child.run())
        return self._running

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._running is not None

    @property
    def state(self) -> PartState:
        """Whether it works, and if not, since when and why."""
        outage = self._outage
        return PartState(
            works=self.is_up,
            since=outage.since,
            why=outage.why,
            restarts=dict(self._restarts),
            address=self.address if self.name in _ROLES else "",
            starts=self._n_starts,
        )

    def mark_up(self) -> None:
        """Record that it works: its outage, if any, is over."""
        self.is_up = True
        self._outage.over()
        if self._why_restarted:
            _LOG.info("%s runs %s", self.name, self._why_restarted)
            self._why_restarted = ""

    def restart(self, why: str) -> None:
        """End it and start it again at once: it reads its configuration at the start.

        A sidecar is killed: its relay workers serve on and give their port to the next one, which SIGTERM would close.

        Parameters
        ----------
        why
            For the log, after "shadow runs": `with the changed configuration`.
        """
        self._why_restarted = why
        if self.name == "sidecar":
            self.child.restart(signal.SIGKILL, within_s=_KILLED_S)
        else:
            self.child.restart(within_s=GRACE_S + _KILLED_S)

    def mark_down(self, why: str, plan: str) -> None:
        """Record that it runs, but does not work."""
        self.is_up = False
        self._outage.failed(why, plan=plan)

    def replace_if_hung(self, elapsed_s: float) -> None:
        """Kill it if it hangs; it is started again.

        A sidecar is only reported: its relay workers serve without it.

        Parameters
        ----------
        elapsed_s
            Time since the last call.
        """
        limit_s = SILENT_S.get(self.name)
        if limit_s is None or not (why := self._hang_watch.look(elapsed_s, limit_s)):
            return
        if self.name != "sidecar":
            self.child.replace(f"{why}, and was killed")
        elif self.is_up:
            self.mark_down(
                f"its first process {why}",
                "its relay workers serve, so it is left alone: `quantdrift up --restart sidecar` starts it again",
            )

    async def end(self, within_s: float) -> None:
        """Stop it; kill it after `within_s`."""
        if self._running is None:
            return
        self.child.terminate()
        await asyncio.wait([self._running], timeout=within_s)
        if not self._running.done():
            _LOG.error("%s did not stop within %g s and is killed", self.name, within_s)
            self.child.kill()
            await asyncio.wait([self._running], timeout=_KILLED_S)

    def _begun(self, _pid: int) -> None:
        self._n_starts += 1
        self.address = self._on_start()

    def _forget_beats(self) -> None:
        self.is_up = False
        self._heartbeat.reset()

    def _ended(self, how: str, code: int | None, pause_s: float) -> None:
        self._forget_beats()
        self._restarts["not_started" if code is None else self.child.label(code)] += 1
        self._shows_output_from_s = self._clock.monotonic_s() + pause_s + _STEADY_S
        error = self._last_error.take()
        self._outage.failed(error if error and code is not None and code >= 0 else f"it {how}")

    def _pass_on(self, line: bytes) -> None:
        """Write a line of its stderr to ours, except its last error, which the line about the outage has.

        While it fails to start, its output is left out, because it repeats with every attempt.
        """
        is_last = self._last_error.read(line)
        is_repeated = self._outage.is_down and self._clock.monotonic_s() < self._shows_output_from_s
        if not is_last and not is_repeated:
            _say(line, 2, self.name)


class _UpSupervisor:
    def __init__(
        self, config_path: Path, config: Config, data: Path, only: tuple[str, ...], stop: Stop
    ) -> None:
        self._config = self._config_of_sidecar = config
        self._config_path = config_path
        self._data = data
        self._stop = stop
        self._clock = SystemClock()
        self._arguments = ["--config", str(config_path)]
        self._instance = secrets.token_hex(8)
        states = {STATES_FILE: str((data / STATES).absolute())}
        self._environment = variables() | {INSTANCE: self._instance} | states
        # Sidecar and shadow need the same one: the mark of rechecks is made with it.
        self._environment.setdefault("QUANTDRIFT_SAMPLING_SALT", secrets.token_hex(16))
        self._has_postgres = False
        self._dsn: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._servers: list[_Process] = []
        self._nats: tuple[Path, str] | None = None  # directory and address of the embedded server
        self._nats_works = asyncio.Event()
        self._choose_addresses()
        self._steps: list[_Process] = []  # what is done once and ends
        self._names = [name for name in _ROLES if not only or name in only]
        self._may_have_page = not only or _PAGE in only
        self._has_parts = False
        self._roles: dict[str, _Process] = {}
        self._states: dict[str, PartState] = {}

    async def run(self) -> int:
        code = 0
        tasks = []
        try:
            if "sidecar" in self._names:
                sidecar = self._role("sidecar").start()
                sidecar.add_done_callback(lambda _: self._stop.set())
            for server in self._servers:
                server.start()
            work = {
                "starting shadow and monitor": self._start_shadow_and_monitor,
                "checking readiness": self._watch,
                "watching the configuration": self._watch_config,
                "watching for processes that hang": self._watch_silence,
            }
            if self._nats is not None:
                work["setting up NATS"] = self._set_up_nats
            tasks = [asyncio.create_task(supervise(name, step, self._stop)) for name, step in work.items()]
            await self._stop.wait()
            if "sidecar" in self._names and sidecar.done():
                code = sidecar.result()  # its last log line says why
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()
            (self._data / STATES).unlink(missing_ok=True)
        return code

    async def _end(self) -> None:
        grace_s = {
            "sidecar": self._config.sidecar.grace_s,
            "shadow": GRACE_S,
            "monitor": GRACE_S,
            _PAGE: _PAGE_GRACE_S,
        }
        for name, role in self._roles.items():
            await role.end(grace_s[name] + _KILLED_S)
        for step in self._steps:
            await step.end(_KILLED_S)
        await asyncio.gather(*(server.end(SERVERS_GRACE_S - 2 * _KILLED_S) for server in self._servers))

    def _choose_addresses(self) -> None:
        """Choose the addresses of the embedded servers."""
        if not self._environment.get("QUANTDRIFT_DSN") and not self._config.storage.dsn_file:
            arguments = ["postgres", str(self._data / "postgres"), str(_port(self._data / "dsn"))]
            postgres = _Process(
                "postgres",
                "quantdrift.cli.run.embedded",
                arguments,
                without_secrets(self._environment),
                clock=self._clock,
                on_stdout=lambda line: self._reported(postgres, "dsn", line),
            )
            self._servers.append(postgres)
            self._has_postgres = True
        else:
            self._dsn.set_result(self._environment.get("QUANTDRIFT_DSN", ""))
        stream = self._config.stream
        if stream.url == Stream().url and not (stream.url_file or stream.credentials_file):
            directory, port = self._data / "nats", _port(self._data / "nats.url")
            nats = _Process(
                "nats",
                "quantdrift.cli.run.embedded",
                ["nats", str(directory), str(port), stream.name],
                without_secrets(self._environment),
                clock=self._clock,
                on_stdout=lambda line: self._reported(nats, "nats.url", line),
            )
            self._nats = directory, server_url(port)
            self._servers.append(nats)
            # Now if possible: the sidecar connects before the server runs. Otherwise the server's process makes them.
            try:
                access(directory, stream.name)
                if any(model.exemplars for model in self._config.models):
                    make_encryption(directory)
            except (OSError, OperatorError) as error:
                _LOG.error("the keys of the embedded NATS cannot be made yet: %s", error)

    def _reported(self, server: _Process, file: str, line: bytes) -> None:
        report = msgspec.json.decode(line, type=Report)
        _write(self._data / file, report.address)
        if report.problem:
            server.mark_down(report.problem, "it is still read from")
            return
        server.mark_up()
        if server.name == "nats":
            self._nats_works.set()
        if server.name == "postgres" and not self._dsn.done():
            _LOG.info("postgres is up")
            for role in (
                "shadow",
                "monitor",
                "reader",
                "operator",
                "page",
            ):  # of an earlier start, at another port
                with contextlib.suppress(OSError, ValueError):
                    path = self._data / address_file(role)
                    if urlsplit(path.read_text("utf-8").strip()).port != urlsplit(report.address).port:
                        path.unlink()
            self._dsn.set_result(report.address)

    def _role(self, name: str) -> _Process:
        arguments = [name, *self._arguments]
        environment = _needed(self._environment, name)
        if self._nats is not None and (name != _PAGE or self._config.web.exemplars):
            role = NatsRole.PAGE if name == _PAGE else NatsRole(name)
            environment |= nats_variables(*self._nats, role)
        if self._has_postgres and name != "sidecar":
            environment["QUANTDRIFT_DSN"] = embedded_address(
                self._data, address_file("reader" if name == _PAGE else name)
            )
            if name == _PAGE:
                environment |= self._page_variables()
        final = (
            _OPERATOR if name == "sidecar" else None
        )  # only a failure of its first start ends this command
        self._roles[name] = _Process(
            name,
            "quantdrift",
            arguments,
            environment,
            clock=self._clock,
            final=final,
            on_start=lambda: self._begins(name),
        )
        return self._roles[name]

    def _begins(self, name: str) -> str:
        """Note that a part reads the present configuration, and return the address of its port."""
        config = self._config
        if name == "sidecar":
            self._config_of_sidecar = config
        return {
            "sidecar": config.sidecar.admin,
            "shadow": config.shadow.admin,
            "monitor": config.monitor.admin,
            _PAGE: config.web.listen,
        }[name]

    def _page_variables(self) -> dict[str, str]:
        if not self._has_postgres or self._config.web.operator_dsn_file:
            return {}
        return {_OPERATOR_FILE: str(self._data.resolve() / address_file("page"))}

    async def _start_shadow_and_monitor(self) -> None:
        """Start shadow and monitor once the database is up and upgraded."""
        if dsn := await self._dsn:
            self._environment["QUANTDRIFT_DSN"] = dsn
        arguments = ["db", "upgrade", "--json", *self._arguments]
        if applied := msgspec.json.decode(
            await self._step("db upgrade", "quantdrift", arguments, {}), type=_Upgrade
        ).applied:
            _LOG.info("applied the schema revisions %s", ", ".join(applied))
        if self._has_postgres:
            await self._step("setup postgres", "quantdrift.cli.run.embedded_postgres", [str(self._data)], {})
        for name in self._names:
            if name != "sidecar":
                self._role(name).start()
        self._has_parts = True
        await self._stop.wait()

    async def _watch_config(self) -> None:
        """Restart what reads the configuration at its start once that has changed, and what somebody asks for."""
        watch = FileWatch(self._config_path)
        while not await self._stop.wait(_CONFIG_POLL_S):
            for name in _requested(self._data):
                self._restart(name, "again, as asked")
            try:
                config = await asyncio.to_thread(watch.poll)
            except OperatorError as error:
                if "sidecar" not in self._names:  # it says so itself
                    _LOG.error(
                        "the changed configuration is refused, the previous one stays in effect: %s",
                        in_one_line(str(error)),
                    )
                continue
            if config is not None:
                if "sidecar" not in self._names:  # it keeps what it accepts
                    await asyncio.to_thread(keep, self._config_path)
                self._take(config)
            await self._set_page()

    def _take(self, config: Config) -> None:
        """Restart shadow, monitor and page with a changed configuration; the sidecar takes it itself."""
        if config == self._config:
            return
        changed = changed_options(config_state(self._config), config_state(config))
        if at_start := [name for name in changed if name in _AT_START or self._needs_encryption(name)]:
            _LOG.warning(
                "the changed configuration reaches no part but the sidecar before `quantdrift up` is restarted, because of %s",
                ", ".join(at_start),
            )
            return
        self._config = config
        parts = [name for name in self._roles if name != "sidecar"]
        for name in parts:
            self._restart(name, "with the changed configuration")
        if parts:
            _LOG.info(
                "%s restarted with the changed configuration: %s",
                f"{listed(parts)} {'is' if len(parts) == 1 else 'are'}",
                plain(", ".join(changed), _MOST_CHARACTERS),
            )
        if "sidecar" in self._names and (waiting := merge(self._config_of_sidecar, config)[1]):
            _LOG.warning(
                "%s: the sidecar takes this at its next start. `quantdrift up --restart sidecar --data %s` does that; its port"
                " stays open",
                ", ".join(waiting),
                self._data,
            )

    def _needs_encryption(self, option: str) -> bool:
        """Return whether an option lets exemplars be kept at an embedded server whose disk is not encrypted yet."""
        if self._nats is None or not option.startswith("models.") or not option.endswith(".exemplars"):
            return False
        return not (self._nats[0] / ENCRYPTION).exists()

    def _restart(self, name: str, why: str) -> None:
        if (part := self._roles.get(name)) is None:
            return
        if name == _PAGE:
            part.child.environment.pop(_OPERATOR_FILE, None)
            part.child.environment |= self._page_variables()
        part.restart(why)

    async def _set_page(self) -> None:
        """Start the page once the others were, and end it when the configuration has none any more."""
        wanted = self._has_parts and self._may_have_page and bool(self._config.web.listen)
        if wanted and _PAGE not in self._roles:
            self._role(_PAGE).start()
        if not wanted and (page := self._roles.pop(_PAGE, None)) is not None:
            await page.end(_PAGE_GRACE_S + _KILLED_S)

    async def _set_up_nats(self) -> None:
        """Create or update streams and buckets at the embedded server: only the administrator may."""
        assert self._nats is not None
        await self._nats_works.wait()
        keys = ["--keys", str(key_directory(self._nats[0])), "--apply"]
        arguments = ["setup", "nats", *keys, *self._arguments]
        await self._step("setup nats", "quantdrift", arguments, nats_variables(*self._nats))
        await self._stop.wait()

    async def _step(
        self, name: str, module: str, arguments: Sequence[str], environment: dict[str, str]
    ) -> bytes:
        """Run a process until it has succeeded once; return its stdout, which says the same at each start."""
        lines: list[bytes] = []

        def begins() -> str:
            lines.clear()
            return ""

        step = _Process(
            name,
            module,
            arguments,
            _needed(self._environment, name) | environment,
            clock=self._clock,
            final=0,
            on_stdout=lines.append,
            on_start=begins,
        )
        self._steps.append(step)
        await asyncio.shield(step.start())
        step.mark_up()
        return b"\n".join(lines)

    async def _watch(self) -> None:
        """Check which processes are ready, and print the addresses once all of them are."""
        urls: dict[str, str] = {}
        is_up = False
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as client:
            while True:
                for name, role in list(self._roles.items()):
                    if role.address:
                        urls[name] = f"http://{read_address(role.address).dialled}"
                    if not role.is_up and name in urls and await self._is_ready(client, urls[name]):
                        role.mark_up()
                        role.child.final = None  # its configuration works: a restart can solve later failures
                self._write_states()
                if not is_up and all(name in self._roles and self._roles[name].is_up for name in self._names):
                    is_up = True
                    _say(
                        f"quantdrift is up: {', '.join(f'{name} {urls[name]}' for name in self._names)}".encode()
                    )
                await asyncio.sleep(_SLOW_POLL_S if is_up else _POLL_S)

    async def _watch_silence(self) -> None:
        """Replace processes that hang."""
        last_s = self._clock.monotonic_s()
        while not await self._stop.wait(LOOK_S):
            now_s = self._clock.monotonic_s()
            elapsed_s, last_s = now_s - last_s, now_s
            for process in (*self._servers, *self._roles.values()):
                process.replace_if_hung(elapsed_s)

    def _write_states(self) -> None:
        """Write the states of all processes to the data directory if one has changed; `quantdrift status` reads them."""
        states = {part.name: part.state for part in (*self._servers, *self._steps, *self._roles.values())}
        if states != self._states:
            self._states = states
            _write(self._data / STATES, msgspec.json.encode(states).decode())

    async def _is_ready(self, client: aiohttp.ClientSession, url: str) -> bool:
        """Return whether our own process answers; another one may have taken the port."""
        try:
            async with client.get(f"{url}/readyz") as answer:
                return answer.status == 200 and answer.headers.get(INSTANCE_HEADER) == self._instance
        except (aiohttp.ClientError, TimeoutError):
            return False


def _requested(data: Path) -> tuple[str, ...]:
    """Return the processes that somebody wants to be started again, and forget them."""
    file = data / _REQUEST
    try:
        names = msgspec.json.decode(file.read_bytes(), type=tuple[str, ...])
        file.unlink()
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        _LOG.error("%s cannot be read: %s", file, error)
        with contextlib.suppress(OSError):
            file.unlink()
        return ()
    return names


def _say(line: bytes, descriptor: int = 1, name: str = "up") -> None:
    """Write a line to stdout or stderr: processes that must not end with the terminal do not inherit them.

    Where the log is JSON, so is what is not: lines for people, and what Python or a library writes past the log.

    Parameters
    ----------
    name
        The process that has written it.
    """
    if logs_json() and not line.startswith(b"{"):
        _LOG.info("%s%s", "" if name == "up" else f"{name}: ", line.decode(errors="replace"))
    else:
        background(descriptor).write(line + b"\n")


def _needed(environment: Mapping[str, str], process: str) -> dict[str, str]:
    """Return an environment without the secrets that a process does not need."""
    hidden = _SECRETS - _NEEDED.get(process, frozenset())
    return {name: value for name, value in environment.items() if name not in hidden}


def _write(path: Path, secret: str) -> None:
    try:
        path.touch(mode=0o600)
        path.write_text(secret + "\n", encoding="utf-8")
    except OSError as error:
        _LOG.error(
            "%s cannot be written (%s): commands with --data cannot find the server", path, error.strerror
        )


def _port(address: Path) -> int:
    """Return the port of an earlier start, from the file with its address, if it is still free; else one that is free.

    The port is below the range that the kernel gives to outgoing connections. Otherwise a client that tries to reach
    the server before it runs could take its port. Binding to port 0 would choose from that range.
    """
    earlier = []
    with contextlib.suppress(OSError, ValueError):
        earlier = [urlsplit(address.read_text(encoding="utf-8").strip()).port or 0]
    for port in (
        *(port for port in earlier if port in _PORTS),
        *secrets.SystemRandom().sample(_PORTS, _TRIES),
    ):
        with socket.socket() as probe, contextlib.suppress(OSError):
            # As the servers do: connections of the earlier start that still end are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise OperatorError(f"no port on 127.0.0.1 from {_PORTS.start} to {_PORTS.stop - 1} is free")
