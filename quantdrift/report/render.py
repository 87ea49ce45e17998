"""The page: figures and drawings into one HTML file that loads nothing and runs nothing."""

from datetime import timedelta
from importlib.resources import files

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from quantdrift.core.notation import count_of, number, percent
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import MEASURES
from quantdrift.drift.explain.mix import FEWEST_BEFORE
from quantdrift.report import wording
from quantdrift.report.figures import ReportFigures
from quantdrift.report.finding import QUANTILES, SHORTFALL

# What each reason for a loss, a quarantine or a skip means.
REASONS = {
    "held_bytes": "the relay's memory bound was reached",
    "truncated": "a peer closed in the middle",
    "framing": "its connection could no longer be followed",
    "observer_error": "the observer let go of it",
    "capture_down": "the capture process was down",
    "capture_behind": "the capture process did not keep up",
    "error_status": "the candidate answered with an error",
    "unknown_model": "the model is not in the configuration",
    "decode": "not what the protocol says",
    "shared_memory": "tensors did not travel on the wire",
    "sequence": "part of a stateful sequence",
    "too_large": "above the stream's payload limit",
    "rate_cap": "the local cap on exchanges per second",
    "byte_cap": "the local cap on bytes per second",
    "queue_full": "the stream did not keep up",
    "stream_full": "the stream was full",
    "publish": "the stream could not be reached",
    "expired": "expired in the stream before it was replayed: the shadow was too slow or away",
    "capture_error": "an error of quantdrift itself",
    "metadata": "only the configuration can tell what its tensors are",
    "unpaired": "its other half did not come, or could not be told from another's",
    "no_reference": "the version has no reference",
    "schema": "tensors do not fit the reference",
    "output": "the output cannot be compared with the reference's",
    "replay": "the reference failed on this input",
    "too_late": "no partition takes its capture time any more",
    "too_early": "captured in the future: the sidecar's clock is wrong",
    "poison": "delivered too often without being finished",
}


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """The trend of one slice.

    Parameters
    ----------
    version_id, slice_id
        Of which.
    width_s
        Seconds of one point: more than that of the others where there is little data.
    svg
        An `svg` element of our own making: it holds no text from outside.
    """

    version_id: int
    slice_id: int
    width_s: float
    svg: str


def render(
    title: str,
    figures: ReportFigures,
    drawings: list[Drawing],
    *,
    most_table: int,
    most_tail: int,
    most_losses: int = 20,
) -> str:
    """Return the page.

    Every value is escaped by the template engine; only the drawings and the style sheet are taken as they are.

    Parameters
    ----------
    title
        Heading.
    figures
        Everything it says.
    drawings
        Trends, in the order they are shown.
    most_table, most_tail, most_losses
        Rows of a version's table of slices, of its table of tails, and of the losses by model; the rest is counted.
    """
    package = files("quantdrift.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        percent=percent,
        number=number,
        count=wording.count,
        count_of=count_of,
        moment=wording.moment,
        duration=wording.duration,
        detail=wording.detail,
        reason=lambda name: REASONS.get(name, ""),
        tidy=lambda text: text.replace(" %", "\u00a0%").replace(" nat", "\u00a0nat"),
    )
    environment.globals.update(
        amount=wording.amount,
        interval=wording.interval,
        measured=wording.measured,
        Metric=Metric,
        measures=MEASURES,
        verdicts=Verdict,
        quantiles=QUANTILES,
        shortfall=SHORTFALL,
        fewest_before=FEWEST_BEFORE,
        seconds=lambda s: timedelta(seconds=s),
    )
    template = environment.from_string(package.joinpath("page.html").read_text(encoding="utf-8"))
    drawn: dict[int, list[tuple[Drawing, Markup]]] = {}
    for drawing in drawings:
        drawn.setdefault(drawing.version_id, []).append(
            (drawing, Markup(drawing.svg))  # noqa: S704 - made by `trend.draw` from numbers alone
        )
    style = Markup(package.joinpath("page.css").read_text(encoding="utf-8"))  # noqa: S704 - package data
    return template.render(
        title=title,
        figures=figures,
        drawn=drawn,
        style=style,
        most_table=most_table,
        most_tail=most_tail,
        most_losses=most_losses,
    )
