"""The fold: stored batches in, detector states, verdicts, transitions and roll-ups out.

It decides everything and touches nothing: no clock, no socket, no database. The same batches in the same order give
the same bits, however they are cut into folds, and whenever the process was killed between two of them. (Roll-ups are
added up in the store, where the order of additions may differ in the last bits.)
"""

from collections.abc import Sequence

from quantdrift.core.config.schema import Config
from quantdrift.core.slices import ALL, is_declared
from quantdrift.drift.evidence.clock import MICROSECONDS
from quantdrift.drift.watch import Change, SignalKey, advance
from quantdrift.monitor.fold.groups import SliceGroups, exchanges, shown, slices_of
from quantdrift.monitor.fold.inclusion import Rates
from quantdrift.monitor.fold.loss import LossCounts
from quantdrift.monitor.fold.noise import NoiseSubject, by_version
from quantdrift.monitor.fold.rollup import HOUR_US, Rollup
from quantdrift.monitor.fold.sessions import Sessions
from quantdrift.monitor.fold.slice_state import RETIRED_AFTER_US, Key, SliceState
from quantdrift.monitor.fold.state import FoldState
from quantdrift.monitor.fold.transitions import Transitions
from quantdrift.monitor.fold.verdict import NO_REFERENCE, RETIRED, Verdicts
from quantdrift.storage.monitor.rows import (
    BatchRows,
    Catalog,
    ComparisonRow,
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
        self._roster = FoldState(config, snapshot)
        self._sessions = Sessions(int(monitor.session_s * MICROSECONDS), snapshot.sessions)
        self._ledger = LossCounts(snapshot.baselines, snapshot.tallies, snapshot.expiries)
        self._rates = Rates()
        self._appraisal = Verdicts(
            monitor, self._ledger, self._rates, self._roster.succession, self._roster.noise
        )
        self._chronicle = Transitions(self._roster, self._appraisal)
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
            event_us=self._roster.clock.at_us,
            mass=self._roster.clock.mass,
            n_detectors=self._roster.clock.n_detectors,
        )

    @property
    def catalog(self) -> Catalog:
        """What the numbers in its rows stand for."""
        return self._appraisal.catalog

    def policies(self) -> set[int]:
        """Return the policies that its slices were last sampled under, and those of open sessions."""
        return {entry.policy_id for entry in self._entries.values()} | self._sessions.policies()

    def verdicts(self) -> list[VerdictRow]:
        """Return every verdict as it stands."""
        return [entry.verdict for _, entry in self._roster.sorted()]

    def current(self) -> list[VerdictRow]:
        """Return the verdicts on versions that no other has replaced."""
        return [
            row
            for row in self.verdicts()
            if not self._roster.succession.superseded(row.model_version_id, self.catalog)
        ]

    def floors(self) -> list[FloorRow]:
        """Return what is known of the noise of every version."""
        return self._roster.noise.rows()

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
        before_us = self._roster.clock.at_us or 0
        self._hear(rows)
        touched, changes = self._compare(rows)
        for tally in rows.tallies:
            self._see(tally.at_us)
            self._ledger.add(tally)
        for expiry in rows.expiries:
            self._see(expiry.at_us)
            self._ledger.expire(expiry)
        if self._roster.clock.at_us is None:
            return
        self._see_noise(rows)  # after the comparisons: what they are held against knows the past alone
        now_us = self._roster.now_us
        self._ledger.forget(now_us)
        self._roster.tend(sorted(touched), self._fold_seq)
        for key, change in changes:
            self._chronicle.alert(key, change)
        if now_us // HOUR_US > before_us // HOUR_US:
            self._ledger.trim(now_us)
            self._retire(now_us)
        # Time and loss concern everybody: looked at by the clock, or a large fleet's tallies would cost more than they tell.
        all_due = now_us // SETTLE_US > before_us // SETTLE_US
        due = self._entries if all_due else (touched | self._of_models(rows)) & self._entries.keys()
        for key in sorted(due):
            self._chronicle.settle(key, touched=key in touched)

    def _of_models(self, rows: BatchRows) -> set[Key]:
        """Return the slices of models whose samples expired: nothing else may come of them that would have them judged."""
        models = {expiry.model for expiry in rows.expiries}
        return {key for key in self._entries if models and self.catalog.versions[key[0]].model in models}

    def take(self) -> Outcome:
        """Return what is to be written for the batches since the last call, and forget it."""
        # What was retired and came back is written once, as it stands.
        detectors, verdicts = self._gone_detectors, self._gone_verdicts
        for key in self._chronicle.dirty:
            entry = self._entries[key]
            detectors |= {(key, SignalKey(row.metric, row.kind)): row for row in entry.rows()}
            verdicts[key] = entry.verdict
        self._gone_detectors, self._gone_verdicts = {}, {}
        transitions, self._chronicle.transitions = self._chronicle.transitions, []
        self._chronicle.dirty = set()
        rollups, self._rollup = self._rollup.rows(), Rollup()
        sessions, closed = self._sessions.take(self._fold_seq)
        floors, noise_changes = self._roster.noise.take()
        return Outcome(
            position=self.position,
            detectors=tuple(detectors[key] for key in sorted(detectors)),
            verdicts=tuple(verdicts[key] for key in sorted(verdicts)),
            transitions=tuple(transitions),
            rollups=tuple(rollups),
            learned=self._roster.take(),
            sessions=sessions,
            closed=closed,
            floors=floors,
            noise_changes=noise_changes,
        )

    # --- comparisons

    def _compare(self, rows: BatchRows) -> tuple[set[Key], list[tuple[Key, Change]]]:
        collected: dict[Key, SliceGroups] = {}
        order = 0
        for exchange in exchanges(rows.comparisons):
            order, first = exchange.order, exchange.rows[0]
            # A sidecar whose clock runs ahead must not carry the fold's clock with it.
            self._see(min(first.captured_us, rows.stored_us))
            version = self.catalog.versions[first.model_version_id]
            if not version.reference_digest:
                continue
            cap = self._roster.budget(version.model).cap
            for slice_id, items in slices_of(exchange.rows).items():
                self._rollup.add(slice_id, items, cap)
            if first.group_key:
                self._sessions.add(exchange.rows, self._roster.now_us)
            else:
                self._group(exchange.rows, order, collected)
        if self._roster.clock.at_us is not None:
            for place, items in enumerate(self._sessions.due(self._roster.now_us), start=order + 1):
                self._group(items, place, collected)
        keys = sorted(collected)
        watches = [self._entries[key].watch for key in keys]
        changes = advance(watches, [collected[key].groups() for key in keys], self._appraisal.thresholds)
        return set(keys), [(keys[change.watch], change) for change in changes]

    def _group(self, rows: Sequence[ComparisonRow], order: int, collected: dict[Key, SliceGroups]) -> None:
        """Take one observation: an exchange, or a session that has closed."""
        first, roster = rows[0], self._roster
        budget = roster.budget(self.catalog.versions[first.model_version_id].model)
        captured_us = min(max(row.captured_us for row in rows), roster.now_us)
        for slice_id, items in slices_of(rows).items():
            rates = self._rates.of(self.catalog, slice_id, first.policy_id)
            if self._ignores(slice_id):
                continue  # captured, or put into it, before the workers heard of it
            values = shown(slice_id, items, rates, budget)
            if not values:
                continue
            key = (first.model_version_id, slice_id)
            if key not in self._entries:
                self._enter(key, "", roster.now_us, captured_us)
            roster.observed(
                key,
                sorted(values),
                policy_id=first.policy_id,
                captured_us=captured_us,
                weighted=rates.weighted and not first.group_key,
                fold_seq=self._fold_seq,
                catalog=self.catalog,
            )
            groups = collected.setdefault(key, SliceGroups())
            groups.add(order, roster.clock.mass, roster.now_us, values)

    def _see_noise(self, rows: BatchRows) -> None:
        """Take in what was computed again."""
        roster, catalog = self._roster, self.catalog
        for version_id, items in by_version(rows.noise):
            version = catalog.versions[version_id]
            everything = self._everything[version.model]
            roster.noise.see(
                NoiseSubject(
                    version=version, task=roster.task(version.model), budget=roster.budget(version.model)
                ),
                items,
                {
                    policy_id: self._rates.of(catalog, everything, policy_id).smallest
                    for policy_id in {item.policy_id for item in items}
                },
                at_us=roster.now_us,
                fold_seq=self._fold_seq,
            )

    def _see(self, event_us: int) -> None:
        self._roster.clock = self._roster.clock.seen(event_us)

    def _enter(self, key: Key, reason: str, at_us: int, last_us: int) -> None:
        self._roster.enter(
            key,
            reason,
            at_us=at_us,
            last_us=last_us,
            threshold=self._appraisal.thresholds.page,
            fold_seq=self._fold_seq,
        )

    def _hear(self, rows: BatchRows) -> None:
        """Follow what was decided since the batch before, and note which versions without a reference still serve."""
        for decision in rows.decisions:
            self._roster.decide(decision)
            if (decision.model_version_id, decision.slice_id) in self._entries:
                self._chronicle.dirty.add((decision.model_version_id, decision.slice_id))
        for decided in rows.slices:
            self._follow(decided)
        for version_id in rows.unreferenced:
            self._unreferenced(self.catalog.versions[version_id], rows.stored_us)

    def _unreferenced(self, version: VersionRow, seen_us: int) -> None:
        """Say `unknown` of a version without a reference for as long as its exchanges come; noted to the hour."""
        slice_id, now_us = self._everything.get(version.model), self._roster.clock.at_us
        if version.reference_digest or slice_id is None:
            return
        key = (version.id, slice_id)
        entry = self._entries.get(key)
        if entry is None and (now_us is None or now_us - seen_us <= RETIRED_AFTER_US):
            self._enter(key, NO_REFERENCE, seen_us, seen_us)
        elif entry is not None and seen_us - entry.last_us >= HOUR_US:
            entry.seen(seen_us)
        else:
            return
        self._chronicle.dirty.add(key)

    def _retire(self, now_us: int) -> None:
        """Let go of what has seen nothing for 30 days, here and, with its last row, in the record."""
        for key, entry in list(self._roster.sorted()):
            if (silent := entry.silent(now_us)) or entry.gone(now_us):
                self._let_go(key, silent, RETIRED)
        self._roster.succession.recount(self._entries.values())

    def _follow(self, change: SliceChange) -> None:
        """Watch a discovered slice no more, or again from nothing; one that is declared goes on whatever is decided."""
        if change.watched:
            self._retired.discard(change.slice_id)
            return
        self._retired.add(change.slice_id)
        if not self._ignores(change.slice_id):
            return
        reason = f"retired by {change.made_by}: {change.reason}"
        for key, entry in list(self._roster.sorted()):
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
        entry = self._entries[key]
        ends = len(signals) == len(entry.watch.states)
        if ends:
            self._chronicle.end(key, reason)
        self._roster.forget(key, signals)
        rows = entry.retire(signals, self._roster.now_us, self._fold_seq)
        self._gone_detectors |= {(key, SignalKey(row.metric, row.kind)): row for row in rows}
        self._chronicle.dirty.add(key)
        if ends:
            self._gone_verdicts[key] = self._entries.pop(key).verdict
            self._chronicle.dirty.remove(key)

    @property
    def _entries(self) -> dict[Key, SliceState]:
        return self._roster.entries
