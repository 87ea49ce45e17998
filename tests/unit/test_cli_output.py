"""What commands print on a terminal: verdicts in colour, and what is waited for."""

import io
import sys
import threading

import click
import pytest
from click.testing import CliRunner

from quantdrift.cli.output import show, waiting

pytestmark = pytest.mark.unit

TEXT = "slice  verdict\nall    OK\nrare   drifted\n\n  slices: 3 OK, 1 not known (all: loss)\nOK is a word here\n"


@click.command()
def _shown() -> None:
    show(TEXT)


def test_verdicts_are_in_colour_where_they_stand_for_a_slice() -> None:
    """In a column and in a count; not in a sentence, not in a pipe, and not for whoever wants none."""
    shown = CliRunner().invoke(_shown, color=True).output
    assert "all    \x1b[36mOK\x1b[0m\n" in shown
    assert "rare   \x1b[31mdrifted\x1b[0m\n" in shown
    assert "3 \x1b[36mOK\x1b[0m, 1 \x1b[90mnot known\x1b[0m (all: loss)" in shown
    assert "\nOK is a word here" in shown
    assert CliRunner().invoke(_shown).output == f"{TEXT}\n"
    assert CliRunner(env={"NO_COLOR": "1"}).invoke(_shown, color=True).output == f"{TEXT}\n"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, and knows when it has text."""

    def __init__(self) -> None:
        super().__init__()
        self.has_text = threading.Event()

    def isatty(self) -> bool:
        """Return that it is."""
        return True

    def write(self, text: str) -> int:
        """Keep the text."""
        self.has_text.set()
        return super().write(text)


def test_what_takes_long_is_said_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal alone, and not where the output is JSON."""
    monkeypatch.setattr("quantdrift.cli.output._WAIT_S", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with waiting("comparing"):
        assert terminal.has_text.wait(30)
    assert click.unstyle(terminal.getvalue()).replace("\r", "") == "comparing ..."
    assert terminal.getvalue().endswith("\r\x1b[K")
    monkeypatch.setattr(sys, "stderr", quiet := Terminal())
    with waiting("comparing", quiet=True):
        pass
    assert quiet.getvalue() == ""
