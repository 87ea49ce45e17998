"""Alert events, by the kind of detector that fired."""

import msgspec
import numpy as np
import pytest

from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import Task
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS, TAIL
from quantdrift.drift.evidence.header import N_TOTAL, Onset
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.facts.events import AlertExamples, event_of
from quantdrift.facts.explanation import Explanation
from quantdrift.facts.words.alert import reason_of, text_of
from quantdrift.monitor.fold.alert_event import transition_row
from quantdrift.storage.fold_rows import Episode, TransitionRow
from tests.support.monitor.alert_cases import alert, event_with
from tests.support.monitor.fold_stream import BEGIN_US, CATALOG, FAINT_ID, WITH_REFERENCE
from tests.support.monitor.tail_streams import STRETCHED, given, last, learned

pytestmark = pytest.mark.unit


def told(state: FloatArray, *, kind: str, metric: Metric, moved: Onset | None = None) -> TransitionRow:
    """Return an alert of `scanner=faint` that a detector decided."""
    return transition_row(
        task=Task.CLASSIFICATION,
        version=CATALOG.versions[WITH_REFERENCE],
        place=CATALOG.slices[FAINT_ID],
        change=(Verdict.OK, Verdict.FIRING),
        reason=reason_of(kind, metric, page=True),
        metric=metric,
        kind=kind,
        state=state,
        budget=0.02,
        n_groups=20_000,
        moved=moved or DETECTORS[kind].moved(state),
        evidence=12.0,
        threshold=10.0,
        aggregate=(Verdict.OK, None, None),
        episode=Episode.OPEN,
        at_us=BEGIN_US,
        fold_seq=1,
    )


@pytest.mark.slow
def test_an_alert_of_the_tail_has_the_share_above_a_level() -> None:
    """Its quantile, its budget, and at which level how much more there is; the text says which figure it is.

    Seeded; the upper tail is stretched by three.
    """
    rng = np.random.default_rng(5)
    states = learned(rng, 1, 20_000, tau=0.0)
    for first in range(0, 8 * 256, 256):
        states = last(TAIL.run(states, given(rng, STRETCHED, 1, first)))
    row = told(states[0], kind=TAIL.kind, metric=Metric.DIVERGENCE)
    evidence = row.alert.evidence
    assert evidence.detector == "tail"
    assert evidence.budget == 0.02
    assert evidence.tail_after is not None
    assert evidence.tail_before is not None
    assert evidence.tail_after > evidence.tail_before >= 0
    assert evidence.tail_level is not None
    assert evidence.tail_level > 0
    assert "of outputs in scanner=faint are far from those of the FP32 model" in text_of(row.alert).headline
    assert "budget" not in text_of(row.alert).headline


def test_an_alert_of_a_budget_has_no_tail() -> None:
    """The mean against the budget, which holds whatever the state tests against."""
    state = BUDGET.fresh(budget=0.01, scale=1.0, weighted=False, mass=0.0, at_us=0)
    state[N_TOTAL] = 400
    moved = Onset(onset_us=BEGIN_US, before=None, after=None, n_after=0)
    row = told(state, kind=BUDGET.kind, metric=Metric.FLIP, moved=moved)
    assert row.alert.evidence.detector == "budget"
    assert row.alert.evidence.tail_level is None
    assert "Since: about 2026-03-01 12:00 UTC (estimated)" in text_of(row.alert).plain()


def test_the_end_of_an_alert_says_whether_it_is_well_or_gone() -> None:
    """What is compared no more is not called healthy."""
    gone, well = (event_with(verdict=verdict.value) for verdict in (Verdict.UNKNOWN, Verdict.OK))
    assert "is not compared any more, so its state is not known" in text_of(gone).headline
    assert "within the budget of 1 %" in text_of(well).headline


def test_an_alert_that_was_stored_flat_is_read_back_as_the_same_record() -> None:
    """Of all of its parts, with an explanation; a change between `ok` and `unknown` has no event to read."""
    found = Explanation(
        cause="damage", damage=0.04, damage_se=0.01, explained_by="small", explained_by_id=7, incident="7"
    )
    event = alert(found=found).alert
    event = msgspec.structs.replace(
        event, examples=AlertExamples(exchanges=("0" * 32,), traces=("https://t",))
    )
    flat = event.attributes()
    assert not any(isinstance(value, dict) or value is None for value in flat.values())
    assert (flat["slice"], flat["verdict"], flat["evidence"], flat["incident"]) == (
        "scanner=faint",
        "firing",
        16.2,
        "7",
    )
    assert event_of(msgspec.json.decode(msgspec.json.encode(flat))) == event
    assert event_of({"reason": "stale"}) is None
