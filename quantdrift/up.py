"""Every role on one host: starts the servers and the roles, starts again what dies, ends all in order."""

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import click
import msgspec

from quantdrift.core.config.schema import Config, Stream
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.nats_server import NatsServer
from quantdrift.core.process import Stop
from storage.embedded import PostgresServer

_LOG = logging.getLogger(__name__)
_ROLES = ("sidecar", "shadow", "monitor")  # also the order in which they end: source first
_WATCH_S = 0.5
_MOST_PAUSE_S = 10.0
_OPERATOR = 2  # a role's exit code when a person must act: starting it again would not help


class _Servers:
    """The embedded servers of this host: those that no configuration replaces."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._postgres: PostgresServer | None = None
        self._nats: NatsServer | None = None

    def start_postgres(self) -> str:
        """Start Postgres and return its address, which `dsn` in the data directory tells to other commands."""
        self._postgres = PostgresServer(self._data / "postgres")
        self._postgres.start()
        _write(self._data / "dsn", self._postgres.dsn)
        return self._postgres.dsn

    def start_nats(self) -> str:
        """Start NATS and return its address, which `nats.url` in the data directory tells to people."""
        self._nats = NatsServer.start(self._data / "nats")
        _write(self._data / "nats.url", self._nats.url)
        return self._nats.url

    def restart_dead(self) -> None:
        """Start again, on the same port and data, what is gone.

        On the main thread by need: the kernel ends a server with the thread that started it.
        """
        if self._postgres is not None and self._postgres.pid is None:
            _LOG.error("postgres is gone: starting it again on its data")
            self._postgres.start()
        if self._nats is not None and not self._nats.alive():
            _LOG.error("nats is gone: starting it again on its data")
            self._nats = NatsServer.start(self._data / "nats", self._nats.port)

    def stop(self) -> None:
        """End what runs."""
        if self._nats is not None:
            self._nats.stop()
        if self._postgres is not None:
            self._postgres.stop()


class _Role(msgspec.Struct, kw_only=True):
    """A role's process and how often it failed of late."""

    name: str
    admin: str
    environment: dict[str, str]
    process: asyncio.subprocess.Process | None = None
    failures: int = 0

    def end(self) -> None:
        """Ask the process to finish, if there is one."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)


async def serve(config_path: Path, config: Config, data: Path, only: tuple[str, ...], stop: Stop) -> int:
    """Run the servers that are not configured and every role, until `stop`.

    Parameters
    ----------
    config_path, config
        The configuration and where the roles read it.
    data
        Directory of the embedded servers; `dsn` and `nats.url` in it tell other commands where they are.
    only
        Roles to start; empty: all.
    stop
        Ends everything: sidecar, shadow, monitor, then the servers.

    Returns
    -------
    int
        0, or 2 when a role says that a person must act.

    Raises
    ------
    OperatorError
        Another `up` uses the same data directory, or a server cannot be started here.
    """
    with _exclusive(data):
        servers = _Servers(data)
        try:
            environment = _environment(config, servers)
            await _migrate(config_path, environment, stop)
            return await _supervise(config_path, _roles(config, environment, only), servers, stop)
        finally:
            servers.stop()


@contextmanager
def _exclusive(data: Path) -> Iterator[None]:
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (data / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OperatorError(
                f"another `quantdrift up` uses {data}: give --data another directory"
            ) from error
        yield


def _environment(config: Config, servers: _Servers) -> dict[str, str]:
    """Start what is not configured; return the environment that tells the roles where it is."""
    environment = dict(os.environ)
    if not environment.get("QUANTDRIFT_DSN") and not config.storage.dsn_file:
        environment["QUANTDRIFT_DSN"] = servers.start_postgres()
        _LOG.info("postgres is up")
    if config.stream.url == Stream().url and not config.stream.credentials_file:
        environment["QUANTDRIFT__STREAM__URL"] = servers.start_nats()
        _LOG.info("nats is up at %s", environment["QUANTDRIFT__STREAM__URL"])
    return environment


def _write(path: Path, secret: str) -> None:
    path.touch(mode=0o600)
    path.write_text(secret + "\n", encoding="utf-8")


def _roles(config: Config, environment: dict[str, str], only: tuple[str, ...]) -> list[_Role]:
    admin = {"sidecar": config.sidecar.admin, "shadow": config.shadow.admin, "monitor": config.monitor.admin}
    without_dsn = {name: value for name, value in environment.items() if name != "QUANTDRIFT_DSN"}
    return [
        _Role(name=name, admin=admin[name], environment=without_dsn if name == "sidecar" else environment)
        for name in _ROLES
        if not only or name in only
    ]


async def _migrate(config_path: Path, environment: dict[str, str], stop: Stop) -> None:
    """Run `db upgrade`; a database that is not there yet is waited for."""
    pause_s = 0.5
    while not stop.is_set():
        process = await _start(["db", "upgrade", "--config", str(config_path)], environment)
        code = await process.wait()
        if code == 0:
            return
        if code == _OPERATOR:
            raise OperatorError("the database cannot be prepared: see the line above")
        _LOG.warning("the database is not ready: again in %g s", pause_s)
        await stop.wait(pause_s)
        pause_s = min(pause_s * 2, _MOST_PAUSE_S)


async def _supervise(config_path: Path, roles: list[_Role], servers: _Servers, stop: Stop) -> int:
    command = ["--config", str(config_path)]
    watches = {role.name: asyncio.create_task(_keep(role, command, stop)) for role in roles}
    keep_servers = asyncio.create_task(_keep_servers(servers, stop))
    announce = asyncio.create_task(_announce(roles, stop))
    codes = []
    try:
        await stop.wait()
        for role in roles:
            role.end()
            codes.append(await watches[role.name])
        codes.append(await keep_servers)
    finally:
        for role in roles:
            role.end()
        announce.cancel()
    return _OPERATOR if _OPERATOR in codes else max(codes, default=0)


async def _keep(role: _Role, command: list[str], stop: Stop) -> int:
    """Run a role until `stop`; start it again when it dies; return its last exit code."""
    loop = asyncio.get_running_loop()
    while True:
        started = loop.time()
        role.process = await _start([role.name, *command], role.environment)
        if stop.is_set():  # asked for while it was being started
            role.end()
        code = await role.process.wait()
        if stop.is_set():
            return code
        if code == _OPERATOR:
            _LOG.error("%s cannot run: see the line above", role.name)
            stop.set()
            return code
        role.failures = 0 if loop.time() - started > 60 else role.failures + 1
        pause_s = min(0.2 * 2**role.failures, _MOST_PAUSE_S)
        _LOG.error("%s ended with %s: again in %g s", role.name, code, pause_s)
        if await stop.wait(pause_s):
            return 0


async def _start(arguments: list[str], environment: dict[str, str]) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "quantdrift", *arguments]
    if setpriv := shutil.which("setpriv"):  # an `up` that is killed takes its roles along
        command = [setpriv, "--pdeathsig", "TERM", *command]
    # A session of its own: Ctrl-C reaches `up` alone, which ends the roles in their order.
    return await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)


async def _keep_servers(servers: _Servers, stop: Stop) -> int:
    while not await stop.wait(_WATCH_S):
        try:
            servers.restart_dead()
        except RetryError as error:
            _LOG.warning("%s: again", error)
        except OperatorError:
            _LOG.exception("an embedded server does not start")
            stop.set()
            return _OPERATOR
    return 0


async def _announce(roles: list[_Role], stop: Stop) -> None:
    """Say once that every role is ready, and where."""
    timeout = aiohttp.ClientTimeout(total=2)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        waiting = {role.name: role.admin for role in roles}
        while waiting and not stop.is_set():
            for name, admin in list(waiting.items()):
                try:
                    async with client.get(f"http://{_reachable(admin)}/readyz") as answer:
                        if answer.status == 200:
                            del waiting[name]
                except (aiohttp.ClientError, TimeoutError):
                    pass
            await stop.wait(0.1)
    if not waiting:
        click.echo(
            "quantdrift is up: " + ", ".join(f"{role.name} http://{_reachable(role.admin)}" for role in roles)
        )


def _reachable(address: str) -> str:
    return address.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - the wildcard is listened on, not dialled
