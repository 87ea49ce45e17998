"""One slice of one candidate version, as the fold holds it."""

from collections.abc import Iterator, Sequence
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

    Attributes
    ----------
    last_us
        Capture time of its last comparison, at most that of storing it; the row follows.
    noise
        Per signal the part of the mean it tests against that was added for noise, over the cap.
    """

    def __init__(self, watch: SliceWatch, verdict: VerdictRow) -> None:
        self.noise: dict[SignalKey, float] = {}
        self.watch = watch
        self.verdict = verdict
        self.last_us = verdict.last_us

    @property
    def n_groups(self) -> int:
        """Exchanges compared so far."""
        return max((int(state[fields.N_TOTAL]) for state in self.watch.states.values()), default=0)

    @property
    def policy_id(self) -> int:
        """Policy of its last exchange; 0 before the first."""
        return max((int(state[fields.POLICY]) for state in self.watch.states.values()), default=0)

    def state(self, metric: Metric) -> FloatArray | None:
        """Return the state of a metric's budget detector, or None where it was never observed."""
        return self.watch.states.get(SignalKey(metric.value, BUDGET.kind))

    def weight(self, verdict: Verdict, thresholds: Thresholds) -> tuple[float, float]:
        """Return the evidence that is shown with a verdict, and what it must reach to page.

        An alarm resets the evidence: until it is over, what it was then says more than nothing.
        """
        if verdict is Verdict.FIRING is self.verdict.verdict:
            return self.verdict.evidence, self.verdict.threshold
        return self.watch.evidence(), self.watch.page_threshold(thresholds)

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

        What a baseline still lacks stands beside it, in exchanges: `change_missing`, `tail_missing`.
        """
        found: dict[str, dict[str, float]] = {}
        for signal, state in sorted(self.watch.states.items()):
            if signal.kind != BUDGET.kind:
                if missing := DETECTORS[signal.kind].missing(state):
                    found.setdefault(signal.metric, {})[f"{signal.kind}_missing"] = missing
                continue
            noise = self.noise.get(signal, 0.0)
            shown = {"budget": float((state[fields.M] - noise) * state[fields.SCALE])}
            if noise:
                shown["noise"] = float(noise * state[fields.SCALE])
            recent, since = BUDGET.recent(state), BUDGET.since_change(state)
            if recent:
                shown |= {"mean": recent.mean, "low": recent.low, "high": recent.high, "n": recent.n}
            if since and self.watch.phase is not Phase.WATCHING:
                shown["severity"] = since.low
            found[signal.metric] = found.get(signal.metric, {}) | shown
        return found

    @property
    def missing(self) -> int:
        """How many exchanges its baselines lack until all of them are learned; 0 where they are."""
        states = self.watch.states.items()
        return max((DETECTORS[signal.kind].missing(state) for signal, state in states), default=0)

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
        self.last_us = at_us
        self.verdict = msgspec.structs.replace(self.verdict, last_us=at_us)

    def retire(self, signals: Sequence[SignalKey], now_us: int, fold_seq: int) -> list[DetectorRow]:
        """Watch `signals` no more and return their last rows: retired now, or when they had been silent for 30 days."""
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
        return rows

    def rows(self) -> Iterator[DetectorRow]:
        """Yield its detectors as they are stored."""
        for signal, state in sorted(self.watch.states.items()):
            last_us = int(state[fields.LAST_AT])
            yield DetectorRow(
                model_version_id=self.verdict.model_version_id,
                slice_id=self.verdict.slice_id,
                metric=signal.metric,
                kind=signal.kind,
                state=dump_state(signal.kind, state),
                budget=float(state[fields.M]),
                n_groups=int(state[fields.N]),
                evidence=DETECTORS[signal.kind].evidence(state),
                fold_seq=self.verdict.fold_seq,
                created_us=int(state[fields.CREATED_AT]),
                last_us=last_us,
                retired_us=None,
                noise=self.noise.get(signal, 0.0),
            )


def new_entry(
    key: Key, *, reason: str, at_us: int, last_us: int, threshold: float, fold_seq: int
) -> SliceState:
    """Return an entry that nothing is known of yet: `unknown`."""
    verdict = VerdictRow(
        model_version_id=key[0],
        slice_id=key[1],
        verdict=Verdict.UNKNOWN,
        reason=reason,
        since_us=at_us,
        n_groups=0,
        evidence=0.0,
        threshold=threshold,
        estimate={},
        last_us=last_us,
        updated_us=at_us,
        fold_seq=fold_seq,
    )
    return SliceState(SliceWatch(), verdict)
