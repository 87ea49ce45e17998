"""Gates in the database: a candidate's digest before its first exchange, and the verdict on it."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import text

from quantdrift.core.records import Predicate
from quantdrift.core.slices import SliceKey
from quantdrift.storage.database import Database

_BEGIN: Final = text("""
    insert into gate_run (model, candidate, alpha) values (:model, :candidate, :alpha) returning id, begun_at
""")
# Rows of gates are written by these functions alone, and only for the user that began the gate. The second one adds to the audit.
_PROGRESS: Final = text("select gate_progress(:id, :more, cast(:answers as jsonb))")
_END: Final = text(
    "select gate_end(:id, :verdict, :more, cast(:answers as jsonb), cast(:configuration as jsonb), :slice)"
)
_READ: Final = text("""
    select r.id, r.model, r.candidate, r.made_by, r.begun_at, r.checked_at, r.ended_at, r.more, r.answers,
        coalesce(v.verdict, 'insufficient') as verdict, coalesce(v.slice, '') as slice,
        coalesce(v.configuration, '{}') as configuration,
        coalesce(extract(epoch from now() - v.made_at), 0) as age_s
    from gate_run r left join gate_verdict v on v.gate_id = r.id where r.id = :id
""")
# A slice of which nothing was compared in the last day has no traffic, and would never pass.
_WATCHED: Final = text("""
    select s.name, s.predicate, s.definition -> 'where' as conditions from slice s
    where s.model = :model and s.lapsed_at is null and exists (
        select from rollup_hour r join model_version v on v.id = r.model_version_id
        where v.model = :model and r.slice_id = s.id and r.hour > now() - interval '25 hours'
    ) order by s.id
""")


_LABELS: Final = text("""
    select l.exchange_id, l.item, l.label, l.candidate_right, l.reference_right
    from label l join model_version v on v.id = l.model_version_id
    where v.model = :model and l.captured_at > :begun_at and l.loaded_at > :since
    order by l.loaded_at, l.captured_at, l.exchange_id, l.item
""")
_NOW: Final = text("select now()")
# A load stores its rows with the time at which it began, and may take as long.
_LONGEST_LOAD: Final = timedelta(minutes=15)


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A gate that has begun: its number, and the time of the database from which exchanges count."""

    id: int
    at: datetime


class TrueLabel(msgspec.Struct, frozen=True, kw_only=True):
    """A label of an item; fields as the columns of `label`, where the candidate is the version that served."""

    exchange: UUID
    item: int
    label: str | None
    candidate_right: bool
    reference_right: bool


class GateRun(msgspec.Struct, frozen=True, kw_only=True):
    """A gate as it is stored.

    Parameters
    ----------
    id, model, candidate, made_by, begun_at, checked_at, ended_at, more, answers
        The columns of `gate_run`.
    verdict, slice, configuration
        The columns of `gate_verdict`; `insufficient` and empty while there is no verdict.
    age_s
        Time since the verdict, by the clock of the database.
    """

    id: int
    model: str
    candidate: str
    made_by: str
    begun_at: datetime
    checked_at: datetime | None
    ended_at: datetime | None
    more: int | None
    answers: list[dict[str, Any]]
    verdict: str
    slice: str
    configuration: dict[str, Any]
    age_s: float


async def begin(database: Database, *, model: str, candidate: str, alpha: float) -> Begun:
    """Record a candidate before its first exchange.

    Raises
    ------
    OperatorError, RetryError
        As `Database.begin`.
    """
    async with database.begin() as connection:
        values = {"model": model, "candidate": candidate, "alpha": alpha}
        row = (await connection.execute(_BEGIN, values)).one()
    return Begun(id=row.id, at=row.begun_at)


async def progress(database: Database, number: int, *, more: int | None, answers: bytes) -> None:
    """Record what is known of a gate that runs; `answers` is a JSON list.

    Raises
    ------
    OperatorError
        The gate has ended, or another user of the database began it.
    OperatorError, RetryError
        As `Database.begin`.
    """
    async with database.begin() as connection:
        await connection.execute(_PROGRESS, {"id": number, "more": more, "answers": answers.decode()})


async def end(
    database: Database,
    number: int,
    *,
    verdict: str,
    more: int | None,
    answers: bytes,
    configuration: Mapping[str, Any],
    only: str,
) -> None:
    """Record the verdict of a gate, once and for all, and add it to the audit. Errors as `progress`.

    Parameters
    ----------
    answers
        A JSON list.
    configuration
        Options by which it was judged, as of `judged_by`.
    only
        Slice that was judged alone, beside all traffic; empty: every slice.
    """
    values = {
        "id": number,
        "verdict": verdict,
        "more": more,
        "answers": answers.decode(),
        "configuration": msgspec.json.encode(configuration).decode(),
        "slice": only,
    }
    async with database.begin() as connection:
        await connection.execute(_END, values)


async def read(database: Database, number: int) -> GateRun | None:
    """Return a gate, or None. Errors as `begin`."""
    async with database.begin() as connection:
        row = (await connection.execute(_READ, {"id": number})).mappings().one_or_none()
    return None if row is None else GateRun(**{**row, "age_s": float(row["age_s"])})


async def labels_of(
    database: Database, model: str, *, begun_at: datetime, since: datetime
) -> tuple[list[TrueLabel], datetime]:
    """Return the labels of exchanges of a model that were loaded after `since`, and the time to ask from next.

    Labels may come again the next time: a load that began earlier may end later.

    Parameters
    ----------
    begun_at
        Only of exchanges that were captured after it.

    Raises
    ------
    OperatorError, RetryError
        As `Database.begin`.
    """
    async with database.begin() as connection:
        now: datetime = (await connection.execute(_NOW)).scalar_one()
        values = {"model": model, "begun_at": begun_at, "since": since}
        rows = (await connection.execute(_LABELS, values)).all()
    labels = [
        TrueLabel(
            exchange=UUID(str(row.exchange_id)),
            item=row.item,
            label=row.label,
            candidate_right=row.candidate_right,
            reference_right=row.reference_right,
        )
        for row in rows
    ]
    return labels, now - _LONGEST_LOAD


async def watched_slices(database: Database, model: str) -> list[SliceKey]:
    """Return the slices of a model that had traffic within the last day. Errors as `begin`."""
    async with database.begin() as connection:
        rows = (await connection.execute(_WATCHED, {"model": model})).all()
    return [
        SliceKey(
            model=model,
            name=row.name,
            predicate=row.predicate,
            where=msgspec.convert(row.conditions or (), tuple[Predicate, ...]),
        )
        for row in rows
    ]
