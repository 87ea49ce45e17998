"""All that the fold remembers from one batch to the next, and what of it is still to be written."""

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from quantdrift.core.config.schema import Budget, Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Side, Verdict
from quantdrift.core.signals import budget_of, cap_of, signal_of
from quantdrift.core.slices import ALL, is_declared
from quantdrift.core.tasks import Task
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS, GROWTH, LEARNERS
from quantdrift.drift.evidence import header
from quantdrift.drift.evidence.clock import ALONE, MICROSECONDS, CalendarClock
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.drift.evidence.state import load_state
from quantdrift.drift.watch import Phase, SignalKey, SliceWatch, Thresholds
from quantdrift.monitor.fold.groups import LATENCY_GROWTH, scale_of
from quantdrift.monitor.fold.inclusion import RememberedRates, SliceRates
from quantdrift.monitor.fold.loss import LossCounts, RecentCounts
from quantdrift.monitor.fold.missing import MissingSamples
from quantdrift.monitor.fold.noise import NoiseFloors
from quantdrift.monitor.fold.noise_pairs import PairTests
from quantdrift.monitor.fold.rollup import HOUR_US, Rollup
from quantdrift.monitor.fold.serving import ServingVersions
from quantdrift.monitor.fold.sessions import Sessions
from quantdrift.monitor.fold.slice_state import (
    CLOSED,
    RETIRED_AFTER_US,
    FoldArrays,
    Key,
    SliceState,
    detector_rows,
    new_slice,
    rows_of,
    verdict_rows,
)
from quantdrift.storage.fold_rows import (
    BaselineRow,
    BatchRows,
    Catalog,
    Circumstances,
    DetectorRow,
    FoldResult,
    ItemCount,
    Position,
    Snapshot,
    Source,
    TransitionRow,
    VerdictRow,
)

_ALERTS = {Verdict.WARNING: Phase.WARNING, Verdict.FIRING: Phase.FIRING}
_LOG = logging.getLogger(__name__)


class FoldState:
    """The state of the fold. A batch changes it in place; `take` returns what has to be written of it.

    Parameters
    ----------
    config
        Budgets and limits.
    snapshot
        The stored state.

    Attributes
    ----------
    fold_seq
        Number of the last batch.
    clock
        The time of the exchanges.
    watched
        The models that share the allowance.
    compared_us
        When the last batch of comparisons was stored; None: long ago.
    catalog
        What the numbers in its rows stand for.
    slices
        Per candidate version and slice.
    table
        Their detector states, and what changes with each batch.
    sessions
        The open sessions.
    losses
        What was lost in the recent hour.
    missing
        Slices that may have lost far more than their strata.
    noise
        What is added to budgets for noise.
    pairs
        Whether noise explains what is measured of suspect slices.
    serving
        Which versions serve. The detectors of a version that another one has replaced get no allowance.
    retired
        Discovered slices that were retired.
    lapsed
        Slices of values that lost their place: their items count as `(other)`.
    thresholds
        When evidence is an alarm.
    circumstances
        What is so now, beside the batches.
    limits
        When a slice is `unknown`: the options of `[monitor]`.
    count_classes
        Header strata and models whose losses count for some slice.
    rollup
        Sums since the last `take`.
    transitions
        Changes of verdict that are.
    """

    def __init__(self, config: Config, snapshot: Snapshot) -> None:
        self._config = config
        self.limits = monitor = config.monitor
        self.thresholds = Thresholds(
            page=1.0 / monitor.pages_per_30_days, ticket=1.0 / monitor.tickets_per_30_days
        )
        position = snapshot.position
        self.fold_seq = position.fold_seq
        self.clock = CalendarClock(
            at_us=position.exchange_us, mass=position.mass, n_detectors=position.n_detectors
        )
        self.watched = ALONE
        self._event_us = position.event_us
        self.compared_us = snapshot.compared_us
        self.catalog = Catalog(versions={}, slices={}, policies={})
        self.circumstances = Circumstances()
        self.table = FoldArrays()
        self.slices = self._slices(snapshot)
        self._early: dict[Key, list[ItemCount]] = {}
        self.count_items(snapshot.recent_items)
        self._sorted: tuple[list[SliceState], IntArray] | None = None
        self.sessions = Sessions(
            int(monitor.session_s * MICROSECONDS),
            snapshot.sessions,
            lambda version_id: self.catalog.versions[version_id].first_seen_us,
        )
        self.missing = MissingSamples()
        self.losses = LossCounts(snapshot.baselines, snapshot.tallies, snapshot.expiries)
        self.noise = NoiseFloors(snapshot.floors)
        self.pairs = PairTests(
            snapshot.pairs,
            self.table,
            self.thresholds,
            self.slices,
            now_us=self._event_us or 0,
            everything=lambda version_id: self.everything(self.model(version_id)),
            allowance=lambda key, metric, side: self.noise.added(key, metric, 0.0, (side,)),
            noise=self._highest_noise,
        )
        self.retired = set(snapshot.retired)
        self.lapsed = set(snapshot.lapsed)
        self.serving = ServingVersions(snapshot.serving)
        if not position.is_counted:
            self._grow_to_live()
        self._closed = {
            key: entry.reason for key, entry in self.slices.items() if entry.reason.startswith(CLOSED)
        }
        self._declared: dict[int, bool] = {}
        self._everything: dict[str, int] = {}
        self._rates = RememberedRates()
        self._imported: dict[tuple[int, int, str], float] = {}
        self._n_imports = 0
        for row in snapshot.imported:
            self._import(row)
        # Worked out at most once a batch.
        self._counts: dict[tuple[tuple[str, ...], str], RecentCounts] = {}
        self.count_classes: list[tuple[tuple[str, ...], str]] = []
        self._count_class: dict[tuple[tuple[str, ...], str], int] = {}
        # Since the last `take`.
        self.rollup = Rollup()
        self.transitions: list[TransitionRow] = []
        self._learned: list[BaselineRow] = []
        self._gone_detectors: dict[tuple[Key, SignalKey], DetectorRow] = {}
        self._gone_verdicts: dict[Key, VerdictRow] = {}

    # --- time and numbers

    @property
    def position(self) -> Position:
        """How far the fold has come."""
        return Position(
            fold_seq=self.fold_seq,
            event_us=self._event_us,
            exchange_us=self.clock.at_us,
            mass=self.clock.mass,
            n_detectors=self.clock.n_detectors,
        )

    @property
    def has_begun(self) -> bool:
        """Whether anything was folded that has a time."""
        return self._event_us is not None

    @property
    def now_us(self) -> int:
        """The fold's time, which is known once anything was folded."""
        assert self._event_us is not None
        return self._event_us

    def hear(self, event_us: int) -> None:
        """Move the fold's time on to an event; an earlier one changes nothing.

        Tallies are folded when they come, and exchanges once those before them have come: tallies do not move the clock by which
        exchanges are observed and get their allowance, since all that waits would then be of one moment.
        """
        self._event_us = event_us if self._event_us is None else max(self._event_us, event_us)

    def pass_time(self, event_us: int) -> None:
        """Move the clock of the exchanges on to one of them, and the fold's time with it; an earlier one changes nothing."""
        self.hear(event_us)
        self.clock = self.clock.seen(event_us, self.watched)

    @property
    def exchange_us(self) -> int:
        """The clock of the exchanges, or the fold's time before the first."""
        return self.now_us if self.clock.at_us is None else self.clock.at_us

    def learn(self, catalog: Catalog) -> None:
        """Take over versions, slices and policies."""
        doubted = self.catalog.undeclared_sessions or catalog.undeclared_sessions
        self.catalog = catalog
        if doubted or any(not row.is_verified for row in catalog.versions.values()):
            for entry in self.slices.values():
                self.table.may_page[entry.row] = self.may_page(entry.key)
        self._everything = {
            row.model: row.id for row in catalog.slices.values() if row.name == ALL and not row.where
        }

    def paused(self, version_id: int) -> str:
        """Return by whom and since when the sampling of a version's model is paused; empty where it is not."""
        orders = self.circumstances.paused
        return (orders.get(self.model(version_id)) or orders.get("", "")) if orders else ""

    def everything(self, model: str) -> int | None:
        """Return the slice of all of a model's traffic; None before anything was stored of it."""
        return self._everything.get(model)

    def model(self, version_id: int) -> str:
        """Return the model of a version."""
        return self.catalog.versions[version_id].model

    def is_verified(self, version_id: int) -> bool:
        """Return whether it is known who sent the exchanges of a version: without that, nothing in it can page."""
        return self.catalog.versions[version_id].is_verified

    def may_page(self, key: Key) -> bool:
        """Return whether an alert of a slice can be a page: its senders are known, and its requests count once each."""
        return self.is_verified(key[0]) and not self.session_attribute(key)

    def has_people(self, key: Key) -> bool:
        """Return whether it is known who sends the requests of a slice: then people are counted, and not exchanges.

        The option alone does not say so: the callers of some models, or of some slices, may not send its header. It is read off the
        requests of this hour and the one before; of a slice without any off those of its version.
        """
        if not self._config.sampling.sticky_header:
            return False
        everything = self.everything(self.model(key[0]))
        for slice_id in (key[1], everything):
            entry = None if slice_id is None else self.slices.get((key[0], slice_id))
            counts = None if entry is None else self.table.counts_people(entry.row, self.now_us // HOUR_US)
            if counts is not None:
                return counts
        return False

    def budget(self, version_id: int) -> Budget:
        """Return what the owner of a version's model accepts."""
        return self._config.budget(self.model(version_id))

    def task(self, model: str) -> Task:
        """Return what a model gives."""
        configured = self._config.model(model)
        return configured.task if configured else Task.CLASSIFICATION

    def rates(self, slice_id: int, policy_id: int) -> SliceRates:
        """Return how a slice is sampled under a policy."""
        return self._rates.of(self.catalog, slice_id, policy_id)

    # --- slices

    def sorted(self) -> tuple[list[SliceState], IntArray]:
        """Return the slices in the order of their keys, and the row of each."""
        if self._sorted is None:
            slices = [self.slices[key] for key in sorted(self.slices)]
            self._sorted = slices, rows_of(slices)
        return self._sorted

    def changed(self) -> list[SliceState]:
        """Return the slices whose rows are to be written, in the order of their keys."""
        slices, rows = self.sorted()
        return list(itertools.compress(slices, self.table.dirty[rows].tolist()))

    def enter(self, key: Key, reason: str, *, at_us: int, last_us: int) -> None:
        """Add a slice that nothing is known of yet."""
        self._sorted = None
        self.slices[key] = new_slice(
            key,
            self.table,
            reason=reason,
            at_us=at_us,
            last_us=last_us,
            thresholds=self.thresholds,
            fold_seq=self.fold_seq,
            may_page=self.may_page(key),
        )
        self.pairs.enter(self.slices[key])
        self.count_items(self._early.pop(key, ()))

    def count_items(self, counts: Sequence[ItemCount]) -> None:
        """Count what was compared, in whole; of a slice that nothing is known of yet it is kept for when it begins."""
        rows = self.rows(count[:2] for count in counts)
        for count in itertools.compress(counts, (rows < 0).tolist()):
            self._early.setdefault(count[:2], []).append(count)
        if (some := rows >= 0).any():
            columns = np.array([count[2:] for count in counts], dtype=np.intp)[some]
            hour, n_items, n_unmeasured, names_people = columns.T
            self.table.count(rows[some], hour // HOUR_US, n_items, n_unmeasured, names_people > 0)

    def unmeasured(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Return the items that were compared in this hour and the one before, and those that nothing was measured of."""
        return self.table.counted_items(rows, self.now_us // HOUR_US)

    def forget_items(self) -> None:
        """Forget what was compared before the last hour in slices that never began."""
        begin_us = (self.now_us // HOUR_US - 1) * HOUR_US
        self._early = {
            key: kept
            for key, counts in self._early.items()
            if (kept := [count for count in counts if count.hour_us >= begin_us])
        }

    def ignores(self, slice_id: int) -> bool:
        """Return whether a slice is not compared any more: without a place, or retired and not in the configuration."""
        if slice_id in self.lapsed:
            return True
        if slice_id not in self.retired:
            return False
        declared = self._declared.get(slice_id)
        if declared is None:
            declared = self._declared[slice_id] = is_declared(self._config, self.catalog.slices[slice_id].key)
        return not declared

    def not_asked(self) -> list[tuple[Key, list[SignalKey]]]:
        """Return the slices with signals that are watched although the configuration asks for them no more.

        An alert of theirs would wait for a recovery that nothing can show.
        """
        not_asked = []
        for key, entry in sorted(self.slices.items()):
            budget = self.budget(key[0])
            if signals := [
                signal
                for signal in sorted(entry.watch.states)
                if not signal_of(signal.metric).is_asked(signal.kind, budget)
            ]:
                not_asked.append((key, signals))
        return not_asked

    def retune_growth(self) -> None:
        """Test every latency against what the configuration allows today of its learned baseline."""
        for key, entry in sorted(self.slices.items()):
            state = entry.watch.states.get(LATENCY_GROWTH)
            if state is not None and GROWTH.retune(state, self.budget(key[0]).latency_growth):
                entry.watch.touched()
                self.table.dirty[entry.row] = True

    def remove(self, key: Key, signals: Sequence[SignalKey]) -> None:
        """Remove signals of a slice, and with the last of them the slice; their last rows are written."""
        entry = self.slices[key]
        ends = len(signals) == len(entry.watch.states)
        states = entry.watch.states
        self._grow(key[0], -sum(DETECTORS[signal.kind].live(states[signal]) for signal in signals))
        rows = entry.retire(signals, self.now_us, self.fold_seq)
        self._gone_detectors |= {(key, SignalKey(row.metric, row.kind)): row for row in rows}
        self.table.dirty[entry.row] = not ends
        if ends:
            self.noise.forget(key)
            self.pairs.end(key)
            self._closed.pop(key, None)
            self._gone_verdicts[key] = self.slices.pop(key).verdict
            self.table.free_row(entry.row)
            self._sorted = None

    # --- versions

    def see(self, rows: BatchRows) -> None:
        """Note which versions a batch has exchanges of, a version without a reference too."""
        times: dict[int, list[int]] = {}
        for row in rows.comparisons:
            times.setdefault(row.model_version_id, []).append(min(row.captured_us, rows.stored_us))
        if rows.captured_us:
            for version_id in rows.unreferenced:
                times.setdefault(version_id, []).append(min(rows.captured_us, rows.stored_us))
        for version_id, of_version in sorted(times.items()):
            if version_id not in self.serving:
                self._begin_version(version_id)
            self.serving.seen(version_id, np.array(of_version))

    def _begin_version(self, version_id: int) -> None:
        """Let a version begin with the noise of its reference, if another version of the model was compared with the same."""
        versions = self.catalog.versions
        digest = versions[version_id].reference_digest if version_id in versions else ""
        same = [
            other
            for other in self.serving.versions()
            if digest
            and other in versions
            and self.model(other) == self.model(version_id)
            and versions[other].reference_digest == digest
            and self.is_verified(other) is self.is_verified(version_id)
        ]
        if same:
            before = max(same, key=lambda same_id: (self.serving.row(same_id).last_us, same_id))
            self.noise.go_on(version_id, before)
            self.pairs.go_on(version_id, before)

    def judge_versions(self) -> None:
        """Find which versions were replaced, and which serve again.

        The detectors of a version that was replaced give their allowance to the others. If it serves again, they take part
        again, and get nothing for the time between.
        """
        replaced, back = self.serving.judge(self.now_us, self._replaces)
        for version_id in (*replaced, *back):
            n_live = sum(1 for _ in self._live_states(version_id))
            is_back = version_id in back
            self.clock = self.clock.with_detectors(self.clock.n_detectors + (n_live if is_back else -n_live))
            if is_back:
                self.withhold(version_id)
        for version_id in self.serving.versions():
            if version_id in self.catalog.versions and (
                heirs := self.serving.heirs(version_id, self._replaces)
            ):
                self._hand_over(version_id, heirs)

    def _hand_over(self, version_id: int, heirs: Sequence[int]) -> None:
        """Move the evidence of a version that is silent to the first of its heirs that has the signal, slice by slice."""
        table, (slices, rows) = self.table, self.sorted()
        table.survey_all(rows)
        has_some = (table.version_id[rows] == version_id) & (table.page_mass[rows] > 0.0)
        for entry in itertools.compress(slices, has_some.tolist()):
            for signal in sorted(entry.watch.states):
                of_heirs = (self.slices.get((heir, entry.key[1])) for heir in heirs)
                heir = next(
                    (
                        of_heir
                        for of_heir in of_heirs
                        if of_heir is not None and signal in of_heir.watch.states
                    ),
                    None,
                )
                if heir is not None:
                    self._carry(heir, signal, entry)

    def withhold(self, version_id: int, slices: Iterable[SliceState] | None = None) -> None:
        """Let live detectors of a version go without the allowance of the time until now: all of them, or those of slices."""
        for entry, state in self._live_states(version_id, slices):
            state[header.MASS] = max(state[header.MASS], self.clock.mass)
            self.table.dirty[entry.row] = True

    def serves_now(self, version_id: int) -> list[str]:
        """Return the versions that serve instead of one that was replaced, each once, the one that was seen last first."""
        version_ids = self.serving.instead_of(version_id, self._replaces)
        return list(dict.fromkeys(self.catalog.versions[other].candidate_version for other in version_ids))

    def forget_versions(self) -> None:
        """Forget the versions that were not seen for 30 days and have no slices any more."""
        kept = {key[0] for key in self.slices}
        for version_id in self.serving.versions():
            if (
                version_id not in kept
                and self.now_us - self.serving.row(version_id).last_us > RETIRED_AFTER_US
            ):
                self.serving.forget(version_id)

    def _replaces(self, other: int, version_id: int) -> bool:
        """Return whether a version can replace another one.

        Both are of one model: another version, or the same with another reference. A version that unverified senders report
        replaces no other one.
        """
        versions = self.catalog.versions
        if other not in versions or version_id not in versions:
            return False
        same = self.model(other) == self.model(version_id) and other != version_id
        return same and (self.is_verified(other) or not self.is_verified(version_id))

    def _live_states(
        self, version_id: int, slices: Iterable[SliceState] | None = None
    ) -> Iterator[tuple[SliceState, FloatArray]]:
        for entry in self.sorted()[0] if slices is None else slices:
            if entry.key[0] == version_id:
                for signal, state in entry.watch.states.items():
                    if DETECTORS[signal.kind].live(state):
                        yield entry, state

    def closed(self, key: Key) -> str:
        """Return what a person said who closed the alert of a slice, until enough was compared since; empty: nobody did."""
        reason = self._closed.get(key, "")
        entry = self.slices.get(key)
        if reason and entry is not None:
            n = max((state[header.N] for state in entry.watch.states.values()), default=0.0)
            if n >= self.limits.min_groups:
                del self._closed[key]
                return ""
        return reason

    @property
    def any_closed(self) -> bool:
        """Whether a person closed any alert lately."""
        return bool(self._closed)

    def note_closed(self, key: Key, reason: str) -> None:
        """Note that a person closed the alert of a slice."""
        self._closed[key] = reason

    def session_attribute(self, key: Key) -> str:
        """Return the attribute whose requests are alike in a slice although it is not declared; empty: there is none."""
        attribute = self.catalog.undeclared_sessions.get(key, "")
        return "" if attribute == f"header.{self._config.sampling.sticky_header}" else attribute

    def recent_counts(self, strata: tuple[str, ...], model: str) -> RecentCounts:
        """Return what was offered and lost of a model in the recent hour; see `look`."""
        counts = self._counts.get((strata, model))
        if counts is None:
            quarantined = self.circumstances.quarantined.get(model)
            n, reason = (0, "") if quarantined is None else (quarantined.n, quarantined.reason)
            seen_us = [of.first_seen_us for of in self.catalog.versions.values() if of.model == model]
            known_us = min(seen_us, default=None)
            counts = self._counts[strata, model] = self.losses.recent(strata, model, known_us, n, reason)
        return counts

    def count_class(self, slice_id: int, version_id: int, policy_id: int) -> int:
        """Return the place in `count_classes` of the strata and the model whose losses count for a slice."""
        key = (self.rates(slice_id, policy_id).strata, self.model(version_id))
        number = self._count_class.get(key)
        if number is None:
            number = self._count_class[key] = len(self.count_classes)
            self.count_classes.append(key)
        return number

    def look(self) -> None:
        """Let `recent_counts` be worked out again: what they rest on may have changed."""
        self._counts = {}

    # --- signals, and what they are measured against

    @property
    def generation(self) -> int:
        """Grows with every change of what budgets are made of."""
        return self.noise.generation + self._n_imports

    def rows(self, keys: Iterable[Key]) -> IntArray:
        """Return the rows of slices in `table`; -1 for a slice that nothing is known of."""
        entries = map(self.slices.get, keys)
        return np.array([-1 if entry is None else entry.row for entry in entries], dtype=np.intp)

    def knows(self, rows: IntArray, codes: IntArray, signals: Sequence[SignalKey]) -> BoolArray:
        """Return of which slices all signals exist that they show, (rows,), measured against the budgets of today.

        Parameters
        ----------
        rows
            In `table`; -1 where nothing is known.
        codes
            (rows,) the sum of 2 ** place of the signals that each shows, in the order of `signals`.
        """
        table = self.table
        exist = np.zeros(len(rows), dtype=np.intp)
        for bit, signal in enumerate(signals):
            if signal in table.has:
                exist += table.has[signal][rows].astype(np.intp) << bit
        complete: BoolArray = (rows >= 0) & (table.checked[rows] == self.generation) & (codes & ~exist == 0)
        return complete

    def lacks(self, key: Key, shown: Sequence[SignalKey]) -> list[SignalKey]:
        """Return those of the signals that a slice shows that do not exist, and all that have a budget."""
        states = self.slices[key].watch.states if key in self.slices else {}
        return [signal for signal in shown if signal.kind == BUDGET.kind or signal not in states]

    def observed(self, key: Key, shown: Iterable[SignalKey], *, weighted: bool) -> None:
        """Make sure that the signals that a group shows exist, and measure against the budget of today.

        Parameters
        ----------
        key
            A slice that has an entry.
        shown
            Signals that have a value.
        weighted
            Whether inclusion probabilities differ within the slice.
        """
        entry = self.slices[key]
        budget = self.budget(key[0])
        for signal in shown:
            if signal.kind == BUDGET.kind:
                self._budget_state(key, signal, budget, weighted=weighted)
            else:
                self._learner_state(key, signal, budget)
        self.table.sampled_under[entry.row] = -1

    def checked(self, key: Key, shown: Sequence[SignalKey]) -> None:
        """Note that the budgets of a slice are those of today, if all of them were shown.

        Not while it alerts: less noise waits for the end of the alert.
        """
        entry = self.slices[key]
        states = entry.watch.states
        budgets = [signal for signal in states if signal.kind == BUDGET.kind]
        if not any(signal not in shown or states[signal][header.ALERTING] for signal in budgets):
            self.table.checked[entry.row] = self.generation

    def tend(self, slices: Iterable[SliceState]) -> None:
        """Between batches: windows of the touched slices move on, and what has learned enough takes part."""
        for entry in slices:
            for signal, state in sorted(entry.watch.states.items()):
                detector = DETECTORS[signal.kind]
                before = detector.live(state)
                detector.tend(state, mass=self.clock.mass, at_us=self.exchange_us)
                entry.watch.touched()
                if detector.live(state) and not before:
                    self._grow(entry.key[0], 1)
                    self._note(entry.key, signal, state, Source.LEARNED)

    def decide(self, row: BaselineRow) -> None:
        """Apply a person's decision about what a signal is measured against."""
        key = (row.model_version_id, row.slice_id)
        if key in self.slices:
            # The row that is written shows the states as they were at the last verdict, without the decision.
            _ = self.slices[key].verdict
            self.table.dirty[self.slices[key].row] = True
        signal = SignalKey(row.metric, row.kind)
        if row.source is Source.IMPORTED:
            self._import(row)
            return
        entry = self.slices.get(key)
        learner = LEARNERS.get(row.kind)
        state = entry.watch.states.get(signal) if entry else None
        if entry is None or learner is None or state is None:
            _LOG.warning(
                "baseline decision on %s of slice %d: there is no such signal", row.metric, row.slice_id
            )
            return
        before = learner.live(state)
        entry.watch.touched()
        if row.source is Source.FROZEN and not before:
            _LOG.warning("slice %d has no baseline of %s yet that could be frozen", row.slice_id, row.metric)
        elif row.source is Source.FROZEN:
            learner.freeze(state)
        elif row.source is Source.KEPT:
            learner.keep(state)
        elif row.content is not None:
            fresh = learner.from_content(
                msgspec.convert(row.content, learner.record),
                scale=float(state[header.SCALE]),
                mass=self.clock.mass,
                at_us=self.exchange_us,
            )
            fresh[header.POLICY], fresh[header.N_TOTAL] = state[header.POLICY], state[header.N_TOTAL]
            entry.watch.add(signal, fresh)
            state = fresh
        self._grow(key[0], learner.live(state) - before)

    # --- what is written

    def take(self) -> FoldResult:
        """Return what is to be written since the last call, and forget it."""
        changed = self.changed()
        detectors = detector_rows(self.table, changed)
        verdicts = verdict_rows(self.table, changed, self.thresholds)
        if self._gone_detectors or self._gone_verdicts:
            # What was retired and came back is written once, in its present state.
            by_signal = self._gone_detectors | {
                ((row.model_version_id, row.slice_id), SignalKey(row.metric, row.kind)): row
                for row in detectors
            }
            detectors = [by_signal[signal_key] for signal_key in sorted(by_signal)]
            said = self._gone_verdicts | {(row.model_version_id, row.slice_id): row for row in verdicts}
            verdicts = [said[key] for key in sorted(said)]
        sessions, closed = self.sessions.take(self.fold_seq)
        floors, noise_changes, forgotten_noise = self.noise.take()
        pairs, ended_pairs = self.pairs.take()
        outcome = FoldResult(
            position=self.position,
            detectors=tuple(detectors),
            verdicts=tuple(verdicts),
            transitions=tuple(self.transitions),
            rollups=tuple(self.rollup.rows()),
            learned=tuple(self._learned),
            sessions=sessions,
            closed=closed,
            floors=floors,
            noise_changes=noise_changes,
            forgotten_noise=forgotten_noise,
            pairs=pairs,
            ended_pairs=ended_pairs,
            serving=self.serving.take(),
        )
        self.rollup, self.transitions, self._learned = Rollup(), [], []
        self.table.dirty[:] = False
        self._gone_detectors, self._gone_verdicts = {}, {}
        return outcome

    # --- parts of the above

    def _slices(self, snapshot: Snapshot) -> dict[Key, SliceState]:
        slices = {}
        for row in snapshot.verdicts:
            watch = SliceWatch(_ALERTS.get(row.verdict, Phase.WATCHING), table=self.table)
            slices[row.model_version_id, row.slice_id] = SliceState(watch, row, self.thresholds)
        for stored in snapshot.detectors:
            entry = slices[stored.model_version_id, stored.slice_id]
            signal = SignalKey(stored.metric, stored.kind)
            entry.watch.states[signal] = _state(stored)
            self.table.noise[signal][entry.row] = stored.noise
        for entry in slices.values():
            entry.watch.phase = _phase(entry)
        return slices

    def _highest_noise(self, key: Key, metric: str, scale: float) -> float:
        everything = self.everything(self.model(key[0]))
        return self.noise.highest((key[0], 0 if key[1] == everything else key[1]), metric, scale)

    def _budget_state(self, key: Key, signal: SignalKey, budget: Budget, *, weighted: bool) -> None:
        entry = self.slices[key]
        state = entry.watch.states.get(signal)
        m, cap = budget_of(signal.metric, budget), cap_of(signal.metric, budget)
        imported = self._imported.get((*key, signal.metric))
        # A cap that was lowered since may leave no room for it: then the configuration's budget holds.
        if imported is not None and imported < cap:
            m = imported / cap
        # Where pairs decide about the noise of the reference, an allowance for it would only hide a drift; recovery needs one.
        fires = entry.watch.phase is Phase.FIRING
        sides = (Side.CANDIDATE,) if self.pairs.decides(key, signal.metric) and not fires else tuple(Side)
        noise, wanted = entry.noise(signal), self.noise.added(key, signal.metric, m, sides)
        if state is None:
            self._grow(key[0], 1)
        # More noise is another null, for which the evidence begins from nothing; with less it stays, or, where an alert lasts,
        # the null does: what has recovered from the larger one has not yet from the smaller.
        same = state is not None and (state[header.M], state[header.SCALE]) == (m + noise, cap)
        if state is not None and same and wanted < noise and not state[header.ALERTING]:
            BUDGET.lower(state, m + wanted)
            entry.watch.touched()
            self.table.noise[signal][entry.row] = wanted
        elif state is None or not same or wanted > noise:
            if imported is not None and imported >= cap:
                _LOG.warning(
                    "slice %d: the imported budget of %s, %g, is not below its cap of %g and does not hold: "
                    "import another, or raise the cap",
                    key[1],
                    signal.metric,
                    imported,
                    cap,
                )
            is_new = state is None
            n_total = 0.0 if state is None else state[header.N_TOTAL]
            state = BUDGET.fresh(
                budget=m + wanted, scale=cap, weighted=weighted, mass=self.clock.mass, at_us=self.exchange_us
            )
            state[header.N_TOTAL] = n_total
            entry.watch.add(signal, state)
            self.table.noise[signal][entry.row] = wanted
            if is_new:
                self._take_over(key, signal)

    def _take_over(self, key: Key, signal: SignalKey) -> None:
        """Move the evidence of versions that were silent before a slice of this one began to it."""
        for before in list(self._earlier(key, signal)):
            if key[0] in self.serving.heirs(before.key[0], self._replaces):
                self._carry(self.slices[key], signal, before)

    def _carry(self, entry: SliceState, signal: SignalKey, before: SliceState) -> None:
        """Move the evidence of a signal of the same slice of a version that is silent; not where the budget was another."""
        state, of_before = entry.watch.states[signal], before.watch.states[signal]
        budgets = (state[header.M] - entry.noise(signal), of_before[header.M] - before.noise(signal))
        if signal.kind == BUDGET.kind and not math.isclose(*budgets, rel_tol=1e-9):
            return
        _ = entry.verdict, before.verdict  # as their states show them now
        if DETECTORS[signal.kind].carry(state, of_before):
            self.pairs.carry(entry, before.key)
            for slice_ in (entry, before):
                slice_.watch.touched()
                self.table.dirty[slice_.row] = True

    def _earlier(self, key: Key, signal: SignalKey) -> Iterator[SliceState]:
        """Yield the same slice of the other versions, where it has this signal.

        What unverified senders report gives nothing to verified versions, and takes nothing from them.
        """
        is_verified = self.is_verified(key[0])
        for version_id in self.serving.versions():
            entry = self.slices.get((version_id, key[1]))
            if entry is None or version_id == key[0] or self.is_verified(version_id) is not is_verified:
                continue
            if signal in entry.watch.states:
                yield entry

    def _learner_state(self, key: Key, signal: SignalKey, budget: Budget) -> None:
        watch, learner = self.slices[key].watch, LEARNERS[signal.kind]
        if signal in watch.states:
            return
        mass, at_us = self.clock.mass, self.exchange_us
        before = self._predecessor(key, signal)
        if before is None and (learning := max(self._earlier(key, signal), key=_last_compared, default=None)):
            state = learner.inherit(learning.watch.states[signal], mass=mass, at_us=at_us)
        elif before is None:
            scale = scale_of(signal, budget)
            tau = budget.latency_growth - 1.0 if signal == LATENCY_GROWTH else self.limits.tolerance
            state = learner.fresh(tau=tau, scale=scale, mass=mass, at_us=at_us)
        else:
            state = learner.inherit(self.slices[before, key[1]].watch.states[signal], mass=mass, at_us=at_us)
            self._grow(key[0], 1)
            self._note(key, signal, state, Source.INHERITED, from_version_id=before)
        watch.add(signal, state)
        self._take_over(key, signal)

    def _predecessor(self, key: Key, signal: SignalKey) -> int | None:
        """Return the version of the same model that was compared last and has a baseline for this signal."""
        learner = LEARNERS[signal.kind]
        live = (entry for entry in self._earlier(key, signal) if learner.live(entry.watch.states[signal]))
        before = max(live, key=_last_compared, default=None)
        return None if before is None else before.key[0]

    def _import(self, row: BaselineRow) -> None:
        content: Mapping[str, float] = row.content or {}
        key = (row.model_version_id, row.slice_id, row.metric)
        self._n_imports += 1
        if "budget" in content:
            self._imported[key] = float(content["budget"])
        else:
            self._imported.pop(key, None)  # back to the configuration's

    def _note(
        self,
        key: Key,
        signal: SignalKey,
        state: FloatArray,
        source: Source,
        *,
        from_version_id: int | None = None,
    ) -> None:
        self._learned.append(
            BaselineRow(
                model_version_id=key[0],
                slice_id=key[1],
                metric=signal.metric,
                kind=signal.kind,
                source=source,
                made_by="monitor",
                reason="",
                from_us=int(state[header.CREATED_AT]),
                to_us=self.exchange_us,
                n_groups=int(LEARNERS[signal.kind].learned(state)),
                from_version_id=from_version_id,
                content=msgspec.to_builtins(LEARNERS[signal.kind].content(state)),
                fold_seq=self.fold_seq,
            )
        )

    def _grow_to_live(self) -> None:
        """Count the live detectors of versions that no other one has replaced."""
        for version_id in sorted({key[0] for key in self.slices}):
            self._grow(version_id, sum(1 for _ in self._live_states(version_id)))

    def _grow(self, version_id: int, n: int) -> None:
        """Count `n` more live detectors of a version; those of one that was replaced do not count."""
        if n and not self.serving.is_replaced(version_id):
            self.clock = self.clock.with_detectors(self.clock.n_detectors + n)


def _state(stored: DetectorRow) -> FloatArray:
    detector = DETECTORS.get(stored.kind)
    if detector is None:
        raise OperatorError(
            f"a detector state in the store is of kind {stored.kind!r}, which this program does not know: upgrade it"
        )
    return load_state(stored.kind, stored.state, detector.size)


def _phase(entry: SliceState) -> Phase:
    """Return the phase of a slice that was stored: the alert of a version that was replaced is not in its verdict."""
    alerting = [state for state in entry.watch.states.values() if state[header.ALERTING]]
    if entry.watch.phase is not Phase.WATCHING or not alerting:
        return entry.watch.phase
    return Phase.WARNING if all(state[header.PAGING] for state in alerting) else Phase.FIRING


def _last_compared(entry: SliceState) -> tuple[int, int]:
    return entry.last_us, entry.key[0]
