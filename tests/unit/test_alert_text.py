"""Whole alert texts by case, as the person on call reads them, and what none of them may say."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantdrift.core.records import Metric, Suspect, Verdict
from quantdrift.core.tasks import Task
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, DETECTORS
from quantdrift.drift.explain.diagnosis import Kind
from quantdrift.drift.explain.mix import FEWEST_BEFORE
from quantdrift.monitor.fold.alert_text import RETURNED, page, sentences, summary
from quantdrift.storage.monitor.events import AlertEvent
from quantdrift.storage.monitor.explanation import Explanation
from tests.support.monitor.alert_cases import alert, event_with, text
from tests.support.monitor.fold_stream import ALL_ID

pytestmark = pytest.mark.unit

COMPARED = Explanation(
    compared_with="the week before the onset without its last hour",
    n_window_before=400,
    n_window_after=254,
    daily=3_400.0,
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
SHIFT = msgspec.structs.replace(
    COMPARED,
    cause="input_shift",
    damage=0.0002,
    damage_se=0.003,
    shift=0.048,
    shift_se=0.009,
    low_margin_before=0.08,
    low_margin_after=0.41,
)
UNSEEN = msgspec.structs.replace(
    COMPARED,
    cause="unseen",
    damage=0.0,
    damage_se=0.003,
    shift=0.001,
    shift_se=0.002,
    unseen=0.047,
    unseen_se=0.008,
    changes=("sidecar pod-7, first seen 2026-03-01 11:58 UTC, 92 % of the slice since",),
)
BOTH = msgspec.structs.replace(
    COMPARED,
    cause="both",
    damage=0.031,
    damage_se=0.006,
    shift=0.018,
    shift_se=0.005,
    not_finite=0.02,
    explains=("all",),
)
TOO_FEW = Explanation(
    begin="first_seen",
    cause="too_few",
    aggregate_cause="too_few",
    n_window_before=9,
    n_window_after=261,
    compared_with="the week before the onset",
)
RELEASED = Explanation(
    begin="new_version",
    cause="undecided",
    changes=("candidate version 1 (this one), first seen 2026-03-01 11:40 UTC",),
    daily=3_400.0,
)
TAIL_LEVEL: dict[str, Any] = {
    "detector": "tail",
    "metric": "divergence",
    "unit": "nat",
    "measure": "KL",
    "before": 0.4,
    "after": 1.1,
    "tail_level": 0.5,
    "tail_before": 0.01,
    "tail_after": 0.031,
    "budget": 0.04,
    "aggregate_mean": 0.0055,
    "aggregate_accepted": 0.04,
    "flips": 0.004,
    "daily": 3_400.0,
}
ENDED: dict[str, Any] = {
    "from_verdict": "firing",
    "verdict": "ok",
    "onset": None,
    "evidence": 12_345.0,
    "threshold": 10_000.0,
}
REPLACED: dict[str, Any] = {
    "verdict": "unknown",
    "ended": "replaced",
    "last_seen": "2026-03-01T13:04:00+00:00",
    "serving": ["3"],
}


def _read(**flat: Any) -> AlertEvent:
    """Return an alert of flips from 2026-03-01 12:00 UTC on, in its flat form, with `flat` in place of its own values."""
    usual: dict[str, Any] = {
        "after": 0.053,
        "before": 0.004,
        "onset": "2026-03-01T12:00:00+00:00",
        "n_since_onset": 254,
        "n_history": 400,
        "aggregate_mean": 0.0058,
        "aggregate_accepted": 0.01,
        "evidence": 16.2,
    }
    return event_with(**usual | flat)


CASES: dict[str, AlertEvent] = {
    "damage in a slice with a history": alert(found=DAMAGE).alert,
    "input shift": alert(found=SHIFT).alert,
    "new traffic": alert(found=UNSEEN).alert,
    "several causes": alert(found=BOTH).alert,
    "bad since it was first seen": alert(n_before=8, before=1.0, found=TOO_FEW).alert,
    "a new version": alert(n_before=0, before=None, found=RELEASED).alert,
    "too little known": alert(
        n_after=12, found=Explanation(cause="too_few", n_window_before=31, n_window_after=6)
    ).alert,
    "a ticket that could not be explained": alert(
        verdict=Verdict.WARNING, found=Explanation(unexplained="the database did not answer in time")
    ).alert,
    "explained by a smaller slice": alert(
        slice_id=ALL_ID, aggregate=Verdict.FIRING, found=Explanation(explained_by="scanner=faint")
    ).alert,
    "an alert about all traffic": alert(slice_id=ALL_ID, aggregate=Verdict.FIRING).alert,
    "all traffic is unknown": alert(aggregate=Verdict.UNKNOWN).alert,
    "all traffic is above its budget too": alert(aggregate_mean=0.058, budget=0.05, after=0.2).alert,
    "all traffic alerts too": alert(aggregate=Verdict.FIRING, aggregate_mean=0.03).alert,
    "a learned baseline decided": alert(kind=CHANGE.kind, after=0.009, found=COMPARED).alert,
    "the mean divergence decided, and answers changed too": alert(
        metric=Metric.DIVERGENCE,
        after=0.098,
        aggregate_mean=0.0055,
        found=Explanation(flips=0.44, daily=900.0),
    ).alert,
    "the worst outputs decided": _read(**TAIL_LEVEL),
    **{
        f"slow, and the suspect is: {suspect}": alert(
            metric=Metric.LATENCY,
            verdict=Verdict.WARNING,
            before=0.002,
            after=0.12,
            n_after=84,
            suspect=suspect,
            found=Explanation(changes=("sidecar: pod-7, since 2026-03-01 11:40 (before: pod-6)",))
            if suspect is Suspect.ENGINE
            else None,
        ).alert
        for suspect in Suspect
    },
    "recovered": _read(**ENDED),
    "recovered from a mean divergence": _read(
        **ENDED | {"metric": "divergence", "measure": "KL", "unit": "nat"}
    ),
    "fast again": _read(**ENDED | {"metric": "latency", "latency_budget_s": 0.25}),
    "recovered in its worst outputs": _read(**ENDED | {"metric": "divergence", "detector": "tail"}),
    "not compared any more": _read(**ENDED | {"verdict": "unknown"}),
    "its version was replaced": _read(**ENDED | REPLACED),
    "its version was replaced by two": _read(**ENDED | REPLACED | {"serving": ["3", "4"]}),
    "its version is compared with another reference": _read(**ENDED | REPLACED | {"serving": ["1"]}),
    "a person closed it": _read(
        **ENDED
        | {"verdict": "unknown", "ended": "closed", "reason": "closed by ada: goes to FP32 since 03:20"}
    ),
    "its version serves again": _read(from_verdict="unknown", reason=RETURNED),
    "trees": alert(found=msgspec.structs.replace(DAMAGE, build="trees")).alert,
    "a language model": alert(found=msgspec.structs.replace(DAMAGE, build="language")).alert,
    "a model that only a server has": alert(found=msgspec.structs.replace(DAMAGE, build="other")).alert,
}
PAGE = Path(__file__).with_name("alert_texts.txt")


def _written() -> dict[str, str]:
    """Return the texts of `alert_texts.txt`, by case."""
    parts = re.split(r"^=== (.+) ===\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: said.strip("\n") for name, said in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("case", CASES)
def test_an_alert_reads_as_its_case_says(case: str) -> None:
    """The whole text as the person on call reads it; `alert_texts.txt` is the page to review."""
    assert page(CASES[case]) == _written()[case]


def test_every_text_belongs_to_a_case() -> None:
    """A text that no alert has would be reviewed for nothing."""
    assert list(_written()) == list(CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_lines_for_a_person_who_is_no_statistician_have_no_words_of_statistics(case: str) -> None:
    """Nat, strata, standard errors and intervals are in the details, or nowhere."""
    lines = page(CASES[case]).partition("\n\nDetails\n")[0]
    assert not re.search(r"\bnat\b|strat|standard error|interval|quantile|\bp99\b|\bKL\b", lines)


@pytest.mark.parametrize("case", ["trees", "a language model", "a model that only a server has"])
def test_advice_that_is_of_networks_alone_is_not_given_to_others(case: str) -> None:
    """Trees have no channels, and a file that nobody has no sensitive layers."""
    assert not re.search("per channel|sensitive layers|[Cc]alibrate again", page(CASES[case]))


def test_one_exchange_is_not_enough_for_a_mean_before() -> None:
    """Below 30 exchanges the mean before the onset is not told at all; the count is."""
    few, enough = (alert(n_before=n, before=1.0).alert for n in (FEWEST_BEFORE - 1, FEWEST_BEFORE))
    assert (few.evidence.before, few.evidence.n_history, few.explanation.begin) == (None, 29, "first_seen")
    assert (enough.evidence.before, enough.explanation.begin) == (1.0, "changed")


def test_the_reason_names_what_decided() -> None:
    """Flips that decided are not told as a divergence."""
    assert alert().alert.change.reason == "the flip rate is above the budget"
    assert alert(metric=Metric.DIVERGENCE).alert.change.reason == "the mean divergence is above the budget"


def test_the_end_of_an_alert_leaves_out_the_window_that_still_contains_the_drift() -> None:
    """A recovery beside a mean of 2.7 % against 1 % is a contradiction: the mean is of another window."""
    said = page(_read(**ENDED | {"mean": 0.027, "low": 0.02, "high": 0.03}))
    assert "2.7" not in said
    assert summary(_read(**ENDED)) == (
        "digits 1: scanner=faint has recovered: no more answers change than the accepted 1 %."
    )


def test_the_names_of_the_kinds_are_those_of_the_detectors() -> None:
    """Whoever words a case does not load the detectors."""
    assert {kind.value for kind in Kind} == set(DETECTORS)


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
    assert ("All traffic together: within its budget" in told) == within, told
    assert not re.search(r"\bnot fine\b", told)
    if n_before < FEWEST_BEFORE:
        assert row.alert.evidence.before is None
        assert "look for what changed" not in told.lower(), told
        assert "did not change" not in told, told
        assert " before." not in told.partition("\n")[0], told
        assert len(set(re.findall(r"([\d,]+) (?:answers?|exchanges?)[^.]*? before", told))) <= 1, told
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
        "Over all traffic the mean did not move beyond chance, but a part of it did:"
        " +0.00292 nat (standard error 0.0005) by traffic that is new or was rare before."
    )


def test_a_move_that_six_digits_do_not_show_is_printed_as_none() -> None:
    """`from 1 to 1` says nothing."""
    found = Explanation(
        moved=("topk_overlap",), moved_before=(1.0,), moved_after=(1.0 - 1e-12,), n_measures=1
    )
    (said,) = sentences(found, Metric.FLIP, BUDGET.kind, Task.CLASSIFICATION)
    assert said == "No other measure moved beyond chance (1 compared)."
