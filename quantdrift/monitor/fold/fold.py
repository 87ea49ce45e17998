"""The fold: stored batches in, detector states, verdicts, transitions and roll-ups out.

It decides everything and touches nothing: no clock, no socket, no database. The same batches in the same order give
the same bits, however they are cut into folds, and whenever the process was killed between two of them. (Roll-ups are
added up in the store, where the order of additions may differ in the last bits.)
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from quantdrift.core.config.schema import Config
from quantdrift.core.sampling.inclusion import second_rate
from quantdrift.core.slices import ALL, is_declared
from quantdrift.drift.evidence.clock import MICROSECONDS
from quantdrift.drift.evidence.group import Members, group_value, session_value
from quantdrift.drift.evidence.header import POLICY
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.drift.watch import Change, SignalKey, advance_joined
from quantdrift.monitor.fold.groups import Columns, Observation, SliceGroups, exchanges
from quantdrift.monitor.fold.groups import changes as stretches
from quantdrift.monitor.fold.inclusion import Rates
from quantdrift.monitor.fold.loss import LossCounts
from quantdrift.monitor.fold.noise import NoiseSubject, by_version
from quantdrift.monitor.fold.rollup import HOUR_US, Rollup
from quantdrift.monitor.fold.sessions import Sessions
from quantdrift.monitor.fold.slice_state import RETIRED_AFTER_US, Key
from quantdrift.monitor.fold.state import FoldState
from quantdrift.monitor.fold.transitions import Transitions
from quantdrift.monitor.fold.verdict import NO_REFERENCE, RETIRED, Verdicts
from quantdrift.storage.monitor.rows import (
    BatchRows,
    Catalog,
    DetectorRow,
    FloorRow,
    Outcome,
    Position,
    SliceChange,
    Snapshot,
    VerdictRow,
    VersionRow,
)

SETTLE_US = 10_000_000  # event time
_LOG = logging.getLogger(__name__)


class Fold:
    """The state of the fold, which `batch` moves on.

    When a transaction that should have stored an `Outcome` fails, this object is of no use any more: resume a new
    one from the record.

    Parameters
    ----------
    config
        Budgets and limits.
    snapshot
        Where the record stands.
    """

    def __init__(self, config: Config, snapshot: Snapshot) -> None:
        monitor = config.monitor
        self._fold_seq = snapshot.position.fold_seq
        self._state = FoldState(config, snapshot)
        self._sessions = Sessions(int(monitor.session_s * MICROSECONDS), snapshot.sessions)
        self._ledger = LossCounts(snapshot.baselines, snapshot.tallies, snapshot.expiries)
        self._rates = Rates()
        self._appraisal = Verdicts(
            monitor,
            thresholds=self._state.thresholds,
            ledger=self._ledger,
            rates=self._rates,
            succession=self._state.succession,
            noise=self._state.noise,
        )
        self._chronicle = Transitions(self._state, self._appraisal)
        self._gone_detectors: dict[tuple[Key, SignalKey], DetectorRow] = {}
        self._gone_verdicts: dict[Key, VerdictRow] = {}
        self._rollup = Rollup()
        self._config = config
        self._retired = set(snapshot.retired)
        self._declared: dict[int, bool] = {}
        self._everything: dict[str, int] = {}

    @property
    def position(self) -> Position:
        """How far it has come."""
        return Position(
            fold_seq=self._fold_seq,
            event_us=self._state.clock.at_us,
            mass=self._state.clock.mass,
            n_detectors=self._state.clock.n_detectors,
        )

    @property
    def catalog(self) -> Catalog:
        """What the numbers in its rows stand for."""
        return self._appraisal.catalog

    def policies(self) -> set[int]:
        """Return the policies that its slices were last sampled under, and those of open sessions."""
        return {entry.policy_id for entry in self._state.slices.values()} | self._sessions.policies()

    def verdicts(self) -> list[VerdictRow]:
        """Return every verdict as it stands."""
        return [entry.verdict for _, entry in self._state.sorted()]

    def current(self) -> list[VerdictRow]:
        """Return the verdicts on versions that no other has replaced."""
        return [
            row
            for row in self.verdicts()
            if not self._state.succession.superseded(row.model_version_id, self.catalog)
        ]

    def floors(self) -> list[FloorRow]:
        """Return what is known of the noise of every version."""
        return self._state.noise.rows()

    def learn(self, catalog: Catalog) -> None:
        """Take over versions, slices and policies; a version without a reference gets its `unknown` here."""
        self._appraisal.catalog = catalog
        self._everything = {
            row.model: row.id for row in catalog.slices.values() if row.name == ALL and not row.where
        }
        for version in catalog.versions.values():
            self._unreferenced(version, version.first_seen_us)

    def batch(self, rows: BatchRows) -> None:
        """Fold one batch; they come consecutively.

        Raises
        ------
        ValueError
            It is not the next one.
        """
        if rows.fold_seq != self._fold_seq + 1:
            raise ValueError(f"batch {rows.fold_seq} does not follow {self._fold_seq}")
        self._fold_seq = self._chronicle.fold_seq = rows.fold_seq
        before_us = self._state.clock.at_us or 0
        self._hear(rows)
        touched, changes = self._compare(rows)
        self._count_losses(rows)
        if self._state.clock.at_us is None:
            return
        self._see_noise(rows)  # after the comparisons: what they are held against knows the past alone
        now_us = self._state.now_us
        self._ledger.forget(now_us)
        entries = self._state.slices
        due = [key for key in touched if now_us >= entries[key].watch.survey().due_us]
        self._state.tend(due, self._fold_seq)
        self._appraisal.look()
        for key, change in changes:
            self._chronicle.alert(key, change)
        if now_us // HOUR_US > before_us // HOUR_US:
            self._ledger.trim(now_us)
            self._retire(now_us)
            self._appraisal.look()
        self._settle(rows, touched, all_due=now_us // SETTLE_US > before_us // SETTLE_US)

    def _count_losses(self, rows: BatchRows) -> None:
        for tally in rows.tallies:
            self._see(tally.at_us)
            self._ledger.add(tally)
        for expiry in rows.expiries:
            self._see(expiry.at_us)
            self._ledger.expire(expiry)

    def _settle(self, rows: BatchRows, touched: Sequence[Key], *, all_due: bool) -> None:
        """Settle the slices that the batch compared, and all of them when time has passed that concerns everybody."""
        compared = frozenset(touched)
        due: Iterable[Key] = touched
        if all_due:
            due = sorted(self._state.slices)
        elif rows.expiries:
            due = sorted(compared | self._of_models(rows))
        for key in due:
            if key in self._state.slices:
                self._chronicle.settle(key, touched=key in compared)

    def _of_models(self, rows: BatchRows) -> set[Key]:
        """Return the slices of models whose samples expired: nothing else may come of them that would have them judged."""
        models = {expiry.model for expiry in rows.expiries}
        return {key for key in self._state.slices if models and self.catalog.versions[key[0]].model in models}

    def take(self) -> Outcome:
        """Return what is to be written for the batches since the last call, and forget it."""
        dirty = sorted(self._chronicle.dirty)
        changed = [self._state.slices[key] for key in dirty]
        detectors = [row for one in changed for row in one.rows()]
        verdicts = [one.verdict for one in changed]
        if self._gone_detectors or self._gone_verdicts:
            # What was retired and came back is written once, as it stands.
            known = self._gone_detectors | {
                ((row.model_version_id, row.slice_id), SignalKey(row.metric, row.kind)): row
                for row in detectors
            }
            detectors = [known[one] for one in sorted(known)]
            said = self._gone_verdicts | dict(zip(dirty, verdicts, strict=True))
            verdicts = [said[key] for key in sorted(said)]
        self._gone_detectors, self._gone_verdicts = {}, {}
        transitions, self._chronicle.transitions = self._chronicle.transitions, []
        self._chronicle.dirty = set()
        rollups, self._rollup = self._rollup.rows(), Rollup()
        sessions, closed = self._sessions.take(self._fold_seq)
        floors, noise_changes = self._state.noise.take()
        return Outcome(
            position=self.position,
            detectors=tuple(detectors),
            verdicts=tuple(verdicts),
            transitions=tuple(transitions),
            rollups=tuple(rollups),
            learned=self._state.take(),
            sessions=sessions,
            closed=closed,
            floors=floors,
            noise_changes=noise_changes,
        )

    # --- comparisons

    def _compare(self, rows: BatchRows) -> tuple[list[Key], list[tuple[Key, Change]]]:
        """Give the detectors what a batch shows; return the slices that were given something, and changes of phase."""
        observed, event_us = self._observations(rows)
        if not observed:
            for at_us in event_us:
                self._see(at_us)
            return [], []
        columns = Columns(observed)
        budgets = [
            self._state.budget(self.catalog.versions[one.rows[0].model_version_id].model) for one in observed
        ]
        cap = np.array([budget.cap for budget in budgets])[columns.of]
        closed = np.array([one.closed for one in observed])[columns.observation]
        self._rollup.add(columns, ~closed, cap)
        self._rollup.close(columns, closed)
        groups = self._groups(observed, columns, cap)
        mass = self._live(groups, observed, event_us)
        if not groups.keys:
            return [], []
        self._note(groups)
        watches = [self._state.slices[key].watch for key in groups.keys]
        changes = advance_joined(watches, groups.joined(observed, mass), groups.ends, self._state.thresholds)
        return groups.keys, [(groups.keys[change.watch], change) for change in changes]

    def _observations(self, rows: BatchRows) -> tuple[list[Observation], list[int]]:
        """Return what a batch shows, exchanges and then sessions that close, and the event time of each exchange."""
        now_us = self._state.clock.at_us
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
                self._sessions.add(exchange.rows, now_us)
        if now_us is not None:
            begin = max(len(event_us), 1)
            for place, items in enumerate(self._sessions.due(now_us), start=begin):
                observed.append(Observation(place, items, now_us, closed=True))
        return observed, event_us

    def _groups(self, observed: Sequence[Observation], columns: Columns, cap: FloatArray) -> SliceGroups:
        """Return what each slice is shown; what is retired, and a group that shows nothing, is left out."""
        which = np.array([one.counts for one in observed])[columns.observation]
        if self._retired:
            # Captured, or put into it, before the workers heard of it.
            ignored = [slice_id for slice_id in self._retired if self._ignores(slice_id)]
            which &= ~np.isin(columns.slice_id, ignored)
        item, ends = columns.groups(which)
        slice_id, observation = columns.slice_id[which], columns.observation[which]
        policy_id = np.array([one.rows[0].policy_id for one in observed], dtype=np.int64)[observation]
        closed = np.array([one.closed for one in observed])[observation]
        starts = stretches(slice_id, policy_id)
        rates = [
            self._rates.of(self.catalog, *key)
            for key in zip(slice_id[starts].tolist(), policy_id[starts].tolist(), strict=True)
        ]
        of = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(slice_id)))
        smallest, sure, least = (
            np.array([getattr(one, name) for one in rates], dtype=np.float64)[of]
            for name in ("smallest", "sure", "session")
        )
        weighted, of_sessions = (
            np.array([getattr(one, name) for one in rates], dtype=np.bool_)[of]
            for name in ("weighted", "session_weighted")
        )
        members = Members(item, ends, smallest, closed, sure, least)
        groups = SliceGroups(
            columns,
            which=which,
            members=members,
            items=columns.items(cap),
            policy_id=policy_id,
            weighted=np.where(closed, of_sessions, weighted),
        )
        _tell_refused(columns, members, slice_id, groups.refused)
        return groups

    def _live(
        self, groups: SliceGroups, observed: Sequence[Observation], event_us: Sequence[int]
    ) -> FloatArray:
        """Move the clock along a batch; signals begin where they are first shown. Return the mass of each observation."""
        captured_us = groups.captured_us(observed)
        lacking = self._lacking(groups)
        parts: dict[int, list[int]] = {}  # the order matters only where something begins
        if lacking:
            for place, observation in enumerate(groups.observation.tolist()):
                parts.setdefault(observation, []).append(place)
        mass: list[float] = []
        for order, at_us in enumerate(event_us):
            self._see(at_us)
            index = len(mass)
            if index < len(observed) and observed[index].order == order and not observed[index].closed:
                self._begin(parts.get(index, ()), groups, lacking, captured_us)
                mass.append(self._state.clock.mass)
        for index in range(len(mass), len(observed)):
            self._begin(parts.get(index, ()), groups, lacking, captured_us)
            mass.append(self._state.clock.mass)
        self._note_last(groups, captured_us)
        if lacking:
            for key, shown in zip(groups.keys, groups.shown(), strict=True):
                self._state.checked(key, shown)
        return np.array(mass)

    def _note_last(self, groups: SliceGroups, captured_us: IntArray) -> None:
        """Note when each slice and each version was last compared; `captured_us` is (groups,)."""
        if not groups.keys:
            return
        newest: dict[int, int] = {}
        last_us = np.maximum.reduceat(captured_us, groups.starts).tolist()
        for key, at_us in zip(groups.keys, last_us, strict=True):
            entry = self._state.slices[key]
            entry.last_us = max(entry.last_us, at_us)
            newest[key[0]] = max(newest.get(key[0], 0), at_us)
        for version_id, at_us in newest.items():
            self._state.succession.seen(version_id, at_us)

    def _lacking(self, groups: SliceGroups) -> dict[int, list[SignalKey]]:
        """Return per place of a group the signals that begin with it, or whose budget has to be looked at."""
        found: dict[int, list[SignalKey]] = {}
        knows, generation = self._state.knows, self._state.generation
        for number, (key, shown) in enumerate(zip(groups.keys, groups.shown(), strict=True)):
            if not knows(key, shown, generation):
                for signal in self._state.lacks(key, shown):
                    found.setdefault(groups.first(number, signal), []).append(signal)
        return found

    def _begin(
        self,
        places: Sequence[int],
        groups: SliceGroups,
        lacking: Mapping[int, list[SignalKey]],
        captured_us: IntArray,
    ) -> None:
        """Let what one observation shows for the first time begin."""
        for place in places:
            key, at_us = groups.key_of(place), int(captured_us[place])
            if key not in self._state.slices:
                self._enter(key, "", self._state.now_us, at_us)
            self._state.slices[key].last_us = max(self._state.slices[key].last_us, at_us)
            self._state.succession.seen(key[0], at_us)
            if place in lacking:
                self._state.observed(
                    key,
                    sorted(lacking[place]),
                    weighted=bool(groups.weighted[place]),
                    fold_seq=self._fold_seq,
                    catalog=self.catalog,
                )

    def _note(self, groups: SliceGroups) -> None:
        """Note the policy that each signal was last sampled under."""
        last = groups.policy_id[groups.ends - 1]
        same = np.minimum.reduceat(groups.policy_id, groups.starts) == last
        same &= np.maximum.reduceat(groups.policy_id, groups.starts) == last
        for number, (key, policy_id, alike) in enumerate(
            zip(groups.keys, last.tolist(), same.tolist(), strict=True)
        ):
            entry = self._state.slices[key]
            if alike and entry.sampled_under == policy_id:
                continue
            states = entry.watch.states
            for signal, place in groups.last(number):
                states[signal][POLICY] = groups.policy_id[place]
            under = {int(state[POLICY]) for state in states.values()}
            entry.sampled_under = under.pop() if len(under) == 1 else -1

    def _see_noise(self, rows: BatchRows) -> None:
        """Take in what was computed again."""
        state, catalog = self._state, self.catalog
        for version_id, items in by_version(rows.noise):
            version = catalog.versions[version_id]
            everything = self._everything[version.model]
            state.noise.see(
                NoiseSubject(
                    version=version, task=state.task(version.model), budget=state.budget(version.model)
                ),
                items,
                {
                    policy_id: self._rates.of(catalog, everything, policy_id).smallest
                    for policy_id in {item.policy_id for item in items}
                },
                at_us=state.now_us,
                fold_seq=self._fold_seq,
            )

    def _see(self, event_us: int) -> None:
        self._state.clock = self._state.clock.seen(event_us)

    def _enter(self, key: Key, reason: str, at_us: int, last_us: int) -> None:
        self._state.enter(key, reason, at_us=at_us, last_us=last_us, fold_seq=self._fold_seq)

    def _hear(self, rows: BatchRows) -> None:
        """Follow what was decided since the batch before, and note which versions without a reference still serve."""
        for decision in rows.decisions:
            key = (decision.model_version_id, decision.slice_id)
            if key in self._state.slices:
                # What it shows is what was said last, not what the decision makes of it.
                _ = self._state.slices[key].verdict
                self._chronicle.dirty.add(key)
            self._state.decide(decision)
        for decided in rows.slices:
            self._follow(decided)
        for version_id in rows.unreferenced:
            self._unreferenced(self.catalog.versions[version_id], rows.stored_us)

    def _unreferenced(self, version: VersionRow, seen_us: int) -> None:
        """Say `unknown` of a version without a reference for as long as its exchanges come; noted to the hour."""
        slice_id, now_us = self._everything.get(version.model), self._state.clock.at_us
        if version.reference_digest or slice_id is None:
            return
        key = (version.id, slice_id)
        entry = self._state.slices.get(key)
        if entry is None and (now_us is None or now_us - seen_us <= RETIRED_AFTER_US):
            self._enter(key, NO_REFERENCE, seen_us, seen_us)
        elif entry is not None and seen_us - entry.last_us >= HOUR_US:
            entry.seen(seen_us)
        else:
            return
        self._chronicle.dirty.add(key)

    def _retire(self, now_us: int) -> None:
        """Let go of what has seen nothing for 30 days, here and, with its last row, in the record."""
        for key, entry in list(self._state.sorted()):
            if (silent := entry.silent(now_us)) or entry.gone(now_us):
                self._let_go(key, silent, RETIRED)
        self._state.succession.recount(self._state.slices.values())

    def _follow(self, change: SliceChange) -> None:
        """Watch a discovered slice no more, or again from nothing; one that is declared goes on whatever is decided."""
        if change.watched:
            self._retired.discard(change.slice_id)
            return
        self._retired.add(change.slice_id)
        if not self._ignores(change.slice_id):
            return
        reason = f"retired by {change.made_by}: {change.reason}"
        for key, entry in list(self._state.sorted()):
            if key[1] == change.slice_id and entry.watch.states:
                self._let_go(key, sorted(entry.watch.states), reason)

    def _ignores(self, slice_id: int) -> bool:
        """Return whether a slice is watched no more: retired, and not in the configuration either."""
        if slice_id not in self._retired:
            return False
        known = self._declared.get(slice_id)
        if known is None:
            known = self._declared[slice_id] = is_declared(self._config, self.catalog.slices[slice_id].key)
        return not known

    def _let_go(self, key: Key, signals: list[SignalKey], reason: str) -> None:
        """Watch some signals of a slice no more; with the last of them its alert ends, and all that is said of it."""
        entry = self._state.slices[key]
        ends = len(signals) == len(entry.watch.states)
        if ends:
            self._chronicle.end(key, reason)
        self._state.forget(key, signals)
        rows = entry.retire(signals, self._state.now_us, self._fold_seq)
        self._gone_detectors |= {(key, SignalKey(row.metric, row.kind)): row for row in rows}
        self._chronicle.dirty.add(key)
        if ends:
            self._gone_verdicts[key] = self._state.slices.pop(key).verdict
            self._chronicle.dirty.remove(key)


def _tell_refused(columns: Columns, members: Members, slice_id: IntArray, refused: BoolArray) -> None:
    """Say which groups are no observations: what their sidecars said of their sampling does not fit together."""
    for group in np.flatnonzero(refused).tolist():
        places = members.item[members.ends[group - 1] if group else 0 : members.ends[group]].tolist()
        rows = [columns.rows[place] for place in places]
        try:
            if members.session[group]:
                sure = members.sure[group]
                rows = [row for row in rows if row.u2 < second_rate(sure, row.pi1)]
                session_value([0.0] * len(rows), [row.pi1 for row in rows], sure, members.least[group])
            else:
                group_value([0.0] * len(rows), [row.pi for row in rows], members.smallest[group], len(rows))
        except ValueError as error:
            _LOG.warning(
                "exchange %s says nothing of slice %d: %s", rows[0].exchange_id, slice_id[group], error
            )
