"""The warning that an answer costs a process too much processor time."""

import logging
import time

import pytest

from quantdrift.core.process.processor_time import WINDOW, ProcessorTime

pytestmark = pytest.mark.unit

HINTS = {"decode": "send less", "slices": "use fewer"}


def _warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_part_that_costs_most_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not of the first answers, while a process still loads; and not again."""
    watched = ProcessorTime(HINTS)
    for _ in range(4):
        watched.spent("decode", 0.2)
        watched.spent("slices", 1.3)
        watched.answered(WINDOW)
    assert _warned(caplog) == [
        "one answer costs 1.5 ms of processor time here, of which `slices` takes 1.3 ms: use fewer"
    ]


def test_below_a_millisecond_and_without_many_answers_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Windows are looked at one by one; what is no part of ours, such as the reference, does not count."""
    watched = ProcessorTime(HINTS)
    for _ in range(3):
        watched.spent("decode", 0.9)
        watched.spent("replay", 60.0)
        watched.answered(WINDOW)
    watched.spent("slices", 60.0)
    watched.answered(WINDOW - 1)
    assert _warned(caplog) == []


def test_processor_time_is_measured_and_not_time() -> None:
    """A part that computes counts for what its thread computed."""
    watched = ProcessorTime(HINTS)
    began_s = time.thread_time()
    with watched.part("decode"):
        while time.thread_time() - began_s < 0.01:
            pass
    assert 0.005 < watched.seconds("decode") <= time.thread_time() - began_s
