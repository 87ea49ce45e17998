"""The fold as one would write it down first: one group of one slice after the other, and every row made at once.

What the shipped fold does with arrays over a batch, and only as often as it is asked for, must give the same bits.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar
from zlib import crc32

import msgspec
import numpy as np

from quantdrift.core.config.schema import Config
from quantdrift.core.tasks import MEASURES
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS
from quantdrift.drift.evidence.header import CREATED_AT, LAST_AT, N_TOTAL, POLICY, SCALE, M, N
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.evidence.state import dump_state
from quantdrift.drift.watch import Groups, Phase, PhaseChange, Series, SignalKey, advance
from quantdrift.facts.estimate import N_GROUPS
from quantdrift.monitor.fold.fold import Fold
from quantdrift.monitor.fold.groups import exchanges
from quantdrift.monitor.fold.rollup import DIVERGENCE_BINS, HOUR_US
from quantdrift.monitor.fold.sessions import Part
from quantdrift.monitor.fold.slice_state import UNJUDGED, Key, SliceState
from quantdrift.storage.fold_rows import (
    BatchRows,
    ComparisonRow,
    DetectorRow,
    FoldResult,
    ItemCount,
    RollupRow,
    Snapshot,
    VerdictRow,
)
from tests.support.monitor.plain_groups import shown, slices_of

Row = TypeVar("Row", DetectorRow, VerdictRow)
EDGES = np.geomspace(1e-6, 10.0, DIVERGENCE_BINS + 1)[1:-1]
MEANS = ("flip", "topk", "js", "divergence", "margin", "tie")
SQUARED = ("flip", "divergence")


class PlainRollup:
    """Sums of one fold, item after item."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int, int], dict[str, float]] = {}
        self._bins: dict[tuple[int, int, int], list[float]] = {}
        self._people: dict[tuple[int, int, int], list[float]] = {}

    def add(self, slice_id: int, items: Sequence[ComparisonRow], cap: float, n_unmeasured: int) -> None:
        """Add one group."""
        first = items[0]
        sums, bins = self._entry(slice_id, first)
        weight = 1.0 / first.pi
        sums["n_items"] += len(items)
        sums["n_unmeasured"] += n_unmeasured
        sums["n_groups"] += 1
        sums["weight"] += weight
        sums["weight_sq"] += weight * weight
        share = weight / len(items)
        for row in items:
            for metric in MEANS:
                value = getattr(row, metric)
                if value is not None and not math.isnan(value):
                    sums[f"{metric}_weight"] += share
                    sums[metric] += share * (min(value, cap) if metric == "divergence" else value)
            if row.divergence is not None and not math.isnan(row.divergence):
                sums["n_infinite"] += math.isinf(row.divergence)
                bins[int(np.searchsorted(EDGES, row.divergence, side="right"))] += share
        sums["cap"] = max(sums["cap"], cap)
        for number in range(len(SQUARED)):
            self._square(slice_id, items, share, cap, number)

    def _square(
        self, slice_id: int, items: Sequence[ComparisonRow], share: float, cap: float, number: int
    ) -> None:
        """Add the squares of one group, and its sums to those of the random group of its person."""
        first, metric = items[0], SQUARED[number]
        sums, _ = self._entry(slice_id, first)
        values = [
            value for row in items if (value := getattr(row, metric)) is not None and not math.isnan(value)
        ]
        w, y = 0.0, 0.0
        for value in values:
            w += share
            y += share * (min(value, cap) if metric == "divergence" else value)
        squares = {f"{metric}_weight_sq": w * w, f"{metric}_sq": y * y, f"{metric}_cross": w * y}
        for name, square in squares.items():
            sums[name] += square
        sums["heaviest"] = max(sums["heaviest"], w)
        if first.group_key:
            key = (first.model_version_id, slice_id, first.captured_us - first.captured_us % HOUR_US)
            people = self._people.setdefault(key, [0.0] * (len(SQUARED) * (2 * N_GROUPS + 3)))
            begin, group = number * (2 * N_GROUPS + 3), crc32(first.group_key.encode()) % N_GROUPS
            people[begin + group] += w
            people[begin + N_GROUPS + group] += y
            for place, square in enumerate(squares.values(), begin + 2 * N_GROUPS):
                people[place] += square

    def close(self, slice_id: int, items: Sequence[ComparisonRow]) -> None:
        """Let the exchanges of a closed session count as one in the square of the weights."""
        first_of = {row.exchange_id: row for row in reversed(items)}
        weights = [1.0 / row.pi for row in first_of.values()]
        sums, _ = self._entry(slice_id, items[0])
        sums["weight_sq"] += sum(weights) ** 2 - sum(weight * weight for weight in weights)

    def _entry(self, slice_id: int, first: ComparisonRow) -> tuple[dict[str, float], list[float]]:
        key = (first.model_version_id, slice_id, first.captured_us - first.captured_us % HOUR_US)
        names = [
            "n_items",
            "n_unmeasured",
            "n_groups",
            "weight",
            "weight_sq",
            "n_infinite",
            "cap",
            "heaviest",
            *MEANS,
        ]
        names += [f"{name}_weight" for name in MEANS]
        names += [f"{name}_{what}" for name in SQUARED for what in ("weight_sq", "sq", "cross")]
        sums = self._sums.setdefault(key, dict.fromkeys(names, 0.0))
        return sums, self._bins.setdefault(key, [0.0] * DIVERGENCE_BINS)

    def rows(self) -> list[RollupRow]:
        """Return the sums, ordered by their key."""
        counts = ("n_items", "n_unmeasured", "n_groups", "n_infinite")
        kind: type[Any] = RollupRow
        return [
            kind(
                model_version_id=key[0],
                slice_id=key[1],
                hour_us=key[2],
                divergence_bins=tuple(self._bins[key]),
                people=tuple(self._people.get(key, ())),
                **{name: int(value) if name in counts else value for name, value in sums.items()},
            )
            for key, sums in sorted(self._sums.items())
        ]


class PlainFold(Fold):
    """The fold, group by group."""

    def __init__(self, config: Config, snapshot: Snapshot) -> None:
        super().__init__(config, snapshot)
        self.plain_rollup = PlainRollup()

    def batch(self, rows: BatchRows) -> None:
        """Fold one batch, and make the verdicts of what it touched at once, from each state by itself."""
        super().batch(rows)
        for entry in self.state.changed():
            self._make(entry)

    def take(self) -> FoldResult:
        """Return what is to be written."""
        dirty = self.state.changed()
        detectors = [row for entry in dirty for row in plain_rows(entry)]
        verdicts = [entry.written for entry in dirty]
        rollups, self.plain_rollup = self.plain_rollup.rows(), PlainRollup()
        outcome = super().take()
        assert not outcome.rollups
        return msgspec.structs.replace(
            outcome,
            detectors=_replaced(
                outcome.detectors,
                detectors,
                lambda row: (row.model_version_id, row.slice_id, row.metric, row.kind),
            ),
            verdicts=_replaced(outcome.verdicts, verdicts, lambda row: (row.model_version_id, row.slice_id)),
            rollups=tuple(rollups),
        )

    def _settle(self, batch: BatchRows, touched: Sequence[SliceState], *, all_due: bool) -> None:
        self.state.table.judged[:] = UNJUDGED  # each slice is judged by itself
        super()._settle(batch, touched, all_due=all_due)

    def _make(self, entry: SliceState) -> None:
        """Make the row of a verdict."""
        table, row, watch = entry.table, entry.row, entry.watch
        if not table.stale[row]:
            return
        states = sorted(watch.states.items())
        evidence, threshold = entry.written.evidence, entry.written.threshold
        if table.unweighed[row]:
            evidence = 0.0
            for signal, state in states:
                evidence += DETECTORS[signal.kind].evidence(state)
            mass = 0.0
            for signal, state in states:
                mass += DETECTORS[signal.kind].page_mass(state)
            limits = self.state.thresholds
            threshold = max(limits.page, limits.mass_ratio * mass)
        entry.written = VerdictRow(
            model_version_id=entry.key[0],
            slice_id=entry.key[1],
            verdict=entry.said,
            reason=entry.reason,
            since_us=int(table.since_us[row]),
            n_groups=max(int(state[N_TOTAL]) for _, state in states),
            evidence=evidence,
            threshold=threshold,
            estimate=plain_estimate(entry),
            last_us=entry.last_us,
            updated_us=int(table.updated_us[row]),
            fold_seq=int(table.fold_seq[row]),
        )
        table.stale[row] = table.unweighed[row] = False

    def _compare(self, rows: BatchRows) -> tuple[list[SliceState], list[tuple[SliceState, PhaseChange]]]:
        collected: dict[Key, list[tuple[int, float, int, int, dict[SignalKey, FloatArray]]]] = {}
        counted: list[ItemCount] = []
        order = 0
        for exchange in exchanges(rows.comparisons):
            order, first = exchange.order, exchange.rows[0]
            self.state.pass_time(min(first.captured_us, rows.stored_us))
            version = self.catalog.versions[first.model_version_id]
            if not version.reference_digest:
                continue
            cap = self.state.budget(version.id).cap
            for slice_id, items in slices_of(exchange.rows).items():
                n_unmeasured = sum(self._is_unmeasured(row) for row in items)
                self.plain_rollup.add(slice_id, items, cap, n_unmeasured)
                hour_us = items[0].captured_us - items[0].captured_us % HOUR_US
                names_people = any(
                    row.group_key and (row.flip is not None or row.divergence is not None) for row in items
                )
                counted.append(
                    ItemCount(version.id, slice_id, hour_us, len(items), n_unmeasured, names_people)
                )
            if first.group_key:
                self.state.sessions.add(exchange.rows, self.state.now_us)
            else:
                self._group(exchange.rows, order, collected)
        if self.state.clock.at_us is not None:
            self._sessions(order + 1, collected)
        showed_nothing = self._count(counted, collected.keys())
        keys = sorted(collected)
        slices = [self.state.slices[key] for key in keys]
        self._withhold(keys, slices)
        watches = [one.watch for one in slices]
        groups = [_groups(collected[key]) for key in keys]
        changes = advance(watches, groups, self.state.thresholds)
        for watch in watches:
            watch.touched()
        return slices + showed_nothing, [(slices[change.watch], change) for change in changes]

    def _sessions(
        self,
        begin: int,
        collected: dict[Key, list[tuple[int, float, int, int, dict[SignalKey, FloatArray]]]],
    ) -> None:
        over = self.state.sessions.due(self.state.exchange_us)
        for place, (_, closed, part) in enumerate(over, start=begin):
            if part is not Part.BEGIN:
                for slice_id, items in slices_of(closed).items():
                    self.plain_rollup.close(slice_id, items)
            if part is not Part.AFTER:
                self._group(closed, place, collected, budgets_alone=part is Part.BEGIN)

    def _count(self, counted: Sequence[ItemCount], shown: Collection[Key]) -> list[SliceState]:
        """Count what was compared; return the slices that nothing was measured of."""
        for count in counted:
            self.state.count_items([count])
        keys = {count[:2] for count in counted if count.n_unmeasured} - set(shown)
        nothing = sorted(key for key in keys if not self.state.ignores(key[1]))
        for key in nothing:
            if key not in self.state.slices:
                self.state.enter(key, "", at_us=self.state.now_us, last_us=self.state.now_us)
        return [self.state.slices[key] for key in nothing]

    def _is_unmeasured(self, row: ComparisonRow) -> bool:
        if row.divergence is not None and not math.isnan(row.divergence):
            return False
        task = self.state.task(self.state.model(row.model_version_id))
        is_unknown = row.flip is None or math.isnan(row.flip)
        return is_unknown or (MEASURES[task].measured_by_divergence and row.flip == 0)

    def _group(
        self,
        rows: Sequence[ComparisonRow],
        order: int,
        collected: dict[Key, list[tuple[int, float, int, int, dict[SignalKey, FloatArray]]]],
        *,
        budgets_alone: bool = False,
    ) -> None:
        first, state = rows[0], self.state
        budget = state.budget(first.model_version_id)
        captured_us = min(max(row.captured_us for row in rows), state.now_us)
        for slice_id, items in slices_of(rows).items():
            policy_id = items[0].policy_id
            rates = state.rates(slice_id, policy_id)
            if state.ignores(slice_id):
                continue
            values = {
                signal: x
                for signal, x in shown(slice_id, items, state.rates, budget).items()
                if signal.kind == BUDGET.kind or not budgets_alone
            }
            if not values:
                continue
            key = (first.model_version_id, slice_id)
            if key not in self.state.slices:
                state.enter(key, "", at_us=state.now_us, last_us=captured_us)
            entry = self.state.slices[key]
            entry.compared(captured_us)
            weighted = rates.session_weighted if first.group_key else rates.weighted
            state.observed(key, sorted(values), weighted=weighted)
            for signal in values:
                entry.watch.states[signal][POLICY] = policy_id
            collected.setdefault(key, []).append((order, state.clock.mass, state.now_us, captured_us, values))


def plain_rows(entry: SliceState) -> list[DetectorRow]:
    """Return the detectors of a slice as they are stored."""
    return [
        DetectorRow(
            model_version_id=entry.key[0],
            slice_id=entry.key[1],
            metric=signal.metric,
            kind=signal.kind,
            state=dump_state(signal.kind, state),
            budget=float(state[M]),
            n_groups=int(state[N]),
            evidence=DETECTORS[signal.kind].evidence(state),
            fold_seq=int(entry.table.fold_seq[entry.row]),
            created_us=int(state[CREATED_AT]),
            last_us=int(state[LAST_AT]),
            retired_us=None,
            noise=entry.noise(signal),
        )
        for signal, state in sorted(entry.watch.states.items())
    ]


def plain_estimate(entry: SliceState) -> dict[str, dict[str, float]]:
    """Return what the row of a verdict shows of each metric."""
    found: dict[str, dict[str, float]] = {}
    for signal, state in sorted(entry.watch.states.items()):
        if signal.kind != BUDGET.kind:
            if missing := DETECTORS[signal.kind].missing(state):
                found.setdefault(signal.metric, {})[f"{signal.kind}_missing"] = missing
            continue
        noise, scale = entry.noise(signal), float(state[SCALE])
        shown = found.setdefault(signal.metric, {})
        shown["budget"] = (float(state[M]) - noise) * scale
        if noise:
            shown["noise"] = noise * scale
        if recent := BUDGET.recent(state):
            shown["mean"] = recent.mean
            if recent.missing:
                shown["missing"] = recent.missing
            else:
                shown["low"], shown["high"] = recent.low, recent.high
            shown["n"] = recent.n
        if entry.watch.phase is not Phase.WATCHING and (since := BUDGET.since_change(state)):
            shown["severity"] = since.low
    return found


def _replaced(
    written: Sequence[Row], plain: Sequence[Row], key: Callable[[Row], tuple[object, ...]]
) -> tuple[Row, ...]:
    """Return the rows that were written, with those of the same key in `plain` in their places."""
    made = {key(row): row for row in plain}
    assert made.keys() <= {key(row) for row in written}
    return tuple(made.get(key(row), row) for row in written)


def _groups(collected: Sequence[tuple[int, float, int, int, dict[SignalKey, FloatArray]]]) -> Groups:
    signals = {signal: len(value) for *_, values in collected for signal, value in values.items()}
    return Groups(
        order=np.array([one[0] for one in collected], dtype=np.float64),
        mass=np.array([one[1] for one in collected], dtype=np.float64),
        at_us=np.array([one[2] for one in collected], dtype=np.float64),
        captured_us=np.array([one[3] for one in collected], dtype=np.float64),
        series={
            signal: Series(
                x=np.array([values.get(signal, np.zeros(width)) for *_, values in collected]),
                seen=np.array([signal in values for *_, values in collected]),
            )
            for signal, width in signals.items()
        },
    )
