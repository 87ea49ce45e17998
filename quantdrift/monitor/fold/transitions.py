"""What is said of each slice: its verdict, every change of it, and the story of each alert."""

import math

from quantdrift.core.records import Metric, Verdict
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS
from quantdrift.drift.evidence.header import N_TOTAL, SCALE, M, Onset
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.evidence.recovery import RESOLVED
from quantdrift.drift.watch import Change, Phase, SignalKey
from quantdrift.monitor.fold.alert_event import transition_row
from quantdrift.monitor.fold.alert_text import reason_of
from quantdrift.monitor.fold.slice_state import Key, SliceState
from quantdrift.monitor.fold.state import FoldState
from quantdrift.monitor.fold.verdict import SUPERSEDED, Verdicts
from quantdrift.storage.monitor.rows import Episode, TransitionRow


class Transitions:
    """Says what follows from the evidence, and remembers what must be written of it.

    Parameters
    ----------
    state
        What is watched.
    appraisal
        What else is known of it.

    Attributes
    ----------
    fold_seq
        The batch that is folded.
    dirty
        Slices whose rows are to be written.
    transitions
        Changes of verdict that are.
    """

    def __init__(self, state: FoldState, appraisal: Verdicts) -> None:
        self._state = state
        self._appraisal = appraisal
        self.fold_seq = 0
        self.dirty: set[Key] = set()
        self.transitions: list[TransitionRow] = []

    def settle(self, key: Key, *, touched: bool) -> None:
        """Judge a slice again; an alert of a version that another one has replaced ends."""
        entry = self._state.slices[key]
        if not entry.watch.states:
            return
        if not touched:
            basis = self._appraisal.basis(entry, self._state.now_us)
            if basis == entry.judged_by:
                return
            entry.judged_by = basis
        if entry.watch.phase is not Phase.WATCHING and self._appraisal.superseded(key):
            self.end(key, SUPERSEDED)
        self._say(key, *self._judge(entry, entry.watch.phase), touched=touched)

    def _say(self, key: Key, verdict: Verdict, reason: str, *, touched: bool) -> None:
        """Note the verdict; where it changed between `ok` and `unknown`, as a transition."""
        entry = self._state.slices[key]
        changed = verdict is not entry.said
        if changed:
            self.transitions.append(
                TransitionRow(
                    model_version_id=key[0],
                    slice_id=key[1],
                    from_verdict=entry.said,
                    to_verdict=verdict,
                    at_us=self._state.now_us,
                    fold_seq=self.fold_seq,
                    episode=Episode.NONE,
                    metric=Metric(entry.loudest().metric),
                    onset_us=self._state.now_us,
                    reason=reason,
                )
            )
        if touched or changed or reason != entry.reason:
            entry.say(verdict, reason, at_us=self._state.now_us, fold_seq=self.fold_seq)
            self.dirty.add(key)

    def alert(self, key: Key, change: Change) -> None:
        """Tell of an alarm or of its end."""
        entry = self._state.slices[key]
        verdict, reason = self._judge(entry, change.after)
        signals = sorted(change.evidence)
        if change.after is Phase.WATCHING:
            episode, moved = Episode.CLOSE, None
            signal = min(signals, key=lambda one: change.evidence[one])
            evidence = change.evidence[signal]
        else:
            episode = Episode.OPEN if change.before is Phase.WATCHING else Episode.ESCALATE
            signal = max(signals, key=lambda one: change.evidence[one])
            reason = reason_of(signal.kind, Metric(signal.metric), page=verdict is Verdict.FIRING)
            evidence = math.fsum(change.evidence.values())
            moved = DETECTORS[signal.kind].moved(change.states[signal])
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
        moved: Onset | None,
        evidence: float,
        threshold: float,
    ) -> None:
        entry, metric = self._state.slices[key], Metric(signal.metric)
        against = SignalKey(signal.metric, BUDGET.kind)
        accepted, noise = states.get(against), entry.noise.get(against, 0.0)
        version = self._appraisal.catalog.versions[key[0]]
        row = transition_row(
            task=self._state.task(version.model),
            version=version,
            place=self._appraisal.catalog.slices[key[1]],
            change=(entry.said, verdict),
            reason=reason,
            metric=metric,
            kind=signal.kind,
            state=states[signal],
            budget=None if accepted is None else float((accepted[M] - noise) * accepted[SCALE]),
            noise=0.0 if accepted is None else float(noise * accepted[SCALE]),
            n_groups=max(int(state[N_TOTAL]) for state in states.values()),
            moved=moved,
            evidence=evidence,
            threshold=threshold,
            aggregate=self._appraisal.aggregate(self._state.slices, key[0], metric, self._state.now_us),
            episode=episode,
            at_us=at_us,
            fold_seq=self.fold_seq,
        )
        self.transitions.append(row)
        entry.alert(verdict, reason, at_us=at_us, evidence=evidence, threshold=threshold)

    def end(self, key: Key, reason: str) -> None:
        """Call what is compared no more `unknown`, also where it alerts: nothing has shown it to be well."""
        entry = self._state.slices[key]
        if entry.watch.phase is Phase.WATCHING:
            self._say(key, Verdict.UNKNOWN, reason, touched=False)
            return
        watch = entry.watch
        signal = entry.loudest()
        self._tell(
            key,
            Verdict.UNKNOWN,
            reason,
            at_us=self._state.now_us,
            episode=Episode.CLOSE,
            signal=signal,
            states=watch.states,
            moved=None,
            evidence=0.0,
            threshold=RESOLVED,
        )
        watch.stand_down(mass=self._state.clock.mass, at_us=self._state.now_us)
        self._say(key, Verdict.UNKNOWN, reason, touched=True)

    def _judge(self, entry: SliceState, phase: Phase) -> tuple[Verdict, str]:
        return self._appraisal.verdict(entry, phase, self._state.now_us)
