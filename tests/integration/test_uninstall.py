"""`quantdrift uninstall` on folders as `quantdrift up` and sidecars leave them."""

import fcntl
import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import invoked

pytestmark = pytest.mark.integration


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a data directory, beside an empty folder for temporary files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    data = tmp_path / ".quantdrift"
    (data / "postgres").mkdir(parents=True)
    (data / "lock").touch()
    (data / "postgres" / "PG_VERSION").write_text("17")
    return data


@pytest.fixture
def sidecars(data: Path) -> Iterator[tuple[Path, Path]]:
    """Return the folder of a sidecar that was killed, and of one that runs."""
    folders = []
    listening = []
    for name in ("killed", "running"):
        folder = data.parent / "tmp" / f"quantdrift-{name}"
        folder.mkdir()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(folder / "handoff"))
        listener.listen()
        folders.append(folder)
        listening.append(listener)
    listening[0].close()
    yield folders[0], folders[1]
    listening[1].close()


def test_it_removes_the_data_and_what_killed_sidecars_left(data: Path, sidecars: tuple[Path, Path]) -> None:
    """Not the folder of a sidecar that runs; and it says what stays."""
    killed, running = sidecars
    done = invoked("uninstall", "--yes", "--json", directory=data.parent)
    said = json.loads(done.stdout)
    assert said["removed"] == [".quantdrift", str(killed)]
    assert (data.exists(), killed.exists(), running.exists()) == (False, False, True)
    assert any("config.toml" in line for line in said["stays"])
    assert invoked("uninstall", directory=data.parent).stdout.startswith("There is nothing to remove.")


def test_it_asks_first_and_shows_what_it_would_remove(data: Path) -> None:
    """Without an answer nothing is removed."""
    done = invoked("uninstall", directory=data.parent)
    assert done.returncode == 1
    assert ".quantdrift  (0 MiB)" in done.stdout
    assert (data / "postgres" / "PG_VERSION").exists()


def test_a_folder_in_use_or_of_something_else_is_left(data: Path, tmp_path: Path) -> None:
    """While `quantdrift up` holds its lock, and where it never was."""
    with (data / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = invoked("uninstall", "--yes", directory=tmp_path)
    assert (refused.returncode, "stop it first" in refused.stderr) == (2, True)
    other = tmp_path / "home"
    (other / "postgres").mkdir(parents=True)
    refused = invoked("uninstall", "--data", str(other), "--yes", directory=tmp_path)
    assert (refused.returncode, "is no data directory" in refused.stderr) == (2, True)
    assert data.exists()
    assert other.exists()
