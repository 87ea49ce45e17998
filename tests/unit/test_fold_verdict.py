"""What the fold says of a slice, and when it changes its mind."""

import random

import msgspec
import pytest

from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import Task
from quantdrift.facts.words import verdict as words
from quantdrift.monitor.fold.fold import Fold
from quantdrift.monitor.fold.loss import SILENT_US
from quantdrift.monitor.fold.rollup import HOUR_US
from quantdrift.storage.fold_rows import (
    BatchRows,
    ComparisonRow,
    Episode,
    ExpiryRow,
    ItemCount,
    Snapshot,
    TallyRow,
    TransitionRow,
)
from tests.support.monitor.alert_cases import page
from tests.support.monitor.fold_stream import (
    ALL_ID,
    BEGIN_US,
    CATALOG,
    CLEAR_ID,
    CONFIG,
    FAINT_ID,
    SECOND_US,
    WITHOUT_REFERENCE,
    batches,
)
from tests.support.monitor.folds import EMPTY, clean, fold_all, quiet, verdict_of

pytestmark = pytest.mark.unit


@pytest.mark.slow
def test_the_drifted_slice_fires_and_the_aggregate_does_not() -> None:
    """At 8 % flips against a budget of 1 % the slice pages; all traffic together stays inside its budget.

    Its weighted mean is 0.8 %: a false page there has probability below 1e-3 in this stream.
    """
    fold, outcome = fold_all(batches(300, faint_share=0.3))
    assert verdict_of(fold, FAINT_ID)[0] is Verdict.FIRING
    assert verdict_of(fold, ALL_ID)[0] is Verdict.OK
    assert verdict_of(fold, CLEAR_ID)[0] is Verdict.OK
    fired = [row for row in outcome.transitions if row.to_verdict is Verdict.FIRING]
    assert [(row.slice_id, row.metric) for row in fired] == [(FAINT_ID, Metric.FLIP)]
    story, evidence = fired[0].alert, fired[0].alert.evidence
    assert evidence.low is not None
    assert evidence.mean is not None
    assert evidence.high is not None
    assert evidence.low <= evidence.mean <= evidence.high
    assert 0.03 < evidence.mean < 0.2
    assert story.aggregate.verdict is Verdict.OK
    assert evidence.budget == 0.01
    assert BEGIN_US <= fired[0].onset_us <= fired[0].at_us
    (shown,) = [row for row in fold.verdicts() if row.slice_id == FAINT_ID]
    assert shown.evidence == evidence.total >= shown.threshold, "the worst first: not reset by the alarm"


def test_a_new_model_whose_first_exchanges_are_older_than_all_that_was_folded_is_not_ok() -> None:
    """All of 60 answers have changed, and none is evidence: the clock gave no allowance meanwhile. The next exchanges page."""
    other = 7
    catalog = msgspec.structs.replace(
        CATALOG,
        versions=CATALOG.versions
        | {other: msgspec.structs.replace(CATALOG.versions[1], id=other, model="other")},
        slices=CATALOG.slices
        | {other: msgspec.structs.replace(CATALOG.slices[ALL_ID], id=other, model="other")},
    )

    def changed(number: int, at_us: int) -> ComparisonRow:
        row = msgspec.structs.replace(clean(number, at_us), model_version_id=other, slice_ids=(other,))
        return msgspec.structs.replace(row, flip=1.0)

    fold = Fold(CONFIG, EMPTY)
    fold.learn(catalog)
    for rows in quiet(50, step_us=60 * SECOND_US):
        fold.batch(rows)
    newest_us = BEGIN_US + 50 * 60 * SECOND_US
    burst = tuple(
        changed(1000 + number, newest_us - 120 * SECOND_US + number * SECOND_US) for number in range(60)
    )
    fold.batch(BatchRows(fold_seq=101, stored_us=newest_us, comparisons=burst))
    assert verdict_of(fold, other) == (Verdict.UNKNOWN, words.WAITS)
    more = tuple(changed(2000 + number, newest_us + number * SECOND_US) for number in range(1, 60))
    fold.batch(BatchRows(fold_seq=102, stored_us=newest_us + 60 * SECOND_US, comparisons=more))
    assert verdict_of(fold, other)[0] is Verdict.FIRING


def test_a_version_without_reference_is_unknown_and_never_fires() -> None:
    """Whatever its comparisons say, it has no detectors; its verdict names what is missing."""
    fold, outcome = fold_all(batches(200, version=WITHOUT_REFERENCE, faint_flips=1.0))
    assert not outcome.transitions
    assert not outcome.detectors
    assert not outcome.rollups
    (row,) = fold.verdicts()
    assert (row.model_version_id, row.verdict) == (WITHOUT_REFERENCE, Verdict.UNKNOWN)
    assert row.reason.startswith("no reference")


def test_too_few_exchanges_are_unknown_with_the_number_that_is_missing() -> None:
    """Below min_groups a slice is never ok, and its reason counts down."""
    fold, _ = fold_all(quiet(20))
    assert verdict_of(fold, FAINT_ID) == (Verdict.UNKNOWN, "needs 30 more exchanges")
    fold, outcome = fold_all(quiet(50))
    assert verdict_of(fold, FAINT_ID)[0] is Verdict.OK
    assert [(row.from_verdict, row.to_verdict, row.episode) for row in outcome.transitions] == [
        (Verdict.UNKNOWN, Verdict.OK, Episode.NONE)
    ]


@pytest.mark.slow
def test_what_is_missing_is_counted_down_with_each_batch() -> None:
    """Of slices that are judged by the same case as before, too: the number is always that of their exchanges."""
    fold = Fold(CONFIG, EMPTY)
    fold.learn(CATALOG)
    told = set()
    for batch in batches(12):
        fold.batch(batch)
        for row in fold.current():
            if row.reason.startswith("needs "):
                n_missing = CONFIG.monitor.min_groups - row.n_groups
                assert row.reason == words.too_few(n_missing, has_people=False)
                told.add(n_missing)
    assert len(told) > 5


def test_undeclared_sessions_make_a_sound_slice_unknown_and_the_alert_of_a_drifted_one_a_ticket() -> None:
    """The drifted slice would page; its requests may count as more than they are, and both say what to declare."""
    found = msgspec.structs.replace(CATALOG, undeclared_sessions={(1, FAINT_ID): "header.x-user"})
    fold = Fold(CONFIG, EMPTY)
    fold.learn(found)
    transitions: list[TransitionRow] = []
    for batch in batches(300, faint_share=0.3):
        fold.batch(batch)
        transitions += fold.take().transitions
    assert verdict_of(fold, FAINT_ID)[0] is Verdict.WARNING
    (ticket,) = [row for row in transitions if row.episode is Episode.OPEN]
    assert ticket.to_verdict is Verdict.WARNING
    assert ticket.reason.endswith(
        "; a ticket and never a page, because requests that share header.x-user look like sessions and are over-counted:"
        ' set sampling.sticky_header = "x-user"'
    )
    assert ticket.event is not None
    assert "It is a ticket and never a page, because requests that share header.x-user look" in page(
        ticket.event
    )
    assert not any(row.to_verdict is Verdict.FIRING for row in transitions)
    assert verdict_of(fold, CLEAR_ID)[0] is Verdict.OK
    sound = Fold(CONFIG, EMPTY)
    sound.learn(found)
    for batch in quiet(60):
        sound.batch(batch)
    verdict, reason = verdict_of(sound, FAINT_ID)
    assert verdict is Verdict.UNKNOWN
    assert reason.startswith("looks like sessions: requests that share header.x-user are correlated")
    assert reason.endswith('set sampling.sticky_header = "x-user"')


@pytest.mark.slow
def test_sessions_that_are_declared_by_now_no_longer_hide_anything() -> None:
    """With `sampling.sticky_header` the same evidence pages."""
    sampling = msgspec.structs.replace(CONFIG.sampling, sticky_header="x-user")
    fold = Fold(msgspec.structs.replace(CONFIG, sampling=sampling), EMPTY)
    fold.learn(msgspec.structs.replace(CATALOG, undeclared_sessions={(1, FAINT_ID): "header.x-user"}))
    for batch in batches(300, faint_share=0.3):
        fold.batch(batch)
    assert verdict_of(fold, FAINT_ID)[0] is Verdict.FIRING


@pytest.mark.slow
def test_loss_makes_a_slice_unknown() -> None:
    """Above max_loss_ratio in its own header strata a slice is not ok, whatever was compared."""
    fold, _ = fold_all(quiet(200, lost=10))
    verdict, reason = verdict_of(fold, FAINT_ID)
    assert verdict is Verdict.UNKNOWN
    assert reason.startswith("loss")


@pytest.mark.slow
def test_samples_that_a_vanished_sidecar_had_make_a_slice_unknown() -> None:
    """It ended with its machine: nothing says what became of what it had, and the reason says so."""
    stream = quiet(200)
    fold, _ = fold_all(stream)
    at_us = stream[-1].stored_us
    for number, (boot, later_us, still) in enumerate((("c", 0, {"": 60}), ("d", SILENT_US + 1, {})), start=1):
        tally = TallyRow(
            source="pod",
            boot=boot * 32,
            stratum="faint",
            sequence=1,
            at_us=at_us + later_us,
            offered=100,
            taken=100,
            lost=0,
            open=still,
        )
        fold.batch(BatchRows(fold_seq=stream[-1].fold_seq + number, stored_us=tally.at_us, tallies=(tally,)))
    verdict, reason = verdict_of(fold, FAINT_ID)
    assert verdict is Verdict.UNKNOWN
    assert reason == (
        "loss: 60 of this model's samples of the last hour are not accounted for: a sidecar ended without sending its last"
        " counts, for example because its machine was lost; see `quantdrift status`"
    )


def test_silence_while_there_is_traffic_is_unknown() -> None:
    """Without a comparison for stale_after_s of event time, and with offered requests, a slice is stale."""
    stream = quiet(60)
    fold, _ = fold_all(stream)
    for number in range(61, 500):
        at_us = BEGIN_US + (number - 60) * 60 * SECOND_US
        tally = TallyRow(
            source="pod",
            boot="b" * 32,
            stratum="faint",
            sequence=number,
            at_us=at_us,
            offered=10 * number,
            taken=number,
            lost=0,
        )
        fold.batch(BatchRows(fold_seq=60 + number, stored_us=at_us, tallies=(tally,)))
    verdict, reason = verdict_of(fold, FAINT_ID)
    assert verdict is Verdict.UNKNOWN
    assert reason.startswith("stale")


@pytest.mark.slow
def test_loss_does_not_hide_a_firing_slice() -> None:
    """An alert lasts until its slice has shown to be inside the budget, even where samples are lost."""
    stream = batches(300)
    fold, _ = fold_all(stream)
    at_us = stream[-1].stored_us
    tally = TallyRow(
        source="pod",
        boot="c" * 32,
        stratum="faint",
        sequence=1,
        at_us=at_us,
        offered=1000,
        taken=1000,
        lost=1000,
    )
    fold.batch(BatchRows(fold_seq=301, stored_us=at_us, tallies=(tally,)))
    assert verdict_of(fold, FAINT_ID)[0] is Verdict.FIRING


@pytest.mark.slow
def test_a_slice_that_is_mended_resolves_and_watches_again() -> None:
    """After an alert some 700 clean exchanges resolve it, and new evidence starts from nothing."""
    stream = batches(300)
    fold, _ = fold_all(stream)
    at_us = stream[-1].stored_us
    for number in range(1, 1200):
        row = clean(number, at_us + number * SECOND_US)
        fold.batch(BatchRows(fold_seq=300 + number, stored_us=row.captured_us, comparisons=(row,)))
    (closed,) = [row for row in fold.take().transitions if row.episode is Episode.CLOSE]
    assert (closed.from_verdict, closed.to_verdict) == (Verdict.FIRING, Verdict.OK)
    assert verdict_of(fold, FAINT_ID)[0] is Verdict.OK
    assert next(row for row in fold.verdicts() if row.slice_id == FAINT_ID).evidence < 1e-3


@pytest.mark.slow
def test_a_tail_that_grows_while_the_mean_stays_pages_and_says_so() -> None:
    """One in fifty divergences is thirty times as large, the mean stays far inside its budget: the tail detector pages.

    After 12,000 exchanges as a baseline, seeded; at a threshold of 10 a false page here has probability below 1e-3.
    """
    rng = random.Random(7)
    template = batches(1)[0].comparisons[0]
    fold = Fold(CONFIG, EMPTY)
    fold.learn(CATALOG)
    outcome = fold.take()
    found: list[TransitionRow] = []
    for number in range(1, 141):
        rows = tuple(
            msgspec.structs.replace(
                template,
                exchange_id=f"{number * 100 + place:032x}",
                item=0,
                captured_us=BEGIN_US + (number * 100 + place) * SECOND_US,
                slice_ids=(FAINT_ID,),
                pi1=1.0,
                flip=0.0,
                divergence=rng.expovariate(1 / 0.001)
                * (30.0 if number > 120 and rng.random() < 0.02 else 1.0),
            )
            for place in range(100)
        )
        fold.batch(BatchRows(fold_seq=number, stored_us=rows[-1].captured_us, comparisons=rows))
        outcome = fold.take()
        found += outcome.transitions
        if number == 120:
            assert verdict_of(fold, FAINT_ID) == (
                Verdict.OK,
                "no evidence against its budget or its baseline",
            ) or ("baseline needs some" in verdict_of(fold, FAINT_ID)[1])
    (page,) = [row for row in found if row.to_verdict is Verdict.FIRING]
    assert (page.slice_id, page.metric, page.alert.evidence.detector) == (FAINT_ID, Metric.DIVERGENCE, "tail")
    assert page.onset_us > BEGIN_US + 11_000 * SECOND_US


@pytest.mark.slow
def test_expired_samples_make_their_models_slices_unknown_at_once() -> None:
    """Nothing else may come of that model that would have them judged; another model's expiries change nothing."""
    stream = quiet(60)
    for model, expected in (("other", Verdict.OK), ("digits", Verdict.UNKNOWN)):
        at_us = stream[-1].stored_us
        expiry = ExpiryRow(stratum="faint", model=model, n=40, at_us=at_us)
        stream.append(BatchRows(fold_seq=len(stream) + 1, stored_us=at_us, expiries=(expiry,)))
        fold, _ = fold_all(stream)
        verdict, reason = verdict_of(fold, FAINT_ID)
        assert verdict is expected
    assert reason.startswith("loss: 67 % of this model's samples")


def _unmeasured(stream: list[BatchRows], every: int = 1) -> list[BatchRows]:
    """Return the stream in which nothing was measured of any but each `every`th exchange."""
    return [
        rows
        if not rows.comparisons or rows.fold_seq // 2 % every == every - 1 > 0
        else msgspec.structs.replace(
            rows,
            comparisons=tuple(
                msgspec.structs.replace(row, flip=None, divergence=None, js=None) for row in rows.comparisons
            ),
        )
        for rows in stream
    ]


def _told(fold: Fold) -> tuple[Verdict, str]:
    (row,) = [row for row in fold.verdicts() if row.slice_id == FAINT_ID]
    return row.verdict, row.reason


@pytest.mark.slow
def test_what_nothing_was_measured_of_is_unknown_and_not_ok() -> None:
    """However many exchanges came; below thirty of them the slice needs more, as any other."""
    fold, outcome = fold_all(_unmeasured(quiet(20)))
    assert _told(fold) == (Verdict.UNKNOWN, "needs 50 more exchanges")
    fold, outcome = fold_all(_unmeasured(quiet(400)))
    verdict, reason = _told(fold)
    assert verdict is Verdict.UNKNOWN
    assert reason.startswith("not measured: 400 of 400 answers could not be measured")
    assert sum(row.n_unmeasured for row in outcome.rollups) == 400
    assert not outcome.transitions


@pytest.mark.slow
@pytest.mark.parametrize(("every", "expected"), [(3, Verdict.UNKNOWN), (2, Verdict.OK)])
def test_half_of_the_answers_must_be_measured(every: int, expected: Verdict) -> None:
    """One in three is not enough to call a slice ok, one in two is."""
    fold, _ = fold_all(_unmeasured(quiet(400), every))
    verdict, reason = _told(fold)
    assert (verdict, "not measured" in reason) == (expected, expected is Verdict.UNKNOWN)


@pytest.mark.slow
def test_an_answer_of_text_needs_a_divergence_to_be_measured() -> None:
    """Where only the form of sampled answers could be checked, the slice is not called ok; nor does that hide broken ones."""
    text = msgspec.structs.replace(
        CONFIG, models=(msgspec.structs.replace(CONFIG.models[0], task=Task.GENERATION),)
    )
    checked = [
        msgspec.structs.replace(
            rows,
            comparisons=tuple(
                msgspec.structs.replace(row, divergence=None, js=None) for row in rows.comparisons
            ),
        )
        for rows in quiet(400)
    ]
    fold, _ = fold_all(checked, config=text)
    assert _told(fold)[1].startswith(
        "not measured: 400 of 400 answers are texts sampled with penalties, biases or a grammar, without log-probabilities"
    )
    broken = [
        msgspec.structs.replace(
            rows,
            comparisons=tuple(
                msgspec.structs.replace(row, flip=1.0, signals={"broken-answers": 1.0})
                for row in rows.comparisons
            ),
        )
        for rows in checked
    ]
    assert _told(fold_all(broken, config=text)[0])[0] is Verdict.FIRING


@pytest.mark.slow
def test_a_slice_is_measured_again_within_two_hours() -> None:
    """What could not be measured before does not count for longer."""
    before = _unmeasured(quiet(400))
    after = [
        msgspec.structs.replace(
            rows,
            stored_us=rows.stored_us + 2 * HOUR_US,
            comparisons=tuple(
                msgspec.structs.replace(row, captured_us=row.captured_us + 2 * HOUR_US)
                for row in rows.comparisons
            ),
            tallies=(),
        )
        for rows in quiet(100, first=401)
    ]
    fold, _ = fold_all(before + after)
    assert _told(fold)[0] is Verdict.OK


@pytest.mark.slow
def test_a_fold_that_stopped_goes_on_with_what_was_not_measured() -> None:
    """What it read of the roll-ups gives the same verdict, in the same words, as if it had never stopped."""
    stream = _unmeasured(quiet(100))
    whole, _ = fold_all(stream)
    first, outcome = fold_all(stream[:120])
    counts = tuple(
        ItemCount(
            row.model_version_id, row.slice_id, row.hour_us, row.n_items, row.n_unmeasured, bool(row.people)
        )
        for row in outcome.rollups
    )
    stored = Snapshot(position=outcome.position, verdicts=outcome.verdicts, recent_items=counts)
    second, _ = fold_all(stream[120:], stored)
    assert _told(second) == _told(whole)
    assert _told(first) != _told(whole)
