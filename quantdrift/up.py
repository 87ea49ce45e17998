"""Every role on one host: starts the servers and the roles, starts again what dies, ends all in order."""

import asyncio
import fcntl
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import click

from quantdrift.core.child import Child
from quantdrift.core.config.schema import Config, Stream
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.leash import leashed
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
        self._postgres = PostgresServer(data / "postgres")
        self._nats = NatsServer(data / "nats")
        self._wanted: list[PostgresServer | NatsServer] = []

    def start_postgres(self) -> str:
        """Start Postgres and return its address, which `dsn` in the data directory tells to other commands."""
        self._wanted.append(self._postgres)
        self._postgres.start()
        _write(self._data / "dsn", self._postgres.dsn)
        return self._postgres.dsn

    def start_nats(self) -> str:
        """Start NATS and return its address, which `nats.url` in the data directory tells to people."""
        self._wanted.append(self._nats)
        self._nats.start()
        _write(self._data / "nats.url", self._nats.url)
        return self._nats.url

    def restart_dead(self) -> None:
        """Start again, on the same port and data, what is gone.

        On the main thread by need: the kernel ends a server with the thread that started it.
        """
        for server in self._wanted:
            if not server.alive():
                _LOG.error("%s is gone: starting it again on its data", type(server).__name__)
                server.start()

    def stop(self) -> None:
        """End what runs, the last started first."""
        for server in reversed(self._wanted):
            server.stop()


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
            return await _supervise(config, _roles(config_path, environment, only), servers, stop)
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
        _LOG.info("nats is up")
    return environment


def _write(path: Path, secret: str) -> None:
    path.touch(mode=0o600)
    path.write_text(secret + "\n", encoding="utf-8")


def _roles(config_path: Path, environment: dict[str, str], only: tuple[str, ...]) -> list[Child]:
    without_dsn = {name: value for name, value in environment.items() if name != "QUANTDRIFT_DSN"}
    return [
        Child(
            name,
            "quantdrift",
            [name, "--config", str(config_path)],
            environment=without_dsn if name == "sidecar" else environment,
            final=_OPERATOR,
        )
        for name in _ROLES
        if not only or name in only
    ]


async def _migrate(config_path: Path, environment: dict[str, str], stop: Stop) -> None:
    """Run `db upgrade`; a database that is not there yet is waited for."""
    pause_s = 0.5
    while not stop.is_set():
        command = [sys.executable, "-m", "quantdrift", "db", "upgrade", "--config", str(config_path)]
        process = await asyncio.create_subprocess_exec(
            *leashed(command), env=environment, start_new_session=True
        )
        code = await process.wait()
        if code == 0:
            return
        if code == _OPERATOR:
            raise OperatorError("the database cannot be prepared: see the line above")
        _LOG.warning("the database is not ready: again in %g s", pause_s)
        await stop.wait(pause_s)
        pause_s = min(pause_s * 2, _MOST_PAUSE_S)


async def _supervise(config: Config, roles: list[Child], servers: _Servers, stop: Stop) -> int:
    tasks = [asyncio.create_task(_keep(role, stop)) for role in roles]
    tasks.append(asyncio.create_task(_keep_servers(servers, stop)))
    announce = asyncio.create_task(_announce(config, [role.name for role in roles], stop))
    try:
        await stop.wait()
        for role, task in zip(roles, tasks, strict=False):
            role.terminate()
            await task
        codes = await asyncio.gather(*tasks)
    finally:
        for role in roles:
            role.terminate()
        announce.cancel()
    return _OPERATOR if _OPERATOR in codes else max(codes)


async def _keep(role: Child, stop: Stop) -> int:
    code = await role.run()
    if not stop.is_set():
        _LOG.error("%s cannot run: see the line above", role.name)
        stop.set()
    return code


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


async def _announce(config: Config, names: list[str], stop: Stop) -> None:
    """Say once that every role is ready, and where."""
    admin = {"sidecar": config.sidecar.admin, "shadow": config.shadow.admin, "monitor": config.monitor.admin}
    urls = {name: f"http://{_reachable(admin[name])}" for name in names}
    waiting = dict(urls)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as client:
        while waiting and not stop.is_set():
            for name, url in list(waiting.items()):
                try:
                    async with client.get(f"{url}/readyz") as answer:
                        if answer.status == 200:
                            del waiting[name]
                except (aiohttp.ClientError, TimeoutError):
                    pass
            await stop.wait(0.1)
    if not waiting:
        click.echo("quantdrift is up: " + ", ".join(f"{name} {url}" for name, url in urls.items()))


def _reachable(address: str) -> str:
    return address.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - the wildcard is listened on, not dialled
