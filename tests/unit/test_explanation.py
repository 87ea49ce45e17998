"""Which alerts stand beside each other, which explains which, and what is said of it."""

from typing import Any

import msgspec
import pytest

from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import Task
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, TAIL
from quantdrift.facts.events import AlertEvent
from quantdrift.facts.explanation import Explanation, explanation_of
from quantdrift.facts.words.alert import reason_of, text_of
from quantdrift.facts.words.details import details
from quantdrift.monitor.explain.explain import findings
from quantdrift.monitor.explain.related_alerts import AlertingSlices, explains, smallest
from quantdrift.monitor.explain.sample import (
    ComparedValue,
    WindowSample,
    level_of,
    measure_of,
    new_engines,
    new_sidecars,
    new_versions,
    versions_around,
)
from quantdrift.storage.alerts.evidence import Alerting, EvidenceItem
from quantdrift.storage.fold_rows import Catalog, Episode, ExplainedBy, TransitionRow
from tests.support.monitor.alert_cases import event_with
from tests.support.monitor.fold_stream import BEGIN_US, CATALOG, SECOND_US

pytestmark = pytest.mark.unit

TASK = Task.CLASSIFICATION

VERSION, ALL, BIG, SMALL = 1, 1, 2, 3
DETAILS: dict[str, Any] = {"metric": "flip", "budget": 0.01, "before": 0.002}
HOUR_US = 3600 * SECOND_US


def item(number: int, slices: tuple[int, ...], **more: Any) -> EvidenceItem:
    """Return an item, the `number`-th second after the begin."""
    known: dict[str, Any] = {
        "captured_us": BEGIN_US + number * SECOND_US,
        "exchange": f"{number:032x}",
        "group": f"{number:032x}",
        "slice_ids": slices,
        "pi": 1.0,
        "flip": 0.0,
        "divergence": 0.0,
        "margin": 0.5,
        "source": "pod-1",
        "batch_id": 1,
    }
    return EvidenceItem(**(known | more))


def test_a_slow_slice_is_told_from_the_other_traffic_and_explains_the_slow_whole() -> None:
    """By weight, each exchange once; without the small slice all traffic is fast enough, so it explains that alert."""
    slow = [item(n, (ALL, SMALL), latency_s=0.4, pi=0.5, n_items=4) for n in range(40)]
    fast = [item(40 + n, (ALL, BIG), latency_s=0.1, n_items=1) for n in range(120)]
    twice = slow[-1:]  # its second item
    untimed = [item(200, (ALL, BIG))]
    sample = WindowSample([*slow, *twice, *fast, *untimed])
    assert sample.share_slow(0.25, without=SMALL) == (0.0, 120)
    assert sample.share_slow(0.25, without=9) == (80 / 200, 160)
    assert WindowSample(untimed).share_slow(0.25, without=SMALL) == (None, 0)
    assert sample.mean_items() == pytest.approx((80 * 4 + 121) / 201)
    details = {"metric": "latency", "latency_budget_s": 0.25}
    alerts = {one: alert(one, Verdict.WARNING, **details) for one in (ALL, SMALL)}
    found = smallest(
        sample, alerts, sample.sizes(), slice_id=ALL, cap=1.0, tolerance=0.25, declared={ALL, SMALL}
    )
    assert found == (SMALL,)


def alert(slice_id: int, severity: Verdict = Verdict.FIRING, **details: Any) -> Alerting:
    """Return an open alert."""
    return Alerting(
        model_version_id=VERSION, slice_id=slice_id, severity=severity, event=event_with(**DETAILS | details)
    )


def change(
    slice_id: int, fold_seq: int, episode: Episode = Episode.OPEN, to: Verdict = Verdict.FIRING
) -> TransitionRow:
    """Return a change of verdict."""
    return TransitionRow(
        model_version_id=VERSION,
        slice_id=slice_id,
        from_verdict=Verdict.OK,
        to_verdict=to,
        at_us=BEGIN_US,
        fold_seq=fold_seq,
        episode=episode,
        metric=Metric.FLIP,
        onset_us=BEGIN_US,
        reason="r",
        event=event_with(**DETAILS),
    )


def drifted() -> WindowSample:
    """Return 200 items of `big`: the half that is also `small` flips every third time, the rest never."""
    return WindowSample(
        [
            item(number, (ALL, BIG, SMALL), flip=float(number % 3 == 0))
            if number % 2
            else item(number, (ALL, BIG))
            for number in range(200)
        ]
    )


@pytest.mark.parametrize(
    ("big", "small", "expected"),
    [
        (Verdict.FIRING, Verdict.FIRING, (SMALL,)),
        (Verdict.WARNING, Verdict.FIRING, (SMALL,)),
        (Verdict.WARNING, Verdict.WARNING, (SMALL,)),
        (Verdict.FIRING, Verdict.WARNING, ()),
    ],
)
def test_a_page_is_never_folded_under_a_ticket(
    big: Verdict, small: Verdict, expected: tuple[int, ...]
) -> None:
    """Whoever silences what is explained must still be woken by what explains it."""
    scene = drifted()
    beside = {BIG: alert(BIG, big), SMALL: alert(SMALL, small)}
    assert smallest(scene, beside, scene.sizes(), slice_id=BIG, cap=2.0, tolerance=0.25) == expected
    assert smallest(scene, beside, scene.sizes(), slice_id=SMALL, cap=2.0, tolerance=0.25) == ()


def test_of_two_slices_with_the_same_items_one_explains_the_other_and_not_the_other_way_round() -> None:
    """The lower number is taken for the smaller: two pages must not be hidden behind each other."""
    scene = WindowSample([item(number, (ALL, BIG, SMALL), flip=1.0) for number in range(50)])
    beside = {BIG: alert(BIG), SMALL: alert(SMALL)}
    found = [
        smallest(scene, beside, scene.sizes(), slice_id=one, cap=2.0, tolerance=0.25) for one in (BIG, SMALL)
    ]
    assert found == [(), (BIG,)]


def test_of_two_slices_with_the_same_items_the_declared_one_is_the_finding() -> None:
    """Whichever has the lower number, and whichever alerted first: a found slice stands under the name that people gave."""
    scene = WindowSample([item(number, (ALL, BIG, SMALL), flip=1.0) for number in range(50)])
    beside = {BIG: alert(BIG), SMALL: alert(SMALL)}
    for declared, expected in (
        ({SMALL}, [(SMALL,), ()]),
        ({BIG}, [(), (BIG,)]),
        ({BIG, SMALL}, [(), (BIG,)]),
    ):
        found = [
            smallest(scene, beside, scene.sizes(), slice_id=one, cap=2.0, tolerance=0.25, declared=declared)
            for one in (BIG, SMALL)
        ]
        assert found == expected
    standing = AlertingSlices([alert(BIG)], [change(SMALL, 6)])
    assert standing.larger(change(SMALL, 6), scene, scene.sizes()) == []
    assert standing.larger(change(SMALL, 6), scene, scene.sizes(), {SMALL}) == [BIG]


def city(n_damaged: int, n_stores: int = 5, n: int = 1500) -> WindowSample:
    """Return items of a city, slice 10, and its stores, 11 and so on: in damaged ones every fifth item flips, else none."""
    return WindowSample(
        [
            item(
                number,
                (ALL, 10, 11 + number % n_stores),
                flip=float(number % n_stores < n_damaged and number // n_stores % 5 == 0),
            )
            for number in range(n)
        ]
    )


@pytest.mark.parametrize(("n_damaged", "expected"), [(1, {11}), (2, {11, 12}), (3, {11, 12, 13}), (5, set())])
def test_two_damaged_stores_explain_the_alert_of_their_city(n_damaged: int, expected: set[int]) -> None:
    """And three of five; where all are damaged the city is the finding. The stores explain themselves by nothing."""
    scene = city(n_damaged)
    beside = {one: alert(one) for one in (10, *range(11, 11 + n_damaged))}

    def found(slice_id: int) -> tuple[int, ...]:
        return smallest(scene, beside, scene.sizes(), slice_id=slice_id, cap=2.0, tolerance=0.25)

    assert set(found(10)) == expected
    assert found(11) == ()
    last = 10 + n_damaged
    assert (
        set(explains(scene, beside, scene.sizes(), slice_id=last, larger=10, cap=2.0, tolerance=0.25))
        == expected
    )


def test_a_store_without_damage_is_no_part_of_what_explains_the_city() -> None:
    """Five stores alert for some other reason, say another metric: only those without which no excess is left are named."""
    scene = city(2)
    beside = {one: alert(one) for one in range(10, 16)}
    assert set(smallest(scene, beside, scene.sizes(), slice_id=10, cap=2.0, tolerance=0.25)) == {11, 12}


def test_alerts_are_as_they_were_after_the_batch_of_a_change() -> None:
    """What opens later does not count, what opens in the same batch does, what has ended does not."""
    standing = AlertingSlices(
        [alert(ALL), alert(SMALL)],
        [change(SMALL, 5, Episode.CLOSE, Verdict.OK), change(BIG, 6), change(SMALL, 6), change(SMALL, 7)],
    )
    assert set(standing.at(change(BIG, 5))) == {ALL}
    assert set(standing.at(change(BIG, 6))) == {ALL, BIG, SMALL}
    scene = drifted()
    assert standing.larger(change(SMALL, 6), scene, scene.sizes()) == [ALL]
    assert standing.larger(change(SMALL, 7), scene, scene.sizes()) == [ALL, BIG]


def test_nothing_is_noted_that_a_later_change_of_the_same_fold_says_better() -> None:
    """The alert's own row is newer than the note."""
    standing = AlertingSlices([alert(BIG)], [change(SMALL, 5), change(BIG, 6, Episode.ESCALATE)])
    assert standing.notes_on_explained(change(SMALL, 5), {BIG: "small"}) == []
    assert standing.notes_on_explaining(change(SMALL, 5), BIG, Explanation()) == []
    alone = AlertingSlices([alert(BIG)], [change(SMALL, 5)])
    (note,) = alone.notes_on_explained(change(SMALL, 5), {BIG: "small"})
    by = ExplainedBy(explained_by="small", explained_by_id=SMALL)
    assert (note.slice_id, note.change) == (BIG, by)


def test_an_explanation_from_fewer_exchanges_does_not_take_the_place_of_one_from_more() -> None:
    """Unless the new alert explains that one, too, or the better one has ended or is less severe."""
    known = [
        alert(ALL, explained_by="big", explained_by_id=BIG),
        alert(BIG, n_window_after=900),
    ]
    standing = AlertingSlices(known, [])
    row = change(SMALL, 5)
    assert standing.without_better(row, {ALL: "small"}, 200) == {}
    assert standing.without_better(row, {ALL: "small"}, 900) == {ALL: "small"}
    assert standing.without_better(row, {ALL: "small", BIG: "small"}, 200) == {ALL: "small", BIG: "small"}
    ended = AlertingSlices(known, [change(BIG, 4, Episode.CLOSE, Verdict.OK)])
    assert ended.without_better(row, {ALL: "small"}, 200) == {ALL: "small"}
    ticket = AlertingSlices([known[0], alert(BIG, Verdict.WARNING, n_window_after=900)], [])
    assert ticket.without_better(row, {ALL: "small"}, 200) == {ALL: "small"}


def test_an_alert_is_listed_alone_once_the_one_that_explains_it_has_ended() -> None:
    """Nothing explains it any more."""
    known = [alert(BIG, slice="big", explained_by="small", explained_by_id=SMALL), alert(SMALL)]
    (note,) = AlertingSlices(known, [change(SMALL, 5, Episode.CLOSE, Verdict.OK)]).notes_on_ended()
    assert note.slice_id == BIG
    assert note.change == ExplainedBy(explained_by=None, explained_by_id=None)
    assert AlertingSlices(known, [change(ALL, 5, Episode.CLOSE, Verdict.OK)]).notes_on_ended() == []


def test_what_is_looked_at_follows_the_detector_that_decided() -> None:
    """A tail is looked at by the share above its level, and held against its baseline with the tolerance."""
    tail = {
        "metric": "divergence",
        "detector": TAIL.kind,
        "tail_level": 0.1,
        "tail_before": 0.01,
        "budget": 0.02,
    }
    decided = event_with(**tail).evidence
    measure = measure_of(decided, 2.0)
    assert [measure.of(item(0, (), divergence=divergence)) for divergence in (0.05, 0.2, float("inf"))] == [
        0.0,
        1.0,
        1.0,
    ]
    assert level_of(decided, 0.25) == pytest.approx(0.0125)
    assert level_of(event_with(**DETAILS).evidence, 0.25) == 0.01
    assert level_of(event_with(**DETAILS, detector=CHANGE.kind).evidence, 0.25) == pytest.approx(0.0025)
    mean = measure_of(event_with(metric="divergence", budget=0.02).evidence, 2.0)
    assert mean == ComparedValue(metric=Metric.DIVERGENCE, kind=BUDGET.kind, cap=2.0)
    assert mean.of(item(0, (), divergence=float("inf"))) == 2.0


def test_what_came_with_the_onset_is_named_and_nothing_else() -> None:
    """An engine and a sidecar seen for the first time around it; those that were always there are not news."""
    before = [item(number, (ALL,), batch_id=1) for number in range(60)]
    after = [
        item(100 + number, (ALL,), batch_id=2, source="pod-2" if number % 2 else "pod-1")
        for number in range(40)
    ]
    old, new = WindowSample(before[::-1]), WindowSample(after[::-1])
    provenance = {
        1: {"runtime": "onnxruntime", "provider": "cpu"},
        2: {"runtime": "onnxruntime", "provider": "cuda"},
    }
    onset_us = BEGIN_US + 100 * SECOND_US
    (engine,) = new_engines(old, new, onset_us, provenance)
    assert engine.startswith("provider of the replay: cuda, first seen")
    assert engine.endswith("(before: cpu)")
    (sidecar,) = new_sidecars(old, new, onset_us)
    assert sidecar.startswith("sidecar pod-2,")
    assert "50 %" in sidecar
    assert new_engines(old, new, onset_us + 2 * HOUR_US, provenance) == []
    assert new_sidecars(WindowSample(before[:5]), new, onset_us) == []


def test_a_candidate_version_of_the_model_that_came_with_the_onset_is_named() -> None:
    """One first seen a month later was not known then, and a model's first version is no news."""
    row = change(BIG, 5)
    (other,) = new_versions(versions_around(CATALOG, row, None), VERSION)
    assert other.startswith("candidate version 2, first seen")
    assert versions_around(CATALOG, row, BEGIN_US - SECOND_US) == []
    before = msgspec.structs.replace(CATALOG.versions[2], first_seen_us=BEGIN_US - 40 * 24 * HOUR_US)
    later = Catalog(
        versions={**CATALOG.versions, 2: before}, slices=CATALOG.slices, policies=CATALOG.policies
    )
    (mine,) = new_versions(versions_around(later, row, None), VERSION)
    assert mine.startswith("candidate version 1 (this one), first seen")


def test_the_reason_names_the_signal_that_decided() -> None:
    """Eight texts, each its own: flips that decided are not told as a divergence."""
    signals = (
        (BUDGET.kind, Metric.FLIP),
        (BUDGET.kind, Metric.DIVERGENCE),
        (CHANGE.kind, Metric.FLIP),
        (TAIL.kind, Metric.DIVERGENCE),
    )
    assert len({reason_of(*signal, page=page) for signal in signals for page in (True, False)}) == 8
    assert (
        reason_of(BUDGET.kind, Metric.FLIP, page=True) == "the share of changed answers is above the budget"
    )
    assert reason_of(BUDGET.kind, Metric.DIVERGENCE, page=True) == "the mean divergence is above the budget"
    assert "tail" in reason_of(TAIL.kind, Metric.DIVERGENCE, page=True)


FOUND = Explanation(
    cause="damage",
    damage=0.05,
    damage_se=0.01,
    shift=0.001,
    shift_se=0.002,
    aggregate_cause="mix",
    aggregate_move=0.004,
    aggregate_within=0.001,
    aggregate_within_se=0.001,
    aggregate_mix=0.003,
    aggregate_mix_se=0.001,
    changes=("provider of the replay: cuda (before: cpu)",),
    explained_by="small",
    explains=("bigger", "all"),
)


def event_of(
    found: Explanation, metric: Metric = Metric.FLIP, kind: str = BUDGET.kind, task: Task = TASK
) -> AlertEvent:
    """Return an alert with an explanation."""
    return msgspec.structs.replace(
        event_with(metric=metric, detector=kind, task=task, n_history=300), explanation=found
    )


def sentences(
    found: Explanation, metric: Metric = Metric.FLIP, kind: str = BUDGET.kind, task: Task = TASK
) -> tuple[str, ...]:
    """Return the details of an alert with an explanation."""
    return details(event_of(found, metric, kind, task))


def test_every_finding_is_said_the_most_important_first() -> None:
    """What is new and what it explains for whoever is woken; damage or shift, and all traffic, in points or nats, in the details."""
    labels = {line.label: line.text for line in text_of(event_of(FOUND)).lines}
    assert labels["Also alerts"].startswith("bigger, all.")
    assert "New at about that time: provider of the replay: cuda" in labels["What changed"]
    assert text_of(event_of(FOUND)).do_now[0].text.startswith("Look at the alert of small:")
    said = sentences(FOUND, Metric.FLIP, BUDGET.kind, TASK)
    assert [one.split(" ")[0] for one in said] == ["Numeric", "Over"]
    assert "+5 points" in said[0]
    assert "nat" in sentences(FOUND, Metric.DIVERGENCE, BUDGET.kind, TASK)[0]
    assert "points" in sentences(FOUND, Metric.DIVERGENCE, TAIL.kind, TASK)[0]
    (why,) = sentences(
        Explanation(unexplained="the database did not answer in time"), Metric.FLIP, BUDGET.kind, TASK
    )
    assert why.startswith("Not explained: the database did not answer in time")


def test_too_few_items_are_reported_as_too_few_and_without_figures() -> None:
    """A cause or a move of eight exchanges would be taken for a finding."""
    found = Explanation(
        cause="too_few",
        aggregate_cause="too_few",
        n_window_before=8,
        n_window_after=45,
        compared_with="the week before the onset",
    )
    slice_, aggregate, window = sentences(found, Metric.DIVERGENCE, BUDGET.kind, TASK)
    assert slice_.startswith(
        "Too few exchanges to distinguish damage from input shift: 8 exchanges before the onset"
    )
    assert aggregate.startswith("All traffic: too few exchanges")
    assert window == "Compared with the week before the onset (8 exchanges, 45 since)."
    assert "nat" not in slice_ + aggregate


def test_a_part_far_below_its_standard_error_is_reported_as_none() -> None:
    """Nobody who is woken reads -9.19e-05 as nothing, nor a part within 1.96 standard errors as a finding."""
    found = msgspec.structs.replace(FOUND, aggregate_mix=-9.19e-7, aggregate_mix_se=0.00084)
    said = " ".join(sentences(found, Metric.FLIP, BUDGET.kind, TASK))
    assert "nothing beyond chance (standard error 0.084 points)" in said
    assert "e-05" not in said
    below = msgspec.structs.replace(FOUND, aggregate_mix=0.0008, aggregate_mix_se=0.00084)
    assert "0.08 points" not in " ".join(sentences(below, Metric.FLIP, BUDGET.kind, TASK))


def test_traffic_that_is_new_is_reported_separately() -> None:
    """As the cause of its own, or beside another one; nothing is said of it where there was no such traffic."""
    new = msgspec.structs.replace(
        FOUND,
        cause="unseen",
        unseen=0.08,
        unseen_se=0.01,
        aggregate_cause="unseen",
        aggregate_unseen=0.02,
        aggregate_unseen_se=0.005,
    )
    *_, slice_, aggregate = sentences(new, Metric.FLIP, BUDGET.kind, TASK)
    assert slice_.startswith("Inputs at margins that did not occur before")
    assert "at margins that did not occur before: +8 points (standard error 1)" in slice_
    assert aggregate.endswith("; traffic that is new or was rare before: +2 points (standard error 0.5).")
    beside = msgspec.structs.replace(new, cause="damage", aggregate_cause="within")
    assert (
        "traffic that is new or was rare before: +2 points"
        in sentences(beside, Metric.FLIP, BUDGET.kind, TASK)[-1]
    )
    assert not any("did not occur" in one for one in sentences(FOUND, Metric.FLIP, BUDGET.kind, TASK))


def test_a_part_that_rose_is_not_called_the_reason_of_a_fall() -> None:
    """Where the other parts outweigh it, the sentence says so; where all go one way it names the part."""
    parts = {"aggregate_within": -0.0034, "aggregate_mix": -0.00007, "aggregate_unseen": 0.00196}
    for cause in ("unseen", "within", "mix", "both"):
        fell = msgspec.structs.replace(FOUND, aggregate_cause=cause, aggregate_move=-0.00151, **parts)
        *_, said = sentences(fell, Metric.DIVERGENCE, BUDGET.kind, TASK)
        assert said.startswith("Over all traffic it moved by -0.00151 nat, although "), said
        assert "-0.0034 nat" in said
        assert ": by traffic that is new" not in said
    *_, said = sentences(
        msgspec.structs.replace(FOUND, aggregate_cause="unseen"), Metric.DIVERGENCE, BUDGET.kind, TASK
    )
    assert said.startswith("Over all traffic it moved by +0.004 nat: by traffic that is new")


def test_without_margins_nothing_is_said_of_them() -> None:
    """Only classes have close calls: of other tasks neither a cause nor a lack of margins is told."""
    measure, cap = ComparedValue(metric=Metric.DIVERGENCE, kind=BUDGET.kind, cap=2.0), 2.0
    before, after = (
        WindowSample([item(number, (ALL,), margin=None, divergence=level) for number in range(200)])
        for level in (0.001, 0.1)
    )
    found = findings(before, after, measure, cap)
    assert (found.cause, found.n_window_before, found.n_window_after) == (None, 200, 200)
    known = findings(WindowSample([item(1, (ALL,))]), after, measure, cap)
    assert known.cause == "too_few"


def test_outputs_that_are_not_finite_are_reported_by_their_weight() -> None:
    """Of every task, whatever else is known; nothing is said where all are numbers, and no `before` of no window."""
    measure, cap = ComparedValue(metric=Metric.FLIP, kind=BUDGET.kind, cap=1.0), 2.0
    before = WindowSample([item(number, (ALL,), margin=None) for number in range(100)])
    spoilt = [item(number, (ALL,), margin=None, not_finite=number < 10, pi=0.5) for number in range(20)]
    kept = [item(number, (ALL,), margin=None) for number in range(20, 40)]
    found = findings(before, WindowSample(spoilt + kept), measure, cap)
    assert found.not_finite == pytest.approx(20 / 60)
    assert found.not_finite_before == 0
    said = text_of(event_of(found, task=Task.REGRESSION)).plain()
    assert "Invalid outputs: 33.3 % of the slice's outputs since the onset" in said
    assert "(before: 0 %)" in said
    few = WindowSample(before.items[:5])
    alone = text_of(event_of(findings(few, WindowSample(spoilt), measure, cap))).plain()
    assert "Invalid outputs: 50 %" in alone
    assert "(before:" not in alone
    assert findings(before, WindowSample(kept), measure, cap).not_finite is None


def test_what_to_do_follows_the_cause() -> None:
    """Nobody is told to calibrate again because of what others send."""
    told = {
        cause: " ".join(map(str, (*text.do_now, *text.tomorrow)))
        for cause in ("damage", "input_shift", "unseen", "undecided", "too_few", None)
        for text in [text_of(event_with(cause=cause, begin="changed", n_history=300))]
    }
    assert "Calibrate again" in told["damage"]
    assert "Do not calibrate again" in told["input_shift"]
    assert "per channel" in told["damage"]
    assert "Label 50" in told["unseen"]
    assert told["undecided"] == told["too_few"] == told[None]
    assert "per channel" in told[None]
    explained = event_with(explained_by="small", begin="changed", aggregate_verdict="firing")
    assert text_of(explained).do_now[0].text.startswith("Look at the alert of small: without")


def test_what_is_not_known_is_left_out_and_an_older_release_is_read() -> None:
    """No null, no empty list and no infinity reaches an event."""
    assert Explanation(damage_se=float("inf"), cause="both").attributes() == {"cause": "both"}
    assert explanation_of(FOUND.attributes() | {"slice": "faint"}) == FOUND
    assert explanation_of({"explains": 3}) == Explanation()
