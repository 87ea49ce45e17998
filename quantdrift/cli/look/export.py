"""The command `quantdrift export`."""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.core.config.load import Role
from quantdrift.core.errors import OperatorError

_WEEK_DAYS = 7


@click.command()
@CONFIG
@DATA
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Directory of the files; made if it is not there.",
)
@click.option(
    "--from", "from_at", type=click.DateTime(["%Y-%m-%d"]), help="First day, UTC.  [default: a week ago]"
)
@click.option(
    "--to", "to_at", type=click.DateTime(["%Y-%m-%d"]), help="Last day, UTC, inclusive.  [default: today]"
)
@click.option("--model", default="", help="Only this model.  [default: all]")
@click.option(
    "--slice", "slice_", default="", help="Only this slice; `all` has each item once.  [default: all slices]"
)
@JSON
def export(
    config_path: Path,
    data: Path | None,
    out: Path,
    from_at: datetime | None,
    to_at: datetime | None,
    model: str,
    slice_: str,
    as_json: bool,
) -> None:
    """Export compared items to Parquet files, one for each day.

    A row is an item in one of its slices, with its weight there: the view `item`. DuckDB, Polars, pandas and Spark read the
    directory as it is. An export that was interrupted goes on where it ended, and a later one writes only days that may have
    changed. Inputs and outputs are not stored, and so not exported; recorded attributes are.

    \b
    Examples:
      quantdrift export --out week
      quantdrift export --out digits --model digits --slice all --from 2026-11-01 --to 2026-11-07
      duckdb -c "select model, candidate_version, slice, count(*) from 'week/*/*.parquet' group by all"
    """
    from quantdrift.frames import export as files
    from quantdrift.frames.connection import SnapshotConnection

    config, secrets = prepare(config_path, Role.REPORT, data)
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    last = to_at.replace(tzinfo=UTC) if to_at else today
    first = from_at.replace(tzinfo=UTC) if from_at else last - timedelta(days=_WEEK_DAYS - 1)
    if first > last:
        raise OperatorError(f"--from {first:%Y-%m-%d} is after --to {last:%Y-%m-%d}")
    days = files.days_of(first, last + timedelta(days=1))
    connection = SnapshotConnection(secrets.dsn, statement_timeout=timedelta(hours=1))
    exported = files.export(
        connection,
        out,
        days,
        files.Request(model=model, slice=slice_),
        late=timedelta(seconds=config.stream.max_age_s),
    )
    done: list[files.Day] = []
    try:
        with click.progressbar(
            exported,
            length=len(days),
            label="Days",
            item_show_func=lambda day: f"{day.day}: {day.rows:,} rows" if day else "",
            file=sys.stderr,
            hidden=as_json,
        ) as bar:
            done.extend(bar)
    finally:
        connection.close()
    rows, written = sum(day.rows for day in done), sum(day.written for day in done)
    if as_json:
        emit({"directory": str(out), "rows": rows, "days": done})
        return
    earlier = f", {len(done) - written} of them from an earlier export" if written < len(done) else ""
    click.echo(f"{rows:,} rows of {len(done)} days in {out}{earlier}")
    if not rows:
        click.echo(
            "Nothing was compared in this time; check the names of --model and --slice with `quantdrift slices list`."
        )
