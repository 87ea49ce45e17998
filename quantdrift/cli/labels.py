"""The command `quantdrift labels`."""

import asyncio
import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import Steps, columns
from quantdrift.core.config.load import Role
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.errors import OperatorError
from quantdrift.core.text import plain

if TYPE_CHECKING:
    from quantdrift.report.labels import LabelledSlice
    from quantdrift.storage.labels import Loaded, Row

_KEY, _LABEL, _ITEM = "key", "label", "item"
_SIDES: Final = ("candidate_right", "reference_right")
_TRUE, _FALSE = frozenset({"true", "1", "yes", "t"}), frozenset({"false", "0", "no", "f"})
_MOST_ROWS: Final = 5_000_000
_MOST_TEXT: Final = 1_000
_MOST_ITEM: Final = 32_767
_MOST_CLASS: Final = 2**31 - 1
_MOST_REASONS: Final = 8
_DAYS: Final = 7


@click.group()
def labels() -> None:
    """Load true labels, and show where the candidate is less accurate than its reference."""


@labels.command("load")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@CONFIG
@DATA
@click.option(
    "--by",
    required=True,
    metavar="NAME",
    help="What the keys of the file are: a recorded attribute such as header.x-request-id, `exchange` or `trace`.",
)
@click.option("--model", default="", help="The model.  [default: the only one of the configuration]")
@click.option("--key-column", default="", help="Column with the keys.  [default: NAME, or key]")
@click.option("--label-column", default=_LABEL, show_default=True, help="Column with the true class.")
@JSON
def load(
    file: Path,
    config_path: Path,
    data: Path | None,
    by: str,
    model: str,
    key_column: str,
    label_column: str,
    as_json: bool,
) -> None:
    """Load true labels from FILE, a CSV file with a header line or a Parquet file (.parquet).

    Each row has a key, which finds the exchange, and the true class: its name in `models.labels`, or its number from 0. A
    column `item` gives the item of exchanges that have several. In place of the class a file may have two columns,
    candidate_right and reference_right, with true or false: for models that choose no class. A row whose request was not
    sampled finds nothing; the command says how many there are. Loading a file again changes nothing.

    \b
    Examples:
      quantdrift labels load truth.csv --by header.x-request-id
      quantdrift labels load truth.parquet --by trace --model digits --label-column digit
    """
    from quantdrift.storage.database import Database
    from quantdrift.storage.labels import load as store

    config, secrets = prepare(config_path, Role.REPORT, data)
    of = _model(config, model)
    with Steps(quiet=as_json) as step:
        step(f"reading {file.name}")
        rows, wrong = _rows(file, of, key_column or by, label_column)
        if not rows:
            raise OperatorError(f"{file} has no row that can be used: {_listed(wrong) or 'it is empty'}")
        step(f"searching the exchanges of {len(rows):,} rows")
        since = datetime.now(UTC) - timedelta(days=config.storage.retention_days)

        async def run() -> "Loaded":
            async with (
                Database(secrets.dsn, statement_timeout_s=600.0) as database,
                database.begin() as connection,
            ):
                return await store(connection, rows, model=of.name, by=by, since=since, source=file.name)

        loaded = asyncio.run(run())
    if as_json:
        emit({"loaded": loaded, "left_out": dict(wrong)})
        return
    click.echo(f"{loaded.labelled:,} items of {of.name} are labelled, from {loaded.rows:,} rows")
    if loaded.unmatched:
        keys = ", ".join(plain(key) for key in loaded.unmatched_keys)
        click.echo(
            f"{loaded.unmatched:,} rows found no compared item, such as {keys}: their requests were not sampled, are older than"
            f" {config.storage.retention_days:g} days, or {by} is not recorded"
        )
    if loaded.undecided:
        click.echo(
            f"{loaded.undecided:,} items were found, and which answer was right cannot be said: they have no top class"
        )
    if wrong:
        click.echo(f"left out: {_listed(wrong)}")
    if loaded.labelled:
        click.echo("See what they say: quantdrift labels show")


@labels.command("show")
@CONFIG
@DATA
@click.option("--model", default="", help="The model.  [default: the only one of the configuration]")
@click.option(
    "--version",
    "version_",
    default="",
    help="Only this candidate version.  [default: the newest with labels]",
)
@click.option(
    "--days", type=click.IntRange(1, 366), default=_DAYS, show_default=True, help="So many days back."
)
@JSON
def show(config_path: Path, data: Path | None, model: str, version_: str, days: int, as_json: bool) -> None:
    """Show by slice how often the candidate is wrong where the reference is right, and the reverse, worst first.

    Intervals are 95 %, with a session as one unit. They say something about the traffic if labels do not depend on who is right.

    \b
    Examples:
      quantdrift labels show
      quantdrift labels show --model digits --days 30 --json
    """
    from quantdrift.report.labels import worst_first
    from quantdrift.storage.database import Database
    from quantdrift.storage.labels import outcomes
    from quantdrift.storage.report.reading import reading

    config, secrets = prepare(config_path, Role.REPORT, data)
    name = _model(config, model).name
    end = datetime.now(UTC)

    async def run() -> "tuple[str, tuple[LabelledSlice, ...]]":
        async with Database(secrets.dsn) as database:
            async with reading(database) as reader:
                known = {
                    one.id: one.candidate_version
                    for one in await reader.versions()
                    if one.model == name and version_ in {"", one.candidate_version}
                }
            if version_ and not known:
                raise OperatorError(f"no version `{version_}` of {name} is known: see `quantdrift report`")
            async with database.begin() as connection:
                found = await outcomes(connection, list(known), end - timedelta(days=days), end)
        if not found:
            return "", ()
        newest = max(outcome.model_version_id for outcome in found)
        return known[newest], worst_first([one for one in found if one.model_version_id == newest])

    version, slices = asyncio.run(run())
    if as_json:
        emit({"model": name, "version": version, "slices": slices})
    elif not slices:
        click.echo(
            f"No item of {name} of the last {days} days has a label: load some with `quantdrift labels load`."
        )
    else:
        click.echo(_table(name, version, slices))


def _table(name: str, version: str, slices: "Sequence[LabelledSlice]") -> str:
    from quantdrift.report.wording import points

    head = (
        "slice",
        "result",
        "loses",
        "only the candidate wrong",
        "only the reference wrong",
        "both wrong",
        "labels",
    )
    rows = [
        (
            plain(one.slice),
            one.words,
            points(one.loss),
            points(one.harm),
            points(one.help),
            points(one.both_wrong),
            f"{one.n_items:,}",
        )
        for one in slices
    ]
    return f"{plain(name)} {plain(version)}, answers in %\n{columns(head, rows)}"


def _model(config: Config, name: str) -> Model:
    names = [model.name for model in config.models]
    if not name and len(names) != 1:
        raise OperatorError(f"several models are configured: give --model, one of {', '.join(names)}")
    for model in config.models:
        if name in {"", model.name}:
            return model
    raise OperatorError(f"no model `{name}` is configured: {', '.join(names)}")


def _rows(file: Path, model: Model, key_column: str, label_column: str) -> "tuple[list[Row], Counter[str]]":
    """Return the rows that can be used, and how many others there are by reason."""
    numbers = {name: number for number, name in enumerate(model.labels)}
    rows: list[Row] = []
    wrong: Counter[str] = Counter()
    for n, cells in enumerate(_cells(file, key_column, label_column), start=1):
        if n > _MOST_ROWS:
            raise OperatorError(f"{file} has more than {_MOST_ROWS:,} rows: split it")
        row = _row(n, cells, numbers)
        if not isinstance(row, str):
            rows.append(row)
        elif row in wrong or len(wrong) < _MOST_REASONS:
            wrong[row] += 1
        else:
            wrong["other reasons"] += 1
    return rows, wrong


def _row(n: int, cells: Mapping[str, str], numbers: Mapping[str, int]) -> "Row | str":
    """Return a row, or why it cannot be used; `numbers` are those of the classes by name."""
    from quantdrift.storage.labels import Row

    key, item, label = cells.get(_KEY, ""), cells.get(_ITEM) or "0", cells.get(_LABEL, "")
    if not key or len(key) > _MOST_TEXT:
        return "with a key that is too long" if key else "without a key"
    if not item.isdecimal() or int(item) > _MOST_ITEM:
        return f"with an item that is no number from 0 to {_MOST_ITEM}"
    candidate, reference = (_truth(cells.get(side, "")) for side in _SIDES)
    if candidate is not None and reference is not None:
        return Row(n=n, key=key, item=int(item), candidate_right=candidate, reference_right=reference)
    if not label:
        return "without a label"
    number = numbers.get(label, int(label) if label.isdecimal() else -1)
    if 0 <= number <= _MOST_CLASS:
        return Row(n=n, key=key, item=int(item), label=label[:_MOST_TEXT], number=number)
    return f"with the class {plain(label, 40)}, which `models.labels` does not name"


def _cells(file: Path, key_column: str, label_column: str) -> Iterator[Mapping[str, str]]:
    """Yield each row with the names `key`, `label`, `item`, `candidate_right` and `reference_right`, as far as the file has them.

    Raises
    ------
    OperatorError
        The file cannot be read, or lacks a column.
    """
    read = _parquet if file.suffix == ".parquet" else _csv
    lines = read(file)
    head = next(lines, None)
    if head is None:
        raise OperatorError(f"{file} is empty: it needs a header line")
    names = [str(name).strip() for name in head]
    of = {_KEY: key_column, _LABEL: label_column, _ITEM: _ITEM, **dict(zip(_SIDES, _SIDES, strict=True))}
    if key_column not in names and _KEY in names:
        of[_KEY] = _KEY
    place = {name: names.index(column) for name, column in of.items() if column in names}
    listed = ", ".join(plain(name) for name in names[:20])
    if _KEY not in place:
        raise OperatorError(
            f"{file} has no column `{key_column}` or `key`: it has {listed}. Name it with --key-column"
        )
    if _LABEL not in place and not all(side in place for side in _SIDES):
        raise OperatorError(
            f"{file} has neither a column `{label_column}` nor both {' and '.join(_SIDES)}: it has {listed}. Name it with"
            " --label-column"
        )
    for line in lines:
        if len(line) == len(names):
            yield {name: _text(line[index]) for name, index in place.items()}
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
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            yield parquet.schema_arrow.names
            for batch in parquet.iter_batches():
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
    except (OSError, pa.ArrowInvalid) as error:
        raise OperatorError(f"{file} is no Parquet file: {str(error).splitlines()[0]}") from error


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell).strip()


def _truth(text: str) -> bool | None:
    word = text.lower()
    return True if word in _TRUE else False if word in _FALSE else None


def _listed(wrong: Mapping[str, int]) -> str:
    return "; ".join(f"{n:,} {why}" for why, n in wrong.items())
