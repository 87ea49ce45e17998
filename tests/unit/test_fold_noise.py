"""Noise in the fold: added to budgets, reported, restored after a restart, and unknown where it is not measured."""

import msgspec
import pytest

from quantdrift.core.records import Metric, Side, Verdict
from quantdrift.drift import noise
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS
from quantdrift.drift.evidence.header import ALERTING, M
from quantdrift.drift.evidence.state import load_state
from quantdrift.facts.words.noise import noise_line
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.fold_rows import DetectorRow, FloorRow, FoldResult, Snapshot, VerdictRow
from tests.support.monitor.fold_stream import (
    ALL_ID,
    CATALOG,
    CLEAR_ID,
    CONFIG,
    batches,
    with_noise,
    with_slice_noise,
)
from tests.support.monitor.folds import EMPTY, fold_all

pytestmark = pytest.mark.unit

CALM = 0.001


def floor_of(outcome: FoldResult, metric: str = "flip") -> FloorRow:
    """Return what is known of the noise of a metric."""
    return next(row for row in outcome.floors if row.metric == metric)


def held_against(outcome: FoldResult, slice_id: int = ALL_ID, metric: str = "flip") -> tuple[float, float]:
    """Return what a slice is tested against, and the part of it that is noise."""
    row = next(
        row
        for row in outcome.detectors
        if (row.slice_id, row.metric, row.kind) == (slice_id, metric, BUDGET.kind)
    )
    state = load_state(row.kind, row.state, DETECTORS[row.kind].size)
    assert state[M] == row.budget
    return row.budget, row.noise


@pytest.mark.slow
def test_a_reference_that_never_differs_changes_no_bit() -> None:
    """But for what is known of its noise: nothing."""
    _, without = fold_all(batches(60))
    _, outcome = fold_all(with_noise(batches(60), 0.0))
    assert (floor_of(outcome).low, floor_of(outcome).added, floor_of(outcome).exceeds) == (0.0, 0.0, False)
    assert outcome.detectors == without.detectors
    assert outcome.transitions == without.transitions
    assert not outcome.noise_changes


def test_noise_is_added_to_every_budget_of_its_version() -> None:
    """By its upper bound as it was when it was shown; the other metric, which has none, keeps its budget."""
    fold, outcome = fold_all(with_noise(batches(40, faint_flips=CALM), 0.04))
    row = floor_of(outcome)
    assert row.added >= 0.04
    for slice_id in (ALL_ID, CLEAR_ID):
        assert held_against(outcome, slice_id) == (0.01 + row.added, row.added)
        assert held_against(outcome, slice_id, "divergence") == (0.01, 0.0)
    shown = next(row for row in fold.verdicts() if row.slice_id == ALL_ID and row.estimate).estimate
    assert shown["flip"]["budget"] == pytest.approx(0.01)
    assert shown["flip"]["noise"] == pytest.approx(row.added)
    assert "noise" not in shown["divergence"]


@pytest.mark.slow
def test_too_much_noise_is_reported_and_no_slice_is_ok() -> None:
    """Its own event; what is inside a budget that is mostly noise is not shown to be well."""
    fold, outcome = fold_all(with_noise(batches(60, faint_flips=CALM), 0.04))
    (change,) = outcome.noise_changes
    assert (change.side, change.metric, change.exceeds) == (Side.REFERENCE, "flip", True)
    assert noise_line(change.event).startswith("digits 1: the reference differs from itself too much: flip")
    verdicts = {(row.verdict, row.reason) for row in fold.verdicts() if row.n_groups}
    assert verdicts == {
        (
            Verdict.UNKNOWN,
            "noise: the reference differs from itself by too large a part of the budget for changed answers",
        )
    }


def test_the_candidates_noise_is_added_too() -> None:
    """Both sides have a part in what is measured."""
    both = with_noise(batches(40, faint_flips=CALM), 0.04)
    candidate = with_noise(batches(40, faint_flips=CALM), 0.04, side=Side.CANDIDATE, seed=4)
    joined = [
        msgspec.structs.replace(one, noise=one.noise + other.noise)
        for one, other in zip(both, candidate, strict=True)
    ]
    _, outcome = fold_all(joined)
    sides = {row.side: row.added for row in outcome.floors if row.metric == "flip"}
    assert min(sides.values()) >= 0.04
    assert held_against(outcome)[1] == sides[Side.REFERENCE] + sides[Side.CANDIDATE]


@pytest.mark.release
@pytest.mark.slow
def test_noise_that_is_over_ends_with_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the windows have moved on; budgets go down again."""
    monkeypatch.setattr(noise, "WINDOW", 0.0)
    stream = with_noise(batches(40, faint_flips=CALM), 0.3, per_batch=30)
    stream += with_noise(batches(150, faint_flips=CALM), 0.0, per_batch=100)[40:]
    fold, outcome = fold_all(stream)
    assert [change.exceeds for change in outcome.noise_changes] == [True, False]
    assert floor_of(outcome).added < 0.1
    assert held_against(outcome)[1] == floor_of(outcome).added
    assert not any("noise" in row.reason for row in fold.verdicts())


@pytest.mark.parametrize(("digest", "goes_on"), [("", True), ("0" * 64, False)], ids=["same", "other"])
def test_a_new_version_begins_with_the_noise_of_the_same_reference(digest: str, *, goes_on: bool) -> None:
    """Its first exchange is tested with the allowance, and nothing is measured again from nothing; another reference is."""
    stream = with_noise(batches(60, faint_flips=CALM), 0.04)
    before = CATALOG.versions[1]
    new = msgspec.structs.replace(
        before, id=9, candidate_version="9", reference_digest=digest or before.reference_digest
    )
    catalog = msgspec.structs.replace(CATALOG, versions={**CATALOG.versions, 9: new})
    fold = Fold(CONFIG, EMPTY)
    fold.learn(catalog)
    for rows in stream[:40]:
        fold.batch(rows)
    added = fold.noise_allowance((1, ALL_ID), Metric.FLIP)
    assert added >= 0.04
    later = [
        msgspec.structs.replace(
            rows,
            comparisons=tuple(msgspec.structs.replace(row, model_version_id=9) for row in rows.comparisons),
            noise=(),
        )
        for rows in stream[40:]
    ]
    for rows in later:
        fold.batch(rows)
    assert fold.noise_allowance((9, ALL_ID), Metric.FLIP) == (added if goes_on else 0.0)
    outcome = fold.take()
    assert goes_on is any(row.model_version_id == 9 and row.added == added for row in outcome.floors)


@pytest.mark.release
@pytest.mark.slow
def test_noise_lifts_a_budget_and_does_not_hide_drift() -> None:
    """Flips of 8 % in one slice, over 1 % and a noise of 1 %, page all the same."""
    _, outcome = fold_all(with_noise(batches(500), 0.01))
    assert held_against(outcome)[1] > 0.01
    assert any(row.to_verdict is Verdict.FIRING for row in outcome.transitions)


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.release), 7])
def test_it_resumes_with_the_same_bits(every: int) -> None:
    """However the batches are cut into folds, and with the noise of slices."""
    stream = with_slice_noise(batches(60), 0.08, 0.02)
    _, whole = fold_all(stream)
    floors: dict[tuple[int, Side, str], FloorRow] = {}
    detectors: dict[tuple[int, str, str], DetectorRow] = {}
    verdicts: dict[tuple[int, int], VerdictRow] = {}
    snapshot, changes = EMPTY, 0
    for begin in range(0, len(stream), every):
        fold = Fold(CONFIG, snapshot)
        fold.learn(CATALOG)
        tallies = snapshot.tallies
        for rows in stream[begin : begin + every]:
            fold.batch(rows)
            tallies += rows.tallies
        outcome = fold.take()
        floors |= {(row.slice_id, row.side, row.metric): row for row in outcome.floors}
        detectors |= {(row.slice_id, row.metric, row.kind): row for row in outcome.detectors}
        verdicts |= {(row.model_version_id, row.slice_id): row for row in outcome.verdicts}
        changes += len(outcome.noise_changes)
        snapshot = Snapshot(
            position=outcome.position,
            detectors=tuple(detectors.values()),
            verdicts=tuple(verdicts.values()),
            tallies=tallies,
            floors=tuple(floors.values()),
        )
    assert tuple(floors[key] for key in sorted(floors)) == whole.floors
    assert {row.slice_id: row for row in whole.detectors} == {row.slice_id: row for row in detectors.values()}
    assert tuple(detectors[key] for key in sorted(detectors)) == whole.detectors
    assert changes == len(whole.noise_changes) > 0
    assert any(row.slice_id and row.own for row in whole.floors)


def test_what_an_alert_lasts_against_is_not_lowered() -> None:
    """What has recovered from the larger mean has not yet from the smaller one."""
    state = BUDGET.fresh(budget=0.03, scale=1.0, weighted=False, mass=0.0, at_us=0)
    BUDGET.alarmed(state, page=True)
    assert state[ALERTING]
    with pytest.raises(ValueError, match="evidence"):
        BUDGET.lower(state, 0.02)
    BUDGET.arm(state, mass=0.0, at_us=0)
    BUDGET.lower(state, 0.02)
    fresh = BUDGET.fresh(budget=0.02, scale=1.0, weighted=False, mass=0.0, at_us=0)
    assert state[M] == 0.02
    assert state.tolist() == pytest.approx(fresh.tolist())
    with pytest.raises(ValueError, match="cannot be kept"):
        BUDGET.lower(state, 0.03)
