"""Learned slices as their fit described them: how many vectors, what sets them apart, and typical exchanges."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_DESCRIBED: Final = text("""
    select s.id, e.cluster from slice s join model_version v on v.id = :version
    cross join lateral (
        select c.clusters from clustering c
        where c.model = v.model and c.reference_digest = v.reference_digest order by c.id desc limit 1
    ) newest
    cross join lateral jsonb_array_elements(newest.clusters) e(cluster)
    where s.id = any(cast(:slices as int[])) and s.predicate = 'cluster ' || (e.cluster ->> 'id')
""")


async def described(
    connection: AsyncConnection, version_id: int, slice_ids: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Return those of some slices that are clusters of the newest clustering of a version's reference, as its fit described them."""
    values = {"version": version_id, "slices": list(slice_ids)}
    return {row["id"]: row["cluster"] for row in (await connection.execute(_DESCRIBED, values)).mappings()}
