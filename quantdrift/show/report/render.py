"""Rendering of the page: figures and drawings become one HTML file that loads nothing and runs no script."""

from typing import Final

from markupsafe import Markup

from quantdrift.core.records import Metric
from quantdrift.report.figures import ReportFigures
from quantdrift.report.finding import QUANTILES, SHORTFALL
from quantdrift.show import rendering
from quantdrift.show.trends import Plot

_TAIL: Final = (
    "Slice",
    *(f"p{100 * p:g}" for p in QUANTILES),
    f"Mean above p{100 * SHORTFALL:g}",
    "Infinite",
    "Effective exchanges",
)
Drawings = dict[int, dict[int, dict[Metric, Plot]]]
"""The plots of changed answers and of the mean divergence, by version and slice, in the order in which they are shown."""


def render(
    title: str,
    figures: ReportFigures,
    drawings: Drawings,
    *,
    most_table: int,
    most_tail: int,
    most_losses: int = 20,
) -> str:
    """Return the page.

    Every value is escaped by the template engine; only the drawings and the style sheet are taken as they are.

    Parameters
    ----------
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
            tail_head=[(text, "") for text in _TAIL],
            style=Markup(rendering.style()),  # noqa: S704 - package data
            most_table=most_table,
            most_tail=most_tail,
            most_losses=most_losses,
        )
    )
