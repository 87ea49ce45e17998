"""The fold: stored batches in, detector states, verdicts, transitions and roll-ups out.

It decides everything and touches nothing: no clock, no socket, no database. The same batches in the same order give
the same bits, however they are cut into folds, and whenever the process was killed between two of them. (Roll-ups are
added up in the store, where the order of additions may differ in the last bits.)
"""

import math

import msgspec

from quantdrift.core.config.schema import Budget, Config
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.slices import ALL
from quantdrift.drift import budget as fields
from quantdrift.drift.block import FloatArray
from quantdrift.drift.budget import Moved
from quantdrift.drift.clock import CalendarClock
from quantdrift.drift.detector import BUDGET
from quantdrift.drift.resolve import RESOLVED
from quantdrift.drift.state import load_state
from quantdrift.drift.watch import Change, Phase, SignalKey, Watch, advance
from quantdrift.monitor.appraisal import Appraisal
from quantdrift.monitor.entry import SIGNALS, Entry, Key, new_entry
from quantdrift.monitor.gather import SliceGroups, budget_of, cap_of, exchanges, group_values
from quantdrift.monitor.judge import NO_REFERENCE, RETIRED, SUPERSEDED
from quantdrift.monitor.ledger import Ledger
from quantdrift.monitor.rates import Rates
from quantdrift.monitor.rollup import HOUR_US, Rollup
from quantdrift.monitor.story import tell
from quantdrift.monitor.succession import Succession
from storage.fold_rows import (
    BatchRows,
    Catalog,
    DetectorRow,
    Episode,
    Outcome,
    Position,
    Snapshot,
    TransitionRow,
    VerdictRow,
)

_ALERTS = {Verdict.WARNING: Phase.WARNING, Verdict.FIRING: Phase.FIRING}
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
        self._config = config
        position = snapshot.position
        self._fold_seq = position.fold_seq
        self._clock = CalendarClock(
            at_us=position.event_us, mass=position.mass, n_detectors=position.n_detectors
        )
        self._ledger = Ledger(snapshot.baselines, snapshot.tallies)
        self._rates = Rates()
        self._entries = {
            (row.model_version_id, row.slice_id): Entry(Watch(_ALERTS.get(row.verdict, Phase.WATCHING)), row)
            for row in snapshot.verdicts
        }
        for stored in snapshot.detectors:
            states = self._entries[stored.model_version_id, stored.slice_id].watch.states
            states[SignalKey(stored.metric, stored.kind)] = load_state(stored.kind, stored.state, BUDGET.size)
        self._succession = Succession(monitor.stale_after_s, self._entries.values())
        self._appraisal = Appraisal(monitor, self._ledger, self._rates, self._succession)
        self._dirty: set[Key] = set()
        self._gone_detectors: dict[tuple[Key, str], DetectorRow] = {}
        self._gone_verdicts: dict[Key, VerdictRow] = {}
        self._transitions: list[TransitionRow] = []
        self._rollup = Rollup()

    @property
    def position(self) -> Position:
        """How far it has come."""
        return Position(
            fold_seq=self._fold_seq,
            event_us=self._clock.at_us,
            mass=self._clock.mass,
            n_detectors=self._clock.n_detectors,
        )

    @property
    def catalog(self) -> Catalog:
        """What the numbers in its rows stand for."""
        return self._appraisal.catalog

    def verdicts(self) -> list[VerdictRow]:
        """Return every verdict as it stands."""
        return [entry.verdict for _, entry in sorted(self._entries.items(), key=lambda item: item[0])]

    def current(self) -> list[VerdictRow]:
        """Return the verdicts on versions that no other has replaced."""
        return [
            row
            for row in self.verdicts()
            if not self._succession.superseded(row.model_version_id, self.catalog)
        ]

    def learn(self, catalog: Catalog) -> None:
        """Take over versions, slices and policies; a version without a reference gets its `unknown` here."""
        self._appraisal.catalog = catalog
        everything = {
            row.model: row.id for row in catalog.slices.values() if row.name == ALL and not row.where
        }
        for version in catalog.versions.values():
            slice_id = everything.get(version.model)
            if version.reference_digest or slice_id is None or (version.id, slice_id) in self._entries:
                continue
            at_us = version.first_seen_us
            self._enter((version.id, slice_id), NO_REFERENCE, at_us, at_us)
            self._dirty.add((version.id, slice_id))

    def batch(self, rows: BatchRows) -> None:
        """Fold one batch; they come consecutively.

        Raises
        ------
        ValueError
            It is not the next one.
        """
        if rows.fold_seq != self._fold_seq + 1:
            raise ValueError(f"batch {rows.fold_seq} does not follow {self._fold_seq}")
        self._fold_seq = rows.fold_seq
        before_us = self._clock.at_us or 0
        touched, changes = self._compare(rows)
        for tally in rows.tallies:
            self._clock = self._clock.seen(tally.at_us)
            self._ledger.add(tally)
        now_us = self._clock.at_us
        if now_us is None:
            return
        self._ledger.forget(now_us)
        for key, change in changes:
            self._alert(key, change)
        if now_us // HOUR_US > before_us // HOUR_US:
            self._ledger.trim(now_us)
            self._retire(now_us)
        # Time and loss concern everybody: looked at by the clock, or a large fleet's tallies would cost more than they tell.
        all_due = now_us // SETTLE_US > before_us // SETTLE_US
        for key in sorted(self._entries if all_due else touched & self._entries.keys()):
            self._settle(key, touched=key in touched)

    def take(self) -> Outcome:
        """Return what is to be written for the batches since the last call, and forget it."""
        # What was retired and came back is written once, as it stands.
        detectors, verdicts = self._gone_detectors, self._gone_verdicts
        for key in self._dirty:
            entry = self._entries[key]
            detectors |= {(key, row.metric): row for row in entry.rows()}
            verdicts[key] = entry.verdict
        self._dirty, self._gone_detectors, self._gone_verdicts = set(), {}, {}
        transitions, self._transitions = self._transitions, []
        rollups, self._rollup = self._rollup.rows(), Rollup()
        return Outcome(
            position=self.position,
            detectors=tuple(detectors[key] for key in sorted(detectors)),
            verdicts=tuple(verdicts[key] for key in sorted(verdicts)),
            transitions=tuple(transitions),
            rollups=tuple(rollups),
        )

    # --- comparisons

    def _compare(self, rows: BatchRows) -> tuple[set[Key], list[tuple[Key, Change]]]:
        collected: dict[Key, SliceGroups] = {}
        for exchange in exchanges(rows.comparisons):
            first = exchange.rows[0]
            # A sidecar whose clock runs ahead must not carry the fold's clock with it.
            captured_us = min(first.captured_us, rows.stored_us)
            self._clock = self._clock.seen(captured_us)
            version = self.catalog.versions[first.model_version_id]
            if not version.reference_digest:
                continue
            budget = self._budget(version.model)
            for slice_id, items in exchange.slices.items():
                self._rollup.add(slice_id, items, budget.kl_cap)
                smallest = self._rates.of(self.catalog, slice_id, first.policy_id).smallest
                if values := group_values(slice_id, items, smallest, budget):
                    key = (version.id, slice_id)
                    self._observed(key, first.policy_id, captured_us, sorted(values), budget)
                    groups = collected.setdefault(key, SliceGroups())
                    groups.add(exchange.order, self._clock.mass, self._now_us(), values)
        keys = sorted(collected)
        watches = [self._entries[key].watch for key in keys]
        changes = advance(watches, [collected[key].groups() for key in keys], self._appraisal.thresholds)
        for watch in watches:
            for state in watch.states.values():
                BUDGET.rotate(state)
        return set(keys), [(keys[change.watch], change) for change in changes]

    def _observed(
        self, key: Key, policy_id: int, captured_us: int, metrics: list[Metric], budget: Budget
    ) -> None:
        """Make sure that the signals exist and measure against the budget of today."""
        if key not in self._entries:
            self._enter(key, "", self._now_us(), captured_us)
        entry = self._entries[key]
        entry.last_us = max(entry.last_us, captured_us)
        self._succession.seen(key[0], captured_us)
        for metric in metrics:
            state = entry.state(metric)
            m, cap = budget_of(metric, budget), cap_of(metric, budget)
            if state is None:
                self._clock = self._clock.with_detectors(self._clock.n_detectors + 1)
            if state is None or (state[fields.M], state[fields.SCALE]) != (m, cap):
                n_total = 0.0 if state is None else state[fields.N_TOTAL]
                state = BUDGET.fresh(
                    budget=m,
                    scale=cap,
                    weighted=self._rates.of(self.catalog, key[1], policy_id).weighted,
                    mass=self._clock.mass,
                    at_us=self._now_us(),
                )
                state[fields.N_TOTAL] = n_total
                entry.watch.add(SIGNALS[metric], state)
            state[fields.POLICY] = policy_id

    def _enter(self, key: Key, reason: str, at_us: int, last_us: int) -> None:
        self._entries[key] = new_entry(
            key,
            reason=reason,
            at_us=at_us,
            last_us=last_us,
            threshold=self._appraisal.thresholds.page,
            fold_seq=self._fold_seq,
        )

    def _retire(self, now_us: int) -> None:
        """Let go of what has seen nothing for 30 days, here and, with its last row, in the record."""
        for key, entry in sorted(self._entries.items(), key=lambda item: item[0]):
            if not (silent := entry.silent(now_us)):
                continue
            ends = len(silent) == len(entry.watch.states)
            if ends:
                self._end(key, RETIRED)
            self._clock = self._clock.with_detectors(self._clock.n_detectors - len(silent))
            self._gone_detectors |= {(key, row.metric): row for row in entry.retire(silent, self._fold_seq)}
            self._dirty.add(key)
            if ends:
                self._gone_verdicts[key] = self._entries.pop(key).verdict
                self._dirty.remove(key)
        self._succession.recount(self._entries.values())

    # --- verdicts

    def _settle(self, key: Key, *, touched: bool) -> None:
        """Judge a slice again; an alert of a version that another one has replaced ends."""
        entry = self._entries[key]
        if not entry.watch.states:
            return
        if entry.watch.phase is not Phase.WATCHING and self._appraisal.superseded(key):
            self._end(key, SUPERSEDED)
        self._say(key, *self._judge(entry, entry.watch.phase), touched=touched)

    def _say(self, key: Key, verdict: Verdict, reason: str, *, touched: bool) -> None:
        """Note the verdict; where it changed between `ok` and `unknown`, as a transition."""
        entry = self._entries[key]
        before = entry.verdict
        changed = verdict is not before.verdict
        if changed:
            self._transitions.append(
                TransitionRow(
                    model_version_id=key[0],
                    slice_id=key[1],
                    from_verdict=before.verdict,
                    to_verdict=verdict,
                    at_us=self._now_us(),
                    fold_seq=self._fold_seq,
                    episode=Episode.NONE,
                    metric=entry.loudest(),
                    onset_us=self._now_us(),
                    details={"reason": reason},
                )
            )
        if touched or changed or reason != before.reason:
            evidence, threshold = entry.weight(verdict, self._appraisal.thresholds)
            entry.verdict = msgspec.structs.replace(
                before,
                verdict=verdict,
                reason=reason,
                since_us=self._now_us() if changed else before.since_us,
                n_groups=entry.n_groups,
                evidence=evidence,
                threshold=threshold,
                estimate=entry.estimates(),
                last_us=entry.last_us,
                updated_us=self._now_us(),
                fold_seq=self._fold_seq,
            )
            self._dirty.add(key)

    def _alert(self, key: Key, change: Change) -> None:
        """Tell of an alarm or of its end."""
        entry = self._entries[key]
        verdict, reason = self._judge(entry, change.after)
        signals = sorted(change.evidence)
        if change.after is Phase.WATCHING:
            episode, moved = Episode.CLOSE, None
            signal = min(signals, key=lambda one: change.evidence[one])
            evidence = change.evidence[signal]
        else:
            episode = Episode.OPEN if change.before is Phase.WATCHING else Episode.ESCALATE
            signal = max(signals, key=lambda one: change.evidence[one])
            evidence = math.fsum(change.evidence.values())
            moved = BUDGET.moved(change.states[signal])
        self._tell(
            key,
            verdict,
            reason,
            at_us=change.at_us,
            episode=episode,
            signal=signal,
            states=change.states,
            moved=moved,
            evidence=evidence,
            threshold=change.threshold,
        )

    def _tell(
        self,
        key: Key,
        verdict: Verdict,
        reason: str,
        *,
        at_us: int,
        episode: Episode,
        signal: SignalKey,
        states: dict[SignalKey, FloatArray],
        moved: Moved | None,
        evidence: float,
        threshold: float,
    ) -> None:
        entry, metric = self._entries[key], Metric(signal.metric)
        row = tell(
            version=self.catalog.versions[key[0]],
            place=self.catalog.slices[key[1]],
            change=(entry.verdict.verdict, verdict),
            reason=reason,
            metric=metric,
            state=states[signal],
            n_groups=max(int(state[fields.N_TOTAL]) for state in states.values()),
            moved=moved,
            evidence=evidence,
            threshold=threshold,
            aggregate=self._appraisal.aggregate(self._entries, key[0], metric, self._now_us()),
            episode=episode,
            at_us=at_us,
            fold_seq=self._fold_seq,
        )
        self._transitions.append(row)
        entry.verdict = msgspec.structs.replace(
            entry.verdict,
            verdict=verdict,
            reason=reason,
            since_us=at_us,
            evidence=evidence,
            threshold=threshold,
        )

    def _end(self, key: Key, reason: str) -> None:
        """Call what is compared no more `unknown`, also where it alerts: nothing has shown it to be well."""
        entry = self._entries[key]
        if entry.watch.phase is Phase.WATCHING:
            self._say(key, Verdict.UNKNOWN, reason, touched=False)
            return
        watch = entry.watch
        signal = max(sorted(watch.states), key=lambda one: BUDGET.evidence(watch.states[one]))
        self._tell(
            key,
            Verdict.UNKNOWN,
            reason,
            at_us=self._now_us(),
            episode=Episode.CLOSE,
            signal=signal,
            states=watch.states,
            moved=None,
            evidence=0.0,
            threshold=RESOLVED,
        )
        watch.stand_down(mass=self._clock.mass, at_us=self._now_us())
        self._say(key, Verdict.UNKNOWN, reason, touched=True)

    def _judge(self, entry: Entry, phase: Phase) -> tuple[Verdict, str]:
        return self._appraisal.verdict(entry, phase, self._now_us())

    def _now_us(self) -> int:
        assert self._clock.at_us is not None
        return self._clock.at_us

    def _budget(self, model: str) -> Budget:
        found = self._config.model(model)
        return found.budget if found else Budget()
