"""Which of several workers reads a model: one where one is enough, more where it is not, and never nobody for long."""

import random

import pytest

from quantdrift.core.config.schema import Shadow
from quantdrift.core.stream.connection import Readers
from quantdrift.shadow.pipeline.one_reader import LOOK_S, OneReader

pytestmark = pytest.mark.unit

SHADOW = Shadow(batch_delay_s=0.5, batch_items=64)
TICK_S = 0.05
SETTLED_S = 20.0
TAKEN_OVER_S = 1.25 * LOOK_S + 2 * SHADOW.batch_delay_s


class Workers:
    """Workers of one model, whose requests wait at the stream while they read, but for moments."""

    def __init__(self, n: int, *, seed: int, per_s: float = 50.0) -> None:
        self._rng = random.Random(seed)
        self.now_s = 0.0
        self.per_s = per_s
        self.n_pending = 0
        self.busy: set[OneReader] = set()
        self.away_share = 0.02
        self.all = [OneReader(SHADOW, 0.0, self._rng) for _ in range(n)]

    @property
    def reading(self) -> list[OneReader]:
        """Those that read now."""
        return [one for one in self.all if one.reads]

    def run(self, seconds: float) -> None:
        """Let time pass: in each moment the workers look in any order, if it is time to, and fetch."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += TICK_S
            for one in self._rng.sample(self.all, len(self.all)):
                if self.now_s >= one.next_look_s:
                    one.looked(
                        Readers(n_readers=self._waiting_beside(one), n_pending=self.n_pending), self.now_s
                    )
            for one in self.reading:
                if one in self.busy:
                    one.waited(TICK_S)
                elif self._rng.random() < TICK_S / SHADOW.batch_delay_s:
                    one.fetched(int(self.per_s * SHADOW.batch_delay_s / len(self.reading)))

    def _waiting_beside(self, looking: OneReader) -> int:
        return sum(
            one is not looking and one not in self.busy and self._rng.random() > self.away_share
            for one in self.reading
        )


@pytest.mark.parametrize("n", [1, 2, 12, 100])
def test_one_of_them_reads_and_somebody_always_does(n: int) -> None:
    """Whoever leaves has seen another one, so that somebody reads at each moment."""
    n_looks = n_reading = 0
    for seed in range(5):
        workers = Workers(n, seed=seed)
        while workers.now_s < 3 * SETTLED_S:
            workers.run(TICK_S)
            assert workers.reading
            if workers.now_s > SETTLED_S:
                n_looks += 1
                n_reading += len(workers.reading)
    assert n_reading < 1.2 * n_looks


def test_another_one_takes_over() -> None:
    """The reader is killed: one that looked a moment ago looks again within seconds."""
    for seed in range(20):
        workers = Workers(3, seed=seed)
        workers.run(SETTLED_S)
        workers.all.remove(workers.reading[0])
        workers.run(TAKEN_OVER_S + 2 * TICK_S)
        assert workers.reading


def test_a_backlog_is_read_by_all_and_left_to_one_afterwards() -> None:
    """More than a batch waits: whoever looks helps, and stays while batches are large."""
    workers = Workers(5, seed=1)
    workers.run(SETTLED_S)
    workers.n_pending, workers.per_s = SHADOW.batch_items, 5 * 64 / SHADOW.batch_delay_s
    workers.run(2 * LOOK_S)
    assert len(workers.reading) == 5
    workers.run(SETTLED_S)
    assert len(workers.reading) == 5
    workers.n_pending, workers.per_s = 0, 50.0
    workers.run(SETTLED_S)
    assert len(workers.reading) == 1


def test_one_whose_batches_wait_leaves_its_place() -> None:
    """The busy one asks for nothing, so that another one begins; the busy one is the one that leaves."""
    for seed in range(20):
        workers = Workers(2, seed=seed)
        workers.away_share = 0.0
        workers.run(SETTLED_S)
        (busy,) = workers.reading
        workers.busy = {busy}
        workers.run(SETTLED_S)
        assert workers.reading
        assert busy not in workers.reading


def test_models_are_spread_over_workers() -> None:
    """Of 400 models none of four workers has more than twice its part."""
    n_of = [0, 0, 0, 0]
    for seed in range(400):
        workers = Workers(4, seed=seed)
        workers.run(SETTLED_S)
        n_of[workers.all.index(workers.reading[0])] += 1
    assert max(n_of) < 200
