"""The models that are folded, each by itself: how far each is, and when it shares the allowance of the fleet.

A model has a position of its own, so that any monitor can fold it, whatever other models that monitor folds. Whoever does locks its row:
a monitor that has lost it, and does not know yet, waits for the row, and then finds another position than its own.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.storage.fold_rows import Position, from_us, to_us

SHARES_FOR: Final = timedelta(days=30)
"""A model shares the allowance for so long after its latest capture, as long as a signal without data is watched."""
_FIRST: Final = from_us(0)  # the first model has had all of it before

_LOCK: Final = text("""
    select fold_seq, event_time, exchange_time, mass, n_detectors, model from model_fold
    where model = any(cast(:models as text[])) order by model for update
""")
_WRITE: Final = text("""
    update model_fold set fold_seq = :fold_seq, event_time = :event_time, exchange_time = :exchange_time, mass = :mass,
        n_detectors = :n_detectors, folded_at = now()
    where model = :model
""")
# Tallies are folded whatever model there is: what was lost before a model begins may be of its own.
_BEGIN: Final = text("""
    insert into model_fold (model, number, fold_seq, event_time, mass, n_detectors)
    select v.model, coalesce((select max(number) from model_fold), -1) + row_number() over (order by v.model), cast(:after as bigint), (
        select max(least(t.at, b.stored_at)) from tally t join batch b on b.id = t.batch_id
        where b.kind = 'tally' and b.fold_seq <= :after and b.stored_at > (
            select max(stored_at) from batch where kind = 'tally' and fold_seq <= :after
        ) - interval '1 hour'
    ), 0, 0
    from (select distinct model from model_version) v where not exists (select from model_fold f where f.model = v.model)
""")
# A release that knows one position for all models has folded.
_TAKE_OVER: Final = text("""
    insert into model_fold (model, number, fold_seq, event_time, exchange_time, mass, n_detectors)
    select v.model, coalesce((select max(number) from model_fold), -1) + row_number() over (order by v.model), f.fold_seq, f.event_time, f.exchange_time, f.mass, cast(null as integer)
    from (select distinct model from model_version) v, fold f
    on conflict (model) do update set fold_seq = excluded.fold_seq, event_time = excluded.event_time,
        exchange_time = excluded.exchange_time, mass = excluded.mass, n_detectors = null
""")
_TAKE_OVER_SPANS: Final = text("""
    insert into model_span (model, from_at, last_at)
    select m.model, f.exchange_time, f.exchange_time from model_fold m, fold f
    where f.exchange_time is not null and not exists (select from model_span s where s.model = m.model)
""")
_SPANS: Final = text("select model, from_at, last_at from model_span order by from_at, model")
_SPAN: Final = text("""
    insert into model_span (model, from_at, last_at) values (:model, :from_at, :last_at)
    on conflict (model, from_at) do update set last_at = greatest(model_span.last_at, excluded.last_at)
""")
_NUMBERS: Final = text("select model, number from model_fold order by model")
_NUMBERED: Final = text("""
    update fold set fold_seq = :fold_seq, model_seq = :fold_seq, shards = :shards, newest_capture = :newest,
        folded_at = case when fold_seq = :fold_seq then folded_at else now() end
    where id = 1 and (fold_seq, model_seq, shards, newest_capture)
        is distinct from (cast(:fold_seq as bigint), cast(:fold_seq as bigint), cast(:shards as smallint), cast(:newest as timestamptz))
""")
_SUM_UP: Final = text("""
    update fold set event_time = m.event_time, exchange_time = m.exchange_time, mass = m.mass, n_detectors = m.n_detectors,
        folded_at = greatest(m.folded_at, fold.folded_at)
    from (
        select max(event_time) as event_time, max(exchange_time) as exchange_time, max(mass) as mass,
            sum(coalesce(n_detectors, 0)) as n_detectors, max(folded_at) as folded_at
        from model_fold
    ) m
    where fold.id = 1 and m.event_time is not null
        and (fold.event_time, fold.exchange_time, fold.mass, fold.n_detectors)
            is distinct from (m.event_time, m.exchange_time, m.mass, m.n_detectors)
""")


async def model_numbers(connection: AsyncConnection) -> dict[str, int]:
    """Return the models that have begun, and the number of each; its rest divided by the number of shards is its shard."""
    return {row.model: row.number for row in await connection.execute(_NUMBERS)}


async def lock_positions(connection: AsyncConnection, models: Collection[str]) -> dict[str, Position]:
    """Lock models until the end of the transaction, and return how far each is."""
    rows = (await connection.execute(_LOCK, {"models": sorted(models)})).mappings().all()
    return {row["model"]: position_of(row) for row in rows}


async def write_positions(connection: AsyncConnection, positions: Mapping[str, Position]) -> None:
    """Store how far models are, inside the transaction that locked them."""
    rows = [
        {
            "model": model,
            "fold_seq": of.fold_seq,
            "event_time": None if of.event_us is None else from_us(of.event_us),
            "exchange_time": None if of.exchange_us is None else from_us(of.exchange_us),
            "mass": of.mass,
            "n_detectors": of.n_detectors,
        }
        for model, of in positions.items()
    ]
    if rows:
        await connection.execute(_WRITE, rows)


async def begin_models(connection: AsyncConnection, after: int, *, known: bool) -> None:
    """Let models begin that have no position yet.

    Parameters
    ----------
    after
        The last batch that has a number.
    known
        False: a release that knows one position for all models has folded until then, and each model goes on from there.
    """
    if known:
        await connection.execute(_BEGIN, {"after": after})
    else:
        await connection.execute(_TAKE_OVER)
        await connection.execute(_TAKE_OVER_SPANS)


async def note_spans(
    connection: AsyncConnection, numbered: Iterable[RowMapping | Mapping[str, Any]], newest: datetime | None
) -> datetime | None:
    """Note of new batches, in their order, which models share the allowance from when on; return the latest capture.

    Parameters
    ----------
    newest
        Latest capture of the batches before; None: there is none.
    """
    spans: dict[str, list[datetime]] = {}
    for row in (await connection.execute(_SPANS)).mappings():
        spans[row["model"]] = [row["from_at"], row["last_at"]]
    changed: dict[tuple[str, datetime], datetime] = {}
    for batch in sorted(numbered, key=lambda batch: int(batch["fold_seq"])):
        model = batch["model"]
        if model is None or batch["kind"] != "comparison":
            continue
        captured_at = min(batch["captured_to"], batch["stored_at"])
        span = spans.get(model)
        # Where no clock is beyond the end of its last span, that one goes on.
        if span is None or (newest is not None and newest > span[1] + SHARES_FOR):
            begin = _FIRST if newest is None else newest
            span = spans[model] = [begin, max(begin, captured_at)]
        span[1] = max(span[1], captured_at)
        changed[model, span[0]] = span[1]
        newest = captured_at if newest is None else max(newest, captured_at)
    if changed:
        await connection.execute(
            _SPAN,
            [
                {"model": model, "from_at": from_at, "last_at": last_at}
                for (model, from_at), last_at in changed.items()
            ],
        )
    return newest


async def read_spans(connection: AsyncConnection) -> dict[str, list[tuple[int, int]]]:
    """Return from when until when each model shares the allowance, in microseconds since 1970."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for row in (await connection.execute(_SPANS)).mappings():
        span = to_us(row["from_at"]), to_us(row["last_at"] + SHARES_FOR)
        spans.setdefault(row["model"], []).append(span)
    return spans


async def note_numbers(
    connection: AsyncConnection, fold_seq: int, shards: int, newest: datetime | None
) -> None:
    """Note how far batches have numbers, in how many shards models are folded, and the latest capture."""
    await connection.execute(_NUMBERED, {"fold_seq": fold_seq, "shards": shards, "newest": newest})


async def sum_up(connection: AsyncConnection) -> None:
    """Write what is so of all models together into `fold`: of the monitor that leads, which alone writes that."""
    await connection.execute(_SUM_UP)


def position_of(row: RowMapping | Mapping[str, Any]) -> Position:
    """Return a row of `fold` or `model_fold` as the fold reads it."""
    return Position(
        fold_seq=row["fold_seq"],
        event_us=None if row["event_time"] is None else to_us(row["event_time"]),
        exchange_us=None if row["exchange_time"] is None else to_us(row["exchange_time"]),
        mass=row["mass"],
        n_detectors=row["n_detectors"] or 0,
        is_counted=row["n_detectors"] is not None,
    )
