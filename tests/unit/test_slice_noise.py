"""The noise of slices in the fold: each has its own allowance and its own `unknown`, and follows its version until it is known."""

import msgspec
import pytest

from quantdrift.core.records import Metric, Side, Verdict
from quantdrift.facts.words.noise import noise_line
from quantdrift.monitor.fold import noise
from quantdrift.storage.fold_rows import FloorRow, FoldResult, SliceChange
from tests.support.monitor.fold_stream import (
    ALL_ID,
    CLEAR_ID,
    FAINT_ID,
    batches,
    with_noise,
    with_slice_noise,
)
from tests.support.monitor.folds import fold_all, verdict_of

pytestmark = pytest.mark.unit

CALM = 0.001


def floor_of(outcome: FoldResult, slice_id: int) -> FloorRow:
    """Return what is known of the noise of flips in a slice; 0: of the version."""
    return next(row for row in outcome.floors if (row.slice_id, row.metric) == (slice_id, "flip"))


def allowance_of(outcome: FoldResult, slice_id: int) -> float:
    """Return what the budget of flips of a slice contains for noise."""
    return next(
        row.noise
        for row in outcome.detectors
        if (row.slice_id, row.metric, row.kind) == (slice_id, "flip", "budget")
    )


@pytest.mark.slow
def test_a_noisy_slice_is_unknown_and_does_not_page() -> None:
    """Its flips are its noise alone, ten times that of all traffic; the other slices have exact answers, and verdicts."""
    stream = with_slice_noise(batches(300, seed=2, faint_flips=0.04), 0.04, 0.0, per_batch=16)
    fold, outcome = fold_all(stream)
    assert not any(row.to_verdict in {Verdict.WARNING, Verdict.FIRING} for row in outcome.transitions)
    assert verdict_of(fold, FAINT_ID) == (
        Verdict.UNKNOWN,
        "noise: the reference differs from itself by too large a part of the budget for changed answers in this slice",
    )
    assert verdict_of(fold, CLEAR_ID)[0] is Verdict.OK
    assert floor_of(outcome, FAINT_ID).own
    assert allowance_of(outcome, FAINT_ID) >= 0.04
    assert allowance_of(outcome, FAINT_ID) > allowance_of(outcome, ALL_ID)


@pytest.mark.slow
def test_the_noise_of_one_slice_does_not_hide_the_drift_of_another() -> None:
    """A quarter of the answers of `clear` differ, and from batch 300 on `faint` has 6 % flips without noise."""
    calm = with_slice_noise(batches(300, seed=2, faint_flips=CALM), 0.0, 0.25, per_batch=32)
    drifting = with_slice_noise(batches(440, seed=12, faint_flips=0.06), 0.0, 0.25, per_batch=32)[300:]
    _, outcome = fold_all(calm + drifting)
    of_faint = [row for row in outcome.transitions if row.slice_id == FAINT_ID]
    assert Verdict.WARNING in {row.to_verdict for row in of_faint if row.fold_seq > 300}
    assert allowance_of(outcome, CLEAR_ID) > 0.2
    assert allowance_of(outcome, FAINT_ID) < 0.02


@pytest.mark.slow
def test_a_slice_that_is_little_known_has_the_allowance_of_its_version() -> None:
    """Its own bounds say nothing yet, so it neither pages for noise that others have shown, nor gets more."""
    stream = with_slice_noise(batches(60, faint_flips=CALM), 0.03, 0.03)
    few = [
        msgspec.structs.replace(
            rows,
            noise=tuple(
                row for n, row in enumerate(rows.noise) if FAINT_ID not in (row.slice_ids or ()) or n < 1
            ),
        )
        for rows in stream
    ]
    fold, outcome = fold_all(few)
    assert not floor_of(outcome, FAINT_ID).own
    assert allowance_of(outcome, FAINT_ID) == floor_of(outcome, 0).added > 0.01
    assert verdict_of(fold, FAINT_ID) == (
        Verdict.UNKNOWN,
        "noise: the reference differs from itself by too large a part of the budget for changed answers",
    )


@pytest.mark.slow
def test_the_noise_of_one_slice_does_not_raise_the_budget_of_a_quiet_one() -> None:
    """Once enough of the quiet one was computed again; its evidence goes on against the smaller budget."""
    _, outcome = fold_all(with_slice_noise(batches(150, faint_flips=CALM), 0.2, 0.0, per_batch=80))
    of_version = floor_of(outcome, 0)
    clear = floor_of(outcome, CLEAR_ID)
    assert clear.own
    assert clear.low == 0.0
    assert allowance_of(outcome, CLEAR_ID) == clear.added < of_version.added / 4
    assert allowance_of(outcome, ALL_ID) == of_version.added


def test_items_without_slices_count_for_the_version_alone() -> None:
    """As a worker of the release before stores them."""
    _, outcome = fold_all(with_noise(batches(40, faint_flips=CALM), 0.04))
    assert {row.slice_id for row in outcome.floors} == {0}


def test_items_count_for_the_slices_that_they_were_chosen_for() -> None:
    """Those chosen for a rare slice are more than their share of all traffic."""
    stream = [
        msgspec.structs.replace(
            rows, noise=tuple(msgspec.structs.replace(row, slice_ids=(FAINT_ID,)) for row in rows.noise)
        )
        for rows in with_slice_noise(batches(20), 0.1, 0.1)
    ]
    _, outcome = fold_all(stream)
    assert {row.slice_id for row in outcome.floors} == {FAINT_ID}


@pytest.mark.slow
def test_too_much_noise_of_a_slice_is_an_event_of_its_own() -> None:
    """Once, and with its name."""
    _, outcome = fold_all(with_slice_noise(batches(100, faint_flips=CALM), 0.03, 0.0))
    assert not floor_of(outcome, 0).exceeds
    (change,) = outcome.noise_changes
    assert (change.slice_id, change.exceeds, change.event.slice) == (FAINT_ID, True, "scanner=faint")
    assert noise_line(change.event).startswith("digits 1, scanner=faint: the reference differs from itself")
    assert "the other slices are not" in change.event.advice


@pytest.mark.slow
def test_where_the_version_has_too_much_noise_its_event_is_enough() -> None:
    """A thousand slices would else say it a thousand times."""
    fold, outcome = fold_all(with_slice_noise(batches(200, faint_flips=CALM), 0.1, 0.1))
    assert [change.slice_id for change in outcome.noise_changes] == [0]
    assert {verdict_of(fold, slice_id)[0] for slice_id in (FAINT_ID, CLEAR_ID)} == {Verdict.UNKNOWN}


@pytest.mark.slow
def test_only_so_many_slices_have_a_figure_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The level of their bounds is paid for so many; the others use that of their version."""
    monkeypatch.setattr(noise, "MOST_SLICES", 1)
    _, outcome = fold_all(with_slice_noise(batches(100, faint_flips=CALM), 0.05, 0.05))
    assert {row.slice_id for row in outcome.floors} == {0, FAINT_ID}
    assert allowance_of(outcome, CLEAR_ID) == floor_of(outcome, 0).added


@pytest.mark.slow
def test_the_noise_of_a_retired_slice_is_forgotten() -> None:
    """Here and, with the same write, in the database."""
    stream = with_slice_noise(batches(60, faint_flips=CALM), 0.05, 0.0)
    retired = SliceChange(slice_id=FAINT_ID, watched=False, made_by="test", reason="no longer needed")
    stream[50] = msgspec.structs.replace(stream[50], slices=(retired,))
    fold, outcome = fold_all(stream)
    assert outcome.forgotten_noise == ((1, FAINT_ID),)
    assert not any(row.slice_id == FAINT_ID for row in outcome.floors)
    assert fold.noise_allowance((1, FAINT_ID), Metric.FLIP) == floor_of(outcome, 0).added


@pytest.mark.slow
def test_noise_of_the_candidate_is_that_of_the_slice_too() -> None:
    """Both sides are added, each from where it is known."""
    stream = with_slice_noise(batches(150, faint_flips=CALM), 0.05, 0.0)
    both = [
        msgspec.structs.replace(
            rows,
            noise=rows.noise
            + tuple(
                msgspec.structs.replace(row, side=Side.CANDIDATE, exchange_id=row.exchange_id[::-1])
                for row in rows.noise
            ),
        )
        for rows in stream
    ]
    _, outcome = fold_all(both)
    added = [row.added for row in outcome.floors if (row.slice_id, row.metric) == (FAINT_ID, "flip")]
    assert len(added) == 2
    assert min(added) >= 0.05
    assert allowance_of(outcome, FAINT_ID) == pytest.approx(sum(added))


@pytest.mark.slow
def test_a_page_for_noise_ends_once_the_noise_is_known() -> None:
    """A slice can page before its noise is known; then it is compared with budget and noise together."""
    late = with_slice_noise(batches(700, faint_flips=0.06), 0.06, 0.0)
    late[:150] = [msgspec.structs.replace(rows, noise=()) for rows in late[:150]]
    _, outcome = fold_all(late)
    of_faint = [row.to_verdict for row in outcome.transitions if row.slice_id == FAINT_ID]
    assert Verdict.FIRING in of_faint
    assert of_faint[-1] is Verdict.UNKNOWN
