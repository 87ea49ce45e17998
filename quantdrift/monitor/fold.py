"""The fold: stored batches in, detector states, verdicts, transitions and roll-ups out.

It decides everything and touches nothing: no clock, no socket, no database. The same batches in the same order give
the same bits, however they are cut into folds, and whenever the process was killed between two of them. (Roll-ups are
added up in the store, where the order of additions may differ in the last bits.)
"""

import logging
import math

import msgspec

from quantdrift.core.config.schema import Budget, Config
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.slices import ALL
from quantdrift.drift import budget as fields
from quantdrift.drift.clock import MICROSECONDS, CalendarClock
from quantdrift.drift.detector import BUDGET
from quantdrift.drift.group import GroupValue, group_value
from quantdrift.drift.interval import Estimate
from quantdrift.drift.state import load_state
from quantdrift.drift.watch import Change, Phase, SignalKey, Thresholds, Watch, advance
from quantdrift.monitor.entry import SIGNALS, Entry, Key, new_entry
from quantdrift.monitor.gather import WATCHED, SliceGroups, budget_of, cap_of, exchanges, values_of
from quantdrift.monitor.judge import NO_REFERENCE, Limits, Standing, judge
from quantdrift.monitor.ledger import Counts, Ledger
from quantdrift.monitor.rates import Rates
from quantdrift.monitor.rollup import HOUR_US, Rollup
from quantdrift.monitor.story import Story, advice, interval_of, iso, unit_of
from storage.fold_rows import (
    BatchRows,
    Catalog,
    ComparisonRow,
    Episode,
    Outcome,
    Position,
    Snapshot,
    TransitionRow,
    VerdictRow,
)

_LOG = logging.getLogger(__name__)
_ALERTS = {Verdict.WARNING: Phase.WARNING, Verdict.FIRING: Phase.FIRING}
_NOTHING = Counts(offered=0, taken=0, lost=0)


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
        self._thresholds = Thresholds(
            page=1.0 / monitor.pages_per_30_days, ticket=1.0 / monitor.tickets_per_30_days
        )
        self._limits = Limits(
            min_groups=monitor.min_groups,
            max_loss_ratio=monitor.max_loss_ratio,
            stale_after_s=monitor.stale_after_s,
        )
        position = snapshot.position
        self._fold_seq = position.fold_seq
        self._clock = CalendarClock(
            at_us=position.event_us, mass=position.mass, n_detectors=position.n_detectors
        )
        self._ledger = Ledger(snapshot.baselines, snapshot.tallies)
        self._catalog = Catalog(versions={}, slices={}, policies={})
        self._rates = Rates()
        self._entries = {
            (row.model_version_id, row.slice_id): Entry(Watch(_ALERTS.get(row.verdict, Phase.WATCHING)), row)
            for row in snapshot.verdicts
        }
        for stored in snapshot.detectors:
            states = self._entries[stored.model_version_id, stored.slice_id].watch.states
            states[SignalKey(stored.metric, stored.kind)] = load_state(stored.kind, stored.state, BUDGET.size)
        self._dirty: set[Key] = set()
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
        return self._catalog

    def verdicts(self) -> list[VerdictRow]:
        """Return every verdict as it stands."""
        return [entry.verdict for _, entry in sorted(self._entries.items(), key=lambda item: item[0])]

    def learn(self, catalog: Catalog) -> None:
        """Take over versions, slices and policies; a version without a reference gets its `unknown` here."""
        self._catalog = catalog
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
        hour = (self._clock.at_us or 0) // HOUR_US
        touched, changes = self._compare(rows)
        for tally in rows.tallies:
            self._clock = self._clock.seen(min(tally.at_us, rows.stored_us))
            self._ledger.add(tally)
        now_us = self._clock.at_us
        if now_us is None:
            return
        self._ledger.forget(now_us)
        if now_us // HOUR_US > hour:
            self._retire(now_us)
        for key, change in changes:
            self._alert(key, change)
        # A tally may change the loss, and lets time pass for everybody.
        for key in sorted(self._entries if rows.tallies else touched):
            self._settle(key, touched=key in touched)

    def take(self) -> Outcome:
        """Return what is to be written for the batches since the last call, and forget it."""
        dirty, self._dirty = sorted(self._dirty), set()
        transitions, self._transitions = self._transitions, []
        rollups, self._rollup = self._rollup.rows(), Rollup()
        return Outcome(
            position=self.position,
            detectors=tuple(row for key in dirty for row in self._entries[key].rows()),
            verdicts=tuple(self._entries[key].verdict for key in dirty),
            transitions=tuple(transitions),
            rollups=tuple(rollups),
        )

    # --- comparisons

    def _compare(self, rows: BatchRows) -> tuple[set[Key], list[tuple[Key, Change]]]:
        collected: dict[Key, SliceGroups] = {}
        for exchange in exchanges(rows.comparisons):
            first = exchange.rows[0]
            # A sidecar whose clock runs ahead must not carry the fold's clock with it.
            self._clock = self._clock.seen(min(first.captured_us, rows.stored_us))
            version = self._catalog.versions[first.model_version_id]
            if not version.reference_digest:
                continue
            budget = self._budget(version.model)
            for slice_id, items in exchange.slices.items():
                self._rollup.add(slice_id, items, budget.kl_cap)
                if values := self._values(slice_id, items, budget):
                    key = (version.id, slice_id)
                    self._observed(key, items[0], sorted(values), budget)
                    groups = collected.setdefault(key, SliceGroups())
                    groups.add(exchange.order, self._clock.mass, self._now_us(), values)
        keys = sorted(collected)
        watches = [self._entries[key].watch for key in keys]
        changes = advance(watches, [collected[key].groups() for key in keys], self._thresholds)
        for watch in watches:
            for state in watch.states.values():
                BUDGET.rotate(state)
        return set(keys), [(keys[change.watch], change) for change in changes]

    def _values(
        self, slice_id: int, items: tuple[ComparisonRow, ...], budget: Budget
    ) -> dict[Metric, GroupValue]:
        first = items[0]
        smallest = self._rates.of(self._catalog, slice_id, first.policy_id).smallest
        values = {}
        for metric in WATCHED:
            x = values_of(metric, items, cap_of(metric, budget))
            if not x:
                continue
            try:
                values[metric] = group_value(x, [first.pi] * len(x), smallest, len(x))
            except ValueError as error:
                # What its sidecar said of its sampling does not fit together: no observation, whatever it shows.
                _LOG.warning("exchange %s says nothing of slice %d: %s", first.exchange_id, slice_id, error)
        return values

    def _observed(self, key: Key, first: ComparisonRow, metrics: list[Metric], budget: Budget) -> None:
        """Make sure that the signals exist, live, and measure against the budget of today."""
        if key not in self._entries:
            self._enter(key, "", self._now_us(), first.captured_us)
        entry = self._entries[key]
        entry.last_us = max(entry.last_us, first.captured_us)
        for metric in metrics:
            state = entry.state(metric)
            m, cap = budget_of(metric, budget), cap_of(metric, budget)
            if state is None or not state[fields.LIVE]:
                self._clock = self._clock.with_detectors(self._clock.n_detectors + 1)
            if state is None or (state[fields.M], state[fields.SCALE]) != (m, cap):
                n_total = 0.0 if state is None else state[fields.N_TOTAL]
                state = BUDGET.fresh(
                    budget=m,
                    scale=cap,
                    weighted=self._rates.of(self._catalog, key[1], first.policy_id).weighted,
                    mass=self._clock.mass,
                    at_us=self._now_us(),
                )
                state[fields.N_TOTAL] = n_total
                entry.watch.add(SIGNALS[metric], state)
            elif not state[fields.LIVE]:
                BUDGET.revive(state, mass=self._clock.mass)
            state[fields.POLICY] = first.policy_id

    def _enter(self, key: Key, reason: str, at_us: int, last_us: int) -> None:
        self._entries[key] = new_entry(
            key,
            reason=reason,
            at_us=at_us,
            last_us=last_us,
            threshold=self._thresholds.page,
            fold_seq=self._fold_seq,
        )

    def _retire(self, now_us: int) -> None:
        for key, entry in sorted(self._entries.items(), key=lambda item: item[0]):
            if n_retired := entry.retire(now_us):
                self._clock = self._clock.with_detectors(self._clock.n_detectors - n_retired)
                entry.verdict = msgspec.structs.replace(
                    entry.verdict, evidence=entry.watch.evidence(), fold_seq=self._fold_seq
                )
                self._dirty.add(key)

    # --- verdicts

    def _settle(self, key: Key, *, touched: bool) -> None:
        """Judge a slice again; where it changed between `ok` and `unknown`, say so."""
        entry = self._entries[key]
        if not entry.watch.states:
            return
        before = entry.verdict
        verdict, reason = self._judge(entry, entry.watch.phase)
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
            entry.verdict = msgspec.structs.replace(
                before,
                verdict=verdict,
                reason=reason,
                since_us=self._now_us() if changed else before.since_us,
                n_groups=entry.n_groups,
                evidence=entry.watch.evidence(),
                threshold=entry.watch.page_threshold(self._thresholds),
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
        metric, state = Metric(signal.metric), change.states[signal]
        recent = BUDGET.recent(state)
        mean, low, high = interval_of(recent)
        aggregate, overall = self._aggregate(key, metric)
        aggregate_mean, aggregate_low, aggregate_high = interval_of(overall)
        version, place = self._catalog.versions[key[0]], self._catalog.slices[key[1]]
        story = Story(
            model=version.model,
            version=version.candidate_version,
            reference=version.reference_digest,
            slice=place.name,
            predicate=place.predicate,
            from_verdict=entry.verdict.verdict,
            verdict=verdict,
            reason=reason,
            metric=metric,
            unit=unit_of(metric),
            budget=float(state[fields.M] * state[fields.SCALE]),
            before=moved.before if moved else None,
            after=moved.after if moved else None,
            mean=mean,
            low=low,
            high=high,
            n_recent=recent.n if recent else 0,
            n_groups=max(int(found[fields.N_TOTAL]) for found in change.states.values()),
            evidence=evidence,
            threshold=change.threshold,
            aggregate_verdict=aggregate,
            aggregate_mean=aggregate_mean,
            aggregate_low=aggregate_low,
            aggregate_high=aggregate_high,
            onset=iso(moved.onset_us) if moved else None,
            n_since_onset=moved.n_after if moved else None,
            advice=advice(metric, aggregate, moved),
        )
        self._transitions.append(
            TransitionRow(
                model_version_id=key[0],
                slice_id=key[1],
                from_verdict=entry.verdict.verdict,
                to_verdict=verdict,
                at_us=change.at_us,
                fold_seq=self._fold_seq,
                episode=episode,
                metric=metric,
                onset_us=moved.onset_us if moved else change.at_us,
                details=story.attributes(),
            )
        )
        entry.verdict = msgspec.structs.replace(
            entry.verdict, verdict=verdict, reason=reason, since_us=change.at_us
        )

    def _aggregate(self, key: Key, metric: Metric) -> tuple[Verdict, Estimate | None]:
        """Return the verdict over all of the version's traffic, and its estimate of `metric`."""
        model = self._catalog.versions[key[0]].model
        for row in self._catalog.slices.values():
            if row.model == model and row.name == ALL and not row.where and (key[0], row.id) in self._entries:
                entry = self._entries[key[0], row.id]
                return self._judge(entry, entry.watch.phase)[0], entry.recent(metric)
        return Verdict.UNKNOWN, None

    def _judge(self, entry: Entry, phase: Phase) -> tuple[Verdict, str]:
        counts, policy_id = _NOTHING, entry.policy_id
        if policy_id in self._catalog.policies:
            rates = self._rates.of(self._catalog, entry.verdict.slice_id, policy_id)
            counts = self._ledger.recent(rates.strata)
        standing = Standing(
            phase=phase,
            evidence_ratio=entry.watch.evidence() / entry.watch.page_threshold(self._thresholds),
            n_groups=entry.n_groups,
            silent_s=(self._now_us() - entry.last_us) / MICROSECONDS,
            counts=counts,
        )
        return judge(standing, self._limits)

    def _now_us(self) -> int:
        assert self._clock.at_us is not None
        return self._clock.at_us

    def _budget(self, model: str) -> Budget:
        found = self._config.model(model)
        return found.budget if found else Budget()
