"""Writing a report: read one snapshot, derive the figures, draw, write the file, and record the run."""

import asyncio
import os
from collections.abc import Callable
from enum import StrEnum
from math import ceil
from pathlib import Path
from typing import Final

import msgspec

from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Metric
from quantdrift.core.tasks import MEASURES
from quantdrift.report import finding
from quantdrift.report.figures import Replays, ReportFigures, SliceFigures
from quantdrift.report.gathering import MOST_PLOTS, MOST_TABLE, Gathered, gather
from quantdrift.report.period import Period
from quantdrift.show.report import trend
from quantdrift.show.report.brief import briefs
from quantdrift.show.report.markdown import render_markdown
from quantdrift.show.report.render import Drawing, render
from quantdrift.storage.database import Database
from quantdrift.storage.estimates import STATEMENT_S
from quantdrift.storage.report.facts import SliceSums
from quantdrift.storage.report.reading import reading, record_run

__all__ = ["Form", "Period", "write"]

DIRECTORY: Final = Path("reports")
"""Where reports go without `--out`: below the working directory."""
TITLE: Final = "Quantisation drift"
"""Heading of the page."""
_CLOCK = SystemClock()


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
        async with reading(database) as reader:
            gathered = await gather(reader, config, period, model=model, now=now, progress=progress)
        if model and not gathered.facts.versions:
            raise OperatorError(f"no comparison of a model `{model}` is stored: check its name")
        figures = _figures(config, period, gathered, path)
        progress("drawing trends" if form is Form.HTML else f"writing {path}")
        text = await asyncio.to_thread(_rendered, form, config, gathered, figures)
        await asyncio.to_thread(_store, path, text)
        await record_run(
            database,
            kind=period.kind.value,
            begin=period.begin,
            end=period.end,
            path=str(path),
            figures=msgspec.json.decode(msgspec.json.encode(figures)),
        )
    return figures


def _rendered(form: Form, config: Config, gathered: Gathered, figures: ReportFigures) -> str:
    if form is Form.MARKDOWN:
        return render_markdown(TITLE, figures, most_table=MOST_TABLE)
    if form is Form.JSON:
        # Where it was written is no figure of the period.
        return (
            msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(figures, path=""))).decode()
            + "\n"
        )
    drawings = _draw(config, gathered, figures)
    return render(TITLE, figures, drawings, most_table=MOST_TABLE, most_tail=MOST_PLOTS)


def _figures(config: Config, period: Period, gathered: Gathered, path: Path) -> ReportFigures:
    models = finding.models(config, gathered.facts)
    episodes = finding.episodes(config, gathered.facts)
    n_offered = sum(stratum.offered for stratum in gathered.coverage.strata)
    n_compared = sum(entry.aggregate.n_exchanges for entry in models if entry.aggregate)
    how = gathered.resolution
    return ReportFigures(
        kind=period.kind,
        begin=period.begin,
        end=period.end,
        path=str(path),
        source=how.window.grain.value if how else "",
        bucket_s=how.width.total_seconds() if how else 0.0,
        first_at=gathered.extent.first,
        last_at=gathered.extent.last,
        n_offered=n_offered,
        n_compared=n_compared,
        n_slices=sum(entry.n_slices for entry in models),
        n_pages=gathered.changes.pages,
        n_tickets=gathered.changes.tickets,
        models=models,
        episodes=episodes,
        n_episodes_left_out=gathered.n_episodes_left_out,
        coverage=gathered.coverage,
        briefs=briefs(
            models, episodes, gathered.serving, gathered.marks, gathered.comparisons, labels=gathered.labels
        ),
        marks=gathered.marks,
        comparisons=gathered.comparisons,
        labels=gathered.labels,
        costs=gathered.costs,
        replays=Replays(
            n=n_compared,
            per_million=1e6 * n_compared / n_offered if n_offered >= n_compared > 0 else None,
        ),
    )


def _draw(config: Config, gathered: Gathered, figures: ReportFigures) -> list[Drawing]:
    """Draw the chosen slices of each version; all drawings of one version have the same axes."""
    how = gathered.resolution
    if how is None:
        return []
    span = how.window.end - how.window.begin
    grid = trend.Grid(begin=how.window.begin, width=how.width, n=ceil(span / how.width))
    points: dict[finding.Key, list[SliceSums]] = {}
    for point in gathered.series:
        points.setdefault((point.version_id, point.slice_id), []).append(point)
    drawings = []
    for version in figures.models:
        cap = config.budget(version.model).cap
        measure = MEASURES[version.task]
        titles = {
            Metric.FLIP: "flips, %",
            Metric.DIVERGENCE: f"{measure.name}, {measure.unit}" if measure.unit else measure.name,
        }
        everything = version.aggregate.slice_id if version.aggregate else 0
        chosen = [*gathered.drawn.get(version.version_id, ()), everything]

        def trend_of(
            metric: Metric, slice_id: int, version_id: int = version.version_id, cap: float = cap
        ) -> trend.Trend:
            key = version_id, slice_id
            return trend.trend(metric, points.get(key, []), grid, gathered.facts.bins.get(key, ()), cap)

        entries = {entry.slice_id: entry for entry in (*version.slices, version.aggregate) if entry}
        panels: dict[int, list[trend.Panel]] = {slice_id: [] for slice_id in chosen if slice_id in entries}
        for metric in (Metric.FLIP, Metric.DIVERGENCE):
            trends = {slice_id: trend_of(metric, slice_id) for slice_id in panels}
            budgets = {key: _budget(entries[key], metric) for key in panels}
            for slice_id, panel in panels.items():
                panel.append(
                    trend.Panel(
                        metric=metric,
                        title=titles[metric],
                        slice=trends[slice_id],
                        aggregate=None if slice_id == everything else trends.get(everything),
                        budget=budgets[slice_id],
                        top=trend.axis_top(
                            [trends[slice_id], *filter(None, [trends.get(everything)])], budgets[slice_id]
                        ),
                    )
                )
        for slice_id, panel in panels.items():
            alerts = [
                episode
                for episode in figures.episodes
                if (episode.model, episode.version, episode.slice_id)
                == (version.model, version.version, slice_id)
            ]
            marks = [mark for mark in figures.marks if mark.model in {"", version.model}]
            svg = trend.draw(panel, grid, alerts, marks=marks, salt=f"{version.version_id}-{slice_id}")
            drawings.append(
                Drawing(
                    version_id=version.version_id,
                    slice_id=slice_id,
                    width_s=panel[0].slice.grid.width.total_seconds(),
                    svg=svg,
                )
            )
    return drawings


def _budget(entry: SliceFigures, metric: Metric) -> float | None:
    return entry.flip_budget if metric is Metric.FLIP else entry.divergence_budget


def _store(path: Path, text: str) -> None:
    """Write the file completely or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OperatorError(f"the report cannot be written to {path}: {error.strerror}") from error
