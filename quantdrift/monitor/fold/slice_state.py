"""One slice of one candidate version, as the fold holds it."""

from collections.abc import Sequence
from datetime import timedelta

import msgspec

from quantdrift.core.records import Metric, Verdict
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS
from quantdrift.drift.evidence import header as fields
from quantdrift.drift.evidence.interval import Estimate
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.evidence.state import dump_state
from quantdrift.drift.watch import Phase, SignalKey, SliceWatch, Thresholds
from quantdrift.storage.monitor.rows import RETIRED_AFTER, DetectorRow, VerdictRow

RETIRED_AFTER_US = RETIRED_AFTER // timedelta(microseconds=1)
Key = tuple[int, int]  # model_version_id, slice_id


class SliceState:
    """Its watch and what is said of it now.

    Parameters
    ----------
    watch
        Phase and detector states.
    verdict
        The row in the store, as it stands or will stand.
    thresholds
        When evidence is an alarm.

    Attributes
    ----------
    said, reason
        The verdict and why.
    last_us
        Capture time of its last comparison, at most that of storing it; the row follows.
    noise
        Per signal the part of the mean it tests against that was added for noise, over the cap.
    judged_by
        What its last verdict rested on, where nothing was compared since; else what an earlier one did, or None.
    checked
        The `FoldState.generation` for which its budgets were last seen to be those of today; -1 for none.
    sampled_under
        Policy that all of its signals were last sampled under; -1 where they differ, or it is not known.
    """

    def __init__(self, watch: SliceWatch, verdict: VerdictRow, thresholds: Thresholds) -> None:
        self.noise: dict[SignalKey, float] = {}
        self.watch = watch
        self.key: Key = (verdict.model_version_id, verdict.slice_id)
        self.said, self.reason = verdict.verdict, verdict.reason
        self.last_us = verdict.last_us
        self.checked = self.sampled_under = -1
        self.judged_by: object = None
        self._thresholds = thresholds
        self._row = verdict
        self._since_us, self._updated_us = verdict.since_us, verdict.updated_us
        self._fold_seq = verdict.fold_seq
        self._stale = self._unweighed = False

    @property
    def verdict(self) -> VerdictRow:
        """The row; what it shows of the states is worked out here, and so only as often as it is wanted.

        Whoever changes a state without saying something of it asks for the row before.
        """
        if self._stale:
            self._stale = False
            row, survey = self._row, self.watch.survey()
            evidence, threshold = row.evidence, row.threshold
            if self._unweighed:
                self._unweighed = False
                evidence, threshold = survey.total, self.watch.page_threshold(self._thresholds)
            self._row = VerdictRow(
                model_version_id=self.key[0],
                slice_id=self.key[1],
                verdict=self.said,
                reason=self.reason,
                since_us=self._since_us,
                n_groups=survey.n_groups,
                evidence=evidence,
                threshold=threshold,
                estimate=self.estimates(),
                last_us=self.last_us,
                updated_us=self._updated_us,
                fold_seq=self._fold_seq,
            )
        return self._row

    @property
    def n_groups(self) -> int:
        """Exchanges compared so far."""
        return self.watch.survey().n_groups

    @property
    def policy_id(self) -> int:
        """Policy of its last exchange; 0 before the first."""
        return self.watch.survey().policy_id

    def say(self, verdict: Verdict, reason: str, *, at_us: int, fold_seq: int) -> None:
        """Say `verdict` of it, and all that its states show now.

        An alarm resets the evidence: until it is over, what it was then says more than nothing.
        """
        if not verdict is Verdict.FIRING is self.said:
            self._unweighed = True
        if verdict is not self.said:
            self._since_us = at_us
        self.said, self.reason, self._updated_us, self._fold_seq = verdict, reason, at_us, fold_seq
        self._stale = True

    def alert(self, verdict: Verdict, reason: str, *, at_us: int, evidence: float, threshold: float) -> None:
        """Say what an alarm says, or the end of one; the rest of the row stays."""
        self._row = msgspec.structs.replace(
            self.verdict,
            verdict=verdict,
            reason=reason,
            since_us=at_us,
            evidence=evidence,
            threshold=threshold,
        )
        self.said, self.reason, self._since_us = verdict, reason, at_us

    def state(self, metric: Metric) -> FloatArray | None:
        """Return the state of a metric's budget detector, or None where it was never observed."""
        return self.watch.states.get(SignalKey(metric.value, BUDGET.kind))

    def loudest(self) -> SignalKey:
        """Return the signal with the most evidence."""
        states = self.watch.states
        return max(sorted(states), key=lambda key: DETECTORS[key.kind].evidence(states[key]))

    def recent(self, metric: Metric) -> Estimate | None:
        """Return a metric's mean and interval over the recent window, or None where nothing was observed."""
        state = self.state(metric)
        return None if state is None else BUDGET.recent(state)

    def estimates(self) -> dict[str, dict[str, float]]:
        """Return per metric the recent mean with its interval, the budget and the noise added to it; the severity of alerts.

        What a baseline still lacks stands beside it, in exchanges: `change_missing`, `tail_missing`. An interval that would
        hold every value is left out: `missing` is how many exchanges one needs.
        """
        found: dict[str, dict[str, float]] = {}
        learned = self.watch.survey().missing == 0
        for signal, state in self.watch.ordered():
            if signal.kind != BUDGET.kind:
                if not learned and (missing := DETECTORS[signal.kind].missing(state)):
                    found.setdefault(signal.metric, {})[f"{signal.kind}_missing"] = missing
                continue
            noise, scale = self.noise.get(signal, 0.0), state.item(fields.SCALE)
            shown = found.setdefault(signal.metric, {})
            shown["budget"] = (state.item(fields.M) - noise) * scale
            if noise:
                shown["noise"] = noise * scale
            if recent := BUDGET.recent(state):
                shown["mean"] = recent.mean
                if recent.missing:
                    shown["missing"] = recent.missing
                else:
                    shown["low"], shown["high"] = recent.low, recent.high
                shown["n"] = recent.n
            if self.watch.phase is not Phase.WATCHING and (since := BUDGET.since_change(state)):
                shown["severity"] = since.low
        return found

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
        self._row = msgspec.structs.replace(self.verdict, last_us=at_us)
        self.last_us = at_us

    def retire(self, signals: Sequence[SignalKey], now_us: int, fold_seq: int) -> list[DetectorRow]:
        """Watch `signals` no more and return their last rows: retired now, or when they had been silent for 30 days."""
        self._row = self.verdict  # as its states show it now
        rows = [
            msgspec.structs.replace(
                row, retired_us=min(row.last_us + RETIRED_AFTER_US, now_us), fold_seq=fold_seq, evidence=0.0
            )
            for row in self.rows()
            if SignalKey(row.metric, row.kind) in signals
        ]
        for signal in signals:
            del self.watch.states[signal]
            self.noise.pop(signal, None)
        self.watch.touched()
        return rows

    def rows(self) -> list[DetectorRow]:
        """Return its detectors as they are stored, by metric and kind."""
        version_id, slice_id = self.key
        evidence, noise, fold_seq = self.watch.survey().evidence, self.noise, self._fold_seq
        return [
            DetectorRow(
                model_version_id=version_id,
                slice_id=slice_id,
                metric=signal.metric,
                kind=signal.kind,
                state=dump_state(signal.kind, state),
                budget=state.item(fields.M),
                n_groups=int(state.item(fields.N)),
                evidence=weight,
                fold_seq=fold_seq,
                created_us=int(state.item(fields.CREATED_AT)),
                last_us=int(state.item(fields.LAST_AT)),
                retired_us=None,
                noise=noise.get(signal, 0.0) if noise else 0.0,
            )
            for (signal, state), weight in zip(self.watch.ordered(), evidence, strict=True)
        ]


def new_slice(
    key: Key, *, reason: str, at_us: int, last_us: int, thresholds: Thresholds, fold_seq: int
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
    return SliceState(SliceWatch(), verdict, thresholds)
