"""The rows of a file of labels, from the disk or from a request: which can be used, and why others cannot."""

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from quantdrift.core.config.schema import Model
from quantdrift.core.errors import OperatorError
from quantdrift.core.links import trace_link
from quantdrift.core.text import plain
from quantdrift.storage.labels import EXCHANGE, LabelRow, WantedLabel

LABEL: Final = "label"
_KEY, _ITEM = "key", "item"
DRAWN: Final = "drawn_for"
"""The column of the slice for which a row was drawn, as `quantdrift labels wanted` writes it."""
_SIDES: Final = ("candidate_right", "reference_right")
_TRUE, _FALSE = frozenset({"true", "1", "yes", "t"}), frozenset({"false", "0", "no", "f"})
_MOST_ROWS: Final = 5_000_000
_MOST_TEXT: Final = 1_000
_MOST_ITEM: Final = 32_767
_MOST_CLASS: Final = 2**31 - 1
_MOST_DIGITS: Final = 20
_MOST_REASONS: Final = 8


class TooManyRowsError(OperatorError):
    """A file or request of labels that is longer than what is read at once."""


def rows_of_file(
    file: Path, model: Model, key_column: str, label_column: str
) -> tuple[list[LabelRow], Counter[str]]:
    """Return the rows of a CSV or Parquet file that can be used, and how many others there are by reason.

    Raises
    ------
    OperatorError
        The file cannot be read, is empty or too long, or lacks a column.
    """
    lines = _parquet(file) if file.suffix == ".parquet" else _csv(file)
    return rows_of(lines, str(file), model, key_column, label_column, most=_MOST_ROWS)


def rows_of_text(
    text: str, model: Model, key_column: str, label_column: str, *, most: int
) -> tuple[list[LabelRow], Counter[str]]:
    """Return the same of CSV text with at most so many rows.

    Raises
    ------
    TooManyRowsError
        It has more rows.
    OperatorError
        It is no CSV, is empty, or lacks a column.
    """
    # Lines end as in a file, one after the other; `splitlines` would also split at U+0085 or U+2028 inside a cell.
    lines = csv.reader(io.StringIO(text, newline=""))
    try:
        return rows_of(lines, "the request", model, key_column, label_column, most=most)
    except csv.Error as error:
        raise OperatorError(f"the request is no CSV: {error}") from error


def rows_of(
    lines: Iterator[Sequence[Any]], name: str, model: Model, key_column: str, label_column: str, *, most: int
) -> tuple[list[LabelRow], Counter[str]]:
    """Return the rows that can be used, and how many others there are by reason; the first line has the names of the columns."""
    numbers = {name: number for number, name in enumerate(model.labels)}
    rows: list[LabelRow] = []
    wrong: Counter[str] = Counter()
    for n, cells in enumerate(_cells(lines, name, key_column, label_column), start=1):
        if n > most:
            raise TooManyRowsError(f"{name} has more than {most:,} rows: split it")
        row = _row(n, cells, numbers)
        if not isinstance(row, str):
            rows.append(row)
        elif row in wrong or len(wrong) < _MOST_REASONS:
            wrong[row] += 1
        else:
            wrong["other reasons"] += 1
    return rows, wrong


def write_wanted(
    file: Path, drawn: Sequence[WantedLabel], slice_id: int, model: Model, trace_url: str
) -> None:
    """Write drawn answers to a new CSV file with an empty column for the labels, as `rows_of_file` reads it.

    Raises
    ------
    OperatorError
        The file cannot be written, or is there already: somebody may have filled it in.
    """
    head = (EXCHANGE, _ITEM, DRAWN, LABEL, "captured_at", "request_id", "reference", "candidate", "link")
    try:
        with file.open("x", encoding="utf-8", newline="") as lines:
            writer = csv.writer(lines)
            writer.writerow(head)
            for answer in drawn:
                classes = class_name(model, answer.reference), class_name(model, answer.candidate)
                writer.writerow(
                    (
                        answer.exchange_id,
                        answer.item,
                        slice_id,
                        "",
                        answer.captured_at.isoformat(),
                        _cell(answer.request_id or ""),
                        *classes,
                        trace_link(trace_url, answer.trace),
                    )
                )
    except FileExistsError as error:
        raise OperatorError(f"{file} exists: somebody may have filled it in. Name another file") from error
    except OSError as error:
        raise OperatorError(f"{file} cannot be written: {error.strerror}") from error


def _cell(text: str) -> str:
    """Return a text from outside as a cell that no spreadsheet takes for a formula."""
    return f"'{plain(text)}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else plain(text)


def class_name(model: Model, number: int | None) -> str:
    """Return a class as the owner of the model calls it; its number where it has no name, and a dash where there is none."""
    if number is None:
        return "-"
    return model.labels[number] if 0 <= number < len(model.labels) else str(number)


def listed(wrong: Mapping[str, int]) -> str:
    """Return the reasons for rows that cannot be used, with their numbers."""
    return "; ".join(f"{n:,} {why}" for why, n in wrong.items())


def _row(n: int, cells: Mapping[str, str], numbers: Mapping[str, int]) -> LabelRow | str:
    """Return a row, or why it cannot be used; `numbers` are those of the classes by name."""
    key, item, label = cells.get(_KEY, ""), cells.get(_ITEM) or "0", cells.get(LABEL, "")
    if not key or len(key) > _MOST_TEXT or "\0" in key:
        return _wrong_key(key)
    index = _number(item, _MOST_ITEM)
    if index is None:
        return f"with an item that is no number from 0 to {_MOST_ITEM}"
    candidate, reference = (_truth(cells.get(side, "")) for side in _SIDES)
    drawn_for = _number(cells.get(DRAWN, ""), _MOST_CLASS)
    if candidate is not None and reference is not None:
        return LabelRow(
            n=n,
            key=key,
            item=index,
            candidate_right=candidate,
            reference_right=reference,
            drawn_for=drawn_for,
        )
    if not label:
        return "without a label"
    number = numbers.get(label, _number(label, _MOST_CLASS))
    if number is not None:
        return LabelRow(
            n=n, key=key, item=index, label=label[:_MOST_TEXT], number=number, drawn_for=drawn_for
        )
    return f"with the class {plain(label, 40)}, which `models.labels` does not name"


def _wrong_key(key: str) -> str:
    if not key:
        return "without a key"
    return "with a key that has a NUL character" if "\0" in key else "with a key that is too long"


def _cells(
    lines: Iterator[Sequence[Any]], name: str, key_column: str, label_column: str
) -> Iterator[Mapping[str, str]]:
    """Yield each row with the names `key`, `label`, `item`, `drawn_for`, `candidate_right` and `reference_right`, as far as the file has them.

    Raises
    ------
    OperatorError
        It cannot be read, or lacks a column.
    """
    head = next(lines, None)
    if head is None:
        raise OperatorError(f"{name} is empty: it needs a header line")
    names = [str(column).strip() for column in head]
    of = {
        _KEY: key_column,
        LABEL: label_column,
        _ITEM: _ITEM,
        DRAWN: DRAWN,
        **dict(zip(_SIDES, _SIDES, strict=True)),
    }
    if key_column not in names and _KEY in names:
        of[_KEY] = _KEY
    index_of = {what: names.index(column) for what, column in of.items() if column in names}
    listed = ", ".join(plain(column) for column in names[:20])
    if _KEY not in index_of:
        raise OperatorError(
            f"{name} has no column `{key_column}` or `key`: it has {listed}. Name it with --key-column (over HTTP key_column)"
        )
    if LABEL not in index_of and not all(side in index_of for side in _SIDES):
        raise OperatorError(
            f"{name} has neither a column `{label_column}` nor both {' and '.join(_SIDES)}: it has {listed}. Name it with"
            " --label-column (over HTTP label_column)"
        )
    for line in lines:
        if len(line) == len(names):
            yield {what: _text(line[index]) for what, index in index_of.items()}
        elif line:
            yield {}


def _csv(file: Path) -> Iterator[Sequence[Any]]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            yield from csv.reader(lines)
    except (UnicodeDecodeError, csv.Error) as error:
        raise OperatorError(f"{file} is no CSV file in UTF-8: {error}") from error
    except OSError as error:
        raise OperatorError(f"{file} cannot be read: {error.strerror}") from error


def _parquet(file: Path) -> Iterator[Sequence[Any]]:
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with pq.ParquetFile(file) as parquet:
            yield parquet.schema_arrow.names
            for batch in parquet.iter_batches():
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
    except (OSError, pa.ArrowInvalid) as error:
        raise OperatorError(f"{file} is no Parquet file: {str(error).splitlines()[0]}") from error


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell).strip()


def _number(text: str, most: int) -> int | None:
    """Return a whole number from 0 to `most`; None if the text is none, however long it is."""
    number = int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else -1
    return number if 0 <= number <= most else None


def _truth(text: str) -> bool | None:
    word = text.lower()
    return True if word in _TRUE else False if word in _FALSE else None
