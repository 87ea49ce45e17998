"""The outcome of the demo: which events make it fail."""

from typing import Any

import msgspec
import pytest

from examples.digits.outcome import SLICE, VERDICT, Outcome
from examples.digits.watch import ARCHIVE, SliceState, Snapshot
from examples.otlp_receiver import Event

pytestmark = pytest.mark.unit


def _event(slice_: str, verdict: str) -> Event:
    attributes: dict[str, Any] = {SLICE: slice_, VERDICT: verdict}
    return Event(name="e", severity=17, body="", time_unix_nano=0, attributes=attributes, resource={})


def _snapshot(verdict: str) -> Snapshot:
    aggregate = SliceState(
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
    return Snapshot(slices=(aggregate,))


def test_the_run_is_good_when_only_the_archive_fired_and_the_aggregate_is_ok() -> None:
    """Tickets on the way are no harm."""
    events = (_event(ARCHIVE, "warning"), _event(ARCHIVE, "firing"), _event("scanner=lab", "ok"))
    assert Outcome(events=events, snapshot=_snapshot("ok"), failed=0).problems() == []


@pytest.mark.parametrize(
    ("events", "verdict", "failed", "word"),
    [
        ((), "ok", 0, "did not fire"),
        ((_event(ARCHIVE, "warning"),), "ok", 0, "did not fire"),
        ((_event(ARCHIVE, "firing"), _event("all", "firing")), "ok", 0, "without a reason: all"),
        ((_event(ARCHIVE, "firing"),), "unknown", 0, "aggregate is unknown"),
        ((_event(ARCHIVE, "firing"),), "ok", 3, "3 requests"),
    ],
)
def test_every_problem_is_listed(events: tuple[Event, ...], verdict: str, failed: int, word: str) -> None:
    """Each way to fail is a problem of its own."""
    (problem,) = Outcome(events=events, snapshot=_snapshot(verdict), failed=failed).problems()
    assert word in problem


def test_an_aggregate_that_nobody_knows_is_a_problem() -> None:
    """Silence is not health."""
    outcome = Outcome(events=(_event(ARCHIVE, "firing"),), snapshot=Snapshot(), failed=0)
    assert outcome.problems() == ["the aggregate is not known, not ok"]


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
    outcome = Outcome(events=(), snapshot=Snapshot(slices=(seen,)), failed=0)
    assert (
        outcome.conclusion()
        == f"The archive's slice fired; no other did, and all traffic taken together {said}"
    )


def test_what_decided_is_what_the_event_says_after_its_verdicts() -> None:
    """The last alert of each slice; the end of one decides nothing."""
    events = [
        msgspec.structs.replace(
            _event(ARCHIVE, verdict), body=f"digits 1, {ARCHIVE}: ok -> {verdict}: {said}"
        )
        for verdict, said in (("warning", "a few"), ("firing", "5 % of decisions changed"), ("ok", "nothing"))
    ]
    assert Outcome(events=tuple(events), snapshot=Snapshot(), failed=0).decided() == {
        ARCHIVE: "5 % of decisions changed"
    }
