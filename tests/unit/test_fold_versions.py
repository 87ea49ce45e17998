"""A candidate version that another one replaces, and slices without traffic."""

import msgspec
import pytest

from quantdrift.core.records import Verdict
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.monitor.rows import BatchRows, Catalog, Episode, Outcome, Position, Snapshot, TallyRow
from tests.support.monitor.fold_stream import (
    CATALOG,
    CONFIG,
    FAINT_ID,
    SECOND_US,
    WITH_REFERENCE,
    WITHOUT_REFERENCE,
    batches,
)

pytestmark = pytest.mark.unit

NEW = 3
VERSIONS = {
    **CATALOG.versions,
    NEW: msgspec.structs.replace(CATALOG.versions[WITH_REFERENCE], id=NEW, candidate_version="3"),
}
BOTH = Catalog(versions=VERSIONS, slices=CATALOG.slices, policies=CATALOG.policies)
HOUR_US = 3600 * SECOND_US
STALE_US = int(CONFIG.monitor.stale_after_s * SECOND_US)


def _begin(snapshot: Snapshot | None = None) -> Fold:
    fold = Fold(CONFIG, snapshot or Snapshot(position=Position()))
    fold.learn(BOTH)
    return fold


def _fired() -> tuple[Fold, int, int]:
    """Return a fold in which version 1 fires, its last batch and the time."""
    fold, stream = _begin(), batches(300)
    for rows in stream:
        fold.batch(rows)
    return fold, 300, stream[-1].stored_us


def _tally(fold_seq: int, at_us: int, *, unreferenced: tuple[int, ...] = ()) -> BatchRows:
    row = TallyRow(
        source="pod",
        boot="e" * 32,
        stratum="default",
        sequence=fold_seq,
        at_us=at_us,
        offered=100 * fold_seq,
        taken=0,
        lost=0,
    )
    return BatchRows(fold_seq=fold_seq, stored_us=at_us, tallies=(row,), unreferenced=unreferenced)


def _compared(fold_seq: int, at_us: int, *, version: int, captured_us: int | None = None) -> BatchRows:
    rows = tuple(
        msgspec.structs.replace(
            row, captured_us=captured_us or at_us, model_version_id=version, flip=0.0, divergence=0.0
        )
        for row in batches(1)[0].comparisons
    )
    return BatchRows(fold_seq=fold_seq, stored_us=at_us, comparisons=rows)


def _verdict(fold: Fold, version: int) -> tuple[Verdict, str]:
    (row,) = [row for row in fold.verdicts() if (row.model_version_id, row.slice_id) == (version, FAINT_ID)]
    return row.verdict, row.reason.partition(":")[0]


def _closed(outcome: Outcome) -> list[tuple[int, int, Verdict, Verdict]]:
    return [
        (row.model_version_id, row.slice_id, row.from_verdict, row.to_verdict)
        for row in outcome.transitions
        if row.episode is Episode.CLOSE
    ]


def test_an_alert_of_a_version_that_another_replaced_ends_as_unknown() -> None:
    """It lasts while both are compared and until stale_after_s of silence; then it ends with an event, not as health."""
    fold, seq, at_us = _fired()
    fold.take()
    for step, after_us in enumerate((SECOND_US, STALE_US - HOUR_US), start=1):
        fold.batch(_compared(seq + 2 * step - 1, at_us + after_us, version=NEW))
        fold.batch(_tally(seq + 2 * step, at_us + after_us))
        assert _verdict(fold, WITH_REFERENCE)[0] is Verdict.FIRING
    assert not _closed(fold.take())
    late_us = at_us + STALE_US + HOUR_US
    fold.batch(_compared(seq + 5, late_us, version=NEW))
    fold.batch(_tally(seq + 6, late_us))
    outcome = fold.take()
    assert _closed(outcome) == [(WITH_REFERENCE, FAINT_ID, Verdict.FIRING, Verdict.UNKNOWN)]
    assert _verdict(fold, WITH_REFERENCE) == (Verdict.UNKNOWN, "superseded")
    (story,) = [row.alert for row in outcome.transitions if row.episode is Episode.CLOSE]
    assert "its health is unknown" in story.change.advice
    assert {row.model_version_id for row in fold.current()} == {2, NEW}
    # One straggler of the old version changes nothing.
    fold.batch(_compared(seq + 7, late_us + SECOND_US, version=WITH_REFERENCE, captured_us=at_us + SECOND_US))
    assert _verdict(fold, WITH_REFERENCE) == (Verdict.UNKNOWN, "superseded")


def test_a_version_that_comes_back_is_watched_from_nothing() -> None:
    """A roll-back: its old evidence is gone, and it can fire again."""
    fold, seq, at_us = _fired()
    late_us = at_us + STALE_US + HOUR_US
    fold.batch(_compared(seq + 1, late_us, version=NEW))
    fold.batch(_tally(seq + 2, late_us))
    fold.take()
    shift_us = late_us - batches(1)[0].stored_us
    for rows in batches(300):
        moved = tuple(
            msgspec.structs.replace(row, captured_us=row.captured_us + shift_us) for row in rows.comparisons
        )
        fold.batch(
            BatchRows(
                fold_seq=seq + 2 + rows.fold_seq, stored_us=rows.stored_us + shift_us, comparisons=moved
            )
        )
    opened = [row for row in fold.take().transitions if row.episode is Episode.OPEN]
    assert [(row.model_version_id, row.slice_id) for row in opened] == [(WITH_REFERENCE, FAINT_ID)]


def test_silence_of_everything_ends_no_alert() -> None:
    """Where nothing of the model is compared at all, the shadow may be down: the alert lasts."""
    fold, seq, at_us = _fired()
    fold.batch(_tally(seq + 1, at_us + 3 * STALE_US))
    assert _verdict(fold, WITH_REFERENCE)[0] is Verdict.FIRING


def test_an_alert_on_what_is_seen_no_more_ends_after_thirty_days() -> None:
    """A slice without traffic is retired: its alert ends unknown, its detectors free their allowance.

    A version without a reference stays `unknown` for as long as its exchanges come, and goes in the same way then.
    """
    fold, seq, at_us = _fired()
    fold.take()
    for day in range(1, 32):
        fold.batch(_tally(seq + day, at_us + day * 24 * HOUR_US, unreferenced=(WITHOUT_REFERENCE,)))
    outcome = fold.take()
    assert _closed(outcome) == [(WITH_REFERENCE, FAINT_ID, Verdict.FIRING, Verdict.UNKNOWN)]
    assert all(row.retired_us for row in outcome.detectors)
    gone = [row for row in outcome.verdicts if row.model_version_id == WITH_REFERENCE]
    assert {row.reason.partition(":")[0] for row in gone} == {"retired"}
    assert fold.position.n_detectors == 0
    assert [row.model_version_id for row in fold.verdicts()] == [WITHOUT_REFERENCE]
    for day in range(32, 63):
        fold.batch(_tally(seq + day, at_us + day * 24 * HOUR_US))
    assert not fold.verdicts()


def test_resuming_between_rollout_and_end_changes_nothing() -> None:
    """A fold resumed from its rows before the alert ends tells the same end."""
    fold, seq, at_us = _fired()
    rest = [
        _compared(seq + 1, at_us + SECOND_US, version=NEW),
        _tally(seq + 2, at_us + HOUR_US),
        _compared(seq + 3, at_us + STALE_US + HOUR_US, version=NEW),
        _tally(seq + 4, at_us + STALE_US + HOUR_US),
    ]
    stored = fold.take()
    for rows in rest:
        fold.batch(rows)
    whole = fold.take()
    resumed = _begin(Snapshot(position=stored.position, detectors=stored.detectors, verdicts=stored.verdicts))
    for rows in rest:
        resumed.batch(rows)
    again = resumed.take()
    assert (again.transitions, again.detectors) == (whole.transitions, whole.detectors)


def test_a_capture_clock_that_runs_ahead_hides_no_silence() -> None:
    """The last comparison is at most as late as its storing: heartbeat and staleness go by that."""
    fold = _begin()
    at_us = batches(1)[0].stored_us
    fold.batch(_compared(1, at_us, version=NEW, captured_us=at_us + 100 * 24 * HOUR_US))
    assert {row.last_us for row in fold.take().verdicts if row.model_version_id == NEW} == {at_us}


def test_a_version_that_another_replaced_gives_its_allowance_back_until_it_is_compared_again() -> None:
    """So each detector of the new version has as much as if it were alone; nothing is given for the time between."""
    fold, seq, at_us = _fired()
    alone = fold.position.n_detectors
    fold.batch(_compared(seq + 1, at_us + SECOND_US, version=NEW))
    both = fold.position.n_detectors
    assert both > alone
    late_us = at_us + STALE_US + HOUR_US
    fold.batch(_compared(seq + 2, late_us, version=NEW))
    fold.batch(_tally(seq + 3, late_us))
    assert fold.position.n_detectors == both - alone
    stored = fold.take()
    for known in (
        fold,
        _begin(Snapshot(position=stored.position, detectors=stored.detectors, verdicts=stored.verdicts)),
    ):
        known.batch(_compared(seq + 4, late_us + SECOND_US, version=WITH_REFERENCE))
        assert known.position.n_detectors == both
        known.batch(_compared(seq + 5, late_us + 2 * SECOND_US, version=WITH_REFERENCE))
    again = fold.take()
    assert {row.model_version_id for row in again.detectors} == {WITH_REFERENCE}


def test_a_drift_is_found_across_releases() -> None:
    """Each version has some 20 exchanges of the slice, none of which has the evidence alone."""
    versions = {
        **CATALOG.versions,
        **{
            number: msgspec.structs.replace(
                CATALOG.versions[WITH_REFERENCE], id=number, candidate_version=str(number)
            )
            for number in range(10, 90)
        },
    }
    fold = Fold(CONFIG, Snapshot(position=Position()))
    fold.learn(Catalog(versions=versions, slices=CATALOG.slices, policies=CATALOG.policies))
    for rows in batches(300):
        version = 10 + rows.fold_seq // 4
        fold.batch(
            BatchRows(
                fold_seq=rows.fold_seq,
                stored_us=rows.stored_us,
                comparisons=tuple(
                    msgspec.structs.replace(row, model_version_id=version) for row in rows.comparisons
                ),
            )
        )
    fired = [row for row in fold.take().transitions if row.to_verdict is Verdict.FIRING]
    assert {row.slice_id for row in fired} == {FAINT_ID}
    assert fired[0].model_version_id > 12, "no version alone has the evidence"
    assert fired[0].onset_us < fired[0].at_us
