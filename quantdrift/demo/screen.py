"""What the demo shows: live on a terminal, plain lines elsewhere."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Self

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quantdrift.core.notation import number
from quantdrift.demo.model import Quality
from quantdrift.demo.otlp_receiver import Event
from quantdrift.demo.watch import ALL, Moment, ShownSlice
from quantdrift.facts.status import ALERTS, RANK, said

_COLOURS = dict(zip(RANK, ("bold red", "yellow", "dim", "green"), strict=True))
_BAR_CELLS = 18
_BAR_DECADES = 7  # the bar is logarithmic: evidence grows by factors
_LINE_EVERY_S = 5.0
_LOG_WIDTH = 140
_STALE = "  (something does not answer: this is the last known state)"
_FIRST = (
    *("model", "version", "slice", "predicate", "from_verdict", "verdict", "reason"),
    *("metric", "measure", "unit", "budget", "onset", "after", "n_since_onset", "before", "n_history"),
    *("evidence", "threshold", "aggregate_verdict", "aggregate_mean", "aggregate_accepted", "do_now"),
    *("explanation", "mean", "low", "high", "n_recent", "n_groups"),
)
_ERROR = 17  # the severity number of a page


class ScreenView(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of the run.

    Parameters
    ----------
    phase
        What is going on, in words.
    elapsed_s
        Since the traffic began.
    snapshot
        What quantdrift says.
    failed
        Requests that got no proper answer.
    """

    phase: str
    elapsed_s: float
    snapshot: Moment
    failed: int


class Screen:
    """Shows the run; used as a context manager around everything that is live.

    Parameters
    ----------
    console
        Decides by itself whether it is a terminal; where it is none, lines may be longer.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        if not console.is_terminal:
            console.width = max(console.width, _LOG_WIDTH)
        self._live: Live | None = None
        self._last_line_s = -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()

    @contextmanager
    def step(self, what: str) -> Iterator[Callable[[str, float], None]]:
        """Show a step while it lasts; yields a function that tells its detail and the share that is done."""
        started = time.monotonic()
        if not self.console.is_terminal:
            yield lambda _detail, _share: None
        else:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(24),
                TextColumn("[dim]{task.fields[detail]}"),
                TimeElapsedColumn(),
            )
            with Progress(*columns, console=self.console, transient=True) as progress:
                task = progress.add_task(what, total=None, detail="")

                def tell(detail: str, share: float) -> None:
                    progress.update(task, total=1.0, completed=share, detail=detail)

                yield tell
        self.console.print(
            f"[green]✓[/] {what} [dim]({time.monotonic() - started:.1f} s)[/]", highlight=False
        )

    def say(self, text: str) -> None:
        """Print a line of text, with markup."""
        self.console.print(text, highlight=False)

    def plain(self, text: str) -> None:
        """Print the output of a command as it is, indented."""
        lines = "\n".join(f"  {line}" for line in text.splitlines())
        self.console.print(lines, highlight=False, markup=False, soft_wrap=True)

    def show(self, view: ScreenView) -> None:
        """Show the state of this moment: the live table, or now and then a line."""
        if self.console.is_terminal:
            if self._live is None:
                self._live = Live(console=self.console, auto_refresh=False)
                self._live.start()
            self._live.update(_table(view), refresh=True)
        elif view.elapsed_s - self._last_line_s >= _LINE_EVERY_S:
            self._last_line_s = view.elapsed_s
            self.console.print(_line(view), highlight=False, markup=False, soft_wrap=True)

    def settle(self) -> None:
        """Leave the live table as it is and go on below it."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def event(self, event: Event) -> None:
        """Show an event as the collector received it: a page with everything in it, any other in a line."""
        if event.severity < _ERROR:
            first = event.body.partition("\n")[0]
            self.console.print(Text(f"OTLP event {event.name}: {first}", style="dim"), soft_wrap=True)
            return
        grid = Table.grid(padding=(0, 2))
        for name, value in sorted(event.attributes.items(), key=lambda pair: _place(pair[0])):
            if value not in ([], ""):
                grid.add_row(Text(name, style="dim"), Text(_plain(value)))
        at = datetime.fromtimestamp(event.time_unix_nano / 1e9, UTC)
        self.console.print(
            Panel(
                Group(Text(event.body, style="bold"), Text(), grid),
                title=f"OTLP event {event.name}, severity {event.severity}, {at:%H:%M:%S} UTC",
                border_style="red",
            )
        )

    def verdicts(self, slices: Sequence[ShownSlice], decided: Mapping[str, str]) -> None:
        """Show the verdicts beside each other with what was seen lately, and below them what decided each alert.

        Parameters
        ----------
        slices
            All of them.
        decided
            Per slice that alerts what decided, in words.
        """
        table = Table(
            title="What quantdrift says now, of the pages that were replayed",
            title_justify="left",
            title_style="bold",
        )
        for name in ("slice", "verdict", "changed lately", "95 % interval", "accepted", "readers"):
            table.add_column(name, justify="left" if name in {"slice", "verdict"} else "right")
        for state in slices:
            table.add_row(
                state.slice,
                Text(said(state.verdict), style=_COLOURS[state.verdict]),
                _percent(state.flip_mean),
                _interval(state),
                _percent(state.flip_budget),
                f"{state.n_groups:,}",
            )
        self.console.print(table)
        for state in slices:
            if state.verdict in ALERTS and state.slice in decided:
                self.console.print(
                    Text(f"{state.slice} {said(state.verdict)}; its alert said: {decided[state.slice]}"),
                    soft_wrap=True,
                )

    def quality(self, title: str, rows: Sequence[Quality]) -> None:
        """Show both models against the true labels."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for name in (
            "scanner",
            "pages",
            "FP32 right",
            "INT8 right",
            "difference",
            "answers changed",
            "KL, nats",
        ):
            table.add_column(name, justify="left" if name == "scanner" else "right")
        for row in rows:
            change = row.candidate_accuracy - row.reference_accuracy
            table.add_row(
                row.scanner.value,
                f"{row.n:,}",
                f"{row.reference_accuracy:.1%}",
                f"{row.candidate_accuracy:.1%}",
                Text(f"{100 * change:+.1f}", style="red" if change < -0.01 else ""),
                _percent(row.flip),
                f"{row.divergence:.4f}",
            )
        self.console.print(table)


def _place(attribute: str) -> tuple[int, str]:
    """Where, what, since when, how sure, and then the rest."""
    name = attribute.removeprefix("quantdrift.")
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def _plain(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return number(value, 4) if isinstance(value, float) else str(value)


def evidence_bar(ratio: float | None) -> str:
    """Return a bar of 18 cells: empty at 1e-7 of what pages, full at 1; logarithmic.

    Parameters
    ----------
    ratio
        Evidence over its threshold, >= 0, or None.
    """
    decades = math.log10(ratio) if ratio else -math.inf
    share = min(1.0, max(0.0, 1.0 + decades / _BAR_DECADES))
    full = round(share * _BAR_CELLS)
    return "█" * full + "·" * (_BAR_CELLS - full)


def _table(view: ScreenView) -> Group:
    snapshot = view.snapshot
    counts = Table.grid(padding=(0, 3))
    counts.add_row(
        f"[bold]{view.elapsed_s:4.0f} s[/]",
        f"offered [bold]{snapshot.offered:,}[/]",
        f"sampled [bold]{snapshot.taken:,}[/]",
        f"replayed [bold]{snapshot.replayed:,}[/]",
        f"lost [bold]{snapshot.lost:,}[/]",
        f"failed requests [bold]{view.failed:,}[/]",
    )
    table = Table()
    for name in (
        "slice",
        "readers",
        "answers changed",
        "95 % interval",
        "KL, nats",
        "evidence to page",
        "verdict",
    ):
        table.add_column(
            name, justify="right" if name in {"readers", "answers changed", "KL, nats"} else "left"
        )
    for state in snapshot.slices:
        colour = _COLOURS[state.verdict]
        table.add_row(
            Text(state.slice, style="bold" if state.slice == "all" else ""),
            f"{state.n_groups:,}",
            _percent(state.flip_mean),
            _interval(state),
            "" if state.divergence_mean is None else f"{state.divergence_mean:.4f}",
            _evidence(state),
            Text(said(state.verdict), style=colour),
            end_section=state.slice == "all",
        )
    phase = Text(view.phase, style="bold")
    if snapshot.stale:
        phase.append(_STALE, style="yellow")
    return Group(phase, counts, table)


def _evidence(state: ShownSlice) -> Text:
    if state.verdict == "firing":  # the detector has begun again since; what paged is what counts
        return Text(evidence_bar(1.0), style="red")
    return Text(evidence_bar(state.evidence_ratio), style="cyan")


def _line(view: ScreenView) -> str:
    """Return the moment in a line: all traffic and the worst slice with their shares of changed answers, the others counted."""
    snapshot = view.snapshot
    parts = [f"{view.elapsed_s:4.0f} s  {snapshot.offered:,} requests, {snapshot.replayed:,} replayed"]
    parts += [f"{n:,} {what}" for n, what in ((snapshot.lost, "lost"), (view.failed, "failed")) if n]
    slices = [state for state in snapshot.slices if state.slice != ALL]
    worst = max(slices, key=lambda state: state.flip_mean or state.divergence_mean or 0.0, default=None)
    named = [state for state in (snapshot.slice(ALL), worst) if state is not None]
    states = [
        f"{state.slice.removeprefix('scanner=')} {said(state.verdict)} {_percent(state.flip_mean) or _nats(state)}".rstrip()
        for state in named
    ]
    others = Counter(state.verdict for state in slices if state is not worst)
    states += [
        f"{others[verdict]} {'other' if others[verdict] == 1 else 'others'} {said(verdict)}"
        for verdict in RANK
        if others[verdict]
    ]
    return f"{', '.join(parts)}{' | ' if states else ''}{', '.join(states)}{_STALE if snapshot.stale else ''}"


def _nats(state: ShownSlice) -> str:
    return "" if state.divergence_mean is None else f"{state.divergence_mean:.4f} nat"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _interval(state: ShownSlice) -> str:
    if state.flip_low is None or state.flip_high is None:
        return ""
    return f"{state.flip_low:.2%} to {state.flip_high:.2%}"
