"""Terminal output: progress, tables, and the summary of a configuration."""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import click

from quantdrift.cli.config_summary import ConfigEffects, ModelPlan
from quantdrift.cli.options import WITHOUT_MODELS
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import MEASURES
from quantdrift.core.text import columns
from quantdrift.facts.status import STATUSES

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar

    from quantdrift.release.progress import Progress


_WAIT_S: Final = 2.0
_COLOURS: Final = {
    Verdict.FIRING: "red",
    Verdict.WARNING: "yellow",
    Verdict.UNKNOWN: "bright_black",
    Verdict.OK: "cyan",
}
_COLOUR_OF: Final = {status.words: _COLOURS[status.verdict] for status in STATUSES}
_VERDICT: Final = re.compile(
    rf"(?m)(?:(?<=  )|(?<=\d )|^)({'|'.join(status.words for status in STATUSES)})(?=  |, | \(| on |$)"
)


def show(text: str) -> None:
    """Print a text with verdicts in colour: on a terminal, unless NO_COLOR is set."""
    if not os.environ.get("NO_COLOR"):
        text = _VERDICT.sub(lambda match: click.style(match[1], fg=_COLOUR_OF[match[1]]), text)
    click.echo(text)


@contextmanager
def waiting(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Say on a terminal what is waited for, once that takes longer than two seconds."""
    shows = sys.stderr.isatty() and not quiet
    timer = threading.Timer(_WAIT_S, lambda: click.echo(f"\r\x1b[K{text} ...", nl=False, err=True))
    timer.daemon = True
    if shows:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if shows:
            click.echo("\r\x1b[K", nl=False, err=True)


class Steps:
    """Progress on stderr: one line that is overwritten, or several lines if stderr is not a terminal.

    Parameters
    ----------
    quiet
        Show nothing, because the output is JSON.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()

    def __enter__(self) -> Callable[[str], None]:
        return self.step

    def __exit__(self, *_: object) -> None:
        if self._live and not self._quiet:
            click.echo("\r\x1b[K", nl=False, err=True)

    def step(self, text: str) -> None:
        """Show what begins."""
        if not self._quiet:
            click.echo(f"\r\x1b[K{text} ..." if self._live else text, nl=not self._live, err=True)


class ProgressLine:
    """Progress of a call on stderr: steps as of `Steps`, and a bar for what is counted.

    Parameters
    ----------
    quiet
        Show notes alone, because the output is JSON.
    name
        Stands before each note.
    """

    def __init__(self, *, quiet: bool, name: str = "") -> None:
        self._steps, self._quiet, self._name = Steps(quiet=quiet), quiet, name
        self._bar: ProgressBar[int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_bar()
        self._steps.__exit__(*error)

    def __call__(self, progress: "Progress") -> None:
        """Show what is done now."""
        if progress.is_note:
            self._end_bar()
            click.echo(f"{self._name}{progress.text}", err=True)
        elif not progress.total:
            self._end_bar()
            self._steps.step(progress.text)
        elif not self._quiet:
            if self._bar is None:
                self._bar = click.progressbar(length=progress.total, label=progress.text, file=sys.stderr)
                self._bar.__enter__()
            self._bar.update(progress.done - self._bar.pos)
            if progress.done >= progress.total:
                self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None


def _budgets(model: ModelPlan) -> list[str]:
    """Return what a model is judged by, with its budgets."""
    measure = MEASURES[model.task]
    budgets = {
        Metric.FLIP.value: f"changed answers <= {model.flip_budget:.2%}",
        Metric.DIVERGENCE.value: f"mean {measure.name} <= {model.divergence_budget:g} {measure.unit}".rstrip(),
    }
    judged = [text for name, text in budgets.items() if not model.watch or name in model.watch]
    return [*judged, *(f"{name} <= {accepted:.2%}" for name, accepted in model.signal_budgets.items())]


def explained(explanation: ConfigEffects, path: Path) -> str:
    """Return the summary of a configuration as text."""
    nothing = "" if explanation.models else f" It has no [[models]]: {WITHOUT_MODELS}."
    lines = [f"{path} is sound.{nothing}", ""]
    if explanation.missing:
        lines[1:] = ["", "Missing here:", *(f"  - {note}" for note in explanation.missing), ""]
    for model in explanation.models:
        lines.append(f"model {model.name}: {model.task}, {', '.join(_budgets(model))}")
        for word, explained_paths in (("against", model.references), ("copied at", model.copies)):
            for pattern, explained_path in explained_paths.items():
                lines.append(f"  versions {pattern:<12} {word} {explained_path}")
                if explained_path in explanation.checked:
                    lines.append(f"           {'':<12} {explanation.checked[explained_path]}")
        lines.append(f"  slices: {', '.join([*model.slices, *model.open_slices])}")
    rows = []
    for stratum in explanation.strata:
        low, high = stratum.replayed_low, stratum.replayed_high
        replayed = f"{low:.2%}" if low == high else f"{low:.2%} to {high:.2%}"
        rows.append((stratum.name, f"{stratum.rate:.2%}", replayed))
    lines += ["", columns(("header stratum", "taken", "replayed"), rows)]
    if explanation.expected_replays_per_s is not None:
        lines.append(
            f"expected replays: {explanation.expected_replays_per_s:.1f}/s where no header stratum matches"
        )
    lines += [
        f"hard cap: {explanation.max_replays_per_s:g} replays/s per sidecar",
        f"false pages: at most {explanation.pages_per_30_days:g} expected in 30 days, whole fleet",
        "",
        columns(
            ("sidecar memory, at most", "MiB", "option"),
            [
                *((part.part, f"{part.n_bytes / 2**20:.0f}", part.option) for part in explanation.memory),
                ("the container's limit", f"{explanation.memory_bytes / 2**20:.0f}", ""),
            ],
        ),
        "",
        "connections:",
        *(f"  {connection.to}: {connection.protection}" for connection in explanation.connections),
    ]
    if notes := [note for note in explanation.notes if note not in explanation.missing]:
        lines += ["", "Notes:", *(f"  - {note}" for note in notes)]
    return "\n".join(lines)
