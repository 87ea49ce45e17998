"""The judgement of a parent whether a child process hangs: of the sidecar's supervisor, and of `quantdrift up`."""

import os
from datetime import UTC, datetime

import pytest

from quantdrift.cli.run import up
from quantdrift.core.clock import ManualClock
from quantdrift.core.process.heartbeat import LOOK_S, Heartbeat
from quantdrift.sidecar.state.counters import Counters, Gauge, Slot
from quantdrift.sidecar.state.readiness import LATE_S, WORKER_HUNG_S, ChildWatch, Readiness

pytestmark = pytest.mark.unit

NO_SUCH_PROCESS = 2**30  # its state cannot be read, so that only time counts


class Child:
    """A child process that is not there."""

    def __init__(self, pid: int) -> None:
        self.pid: int | None = pid
        self.final = None
        self.replaced = ""

    def replace(self, why: str) -> None:
        """Remember why."""
        self.replaced = why


class Sidecar:
    """A sidecar with one relay worker, which serves and has beaten once.

    Attributes
    ----------
    watch, slot, child
        The supervisor's view of the worker, its counters and its process.
    """

    def __init__(self, pid: int = NO_SUCH_PROCESS) -> None:
        counters = Counters.create(4, 1)
        self.child, self.slot = Child(pid), counters.slot(0)
        self.watch = ChildWatch(self.child, self.slot, WORKER_HUNG_S)
        self._readiness = Readiness(counters)
        self.slot.set(Gauge.SERVING, 1)
        self.slot.adjust(Gauge.BEATS)
        assert self.watch.look(LOOK_S) == ""

    @property
    def serves(self) -> bool:
        """Whether it is ready."""
        return self._readiness.ready()


def started(pid: int = NO_SUCH_PROCESS) -> tuple[Sidecar, Slot, Child]:
    """Return a sidecar, and the counters and the process of its worker."""
    sidecar = Sidecar(pid)
    return sidecar, sidecar.slot, sidecar.child


def looks(sidecar: Sidecar, seconds: float) -> list[str]:
    """Look every `LOOK_S` for so long, and return the answers."""
    return [sidecar.watch.look(LOOK_S) for _ in range(round(seconds / LOOK_S))]


def test_a_silent_child_does_not_serve_after_five_seconds_and_hangs_after_ten() -> None:
    """Both limits count from its last heartbeat."""
    sidecar, slot, _ = started()
    looks(sidecar, LATE_S - LOOK_S)
    assert sidecar.serves
    slot.adjust(Gauge.BEATS)
    looks(sidecar, LATE_S)
    assert sidecar.serves
    assert not any(looks(sidecar, WORKER_HUNG_S - LATE_S - LOOK_S))
    assert not sidecar.serves
    sidecar.watch.look(LOOK_S)
    assert "gave no heartbeat for 10 s" in sidecar.watch.look(LOOK_S)


def test_time_in_which_the_supervisor_did_not_run_does_not_count() -> None:
    """After an hour's pause of the whole container a child has as much time as before to show that it works."""
    sidecar, slot, _ = started()
    assert sidecar.watch.look(3600.0) == ""
    assert sidecar.serves
    slot.adjust(Gauge.BEATS)
    assert sidecar.watch.look(LOOK_S) == ""
    for _ in range(8):  # a machine under load: the supervisor looks every minute only
        assert sidecar.watch.look(60.0) == ""


def test_a_child_that_waits_for_a_processor_is_not_judged() -> None:
    """The process of this test is runnable, and uses little processor time between the looks."""
    sidecar, _, _ = started(os.getpid())
    assert not any(looks(sidecar, 10 * WORKER_HUNG_S))
    assert not sidecar.serves


def test_a_new_process_has_a_minute_until_its_first_heartbeat() -> None:
    """Imports take long on a busy machine."""
    sidecar, slot, child = started()
    child.pid = NO_SUCH_PROCESS + 1
    slot.set(Gauge.BEATS, 0)
    assert not any(looks(sidecar, 59.0))
    assert any(looks(sidecar, 3.0))


def test_a_child_that_is_being_restarted_does_not_hang() -> None:
    """While there is no process, there is nothing to kill."""
    sidecar, _, child = started()
    child.pid = None
    assert not any(looks(sidecar, 100.0))


def test_the_beats_of_a_process_begin_again_with_the_next_one() -> None:
    """Parent and child see one count, which the parent sets back when the process has ended."""
    parent = Heartbeat.create()
    child = Heartbeat(parent.fd)
    assert parent.beats == 0
    child.beat()
    child.beat()
    assert parent.beats == 2
    parent.reset()
    child.beat()
    assert parent.beats == 1
    os.close(parent.fd)


class _Part(up._Process):
    """A part of `quantdrift up` that has beaten once."""

    def __init__(self, name: str, pid: int) -> None:
        clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
        super().__init__(name, "quantdrift", (), {}, clock=clock)
        self.child = self.of_test = Child(pid)  # type: ignore[assignment]
        self._hang_watch._child = self.child
        self._heartbeat.beat()
        self.replace_if_hung(LOOK_S)

    def silent(self, seconds: float) -> None:
        """Let so much time pass without a heartbeat."""
        for _ in range(round(seconds / LOOK_S)):
            self.replace_if_hung(LOOK_S)


def test_a_part_of_up_that_waits_for_a_processor_is_not_replaced() -> None:
    """The process of this test is runnable and uses little processor time between the looks; one that waits is replaced."""
    waiting = _Part("monitor", os.getpid())
    waiting.silent(2 * up.SILENT_S["monitor"])
    assert waiting.of_test.replaced == ""
    hanging = _Part("monitor", NO_SUCH_PROCESS)
    hanging.silent(up.SILENT_S["monitor"])
    assert hanging.of_test.replaced == "gave no heartbeat for 120 s, and was killed"


def test_time_in_which_up_did_not_run_counts_against_none_of_its_parts() -> None:
    """A suspended machine; and a minute between two looks, again and again, on a machine that is too busy."""
    part = _Part("monitor", NO_SUCH_PROCESS)
    for _ in range(100):
        part.replace_if_hung(60.0)
    assert part.of_test.replaced == ""


def test_a_sidecar_that_hangs_is_reported_by_up_and_not_replaced() -> None:
    """Its relay workers serve without its first process, and would end with it."""
    part = _Part("sidecar", NO_SUCH_PROCESS)
    part.mark_up()
    part.silent(2 * up.SILENT_S["sidecar"])
    assert part.of_test.replaced == ""
    assert not part.state.works
    assert part.state.why.startswith("its first process gave no heartbeat for")
