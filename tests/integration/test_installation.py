"""An installation from the wheel, in an environment where no checkout is."""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.support.sidecar.relay_process import free_port, running_backend

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("sidecar", "shadow", "storage", "migrations")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of this checkout, built in a copy of it."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("quantdrift", *LINKED):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(out), str(copy)], check=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` of an environment with the wheel, and with what it needs from the environment of the tests."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", str(wheel)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A line of a .pth file adds a folder and not the .pth files in it: the checkout that is installed there stays out.
    needed = dict.fromkeys(
        [sysconfig.get_path("purelib"), *(path for path in sys.path if "site-packages" in path)]
    )
    (packages / "needed.pth").write_text("\n".join(needed) + "\n", encoding="utf-8")
    return python.parent


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a working directory with modules of the user's own, each of which leaves a mark where it is imported."""
    for name in ("sidecar", "shadow", "storage", "hpack", "migrations/__init__"):
        module = tmp_path / f"{name}.py"
        module.parent.mkdir(exist_ok=True)
        mark = tmp_path / f"{name.partition('/')[0]}.imported"
        module.write_text(f"OWN = True\nopen({str(mark)!r}, 'w').close()\n", encoding="utf-8")
    return tmp_path


def imported(directory: Path) -> list[str]:
    """Return which of the user's modules have been imported."""
    return sorted(mark.stem for mark in directory.glob("*.imported"))


def test_a_wheel_has_one_name_at_its_top_level(wheel: Path) -> None:
    """A module `storage` or `migrations` of a server that has the tap is the server's own."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"quantdrift"}
    there = {
        path.relative_to(ROOT).as_posix()
        for linked in ("quantdrift", *LINKED)
        for path in (ROOT / linked).rglob("*.py")
        if not (linked == "quantdrift" and path.relative_to(ROOT / linked).parts[0] in LINKED)
    }
    assert {name for name in names if name.endswith(".py")} == {
        name if name.startswith("quantdrift/") else f"quantdrift/{name}" for name in there
    }
    for data in ("py.typed", "sidecar/intake/openapi.json", "migrations/script.py.mako"):
        assert f"quantdrift/{data}" in names


def test_the_tap_works_next_to_modules_of_the_same_names(installed: Path, directory: Path) -> None:
    """What a server calls `sidecar`, `storage` or `migrations` stays what it was."""
    program = (
        "import sidecar, storage, migrations, sys; from quantdrift import Tap; "
        "assert sidecar.OWN and storage.OWN and migrations.OWN; "
        "assert Tap.__module__ == 'quantdrift.sidecar.tap.tap', Tap.__module__; print(sys.modules['quantdrift'].__file__)"
    )
    done = subprocess.run(
        [installed / "python", "-c", program], cwd=directory, capture_output=True, text=True, check=True
    )
    assert str(installed.parent) in done.stdout


def test_importing_quantdrift_loads_nothing_else(installed: Path, directory: Path) -> None:
    """A server that imports it for the tap does not pay for the rest."""
    program = "import quantdrift, sys; print(*sorted(name for name in sys.modules if name.startswith('quantdrift')))"
    done = subprocess.run(
        [installed / "python", "-c", program], cwd=directory, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["quantdrift"]


def test_commands_import_nothing_from_the_working_directory(
    installed: Path, directory: Path, postgres_dsn: str
) -> None:
    """They are run from wherever somebody stands."""
    version = subprocess.run(
        [installed / "quantdrift", "--version"], cwd=directory, capture_output=True, text=True, check=True
    )
    assert version.stdout.startswith("quantdrift, version ")
    (directory / "config.toml").write_text("", encoding="utf-8")
    subprocess.run(
        [installed / "quantdrift", "db", "upgrade"],
        cwd=directory,
        env={**os.environ, "QUANTDRIFT_DSN": postgres_dsn},
        check=True,
    )
    assert imported(directory) == []


@pytest.fixture
def backend_port() -> Iterator[int]:
    """Return the port of an inference server."""
    with running_backend() as backend:
        yield backend.server_address[1]


def test_child_processes_import_nothing_from_the_working_directory(
    installed: Path, directory: Path, backend_port: int
) -> None:
    """A file that somebody left there would be run beside the model that is served, with the sidecar's rights."""
    admin = f"127.0.0.1:{free_port()}"
    settings = {
        "SIDECAR__LISTEN": f"127.0.0.1:{free_port()}",
        "SIDECAR__BACKEND": f"127.0.0.1:{backend_port}",
        "SIDECAR__ADMIN": admin,
        "STREAM__URL": f"nats://127.0.0.1:{free_port()}",
    }
    (directory / "config.toml").write_text("", encoding="utf-8")
    with subprocess.Popen(
        [installed / "quantdrift", "sidecar", "-c", "config.toml"],
        cwd=directory,
        env={**os.environ, **{f"QUANTDRIFT__{name}": value for name, value in settings.items()}},
    ) as process:
        try:
            until(lambda: is_ready(admin), process)
        finally:
            process.terminate()
    assert process.returncode == 0
    assert imported(directory) == []


def is_ready(admin: str) -> bool:
    """Return whether every process of the sidecar has started."""
    try:
        with urllib.request.urlopen(f"http://{admin}/readyz", timeout=5) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait for a condition, for as long as the process runs and at most a minute."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
