"""Explanation of alerts that open or escalate, from the exchanges compared before and since the onset.

`quantdrift.monitor.explain.before_window` chooses the window before the onset.

It runs in the leader's transaction, between the fold and the writing, and must neither break nor delay it: reads are
limited in rows and time and are rolled back separately, only `MOST` alerts of one fold are explained, pages first, and
an alert that is not explained is sent all the same and says so.

The same database gives the same explanation: windows are in event time, only rows count that were folded no later than
the change of verdict, and related alerts are those that are open after its batch. Only doubts about the configuration
are those of the present.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.clock import Clock
from quantdrift.core.clusters import CLUSTER_KEY
from quantdrift.core.config.schema import Config
from quantdrift.core.diagnosable import build_of
from quantdrift.core.errors import RetryError
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.signals import signal_of
from quantdrift.core.slices import ALL, is_declared
from quantdrift.core.tasks import COUNTED, LABELS, MEASURES, Build
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.explain.mix import MoveCause, MovePart
from quantdrift.drift.explain.moves import MeasuredItems, Moves, moves
from quantdrift.facts import figures
from quantdrift.facts.explanation import FEWEST_BEFORE, Begin, DamageCause, Explanation
from quantdrift.facts.words.cluster import mostly, sets_apart
from quantdrift.monitor.explain.before_window import BeforeWindow, find_before_window
from quantdrift.monitor.explain.related_alerts import AlertingSlices, explains, smallest
from quantdrift.monitor.explain.sample import (
    ComparedValue,
    WindowSample,
    damage_between,
    measure_of,
    mix_between,
    new_engines,
    new_sidecars,
    new_versions,
    versions_around,
)
from quantdrift.monitor.fold.slice_state import Key
from quantdrift.storage.alerts.evidence import DetailItem, Evidence
from quantdrift.storage.fold_rows import Catalog, Episode, FoldResult, TransitionRow, VersionRow, from_us

MOST = 16  # alerts of one fold that are explained
STATEMENT_S = 1.0
FOLD_S = 3.0
MOST_LARGER = 4  # larger alerting slices that a new alert is tested to explain
_EPISODES = (Episode.OPEN, Episode.ESCALATE)
_LOG = logging.getLogger(__name__)
MOST_MEASURES: Final = 64


class _Explained(msgspec.Struct, frozen=True, kw_only=True):
    """An explanation, and the slices of earlier alerts that the new one explains with the names of what explains each."""

    explanation: Explanation
    explained: dict[int, str] = {}


class Explainer:
    """The builder of explanations.

    Parameters
    ----------
    config
        Budgets and the tolerance of learned baselines.
    clock
        For the time limit.
    count
        Called with the outcome of each alert: `explained`, `late`, `failed` or `left_out`.
    """

    def __init__(self, config: Config, clock: Clock, count: Callable[[str], None]) -> None:
        self._config = config
        self._clock = clock
        self._count = count

    async def explain(self, evidence: Evidence, outcome: FoldResult, catalog: Catalog) -> FoldResult:
        """Return the outcome of a fold with explanations in the alerts that open or escalate.

        Parameters
        ----------
        evidence
            Reads inside the transaction that claimed the batches.
        """
        if all(row.episode is Episode.NONE for row in outcome.transitions):
            return outcome
        ending_s = self._clock.monotonic_s() + FOLD_S
        versions = sorted({row.model_version_id for row in outcome.transitions})
        try:
            async with evidence.bounded(STATEMENT_S):
                alerting = AlertingSlices(await evidence.alerting(versions), outcome.transitions)
        except RetryError as error:
            _LOG.warning("open alerts cannot be read, so new ones are not related to them: %s", error)
            alerting = AlertingSlices((), outcome.transitions)
        indices = [index for index, row in enumerate(outcome.transitions) if row.episode in _EPISODES]
        indices.sort(key=lambda index: outcome.transitions[index].to_verdict is not Verdict.FIRING)
        explained = {}
        for number, index in enumerate(indices):
            row = outcome.transitions[index]
            explained[index] = await self._bounded(
                evidence, row, alerting, catalog, number=number, ending_s=ending_s
            )
            await asyncio.sleep(0)  # a probe of the admin port waits for one alert at most
        return _with_explanations(outcome, explained, alerting, catalog)

    async def _bounded(
        self,
        evidence: Evidence,
        row: TransitionRow,
        alerting: AlertingSlices,
        catalog: Catalog,
        *,
        number: int,
        ending_s: float,
    ) -> _Explained:
        """Explain one alert, or say why not."""
        why, outcome = "", "explained"
        if number >= MOST:
            why, outcome = f"more than {MOST} alerts opened at once", "left_out"
        elif self._clock.monotonic_s() >= ending_s:
            why, outcome = "the database answers too slowly", "late"
        else:
            try:
                async with evidence.bounded(STATEMENT_S):
                    explained = await self._explained(evidence, row, alerting, catalog)
            except RetryError as error:
                _LOG.warning("alert of %s is not explained: %s", row.alert.slice.name, error)
                why, outcome = "the database did not answer in time", "late"
            except Exception:  # noqa: BLE001 - an observer: an alert goes out, explained or not
                _LOG.exception("alert of %s could not be explained", row.alert.slice.name)
                why, outcome = "an error in quantdrift; see the monitor's log", "failed"
        self._count(outcome)
        inputs = await _inputs(evidence, row, catalog)
        if not why:
            return msgspec.structs.replace(
                explained, explanation=msgspec.structs.replace(explained.explanation, **inputs)
            )
        # An alert that gets worse keeps the explanation that it has.
        stored = alerting.stored_explanation((row.model_version_id, row.slice_id))
        keeps = row.episode is Episode.ESCALATE and stored.n_window_after
        return _Explained(explanation=stored if keeps else Explanation(unexplained=why, **inputs))

    async def _explained(
        self, evidence: Evidence, row: TransitionRow, alerting: AlertingSlices, catalog: Catalog
    ) -> _Explained:
        version = catalog.versions[row.model_version_id]
        everything = next(
            entry.id
            for entry in catalog.slices.values()
            if entry.model == version.model and entry.name == ALL and not entry.where
        )
        cap = self._config.budget(version.model).cap
        measure = measure_of(row.alert.evidence, cap)
        before_window = await find_before_window(evidence, row, catalog.versions)
        before, past = WindowSample(before_window.items), WindowSample(before_window.past)
        after = await _items_since(evidence, row, row.slice_id)
        whole_before, whole_after = before, after
        if row.slice_id != everything:
            whole_before = await _items_before(evidence, row, before_window, everything)
            whole_after = await _items_since(evidence, row, everything)

        is_slow = signal_of(row.metric).is_about_speed
        # What the reference runs on says nothing of how fast the candidate is.
        windows = () if is_slow else (past, after)
        batches = {item.batch_id for window in windows for item in window.items}
        engines = await evidence.provenance(sorted(batches))
        new = versions_around(catalog, row, await evidence.stored_at_us(row.fold_seq))
        changes = [
            *new_versions(new, row.model_version_id),
            *new_engines(past, after, row.onset_us, engines),
            *new_sidecars(past, after, row.onset_us),
        ]
        tolerance = self._config.monitor.tolerance
        alerts = alerting.at(row)
        sizes = whole_after.sizes()
        declared = {entry for entry in alerts if is_declared(self._config, catalog.slices[entry].key)}
        by = smallest(
            after, alerts, sizes, slice_id=row.slice_id, cap=cap, tolerance=tolerance, declared=declared
        )
        explained: dict[int, str] = {}
        for larger in alerting.larger(row, after, sizes, declared)[:MOST_LARGER]:
            window = whole_after
            if larger != everything:
                window = await _items_since(evidence, row, larger)
            if together := explains(
                window,
                alerts,
                sizes,
                slice_id=row.slice_id,
                larger=larger,
                cap=cap,
                tolerance=tolerance,
                declared=declared,
            ):
                explained[larger] = _names(together, catalog)
        explained = alerting.without_better(row, explained, after.n_exchanges)
        explanation = (
            _speed(before, after, whole_after, row)
            if is_slow
            else _aggregate(findings(before, after, measure, cap), whole_before, whole_after, measure)
        )
        other = before_window.version != row.model_version_id
        explanation = msgspec.structs.replace(
            explanation,
            compared_with=before_window.words,
            compared_version=catalog.versions[before_window.version].candidate_version if other else None,
            changes=tuple(changes),
            begin=Begin.NEW_VERSION if version in new else None,
            **_when_paged(after, row, has_people=bool(self._config.sampling.sticky_header)),
            build=self._build(version, engines.values()),
            divergence_is=_divergence_of(after, row),
            doubt=await evidence.doubt(row.model_version_id),
            explained_by=_names(by, catalog) if by else None,
            explained_by_id=by[0] if by else None,
            explains=tuple(catalog.slices[entry].name for entry in explained),
            explains_ids=tuple(explained),
        )
        moved = Moves() if is_slow else await _moved(evidence, row, before_window)
        return _Explained(
            explanation=msgspec.structs.replace(
                explanation,
                moved=tuple(entry.name for entry in moved.found),
                moved_before=tuple(entry.before for entry in moved.found),
                moved_after=tuple(entry.after for entry in moved.found),
                n_measures=moved.n_measures or None,
            ),
            explained=explained,
        )

    def _build(self, version: VersionRow, engines: Iterable[Mapping[str, str]]) -> str | None:
        """Return what a version is made of; None: the configuration does not know its model."""
        model = self._config.model(version.model)
        trees = any(engine.get("build") == Build.TREES for engine in engines)
        return None if model is None else build_of(model, version.candidate_version, trees=trees).value


async def _inputs(evidence: Evidence, row: TransitionRow, catalog: Catalog) -> dict[str, Any]:
    """Return what sets a learned slice apart, by field of the explanation: a row of the database, which is there where the rest was late."""
    if all(part.key != CLUSTER_KEY for part in catalog.slices[row.slice_id].where):
        return {}
    try:
        async with evidence.bounded(STATEMENT_S):
            cluster = await evidence.cluster(row.model_version_id, row.slice_id)
    except RetryError as error:
        _LOG.warning("what sets %s apart cannot be read: %s", row.alert.slice.name, error)
        return {}
    return {"sets_apart": sets_apart(cluster) or None, "mostly": mostly(cluster) or None} if cluster else {}


def _speed(before: WindowSample, after: WindowSample, whole: WindowSample, row: TransitionRow) -> Explanation:
    """Return what the windows say of a slow candidate: all other traffic, and the size of its requests.

    Margins and outputs explain nothing of it.
    """
    limit_s = row.alert.evidence.latency_budget_s
    slow, n = (None, 0) if limit_s is None else whole.share_slow(limit_s, without=row.slice_id)
    return Explanation(
        n_window_before=before.n_exchanges,
        n_window_after=after.n_exchanges,
        slow_elsewhere=slow,
        n_elsewhere=n or None,
        items_before=before.mean_items() if before.n_exchanges >= FEWEST_BEFORE else None,
        items_after=after.mean_items(),
    )


def _when_paged(after: WindowSample, row: TransitionRow, *, has_people: bool) -> dict[str, Any]:
    """Return the figures of the time from the onset to the alert, as the fields of an explanation that have them.

    The newest items were read, a limited number: a rate is that of the time since the oldest of them.

    Parameters
    ----------
    has_people
        Whether requests can say who sends them; people are counted where each of these does.
    """
    if not after.items:
        return {}
    event, at = row.alert, from_us(row.at_us)
    has_people = has_people and all(item.group != item.exchange for item in after.items)
    begin = from_us(min(item.captured_us for item in after.items))
    scope = figures.Scope(
        window=figures.when_paged(from_us(row.onset_us), at),
        of=figures.Subject(model=event.slice.model, version=event.slice.version, slice=event.slice.name),
        as_of=at,
    )
    counted = figures.Counted(
        n=len(after.items),
        n_people=int(after.cluster.max()) + 1 if has_people else None,
        requests=float(after.weight.sum()),
        served=figures.Served(begin=begin, end=max(begin, at)),
    )
    share = figures.changed_share(scope, counted, after.flips())
    daily = figures.requests_per_day(scope, counted)
    return {
        "n_answers": counted.n,
        "n_people": counted.n_people,
        **({"changed": share.value, "changed_low": share.low, "changed_high": share.high} if share else {}),
        **({"requests_per_day": daily.value, "basis": daily.basis or None} if daily else {}),
    }


def _divergence_of(after: WindowSample, row: TransitionRow) -> str | None:
    """Return the name of the divergence of a slice's answers; None where that of the task says it."""
    of_task = MEASURES[row.alert.slice.task]
    name = of_task.of(Counter(item.measure for item in after.items if item.measure)).name
    return None if name == of_task.name else name


def _names(slice_ids: Sequence[int], catalog: Catalog) -> str:
    """Return the names of slices as they stand in a sentence."""
    *some, last = (catalog.slices[slice_id].name for slice_id in slice_ids)
    return f"{', '.join(some)} and {last}" if some else last


async def _items_before(
    evidence: Evidence, row: TransitionRow, before_window: BeforeWindow, slice_id: int
) -> WindowSample:
    items = await evidence.items(
        version=before_window.version,
        slice_id=slice_id,
        begin_us=before_window.begin_us,
        end_us=before_window.end_us,
        fold_seq=row.fold_seq,
    )
    return WindowSample(items)


async def _items_since(evidence: Evidence, row: TransitionRow, slice_id: int) -> WindowSample:
    items = await evidence.items(
        version=row.model_version_id,
        slice_id=slice_id,
        begin_us=row.onset_us,
        end_us=row.at_us + 1,
        fold_seq=row.fold_seq,
    )
    return WindowSample(items)


async def _moved(evidence: Evidence, row: TransitionRow, before_window: BeforeWindow) -> Moves:
    """Return the other measures that moved in the slice; none where the database is too slow for this part alone."""
    try:
        async with evidence.bounded(STATEMENT_S):
            before = await evidence.details(
                version=before_window.version,
                slice_id=row.slice_id,
                begin_us=before_window.begin_us,
                end_us=before_window.end_us,
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
        _LOG.warning("other measures of an alert's slice could not be read: %s", error)
        return Moves()
    return other_moves(before, after)


def findings(before: WindowSample, after: WindowSample, measure: ComparedValue, cap: float) -> Explanation:
    """Return the part of an explanation that follows from the slice's own windows.

    Parameters
    ----------
    measure
        The measure that decided.
    cap
        A divergence above it counts as this much.
    """
    explanation = Explanation(n_window_before=before.n_exchanges, n_window_after=after.n_exchanges)
    if (not_finite := after.not_finite()) > 0:
        # A share of very few exchanges would be taken for a finding.
        earlier = before.not_finite() if before.n_exchanges >= FEWEST_BEFORE else None
        explanation = msgspec.structs.replace(explanation, not_finite=not_finite, not_finite_before=earlier)
    if before.items and after.items and not (before.has_margins or after.has_margins):
        return explanation  # only classification has margins
    damage = damage_between(before, after, measure)
    if damage is None or damage.cause is DamageCause.TOO_FEW:
        # Figures of very few exchanges would be taken for findings.
        return msgspec.structs.replace(explanation, cause=DamageCause.TOO_FEW.value)
    explanation = msgspec.structs.replace(
        explanation,
        cause=damage.cause.value,
        **_estimates(damage=damage.at_equal_margins, shift=damage.by_margins, unseen=damage.unseen),
        low_margin_before=damage.low_margin_before,
        low_margin_after=damage.low_margin_after,
    )
    mean_divergence = ComparedValue(metric=Metric.DIVERGENCE, kind=BUDGET.kind, cap=cap)
    decided_by_it = measure.metric is Metric.DIVERGENCE and measure.above is None
    if not decided_by_it and (divergence := damage_between(before, after, mean_divergence)):
        explanation = msgspec.structs.replace(
            explanation,
            **_estimates(
                divergence_damage=divergence.at_equal_margins,
                divergence_shift=divergence.by_margins,
                divergence_unseen=divergence.unseen,
            ),
        )
    return explanation


def _aggregate(
    explanation: Explanation, before: WindowSample, after: WindowSample, measure: ComparedValue
) -> Explanation:
    """Return an explanation with the split of the move of all traffic."""
    mix = mix_between(before, after, measure)
    if mix is None or mix.cause is MoveCause.TOO_FEW:
        return msgspec.structs.replace(explanation, aggregate_cause=MoveCause.TOO_FEW.value)
    return msgspec.structs.replace(
        explanation,
        aggregate_cause=mix.cause.value,
        **_estimates(
            aggregate_move=mix.move,
            aggregate_within=mix.within,
            aggregate_mix=mix.mix,
            aggregate_unseen=mix.unseen,
        ),
    )


def _estimates(**parts: MovePart) -> dict[str, float]:
    """Return each part and its standard error by their fields of `Explanation`."""
    return {name: part.value for name, part in parts.items()} | {
        f"{name}_se": part.se for name, part in parts.items()
    }


def _with_explanations(
    outcome: FoldResult, found: dict[int, _Explained], alerting: AlertingSlices, catalog: Catalog
) -> FoldResult:
    """Return the outcome with explanations in its alerts; what concerns an earlier alert becomes a note on it."""
    rows, notes = list(outcome.transitions), alerting.notes_on_ended()
    explanations = {index: found[index].explanation for index in sorted(found)}
    by_slice: dict[Key, list[int]] = {}
    for index in explanations:
        by_slice.setdefault((rows[index].model_version_id, rows[index].slice_id), []).append(index)
    earlier: list[tuple[TransitionRow, int]] = []
    for index, explanation in list(explanations.items()):
        row, by = rows[index], explanation.explained_by_id
        if by is None:
            continue
        candidates = by_slice.get((row.model_version_id, by), [])
        if same_batch := [other for other in candidates if rows[other].fold_seq == row.fold_seq]:
            last = same_batch[-1]
            explanations[last] = _explaining(explanations[last], row.slice_id, catalog)
        else:
            earlier.append((row, by))
    updated: dict[Key, Explanation] = {}
    for row, by in earlier:
        key = (row.model_version_id, by)
        preceding = [other for other in by_slice.get(key, []) if rows[other].fold_seq < row.fold_seq]
        before = updated.get(key) or (
            explanations[preceding[-1]] if preceding else alerting.stored_explanation(key)
        )
        updated[key] = _explaining(before, row.slice_id, catalog)
        notes += alerting.notes_on_explaining(row, by, updated[key])
    for index, explanation in explanations.items():
        row = rows[index]
        notes += alerting.notes_on_explained(row, found[index].explained)
        rows[index] = with_explanation(row, explanation)
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
    """Return an alert with its explanation."""
    event = row.alert
    explanation = msgspec.structs.replace(
        explanation,
        begin=explanation.begin or event.explanation.begin or Begin.CHANGED,
    )
    return msgspec.structs.replace(row, event=msgspec.structs.replace(event, explanation=explanation))


def other_moves(before: Sequence[DetailItem], after: Sequence[DetailItem]) -> Moves:
    """Return the measures that moved between two windows; of more than 64, those that most items have are compared."""
    figures = [[_figures(item.detail) for item in window] for window in (before, after)]
    n_items = Counter(name for window in figures for of_item in window for name in of_item)
    names = [
        name for name, _ in sorted(n_items.items(), key=lambda pair: (-pair[1], pair[0]))[:MOST_MEASURES]
    ]
    old, new = (_measured(window, rows, names) for window, rows in zip((before, after), figures, strict=True))
    return moves(old, new)


def _figures(detail: str | None) -> dict[str, float]:
    """Return the measures of an item by name; those of several outputs are named `measure.output`."""
    figures: dict[str, float] = {}
    measured: Mapping[str, Any] = msgspec.json.decode(detail) if detail else {}
    for name, value in measured.items():
        for key, figure in value.items() if isinstance(value, dict) else (("", value),):
            if isinstance(figure, (bool, int, float)) and name not in LABELS:
                figures[f"{name}.{key}" if key else name] = float(figure)
    return figures


def _measured(
    items: Sequence[DetailItem], figures: Sequence[Mapping[str, float]], names: Sequence[str]
) -> MeasuredItems:
    parts = Counter(item.exchange for item in items)
    numbers: dict[str, int] = {}
    return MeasuredItems(
        weight=np.array([1.0 / (item.pi * parts[item.exchange]) for item in items]),
        cluster=np.array([numbers.setdefault(item.group, len(numbers)) for item in items], dtype=np.int64),
        values={
            name: np.array([of_item.get(name, 0.0 if name in COUNTED else np.nan) for of_item in figures])
            for name in names
        },
    )
