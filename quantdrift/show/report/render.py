"""Rendering of the page: figures and drawings become one HTML file that loads nothing and runs no script."""

from datetime import timedelta
from functools import cache

import jinja2
import msgspec
from markupsafe import Markup

from quantdrift.core.records import Verdict
from quantdrift.core.tasks import MEASURES
from quantdrift.facts import status
from quantdrift.facts.words import amount, first_screen
from quantdrift.report.figures import ReportFigures
from quantdrift.report.finding import QUANTILES, SHORTFALL
from quantdrift.show import rendering
from quantdrift.storage.report.facts import Grain

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
    """The plots of one slice.

    Parameters
    ----------
    width
        Time of one point: more than in other drawings where there is little data.
    flips, divergence
        Made by `charts.line`.
    """

    version_id: int
    slice_id: int
    width: timedelta
    flips: Markup
    divergence: Markup


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
    drawn: dict[int, dict[int, Drawing]] = {}
    for drawing in drawings:
        drawn.setdefault(drawing.version_id, {})[drawing.slice_id] = drawing
    return (
        _environment()
        .get_template("report.html")
        .render(
            title=title,
            figures=figures,
            drawn=drawn,
            style=Markup(rendering.style()),  # noqa: S704 - package data
            most_table=most_table,
            most_tail=most_tail,
            most_losses=most_losses,
        )
    )


@cache
def _environment() -> jinja2.Environment:
    environment = rendering.environment("report")
    environment.filters |= {"detail": amount.detail, "reason": lambda name: REASONS.get(name, "")}
    environment.globals |= {
        "over": first_screen.over,
        "amount": amount.amount,
        "points": amount.points,
        "measures": MEASURES,
        "verdicts": Verdict,
        "alert_kind": status.alert_kind,
        "grain": Grain,
        "tail_head": [
            (text, "")
            for text in (
                "Slice",
                *(f"p{100 * p:g}" for p in QUANTILES),
                f"Mean above p{100 * SHORTFALL:g}",
                "Infinite",
                "Effective exchanges",
            )
        ],
    }
    return environment
