"""The command `quantdrift compare`."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import click
from click.shell_completion import CompletionItem

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import columns
from quantdrift.core.config.load import Role
from quantdrift.core.errors import OperatorError, QuantdriftError

if TYPE_CHECKING:
    from quantdrift.core.records import Metric
    from quantdrift.facts.estimate import Estimate
    from quantdrift.facts.figures import Figure
    from quantdrift.report.figures import ComparedSlice, VersionComparison
    from quantdrift.storage.report.facts import Version

_DAYS = 7
_TIME: Final = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?$")
"""What is a time and not the name of a version."""
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
    if parameter.name in {"model", "with_model"}:
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
    "version_",
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
    model: str,
    version_: str,
    with_model: str,
    with_version: str,
    not_in: tuple[str, ...],
    timezone: str,
    days: int,
    as_json: bool,
) -> None:
    """Compare two versions, two periods or two models, slice by slice, worst first.

    A difference is new minus old, with a 95 % interval for one look in which the answers to one person count as correlated. A
    slice is called worse or better where that allows for the number of slices (Holm): if nothing differs, a comparison names any
    slice with a probability of at most 5 %.

    \b
    Examples:
      quantdrift compare --from int8-1 --to int8-2
      quantdrift compare --from int8-1 --to int8-2 --not-in 2026-11-11 --timezone Europe/Berlin
      quantdrift compare --model digits --old-from 2026-11-02 --old-to 2026-11-09 --from 2026-11-09 --to 2026-11-16
      quantdrift compare --model digits --with-model letters --days 2 --json
    """
    from quantdrift.report.compare import Sides, compare_models, compare_periods
    from quantdrift.report.compare import compare as compare_versions
    from quantdrift.storage.database import Database
    from quantdrift.storage.estimates import STATEMENT_S
    from quantdrift.storage.report.reading import reading

    zone = _zone(timezone)
    left_out = tuple(_left_out(text, zone) for text in not_in)
    old = _span(("--old-from", old_from), ("--old-to", old_to), zone) if old_from or old_to else None
    are_times = bool(old) or any(_TIME.match(text) for text in (begin, end))
    new = _span(("--from", begin), ("--to", end), zone) if are_times else None
    if with_model and (not model or old or bool(begin or end) is not are_times):
        raise OperatorError("--with-model needs --model, and times for --from and --to if there are any")
    if not with_model and not old and (are_times or not (begin and end)):
        raise OperatorError(
            "give two versions (--from OLD --to NEW), two periods (--old-from, --old-to, --from, --to), or two models"
            " (--model, --with-model)"
        )
    config, secrets = prepare(config_path, Role.REPORT, data)

    async def ask() -> "VersionComparison":
        async with (
            Database(secrets.dsn, statement_timeout_s=STATEMENT_S) as database,
            reading(database) as reader,
        ):
            if with_model:
                within = Sides(begin=new and new[0], end=new and new[1], not_in=left_out)
                pair = {"old": (with_model, with_version), "new": (model, version_)}
                return await compare_models(reader, config, **pair, days=days, within=within)
            if old and new:
                return await compare_periods(
                    reader, config, old=old, new=new, model=model, version=version_, not_in=left_out
                )
            return await compare_versions(
                reader, config, old=begin, new=end, model=model, days=days, within=Sides(not_in=left_out)
            )

    found = asyncio.run(ask())
    if as_json:
        emit(found)
    else:
        click.echo(text_of(found))


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise OperatorError(f"--timezone `{name[:64]}` is not a time zone such as Europe/Berlin") from error


def _time(option: str, text: str, zone: ZoneInfo) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise OperatorError(
            f"{option} `{text[:64]}` is not a time such as 2026-11-11 or 2026-11-11T08:00"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=zone)


def _span(begin: tuple[str, str], end: tuple[str, str], zone: ZoneInfo) -> tuple[datetime, datetime]:
    """Return a period from two options, each with its name."""
    for option, text in (begin, end):
        if not text:
            raise OperatorError(f"{option} is missing: a period has a begin and an end")
    span = _time(*begin, zone).astimezone(UTC), _time(*end, zone).astimezone(UTC)
    if span[0] >= span[1]:
        raise OperatorError(f"{begin[0]} is not before {end[0]}")
    return span


def _left_out(text: str, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """Return a day or a time to leave out; a day of the time zone may have 23 or 25 hours."""
    begin, slash, end = text.partition("/")
    if slash:
        return _span(("--not-in", begin), ("--not-in", end), zone)
    day = _time("--not-in", begin, zone)
    return day.astimezone(UTC), (day + timedelta(days=1)).astimezone(UTC)


def text_of(found: "VersionComparison") -> str:
    """Return the comparison for the terminal: a sentence, the table, and what only one version has."""
    from quantdrift.core.notation import moment
    from quantdrift.facts.cost import money_of

    lines = [found.sentence, found.old.basis, found.new.basis]
    lines += [f"left out: {moment(one.begin)} to {moment(one.end)}" for one in found.not_in]
    if found.cost is not None:
        lines.append(f"cost of the difference in the window of the new side: {money_of(found.cost)}")
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
            lines.append(f"only in {version.label or version.version}: {', '.join(names[:_MOST_ROWS])}{more}")
    return "\n".join(lines)


def _table(found: "VersionComparison", entries: "list[ComparedSlice]") -> str:
    from quantdrift.core.records import Metric
    from quantdrift.core.tasks import MEASURES

    measure = MEASURES[found.task]
    unit = f", {measure.unit}" if measure.unit else ""
    rows = [
        (
            entry.name,
            entry.shown,
            _share(entry.old.flip),
            _share(entry.new.flip),
            _difference(Metric.FLIP, entry.flip),
            _difference(Metric.DIVERGENCE, entry.divergence),
            f"{entry.old.n_exchanges:,} / {entry.new.n_exchanges:,}",
        )
        for entry in entries
    ]
    head = (
        "slice",
        "change",
        f"flips {found.old.label or found.old.version}",
        f"flips {found.new.label or found.new.version}",
        "difference, points",
        f"difference of {measure.name}{unit}",
        "exchanges",
    )
    return columns(head, rows)


def _share(figure: "Figure | None") -> str:
    from quantdrift.facts.figures import shown

    return "-" if figure is None else str(shown(figure))


def _difference(metric: "Metric", estimate: "Estimate | None") -> str:
    from quantdrift.facts.words.amount import signed

    return "-" if estimate is None else signed(metric, estimate)
