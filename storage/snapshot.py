"""The base of a report's reads: statements in one snapshot of the database."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import RowMapping, TextClause
from sqlalchemy.ext.asyncio import AsyncConnection


class SnapshotReader:
    """Reads in one snapshot.

    Parameters
    ----------
    connection
        Inside a transaction.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    @property
    def connection(self) -> AsyncConnection:
        """The connection, for what else is read in the same snapshot."""
        return self._connection

    async def _rows(self, statement: TextClause, **parameters: Any) -> Sequence[RowMapping]:
        return (await self._connection.execute(statement, parameters)).mappings().all()
