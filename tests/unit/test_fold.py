"""The fold as a pure function of stored batches."""

import random

import msgspec
import pytest

from quantdrift.core.config.schema import Budget, Model
from quantdrift.core.records import Metric, Verdict
from quantdrift.monitor.fold import Fold
from storage.fold_rows import (
    BaselineRow,
    BatchRows,
    DetectorRow,
    Episode,
    Outcome,
    Position,
    Snapshot,
    Source,
    TallyRow,
    TransitionRow,
    VerdictRow,
)
from tests.fold_stream import (
    ALL_ID,
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

EMPTY = Snapshot(position=Position())
DAY_US = 86_400 * SECOND_US


def fold_all(stream: list[BatchRows], snapshot: Snapshot = EMPTY) -> tuple[Fold, Outcome]:
    """Fold everything in one go."""
    fold = Fold(CONFIG, snapshot)
    fold.learn(CATALOG)
    for rows in stream:
        fold.batch(rows)
    return fold, fold.take()


def quiet(n: int, *, first: int = 1, lost: int = 0, step_us: int = SECOND_US) -> list[BatchRows]:
    """Return `n` batches of exchanges of `faint` that never differ, each followed by a tally."""
    found = []
    for number in range(n):
        at_us = BEGIN_US + (first + number) * step_us
        row = batches(1)[0].comparisons[0]
        row = msgspec.structs.replace(
            row,
            exchange_id=f"{first + number:032x}",
            captured_us=at_us,
            slice_ids=(FAINT_ID,),
            group_key="",
            pi1=1.0,
            pi2=1.0,
            u1=0.0,
            u2=0.0,
            candidate_margin=0.5,
            flip=0.0,
            kl=0.0,
        )
        tally = TallyRow(
            source="pod",
            boot="b" * 32,
            stratum="faint",
            sequence=first + number,
            at_us=at_us,
            offered=10 * (first + number),
            taken=first + number,
            lost=lost * (first + number) // 100,
        )
        seq = 2 * (first + number) - 1
        found.append(BatchRows(fold_seq=seq, stored_us=at_us, comparisons=(row,)))
        found.append(BatchRows(fold_seq=seq + 1, stored_us=at_us, tallies=(tally,)))
    return found


def verdict_of(fold: Fold, slice_id: int) -> tuple[Verdict, str]:
    """Return verdict and reason of a slice."""
    row = next(row for row in fold.verdicts() if row.slice_id == slice_id and row.n_groups)
    return row.verdict, row.reason


def test_the_same_batches_give_the_same_bits() -> None:
    """Two runs over the same batches give identical states, verdicts, transitions and roll-ups."""
    assert fold_all(batches(80))[1] == fold_all(batches(80))[1]


def test_cutting_the_batches_into_folds_changes_nothing() -> None:
    """Resumed from its stored rows after every few batches, the fold ends in the same bits, with the same story."""
    stream = batches(300)
    _, whole = fold_all(stream)
    detectors: dict[tuple[int, str, str], DetectorRow] = {}
    verdicts: dict[tuple[int, int], VerdictRow] = {}
    tallies: list[TallyRow] = []
    transitions: list[TransitionRow] = []
    position = Position()
    for begin in range(0, len(stream), 7):
        snapshot = Snapshot(
            position=position,
            detectors=tuple(detectors.values()),
            verdicts=tuple(verdicts.values()),
            tallies=tuple(tallies),
        )
        part = stream[begin : begin + 7]
        _, outcome = fold_all(part, snapshot)
        tallies += [row for rows in part for row in rows.tallies]
        detectors |= {(row.slice_id, row.metric, row.kind): row for row in outcome.detectors}
        verdicts |= {(row.model_version_id, row.slice_id): row for row in outcome.verdicts}
        transitions += outcome.transitions
        position = outcome.position
    assert position == whole.position
    assert {(row.slice_id, row.metric, row.kind): row for row in whole.detectors} == detectors
    assert [row for row in whole.verdicts if row.n_groups] == [
        verdicts[row.model_version_id, row.slice_id] for row in whole.verdicts if row.n_groups
    ]
    assert list(whole.transitions) == transitions
    assert {row.to_verdict for row in transitions} >= {Verdict.FIRING}


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
    story = fired[0].details
    assert story["low"] <= story["mean"] <= story["high"]
    assert 0.03 < story["mean"] < 0.2
    assert story["aggregate_verdict"] == "ok"
    assert story["budget"] == 0.01
    assert story["advice"]
    assert BEGIN_US <= fired[0].onset_us <= fired[0].at_us
    (shown,) = [row for row in fold.verdicts() if row.slice_id == FAINT_ID]
    assert shown.evidence == story["evidence"] >= shown.threshold, "the worst first: not reset by the alarm"


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


def test_loss_makes_a_slice_unknown() -> None:
    """Above max_loss_ratio in its own header strata a slice is not ok, whatever was compared."""
    fold, _ = fold_all(quiet(200, lost=10))
    verdict, reason = verdict_of(fold, FAINT_ID)
    assert verdict is Verdict.UNKNOWN
    assert reason.startswith("loss")


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


def test_a_slice_that_is_mended_resolves_and_watches_again() -> None:
    """After an alert some 700 clean exchanges resolve it, and new evidence starts from nothing."""
    stream = batches(300)
    fold, _ = fold_all(stream)
    at_us = stream[-1].stored_us
    for number in range(1, 1200):
        row = msgspec.structs.replace(
            stream[0].comparisons[0],
            exchange_id=f"{number:032x}",
            captured_us=at_us + number * SECOND_US,
            slice_ids=(FAINT_ID,),
            group_key="",
            pi1=1.0,
            pi2=1.0,
            u1=0.0,
            u2=0.0,
            candidate_margin=0.5,
            flip=0.0,
            kl=0.0,
        )
        fold.batch(BatchRows(fold_seq=300 + number, stored_us=row.captured_us, comparisons=(row,)))
    (closed,) = [row for row in fold.take().transitions if row.episode is Episode.CLOSE]
    assert (closed.from_verdict, closed.to_verdict) == (Verdict.FIRING, Verdict.OK)
    assert verdict_of(fold, FAINT_ID)[0] is Verdict.OK
    assert next(row for row in fold.verdicts() if row.slice_id == FAINT_ID).evidence < 1e-3


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
    stream = [
        msgspec.structs.replace(
            rows,
            comparisons=tuple(msgspec.structs.replace(row, kl=float("inf")) for row in rows.comparisons),
        )
        for rows in batches(40)
    ]
    fold, outcome = fold_all(stream)
    assert verdict_of(fold, CLEAR_ID)[0] is Verdict.FIRING
    assert sum(row.n_kl_infinite for row in outcome.rollups) > 0
    text = msgspec.json.encode([row.details for row in outcome.transitions]).decode()
    assert "inf" not in text.replace("infinite", "")
    assert "null" not in text
    kl = next(row for row in outcome.verdicts if row.slice_id == CLEAR_ID).estimate["kl"]
    assert kl["mean"] == pytest.approx(2.0)


def test_a_clock_that_runs_ahead_does_not_move_the_folds_time() -> None:
    """Capture times after the storing of their batch count as the time of storing."""
    row = msgspec.structs.replace(batches(1)[0].comparisons[0], captured_us=BEGIN_US + 400 * DAY_US)
    fold, _ = fold_all([BatchRows(fold_seq=1, stored_us=BEGIN_US, comparisons=(row,))])
    assert fold.position.event_us == BEGIN_US


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


def test_a_changed_budget_starts_the_evidence_anew() -> None:
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
    for kept in (("kl", "budget"), ("flip", "change"), ("kl", "tail")):
        assert found[ALL_ID, *kept].n_groups == before[ALL_ID, *kept].n_groups + 16
    assert next(row for row in fold.verdicts() if row.slice_id == ALL_ID).n_groups > 100


def test_an_imported_budget_that_a_lowered_cap_leaves_no_room_for_does_not_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The configuration's holds, the fold goes on, and the log says it once and not for every exchange."""
    imported = BaselineRow(
        model_version_id=WITH_REFERENCE,
        slice_id=ALL_ID,
        metric=Metric.KL.value,
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
        budget = Budget(kl=0.02, kl_cap=cap)
        fold = Fold(
            msgspec.structs.replace(CONFIG, models=(Model(name="digits", budget=budget),)),
            Snapshot(position=Position(), imported=(imported,)),
        )
        fold.learn(CATALOG)
        for rows in batches(5):
            fold.batch(rows)
        found = {(row.slice_id, row.metric, row.kind): row.budget for row in fold.take().detectors}
        budgets.append(found[ALL_ID, "kl", "budget"])
    assert budgets == [0.75, 0.02]
    (said,) = caplog.messages
    assert said.startswith(
        "slice 1: the imported budget of kl, 1.5, is not below its cap of 1 and does not hold"
    )


def test_batches_come_consecutively() -> None:
    """A batch that does not follow is refused."""
    fold, _ = fold_all(batches(2))
    with pytest.raises(ValueError, match="does not follow"):
        fold.batch(batches(1)[0])


def test_rollups_add_up_to_what_was_offered() -> None:
    """Sums of 1 / pi estimate the exchanges offered, and the histogram holds every group once."""
    stream = batches(50)
    _, outcome = fold_all(stream)
    rows = [row for row in outcome.rollups if row.slice_id == ALL_ID]
    pi = {row.exchange_id: row.pi for rows_ in stream for row in rows_.comparisons}
    assert sum(row.weight for row in rows) == pytest.approx(sum(1 / value for value in pi.values()))
    assert sum(row.n_groups for row in rows) == len(pi)
    for row in rows:
        assert sum(row.kl_bins) == pytest.approx(row.weight)


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
                kl=rng.expovariate(1 / 0.001) * (30.0 if number > 120 and rng.random() < 0.02 else 1.0),
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
    assert (page.slice_id, page.metric, page.details["detector"]) == (FAINT_ID, Metric.KL, "tail")
    assert page.onset_us > BEGIN_US + 11_000 * SECOND_US
