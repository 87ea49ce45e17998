"""The verdict on a slice: from evidence, counts and time to the verdict, and from a change of it to what is sent."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import Monitor
from quantdrift.core.records import Metric, Suspect, Verdict
from quantdrift.core.signals import SignalForm, signal_of
from quantdrift.core.tasks import Task
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS, GROWTH
from quantdrift.drift.evidence.clock import MICROSECONDS
from quantdrift.drift.evidence.header import N_TOTAL, SCALE, M, Onset
from quantdrift.drift.evidence.interval import WeightedEstimate
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.drift.evidence.recovery import RESOLVED
from quantdrift.drift.watch import Phase, PhaseChange, SignalKey, Survey
from quantdrift.facts.events import Ending
from quantdrift.facts.words import verdict as words
from quantdrift.facts.words.alert import RETURNED, over_counts, reason_of
from quantdrift.monitor.fold.alert_event import AlertEnd, transition_row
from quantdrift.monitor.fold.loss import LEAST_LOST, RecentCounts
from quantdrift.monitor.fold.slice_state import UNJUDGED, Key, SliceState, rows_of
from quantdrift.monitor.fold.state import FoldState
from quantdrift.storage.fold_rows import Episode, TransitionRow

LEAST_UNMEASURED = 30  # a few answers of the first minute say nothing of the traffic
# From here on the evidence grows too fast for chance: it is a few nats, some dozens of exchanges, from a ticket.
UNDECIDED_FROM = 1e-3
_SURE = 20.0  # evidence over mass: without drift its expectation is at most 1, so that some 5 % of healthy slices exceed it
ALERTS = {Phase.FIRING: Verdict.FIRING, Phase.WARNING: Verdict.WARNING}


class SliceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a slice.

    Parameters
    ----------
    phase
        What the evidence says.
    evidence_ratio
        Evidence over its paging threshold.
    n_groups
        Exchanges compared so far.
    silent_s
        Event time since its last comparison.
    counts
        Of the header strata that its items may fall into, over the recent hour.
    replaced
        Whether another version of the model serves instead of its candidate version.
    paused
        By whom and since when the sampling of its model is paused; empty where it is not.
    n_missing
        Exchanges that its learned baselines lack; 0 where they are complete.
    alarm
        Why it alerts, as was said at the alarm; empty where that is not known.
    noise
        Why noise is too much to say anything; empty where it is not.
    session_attribute
        The attribute whose requests are alike although it is not declared; empty where there is none.
    n_items, n_unmeasured
        Items compared in this hour and the one before, and those of them that nothing was measured of.
    task
        What its model gives.
    has_people
        Whether people are counted, and not exchanges.
    closed
        What a person said who closed its alert; empty where nobody did, or enough was compared since.
    fallen
        Why far more of its samples may be missing than of its header strata; empty where nothing says so.
    waits
        Whether enough was compared, and none of it could be evidence: its detectors have no allowance of false alarms yet.
    asked
        Whether it is not known yet if noise of the reference explains what is measured.
    """

    phase: Phase
    evidence_ratio: float
    n_groups: int
    silent_s: float
    counts: RecentCounts
    replaced: bool = False
    paused: str = ""
    alarm: str = ""
    n_missing: int = 0
    noise: str = ""
    session_attribute: str = ""
    n_items: int = 0
    n_unmeasured: int = 0
    task: Task = Task.CLASSIFICATION
    closed: str = ""
    has_people: bool = False
    fallen: str = ""
    waits: bool = False
    asked: bool = False


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What decides by which case slices are judged: an entry for each slice, or numbers of a single one.

    Parameters
    ----------
    alerting
        Whether the phase of its evidence is an alert.
    loses, loses_somehow
        Whether too many of its samples are missing, and whether it is said without figures why.
    offered
        Whether there was traffic in the recent hour.
    noisy
        Whether noise is too much to say anything.

    Others are as in `SliceStatus`.
    """

    replaced: BoolArray
    alerting: BoolArray
    closed: BoolArray
    paused: BoolArray
    n_items: IntArray
    n_unmeasured: IntArray
    n_groups: IntArray
    waits: BoolArray
    sessions: BoolArray
    loses: BoolArray
    loses_somehow: BoolArray
    fallen: BoolArray
    silent_s: FloatArray
    offered: BoolArray
    noisy: BoolArray
    evidence_ratio: FloatArray
    asked: BoolArray
    n_missing: IntArray


class Case(msgspec.Struct, frozen=True):
    """A case of the verdict.

    Parameters
    ----------
    holds
        Returns which slices it is the case of; of several cases the first counts.
    verdict
        None: that of the slice's phase.
    words
        The reason, or what returns it. A reason that is always the same is not written again.
    counts
        Whether the reason has figures that only comparisons of the slice change: `n_groups`, `n_missing`, `has_people`.
    """

    holds: Callable[[Facts, Monitor], BoolArray]
    verdict: Verdict | None
    words: str | Callable[[SliceStatus, Monitor], str]
    counts: bool = False

    @property
    def is_repeatable(self) -> bool:
        """Whether a slice that is judged by it again says the same, but for its own figures."""
        return self.counts or isinstance(self.words, str)


def judge(status: SliceStatus, limits: Monitor) -> tuple[Verdict, str]:
    """Return the verdict and why, in words.

    An alert lasts until its slice has shown to be inside the budget again, or serves nobody: what makes others `unknown`
    does not hide it. Otherwise whatever could hide drift makes the slice `unknown`, never `ok`.
    """
    facts = _facts(status, limits)
    case = next(case for case in CASES if case.holds(facts, limits))
    reason = case.words if isinstance(case.words, str) else case.words(status, limits)
    return case.verdict or ALERTS[status.phase], reason


def _facts(status: SliceStatus, limits: Monitor) -> Facts:
    counts = status.counts
    loses = _loses(counts, limits)
    return Facts(
        replaced=np.asarray(status.replaced),
        alerting=np.asarray(status.phase in ALERTS),
        closed=np.asarray(bool(status.closed)),
        paused=np.asarray(bool(status.paused)),
        n_items=np.asarray(status.n_items),
        n_unmeasured=np.asarray(status.n_unmeasured),
        n_groups=np.asarray(status.n_groups),
        waits=np.asarray(status.waits),
        sessions=np.asarray(bool(status.session_attribute)),
        loses=np.asarray(loses),
        loses_somehow=np.asarray(loses and _loss(counts) == words.LOST),
        fallen=np.asarray(bool(status.fallen)),
        silent_s=np.asarray(status.silent_s),
        offered=np.asarray(counts.offered > 0),
        noisy=np.asarray(bool(status.noise)),
        evidence_ratio=np.asarray(status.evidence_ratio),
        asked=np.asarray(status.asked),
        n_missing=np.asarray(status.n_missing),
    )


def _is_unmeasured(n_items: IntArray, n_unmeasured: IntArray) -> BoolArray:
    """Return whether most of what was compared was not measured, and that is no accident of a few."""
    unmeasured: BoolArray = (n_unmeasured >= LEAST_UNMEASURED) & (2 * n_unmeasured > n_items)
    return unmeasured


def _waits(page_mass: FloatArray, n_armed: IntArray, limits: Monitor) -> BoolArray:
    """Return whether enough was compared since detectors began, and they got no allowance meanwhile.

    The time of the fold is that of all models: a model whose first exchanges are folded after later ones of another model begins at
    the moment at which all of them are observed.
    """
    waits: BoolArray = (page_mass == 0.0) & (n_armed >= limits.min_groups)
    return waits


def _loses(counts: RecentCounts, limits: Monitor) -> bool:
    """Return whether too many samples were lost or expired."""
    return counts.missing >= LEAST_LOST and counts.missing > limits.max_loss_ratio * counts.taken


def _loss(counts: RecentCounts) -> str:
    """Return why samples are missing: the most frequent way."""
    # What expired in the last hour may have been taken before it.
    taken = max(counts.taken, counts.missing)
    if counts.quarantined > max(counts.lost, counts.expired, counts.unaccounted):
        return words.quarantined(counts.quarantined / taken, counts.quarantined_for)
    if counts.unaccounted > max(counts.lost, counts.expired):
        return words.unaccounted(counts.unaccounted)
    return words.expired(counts.expired / taken) if counts.expired > counts.lost else words.LOST


CASES: Final = (
    Case(lambda of, _: of.replaced, Verdict.UNKNOWN, words.REPLACED),
    Case(lambda of, _: of.alerting, None, lambda status, _: words.alarm(status.alarm, status.paused)),
    # What could hide drift.
    Case(lambda of, _: of.closed, Verdict.UNKNOWN, lambda status, _: status.closed),
    Case(
        lambda of, _: of.paused,
        Verdict.UNKNOWN,
        lambda status, _: words.sampling_paused(status.paused),
    ),
    Case(
        lambda of, _: _is_unmeasured(of.n_items, of.n_unmeasured),
        Verdict.UNKNOWN,
        lambda status, _: words.not_measured(status.n_unmeasured, status.n_items, status.task),
    ),
    Case(
        lambda of, limits: of.n_groups < limits.min_groups,
        Verdict.UNKNOWN,
        lambda status, limits: words.too_few(
            limits.min_groups - status.n_groups, has_people=status.has_people
        ),
        counts=True,
    ),
    Case(
        lambda of, _: of.sessions,
        Verdict.UNKNOWN,
        lambda status, _: words.looks_like_sessions(status.session_attribute),
    ),
    Case(lambda of, _: of.loses_somehow, Verdict.UNKNOWN, words.LOST),
    Case(lambda of, _: of.loses, Verdict.UNKNOWN, lambda status, _: _loss(status.counts)),
    Case(lambda of, _: of.fallen, Verdict.UNKNOWN, lambda status, _: status.fallen),
    Case(
        lambda of, limits: (of.silent_s > limits.stale_after_s) & of.offered,
        Verdict.UNKNOWN,
        words.STALE,
    ),
    Case(
        lambda of, _: ~of.noisy & of.asked & (of.evidence_ratio >= UNDECIDED_FROM),
        Verdict.UNKNOWN,
        words.NOISE_ASKED,
    ),
    Case(
        lambda of, _: ~of.noisy & (of.evidence_ratio >= UNDECIDED_FROM),
        Verdict.UNKNOWN,
        words.UNDECIDED,
    ),
    Case(lambda of, _: of.noisy, Verdict.UNKNOWN, lambda status, _: status.noise),
    Case(lambda of, _: of.waits, Verdict.UNKNOWN, words.WAITS),
    Case(
        lambda of, _: of.n_missing > 0,
        Verdict.OK,
        lambda status, _: words.no_baseline_yet(status.n_missing, has_people=status.has_people),
        counts=True,
    ),
    Case(
        lambda of, _: np.ones_like(of.replaced),
        Verdict.OK,
        words.HEALTHY,
    ),
)
"""The cases of the verdict in their order: the first that holds counts. A slice's `judged` is its place in it, from 1."""
_COUNTING: Final = np.array([False, *(case.counts for case in CASES)])  # by `judged`


# Of its states, of loss, whether its version was replaced, why noise is too much, the attribute of undeclared sessions, whether
# it has been silent for long; of the items that were compared and that nothing was measured of; by whom it is paused; why its
# samples may be missing.
Basis = tuple[Survey, RecentCounts, bool, str, str, bool, tuple[int, int], str, str]
_NOTHING = RecentCounts(offered=0, taken=0, lost=0)


def settle(state: FoldState, slices: Sequence[SliceState], rows: IntArray, compared: BoolArray) -> None:
    """Judge slices again, and note their verdicts; an alert of a version that another one has replaced ends until it is back.

    First it is found for all of them at once by which case they are judged. Where that says the same as before in the
    same words, only the time of the verdict changes, and the slice's own figures in them.

    Parameters
    ----------
    slices, rows
        The slices, and their rows in the table.
    compared
        (slices,) those that the batch compared: their rows are written even if the verdict is the same.
    """
    if not slices:  # of small batches nearly all bring nothing
        return
    table = state.table
    table.survey_all(rows)
    cases = _cases(state, slices, rows)
    same = (cases == table.judged[rows]) & (cases != UNJUDGED)
    again = rows[same & compared]
    table.updated_us[again], table.fold_seq[again] = state.now_us, state.fold_seq
    table.stale[again] = table.unweighed[again] = table.dirty[again] = True
    for index in np.flatnonzero(same & compared & _COUNTING[cases]).tolist():
        slices[index].reason = _counted(state, slices[index], CASES[cases[index] - 1])
    for index in np.flatnonzero(~same).tolist():
        entry, case = slices[index], int(cases[index])
        _settle(state, entry, touched=bool(compared[index]))
        table.judged[entry.row] = case if case != UNJUDGED and CASES[case - 1].is_repeatable else UNJUDGED


def _counted(state: FoldState, entry: SliceState, case: Case) -> str:
    """Return the reason of a case whose words have the slice's own figures alone."""
    assert not isinstance(case.words, str)
    status = SliceStatus(
        phase=Phase.WATCHING,
        evidence_ratio=0.0,
        n_groups=state.table.n_groups.item(entry.row),
        silent_s=0.0,
        counts=_NOTHING,
        n_missing=state.table.missing.item(entry.row),
        has_people=state.has_people(entry.key),
    )
    return case.words(status, state.limits)


def _settle(state: FoldState, entry: SliceState, *, touched: bool) -> None:
    """Judge one slice again."""
    if not entry.watch.states and entry.reason == words.NO_REFERENCE:
        return
    if not touched:
        basis = _basis(state, entry)
        if basis == entry.judged_by:
            return
        entry.judged_by = basis
    if entry.watch.phase is not Phase.WATCHING:
        is_sent, is_replaced = entry.said in ALERTS.values(), state.serving.is_replaced(entry.key[0])
        if is_sent and is_replaced:
            _leave(state, entry)
        elif not is_sent and not is_replaced:
            _come_back(state, entry)
    _say(state, entry, *_verdict(state, entry, entry.watch.phase), touched=touched)


def _cases(state: FoldState, slices: Sequence[SliceState], rows: IntArray) -> IntArray:
    """Return by which of `CASES` slices are judged that are surveyed, (rows,) from 1; `UNJUDGED` without a signal."""
    table = state.table
    facts = _facts_of_many(state, slices, rows)
    holds = [case.holds(facts, state.limits) for case in CASES]
    judged: IntArray = np.select(holds, range(UNJUDGED + 1, UNJUDGED + 1 + len(CASES)), UNJUDGED)
    judged[(table.n_signals[rows] == 0) & ~_is_unmeasured(facts.n_items, facts.n_unmeasured)] = UNJUDGED
    return judged


def _facts_of_many(state: FoldState, slices: Sequence[SliceState], rows: IntArray) -> Facts:
    table = state.table
    loses, loses_somehow, offered = _losses(state, slices, rows)
    replaced, noisy, closed, paused, sessions, fallen = np.zeros((6, len(rows)), dtype=np.bool_)
    version_id, slice_id = table.version_id[rows], table.slice_id[rows]
    for version in np.unique(version_id).tolist():
        of = version_id == version
        of_version, of_slices = state.noise.too_noisy(version)
        replaced[of], noisy[of] = state.serving.is_replaced(version), bool(of_version)
        paused[of] = bool(state.paused(version))
        if of_slices:
            noise = [
                noisy_id for noisy_id, reason in of_slices.items() if bool(reason) is not bool(of_version)
            ]
            noisy[of] ^= np.isin(slice_id[of], noise)
    if state.catalog.undeclared_sessions:
        sessions[:] = [bool(state.session_attribute(entry.key)) for entry in slices]
    if state.any_closed:
        closed[:] = [bool(state.closed(entry.key)) for entry in slices]
    if state.missing:
        fallen[:] = [bool(state.missing.reason(state.model(entry.key[0]), entry.key[1])) for entry in slices]
    n_items, n_unmeasured = state.unmeasured(rows)
    return Facts(
        replaced=replaced,
        alerting=table.phase[rows] != 0,
        closed=closed,
        paused=paused,
        n_items=n_items,
        n_unmeasured=n_unmeasured,
        n_groups=table.n_groups[rows],
        waits=_waits(table.page_mass[rows], table.n_armed[rows], state.limits),
        sessions=sessions,
        loses=loses,
        loses_somehow=loses_somehow,
        fallen=fallen,
        silent_s=(state.now_us - table.last_us[rows]) / MICROSECONDS,
        offered=offered,
        noisy=noisy,
        evidence_ratio=table.doubts(rows, state.thresholds),
        asked=table.asked[rows],
        n_missing=table.missing[rows],
    )


def _losses(
    state: FoldState, slices: Sequence[SliceState], rows: IntArray
) -> tuple[BoolArray, BoolArray, BoolArray]:
    """Return `loses`, `loses_somehow` and `offered` of `Facts`."""
    table = state.table
    policy_id = table.policy_id[rows]
    for index in np.flatnonzero(table.counted_under[rows] != policy_id).tolist():
        entry, policy = slices[index], policy_id.item(index)
        is_known = policy in state.catalog.policies
        table.counted[entry.row] = state.count_class(entry.key[1], entry.key[0], policy) if is_known else -1
        table.counted_under[entry.row] = policy if is_known else -1
    counted = table.counted[rows]
    loses, loses_somehow, offered = np.zeros((3, len(rows)), dtype=np.bool_)
    for number in np.unique(counted[counted >= 0]).tolist():
        counts, of = state.recent_counts(*state.count_classes[number]), counted == number
        offered[of] = counts.offered > 0
        loses[of] = _loses(counts, state.limits)
        loses_somehow[of] = loses[of] & (_loss(counts) == words.LOST)
    return loses, loses_somehow, offered


def alert(state: FoldState, key: Key, change: PhaseChange) -> None:
    """Note that an alert opens, escalates or closes.

    Where sessions are not declared, the evidence may count one observation many times: the alert is a ticket, and says so.
    Where another version serves, the last sessions and stragglers of this one wake nobody: what they show is stored, and sent
    if the version comes back.
    """
    entry = state.slices[key]
    verdict, reason = _verdict(state, entry, change.after)
    suspect = None
    signals = sorted(change.evidence)
    if change.after is Phase.WATCHING:
        episode, moved, ended = Episode.CLOSE, None, Ending.RECOVERED
        signal = min(signals, key=lambda alerting: change.evidence[alerting])
        evidence = change.evidence[signal]
    else:
        episode, ended = Episode.OPEN if change.before is Phase.WATCHING else Episode.ESCALATE, None
        signal = max(signals, key=lambda alerting: change.evidence[alerting])
        suspect = _suspect(state, entry, change, signal) if _is_slow(signal) else None
        reason = reason_of(
            signal.kind,
            Metric(signal.metric),
            page=change.after is Phase.FIRING,
            is_verified=state.is_verified(key[0]),
            suspect=suspect,
            doubt=over_counts(attribute) if (attribute := state.session_attribute(key)) else "",
        )
        evidence = math.fsum(change.evidence.values())
        moved = DETECTORS[signal.kind].moved(change.states[signal])
    is_replaced = state.serving.is_replaced(key[0])
    if is_replaced and change.after in ALERTS:
        verdict = ALERTS[change.after]
    _send(
        state,
        entry,
        verdict,
        reason,
        at_us=change.at_us,
        episode=episode,
        signal=signal,
        states=change.states,
        moved=moved,
        evidence=evidence,
        threshold=change.threshold,
        suspect=suspect,
        ended=ended,
        quiet=is_replaced,
    )
    if is_replaced and change.after in ALERTS:
        _leave(state, entry, quiet=True)


def _suspect(state: FoldState, entry: SliceState, change: PhaseChange, signal: SignalKey) -> Suspect:
    """Return where to look first for the cause of slow answers: at the model, the engine or the requests.

    A mean counts as within its budget where its whole interval is. All traffic is judged as the slice is, by `signal`: against
    the budget, or against what was learned of it.
    """
    answers = {key: of for key, of in change.states.items() if not _is_slow(key)}
    if _drifts(answers):
        return Suspect.MODEL
    if not all(_within(of) for key, of in answers.items() if key.kind == BUDGET.kind):
        return Suspect.UNKNOWN
    everything = state.everything(state.model(entry.key[0]))
    whole = None if everything is None else state.slices.get((entry.key[0], everything))
    of_all = None if whole is None else whole.watch.states.get(signal)
    if of_all is None or not DETECTORS[signal.kind].live(of_all):
        return Suspect.UNKNOWN
    if whole is entry or _drifts({signal: of_all}):
        return Suspect.ENGINE
    return Suspect.TRAFFIC if _within(of_all) else Suspect.UNKNOWN


def _is_slow(signal: SignalKey) -> bool:
    """Return whether a signal is about how fast answers are, and not about what they are."""
    return signal_of(signal.metric).is_about_speed


def _drifts(states: Mapping[SignalKey, FloatArray]) -> bool:
    """Return whether the evidence of signals together is more than chance gives, without being enough for an alert."""
    evidence = math.fsum(DETECTORS[key.kind].evidence(state) for key, state in states.items())
    mass = math.fsum(DETECTORS[key.kind].page_mass(state) for key, state in states.items())
    return mass > 0 and evidence >= _SURE * mass


def _within(state: FloatArray) -> bool:
    """Return whether the mean of a signal that is tested against a budget is shown to be within it, over the recent window."""
    recent = BUDGET.recent(state)
    return recent is not None and not recent.missing and recent.high <= state[M] * state[SCALE]


def end(state: FoldState, key: Key, reason: str, ended: Ending) -> None:
    """Make a slice `unknown`, also where it alerts: nothing has shown it to be healthy. Its detectors start from the beginning."""
    entry = state.slices[key]
    if entry.watch.phase is Phase.WATCHING:
        _say(state, entry, Verdict.UNKNOWN, reason, touched=False)
        return
    _close(state, entry, reason, ended, quiet=entry.said not in ALERTS.values())
    entry.watch.stand_down(mass=state.clock.mass, at_us=state.exchange_us)
    _say(state, entry, Verdict.UNKNOWN, reason, touched=True)


def close(state: FoldState, key: Key, reason: str) -> None:
    """End the alert of a slice as a person decided; a slice that does not alert any more stays as it is."""
    entry = state.slices.get(key)
    if entry is not None and entry.watch.phase is not Phase.WATCHING:
        end(state, key, reason, Ending.CLOSED)
        state.note_closed(key, reason)


def _leave(state: FoldState, entry: SliceState, *, quiet: bool = False) -> None:
    """End the alert of a version that another one has replaced, until it is back: its detectors keep what they have."""
    _close(state, entry, words.REPLACED, Ending.REPLACED, quiet=quiet)
    _say(state, entry, Verdict.UNKNOWN, words.REPLACED, touched=True)


def _come_back(state: FoldState, entry: SliceState) -> None:
    """Open the alert again that ended because its version was replaced: the version serves again."""
    verdict = ALERTS[entry.watch.phase]
    _note_transition(state, entry, verdict, RETURNED, Episode.REOPEN)
    entry.say(verdict, RETURNED, at_us=state.now_us, fold_seq=state.fold_seq)
    state.table.dirty[entry.row] = True


def _close(state: FoldState, entry: SliceState, reason: str, ended: Ending, *, quiet: bool) -> None:
    """Note the end of an alert that no evidence ends."""
    _send(
        state,
        entry,
        Verdict.UNKNOWN,
        reason,
        at_us=state.now_us,
        episode=Episode.CLOSE,
        signal=entry.loudest(),
        states=entry.watch.states,
        moved=None,
        evidence=0.0,
        threshold=RESOLVED,
        ended=ended,
        quiet=quiet,
    )


def _end_of(state: FoldState, key: Key, ended: Ending) -> AlertEnd:
    """Return why an alert is over, with the versions that serve where its own was replaced."""
    if ended is not Ending.REPLACED:
        return AlertEnd(ended=ended)
    last_us = state.serving.row(key[0]).last_us
    return AlertEnd(ended=ended, last_seen_us=last_us, serving=tuple(state.serves_now(key[0])))


def _basis(state: FoldState, entry: SliceState) -> Basis:
    """Return what a verdict on a slice rests on; while that is the same, so is the verdict."""
    version_id, slice_id = entry.key
    survey = entry.watch.survey()
    counts = _NOTHING
    if survey.policy_id in state.catalog.policies:
        rates = state.rates(slice_id, survey.policy_id)
        counts = state.recent_counts(rates.strata, state.model(version_id))
    is_silent = _silent_s(state, entry) > state.limits.stale_after_s
    replaced, noise = state.serving.is_replaced(version_id), state.noise.too_much(entry.key)
    (n_items,), (n_unmeasured,) = state.unmeasured(rows_of([entry]))
    items = int(n_items), int(n_unmeasured)
    session_attribute, paused = state.session_attribute(entry.key), state.paused(version_id)
    fallen = state.missing.reason(state.model(version_id), slice_id)
    return survey, counts, replaced, noise, session_attribute, is_silent, items, paused, fallen


def _verdict(state: FoldState, entry: SliceState, phase: Phase) -> tuple[Verdict, str]:
    """Return the verdict on a slice in `phase`, and why."""
    survey, counts, replaced, noise, session_attribute, _, items, paused, fallen = _basis(state, entry)
    status = SliceStatus(
        phase=phase,
        evidence_ratio=entry.watch.doubt(state.thresholds),
        n_groups=survey.n_groups,
        waits=bool(_waits(np.asarray(survey.page_mass), np.asarray(survey.n_armed), state.limits)),
        silent_s=_silent_s(state, entry),
        counts=counts,
        replaced=replaced,
        paused=paused,
        n_missing=survey.missing,
        noise=noise,
        session_attribute=session_attribute,
        n_items=items[0],
        n_unmeasured=items[1],
        task=state.task(state.model(entry.key[0])),
        alarm=entry.reason if entry.said is ALERTS.get(phase) else "",
        closed=state.closed(entry.key),
        has_people=state.has_people(entry.key),
        fallen=fallen,
        asked=bool(state.table.asked[entry.row]),
    )
    return judge(status, state.limits)


def _silent_s(state: FoldState, entry: SliceState) -> float:
    return (state.now_us - entry.last_us) / MICROSECONDS


def _aggregate(
    state: FoldState, version_id: int, signal: SignalKey
) -> tuple[Verdict, WeightedEstimate | None, float | None]:
    """Return the verdict over all of a version's traffic, its estimate of a signal's metric, and what is accepted with noise."""
    everything = state.everything(state.model(version_id))
    entry = None if everything is None else state.slices.get((version_id, everything))
    if entry is None:
        return Verdict.UNKNOWN, None, None
    accepted = entry.watch.states.get(_accepted_by(signal))
    return (
        _verdict(state, entry, entry.watch.phase)[0],
        None if accepted is None else BUDGET.recent(accepted),
        None if accepted is None else float(accepted[M] * accepted[SCALE]),
    )


def _limit_s(state: FoldState, key: Key, signal: SignalKey, of: FloatArray) -> float | None:
    """Return the seconds above which an exchange counts as slow for a signal; None for other metrics."""
    if signal_of(signal.metric).form is not SignalForm.SLOW:
        return None
    return GROWTH.limit_s(of) if signal.kind == GROWTH.kind else state.budget(key[0]).latency_p99_s


def _accepted_by(signal: SignalKey) -> SignalKey:
    """Return the signal whose state has the accepted mean of another: its metric's budget, or itself where it has one."""
    return signal if signal.kind == GROWTH.kind else SignalKey(signal.metric, BUDGET.kind)


def _note_transition(
    state: FoldState, entry: SliceState, verdict: Verdict, reason: str, episode: Episode
) -> None:
    state.transitions.append(
        TransitionRow(
            model_version_id=entry.key[0],
            slice_id=entry.key[1],
            from_verdict=entry.said,
            to_verdict=verdict,
            at_us=state.now_us,
            fold_seq=state.fold_seq,
            episode=episode,
            metric=Metric(entry.loudest().metric),
            onset_us=state.now_us,
            reason=reason,
        )
    )


def _say(state: FoldState, entry: SliceState, verdict: Verdict, reason: str, *, touched: bool) -> None:
    """Note the verdict; where it changed between `ok` and `unknown`, as a transition."""
    changed = verdict is not entry.said
    if changed:
        _note_transition(state, entry, verdict, reason, Episode.NONE)
    if touched or changed or reason != entry.reason:
        entry.say(verdict, reason, at_us=state.now_us, fold_seq=state.fold_seq)
        state.table.dirty[entry.row] = True


def _send(
    state: FoldState,
    entry: SliceState,
    verdict: Verdict,
    reason: str,
    *,
    at_us: int,
    episode: Episode,
    signal: SignalKey,
    states: Mapping[SignalKey, FloatArray],
    moved: Onset | None,
    evidence: float,
    threshold: float,
    suspect: Suspect | None = None,
    ended: Ending | None = None,
    quiet: bool = False,
) -> None:
    """Note a change of verdict that is sent as an event, unless it is `quiet`; other parameters as in `transition_row`."""
    key, metric = entry.key, Metric(signal.metric)
    against = _accepted_by(signal)
    accepted, noise = states.get(against), entry.noise(against)
    version = state.catalog.versions[key[0]]
    row = transition_row(
        task=state.task(version.model),
        version=version,
        place=state.catalog.slices[key[1]],
        change=(entry.said, verdict),
        reason=reason,
        metric=metric,
        kind=signal.kind,
        state=states[signal],
        budget=None if accepted is None else float((accepted[M] - noise) * accepted[SCALE]),
        noise=0.0 if accepted is None else float(noise * accepted[SCALE]),
        n_groups=max(int(signal_state[N_TOTAL]) for signal_state in states.values()),
        moved=moved,
        evidence=evidence,
        threshold=threshold,
        aggregate=_aggregate(state, key[0], signal),
        episode=episode,
        at_us=at_us,
        fold_seq=state.fold_seq,
        latency_budget_s=_limit_s(state, key, signal, states[signal]),
        suspect=suspect,
        end=None if ended is None else _end_of(state, key, ended),
        quiet=quiet,
    )
    state.transitions.append(row)
    entry.alert(verdict, reason, at_us=at_us, evidence=evidence, threshold=threshold)
