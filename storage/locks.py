"""Locks on tables, which need a right to them: any user of Postgres can hold an advisory lock, and keep others waiting.

All of them last until the transaction ends. They exclude each other, and neither readers nor writers of the table.
"""

from typing import Final

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.storage.database import sqlstate

_NOT_AVAILABLE: Final = "55P03"


async def lock(connection: AsyncConnection, relation: str) -> None:
    """Lock a table or view, and wait for whoever has it."""
    await connection.execute(text(f"lock table {relation} in share update exclusive mode"))


async def try_lock(connection: AsyncConnection, relation: str) -> bool:
    """Lock a table or view, and return whether nobody else has it."""
    try:
        async with connection.begin_nested():
            await connection.execute(text(f"lock table {relation} in share update exclusive mode nowait"))
    except DBAPIError as error:
        if sqlstate(error) != _NOT_AVAILABLE:
            raise
        return False
    return True
