"""The plot of a back-test: each slice's mean over time, its recorded alerts and those under test."""

import io
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import matplotlib as mpl
import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure

from quantdrift.core.errors import OperatorError

FORMATS = (".png", ".svg")
_HOUR = timedelta(hours=1)
_RECORDED, _TESTED, _MEAN, _BUDGET = "#8a8f98", "#c2410c", "#1d4ed8", "#3f3f46"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "timeline",
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.edgecolor": "#d4d4d8",
    "xtick.color": _BUDGET,
    "ytick.color": _BUDGET,
    "timezone": "UTC",
}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """The times of an alert: opened as a ticket or page, paged, ended; None where that did not happen."""

    opened: datetime
    paged: datetime | None
    ended: datetime | None


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """The row of one slice.

    Parameters
    ----------
    title
        Model, version and slice.
    at, ratio
        Begins of the hours with data, and the slice's mean in each, divided by its budget.
    recorded, tested
        Alerts in the database, and alerts of the policy under test.
    """

    title: str
    at: Sequence[datetime]
    ratio: Sequence[float]
    recorded: Sequence[Span]
    tested: Sequence[Span]


def draw(path: Path, lanes: Sequence[Lane], begin: datetime, end: datetime) -> None:
    """Write a picture of the lanes, as PNG or SVG by the name of the file.

    Parameters
    ----------
    lanes
        From top to bottom; at least one.
    begin, end
        Ends of the time axis.

    Raises
    ------
    OperatorError
        The suffix of `path` is no known format, or the file cannot be written.
    """
    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise OperatorError(f"{path}: name a file that ends in {' or '.join(FORMATS)}")
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(9.0, 0.8 + 1.35 * len(lanes)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(lanes), 1, sharex=True, squeeze=False)[:, 0]
        for axis, lane in zip(axes, lanes, strict=True):
            _draw_lane(axis, lane, begin, end)
        locator = AutoDateLocator(minticks=3, maxticks=8)  # type: ignore[no-untyped-call]
        axes[-1].xaxis.set_major_locator(locator)
        axes[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
        axes[-1].set_xlim(_days(begin), _days(end))
        figure.legend(
            handles=_legend(axes[0]), loc="outside upper left", ncols=4, frameon=False, handlelength=1.6
        )
        out = io.BytesIO()
        figure.savefig(out, format=kind[1:], dpi=130, metadata={"Date": None} if kind == ".svg" else None)
    try:
        path.write_bytes(out.getvalue())
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror}") from error


def _draw_lane(axis: Axes, lane: Lane, begin: datetime, end: datetime) -> None:
    # Each step is as wide as its hour, cut at the axis: so less than an hour of history has a visible line too.
    edges = [_days(edge) for at in lane.at for edge in (max(at, begin), min(at + _HOUR, end))]
    axis.plot(edges, np.repeat(lane.ratio, 2), color=_MEAN, linewidth=1.3, zorder=3)
    axis.axhline(1.0, color=_BUDGET, linewidth=0.9, dashes=(5, 3), zorder=2)
    axis.set_ylim(0, max([2.0, *(1.1 * value for value in lane.ratio)]))
    for spans, colour, low, high in (
        (lane.recorded, _RECORDED, 0.55, 1.0),
        (lane.tested, _TESTED, 0.0, 0.45),
    ):
        for span in spans:
            ends = _days(span.ended or end)
            axis.axvspan(_days(span.opened), ends, low, high, color=colour, alpha=0.16, linewidth=0)
            if span.paged is not None:
                axis.axvspan(_days(span.paged), ends, low, high, color=colour, alpha=0.24, linewidth=0)
                axis.axvline(_days(span.paged), low, high, color=colour, linewidth=1.6, zorder=4)
    axis.set_title(lane.title, loc="left", pad=3)
    axis.set_ylabel("budgets")


def _legend(axis: Axes) -> list[mpl.artist.Artist]:
    return [
        axis.plot([], [], color=_MEAN, label="hourly mean")[0],
        axis.plot([], [], color=_BUDGET, dashes=(5, 3), label="budget")[0],
        axis.axvspan(0, 0, color=_RECORDED, alpha=0.4, label="recorded alert"),
        axis.axvspan(0, 0, color=_TESTED, alpha=0.4, label="alert under test"),
    ]


def _days(at: datetime) -> float:
    return float(date2num(at))  # type: ignore[no-untyped-call]
