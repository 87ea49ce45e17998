"""Whether versions serve and are paused: what stands beside the status of their slices, from one read."""

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts.status import Serves, Serving
from quantdrift.storage.pauses import EVERYTHING, paused

_VERSIONS: Final = text("""
    select model_version_id, model, candidate_version, serving, replaced_by, seen_at from version_now
    where :model = '' or model = :model order by model, seen_at desc nulls last, model_version_id desc limit 1000
""")


async def servings(
    connection: AsyncConnection, max_share: float, *, model: str = ""
) -> dict[tuple[str, str], Serving]:
    """Return whether versions serve, by model and version, the one that was seen last of each model first.

    Parameters
    ----------
    max_share
        Share of a model's sidecars from which on a pause at them alone is one of the model: `monitor.max_loss_ratio`.
    model
        Only this model; empty: all.
    """
    pauses = await paused(connection, max_share)
    by_version: dict[tuple[str, str], Serving] = {}
    for row in (await connection.execute(_VERSIONS, {"model": model})).mappings():
        # A version may stand there with several references: the one that was seen last counts.
        by_version.setdefault(
            (row["model"], row["candidate_version"]),
            Serving(
                serves=None if row["serving"] is None else Serves(row["serving"]),
                replaced_by=row["replaced_by"] or "",
                seen_at=row["seen_at"],
                paused=pauses.get(row["model"]) or pauses.get(EVERYTHING) or "",
            ),
        )
    return by_version
