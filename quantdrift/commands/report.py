"""`quantdrift report`."""

from datetime import UTC, datetime
from pathlib import Path

import click

from quantdrift.commands.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.core.config.load import Role
from quantdrift.core.errors import OperatorError
from quantdrift.terminal import Steps


@click.command()
@CONFIG
@DATA
@click.option("--week", is_flag=True, help="The last seven days (the default).")
@click.option("--day", is_flag=True, help="The last 24 hours.")
@click.option("--from", "from_at", type=click.DateTime(), help="Begin, UTC.")
@click.option("--to", "to_at", type=click.DateTime(), help="End, UTC, exclusive; now if left out.")
@click.option("--model", default="", help="Only this model; all of them if left out.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="File to write; else a dated one in report.directory."
)
@JSON
def report(
    config_path: Path,
    data: Path | None,
    week: bool,
    day: bool,
    from_at: datetime | None,
    to_at: datetime | None,
    model: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Write one self-contained HTML file: what fired, the worst slices, trends, coverage and losses.

    \b
    Examples:
      quantdrift report --week --data .quantdrift
      quantdrift report --from 2026-01-01 --to 2026-02-01 --out january.html --json
    """
    import asyncio

    from quantdrift.report.page import Period, write

    if sum([week, day, from_at is not None]) > 1:
        raise OperatorError("give one of --week, --day and --from")
    config, secrets = prepare(config_path, Role.REPORT, data)
    end = (to_at or datetime.now(UTC)).replace(tzinfo=UTC)
    period = Period.of(
        kind="day" if day else "range" if from_at else "week",
        end=end,
        start=from_at.replace(tzinfo=UTC) if from_at else None,
    )
    with Steps(quiet=as_json) as step:
        figures = asyncio.run(write(config, secrets, period, out=out, progress=step, model=model))
    if as_json:
        emit(figures)
    else:
        click.echo(figures.summary())
