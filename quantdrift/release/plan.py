"""The plan: how long a drift of each slice takes to page, before anything is deployed."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from quantdrift.core.config.schema import Config, Slice
from quantdrift.core.config.wrong_values import nearest
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Predicate
from quantdrift.core.sampling.rates import policy_of
from quantdrift.core.slices import SliceAssigner, SliceKey, attribute_key
from quantdrift.core.text import Table
from quantdrift.facts.plan import Forecast
from quantdrift.facts.words.plan import planned
from quantdrift.monitor.planning.forecast import ForecastQuestion, ModelTraffic, forecast
from quantdrift.release.blocking import wait_for
from quantdrift.release.progress import OnProgress, Watch
from quantdrift.release.result import Result
from quantdrift.release.setting import File, Setting
from quantdrift.storage.account.coverage import Usage, usage
from quantdrift.storage.database import Database

_AND: Final = " & "


class PlanResult(Result, frozen=True, kw_only=True):
    """What a policy finds, and when.

    Parameters
    ----------
    forecast
        The delays of each slice, and what the replays cost.
    """

    forecast: Forecast

    def blocks(self) -> Sequence[str | Table]:
        """Return what is planned, a row for each slice, and which slices cannot be observed."""
        return planned(self.forecast)

    def to_dict(self) -> dict[str, Any]:
        """Return what the command prints with `--json`."""
        record: dict[str, Any] = msgspec.to_builtins(self.forecast)
        return record


def plan(
    *,
    config: File = "config.toml",
    data: File | None = None,
    model: str = "",
    rps: float | None = None,
    slices: Mapping[str, float] | None = None,
    strata: Mapping[str, float] | None = None,
    from_record: bool = False,
    days: float = 7.0,
    replays_per_s: float | None = None,
    replay_ms: float | None = None,
    gpu_share: float | None = None,
    allocate: bool = False,
    pods: int = 1,
    shift: float = 3.0,
    horizon: float = 30.0,
    quiet_days: float = 30.0,
    detectors: int | None = None,
    progress: OnProgress | None = None,
) -> PlanResult:
    """Predict detection delays and replay rates for each slice before a deployment.

    It simulates the real detector with its production threshold. The parameters are the options of `quantdrift plan`, whose help explains
    each.

    Parameters
    ----------
    config, data
        The configuration file, and the data directory of a running `quantdrift up`, whose Postgres is used without `rps`.
    model
        The model; empty: the only one.
    rps
        Requests per second of the model, in the whole fleet; None: the traffic is read from the database.
    slices, strata
        Share of the requests of each, in [0, 1], by name.
    from_record
        Read traffic and shares of the last `days` from the database, as without `rps`.
    replays_per_s
        Replays that the shadow can do; or `replay_ms` and `gpu_share`, the time of one and the GPUs for them.
    allocate
        Allocate the replays as the monitor would.
    shift
        Share of changed answers to detect, as a multiple of the budget.
    horizon, quiet_days
        Days within which it must page, and days without drift before it.
    progress
        Called with each step.

    Raises
    ------
    OperatorError
        Something must be changed by a person; the sentence is the one that the command prints.
    RetryError
        The database is away.
    """
    numbers = (rps, days, replays_per_s, replay_ms, gpu_share, shift, horizon, quiet_days)
    if not all(math.isfinite(value) for value in numbers if value is not None):
        raise OperatorError("inf and nan are not allowed: give finite numbers")
    if gpu_share is not None:
        if replay_ms is None or replays_per_s is not None:
            raise OperatorError("--gpu-share needs --gpu-ms-per-replay and excludes --replays-per-s")
        replays_per_s = 1000 * gpu_share / replay_ms
    if allocate and replays_per_s is None:
        raise OperatorError("--allocate needs a budget: give --replays-per-s or --gpu-share")
    if rps is not None and from_record:
        raise OperatorError(
            "give the traffic by --rps with --slice, or let it be read --from-record: not both"
        )
    if rps is None and (slices or strata):
        raise OperatorError("--slice and --stratum need --rps")
    setting, watch = Setting.of(config, data), Watch(progress)
    options = setting.config()
    name = _model(options, model)
    if rps is None:
        traffic = _recorded(setting, options, name, days)
    else:
        traffic = _given(options, name, rps, slices or {}, strata or {})
    if detectors is not None:
        traffic = msgspec.structs.replace(traffic, n_detectors=detectors)
    question = ForecastQuestion(
        shift=shift,
        horizon_days=horizon,
        quiet_days=quiet_days,
        replays_per_s=replays_per_s,
        allocate=allocate,
        replay_ms=replay_ms,
        pods=pods,
    )
    return PlanResult(
        forecast=forecast(options, policy_of(options.sampling, "plan"), traffic, question, watch.step)
    )


def _model(config: Config, name: str) -> str:
    names = [model.name for model in config.models]
    if name in names:
        return name
    if name:
        raise OperatorError(f"no model `{name}` in the configuration: {nearest(name, names)}")
    if len(names) != 1:
        raise OperatorError(f"give --model; configured are: {', '.join(names) or 'none'}")
    return names[0]


def _recorded(setting: Setting, config: Config, model: str, days: float) -> ModelTraffic:
    """Return the traffic of the last days, as the database has it."""
    secrets, end = setting.secrets(config), datetime.now(UTC)

    async def ask() -> Usage:
        async with Database(secrets.dsn) as database:
            return await usage(database, model, end - timedelta(days=days), end)

    used = wait_for(ask())
    return ModelTraffic(
        model=model,
        requests_per_s=used.requests_per_s,
        slices=tuple(
            (
                SliceKey(model=model, name=slice_.name, predicate=slice_.predicate, where=slice_.where),
                slice_.share,
            )
            for slice_ in used.slices
        ),
        strata=used.strata,
        n_detectors=used.n_detectors or None,
    )


def _given(
    config: Config, model: str, rps: float, slices: Mapping[str, float], strata: Mapping[str, float]
) -> ModelTraffic:
    """Return the traffic that somebody expects."""
    for name, share in (*slices.items(), *strata.items()):
        if not 0 <= share <= 1:
            raise OperatorError(f"`{name}`: {share:g} is not a share from 0 to 1")
    shares = {_slice(config, model, name): share for name, share in slices.items()}
    names = [stratum.name for stratum in config.sampling.header_strata]
    for name in strata:
        if name not in names:
            raise OperatorError(f"no header stratum `{name}`: {nearest(name, names)}")
    return ModelTraffic(model=model, requests_per_s=rps, slices=tuple(shares.items()), strata=dict(strata))


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
    open_rules = {rule.name: rule for rule in config.slices if rule.model in {"", model} and _is_open(rule)}
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


def _is_open(rule: Slice) -> bool:
    """Return whether each observed value becomes a slice."""
    return bool(rule.header or rule.parameter or rule.json or rule.text) and not (rule.values or rule.edges)
