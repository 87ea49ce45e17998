"""The command `quantdrift status`."""

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
from msgspec import UNSET, UnsetType

from quantdrift.cli.look.blockers import Port, StatusFacts, ago, blockers, models_of, nameless, notes
from quantdrift.cli.look.guide import Expected, expected, expected_lines, guide, steps
from quantdrift.cli.options import CONFIG, DATA, JSON, emit, set_up_logs, span_of
from quantdrift.cli.output import show, waiting
from quantdrift.core.config.address import read_address
from quantdrift.core.config.load import Role
from quantdrift.core.config.schema import Budget, Config
from quantdrift.core.config.state import shared_digest
from quantdrift.core.data_directory import at_data, secrets_at
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.notation import count_of, number
from quantdrift.core.process.kept_config import KEPT, load_or_kept
from quantdrift.core.process.states import STATES, PartState, read_states, up_runs
from quantdrift.core.records import UNANSWERED
from quantdrift.core.sampling.pause import KEY, Pause, PauseError, decode
from quantdrift.core.text import columns, in_one_line
from quantdrift.facts.cost import money_of
from quantdrift.facts.figures import period
from quantdrift.facts.status import RANK, said

if TYPE_CHECKING:
    import aiohttp

    from quantdrift.core.stream.backlog import Waiting
    from quantdrift.facts.figures import Figure
    from quantdrift.facts.status import Serving
    from quantdrift.storage.account.account import Account
    from quantdrift.storage.account.flow import Flow, FlowStep, ModelFlow, TrafficLatency
    from quantdrift.storage.fold_rows import ShardState

_PORT_S: Final = 2.0
_DATABASE_S: Final = 40.0
_LEAST_FREE_BYTES: Final = 4 << 20
_REPLAYS_S: Final = 5.0
_WATCH_S: Final = 2.0
_WIDTH: Final = 10
_MOST_VERSIONS: Final = 3  # those of a model that were seen last
# What is read of /metrics, without prefix `quantdrift_ROLE_` and suffix `_total`.
_COUNTS: Final = {
    "sidecar": (
        "offered",
        "taken",
        "lost",
        "ignored",
        "unknown_posts",
        "config_refused",
        "backend_failures",
        "blind_connections",
        "connections",
        "tap_connections",
        "early",
        "observer_errors",
        "intake_refused",
        "stream_unstored_seconds",
    ),
    "shadow": ("compared", "skipped"),
    "monitor": ("folded", "leader"),
}


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the output of `--json`: its steps in the database, what waits in the stream, and its account.

    `not_accounted_for` is None without the database. `versions` says of each version whether it serves and is paused. `strata` are the accounts by header stratum. `expected` are its slices
    that lack exchanges for a verdict, with the time until they have them. `replay_cost` is left out without a price.
    """

    model: str
    is_configured: bool
    steps: "ModelFlow | None"
    waiting: "Waiting | None"
    account: "Account | None"
    not_accounted_for: int | None
    strata: "dict[str, Account]"
    versions: "dict[str, Serving]"
    expected: tuple[Expected, ...]
    replay_cost: "Figure | UnsetType" = UNSET


@click.command()
@CONFIG
@DATA
@click.option(
    "--since",
    "span",
    default="1h",
    show_default=True,
    help="Period that is counted beside the total, up to now: 30m, 2h, 1d.",
)
@click.option("--watch", is_flag=True, help="Show it again every two seconds, until Ctrl-C.")
@JSON
@click.pass_context
def status(
    context: click.Context, config_path: Path, *, data: Path | None, span: str, watch: bool, as_json: bool
) -> None:
    """Show how far exchanges come, from the client's socket to the monitor, and what blocks them.

    For each model: requests offered, captured, left out, lost, waiting, compared, quarantined and folded, over a period
    and in total, with the time of the last one. Until the first verdict it shows the steps to it: what is done, what
    comes next, and when the verdict can be expected at the present rate. It reads Postgres, NATS and the admin ports of this host, and changes
    nothing. A part that does not answer is a line of the output, not an error.

    Exit codes: 0 if nothing blocks, 1 if something does, 2 if the configuration cannot be read.

    \b
    Examples:
      quantdrift status
      quantdrift status --since 1d --json
    """
    if watch and as_json:
        raise OperatorError("--watch and --json exclude each other")
    since = span_of("--since", span)
    while True:
        config, refusal = load_or_kept(config_path, None if data is None else data / KEPT)
        set_up_logs(config)
        with waiting("asking Postgres, NATS and the processes", quiet=watch or as_json):
            facts = asyncio.run(_gathered(config, refusal, data, span, since))
        blocking = blockers(config, facts)
        if as_json:
            emit(_as_json(config, facts, blocking))
        else:
            text = shown(config, facts, blocking)
            show(f"\x1b[H\x1b[2J{text}" if watch and sys.stdout.isatty() else text)
        if not watch:
            context.exit(1 if blocking else 0)
        time.sleep(_WATCH_S)


async def _gathered(
    config: Config, refusal: str, data: Path | None, span: str, since: timedelta
) -> StatusFacts:
    now = datetime.now(UTC)
    flow: Flow | str
    runs = None if data is None else up_runs(data)
    processes = read_states(data / STATES) if runs and data is not None else {}
    (flow, (waiting, oldest_s, pause, nats_problem), ports) = await asyncio.gather(
        _database(config, data, now - since), _stream(config, data), _ports(config, processes)
    )
    return StatusFacts(
        now=now,
        begin=now - since,
        span=span,
        flow=None if isinstance(flow, str) else flow,
        database_problem=flow if isinstance(flow, str) else "",
        waiting=waiting,
        nats_problem=nats_problem,
        oldest_s=oldest_s,
        pause=pause.at(now),
        ports=ports,
        processes=processes,
        up_missing=str(data) if runs is False else "",
        full_disk=str(data) if runs and data is not None and _is_full(data) else "",
        missing=missing_files(config),
        config_problem=in_one_line(refusal),
        digest=shared_digest(config),
    )


def _is_full(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(directory).free < _LEAST_FREE_BYTES
    return False


def missing_files(config: Config) -> dict[str, tuple[str, ...]]:
    """Return the files of references that do not exist on this machine, by model."""
    paths_by_model = {
        model.name: tuple(
            reference.path
            for reference in model.references
            if reference.path and not Path(reference.path).exists()
        )
        for model in config.models
    }
    return {model: paths for model, paths in paths_by_model.items() if paths}


async def _database(config: Config, data: Path | None, begin: datetime) -> "Flow | str":
    """Return the flow, or why the database cannot be asked."""
    try:
        from quantdrift.core.stream.errors import in_words
        from quantdrift.storage.account.flow import flow
        from quantdrift.storage.address import PostgresAddress
        from quantdrift.storage.cost import replay_costs, replay_times
        from quantdrift.storage.database import Database
        from quantdrift.storage.shards import shard_states
        from quantdrift.storage.snapshot import in_time
    except ModuleNotFoundError as error:
        return f"Postgres cannot be read: {error.name} is not installed: pip install 'quantdrift[storage]'"
    where = ""
    try:
        secrets = secrets_at(config, Role.REPORT, data)
        where = f" at {PostgresAddress.of(secrets.dsn).where}"
        async with (
            asyncio.timeout(_DATABASE_S),
            Database(secrets.dsn) as database,
            database.begin() as connection,
        ):
            now = datetime.now(UTC)
            counted = await flow(connection, begin, max_share=config.monitor.max_loss_ratio)
            if len(states := await shard_states(connection)) > 1:
                counted = msgspec.structs.replace(counted, shards=tuple(states))
            if not config.cost.device_hour:
                return counted
            times = await in_time(connection, partial(replay_times, connection, begin, now), _REPLAYS_S) or {}
            return msgspec.structs.replace(
                counted, costs=replay_costs(times, config, period(begin, now), now)
            )
    except TimeoutError:
        return f"Postgres{where} did not answer within {_DATABASE_S:g} s"
    except RetryError as error:
        cause = error.__cause__
        why = in_words(cause) if isinstance(cause, OSError) else str(error)
        return f"Postgres{where} does not answer ({why}): nothing is stored and nothing is folded"
    except OperatorError as error:
        return f"Postgres{where} cannot be read: {error}"


async def _stream(config: Config, data: Path | None) -> "tuple[dict[str, Waiting] | None, float, Pause, str]":
    """Return what waits in the stream, the age of the oldest, what is paused, and why NATS cannot be asked."""
    from quantdrift.core.stream.backlog import read_backlog, read_waiting
    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.keyvalue import KeyValue
    from quantdrift.core.stream.rights import NatsRole

    try:
        config = at_data(config, data)
        queue = await Queue.connect(config.stream, client_name="quantdrift-status", role=NatsRole.OPERATOR)
    except (RetryError, OperatorError) as error:
        return None, 0.0, Pause(), f"{error}: no exchange passes from the sidecars to the shadow"
    try:
        waiting = await read_waiting(queue, [model.name for model in config.models])
        backlog = await read_backlog(queue)
        pause = Pause()
        with contextlib.suppress(RetryError, PauseError):  # no bucket yet
            entry = await KeyValue(queue, config.stream, purpose=KEY).get(KEY)
            pause = Pause() if entry is None else decode(entry.value)
    except RetryError as error:
        return None, 0.0, Pause(), str(error)
    finally:
        await queue.close()
    return waiting, backlog.oldest_s, pause, ""


async def _ports(config: Config, processes: dict[str, PartState]) -> dict[str, Port]:
    """Return what the admin ports answer: those of the processes of `quantdrift up`, else the configured ones."""
    import aiohttp

    configured = {
        "sidecar": config.sidecar.admin,
        "shadow": config.shadow.admin,
        "monitor": config.monitor.admin,
    }
    addresses = {
        role: (processes[role].address if role in processes else "") or at for role, at in configured.items()
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PORT_S)) as client:
        ports = await asyncio.gather(*(_port(client, role, at) for role, at in addresses.items()))
    return dict(zip(addresses, ports, strict=True))


async def _port(client: "aiohttp.ClientSession", role: str, address: str) -> Port:
    import aiohttp
    from prometheus_client.parser import text_string_to_metric_families

    where = str(read_address(address).dialled)
    try:
        async with client.get(f"http://{where}/readyz") as answer:
            ready = answer.status == 200
        async with client.get(f"http://{where}/metrics") as answer:
            text = await answer.text()
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
        return Port(address=where)
    counts: dict[str, float] = {}
    digest = ""
    with contextlib.suppress(ValueError):  # another program has the port
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "quantdrift_config":
                    digest = sample.labels.get("digest", "")
                name = sample.name.removeprefix(f"quantdrift_{role}_").removesuffix("_total")
                if name != sample.name and name in _COUNTS[role]:
                    counts[name] = counts.get(name, 0.0) + sample.value
    return Port(address=where, answers=True, ready=ready, counts=counts, digest=digest)


def _as_json(config: Config, facts: StatusFacts, found: tuple[str, ...]) -> object:
    configured = {model.name for model in config.models}
    models = facts.flow.models if facts.flow else {}
    return {
        "at": facts.now,
        "since": facts.begin,
        "flows": not found,
        "blockers": found,
        "notes": notes(config, facts),
        "steps": steps(config, facts),
        "models": [
            ModelStatus(
                model=name,
                is_configured=name in configured,
                steps=models.get(name),
                waiting=(facts.waiting or {}).get(name),
                account=_account(facts, name),
                not_accounted_for=_not_accounted_for(facts, name),
                strata={} if facts.flow is None else facts.flow.accounts.get(name, {}),
                versions={} if facts.flow is None else facts.flow.serving.get(name, {}),
                expected=expected(config, models[name]) if name in models else (),
                replay_cost=UNSET if facts.flow is None else facts.flow.costs.get(name, UNSET),
            )
            for name in models_of(config, facts.flow, facts.waiting)
        ],
        "unattributed": models.get(""),
        "account": _account(facts),
        "not_accounted_for": _not_accounted_for(facts),
        "fleet": None
        if facts.flow is None
        else {
            name: getattr(facts.flow, name)
            for name in (
                "offered",
                "captured",
                "n_sidecars",
                "tallied_at",
                "folded_at",
                "standby_s",
                "lag_factor",
                "shards",
                "n_unsent",
                "unsent_since",
            )
        },
        "oldest_waiting_s": facts.oldest_s,
        "postgres_problem": facts.database_problem,
        "nats_problem": facts.nats_problem,
        "ports": facts.ports,
        "processes": facts.processes,
    }


def _account(facts: StatusFacts, model: str | None = None) -> "Account | None":
    """Return the account of a model, or of all together; None without the database."""
    if facts.flow is None:
        return None
    from quantdrift.storage.account.account import Account

    every = facts.flow.accounts
    wanted = every.values() if model is None else [every.get(model, {})]
    return sum((account for strata in wanted for account in strata.values()), Account())


def _not_accounted_for(facts: StatusFacts, model: str | None = None) -> int | None:
    """Return how many sampled requests of a model, or of all together, nothing says of; None without the database."""
    account = _account(facts, model)
    if account is None:
        return None
    n_waiting = None
    if facts.waiting is not None:
        wanted = facts.waiting.values() if model is None else [facts.waiting.get(model)]
        n_waiting = sum(backlog.n_messages for backlog in wanted if backlog is not None)
    return account.missing(n_waiting)


def shown(config: Config, facts: StatusFacts, found: tuple[str, ...]) -> str:
    """Return the status as text: what blocks first, then the parts, then a table for each model."""
    lines = [*_head_lines(found, notes(config, facts)), ""]
    if rows_of_guide := [*guide(steps(config, facts), facts)]:
        lines += ["To a first verdict:", *(f"  {state}  {text}" for state, text in rows_of_guide), ""]
    lines += _part_lines(facts)
    rows: list[tuple[str, ...]] = []
    for name in models_of(config, facts.flow, facts.waiting):
        rows += [("", "", "", ""), (f"model {name}", "", "", "")]
        model = facts.flow.models.get(name) if facts.flow else None
        waiting = (facts.waiting or {}).get(name)
        is_configured = config.model(name) is not None
        rows += _model_rows(model, waiting, facts, is_configured=is_configured)
        if model is not None:
            rows += [(f"  {line}", "", "", "") for line in expected_lines(config, model)]
        if model is not None and model.latency is not None:
            rows.append((_took(model.latency, config.budget(name)), "", "", ""))
        versions = {} if facts.flow is None else facts.flow.serving.get(name, {})
        shown_versions = list(versions.items())[:_MOST_VERSIONS]
        rows += [(f"  {version}: {beside.words}", "", "", "") for version, beside in shown_versions]
        if facts.flow is not None and (cost := facts.flow.costs.get(name)) is not None:
            rows.append(("  cost of replays", f"{money_of(cost):>{_WIDTH}}", "", ""))
        if (n := _not_accounted_for(facts, name)) is not None and n > 0:
            rows += [("  not accounted for", "", f"{n:>{_WIDTH},}", "")]
    head = (
        f"{facts.now:%Y-%m-%d %H:%M:%S} UTC",
        f"{f'last {facts.span}':>{_WIDTH}}",
        f"{'total':>{_WIDTH}}",
        "last",
    )
    # A line of words must not widen the column of the names.
    table = iter(columns(head, [row for row in rows if any(row[1:])]).splitlines())
    lines += ["", next(table), *(next(table) if any(row[1:]) else row[0] for row in rows)]
    return "\n".join(lines)


def _head_lines(found: tuple[str, ...], noted: tuple[str, ...]) -> Iterator[str]:
    if found:
        yield from ("Blocked:", *(f"  - {line}" for line in found))
    if noted:
        yield from (
            *(("", "Also:") if found else ("Nothing blocks, but:",)),
            *(f"  - {line}" for line in noted),
        )
    if not found and not noted:
        yield "Everything flows."


def _shards_line(shards: "Sequence[ShardState]", now: datetime) -> str:
    """Return who folds the models, and what waits for them."""
    monitors = len({shard.holder for shard in shards} - {""})
    n = sum(shard.n_unfolded for shard in shards)
    oldest = min((shard.oldest for shard in shards if shard.oldest is not None), default=None)
    since = "" if oldest is None else f", the oldest for {ago(now - oldest)}"
    waits = f"{count_of(n, 'batch', 'batches')} {'waits' if n == 1 else 'wait'} for the fold{since}"
    return f"{len(shards)} shards of models, folded by {count_of(monitors, 'monitor')}; {waits}"


def _part_lines(facts: StatusFacts) -> Iterator[str]:
    flow = facts.flow
    if flow is not None:
        folded = "never" if flow.folded_at is None else f"{ago(facts.now - flow.folded_at)} ago"
        yield f"Postgres answers; the monitor last folded: {folded}"
        if flow.shards:
            yield _shards_line(flow.shards, facts.now)
    if facts.waiting is not None:
        n = sum(backlog.n_messages for backlog in facts.waiting.values())
        oldest = f", the oldest for {ago(timedelta(seconds=facts.oldest_s))}" if n else ""
        yield f"NATS answers; {count_of(n, 'exchange')} in the stream{oldest}"
    tell: dict[str, Callable[[dict[str, float]], str]] = {
        "sidecar": lambda n: f"{n.get('offered', 0):,.0f} requests, {n.get('taken', 0):,.0f} sampled",
        "shadow": lambda n: f"{n.get('compared', 0):,.0f} compared, {n.get('skipped', 0):,.0f} not",
        "monitor": lambda n: f"{n.get('folded', 0):,.0f} batches folded",
    }
    for role, port in facts.ports.items():
        if not port.answers:
            yield f"{role} does not answer at {port.address}"
        else:
            ready = "is ready" if port.ready else "answers, but is not ready"
            yield f"{role} at {port.address} {ready}; since its start {tell[role](port.counts)}"
    if flow is not None and flow.n_sidecars > 1:
        yield f"{flow.n_sidecars} sidecars have sent counts, {flow.offered.recent:,} requests in the last {facts.span}"


def _model_rows(
    model: "ModelFlow | None", waiting: "Waiting | None", facts: StatusFacts, *, is_configured: bool
) -> Iterator[tuple[str, ...]]:
    if not is_configured and model is not None and model.unknown.total:
        yield _row("named, but not configured", model.unknown, facts)
        return
    if model is not None:
        several = facts.flow is not None and facts.flow.offered.total != model.offered.total
        yield _row("offered (estimated)" if several else "offered", model.offered, facts)
        yield _row("captured", model.captured, facts)
        if model.thinned.total:
            yield _row("left out by the second draw", model.thinned, facts)
        yield from _lost_rows(model, facts, is_configured=is_configured)
    if waiting is not None:
        yield ("  waiting in the stream", "", f"{waiting.n_messages:>{_WIDTH},}", _read(waiting, facts))
    if model is not None:
        yield _row("replayed and compared", model.compared, facts)
        for reason, step in model.quarantined.items():
            yield _row(f"quarantined: {reason}", step, facts)
        yield _row("folded", model.folded, facts)
        yield from _verdict_rows(model)


def _verdict_rows(model: "ModelFlow") -> Iterator[tuple[str, ...]]:
    if model.n_unmeasured:
        yield ("  answers that could not be measured", f"{model.n_unmeasured:>{_WIDTH},}", "", "")
    if model.verdicts:
        verdicts = ", ".join(
            f"{model.verdicts[verdict]} {said(verdict)}" for verdict in RANK if verdict in model.verdicts
        )
        why = f" (all: {model.reason})" if model.reason else ""
        yield (f"  slices: {verdicts}{why}", "", "", "")


def _lost_rows(model: "ModelFlow", facts: StatusFacts, *, is_configured: bool) -> Iterator[tuple[str, ...]]:
    for reason, step in model.lost.items():
        yield _row(f"{_what_of(reason)}: {reason}", step, facts)
    for reason, step in (nameless(model, facts.flow) if is_configured else {}).items():
        yield _row(f"{_what_of(reason)}, model not known: {reason}", step, facts)
    if model.unknown.total:
        yield _row("named where it was not configured", model.unknown, facts)
    if model.expired.total or model.expired.recent:
        yield _row("lost: expired in the stream", model.expired, facts)
    if model.dropped.total:
        yield _row("lost: dropped from the stream", model.dropped, facts)


def _what_of(reason: str) -> str:
    return "no answer" if reason in UNANSWERED else "lost"


def _took(latency: "TrafficLatency", accepted: Budget) -> str:
    """Return how long the candidate takes, and its budget or what was learned of it, where there is one."""
    against = [f"budget {number(accepted.latency_p99_s)} s"] if accepted.latency_p99_s else []
    if accepted.latency_growth:
        against.append(
            "learning what is usual"
            if latency.learned_s is None
            else f"learned: {number(latency.learned_s)} s"
        )
    budget = f" ({'; '.join(against)})" if against else ""
    median, p99 = number(latency.median_s), number(latency.p99_s)
    return f"  answers of the candidate: half within {median} s, 99 % within {p99} s{budget}"


def _read(waiting: "Waiting", facts: StatusFacts) -> str:
    if waiting.is_read:
        return "read now"
    return "not read" if waiting.read_at is None else f"read {ago(facts.now - waiting.read_at)} ago"


def _row(name: str, step: "FlowStep", facts: StatusFacts) -> tuple[str, ...]:
    last = "" if step.last is None else f"{ago(facts.now - step.last)} ago"
    return f"  {name}", f"{step.recent:>{_WIDTH},}", f"{step.total:>{_WIDTH},}", last
