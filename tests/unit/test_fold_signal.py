"""Which signals the fold keeps, what they are given, and what they are measured against."""

import msgspec
import pytest

from quantdrift.core.config.schema import Budget, Model
from quantdrift.core.records import Metric, Verdict
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.fold_rows import BaselineRow, BatchRows, Position, Snapshot, Source, TallyRow
from tests.support.monitor.fold_stream import (
    ALL_ID,
    BEGIN_US,
    CATALOG,
    CLEAR_ID,
    CONFIG,
    SECOND_US,
    WITH_REFERENCE,
    batches,
    diverging,
)
from tests.support.monitor.folds import fold_all, quiet, verdict_of

pytestmark = pytest.mark.unit

DAY_US = 86_400 * SECOND_US


def test_an_observation_from_another_policy_is_refused_not_weighted() -> None:
    """A probability below the policy's smallest rate would weigh more than 1: it is left out, the fold goes on."""
    row = batches(1)[0].comparisons[0]
    row = msgspec.structs.replace(row, slice_ids=(ALL_ID,), pi1=0.01)
    fold, outcome = fold_all([BatchRows(fold_seq=1, stored_us=row.captured_us, comparisons=(row,))])
    assert not outcome.detectors
    assert outcome.rollups
    assert fold.position.fold_seq == 1


def test_infinite_divergence_counts_as_the_cap() -> None:
    """An infinite KL is one observation of the cap: every number that is stored stays finite."""
    fold, outcome = fold_all(diverging(batches(40), every=1))
    assert verdict_of(fold, CLEAR_ID)[0] is Verdict.FIRING
    assert sum(row.n_infinite for row in outcome.rollups) > 0
    text = msgspec.json.encode([row.alert.attributes() for row in outcome.transitions if row.event]).decode()
    assert "inf" not in text.replace("infinite", "")
    assert "null" not in text
    divergence = next(row for row in outcome.verdicts if row.slice_id == CLEAR_ID).estimate["divergence"]
    assert divergence["mean"] == pytest.approx(2.0)


def test_detectors_that_see_nothing_for_a_month_are_not_counted() -> None:
    """Retired after 30 days without an observation, and counted again when one comes."""
    fold, _ = fold_all(quiet(50))
    assert fold.position.n_detectors == 2
    late_us = BEGIN_US + 31 * DAY_US
    tally = TallyRow(
        source="pod", boot="b" * 32, stratum="x", sequence=99, at_us=late_us, offered=0, taken=0, lost=0
    )
    fold.batch(BatchRows(fold_seq=101, stored_us=late_us, tallies=(tally,)))
    assert fold.position.n_detectors == 0
    assert all(row.retired_us for row in fold.take().detectors)
    row = quiet(1)[0].comparisons[0]
    again = msgspec.structs.replace(row, captured_us=late_us + SECOND_US)
    fold.batch(BatchRows(fold_seq=102, stored_us=late_us + SECOND_US, comparisons=(again,)))
    assert fold.position.n_detectors == 2
    assert not any(row.retired_us for row in fold.take().detectors)


def test_a_changed_budget_resets_the_evidence() -> None:
    """A state that measured against another budget is not carried over, but the exchanges stay counted."""
    stream = batches(60)
    _, outcome = fold_all(stream[:50])
    snapshot = Snapshot(position=outcome.position, detectors=outcome.detectors, verdicts=outcome.verdicts)
    wide = msgspec.structs.replace(CONFIG, models=(Model(name="digits", budget=Budget(flip=0.2)),))
    fold = Fold(wide, snapshot)
    fold.learn(CATALOG)
    fold.batch(stream[50])
    found = {(row.slice_id, row.metric, row.kind): row for row in fold.take().detectors}
    before = {(row.slice_id, row.metric, row.kind): row for row in outcome.detectors}
    assert found[ALL_ID, "flip", "budget"].budget == 0.2
    assert found[ALL_ID, "flip", "budget"].n_groups == 16
    for kept in (("divergence", "budget"), ("flip", "change"), ("divergence", "tail")):
        assert found[ALL_ID, *kept].n_groups == before[ALL_ID, *kept].n_groups + 16
    assert next(row for row in fold.verdicts() if row.slice_id == ALL_ID).n_groups > 100


def test_an_imported_budget_that_a_lowered_cap_leaves_no_room_for_does_not_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The configuration's holds, the fold goes on, and the log says it once and not for every exchange."""
    imported = BaselineRow(
        model_version_id=WITH_REFERENCE,
        slice_id=ALL_ID,
        metric=Metric.DIVERGENCE.value,
        kind="budget",
        source=Source.IMPORTED,
        made_by="ana",
        reason="",
        from_us=None,
        to_us=None,
        n_groups=0,
        from_version_id=None,
        content={"budget": 1.5},
        fold_seq=1,
    )
    budgets = []
    for cap in (2.0, 1.0):
        budget = Budget(divergence=0.02, cap=cap)
        fold = Fold(
            msgspec.structs.replace(CONFIG, models=(Model(name="digits", budget=budget),)),
            Snapshot(position=Position(), imported=(imported,)),
        )
        fold.learn(CATALOG)
        for rows in batches(5):
            fold.batch(rows)
        found = {(row.slice_id, row.metric, row.kind): row.budget for row in fold.take().detectors}
        budgets.append(found[ALL_ID, "divergence", "budget"])
    assert budgets == [0.75, 0.02]
    (said,) = caplog.messages
    assert said.startswith(
        "slice 1: the imported budget of divergence, 1.5, is not below its cap of 1 and does not hold"
    )
