"""The disk under a sidecar's directory is full: serving goes on, and what could not be written changes nothing."""

import contextlib
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from quantdrift.sidecar import supervisor
from tests.support.sidecar.relay_process import Backend, SidecarProcess, started, wait
from tests.support.sidecar.relay_rig import answer, post

pytestmark = pytest.mark.fault

KIB = 1024
Fill = Callable[[SidecarProcess], Callable[[], None]]
"""Makes the disk full for a sidecar; returns what makes room again."""


@pytest.fixture
def disk() -> Iterator[tuple[str, Fill]]:
    """Return a directory and how to fill it: a small file system, or where none may be mounted a limit on files."""
    with tempfile.TemporaryDirectory(prefix="qd-") as directory, contextlib.ExitStack() as stack:
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", directory]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            yield directory, _forbid
        else:
            stack.callback(subprocess.run, ["umount", "-l", directory], check=True)
            yield directory, _stuff


def _stuff(sidecar: SidecarProcess) -> Callable[[], None]:
    """Fill the file system to its last byte."""
    return _fill(sidecar.temporary)


def _fill(directory: str) -> Callable[[], None]:
    stuffing = Path(directory) / "stuffing"
    with contextlib.suppress(OSError), stuffing.open("wb", buffering=0) as file:
        while file.write(bytes(KIB)):
            pass
    return stuffing.unlink


def _forbid(sidecar: SidecarProcess) -> Callable[[], None]:
    """Let the sidecar's processes write no file any more."""
    none, all_ = (0, resource.RLIM_INFINITY), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    def limit(to: tuple[int, int]) -> None:
        for process in (sidecar.root, *sidecar.root.children()):
            process.rlimit(psutil.RLIMIT_FSIZE, to)

    limit(none)
    return lambda: limit(all_)


def _reloads(sidecar: SidecarProcess, result: str) -> float:
    return sidecar.count("quantdrift_sidecar_reloads_total", result=result)


def test_a_full_disk_costs_changes_and_no_request(
    tmp_path: Path, backend: Backend, disk: tuple[str, Fill]
) -> None:
    """Bytes flow, samples are taken, a killed worker comes back; a change is refused, and taken over once there is room."""
    directory, fill = disk
    path = tmp_path / "config.toml"
    with started(SidecarProcess(tmp_path, directory, backend.port, SIDECAR__GRACE_S=2)) as sidecar:
        make_room = fill(sidecar)
        assert sidecar.talk(post(b"x")) == answer(b"to x")
        path.write_text("[sampling]\nrate = 1.0\n")
        wait(lambda: _reloads(sidecar, "refused") == 1, "the change is refused")
        refused = sidecar.switch("pause")
        assert refused.returncode == 2
        assert "the pause cannot be written" in refused.stderr, (
            "who wants to pause is told that it is not done"
        )
        victim = sidecar.workers[0]
        victim.send_signal(signal.SIGKILL)
        wait(lambda: sidecar.workers not in ([], [victim]), "another worker")
        wait(sidecar.is_ready, "it is ready again")
        assert sidecar.talk(post(b"y")) == answer(b"to y")
        assert sidecar.count("quantdrift_sidecar_taken_total") == 0
        make_room()
        assert sidecar.switch("resume").returncode == 0
        path.write_text("[sampling]\nrate = 1.0 # again\n")
        wait(lambda: _reloads(sidecar, "taken_over") == 1, "the change holds")

        def takes() -> bool:
            assert sidecar.talk(post(b"z")) == answer(b"to z")
            return sidecar.count("quantdrift_sidecar_taken_total") > 0

        wait(takes, "the worker follows")
        assert sidecar.switch("pause").returncode == 0


def test_a_sidecar_keeps_its_state_in_memory_where_the_disk_is_full_at_its_start(
    disk: tuple[str, Fill], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not wait for room, or a restart on a full disk would close the port."""
    directory, fill = disk
    if fill is not _stuff:
        pytest.skip("needs the right to mount a file system")
    _fill(directory)
    monkeypatch.setattr(tempfile, "tempdir", directory)
    state = supervisor._state_directory()
    try:
        assert state.parent == Path("/dev/shm")
        assert list(Path(directory).glob("quantdrift-*")) == []
    finally:
        state.rmdir()
