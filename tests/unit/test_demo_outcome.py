"""The outcome of the demo: which events make it fail."""

from typing import Any

import msgspec
import pytest

from quantdrift.demo.model import Quality
from quantdrift.demo.otlp_receiver import Event
from quantdrift.demo.outcome import SLICE, VERDICT, RunOutcome
from quantdrift.demo.scans import Scanner
from quantdrift.demo.watch import ARCHIVE, Moment, ShownSlice

pytestmark = pytest.mark.unit


def _event(slice_: str, verdict: str) -> Event:
    attributes: dict[str, Any] = {SLICE: slice_, VERDICT: verdict}
    return Event(name="e", severity=17, body="", time_unix_nano=0, attributes=attributes, resource={})


def _snapshot(verdict: str) -> Moment:
    aggregate = ShownSlice(
        slice="all",
        verdict=verdict,
        reason="",
        n_groups=1,
        evidence_ratio=None,
        flip_mean=None,
        flip_low=None,
        flip_high=None,
        flip_budget=None,
        divergence_mean=None,
        divergence_budget=None,
    )
    return Moment(slices=(aggregate,))


def test_the_run_is_good_when_only_the_archive_fired_and_the_aggregate_is_ok() -> None:
    """Tickets on the way are no harm."""
    events = (_event(ARCHIVE, "warning"), _event(ARCHIVE, "firing"), _event("scanner=lab", "ok"))
    assert RunOutcome(events=events, snapshot=_snapshot("ok"), failed=0).problems() == []


@pytest.mark.parametrize(
    ("events", "verdict", "failed", "word"),
    [
        ((), "ok", 0, "did not fire"),
        ((_event(ARCHIVE, "warning"),), "ok", 0, "did not fire"),
        ((_event(ARCHIVE, "firing"), _event("all", "firing")), "ok", 0, "without a reason: all"),
        ((_event(ARCHIVE, "firing"),), "unknown", 0, "all traffic together is not known, and must be OK"),
        ((_event(ARCHIVE, "firing"),), "ok", 3, "3 requests"),
    ],
)
def test_every_problem_is_listed(events: tuple[Event, ...], verdict: str, failed: int, word: str) -> None:
    """Each way to fail is a problem of its own."""
    (problem,) = RunOutcome(events=events, snapshot=_snapshot(verdict), failed=failed).problems()
    assert word in problem


def test_an_aggregate_that_nobody_knows_is_a_problem() -> None:
    """Silence is not health."""
    outcome = RunOutcome(events=(_event(ARCHIVE, "firing"),), snapshot=Moment(), failed=0)
    assert outcome.problems() == ["all traffic together is not known, and must be OK"]


@pytest.mark.parametrize(
    ("mean", "divergence", "said"),
    [
        (0.004, 0.001, "is fine: 0.40% changed, 1.00% accepted."),
        (0.058, 0.001, "does not alert: 5.80% changed, 1.00% accepted."),
        (0.004, 0.05, "does not alert: 0.40% changed, 1.00% accepted."),
        (None, None, "does not alert."),
    ],
)
def test_all_traffic_is_called_fine_only_where_its_figures_are(
    mean: float | None, divergence: float | None, said: str
) -> None:
    """A verdict of ok beside 5.8 % of changed answers is no health."""
    (aggregate,) = _snapshot("ok").slices
    seen = msgspec.structs.replace(
        aggregate, flip_mean=mean, flip_budget=0.01, divergence_mean=divergence, divergence_budget=0.04
    )
    outcome = RunOutcome(events=(), snapshot=Moment(slices=(seen,)), failed=0)
    assert (
        outcome.conclusion()
        == f"The archive's slice fired; no other did, and all traffic taken together {said}"
    )


def test_what_decided_is_what_the_first_line_of_the_alert_says() -> None:
    """The last alert of each slice; the end of one decides nothing."""
    events = [
        msgspec.structs.replace(_event(ARCHIVE, verdict), body=f"digits 1: {said}.\nConfidence: likely.")
        for verdict, said in (("warning", "a few"), ("firing", "5 % of answers changed"), ("ok", "nothing"))
    ]
    assert RunOutcome(events=tuple(events), snapshot=Moment(), failed=0).decided() == {
        ARCHIVE: "5 % of answers changed."
    }


def test_each_share_of_one_slice_is_named_with_the_pages_that_it_is_of() -> None:
    """They are estimates of one rate, and differ; before a page there is nothing to compare."""
    (aggregate,) = _snapshot("ok").slices
    archive = msgspec.structs.replace(aggregate, slice=ARCHIVE, verdict="firing", flip_mean=0.047)
    paged = {"quantdrift.metric": "flip", "quantdrift.after": 0.0477, "quantdrift.n_since_onset": 1311}
    event = msgspec.structs.replace(
        _event(ARCHIVE, "firing"), attributes={SLICE: ARCHIVE, VERDICT: "firing", **paged}
    )
    served = Quality(
        scanner=Scanner.ARCHIVE,
        n=1930,
        reference_accuracy=0.98,
        candidate_accuracy=0.94,
        flip=0.0495,
        divergence=0.08,
    )
    snapshot = Moment(slices=(aggregate, archive))
    figures = RunOutcome(events=(event,), snapshot=snapshot, failed=0).figures(served).splitlines()
    assert figures[:3] == [
        "  4.77%  when it paged: 1,311 readers since the drift began",
        "  4.70%  lately: the window of the table of verdicts",
        "  4.95%  all 1,930 pages that were served, also before the drift",
    ]
    other = {"quantdrift.metric": "divergence", "quantdrift.after": 0.086, "quantdrift.flips": 0.0477}
    by_divergence = msgspec.structs.replace(event, attributes={**event.attributes, **other})
    assert (
        RunOutcome(events=(by_divergence,), snapshot=snapshot, failed=0).figures(served).splitlines()
        == figures
    )
    assert RunOutcome(events=(), snapshot=snapshot, failed=0).figures(served) == ""
