"""The command `quantdrift backtest`."""

import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.core.config.check import problems
from quantdrift.core.config.load import Role, Secrets
from quantdrift.core.config.schema import Config
from quantdrift.core.config.wrong_values import mistakes, nearest
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Metric
from quantdrift.core.signals import WATCHED

if TYPE_CHECKING:
    from quantdrift.monitor.planning.alerts import Alert
    from quantdrift.monitor.planning.backtest import Backtest, Findings
    from quantdrift.monitor.planning.backtest_report import BacktestReport
    from quantdrift.show.timeline import Span
    from quantdrift.storage.fold.history import HistoryExtent
    from quantdrift.storage.fold_rows import Catalog

_MOST_LANES = 16
# The other options were used when the comparisons were made: changing them now has no effect.
_MATTERS = ("monitor.", "models.")
_WANTED = {bool: "true or false", int: "a number", float: "a number"}


@click.command()
@CONFIG
@DATA
@click.option(
    "--set",
    "assignments",
    metavar="KEY=VALUE",
    multiple=True,
    help="Change one option, e.g. monitor.pages_per_30_days=1 or models.digits.budget.flip=0.02; may be repeated.",
)
@click.option("--from", "from_at", type=click.DateTime(), help="Start, UTC.  [default: the oldest history]")
@click.option("--to", "to_at", type=click.DateTime(), help="End, UTC, exclusive.  [default: the newest]")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="Number of days up to now.")
@click.option("--model", default="", help="Show only this model; the run always covers all models.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Plot the alerts of each slice over time, as .svg.",
)
@JSON
def backtest(
    config_path: Path,
    data: Path | None,
    assignments: tuple[str, ...],
    from_at: datetime | None,
    to_at: datetime | None,
    days: float | None,
    model: str,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay the stored history with another configuration and compare its alerts with the real ones.

    Only [monitor] and the budgets of [[models]] have an effect; sampling and slices stay as they were when the
    comparisons were made. Nothing is written to the database. With the original configuration and the whole history,
    every change of verdict is reproduced.

    \b
    Examples:
      quantdrift backtest --set monitor.pages_per_30_days=1
      quantdrift backtest --config stricter.toml --days 14 --plot stricter.svg
    """
    import asyncio

    if days is not None and (from_at or to_at):
        raise OperatorError("give --days, or --from and --to")
    config, secrets = prepare(config_path, Role.REPORT, data)
    config = assign(config, assignments)
    begin, end = (at.replace(tzinfo=UTC) if at else None for at in (from_at, to_at))
    if days is not None:
        begin = datetime.now(UTC) - timedelta(days=days)
    if plot is not None:
        _check_plot(plot)
    notes = [
        f"{assignment.partition('=')[0]} has no effect here: the stored comparisons stay as they are"
        for assignment in assignments
        if not assignment.startswith(_MATTERS)
    ]
    report, draw = asyncio.run(_fold(config, secrets, (begin, end), model, notes, quiet=as_json))
    if as_json:
        emit(report)
    else:
        click.echo(report.text())
    if plot is not None:
        drawn = draw(plot)
        click.echo(
            f"plot: {plot}" if drawn else "no plot: there is no alert with either configuration", err=True
        )


def _check_plot(plot: Path) -> None:
    from quantdrift.show.timeline import SUFFIX

    if plot.suffix.lower() != SUFFIX:
        raise OperatorError(f"{plot}: a plot file ends in {SUFFIX}")


async def _fold(
    config: Config,
    secrets: Secrets,
    period: tuple[datetime | None, datetime | None],
    model: str,
    notes: Sequence[str],
    *,
    quiet: bool,
) -> "tuple[BacktestReport, Callable[[Path], bool]]":
    from quantdrift.monitor.planning.backtest import Backtest
    from quantdrift.monitor.planning.backtest_report import build_report
    from quantdrift.storage.database import Database
    from quantdrift.storage.fold.history import History

    async with Database(secrets.dsn) as database:
        history = History(database)
        extent = await history.extent(*period)
        catalog = await history.catalog()
        notes = [*notes, *_models(config, catalog, model)]
        test = Backtest(config, catalog, extent, await history.spans())
        length = extent.last - extent.first + 1
        with click.progressbar(length=length, label="replaying", hidden=quiet, file=sys.stderr) as bar:
            async for batches in history.batches(extent):
                test.fold(batches)
                bar.update(len(batches))
        findings = test.findings(await history.transitions(extent), model)
    report = build_report(findings, extent, catalog, notes)
    return report, lambda path: _draw(path, config, test, findings, extent, catalog)


def _models(config: Config, catalog: "Catalog", model: str) -> list[str]:
    recorded = sorted({version.model for version in catalog.versions.values()})
    if model and model not in recorded:
        raise OperatorError(f"the database has no model `{model}`: {nearest(model, recorded)}")
    return [
        f"model `{name}` is not in the configuration: its budgets are the defaults"
        for name in recorded
        if config.model(name) is None and model in {"", name}
    ]


def _draw(
    path: Path,
    config: Config,
    test: "Backtest",
    findings: "Findings",
    extent: "HistoryExtent",
    catalog: "Catalog",
) -> bool:
    from quantdrift.monitor.planning.backtest_report import named
    from quantdrift.show.timeline import Lane, draw

    metrics: dict[tuple[int, int], str] = {breach.key: breach.metric for breach in findings.breaches}
    for pairing in findings.pairings:
        alert = pairing.tested or pairing.recorded
        assert alert is not None
        metrics[pairing.key] = alert.metric
    if not metrics:
        return False
    lanes: list[Lane] = []
    for key in sorted(metrics)[:_MOST_LANES]:
        model, version, slice_name = named(key, catalog)
        metric = Metric(metrics[key])
        recorded = [
            pairing.recorded for pairing in findings.pairings if pairing.key == key and pairing.recorded
        ]
        tested = [pairing.tested for pairing in findings.pairings if pairing.key == key and pairing.tested]
        at, ratio = _course(config, test, key, metric, model)
        lanes.append(
            Lane(
                title=f"{model} {version}, {slice_name}: {metric}",
                at=at,
                ratio=ratio,
                recorded=[_span(alert) for alert in recorded],
                tested=[_span(alert) for alert in tested],
            )
        )
    draw(path, lanes, extent.begin, extent.end)
    return True


def _course(
    config: Config, test: "Backtest", key: tuple[int, int], metric: Metric, model: str
) -> tuple[list[datetime], list[float]]:
    from quantdrift.monitor.planning.backtest import accepted
    from quantdrift.storage.fold_rows import from_us

    at: list[datetime] = []
    ratio: list[float] = []
    if metric not in WATCHED:  # the sums have neither times nor the values of plug-ins
        return at, ratio
    budget, _ = accepted(config, model, metric)
    for hour_us, sums in sorted(test.hours.get(key, {}).items()):
        mean = sums.mean(metric)
        if mean is not None:
            at.append(from_us(hour_us))
            ratio.append(mean / budget)
    return at, ratio


def _span(alert: "Alert") -> "Span":
    from quantdrift.show.timeline import Span
    from quantdrift.storage.fold_rows import from_us

    return Span(
        opened=from_us(alert.opened_us),
        paged=None if alert.paged_us is None else from_us(alert.paged_us),
        ended=None if alert.ended_us is None else from_us(alert.ended_us),
    )


def assign(config: Config, assignments: Iterable[str]) -> Config:
    """Return `config` with each `KEY=VALUE` set.

    Parameters
    ----------
    config
        A checked configuration.
    assignments
        KEY is a path of names separated by dots; an entry of a list is given by its `name`. VALUE is JSON, or plain
        text if the option is text.

    Raises
    ------
    OperatorError
        A key is unknown (the error gives the nearest known name), a value is invalid, or options contradict each
        other.
    """
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise OperatorError(f"`{assignment}` has no value: write KEY=VALUE")
        document = msgspec.to_builtins(config)
        table, option = _place(document, key)
        try:
            table[option] = text if isinstance(table[option], str) else _value(text, table[option])
        except msgspec.DecodeError as error:
            raise OperatorError(f"`{assignment}` does not fit: {error}") from error
        for mistake in mistakes(document, Config):
            raise OperatorError(f"`{assignment}` does not fit: {mistake.text}")
        config = msgspec.convert(document, Config)
    if contradictions := problems(config):
        raise OperatorError(
            "with these options:\n" + "\n".join(f"  - {problem}" for problem in contradictions)
        )
    return config


def _value(text: str, before: Any) -> Any:
    """Return the JSON value of `text`; `before` is the old value, for the error."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        wanted = _WANTED.get(type(before), "a list or table as JSON")
        raise msgspec.DecodeError(f"`{text}` is not {wanted}") from error


def _place(document: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the table of an option, and the option's name in it."""
    *parents, option = key.split(".")
    table: Any = document
    for depth, name in enumerate(parents):
        table = _entry(table, name, ".".join(parents[:depth]))
    if not isinstance(table, dict) or option not in table:
        _entry(table, option, ".".join(parents))
        raise OperatorError(f"`{key}` is not a single option: name one inside it")
    return table, option


def _entry(table: Any, name: str, where: str) -> Any:
    if isinstance(table, list | tuple):
        entries = {entry["name"]: entry for entry in table if isinstance(entry, dict) and "name" in entry}
    else:
        entries = table if isinstance(table, dict) else {}
    if name in entries:
        return entries[name]
    path = f"{where}.{name}" if where else name
    raise OperatorError(f"unknown option `{path}`: {nearest(name, list(entries))}")
