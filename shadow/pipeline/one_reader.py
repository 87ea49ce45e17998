"""Which of several workers reads a model: one of them where one is enough, so that its batches are large.

Each batch costs worker, stream, database and monitor some milliseconds, whatever it holds. If all workers read all models, ten workers
make ten batches out of one. So a worker that sees another one wait for the messages of a model leaves them to it, and
looks every few seconds whether it should read again: if nobody waits for messages any more, or more of them wait than make a batch.

Two workers never leave a model to each other. A worker leaves only while the stream holds a request of another one, and has none of its
own then; so the other one, when it looks later, sees nobody.

Who stays is drawn for each worker and model, so that models are spread over workers. One whose batches wait for their replay leaves first.
"""

import random
from typing import Final

from quantdrift.core.config.schema import Shadow
from quantdrift.core.stream.connection import Readers

LOOK_S: Final = 4.0
"""How often a worker looks at who else reads a model."""

_SETTLE_S: Final = 4.0  # longest time until one of two workers leaves
_CONTEST_S: Final = 1.0  # between looks while another worker reads, too
_BUSY: Final = 0.5  # share of its time that a busy reader waits for earlier batches
_LARGE: Final = 0.5  # of `shadow.batch_items`: such batches need not be joined
_AT_FIRST_S: Final = 1.0


class OneReader:
    """Decides whether this worker reads a model now. It does no I/O: the caller passes the time, and what it saw when `next_look_s` came.

    Parameters
    ----------
    now_s
        Monotonic time.
    draw
        Random numbers. The first is the rank of this worker for the model: of two workers the one of the higher rank stays, unless it
        came much later.
    """

    def __init__(self, shadow: Shadow, now_s: float, draw: random.Random | None = None) -> None:
        self._delay_s = shadow.batch_delay_s
        self._batch_items = shadow.batch_items
        self._draw = draw or random.SystemRandom()
        self._rank = self._draw.random()
        self.reads = True
        self.next_look_s = now_s + self._jittered(_AT_FIRST_S)
        self._since_s = now_s  # of the counts below
        self._n_batches = 0
        self._n_messages = 0
        self._waited_s = 0.0
        self._shared_since_s: float | None = None
        self._was_alone = False

    def fetched(self, n_messages: int) -> None:
        """Count what a fetch has brought."""
        self._n_batches += n_messages > 0
        self._n_messages += n_messages

    def waited(self, seconds: float) -> None:
        """Count time in which a batch waited for an earlier one of the model."""
        self._waited_s += seconds

    def looked(self, seen: Readers, now_s: float) -> None:
        """Decide by what was seen, and set the time of the next look."""
        if self.reads:
            self._consider_leaving(seen, now_s)
        else:
            self._consider_reading(seen, now_s)
        self._since_s, self._n_batches, self._n_messages, self._waited_s = now_s, 0, 0, 0.0

    def _consider_leaving(self, seen: Readers, now_s: float) -> None:
        if not seen.n_readers or self._makes_large_batches():
            self._shared_since_s = None
            self.next_look_s = now_s + self._jittered(LOOK_S)
            return
        if self._shared_since_s is None:
            self._shared_since_s = now_s
        left_s = self._shared_since_s + self._rank * _SETTLE_S - now_s
        if left_s > 0 and not self._is_busy(now_s):
            self.next_look_s = now_s + min(left_s, _CONTEST_S)
            return
        self.reads = False
        self._was_alone = False
        self.next_look_s = now_s + self._jittered(LOOK_S)

    def _consider_reading(self, seen: Readers, now_s: float) -> None:
        if seen.n_pending >= self._batch_items or (not seen.n_readers and self._was_alone):
            self.reads = True
            self._shared_since_s = None
            self.next_look_s = now_s + self._jittered(LOOK_S)
            return
        # A reader that has just got its messages asks for more within moments: look again before its place is taken.
        self._was_alone = not seen.n_readers
        self.next_look_s = now_s + (self._delay_s if self._was_alone else self._jittered(LOOK_S))

    def _makes_large_batches(self) -> bool:
        return self._n_messages >= _LARGE * self._batch_items * max(self._n_batches, 1)

    def _is_busy(self, now_s: float) -> bool:
        return self._waited_s > _BUSY * (now_s - self._since_s)

    def _jittered(self, seconds: float) -> float:
        return seconds * self._draw.uniform(0.75, 1.25)
