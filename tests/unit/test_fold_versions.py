"""A candidate version that another one replaces, and slices without traffic."""

from copy import deepcopy
from functools import cache

import msgspec
import numpy as np
import pytest

from quantdrift.core.records import Verdict
from quantdrift.facts.events import Ending
from quantdrift.monitor.fold.alert_event import iso
from quantdrift.monitor.fold.fold import SHOWN_US, Fold
from quantdrift.monitor.fold.serving import LEAST_SILENCE_S, SWITCH_S, ServingVersions
from quantdrift.storage.fold_rows import (
    AlertClose,
    BatchRows,
    Catalog,
    Episode,
    FoldResult,
    Position,
    Snapshot,
    TallyRow,
)
from tests.support.monitor.alert_cases import page
from tests.support.monitor.fold_stream import (
    BEGIN_US,
    CATALOG,
    CLEAR_ID,
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
SILENT_US = int(LEAST_SILENCE_S * SECOND_US)  # of a version with five exchanges a second


def _begin(snapshot: Snapshot | None = None) -> Fold:
    fold = Fold(CONFIG, snapshot or Snapshot(position=Position()))
    fold.learn(BOTH)
    return fold


def _fired() -> tuple[Fold, int, int]:
    """Return a fold in which version 1 fires, its last batch and the time of its newest exchange."""
    fold, newest_us = _folded()
    return deepcopy(fold), 300, newest_us


@cache
def _folded() -> tuple[Fold, int]:
    fold, stream = _begin(), batches(300)
    for rows in stream:
        fold.batch(rows)
    return fold, max(row.captured_us for rows in stream for row in rows.comparisons)


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
    return BatchRows(
        fold_seq=fold_seq, stored_us=at_us, captured_us=at_us, tallies=(row,), unreferenced=unreferenced
    )


def _compared(fold_seq: int, at_us: int, *, version: int, captured_us: int | None = None) -> BatchRows:
    rows = tuple(
        msgspec.structs.replace(
            row, captured_us=captured_us or at_us, model_version_id=version, flip=0.0, divergence=0.0
        )
        for row in batches(1)[0].comparisons
    )
    return BatchRows(fold_seq=fold_seq, stored_us=at_us, comparisons=rows)


def _fold(fold: Fold, *times: tuple[int, int]) -> None:
    """Fold, for each version and time, exchanges of that time and the counts that make the monitor judge all slices."""
    for version, at_us in times:
        seq = fold.position.fold_seq
        fold.batch(_compared(seq + 1, at_us, version=version))
        fold.batch(_tally(seq + 2, at_us + 10 * SECOND_US))


def _again(fold: Fold) -> Fold:
    """Return a fold that goes on from what is stored of this one."""
    fold.state.table.dirty[:] = True
    serving = tuple(fold.state.serving.row(version) for version in fold.state.serving.versions())
    stored = fold.take()
    return _begin(
        Snapshot(
            position=stored.position, detectors=stored.detectors, verdicts=stored.verdicts, serving=serving
        )
    )


def _verdict(fold: Fold, version: int) -> tuple[Verdict, str]:
    (row,) = [row for row in fold.verdicts() if (row.model_version_id, row.slice_id) == (version, FAINT_ID)]
    return row.verdict, row.reason.partition(":")[0]


def _closed(outcome: FoldResult) -> list[tuple[int, int, Verdict, Verdict]]:
    return [
        (row.model_version_id, row.slice_id, row.from_verdict, row.to_verdict)
        for row in outcome.transitions
        if row.episode is Episode.CLOSE
    ]


def _episodes(outcome: FoldResult) -> list[tuple[int, Episode, bool]]:
    return [
        (row.slice_id, row.episode, row.quiet)
        for row in outcome.transitions
        if row.episode is not Episode.NONE and row.slice_id == FAINT_ID
    ]


@pytest.mark.slow
def test_an_alert_ends_within_minutes_of_another_version_taking_over() -> None:
    """It lasts while both serve; after ten usual gaps, two minutes here, it ends, and says what serves now and since when not."""
    fold, _, at_us = _fired()
    fold.take()
    for after_us in (SECOND_US, SILENT_US - 10 * SECOND_US, SILENT_US):
        _fold(fold, (NEW, at_us + after_us))
        assert _verdict(fold, WITH_REFERENCE)[0] is Verdict.FIRING
    assert not _closed(fold.take())
    _fold(fold, (NEW, at_us + SILENT_US + 20 * SECOND_US))
    outcome = fold.take()
    assert _closed(outcome) == [(WITH_REFERENCE, FAINT_ID, Verdict.FIRING, Verdict.UNKNOWN)]
    assert _verdict(fold, WITH_REFERENCE) == (Verdict.UNKNOWN, "replaced")
    (story,) = [row.alert for row in outcome.transitions if row.episode is Episode.CLOSE]
    assert (story.change.ended, story.change.serving) == (Ending.REPLACED, ("3",))
    assert story.change.last_seen == iso(at_us)
    assert page(story).startswith(
        "digits 1 does not serve any more (last seen 2026-03-01 12:14 UTC). 3 serves now."
    )


def _served(
    versions: ServingVersions, version: int, begin_s: float, end_s: float, gap_s: float = 0.1
) -> list[int]:
    """Note the exchanges of a version in a time, and return the versions that are replaced at its end."""
    times = np.arange(begin_s, end_s, gap_s) * SECOND_US
    versions.seen(version, times.astype(np.int64))
    versions.judge(int(end_s * SECOND_US), lambda *_: True)
    return [seen for seen in versions.versions() if versions.is_replaced(seen)]


def test_a_release_and_a_roll_back_are_said_after_half_a_minute() -> None:
    """The version that began, or came back, when the other one ended is the one that serves, also in a third release."""
    versions = ServingVersions(())
    assert _served(versions, 1, 0, 3600) == []
    assert _served(versions, 2, 3600, 3600 + SWITCH_S - 1) == []
    assert _served(versions, 2, 3600 + SWITCH_S - 1, 3600 + SWITCH_S + 2) == [1]
    assert _served(versions, 1, 3640, 3640 + SWITCH_S - 1) == [1]
    assert _served(versions, 1, 3640 + SWITCH_S - 1, 3640 + SWITCH_S + 2) == [2]
    assert _served(versions, 3, 3680, 3680 + SWITCH_S + 2) == [1, 2]


def test_a_pause_beside_a_canary_or_an_older_version_is_no_release() -> None:
    """What has long been there, and what has a small part of the traffic, replaces after two minutes only."""
    versions = ServingVersions(())
    _served(versions, 1, 0, 3600)
    _served(versions, 2, 3000, 3600)
    assert _served(versions, 2, 3600, 3600 + LEAST_SILENCE_S - 1) == []
    assert _served(versions, 2, 3600 + LEAST_SILENCE_S - 1, 3600 + LEAST_SILENCE_S + 1) == [1]
    versions = ServingVersions(())
    _served(versions, 1, 0, 3600)
    assert _served(versions, 2, 3600, 3600 + LEAST_SILENCE_S - 1, gap_s=2.0) == []
    assert _served(versions, 1, 3719, 3720) == []


@pytest.mark.slow
def test_gauges_show_a_replaced_version_as_unknown_for_a_while_and_then_no_more() -> None:
    """A rule that uses the last known verdict for 15 minutes sees at once that nothing fires."""
    fold, _, at_us = _fired()
    _fold(fold, (NEW, at_us + 2 * SILENT_US))
    shown = {row.model_version_id: row.verdict for row in fold.current() if row.slice_id == FAINT_ID}
    assert shown[WITH_REFERENCE] is Verdict.UNKNOWN
    _fold(fold, (NEW, at_us + 2 * SILENT_US + SHOWN_US + 20 * SECOND_US))
    assert {row.model_version_id for row in fold.current()} == {2, NEW}


@pytest.mark.slow
def test_a_straggler_brings_nothing_back_and_a_return_brings_the_alert_back() -> None:
    """One exchange is no return; two minutes of them are, and no evidence is lost, also where the monitor began again."""
    for is_resumed in (False, True):
        fold, _, at_us = _fired()
        _fold(fold, (NEW, at_us + 2 * SILENT_US))
        fold = _again(fold) if is_resumed else fold
        fold.take()
        late_us = at_us + 3 * SILENT_US
        _fold(fold, (WITH_REFERENCE, late_us), (NEW, late_us + SECOND_US))
        assert _verdict(fold, WITH_REFERENCE) == (Verdict.UNKNOWN, "replaced")
        assert not _episodes(fold.take())
        late_us += HOUR_US
        _fold(fold, *((one, late_us + n * 30 * SECOND_US) for n in range(6) for one in (WITH_REFERENCE, NEW)))
        assert _verdict(fold, WITH_REFERENCE)[0] is Verdict.FIRING
        assert _episodes(fold.take()) == [(FAINT_ID, Episode.REOPEN, False)]


@pytest.mark.release
@pytest.mark.slow
def test_a_pause_that_a_version_has_come_back_from_ends_its_alert_no_more() -> None:
    """A canary that is sent a burst every ten minutes: its alert comes and goes once, not with each burst."""
    fold, _, at_us = _fired()
    fold.take()
    for n in range(12):
        begin_us = at_us + n * 600 * SECOND_US
        for step in range(1, 60):
            turn = WITH_REFERENCE if step > 45 else NEW
            _fold(fold, (NEW, begin_us + step * 10 * SECOND_US), (turn, begin_us + step * 10 * SECOND_US + 1))
    changes = [row for row in fold.take().transitions if row.slice_id == FAINT_ID]
    sent = [(row.episode, row.ended) for row in changes if row.episode is not Episode.NONE]
    assert sent == [
        (Episode.CLOSE, Ending.REPLACED),
        (Episode.REOPEN, None),
        (Episode.CLOSE, Ending.RECOVERED),
    ], "its bursts are healthy, so at last it recovers"


def test_a_slow_version_is_not_replaced_between_two_of_its_exchanges() -> None:
    """Ten usual gaps: with an exchange every minute a silence of nine minutes says nothing, one of eleven does."""
    fold = _begin()
    at_us = batches(1)[0].stored_us
    _fold(fold, *((WITH_REFERENCE, at_us + n * 60 * SECOND_US) for n in range(30)))
    last_us = at_us + 29 * 60 * SECOND_US
    _fold(fold, *((NEW, last_us + n * 60 * SECOND_US) for n in range(1, 10)))
    assert _verdict(fold, WITH_REFERENCE)[1] != "replaced"
    _fold(fold, *((NEW, last_us + n * 60 * SECOND_US) for n in range(10, 12)))
    assert _verdict(fold, WITH_REFERENCE)[1] == "replaced"


@pytest.mark.slow
def test_a_night_without_traffic_makes_no_version_slow() -> None:
    """What nobody sent to any version counts as two minutes: a release in the morning replaces at once."""
    fold, _, at_us = _fired()
    for rows in _moved(batches(30), fold.position.fold_seq, at_us + 8 * HOUR_US):
        fold.batch(rows)
    morning_us = at_us + 8 * HOUR_US + 200 * SECOND_US
    _fold(fold, (NEW, morning_us), (NEW, morning_us + SILENT_US), (NEW, morning_us + 2 * SILENT_US))
    assert _verdict(fold, WITH_REFERENCE) == (Verdict.UNKNOWN, "replaced")


@pytest.mark.slow
def test_a_version_without_a_reference_replaces_too() -> None:
    """Who rolls back to a version that is compared with nothing has stopped the damage all the same."""
    fold, seq, at_us = _fired()
    for step in (1, 2, 3):
        fold.batch(_tally(seq + step, at_us + step * SILENT_US, unreferenced=(WITHOUT_REFERENCE,)))
    assert _verdict(fold, WITH_REFERENCE) == (Verdict.UNKNOWN, "replaced")
    (story,) = [row.alert for row in fold.take().transitions if row.episode is Episode.CLOSE]
    assert story.change.serving == ("2",)


@pytest.mark.slow
def test_what_a_replaced_version_still_shows_wakes_nobody() -> None:
    """The alarm of the last sessions of a version that serves no more is stored, not sent; it is sent if the version returns."""
    fold, healthy = _begin(), batches(100, faint_flips=0.0)
    for rows in healthy:
        fold.batch(rows)
    at_us = healthy[-1].stored_us
    _fold(fold, (NEW, at_us + 2 * SILENT_US))
    assert _verdict(fold, WITH_REFERENCE) == (Verdict.UNKNOWN, "replaced")
    stream = [
        msgspec.structs.replace(
            rows,
            stored_us=at_us + 2 * SILENT_US,
            comparisons=tuple(msgspec.structs.replace(row, captured_us=at_us) for row in rows.comparisons),
        )
        for rows in _moved(batches(60, faint_flips=0.5, tally_every=100), fold.position.fold_seq, at_us)
    ]
    for rows in stream:
        fold.batch(rows)
    assert _verdict(fold, WITH_REFERENCE) == (Verdict.UNKNOWN, "replaced")
    outcome = fold.take()
    assert _episodes(outcome)[:2] == [(FAINT_ID, Episode.OPEN, True), (FAINT_ID, Episode.CLOSE, True)]
    assert {quiet for *_, quiet in _episodes(outcome)} == {True}
    late_us = at_us + 20 * SILENT_US
    _fold(fold, *((one, late_us + n * 30 * SECOND_US) for n in range(6) for one in (WITH_REFERENCE, NEW)))
    assert _episodes(fold.take()) == [(FAINT_ID, Episode.REOPEN, False)]


@pytest.mark.slow
@pytest.mark.release
def test_a_version_that_comes_back_is_watched_with_what_it_had() -> None:
    """A roll-back: its alert is open again, and ends by evidence alone."""
    fold, _, at_us = _fired()
    _fold(fold, (NEW, at_us + 5 * HOUR_US))
    fold.take()
    for rows in _moved(batches(300), fold.position.fold_seq, at_us + 6 * HOUR_US):
        fold.batch(rows)
    assert _episodes(fold.take()) == [(FAINT_ID, Episode.REOPEN, False)]
    for rows in _moved(batches(1500, faint_flips=0.0), fold.position.fold_seq, at_us + 8 * HOUR_US):
        fold.batch(rows)
    (closed,) = [row for row in fold.take().transitions if row.episode is Episode.CLOSE]
    assert (closed.slice_id, closed.to_verdict, closed.ended) == (FAINT_ID, Verdict.OK, Ending.RECOVERED)


@pytest.mark.slow
def test_a_person_closes_an_alert_and_the_detectors_start_afresh() -> None:
    """It ends with who and why, is `unknown` until enough was compared, and a drift that goes on alerts again."""
    fold, seq, at_us = _fired()
    evidence = [row for row in fold.take().detectors if row.slice_id == FAINT_ID]
    close = AlertClose(
        model_version_id=WITH_REFERENCE, slice_id=FAINT_ID, made_by="ada", reason="goes to FP32 since 12:20"
    )
    fold.batch(BatchRows(fold_seq=seq + 1, stored_us=at_us, closes=(close,)))
    outcome = fold.take()
    (closed,) = [row for row in outcome.transitions if row.episode is Episode.CLOSE]
    assert (closed.ended, closed.reason) == (Ending.CLOSED, "closed by ada: goes to FP32 since 12:20")
    assert evidence
    assert not any(row.evidence for row in outcome.detectors if row.slice_id == FAINT_ID)
    fold = _again(fold)
    _fold(fold, (NEW, at_us + SECOND_US))
    assert _verdict(fold, WITH_REFERENCE) == (Verdict.UNKNOWN, "closed by ada")
    for rows in _moved(batches(5, faint_flips=0.0), fold.position.fold_seq, at_us + 30 * SECOND_US):
        fold.batch(rows)
    assert _verdict(fold, WITH_REFERENCE)[1] == "closed by ada", "too little was compared since"
    for rows in _moved(batches(30, faint_flips=0.0), fold.position.fold_seq, at_us + 120 * SECOND_US):
        fold.batch(rows)
    assert _verdict(fold, WITH_REFERENCE)[0] is Verdict.OK
    for rows in _moved(batches(300, faint_flips=0.3), fold.position.fold_seq, at_us + HOUR_US):
        fold.batch(rows)
    assert Episode.OPEN in {episode for _, episode, _ in _episodes(fold.take())}
    nothing = msgspec.structs.replace(close, slice_id=CLEAR_ID)
    fold.batch(BatchRows(fold_seq=fold.position.fold_seq + 1, stored_us=at_us, closes=(nothing,)))
    assert not fold.take().transitions, "a slice that does not alert stays as it is"


@pytest.mark.slow
def test_a_person_closes_the_alert_of_a_replaced_version_for_good() -> None:
    """It does not come back with the version, and nothing is sent again."""
    fold, _, at_us = _fired()
    _fold(fold, (NEW, at_us + 2 * SILENT_US))
    fold.take()
    close = AlertClose(model_version_id=WITH_REFERENCE, slice_id=FAINT_ID, made_by="ada", reason="known")
    fold.batch(BatchRows(fold_seq=fold.position.fold_seq + 1, stored_us=at_us, closes=(close,)))
    outcome = fold.take()
    assert [(row.ended, row.quiet) for row in outcome.transitions if row.episode is Episode.CLOSE] == [
        (Ending.CLOSED, True)
    ]
    late_us = at_us + 3 * SILENT_US
    _fold(fold, *((one, late_us + n * 30 * SECOND_US) for n in range(6) for one in (WITH_REFERENCE, NEW)))
    assert _verdict(fold, WITH_REFERENCE) == (Verdict.UNKNOWN, "closed by ada")
    assert not _episodes(fold.take())


def _moved(stream: list[BatchRows], after_seq: int, to_us: int) -> list[BatchRows]:
    """Return batches of version 1 that follow, from a time on."""
    shift_us = to_us - BEGIN_US
    return [
        msgspec.structs.replace(
            rows,
            fold_seq=after_seq + rows.fold_seq,
            stored_us=rows.stored_us + shift_us,
            comparisons=tuple(
                msgspec.structs.replace(row, captured_us=row.captured_us + shift_us)
                for row in rows.comparisons
            ),
            tallies=tuple(
                msgspec.structs.replace(row, at_us=row.at_us + shift_us, sequence=row.sequence + 10_000)
                for row in rows.tallies
            ),
        )
        for rows in stream
    ]


@pytest.mark.slow
def test_silence_of_everything_ends_no_alert() -> None:
    """Where nothing of the model is compared at all, the shadow may be down: the alert lasts."""
    fold, seq, at_us = _fired()
    fold.batch(_tally(seq + 1, at_us + 3 * HOUR_US))
    assert _verdict(fold, WITH_REFERENCE)[0] is Verdict.FIRING


@pytest.mark.slow
def test_an_alert_on_what_is_seen_no_more_ends_after_thirty_days() -> None:
    """A slice without traffic is retired: its alert ends unknown, its detectors free their allowance.

    A version without a reference stays `unknown` for as long as its exchanges come, and goes in the same way then.
    """
    fold, seq, at_us = _fired()
    fold.take()
    for day in range(1, 32):
        rows = _tally(seq + day, at_us + day * 24 * HOUR_US, unreferenced=(WITHOUT_REFERENCE,))
        fold.batch(msgspec.structs.replace(rows, captured_us=0))
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


@pytest.mark.slow
def test_resuming_between_rollout_and_end_changes_nothing() -> None:
    """A fold resumed from its rows before the alert ends tells the same end."""
    fold, seq, at_us = _fired()
    rest = [
        _compared(seq + 1, at_us + SECOND_US, version=NEW),
        _tally(seq + 2, at_us + HOUR_US),
        _compared(seq + 3, at_us + 2 * HOUR_US, version=NEW),
        _tally(seq + 4, at_us + 2 * HOUR_US),
    ]
    stored = fold.take()
    for rows in rest:
        fold.batch(rows)
    whole = fold.take()
    resumed = _begin(
        Snapshot(
            position=stored.position,
            detectors=stored.detectors,
            verdicts=stored.verdicts,
            serving=stored.serving,
        )
    )
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


@pytest.mark.slow
def test_a_version_that_another_replaced_gives_its_allowance_back_until_it_is_compared_again() -> None:
    """So each detector of the new version has as much as if it were alone; nothing is given for the time between."""
    fold, seq, at_us = _fired()
    alone = fold.position.n_detectors
    fold.batch(_compared(seq + 1, at_us + SECOND_US, version=NEW))
    both = fold.position.n_detectors
    assert both > alone
    late_us = at_us + HOUR_US
    fold.batch(_compared(seq + 2, late_us, version=NEW))
    fold.batch(_tally(seq + 3, late_us))
    assert fold.position.n_detectors == both - alone
    fold = _again(fold)
    for step in range(3):
        assert fold.position.n_detectors == both - alone
        _fold(fold, (WITH_REFERENCE, late_us + (60 * step + 1) * SECOND_US))
    assert fold.position.n_detectors == both
    assert WITH_REFERENCE in {row.model_version_id for row in fold.take().detectors}


@pytest.mark.slow
def test_a_canary_takes_nothing_from_the_version_that_goes_on() -> None:
    """While both have exchanges each has evidence of its own; what the canary had goes back when it has ended."""
    fold, stream = _begin(), batches(120, faint_flips=0.02)
    for number, rows in enumerate(stream):
        version = NEW if 60 <= number < 80 and number % 4 == 0 else WITH_REFERENCE
        of = tuple(msgspec.structs.replace(row, model_version_id=version) for row in rows.comparisons)
        before = _evidence(fold)
        fold.batch(msgspec.structs.replace(rows, comparisons=of))
        if version == NEW:
            assert _evidence(fold).get(WITH_REFERENCE) == before[WITH_REFERENCE]
            assert number > 60 or _evidence(fold)[NEW] < 0.1 * before[WITH_REFERENCE]
    shown = _evidence(fold)
    assert shown[NEW] < 0.05 * shown[WITH_REFERENCE]


def _evidence(fold: Fold) -> dict[int, float]:
    """Return the evidence of the faint slice by version."""
    return {
        version: entry.watch.evidence()
        for (version, slice_id), entry in fold.state.slices.items()
        if slice_id == FAINT_ID
    }


@pytest.mark.slow
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
