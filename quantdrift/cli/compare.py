"""The command `quantdrift compare`."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import columns
from quantdrift.core.config.load import Role
from quantdrift.core.errors import QuantdriftError

if TYPE_CHECKING:
    from quantdrift.core.records import Metric
    from quantdrift.facts.estimate import Estimate
    from quantdrift.report.figures import ComparedSlice, ComparedVersion, VersionComparison
    from quantdrift.storage.report.facts import Version

_DAYS = 7
_MOST_ROWS = 20
_COMPLETION_S = 3.0


def _names(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the versions, or models, whose names begin so; none where the database cannot be asked."""
    given = context.params
    try:
        with context.scope(cleanup=False):
            _, secrets = prepare(
                given.get("config_path") or Path("config.toml"), Role.REPORT, given.get("data")
            )
        versions = asyncio.run(asyncio.wait_for(_versions(secrets.dsn), _COMPLETION_S))
    except (QuantdriftError, TimeoutError):
        return []
    if parameter.name == "model":
        names = [version.model for version in versions]
    else:
        wanted = given.get("model")
        names = [version.candidate_version for version in versions if wanted in {None, "", version.model}]
    return [CompletionItem(name) for name in dict.fromkeys(names) if name.startswith(begun)]


async def _versions(dsn: str) -> "list[Version]":
    from quantdrift.storage.database import Database
    from quantdrift.storage.report.reading import reading

    async with Database(dsn) as database, reading(database) as reader:
        return await reader.versions()


@click.command()
@CONFIG
@DATA
@click.option("--from", "old", required=True, shell_complete=_names, help="The version to compare with.")
@click.option("--to", "new", required=True, shell_complete=_names, help="The version that is judged.")
@click.option(
    "--model",
    default="",
    shell_complete=_names,
    help="Their model.  [default: the only one that has both versions]",
)
@click.option(
    "--days",
    type=click.IntRange(1, 366),
    default=_DAYS,
    show_default=True,
    help="Of each version, compare at most this many of its newest days.",
)
@JSON
def compare(
    config_path: Path, data: Path | None, old: str, new: str, model: str, days: int, as_json: bool
) -> None:
    """Compare two versions of a model, slice by slice, worst first.

    A difference is new minus old, with a 95 % interval in which the exchanges of a session count as one unit. An interval
    above 0 says worse, one below 0 better. Of many slices, about one in twenty is named by chance.

    \b
    Examples:
      quantdrift compare --from int8-1 --to int8-2
      quantdrift compare --model digits --from int8-1 --to int8-2 --days 2 --json
    """
    from quantdrift.report.compare import compare as compared
    from quantdrift.storage.database import Database
    from quantdrift.storage.estimates import STATEMENT_S
    from quantdrift.storage.report.reading import reading

    config, secrets = prepare(config_path, Role.REPORT, data)

    async def ask() -> "VersionComparison":
        async with (
            Database(secrets.dsn, statement_timeout_s=STATEMENT_S) as database,
            reading(database) as reader,
        ):
            return await compared(reader, config, old=old, new=new, model=model, days=days)

    found = asyncio.run(ask())
    if as_json:
        emit(found)
    else:
        click.echo(text_of(found))


def text_of(found: "VersionComparison") -> str:
    """Return the comparison for the terminal: a sentence, the table, and what only one version has."""
    from quantdrift.report.wording import compared_sentence

    lines = [compared_sentence(found), _window(found.old), _window(found.new)]
    if found.warning:
        lines.append(f"Careful: {found.warning}.")
    entries = [entry for entry in (found.aggregate, *found.slices) if entry is not None]
    if entries:
        lines += ["", _table(found, entries[: _MOST_ROWS + 1])]
    if len(entries) > _MOST_ROWS + 1:
        lines.append(f"{len(entries) - _MOST_ROWS - 1} more: --json prints all")
    for version, names in ((found.old, found.only_old), (found.new, found.only_new)):
        if names:
            more = f" and {len(names) - _MOST_ROWS} more" if len(names) > _MOST_ROWS else ""
            lines.append(f"only in {version.version}: {', '.join(names[:_MOST_ROWS])}{more}")
    return "\n".join(lines)


def _window(version: "ComparedVersion") -> str:
    from quantdrift.report.wording import moment

    return f"{version.version}: {moment(version.begin)} to {moment(version.end)}, from {version.source.value}"


def _table(found: "VersionComparison", entries: "list[ComparedSlice]") -> str:
    from quantdrift.core.records import Metric
    from quantdrift.core.tasks import MEASURES
    from quantdrift.report.wording import count

    measure = MEASURES[found.task]
    unit = f", {measure.unit}" if measure.unit else ""
    rows = [
        (
            entry.name,
            entry.shown,
            _mean(Metric.FLIP, entry.old.flip),
            _mean(Metric.FLIP, entry.new.flip),
            _difference(Metric.FLIP, entry.flip),
            _difference(Metric.DIVERGENCE, entry.divergence),
            f"{count(entry.old.n_exchanges)} / {count(entry.new.n_exchanges)}",
        )
        for entry in entries
    ]
    head = (
        "slice",
        "change",
        f"flips {found.old.version}",
        f"flips {found.new.version}",
        "difference, points",
        f"difference of {measure.name}{unit}",
        "exchanges",
    )
    return columns(head, rows)


def _mean(metric: "Metric", estimate: "Estimate | None") -> str:
    from quantdrift.report.wording import amount

    return "-" if estimate is None else amount(metric, estimate.mean, "")


def _difference(metric: "Metric", estimate: "Estimate | None") -> str:
    from quantdrift.report.wording import signed

    return "-" if estimate is None else signed(metric, estimate)
