"""Databases of a server that tests share: each a copy of one that was filled once."""

import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg

from quantdrift.storage.schema.roles import statements

_NUMBER = itertools.count()
T = TypeVar("T")


class Databases:
    """Makes databases in a server, and drops them.

    Nobody connects to a database that is copied but whoever fills it. Migrating, giving rights to roles and writing rows take longer
    than most tests; copying takes some 40 ms of processor time.

    Parameters
    ----------
    dsn
        Address of a database with the newest schema, as a superuser.
    """

    def __init__(self, dsn: str) -> None:
        self._base, _, self._newest = dsn.rpartition("/")
        self._filled: dict[Callable[[str], Awaitable[Any]], tuple[str, Any]] = {}

    async def filled(self, fill: Callable[[str], Awaitable[T]]) -> T:
        """Fill a database, unless `fill` has done so before; return what `fill` returned for its address.

        Nobody changes what is returned.
        """
        if fill not in self._filled:
            name = await self._copied(self._newest)
            self._filled[fill] = (name, await fill(f"{self._base}/{name}"))
        result: T = self._filled[fill][1]
        return result

    @asynccontextmanager
    async def copy(self, fill: Callable[[str], Awaitable[object]] | None = None) -> AsyncIterator[str]:
        """Copy the database that `fill` has filled, or the newest schema; yield its address, and drop it after the block."""
        if fill is not None:
            await self.filled(fill)
        name = await self._copied(self._newest if fill is None else self._filled[fill][0])
        yield f"{self._base}/{name}"
        await self._execute(f"drop database {name} with (force)")

    async def _copied(self, template: str) -> str:
        name = f"test_{os.getpid()}_{next(_NUMBER)}"
        # Files are copied: writing the copy to the log as well takes several times as long.
        await self._execute(f"create database {name} template {template} strategy file_copy")
        return name

    async def _execute(self, statement: str) -> None:
        admin = await asyncpg.connect(f"{self._base}/postgres")
        try:
            await admin.execute(statement)
        finally:
            await admin.close()


async def give_rights(dsn: str) -> None:
    """Execute the statements of the SQL roles, without an entry in the audit."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(";\n".join(statements()))
    finally:
        await connection.close()
