"""Growing pauses between attempts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.process.backoff import Backoff
from quantdrift.core.process.run import Stop, supervise

pytestmark = pytest.mark.unit


@given(
    first_s=st.floats(0.001, 10.0),
    factor=st.floats(1.0, 1000.0),
    n=st.integers(1, 60),
)
def test_each_pause_is_between_half_and_all_of_a_length_that_doubles_up_to_the_limit(
    first_s: float, factor: float, n: int
) -> None:
    """However many attempts fail, no pause exceeds the limit, and none is shorter than half of its length."""
    longest_s = first_s * factor
    backoff = Backoff(first_s, longest_s)
    for number in range(n):
        nominal_s = min(first_s * 2.0**number, longest_s)
        assert nominal_s / 2 <= backoff.next_s() <= nominal_s


def test_a_success_makes_the_next_pause_short_again() -> None:
    """After `reset` the pauses begin again with the first one."""
    backoff = Backoff(1.0, 64.0)
    for _ in range(10):
        backoff.next_s()
    backoff.reset()
    assert 0.5 <= backoff.next_s() <= 1.0
    assert 1.0 <= backoff.next_s() <= 2.0


def test_two_processes_do_not_pause_for_the_same_time() -> None:
    """Jitter: 20 pauses of two processes in the same state are not all equal (chance of a false failure: nil)."""
    first, second = Backoff(1.0, 1.0), Backoff(1.0, 1.0)
    assert [first.next_s() for _ in range(20)] != [second.next_s() for _ in range(20)]


class _RecordedStop(Stop):
    """A stop that records the pauses, does not wait, and is set after six of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses_s: list[float] = []

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Record the pause."""
        assert timeout_s is not None
        self.pauses_s.append(timeout_s)
        if len(self.pauses_s) == 6:
            self.set()
        return self.is_set()


async def test_a_supervised_task_that_fails_is_tried_again_after_growing_pauses_with_jitter() -> None:
    """The pauses double up to 30 s, and each has jitter, so that a fleet does not come back to a server at once."""

    async def fail() -> None:
        raise ValueError("as always")

    stop = _RecordedStop()
    await supervise("failing", fail, stop)
    for pause_s, nominal_s in zip(stop.pauses_s, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0], strict=True):
        assert nominal_s / 2 <= pause_s <= nominal_s
    assert stop.pauses_s != [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
