"""The report's advice on each finding."""

import msgspec
import pytest

from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import Task
from quantdrift.drift.explain.diagnosis import Aggregate
from quantdrift.drift.explain.diagnosis_text import changed, since
from quantdrift.facts.estimate import Estimate
from quantdrift.report.advice import advise, diagnosis, trace_link
from quantdrift.storage.monitor.explanation import Explanation
from quantdrift.storage.report.facts import Episode, SliceName, Version
from tests.support.monitor.alert_cases import event_with
from tests.support.monitor.report_figures import NOW

pytestmark = pytest.mark.unit

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
EPISODE = Episode(
    id=1,
    version_id=1,
    slice_id=2,
    severity=Verdict.FIRING,
    metric=Metric.FLIP,
    onset_at=NOW,
    opened_at=NOW,
    resolved_at=None,
)
SLICE = SliceName(id=2, model="digits", name="scanner=faint", predicate="p")
VERSION = Version(id=1, model="digits", candidate_version="int8-7", reference_digest="5f", first_seen_at=NOW)
LOW, HIGH = (Estimate(mean=m, low=m * 0.8, high=m * 1.2) for m in (0.004, 0.05))


def _advise(
    episode: Episode = EPISODE,
    *,
    before: Estimate | None = LOW,
    n_before: int = 1000,
    flips: Estimate | None = None,
    shares: tuple[float, float] = (0.04, 0.04),
) -> str:
    case = diagnosis(
        episode,
        SLICE,
        VERSION,
        task=Task.CLASSIFICATION,
        whole=Aggregate(verdict=Verdict.OK),
        before=before,
        n_before=n_before,
        budget=0.01,
        flips=flips,
    )
    steps = advise(
        case,
        episode,
        n_before=n_before,
        flips=flips,
        flip_budget=0.01,
        share_before=shares[0],
        share_after=shares[1],
    )
    return " ".join([since(case), changed(case), *steps])


def test_a_slice_without_history_is_compared_with_the_version_before() -> None:
    """Bad from its first exchange on: the version is at fault, or was never good there."""
    assert "No answer of this slice was compared before" in _advise(before=None, n_before=0)
    assert "Compare it with the version that served before" in _advise(before=None, n_before=0)


def test_a_slice_above_budget_before_the_onset_is_reported_as_older() -> None:
    """An onset is an estimate: what was bad before it is said."""
    assert "older than the alert" in _advise(before=HIGH)


def test_a_version_that_came_with_the_onset_is_not_called_unchanged() -> None:
    """What *Why* says and what to do say the same; another version that came then is no change of this one."""
    mine, other = (
        msgspec.structs.replace(EPISODE, explanation=Explanation(changes=(change,)))
        for change in (
            "candidate version int8-7 (this one), first seen 2026-11-03 09:00 UTC",
            "candidate version int8-8, first seen 2026-11-03 09:00 UTC",
        )
    )
    assert "What changed: the version (int8-7 is new)" in _advise(mine)
    assert "roll back" in _advise(mine)
    assert "What changed: candidate version int8-8" in _advise(other)
    assert "roll back" not in _advise(other)


def test_grown_traffic_is_reported() -> None:
    """A fault that more people meet is another fault for the business."""
    assert "grew from 0.5 % to 4 %" in _advise(shares=(0.005, 0.04))
    assert "grew" not in _advise()


def test_advice_follows_the_metric_and_the_state() -> None:
    """Flips ask for labels, KL for thresholds, a resolved alert for its cause."""
    assert "labels" in _advise()
    other = msgspec.structs.replace(EPISODE, metric=Metric.DIVERGENCE, resolved_at=NOW)
    assert "thresholds" in _advise(other)
    assert "It has recovered" in _advise(other)
    assert "send scanner=faint to the unquantised model" in _advise()
    assert "alibrate again" in _advise()
    shifted = msgspec.structs.replace(EPISODE, explanation=Explanation(cause="input_shift", begin="changed"))
    assert _advise(shifted).count("alibrat") == 1
    assert "Calibrating again does not change the inputs" in _advise(shifted)


def test_a_slice_that_was_bad_from_its_first_exchange_is_not_said_to_have_changed() -> None:
    """One exchange before the onset is no history, and the monitor's case goes before the report's own count."""
    one = _advise(before=None, n_before=1)
    assert "Only 1 answer of this slice was compared before" in one
    assert "30 are needed to say that anything changed" in one
    assert "did not change" not in one
    told = msgspec.structs.replace(
        EPISODE, explanation=Explanation(begin="first_seen"), evidence=event_with(n_history=8).evidence
    )
    assert "Only 8 answers of this slice were compared before" in _advise(told)
    unread = msgspec.structs.replace(EPISODE, explanation=Explanation(begin="a later release's"))
    assert "Since: about 2026-11-16 12:00 UTC (estimated)" in _advise(unread)


def test_what_is_said_of_decisions_is_what_became_of_them() -> None:
    """Outputs are not told to move before decisions where 44 % of the decisions changed."""
    moved = msgspec.structs.replace(EPISODE, metric=Metric.DIVERGENCE)
    many, few = (Estimate(mean=mean, low=None, high=None) for mean in (0.44, 0.003))
    assert "Decisions changed too (44 % since the onset)" in _advise(moved, flips=many)
    assert "Few decisions changed (0.3 % since the onset, 1 % accepted)" in _advise(moved, flips=few)
    assert "how many decisions changed is not known" in _advise(moved)
    assert not any("before decisions" in _advise(moved, flips=one) for one in (many, few, None))


def test_an_earlier_share_of_traffic_needs_enough_exchanges() -> None:
    """A share that a single exchange gave is the count of it."""
    said = _advise(before=None, n_before=1, shares=(0.0005, 0.04))
    assert "grew to 4 % of all exchanges (1 exchange before the onset)" in said


def test_a_trace_link_holds_the_trace_id() -> None:
    """The template's place is filled."""
    assert trace_link("https://t.example.com/{trace_id}?x", TRACE) == (
        "https://t.example.com/4bf92f3577b34da6a3ce929d0e0e4736?x"
    )


@pytest.mark.parametrize(
    ("template", "trace"),
    [
        ("", TRACE),
        ("javascript:alert('{trace_id}')", TRACE),
        ("https://t.example.com/{trace_id}", ""),
        ("https://t.example.com/{trace_id}", "00-../../evil-00f067aa0ba902b7-01"),
        ("https://t.example.com/{trace_id}", TRACE + '" onclick="x'),
    ],
)
def test_a_trace_that_is_not_one_gives_no_link(template: str, trace: str) -> None:
    """The header comes from the client: only sixteen hexadecimal bytes in a web address become a link."""
    assert trace_link(template, trace) == ""
