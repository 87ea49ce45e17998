"""How the tests run: what a unit test must not do, what is made once, and who takes which file."""

import asyncio
import fcntl
import importlib
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support import in_memory
from tests.support.in_memory import memory_directory
from tests.support.isolation import ROOT, isolated, reaches
from tests.support.resident_memory import apart, resident_bytes
from tests.support.schedule import ORDER, part, rank, turned
from tests.support.shared import made_once

TESTS = ROOT / "tests"


@pytest.mark.integration
def test_a_socket_a_process_and_torch_are_noted() -> None:
    """Whoever opens, starts or imports them: also through asyncio, and torch that was imported before."""
    with isolated() as found:
        socket.create_server(("127.0.0.1", 0)).close()
    assert found == ["socket.bind"]
    with isolated() as found, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 1), timeout=1)
    assert "socket.connect" in found
    with isolated() as found:
        subprocess.run([sys.executable, "-c", ""], check=True)
    assert found == [f"subprocess.Popen {sys.executable}"]
    with isolated() as found:
        assert apart(resident_bytes) > 0
    assert found == ["multiprocessing"]
    before = importlib.import_module("torch")
    with isolated() as found, pytest.raises(ImportError, match="must not import torch"):
        importlib.import_module("torch")
    assert found == ["import torch"]
    assert importlib.import_module("torch") is before


@pytest.mark.unit
def test_an_event_loop_is_allowed() -> None:
    """With the sockets it wakes itself up by, which have no address."""

    async def turn() -> None:
        await asyncio.sleep(0)

    with isolated() as found:
        asyncio.run(turn())
    assert found == []


@pytest.mark.slow
@pytest.mark.unit
def test_no_module_with_unit_tests_imports_torch() -> None:
    """Not by way of others either: collecting the unit tests costs no second of it."""
    modules = [
        path for path in TESTS.glob("*/test_*.py") if re.search(r"mark\.unit\b", path.read_text("utf-8"))
    ]
    assert len(modules) > 100
    assert [way for way in map(reaches, modules) if way] == []
    assert reaches(TESTS / "support" / "shadow" / "vllm_like.py")[-1] == "torch"


@pytest.mark.unit
def test_every_directory_has_its_turn_and_servers_go_together() -> None:
    """A file goes to one process, the tests with real servers to one together, and what is short comes last."""
    held = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert held == set(ORDER)
    assert part("tests/unit/test_backtest_alerts.py::test_a[b::c]") == "tests/unit/test_backtest_alerts.py"
    assert part("tests/servers/test_vllm.py::test_a") == part("tests/servers/test_kserve.py::test_b")
    turns = [rank(f"tests/{name}/test_a.py::test_a") for name in ("new", "acceptance", "integration", "unit")]
    assert turns == sorted(turns)
    assert rank("test_alone.py::test_a") == turns[0]


@pytest.mark.unit
def test_each_process_begins_to_collect_elsewhere_and_collects_all() -> None:
    """Two processes begin half of the files apart; what is named by itself stays as it was named."""
    folders = [str(TESTS / name) for name in ("contract", "property")]
    first, second = (turned(folders, process, 2) for process in range(2))
    assert first == [str(path) for folder in folders for path in sorted(Path(folder).glob("test_*.py"))]
    assert first[0] == second[-(len(first) // 2)]
    assert sorted(first) == sorted(second)
    named = [folders[0], f"{folders[1]}/test_tap.py::test_a"]
    assert turned(named, 1, 2) == named


@pytest.mark.unit
def test_what_several_ask_for_is_made_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Others wait until it is whole; one that failed is made again."""
    calls: list[Path] = []

    def make(directory: Path) -> Path:
        calls.append(directory)
        if len(calls) == 1:
            raise RuntimeError("the disk is full")
        (directory / "model").write_text("trained")
        return directory / "model"

    name = f"suite-{tmp_path_factory.mktemp('once').parent.name}"  # the folder is shared with the other processes
    with pytest.raises(RuntimeError, match="the disk is full"):
        made_once(tmp_path_factory, name, make)
    found: list[str] = []
    asking = [
        threading.Thread(target=lambda: found.append(made_once(tmp_path_factory, name, make).read_text()))
        for _ in range(4)
    ]
    for one in asking:
        one.start()
    for one in asking:
        one.join()
    assert found == ["trained"] * 4
    assert len(calls) == 2


@pytest.mark.unit
def test_a_directory_in_memory_is_deleted_at_the_end_and_that_of_a_killed_process_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory in use stays. Without room in memory it is on disk."""
    monkeypatch.setattr(in_memory, "MEMORY", tmp_path)
    (tmp_path / "quantdrift-tests-killed.lock").touch()
    (tmp_path / "quantdrift-tests-killed" / "postgres").mkdir(parents=True)
    with memory_directory() as first:
        assert not (tmp_path / "quantdrift-tests-killed").exists()
        with memory_directory() as second:
            assert first.parent == second.parent == tmp_path
            assert first.is_dir()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(in_memory, "MEMORY", tmp_path / "missing")
    with memory_directory() as directory:
        assert tmp_path not in directory.parents
        assert directory.stat().st_mode & 0o777 == 0o755
    assert not directory.exists()


@pytest.mark.unit
def test_a_directory_in_memory_survives_another_process_that_cleans_up_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file may be taken for abandoned between its making and its lock: then there is a new one."""
    lock = fcntl.flock
    made: list[Path] = []

    def late(file: Any, operation: int) -> None:
        """Let the other process come first, once."""
        if not operation & fcntl.LOCK_NB and not made:
            made.extend(tmp_path.iterdir())
            for path in made:
                path.unlink()
        lock(file, operation)

    monkeypatch.setattr(in_memory, "MEMORY", tmp_path)
    monkeypatch.setattr(fcntl, "flock", late)
    with memory_directory() as directory:
        assert directory.is_dir()
        assert [path.suffix for path in made] == [".lock"]
        assert directory.with_suffix(".lock").exists()
    assert list(tmp_path.iterdir()) == []
