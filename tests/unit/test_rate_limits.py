"""The token bucket of the capture process."""

from datetime import UTC, datetime

import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.sidecar.capture.rate_limits import TokenBucket

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
