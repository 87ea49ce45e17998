"""Whole alert texts by case, as the person on call reads them, and what none of them may say."""

import re
import shlex
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.records import Metric, Verdict
from quantdrift.core.signals import DetectorKind
from quantdrift.core.text import plain
from quantdrift.drift.detectors.protocol import DETECTORS
from quantdrift.facts.events import AlertEvent
from quantdrift.facts.explanation import FEWEST_BEFORE, Explanation
from quantdrift.facts.words.alert import text_of
from quantdrift.facts.words.details import details
from quantdrift.facts.words.steps import Ways
from tests.support.examples import examples
from tests.support.monitor.alert_cases import alert, event_with, text
from tests.support.monitor.alert_texts import CASES, ENDED, PAGE, WAYS, read, written

pytestmark = pytest.mark.unit


def page(event: AlertEvent, ways: Ways = WAYS) -> str:
    """Return the whole text of an alert."""
    return text_of(event, ways).plain()


def test_alerts_read_as_the_page_that_was_reviewed() -> None:
    """`python -m tests.support.monitor.alert_texts` writes it again: read what changed before you commit it."""
    assert written() == PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_nobody_who_is_woken_gets_more_than_three_steps(case: str) -> None:
    """Steps are numbered, and a command never names an alert or a slice that a shell would read otherwise."""
    text = text_of(*CASES[case])
    assert 1 <= len(text.do_now) <= 3
    commands = [step.command for step in (*text.do_now, *text.tomorrow) if step.command]
    assert all(shlex.split(command)[0] == "quantdrift" and plain(command) == command for command in commands)


@pytest.mark.parametrize("case", CASES)
def test_the_lines_for_a_person_who_is_no_statistician_have_no_words_of_statistics(case: str) -> None:
    """Nat, strata, standard errors and intervals are in the details, or nowhere."""
    lines = page(*CASES[case]).partition("\n\nDetails\n")[0]
    assert not re.search(r"\bnat\b|strat|standard error|interval|quantile|\bp99\b|\bKL\b", lines)


@pytest.mark.parametrize("case", ["trees", "a language model", "a model that only a server has"])
def test_advice_that_is_of_networks_alone_is_not_given_to_others(case: str) -> None:
    """Trees have no channels, and a file that nobody has no sensitive layers."""
    assert not re.search("per channel|sensitive layers|[Cc]alibrate again", page(*CASES[case]))


def test_one_exchange_is_not_enough_for_a_mean_before() -> None:
    """Below 30 exchanges the mean before the onset is not told at all; the count is."""
    few, enough = (alert(n_before=n, before=0.004).alert for n in (FEWEST_BEFORE - 1, FEWEST_BEFORE))
    assert (few.evidence.before, few.evidence.n_history, few.explanation.begin) == (None, 29, "first_seen")
    assert (enough.evidence.before, enough.explanation.begin) == (0.004, "changed")


@pytest.mark.parametrize(
    ("before", "noise", "begin"),
    [(0.05, 0.0, "older"), (0.05, 0.5, "changed"), (0.015, 0.0, "changed"), (0.004, 0.0, "changed")],
)
def test_noise_before_the_onset_is_no_older_fault(before: float, noise: float, begin: str) -> None:
    """Above budget and noise beyond chance, a slice was at fault already; what is added to the budget for noise was not at fault."""
    event = alert(before=before, noise=noise).alert
    assert event.explanation.begin == begin
    assert ("the fault is older than the alert" in page(event)) is (begin == "older")


def test_the_reason_names_what_decided() -> None:
    """Flips that decided are not told as a divergence."""
    assert alert().alert.change.reason == "the share of changed answers is above the budget"
    assert alert(metric=Metric.DIVERGENCE).alert.change.reason == "the mean divergence is above the budget"


def test_a_share_that_is_above_what_was_learned_says_so() -> None:
    """Of unlikely tokens, whose mean (`change`) and whose worst answers (`tail`) are compared with the past."""
    words = "are among the 5 % that the FP32 model would say least"
    more = event_with(metric="unlikely-tokens", budget=0.1, detector="change", before=0.05, after=0.09)
    assert (
        f"9 % of sampled tokens in scanner=faint {words}, 5 % before (budget: 10 %)"
        in page(more).splitlines()[0]
    )
    few = event_with(
        metric="unlikely-tokens",
        budget=0.1,
        detector="tail",
        tail_level=0.2,
        tail_before=0.01,
        tail_after=0.04,
    )
    worst = f"in 4 % of outputs, 1 % before, more than 20 % of sampled tokens in scanner=faint {words}"
    assert worst in page(few).splitlines()[0]
    assert f"4 % of outputs have a share of sampled tokens that {words} above 20 %" in details(few)[0]
    over = event_with(metric="unlikely-tokens", detector="tail", from_verdict="firing", verdict="ok")
    assert f"in its worst outputs no more of its sampled tokens {words} than before" in page(over)


def test_the_end_of_an_alert_leaves_out_the_window_that_still_contains_the_drift() -> None:
    """A recovery beside a mean of 2.7 % against 1 % is a contradiction: the mean is of another window."""
    said = page(read(**ENDED | {"mean": 0.027, "low": 0.02, "high": 0.03}))
    assert "2.7" not in said
    assert text_of(read(**ENDED)).headline == (
        "digits 1: scanner=faint has recovered: its changed answers are within the budget of 1 %."
    )


def test_the_names_of_the_kinds_are_those_of_the_detectors() -> None:
    """Whoever words a case does not load the detectors."""
    assert {kind.value for kind in DetectorKind} == set(DETECTORS)


SIZES = st.sampled_from([0.0, 3.68e-11, 9e-5, 0.0077, 0.0099, 0.01, 0.044, 0.44, 1.0])
ERRORS = st.sampled_from([None, 0.0, 1e-12, 0.001, 0.5, float("inf")])


@pytest.mark.slow
@examples(2)
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
    assert ("All traffic: within its budget" in told) == within, told
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
    (said,) = details(msgspec.structs.replace(event_with(metric="divergence"), explanation=found))
    assert said == (
        "Over all traffic the mean did not move beyond chance, but a part of it did:"
        " +0.00292 nat (standard error 0.0005) by traffic that is new or was rare before."
    )


def test_a_move_that_six_digits_do_not_show_is_printed_as_none() -> None:
    """`from 1 to 1` says nothing."""
    found = Explanation(
        moved=("topk_overlap",), moved_before=(1.0,), moved_after=(1.0 - 1e-12,), n_measures=1
    )
    (said,) = details(msgspec.structs.replace(event_with(), explanation=found))
    assert said == "No other measure moved beyond chance (1 compared)."
