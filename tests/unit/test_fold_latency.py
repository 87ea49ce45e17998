"""What the fold says of a slow candidate: a ticket that names the latency, and never a page or a hidden one."""

import random
from collections.abc import Callable

import msgspec
import pytest

from quantdrift.core.config.schema import Budget, Config, Model
from quantdrift.core.records import Metric, Suspect, Verdict
from quantdrift.drift.detectors.protocol import GROWTH
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.facts.words.alert import text_of
from quantdrift.monitor.fold.fold import Fold
from quantdrift.monitor.fold.groups import LATENCY_GROWTH
from quantdrift.storage.fold_rows import BatchRows, ComparisonRow, Episode, Source, TransitionRow
from tests.support.monitor.alert_cases import page
from tests.support.monitor.fold_stream import ALL_ID, CATALOG, CLEAR_ID, CONFIG, FAINT_ID, batches, spread
from tests.support.monitor.folds import EMPTY, fold_all, verdict_of

pytestmark = [pytest.mark.unit, pytest.mark.slow]

LIMIT_S = 0.25
TIMED = msgspec.structs.replace(CONFIG, models=(Model(name="digits", budget=Budget(latency_p99_s=LIMIT_S)),))


def timed(stream: list[BatchRows], slow: Callable[[int, ComparisonRow], float]) -> list[BatchRows]:
    """Return the stream with a latency in each comparison: above the budget with the probability that `slow` returns.

    It is called with the number of the batch; the items of an exchange share one latency.
    """
    rng = random.Random(5)
    found = []
    for number, rows in enumerate(stream):
        took: dict[str, float] = {}
        for row in rows.comparisons:
            is_slow = rng.random() < slow(number, row)
            took.setdefault(row.exchange_id, 0.4 if is_slow else 0.1)
        found.append(
            msgspec.structs.replace(
                rows,
                comparisons=tuple(
                    msgspec.structs.replace(row, latency_s=took[row.exchange_id]) for row in rows.comparisons
                ),
            )
        )
    return found


def alarms(config: Config, stream: list[BatchRows]) -> tuple[Fold, list[TransitionRow]]:
    """Fold a stream, and return the fold with the alerts that opened, escalated or closed."""
    fold, outcome = fold_all(stream, config=config)
    return fold, [row for row in outcome.transitions if row.episode is not Episode.NONE]


def test_a_slow_slice_opens_a_ticket_that_sends_nobody_to_the_model() -> None:
    """One exchange in ten of a slice is slow from the middle on; no answer changes, and all traffic is fast enough.

    The slice has 7 % of the traffic, so that 0.7 % of all exchanges are slow.
    """
    stream = timed(
        batches(1200, faint_share=0.23, faint_flips=0.0),
        lambda number, row: 0.1 if number > 700 and FAINT_ID in row.slice_ids else 0.0,
    )
    fold, found = alarms(TIMED, stream)
    assert [(row.slice_id, row.metric, row.to_verdict) for row in found] == [
        (FAINT_ID, Metric.LATENCY, Verdict.WARNING)
    ]
    event = found[0].alert
    assert (event.evidence.latency_budget_s, event.evidence.suspect) == (LIMIT_S, Suspect.TRAFFIC)
    assert event.evidence.budget == 0.01
    assert event.evidence.after is not None
    assert 0.05 < event.evidence.after < 0.3
    said, reason = verdict_of(fold, FAINT_ID)
    assert (said, reason) == (Verdict.WARNING, event.change.reason)
    assert reason.startswith(
        "the latency seems to be above the budget; its answers have not drifted, and all"
    )
    lines = page(event).splitlines()
    assert lines[0].startswith("digits 1: ")
    assert lines[0].endswith("% of exchanges in scanner=faint took longer than 0.25 s (budget: 1 %).")
    assert "Its answers have not drifted, and all traffic together is fast enough." in lines
    assert "1. Look at the requests of this slice, such as their size." in lines
    assert not any("unquantised" in line for line in lines)


def test_where_all_traffic_is_slow_the_engine_is_suspected() -> None:
    """Half of all exchanges are slow from some moment on, and no answer changes: three tickets, no page."""
    stream = timed(batches(1200, faint_flips=0.0), lambda number, _: 0.5 if number > 900 else 0.0)
    _, found = alarms(TIMED, stream)
    assert {(row.slice_id, row.to_verdict) for row in found} == {
        (slice_id, Verdict.WARNING) for slice_id in (ALL_ID, FAINT_ID, CLEAR_ID)
    }
    assert {row.alert.evidence.suspect for row in found} == {Suspect.ENGINE}


@pytest.mark.release
def test_answers_that_have_drifted_too_page_although_a_ticket_is_open() -> None:
    """The slow slice has its ticket; when its answers change, the page comes, and names the flips."""
    stream = timed(batches(1200, faint_flips=0.0), lambda number, _: 0.3 if number > 300 else 0.0)
    stream = [
        rows
        if number <= 600
        else msgspec.structs.replace(
            rows,
            comparisons=tuple(
                msgspec.structs.replace(row, flip=1.0)
                if FAINT_ID in row.slice_ids and place % 4 == 0
                else row
                for place, row in enumerate(rows.comparisons)
            ),
        )
        for number, rows in enumerate(stream)
    ]
    _, found = alarms(TIMED, stream)
    of_slice = [row for row in found if row.slice_id == FAINT_ID]
    assert [(row.metric, row.to_verdict) for row in of_slice] == [
        (Metric.LATENCY, Verdict.WARNING),
        (Metric.FLIP, Verdict.FIRING),
    ]


def test_a_slow_candidate_whose_answers_drift_as_well_is_no_question_of_load() -> None:
    """Answers drift too little for an alert yet when it becomes slow: the ticket says so, and asks for the deployment."""
    stream = timed(
        batches(100, faint_flips=0.03),
        lambda number, row: 0.6 if number > 60 and FAINT_ID in row.slice_ids else 0.0,
    )
    _, found = alarms(TIMED, stream)
    event = next(row.alert for row in found if row.slice_id == FAINT_ID)
    assert (event.evidence.metric, event.evidence.suspect) == (Metric.LATENCY, Suspect.MODEL)
    assert str(text_of(event).do_now[0]) == "Look at what was deployed, the model and its engine."


def test_without_a_budget_a_latency_changes_no_bit() -> None:
    """The same detectors, verdicts, transitions and sums as if nothing had been measured."""
    stream = batches(200)
    _, plain = fold_all(stream)
    _, with_times = fold_all(timed(stream, lambda _number, _row: 0.5))
    assert msgspec.msgpack.encode(plain) == msgspec.msgpack.encode(with_times)


def test_a_latency_within_its_budget_changes_no_verdict() -> None:
    """One exchange in a thousand is slow; the mean of the signal is shown like that of every other."""
    fold, found = alarms(TIMED, timed(batches(400, faint_flips=0.0), lambda _number, _row: 0.001))
    assert found == []
    assert verdict_of(fold, ALL_ID)[0] is Verdict.OK
    (row,) = [row for row in fold.verdicts() if (row.model_version_id, row.slice_id) == (1, ALL_ID)]
    assert row.estimate["latency"]["budget"] == 0.01


def test_a_budget_that_is_taken_away_leaves_no_ticket_that_never_ends() -> None:
    """Nothing could show the recovery of a signal that is not measured: without it the answers decide."""
    stream = timed(batches(600, faint_flips=0.0), lambda number, _: 0.5 if number < 300 else 0.0)
    fold, outcome = fold_all(stream[:300], config=TIMED)
    assert verdict_of(fold, ALL_ID)[0] is Verdict.WARNING
    snapshot = msgspec.structs.replace(
        EMPTY,
        position=outcome.position,
        detectors=outcome.detectors,
        verdicts=outcome.verdicts,
    )
    again = Fold(CONFIG, snapshot)
    again.learn(CATALOG)
    for rows in stream[300:]:
        again.batch(rows)
    assert verdict_of(again, ALL_ID)[0] is Verdict.OK


GROWS = msgspec.structs.replace(CONFIG, models=(Model(name="digits", budget=Budget(latency_growth=2.0)),))
EDGE_S = 2**-3.25  # above the 0.1 s that an exchange takes


def growth_of(fold: Fold, slice_id: int, version: int = 1) -> FloatArray | None:
    """Return the state of the learned baseline of a slice's latency."""
    return fold.state.slices[version, slice_id].watch.states.get(LATENCY_GROWTH)


def test_a_slice_that_becomes_slower_than_in_its_first_week_opens_a_ticket() -> None:
    """Nobody gave a budget: the limit is twice what was learned of the slice, which is judged against its own, too."""
    stream = spread(
        timed(
            batches(420, faint_share=0.5, faint_flips=0.0),
            lambda number, row: 0.2 if number > 380 and FAINT_ID in row.slice_ids else 0.0,
        )
    )
    fold, found = alarms(GROWS, stream)
    state = growth_of(fold, FAINT_ID)
    assert state is not None
    assert GROWTH.content(state).learned_s == EDGE_S
    of_slice = [row for row in found if row.slice_id == FAINT_ID]
    assert [(row.metric, row.to_verdict) for row in of_slice] == [(Metric.LATENCY, Verdict.WARNING)]
    evidence = of_slice[0].alert.evidence
    assert (evidence.detector, evidence.latency_budget_s, evidence.budget) == ("growth", 2 * EDGE_S, 0.01)
    assert evidence.suspect is Suspect.TRAFFIC
    text = page(of_slice[0].alert)
    assert "took longer than 0.21 s (budget: 1 %)" in text
    assert "It means slower than before, not over a budget: more load makes answers slower, too." in text
    assert verdict_of(fold, FAINT_ID)[1].startswith("the latency seems to be above its learned baseline")


def test_the_first_week_has_no_ticket_however_slow_and_the_verdict_says_what_lacks() -> None:
    """A signal that learns gets nothing of the allowance; the answers are judged all the same."""
    stream = spread(timed(batches(150, faint_flips=0.0), lambda number, _: 0.5 if number > 100 else 0.0))
    fold, found = alarms(GROWS, stream)
    assert found == []
    state = growth_of(fold, ALL_ID)
    assert state is not None
    assert GROWTH.missing(state) > 0
    assert not GROWTH.live(state)
    (row,) = [one for one in fold.verdicts() if (one.model_version_id, one.slice_id) == (1, ALL_ID)]
    assert row.estimate["latency"]["growth_missing"] == GROWTH.missing(state)


def test_a_new_version_starts_against_the_baseline_of_the_one_before() -> None:
    """It is slower than that was, from its first exchange on: that is a ticket, and its own first week is not the measure."""
    before = spread(timed(batches(330, faint_flips=0.0), lambda _number, _row: 0.0))
    after = spread(timed(batches(400, faint_flips=0.0), lambda _number, _row: 0.1))[330:]
    later = [
        msgspec.structs.replace(
            rows,
            comparisons=tuple(msgspec.structs.replace(row, model_version_id=3) for row in rows.comparisons),
        )
        for rows in after
    ]
    fold = Fold(GROWS, EMPTY)
    versions = {
        **CATALOG.versions,
        3: msgspec.structs.replace(CATALOG.versions[1], id=3, candidate_version="3"),
    }
    fold.learn(msgspec.structs.replace(CATALOG, versions=versions))
    for rows in (*before, *later):
        fold.batch(rows)
    outcome = fold.take()
    (inherited,) = [
        row
        for row in outcome.learned
        if (row.model_version_id, row.slice_id, row.kind, row.source)
        == (3, ALL_ID, "growth", Source.INHERITED)
    ]
    assert inherited.from_version_id == 1
    assert inherited.content is not None
    assert inherited.content["learned_s"] == EDGE_S
    found = [row for row in outcome.transitions if row.episode is Episode.OPEN]
    assert {(row.model_version_id, row.metric, row.to_verdict) for row in found} == {
        (3, Metric.LATENCY, Verdict.WARNING)
    }


def test_another_growth_applies_at_once_and_none_removes_the_signal() -> None:
    """What was learned stays; an alert of a signal that is gone would never end."""
    stream = spread(timed(batches(420, faint_flips=0.0), lambda number, _: 0.5 if number > 380 else 0.0))
    fold, outcome = fold_all(stream, config=GROWS)
    assert verdict_of(fold, ALL_ID)[0] is Verdict.WARNING
    snapshot = msgspec.structs.replace(
        EMPTY, position=outcome.position, detectors=outcome.detectors, verdicts=outcome.verdicts
    )
    looser = Fold(
        msgspec.structs.replace(GROWS, models=(Model(name="digits", budget=Budget(latency_growth=4.0)),)),
        snapshot,
    )
    looser.learn(CATALOG)
    state = growth_of(looser, ALL_ID)
    assert state is not None
    assert GROWTH.limit_s(state) == pytest.approx(4 * EDGE_S)
    for rows in spread(timed(batches(520, faint_flips=0.0), lambda _number, _row: 0.5))[420:]:
        looser.batch(rows)
    assert verdict_of(looser, ALL_ID)[0] is Verdict.OK  # 0.4 s is no longer slow
    without = Fold(CONFIG, snapshot)
    without.learn(CATALOG)
    assert growth_of(without, ALL_ID) is None
    gone = [row for row in without.take().detectors if row.kind == "growth"]
    assert gone
    assert all(row.retired_us is not None for row in gone)
