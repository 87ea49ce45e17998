"""The command `quantdrift report`."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import Steps, show
from quantdrift.core.config.load import Role
from quantdrift.core.errors import OperatorError
from quantdrift.core.text import columns
from quantdrift.facts.status import said

if TYPE_CHECKING:
    from quantdrift.report.figures import ModelFigures, ReportedSlice, ReportFigures

_MOST_ROWS = 6


@click.command()
@CONFIG
@DATA
@click.option("--week", is_flag=True, help="The last seven days (the default).")
@click.option("--day", is_flag=True, help="The last 24 hours.")
@click.option("--from", "from_at", type=click.DateTime(), help="Start, UTC.")
@click.option("--to", "to_at", type=click.DateTime(), help="End, UTC, exclusive.  [default: now]")
@click.option("--model", default="", help="Only this model.  [default: all]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="File to write.  [default: a dated file in the directory reports]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "md", "json"]),
    help="What the file is: a page, Markdown, or all figures.  [default: as the name in --out ends, else html]",
)
@click.option("--pdf", is_flag=True, help="Print the page to a PDF beside it, too; needs Chromium.")
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
    form: str | None,
    pdf: bool,
    as_json: bool,
) -> None:
    """Write a report as one file: is the model good enough, which slices are affected, since when, and what to do; then all figures.

    The terminal shows one sentence and the worst slices of each version; --json prints all figures of the page.

    \b
    Examples:
      quantdrift report --week
      quantdrift report --from 2026-01-01 --to 2026-02-01 --out january.html --json
      quantdrift report --week --format md --out report.md
      quantdrift report --week --out week.html --pdf
    """
    import asyncio

    from quantdrift.show.report.page import Form, Period, write
    from quantdrift.show.report.pdf import browser, write_pdf

    if sum([week, day, from_at is not None]) > 1:
        raise OperatorError("give one of --week, --day and --from")
    config, secrets = prepare(config_path, Role.REPORT, data)
    end = (to_at or datetime.now(UTC)).replace(tzinfo=UTC)
    period = Period.of(
        kind="day" if day else "range" if from_at else "week",
        end=end,
        start=from_at.replace(tzinfo=UTC) if from_at else None,
    )
    suffix = out.suffix.removeprefix(".") if out else ""
    form = form or (suffix if suffix in {"md", "json"} else "html")
    if pdf and form != "html":
        raise OperatorError(
            "--pdf prints the HTML page: leave --format out, or name a file that ends in .html"
        )
    chromium = browser() if pdf else ""
    with Steps(quiet=as_json) as step:
        figures = asyncio.run(
            write(config, secrets, period, out=out, progress=step, model=model, form=Form(form))
        )
        printed = write_pdf(Path(figures.path), chromium) if pdf else None
    if as_json:
        emit(figures)
    else:
        show(summary(figures) + (f"\npdf: {printed}" if printed else ""))


def summary(figures: "ReportFigures") -> str:
    """Return the text for the terminal: a sentence and the worst slices of each version, and the path of the page."""
    tables = [_table(model) for model in figures.models if model.aggregate]
    doubts = [
        f"\n{model.model} {model.version}: its figures may mislead. {model.doubt[0].upper()}{model.doubt[1:]}."
        for model in figures.models
        if model.doubt
    ]
    return "\n".join([*figures.headlines(), *doubts, *tables, f"report: {figures.path}"])


def _table(model: "ModelFigures") -> str:
    """Return a version's aggregate and worst slices, with the tail of their divergence."""
    from quantdrift.report.finding import QUANTILES, SHORTFALL

    names = [f"p{100 * p:g}" for p in QUANTILES[1:]]
    entries = [entry for entry in (model.aggregate, *model.slices) if entry and entry.n_exchanges]
    rows_shown = entries[:_MOST_ROWS]
    measure = model.measure
    title = f"\n{model.model} {model.version}, {measure.name}{f' in {measure.unit}s' if measure.unit else ''}"
    head = (
        "slice",
        "verdict",
        "changed answers",
        measure.name,
        *names,
        f"mean above p{100 * SHORTFALL:g}",
        "exchanges",
    )
    left_out = (
        f"\n{len(entries) - len(rows_shown)} more are in the report" if len(entries) > len(rows_shown) else ""
    )
    return f"{title}\n{columns(head, [_row(entry) for entry in rows_shown])}{left_out}\n"


def _row(entry: "ReportedSlice") -> tuple[str, ...]:
    from quantdrift.core.notation import number, percent

    tail = [*entry.tail[1:], entry.shortfall]
    return (
        entry.name,
        said(entry.verdict),
        percent(entry.flip.mean) if entry.flip else "-",
        number(entry.divergence.mean) if entry.divergence else "-",
        *("-" if value is None else number(value.value) for value in tail),
        f"{entry.n_exchanges:,}",
    )
