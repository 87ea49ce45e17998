"""The slices whose exchanges the shadow replays twice: a worker reads them, and so nothing here loads SciPy."""

from typing import Final

from sqlalchemy import text

from quantdrift.storage.comparisons.rows import VersionKey
from quantdrift.storage.database import Database

_SUSPECTS: Final = text("""
    select distinct v.model, v.candidate_version, v.reference_digest, s.predicate
    from noise_test t join model_version v on v.id = t.model_version_id join slice s on s.id = t.slice_id
    where t.suspect
""")

Suspects = frozenset[tuple[VersionKey, str]]
"""Versions, and the predicates of their slices whose exchanges are replayed twice."""


async def suspects(database: Database) -> Suspects:
    """Return the slices that the monitor has evidence against, which noise of the reference may explain.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    async with database.begin() as connection:
        rows = (await connection.execute(_SUSPECTS)).all()
    return frozenset(
        (VersionKey(model=model, candidate_version=version, reference_digest=digest), predicate)
        for model, version, digest, predicate in rows
    )
