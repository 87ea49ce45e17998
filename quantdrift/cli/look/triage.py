"""The command `quantdrift triage`."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantdrift.cli.look.alerts import replaced_lines
from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import show, waiting
from quantdrift.core.config.load import Role
from quantdrift.core.config.wrong_values import nearest
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import number
from quantdrift.core.records import Verdict
from quantdrift.core.text import columns
from quantdrift.facts.status import said

if TYPE_CHECKING:
    from quantdrift.storage.alerts.alerts import AlertFact
    from quantdrift.storage.slices.triage import TriagedSlice


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
    from quantdrift.storage.alerts.alerts import lately_replaced
    from quantdrift.storage.database import Database
    from quantdrift.storage.slices.triage import watched

    _, secrets = prepare(config_path, Role.REPORT, data)

    async def ask() -> "tuple[list[TriagedSlice], float, list[AlertFact]]":
        async with Database(secrets.dsn) as database, database.begin() as connection:
            return *await watched(connection), await lately_replaced(connection, model=model)

    with waiting("reading the evidence of all slices", quiet=as_json):
        slices, months, replaced = asyncio.run(ask())
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
            {
                "alpha": alpha,
                "months": months,
                "n_watched": len(slices),
                "slices": [_as_json(slice_) for slice_ in entries],
                "firing": [_as_json(slice_) for slice_ in firing],
                "replaced": [
                    {"alert": alert.id, "model": alert.model, "version": alert.version, "slice": alert.slice}
                    for alert in replaced
                ],
            }
        )
        return
    if not slices:
        click.echo("No slice is watched yet: no exchange has been compared.")
        return
    if entries:
        show(_table(entries))
        click.echo(
            f"\n{len(entries)} of {len(slices)} slices; at most {100 * alpha:g}% of such a list is expected to be false."
        )
    else:
        click.echo(f"No new problem: none of {len(slices)} slices has enough evidence now (alpha {alpha:g}).")
    if firing:
        click.echo("Alerts that are still open:")
        for slice_ in firing:
            click.echo(f"  {slice_.model} {slice_.version}: {_what(slice_)}")
    for line in replaced_lines(replaced):
        click.echo(line)


def _table(entries: "list[TriagedSlice]") -> str:
    rows = [
        (
            entry.model,
            entry.version,
            entry.slice,
            said(entry.verdict),
            number(entry.evidence, 3),
            number(entry.threshold, 3),
            f"{entry.n_groups:,}",
            _what(entry),
        )
        for entry in entries
    ]
    return columns(
        ("model", "version", "slice", "verdict", "evidence", "pages at", "exchanges", "what"), rows
    )


def _what(entry: "TriagedSlice") -> str:
    """Return what is wrong: for a slice that alerts what decided, as its page says; else its recent means."""
    from quantdrift.facts.words.alert import finding

    if entry.alert is not None and entry.alert.evidence.onset:
        return finding(entry.alert)
    means = ", ".join(
        f"{metric} {number(estimate['mean'], 3)} (budget: {number(estimate['budget'], 3)})"
        for metric, estimate in sorted(entry.estimate.items())
        if "mean" in estimate and "budget" in estimate
    )
    return means or entry.slice


def _as_json(entry: "TriagedSlice") -> dict[str, Any]:
    """Return a slice for programs: the text of its alert in place of its event."""
    import msgspec

    fields = msgspec.structs.asdict(entry)
    fields["alert"] = _what(entry) if entry.alert is not None else None
    return fields
