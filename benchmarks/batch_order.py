"""Independent traffic with inputs of several shapes, replayed in batches of one shape: what the order of folding does to the bound.

Exchanges go through the shipped batcher with the loop of the shadow's reader, and are stored as virtual workers finish. They are
folded in the order of capture, as they were stored (what must not be done), or as the shipped reading order says.
"""

import heapq
from typing import Final

import msgspec
import numpy as np

from benchmarks.delays import PRODUCTION
from benchmarks.race import OPERATING_POINT, Shipped, known, learned
from quantdrift.core.config.schema import Monitor, Shadow
from quantdrift.drift.evidence.observations import FloatArray, IntArray
from quantdrift.shadow.pipeline.reader import Batcher
from quantdrift.storage.fold.reading_order import ReadingOrder, Stretch, closed_up

BOUND: Final = 0.25  # P(evidence of 4 n within n groups)
BATCH: Final = Shadow().batch_items
_DELAY_S: Final = Shadow().batch_delay_s
_BLOCK: Final = 1000
_QUIET_PER_S: Final = 50.0  # at which a backlog was captured
_ALONE_AFTER_S: Final = 10.0
_SECOND_US: Final = 1_000_000


class ShapeLaw(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of inputs with a few shapes; answers are independent given the shape.

    Parameters
    ----------
    name
        A few words.
    shares
        Of each shape, of all inputs.
    flips
        Chance of a changed answer, by shape.
    """

    name: str
    shares: tuple[float, ...]
    flips: tuple[float, ...]


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How exchanges come to the workers.

    Parameters
    ----------
    name
        A few words.
    per_s
        Exchanges a second; in a backlog what the workers manage.
    backlog
        Whether all of them wait in the stream when it begins; they were captured at 50 a second.
    workers
        Which take turns.
    crash_s
        How often a worker dies with what it has; that is delivered again after `shadow.ack_wait_s`, one by one. 0: never.
    alone
        Whether every exchange of the last shape fails first, and is tried again alone ten seconds later.
    slow_s
        Seconds that the replay of a batch of the last shape takes longer.
    """

    name: str
    per_s: float
    backlog: bool = False
    workers: int = 1
    crash_s: float = 0.0
    alone: bool = False
    slow_s: float = 0.0


LAWS: Final = (
    ShapeLaw(name="3 % large, flip 25 %, else 0.2 %", shares=(0.97, 0.03), flips=(0.002, 0.25)),
    ShapeLaw(name="10 % large, flip 8 %, else 0.2 %", shares=(0.9, 0.1), flips=(0.002, 0.08)),
)
PACES: Final = (
    Pace(name="50 a second", per_s=50.0),
    Pace(name="200 a second", per_s=200.0),
    Pace(name="1,000 a second", per_s=1000.0),
    Pace(name="1,000 a second, 3 workers", per_s=1000.0, workers=3),
    Pace(name="200 a second, large ones take 2 s longer", per_s=200.0, slow_s=2.0),
    Pace(name="200 a second, a worker dies each 20 s", per_s=200.0, workers=2, crash_s=20.0),
    Pace(name="200 a second, large ones are retried alone", per_s=200.0, alone=True),
    Pace(name="backlog at 300 a second", per_s=300.0, backlog=True),
    Pace(name="backlog at 1,000 a second", per_s=1000.0, backlog=True),
)


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A stored batch: when, and which exchanges."""

    at_s: float
    exchanges: IntArray


class _Shadow:
    """Virtual workers that take turns at the stream, and what they stored."""

    def __init__(self, rng: np.random.Generator, pace: Pace, shapes: IntArray) -> None:
        self._rng, self._pace, self._shapes = rng, pace, shapes.tolist()
        self._last = int(shapes.max())
        self._batchers = [
            Batcher[int](max_items=BATCH, max_bytes=10**12, delay_s=_DELAY_S) for _ in range(pace.workers)
        ]
        self._again: list[tuple[float, int]] = []
        self._crash_at_s = pace.crash_s
        self._turn = 0
        self.stored: list[Stored] = []

    def wait_s(self, now_s: float) -> float:
        """Return how long the worker whose turn it is waits at the stream, as the shadow's reader does."""
        return min(max(self._batchers[self._turn].wait_s(now_s), 0.01), 1.0)

    def fetched(self, exchanges: range, now_s: float, step_s: float) -> float:
        """Take what a worker has fetched, each exchange a step after the one before; return the time after them."""
        batcher = self._batchers[self._turn]
        for exchange in exchanges:
            now_s += step_s
            shape = self._shapes[exchange]
            self._replay(batcher.add(shape, exchange, n_items=1, n_bytes=1, now_s=now_s), now_s)
        if self._pace.crash_s and now_s >= self._crash_at_s:
            self._crash_at_s += self._pace.crash_s
            for exchange in (one for batch in batcher.flush() for one in batch):
                heapq.heappush(self._again, (now_s + Shadow().ack_wait_s, exchange))
        for other in self._batchers:
            self._replay(other.due(now_s), now_s)
        if len(exchanges) < BATCH:  # the stream is empty: nothing to wait for
            self._replay(batcher.flush(), now_s)
        self._store_again(now_s)
        self._turn = (self._turn + 1) % len(self._batchers)
        return now_s

    def end(self, now_s: float) -> None:
        """Store the rest."""
        for batcher in self._batchers:
            self._replay(batcher.flush(), now_s)
        self._store_again(float("inf"))
        self.stored.sort(key=lambda batch: batch.at_s)

    def _replay(self, batches: list[list[int]], now_s: float) -> None:
        for batch in batches:
            of_last = self._shapes[batch[0]] == self._last
            if self._pace.alone and of_last:
                for exchange in batch:
                    heapq.heappush(self._again, (now_s + _ALONE_AFTER_S, exchange))
                continue
            took_s = 0.02 + 0.0002 * len(batch) + (self._pace.slow_s if of_last else 0.0)
            self.stored.append(Stored(at_s=now_s + took_s, exchanges=self._rng.permutation(batch)))

    def _store_again(self, now_s: float) -> None:
        while self._again and self._again[0][0] <= now_s:
            at_s, exchange = heapq.heappop(self._again)
            self.stored.append(Stored(at_s=at_s, exchanges=np.array([exchange])))


def batches(rng: np.random.Generator, pace: Pace, shapes: IntArray) -> tuple[FloatArray, list[Stored]]:
    """Return when exchanges were captured, (exchanges,), in seconds, and the batches in which they are stored, in order."""
    n = len(shapes)
    captured = np.cumsum(rng.exponential(1 / (_QUIET_PER_S if pace.backlog else pace.per_s), n))
    shadow, now_s, place = _Shadow(rng, pace, shapes), 0.0, 0
    if pace.backlog:
        now_s = float(captured[-1])
    while place < n:
        until_s = now_s + shadow.wait_s(now_s)
        stop = n if pace.backlog else int(np.searchsorted(captured, until_s, side="right"))
        stop = min(stop, place + BATCH)
        if not pace.backlog:
            full = stop - place == BATCH
            now_s = max(now_s, float(captured[stop - 1])) if full else until_s
        now_s = shadow.fetched(range(place, stop), now_s, 1 / pace.per_s if pace.backlog else 0.0)
        place = stop
    shadow.end(now_s)
    return captured, shadow.stored


def fold_order(
    rng: np.random.Generator, captured_s: FloatArray, stored: list[Stored]
) -> tuple[IntArray, FloatArray]:
    """Return the exchanges in the order in which the monitor folds them, and how long each waits for that after it was stored."""
    order = ReadingOrder(round(Monitor().reorder_s * _SECOND_US))
    captured_us = (captured_s * _SECOND_US).astype(np.int64).tolist()
    salt = int(rng.integers(2**60))
    places: list[tuple[int, int]] = []
    late: list[bool] = []
    waits: list[tuple[int, float]] = []
    marks: list[tuple[int, float]] = []
    for batch in stored:
        times = [captured_us[exchange] for exchange in batch.exchanges.tolist()]
        stretch: Stretch = order.stretch(round(batch.at_s * _SECOND_US), min(times), max(times))
        marks.append((stretch.until_us, batch.at_s))
        for exchange, at_us in zip(batch.exchanges.tolist(), times, strict=True):
            place_us = stretch.place_us(f"{salt:016x}{exchange:016x}", at_us)
            places.append((place_us, exchange))
            late.append(stretch.is_late(at_us))
            waits.append((place_us, batch.at_s))
    until = np.array([mark for mark, _ in marks])
    at = np.array([at_s for _, at_s in marks])
    index = np.searchsorted(until, [place for place, _ in waits])
    inside = index < len(until)
    delay = at[np.minimum(index, len(at) - 1)] - np.array([at_s for _, at_s in waits])
    ends = [number for number, (place_us, _) in enumerate(places) if place_us > marks[-1][0]]
    moved = closed_up([places[number][0] for number in ends], [late[number] for number in ends], marks[-1][0])
    for number, place_us in zip(ends, moved, strict=True):
        places[number] = place_us, places[number][1]
    return np.array([exchange for _, exchange in sorted(places)], dtype=np.intp), delay[inside]


class Pages(msgspec.Struct, frozen=True, kw_only=True):
    """How often evidence reached a threshold in runs without a fault.

    Parameters
    ----------
    ratio
        Share of runs with evidence of 4 n within n groups, over the proven bound of a quarter.
    at_a, at_production
        Share of runs that page at 4e6, and at the production threshold.
    """

    ratio: float
    at_a: float
    at_production: float


def pages(detector: Shipped, x: FloatArray, begin: int = 0) -> Pages:
    """Return how often a detector alarms on series, (groups, runs); what comes before `begin` is for learning."""
    top = np.zeros(x.shape[1])
    for first in range(0, len(x), _BLOCK):
        top = np.maximum(top, detector.follow(x[first : first + _BLOCK]).max(axis=0))
    n = len(x) - begin
    return Pages(
        ratio=float((top >= n / BOUND).mean()) / BOUND,
        at_a=float((top >= OPERATING_POINT).mean()),
        at_production=float((top >= PRODUCTION).mean()),
    )


def series(
    law: ShapeLaw, pace: Pace | None, *, runs: int, n: int, seed: int, reordered: bool = True
) -> tuple[FloatArray, FloatArray]:
    """Return changed answers in the order in which they are folded, (n, runs), and the waits for that in seconds.

    Parameters
    ----------
    pace
        None: in the order of capture.
    reordered
        As the monitor folds them; else batch after batch, as they were stored.
    """
    rng = np.random.default_rng(seed)
    columns, waits = [], [np.zeros(1)]
    for _ in range(runs):
        shapes = rng.choice(len(law.shares), n, p=law.shares)
        x = (rng.random(n) < np.array(law.flips)[shapes]).astype(np.float64)
        if pace is None:
            columns.append(x)
            continue
        captured, stored = batches(rng, pace, shapes)
        if reordered:
            order, waited = fold_order(rng, captured, stored)
            waits.append(waited)
        else:
            order = np.concatenate([batch.exchanges for batch in stored])
        columns.append(x[order])
    return np.stack(columns, axis=1), np.concatenate(waits)


def measure(*, quick: bool, seed: int = 1250) -> dict[str, float]:
    """Return the worst ratio over all laws and paces, and what it was in the order of storing; print each."""
    runs, n = (32, 20_000) if quick else (64, 20_000)
    worst = batched = wait = capture = 0.0
    for law in LAWS:
        in_order = pages(known(0.01, runs), series(law, None, runs=runs, n=n, seed=seed)[0])
        capture = max(capture, in_order.ratio)
        print(f"{law.name}; in the order of capture: ratio {in_order.ratio:.2f}")
        for pace in PACES:
            x, waited = series(law, pace, runs=runs, n=n, seed=seed)
            ours = pages(known(0.01, runs), x)
            stored, _ = series(law, pace, runs=runs, n=n, seed=seed, reordered=False)
            theirs = pages(known(0.01, runs), stored)
            print(
                f"  {pace.name:44} folded: ratio {ours.ratio:.2f}, pages {ours.at_a:.0%} at A, {ours.at_production:.0%} in"
                f" production, wait {np.median(waited):.1f} s ({np.quantile(waited, 0.99):.1f}); as stored: ratio"
                f" {theirs.ratio:.2f}, {theirs.at_a:.0%}, {theirs.at_production:.0%}",
                flush=True,
            )
            worst, batched = max(worst, ours.ratio), max(batched, theirs.ratio)
            wait = max(wait, float(np.median(waited)))
    runs, n = (8, 20_000) if quick else (24, 20_000)
    for pace in (PACES[1], PACES[2]):
        x, _ = series(LAWS[0], pace, runs=runs, n=n, seed=seed + 10)
        ours = pages(learned("change", 0.25, runs), x, begin=5_500)
        print(f"  a learned baseline, {pace.name}: ratio {ours.ratio:.2f}", flush=True)
        worst = max(worst, ours.ratio)
    return {
        "shape_ratio": worst,
        "shape_ratio_as_stored": batched,
        "shape_ratio_in_order_of_capture": capture,
        "order_wait_s": wait,
    }
