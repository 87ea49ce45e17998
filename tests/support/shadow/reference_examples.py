"""What the README of `examples/references` shows, run as it is typed."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
EXAMPLE: Final = ROOT / "examples" / "references"
_OUT: Final = "out/references"
_SERVES: Final = ("docker ", "python -m examples.oip_server ")


def commands() -> list[str]:
    """Return the commands that end by themselves, in their order."""
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    found = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [command for command in found if not command.startswith(_SERVES)]


def typed(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with `directory` in place of `out/references`, and return what became of it."""
    programs = Path(sys.executable).parent
    return subprocess.run(
        ["sh", "-c", command.replace(_OUT, str(directory))],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "QUANTDRIFT__SHADOW__PROVIDER": "cpu",
            "QUANTDRIFT__SHADOW__THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def works(command: str, directory: Path) -> str:
    """Run a command, check that it does what the page says, and return what it printed."""
    done = typed(command, directory)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    if "reference check" in command:
        assert "reproduced" in done.stdout, done.stdout
    if "reference record" in command:
        assert 'canaries = "canaries.safetensors"' in done.stdout, done.stdout
    if "config check" in command:
        assert re.search(r"(float32|unverified), .*sha256 [0-9a-f]{64}", done.stdout), done.stdout
    return done.stdout


def made(directory: Path) -> Path:
    """Return the directory with the models, their configurations, and the canaries."""
    for command in commands():
        if any(said in command for said in ("references.make", "/onnx.toml")):
            works(command, directory)
    return directory
