"""What it costs to have a sidecar: its installed size, its memory idle and under load, and how long it takes to start.

    python -m benchmarks.footprint [--quick]

Needs nginx and wrk, as `benchmarks.relay`. Makes a fresh virtual environment, installs the base of this checkout into
it and runs `quantdrift sidecar` from there, with its defaults: one relay worker, and a real NATS server to publish to.
Size is what the installation adds to the environment, compiled modules included. Start-up is from the start of the
first process to the first `200` of `/readyz`, the median of five. Memory is what is resident (RSS), for each process:
idle, five seconds after it is ready; under load the most of ten looks a second, while wrk sends 3 kB and then 600 kB
bodies on 128 connections, everything sampled, within the caps that it is shipped with. Processes share pages: together
they take less than the sum (PSS).

`--quick`: this environment in place of a fresh one, one start, two seconds of each load.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import psutil

from benchmarks import load, ways
from benchmarks.payload import Size, Wire, path, request, write_script
from benchmarks.relay import make_stream
from benchmarks.result import Goal, finish
from quantdrift.core.process.nats_server import NatsServer

_ROOT = Path(__file__).resolve().parent.parent
_NOT_COPIED = (".*", "__pycache__", "*.egg-info", "build", "out", "tests", "docs")
_LIST = "from importlib.metadata import distributions; print(*{each.name for each in distributions()})"
_NOT_OURS = {"pip", "setuptools", "wheel"}
_UNWANTED = ("torch", "onnxruntime", "scipy", "sqlalchemy")
_SETTLED_S = 5.0
_READY_S = 60.0
_LOOK_S = 0.1
_CONNECTIONS = 128
_MODULES = {"quantdrift.sidecar.relay.worker": "relay", "quantdrift.sidecar.capture.process": "capture"}


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How long it takes.

    Parameters
    ----------
    is_fresh
        Whether to install.
    starts
        How many are timed.
    seconds
        Of each load.
    """

    is_fresh: bool = True
    starts: int = 5
    seconds: float = 10.0


QUICK = Scale(is_fresh=False, starts=1, seconds=2.0)


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """What an installation added.

    Parameters
    ----------
    mb
        On disk, in MB.
    packages
        Names, ours included.
    seconds
        How long it took; wheels may have come from pip's cache.
    """

    mb: float
    packages: tuple[str, ...]
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.footprint", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, and no installation")
    scale = QUICK if parser.parse_args(arguments).quick else Scale()
    figures: dict[str, float | int | str | None] = {}
    goals: list[Goal] = []
    python = Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="qd-") as temporary, ExitStack() as stack:
        directory = Path(temporary)
        directory.chmod(0o755)  # nginx's worker may be somebody else
        if scale.is_fresh:
            python, installed = install(directory / "venv")
            figures["installed_mb"] = round(installed.mb, 1)
            figures["packages"] = len(installed.packages)
            figures["install_s"] = round(installed.seconds, 1)
            unwanted = [name for name in installed.packages if name.lower() in _UNWANTED]
            goals.append(
                Goal(name="unwanted_packages", value=float(len(unwanted)), bound=0.0, unit="packages")
            )
        port = stack.enter_context(ways.backend(directory / "backend"))["http"].port
        server = stack.enter_context(NatsServer(directory / "nats"))
        asyncio.run(make_stream(server.url))
        figures["start_s"] = round(
            statistics.median(_start_s(python, directory, port, server.url) for _ in range(scale.starts)), 2
        )
        figures |= _memory(python, directory, port, server.url, scale)
    for name, value in figures.items():
        print(f"{name:28} {value}")
    finish("footprint", figures, goals)
    return 0


def install(directory: Path) -> tuple[Path, Installed]:
    """Install the base of this checkout into a fresh environment; return its Python, and what was added."""
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    python = directory / "bin" / "python"
    source = directory.with_name("source")  # a build leaves its traces where it runs
    shutil.copytree(_ROOT, source, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    before_bytes, began = _size_bytes(directory), time.monotonic()
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, "-c", str(_ROOT / "constraints.txt"), str(source)], check=True)
    seconds = time.monotonic() - began
    listed = subprocess.run([str(python), "-c", _LIST], check=True, capture_output=True, text=True)
    names = tuple(name for name in listed.stdout.split() if name not in _NOT_OURS)
    mb = (_size_bytes(directory) - before_bytes) / 1e6
    return python, Installed(mb=mb, packages=names, seconds=seconds)


def _size_bytes(directory: Path) -> int:
    return sum(
        (Path(place) / name).lstat().st_size for place, _, names in os.walk(directory) for name in names
    )


class _Sidecar:
    """A running sidecar: where it listens, its first process, and how long it took to be ready."""

    def __init__(self, port: int, root: psutil.Process, start_s: float) -> None:
        self.port = port
        self.root = root
        self.start_s = start_s

    @property
    def processes(self) -> dict[str, psutil.Process]:
        """Its processes by role."""
        found = {"supervisor": self.root}
        for child in self.root.children():
            found |= {role: child for module, role in _MODULES.items() if module in child.cmdline()}
        return found


@contextmanager
def _sidecar(python: Path, directory: Path, backend: int, nats_url: str) -> Iterator[_Sidecar]:
    port, admin = ways.free_port(), ways.free_port()
    models = "".join(f'\n[[models]]\nname = "{wire}"\n' for wire in Wire)
    config = directory / "config.toml"
    config.write_text(
        f'[sidecar]\nlisten = "127.0.0.1:{port}"\nbackend = "127.0.0.1:{backend}"\nadmin = "127.0.0.1:{admin}"\n'
        f'drain_delay_s = 0.0\n[stream]\nurl = "{nats_url}"\n[sampling]\nrate = 1.0\n{models}',
        encoding="utf-8",
    )
    began = time.monotonic()
    # In a directory of its own, or the checkout's modules would be found first.
    command = [str(python), "-m", "quantdrift", "sidecar", "-c", str(config)]
    with subprocess.Popen(command, cwd=directory) as process:
        try:
            while not _is_ready(admin):
                if process.poll() is not None or time.monotonic() - began > _READY_S:
                    raise TimeoutError("the sidecar does not become ready")
                time.sleep(0.01)
            yield _Sidecar(port, psutil.Process(process.pid), time.monotonic() - began)
        finally:
            process.terminate()


def _is_ready(admin: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _start_s(python: Path, directory: Path, backend: int, nats_url: str) -> float:
    with _sidecar(python, directory, backend, nats_url) as sidecar:
        return sidecar.start_s


def _memory(
    python: Path, directory: Path, backend: int, nats_url: str, scale: Scale
) -> dict[str, float | int | str | None]:
    """Return resident memory in MiB by process, idle and under load."""
    with _sidecar(python, directory, backend, nats_url) as sidecar:
        time.sleep(_SETTLED_S)
        processes = sidecar.processes
        figures: dict[str, float | int | str | None] = {
            f"{role}_idle_mib": _mib(process.memory_info().rss) for role, process in processes.items()
        }
        figures["together_idle_mib"] = _mib(_pss_bytes(processes))
        most = dict.fromkeys([*processes, "together"], 0)
        done = threading.Event()

        def look() -> None:
            while not done.wait(_LOOK_S):
                for role, process in processes.items():
                    most[role] = max(most[role], process.memory_info().rss)
                most["together"] = max(most["together"], _pss_bytes(processes))

        looking = threading.Thread(target=look)
        looking.start()
        try:
            for size in Size:
                script = write_script(request(size, Wire.BINARY), directory, size)
                url = f"http://127.0.0.1:{sidecar.port}{path(Wire.BINARY)}"
                seen = load.wrk(script, url, connections=_CONNECTIONS, seconds=scale.seconds)
                figures[f"{size}_per_s"] = round(seen.per_s)
                figures[f"{size}_failed"] = seen.failed
        finally:
            done.set()
            looking.join()
        return figures | {f"{role}_load_mib": _mib(n_bytes) for role, n_bytes in most.items()}


def _pss_bytes(processes: dict[str, psutil.Process]) -> int:
    return sum(process.memory_full_info().pss for process in processes.values())


def _mib(n_bytes: int) -> float:
    return round(n_bytes / 2**20, 1)


if __name__ == "__main__":
    sys.exit(main())
