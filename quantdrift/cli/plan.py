"""The command `quantdrift plan`."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import Steps
from quantdrift.core.config.load import Role, load
from quantdrift.core.config.schema import Config, Slice
from quantdrift.core.config.wrong_values import nearest
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import number
from quantdrift.core.records import Predicate
from quantdrift.core.slices import SliceAssigner, SliceKey, attribute_key

if TYPE_CHECKING:
    from quantdrift.monitor.planning.forecast import Forecast, SliceForecast, Traffic

_AND = " & "
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
@click.option("--from-record", is_flag=True, help="Read traffic and shares from the database.")
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
    help="Flip rate to detect, as a multiple of the budget.",
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
    data: Path | None,
    model: str,
    rps: float | None,
    slices: tuple[str, ...],
    strata: tuple[str, ...],
    from_record: bool,
    days: float,
    replays_per_s: float | None,
    replay_ms: float | None,
    gpu_share: float | None,
    allocate: bool,
    pods: int,
    shift: float,
    horizon: float,
    quiet_days: float,
    detectors: int | None,
    as_json: bool,
) -> None:
    """Predict detection delays and replay rates per slice before a deployment.

    The command simulates the real detector with its production threshold. It shows how many samples and how much time
    a shift of the flip rate needs to page, which slices get too few samples, and which rate they would need. It needs
    a database only with --from-record.

    \b
    Examples:
      quantdrift plan --rps 300 --slice scanner=faint=0.5% --slice scanner=clear=20%
      quantdrift plan --rps 300 --slice scanner=faint=0.5% --gpu-ms-per-replay 8 --gpu-share 0.1 --allocate
      quantdrift plan --from-record --days 14
    """
    from quantdrift.core.sampling.rates import policy_of
    from quantdrift.monitor.planning.forecast import Question, forecast

    numbers = (rps, days, replays_per_s, replay_ms, gpu_share, shift, horizon, quiet_days)
    if not all(math.isfinite(one) for one in numbers if one is not None):
        raise OperatorError("inf and nan are not allowed: give finite numbers")
    if gpu_share is not None:
        if replay_ms is None or replays_per_s is not None:
            raise OperatorError("--gpu-share needs --gpu-ms-per-replay and excludes --replays-per-s")
        replays_per_s = 1000 * gpu_share / replay_ms
    if allocate and replays_per_s is None:
        raise OperatorError("--allocate needs a budget: give --replays-per-s or --gpu-share")
    if from_record is (rps is not None):
        raise OperatorError("give the traffic: --rps with --slice, or --from-record")
    if from_record:
        config, traffic = _recorded(config_path, data, model, days)
    else:
        config = load(config_path)
        name = _model(config, model)
        traffic = _given(config, name, rps or 0.0, slices, strata)
    if detectors is not None:
        traffic = msgspec.structs.replace(traffic, n_detectors=detectors)
    question = Question(
        shift=shift,
        horizon_days=horizon,
        quiet_days=quiet_days,
        replays_per_s=replays_per_s,
        allocate=allocate,
        replay_ms=replay_ms,
        pods=pods,
    )
    with Steps(quiet=as_json) as step:
        result = forecast(config, policy_of(config.sampling, "plan"), traffic, question, step)
    if as_json:
        emit(result)
    else:
        click.echo(_text(result))


def _model(config: Config, name: str) -> str:
    names = [model.name for model in config.models]
    if name in names:
        return name
    if name:
        raise OperatorError(f"no model `{name}` in the configuration: {nearest(name, names)}")
    if len(names) != 1:
        raise OperatorError(f"give --model; configured are: {', '.join(names) or 'none'}")
    return names[0]


def _recorded(config_path: Path, data: Path | None, model: str, days: float) -> "tuple[Config, Traffic]":
    import asyncio

    from quantdrift.monitor.planning.forecast import Traffic
    from quantdrift.storage.commands.usage import Usage, usage
    from quantdrift.storage.database import Database

    config, secrets = prepare(config_path, Role.REPORT, data)
    name = _model(config, model)
    end = datetime.now(UTC)

    async def ask() -> Usage:
        async with Database(secrets.dsn) as database:
            return await usage(database, name, end - timedelta(days=days), end)

    used = asyncio.run(ask())
    traffic = Traffic(
        model=name,
        requests_per_s=used.requests_per_s,
        slices=tuple(
            (
                SliceKey(model=name, name=slice_.name, predicate=slice_.predicate, where=slice_.where),
                slice_.share,
            )
            for slice_ in used.slices
        ),
        strata=used.strata,
        n_detectors=used.n_detectors or None,
    )
    return config, traffic


def _given(
    config: Config, model: str, rps: float, slices: tuple[str, ...], strata: tuple[str, ...]
) -> "Traffic":
    from quantdrift.monitor.planning.forecast import Traffic

    shares = {}
    for name, share in map(_share, slices):
        shares[_slice(config, model, name)] = share
    stratum_names = [stratum.name for stratum in config.sampling.header_strata]
    given = dict(map(_share, strata))
    for name in given:
        if name not in stratum_names:
            raise OperatorError(f"no header stratum `{name}`: {nearest(name, stratum_names)}")
    return Traffic(model=model, requests_per_s=rps, slices=tuple(shares.items()), strata=given)


def _share(text: str) -> tuple[str, float]:
    name, _, given = text.rpartition("=")
    try:
        share = float(given.removesuffix("%")) / (100 if given.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not name or not 0 <= share <= 1:
        raise OperatorError(f"`{text}` is not NAME=SHARE with a share from 0 to 1 or a percentage")
    return name, share


def _slice(config: Config, model: str, name: str) -> SliceKey:
    """Return the slice with this name; parts joined by ` & ` make a crossed slice."""
    parts = [_part(config, model, part) for part in name.split(_AND)]
    if len(parts) == 1:
        return parts[0]
    return SliceKey(
        model=model,
        name=name,
        predicate=" and ".join(part.predicate for part in parts),
        where=tuple(condition for part in parts for condition in part.where),
    )


def _part(config: Config, model: str, name: str) -> SliceKey:
    declared = {key.name: key for key in SliceAssigner(config, model).declared() if key.where}
    if name in declared:
        return declared[name]
    rule, _, value = name.partition("=")
    open_rules = {rule.name: rule for rule in config.slices if rule.model in {"", model} and _open(rule)}
    if value and rule in open_rules:
        key = attribute_key(open_rules[rule])
        quoted = msgspec.json.encode(value).decode()
        return SliceKey(
            model=model,
            name=name,
            predicate=f"{key} = {quoted}",
            where=(Predicate(key=key, equals=value),),
        )
    possible_parts = [*declared, *(f"{name}=VALUE" for name in open_rules)]
    raise OperatorError(f"no slice `{name}` of model `{model}`: {nearest(name, possible_parts)}")


def _open(rule: Slice) -> bool:
    """Return whether each observed value becomes a slice."""
    return bool(rule.header or rule.parameter or rule.json) and not rule.values


def _text(plan: "Forecast") -> str:
    policy = "the allocation's rates" if plan.allocated else "the configured rates"
    lines = [
        f"model {plan.model}: {_count(plan.requests_per_s)} requests/s, {policy}: "
        f"{_count(plan.granted * plan.replays_per_s)} replays/s"
        + (f", {number(plan.gpu_share)} GPU" if plan.gpu_share is not None else ""),
        f"to detect: flips from {plan.budget:.2%} (the budget) to {plan.shifted:.2%}",
        f"before the shift: {plan.quiet_days:g} days without drift",
        f"false pages: at most {plan.pages_per_30_days:g} in 30 days, shared by {plan.n_detectors} detectors",
        "",
    ]
    width = max(len(forecast.slice) for forecast in plan.slices)
    quantiles = ("10 %", "50 %", "90 %")
    head = f"{'slice':<{width}}  {'share':>8}  {'samples/h':>10}"
    lines.append(f"{head}  {'samples to page':^24}  {'time to page':^26}".rstrip())
    samples, times = (f"{n:>8}" for n in quantiles), (f"{n:>8}" for n in quantiles)
    lines.append(f"{'':<{len(head)}}  {''.join(samples)}  {' '.join(times)}")
    lines += [_row(forecast, width) for forecast in plan.slices]
    blind = [forecast for forecast in plan.slices if not forecast.observable]
    if blind:
        lines += [
            "",
            f"NOT OBSERVABLE: nine of ten such shifts would not page within {plan.horizon_days:g} days",
        ]
        lines += [f"  {forecast.slice}: {_wanted(forecast)}" for forecast in blind]
    if plan.notes:
        lines += ["", "Notes:", *(f"  - {note}" for note in plan.notes)]
    return "\n".join(lines)


def _row(forecast: "SliceForecast", width: int) -> str:
    samples = "".join(
        f"{'-' if n is None else f'{n:,}':>8}"
        for n in (forecast.samples.p10, forecast.samples.p50, forecast.samples.p90)
    )
    times = " ".join(f"{_length(hours):>8}" for hours in forecast.hours)
    return f"{forecast.slice:<{width}}  {_percent(forecast.share):>8}  {_count(3600 * forecast.samples_per_s):>10}  {samples}  {times}"


def _wanted(forecast: "SliceForecast") -> str:
    if forecast.needed_per_s is None:
        return "no rate is enough: the shift is too small"
    day = 86_400 * forecast.needed_per_s
    if forecast.needed_rate is None or forecast.needed_rate > 1:
        return (
            f"it would need {_count(day)} samples a day and gets {_count(86_400 * forecast.requests_per_s)} requests: "
            "merge it with other slices, or plan for larger shifts"
        )
    return f"sample it at {_percent(forecast.needed_rate, digits=2)} ({_count(day)} samples a day)"


def _count(n: float) -> str:
    """Format a number that may be below one."""
    return f"{n:,.0f}" if n >= 100 or n == 0 else number(n, 3 if n >= 1 else 2)


def _percent(share: float, *, digits: int = 3) -> str:
    """Format a share with `digits` decimals, and a smaller one with two significant digits."""
    return f"{number(100 * share)}%" if 0 < 100 * share < 10.0**-digits else f"{share:.{digits}%}"


def _length(hours: float | None) -> str:
    if hours is None:
        return "-"
    if hours < 1 / 60:
        return f"{3600 * hours:.0f} s" if hours >= 1 / 3600 else "< 1 s"
    if hours < 1:
        return f"{60 * hours:.0f} min"
    if hours < 48:
        return f"{hours:.1f} h"
    return f"{hours / 24:.1f} d" if hours < 24_000 else f"{hours / 24:,.0f} d"
