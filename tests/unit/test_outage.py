"""The messages about a part that does not run."""

import logging
from datetime import UTC, datetime

import pytest

from quantdrift.cli.run.outage import REPEAT_S, LastError, Outage
from quantdrift.core.clock import ManualClock

pytestmark = pytest.mark.unit


def test_the_same_reason_is_logged_once_in_ten_minutes_another_at_once_and_the_end_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A part is tried again every half minute, all night. A number makes it no other reason, and reasons may take turns."""
    caplog.set_level(logging.INFO)
    clock = ManualClock(datetime(2026, 3, 1, 12, 3, 5, tzinfo=UTC))
    outage = Outage("shadow", 30.0, clock)
    outage.over()
    since = clock.now().astimezone().strftime("%H:%M:%S")
    for number in range(10):
        outage.failed("x.onnx is not there")
        if number:
            outage.failed(f"process {number} cannot read x.onnx")
        clock.advance(30.0)
    clock.advance(REPEAT_S - 270.0)
    outage.failed("process 11 cannot read x.onnx")
    outage.over()
    outage.over()
    first = f"shadow is down since {since}: x.onnx is not there; it is restarted, at least every 30 s"
    assert [record.getMessage() for record in caplog.records] == [
        first,
        first.replace("x.onnx is not there", "process 1 cannot read x.onnx"),
        first.replace("x.onnx is not there", "process 11 cannot read x.onnx"),
        "shadow runs again after 630 s",
    ]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["12:03:05 shadow   ERROR   the device is gone", "12:03:06 shadow   INFO    ending"],
            "the device is gone",
        ),
        (['{"level": "error", "message": "the device is gone"}', "{}", '{"a"'], "the device is gone"),
        (
            ['{"level": "error", "logger": "quantdrift.cli.main", "message": "the port is used"}', "{}"],
            "the port is used",
        ),
        (["Traceback (most recent call last):", '  File "x.py"', "ValueError: no"], "ValueError: no"),
        (["12:03:05 up ERROR   x", "quantdrift: c.toml:", "  - a", "  - b (try again)"], "c.toml: a b"),
        (["some library's own words", "12:03:05 shadow   WARNING later"], ""),
    ],
)
def test_the_reason_is_the_last_error_that_a_process_wrote(lines: list[str], reason: str) -> None:
    """Of its log as text or JSON, of a traceback, or of the command line, whose error may have several lines."""
    last_error = LastError()
    for line in lines:
        last_error.read(line.encode())
    assert last_error.take() == reason
    assert last_error.take() == ""
