"""A read-only connection to Postgres that returns Arrow tables, through ADBC."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import adbc_driver_postgresql.dbapi as postgres
import pyarrow as pa
from adbc_driver_manager import Error

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.storage.address import PostgresAddress

_REFUSED: Final = ("authentication failed", "permission denied", "does not exist", "role ")
_SEVERITY: Final = re.compile(r"(?:ERROR|FATAL):\s+|\[libpq\] ")
_BATCH_BYTES: Final = 8 * 2**20
"""Size of the batches in which rows arrive; a result is never held twice."""


class SnapshotConnection:
    """A connection whose transactions read one snapshot and change nothing.

    Parameters
    ----------
    dsn
        `postgresql://user:password@host:port/name`. TLS settings mean what they mean to every other process of quantdrift.
    statement_timeout
        Longest time that one statement may take.

    Raises
    ------
    OperatorError
        The address cannot be read, or the server refuses the user.
    RetryError
        The server cannot be reached.
    """

    def __init__(self, dsn: str, *, statement_timeout: timedelta = timedelta(minutes=10)) -> None:
        address = PostgresAddress.of(dsn)
        with _in_words(address.where):
            self._connection = postgres.connect(address.libpq)
            with self._connection.cursor() as cursor:
                cursor.execute(
                    "set session characteristics as transaction isolation level repeatable read, read only"
                )
                cursor.execute(f"set statement_timeout = {statement_timeout // timedelta(milliseconds=1)}")
            self._connection.commit()
        self._where = address.where

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def table(self, query: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """Run one query with `$1`, `$2`, ... and return its rows.

        Raises
        ------
        OperatorError
            Postgres refuses the query: its message says why.
        RetryError
            The connection was lost, or the query took too long.
        """
        with self.batches(query, parameters) as reader:
            return reader.read_all()

    @contextmanager
    def batches(self, query: str, parameters: Sequence[Any] = ()) -> Iterator[pa.RecordBatchReader]:
        """Run one query and yield its rows as they arrive; parameters and errors are those of `table`."""
        with self._connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)})
            try:
                with _in_words(self._where):
                    cursor.execute(query, parameters=[*parameters] or None)
                    reader = cursor.fetch_record_batch()
                yield _plain(reader, self._where)
            finally:
                with _in_words(self._where):
                    self._connection.rollback()


@contextmanager
def _in_words(where: str) -> Iterator[None]:
    """Translate what driver and Arrow raise."""
    try:
        yield
    except (Error, OSError) as error:
        text = _SEVERITY.split(str(error).strip().splitlines()[0])[-1]
        state = getattr(error, "sqlstate", None)
        if state == "57014" or text.startswith("canceling statement"):
            raise RetryError(
                f"Postgres at {where} ended the query: it took too long, or was cancelled"
            ) from None
        refused = state is not None or any(word in text for word in _REFUSED)
        raise (OperatorError if refused else RetryError)(f"Postgres at {where}: {text}") from None


def _plain(reader: pa.RecordBatchReader, where: str) -> pa.RecordBatchReader:
    """Return a reader without Arrow's extension types, which few libraries know: identifiers and JSON become text, `numeric` a float."""
    schema = pa.schema([pa.field(field.name, _plain_type(field.type)) for field in reader.schema])

    def batches() -> Iterator[pa.RecordBatch]:
        with _in_words(where):
            for batch in reader:
                yield pa.record_batch([_column(column) for column in batch.columns], schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _plain_type(of: pa.DataType) -> pa.DataType:
    if isinstance(of, pa.OpaqueType) and of.type_name == "numeric":
        return pa.float64()
    return pa.string() if isinstance(of, pa.BaseExtensionType) else of


def _column(column: pa.Array) -> pa.Array:
    if isinstance(column.type, pa.UuidType):
        return pa.array([None if value is None else str(value) for value in column.to_pylist()], pa.string())
    plain = column.storage if isinstance(column, pa.ExtensionArray) else column
    return plain.cast(_plain_type(column.type))
