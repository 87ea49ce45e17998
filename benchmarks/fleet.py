"""What an exchange costs a whole fleet, behind its sidecars: processor time of workers, monitors, NATS and Postgres, and where that bends.

    python -m benchmarks.fleet [--quick] [--axes NAME ...] [--only costs|plan|knee] [--rounds N] [--out DIRECTORY]

Real workers, real monitors, a real NATS and a real Postgres (with `fsync`) on this machine; of the sidecars there are only the records that
they send: one process makes exchanges, encrypted and numbered, and the counts of as many pods as wanted. Every exchange has one item, an image
of 8 x 8 of which the reference costs next to nothing, and lies in `all` and in seven other slices, drawn evenly.

**Costs**, one axis at a time from a base of 1,000 slices, 4 models, one worker, one monitor and batches of 64. Workers work off a backlog while no
monitor runs; then monitors fold what was stored while no worker runs. Processor time is counted in the middle of each, in `/proc`, of the fold from one
writing to another (as `python -m benchmarks.leader` does), so that Postgres' share is told for workers and monitors apart, and nothing depends on how fast the machine's other work lets it go, but for caches. The plot marks
where an axis bends: where an exchange costs twice what it costs at the cheapest point of that axis.

**Plan**: small fleets, live, with batches of one to fifty and 200 to 4,000 slices, beside what `quantdrift plan --fleet` calculates for them. Then it prints
the costs that fit best to what was measured, how far they are off in each fleet, and both as they are to be entered: the lines of `Costs` in
`quantdrift/monitor/planning/fleet.py`, and the rows of the table "What a fleet costs" in docs/explanation/performance.md. What depends on them
is compared by `tests/unit/test_fleet_plan.py`. More pods are more workers with batches as large, which two cores cannot run.

**Knee**: as `python -m benchmarks.knee`, against a server whose knee theory knows.

`leader_exchanges_per_s` is what one core could fold at the base if it did all of that, Postgres included, and nothing else;
`leader_small_batch_ratio` how much more an exchange costs it in batches of three; `knee_error` how far the knee that `quantdrift load` finds is from the
one of theory; `plan_worst_ratio` the cost that is furthest from what the plan says, over it or under it. The last line has them as JSON, and
`DIRECTORY/fleet.json` has every point.
"""

import argparse
import asyncio
import math
import os
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

from benchmarks import knee
from benchmarks.fleet_plan import (
    CASES,
    PARTS,
    QUICK_CASES,
    WITHIN,
    Case,
    Live,
    median,
    plan_said,
    run_said,
    worst_ratio,
)
from benchmarks.leader import SLICES_OF_EXCHANGE, WAITING, monitors, n_batches_of, until_shared, writings
from benchmarks.plots import Stack, stacked
from benchmarks.replays import Servers, Traffic, config_of, cpu_s, running, servers_in
from benchmarks.replays import until_left as until_acknowledged
from benchmarks.result import Figures, Goal, finish, machine
from benchmarks.worker import TINY, turn
from quantdrift.core.config.schema import Config, Monitor, Provider, Slice
from quantdrift.core.keys import Key, KeyRing, write_keys
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue

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
_KEPT_UP_S: Final = 60.0
_WAITING_S: Final = 3.0
_ALL_SEEN: Final = 3.0  # of the values of a header 5 % at most are not drawn
_SMALL: Final = 3
_GOAL_PER_S: Final = 8_000.0
_GOAL_RATIO: Final = 2.0
_OF_POSTGRES: Final = """
    select (select coalesce(sum(n_rows), 0)::bigint from batch where kind = 'comparison') as n,
        (select count(*) from batch where kind = 'comparison' and n_rows > 0) as n_batches,
        (select n_tup_ins + n_tup_upd from pg_stat_user_tables where relname = 'rollup_day') as n_slices,
        (select sum(pg_total_relation_size(inhrelid))::bigint from pg_inherits where inhparent = 'comparison'::regclass) as n_bytes
"""
"""A slice that a turn touches has one row of `rollup_day` written."""
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
    parser.add_argument("--only", choices=["costs", "plan", "knee"], help="one of the three parts")
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="how often each fleet of the plan is run, in turn; the median counts",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/benchmarks"), help="where the plot and the JSON go"
    )
    given = parser.parse_args(arguments)
    say = partial(print, flush=True)
    wanted = (given.only,) if given.only else ("costs", "plan", "knee")
    axes = {name: values for name, values in (_QUICK if given.quick else AXES).items() if name in given.axes}
    found: dict[Point, Found] = {}
    if "costs" in wanted:
        points = dict.fromkeys(
            [BASE, *(_at(name, value) for name, values in axes.items() for value in values)]
        )
        for number, point in enumerate(points, start=1):
            began = time.monotonic()
            found[point] = _in_servers(partial(_measure, point, is_quick=given.quick))
            say(
                f"[{number}/{len(points)}, {time.monotonic() - began:.0f} s, load {_load():.1f}] {_said(found[point])}"
            )
        panels = [
            Stack(
                label=_LABELS[name], values=values, parts=[found[_at(name, value)].parts for value in values]
            )
            for name, values in axes.items()
        ]
        for path in stacked(_TITLE.format(BASE), panels, _made_folder(given.out), "fleet") if panels else ():
            say(f"wrote {path}")
    lives: list[Live] = []
    if "plan" in wanted:
        cases = QUICK_CASES if given.quick else CASES
        runs: list[list[Live]] = [[] for _ in cases]
        for _ in range(given.rounds):
            for case, of_case in zip(cases, runs, strict=True):
                of_case.append(_in_servers(partial(_run_live, case, 15.0 if given.quick else 30.0)))
                say(run_said(of_case[-1]))
        lives = [median(of_case) for of_case in runs]
        say(plan_said(lives))
    figures, goals = _figures(found, lives)
    if "knee" in wanted:
        knee_figures, knee_goals = knee.measured(is_quick=given.quick)
        figures |= knee_figures or {"knee_error": None}  # the client kept its schedule at no load
        goals += knee_goals
    report = {"machine": machine(), "figures": figures, "points": list(found.values()), "live": lives}
    (_made_folder(given.out) / "fleet.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    finish("fleet", figures, goals)
    return 0


_TITLE: Final = "Processor time of one exchange at {}, but for one axis"
_LABELS: Final = {
    "batch": "most exchanges in a batch",
    "slices": "slices of all models",
    "models": "models",
    "workers": "workers",
    "leaders": "monitors that fold",
}


def _at(axis: str, value: int) -> Point:
    return msgspec.structs.replace(BASE, **{axis: value})


def _figures(found: dict[Point, Found], lives: Sequence[Live]) -> tuple[Figures, list[Goal]]:
    figures: Figures = {}
    goals: list[Goal] = []
    if BASE in found:
        per_s = figures["leader_exchanges_per_s"] = found[BASE].folded_per_s
        goals.append(
            Goal(name="leader_exchanges_per_s", value=per_s, bound=_GOAL_PER_S, unit="1/s", at_most=False)
        )
    if (small := found.get(_at("batch", _SMALL))) is not None:
        ratio = figures["leader_small_batch_ratio"] = found[BASE].folded_per_s / small.folded_per_s
        goals.append(Goal(name="leader_small_batch_ratio", value=ratio, bound=_GOAL_RATIO, unit="ratio"))
    if lives:
        worst = figures["plan_worst_ratio"] = worst_ratio(lives)
        far = max(worst, 1 / worst)
        goals.append(Goal(name="plan_worst_ratio", value=far, bound=1 + WITHIN, unit="ratio"))
    return figures, goals


def _made_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _load() -> float:
    return os.getloadavg()[0]


def _said(found: Found) -> str:
    parts = ", ".join(f"{name} {value:.0f}" for name, value in found.parts.items())
    return f"{found.point}: us an exchange: {parts}; {found.folded_per_s:,.0f} folded/s and core, batches had {found.batch:.1f}"


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


async def _measure(point: Point, servers: Servers, folder: Path, *, is_quick: bool) -> Found:
    """Return the costs at one point, each in the middle of a backlog."""
    n = n_batches_of(point.batch, point.leaders, is_quick=is_quick) * point.batch
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
        seen = await writings(watch, processes, servers, stored["n_batches"])
    # The first turn loads everything, and slices begin.
    batch, lag = stored["n"] / stored["n_batches"], _LAG_S * _CAPTURED_PER_S / stored["n"]
    _, first, *_, last = [each for each in seen if each.n_left < stored["n_batches"] * (1 - lag)]
    leader, folding = last.since(first, (first.n_left - last.n_left) * batch)
    return Found(
        point=point,
        batch=batch,
        worker=of_worker["loop"] + of_worker["threads"],
        nats=of_worker["nats"],
        storing=of_worker["postgres"],
        leader=leader,
        folding=folding,
    )


async def _run_live(case: Case, seconds: float, servers: Servers, folder: Path) -> Live:
    """Run a fleet with one worker and one monitor, and return what each part took."""
    fleet = case.fleet
    monitor = Monitor(admin="127.0.0.1:0")
    made = _made(servers, folder, fleet.models, fleet.slices, monitor, batch_delay_s=case.batch_delay_s)
    async with (
        running(made.config, servers) as worker,
        monitors(made.config, servers) as (processes, watch),
    ):
        queue = await Queue.connect(made.config.stream, client_name="benchmark")
        try:
            traffic = made.traffic(queue, fleet.pods, fleet.sampled)
            await until_shared(watch, 1)
            # Each slice is seen before what counts begins: a new one costs more than all else.
            n_values = math.ceil((fleet.slices - 1) / (SLICES_OF_EXCHANGE - 1))
            await traffic.publish(fleet.models * math.ceil(n_values * (math.log(n_values) + _ALL_SEEN)))
            sending = asyncio.create_task(traffic.steady(case.per_s, _LONGEST_S))

            async def seen() -> dict[str, float]:
                parts = worker.cpu_s()
                row = await watch.fetchrow(_OF_POSTGRES)
                return {
                    "at": time.monotonic(),
                    "worker": parts["loop"] + parts["replay"],
                    "nats": parts["nats"],
                    "postgres": parts["postgres"],
                    "leader": sum(cpu_s(process.pid) for process in processes),
                    **{name: float(value or 0) for name, value in row.items()},
                }

            # Versions and the counts of pods begin, and everything is loaded.
            await asyncio.sleep(seconds)
            await _until_kept_up(queue, case.per_s * max(4 * case.batch_delay_s, _WAITING_S))
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
        case=case,
        stored_per_s=grown["n"] / grown["at"],
        batch=grown["n"] / grown["n_batches"],
        slices=grown["n_slices"] / grown["n"],
        us={part: 1e6 * grown[part] / grown["n"] for part in PARTS},
        comparison_bytes=grown["n_bytes"] / grown["n"],
        n_waiting=n_waiting,
        load=_load(),
    )


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


if __name__ == "__main__":
    sys.exit(main())
