"""What the fold is told of the present: pauses, and what was quarantined."""

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.storage.fold_rows import Circumstances, Quarantined
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
        quarantined={model: Quarantined(n=n, reason=reason) for model, n, reason in rows},
    )
