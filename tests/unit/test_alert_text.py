"""Whole alert texts by case, as the person on call reads them, and what none of them may say."""

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import Task
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, TAIL
from quantdrift.drift.explain.diagnosis import Kind
from quantdrift.drift.explain.mix import FEWEST_BEFORE
from quantdrift.monitor.fold.alert_event import summary
from quantdrift.monitor.fold.alert_text import sentences
from quantdrift.storage.monitor.explanation import Explanation
from tests.support.monitor.alert_cases import alert, event_with, text
from tests.support.monitor.fold_stream import ALL_ID

pytestmark = pytest.mark.unit

COMPARED = Explanation(
    compared_with="the week before the onset without its last hour", n_window_before=400, n_window_after=254
)
DAMAGE = msgspec.structs.replace(
    COMPARED,
    cause="damage",
    damage=0.049,
    damage_se=0.008,
    shift=0.0004,
    shift_se=0.002,
    low_margin_before=0.08,
    low_margin_after=0.09,
    divergence_damage=0.09,
    divergence_damage_se=0.01,
    divergence_shift=3.68e-11,
    divergence_shift_se=0.001,
    aggregate_cause="undecided",
    aggregate_move=0.0007,
    aggregate_move_se=0.001,
    aggregate_within=0.0002,
    aggregate_within_se=0.0005,
    aggregate_mix=-7.75e-05,
    aggregate_mix_se=0.0001,
    moved=("box_shift", "topk_overlap", "same"),
    moved_before=(0.105, 0.99999, 1.0),
    moved_after=(0.305, 0.99949, 1.0 - 1e-12),
    n_measures=1,
)
TOO_FEW = Explanation(
    cause="too_few",
    aggregate_cause="too_few",
    n_window_before=1,
    n_window_after=261,
    compared_with="the week before the onset",
)
AT = "2026-03-01T12:00:00+00:00"
MEND = (
    "Most often the calibration set lacked this slice: calibrate again with it, or use finer (per-channel) quantisation;"
    " measure with labels."
)
GUESS = "Flips with little divergence are inputs near the decision boundary; with it, numeric damage."
RAISED = (
    "digits 1, scanner=faint: ok -> firing: 5.3 % of decisions changed since 2026-03-01 12:00 UTC (254 exchanges), 1 %"
    " accepted"
)
FINE = "Route this slice to the unquantised model while you investigate: the aggregate is fine at 0.58 %."

CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "damage in a slice with a history": (
        {"found": DAMAGE},
        [
            RAISED,
            (
                "Numeric damage: the flip rate rose by +4.9 points (standard error 0.8) on inputs that are as hard as before,"
                " and by nothing beyond chance (standard error 0.2 points) because the margins changed; close calls (margin"
                " below 0.1) were 8 % of the slice and are 9 %."
            ),
            (
                "Mean KL moved by +0.09 nat (standard error 0.01) at equal margins and by nothing beyond chance (standard"
                " error 0.001 nat) because the margins changed."
            ),
            "Over all traffic nothing moved beyond chance.",
            "Other measures that moved (1 compared): box_shift from 0.105 to 0.305, topk_overlap from 1 to 0.999.",
            "Compared with the week before the onset without its last hour (400 exchanges, 254 since).",
            (
                f"{FINE} Look for what changed around {AT}. It is numeric damage: these inputs need a range or a"
                " resolution that quantisation removed. Calibrate again with them, or use finer (per-channel) quantisation"
                " or higher precision in the sensitive layers: calibration alone moves ranges and adds no resolution. Measure"
                " with labels which of them helps."
            ),
        ],
    ),
    "bad since it was first seen": (
        {"n_before": 1, "before": 1.0, "found": TOO_FEW},
        [
            RAISED,
            (
                "Too few exchanges to distinguish damage from input shift: 1 exchange before the onset and 261 since; 30 and"
                " 10 independent ones with a margin are needed."
            ),
            "Over all traffic there are too few exchanges before or since the onset to split the move.",
            "Compared with the week before the onset (1 exchange, 261 since).",
            (
                f"{FINE} The slice has no history before the drift (1 exchange before the estimated onset, 30 are needed"
                " to compare): it may have been as bad from its first exchange. Compare it with the version that served"
                f" before, if there was one, and roll back if that one is better. {GUESS} {MEND}"
            ),
        ],
    ),
    "a new version": (
        {"n_before": 0, "before": None, "found": Explanation(begin="new_version", cause="undecided")},
        [
            RAISED,
            (
                f"{FINE} The version is new (1 was first seen within an hour of the estimated onset): compare it with the"
                f" version that served before, and roll back if that one is better. {GUESS} {MEND}"
            ),
        ],
    ),
    "the aggregate is unknown": (
        {"aggregate": Verdict.UNKNOWN},
        [
            RAISED,
            (
                "Look at this slice first: it is not known whether the aggregate is within its budget (at 0.58 %). Look for"
                f" what changed around {AT}. {GUESS} {MEND}"
            ),
        ],
    ),
    "the aggregate is ok and above its budget": (
        {"aggregate_mean": 0.058},
        [
            RAISED,
            (
                "Look at this slice first, then at the others: the aggregate at 5.8 % is above its budget of 1 % too, without"
                f" an alert yet. Look for what changed around {AT}. {GUESS} {MEND}"
            ),
        ],
    ),
    "the aggregate alerts too": (
        {"aggregate": Verdict.FIRING, "aggregate_mean": 0.03},
        [
            RAISED,
            (
                "Look at the whole candidate version first: the aggregate drifts too at 3 %. Look for what changed around"
                f" {AT}. {GUESS} {MEND}"
            ),
        ],
    ),
    "an alert about the aggregate": (
        {"slice_id": ALL_ID, "aggregate": Verdict.FIRING},
        [
            RAISED.replace("scanner=faint", "all"),
            (
                "This alert is about all traffic: look at the whole candidate version. Look for what changed around"
                f" {AT}. {GUESS} {MEND}"
            ),
        ],
    ),
    "what was learned decided": (
        {"kind": CHANGE.kind, "after": 0.009},
        [
            (
                "digits 1, scanner=faint: ok -> firing: 0.9 % of decisions changed since 2026-03-01 12:00 UTC (254"
                " exchanges), 0.4 % before (the flip rate is above its learned baseline)"
            ),
            f"{FINE} Look for what changed around {AT}. {GUESS} {MEND}",
        ],
    ),
    "the divergence decided": (
        {"metric": Metric.DIVERGENCE, "after": 0.098, "aggregate_mean": 0.0055},
        [
            (
                "digits 1, scanner=faint: ok -> firing: mean KL 0.098 nat since 2026-03-01 12:00 UTC (254 exchanges), 0.04"
                " nat accepted"
            ),
            (
                "Route this slice to the unquantised model while you investigate: the aggregate is fine at 0.0055 nat. Look for what"
                f" changed around {AT}. Divergence of the whole output distribution points to numeric damage (range or"
                f" resolution lost). {MEND}"
            ),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_alert_reads_as_its_case_says(case: str) -> None:
    """The whole text, to be reviewed as it is read: the first line has the figures that decided."""
    given_, lines = CASES[case]
    assert text(alert(**given_)).split("\n") == lines


def test_one_exchange_is_not_enough_for_a_mean_before() -> None:
    """Below 30 exchanges the mean before the onset is not told at all; the count is."""
    few, enough = (alert(n_before=n, before=1.0).alert for n in (FEWEST_BEFORE - 1, FEWEST_BEFORE))
    assert (few.evidence.before, few.evidence.n_history, few.explanation.begin) == (None, 29, "first_seen")
    assert (enough.evidence.before, enough.explanation.begin) == (1.0, "changed")


def test_the_reason_names_what_decided() -> None:
    """Flips that decided are not told as a divergence."""
    assert alert().alert.change.reason == "the flip rate is above the budget"
    assert alert(metric=Metric.DIVERGENCE).alert.change.reason == "the mean divergence is above the budget"


@pytest.mark.parametrize(
    ("detector", "metric", "said"),
    [
        (BUDGET.kind, Metric.FLIP, "the flip rate is within its budget of 1 % again"),
        (BUDGET.kind, Metric.DIVERGENCE, "the mean KL is within its budget of 0.01 nat again"),
        (TAIL.kind, Metric.DIVERGENCE, "the upper tail of KL is within its learned baseline again"),
    ],
)
def test_the_end_of_an_alert_shows_the_evidence_and_not_the_window_that_contains_the_drift(
    detector: str, metric: Metric, said: str
) -> None:
    """A recovery beside a mean of 2.7 % against 1 % is a contradiction: the mean is of another window."""
    story = event_with(
        slice="s", from_verdict="firing", verdict="ok", reason="no evidence", metric=metric.value, measure="KL",
        unit="nat", mean=0.027, low=0.02, high=0.03, n_recent=1500, n_groups=4000, evidence=12_345.0, threshold=1e4,
        detector=detector,
    )  # fmt: skip
    assert summary(story) == (
        f"digits 1, s: firing -> ok: {said}; the evidence of recovery is 12,345, and 10,000 is needed"
    )


def test_the_names_of_the_kinds_are_those_of_the_detectors() -> None:
    """Whoever words a case does not load the detectors."""
    assert {kind.value for kind in Kind} == {BUDGET.kind, CHANGE.kind, TAIL.kind}


SIZES = st.sampled_from([0.0, 3.68e-11, 9e-5, 0.0077, 0.0099, 0.01, 0.044, 0.44, 1.0])
ERRORS = st.sampled_from([None, 0.0, 1e-12, 0.001, 0.5, float("inf")])


@settings(max_examples=200, deadline=None)
@given(
    metric=st.sampled_from([Metric.FLIP, Metric.DIVERGENCE]),
    verdict=st.sampled_from([Verdict.WARNING, Verdict.FIRING]),
    n_before=st.sampled_from([0, 1, 2, 29, 30, 31, 5000]),
    n_after=st.sampled_from([1, 2, 261, 5000]),
    before=SIZES,
    after=SIZES,
    aggregate=st.sampled_from(list(Verdict)),
    aggregate_mean=st.none() | SIZES,
    cause=st.sampled_from([None, "damage", "input_shift", "unseen", "both", "undecided", "too_few"]),
    whole=st.sampled_from([None, "within", "mix", "unseen", "both", "undecided", "too_few"]),
    parts=st.lists(st.tuples(SIZES, ERRORS), min_size=6, max_size=6),
    moved=st.lists(st.tuples(SIZES, SIZES), max_size=8),
)
def test_no_alert_contradicts_itself(
    *,
    metric: Metric,
    verdict: Verdict,
    n_before: int,
    n_after: int,
    before: float,
    after: float,
    aggregate: Verdict,
    aggregate_mean: float | None,
    cause: str | None,
    whole: str | None,
    parts: list[tuple[float, float | None]],
    moved: list[tuple[float, float]],
) -> None:
    """Fine only where verdict and figure say so; no before of a handful; no number twice; no exponent; plurals right.

    Beside that, no part of a move is told that is within its standard error.
    """
    named = dict(
        zip(
            ("damage", "shift", "unseen", "aggregate_within", "aggregate_mix", "aggregate_unseen"),
            parts,
            strict=True,
        )
    )
    figures: dict[str, Any] = {name: value for name, (value, _) in named.items()}
    errors: dict[str, Any] = {f"{name}_se": se for name, (_, se) in named.items()}
    found = Explanation(
        cause=cause,
        aggregate_cause=whole,
        aggregate_move=before - after,
        aggregate_move_se=parts[0][1],
        low_margin_before=before,
        low_margin_after=after,
        n_window_before=n_before,
        n_window_after=n_after,
        compared_with="the week before the onset",
        moved=tuple(f"measure_{'abcdefgh'[place]}" for place in range(len(moved))),
        moved_before=tuple(one for one, _ in moved),
        moved_after=tuple(one for _, one in moved),
        n_measures=len(moved),
        **figures,
        **errors,
    )
    row = alert(
        metric=metric,
        verdict=verdict,
        n_before=n_before,
        n_after=n_after,
        before=before,
        after=after,
        aggregate=aggregate,
        aggregate_mean=aggregate_mean,
        found=found,
    )
    told = text(row)
    budget = row.alert.evidence.budget
    within = aggregate is Verdict.OK and aggregate_mean is not None and aggregate_mean <= budget
    assert ("fine at" in told) == within, told
    assert not re.search(r"\bnot fine\b", told)
    if n_before < FEWEST_BEFORE:
        assert row.alert.evidence.before is None
        assert "Look for what changed" not in told, told
        assert "did not change" not in told, told
    assert not re.search(r"\de[+-]?\d", told), told
    assert not re.search(r"\b1 exchanges|\b1 other measures", told), told
    assert not re.search(r"(?<![\d,.])(?!1 )[\d,]+ exchange\b", told), told
    for same in re.finditer(
        r"from ([-\d.,]+) to ([-\d.,]+)|were ([-\d.]+) % of the slice and are ([-\d.]+) %", told
    ):
        low, high = (one.rstrip(",") for one in same.groups() if one is not None)
        assert low != high, told
    for value, error in re.findall(r"([+-]?[\d,.]+)(?: points| nat)? \(standard error ([\d,.]+)\)", told):
        assert abs(float(value.replace(",", ""))) > float(error.replace(",", "")), told


def test_a_move_that_may_be_chance_is_not_split_into_parts_that_may_be_chance() -> None:
    """Only the part that is beyond chance is named."""
    found = Explanation(
        aggregate_cause="unseen",
        aggregate_move=0.0017,
        aggregate_move_se=0.0018,
        aggregate_within=-0.0011,
        aggregate_within_se=0.0016,
        aggregate_mix=-0.0001,
        aggregate_mix_se=0.0002,
        aggregate_unseen=0.00292,
        aggregate_unseen_se=0.0005,
    )
    (said,) = sentences(found, Metric.DIVERGENCE, BUDGET.kind, Task.CLASSIFICATION)
    assert said == (
        "Over all traffic nothing moved beyond chance, although traffic that is new or was rare before raised it:"
        " +0.00292 nat (standard error 0.0005) by traffic that is new or was rare before."
    )


def test_a_move_that_six_digits_do_not_show_is_printed_as_none() -> None:
    """`from 1 to 1` says nothing."""
    found = Explanation(
        moved=("topk_overlap",), moved_before=(1.0,), moved_after=(1.0 - 1e-12,), n_measures=1
    )
    (said,) = sentences(found, Metric.FLIP, BUDGET.kind, Task.CLASSIFICATION)
    assert said == "No other measure moved beyond chance (1 compared)."
