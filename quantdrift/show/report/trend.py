"""A plot of one slice and the aggregate over time: matplotlib draws SVG that takes its colours from the page."""

import io
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from math import nan
from statistics import median
from typing import Any

import matplotlib as mpl
import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, MaxNLocator
from numpy.typing import NDArray

from quantdrift.core.records import Metric
from quantdrift.report.figures import EpisodeFigures, Mark
from quantdrift.storage.report.facts import SliceSums, Sums

# Each colour is a placeholder for a variable of the page's style sheet: one drawing fits light, dark and print.
_INK, _MUTED, _LINE = "#010101", "#020202", "#030303"
_SLICE, _AGGREGATE, _BUDGET, _ALERT = "#040404", "#050505", "#060606", "#070707"
_MARK = "#080808"
_VARIABLES = {
    _INK: "--ink",
    _MUTED: "--muted",
    _LINE: "--line",
    _SLICE: "--slice",
    _AGGREGATE: "--aggregate",
    _BUDGET: "--budget",
    _ALERT: "--firing",
    _MARK: "--ink",
}
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 8.5,
    "text.color": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _LINE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.size": 0,
    "xtick.major.pad": 6.5,  # clear of the 0 of the other axis
    "ytick.major.size": 0,
    "axes.titlesize": 8.5,
    "axes.titlecolor": _MUTED,
    "timezone": "UTC",
}
_TRUSTED = 20  # effective exchanges that a point needs to count for the height of the axis
_ENOUGH = 60  # effective exchanges wanted in each point
_FACTORS = (1, 2, 3, 4, 6, 10, 15)
_LEAST_BUCKETS = 7
Floats = NDArray[np.float64]

_XML = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", re.DOTALL)
_SIZE = re.compile(r' (?:width|height)="[0-9.]+pt"')
_FONT = re.compile(r" font-family: [^;]*;")
_EMPTY = re.compile(r'\s*<g id="[^"]*"/>')
_NAMED = re.compile(r'<g id="[^"]*">')
_SPACE = re.compile(r"\s*\n\s*")


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The buckets of a plot: `n` of `width`, the first at `begin`."""

    begin: datetime
    width: timedelta
    n: int

    def coarser(self, factor: int) -> "Grid":
        """Return the same time range with `factor` buckets joined into one."""
        return Grid(begin=self.begin, width=factor * self.width, n=-(-self.n // factor))

    @property
    def middles(self) -> Floats:
        """(n,): middles of the buckets, in matplotlib's days."""
        width = self.width / timedelta(days=1)
        return np.asarray(_days(self.begin) + width * (np.arange(self.n) + 0.5), dtype=np.float64)


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over time.

    Parameters
    ----------
    grid
        The trend's own buckets: wider than the plot's where there is little data.
    mean, low, high
        (grid.n,): nan where nothing was compared or there is too little data.
    top
        The largest mean with enough data to count for the height of the axis; 0 where there is none.
    """

    grid: Grid
    mean: Floats
    low: Floats
    high: Floats
    top: float


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one slice: its trend, the aggregate's (None in the aggregate's own), budget and axis top."""

    metric: Metric
    title: str
    slice: Trend
    aggregate: Trend | None
    budget: float | None
    top: float


def trend(
    metric: Metric, points: Sequence[SliceSums], grid: Grid, bins: Sequence[float], cap: float
) -> Trend:
    """Return a slice's means with their intervals.

    Parameters
    ----------
    metric
        Flip or divergence.
    points
        The slice's buckets, those without data left out.
    grid
        All buckets; they are joined until each has enough exchanges of the slice, or few buckets are left.
    bins
        The slice's divergence histogram over the whole period, from which the variance of each point is taken.
    cap
        Cap of single divergences.
    """
    grid = grid.coarser(_factor(points, grid))
    merged: dict[int, Sums] = {}
    for point in points:
        index = int((point.at - grid.begin) / grid.width)
        if 0 <= index < grid.n:
            merged[index] = merged.get(index, Sums()) + point.sums
    mean, low, high = (np.full(grid.n, nan) for _ in range(3))
    top = 0.0
    # The last bucket may have only begun: its mean would add a jump to the end of a calm line.
    least = _TRUSTED if merged and median(sums.n_effective for sums in merged.values()) >= _TRUSTED else 0
    for index, sums in merged.items():
        n = sums.n_effective_of(metric)
        if n < least:
            continue
        estimate = sums.estimate(metric, cap, bins)
        if estimate is None:
            continue
        mean[index] = estimate.mean
        low[index] = nan if estimate.low is None else estimate.low
        high[index] = nan if estimate.high is None else estimate.high
        if n >= _TRUSTED:
            top = max(top, estimate.mean)
    return Trend(grid=grid, mean=mean, low=low, high=high, top=top)


def _factor(points: Sequence[SliceSums], grid: Grid) -> int:
    usual = median([point.sums.n_effective for point in points]) if points else 0.0
    allowed = [factor for factor in _FACTORS if grid.n >= _LEAST_BUCKETS * factor] or [1]
    return next((factor for factor in allowed if usual * factor >= _ENOUGH), allowed[-1])


def draw(
    panels: Sequence[Panel],
    grid: Grid,
    episodes: Sequence[EpisodeFigures],
    *,
    salt: str,
    marks: Sequence[Mark] = (),
) -> str:
    """Return the panels below each other, on one time axis, as an `svg` element without any text from outside.

    Parameters
    ----------
    panels
        From top to bottom.
    episodes
        Alerts of the slice: onset dotted, alert solid, the time between onset and end shaded.
    salt
        Differs for each drawing of a page, so that identifiers in the SVG do not collide.
    marks
        Releases (a triangle on the time axis) and decisions (a diamond): shapes, so that they differ in grey too.
    """
    style: Any = {**_STYLE, "svg.hashsalt": salt}
    with mpl.rc_context(style):
        figure = Figure(figsize=(5.6, 1.6 * len(panels) + 0.3))
        FigureCanvasSVG(figure)
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel)
            _mark(axis, grid, episodes)
            _mark_changes(axis, grid, marks)
        locator = AutoDateLocator(minticks=3, maxticks=7)  # type: ignore[no-untyped-call]
        axes[-1].xaxis.set_major_locator(locator)
        axes[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
        axes[-1].set_xlim(*_ends(grid))
        figure.subplots_adjust(left=0.085, right=0.962, top=0.94, bottom=0.23 / len(panels), hspace=0.32)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _themed(out.getvalue())


def _draw_panel(axis: Axes, panel: Panel) -> None:
    scale = 100.0 if panel.metric is Metric.FLIP else 1.0
    x = panel.slice.grid.middles
    if panel.aggregate is not None:
        axis.plot(
            panel.aggregate.grid.middles,
            scale * panel.aggregate.mean,
            color=_AGGREGATE,
            linewidth=1.3,
            zorder=2,
        )
    axis.fill_between(
        x, scale * panel.slice.low, scale * panel.slice.high, color=_SLICE, alpha=0.14, linewidth=0, zorder=1
    )
    few_points = np.isfinite(panel.slice.mean).sum() <= 2  # a line through one point is invisible
    axis.plot(
        x,
        scale * panel.slice.mean,
        color=_SLICE,
        linewidth=1.7,
        marker="o" if few_points else None,
        markersize=4,
        zorder=3,
        solid_joinstyle="round",
    )
    if panel.budget is not None:
        axis.axhline(scale * panel.budget, color=_BUDGET, linewidth=1.1, dashes=(5, 3), zorder=2)
    axis.set_ylim(0, scale * panel.top)
    axis.set_title(panel.title, loc="left", pad=4)
    axis.yaxis.set_major_locator(MaxNLocator(4))
    axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.grid(visible=True, axis="y")
    axis.set_axisbelow(True)


def _mark(axis: Axes, grid: Grid, episodes: Sequence[EpisodeFigures]) -> None:
    begin, end = _ends(grid)
    for episode in episodes:
        onset, opened = _days(episode.onset_at), _days(episode.opened_at)
        until = end if episode.resolved_at is None else _days(episode.resolved_at)
        axis.axvspan(max(onset, begin), min(until, end), color=_ALERT, alpha=0.07, linewidth=0, zorder=0)
        for at, style in ((onset, (0, (1, 2))), (opened, "solid")):
            if begin <= at <= end:
                axis.axvline(at, color=_ALERT, linewidth=1.2, linestyle=style, zorder=4)


def _mark_changes(axis: Axes, grid: Grid, marks: Sequence[Mark]) -> None:
    begin, end = _ends(grid)
    for mark in marks:
        at = _days(mark.at)
        if begin <= at <= end:
            axis.plot(
                [at],
                [0.0],
                marker="^" if mark.kind == "release" else "D",
                markersize=6 if mark.kind == "release" else 4.5,
                color=_MARK,
                linestyle="none",
                clip_on=False,
                zorder=5,
            )


def axis_top(trends: Sequence[Trend], budget: float | None) -> float:
    """Return the top of the axis of a plot, so that its trends and the budget fit in; never 0.

    Each plot has its own: on a scale of the worst slice the sound ones would be flat lines.
    """
    top = max((1.2 * trend.top for trend in trends), default=0.0)
    return max(top, 1.25 * (budget or 0.0)) or 1.0


def _days(at: datetime) -> float:
    """Return a time as matplotlib's number: days since its epoch, which is that of Unix."""
    return at.timestamp() / 86400


def _ends(grid: Grid) -> tuple[float, float]:
    return _days(grid.begin), _days(grid.begin + grid.n * grid.width)


def _themed(svg: str) -> str:
    """Return the drawing without fonts, size and colours of its own: the page sets them."""
    for pattern, text in (
        (_XML, ""),
        (_SIZE, ""),
        (_FONT, ""),
        (_EMPTY, ""),
        (_NAMED, "<g>"),
        (_SPACE, "\n"),
    ):
        svg = pattern.sub(text, svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg ", '<svg aria-hidden="true" ', 1).strip()
