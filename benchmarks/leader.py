"""What the leading monitor costs for each exchange: processor time, its own and that of Postgres.

    python -m benchmarks.leader [--quick] [--slices N ...] [--batches N ...] [--live PER_S] [--leaders N ...]

The real monitor, in a process of its own, leads and folds batches that the real writer stored in a real Postgres server (with `fsync`).
It starts when all of a backlog is stored. Every exchange has one item, which lies in `all` and in
seven other slices, drawn evenly, which touches the most slices; all are watched with the defaults. A monitor writes what it has folded
once for several turns, and only then it shows how far it is. So a backlog is several writings long, and processor time is counted from the
second to the last but one: of the monitor, of all of Postgres. Before the first all is loaded, and before the last the monitor may wait for more.

With `--live` the exchanges of 20 models with 200 slices each are stored as they come, in batches of three, at a rate; `leader_live_core` is the
share of a core that the monitor takes then, and `leader_live_waiting` how many batches wait for it at the end.

With `--leaders` the backlog is of four models with 250 slices each, in batches of 64, and so many monitors fold it in as many shards:
`leaders_N_per_s` is how many exchanges a second they folded together by the clock, `leaders_N_us` processor time for each of them, Postgres
included. More monitors than cores show only what the second costs.

`leader_exchanges_per_s` is what one core could fold if it did all of that, Postgres included, and nothing else, at 1,000 slices;
`leader_small_batch_ratio` how much more an exchange costs in batches of three than in batches of 64.
"""

import argparse
import asyncio
import math
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import asyncpg
import msgspec
import numpy as np
import psutil

from benchmarks.replays import READY_S, SPAWN, Servers, cpu_s, servers_in
from benchmarks.result import Goal, finish
from quantdrift.core.clock import SystemClock
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, Monitor, Stream
from quantdrift.core.process.run import GRACE_S, run
from quantdrift.core.records import Exchange, Predicate, Sampling
from quantdrift.core.sampling.rates import policy_of
from quantdrift.core.slices import SliceKey
from quantdrift.monitor.service import serve
from quantdrift.storage.comparisons.rows import ComparedExchange, ComparedItem, StoreBatch, VersionKey
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database

_MODEL: Final = "tiny"
_MODELS, _SLICES, _WORKERS = 20, 200, 8  # of live traffic
SLICES_OF_EXCHANGE: Final = 8
_GOAL_PER_S: Final = 8_000.0
_GOAL_RATIO: Final = 2.0
_GOAL_AT: Final = 1_000  # slices
_LARGE, _SMALL = 64, 3
_WITHIN_S: Final = 600.0
# A monitor writes after 16,384 exchanges or 4,096 batches: so many writings are in a backlog.
_WRITINGS, _QUICK_WRITINGS = 6.5, 4.5
_WRITTEN_ROWS, _WRITTEN_BATCHES = 16_384, 4_096
_POLL_S: Final = 0.05
# Exchanges wait `monitor.reorder_s` for earlier ones, by the time at which batches were stored.
STORED: Final = "update batch set stored_at = captured_to + interval '1 second' where fold_seq is null"
_SHARED, _SHARED_PER_S = 4, 250  # models of several leaders, and exchanges in a second of capture of each
# Without a number, or with one that its model has not come to.
WAITING: Final = """
    select (select count(*) from batch where fold_seq is null) + coalesce((
        select sum(waiting.n) from model_fold f cross join lateral (
            select count(*) as n from batch where compared_model = f.model and fold_seq > f.fold_seq
        ) waiting
    ), 0)
"""
_POSITIONS: Final = "select sum(fold_seq) from model_fold"
_HOLDERS: Final = "select count(distinct m.name) from shard s join monitor_process m on m.name = s.holder"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of processor time for one exchange."""

    slices: int
    batch: int
    monitor_us: float
    postgres_us: float

    @property
    def per_s(self) -> float:
        """Exchanges a second that one core could fold."""
        return 1e6 / (self.monitor_us + self.postgres_us)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.leader",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="smaller backlogs")
    parser.add_argument("--slices", type=int, nargs="+", default=[40, _GOAL_AT], help="numbers of slices")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[_LARGE, 25, _SMALL], help="exchanges in a batch"
    )
    parser.add_argument(
        "--captured-per-s",
        type=int,
        default=1_000,
        help="exchanges in a second of capture, of the one model of a backlog",
    )
    parser.add_argument(
        "--leaders", type=int, nargs="+", metavar="N", help="numbers of monitors, in place of one"
    )
    parser.add_argument("--live", type=int, metavar="PER_S", help="exchanges a second, in place of backlogs")
    given = parser.parse_args(arguments)
    if given.live:
        with tempfile.TemporaryDirectory(prefix="qd-") as folder, servers_in(Path(folder)) as servers:
            core, waiting = asyncio.run(_live(servers, given.live, 20.0 if given.quick else 60.0))
        print(f"{given.live} exchanges/s: the monitor takes {core:.2f} of a core; {waiting} batches wait")
        finish("leader", {"leader_live_core": core, "leader_live_waiting": waiting}, [])
        return 0
    if given.leaders:
        finish("leader", _compare_leaders(given.leaders, is_quick=given.quick), [])
        return 0
    found: list[Found] = []
    for slices in given.slices:
        with tempfile.TemporaryDirectory(prefix="qd-") as folder, servers_in(Path(folder)) as servers:
            for one in asyncio.run(
                _measure(servers, slices, given.batches, given.captured_per_s, is_quick=given.quick)
            ):
                found.append(one)
                print(
                    f"{one.slices:>6} slices, {one.batch:>3} exchanges in a batch: {one.per_s:>7,.0f} exchanges/s and core; "
                    f"microseconds each: monitor {one.monitor_us:.0f}, Postgres {one.postgres_us:.0f}",
                    flush=True,
                )
    figures: dict[str, float | int | str | None] = {}
    for one in found:
        figures[f"leader_monitor_us_{one.slices}_{one.batch}"] = one.monitor_us
        figures[f"leader_postgres_us_{one.slices}_{one.batch}"] = one.postgres_us
    by_size = {(one.slices, one.batch): one.per_s for one in found}
    goals = []
    if (most := by_size.get((_GOAL_AT, _LARGE))) is not None:
        figures["leader_exchanges_per_s"] = most
        goals.append(
            Goal(name="leader_exchanges_per_s", value=most, bound=_GOAL_PER_S, unit="1/s", at_most=False)
        )
        if (small := by_size.get((_GOAL_AT, _SMALL))) is not None:
            figures["leader_small_batch_ratio"] = most / small
            goals.append(
                Goal(name="leader_small_batch_ratio", value=most / small, bound=_GOAL_RATIO, unit="ratio")
            )
    finish("leader", figures, goals)
    return 0


def n_batches_of(size: int, leaders: int = 1, *, is_quick: bool = False) -> int:
    """Return how many batches of a size make a backlog in which each of several monitors writes often enough."""
    writings = _QUICK_WRITINGS if is_quick else _WRITINGS
    return int(leaders * writings * min(_WRITTEN_BATCHES, _WRITTEN_ROWS / size))


def _compare_leaders(leaders: Sequence[int], *, is_quick: bool) -> dict[str, float | int | str | None]:
    """Measure each number of monitors, and print it."""
    figures: dict[str, float | int | str | None] = {"cores": os.cpu_count()}
    for n in leaders:
        with tempfile.TemporaryDirectory(prefix="qd-") as folder, servers_in(Path(folder)) as servers:
            per_s, monitor_us, postgres_us = asyncio.run(
                _together(servers, n, n_batches_of(_LARGE, n, is_quick=is_quick))
            )
        print(
            f"{n} monitors: {per_s:>7,.0f} exchanges/s by the clock; microseconds each: monitors {monitor_us:.0f}, "
            f"Postgres {postgres_us:.0f}; {per_s * (monitor_us + postgres_us) / 1e6:.2f} cores",
            flush=True,
        )
        figures |= {f"leaders_{n}_per_s": per_s, f"leaders_{n}_us": monitor_us + postgres_us}
    return figures


async def _together(servers: Servers, leaders: int, n: int) -> tuple[float, float, float]:
    """Return exchanges a second by the clock, and microseconds of processor time each, of monitors and Postgres."""
    config = _config(servers, [f"m{number}" for number in range(_SHARED)], leaders)
    traffics = [_Traffic(config, model.name, _GOAL_AT // _SHARED, _SHARED_PER_S) for model in config.models]
    await _let_begin(servers, config, traffics, _GOAL_AT // _SHARED)
    return await _work_off(servers, config, traffics, _LARGE, n)


async def _measure(
    servers: Servers, slices: int, batches: Sequence[int], per_s: int, *, is_quick: bool
) -> list[Found]:
    config = _config(servers, [_MODEL])
    traffic = _Traffic(config, _MODEL, slices, per_s)
    await _let_begin(servers, config, [traffic], slices)
    found = []
    for size in batches:
        n = n_batches_of(size, is_quick=is_quick)
        _, monitor_us, postgres_us = await _work_off(servers, config, [traffic], size, n)
        found.append(Found(slices=slices, batch=size, monitor_us=monitor_us, postgres_us=postgres_us))
    return found


async def _let_begin(servers: Servers, config: Config, traffics: Sequence["_Traffic"], n_slices: int) -> None:
    """Let each slice of some models be seen."""
    async with _leading(servers, config) as (_, watch, writer):
        for traffic in traffics:
            for _ in range(math.ceil(n_slices / _LARGE) + 8):
                await writer.store(traffic.batch(_LARGE))
        await watch.execute(STORED)
        await until_left(watch, 0)


async def _work_off(
    servers: Servers, config: Config, traffics: Sequence["_Traffic"], size: int, n: int
) -> tuple[float, float, float]:
    """Store a backlog of batches, and let monitors fold it; return the same as `_together`."""
    # Nobody folds while it is stored. Monitors that only stood still would begin by finding lead and leases gone.
    watch = await asyncpg.connect(servers.dsn)
    async with Database(servers.dsn) as database:
        writer = Writer(database, SystemClock())
        for number in range(n):
            await writer.store(traffics[number % len(traffics)].batch(size))
    await watch.execute(STORED)
    await watch.close()
    async with _leading(servers, config) as (processes, watch, _):
        await until_shared(watch, config.monitor.shards)
        _, first, *_, last = await writings(watch, processes, servers, n)
        await until_left(watch, 0)
        folded = (first.n_left - last.n_left) * size
        monitor_us, postgres_us = last.since(first, folded)
        return folded / (last.at_s - first.at_s), monitor_us, postgres_us


async def _live(servers: Servers, per_s: int, seconds: float) -> tuple[float, int]:
    """Return the share of a core that the monitor takes, and how many batches wait at the end."""
    names = [f"m{number}" for number in range(_MODELS)]
    config = _config(servers, names)
    async with _leading(servers, config) as ((process,), watch, writer):
        traffics = [_Traffic(config, name, _SLICES) for name in names]
        for traffic in traffics:
            for _ in range(_SLICES // _LARGE + 2):
                await writer.store(traffic.batch(_LARGE))
        await until_left(watch, 0)
        began, n = time.monotonic(), 0

        async def store() -> None:
            nonlocal n
            while time.monotonic() - began < seconds:
                n += 1
                due, traffic = began + n * _SMALL / per_s, traffics[n % _MODELS]
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await writer.store(traffic.batch(_SMALL))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(_WORKERS):
                tasks.create_task(store())
            await asyncio.sleep(seconds / 4)
            counted_from, before = time.monotonic(), cpu_s(process.pid)
        core = (cpu_s(process.pid) - before) / (time.monotonic() - counted_from)
        if n * _SMALL < 0.95 * per_s * seconds:
            print(f"only {n * _SMALL / seconds:.0f} exchanges a second were stored", flush=True)
        return core, int(await watch.fetchval(WAITING))


def _config(servers: Servers, models: Sequence[str], n_monitors: int = 1) -> Config:
    return Config(
        stream=Stream(url=servers.nats_url, name="leader"),
        monitor=Monitor(admin="127.0.0.1:0", shards=n_monitors),
        models=tuple(Model(name=name) for name in models),
    )


@asynccontextmanager
async def _leading(
    servers: Servers, config: Config
) -> AsyncIterator[tuple[list[psutil.Process], Any, Writer]]:
    """Run monitors; yield their processes, a connection and a writer to their database."""
    async with monitors(config, servers) as (running, watch), Database(servers.dsn) as database:
        yield running, watch, Writer(database, SystemClock())


@asynccontextmanager
async def monitors(config: Config, servers: Servers) -> AsyncIterator[tuple[list[psutil.Process], Any]]:
    """Run a monitor for each shard; yield their processes and a connection to their database."""
    watch = await asyncpg.connect(servers.dsn)
    processes = [
        SPAWN.Process(target=_work, args=(config, servers.dsn), daemon=True)
        for _ in range(config.monitor.shards)
    ]
    for process in processes:
        process.start()
    try:
        yield [psutil.Process(process.pid) for process in processes], watch
    finally:
        for process in processes:
            process.terminate()
            await asyncio.to_thread(process.join, READY_S)
        await watch.close()


class _Traffic:
    """Batches of compared exchanges, one after another in time of capture.

    Parameters
    ----------
    config
        Of the monitor.
    model
        Name of the model.
    slices
        How many slices there are, `all` among them.
    per_s
        Exchanges in a second of capture, from some hours ago on; 0: each is captured when it is made.
    """

    def __init__(self, config: Config, model: str, slices: int, per_s: int = 0) -> None:
        self._rng = np.random.default_rng(5)
        self._model = model
        self._step = timedelta(seconds=1 / per_s) if per_s else None
        self._at = datetime.now(UTC) - timedelta(hours=10)
        self._all = SliceKey(model=model, name="all", predicate="true")
        self._others = [
            SliceKey(
                model=model,
                name=f"tenant={number}",
                predicate=f'header.x-tenant = "{number}"',
                where=(Predicate(key="header.x-tenant", equals=str(number)),),
            )
            for number in range(1, slices)
        ]
        self._version = VersionKey(model=model, candidate_version="2", reference_digest="d" * 64)
        self._sampling = Sampling(
            policy=policy_of(config.sampling, "benchmark"),
            header_stratum="default",
            body_stratum="default",
            pi1=0.25,
            pi2=1.0,
            u1=0.1,
            u2=0.1,
        )

    def batch(self, n: int) -> StoreBatch:
        """Return the next batch."""
        return StoreBatch(
            worker="benchmark",
            at=datetime.now(UTC),
            compared=tuple(self._exchange() for _ in range(n)),
        )

    def _exchange(self) -> ComparedExchange:
        self._at = datetime.now(UTC) if self._step is None else self._at + self._step
        chosen = self._rng.choice(
            len(self._others), min(SLICES_OF_EXCHANGE - 1, len(self._others)), replace=False
        )
        divergence = float(self._rng.lognormal(-6.0, 1.0))
        item = ComparedItem(
            slices=(self._all, *(self._others[number] for number in chosen)),
            features={},
            flip=bool(self._rng.random() < 0.003),
            topk=False,
            js=divergence / 8,
            divergence=divergence,
            margin=0.01,
            candidate_margin=float(self._rng.beta(2.0, 1.0)),
            reference_margin=0.5,
            detail='{"candidate_top": 1, "reference_top": 1}',
        )
        exchange = Exchange(
            id=uuid4().hex,
            captured_at=self._at,
            source="benchmark",
            model=self._model,
            version="2",
            protocol="oip-v2-rest",
            inputs=(),
            outputs=(),
            attributes={"header.x-tenant": "1"},
            sampling=self._sampling,
        )
        return ComparedExchange(
            stream_sequence=0, payload=b"", exchange=exchange, version=self._version, items=(item,)
        )


async def until_shared(watch: Any, n_monitors: int) -> None:
    """Wait until each of several monitors has shards."""
    until = time.monotonic() + _WITHIN_S
    while n_monitors > 1 and await watch.fetchval(_HOLDERS) < n_monitors:
        if time.monotonic() > until:
            raise TimeoutError("the monitors do not share the shards")
        await asyncio.sleep(_POLL_S)


class Writing(msgspec.Struct, frozen=True, kw_only=True):
    """The moment at which a writing of the fold has become visible.

    Parameters
    ----------
    n_left
        Batches that are not folded.
    at_s
        Time of a clock that never goes back.
    monitor_s, postgres_s
        Processor time so far.
    """

    n_left: int
    at_s: float
    monitor_s: float
    postgres_s: float

    def since(self, first: "Writing", n: int) -> tuple[float, float]:
        """Return the processor time from an earlier one on for each of so many, in microseconds: monitors, Postgres."""
        return 1e6 * (self.monitor_s - first.monitor_s) / n, 1e6 * (self.postgres_s - first.postgres_s) / n


async def writings(
    watch: Any, processes: Sequence[psutil.Process], servers: Servers, n_batches: int
) -> list[Writing]:
    """Return the writings of a backlog, but for those that leave nothing: the monitor may have waited before.

    Raises
    ------
    ValueError
        There were fewer than three, so that what lies between the second and the last cannot be told.
    """
    seen: list[Writing] = []
    until, n_left, position = time.monotonic() + _WITHIN_S, n_batches, await watch.fetchval(_POSITIONS)
    while n_left > 0:
        if time.monotonic() > until:
            raise TimeoutError(f"the monitor has not folded the batches within {_WITHIN_S:g} s")
        # To count all that waits would take Postgres as long as a part of the fold.
        if (now := await watch.fetchval(_POSITIONS)) == position:
            await asyncio.sleep(_POLL_S)
            continue
        position = now
        writing = Writing(
            at_s=time.monotonic(),
            monitor_s=math.fsum(cpu_s(process.pid) for process in processes),
            postgres_s=cpu_s(servers.postgres_pid, with_children=True),
            n_left=int(await watch.fetchval(WAITING)),
        )
        if 0 < writing.n_left < n_left:
            seen.append(writing)
        n_left = writing.n_left
    if len(seen) <= 2:
        raise ValueError("fewer than three writings were seen: the backlog is too small")
    return seen


async def until_left(watch: Any, n_left: int) -> int:
    """Wait until no more than so many batches wait to be folded; return how many do."""
    until = time.monotonic() + _WITHIN_S
    while (n := await watch.fetchval(WAITING)) > n_left:
        if time.monotonic() > until:
            raise TimeoutError(f"the monitor has not folded the batches within {_WITHIN_S:g} s")
        await asyncio.sleep(_POLL_S)
    return int(n)


def _work(config: Config, dsn: str) -> None:
    raise SystemExit(run(lambda stop: serve(config, Secrets(dsn=dsn), stop), grace_s=GRACE_S))


if __name__ == "__main__":
    sys.exit(main())
