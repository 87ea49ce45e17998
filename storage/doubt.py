"""What the outputs of references say against the configuration, as the shadow states it."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.storage import tables
from quantdrift.storage.rows import DoubtRow


async def write_doubts(connection: AsyncConnection, doubts: Sequence[DoubtRow], at: datetime) -> None:
    """State what was seen of references, in place of what was seen before."""
    # In one order everywhere, so that two workers never wait for each other.
    for doubt in sorted(doubts, key=lambda one: (one.model, one.reference_digest)):
        told = {"option": doubt.option, "doubt": doubt.doubt.replace("\0", ""), "found_at": at}
        await connection.execute(
            upsert(tables.Doubt)
            .values(model=doubt.model, reference_digest=doubt.reference_digest, **told)
            .on_conflict_do_update(index_elements=["model", "reference_digest"], set_=told)
        )
