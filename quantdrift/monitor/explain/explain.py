"""Explains alerts as they open and escalate, from what was compared before and since the onset.

What before is, `quantdrift.monitor.explain.before_window` decides.

It belongs to the leader's transaction, between the fold and the writing, and must neither break nor delay it: reads
are bounded in rows and time and undone alone, only so many alerts of one fold are explained, pages first, and an alert
that is not explained says so and goes out.

The same record gives the same explanation: windows are of event time, rows count that were folded no later than the
change of verdict, and the alerts beside it are those that stand after its batch. What is doubted of the configuration alone
is as of now.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import RetryError
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.slices import ALL, EVERYTHING
from quantdrift.core.tasks import Task
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.explain.damage import DamageCause
from quantdrift.drift.explain.diagnosis import Aggregate, Begin
from quantdrift.drift.explain.mix import FEWEST_BEFORE, Cause
from quantdrift.drift.explain.moves import Moves
from quantdrift.monitor.explain.before_window import BeforeWindow, yardstick
from quantdrift.monitor.explain.other_measures import beside
from quantdrift.monitor.explain.related_alerts import AlertingSlices, explains, smallest
from quantdrift.monitor.explain.sample import (
    Measure,
    WindowSample,
    damaged,
    measure_of,
    mixed,
    new_engines,
    new_sidecars,
    new_versions,
    versions_around,
)
from quantdrift.monitor.fold.alert_text import advice, sentences
from quantdrift.monitor.fold.slice_state import Key
from quantdrift.storage.monitor.evidence import Evidence
from quantdrift.storage.monitor.explanation import Explanation
from quantdrift.storage.monitor.rows import Catalog, Episode, Outcome, TransitionRow

MOST = 16  # alerts of one fold that are explained
STATEMENT_S = 1.0
FOLD_S = 3.0
MOST_LARGER = 4  # larger alerting slices that a new alert is held against
_EPISODES = (Episode.OPEN, Episode.ESCALATE)
_LOG = logging.getLogger(__name__)


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """An explanation, and the earlier alerts that the new one explains."""

    explanation: Explanation
    explained: tuple[int, ...] = ()


class Explainer:
    """Puts explanations together.

    Parameters
    ----------
    config
        Budgets and the tolerance of learned baselines.
    clock
        For the bound in time.
    count
        Told what became of each alert: `explained`, `late`, `failed` or `left_out`.
    """

    def __init__(self, config: Config, clock: Clock, count: Callable[[str], None]) -> None:
        self._config = config
        self._clock = clock
        self._count = count

    async def explain(self, evidence: Evidence, outcome: Outcome, catalog: Catalog) -> Outcome:
        """Return what is to be written with explanations in the alerts that open or escalate.

        Parameters
        ----------
        evidence
            Inside the transaction that claimed the batches.
        outcome, catalog
            Of the fold.
        """
        if all(row.episode is Episode.NONE for row in outcome.transitions):
            return outcome
        ending_s = self._clock.monotonic_s() + FOLD_S
        versions = sorted({row.model_version_id for row in outcome.transitions})
        try:
            async with evidence.bounded(STATEMENT_S):
                standing = AlertingSlices(await evidence.alerting(versions), outcome.transitions)
        except RetryError as error:
            _LOG.warning("alerts are not explained: %s", error)
            standing = AlertingSlices((), outcome.transitions)
        places = [place for place, row in enumerate(outcome.transitions) if row.episode in _EPISODES]
        places.sort(key=lambda place: outcome.transitions[place].to_verdict is not Verdict.FIRING)
        found = {}
        for number, place in enumerate(places):
            row = outcome.transitions[place]
            found[place] = await self._bounded(
                evidence, row, standing, catalog, number=number, ending_s=ending_s
            )
            await asyncio.sleep(0)  # a probe of the admin port waits for one alert at most
        return _told(outcome, found, standing, catalog)

    async def _bounded(
        self,
        evidence: Evidence,
        row: TransitionRow,
        standing: AlertingSlices,
        catalog: Catalog,
        *,
        number: int,
        ending_s: float,
    ) -> _Found:
        """Explain one alert, or say why not."""
        why, outcome = "", "explained"
        if number >= MOST:
            why, outcome = f"more than {MOST} alerts came at once", "left_out"
        elif self._clock.monotonic_s() >= ending_s:
            why, outcome = "the record answers too slowly", "late"
        else:
            try:
                async with evidence.bounded(STATEMENT_S):
                    found = await self._explained(evidence, row, standing, catalog)
            except RetryError as error:
                _LOG.warning("an alert is not explained: %s", error)
                why, outcome = "the record did not answer in time", "late"
            except Exception:  # noqa: BLE001 - an observer: an alert goes out, explained or not
                _LOG.exception("an alert could not be explained")
                why, outcome = "a fault in quantdrift, which its log shows", "failed"
        self._count(outcome)
        return _Found(explanation=Explanation(unexplained=why)) if why else found

    async def _explained(
        self, evidence: Evidence, row: TransitionRow, standing: AlertingSlices, catalog: Catalog
    ) -> _Found:
        version = catalog.versions[row.model_version_id]
        everything = next(
            one.id
            for one in catalog.slices.values()
            if one.model == version.model and one.name == ALL and not one.where
        )
        cap = self._config.budget(version.model).cap
        measure = measure_of(row.details, cap)
        held_against = await yardstick(evidence, row, catalog.versions)
        before, past = WindowSample(held_against.items), WindowSample(held_against.past)
        after = await _since(evidence, row, row.slice_id)
        whole_before, whole_after = before, after
        if row.slice_id != everything:
            whole_before = await _before(evidence, row, held_against, everything)
            whole_after = await _since(evidence, row, everything)

        batches = {item.batch_id for scene in (past, after) for item in scene.items}
        came = versions_around(catalog, row, await evidence.stored_at_us(row.fold_seq))
        changes = [
            *new_versions(came, row.model_version_id),
            *new_engines(past, after, row.onset_us, await evidence.provenance(sorted(batches))),
            *new_sidecars(past, after, row.onset_us),
        ]
        tolerance = self._config.monitor.tolerance
        others = standing.at(row)
        sizes = whole_after.sizes()
        by = smallest(after, others, sizes, mine=row.slice_id, cap=cap, tolerance=tolerance)
        explained = []
        for larger in standing.larger(row, after, sizes)[:MOST_LARGER]:
            scene = whole_after
            if larger != everything:
                scene = await _since(evidence, row, larger)
            if explains(scene, others, sizes, mine=row.slice_id, larger=larger, cap=cap, tolerance=tolerance):
                explained.append(larger)
        explanation = _aggregate(findings(before, after, measure, cap), whole_before, whole_after, measure)
        other = held_against.version != row.model_version_id
        explanation = msgspec.structs.replace(
            explanation,
            compared_with=held_against.words,
            compared_version=catalog.versions[held_against.version].candidate_version if other else None,
            changes=tuple(changes),
            begin=Begin.NEW_VERSION if version in came else None,
            doubt=await evidence.doubt(row.model_version_id),
            explained_by=None if by is None else catalog.slices[by].name,
            explained_by_id=by,
            explains=tuple(catalog.slices[one].name for one in explained),
            explains_ids=tuple(explained),
        )
        moved = await _moved(evidence, row, held_against)
        return _Found(
            explanation=msgspec.structs.replace(
                explanation,
                moved=tuple(one.name for one in moved.found),
                moved_before=tuple(one.before for one in moved.found),
                moved_after=tuple(one.after for one in moved.found),
                n_measures=moved.n_measures or None,
            ),
            explained=tuple(explained),
        )


async def _before(
    evidence: Evidence, row: TransitionRow, held_against: BeforeWindow, slice_id: int
) -> WindowSample:
    items = await evidence.items(
        version=held_against.version,
        slice_id=slice_id,
        begin_us=held_against.begin_us,
        end_us=held_against.end_us,
        fold_seq=row.fold_seq,
    )
    return WindowSample(items)


async def _since(evidence: Evidence, row: TransitionRow, slice_id: int) -> WindowSample:
    items = await evidence.items(
        version=row.model_version_id,
        slice_id=slice_id,
        begin_us=row.onset_us,
        end_us=row.at_us + 1,
        fold_seq=row.fold_seq,
    )
    return WindowSample(items)


async def _moved(evidence: Evidence, row: TransitionRow, held_against: BeforeWindow) -> Moves:
    """Return what else moved in the slice; nothing where the record does not tell in time: the rest stands without it."""
    try:
        async with evidence.bounded(STATEMENT_S):
            before = await evidence.details(
                version=held_against.version,
                slice_id=row.slice_id,
                begin_us=held_against.begin_us,
                end_us=held_against.end_us,
                fold_seq=row.fold_seq,
            )
            after = await evidence.details(
                version=row.model_version_id,
                slice_id=row.slice_id,
                begin_us=row.onset_us,
                end_us=row.at_us + 1,
                fold_seq=row.fold_seq,
            )
    except RetryError as error:
        _LOG.warning("an alert does not tell what else moved: %s", error)
        return Moves()
    return beside(before, after)


def findings(before: WindowSample, after: WindowSample, measure: Measure, cap: float) -> Explanation:
    """Return what the slice's own windows tell.

    Parameters
    ----------
    before, after
        The windows.
    measure
        What decided.
    cap
        Above it a divergence counts as much.
    """
    explanation = Explanation(n_window_before=before.n_exchanges, n_window_after=after.n_exchanges)
    if (not_finite := after.not_finite()) > 0:
        # A share of a handful would be taken for a finding.
        earlier = before.not_finite() if before.n_exchanges >= FEWEST_BEFORE else None
        explanation = msgspec.structs.replace(explanation, not_finite=not_finite, not_finite_before=earlier)
    if before.items and after.items and not (before.has_margins or after.has_margins):
        return explanation  # no task but classification knows close calls
    found = damaged(before, after, measure)
    if found is None or found.cause is DamageCause.TOO_FEW:
        # Figures of a handful would be taken for findings.
        return msgspec.structs.replace(explanation, cause=DamageCause.TOO_FEW.value)
    explanation = msgspec.structs.replace(
        explanation,
        cause=found.cause.value,
        damage=found.at_equal_margins.value,
        damage_se=found.at_equal_margins.se,
        shift=found.by_margins.value,
        shift_se=found.by_margins.se,
        unseen=found.unseen.value,
        unseen_se=found.unseen.se,
        low_margin_before=found.low_margin_before,
        low_margin_after=found.low_margin_after,
    )
    mean_divergence = Measure(metric=Metric.DIVERGENCE, kind=BUDGET.kind, cap=cap)
    decided_by_it = measure.metric is Metric.DIVERGENCE and measure.above is None
    if not decided_by_it and (divergence := damaged(before, after, mean_divergence)):
        explanation = msgspec.structs.replace(
            explanation,
            divergence_damage=divergence.at_equal_margins.value,
            divergence_damage_se=divergence.at_equal_margins.se,
            divergence_shift=divergence.by_margins.value,
            divergence_shift_se=divergence.by_margins.se,
            divergence_unseen=divergence.unseen.value,
            divergence_unseen_se=divergence.unseen.se,
        )
    return explanation


def _aggregate(
    explanation: Explanation, before: WindowSample, after: WindowSample, measure: Measure
) -> Explanation:
    """Return an explanation with what the windows of all traffic tell."""
    found = mixed(before, after, measure)
    if found is None or found.cause is Cause.TOO_FEW:
        return msgspec.structs.replace(explanation, aggregate_cause=Cause.TOO_FEW.value)
    return msgspec.structs.replace(
        explanation,
        aggregate_cause=found.cause.value,
        aggregate_move=found.move.value,
        aggregate_move_se=found.move.se,
        aggregate_within=found.within.value,
        aggregate_within_se=found.within.se,
        aggregate_mix=found.mix.value,
        aggregate_mix_se=found.mix.se,
        aggregate_unseen=found.unseen.value,
        aggregate_unseen_se=found.unseen.se,
    )


def _told(outcome: Outcome, found: dict[int, _Found], standing: AlertingSlices, catalog: Catalog) -> Outcome:
    """Put explanations into the alerts; what concerns an earlier alert becomes a note on it."""
    rows, notes = list(outcome.transitions), standing.endings()
    explanations = {place: found[place].explanation for place in sorted(found)}
    places: dict[Key, list[int]] = {}
    for place in explanations:
        places.setdefault((rows[place].model_version_id, rows[place].slice_id), []).append(place)
    earlier: list[tuple[TransitionRow, int]] = []
    for place, explanation in list(explanations.items()):
        row, by = rows[place], explanation.explained_by_id
        if by is None:
            continue
        theirs = places.get((row.model_version_id, by), [])
        if together := [one for one in theirs if rows[one].fold_seq == row.fold_seq]:
            last = together[-1]
            explanations[last] = _explaining(explanations[last], row.slice_id, catalog)
        else:
            earlier.append((row, by))
    told: dict[Key, Explanation] = {}
    for row, by in earlier:
        key = (row.model_version_id, by)
        known = [one for one in places.get(key, []) if rows[one].fold_seq < row.fold_seq]
        before = told.get(key) or (explanations[known[-1]] if known else standing.told(key))
        told[key] = _explaining(before, row.slice_id, catalog)
        notes += standing.explains(row, by, told[key])
    for place, explanation in explanations.items():
        row = rows[place]
        notes += standing.explained(row, found[place].explained, catalog.slices[row.slice_id].name)
        rows[place] = with_explanation(row, explanation)
    return msgspec.structs.replace(outcome, transitions=tuple(rows), notes=tuple(notes))


def _explaining(explanation: Explanation, larger: int, catalog: Catalog) -> Explanation:
    """Return an explanation of a slice that also explains `larger`."""
    if larger in explanation.explains_ids:
        return explanation
    return msgspec.structs.replace(
        explanation,
        explains=(*explanation.explains, catalog.slices[larger].name),
        explains_ids=(*explanation.explains_ids, larger),
    )


def with_explanation(row: TransitionRow, explanation: Explanation) -> TransitionRow:
    """Return an alert with its explanation, in figures and in words, and with the advice that follows from it."""
    details = row.details
    task = Task(details.get("task", Task.CLASSIFICATION))  # what an earlier release has told says none
    said = sentences(explanation, row.metric, details.get("detector", BUDGET.kind), task)
    begin = explanation.begin or details.get("begin", Begin.CHANGED)
    explanation = msgspec.structs.replace(explanation, begin=begin)
    told = {
        "advice": advice(
            row.metric,
            task,
            Aggregate(
                verdict=Verdict(details["aggregate_verdict"]),
                mean=details.get("aggregate_mean"),
                accepted=details.get("aggregate_accepted"),
                itself=details["predicate"] == EVERYTHING,
            ),
            details["onset"],
            begin=Begin(begin),
            n_before=details.get("n_history", 0),
            version=details["version"],
            cause=explanation.cause,
            explained_by=explanation.explained_by,
        )
    }
    incident = explanation.explained_by or details["slice"]
    told |= msgspec.structs.replace(explanation, explanation=said, incident=incident).attributes()
    return msgspec.structs.replace(row, details={**details, **told})
