"""The slices under watch with their signals, what these are measured against, and the clock that they share."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from quantdrift.core.config.schema import Budget, Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import Task
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS, LEARNERS
from quantdrift.drift.evidence import header
from quantdrift.drift.evidence.clock import CalendarClock
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.evidence.state import load_state
from quantdrift.drift.watch import Phase, SignalKey, SliceWatch, Thresholds
from quantdrift.monitor.fold.groups import SIGNALS, budget_of, cap_of, scale_of
from quantdrift.monitor.fold.noise import NoiseFloors
from quantdrift.monitor.fold.slice_state import Key, SliceState, new_slice
from quantdrift.monitor.fold.versions import VersionActivity
from quantdrift.storage.monitor.rows import BaselineRow, Catalog, DetectorRow, Snapshot, Source

_ALERTS = {Verdict.WARNING: Phase.WARNING, Verdict.FIRING: Phase.FIRING}
_LOG = logging.getLogger(__name__)


class FoldState:
    """What is watched.

    Parameters
    ----------
    config
        Budgets and the tolerance of learned baselines.
    snapshot
        Where the record stands.

    Attributes
    ----------
    slices
        Per candidate version and slice.
    clock
        The fold's time.
    succession
        When each version was last compared.
    noise
        What is added to budgets for noise.
    thresholds
        When evidence is an alarm.
    """

    def __init__(self, config: Config, snapshot: Snapshot) -> None:
        self._config = config
        monitor = config.monitor
        self.thresholds = Thresholds(
            page=1.0 / monitor.pages_per_30_days, ticket=1.0 / monitor.tickets_per_30_days
        )
        position = snapshot.position
        self.clock = CalendarClock(
            at_us=position.event_us, mass=position.mass, n_detectors=position.n_detectors
        )
        self.slices: dict[Key, SliceState] = {
            (row.model_version_id, row.slice_id): SliceState(
                SliceWatch(_ALERTS.get(row.verdict, Phase.WATCHING)), row, self.thresholds
            )
            for row in snapshot.verdicts
        }
        for stored in snapshot.detectors:
            states = self.slices[stored.model_version_id, stored.slice_id].watch.states
            signal = SignalKey(stored.metric, stored.kind)
            states[signal] = _state(stored)
            if stored.noise:
                self.slices[stored.model_version_id, stored.slice_id].noise[signal] = stored.noise
        self.succession = VersionActivity(config.monitor.stale_after_s, self.slices.values())
        self.noise = NoiseFloors(snapshot.floors)
        self._imported: dict[tuple[int, int, str], float] = {}
        self._n_imports = 0
        for row in snapshot.imported:
            self._import(row)
        self._learned: list[BaselineRow] = []

    @property
    def now_us(self) -> int:
        """The fold's time, which is known once anything was folded."""
        assert self.clock.at_us is not None
        return self.clock.at_us

    def sorted(self) -> Iterator[tuple[Key, SliceState]]:
        """Yield the slices in the order of their keys."""
        yield from sorted(self.slices.items(), key=lambda item: item[0])

    def take(self) -> tuple[BaselineRow, ...]:
        """Return what has been learned or inherited since the last call."""
        learned, self._learned = self._learned, []
        return tuple(learned)

    def enter(self, key: Key, reason: str, *, at_us: int, last_us: int, fold_seq: int) -> None:
        """Begin to say something of a slice: that nothing is known yet."""
        self.slices[key] = new_slice(
            key,
            reason=reason,
            at_us=at_us,
            last_us=last_us,
            thresholds=self.thresholds,
            fold_seq=fold_seq,
        )

    @property
    def generation(self) -> int:
        """Grows with every change of what budgets are made of."""
        return self.noise.generation + self._n_imports

    def knows(self, key: Key, shown: Sequence[SignalKey], generation: int) -> bool:
        """Return whether all that a slice shows exists, and is measured against the budget of today's `generation`."""
        entry = self.slices.get(key)
        if entry is None or entry.checked != generation:
            return False
        states = entry.watch.states
        return len(states) == len(SIGNALS) or all(one in states for one in shown)

    def lacks(self, key: Key, shown: Sequence[SignalKey]) -> list[SignalKey]:
        """Return those of the signals that a slice shows that do not exist, and all that have a budget."""
        states = self.slices[key].watch.states if key in self.slices else {}
        return [one for one in shown if one.kind == BUDGET.kind or one not in states]

    def observed(
        self, key: Key, shown: Iterable[SignalKey], *, weighted: bool, fold_seq: int, catalog: Catalog
    ) -> None:
        """Make sure that the signals that a group shows exist, and measure against the budget of today.

        Parameters
        ----------
        key
            A slice that has an entry.
        shown
            Signals that have a value.
        weighted
            Whether inclusion probabilities differ within the slice.
        fold_seq, catalog
            For what is inherited from the version before.
        """
        entry = self.slices[key]
        budget = self.budget(catalog.versions[key[0]].model)
        for signal in shown:
            if signal.kind == BUDGET.kind:
                self._budget_state(key, signal, budget, weighted=weighted)
            else:
                self._learner_state(key, signal, budget, fold_seq, catalog)
        entry.sampled_under = -1

    def checked(self, key: Key, shown: Sequence[SignalKey]) -> None:
        """Note that the budgets of a slice are those of today, if all of them were shown.

        Not while it alerts: less noise waits for the end of the alert.
        """
        entry = self.slices[key]
        states = entry.watch.states
        budgets = [one for one in states if one.kind == BUDGET.kind]
        if not any(one not in shown or states[one][header.ALERTING] for one in budgets):
            entry.checked = self.generation

    def tend(self, keys: Iterable[Key], fold_seq: int) -> None:
        """Between batches: windows of the touched slices move on, and what has learned enough takes part."""
        for key in keys:
            for signal, state in sorted(self.slices[key].watch.states.items()):
                detector = DETECTORS[signal.kind]
                before = detector.live(state)
                detector.tend(state, mass=self.clock.mass, at_us=self.now_us)
                self.slices[key].watch.touched()
                if detector.live(state) and not before:
                    self._grow(1)
                    self._note(key, signal, state, Source.LEARNED, fold_seq)

    def decide(self, row: BaselineRow) -> None:
        """Follow a person's decision about what a signal is measured against; one without its signal is told."""
        key = (row.model_version_id, row.slice_id)
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
                at_us=self.now_us,
            )
            fresh[header.POLICY], fresh[header.N_TOTAL] = state[header.POLICY], state[header.N_TOTAL]
            entry.watch.add(signal, fresh)
            state = fresh
        self._grow(learner.live(state) - before)

    def forget(self, key: Key, silent: Iterable[SignalKey]) -> None:
        """Count signals no more that are about to be retired."""
        states = self.slices[key].watch.states
        self._grow(-sum(DETECTORS[signal.kind].live(states[signal]) for signal in silent))

    def budget(self, model: str) -> Budget:
        """Return what the owner of a model accepts."""
        return self._config.budget(model)

    def task(self, model: str) -> Task:
        """Return what a model gives."""
        found = self._config.model(model)
        return found.task if found else Task.CLASSIFICATION

    def _budget_state(self, key: Key, signal: SignalKey, budget: Budget, *, weighted: bool) -> None:
        entry, metric = self.slices[key], Metric(signal.metric)
        state = entry.watch.states.get(signal)
        m, cap = budget_of(metric, budget), cap_of(metric, budget)
        imported = self._imported.get((*key, signal.metric))
        # A cap that was lowered since may leave no room for it: then the configuration's budget holds.
        if imported is not None and imported < cap:
            m = imported / cap
        held, wanted = entry.noise.get(signal, 0.0), self.noise.added(key[0], signal.metric, m)
        if state is None:
            self._grow(1)
        # More noise is another null, for which the evidence begins anew; with less it stays, or, where an alert lasts,
        # the null does: what has recovered from the larger one has not yet from the smaller.
        same = state is not None and (state[header.M], state[header.SCALE]) == (m + held, cap)
        if state is not None and same and wanted < held and not state[header.ALERTING]:
            BUDGET.lower(state, m + wanted)
            entry.watch.touched()
            entry.noise[signal] = wanted
        elif state is None or not same or wanted > held:
            if imported is not None and imported >= cap:
                _LOG.warning(
                    "slice %d: the imported budget of %s, %g, is not below its cap of %g and does not hold: "
                    "import another, or raise the cap",
                    key[1],
                    signal.metric,
                    imported,
                    cap,
                )
            n_total = 0.0 if state is None else state[header.N_TOTAL]
            state = BUDGET.fresh(
                budget=m + wanted, scale=cap, weighted=weighted, mass=self.clock.mass, at_us=self.now_us
            )
            state[header.N_TOTAL] = n_total
            entry.noise[signal] = wanted
            entry.watch.add(signal, state)

    def _learner_state(
        self, key: Key, signal: SignalKey, budget: Budget, fold_seq: int, catalog: Catalog
    ) -> None:
        watch, learner = self.slices[key].watch, LEARNERS[signal.kind]
        if signal in watch.states:
            return
        mass, at_us = self.clock.mass, self.now_us
        before = self._predecessor(key, signal, catalog)
        if before is None:
            scale = scale_of(signal, budget)
            state = learner.fresh(tau=self._config.monitor.tolerance, scale=scale, mass=mass, at_us=at_us)
        else:
            state = learner.inherit(self.slices[before, key[1]].watch.states[signal], mass=mass, at_us=at_us)
            self._grow(1)
            self._note(key, signal, state, Source.INHERITED, fold_seq, from_version_id=before)
        watch.add(signal, state)

    def _predecessor(self, key: Key, signal: SignalKey, catalog: Catalog) -> int | None:
        """Return the version of the same model that was compared last and has a baseline for this signal."""
        model = catalog.versions[key[0]].model
        found = [
            (entry.last_us, version_id)
            for (version_id, slice_id), entry in self.slices.items()
            if slice_id == key[1]
            and version_id != key[0]
            and catalog.versions[version_id].model == model
            and signal in entry.watch.states
            and LEARNERS[signal.kind].live(entry.watch.states[signal])
        ]
        return max(found)[1] if found else None

    def _import(self, row: BaselineRow) -> None:
        content: Mapping[str, float] = row.content or {}
        place = (row.model_version_id, row.slice_id, row.metric)
        self._n_imports += 1
        if "budget" in content:
            self._imported[place] = float(content["budget"])
        else:
            self._imported.pop(place, None)  # back to the configuration's

    def _note(
        self,
        key: Key,
        signal: SignalKey,
        state: FloatArray,
        source: Source,
        fold_seq: int,
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
                to_us=self.now_us,
                n_groups=int(LEARNERS[signal.kind].learned(state)),
                from_version_id=from_version_id,
                content=msgspec.to_builtins(LEARNERS[signal.kind].content(state)),
                fold_seq=fold_seq,
            )
        )

    def _grow(self, n: int) -> None:
        if n:
            self.clock = self.clock.with_detectors(self.clock.n_detectors + n)


def _state(stored: DetectorRow) -> FloatArray:
    detector = DETECTORS.get(stored.kind)
    if detector is None:
        raise OperatorError(
            f"a detector state in the store is of kind {stored.kind!r}, which this program does not know: upgrade it"
        )
    return load_state(stored.kind, stored.state, detector.size)
