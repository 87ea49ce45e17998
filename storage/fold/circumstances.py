"""What the fold asks beside the comparisons: pauses, what was quarantined, and the shares of slices by hour."""

from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.storage.fold_rows import Circumstances, QuarantineCount, ShareHour, ShareQuestion
from quantdrift.storage.pauses import paused

# Of a model whose name could not be read nothing can be said.
_QUARANTINED: Final = text("""
    select model, sum(n)::bigint as n, (array_agg(reason order by n desc, reason))[1] as reason
    from (
        select model, reason, count(*) as n from quarantine
        where quarantined_at > now() - interval '1 hour' and model <> '' group by 1, 2
    ) by_reason
    group by 1
""")
# One pass over the hours; then those of the slices that may have fallen, and of all traffic, which comes as slice 0.
_HOURS: Final = text("""
    with hours as materialized (
        select s.model, case when s.predicate = 'true' then 0 else r.slice_id end as slice_id, r.hour,
            sum(r.weight) as weight, sum(r.weight_sq) as weight_sq
        from rollup_hour r join slice s on s.id = r.slice_id
        where r.hour > :since and r.hour <= :until and s.model = any(:models)
        group by 1, 2, 3
    ), sums as (
        select h.model, h.slice_id, sum(h.weight) as history, window_h,
            coalesce(sum(h.weight) filter (where h.hour > cast(:until as timestamptz) - window_h * interval '1 hour'), 0) as now
        from hours h, unnest(cast(:windows_h as integer[])) as w (window_h) group by h.model, h.slice_id, window_h
    ), smaller as (
        select distinct of.model, of.slice_id
        from sums of join sums a on a.model = of.model and a.slice_id = 0 and a.window_h = of.window_h
        where of.slice_id = 0 or of.now * a.history < :kept * of.history * a.now
    ), counted as (
        select model, count(distinct slice_id) as n_slices from sums group by model
    )
    select h.model, h.slice_id, (extract(epoch from h.hour) * 1000000)::bigint as hour_us, h.weight, h.weight_sq, n_slices
    from hours h join smaller using (model, slice_id) join counted using (model) order by h.model, h.slice_id, h.hour
""")


async def read_circumstances(connection: AsyncConnection, max_share: float) -> Circumstances:
    """Return what is paused, and what was quarantined in the last hour.

    Parameters
    ----------
    max_share
        Share of a model's sidecars that may be paused by themselves before the model counts as paused.
    """
    rows = (await connection.execute(_QUARANTINED)).all()
    return Circumstances(
        paused=await paused(connection, max_share),
        quarantined={model: QuarantineCount(n=n, reason=reason) for model, n, reason in rows},
    )


async def read_share_hours(connection: AsyncConnection, question: ShareQuestion) -> list[ShareHour]:
    """Return what is asked by model, slice and hour; none where no model is named."""
    if not question.models:
        return []
    until = datetime.fromtimestamp(question.newest_hour_us / 1e6, UTC)
    rows = await connection.execute(
        _HOURS,
        {
            "models": list(question.models),
            "since": until - timedelta(hours=question.history_h),
            "until": until,
            "windows_h": list(question.windows_h),
            "kept": question.kept,
        },
    )
    return [ShareHour(**row) for row in rows.mappings()]
