"""The command `quantdrift triage`."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import columns
from quantdrift.core.config.assign import nearest
from quantdrift.core.config.load import Role
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import number
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
    places = listed(np.array([one.evidence for one in slices], dtype=np.float64), months=months, alpha=alpha)
    models = sorted({one.model for one in slices})
    if model and slices and model not in models:
        raise OperatorError(f"no slice of a model `{model}` is watched: {nearest(model, models)}")
    found = [slices[place] for place in places if model in {"", slices[place].model}]
    firing = [
        one
        for one in slices
        if one.verdict == Verdict.FIRING.value and model in {"", one.model} and one not in found
    ]
    if as_json:
        emit(
            {
                "alpha": alpha,
                "months": months,
                "n_watched": len(slices),
                "slices": [_as_json(one) for one in found],
                "firing": [_as_json(one) for one in firing],
            }
        )
        return
    if not slices:
        click.echo("No slice is watched yet: no exchange has been compared.")
        return
    if found:
        click.echo(_table(found))
        click.echo(
            f"\n{len(found)} of {len(slices)} slices; at most {100 * alpha:g}% of such a list is expected to be false."
        )
    else:
        click.echo(f"None of {len(slices)} slices has enough evidence now (alpha {alpha:g}).")
    if firing:
        click.echo("Already firing, by the bound on false pages:")
        for one in firing:
            click.echo(f"  {one.model} {one.version}: {_what(one)}")


def _table(found: "list[TriagedSlice]") -> str:
    rows = [
        (
            one.model,
            one.version,
            one.slice,
            one.verdict,
            number(one.evidence, 3),
            number(one.threshold, 3),
            f"{one.n_groups:,}",
            _what(one),
        )
        for one in found
    ]
    return columns(
        ("model", "version", "slice", "verdict", "evidence", "pages at", "exchanges", "what"), rows
    )


def _what(one: "TriagedSlice") -> str:
    """Return what is wrong: for a slice that alerts what decided, as its page says; else its recent means."""
    from quantdrift.drift.explain.diagnosis_text import finding
    from quantdrift.monitor.fold.alert_text import diagnosis_of

    if one.alert is not None and one.alert.evidence.onset:
        return finding(diagnosis_of(one.alert))
    means = ", ".join(
        f"{metric} {number(shown['mean'], 3)} ({number(shown['budget'], 3)} accepted)"
        for metric, shown in sorted(one.estimate.items())
        if "mean" in shown and "budget" in shown
    )
    return means or one.slice


def _as_json(one: "TriagedSlice") -> dict[str, Any]:
    """Return a slice for programs: the text of its alert in place of its event."""
    import msgspec

    found = msgspec.structs.asdict(one)
    found["alert"] = _what(one) if one.alert is not None else None
    return found
