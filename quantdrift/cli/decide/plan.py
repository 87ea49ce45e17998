"""The command `quantdrift plan`."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

import quantdrift
from quantdrift.cli.options import CONFIG, DATA, JSON, emit, set_up_logs
from quantdrift.cli.output import ProgressLine, Steps
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Config
from quantdrift.core.config.wrong_values import mistakes
from quantdrift.core.errors import OperatorError
from quantdrift.monitor.planning.fleet import Fleet

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
@click.option(
    "--fleet",
    "fleet_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Size a whole fleet instead: a TOML file with its pods, requests, models and prices.",
)
@click.option(
    "--measure",
    is_flag=True,
    help="With --fleet: measure what an exchange costs on this machine, with real servers, for two minutes at most.",
)
@JSON
def plan(
    config_path: Path,
    slices: tuple[str, ...],
    strata: tuple[str, ...],
    fleet_path: Path | None,
    measure: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict detection delays and replay rates per slice before a deployment.

    The command simulates the real detector with its production threshold. It shows how many samples and how much time
    a shift of the share of changed answers needs to page, which slices get too few samples, and which rate they would need. Without
    --rps it plans for the traffic in the database.

    With --fleet it calculates workers, leader, Postgres, NATS, memory of sidecars and money for a fleet, and says what is too small.

    \b
    Examples:
      quantdrift plan
      quantdrift plan --rps 300 --slice scanner=faint=0.5% --slice scanner=clear=20%
      quantdrift plan --rps 300 --slice scanner=faint=0.5% --gpu-ms-per-replay 8 --gpu-share 0.1 --allocate
      quantdrift plan --days 14
      quantdrift plan --fleet fleet.toml --measure
    """
    if fleet_path is not None:
        _plan_fleet(config_path, fleet_path, is_measured=measure, as_json=as_json)
        return
    if measure:
        raise OperatorError("--measure is for --fleet FILE")
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


def _plan_fleet(config_path: Path, fleet_path: Path, *, is_measured: bool, as_json: bool) -> None:
    """Print the size of a fleet. Without a configuration file the defaults apply."""
    from quantdrift.cli.config_summary import memory_bytes
    from quantdrift.monitor.planning.fleet import COSTS, fleet_size, planned_fleet

    is_given = click.get_current_context().get_parameter_source("config_path") is not ParameterSource.DEFAULT
    config = load(config_path) if is_given or config_path.exists() else Config()
    fleet = _fleet(fleet_path)
    costs = COSTS
    if is_measured:
        from quantdrift.cli.decide.fleet_measure import measure

        with Steps(quiet=as_json) as say:
            costs = measure(fleet.slices, say)
    size = fleet_size(fleet, config, memory_bytes(config), costs)
    if as_json:
        emit({"fleet": fleet, "costs": costs, "size": size})
    else:
        click.echo(planned_fleet(size, fleet, costs))


def _fleet(path: Path) -> Fleet:
    """Return the fleet in a TOML file; all mistakes are named at once."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OperatorError(f"{path} cannot be read: {error}") from error
    if wrong := list(mistakes(document, Fleet)):
        listed = "\n".join(f"  - {mistake.text}" for mistake in wrong)
        raise OperatorError(f"{path} is wrong:\n{listed}")
    return msgspec.convert(document, Fleet)


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
