"""The noise of the reference: some exchanges are replayed again, in another batch, and compared with themselves.

Which ones is a hash of the exchange's id, the same on any worker, and until some hundreds of a version are measured it is
all of them. They wait until there are enough of one kind, and go through the reference together in another order, alone
or in batches of another size. That takes at most twice the share of the time that replaying takes: what does not fit into it
is left out, whatever it would have shown.
"""

import itertools
import queue
import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.errors import QuarantineError, QuarantineReason, RetryError
from quantdrift.core.records import Side
from quantdrift.core.sampling.hash_draw import draw
from quantdrift.shadow.language.scoring import without_own
from quantdrift.shadow.replay.candidate_noise import NoRechecks, Rechecker, RecheckRequest
from quantdrift.shadow.replay.exchange import Answer, PreparedExchange
from quantdrift.shadow.replay.noise_items import RepeatedItems, version_of
from quantdrift.shadow.replay.pairing import OutputPair, pair_of
from quantdrift.shadow.replay.replay import Outcome, ReplayResult, replay_again
from quantdrift.shadow.tensors.arrays import Outputs
from quantdrift.storage.shadow.rows import NoiseItem, VersionKey

_FIRST: Final = 500  # exchanges of a version that are all chosen
_TIMES_SHARE: Final = 2.0  # of the time that replaying takes: alone, an item takes more than in a batch
_FIRST_S: Final = 0.001
_MOST_S: Final = 0.5  # that is saved up
_TOGETHER: Final = 16  # items
_ALONE: Final = 4
_MOST: Final = 64  # items of one kind that wait
_MOST_BYTES: Final = 32 << 20
_MOST_WAITING: Final = 512  # exchanges, of all kinds
_LONGEST_S: Final = 30.0
_GIVEN_UP_S: Final = 600.0
_OF_EXCHANGE: Final = 8  # items: a random part of larger ones
_KEY: Final = b"quantdrift noise"  # another draw than those of sampling


class _Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """Items that wait to be replayed again: of one exchange, with what the reference gave the first time."""

    entry: PreparedExchange
    first: Outputs
    names: Mapping[str, str]
    rows: tuple[int, ...]
    n_bytes: int
    since_s: float


class _Again(NamedTuple):
    """Items that were replayed again, and what the reference gave, or why it gave nothing."""

    chosen: _Chosen
    outputs: Outputs | QuarantineError


class Noise:
    """Chooses, keeps and replays again.

    The thread of the reference calls `timed` and `again`, another one `choose` and `take`; both may ask the rest.

    Parameters
    ----------
    share
        Of exchanges, from 0 to 1; 0: nothing is done.
    clock
        Measures what it takes.
    rechecks
        Asks candidates again.
    rng
        Orders and sizes; it knows nothing of contents.

    Attributes
    ----------
    counts : Counter
        Items by model, side and outcome, from the start.
    """

    def __init__(
        self,
        share: float,
        clock: Clock,
        rechecks: Rechecker | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._share = share
        self._time = _TIMES_SHARE * share
        self._clock = clock
        self._rechecks = rechecks or NoRechecks()
        self._rng = rng or random.SystemRandom()
        self._left_s = 0.0
        self._cost_s = _FIRST_S  # of the last time
        self._repeated = RepeatedItems(Side.REFERENCE)
        self._lock = threading.Lock()  # of the next three
        self._waiting: dict[_Kind, list[_Chosen]] = {}
        self._n_bytes = 0
        self._n_waiting = 0
        self._replayed: queue.SimpleQueue[_Again] = queue.SimpleQueue()
        self._n_met: Counter[VersionKey] = Counter()
        self.counts: Counter[tuple[str, Side, str]] = Counter()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Allow for a share of the time that what is done inside takes."""
        began_s = self._clock.monotonic_s()
        yield
        # What is not needed is hardly saved up: a burst would hold the others up.
        self._left_s = min(self._left_s + self._time * (self._clock.monotonic_s() - began_s), _MOST_S)

    def choose(
        self, batch: Sequence[PreparedExchange], outputs: Sequence[Answer], outcomes: Sequence[Outcome]
    ) -> None:
        """Keep some of what was just replayed, and have its candidate asked again where that is allowed.

        Parameters
        ----------
        batch, outputs, outcomes
            Exchanges of one signature, what the reference gave, and what came of each.
        """
        if self._share <= 0:
            return
        alone = sum(entry.n_items for entry in batch) == 1
        for entry, answer, outcome in zip(batch, outputs, outcomes, strict=True):
            if isinstance(outcome, ReplayResult) and self._is_chosen(entry):
                pair = pair_of(entry, answer, {})
                if isinstance(pair, OutputPair):
                    self._keep(entry, pair, alone=alone and entry.judge.model.batched)

    def is_due(self, entry: PreparedExchange) -> bool:
        """Return whether there is something to be replayed again by the reference of `entry`, and time for it."""
        return self._left_s >= self._cost_s and self._ripe(entry) is not None

    def again(self, entry: PreparedExchange) -> None:
        """Replay items again with the reference of `entry`: that one is loaded.

        Raises
        ------
        BrokenRuntimeError
            The reference computes nothing any more.
        """
        with self._lock:
            kind = self._ripe(entry)
            if kind is None:
                return
            # What was alone the first time is in company now; else either, at random.
            in_company = kind.alone or self._rng.random() < 0.5
            chosen = self._pop(kind, _TOGETHER if in_company else _ALONE)
        self._rng.shuffle(chosen)
        size = self._rng.randint(2, max(_n_items(chosen), 2)) if in_company else 1
        began_s = self._clock.monotonic_s()
        outputs: list[Outputs | QuarantineError]
        try:
            outputs = replay_again(
                [one.entry for one in chosen], [one.names for one in chosen], most_items=size
            )
        except RetryError as error:  # away: these are a sample, and the next ones do as well
            outputs = [QuarantineError(QuarantineReason.REPLAY, str(error))] * len(chosen)
        finally:
            took_s = self._clock.monotonic_s() - began_s
            self._left_s -= took_s
            self._cost_s = min(took_s, _MOST_S)
        for one, found in zip(chosen, outputs, strict=True):
            self._replayed.put(_Again(one, found))

    def take(self) -> tuple[NoiseItem, ...]:
        """Return what was measured since the last call, of both sides."""
        found: list[NoiseItem] = []
        for answered in self._rechecks.take():
            self.counts[answered.model, Side.CANDIDATE, answered.outcome] += answered.n_items
            found += answered.items
        while not self._replayed.empty():
            one, again = self._replayed.get()
            items = self._repeated.items(one.entry, again, one.first, one.rows)
            self._count(one.entry, "measured", len(items))
            self._count(one.entry, "failed", len(one.rows) - len(items))
            found += items
        return tuple(found)

    def _is_chosen(self, entry: PreparedExchange) -> bool:
        version = version_of(entry)
        if self._n_met[version] < _FIRST:
            self._n_met[version] += 1
            return True
        return draw(entry.exchange.id, _KEY) < self._share

    def _keep(self, entry: PreparedExchange, pair: OutputPair, *, alone: bool) -> None:
        rows = tuple(sorted(self._rng.sample(range(entry.n_items), min(entry.n_items, _OF_EXCHANGE))))
        self._rechecks.offer(RecheckRequest(entry=entry, first=pair.candidate, rows=rows))
        picked = list(rows)
        # Copies: they may be views of a whole batch's.
        inputs = without_own({name: array[picked] for name, array in entry.inputs.items()})
        first = {name: array[picked] for name, array in pair.reference.items()}
        # The exchange is about as large as its payload was; what the reference gave may be far larger.
        n_bytes = len(entry.payload) + sum(array.nbytes for array in (*inputs.values(), *first.values()))
        kind = _Kind(entry.signature, alone)
        with self._lock:
            if self._is_full(n_bytes):
                self._forget()
            waiting = self._waiting.setdefault(kind, [])
            if self._is_full(n_bytes) or _n_items(waiting) + len(rows) > _MOST:
                self._count(entry, "left_out", len(rows))
                return
            self._n_bytes += n_bytes
            self._n_waiting += 1
            waiting.append(
                _Chosen(
                    entry=msgspec.structs.replace(entry, payload=b"", inputs=inputs),
                    first=first,
                    names=pair.names,
                    rows=rows,
                    n_bytes=n_bytes,
                    since_s=self._clock.monotonic_s(),
                )
            )

    def _is_full(self, n_bytes: int) -> bool:
        """Return whether there is no room for so much more; one exchange may wait, however large it is."""
        too_large = self._n_waiting > 0 and self._n_bytes + n_bytes > _MOST_BYTES
        return too_large or self._n_waiting >= _MOST_WAITING

    def _forget(self) -> None:
        """Let go of what waits for a version or a shape that does not come any more."""
        since_s = self._clock.monotonic_s() - _GIVEN_UP_S
        for kind, chosen in list(self._waiting.items()):
            if chosen and chosen[0].since_s < since_s:
                self._count(chosen[0].entry, "left_out", _n_items(chosen))
                self._pop(kind, _n_items(chosen))

    def _pop(self, kind: "_Kind", most_items: int) -> list[_Chosen]:
        """Take the longest waiting exchanges of a kind, at least one and no more items than that."""
        waiting = self._waiting.pop(kind)
        ends = itertools.accumulate(len(one.rows) for one in waiting)
        n = max(sum(end <= most_items for end in ends), 1)
        chosen, left = waiting[:n], waiting[n:]
        if left:
            self._waiting[kind] = left
        self._n_bytes -= sum(one.n_bytes for one in chosen)
        self._n_waiting -= len(chosen)
        return chosen

    def _ripe(self, entry: PreparedExchange) -> "_Kind | None":
        """Return which items of the version of `entry` are to be replayed again, the longest waiting first."""
        now_s, version = self._clock.monotonic_s(), entry.signature[:2]
        ripe = [
            (chosen[0].since_s, kind)
            for kind, chosen in list(self._waiting.items())
            if kind.signature[:2] == version and chosen and _is_ripe(chosen, now_s, alone=kind.alone)
        ]
        return min(ripe, key=lambda one: one[0])[1] if ripe else None

    def _count(self, entry: PreparedExchange, outcome: str, n: int) -> None:
        if n:
            self.counts[entry.exchange.model, Side.REFERENCE, outcome] += n


class _Kind(NamedTuple):
    """What goes together: the signature, and whether each was alone in its batch the first time."""

    signature: tuple[object, ...]
    alone: bool


def _n_items(chosen: Sequence[_Chosen]) -> int:
    return sum(len(one.rows) for one in chosen)


def _is_ripe(chosen: Sequence[_Chosen], now_s: float, *, alone: bool) -> bool:
    n_items, waited = _n_items(chosen), now_s - chosen[0].since_s >= _LONGEST_S
    return n_items >= _TOGETHER or (waited and (n_items > 1 or not alone))
