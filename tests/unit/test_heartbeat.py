"""The supervisor's judgement whether a child process hangs."""

import os

import pytest

from quantdrift.sidecar.state.counters import Counters, Gauge, Slot
from quantdrift.sidecar.state.heartbeat import LATE_S, LOOK_S, WORKER_HUNG_S, Heartbeat

pytestmark = pytest.mark.unit

NO_SUCH_PROCESS = 2**30  # its state cannot be read, so that only time counts


class Child:
    """A child process that is not there."""

    def __init__(self, pid: int) -> None:
        self.pid: int | None = pid

    def replace(self, why: str) -> None:
        """Do nothing."""


def started(pid: int = NO_SUCH_PROCESS) -> tuple[Heartbeat, Slot, Child]:
    """Return the heartbeat of a child that serves and has beaten once, its counters and the child."""
    child, slot = Child(pid), Counters.create(1, 1).slot(0)
    heartbeat = Heartbeat(child, slot, WORKER_HUNG_S)
    slot.set(Gauge.SERVING, 1)
    slot.adjust(Gauge.BEATS)
    assert heartbeat.look(LOOK_S) == ""
    return heartbeat, slot, child


def looks(heartbeat: Heartbeat, seconds: float) -> list[str]:
    """Look every `LOOK_S` for so long, and return the answers."""
    return [heartbeat.look(LOOK_S) for _ in range(round(seconds / LOOK_S))]


def test_a_silent_child_does_not_serve_after_five_seconds_and_hangs_after_ten() -> None:
    """Both limits count from its last heartbeat."""
    heartbeat, slot, _ = started()
    looks(heartbeat, LATE_S - LOOK_S)
    assert heartbeat.serves
    slot.adjust(Gauge.BEATS)
    looks(heartbeat, LATE_S)
    assert heartbeat.serves
    assert not any(looks(heartbeat, WORKER_HUNG_S - LATE_S - LOOK_S))
    assert not heartbeat.serves
    heartbeat.look(LOOK_S)
    assert "gave no heartbeat for 10 s" in heartbeat.look(LOOK_S)


def test_time_in_which_the_supervisor_did_not_run_does_not_count() -> None:
    """After an hour's pause of the whole container a child has as much time as before to show that it works."""
    heartbeat, slot, _ = started()
    assert heartbeat.look(3600.0) == ""
    assert heartbeat.serves
    slot.adjust(Gauge.BEATS)
    assert heartbeat.look(LOOK_S) == ""
    for _ in range(8):  # a machine under load: the supervisor looks every minute only
        assert heartbeat.look(60.0) == ""


def test_a_child_that_waits_for_a_processor_is_not_judged() -> None:
    """The process of this test is runnable, and uses little processor time between the looks."""
    heartbeat, _, _ = started(os.getpid())
    assert not any(looks(heartbeat, 10 * WORKER_HUNG_S))
    assert not heartbeat.serves


def test_a_new_process_has_a_minute_until_its_first_heartbeat() -> None:
    """Imports take long on a busy machine."""
    heartbeat, slot, child = started()
    child.pid = NO_SUCH_PROCESS + 1
    slot.set(Gauge.BEATS, 0)
    assert not any(looks(heartbeat, 59.0))
    assert any(looks(heartbeat, 3.0))


def test_a_child_that_is_being_restarted_does_not_hang() -> None:
    """While there is no process, there is nothing to kill."""
    heartbeat, _, child = started()
    child.pid = None
    assert not any(looks(heartbeat, 100.0))
