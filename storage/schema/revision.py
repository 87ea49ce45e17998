"""The schema revision that this release needs, and the check that the database has it.

A schema changes in two steps. A release may only expand it: the release before works with the new schema, so that
processes of both run side by side. What nobody uses any more goes a release later, at the earliest. The table
`compatibility` says which releases can work with a schema that they do not know.
"""

from functools import cache
from importlib.resources import files
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import OperatorError
from quantdrift.storage.database import Database

OLDEST: Final = "0001"
"""The newest revision that the oldest release knew which can work with the newest schema. A revision that takes something
away raises it to the one at which the code stopped using it."""

_READABLE: Final = text("""
    select to_regclass('alembic_version') is not null as made,
        coalesce(has_table_privilege(to_regclass('alembic_version'), 'select'), false) as revision,
        coalesce(has_table_privilege(to_regclass('compatibility'), 'select'), false) as oldest
""")


@cache
def newest() -> str:
    """Return the newest revision of this release."""
    names = (path.name for path in files("quantdrift.migrations").joinpath("versions").iterdir())
    return max(name[:4] for name in names if name[:4].isdigit())


@cache
def _known() -> frozenset[str]:
    names = (path.name for path in files("quantdrift.migrations").joinpath("versions").iterdir())
    return frozenset(name[:4] for name in names if name[:4].isdigit())


async def refusal(connection: AsyncConnection) -> str:
    """Return why this release cannot work with the schema of a database, and what to do; empty if it can.

    A user who may not read the revision is not stopped: `quantdrift setup postgres` of this release grants it.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    readable = (await connection.execute(_READABLE)).one()
    if readable.made and not readable.revision:
        return ""
    revision = (
        await connection.scalar(text("select version_num from alembic_version")) if readable.made else None
    )
    if revision is None:  # Alembic makes its table before the first revision
        return "the database has no schema: run `quantdrift db upgrade`"
    if revision == newest():
        return ""
    if revision in _known():
        return (
            f"the database has the schema revision {revision}, and this release needs {newest()}: run"
            " `quantdrift db upgrade` of this release"
        )
    oldest = (
        await connection.scalar(text("select oldest_revision from compatibility"))
        if readable.oldest
        else None
    )
    if oldest is None or str(oldest) <= newest():
        return ""  # a newer release has expanded the schema
    return (
        f"the database has the schema revision {revision} of a newer release, which needs revision {oldest} or later;"
        f" this release knows {newest()}: install the newer release"
    )


async def check_schema(database: Database) -> None:
    """Check that this release can work with the schema.

    Raises
    ------
    OperatorError
        It cannot: the schema is older than this release, or a newer release has taken away what this one uses.
    RetryError
        Postgres is not available.
    """
    async with database.begin() as connection:
        if why := await refusal(connection):
            raise OperatorError(why)
