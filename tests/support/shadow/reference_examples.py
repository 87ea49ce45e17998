"""What the README of `examples/references` shows, run as it is typed."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.support.commands import invoked
from tests.support.shared import made_once

ROOT: Final = Path(__file__).resolve().parents[3]
EXAMPLE: Final = ROOT / "examples" / "references"
_OUT: Final = "out/references"
_ON_CPU: Final = {"QUANTDRIFT__SHADOW__PROVIDER": "cpu", "QUANTDRIFT__SHADOW__THREADS": "1"}
_SERVES: Final = ("docker ", "python -m quantdrift.demo.oip_server ")

Run = Callable[[str, Path], subprocess.CompletedProcess[str]]


def commands() -> list[str]:
    """Return the commands that end by themselves, in their order."""
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    found = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [command for command in found if not command.startswith(_SERVES)]


def typed(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with `directory` in place of `out/references`, in a shell, and return what became of it."""
    programs = Path(sys.executable).parent
    return subprocess.run(
        ["sh", "-c", command.replace(_OUT, str(directory))],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **_ON_CPU},
        capture_output=True,
        text=True,
        check=False,
    )


def called(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a `quantdrift` command as `typed` does, in this process, which has PyTorch loaded already."""
    words = shlex.split(command.replace(_OUT, str(directory)))
    at = words.index("quantdrift")
    variables = dict(word.split("=", 1) for word in words[:at])
    with pytest.MonkeyPatch.context() as patch:
        if path := variables.pop("PYTHONPATH", ""):
            patch.syspath_prepend(path)
        return invoked(*words[at + 1 :], directory=ROOT, **variables, **_ON_CPU)


def works(command: str, directory: Path, run: Run = called) -> str:
    """Run a command, check that it does what the page says, and return what it printed."""
    done = run(command, directory)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    if "reference check" in command:
        assert "reproduced" in done.stdout, done.stdout
    if "reference record" in command:
        assert 'canaries = "canaries.safetensors"' in done.stdout, done.stdout
    if "config check" in command:
        assert re.search(r"(float32|unverified), .*sha256 [0-9a-f]{64}", done.stdout), done.stdout
    return done.stdout


def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new directory with the models, their configurations, and the canaries.

    Those commands are typed into a shell as the page shows them, once for all processes; the directory is a copy.
    """
    kept = made_once(tmp_path_factory, "references", _make)
    return Path(shutil.copytree(kept, tmp_path_factory.mktemp("references"), dirs_exist_ok=True))


def _make(directory: Path) -> Path:
    for command in commands():
        if any(said in command for said in ("references.make", "/onnx.toml")):
            works(command, directory, typed)
    return directory
