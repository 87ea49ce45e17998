"""The limits of the capture process on what it sends."""

from datetime import UTC, datetime, timedelta

import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.config import SamplingOptions
from quantdrift.sidecar.capture.rate_limits import TOO_LATE_S, Limit, RateLimits, TokenBucket
from quantdrift.sidecar.state.counters import Counters

pytestmark = pytest.mark.unit


def test_a_bucket_lets_its_rate_through_and_no_more() -> None:
    """One second's burst, then the rate; a pause does not save up more than a second."""
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    bucket = TokenBucket(10, clock)
    passed = 0
    for step in range(51):
        while bucket.allows():
            bucket.take(1)
            passed += 1
        clock.advance(0.1 if step < 50 else 60)
    assert 59 <= passed <= 60
    while bucket.allows():
        bucket.take(1)
        passed += 1
    assert 69 <= passed <= 70


def test_a_large_one_passes_as_a_small_one_would_and_is_paid_off() -> None:
    """Its size does not count before it has passed; afterwards nothing passes until its debt is paid."""
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    bucket = TokenBucket(10, clock)
    bucket.take(8)
    assert bucket.allows()
    bucket.take(27)
    clock.advance(2.5)
    assert not bucket.allows()
    clock.advance(0.2)
    assert bucket.allows()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(max_exchanges_per_s=50),
        SamplingOptions(max_exchanges_per_s=1e6, max_bytes_per_s=50 * 1000),
    ],
)
def test_a_capture_process_that_was_stopped_loses_nothing_of_its_backlog_to_the_limits(
    sampling: SamplingOptions,
) -> None:
    """Two workers sent 24/s each while it was stopped for 10 s; it reads what one of them sent after that of the other one."""
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    caps = RateLimits(sampling, Counters.create(1, 1).slot(0), clock)
    stopped_s = clock.now().timestamp()
    clock.advance(10)
    passed = 0
    for _ in range(2):
        for number in range(240):
            captured_s = stopped_s + number / 24
            if caps.refusal(captured_s) is None:
                caps.count_passed(1000, captured_s)
                passed += 1
    assert passed == 480
    clock.advance(1)
    n_fresh = 0  # the backlog took nothing from what comes after it
    while caps.refusal(clock.now().timestamp()) is None:
        caps.count_passed(1000, clock.now().timestamp())
        n_fresh += 1
    assert 49 <= n_fresh <= 51


def test_a_backlog_is_cut_to_the_rate_of_each_second_of_its_capture() -> None:
    """A flood that came while the capture process was stopped passes at the rate, as if it had been read in time."""
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    limit = Limit(50, clock)
    stopped_s = clock.now().timestamp()
    clock.advance(11.5)
    passed = 0
    for number in range(10_000):
        captured_s = stopped_s + number / 1000
        if limit.allows(captured_s):
            limit.take(1, captured_s)
            passed += 1
    assert passed == 500


def test_no_times_of_capture_let_more_pass_than_the_bound() -> None:
    """Whatever times callers of the intake report: at most the rate, `TOO_LATE_S` of it once, and one burst."""
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    limit = Limit(10, clock)
    passed = 0
    for _ in range(1000):
        clock.advance(0.1)
        for age_s in (-5.0, 0.0, 0.5, 2.0, 7.5, 29.0, 31.0, 3600.0):
            captured_s = clock.now().timestamp() - age_s
            for _ in range(30):
                if limit.allows(captured_s):
                    limit.take(1, captured_s)
                    passed += 1
    assert passed <= 10 * (100 + TOO_LATE_S + 1) + 2


class _ShiftedClock(ManualClock):
    """A clock whose wall time somebody sets, or that a suspended machine catches up with; time for durations goes on."""

    shift = timedelta()

    def now(self) -> datetime:
        """Return the wall time."""
        return super().now() + self.shift


@pytest.mark.parametrize("hours", [-2.0, -0.05, 0.05, 2.0])
def test_a_clock_that_jumps_changes_nothing_of_the_limits(hours: float) -> None:
    """Forward or backward, by minutes or hours: as many pass as before, and what was in hand at the jump is neither refused nor a burst."""
    clock = _ShiftedClock(datetime(2026, 1, 1, tzinfo=UTC))
    caps = RateLimits(SamplingOptions(max_exchanges_per_s=5), Counters.create(1, 1).slot(0), clock)
    passed = [0, 0]
    for after in (False, True):
        for _ in range(600):
            captured_s = clock.now().timestamp()
            clock.shift = timedelta(hours=hours) if after else timedelta()
            clock.advance(0.1)
            if caps.refusal(captured_s) is None:
                caps.count_passed(1, captured_s)
                passed[after] += 1
    assert passed == [pytest.approx(300, abs=6), pytest.approx(300, abs=6)]
