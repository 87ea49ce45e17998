"""The command `quantdrift compare`."""

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

import quantdrift
from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare, set_up_logs
from quantdrift.cli.output import waiting
from quantdrift.core.config.load import Role, load
from quantdrift.core.errors import QuantdriftError
from quantdrift.storage.versions import candidate_versions

if TYPE_CHECKING:
    from quantdrift.storage.versions import Version

_DAYS = 7
_TIME: Final = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?$")
"""What is a time and not the name of a version."""
_COMPLETION_S = 3.0


def _names(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the versions, or models, whose names begin so; none where the database cannot be asked."""
    parameters = context.params
    try:
        with context.scope(cleanup=False):
            _, secrets = prepare(
                parameters.get("config_path") or Path("config.toml"), Role.REPORT, parameters.get("data")
            )
        versions = asyncio.run(asyncio.wait_for(_versions(secrets.dsn), _COMPLETION_S))
    except (QuantdriftError, TimeoutError):
        return []
    if parameter.name in {"model", "with_model"}:
        names = [version.model for version in versions]
    else:
        wanted = parameters.get("model")
        names = [version.candidate_version for version in versions if wanted in {None, "", version.model}]
    return [CompletionItem(name) for name in dict.fromkeys(names) if name.startswith(begun)]


async def _versions(dsn: str) -> "list[Version]":
    from quantdrift.storage.database import Database
    from quantdrift.storage.snapshot import reading

    async with Database(dsn) as database, reading(database) as connection:
        return await candidate_versions(connection)


@click.command()
@CONFIG
@DATA
@click.option(
    "--from",
    "begin",
    default="",
    shell_complete=_names,
    help="The version to compare with; or, as a time, the begin of the period that is judged.",
)
@click.option(
    "--to",
    "end",
    default="",
    shell_complete=_names,
    help="The version that is judged; or, as a time, the end of the period, exclusive.",
)
@click.option("--old-from", default="", help="Begin of the period to compare with.")
@click.option("--old-to", default="", help="End of the period to compare with, exclusive.")
@click.option(
    "--model",
    default="",
    shell_complete=_names,
    help="The model.  [default: the only one that has both versions]",
)
@click.option(
    "--version",
    default="",
    shell_complete=_names,
    help="With times or two models: the version.  [default: the newest one that was compared]",
)
@click.option(
    "--with-model",
    default="",
    shell_complete=_names,
    help="The model that --model is compared with, in the same hours.",
)
@click.option("--with-version", default="", help="Its version.  [default: the newest one that was compared]")
@click.option(
    "--not-in",
    multiple=True,
    metavar="DATE|TIME/TIME",
    help="Leave out this day, or this time, on both sides. Can be repeated.",
)
@click.option(
    "--timezone", default="UTC", show_default=True, help="Time zone of all times, e.g. Europe/Berlin."
)
@click.option(
    "--days",
    type=click.IntRange(1, 366),
    default=_DAYS,
    show_default=True,
    help="Without times: of each version compare at most this many of its newest days.",
)
@JSON
def compare(
    config_path: Path,
    *,
    data: Path | None,
    begin: str,
    end: str,
    old_from: str,
    old_to: str,
    not_in: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Compare two versions, two periods or two models, slice by slice, worst first.

    Without any option the version that was seen last is compared with the one that was seen last before it.

    A difference is new minus old, with a 95 % interval for one look in which the answers to one person count as correlated. A
    slice is called worse or better where that allows for the number of slices (Holm): if nothing differs, a comparison names any
    slice with a probability of at most 5 %.

    \b
    Examples:
      quantdrift compare
      quantdrift compare --from int8-1 --to int8-2
      quantdrift compare --from int8-1 --to int8-2 --not-in 2026-11-11 --timezone Europe/Berlin
      quantdrift compare --model digits --old-from 2026-11-02 --old-to 2026-11-09 --from 2026-11-09 --to 2026-11-16
      quantdrift compare --model digits --with-model letters --days 2 --json
    """
    period = bool(old_from or old_to) or any(_TIME.match(text) for text in (begin, end))
    set_up_logs(load(config_path))
    with waiting("comparing", quiet=as_json):
        result = quantdrift.compare(
            (old_from, old_to) if old_from or old_to else None if period else begin or None,
            (begin, end) if period else end or None,
            config=config_path,
            data=data,
            not_in=[
                (text.partition("/")[0], text.partition("/")[2]) if "/" in text else text for text in not_in
            ],
            **options,
        )
    if as_json:
        emit(result.to_dict())
    else:
        click.echo(str(result))
