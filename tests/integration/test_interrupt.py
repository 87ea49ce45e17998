"""Ctrl-C while a command starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

# A test run in the background may have the signal ignored, and children inherit that.
_HEED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
_RUN = _HEED + "import runpy; runpy.run_module('quantdrift', run_name='__main__', alter_sys=True)"
COMMANDS = [["up"], ["sidecar"], ["config", "check"], ["report", "--week"], ["pause"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("package", ["click", "msgspec", "quantdrift.core.config.schema"])
def test_ctrl_c_while_a_command_loads_ends_it_without_a_traceback(
    tmp_path: Path, command: list[str], package: str
) -> None:
    """The exit code is 130, as of a program that SIGINT ended, whichever package is being loaded."""
    (tmp_path / "config.toml").touch()
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-c", _RUN, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        # With `importtime` Python writes a line as soon as it has loaded a module.
        for line in process.stderr:
            if line.rstrip().endswith(f" {package}"):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert "Traceback" not in rest
    assert "Aborted" not in rest


def test_ctrl_c_in_a_command_that_waits_ends_it_without_a_traceback(tmp_path: Path) -> None:
    """A command that reads from a terminal that says nothing: it is interrupted in its own work."""
    program = (
        f"{_HEED}"
        "import click, sys\n"
        "from quantdrift.cli.interrupt import leave_on_interrupt\n"
        "leave_on_interrupt()\n"
        "from quantdrift.cli.main import main\n"
        "@main.command()\n"
        "def wait():\n"
        "    click.echo('waiting')\n"
        "    sys.stdin.read()\n"
        "main(['wait'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
        assert process.wait(60) == 130
