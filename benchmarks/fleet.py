"""What an exchange costs a whole fleet, behind its sidecars: processor time of workers, monitors, NATS and Postgres, and where that bends.

    python -m benchmarks.fleet [--quick] [--axes NAME ...] [--only costs|plan] [--json] [--out DIRECTORY]

Real workers, real monitors, a real NATS and a real Postgres (with `fsync`) on this machine; of the sidecars there are only the records that
they send: one process makes exchanges, encrypted and numbered, and the counts of as many pods as wanted. Every exchange has one item, an image
of 8 x 8 of which the reference costs next to nothing, and lies in `all` and in seven other slices, drawn evenly.

**Costs**, one axis at a time from a base of 1,000 slices, 4 models, one worker, one monitor and batches of 64. Workers work off a backlog while no
monitor runs; then monitors fold what was stored while no worker runs. Processor time is counted in the middle of each, in `/proc`, so that Postgres'
share is told for workers and monitors apart, and nothing depends on how fast the machine's other work lets it go, but for caches.

**Plan**: 50 pods of 200 requests a second at 1 %, with 20 models of 200 slices and with one, live, beside what `quantdrift plan --fleet` calculates
for them: as many workers and monitors as it says. More pods are more workers with batches as large, which two cores cannot run.

`leader_exchanges_per_s` is what one core could fold at the base if it did all of that, Postgres included, and nothing else;
`leader_small_batch_ratio` how much more an exchange costs it in batches of three.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import torch

from benchmarks.leader import SLICES_OF_EXCHANGE, WAITING, monitors, until_left, until_shared
from benchmarks.plots import Stack, stacked
from benchmarks.replays import Servers, Traffic, config_of, cpu_s, running, servers_in
from benchmarks.replays import until_left as until_acknowledged
from benchmarks.result import Goal, finish, machine
from benchmarks.worker import TINY, turn
from quantdrift.cli.config_summary import memory_bytes
from quantdrift.core.config.schema import Config, Monitor, Provider, Slice
from quantdrift.core.keys import Key, KeyRing, write_keys
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.monitor.planning.fleet import COSTS, Fleet, FleetSize, fleet_size

_T = TypeVar("_T")
_ITEMS: Final = 256  # different ones
_NOISE: Final = 1e-4
"""Noise of the candidate's logits: hardly any answer changes, since alerts cost more than exchanges."""
_CAPTURED_PER_S: Final = 1_000.0  # of a backlog
_REORDER_S: Final = 0.2
_LAG_S: Final = 1.2
"""The first batches of a backlog bring nothing: what has come is read once in a second of storing."""
_QUIET_S: Final = 2.0
_QUIET_SHARE: Final = 0.15  # of a core
_QUIET_WITHIN_S: Final = 30.0
_LONGEST_S: Final = 600.0
_KEPT_UP_S: Final = 120.0
_END: Final = 0.05
_SMALL: Final = 3
_GOAL_PER_S: Final = 8_000.0
_GOAL_RATIO: Final = 2.0
_FLEETS: Final = (
    Fleet(pods=50, requests_per_s=200.0, sampled=0.01, models=20, slices=200),
    Fleet(pods=50, requests_per_s=200.0, sampled=0.01, models=1, slices=200),
)
"""Small batches and large ones. A tenth of a fleet of 500 pods, which two cores can run; its workers have batches as large."""
_WITHIN: Final = 0.25
"""What is planned may differ from what is measured by as much."""
_OF_POSTGRES: Final = """
    select (select coalesce(sum(n_rows), 0)::bigint from batch where kind = 'comparison') as n,
        (select count(*) from batch where kind = 'comparison' and n_rows > 0) as n_batches,
        (select sum(pg_total_relation_size(inhrelid))::bigint from pg_inherits where inhparent = 'comparison'::regclass) as n_bytes
"""
_SHOW: Final = "update batch set fold_seq = null"
_BACKLOG: Final = "select sum(n_rows)::bigint as n, count(*) as n_batches from batch"
# Batches of a backlog were stored as live traffic is, one after another. A number below the first hides them until they are to be folded.
_SPREAD: Final = """
    update batch set stored_at = spread.at, fold_seq = -batch.id
    from (
        select id, (select min(captured_to) from batch) + (1 + sum(n_rows) over (order by id) / {per_s}) * interval '1 second' as at
        from batch
    ) spread
    where batch.id = spread.id
"""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet whose costs are measured.

    Parameters
    ----------
    slices
        Of all models together, `all` of each among them.
    models, workers, leaders
        How many; each leader folds as many shards as any other.
    batch
        Most exchanges that a worker stores in one transaction.
    """

    slices: int = 1_000
    models: int = 4
    workers: int = 1
    leaders: int = 1
    batch: int = 64

    def __str__(self) -> str:
        return f"slices {self.slices:,}, models {self.models}, workers {self.workers}, monitors {self.leaders}, batches of {self.batch}"


BASE: Final = Point()
AXES: Final[dict[str, tuple[int, ...]]] = {
    "batch": (1, 3, 16, 64, 512),
    "slices": (4, 40, 200, 1_000, 4_000, 10_000),
    "models": (1, 4, 20),
    "workers": (1, 2, 4, 8),
    "leaders": (1, 2, 4),
}
_QUICK: Final[dict[str, tuple[int, ...]]] = {
    "batch": (3, 64),
    "slices": (40, 1_000),
    "workers": (1, 2),
    "leaders": (1, 2),
}


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of processor time for one exchange.

    Parameters
    ----------
    batch
        Exchanges that were stored in one transaction, in the mean.
    worker, nats, storing
        Of the workers with all their threads, of NATS, and of Postgres for them.
    leader, folding
        Of the monitors, and of Postgres for them.
    """

    point: Point
    batch: float
    worker: float
    nats: float
    storing: float
    leader: float
    folding: float

    @property
    def folded_per_s(self) -> float:
        """Exchanges a second that one core could fold, Postgres included."""
        return 1e6 / (self.leader + self.folding)

    @property
    def parts(self) -> dict[str, float]:
        """What each part takes, by its name."""
        return {
            "worker": self.worker,
            "NATS": self.nats,
            "Postgres for workers": self.storing,
            "monitors": self.leader,
            "Postgres for monitors": self.folding,
        }


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the plan beside the one that was measured."""

    name: str
    unit: str
    planned: float
    measured: float

    @property
    def ratio(self) -> float:
        """What was measured over what was planned."""
        return self.measured / self.planned


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet that was run, beside its plan.

    Parameters
    ----------
    wanted_per_s, stored_per_s
        Exchanges a second that the pods should send, and that were stored.
    n_waiting
        Batches that waited to be folded at the end.
    """

    fleet: Fleet
    wanted_per_s: float
    stored_per_s: float
    n_waiting: int
    checked: list[Checked]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and draw; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer points and exchanges")
    parser.add_argument(
        "--axes",
        nargs="*",
        choices=list(AXES),
        default=list(AXES),
        help="what is varied; none: the base alone",
    )
    parser.add_argument("--only", choices=["costs", "plan"], help="one of the two parts")
    parser.add_argument(
        "--json", action="store_true", help="print all points as JSON, and progress to standard error"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/benchmarks"), help="where the plot and the JSON go"
    )
    given = parser.parse_args(arguments)
    say = partial(print, file=sys.stderr if given.json else sys.stdout, flush=True)
    axes = {name: values for name, values in (_QUICK if given.quick else AXES).items() if name in given.axes}
    points = list(
        dict.fromkeys([BASE, *(_at(name, value) for name, values in axes.items() for value in values)])
    )
    if given.only == "plan":
        axes, points = {}, []
    found: dict[Point, Found] = {}
    for number, point in enumerate(points, start=1):
        began = time.monotonic()
        found[point] = _in_servers(partial(_measure, point, 12_000 if given.quick else 24_000))
        say(f"[{number}/{len(points)}, {time.monotonic() - began:.0f} s] {_said(found[point])}")
    lives: list[Live] = []
    for fleet in () if given.only == "costs" else _FLEETS:
        lives.append(_in_servers(partial(_run_live, fleet, 15.0 if given.quick else 40.0)))
        say(_table(lives[-1]))
    given.out.mkdir(parents=True, exist_ok=True)
    panels = [
        Stack(label=_LABELS[name], values=values, parts=[found[_at(name, value)].parts for value in values])
        for name, values in axes.items()
        if len(values) > 1
    ]
    if panels:
        for path in stacked(
            f"Processor time of one exchange: {BASE}, but for one axis", panels, given.out, "fleet"
        ):
            say(f"wrote {path}")
    report = {"machine": machine(), "points": list(found.values()), "live": lives}
    (given.out / "fleet.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    if given.json:
        print(msgspec.json.encode(report).decode())
        return 0
    finish("fleet", *_figures(found, lives))
    return 0


_LABELS: Final = {
    "batch": "most exchanges in a batch",
    "slices": "slices of all models",
    "models": "models",
    "workers": "workers",
    "leaders": "monitors that fold",
}


def _at(axis: str, value: int) -> Point:
    return msgspec.structs.replace(BASE, **{axis: value})


def _figures(
    found: dict[Point, Found], lives: Sequence[Live]
) -> tuple[dict[str, float | int | str | None], list[Goal]]:
    figures: dict[str, float | int | str | None] = {}
    goals: list[Goal] = []
    if BASE in found:
        per_s = figures["leader_exchanges_per_s"] = found[BASE].folded_per_s
        goals.append(
            Goal(name="leader_exchanges_per_s", value=per_s, bound=_GOAL_PER_S, unit="1/s", at_most=False)
        )
    if (small := found.get(_at("batch", _SMALL))) is not None:
        ratio = figures["leader_small_batch_ratio"] = found[BASE].folded_per_s / small.folded_per_s
        goals.append(Goal(name="leader_small_batch_ratio", value=ratio, bound=_GOAL_RATIO, unit="ratio"))
    for live in lives:
        figures |= {f"planned_{each.name}_ratio_{live.fleet.models}": each.ratio for each in live.checked}
    return figures, goals


def _said(found: Found) -> str:
    parts = ", ".join(f"{name} {value:.0f}" for name, value in found.parts.items())
    return f"{found.point}: us an exchange: {parts}; {found.folded_per_s:,.0f} folded/s and core, batches had {found.batch:.1f}"


def _table(live: Live) -> str:
    fleet = live.fleet
    lines = [
        f"live: {fleet.pods} pods of {fleet.requests_per_s:g} requests/s at {fleet.sampled:.0%}, {fleet.models} models of {fleet.slices} slices",
        f"{live.stored_per_s:,.0f} exchanges/s were stored of {live.wanted_per_s:,.0f}; {live.n_waiting} batches wait for the fold at the end",
        f"{'':<34}{'planned':>10}{'measured':>10}{'ratio':>8}",
    ]
    for each in live.checked:
        far = "  *" if not 1 / (1 + _WITHIN) <= each.ratio <= 1 + _WITHIN else ""
        lines.append(
            f"{f'{each.name}, {each.unit}':<34}{each.planned:>10,.1f}{each.measured:>10,.1f}{each.ratio:>8.2f}{far}"
        )
    return "\n".join([*lines, f"* more than {_WITHIN:.0%} off"])


def _in_servers(measure: Callable[[Servers, Path], Coroutine[Any, Any, _T]]) -> _T:
    with tempfile.TemporaryDirectory(prefix="qd-") as folder, servers_in(Path(folder)) as servers:
        return asyncio.run(measure(servers, Path(folder)))


class _Made(msgspec.Struct, frozen=True):
    """The configuration of a fleet, and what its exchanges are made of."""

    config: Config
    names: list[str]
    key: Key
    items: Any
    logits: Any
    attributes: Callable[[int], dict[str, str]]

    def traffic(self, queue: Queue, n_pods: int = 1, sampled: float = 1.0) -> Traffic:
        return Traffic(
            queue,
            self.names,
            TINY,
            self.items,
            self.logits,
            key=self.key,
            attributes=self.attributes,
            n_pods=n_pods,
            sampled=sampled,
            noise=_NOISE,
        )


def _made(servers: Servers, folder: Path, models: int, slices: int, monitor: Monitor, **shadow: Any) -> _Made:
    """Return a fleet of models with so many slices each."""
    path, keys = folder / "tiny.onnx", folder / "keys.json"
    TINY.save(path)
    write_keys(keys, KeyRing(keys=(Key.create(datetime.now(UTC) - timedelta(hours=1)),)), is_new=True)
    names = [f"m{number}" for number in range(models)]
    config = config_of(
        [TINY.model(name, TINY.reference(path)) for name in names],
        servers,
        provider=Provider.CPU,
        keys=keys,
        threads=1,
        **shadow,
    )
    # Each slice but `all` is a value of one of a few headers.
    n_values = [
        len(part) for part in np.array_split(np.arange(slices - 1), SLICES_OF_EXCHANGE - 1) if len(part)
    ]
    rules = tuple(
        Slice(name=f"h{number}", header=f"x-h{number}", max_values=n) for number, n in enumerate(n_values)
    )
    rng = np.random.default_rng(3)

    def attributes(_: int) -> dict[str, str]:
        chosen = (rng.random(len(n_values)) * n_values).astype(int).tolist()
        return {f"header.x-h{number}": str(value) for number, value in enumerate(chosen)}

    items = TINY.items(_ITEMS)
    with torch.inference_mode():
        logits = TINY.module()(torch.from_numpy(items)).numpy()
    return _Made(
        config=msgspec.structs.replace(config, slices=rules, monitor=monitor),
        names=names,
        key=msgspec.json.decode(keys.read_bytes(), type=KeyRing).current(datetime.now(UTC)),
        items=items,
        logits=logits,
        attributes=attributes,
    )


async def _measure(point: Point, n_most: int, servers: Servers, folder: Path) -> Found:
    """Return the costs at one point, each in the middle of a backlog."""
    # An exchange in a small batch costs many times as much, and so many are not needed.
    n = min(n_most, n_most // 4 * point.batch)
    lead = n // 8
    monitor = Monitor(admin="127.0.0.1:0", shards=point.leaders, reorder_s=_REORDER_S)
    n_slices = point.slices // point.models
    made = _made(servers, folder, point.models, n_slices, monitor, batch_items=point.batch)
    async with running(made.config, servers, point.workers, point.batch) as worker:
        queue = await Queue.connect(made.config.stream, client_name="benchmark")
        try:
            traffic = made.traffic(queue)
            await traffic.publish(16 * point.models, captured_per_s=_CAPTURED_PER_S)  # each version begins
            await until_acknowledged(queue, 0, lead)
            of_worker = await turn(worker, queue, traffic, n, lead=lead, captured_per_s=_CAPTURED_PER_S)
        finally:
            await queue.close()
    async with monitors(made.config, servers) as (processes, watch):

        def used() -> tuple[float, float]:
            own = sum(cpu_s(process.pid) for process in processes)
            return own, cpu_s(servers.postgres_pid, with_children=True)

        await watch.execute(_SPREAD.format(per_s=_CAPTURED_PER_S))
        stored = await watch.fetchrow(_BACKLOG)
        # Nothing is folded until each monitor has its shards, and what it does at its start is over.
        await until_shared(watch, point.leaders)
        await _until_quiet(used)
        await watch.execute(_SHOW)
        turns = await _turns(watch, used, stored["n_batches"])
    # The first turn loads everything, and slices begin.
    batch, lag = stored["n"] / stored["n_batches"], _LAG_S * _CAPTURED_PER_S / stored["n"]
    first, *_, last = [each for each in turns if each.n_left < stored["n_batches"] * (1 - lag)]
    leader, folding = (
        1e6 * (late - early) / (first.n_left - last.n_left) / batch
        for early, late in zip(first.used_s, last.used_s, strict=True)
    )
    return Found(
        point=point,
        batch=batch,
        worker=of_worker["loop"] + of_worker["threads"],
        nats=of_worker["nats"],
        storing=of_worker["postgres"],
        leader=leader,
        folding=folding,
    )


async def _run_live(fleet: Fleet, seconds: float, servers: Servers, folder: Path) -> Live:
    """Run a fleet with as many workers and monitors as are planned for it."""
    plain = Config()
    size = fleet_size(fleet, plain, memory_bytes(plain))
    monitor = Monitor(admin="127.0.0.1:0", shards=size.leaders)
    made = _made(servers, folder, fleet.models, fleet.slices, monitor)
    async with (
        running(made.config, servers, size.workers) as worker,
        monitors(made.config, servers) as (processes, watch),
    ):
        queue = await Queue.connect(made.config.stream, client_name="benchmark")
        try:
            traffic = made.traffic(queue, fleet.pods, fleet.sampled)
            await until_shared(watch, size.leaders)
            sending = asyncio.create_task(traffic.steady(size.exchanges_per_s, _LONGEST_S))

            async def seen() -> dict[str, float]:
                parts = worker.cpu_s()
                row = await watch.fetchrow(_OF_POSTGRES)
                return {
                    "at": time.monotonic(),
                    "worker": parts["loop"] + parts["replay"],
                    "nats": parts["nats"],
                    "postgres": parts["postgres"],
                    "leader": sum(cpu_s(process.pid) for process in processes),
                    **{name: float(row[name] or 0) for name in ("n", "n_batches", "n_bytes")},
                }

            # First slices, versions and the counts of pods begin, and everything is loaded.
            await asyncio.sleep(seconds)
            await _until_kept_up(queue, size.exchanges_per_s * Config().shadow.batch_delay_s * 4)
            before = await seen()
            await asyncio.sleep(seconds)
            after = await seen()
            if sending.done():
                sending.result()
            sending.cancel()
            n_waiting = int(await watch.fetchval(WAITING))
        finally:
            await queue.close()
    grown = {name: after[name] - before[name] for name in before}
    return Live(
        fleet=fleet,
        wanted_per_s=size.exchanges_per_s,
        stored_per_s=grown["n"] / grown["at"],
        n_waiting=n_waiting,
        checked=_checked(grown, size),
    )


class _Turn(msgspec.Struct, frozen=True):
    """The end of a turn of the fold: batches that wait, and processor time of monitors and Postgres."""

    n_left: int
    used_s: tuple[float, float]


async def _turns(watch: Any, used: Callable[[], tuple[float, float]], n_batches: int) -> list[_Turn]:
    """Return the ends of turns, until hardly any batch waits."""
    turns: list[_Turn] = []
    n_left = n_batches
    while n_left > _END * n_batches:
        n_left = await until_left(watch, n_left - 1)
        turns.append(_Turn(n_left, used()))
    return turns


async def _until_quiet(used: Callable[[], tuple[float, float]]) -> None:
    """Wait until monitors and Postgres hardly do anything, or for half a minute."""
    until = time.monotonic() + _QUIET_WITHIN_S
    before = sum(used())
    while time.monotonic() < until:
        await asyncio.sleep(_QUIET_S)
        before, last = sum(used()), before
        if before - last < _QUIET_SHARE * _QUIET_S:
            return


async def _until_kept_up(queue: Queue, n_most: float) -> None:
    """Wait until the workers keep up with what is sent; where they cannot, for two minutes."""
    began = time.monotonic()
    while (await read_backlog(queue)).n_messages > n_most:
        if time.monotonic() - began > _KEPT_UP_S:
            return
        await asyncio.sleep(1.0)


def _checked(grown: dict[str, float], size: FleetSize) -> list[Checked]:
    """Return what was planned beside what was measured, by the growth of each count."""
    n, per_s = grown["n"], size.exchanges_per_s
    return [
        Checked(name=name, unit=unit, planned=planned, measured=measured)
        for name, unit, planned, measured in (
            ("worker", "us an exchange", size.worker_us, 1e6 * grown["worker"] / n),
            ("nats", "us an exchange", 1e6 * size.nats_cores / per_s, 1e6 * grown["nats"] / n),
            ("postgres", "us an exchange", 1e6 * size.postgres_cores / per_s, 1e6 * grown["postgres"] / n),
            ("monitors", "us an exchange", 1e6 * size.leader_cores / per_s, 1e6 * grown["leader"] / n),
            ("batch", "exchanges", size.batch, n / grown["n_batches"]),
            ("comparison", "bytes", COSTS.comparison_bytes, grown["n_bytes"] / n),
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
