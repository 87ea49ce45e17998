"""The limit on observed connections: who gives way, and how often it is looked for."""

import pytest

from quantdrift.sidecar.relay.observing.limit import QUIET_S, ObserverLimit

pytestmark = pytest.mark.unit


class Clock:
    """A clock that each look at a connection moves by `look_s`."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.look_s = 0.0
        self.n_looks = 0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


class Fake:
    """A connection."""

    def __init__(
        self,
        clock: Clock,
        spoke_s: float = 0.0,
        *,
        idle: bool = False,
        waits: bool = False,
        begins: bool = False,
    ) -> None:
        self._clock = clock
        self._idle = idle
        self.spoke_s = clock.now_s - spoke_s
        self.waits_for_client = waits or idle or begins
        self.has_no_whole_head = begins
        self.gave_way = False

    @property
    def can_resume(self) -> bool:
        """Return whether it is idle; a look at it takes time."""
        self._clock.n_looks += 1
        self._clock.now_s += self._clock.look_s
        return self._idle

    def give_way(self) -> None:
        """Note it."""
        self.gave_way = True


def limit_of(clock: Clock, *connections: Fake) -> ObserverLimit:
    """Return a limit that the connections have reached."""
    limit = ObserverLimit(clock)
    for connection in connections:
        assert limit.enter(connection, len(connections))
    return limit


def test_the_longest_idle_gives_way_first_and_quiet_clients_after_all_idle_ones() -> None:
    """Whoever has no whole head does before them, however lately it spoke; one that waits for its answer never does."""
    clock = Clock()
    answering = Fake(clock, 100 * QUIET_S)
    unfinished = Fake(clock, 2 * QUIET_S, waits=True)
    writing = Fake(clock, QUIET_S / 2, waits=True)
    idle = [Fake(clock, spoke_s, idle=True) for spoke_s in (1, 3, 2)]
    heads = [Fake(clock, spoke_s, begins=True) for spoke_s in (0, 1)]
    limit = limit_of(clock, answering, unfinished, *heads, writing, *idle)
    order = []
    for _ in range(7):
        new = Fake(clock)
        entered = limit.enter(new, 8)
        order += [
            one
            for one in (*idle, *heads, unfinished, writing, answering)
            if one.gave_way and one not in order
        ]
        if not entered:
            break
    assert order == [idle[1], idle[2], idle[0], heads[1], heads[0], unfinished]
    assert len(limit) == 8


def test_who_is_observed_already_needs_no_place() -> None:
    """It may speak as often as it likes."""
    clock = Clock()
    one = Fake(clock)
    limit = limit_of(clock, one)
    assert limit.enter(one, 1)
    limit.leave(one)
    assert len(limit) == 0


def test_searches_that_find_nobody_are_rare() -> None:
    """A search looks at every observed connection."""
    clock = Clock()
    limit = limit_of(clock, *(Fake(clock) for _ in range(100)))
    for _ in range(1000):
        assert not limit.enter(Fake(clock), 100)
        clock.now_s += 0.001
    assert clock.n_looks <= 11 * 200


def test_searches_take_a_tenth_of_the_time_at_most() -> None:
    """Also where each finds a few: the others are not observed, and are counted."""
    clock = Clock()
    clock.look_s = 1e-5
    busy = [Fake(clock) for _ in range(999)]
    limit = limit_of(clock, *busy, Fake(clock, 1, idle=True))
    began_s, searching_s = clock.now_s, 0.0
    for _ in range(10_000):
        before_s = clock.now_s
        limit.enter(Fake(clock, idle=True), 1000)
        searching_s += clock.now_s - before_s
        clock.now_s += 1e-4
    assert 0 < searching_s < 0.15 * (clock.now_s - began_s)
