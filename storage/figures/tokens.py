"""Quantiles of the divergence over the tokens of a slice's newest answers."""

from datetime import datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.token_histogram import TokenQuantiles, quantiles_of

_MOST: Final = 5_000  # answers: some 20 bins of each are read
_BINS: Final = text(
    """
    select cast(split_part(pair, ':', 1) as int) as bin, sum(split_part(pair, ':', 2)::float8 / (newest.pi1 * newest.pi2)) as weight,
        sum(split_part(pair, ':', 2)::int) as n
    from (
        select pi1, pi2, detail ->> 'divergence_bins' as bins
        from comparisons(:begin, :end, array[cast(:slice as integer)])
        where model_version_id = :version and slice_ids @> array[cast(:slice as integer)] and detail ? 'divergence_bins'
        order by captured_at desc limit :most
    ) newest cross join string_to_table(newest.bins, ' ') pair group by 1
""".replace("::", "\\:\\:")
)


async def token_quantiles(
    connection: AsyncConnection, version_id: int, slice_id: int, begin: datetime, end: datetime
) -> TokenQuantiles | None:
    """Return the quantiles over all tokens of the newest 5,000 answers of a period, each weighted by what it stands for; None: there are none."""
    found = await connection.execute(
        _BINS, {"version": version_id, "slice": slice_id, "begin": begin, "end": end, "most": _MOST}
    )
    rows = found.all()
    return quantiles_of({row.bin: float(row.weight) for row in rows}, sum(int(row.n) for row in rows))
