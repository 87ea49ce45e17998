"""Export of compared items to Parquet, one file for each day, which DuckDB, Polars, pandas and Spark read as they are.

    DIRECTORY/day=2026-11-22/items.parquet

A file appears under its name once it is whole. A day is written again as long as late exchanges of it may still arrive, and
not after that: an export that was interrupted goes on where it ended.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from quantdrift.core.errors import OperatorError, os_error_text
from quantdrift.frames.connection import SnapshotConnection

_ROW_GROUP: Final = 131_072
_ABOUT: Final = b"quantdrift.export"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What an export holds. Two files with the same request of the same day hold the same columns and kind of rows.

    Parameters
    ----------
    model, slice
        Only these; empty: all.
    """

    model: str = ""
    slice: str = ""


class _About(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says about itself, in its metadata."""

    request: Request
    read_at: datetime


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """One day of an export.

    Parameters
    ----------
    rows
        In its file.
    written
        False: a file of an earlier export is up to date.
    """

    day: date
    path: str
    rows: int
    written: bool


def export(
    connection: SnapshotConnection,
    directory: Path,
    days: Sequence[date],
    request: Request,
    *,
    late: timedelta,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Iterator[Day]:
    """Write the items of each day, and yield the day when its file is whole.

    Parameters
    ----------
    connection
        Of a user with the role `quantdrift_reader`, at least. Each day is read in one snapshot.
    directory
        Made if it is not there. Files of other days stay.
    days
        In UTC, by the time of capture.
    late
        How long after its capture an exchange may be stored: `stream.max_age_s`.
    now
        Returns the time.

    Raises
    ------
    OperatorError
        A file cannot be written, or the directory holds an export of another request.
    """
    for day in days:
        path = directory / f"day={day.isoformat()}" / "items.parquet"
        if (done := _done(path, request)) and done[0].read_at >= _midnight(day) + timedelta(days=1) + late:
            yield Day(day=day, path=str(path), rows=done[1], written=False)
            continue
        about = _About(request=request, read_at=now())
        try:
            rows = _write(connection, path, day, about)
        except OSError as error:
            raise OperatorError(
                f"{path} cannot be written: {os_error_text(error)}. Run the command again: whole days stay"
            ) from error
        yield Day(day=day, path=str(path), rows=rows, written=True)


def _done(path: Path, request: Request) -> tuple[_About, int] | None:
    """Return what a file says about itself, and its number of rows; None if there is none.

    Raises
    ------
    OperatorError
        It is not an export, or one of another request.
    """
    if not path.exists():
        return None
    try:
        metadata = pq.read_metadata(path)
        about = msgspec.json.decode((metadata.metadata or {})[_ABOUT], type=_About)
    except (OSError, KeyError, pa.ArrowInvalid, msgspec.MsgspecError) as error:
        raise OperatorError(
            f"{path} was not written by `quantdrift export`: choose another directory"
        ) from error
    if about.request != request:
        raise OperatorError(
            f"{path} holds {_in_words(about.request)}, and not {_in_words(request)}: choose another directory"
        )
    return about, metadata.num_rows


def _write(connection: SnapshotConnection, path: Path, day: date, about: _About) -> int:
    """Write the file of a day, and return its number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(".unfinished.parquet")  # readers leave out names that begin with a dot
    begin = _midnight(day)
    conditions = "true"
    parameters: list[Any] = [begin, begin + timedelta(days=1)]
    for column, value in (("model", about.request.model), ("slice", about.request.slice)):
        if value:
            parameters.append(value)
            conditions += f" and {column} = ${len(parameters)}"
    query = f"select * from items($1, $2) where {conditions} order by captured_at, exchange_id, item"  # noqa: S608 -- fixed words
    rows = 0
    try:
        with connection.batches(query, parameters) as reader:
            schema = reader.schema.with_metadata({_ABOUT: msgspec.json.encode(about)})
            with pq.ParquetWriter(unfinished, schema, compression="zstd") as writer:
                for table in _row_groups(reader):
                    writer.write_table(table)
                    rows += table.num_rows
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return rows


def _row_groups(reader: pa.RecordBatchReader) -> Iterator[pa.Table]:
    """Yield the batches joined to tables of at least `_ROW_GROUP` rows."""
    batches = list[pa.RecordBatch]()
    for batch in reader:
        batches.append(batch)
        if sum(len(record_batch) for record_batch in batches) >= _ROW_GROUP:
            yield pa.Table.from_batches(batches, reader.schema)
            batches.clear()
    if batches:
        yield pa.Table.from_batches(batches, reader.schema)


def days_of(start: datetime, end: datetime) -> list[date]:
    """Return the days, in UTC, that [start, end) touches."""
    first = start.astimezone(UTC).date()
    days = (first + timedelta(days=n) for n in itertools.count())
    return list(itertools.takewhile(lambda day: _midnight(day) < end, days))


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


def _in_words(request: Request) -> str:
    slices = f"the slice {request.slice}" if request.slice else "all slices"
    return f"{slices} of {request.model or 'all models'}"
