"""The command `quantdrift plan`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import quantdrift
from quantdrift.cli.options import CONFIG, DATA, JSON, emit, set_up_logs
from quantdrift.cli.output import ProgressLine
from quantdrift.core.config.load import load
from quantdrift.core.errors import OperatorError

_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@CONFIG
@DATA
@click.option("--model", default="", help="Model to plan for; required if there are several.")
@click.option("--rps", type=_POSITIVE, help="Requests per second of the model, in the whole fleet.")
@click.option(
    "--slice",
    "slices",
    metavar="NAME=SHARE",
    multiple=True,
    help="Share of the requests in a slice, e.g. scanner=faint=0.5% or scanner=faint=0.005; may be repeated.",
)
@click.option(
    "--stratum",
    "strata",
    metavar="NAME=SHARE",
    multiple=True,
    help="Share of the requests in a header stratum whose condition is not a slice; may be repeated.",
)
@click.option(
    "--from-record",
    is_flag=True,
    help="Read traffic and shares from the database.  [default: without --rps]",
)
@click.option("--days", type=_POSITIVE, default=7.0, show_default=True, help="Days of the database to read.")
@click.option("--replays-per-s", type=_POSITIVE, help="Replays per second that the shadow can do.")
@click.option(
    "--gpu-ms-per-replay", "replay_ms", type=_POSITIVE, help="GPU time of one replay, milliseconds."
)
@click.option("--gpu-share", type=_POSITIVE, help="GPUs to spend on replays: 0.1 is a tenth of one.")
@click.option(
    "--allocate", is_flag=True, help="Allocate the replays as the monitor would, instead of by [sampling]."
)
@click.option("--pods", type=click.IntRange(min=1), default=1, show_default=True, help="Number of sidecars.")
@click.option(
    "--shift",
    type=click.FloatRange(min=1, min_open=True),
    default=3.0,
    show_default=True,
    help="Share of changed answers to detect, as a multiple of the budget.",
)
@click.option(
    "--horizon", type=_POSITIVE, default=30.0, show_default=True, help="Days within which it must page."
)
@click.option(
    "--quiet-days",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Days without drift before the shift.",
)
@click.option(
    "--detectors", type=click.IntRange(min=1), help="Number of live detectors in the fleet, if known."
)
@JSON
def plan(
    config_path: Path,
    slices: tuple[str, ...],
    strata: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Predict detection delays and replay rates per slice before a deployment.

    The command simulates the real detector with its production threshold. It shows how many samples and how much time
    a shift of the share of changed answers needs to page, which slices get too few samples, and which rate they would need. Without
    --rps it plans for the traffic in the database.

    \b
    Examples:
      quantdrift plan
      quantdrift plan --rps 300 --slice scanner=faint=0.5% --slice scanner=clear=20%
      quantdrift plan --rps 300 --slice scanner=faint=0.5% --gpu-ms-per-replay 8 --gpu-share 0.1 --allocate
      quantdrift plan --days 14
    """
    if options["rps"] is None:
        set_up_logs(load(config_path))
    with ProgressLine(quiet=as_json) as progress:
        result = quantdrift.plan(
            config=config_path,
            slices=_shares(slices),
            strata=_shares(strata),
            progress=progress,
            **options,
        )
    if as_json:
        emit(result.to_dict())
    else:
        click.echo(str(result))


def _shares(texts: Sequence[str]) -> dict[str, float]:
    """Return the share of each NAME=SHARE, by name."""
    shares = {}
    for text in texts:
        name, _, written = text.rpartition("=")
        try:
            share = float(written.removesuffix("%")) / (100 if written.endswith("%") else 1)
        except ValueError:
            share = -1.0
        if not name or not 0 <= share <= 1:
            raise OperatorError(f"`{text}` is not NAME=SHARE with a share from 0 to 1 or a percentage")
        shares[name] = share
    return shares
