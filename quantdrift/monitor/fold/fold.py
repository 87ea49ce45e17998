"""The fold: stored batches in, detector states, verdicts, transitions and roll-ups out.

A batch goes through five modules. This one has the order of the steps; `quantdrift.monitor.fold.groups` makes arrays of
the rows; `quantdrift.drift.watch` advances the detectors; `quantdrift.monitor.fold.verdict` judges the slices; and
`quantdrift.monitor.fold.state` has all that is remembered, and returns what is to be written.

It decides everything and does no I/O: no clock, no socket, no database. The same batches in the same order give
the same bits, however they are cut into folds, and whenever the process was killed between two of them. (Roll-ups are
added up in the store, where the order of additions may differ in the last bits.)
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np

from quantdrift.core.config.schema import Config
from quantdrift.core.records import Metric
from quantdrift.core.signals import (
    OF_STREAMS,
    WATCHED,
    budget_of,
    cap_of,
    is_judged,
    is_watched,
    named_signals,
)
from quantdrift.core.tasks import MEASURES
from quantdrift.drift.evidence.clock import MICROSECONDS
from quantdrift.drift.evidence.header import POLICY
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.drift.share import HISTORY_H, KEPT, WINDOWS_H
from quantdrift.drift.watch import PhaseChange, SignalKey, advance_joined, page_now
from quantdrift.facts.events import Ending
from quantdrift.facts.words.verdict import NO_REFERENCE, RETIRED
from quantdrift.monitor.fold.groups import (
    Columns,
    Observation,
    SliceGroups,
    changes,
    exchanges,
    slice_groups,
)
from quantdrift.monitor.fold.loss import RecentCounts
from quantdrift.monitor.fold.noise import NoiseSubject, by_version
from quantdrift.monitor.fold.rollup import HOUR_US
from quantdrift.monitor.fold.sessions import Part
from quantdrift.monitor.fold.slice_state import CLOSED, RETIRED_AFTER_US, Key, SliceState, rows_of
from quantdrift.monitor.fold.state import FoldState
from quantdrift.monitor.fold.verdict import alert, close, end, settle
from quantdrift.storage.fold_rows import (
    BatchRows,
    Catalog,
    Circumstances,
    Episode,
    FloorRow,
    FoldResult,
    ItemCount,
    Position,
    ShareHour,
    ShareQuestion,
    SliceChange,
    Snapshot,
    VerdictRow,
    VersionRow,
)

SETTLE_US = 10_000_000  # event time
SHOWN_US = 15 * 60_000_000  # as long as rules use the last known verdict


class Fold:
    """The fold of one batch after another.

    When a transaction that should have stored an `FoldResult` fails, this object must not be used any more: begin a new
    one from what is stored.

    Parameters
    ----------
    config
        Budgets and limits.
    snapshot
        The stored state.

    Attributes
    ----------
    state
        All that it remembers.
    """

    def __init__(self, config: Config, snapshot: Snapshot) -> None:
        self.state = FoldState(config, snapshot)
        self._may_ask_otherwise = True  # the stored signals are those of another configuration, perhaps
        self._reorder_us = int(config.monitor.reorder_s * MICROSECONDS)
        self._session_us = int(config.monitor.session_s * MICROSECONDS)

    @property
    def position(self) -> Position:
        """How far it has come."""
        return self.state.position

    @property
    def has_news(self) -> bool:
        """Whether `take` would return what is sent: an alert that opens, changes or ends, or a change of noise."""
        sent = any(row.episode is not Episode.NONE for row in self.state.transitions)
        return sent or self.state.noise.has_changed

    @property
    def catalog(self) -> Catalog:
        """What the numbers in its rows stand for."""
        return self.state.catalog

    def policies(self) -> set[int]:
        """Return the policies that its slices were last sampled under, and those of open sessions."""
        table, (_, rows) = self.state.table, self.state.sorted()
        table.survey_all(rows)
        return set(np.unique(table.policy_id[rows]).tolist()) | self.state.sessions.policies()

    def verdicts(self) -> list[VerdictRow]:
        """Return the present verdict on every slice."""
        return [entry.verdict for entry in self.state.sorted()[0]]

    def current(self) -> list[VerdictRow]:
        """Return the verdicts on versions that serve, and for `SHOWN_US` on those that others have replaced.

        Without the latter a rule on the gauges would go on with the last verdict that it saw, and an alert with it.
        """
        return [row for row in self.verdicts() if self._is_shown(row.model_version_id)]

    def floors(self) -> list[FloorRow]:
        """Return what is known of the noise of every version, over all of its traffic."""
        return self.state.noise.rows()

    def noise_allowance(self, key: Key, metric: Metric) -> float:
        """Return the allowance for noise in the budget of a slice, in the metric's own unit."""
        budget = self.state.budget(key[0])
        return self.state.noise.added(key, metric.value, budget_of(metric, budget)) * cap_of(metric, budget)

    def learn(self, catalog: Catalog) -> None:
        """Take over versions, slices and policies; a version without a reference gets its `unknown` here."""
        is_new = catalog.versions != self.catalog.versions
        self.state.learn(catalog)
        if is_new or self._may_ask_otherwise:
            for key, signals in self.state.not_asked():
                self._remove(key, signals, "the configuration asks for it no more")
            self.state.retune_growth()
            self._may_ask_otherwise = False
        for version in catalog.versions.values():
            self._unreferenced(version, version.first_seen_us)

    def note(self, circumstances: Circumstances) -> None:
        """Take over what is so now, and judge all slices again where it has changed."""
        state = self.state
        if circumstances == state.circumstances:
            return
        state.circumstances = circumstances
        state.look()
        self._settle_all()

    def share_question(self) -> ShareQuestion:
        """Return which shares `note_shares` needs now: of the models of which samples are missing."""
        state = self.state
        now_us = state.now_us if state.has_begun else 0
        counts: dict[str, list[RecentCounts]] = {}
        for strata, model in state.count_classes:
            counts.setdefault(model, []).append(state.recent_counts(strata, model))
        return ShareQuestion(
            models=tuple(state.missing.look(counts, now_us)),
            newest_hour_us=now_us - now_us % HOUR_US,
            history_h=HISTORY_H,
            windows_h=WINDOWS_H,
            kept=KEPT,
        )

    def note_shares(self, rows: Sequence[ShareHour]) -> None:
        """Take over what `share_question` asked for, and judge all slices again where samples of others may be missing now."""
        state = self.state
        if not state.has_begun:
            return
        watched = {(state.model(entry.key[0]), entry.key[1]): entry for entry in state.sorted()[0]}

        def counts(model: str, slice_id: int) -> RecentCounts | None:
            entry = watched.get((model, slice_id))
            if entry is None or state.ignores(slice_id) or entry.policy_id not in state.catalog.policies:
                return None
            return state.recent_counts(state.rates(slice_id, entry.policy_id).strata, model)

        if state.missing.see(rows, state.now_us, counts, state.limits.max_loss_ratio):
            self._settle_all()

    def _settle_all(self) -> None:
        if self.state.has_begun:
            slices, rows = self.state.sorted()
            settle(self.state, slices, rows, np.zeros(len(rows), dtype=np.bool_))

    def skip(self, fold_seq: int) -> None:
        """Note that the batches up to one have nothing that concerns it."""
        self.state.fold_seq = max(self.state.fold_seq, fold_seq)

    def take(self) -> FoldResult:
        """Return what is to be written for the batches since the last call, and forget it."""
        return self.state.take()

    def batch(self, rows: BatchRows) -> None:
        """Fold one batch; they come consecutively.

        Raises
        ------
        ValueError
            It is not the next one.
        """
        state = self.state
        if rows.fold_seq != state.fold_seq + 1:
            raise ValueError(f"batch {rows.fold_seq} does not follow {state.fold_seq}")
        state.fold_seq = rows.fold_seq
        before_us = state.now_us if state.has_begun else 0
        self._apply_decisions(rows)
        state.see(rows)
        touched, changes = self._compare(rows)
        self._count_losses(rows)
        if not state.has_begun:
            return
        # After the comparisons: the noise that they are judged by is that of the past.
        self._measure_noise(rows)
        now_us = state.now_us
        state.pairs.look(touched, at_us=state.clock.at_us, now_us=now_us, fold_seq=state.fold_seq)
        state.pairs.pass_time(now_us, fold_seq=state.fold_seq)
        state.losses.forget(now_us)
        state.tend(self._due(touched))
        state.look()
        for entry, change in changes:
            alert(state, entry.key, change)
        touched = [*touched, *self._page_held(touched)]
        if now_us // HOUR_US > before_us // HOUR_US:
            state.losses.trim(now_us)
            state.forget_items()
            self._retire_silent(now_us)
            touched = [slice_ for slice_ in touched if state.slices.get(slice_.key) is slice_]
            state.look()
        self._settle(rows, touched, all_due=now_us // SETTLE_US > before_us // SETTLE_US)

    def _page_held(self, touched: Sequence[SliceState]) -> list[SliceState]:
        """Let slices page that wait for second replays no more; return those of them that the batch did not compare."""
        state, compared = self.state, {slice_.key for slice_ in touched}
        not_compared = []
        for entry in state.pairs.released():
            change = page_now(entry.watch, state.thresholds, at_us=state.exchange_us)
            if change is not None:
                alert(state, entry.key, change)
                if entry.key not in compared:
                    not_compared.append(entry)
        return not_compared

    def _settle(self, batch: BatchRows, touched: Sequence[SliceState], *, all_due: bool) -> None:
        """Judge the slices that the batch compared; and all of them when enough time has passed to change any."""
        state, rows = self.state, rows_of(touched)
        compared = np.zeros(len(state.table.total), dtype=np.bool_)
        compared[rows] = True
        if all_due:
            state.judge_versions()
        if all_due or batch.expiries:
            # Of a model whose samples expired there may be no other reason to judge its slices.
            models = {expiry.model for expiry in batch.expiries}
            touched, rows = state.sorted()
            if not all_due:
                expired = [state.model(entry.key[0]) in models for entry in touched]
                due = compared[rows] | np.array(expired, dtype=np.bool_)
                touched, rows = list(itertools.compress(touched, due.tolist())), rows[due]
        settle(state, touched, rows, compared[rows])

    def _due(self, touched: Sequence[SliceState]) -> list[SliceState]:
        """Return the slices that the batch compared with a window to move on, or a baseline to look at."""
        if not touched:
            return []
        rows = rows_of(touched)
        self.state.table.survey_all(rows)
        return list(
            itertools.compress(touched, (self.state.now_us >= self.state.table.due_us[rows]).tolist())
        )

    def _is_shown(self, version_id: int) -> bool:
        """Return whether the gauges show a version."""
        state = self.state
        if not state.serving.is_replaced(version_id):
            return True
        at_us = state.serving.row(version_id).replaced_us
        serves_otherwise = self.catalog.versions[version_id].candidate_version in state.serves_now(version_id)
        return at_us is not None and state.now_us - at_us <= SHOWN_US and not serves_otherwise

    # --- comparisons

    def _compare(self, rows: BatchRows) -> tuple[list[SliceState], list[tuple[SliceState, PhaseChange]]]:
        """Give the detectors what a batch shows; return the slices that were given something, and changes of phase."""
        observed, event_us = self._observations(rows)
        if not observed:
            for at_us in event_us:
                self.state.pass_time(at_us)
            return [], []
        columns = Columns(observed)
        budgets = [self.state.budget(entry.rows[0].model_version_id) for entry in observed]
        cap = np.array([budget.cap for budget in budgets])[columns.of]
        closed = np.array([entry.closed for entry in observed])[columns.observation]
        named = self._named(columns, [budget.signals for budget in budgets])
        unmeasured = self._unmeasured(observed, columns, named)
        self.state.rollup.add(columns, ~closed, cap, unmeasured)
        whole = np.array([entry.part is not Part.BEGIN for entry in observed])[columns.observation]
        self.state.rollup.close(columns, closed & whole)
        limits = np.array([budget.latency_p99_s for budget in budgets])
        grows = np.array([budget.latency_growth > 0 for budget in budgets])
        groups = self._groups(
            observed,
            columns,
            cap,
            limits[columns.of] if limits.any() else None,
            grows[columns.of] if grows.any() else None,
            named=named,
            judged={
                metric: judged[columns.of]
                for metric in WATCHED
                if not (judged := np.array([is_judged(metric, budget) for budget in budgets])).all()
            },
        )
        captured_us = groups.captured_us(observed)
        mass = self._live(groups, observed, event_us, captured_us)
        shown_nothing = self._count_items(columns, ~closed, unmeasured, set(groups.keys))
        if not groups.keys:
            return shown_nothing, []
        slices = [self.state.slices[key] for key in groups.keys]
        self._withhold(groups.keys, slices)
        self._note(groups, slices, captured_us)
        watches = [entry.watch for entry in slices]
        changes = advance_joined(watches, groups.joined(observed, mass), groups.ends, self.state.thresholds)
        return slices + shown_nothing, [(slices[change.watch], change) for change in changes]

    def _named(self, columns: Columns, budgets: Sequence[Mapping[str, float]]) -> dict[Metric, FloatArray]:
        """Return the values of the named signals that a model asks for, (items,) each; `budgets` is (observations,)."""
        if not any(budgets):
            return {}
        return {
            signal.metric: columns.named(
                signal.metric,
                np.array([is_watched(signal.metric.value, of_model) for of_model in budgets])[columns.of],
            )
            for signal in named_signals()
        }

    def _unmeasured(
        self, observed: Sequence[Observation], columns: Columns, named: Mapping[Metric, FloatArray]
    ) -> BoolArray:
        """Return of which items nothing was measured, (items,)."""
        unknown = np.isnan(columns.column("divergence"))
        if not unknown.any():
            return unknown
        by_divergence = np.array(
            [
                MEASURES[
                    self.state.task(self.state.model(observation.rows[0].model_version_id))
                ].measured_by_divergence
                for observation in observed
            ]
        )[columns.of]
        flip = columns.column("flip")
        unmeasured: BoolArray = unknown & (np.isnan(flip) | (by_divergence & (flip == 0.0)))
        for metric, values in named.items():
            if metric not in {Metric.BROKEN, *OF_STREAMS}:  # its form and its speed say nothing of the tokens
                unmeasured &= np.isnan(values)
        return unmeasured

    def _count_items(
        self, columns: Columns, which: BoolArray, unmeasured: BoolArray, shown: Collection[Key]
    ) -> list[SliceState]:
        """Count what was compared and what of it was measured; return the slices that nothing was measured of in this batch."""
        item, ends = columns.groups(which)
        if not len(ends):
            return []
        begins, version, slice_id = (
            ends - np.diff(ends, prepend=0),
            columns.version[which],
            columns.slice_id[which],
        )
        captured_us = columns.captured_us[item[begins]]
        n_unmeasured = np.add.reduceat(unmeasured[item].astype(np.intp), begins)
        # As the roll-ups tell it when the fold begins again: they have people where a flip or a divergence was measured.
        measured = columns.present(("flip", "divergence")).any(axis=1)
        of_people = np.array([bool(row.group_key) for row in columns.rows]) & measured
        names_people = np.logical_or.reduceat(of_people[item], begins)
        hour_us = captured_us - captured_us % HOUR_US
        starts = changes(version, slice_id, hour_us)
        counts = [
            ItemCount(*count)
            for count in zip(
                version[starts].tolist(),
                slice_id[starts].tolist(),
                hour_us[starts].tolist(),
                np.add.reduceat(ends - begins, starts).tolist(),
                np.add.reduceat(n_unmeasured, starts).tolist(),
                np.logical_or.reduceat(names_people, starts).tolist(),
                strict=True,
            )
        ]
        self.state.count_items(counts)
        shown_nothing: dict[Key, SliceState] = {}
        for count in counts:
            key = count[:2]
            if not count.n_unmeasured or key in shown or self.state.ignores(count.slice_id):
                continue
            if key not in self.state.slices:
                self.state.enter(key, "", at_us=self.state.now_us, last_us=self.state.now_us)
            shown_nothing[key] = self.state.slices[key]
        return list(shown_nothing.values())

    def _withhold(self, keys: Sequence[Key], slices: Sequence[SliceState]) -> None:
        """Give no allowance for the last sessions and the stragglers of versions that others have replaced."""
        for version_id in sorted({key[0] for key in keys}):
            if self.state.serving.is_replaced(version_id):
                self.state.withhold(version_id, slices)

    def _observations(self, rows: BatchRows) -> tuple[list[Observation], list[int]]:
        """Return what a batch shows, exchanges and then sessions that close, and the event time of each exchange."""
        now_us = self.state.clock.at_us
        observed: list[Observation] = []
        event_us: list[int] = []
        for exchange in exchanges(rows.comparisons):
            first = exchange.rows[0]
            # A sidecar whose clock runs ahead must not carry the fold's clock with it.
            at_us = min(first.captured_us, rows.stored_us)
            event_us.append(at_us)
            now_us = at_us if now_us is None else max(now_us, at_us)
            if not self.catalog.versions[first.model_version_id].reference_digest:
                continue
            observed.append(Observation(exchange.order, exchange.rows, now_us, closed=False))
            if first.group_key:
                self.state.sessions.add(exchange.rows, now_us)
        if now_us is not None:
            until_us = max(now_us, self.state.now_us - self._reorder_us) if self._is_quiet(rows) else now_us
            begin = max(len(event_us), 1)
            for order, (over_us, items, part) in enumerate(self.state.sessions.due(until_us), start=begin):
                observed.append(Observation(order, items, max(over_us, now_us), closed=True, part=part))
        return observed, event_us

    def _is_quiet(self, rows: BatchRows) -> bool:
        """Return whether nothing was compared for the length of a session: then tallies say that the time of open ones is over.

        Not sooner: in a backlog tallies are hours ahead, and each exchange would be a session.
        """
        if rows.compares:
            self.state.compared_us = rows.stored_us
        before_us = self.state.compared_us
        return before_us is None or rows.stored_us - before_us >= self._session_us + self._reorder_us

    def _groups(
        self,
        observed: Sequence[Observation],
        columns: Columns,
        cap: FloatArray,
        limit_s: FloatArray | None,
        grows: BoolArray | None,
        *,
        named: Mapping[Metric, FloatArray],
        judged: Mapping[Metric, BoolArray],
    ) -> SliceGroups:
        """Return what the detectors are given: an exchange of a session is no observation, and the session or its begin is."""
        which = np.array(
            [
                observation.part is not Part.AFTER
                and (observation.closed or not observation.rows[0].group_key)
                for observation in observed
            ]
        )[columns.observation]
        if self.state.retired or self.state.lapsed:
            # Captured, or assigned to it, before the workers learned that it is retired or has lost its place.
            ended = self.state.retired | self.state.lapsed
            ignored = [slice_id for slice_id in sorted(ended) if self.state.ignores(slice_id)]
            which &= ~np.isin(columns.slice_id, ignored)
        return slice_groups(
            observed,
            columns,
            which,
            cap,
            self.state.rates,
            limit_s=limit_s,
            grows=grows,
            named=named,
            judged=judged,
        )

    def _live(
        self,
        groups: SliceGroups,
        observed: Sequence[Observation],
        event_us: Sequence[int],
        captured_us: IntArray,
    ) -> FloatArray:
        """Move the clock along a batch; signals begin where they are first shown. Return the mass of each observation."""
        complete = self.state.knows(self.state.rows(groups.keys), groups.codes(), groups.signals)
        unknown = np.flatnonzero(~complete).tolist()
        lacking = self._lacking(groups, unknown)
        parts: dict[int, list[int]] = {}  # the order matters only where something begins
        if lacking:
            for group, observation in enumerate(groups.observation.tolist()):
                parts.setdefault(observation, []).append(group)
        mass: list[float] = []
        for order, at_us in enumerate(event_us):
            self.state.pass_time(at_us)
            index = len(mass)
            if index < len(observed) and observed[index].order == order and not observed[index].closed:
                self._begin(parts.get(index, ()), groups, lacking, captured_us)
                mass.append(self.state.clock.mass)
        for index in range(len(mass), len(observed)):
            self.state.pass_time(observed[index].now_us)
            self._begin(parts.get(index, ()), groups, lacking, captured_us)
            mass.append(self.state.clock.mass)
        for number in unknown:
            self.state.checked(groups.keys[number], groups.shown(number))
        return np.array(mass)

    def _lacking(self, groups: SliceGroups, unknown: Sequence[int]) -> dict[int, list[SignalKey]]:
        """Return per place of a group the signals that begin with it, or whose budget has to be looked at."""
        lacking: dict[int, list[SignalKey]] = {}
        for number in unknown:
            for signal in self.state.lacks(groups.keys[number], groups.shown(number)):
                lacking.setdefault(groups.first(number, signal), []).append(signal)
        return lacking

    def _begin(
        self,
        places: Sequence[int],
        groups: SliceGroups,
        lacking: Mapping[int, list[SignalKey]],
        captured_us: IntArray,
    ) -> None:
        """Let what one observation shows for the first time begin."""
        for group in places:
            key, at_us = groups.key_of(group), int(captured_us[group])
            if key not in self.state.slices:
                self.state.enter(key, "", at_us=self.state.now_us, last_us=at_us)
            self.state.slices[key].compared(at_us)
            if group in lacking:
                self.state.observed(
                    key,
                    sorted(lacking[group]),
                    weighted=bool(groups.weighted[group]),
                )

    def _note(self, groups: SliceGroups, slices: Sequence[SliceState], captured_us: IntArray) -> None:
        """Note when slices and versions were last compared, and the policy that each signal was last sampled under."""
        table, rows = self.state.table, rows_of(slices)
        last_us = np.maximum.reduceat(captured_us, groups.starts)
        table.last_us[rows] = np.maximum(table.last_us[rows], last_us)
        last = groups.policy_id[groups.ends - 1]
        same = np.minimum.reduceat(groups.policy_id, groups.starts) == last
        same &= np.maximum.reduceat(groups.policy_id, groups.starts) == last
        for number in np.flatnonzero(~same | (table.sampled_under[rows] != last)).tolist():
            states = slices[number].watch.states
            for signal, group in groups.last(number):
                states[signal][POLICY] = groups.policy_id[group]
            under = {int(state[POLICY]) for state in states.values()}
            table.sampled_under[rows[number]] = under.pop() if len(under) == 1 else -1

    # --- all else that a batch brings

    def _measure_noise(self, rows: BatchRows) -> None:
        """Add what was computed twice to the noise floors."""
        state = self.state
        for version_id, items in by_version(rows.noise):
            version = state.catalog.versions[version_id]
            everything = state.everything(version.model)
            assert everything is not None
            subject = NoiseSubject(
                version=version,
                task=state.task(version.model),
                budget=state.budget(version_id),
                everything=everything,
                name_of=partial(self._name_of, version_id),
                smallest=lambda slice_id, policy_id: state.rates(slice_id, policy_id).smallest,
            )
            for slice_id in state.noise.see(subject, items, at_us=state.now_us, fold_seq=state.fold_seq):
                state.table.checked[state.slices[version_id, slice_id].row] = -1  # it has another budget now
            state.pairs.see(
                version_id,
                items,
                subject.budget,
                subject.smallest,
                now_us=state.now_us,
                fold_seq=state.fold_seq,
            )

    def _name_of(self, version_id: int, slice_id: int) -> str | None:
        """Return the name of a slice of a version; None where it is not compared."""
        entry = self.state.slices.get((version_id, slice_id))
        return self.catalog.slices[slice_id].name if entry is not None and entry.watch.states else None

    def _count_losses(self, rows: BatchRows) -> None:
        for tally in rows.tallies:
            self.state.hear(tally.at_us)
            self.state.losses.add(tally)
        for expiry in rows.expiries:
            self.state.hear(expiry.at_us)
            self.state.losses.expire(expiry)

    def _apply_decisions(self, rows: BatchRows) -> None:
        """Apply what was decided since the batch before, and note which versions without a reference still serve."""
        state = self.state
        for decision in rows.decisions:
            state.decide(decision)
            self._may_ask_otherwise = True
        for change in rows.slices:
            self._retire(change)
        for closing in rows.closes:
            close(
                state,
                (closing.model_version_id, closing.slice_id),
                f"{CLOSED}{closing.made_by}: {closing.reason}",
            )
        for version_id in rows.unreferenced:
            self._unreferenced(self.catalog.versions[version_id], rows.stored_us)

    def _unreferenced(self, version: VersionRow, seen_us: int) -> None:
        """Set a version without a reference to `unknown` while it has exchanges; their time is noted to the hour."""
        state = self.state
        slice_id, now_us = state.everything(version.model), state.now_us if state.has_begun else None
        if version.reference_digest or slice_id is None:
            return
        key = (version.id, slice_id)
        entry = state.slices.get(key)
        if entry is None and (now_us is None or now_us - seen_us <= RETIRED_AFTER_US):
            state.enter(key, NO_REFERENCE, at_us=seen_us, last_us=seen_us)
        elif entry is not None and seen_us - entry.last_us >= HOUR_US:
            entry.seen(seen_us)
        else:
            return
        state.table.dirty[state.slices[key].row] = True

    def _retire_silent(self, now_us: int) -> None:
        """Remove what has had no comparison for 30 days, here and, with its last row, in the database."""
        for entry in self.state.sorted()[0]:
            if (silent := entry.silent(now_us)) or entry.gone(now_us):
                self._remove(entry.key, silent, RETIRED)
        self.state.forget_versions()

    def _retire(self, change: SliceChange) -> None:
        """End or begin the watch of a slice; one that the configuration declares is not retired whatever is decided."""
        if change.watched:
            self.state.retired.discard(change.slice_id)
            self.state.lapsed.discard(change.slice_id)
            return
        (self.state.lapsed if change.lapsed else self.state.retired).add(change.slice_id)
        if not self.state.ignores(change.slice_id):
            return
        reason = f"{'lapsed, ended' if change.lapsed else 'retired'} by {change.made_by}: {change.reason}"
        for entry in self.state.sorted()[0]:
            if entry.key[1] == change.slice_id and entry.watch.states:
                self._remove(entry.key, sorted(entry.watch.states), reason)

    def _remove(self, key: Key, signals: list[SignalKey], reason: str) -> None:
        """Remove signals of a slice; with the last of them its alert ends, and the slice is removed."""
        if len(signals) == len(self.state.slices[key].watch.states):
            end(self.state, key, reason, Ending.RETIRED)
        self.state.remove(key, signals)
