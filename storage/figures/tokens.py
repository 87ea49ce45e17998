"""The divergence of the tokens of a slice's newest answers."""

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.token_histogram import TokenBins
from quantdrift.storage import queries


async def token_bins(
    connection: AsyncConnection, version_id: int, slice_id: int, begin: datetime, end: datetime
) -> TokenBins:
    """Return how many tokens of the newest 5,000 answers of a period lie in each bin of the divergence, each answer weighted by what it stands for."""
    query = queries.filled(queries.TOKENS, version=version_id, slice=slice_id, begin=begin, end=end)
    rows = (await connection.exec_driver_sql(query)).all()
    return TokenBins(
        weights={row.bin: float(row.weight) for row in rows}, tokens=sum(int(row.tokens) for row in rows)
    )
