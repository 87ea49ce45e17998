"""The record of each written report."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import insert, text

from quantdrift.storage.database import Database
from quantdrift.storage.schema.tables import ReportRunTable


async def record_run(
    database: Database, *, kind: str, begin: datetime, end: datetime, path: str, figures: Mapping[str, Any]
) -> int | None:
    """Store the run of a report with its figures (JSON types only), and return its id; None: a standby stores nothing."""
    async with database.begin() as connection:
        if await connection.scalar(text("select pg_is_in_recovery()")):
            return None
        statement = insert(ReportRunTable).values(
            kind=kind, from_at=begin, to_at=end, path=path, figures=figures
        )
        return int(await connection.scalar(statement.returning(ReportRunTable.id)) or 0)
