"""The sentences of the report."""

from datetime import timedelta

import msgspec
import pytest

from quantdrift.core.notation import number, percent
from quantdrift.core.records import Metric, Verdict
from quantdrift.facts.estimate import Estimate
from quantdrift.report.wording import detail, duration, headline, interval, measured
from tests.support.monitor.report_figures import NOW, make_episode, make_slice

pytestmark = pytest.mark.unit

ALL = make_slice("all", verdict=Verdict.OK, flip=0.004)
OTHERS = [make_slice(f"scanner={name}", slice_id=n, verdict=Verdict.OK) for n, name in enumerate("abcde", 3)]


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.0523, "5.2 %"), (0.01, "1 %"), (0.0043, "0.43 %"), (0.38, "38 %"), (1.0, "100 %"), (0.0, "0 %")],
)
def test_shares_read_as_percent_with_two_digits(ratio: float, text: str) -> None:
    """A share keeps two significant digits and no idle zeros."""
    assert percent(ratio) == text


def test_bounds_have_the_digits_of_their_mean() -> None:
    """An interval is not more exact than what it belongs to."""
    assert measured(Metric.FLIP, Estimate(mean=0.0523, low=0.0391, high=0.0682), "") == "5.2 % [3.9, 6.8]"
    assert (
        measured(Metric.DIVERGENCE, Estimate(mean=0.0214, low=0.0178, high=0.0263), "nat")
        == "0.021 nat [0.018, 0.026]"
    )
    assert interval(Metric.DIVERGENCE, Estimate(mean=0.02, low=None, high=None)) == ""
    assert measured(Metric.DIVERGENCE, None, "nat") == "no data"


def test_infinite_divergence_is_said_in_words() -> None:
    """A quantised zero is no number."""
    assert number(float("inf")) == "infinite"
    assert number(None) == "?"


def test_measures_of_an_item_are_named() -> None:
    """Numbers with two digits, flags by their name alone; nothing of what is not so, empty, or no figure."""
    assert detail(
        {
            "candidate_top": 0,
            "tv": 0.41234,
            "lost": True,
            "gained": False,
            "classes": [],
            "changed": [4, 7],
            "finish_reason": "stop",
            "by_output": {"latent": 0.25, "aside": 1e-7},
            "clustering": 3,
        }
    ) == (
        "candidate top 0, tv 0.41, lost, changed 4/7, finish reason stop, by output (latent 0.25, aside 0.0000001)"
    )
    assert detail({"candidate_not_finite": True}) == "candidate not finite"


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (timedelta(minutes=12), "12 minutes"),
        (timedelta(minutes=1), "1 minute"),
        (timedelta(hours=36), "1.5 days"),
        (timedelta(0), "0 seconds"),
    ],
)
def test_durations_use_their_largest_unit(span: timedelta, text: str) -> None:
    """A duration is a number and a word."""
    assert duration(span) == text


def test_the_headline_names_the_slice_and_says_what_its_alert_said() -> None:
    """What a director reads first says what drifted, how far, and against what."""
    assert headline("digits int8-7", [make_slice(), *OTHERS], ALL, [make_episode()]) == (
        "1 of 6 slices of digits int8-7 drifted: at least 3.1 % of answers in scanner=faint changed (budget: 1 %),"
        " while in all traffic 0.4 % changed."
    )


def test_the_headline_names_the_other_drifted_slices_and_a_recovery() -> None:
    """More than one page: the first in full, the others by name."""
    episodes = [
        make_episode(resolved_at=NOW, ended="recovered"),
        make_episode(slice_name="scanner=a", slice_id=3),
        make_episode(slice_name="scanner=a", slice_id=3),
    ]
    found = headline("digits int8-7", [make_slice(), *OTHERS], ALL, episodes)
    assert found.startswith("2 of 6 slices")
    assert found.endswith("; recovered on 2026-11-16 12:00 UTC; also scanner=a.")
    episodes[0] = make_episode(resolved_at=NOW, ended="replaced")
    found = headline("digits int8-7", [make_slice(), *OTHERS], ALL, episodes)
    assert "; version replaced on 2026-11-16 12:00 UTC;" in found


def test_the_headline_of_drift_everywhere_says_so() -> None:
    """Drift of all traffic is said as such."""
    whole = make_slice("all", verdict=Verdict.FIRING)
    found = headline("digits int8-7", OTHERS, whole, [make_episode(slice_name="all", slice_id=1)])
    assert found.startswith("All traffic of digits int8-7 drifted: at least 3.1 % of answers in all changed")


def test_the_headline_of_a_ticket_says_that_nothing_pages() -> None:
    """A warning is not a page."""
    found = headline("digits int8-7", OTHERS, ALL, [make_episode(severity=Verdict.WARNING)])
    assert found.startswith("digits int8-7 raised no page, but 1 ticket was open: at least 3.1 % of answers")


def test_the_headline_of_a_quiet_week_still_counts_what_is_unknown() -> None:
    """Quiet is told with its numbers, and unknown slices are never counted as healthy."""
    unknown = make_slice("scanner=z", verdict=Verdict.UNKNOWN)
    assert headline("digits int8-7", [*OTHERS, unknown], ALL, []) == (
        "None of the 6 slices of digits int8-7 drifted; over all its traffic it flips 0.4 % [0.3, 0.52] of"
        " decisions against a budget of 1 %. 1 slice is unknown: there is too little data to call it healthy."
    )


def test_the_headline_of_an_unknown_version_does_not_reassure() -> None:
    """Where all is unknown, nothing is said to be fine."""
    whole = make_slice("all", verdict=Verdict.UNKNOWN)
    found = headline("digits int8-7", [], whole, [])
    assert (
        found
        == "The health of digits int8-7 is not known yet (evidence 34 against 10): unknown does not mean healthy."
    )


def test_the_headline_of_a_version_whose_outputs_are_no_distributions_says_so() -> None:
    """A reference that gives nothing but NaN measures nothing, however much was replayed."""
    nothing = msgspec.structs.replace(ALL.figures, changed_share=None, divergence=None)
    blind = msgspec.structs.replace(ALL, figures=nothing)
    assert headline("digits int8-7", OTHERS, blind, []) == (
        "No exchange of digits int8-7 gave outputs that can be compared in this period, so its health is unknown."
    )


def test_the_headline_without_data_says_so() -> None:
    """Silence is not health."""
    assert headline("digits int8-7", [], None, []) == (
        "No exchange of digits int8-7 was compared in this period, so its health is unknown."
    )
    assert headline("digits int8-7", [], None, [make_episode()]).endswith("; 1 alert was open.")
