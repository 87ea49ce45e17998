"""Rendering of the page: figures and drawings become one HTML file that loads nothing and runs no script."""

from datetime import timedelta
from importlib.resources import files

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from quantdrift.core.notation import count_of, number, percent
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import MEASURES
from quantdrift.facts import status
from quantdrift.facts.cost import money
from quantdrift.facts.explanation import FEWEST_BEFORE
from quantdrift.report import wording
from quantdrift.report.figures import ReportFigures
from quantdrift.report.finding import QUANTILES, SHORTFALL

# The meaning of each reason for a loss, a quarantine or a skip.
REASONS = {
    "held_bytes": "the relay's memory bound was reached",
    "truncated": "the connection was closed in the middle of the exchange",
    "framing": "the byte stream of its connection could not be parsed any more",
    "observer_error": "the observer of its connection stopped after an error",
    "capture_down": "the capture process was down",
    "capture_behind": "the capture process did not keep up",
    "error_status": "the candidate answered with an error; no loss for verdicts",
    "client_abort": "the client left before the answer was complete; no loss for verdicts",
    "unknown_model": "the model is not in the configuration",
    "decode": "the message does not follow its protocol",
    "shared_memory": "the tensors were in shared memory, not on the wire",
    "sequence": "part of a stateful sequence",
    "too_large": "larger than the stream's payload limit",
    "rate_cap": "the sidecar's limit on exchanges per second was reached",
    "byte_cap": "the sidecar's limit on bytes per second was reached",
    "queue_full": "the stream did not keep up",
    "stream_full": "the stream was full",
    "publish": "the stream could not be reached",
    "expired": "expired in the stream before it was replayed: the shadow was too slow or not running",
    "capture_error": "an error of quantdrift itself",
    "process_ended": "a process of the sidecar was killed, or crashed, while it had them",
    "metadata": "its tensors are not described: describe them in the configuration",
    "unobserved": "the relay could not follow its connection; how many there were is an estimate",
    "too_costly": "decoding it takes more processor time than one exchange may use",
    "no_key": "it must be encrypted, and the sidecar could not read the key",
    "unpaired": "its request or response did not arrive, or could not be matched to it",
    "no_reference": "the version has no reference",
    "schema": "its tensors do not fit the reference",
    "output": "the output cannot be compared with the reference's",
    "replay": "the reference failed on this input",
    "too_late": "its capture time is older than the oldest partition",
    "too_early": "captured in the future: the sidecar's clock is wrong",
    "encrypted": "no key of the shadow opens it",
    "poison": "delivered too many times without being finished",
}


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """The trend of one slice.

    Parameters
    ----------
    width_s
        Seconds of one point: more than in other drawings where there is little data.
    svg
        An `svg` element made by `trend.draw`: it contains no text from outside.
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
    drawings
        Trends, in the order in which they are shown.
    most_table, most_tail, most_losses
        Largest number of rows of a version's table of slices, of its table of tails, and of the losses by model; the
        page says how many are left out.
    """
    package = files("quantdrift.show.report")
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
        money=money,
        reason=lambda name: REASONS.get(name, ""),
        tidy=lambda text: text.replace(" %", "\u00a0%").replace(" nat", "\u00a0nat"),
    )
    environment.globals.update(
        ended=wording.ended,
        amount=wording.amount,
        interval=wording.interval,
        measured=wording.measured,
        signed=wording.signed,
        compared_sentence=wording.compared_sentence,
        labels_sentence=wording.labels_sentence,
        points=wording.points,
        Metric=Metric,
        measures=MEASURES,
        verdicts=Verdict,
        said=status.said,
        alert_kind=status.alert_kind,
        statuses=status.STATUSES,
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
