"""Writing a report: read one snapshot, derive the figures, draw, write the file, and record the run."""

import asyncio
from collections.abc import Callable, Mapping
from enum import StrEnum
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
from markupsafe import Markup

from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Metric
from quantdrift.core.signals import WATCHED, signal_of
from quantdrift.core.whole_file import write_whole
from quantdrift.report import finding
from quantdrift.report.figures import Replays, ReportFigures
from quantdrift.report.finding import QUANTILES, SHORTFALL
from quantdrift.report.gathering import MOST_PLOTS, MOST_TABLE, Gathered, gather
from quantdrift.report.period import Period
from quantdrift.show import charts, rendering
from quantdrift.show.charts import VerticalLine
from quantdrift.show.report.brief import briefs
from quantdrift.show.report.markdown import render_markdown
from quantdrift.show.trends import Grid, Plot, alert_marks, plot
from quantdrift.storage.database import Database
from quantdrift.storage.figures.estimates import STATEMENT_S
from quantdrift.storage.figures.periods import SliceSums
from quantdrift.storage.report_runs import record_run
from quantdrift.storage.snapshot import reading

__all__ = ["Form", "Period", "write"]

DIRECTORY: Final = Path("reports")
"""Where reports go without `--out`: below the working directory."""
TITLE: Final = "Quantisation drift"
"""Heading of the page."""
_CLOCK = SystemClock()
_PLOT_HEIGHT: Final = 190
_TAIL: Final = (
    "Slice",
    *(f"p{100 * p:g}" for p in QUANTILES),
    f"Mean above p{100 * SHORTFALL:g}",
    "Infinite",
    "Effective exchanges",
)
Drawings = dict[int, dict[int, dict[Metric, Plot]]]
"""The plots of changed answers and of the mean divergence, by version and slice, in the order in which they are shown."""


class Form(StrEnum):
    """What a report is written as; the value is the suffix of its file."""

    HTML = "html"
    MARKDOWN = "md"
    JSON = "json"


async def write(
    config: Config,
    secrets: Secrets,
    period: Period,
    *,
    out: Path | None,
    progress: Callable[[str], None],
    model: str = "",
    form: Form = Form.HTML,
    clock: Clock = _CLOCK,
) -> ReportFigures:
    """Write one self-contained file on a period, and record that it was written.

    The same data and options give the same bytes, so a run that is repeated replaces its file by an equal one.

    Parameters
    ----------
    out
        File to write; None: a dated one in `DIRECTORY`.
    progress
        Called with one readable line per step.
    model
        Report on this model alone; empty: on all.
    form
        What is written: the page, Markdown or the figures as JSON.

    Returns
    -------
    ReportFigures
        All figures of the page.

    Raises
    ------
    OperatorError
        The file cannot be written, the database has no tables, or it does not know `model`.
    RetryError
        Postgres is not available.
    """
    now = clock.now()
    path = out or DIRECTORY / f"quantdrift-{period.begin:%Y%m%d}-{period.end:%Y%m%d}.{form.value}"
    async with Database(secrets.dsn, statement_timeout_s=STATEMENT_S) as database:
        async with reading(database) as connection:
            gathered = await gather(connection, config, period, model=model, now=now, progress=progress)
        if model and not gathered.facts.versions:
            raise OperatorError(f"no comparison of a model `{model}` is stored: check its name")
        figures = _figures(config, period, gathered, path)
        progress("drawing trends" if form is Form.HTML else f"writing {path}")
        text = await asyncio.to_thread(_rendered, form, gathered, figures)
        await asyncio.to_thread(_store, path, text)
        run_id = await record_run(
            database,
            kind=period.kind.value,
            begin=period.begin,
            end=period.end,
            path=str(path),
            figures=msgspec.json.decode(msgspec.json.encode(figures)),
        )
        if run_id is None:
            progress("not recording that it was written: the database is a standby")
    return figures


def _rendered(form: Form, gathered: Gathered, figures: ReportFigures) -> str:
    if form is Form.MARKDOWN:
        return render_markdown(TITLE, figures, most_table=MOST_TABLE)
    if form is Form.JSON:
        # Where it was written is no figure of the period.
        return (
            msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(figures, path=""))).decode()
            + "\n"
        )
    return render(
        TITLE,
        figures,
        _draw(gathered, figures),
        tokens=_draw_tokens(gathered, figures),
        most_table=MOST_TABLE,
        most_tail=MOST_PLOTS,
    )


def _figures(config: Config, period: Period, gathered: Gathered, path: Path) -> ReportFigures:
    models = finding.models(config, gathered.facts)
    episodes = finding.episodes(config, gathered.facts)
    n_offered = sum(stratum.offered for stratum in gathered.coverage.strata)
    n_compared = sum(entry.aggregate.n_exchanges for entry in models if entry.aggregate)
    how, last_at = gathered.resolution, gathered.extent.last
    return ReportFigures(
        kind=period.kind,
        begin=period.begin,
        end=period.end,
        path=str(path),
        source=how.window.grain.value if how else "",
        bucket_s=how.width.total_seconds() if how else 0.0,
        first_at=gathered.extent.first,
        last_at=last_at,
        n_offered=n_offered,
        n_compared=n_compared,
        n_slices=sum(entry.n_slices for entry in models),
        n_pages=gathered.changes.pages,
        n_tickets=gathered.changes.tickets,
        models=models,
        episodes=episodes,
        n_episodes_left_out=gathered.n_episodes_left_out,
        coverage=gathered.coverage,
        briefs=briefs(models, episodes, gathered),
        incidents=gathered.incidents,
        marks=gathered.marks,
        comparisons=gathered.comparisons,
        labels=gathered.labels,
        costs=gathered.costs,
        replays=Replays(
            n=n_compared,
            per_million=1e6 * n_compared / n_offered if n_offered >= n_compared > 0 else None,
        ),
    )


def _draw(gathered: Gathered, figures: ReportFigures) -> Drawings:
    """Draw the chosen slices of each version; all drawings of one version have the same time axis."""
    how = gathered.resolution
    if how is None:
        return {}
    begin, n = how.window.begin, ceil((how.window.end - how.window.begin) / how.width)
    grid = Grid(begin=begin, width=how.width, n=n, first=figures.first_at, last=figures.last_at)
    buckets: dict[finding.Key, list[SliceSums]] = {}
    for bucket in gathered.series:
        buckets.setdefault((bucket.version_id, bucket.slice_id), []).append(bucket)
    drawings: Drawings = {}
    for version in figures.models:
        whole = version.aggregate
        entries = {entry.slice_id: entry for entry in (*version.slices, whole) if entry}
        marks = [
            VerticalLine(at=mark.at, kind=mark.kind, text=mark.what)
            for mark in figures.marks
            if mark.model in {"", version.model}
        ]
        for slice_id in (*gathered.drawn.get(version.version_id, ()), *([whole.slice_id] if whole else [])):
            if slice_id not in entries:
                continue
            entry = entries[slice_id]
            alerts = [
                alert
                for alert in figures.episodes
                if (alert.model, alert.version, alert.slice_id) == (version.model, version.version, slice_id)
            ]
            of_alerts = [mark for alert in alerts for mark in alert_marks(alert.onset_at, alert.opened_at)]
            others = whole.slice_id if whole and whole.slice_id != slice_id else 0
            drawings.setdefault(version.version_id, {})[slice_id] = {
                metric: plot(
                    metric,
                    buckets.get((version.version_id, slice_id), []),
                    grid,
                    name=entry.name,
                    others=buckets.get((version.version_id, others), []),
                    budget=entry.flip_budget if signal_of(metric).is_share else entry.divergence_budget,
                    marks=[*marks, *of_alerts],
                    alerts=[(alert.onset_at, alert.resolved_at) for alert in alerts],
                    height=_PLOT_HEIGHT,
                )
                for metric in WATCHED
            }
    return drawings


def _draw_tokens(gathered: Gathered, figures: ReportFigures) -> dict[int, tuple[str, Markup]]:
    """Draw, per version of generated text, the divergence of the tokens in its worst slice beside all traffic; with the name of that slice."""
    of, drawings = gathered.facts.tokens, {}
    for version in figures.models:
        slices = [entry for entry in version.slices if (version.version_id, entry.slice_id) in of]
        whole = version.aggregate
        if whole is None or (version.version_id, whole.slice_id) not in of:
            continue
        worst = slices[0] if slices else whole
        drawings[version.version_id] = (
            worst.name,
            charts.beyond(
                of[version.version_id, worst.slice_id].above,
                of[version.version_id, whole.slice_id].above if slices else [],
                title=f"Share of the tokens of {version.model} that moved at least so far",
            ),
        )
    return drawings


def render(
    title: str,
    figures: ReportFigures,
    drawings: Drawings,
    *,
    tokens: Mapping[int, tuple[str, Markup]] = MappingProxyType({}),
    most_table: int,
    most_tail: int,
    most_losses: int = 20,
) -> str:
    """Return the page.

    Every value is escaped by the template engine; only the drawings and the style sheet are taken as they are.

    Parameters
    ----------
    tokens
        Of generated text, by version: the plot of the divergence of single tokens, and the slice that it is of.
    most_table, most_tail, most_losses
        Largest number of rows of a version's table of slices, of its table of tails, and of the losses by model; the
        page says how many are left out.
    """
    return (
        rendering.environment("report")
        .get_template("report.html")
        .render(
            title=title,
            figures=figures,
            drawn=drawings,
            tokens=tokens,
            tail_head=[(text, "") for text in _TAIL],
            style=Markup(rendering.style()),  # noqa: S704 - package data
            most_table=most_table,
            most_tail=most_tail,
            most_losses=most_losses,
        )
    )


def _store(path: Path, text: str) -> None:
    """Write the file completely or not at all; a new one for its owner alone, because it has names that clients choose."""
    try:
        write_whole(path, text.encode(), mode=0o600)
    except OSError as error:
        raise OperatorError(f"the report cannot be written to {path}: {error.strerror}") from error
