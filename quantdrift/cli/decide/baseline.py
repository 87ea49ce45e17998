"""The command `quantdrift baseline`: baselines, and decisions about them."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from quantdrift.cli.options import CONFIG, DATA, JSON, REASON, emit, prepare
from quantdrift.cli.output import Steps
from quantdrift.core.config.load import Role
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Metric
from quantdrift.core.signals import LEARNED
from quantdrift.core.text import columns

if TYPE_CHECKING:
    from quantdrift.monitor.baselines.decisions import DecisionScope
    from quantdrift.storage.baselines import BaselineFact

_MODEL = click.option("--model", required=True, help="Name of the model.")
_VERSION = click.option("--version", default="", help="Candidate version.  [default: the newest]")
_SLICE = click.option("--slice", "slices", multiple=True, help="Only this slice, by name; may be repeated.")
_METRIC = click.option(
    "--metric",
    "metrics",
    type=click.Choice([metric.value for metric in LEARNED]),
    multiple=True,
    help="Only this metric; may be repeated.",
)


@click.group()
def baseline() -> None:
    """Show and change the baselines that slices are compared with.

    After the first deployment each slice learns its baseline. A new candidate version inherits the baseline of its
    predecessor, so that a bad release cannot become normal; only `accept` replaces it. Every decision is stored in the
    table `baseline` with who, when, why and from which rows, and in the audit. The monitor applies it with its next batch.
    """


def _scope(
    model: str,
    version: str,
    slices: tuple[str, ...],
    metrics: tuple[str, ...],
    *,
    reason: str,
) -> "DecisionScope":
    from quantdrift.monitor.baselines.decisions import DecisionScope

    return DecisionScope(
        model=model,
        version=version,
        slices=slices,
        metrics=tuple(Metric(metric) for metric in metrics),
        reason=reason,
    )


@baseline.command("list")
@CONFIG
@DATA
@click.option("--model", default="", help="Only this model.")
@click.option("--version", default="", help="Only this candidate version.")
@click.option("--slice", "slice_name", default="", help="Only this slice, by name.")
@click.option("--history", is_flag=True, help="List all rows, not only the newest of each signal.")
@JSON
def list_(
    config_path: Path,
    data: Path | None,
    model: str,
    version: str,
    slice_name: str,
    history: bool,
    as_json: bool,
) -> None:
    """List the baseline of each signal, since when it applies, and who decided it.

    \b
    Examples:
      quantdrift baseline list --model digits
      quantdrift baseline list --slice scanner=archive --history --json
    """
    from quantdrift.storage.baselines import BaselineFact, baselines, find_slices, find_version
    from quantdrift.storage.database import Database

    _, secrets = prepare(config_path, Role.REPORT, data)

    async def ask() -> list[BaselineFact]:
        async with Database(secrets.dsn) as database, database.begin() as connection:
            rows = await baselines(
                connection, model=model, version=version, slice_name=slice_name, history=history
            )
            if model and not rows:  # an unknown model, version or slice is refused by name
                await find_version(connection, model, version)
                await find_slices(connection, model, [slice_name] if slice_name else [])
            return rows

    listed = asyncio.run(ask())
    if as_json:
        emit(listed)
    elif not listed and (model or version or slice_name):
        click.echo("No such baselines yet: `quantdrift baseline list` shows all of them.")
    elif not listed:
        click.echo("No baselines yet: a slice learns one from about 5,000 exchanges.")
    else:
        click.echo(columns(_HEAD, [_row(fact) for fact in listed]))


_HEAD = ("model", "version", "slice", "metric", "kind", "source", "groups", "by", "when (UTC)", "why")


def _row(fact: "BaselineFact") -> tuple[str, ...]:
    from quantdrift.storage.fold_rows import Source

    source = fact.source.value
    if fact.source is Source.IMPORTED and fact.content is not None:
        source = f"imported: {fact.content['budget']:g}" if fact.content else "back to the configuration"
    if fact.from_version:
        source += f" from {fact.from_version}"
    if fact.fold_seq is None:
        source += " (waits for the monitor)"
    return (
        fact.model,
        fact.version,
        fact.slice,
        fact.metric,
        fact.kind,
        source,
        f"{fact.n_groups:,}" if fact.n_groups else "-",
        fact.made_by,
        f"{fact.made_at.astimezone(UTC):%Y-%m-%d %H:%M}",
        fact.reason,
    )


@baseline.command()
@CONFIG
@DATA
@_MODEL
@_VERSION
@_SLICE
@_METRIC
@click.option(
    "--since", type=click.DateTime(), help="First capture time, UTC.  [default: the version's first]"
)
@click.option("--until", type=click.DateTime(), help="Last capture time, UTC.  [default: now]")
@click.option(
    "--pool",
    multiple=True,
    help="A similar slice; the tails of all slices named replace the slice's own if it has too few exchanges.",
)
@REASON
@JSON
def accept(
    config_path: Path,
    data: Path | None,
    model: str,
    version: str,
    slices: tuple[str, ...],
    metrics: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
    pool: tuple[str, ...],
    reason: str,
    as_json: bool,
) -> None:
    """Accept the measured behaviour of a version as its new baseline.

    The baseline is learned again from the stored comparisons of this version only. A signal with too few of them keeps
    its baseline. An open alert ends once the slice is shown to be inside its new baseline.

    The command refuses a version that the monitor has not seen yet, and signals that it no longer watches.

    A rare slice never has the 10,000 exchanges that a tail needs. --pool names similar slices whose tails are used
    instead. The more these tails differ from each other, the wider the tolerance and the later a drift is detected.

    \b
    Examples:
      quantdrift baseline accept --model digits --slice scanner=new --pool scanner=lab --pool scanner=office
      quantdrift baseline accept --model digits --version int8-b --reason "labels are better than before"
    """
    from quantdrift.monitor.baselines import decisions
    from quantdrift.storage.database import Database

    config, secrets = prepare(config_path, Role.MONITOR, data)
    scope = _scope(model, version, slices, metrics, reason=reason)

    async def run(progress: Steps) -> list[decisions.Accepted]:
        async with Database(secrets.dsn) as database:
            with progress as step:
                return await decisions.accept(
                    database, config, scope, since=_utc(since), until=_utc(until), pool=pool, progress=step
                )

    signals = asyncio.run(run(Steps(quiet=as_json)))
    n_accepted = sum(signal.recorded for signal in signals)
    if as_json:
        emit(signals)
    else:
        rows = [
            (
                signal.slice,
                signal.metric,
                signal.kind,
                f"{signal.n_groups:,}",
                _outcome(signal.missing, watched=signal.watched),
            )
            for signal in signals
        ]
        click.echo(columns(("slice", "metric", "kind", "groups", ""), rows))
        click.echo(
            f"{n_accepted} of {len(signals)} signals have a new baseline; it applies from the monitor's next batch."
        )
    if not n_accepted:
        raise OperatorError(
            "no signal has enough comparisons for a baseline: nothing was stored"
            if any(signal.watched for signal in signals)
            else f"the monitor watches none of these signals of {model} {version or '(the newest version)'}: nothing was "
            "stored. A slice without traffic for 30 days loses its baseline, and learns a new one when it returns"
        )


def _outcome(missing: int, *, watched: bool) -> str:
    """Return the outcome for one signal, in words."""
    if not watched:
        return "not watched, not accepted"
    return f"needs about {missing:,} more" if missing else "accepted"


def _settling(name: str, source: str, text: str) -> None:
    """Add a command that stores a decision about the current baselines."""

    @baseline.command(name, help=text)
    @CONFIG
    @DATA
    @_MODEL
    @_VERSION
    @_SLICE
    @_METRIC
    @REASON
    @JSON
    def _decide(
        config_path: Path,
        data: Path | None,
        model: str,
        version: str,
        slices: tuple[str, ...],
        metrics: tuple[str, ...],
        reason: str,
        as_json: bool,
    ) -> None:
        scope = _scope(model, version, slices, metrics, reason=reason)
        _settle(source, config_path, data, scope, as_json)


_settling(
    "freeze",
    "frozen",
    """Freeze the current baselines: they learn nothing more until a new one is accepted.

    \b
    Example:
      quantdrift baseline freeze --model digits --reason "validated on 2026-11-21"
    """,
)
_settling(
    "keep",
    "kept",
    """Mark an alert as false, and learn the data of its duration after all.

    Normally a slice learns nothing during an alert, and after it the baseline goes back to before the onset.

    \b
    Example:
      quantdrift baseline keep --model digits --slice scanner=archive --reason "a new batch of scans, labels agree"
    """,
)


def _settle(source: str, config_path: Path, data: Path | None, scope: "DecisionScope", as_json: bool) -> None:
    from quantdrift.monitor.baselines.decisions import freeze_or_keep
    from quantdrift.storage.database import Database
    from quantdrift.storage.fold_rows import Source

    _, secrets = prepare(config_path, Role.MONITOR, data)

    async def run() -> int:
        async with Database(secrets.dsn) as database:
            return await freeze_or_keep(database, scope, Source(source))

    n_signals = asyncio.run(run())
    if as_json:
        emit({"decided": n_signals, "source": source})
    else:
        signals = "1 signal" if n_signals == 1 else f"{n_signals} signals"
        click.echo(f"{signals} {source}; it applies from the monitor's next batch.")


@baseline.command("import")
@CONFIG
@DATA
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_MODEL
@_VERSION
@_METRIC
@REASON
@JSON
def import_(
    config_path: Path,
    data: Path | None,
    file: Path,
    model: str,
    version: str,
    metrics: tuple[str, ...],
    reason: str,
    as_json: bool,
) -> None:
    """Import budgets from an offline evaluation; they replace those of the configuration.

    FILE is a JSON list of objects with `slice`, `metric`, `upper` (upper confidence bound of the mean, in the metric's
    unit; null restores the configured budget) and, if known, `n`. They are budgets and not baselines, because an
    offline data set is not a sample of the traffic.

    \b
    Example:
      echo '[{"slice": "scanner=archive", "metric": "flip", "upper": 0.03, "n": 4000}]' > offline.json
      quantdrift baseline import offline.json --model digits
    """
    from quantdrift.monitor.baselines import decisions
    from quantdrift.storage.database import Database

    config, secrets = prepare(config_path, Role.MONITOR, data)
    try:
        figures = msgspec.json.decode(file.read_bytes(), type=list[decisions.Imported])
    except msgspec.DecodeError as error:
        raise OperatorError(
            f"{file} is not a list of objects with slice, metric, upper and n: {error}"
        ) from error
    scope = _scope(model, version, (), metrics, reason=reason)

    async def run() -> list[decisions.Imported]:
        async with Database(secrets.dsn) as database:
            return await decisions.import_(database, config, scope, figures)

    imported = asyncio.run(run())
    if as_json:
        emit(imported)
    else:
        rows = [
            (
                budget.slice,
                budget.metric.value,
                "configuration" if budget.upper is None else f"{budget.upper:g}",
                f"{budget.n:,}",
            )
            for budget in imported
        ]
        click.echo(columns(("slice", "metric", "budget", "n"), rows))
        click.echo(
            "They apply from the monitor's next batch; the evidence of these signals restarts from zero."
        )


def _utc(at: datetime | None) -> datetime | None:
    return at.replace(tzinfo=UTC) if at else None
