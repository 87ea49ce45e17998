"""People whose answers changed on the last day: at least so many, among the requests that were sampled."""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_AFFECTED: Final = text("""
    select s.slice_id, count(distinct c.group_key) as n
    from comparison c cross join unnest(c.slice_ids) as s (slice_id)
    where c.captured_at >= (select max(hour) from rollup_hour) - interval '23 hours' and c.flip and c.group_key <> ''
        and c.model_version_id = :version and s.slice_id = any(cast(:slices as int[]))
    group by 1
""")
_KNOWN: Final = text("""
    select exists (
        select from (
            select group_key from comparison where model_version_id = :version order by captured_at desc limit 1000
        ) as newest where group_key <> ''
    )
""")


async def affected_people(
    connection: AsyncConnection, version: int, slices: Sequence[int]
) -> dict[int, int] | None:
    """Return how many people got at least one changed answer in the last 24 hours of data, by slice; zero is left out.

    None: none of the version's newest requests names its person. A person is one value of `sampling.sticky_header`, of which the database
    has a hash.

    Bound: there were at least so many. People whose changed answers were not sampled are missing, and so are all who send no
    such header; nothing is extrapolated, because a person has another chance to be sampled under each policy of the day.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    values = {"version": version, "slices": list(slices)}
    found = {row.slice_id: row.n for row in await connection.execute(_AFFECTED, values)}
    if not found and not await connection.scalar(_KNOWN, {"version": version}):
        return None
    return found
