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


_CHAIN: Final = text("select obj_description(to_regclass('alembic_version'))")
_LACKING: Final = text("""
    select name from unnest(cast(:tables as text[])) as name where to_regclass(quote_ident(name)) is null
""")
_FIRST_TABLES: Final = ("incident_change", "serving", "slice_change", "undeclared_session")
"""Tables of 0001 that the databases of the time before the first release lack, all or some."""
_DEVELOPMENT: Final = (
    "it was made by another development of quantdrift, whose revisions have other numbers, and cannot be upgraded: restore the dump"
    " from before, or begin with an empty database"
)


@cache
def chain() -> tuple[str, ...]:
    """Return the names of the revisions of this release, in order: a number and what it does."""
    names = (path.name for path in files("quantdrift.migrations").joinpath("versions").iterdir())
    return tuple(sorted(name.removesuffix(".py") for name in names if name[:4].isdigit()))


def newest() -> str:
    """Return the newest revision of this release."""
    return chain()[-1][:4]


def _known() -> frozenset[str]:
    return frozenset(name[:4] for name in chain())


async def write_chain(connection: AsyncConnection) -> None:
    """Write into the database which revisions lead to its schema: a number alone says nothing about another development."""
    names = ", ".join(chain())
    await connection.exec_driver_sql(f"comment on table alembic_version is 'Revisions: {names}'")


async def other_chain(connection: AsyncConnection) -> str:
    """Return why the revision of a database is not one of this chain, and what to do; empty if it is, or there is none yet.

    1.0.0rc1 did not write the names of its revisions: such a database must have the tables of the first one.
    """
    readable = (await connection.execute(_READABLE)).one()
    if not readable.made or not readable.revision:
        return ""
    revision = await connection.scalar(text("select version_num from alembic_version"))
    if revision is None:
        return ""
    if written := await connection.scalar(_CHAIN):
        names = str(written).removeprefix("Revisions: ").split(", ")
        for theirs, ours in zip(names, chain(), strict=False):
            if theirs != ours:
                return f"the schema of the database has the revision {theirs} where this release has {ours}: {_DEVELOPMENT}"
        return ""
    lacking = (await connection.scalars(_LACKING, {"tables": list(_FIRST_TABLES)})).all()
    if lacking:
        return (
            f"the database says that its schema has the revision {revision}, and lacks {', '.join(lacking)} of the first revision:"
            f" {_DEVELOPMENT}"
        )
    return ""


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
        if why := await other_chain(connection) or await refusal(connection):
            raise OperatorError(why)
