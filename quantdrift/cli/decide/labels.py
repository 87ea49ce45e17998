"""The command `quantdrift labels`."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import Steps
from quantdrift.core.config.load import Role
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.errors import OperatorError
from quantdrift.core.text import columns, plain
from quantdrift.storage.slices.verdicts import slice_names
from quantdrift.storage.versions import candidate_versions

if TYPE_CHECKING:
    from quantdrift.facts.figures import Figure
    from quantdrift.report.labels import LabelledSlice
    from quantdrift.storage.labels import Loaded, WantedLabel

_DAYS: Final = 7
_MODEL = click.option("--model", default="", help="The model.  [default: the only one of the configuration]")
_DAYS_BACK = click.option(
    "--days", type=click.IntRange(1, 366), default=_DAYS, show_default=True, help="So many days back."
)
_REQUEST_ID: Final = "header.x-request-id"


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
@_MODEL
@click.option("--key-column", default="", help="Column with the keys.  [default: NAME, or key]")
@click.option("--label-column", default="label", show_default=True, help="Column with the true class.")
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
    from quantdrift.report.label_rows import listed, rows_of_file
    from quantdrift.storage.database import Database
    from quantdrift.storage.labels import load as store

    config, secrets = prepare(config_path, Role.REPORT, data)
    of = _model(config, model)
    with Steps(quiet=as_json) as step:
        step(f"reading {file.name}")
        rows, wrong = rows_of_file(file, of, key_column or by, label_column)
        if not rows:
            raise OperatorError(f"{file} has no row that can be used: {listed(wrong) or 'it is empty'}")
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
        click.echo(f"left out: {listed(wrong)}")
    if loaded.labelled:
        click.echo("See what they say: quantdrift labels show")


@labels.command("wanted")
@CONFIG
@DATA
@_MODEL
@click.option(
    "--version",
    "version_",
    default="",
    help="Only this candidate version.  [default: the newest that was compared]",
)
@click.option("--slice", "slice_", default="all", show_default=True, help="Name or id of a slice.")
@click.option("--n", type=click.IntRange(1, 10_000), default=50, show_default=True, help="So many answers.")
@_DAYS_BACK
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Write them to this new CSV file, with an empty column for the labels.",
)
@JSON
def wanted(
    config_path: Path,
    data: Path | None,
    model: str,
    version_: str,
    slice_: str,
    n: int,
    days: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Draw changed answers for somebody to label: 50 of them say as much as thousands of labels that come by themselves.

    The candidate can only lose accuracy where its answer changed, and how many answers changed is known. So the labels of some changed
    answers, drawn at random, are enough to say how much accuracy a slice loses. Let somebody find each request by its id, fill in the column
    `label` of the file, and load it. Asked again before that, the command draws the same answers. Inputs are not stored, and so not shown.

    \b
    Examples:
      quantdrift labels wanted --slice scanner=archive --out wanted.csv
      quantdrift labels load wanted.csv --by exchange
      quantdrift labels show
    """
    from quantdrift.report.label_rows import write_wanted
    from quantdrift.storage.database import Database
    from quantdrift.storage.labels import draw
    from quantdrift.storage.snapshot import reading

    config, secrets = prepare(config_path, Role.REPORT, data)
    of = _model(config, model)
    end = datetime.now(UTC)

    async def run() -> "tuple[str, int, list[WantedLabel]]":
        async with (
            Database(secrets.dsn, statement_timeout_s=600.0) as database,
            reading(database) as connection,
        ):
            versions = [
                version
                for version in await candidate_versions(connection)
                if version.model == of.name and version_ in {"", version.candidate_version}
            ]
            if not versions:
                raise OperatorError(
                    f"no version{f' `{version_}`' if version_ else ''} of {of.name} was compared yet: see `quantdrift status`"
                )
            newest = max(versions, key=lambda version: version.id)
            named = [
                entry
                for entry in await slice_names(connection)
                if entry.model == of.name and slice_ in {entry.name, str(entry.id)}
            ]
            named.sort(key=lambda entry: entry.name != slice_)
            if not named:
                raise OperatorError(f"{of.name} has no slice `{slice_}`: see `quantdrift slices list`")
            drawn = await draw(
                connection,
                version_id=newest.id,
                slice_id=named[0].id,
                begin=end - timedelta(days=days),
                end=end,
                n=n,
                header=_REQUEST_ID,
            )
            return newest.candidate_version, named[0].id, drawn

    version, slice_id, drawn = asyncio.run(run())
    if out is not None and drawn:
        write_wanted(out, drawn, slice_id, of, config.telemetry.trace_url)
    if as_json:
        emit({"model": of.name, "version": version, "slice": slice_, "drawn_for": slice_id, "wanted": drawn})
    elif not drawn:
        click.echo(
            f"No changed answer of {plain(slice_)} of {plain(of.name)} {plain(version)} of the last {days} days is without a drawn label."
        )
    else:
        click.echo(_wanted_table(of, drawn))
        few = f" There are no more than these {len(drawn)}." if len(drawn) < n else ""
        click.echo(
            f"{len(drawn)} changed answers of {plain(slice_)}, {plain(of.name)} {plain(version)}, drawn at random.{few}"
        )
        click.echo(
            f"Fill in the column label of {out}, then: quantdrift labels load {out} --by exchange"
            if out
            else "Write them to a file to fill in: --out wanted.csv"
        )


def _wanted_table(of: Model, drawn: "Sequence[WantedLabel]") -> str:
    from quantdrift.report.label_rows import class_name

    rows = [
        (
            answer.exchange_id,
            str(answer.item),
            f"{answer.captured_at:%Y-%m-%d %H:%M:%S}",
            plain(answer.request_id or "-"),
            class_name(of, answer.reference),
            class_name(of, answer.candidate),
        )
        for answer in drawn
    ]
    return columns(
        ("exchange", "item", "captured (UTC)", _REQUEST_ID.partition(".")[2], "reference", "candidate"), rows
    )


@labels.command("show")
@CONFIG
@DATA
@_MODEL
@click.option(
    "--version",
    "version_",
    default="",
    help="Only this candidate version.  [default: the newest with labels]",
)
@_DAYS_BACK
@JSON
def show(config_path: Path, data: Path | None, model: str, version_: str, days: int, as_json: bool) -> None:
    """Show by slice how often the candidate is wrong where the reference is right, and the reverse, worst first.

    With prices in `[cost]` it shows what the lost accuracy costs in that time. Intervals are 95 %; they count that the answers to one person are correlated, where `sampling.sticky_header` says who that is. They say something about the traffic if labels do not depend on who is right.

    \b
    Examples:
      quantdrift labels show
      quantdrift labels show --model digits --days 30 --json
    """
    from quantdrift.facts.figures import period
    from quantdrift.report.labels import worst_first
    from quantdrift.storage.cost import lost_costs, prices_of
    from quantdrift.storage.database import Database
    from quantdrift.storage.figures.estimates import STATEMENT_S
    from quantdrift.storage.figures.figures import versions
    from quantdrift.storage.labels import outcomes
    from quantdrift.storage.snapshot import reading

    config, secrets = prepare(config_path, Role.REPORT, data)
    name = _model(config, model).name
    end = datetime.now(UTC)

    async def run() -> "tuple[str, tuple[LabelledSlice, ...], dict[str, Figure]]":
        async with Database(secrets.dsn, statement_timeout_s=STATEMENT_S) as database:
            async with reading(database) as connection:
                version_names = {
                    entry.id: entry.candidate_version
                    for entry in await candidate_versions(connection)
                    if entry.model == name and version_ in {"", entry.candidate_version}
                }
            if version_ and not version_names:
                raise OperatorError(f"no version `{version_}` of {name} is known: see `quantdrift report`")
            async with database.begin() as connection:
                all_outcomes = await outcomes(
                    connection, list(version_names), end - timedelta(days=days), end
                )
                if not all_outcomes:
                    return "", (), {}
                newest = max(outcome.model_version_id for outcome in all_outcomes)
                ids = {
                    entry.slice: entry.slice_id for entry in all_outcomes if entry.model_version_id == newest
                }
                slices = worst_first([entry for entry in all_outcomes if entry.model_version_id == newest])
                costs: dict[int, Figure] = {}
                for version in (await versions(connection, [newest])).values():
                    begin = (end - timedelta(days=days)).replace(minute=0, second=0, microsecond=0)
                    losses = {ids[entry.slice]: entry.loss for entry in slices}
                    costs = await lost_costs(
                        connection, prices_of(config, name), version, period(begin, end), losses
                    )
        return (
            version_names[newest],
            slices,
            {entry: costs[number] for entry, number in ids.items() if number in costs},
        )

    version, slices, costs = asyncio.run(run())
    if as_json:
        rows = [
            msgspec.to_builtins(entry) | ({"cost": costs[entry.slice]} if entry.slice in costs else {})
            for entry in slices
        ]
        emit({"model": name, "version": version, "slices": rows})
    elif not slices:
        click.echo(
            f"No item of {name} of the last {days} days has a label: load some with `quantdrift labels load`."
        )
    else:
        click.echo(_table(name, version, slices, costs))


def _table(name: str, version: str, slices: "Sequence[LabelledSlice]", costs: "Mapping[str, Figure]") -> str:
    from quantdrift.facts.cost import money_of
    from quantdrift.facts.words.amount import points

    head: tuple[str, ...] = (
        "slice",
        "result",
        "loses",
        "only the candidate wrong",
        "only the reference wrong",
        "both wrong",
        "labels",
    )
    rows: list[tuple[str, ...]] = [
        (
            plain(slice_.slice),
            slice_.words,
            points(slice_.loss),
            points(slice_.harm),
            points(slice_.help),
            points(slice_.both_wrong),
            slice_.counted,
        )
        for slice_ in slices
    ]
    if costs:
        head = (*head, "cost")
        rows = [
            (*row, money_of(costs[slice_.slice]) if slice_.slice in costs else "-")
            for row, slice_ in zip(rows, slices, strict=True)
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
