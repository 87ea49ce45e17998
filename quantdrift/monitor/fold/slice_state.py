"""One slice of one candidate version in the fold, and the rows that are written of many."""

import itertools
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import numpy as np

from quantdrift.core.records import Verdict
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS
from quantdrift.drift.evidence import header as fields
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.drift.evidence.state import dump_rows
from quantdrift.drift.watch import SignalKey, SliceArrays, SliceWatch, Thresholds, doubled
from quantdrift.storage.fold_rows import RETIRED_AFTER, DetectorRow, VerdictRow

RETIRED_AFTER_US = RETIRED_AFTER // timedelta(microseconds=1)
Key = tuple[int, int]  # model_version_id, slice_id
UNJUDGED = 0


class FoldArrays(SliceArrays):
    """The columns of the slices of a fold: beside their states, what changes with each batch that touches them.

    Attributes
    ----------
    last_us
        (rows,) capture time of the last comparison, at most that of storing it.
    updated_us, fold_seq
        (rows,) time and batch of the last verdict.
    dirty
        (rows,) whether its rows are to be written.
    stale
        (rows,) whether the row of the verdict has to be made again.
    unweighed
        (rows,) whether its evidence has to be that of the states now.
    judged
        (rows,) by which case of `quantdrift.monitor.fold.verdict` the verdict was found; `UNJUDGED` where it has to be
        found again.
    checked
        (rows,) the `FoldState.generation` for which budgets were last seen to be those of today; -1 for none.
    sampled_under
        (rows,) policy that all signals were last sampled under; -1 where they differ, or it is not known.
    version_id, slice_id
        (rows,) whose row it is.
    since_us
        (rows,) since when the verdict is what it is.
    counted, counted_under
        (rows,) number of the strata and model whose losses count for the slice, as sampled under a policy; -1 for
        a policy that is not known.
    hour, n_items, n_unmeasured, names_people, n_items_before, n_unmeasured_before, named_people_before
        (rows,) the last hour of capture, counted from 1970; items that were compared in it, those of them that nothing was measured
        of, and whether one says who sent it; the same of the hour before.
    suspect, asked
        (rows,) whether its exchanges are replayed twice to find whether noise explains what is measured, and whether it is not known.
    noise
        Per signal (rows,) the part of the mean it tests against that was added for noise, over the cap.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hour: IntArray = np.zeros(1, dtype=np.intp)
        self.n_items: IntArray = np.zeros(1, dtype=np.intp)
        self.n_unmeasured: IntArray = np.zeros(1, dtype=np.intp)
        self.names_people: BoolArray = np.zeros(1, dtype=np.bool_)
        self.n_items_before: IntArray = np.zeros(1, dtype=np.intp)
        self.n_unmeasured_before: IntArray = np.zeros(1, dtype=np.intp)
        self.named_people_before: BoolArray = np.zeros(1, dtype=np.bool_)
        self.last_us: IntArray = np.zeros(1, dtype=np.intp)
        self.updated_us: IntArray = np.zeros(1, dtype=np.intp)
        self.fold_seq: IntArray = np.zeros(1, dtype=np.intp)
        self.dirty: BoolArray = np.zeros(1, dtype=np.bool_)
        self.stale: BoolArray = np.zeros(1, dtype=np.bool_)
        self.unweighed: BoolArray = np.zeros(1, dtype=np.bool_)
        self.judged: IntArray = np.zeros(1, dtype=np.intp)
        self.checked: IntArray = np.zeros(1, dtype=np.intp)
        self.sampled_under: IntArray = np.zeros(1, dtype=np.intp)
        self.version_id: IntArray = np.zeros(1, dtype=np.intp)
        self.slice_id: IntArray = np.zeros(1, dtype=np.intp)
        self.since_us: IntArray = np.zeros(1, dtype=np.intp)
        self.counted: IntArray = np.zeros(1, dtype=np.intp)
        self.counted_under: IntArray = np.zeros(1, dtype=np.intp)
        self.suspect: BoolArray = np.zeros(1, dtype=np.bool_)
        self.asked: BoolArray = np.zeros(1, dtype=np.bool_)
        self.noise: dict[SignalKey, FloatArray] = {}

    def add_row(self) -> int:
        """Return the number of a row that nothing is known of."""
        row = super().add_row()
        self.dirty[row] = self.stale[row] = self.unweighed[row] = False
        self.judged[row] = UNJUDGED
        self.hour[row] = self.n_items[row] = self.n_unmeasured[row] = 0
        self.n_items_before[row] = self.n_unmeasured_before[row] = 0
        self.names_people[row] = self.named_people_before[row] = False
        self.suspect[row] = self.asked[row] = False
        self.checked[row] = self.sampled_under[row] = self.counted_under[row] = -1
        for added in self.noise.values():
            added[row] = 0.0
        return row

    def count(
        self,
        rows: IntArray,
        hour: IntArray,
        n_items: IntArray,
        n_unmeasured: IntArray,
        names_people: BoolArray,
    ) -> None:
        """Count items, (counts,) each; of a row's last two hours alone, whatever their order."""
        for now in np.unique(hour).tolist():
            of = hour == now
            at = rows[of]
            begins = np.unique(at[self.hour[at] < now])
            follows = self.hour[begins] == now - 1
            self.n_items_before[begins] = np.where(follows, self.n_items[begins], 0)
            self.n_unmeasured_before[begins] = np.where(follows, self.n_unmeasured[begins], 0)
            self.named_people_before[begins] = follows & self.names_people[begins]
            self.n_items[begins] = self.n_unmeasured[begins] = 0
            self.names_people[begins] = False
            self.hour[begins] = now
            last, before = self.hour[at] == now, self.hour[at] == now + 1
            np.add.at(self.n_items, at[last], n_items[of][last])
            np.add.at(self.n_unmeasured, at[last], n_unmeasured[of][last])
            self.names_people[at[last & names_people[of]]] = True
            np.add.at(self.n_items_before, at[before], n_items[of][before])
            np.add.at(self.n_unmeasured_before, at[before], n_unmeasured[of][before])
            self.named_people_before[at[before & names_people[of]]] = True

    def counted_items(self, rows: IntArray, hour: int) -> tuple[IntArray, IntArray]:
        """Return the items that were compared, and those that nothing was measured of, since the hour before `hour`."""
        last, before = self.hour[rows] >= hour - 1, self.hour[rows] >= hour
        n_items = np.where(last, self.n_items[rows], 0) + np.where(before, self.n_items_before[rows], 0)
        n_unmeasured = np.where(last, self.n_unmeasured[rows], 0)
        return n_items, n_unmeasured + np.where(before, self.n_unmeasured_before[rows], 0)

    def counts_people(self, row: int, hour: int) -> bool | None:
        """Return whether an item of a row since the hour before `hour` says who sent it; None: nothing was compared."""
        last, before = self.hour[row] >= hour - 1, self.hour[row] >= hour
        if not (last and self.n_items[row]) and not (before and self.n_items_before[row]):
            return None
        return bool((last and self.names_people[row]) or (before and self.named_people_before[row]))

    def put(self, row: int, key: SignalKey, state: FloatArray) -> None:
        """Write the state of a signal, (size,), which the row may not have yet."""
        super().put(row, key, state)
        if key not in self.noise:
            self.noise[key] = np.zeros(len(self.total))

    def remove(self, row: int, key: SignalKey) -> None:
        """Remove a signal of a row, if it has it."""
        super().remove(row, key)
        self.noise[key][row] = 0.0

    def _double(self) -> None:
        super()._double()
        self.noise = {key: doubled(column) for key, column in self.noise.items()}


CLOSED = "closed by "  # begin of the reason of a slice whose alert a person closed


class SliceState:
    """The watch of a slice, and the verdict on it.

    Parameters
    ----------
    watch
        Phase and detector states.
    verdict
        The row in the store, as it is or will be.
    thresholds
        When evidence is an alarm.

    Attributes
    ----------
    said, reason
        The verdict and why.
    judged_by
        What its last verdict rested on, where nothing was compared since; else what an earlier one did, or None.
    """

    __slots__ = ("_thresholds", "judged_by", "key", "reason", "row", "said", "table", "watch", "written")

    def __init__(self, watch: SliceWatch, verdict: VerdictRow, thresholds: Thresholds) -> None:
        assert isinstance(watch.table, FoldArrays)
        self.watch, self.table, self.row = watch, watch.table, watch.row
        self.key: Key = (verdict.model_version_id, verdict.slice_id)
        self.said, self.reason = verdict.verdict, verdict.reason
        self.judged_by: object = None
        self.written = verdict
        self.table.since_us[self.row] = verdict.since_us
        self.table.last_us[self.row], self.table.updated_us[self.row] = verdict.last_us, verdict.updated_us
        self.table.fold_seq[self.row] = verdict.fold_seq
        self.table.version_id[self.row], self.table.slice_id[self.row] = self.key
        self._thresholds = thresholds

    @property
    def last_us(self) -> int:
        """Capture time of its last comparison, at most that of storing it; the row follows."""
        return self.table.last_us.item(self.row)

    @property
    def verdict(self) -> VerdictRow:
        """The row; what it shows of the states is worked out here, and so only as often as it is wanted.

        Whoever changes a state without saying something of it asks for the row before.
        """
        return verdict_rows(self.table, [self], self._thresholds)[0]

    @property
    def n_groups(self) -> int:
        """Exchanges compared so far."""
        return self.watch.survey().n_groups

    @property
    def policy_id(self) -> int:
        """Policy of its last exchange; 0 before the first."""
        return self.watch.survey().policy_id

    def compared(self, at_us: int) -> None:
        """Note the time of a comparison."""
        self.table.last_us[self.row] = max(self.last_us, at_us)

    def say(self, verdict: Verdict, reason: str, *, at_us: int, fold_seq: int) -> None:
        """Say `verdict` of it, and all that its states show now.

        An alarm resets the evidence: until it is over, what it was then says more than nothing.
        """
        table, row = self.table, self.row
        if not verdict is Verdict.FIRING is self.said:
            table.unweighed[row] = True
        if verdict is not self.said:
            table.since_us[row] = at_us
        self.said, self.reason = verdict, reason
        table.updated_us[row], table.fold_seq[row] = at_us, fold_seq
        table.stale[row], table.judged[row] = True, UNJUDGED

    def alert(self, verdict: Verdict, reason: str, *, at_us: int, evidence: float, threshold: float) -> None:
        """Say what an alarm says, or the end of one; the rest of the row stays."""
        self.written = msgspec.structs.replace(
            self.verdict,
            verdict=verdict,
            reason=reason,
            since_us=at_us,
            evidence=evidence,
            threshold=threshold,
        )
        self.said, self.reason = verdict, reason
        self.table.since_us[self.row], self.table.judged[self.row] = at_us, UNJUDGED

    def noise(self, signal: SignalKey) -> float:
        """Return the part of the mean that a signal tests against that was added for noise, over the cap."""
        column = self.table.noise.get(signal)
        return 0.0 if column is None else column.item(self.row)

    def loudest(self) -> SignalKey:
        """Return the signal with the most evidence."""
        states = self.watch.states
        return max(sorted(states), key=lambda key: DETECTORS[key.kind].evidence(states[key]))

    def silent(self, now_us: int) -> list[SignalKey]:
        """Return the signals that have seen nothing for 30 days."""
        return [
            signal
            for signal, state in sorted(self.watch.states.items())
            if now_us - state[fields.LAST_AT] > RETIRED_AFTER_US
        ]

    def gone(self, now_us: int) -> bool:
        """Return whether it is a version without a reference of which nothing has come for 30 days."""
        return not self.watch.states and now_us - self.last_us > RETIRED_AFTER_US

    def seen(self, at_us: int) -> None:
        """Note that a version without a reference still serves."""
        self.written = msgspec.structs.replace(self.verdict, last_us=at_us)
        self.table.last_us[self.row] = at_us

    def retire(self, signals: Sequence[SignalKey], now_us: int, fold_seq: int) -> list[DetectorRow]:
        """Remove `signals` and return their last rows: retired now, or when they had been silent for 30 days."""
        _ = self.verdict  # as its states show it now
        rows = [
            msgspec.structs.replace(
                row, retired_us=min(row.last_us + RETIRED_AFTER_US, now_us), fold_seq=fold_seq, evidence=0.0
            )
            for row in detector_rows(self.table, [self])
            if SignalKey(row.metric, row.kind) in signals
        ]
        for signal in signals:
            del self.watch.states[signal]
        self.watch.touched()
        return rows


def new_slice(
    key: Key,
    table: FoldArrays,
    *,
    reason: str,
    at_us: int,
    last_us: int,
    thresholds: Thresholds,
    fold_seq: int,
    may_page: bool,
) -> SliceState:
    """Return a slice that nothing is known of yet: `unknown`."""
    verdict = VerdictRow(
        model_version_id=key[0],
        slice_id=key[1],
        verdict=Verdict.UNKNOWN,
        reason=reason,
        since_us=at_us,
        n_groups=0,
        evidence=0.0,
        threshold=thresholds.page,
        estimate={},
        last_us=last_us,
        updated_us=at_us,
        fold_seq=fold_seq,
    )
    return SliceState(SliceWatch(table=table, may_page=may_page), verdict, thresholds)


def rows_of(slices: Sequence[SliceState]) -> IntArray:
    """Return the rows of slices in their table."""
    return np.array([entry.row for entry in slices], dtype=np.intp)


def detector_rows(table: FoldArrays, slices: Sequence[SliceState]) -> list[DetectorRow]:
    """Return the detectors of slices as they are stored, slice after slice, by metric and kind."""
    rows = rows_of(slices)
    table.survey_all(rows)
    of_signals = [_rows_of_signal(table, rows, signal) for signal in table.keys]
    if all(len(of) == len(rows) for of in of_signals):
        return list(itertools.chain.from_iterable(zip(*of_signals, strict=True)))
    have = [iter(of) for of in of_signals]
    columns = np.array([table.has[signal][rows] for signal in table.keys]).T.tolist()
    return [next(of) for of_slice in columns for of, has in zip(have, of_slice, strict=True) if has]


def _rows_of_signal(table: FoldArrays, rows: IntArray, signal: SignalKey) -> list[DetectorRow]:
    """Return the detectors of one signal, of those slices that have it."""
    has, states = table.has[signal][rows], table.states[signal]
    rows = rows[has]
    header = states[:, : fields.HEADER][rows]
    whole = header[:, [fields.N, fields.CREATED_AT, fields.LAST_AT]].astype(np.int64).T.tolist()
    return list(
        map(
            DetectorRow,
            table.version_id[rows].tolist(),
            table.slice_id[rows].tolist(),
            itertools.repeat(signal.metric),
            itertools.repeat(signal.kind),
            dump_rows(signal.kind, states, rows.tolist()),
            header[:, fields.M].tolist(),
            whole[0],
            table.evidence[signal][rows].tolist(),
            table.fold_seq[rows].tolist(),
            whole[1],
            whole[2],
            itertools.repeat(None),
            table.noise[signal][rows].tolist(),
        )
    )


def verdict_rows(table: FoldArrays, slices: Sequence[SliceState], thresholds: Thresholds) -> list[VerdictRow]:
    """Return the verdicts on slices as they are stored; rows that are not up to date are made."""
    every = rows_of(slices)
    stale = table.stale[every]
    if stale.any():
        rows, old = every[stale], list(itertools.compress(slices, stale.tolist()))
        table.survey_all(rows)
        evidence, threshold = table.total[rows], table.page_thresholds(rows, thresholds)
        for index in np.flatnonzero(~table.unweighed[rows]).tolist():
            evidence[index], threshold[index] = old[index].written.evidence, old[index].written.threshold
        verdicts = map(
            VerdictRow,
            table.version_id[rows].tolist(),
            table.slice_id[rows].tolist(),
            [entry.said for entry in old],
            [entry.reason for entry in old],
            table.since_us[rows].tolist(),
            table.n_groups[rows].tolist(),
            evidence.tolist(),
            threshold.tolist(),
            _estimates(table, rows),
            table.last_us[rows].tolist(),
            table.updated_us[rows].tolist(),
            table.fold_seq[rows].tolist(),
        )
        for entry, row in zip(old, verdicts, strict=True):
            entry.written = row
        table.stale[rows] = table.unweighed[rows] = False
    return [entry.written for entry in slices]


def _estimates(table: FoldArrays, rows: IntArray) -> list[dict[str, dict[str, float]]]:
    """Return per metric the recent mean with its interval, the budget and the noise added to it; the severity of alerts.

    What a baseline still lacks stands beside it, in exchanges: `change_missing`, `tail_missing`. An interval that would hold
    every value is left out: `missing` is how many exchanges it needs.
    """
    estimates: list[dict[str, dict[str, float]]] = [{} for _ in range(len(rows))]
    learns = table.missing[rows] > 0
    for signal in table.keys:
        has, states = table.has[signal][rows], table.states[signal]
        if signal.kind == BUDGET.kind:
            of_those = itertools.compress(estimates, has.tolist())
            for of_slice, shown in zip(of_those, _means(table, rows[has], signal), strict=True):
                of_slice[signal.metric] = shown
        elif len(lacking := np.flatnonzero(has & learns)):
            n = DETECTORS[signal.kind].missings(states[rows[lacking]])
            for index, missing in zip(lacking.tolist(), n.tolist(), strict=True):
                if missing:
                    estimates[index].setdefault(signal.metric, {})[f"{signal.kind}_missing"] = missing
    return estimates


def _means(table: FoldArrays, rows: IntArray, signal: SignalKey) -> list[dict[str, float]]:
    """Return what a budget's signal shows of each row; all have it."""
    states, added = table.states[signal], table.noise[signal][rows]
    scale, recent = states[:, fields.SCALE][rows], BUDGET.recents(states, rows)
    budget, n = (states[:, fields.M][rows] - added) * scale, recent[:, 3].astype(np.int64)
    columns = zip(budget.tolist(), *recent[:, :3].T.tolist(), n.tolist(), strict=True)
    shown: list[dict[str, float]] = [
        {"budget": accepted, "mean": mean, "low": low, "high": high, "n": groups}
        for accepted, mean, low, high, groups in columns
    ]
    missing = recent[:, 4].astype(np.int64)
    unusual = (n == 0) | (missing > 0) | (added != 0) | (table.phase[rows] != 0)
    for index in np.flatnonzero(unusual).tolist():
        usual = shown[index]
        shown[index] = own = {"budget": usual["budget"]}
        if added[index]:
            own["noise"] = float(added[index] * scale[index])
        if n[index]:
            own["mean"] = usual["mean"]
            if missing[index]:
                own["missing"] = int(missing[index])
            else:
                own |= {name: usual[name] for name in ("low", "high")}
            own["n"] = usual["n"]
        if table.phase[rows[index]] and (since := BUDGET.since_change(states[rows[index]])):
            own["severity"] = since.low
    return shown
