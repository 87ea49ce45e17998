"""The fold's writes: states, verdicts, alerts, transitions, outbox, roll-ups and its position, in one transaction."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Final

import msgspec
from sqlalchemy import TextClause, func, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts.events import AlertEvent, AlertExamples, event_of
from quantdrift.facts.words.alert import text_of
from quantdrift.facts.words.steps import Ways
from quantdrift.storage.alerts.alerts import DETAILS, LAST_EVENT, RELATED, escalate
from quantdrift.storage.alerts.examples import examples
from quantdrift.storage.fold.models import write_positions
from quantdrift.storage.fold_rows import (
    BaselineRow,
    DetectorRow,
    Episode,
    FoldResult,
    Position,
    RollupRow,
    ServingRow,
    SessionRow,
    TransitionRow,
    VerdictRow,
    from_us,
)
from quantdrift.storage.incidents.writing import write_incidents
from quantdrift.storage.noise import write_floors, write_noise_change, write_pairs
from quantdrift.storage.schema import tables

_HOUR: Final = timedelta(hours=1)
_ALARMS: Final = (Episode.OPEN, Episode.ESCALATE)
# The alert that lasts, or that ended because its version was replaced: the newest one, since no other opens meanwhile.
_LASTING: Final = """
    id = (
        select id from alert where model_version_id = :version and slice_id = :slice order by id desc limit 1
    ) and (resolved_at is null or ended = 'replaced')
"""
_CLOSE: Final = text(
    f"update alert set resolved_at = coalesce(resolved_at, :at), ended = :ended where {_LASTING} returning id"  # noqa: S608
)
_ESCALATE: Final = text(f"""
    update alert set severity = :severity, metric = :metric, details = cast(:details as jsonb)
    where {_LASTING} returning id
""")  # noqa: S608
_REOPEN: Final = text(f"""
    with alert as (update alert set resolved_at = null, ended = null where {_LASTING} returning *)
    select a.id, {DETAILS} as details from alert a {LAST_EVENT}
""")  # noqa: S608
_VERDICT_ALERTS: Final = text("""
    update verdict v set alert_id = (
        select a.id from alert a
        where a.model_version_id = v.model_version_id and a.slice_id = v.slice_id and a.resolved_at is null
    )
    where v.model_version_id = :version and v.slice_id = :slice
""")
_NOTE: Final = text("""
    update alert set details = jsonb_strip_nulls(details || cast(:more as jsonb))
    where model_version_id = :version and slice_id = :slice and resolved_at is null
""")
_CLOSE_SESSION: Final = text(
    "delete from session where model_version_id = :version and policy_id = :policy and group_key = :group"
)
_FOLD: Final = text("""
    update fold set fold_seq = :fold_seq, event_time = :event_time, exchange_time = :exchange_time, mass = :mass, n_detectors = :n_detectors,
        folded_at = now()
    where id = 1
""")
_VERSIONS: Final = text(
    "select id, model from model_version where model = any(cast(:models as text[])) order by id"
)
_WITH_INCIDENTS: Final = text("""
    select model_version_id from incident
    where model_version_id = any(cast(:versions as int[])) and (state = 'open' or mitigation in ('routed', 'reported'))
""")
ROWS_OF_STATEMENT: Final = 1_000
"""Rows go to Postgres as arrays of columns, so many at a time: a statement of many rows costs half of as many statements, and takes some
tenths of a second at most."""
_DIALECT: Final = postgresql.dialect()  # type: ignore[no-untyped-call]
_ADDED: Final = ("divergence_bins", "people")
LARGEST: Final = ("cap", "heaviest")
"""Columns of a roll-up that are the largest of what is added, not the sum."""
_SUMS: Final = (
    "n_items",
    "n_groups",
    "weight",
    "weight_sq",
    "flip",
    "topk",
    "js",
    "divergence",
    "margin",
    "flip_weight",
    "topk_weight",
    "js_weight",
    "divergence_weight",
    "margin_weight",
    "n_infinite",
    "tie",
    "tie_weight",
    "n_unmeasured",
    "flip_weight_sq",
    "flip_sq",
    "flip_cross",
    "divergence_weight_sq",
    "divergence_sq",
    "divergence_cross",
)


def _only_by_number(_: TransitionRow, alert_id: int) -> Ways:
    return Ways(alert_id=alert_id)


async def write(
    connection: AsyncConnection,
    outcome: FoldResult,
    trace_url: str,
    *,
    webhook: bool = False,
    ways: Callable[[TransitionRow, int], Ways] = _only_by_number,
) -> None:
    """Store the outcome of one fold of all models: states, verdicts, alerts, transitions, outbox, roll-ups, incidents and the position.

    Parameters
    ----------
    connection
        Inside the transaction that claimed the batches.
    trace_url
        Link to a production trace, with `{trace_id}`; empty: no links.
    webhook
        Whether a webhook gets the alerts too.
    ways
        Returns what can be done about an alert, by its event and its number: its text has that.
    """
    written = await _write(connection, outcome, trace_url, webhook=webhook, ways=ways)
    position = outcome.position
    if position.event_us is not None:
        await write_incidents(
            connection,
            versions=_changed_versions(outcome),
            transitions=[numbers for _, numbers in written],
            now=from_us(position.event_us),
            fold_seq=position.fold_seq,
            webhook=webhook,
        )
    await connection.execute(
        _FOLD,
        {
            "fold_seq": position.fold_seq,
            "event_time": None if position.event_us is None else from_us(position.event_us),
            "exchange_time": None if position.exchange_us is None else from_us(position.exchange_us),
            "mass": position.mass,
            "n_detectors": position.n_detectors,
        },
    )


async def write_models(
    connection: AsyncConnection,
    outcomes: Mapping[str, FoldResult],
    before: Mapping[str, Position],
    trace_url: str,
    *,
    webhook: bool,
    ways: Callable[[TransitionRow, int], Ways],
) -> None:
    """Store the outcomes of the folds of models, each with its position: as `write`.

    Parameters
    ----------
    connection
        Inside the transaction that locked the models.
    outcomes
        By model.
    before
        The positions of the same models as they were locked.
    """
    rows = msgspec.structs.replace(
        next(iter(outcomes.values())),
        **{
            name: tuple(row for outcome in outcomes.values() for row in getattr(outcome, name))
            for name in FoldResult.__struct_fields__
            if name != "position"
        },
    )
    versions = {
        row["id"]: row["model"]
        for row in (await connection.execute(_VERSIONS, {"models": sorted(outcomes)})).mappings()
    }
    written = await _write(connection, rows, trace_url, webhook=webhook, ways=ways, versions=sorted(versions))
    open_incidents = set((await connection.scalars(_WITH_INCIDENTS, {"versions": sorted(versions)})).all())
    for model, outcome in outcomes.items():
        changed, position = _changed_versions(outcome), outcome.position
        own = {version for version, of_model in versions.items() if of_model == model}
        if position.event_us is None or not (changed or own & open_incidents):
            continue
        then_us = before[model].event_us
        await write_incidents(
            connection,
            versions=changed,
            transitions=[numbers for version, numbers in written if version in own],
            now=from_us(position.event_us),
            fold_seq=position.fold_seq,
            webhook=webhook,
            own=own,
            before=None if then_us is None else from_us(then_us),
        )
    await write_positions(connection, {model: outcome.position for model, outcome in outcomes.items()})


def _changed_versions(outcome: FoldResult) -> set[int]:
    changed = {row.model_version_id for row in outcome.transitions}
    return changed | {note.model_version_id for note in outcome.notes}


async def _write(
    connection: AsyncConnection,
    outcome: FoldResult,
    trace_url: str,
    *,
    webhook: bool,
    ways: Callable[[TransitionRow, int], Ways],
    versions: Sequence[int] | None = None,
) -> list[tuple[int, tuple[int, int]]]:
    """Store all but incidents and positions; return the version of each change of an alert, and the numbers of both."""
    await _upsert(connection, tables.DetectorTable, _detector_columns(outcome.detectors))
    await _upsert(connection, tables.VerdictTable, _verdict_columns(outcome.verdicts))
    alarms = [row for row in outcome.transitions if row.episode in _ALARMS]
    examples_of_alarms = iter(await examples(connection, alarms) if alarms else ())
    written: list[tuple[int, tuple[int, int]]] = []
    for transition in outcome.transitions:
        shown = (
            next(examples_of_alarms).linked(trace_url) if transition.episode in _ALARMS else AlertExamples()
        )
        transition_id, alert_id = await _write_transition(
            connection, transition, shown, ways, webhook=webhook
        )
        if alert_id is not None:
            written.append((transition.model_version_id, (transition_id, alert_id)))
    for note in outcome.notes:
        key = {"version": note.model_version_id, "slice": note.slice_id}
        await connection.execute(_NOTE, {**key, "more": msgspec.json.encode(note.change).decode()})
    if outcome.transitions:
        keys = {(row.model_version_id, row.slice_id) for row in outcome.transitions}
        await connection.execute(
            _VERDICT_ALERTS, [{"version": version, "slice": slice_id} for version, slice_id in sorted(keys)]
        )
    if outcome.verdicts or outcome.transitions:
        await escalate(connection, webhook=webhook, versions=versions)
    await _write_rollups(connection, outcome.rollups)
    if outcome.learned:
        await connection.execute(
            insert(tables.BaselineTable), [_baseline_values(row) for row in outcome.learned]
        )
    await write_floors(connection, outcome.floors, outcome.forgotten_noise)
    await write_pairs(connection, outcome.pairs, outcome.ended_pairs)
    for change in outcome.noise_changes:
        await write_noise_change(connection, change)
    await _upsert(connection, tables.ServingTable, _serving_columns(outcome.serving))
    await _upsert(connection, tables.SessionTable, _session_columns(outcome.sessions))
    if outcome.closed:
        closed = [
            {"version": version, "policy": two, "group": three} for version, two, three in outcome.closed
        ]
        await connection.execute(_CLOSE_SESSION, closed)
    return written


async def _write_transition(
    connection: AsyncConnection,
    row: TransitionRow,
    found: AlertExamples,
    ways: Callable[[TransitionRow, int], Ways],
    *,
    webhook: bool,
) -> tuple[int, int | None]:
    """Write a change of verdict; return its number and that of its alert."""
    event = None if row.event is None else msgspec.structs.replace(row.event, examples=found)
    key = {"version": row.model_version_id, "slice": row.slice_id}
    alert_id: int | None = None
    related = {} if event is None else _related(event)
    if row.episode is Episode.OPEN:
        alert_id = await connection.scalar(
            insert(tables.AlertTable)
            .values(
                model_version_id=row.model_version_id,
                slice_id=row.slice_id,
                severity=row.to_verdict.value,
                metric=row.metric.value,
                onset_at=from_us(row.onset_us),
                opened_at=from_us(row.at_us),
                details=related,
            )
            .returning(tables.AlertTable.id)
        )
    elif row.episode is Episode.ESCALATE:
        encoded = msgspec.json.encode(related).decode()
        severity = {"severity": row.to_verdict.value, "metric": row.metric.value, "details": encoded}
        alert_id = await connection.scalar(_ESCALATE, {**key, **severity})
    elif row.episode is Episode.CLOSE:
        ended = None if row.ended is None else row.ended.value
        alert_id = await connection.scalar(_CLOSE, {**key, "at": from_us(row.at_us), "ended": ended})
    elif row.episode is Episode.REOPEN:
        reopened = (await connection.execute(_REOPEN, key)).mappings().one_or_none()
        if reopened is not None:
            alert_id, event = reopened["id"], event_of({**reopened["details"], **_returned(row)})
    words = None
    if event is not None and alert_id is not None:
        now = msgspec.structs.replace(row, event=event)
        words = msgspec.to_builtins(text_of(event, ways(now, alert_id) if event.is_open else Ways()))
    transition_id = await connection.scalar(
        insert(tables.TransitionTable)
        .values(
            model_version_id=row.model_version_id,
            slice_id=row.slice_id,
            alert_id=alert_id,
            from_verdict=row.from_verdict.value,
            to_verdict=row.to_verdict.value,
            at=from_us(row.at_us),
            fold_seq=row.fold_seq,
            details={"reason": row.reason} if event is None else event.attributes(),
            text=words,
        )
        .returning(tables.TransitionTable.id)
    )
    if row.episode is not Episode.NONE and not row.quiet:
        due = {"webhook_due_at": func.now()} if webhook else {}
        await connection.execute(insert(tables.OutboxTable).values(transition_id=transition_id, **due))
    return int(transition_id or 0), alert_id


def _related(event: AlertEvent) -> dict[str, Any]:
    """Return how an alert is related to others: that alone changes after its event was written."""
    attributes = event.explanation.attributes()
    return {name: attributes[name] for name in RELATED if name in attributes}


def _returned(row: TransitionRow) -> dict[str, Any]:
    """Return what an alert that is open again says otherwise than when it opened."""
    return {
        "from_verdict": row.from_verdict.value,
        "verdict": row.to_verdict.value,
        "reason": row.reason,
    }


async def _write_rollups(connection: AsyncConnection, rows: Sequence[RollupRow]) -> None:
    """Add sums of hours to those that are stored, and to those of their days."""
    of_hours: dict[tuple[int, bool], list[RollupRow]] = {}
    for row in rows:
        of_hours.setdefault((row.hour_us, bool(row.people)), []).append(row)
    # A statement can add to a row once: hours of one day are added one after another.
    for (hour_us, _), of_hour in sorted(of_hours.items()):
        hour, day = (_floor(hour_us, step) for step in (timedelta(hours=1), timedelta(days=1)))
        for some in _chunks(of_hour):
            values: dict[str, Any] = {
                name: [getattr(row, name) for row in some]
                for name in ("model_version_id", "slice_id", *_SUMS, *LARGEST)
            }
            for name in _ADDED:
                values[name] = [value for row in some for value in getattr(row, name)]
                values[f"n_{name}"] = len(getattr(some[0], name))
            await connection.execute(_adding(), values | {"hour": hour, "day": day})


@cache
def _adding() -> TextClause:
    """Return the statement that adds sums of slices in one hour: numbers as columns, arrays one behind another."""
    types = {
        name: _type(tables.RollupHour, name) for name in ("model_version_id", "slice_id", *_SUMS, *LARGEST)
    }
    columns = ", ".join((*types, *_ADDED))
    changes = [f"{name} = old.{name} + excluded.{name}" for name in _SUMS]
    changes += [f"{name} = greatest(old.{name}, excluded.{name})" for name in LARGEST]
    # As `array_added`, whose call costs as much as all else of a row.
    changes += [
        f"""{name} = case when excluded.{name} is null then old.{name} when old.{name} is null then excluded.{name} else array(
            select x + y from unnest(old.{name}, excluded.{name}) with ordinality as both_ (x, y, place) order by place
        ) end"""  # noqa: S608 - constants
        for name in _ADDED
    ]
    arrays = [
        f"nullif((cast(:{name} as float8[]))[(place - 1) * :n_{name} + 1 \\: place * :n_{name}], cast(array[] as float8[])) as {name}"
        for name in _ADDED
    ]

    def into(table: str, name: str) -> str:
        return f"""
            insert into {table} as old ({name}, {columns}) select cast(:{name} as timestamptz), {columns} from added
            on conflict (model_version_id, slice_id, {name}) do update set {", ".join(changes)}
        """  # noqa: S608 - constants

    return text(f"""
        with added as materialized (
            select {", ".join((*types, *arrays))}
            from unnest({", ".join(f"cast(:{name} as {of}[])" for name, of in types.items())})
                with ordinality as sums ({", ".join(types)}, place)
        ), of_hour as ({into("rollup_hour", "hour")})
        {into("rollup_day", "day")}
    """)  # noqa: S608 - constants


def _type(table: type[tables.Base], name: str) -> str:
    return str(table.__table__.c[name].type.compile(dialect=_DIALECT))


async def _upsert(
    connection: AsyncConnection, table: type[tables.Base], columns: Mapping[str, Sequence[Any]]
) -> None:
    """Write rows, given as the values of each column, whether they are there or not."""
    names, n_rows = tuple(columns), len(next(iter(columns.values())))
    for begin in range(0, n_rows, ROWS_OF_STATEMENT):
        some = {name: values[begin : begin + ROWS_OF_STATEMENT] for name, values in columns.items()}
        await connection.execute(_upserting(table, names), some)


@cache
def _upserting(table: type[tables.Base], names: tuple[str, ...]) -> TextClause:
    keys = [column.name for column in table.__table__.primary_key]
    arrays = ", ".join(f"cast(:{name} as {_type(table, name)}[])" for name in names)
    changes = ", ".join(f"{name} = excluded.{name}" for name in names if name not in keys)
    return text(f"""
        insert into {table.__tablename__} ({", ".join(names)}) select * from unnest({arrays})
        on conflict ({", ".join(keys)}) do update set {changes}
    """)  # noqa: S608 - names of columns


def _chunks(rows: Sequence[RollupRow]) -> Iterator[Sequence[RollupRow]]:
    for begin in range(0, len(rows), ROWS_OF_STATEMENT):
        yield rows[begin : begin + ROWS_OF_STATEMENT]


def _detector_columns(rows: Sequence[DetectorRow]) -> dict[str, list[Any]]:
    return {
        "model_version_id": [row.model_version_id for row in rows],
        "slice_id": [row.slice_id for row in rows],
        "metric": [row.metric for row in rows],
        "kind": [row.kind for row in rows],
        "state": [row.state for row in rows],
        "budget": [row.budget for row in rows],
        "n_groups": [row.n_groups for row in rows],
        "evidence": [row.evidence for row in rows],
        "fold_seq": [row.fold_seq for row in rows],
        "created_at": [from_us(row.created_us) for row in rows],
        "last_at": [from_us(row.last_us) for row in rows],
        "retired_at": [None if row.retired_us is None else from_us(row.retired_us) for row in rows],
        "noise": [row.noise for row in rows],
    }


def _verdict_columns(rows: Sequence[VerdictRow]) -> dict[str, list[Any]]:
    return {
        "model_version_id": [row.model_version_id for row in rows],
        "slice_id": [row.slice_id for row in rows],
        "verdict": [row.verdict.value for row in rows],
        "reason": [row.reason for row in rows],
        "since": [from_us(row.since_us) for row in rows],
        "n_groups": [row.n_groups for row in rows],
        "evidence": [row.evidence for row in rows],
        "threshold": [row.threshold for row in rows],
        "estimate": [msgspec.json.encode(row.estimate).decode() for row in rows],
        "last_at": [from_us(row.last_us) for row in rows],
        "updated_at": [from_us(row.updated_us) for row in rows],
        "fold_seq": [row.fold_seq for row in rows],
    }


def _baseline_values(row: BaselineRow) -> dict[str, Any]:
    return {
        "model_version_id": row.model_version_id,
        "slice_id": row.slice_id,
        "metric": row.metric,
        "kind": row.kind,
        "source": row.source.value,
        "made_by": row.made_by,
        "reason": row.reason,
        "from_at": None if row.from_us is None else from_us(row.from_us),
        "to_at": None if row.to_us is None else from_us(row.to_us),
        "n_groups": row.n_groups,
        "from_version_id": row.from_version_id,
        "content": row.content,
        "fold_seq": row.fold_seq,
    }


def _serving_columns(rows: Sequence[ServingRow]) -> dict[str, list[Any]]:
    return {
        "model_version_id": [row.model_version_id for row in rows],
        "last_at": [from_us(row.last_us) for row in rows],
        "gap_s": [row.gap_s for row in rows],
        "gaps_s": [row.gaps_s for row in rows],
        "replaced_at": [None if row.replaced_us is None else from_us(row.replaced_us) for row in rows],
        "back_at": [None if row.back_us is None else from_us(row.back_us) for row in rows],
    }


def _session_columns(rows: Sequence[SessionRow]) -> dict[str, list[Any]]:
    return {
        "model_version_id": [row.model_version_id for row in rows],
        "policy_id": [row.policy_id for row in rows],
        "group_key": [row.group_key for row in rows],
        "opened_at": [from_us(row.opened_us) for row in rows],
        "items": [row.items for row in rows],
        "fold_seq": [row.fold_seq for row in rows],
    }


def _floor(at_us: int, step: timedelta) -> datetime:
    step_us = step // timedelta(microseconds=1)
    return from_us(at_us - at_us % step_us)
