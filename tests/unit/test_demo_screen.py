"""The text that the demo prints."""

import io

import pytest
from rich.console import Console

from quantdrift.demo.model import Quality
from quantdrift.demo.otlp_receiver import Event
from quantdrift.demo.scans import Scanner
from quantdrift.demo.screen import Screen, ScreenView, evidence_bar
from quantdrift.demo.watch import Moment, ShownSlice

pytestmark = pytest.mark.unit


def _slice(name: str, verdict: str, evidence: float | None, mean: float | None) -> ShownSlice:
    return ShownSlice(
        slice=name,
        verdict=verdict,
        reason="",
        n_groups=1_234,
        evidence_ratio=evidence,
        flip_mean=mean,
        flip_low=None if mean is None else mean / 2,
        flip_high=None if mean is None else mean * 2,
        flip_budget=0.01,
        divergence_mean=mean,
        divergence_budget=0.02,
    )


def _view(elapsed_s: float) -> ScreenView:
    slices = (_slice("all", "ok", 1e-3, 0.003), _slice("scanner=archive", "unknown", None, None))
    return ScreenView(
        phase="1. healthy",
        elapsed_s=elapsed_s,
        snapshot=Moment(offered=5_000, taken=1_000, replayed=990, slices=slices),
        failed=0,
    )


def _screen(*, terminal: bool) -> tuple[Screen, io.StringIO]:
    text = io.StringIO()
    return Screen(Console(file=text, force_terminal=terminal, width=140, _environ={})), text


@pytest.mark.parametrize(
    ("ratio", "full"), [(None, 0), (0.0, 0), (1e-30, 0), (1e-7, 0), (10**-3.5, 9), (1.0, 18), (50.0, 18)]
)
def test_the_evidence_bar_is_full_at_the_threshold(ratio: float | None, full: int) -> None:
    """It is logarithmic, and never longer than its place."""
    assert evidence_bar(ratio) == "█" * full + "·" * (18 - full)


def test_a_log_file_gets_plain_lines_now_and_then() -> None:
    """Without a terminal there are no control codes and no more than one line in five seconds."""
    screen, text = _screen(terminal=False)
    with screen:
        for second in range(11):
            screen.show(_view(float(second)))
    lines = text.getvalue().splitlines()
    assert len(lines) == 3
    assert "\x1b" not in text.getvalue()
    assert lines[0] == "   0 s  5,000 requests, 990 replayed | all OK 0.30%, archive not known"


def test_a_line_of_a_log_file_fits_on_a_screen() -> None:
    """Of many slices the worst one is named, and the others are counted; so are lost and failed requests, if there are any."""
    screen, text = _screen(terminal=False)
    names = ("office", "lab", "microfilm", "mobile", "archive")
    slices = (
        _slice("all", "ok", 1e-3, 0.0031),
        *(_slice(f"scanner={name}", "ok", 1e-3, 0.001) for name in names[:3]),
        _slice("scanner=mobile", "unknown", None, None),
        _slice("scanner=archive", "firing", 1.0, 0.0712),
    )
    snapshot = Moment(offered=123_456, taken=65_432, replayed=65_321, lost=12, slices=slices, stale=True)
    with screen:
        screen.show(ScreenView(phase="", elapsed_s=412.0, snapshot=snapshot, failed=3))
    (line,) = text.getvalue().splitlines()
    assert line.startswith(
        " 412 s  123,456 requests, 65,321 replayed, 12 lost, 3 failed | all OK 0.31%, archive drifted 7.12%,"
        " 1 other not known, 3 others OK"
    )
    assert len(line.partition("  (something")[0]) <= 130


def test_a_line_without_slices_ends_with_its_counts() -> None:
    """Before the first comparison there is nothing to set apart."""
    screen, text = _screen(terminal=False)
    with screen:
        screen.show(ScreenView(phase="", elapsed_s=0.0, snapshot=Moment(offered=5), failed=0))
    assert text.getvalue() == "   0 s  5 requests, 0 replayed\n"


def test_a_terminal_gets_a_live_table() -> None:
    """Every slice is a row with its interval and its evidence."""
    screen, text = _screen(terminal=True)
    with screen:
        screen.show(_view(1.0))
    assert "scanner=archive" in text.getvalue()
    assert "0.15% to 0.60%" in text.getvalue()
    assert evidence_bar(1e-3) in text.getvalue()


def test_a_firing_slice_has_a_full_bar_although_its_evidence_was_reset() -> None:
    """After the page the stored evidence is zero; what paged is what is shown."""
    screen, text = _screen(terminal=True)
    slices = (_slice("scanner=archive", "firing", 0.0, 0.05),)
    with screen:
        screen.show(ScreenView(phase="", elapsed_s=0.0, snapshot=Moment(slices=slices), failed=0))
    assert evidence_bar(1.0) in text.getvalue()


def test_an_alert_is_shown_with_all_its_attributes() -> None:
    """What came over the wire is what is shown."""
    screen, text = _screen(terminal=False)
    attributes = {"quantdrift.slice": "scanner=archive", "quantdrift.examples": ["a1", "b2"], "n": 5}
    screen.event(
        Event(name="e", severity=17, body="it drifts", time_unix_nano=0, attributes=attributes, resource={})
    )
    for part in ("it drifts", "scanner=archive", "a1", "b2", "00:00:00 UTC"):
        assert part in text.getvalue()


def test_the_check_against_the_labels_shows_who_lost_accuracy() -> None:
    """Both accuracies and their difference stand side by side."""
    screen, text = _screen(terminal=False)
    row = Quality(
        scanner=Scanner.ARCHIVE,
        n=900,
        reference_accuracy=0.975,
        candidate_accuracy=0.931,
        flip=0.052,
        divergence=0.08,
    )
    screen.quality("check", [row])
    for part in ("archive", "97.5%", "93.1%", "-4.4", "5.20%"):
        assert part in text.getvalue()


def test_the_figures_that_decided_an_alert_are_below_those_of_the_recent_window() -> None:
    """The table shows what was seen lately and says so; an alert is decided by what came since its onset."""
    screen, text = _screen(terminal=False)
    slices = (_slice("all", "ok", None, 0.003), _slice("scanner=archive", "firing", 0.0, 0.0077))
    screen.verdicts(
        slices, {"scanner=archive": "mean KL 0.09 nat since 12:00", "all": "an alert that has ended"}
    )
    assert "changed lately" in text.getvalue()
    assert "scanner=archive drifted; its alert said: mean KL 0.09 nat since 12:00" in text.getvalue()
    assert "an alert that has ended" not in text.getvalue()
