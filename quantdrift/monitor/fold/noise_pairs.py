"""Pages that noise would explain, in the fold: which slices are suspect, what their second replays show, and what may page.

A slice is suspect once its evidence is enough for the verdict `undecided`. The workers then replay all of its exchanges twice, as far
as their time allows, and a test (`quantdrift.drift.noise_pairs`) finds whether the noise of the reference explains what is measured. Until it
is shown not to, the evidence of means that noise can raise counts for less than a page (`SliceTable.limits`); a ticket goes out.

Only versions of which exchanges are replayed twice wait: one without any in `QUIET_US` does not. A page does not wait for traffic that has
stopped, or for second replays that do not come: after `PATIENCE_US` without one it goes out, unless the reference is known to be noisy,
and so it does where in `QUIET_US` less than a quarter of the exchanges were replayed twice. These times are the fold's, which tallies move too.

A large drift does not wait where the slice's noise is known.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import Budget
from quantdrift.core.records import Metric, Side
from quantdrift.core.signals import cap_of
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE
from quantdrift.drift.evidence.group import group_value
from quantdrift.drift.evidence.header import N_TOTAL, SCALE, M
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.noise_pairs import PairTest, is_large
from quantdrift.drift.watch import LIMITED, SignalKey, Thresholds, is_limited
from quantdrift.monitor.fold.groups import clipped
from quantdrift.monitor.fold.slice_state import FoldArrays, Key, SliceState, rows_of
from quantdrift.storage.fold_rows import NoiseRow, PairRow

SUSPECT_FROM: Final = 1e-3
"""Evidence over what a page needs from which on a slice is suspect, as it is `undecided`."""
CLEARED_BELOW: Final = 1e-5
PATIENCE_US: Final = 60_000_000
"""Second replays of a slice come within 40 s: workers read what is suspect every 5 s, and collect items for 30 s."""
QUIET_US: Final = 5 * 60_000_000
_LOOK_US: Final = 10_000_000  # the times are looked at so often
_LEAST_GROUPS: Final = 50
_LEAST_PAIRED: Final = 0.25  # of the exchanges while a page waits
_CLOSED: Final = 0.1  # of what a page needs: several signals together stay below it
_CHANGE: Final = SignalKey(Metric.FLIP.value, CHANGE.kind)
_TestKey = tuple[int, int, str]  # version, slice, metric


class PairTests:
    """The tests of slices that are suspect, by version, slice and metric.

    Parameters
    ----------
    rows
        The stored tests.
    table
        Where the limits are.
    slices
        Those of the fold, by key; the fold adds and removes some.
    now_us
        The fold's time; 0 before it has one.
    everything
        Returns the slice of all traffic of a version.
    allowance
        Returns the allowance for the noise of a side that a metric of a slice would have.
    noise
        Returns the upper end of the reference's noise of a metric of a slice, over a cap.
    """

    def __init__(
        self,
        rows: Iterable[PairRow],
        table: FoldArrays,
        thresholds: Thresholds,
        slices: Mapping[Key, SliceState],
        *,
        now_us: int,
        everything: Callable[[int], int | None],
        allowance: Callable[[Key, str, Side], float],
        noise: Callable[[Key, str, float], float],
    ) -> None:
        # A release before this one removes slices without their tests.
        self._rows: dict[_TestKey, PairRow] = {
            row.key: row for row in rows if not row.suspect or row.key[:2] in slices
        }
        # By version, when an exchange that was replayed twice last came.
        self._paired_us: dict[int, int] = {}
        for row in self._rows.values():
            version_id = row.model_version_id
            self._paired_us[version_id] = max(self._paired_us.get(version_id, 0), row.paired_us)
        self._looked_us = now_us - now_us % _LOOK_US
        self._table, self._thresholds = table, thresholds
        self._slices, self._everything = slices, everything
        self._allowance, self._noise = allowance, noise
        self._dirty: set[_TestKey] = set()
        self._ended: set[_TestKey] = set()
        self._lifted: set[Key] = set()
        for entry in slices.values():
            self.enter(entry)

    def go_on(self, version_id: int, before: int) -> None:
        """Let a new version wait for second replays, if another one with the same reference does."""
        if before in self._paired_us:
            self._wait_for(version_id, paired_us=self._paired_us[before], fold_seq=0)

    def carry(self, entry: SliceState, before: Key) -> None:
        """Let a slice that got the evidence of a version that ended go on with its tests: each head start counts once."""
        if self._table.suspect[entry.row] or entry.key[0] not in self._paired_us:
            return
        with self._changing(entry):
            for row in [row for row in self._of(before) if row.suspect]:
                paired_us = max(row.paired_us, self._last_us((*entry.key, row.metric)))
                self._put(msgspec.structs.replace(row, model_version_id=entry.key[0], paired_us=paired_us))

    def enter(self, entry: SliceState) -> None:
        """Limit what a slice counts for, as its tests say."""
        table, row = self._table, entry.row
        tests = list(self._of(entry.key))
        table.suspect[row] = any(test.suspect for test in tests)
        table.asked[row] = any(test.suspect and not _may_page(test) for test in tests)
        for metric in LIMITED:
            limit, before = self._most(entry.key, metric), table.limits[metric][row]
            if limit != before:
                table.limit(row, metric, limit)
            if limit > before:
                self._lifted.add(entry.key)

    def decides(self, key: Key, metric: str) -> bool:
        """Return whether pairs decide about the noise of the reference, in place of an allowance for it.

        Not where they have shown that it explains what is measured, nor where they do not come.
        """
        row = self._rows.get((*key, metric))
        waits = row is None or not row.suspect or not (row.unpaired or row.explained)
        return waits and metric in LIMITED and key[0] in self._paired_us

    def see(
        self,
        version_id: int,
        rows: Sequence[NoiseRow],
        budget: Budget,
        smallest: Callable[[int, int], float],
        *,
        now_us: int,
        fold_seq: int,
    ) -> None:
        """Add the pairs of one version; with the first of them its slices begin to wait.

        Parameters
        ----------
        rows
            Items that were computed twice, those of one exchange and side next to each other.
        smallest
            Returns the smallest inclusion probability of a slice under a policy.
        now_us
            The fold's time.
        """
        pairs = [row for row in rows if _is_pair(row)]
        self._note_paired(version_id, rows, now_us, fold_seq)
        if pairs and version_id not in self._paired_us:
            self._wait_for(version_id, paired_us=now_us, fold_seq=fold_seq)
        before = {key: row for key, row in self._rows.items() if key[0] == version_id and row.suspect}
        if not before:
            return
        tests, everything = dict(before), self._everything(version_id)
        for _, group in groupby(pairs, key=lambda row: row.exchange_id):
            for slice_id, items in _by_slice(group, everything).items():
                for key in ((version_id, slice_id, metric) for metric in LIMITED):
                    if key in tests:
                        pi_min = smallest(slice_id, items[0].policy_id)
                        tests[key] = _seen(tests[key], items, budget, pi_min)
        for key, row in tests.items():
            if row is not before[key]:
                with self._changing(self._slices[key[:2]]):
                    self._put(msgspec.structs.replace(row, paired_us=now_us, fold_seq=fold_seq))

    def look(self, slices: Sequence[SliceState], *, at_us: int | None, now_us: int, fold_seq: int) -> None:
        """Find which of the slices that a batch compared are suspect now, and which no more.

        Parameters
        ----------
        at_us
            The clock of the exchanges: none that was captured later was compared yet.
        now_us
            The fold's time.
        """
        if not self._paired_us or not slices or at_us is None:
            return
        table, rows = self._table, rows_of(slices)
        table.survey_all(rows)
        doubt = table.doubts(rows, self._thresholds, table.unlimited)
        needed = table.page_thresholds(rows, self._thresholds)
        for index in np.flatnonzero((doubt >= SUSPECT_FROM) | table.suspect[rows]).tolist():
            entry = slices[index]
            if entry.key[0] not in self._paired_us:
                continue
            with self._changing(entry):
                if not table.suspect[entry.row]:
                    self._begin(entry, at_us, fold_seq)
                elif doubt[index] < CLEARED_BELOW and not self._allows(entry.key):
                    self.end(entry.key)
                    continue
                self._wait(entry, needed.item(index), now_us, fold_seq)

    def pass_time(self, now_us: int, *, fold_seq: int) -> None:
        """Every ten seconds of the fold's time: find which pages have waited long enough, and which versions wait no more."""
        if now_us - now_us % _LOOK_US == self._looked_us:
            return
        waited = {version_id for version_id in self._paired_us if not self._is_quiet(version_id)}
        self._looked_us = now_us - now_us % _LOOK_US
        for version_id in sorted(version_id for version_id in waited if self._is_quiet(version_id)):
            self._enter_all(version_id)
        for key, row in list(self._rows.items()):
            if not row.suspect or _may_page(row) or self._is_noisy(key[:2], row.metric):
                continue
            if _is_over(row, now_us):
                with self._changing(self._slices[key[:2]]):
                    self._put(msgspec.structs.replace(row, unpaired=True, fold_seq=fold_seq))

    def released(self) -> list[SliceState]:
        """Return the slices whose limits were lifted since the last call, and that may page with the evidence that they have.

        Where second replays do not come, and noise of the reference is known, that evidence is not against a budget with an allowance for it:
        it begins again with the next exchange.
        """
        keys, self._lifted = sorted(self._lifted), set()
        return [
            self._slices[key]
            for key in keys
            if key in self._slices
            and not any(row.unpaired and self._is_noisy(key, row.metric) for row in self._of(key))
        ]

    def end(self, key: Key) -> None:
        """End the tests of a slice."""
        for row in list(self._of(key)):
            if key[1] == self._everything(key[0]):
                self._put(msgspec.structs.replace(row, suspect=False))
            else:
                del self._rows[row.key]
                self._dirty.discard(row.key)
                self._ended.add(row.key)

    def take(self) -> tuple[tuple[PairRow, ...], tuple[_TestKey, ...]]:
        """Return the tests to write, and those to delete, since the last call."""
        rows, ended = tuple(self._rows[key] for key in sorted(self._dirty)), tuple(sorted(self._ended))
        self._dirty, self._ended = set(), set()
        return rows, ended

    @contextmanager
    def _changing(self, entry: SliceState) -> Iterator[None]:
        """Change the tests of a slice inside the block: its limits and its budgets follow."""
        before = [self.decides(entry.key, metric) for metric in LIMITED]
        yield
        self.enter(entry)
        if before != [self.decides(entry.key, metric) for metric in LIMITED]:
            self._table.checked[entry.row] = -1

    def _of(self, key: Key) -> Iterator[PairRow]:
        for metric in LIMITED:
            if (row := self._rows.get((*key, metric))) is not None:
                yield row

    def _allows(self, key: Key) -> bool:
        """Return whether a slice is within its budget by an allowance for the noise that its tests have shown to explain the rest.

        They go on, without a head start: with the budget alone it would be suspect again.
        """
        return any(
            row.suspect and row.explained and self._allowance(key, row.metric, Side.REFERENCE) > 0.0
            for row in self._of(key)
        )

    def _is_noisy(self, key: Key, metric: str) -> bool:
        """Return whether the reference is known to be noisy, whatever its tests say."""
        return self._allowance(key, metric, Side.REFERENCE) > 0.0

    def _is_quiet(self, version_id: int) -> bool:
        """Return whether no exchange of a version was replayed twice for minutes."""
        return self._looked_us - self._paired_us[version_id] >= QUIET_US

    def _last_us(self, key: _TestKey) -> int:
        row = self._rows.get(key)
        return 0 if row is None else row.paired_us

    def _most(self, key: Key, metric: str) -> float:
        """Return the most evidence that a signal of a metric counts for."""
        row = self._rows.get((*key, metric))
        test = row if row is not None and row.suspect else None
        if key[0] not in self._paired_us or (test is not None and _may_page(test)):
            return np.inf
        unasked = test is None or not test.n
        if unasked and self._is_quiet(key[0]) and not self._is_noisy(key, metric):
            return np.inf
        return self._thresholds.page * min(_CLOSED if test is None else _test(test).share, _CLOSED)

    def _enter_all(self, version_id: int) -> None:
        for _, entry in sorted(self._slices.items()):
            if entry.key[0] == version_id:
                self.enter(entry)

    def _wait_for(self, version_id: int, *, paired_us: int, fold_seq: int) -> None:
        """Let the slices of a version wait; the slice of all its traffic has tests from now on."""
        everything = self._everything(version_id)
        if everything is None:
            return
        self._paired_us[version_id] = paired_us
        for _, entry in sorted(self._slices.items()):
            if entry.key[0] == version_id:
                self.enter(entry)
                self._table.checked[entry.row] = -1
        for metric in LIMITED:
            row = _row(
                (version_id, everything, metric),
                PairTest(budget=0.0, since_us=0),
                suspect=False,
                fold_seq=fold_seq,
            )
            self._put(msgspec.structs.replace(row, paired_us=paired_us))

    def _note_paired(self, version_id: int, rows: Sequence[NoiseRow], now_us: int, fold_seq: int) -> None:
        """Note the time in the row of all traffic; a version that was quiet waits again."""
        everything = self._everything(version_id)
        if version_id not in self._paired_us or everything is None:
            return
        if not any(row.side is Side.REFERENCE for row in rows):
            return
        was_quiet = self._is_quiet(version_id)
        self._paired_us[version_id] = now_us
        for row in list(self._of((version_id, everything))):
            self._put(msgspec.structs.replace(row, paired_us=now_us, fold_seq=fold_seq))
        if was_quiet:
            self._enter_all(version_id)

    def _begin(self, entry: SliceState, at_us: int, fold_seq: int) -> None:
        """Begin the tests of a slice, each against its budget or, where that is less, the baseline of its flips."""
        states = entry.watch.states
        for metric in LIMITED:
            signal = SignalKey(metric, BUDGET.kind)
            state = states.get(signal)
            if state is None:
                continue
            budget = float(state[M]) - entry.noise(signal)
            budget += self._allowance(entry.key, metric, Side.CANDIDATE)
            learned = states.get(_CHANGE)
            if metric == _CHANGE.metric and learned is not None and CHANGE.live(learned):
                baseline = CHANGE.content(learned)
                mean = (sum(baseline.total) + 1.0) / (baseline.n_groups + 1.0)
                budget = min(budget, (1.0 + baseline.tau) * mean)
            test, key = PairTest(budget=budget, since_us=at_us), (*entry.key, metric)
            row = _row(key, test, suspect=True, fold_seq=fold_seq)
            self._put(msgspec.structs.replace(row, paired_us=self._last_us(key)))

    def _wait(self, entry: SliceState, needed: float, now_us: int, fold_seq: int) -> None:
        """Note since when a slice has evidence enough for a page; where second replays do not come meanwhile, it may page."""
        table, states = self._table, entry.watch.states
        for row in list(self._of(entry.key)):
            state = states.get(SignalKey(row.metric, BUDGET.kind))
            if _may_page(row) or state is None:
                continue
            evidence = sum(
                table.evidence[signal].item(entry.row)
                for signal in states
                if signal.metric == row.metric and is_limited(signal)
            )
            n_groups = int(state[N_TOTAL])
            if evidence < needed:
                after = msgspec.structs.replace(row, enough_us=0, enough_groups=0, enough_n=0)
            elif self._is_large(entry, row.metric, state):
                after = msgspec.structs.replace(row, shown=True)
            elif not row.enough_us:
                after = msgspec.structs.replace(row, enough_us=now_us, enough_groups=n_groups, enough_n=row.n)
            else:
                n = n_groups - row.enough_groups
                gives_up = (
                    now_us - row.enough_us >= QUIET_US
                    and n >= _LEAST_GROUPS
                    and row.n - row.enough_n < _LEAST_PAIRED * n
                )
                after = msgspec.structs.replace(row, unpaired=gives_up)
            if after != row:
                self._put(msgspec.structs.replace(after, fold_seq=fold_seq))

    def _is_large(self, entry: SliceState, metric: str, state: FloatArray) -> bool:
        """Return whether what is measured is far above the budget and the slice's noise."""
        estimates = (BUDGET.recent(state), BUDGET.since_change(state))
        scale, budget = float(state[SCALE]), float(state[M]) - entry.noise(SignalKey(metric, BUDGET.kind))
        low = max((of.low / scale for of in estimates if of is not None), default=0.0)
        return is_large(low, self._noise(entry.key, metric, scale), budget)

    def _put(self, row: PairRow) -> None:
        self._rows[row.key] = row
        self._dirty.add(row.key)
        self._ended.discard(row.key)


def _row(key: _TestKey, test: PairTest, *, suspect: bool, fold_seq: int) -> PairRow:
    return PairRow(
        model_version_id=key[0],
        slice_id=key[1],
        metric=key[2],
        suspect=suspect,
        budget=test.budget,
        since_us=test.since_us,
        n=test.n,
        wealth=test.wealth,
        shown=test.shown,
        explained=test.explained,
        fold_seq=fold_seq,
    )


def _test(row: PairRow) -> PairTest:
    names = ("budget", "since_us", "n", "wealth", "shown", "explained")
    return PairTest(**{name: getattr(row, name) for name in names})


def _may_page(row: PairRow) -> bool:
    return row.shown or row.unpaired


def _is_over(row: PairRow, now_us: int) -> bool:
    """Return whether a page has waited for a pair as long as one takes to come."""
    return bool(row.enough_us) and now_us - max(row.enough_us, row.paired_us) >= PATIENCE_US


def _by_slice(items: Iterable[NoiseRow], everything: int | None) -> dict[int, list[NoiseRow]]:
    """Return the items of one exchange by the slices that they count for."""
    items_by_slice: dict[int, list[NoiseRow]] = {}
    for row in items:
        for slice_id in (everything,) if row.slice_ids is None else row.slice_ids:
            if slice_id is not None:
                items_by_slice.setdefault(slice_id, []).append(row)
    return items_by_slice


def _is_pair(row: NoiseRow) -> bool:
    """Return whether the candidate's answer is known, too."""
    return row.side is Side.REFERENCE and not (
        row.candidate_flip is None and row.candidate_divergence is None
    )


def _seen(row: PairRow, items: Sequence[NoiseRow], budget: Budget, smallest: float) -> PairRow:
    """Return a test with the items of one exchange, if they count for it."""
    pair = (
        None if items[0].captured_us <= row.since_us else _pair(items, Metric(row.metric), budget, smallest)
    )
    if pair is None:
        return row
    test = _test(row).seen(*pair)
    return msgspec.structs.replace(
        row, n=test.n, wealth=test.wealth, shown=test.shown, explained=test.explained
    )


def _pair(
    items: Sequence[NoiseRow], metric: Metric, budget: Budget, smallest: float
) -> tuple[float, float] | None:
    """Return weighted difference and weight of an exchange; None where a value is not known, or does not fit to its sampling."""
    cap = cap_of(metric, budget)
    twice = [
        (row, of_candidate / cap, of_reference / cap)
        for row in items
        if (of_reference := clipped(metric, row, cap)) is not None
        and (of_candidate := clipped(metric, _of_candidate(row), cap)) is not None
    ]
    if not twice:
        return None
    pi = [row.pi for row, _, _ in twice]
    try:
        candidate = group_value([x for _, x, _ in twice], pi, smallest, len(twice))
        reference = group_value([x for _, _, x in twice], pi, smallest, len(twice))
    except ValueError:
        return None  # its comparison was not an observation either, and the log says why
    v = min(candidate.v, 1.0)
    return max(-v, min(v, candidate.vx - reference.vx)), v


def _of_candidate(row: NoiseRow) -> NoiseRow:
    return msgspec.structs.replace(row, flip=row.candidate_flip, divergence=row.candidate_divergence)
