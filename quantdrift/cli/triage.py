"""The command `quantdrift triage`."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import columns
from quantdrift.core.config.assign import nearest
from quantdrift.core.config.load import Role
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Verdict

if TYPE_CHECKING:
    from quantdrift.storage.commands.triage import TriagedSlice


@click.command()
@CONFIG
@DATA
@click.option("--model", default="", help="Show only this model; the list is computed over all models.")
@click.option(
    "--alpha",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.05,
    show_default=True,
    help="Highest expected share of slices on the list that have no drift.",
)
@JSON
def triage(config_path: Path, data: Path | None, model: str, alpha: float, as_json: bool) -> None:
    """List the slices with the strongest evidence of drift now, the worst first.

    The expected share of false entries is at most --alpha. A drift that many slices share appears here before any
    single slice pages. The guarantee holds for one list, not for several lists over time.

    \b
    Examples:
      quantdrift triage
      quantdrift triage --model digits --alpha 0.2 --json
    """
    import numpy as np

    from quantdrift.drift.triage import triage as listed
    from quantdrift.storage.commands.triage import watched
    from quantdrift.storage.database import Database

    config, secrets = prepare(config_path, Role.REPORT, data)

    async def ask() -> "tuple[list[TriagedSlice], float]":
        async with Database(secrets.dsn, config.storage) as database, database.begin() as connection:
            return await watched(connection)

    slices, months = asyncio.run(ask())
    indices = listed(
        np.array([slice_.evidence for slice_ in slices], dtype=np.float64), months=months, alpha=alpha
    )
    models = sorted({slice_.model for slice_ in slices})
    if model and slices and model not in models:
        raise OperatorError(f"no slice of a model `{model}` is watched: {nearest(model, models)}")
    entries = [slices[index] for index in indices if model in {"", slices[index].model}]
    firing = [
        slice_
        for slice_ in slices
        if slice_.verdict == Verdict.FIRING.value and model in {"", slice_.model} and slice_ not in entries
    ]
    if as_json:
        emit(
            {"alpha": alpha, "months": months, "n_watched": len(slices), "slices": entries, "firing": firing}
        )
        return
    if not slices:
        click.echo("No slice is watched yet: no exchange has been compared.")
        return
    if entries:
        click.echo(_table(entries))
        click.echo(
            f"\n{len(entries)} of {len(slices)} slices; at most {100 * alpha:g}% of such a list is expected to be false."
        )
    else:
        click.echo(f"None of {len(slices)} slices has enough evidence now (alpha {alpha:g}).")
    if firing:
        names = ", ".join(f"{slice_.slice} ({slice_.model} {slice_.version})" for slice_ in firing)
        click.echo(f"Already firing, by the bound on false pages: {names}.")


def _table(entries: "list[TriagedSlice]") -> str:
    rows = [
        (
            entry.model,
            entry.version,
            entry.slice,
            entry.verdict,
            f"{entry.evidence:.3g}",
            f"{entry.threshold:.3g}",
            f"{entry.n_groups:,}",
            _means(entry),
        )
        for entry in entries
    ]
    return columns(
        ("model", "version", "slice", "verdict", "evidence", "pages at", "exchanges", "mean"), rows
    )


def _means(entry: "TriagedSlice") -> str:
    return ", ".join(
        f"{metric} {estimate['mean']:.3g} (budget {estimate['budget']:.3g})"
        for metric, estimate in sorted(entry.estimate.items())
        if "mean" in estimate and "budget" in estimate
    )
