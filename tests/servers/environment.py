"""A real server's own Python environment: made once from pinned requirements under `out/servers`, and kept."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
KEPT = HERE.parents[1] / "out" / "servers"
_INSTALL_S, _SCRIPT_S = 1800, 120


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that is there.

    Parameters
    ----------
    name
        The server's: its files are in the directory of that name beside this module.
    directory
        Where the environment is.
    """

    name: str
    directory: Path

    @property
    def programs(self) -> Path:
        """Where its programs are."""
        return self.directory / "bin"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.programs / "python"

    @property
    def packages(self) -> Path:
        """Where its packages are."""
        return next(self.directory.glob("lib/python*/site-packages"))

    def script(self, name: str) -> Path:
        """Return where a file of this server is, e.g. what it serves."""
        return HERE / self.name / name

    def run(self, script: Path, *arguments: str) -> Any:
        """Run a script to its end, and return the JSON document that it printed."""
        command = [str(self.python), str(script), *arguments]
        done = subprocess.run(
            command, capture_output=True, timeout=_SCRIPT_S, check=False, env=environ(self), text=True
        )
        assert done.returncode == 0, f"{script.name} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        return json.loads(done.stdout)


def environment(name: str, *, closed: bool = True) -> Environment:
    """Return a server's environment, made where it is missing; whoever comes meanwhile waits.

    Parameters
    ----------
    name
        The server's.
    closed
        Its requirements name every package that it needs, so that pip need look for no others. That saves what the
        server's wheel asks for and its tests never load. What `whole.txt` names comes with all that it asks for.

    Raises
    ------
    RuntimeError
        It cannot be installed: a server that is not there is no passed test.
    """
    requirements, whole = (HERE / name / file for file in ("requirements.txt", "whole.txt"))
    named = requirements.read_bytes() + (whole.read_bytes() if whole.exists() else b"")
    key = hashlib.sha256(named + sys.version.encode()).hexdigest()[:12]
    made = Environment(name=name, directory=KEPT / f"{name}-{key}")
    done = made.directory / ".installed"
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(made.directory, ignore_errors=True)
            venv.create(made.directory, symlinks=True)
            _install(made, requirements, closed=closed)
            if whole.exists():
                _install(made, whole, closed=False)
            done.touch()
    return made


def environ(made: Environment) -> dict[str, str]:
    """Return the variables for what runs in an environment: this process's, without what points to its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    return kept | {"PATH": f"{made.programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def _install(made: Environment, requirements: Path, *, closed: bool) -> None:
    # It brings no pip of its own, and compiles on the first start what is really imported: both save seconds.
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(made.python),
        "install",
        "--quiet",
        "--no-compile",
    ]
    command += ["--no-deps"] if closed else []
    pip = subprocess.run(
        [*command, "--requirement", str(requirements)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_INSTALL_S,
        check=False,
        text=True,
    )
    if pip.returncode:
        raise RuntimeError(
            f"{made.name} cannot be installed, and without it its tests are no proof "
            f"(offline, leave them out with -m 'not servers'):\n{pip.stdout[-2000:]}"
        )
