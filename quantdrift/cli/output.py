"""Terminal output: progress, tables, and the summary of a configuration."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click

from quantdrift.cli.config_summary import Explanation
from quantdrift.cli.options import WITHOUT_MODELS
from quantdrift.core.tasks import MEASURES


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
        return self._step

    def __exit__(self, *_: object) -> None:
        if self._live and not self._quiet:
            click.echo("\r\x1b[K", nl=False, err=True)

    def _step(self, text: str) -> None:
        if not self._quiet:
            click.echo(f"\r\x1b[K{text} ..." if self._live else text, nl=not self._live, err=True)


def columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as text, with left-aligned columns as wide as their longest cell."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def explained(explanation: Explanation, path: Path) -> str:
    """Return the summary of a configuration as text."""
    nothing = "" if explanation.models else f" It has no [[models]]: {WITHOUT_MODELS}."
    lines = [f"{path} is sound.{nothing}", ""]
    if explanation.missing:
        lines[1:] = ["", "Missing here:", *(f"  - {note}" for note in explanation.missing), ""]
    for model in explanation.models:
        measure = MEASURES[model.task]
        lines.append(
            f"model {model.name}: {model.task}, flips <= {model.flip_budget:.2%}, mean {measure.name} <= "
            f"{model.divergence_budget:g} {measure.unit}".rstrip()
        )
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
        f"sidecar memory limit: {explanation.memory_bytes / 2**20:.0f} MiB",
        "connections:",
        *(f"  {connection.to}: {connection.protection}" for connection in explanation.connections),
    ]
    if notes := [note for note in explanation.notes if note not in explanation.missing]:
        lines += ["", "Notes:", *(f"  - {note}" for note in notes)]
    return "\n".join(lines)
