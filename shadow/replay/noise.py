"""The noise of the reference: some exchanges are replayed again in another batch and compared with the first result.

The first hundreds of exchanges of a version are all chosen, later ones by a hash of the exchange's id, which is the same on
every worker. These count for every slice that they lie in. So that the noise of a rare slice is known in days and not in
months, the first hundreds of exchanges of a slice are chosen too, while there is room, and count for such slices alone: in all
others they would be more than their share. They wait until there are enough of one group, and are replayed in another order, alone or in batches of
another size. Replaying again takes at most twice `shadow.noise_share` of the replay time; what does not fit is left out,
independently of its result.

Of slices that are suspect (`quantdrift.monitor.fold.noise_pairs`) all exchanges are chosen, and count for these alone. They have a time
budget of their own: a tenth of the replay time, of which up to ten minutes are saved, so that a page is decided in the time of its
slice's traffic, and a reference that is noisy for good takes a tenth.
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
from quantdrift.core.slices import SliceKey
from quantdrift.models.language.scoring import without_free_answer
from quantdrift.models.tensors.arrays import Outputs
from quantdrift.shadow.replay.candidate_noise import NoRechecks, Rechecker, RecheckRequest
from quantdrift.shadow.replay.exchange import Answer, PreparedExchange
from quantdrift.shadow.replay.noise_items import RepeatedItems, version_of, versions_of
from quantdrift.shadow.replay.pairing import OutputPair, pair_of
from quantdrift.shadow.replay.replay import Outcome, ReplayResult, replay_again
from quantdrift.storage.comparisons.rows import NoiseItem, VersionKey
from quantdrift.storage.noise_suspects import Suspects

_ALL_UNTIL: Final = 500  # first exchanges of a version, all chosen; of a slice, while there is room
_MOST_SLICES: Final = 4_000  # of a version, whose exchanges are counted
_TIMES_SHARE: Final = 2.0  # share of the replay time: an item on its own takes longer than in a batch
_SUSPECT_SHARE: Final = 0.1  # of the replay time
_MOST_SUSPECT_S: Final = 600.0
_FIRST_S: Final = 0.001
_MOST_BUDGET_S: Final = 0.5
_TOGETHER: Final = 16  # items
_MOST_TOGETHER: Final = 64  # of suspect slices
_ALONE: Final = 4
_MOST_ITEMS: Final = 64  # waiting items of one group
_MOST_SUSPECT: Final = 256  # the same, where an exchange is chosen for a suspect slice
_MOST_OF_SLICES: Final = 32  # of these, where another exchange is chosen for a rare slice
_MOST_BYTES: Final = 32 << 20
_MOST_WAITING: Final = 512  # waiting exchanges of all groups
_LONGEST_WAIT_S: Final = 30.0
_STALE_S: Final = 600.0
_ITEMS_OF_EXCHANGE: Final = 8  # most items of one exchange; a random subset of larger ones
_KEY: Final = b"quantdrift noise"  # makes the draw independent of those for sampling


class _Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Items of one exchange that wait for their second replay, with the outputs of the first one."""

    entry: PreparedExchange
    first: Outputs
    names: Mapping[str, str]
    rows: tuple[int, ...]
    slices: tuple[tuple[SliceKey, ...], ...]
    n_bytes: int
    since_s: float


class _ReplayedSample(NamedTuple):
    """Items that were replayed again, with the new outputs or the error."""

    chosen: _Sample
    outputs: Outputs | QuarantineError


class NoiseReplays:
    """Chooses exchanges, keeps them and replays them again.

    The reference's thread calls `timed` and `replay_due`, another thread `choose` and `take`; both may call the rest.

    Parameters
    ----------
    share
        Share of exchanges, from 0 to 1; 0 switches the measurement off.
    rechecks
        Measures the candidate's noise; None: it is not measured.
    rng
        Decides order and batch sizes.

    Attributes
    ----------
    counts : Counter
        Items by model, side and outcome, since the start.
    """

    def __init__(
        self,
        share: float,
        clock: Clock,
        rechecks: Rechecker | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._share = share
        self._time_share = _TIMES_SHARE * share
        self._clock = clock
        self._rechecks = rechecks or NoRechecks()
        self._rng = rng or random.SystemRandom()
        self._budget_s = 0.0
        self._suspects: Suspects = frozenset()
        self._suspect_s = _MOST_SUSPECT_S
        self._cost_s = _FIRST_S  # of the last time
        self._repeated = RepeatedItems(Side.REFERENCE)
        self._lock = threading.Lock()  # of the next three
        self._waiting: dict[_Group, list[_Sample]] = {}
        self._n_bytes = 0
        self._n_waiting = 0
        self._replayed: queue.SimpleQueue[_ReplayedSample] = queue.SimpleQueue()
        self._measured: dict[str, list[NoiseItem]] = {}  # by model
        self._n_met: Counter[VersionKey] = Counter()
        self._n_kept: dict[VersionKey, dict[str, int]] = {}  # exchanges, by predicate of the slice
        self.counts: Counter[tuple[str, Side, str]] = Counter()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add a share of the time spent inside the block to the time budget."""
        began_s = self._clock.monotonic_s()
        yield
        took_s = self._clock.monotonic_s() - began_s
        # Bounded: a burst of second replays would delay the others.
        self._budget_s = min(self._budget_s + self._time_share * took_s, _MOST_BUDGET_S)
        self._suspect_s = min(self._suspect_s + _SUSPECT_SHARE * took_s, _MOST_SUSPECT_S)

    def suspect(self, suspects: Suspects) -> None:
        """Choose all exchanges of these slices from now on. Any thread may call it."""
        self._suspects = suspects

    def choose(
        self,
        batch: Sequence[PreparedExchange],
        outputs: Sequence[Answer],
        outcomes: Sequence[Outcome],
        slices: Sequence[Sequence[tuple[SliceKey, ...]]],
    ) -> None:
        """Keep some of the exchanges for a second replay, and offer them for a recheck of the candidate.

        Parameters
        ----------
        batch, outputs, outcomes
            Exchanges of one signature, with the reference's answer and the result of each.
        slices
            The slices of each item of each exchange; empty where it was quarantined.
        """
        if self._share <= 0:
            return
        signature = batch[0].signature if batch else ()
        # Exchanges of one signature have one reference.
        alone = (
            len(batch) == batch[0].n_items == 1 and batch[0].version_reference.model.batched
            if batch
            else False
        )
        has_room = self._has_room(_Group(signature, alone, suspect=False))
        for entry, version, answer, outcome, of_items in zip(
            batch, versions_of(batch), outputs, outcomes, slices, strict=True
        ):
            if not isinstance(outcome, ReplayResult):
                continue
            everywhere, begins = self._is_chosen(entry, version), self._n_met[version] < _ALL_UNTIL
            suspect = self._suspect_slices(version, of_items)
            if not everywhere and not suspect and not has_room:
                continue
            counted = of_items if everywhere else self._rare_slices(version, of_items, suspect)
            if any(counted) and isinstance(pair := pair_of(entry, answer, {}), OutputPair):
                # A random exchange competes with others alike, or the mean over all traffic would miss suspect slices.
                hurries = bool(suspect) and (begins or not everywhere)
                group = _Group(signature, alone, hurries)
                self._add_sample(entry, pair, counted, group, everywhere=everywhere)
                has_room = self._has_room(_Group(signature, alone, suspect=False))

    def is_due(self, entry: PreparedExchange) -> bool:
        """Return whether items wait for the reference of `entry`, and the time budget allows a second replay."""
        return self._due_group(entry) is not None

    def replay_due(self, entry: PreparedExchange) -> None:
        """Replay due items again with the reference of `entry`, which is loaded; of a suspect slice all that are due.

        Raises
        ------
        BrokenRuntimeError
            The reference no longer computes anything.
        """
        while self._replay_group(entry):
            pass

    def _replay_group(self, entry: PreparedExchange) -> bool:
        """Replay items of the group that is due again; return whether they are of a suspect slice.

        Raises
        ------
        BrokenRuntimeError
            The reference no longer computes anything.
        """
        with self._lock:
            group = self._due_group(entry)
            if group is None:
                return False
            # Items that were alone in their first batch now get company; others either, at random.
            in_company = group.alone or self._rng.random() < 0.5
            most_items = _MOST_TOGETHER if group.suspect else _TOGETHER
            chosen = self._pop(group, most_items if in_company else _ALONE)
        self._rng.shuffle(chosen)
        size = self._rng.randint(2, max(_n_items(chosen), 2)) if in_company else 1
        began_s = self._clock.monotonic_s()
        outputs: list[Outputs | QuarantineError]
        try:
            outputs = replay_again(
                [sample.entry for sample in chosen], [sample.names for sample in chosen], most_items=size
            )
        except RetryError as error:  # unreachable: these are a sample, later ones replace them
            outputs = [QuarantineError(QuarantineReason.REPLAY, str(error))] * len(chosen)
        finally:
            took_s = self._clock.monotonic_s() - began_s
            if group.suspect:
                self._suspect_s -= took_s
            else:
                self._budget_s -= took_s
            self._cost_s = min(took_s, _MOST_BUDGET_S)
        for sample, output in zip(chosen, outputs, strict=True):
            self._replayed.put(_ReplayedSample(sample, output))
        return group.suspect

    def take(self, model: str) -> tuple[NoiseItem, ...]:
        """Return the measurements of both sides of a model since the last call for it.

        A batch is folded with those of its own model alone; others wait for a batch of theirs.
        """
        measured = self._measured
        for answered in self._rechecks.take():
            self.counts[answered.model, Side.CANDIDATE, answered.outcome] += answered.n_items
            measured.setdefault(answered.model, []).extend(answered.items)
        while not self._replayed.empty():
            sample, again = self._replayed.get()
            items = self._repeated.items(sample.entry, again, sample.first, sample.rows, sample.slices)
            self._count(sample.entry, "measured", len(items))
            self._count(sample.entry, "failed", len(sample.rows) - len(items))
            measured.setdefault(sample.entry.exchange.model, []).extend(items)
        return tuple(measured.pop(model, ()))

    def _is_chosen(self, entry: PreparedExchange, version: VersionKey) -> bool:
        if self._n_met[version] < _ALL_UNTIL:
            self._n_met[version] += 1
            return True
        return draw(entry.exchange.id, _KEY) < self._share

    def _suspect_slices(self, version: VersionKey, slices: Sequence[tuple[SliceKey, ...]]) -> frozenset[str]:
        """Return the predicates of the suspect ones among the slices of the items."""
        if not self._suspects:
            return frozenset()
        predicates = {key.predicate for of_item in slices for key in of_item}
        return frozenset(predicate for predicate in predicates if (version, predicate) in self._suspects)

    def _rare_slices(
        self, version: VersionKey, slices: Sequence[tuple[SliceKey, ...]], suspect: frozenset[str]
    ) -> list[tuple[SliceKey, ...]]:
        """Return those slices of each item of which few exchanges were kept, and those that are suspect."""
        n_kept = self._n_kept.setdefault(version, {})
        unknown = 0 if len(n_kept) < _MOST_SLICES else _ALL_UNTIL
        return [
            tuple(
                key
                for key in of_item
                if key.predicate in suspect or n_kept.get(key.predicate, unknown) < _ALL_UNTIL
            )
            for of_item in slices
        ]

    def _add_sample(
        self,
        entry: PreparedExchange,
        pair: OutputPair,
        slices: Sequence[tuple[SliceKey, ...]],
        group: "_Group",
        *,
        everywhere: bool,
    ) -> None:
        """Keep an exchange that counts for `slices`, and offer it for a recheck if that is `everywhere`."""
        chosen_items = (
            range(entry.n_items) if everywhere else [n for n, of_item in enumerate(slices) if of_item]
        )
        rows = tuple(sorted(self._rng.sample(chosen_items, min(len(chosen_items), _ITEMS_OF_EXCHANGE))))
        of_rows = tuple(slices[row] for row in rows)
        if everywhere:
            self._rechecks.offer(RecheckRequest(entry=entry, first=pair.candidate, rows=rows, slices=of_rows))
        picked = list(rows)
        # Copied: they may be views of a whole batch, which would stay in memory.
        inputs = without_free_answer({name: array[picked] for name, array in entry.inputs.items()})
        first = {name: array[picked] for name, array in pair.reference.items()}
        # The exchange is about as large as its payload was; the reference's outputs may be far larger.
        n_bytes = len(entry.payload) + sum(array.nbytes for array in (*inputs.values(), *first.values()))
        with self._lock:
            if self._is_full(n_bytes):
                self._drop_stale()
            waiting = self._waiting.setdefault(group, [])
            most_items = _MOST_ITEMS if everywhere else _MOST_OF_SLICES
            most_items = _MOST_SUSPECT if group.suspect else most_items
            if self._is_full(n_bytes) or _n_items(waiting) + len(rows) > most_items:
                if everywhere or group.suspect:
                    self._count(entry, "left_out", len(rows))
                return
            self._n_bytes += n_bytes
            self._n_waiting += 1
            waiting.append(
                _Sample(
                    entry=msgspec.structs.replace(entry, payload=b"", inputs=inputs),
                    first=first,
                    names=pair.names,
                    rows=rows,
                    slices=of_rows,
                    n_bytes=n_bytes,
                    since_s=self._clock.monotonic_s(),
                )
            )
        n_kept = self._n_kept.setdefault(version_of(entry), {})
        for predicate in {key.predicate for of_item in of_rows for key in of_item}:
            if predicate in n_kept or len(n_kept) < _MOST_SLICES:
                n_kept[predicate] = n_kept.get(predicate, 0) + 1

    def _has_room(self, group: "_Group") -> bool:
        """Return whether an exchange that is chosen for a rare slice may find room: most find none, and need no copy."""
        with self._lock:
            return len(self._waiting.get(group, ())) < _MOST_OF_SLICES

    def _is_full(self, n_bytes: int) -> bool:
        """Return whether `n_bytes` more are too many; a single exchange may wait however large it is."""
        too_large = self._n_waiting > 0 and self._n_bytes + n_bytes > _MOST_BYTES
        return too_large or self._n_waiting >= _MOST_WAITING

    def _drop_stale(self) -> None:
        """Drop samples of versions or shapes that have not come for ten minutes."""
        since_s = self._clock.monotonic_s() - _STALE_S
        for group, chosen in list(self._waiting.items()):
            if chosen and chosen[0].since_s < since_s:
                self._count(chosen[0].entry, "left_out", _n_items(chosen))
                self._pop(group, _n_items(chosen))

    def _pop(self, group: "_Group", most_items: int) -> list[_Sample]:
        """Take the exchanges of a group that have waited longest: at least one, and at most `most_items` items."""
        waiting = self._waiting.pop(group)
        ends = itertools.accumulate(len(sample.rows) for sample in waiting)
        n = max(sum(end <= most_items for end in ends), 1)
        chosen, remaining = waiting[:n], waiting[n:]
        if remaining:
            self._waiting[group] = remaining
        self._n_bytes -= sum(sample.n_bytes for sample in chosen)
        self._n_waiting -= len(chosen)
        return chosen

    def _due_group(self, entry: PreparedExchange) -> "_Group | None":
        """Return the group of the version of `entry` that is due and has waited longest; None if none is, or there is no time."""
        now_s, version = self._clock.monotonic_s(), entry.signature[:2]
        due_groups = [
            (chosen[0].since_s, group)
            for group, chosen in list(self._waiting.items())
            if group.signature[:2] == version
            and chosen
            and (self._suspect_s if group.suspect else self._budget_s) >= self._cost_s
            and _is_due(chosen, now_s, alone=group.alone)
        ]
        return min(due_groups, key=lambda group: group[0])[1] if due_groups else None

    def _count(self, entry: PreparedExchange, outcome: str, n: int) -> None:
        if n:
            self.counts[entry.exchange.model, Side.REFERENCE, outcome] += n


class _Group(NamedTuple):
    """What samples must share: the signature, whether each was alone in its first batch, and whether their slice is suspect."""

    signature: tuple[object, ...]
    alone: bool
    suspect: bool


def _n_items(chosen: Sequence[_Sample]) -> int:
    return sum(len(sample.rows) for sample in chosen)


def _is_due(chosen: Sequence[_Sample], now_s: float, *, alone: bool) -> bool:
    n_items, waited = _n_items(chosen), now_s - chosen[0].since_s >= _LONGEST_WAIT_S
    return n_items >= _TOGETHER or (waited and (n_items > 1 or not alone))
