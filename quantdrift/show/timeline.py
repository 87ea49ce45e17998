"""The plot of a back-test: each slice's mean over time, its recorded alerts and those under test."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec
from markupsafe import escape

from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import number
from quantdrift.show import charts, rendering

SUFFIX: Final = ".svg"
_HOUR: Final = timedelta(hours=1)
_WIDTH: Final = 960
_HEIGHT: Final = 110
_TITLE: Final = 22
_LEGEND: Final = (
    ("mean-text", "hourly mean, in budgets"),
    ("budget-text", "budget"),
    ("recorded-text", "above: recorded alerts"),
    ("tested-text", "below: alerts under test"),
)
_STYLE: Final = """
  .recorded { fill: var(--unknown); } .tested { fill: var(--firing); } .recorded, .tested { opacity: .2; } .paged { opacity: .4; }
  .chart .mean-text { fill: var(--mean); } .chart .recorded-text { fill: var(--unknown); } .chart .tested-text { fill: var(--firing); }
"""


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
    """Write a picture of the lanes, as SVG.

    Parameters
    ----------
    lanes
        From top to bottom; at least one.
    begin, end
        Ends of the time axis.

    Raises
    ------
    OperatorError
        The file cannot be written.
    """
    parts, top = [], 2 * _TITLE
    for index, (kind, text) in enumerate(_LEGEND):
        parts.append(f'<text class="{kind}" x="{charts.LEFT + 200 * index}" y="16">{text}</text>')
    for lane in lanes:
        parts.append(
            f'<text x="{charts.LEFT}" y="{top}">{escape(lane.title)}</text><svg class="lane" x="{charts.LEFT}" y="{top + 6}"'
            f' width="{_WIDTH - charts.LEFT - charts.RIGHT}" height="{_HEIGHT + 44}">{_lane(lane, begin, end)}</svg>'
        )
        top += _HEIGHT + 44 + _TITLE
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {top}" style="background: var(--panel)">'
        f"<style>{rendering.style()}{_STYLE}.lane {{ overflow: visible; }}</style>{''.join(parts)}</svg>\n"
    )
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror}") from error


def _lane(lane: Lane, begin: datetime, end: datetime) -> str:
    levels = charts.round_levels(max([2.0, *(1.1 * value for value in lane.ratio)]))
    along = charts.places(begin, end)

    def y(value: float) -> float:
        return round(_HEIGHT * (1 - value / levels[-1]), 1)

    parts = charts.grid_lines(levels, y, number)
    for kind, spans, high in (("recorded", lane.recorded, 0), ("tested", lane.tested, _HEIGHT * 0.55)):
        for span in spans:
            for name, since in ((kind, span.opened), (f"{kind} paged", span.paged)):
                if since is not None:
                    x, until = along(since), along(span.ended or end)
                    parts.append(
                        f'<rect class="{name}" x="{100 * x:.2f}%" width="{100 * max(until - x, 0.002):.2f}%" y="{high}" height="{_HEIGHT * 0.45}"/>'
                    )
    parts.append(f'<line class="budget" x1="0" x2="100%" y1="{y(1.0)}" y2="{y(1.0)}"/>')
    # Each step is as wide as its hour, cut at the axis: so less than an hour of history has a visible line too.
    steps = [
        f"{1000 * along(edge):.1f},{y(ratio)}"
        for at, ratio in zip(lane.at, lane.ratio, strict=True)
        for edge in (at, at + _HOUR)
    ]
    path = f'<polyline class="mean" points="{" ".join(steps)}" vector-effect="non-scaling-stroke"/>'
    return "".join(parts) + charts.frame([path], _HEIGHT) + charts.time_axis(begin, end, _HEIGHT)
