"""What the whole shadow worker reaches of the bare runtime: replays per second, staleness, memory.

    python -m benchmarks.shadow [--quick] [--provider cpu] [--models NAME ...] [--out DIRECTORY]
    python -m benchmarks.shadow --runtime torch [--compile] [--graphs] [--workers N]
    python -m benchmarks.shadow --soak SECONDS

Three references with random weights (`benchmarks.references`), in ONNX Runtime or in PyTorch. The worker is the real one, in a process
of its own, with the defaults of `config.toml` but for `nice` and the size of a batch, on a real NATS and a real Postgres
server on this machine. In turn, round after round:

- **bare**: the same runtime, with the same options and threads, in a process that does nothing else, on one batch that
  lies ready;
- **worker**: with the worker stopped, exchanges of one item each are put into the stream; it is let go, and timed while it
  is at work, from one batch's acknowledgement to another's: pulled, decoded, batched, replayed, compared, put into
  slices, stored and acknowledged.

`efficiency` is the median over the rounds of the worker's replays per second over the bare runtime's. Both may use all
cores, and on a CPU whatever is done beside the replay costs replays; `cpu_efficiency` is the same in processor time, the
servers included, and knows less of neighbours; `best_over_best` is that of the two rounds that neighbours disturbed
least. Afterwards exchanges come at half of the worker's rate, which tells how old a comparison is when it is stored.

`--soak SECONDS`: one worker with mixed shapes for so long, and how its memory grows; nothing else.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import asyncpg
import msgspec
import numpy as np

from benchmarks import device, worker_memory
from benchmarks.references import SORTS, Sort
from benchmarks.replays import (
    Bare,
    Servers,
    Traffic,
    Worker,
    bare,
    config_of,
    running,
    servers_in,
    until_left,
)
from benchmarks.result import Goal, finish
from quantdrift.core.config.schema import Provider, Runtime
from quantdrift.core.stream.connection import Queue
from quantdrift.shadow.pipeline.reader import FETCH_BYTES

_BOUNDS: Final = {"small_cnn": 0.5, "resnet50": 0.95, "bert": 0.95}
_LEAD_BATCHES: Final = 6  # more than are in hand at once
_GATHERED: Final = 512  # most items that a worker takes as one batch where the reference is quick
_FILLED: Final = 0.5  # of the stream, by the inputs of what waits in it
_ITEMS: Final = 64  # different ones
Figures = dict[str, float | int | str | None]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How long it takes.

    Parameters
    ----------
    rounds
        Of both ways, for each reference.
    round_s
        Aimed at for one way in one round.
    steady_s
        How long exchanges come at half of the rate.
    workers
        That share the work.
    """

    rounds: int = 5
    round_s: float = 30.0
    steady_s: float = 30.0
    workers: int = 1


QUICK: Final = Scale(rounds=1, round_s=4.0, steady_s=4.0)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A reference with both ways to it.

    Parameters
    ----------
    name, sort
        The reference.
    alone, worker
        The two ways.
    queue, traffic, servers
        What feeds the worker, and where its record is.
    scale
        How long it takes.
    """

    name: str
    sort: Sort
    alone: Bare
    worker: Worker
    queue: Queue
    traffic: Traffic
    servers: Servers
    scale: Scale


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One round.

    Parameters
    ----------
    bare_per_s, bare_cpu_s
        Items per second of the bare runtime, and its processor time for each.
    worker_per_s
        Replays per second of the whole worker.
    cpu_s
        Processor time for each replay: of the worker's event loop, its other threads, and the servers.
    steps_s
        Time for each replay in each step, as the worker's telemetry has it. Steps overlap.
    """

    bare_per_s: float
    bare_cpu_s: float
    worker_per_s: float
    cpu_s: Mapping[str, float]
    steps_s: Mapping[str, float]

    @property
    def efficiency(self) -> float:
        """The worker's replays per second over the bare runtime's."""
        return self.worker_per_s / self.bare_per_s

    @property
    def cpu_efficiency(self) -> float:
        """The bare runtime's processor time over that of worker and servers."""
        return self.bare_cpu_s / sum(self.cpu_s.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shadow",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--provider", choices=[one.value for one in Provider], default=Provider.AUTO.value)
    parser.add_argument(
        "--runtime", choices=[Runtime.ONNX.value, Runtime.TORCH.value], default=Runtime.ONNX.value
    )
    parser.add_argument("--compile", action="store_true", help="PyTorch: torch.compile")
    parser.add_argument("--graphs", action="store_true", help="PyTorch: CUDA graphs")
    parser.add_argument("--models", nargs="+", choices=list(SORTS), default=list(SORTS))
    parser.add_argument("--workers", type=int, default=1, help="that share one stream, and one device")
    parser.add_argument("--rounds", type=int, help="of both ways")
    parser.add_argument("--seconds", type=float, help="aimed at for one way in one round")
    parser.add_argument("--out", type=Path, help="keep the references' files there")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="memory alone")
    given = parser.parse_args(arguments)
    if given.runtime != Runtime.TORCH and (given.compile or given.graphs):
        parser.error("--compile and --graphs go with --runtime torch")
    with tempfile.TemporaryDirectory(prefix="qd-") as temporary, servers_in(Path(temporary)) as servers:
        provider = Provider(given.provider)
        if given.soak:
            figures, goals = asyncio.run(
                worker_memory.measure(Path(temporary), servers, provider, given.soak)
            )
        else:
            directory = given.out or Path(temporary)
            directory.mkdir(parents=True, exist_ok=True)
            suffix = ".onnx" if given.runtime == Runtime.ONNX else ".safetensors"
            paths = {name: _saved(name, directory / f"{name}{suffix}") for name in given.models}
            prepared = {"compile": given.compile, "cuda_graphs": given.graphs}
            scale = QUICK if given.quick else Scale()
            scale = msgspec.structs.replace(
                scale,
                rounds=given.rounds or scale.rounds,
                round_s=given.seconds or scale.round_s,
                workers=given.workers,
            )
            figures, goals = asyncio.run(_measure(paths, prepared, servers, provider, scale))
    finish("shadow", figures, goals)
    return 0


async def _measure(
    paths: Mapping[str, Path],
    prepared: Mapping[str, bool],
    servers: Servers,
    provider: Provider,
    scale: Scale,
) -> tuple[Figures, list[Goal]]:
    figures: Figures = {}
    goals: list[Goal] = []
    for name, path in paths.items():
        sort = SORTS[name]
        size = sort.cpu_batch if provider is Provider.CPU or not device.is_there() else device.BATCH
        buckets = {"buckets": (1, size), **prepared} if any(prepared.values()) else {}
        config = config_of(
            [sort.model(name, sort.reference(path, **buckets))],
            servers,
            provider=provider,
            batch_items=size,
        )
        with bare(config) as alone:
            async with running(config, servers, scale.workers) as worker:
                queue = await Queue.connect(config.stream, client_name="benchmark")
                try:
                    items = sort.items(_ITEMS)
                    logits = np.concatenate(alone.compute(list(items[:, None])))
                    trial = Trial(
                        name=name,
                        sort=sort,
                        alone=alone,
                        worker=worker,
                        queue=queue,
                        traffic=Traffic(queue, [name], sort, items, logits),
                        servers=servers,
                        scale=scale,
                    )
                    turns = await _turns(trial)
                    stale = await _staleness(trial, turns)
                finally:
                    await queue.close()
        found = _median(turns) | stale | device.figures(sort, _median(turns)["bare_per_s"])
        _print(f"{sort.title}, batches of {size}", turns, found)
        figures |= {f"{name}_{key}": value for key, value in found.items()}
        goals += _goals(name, found)
    return figures, goals


async def _turns(trial: Trial) -> list[Turn]:
    size = trial.worker.config.shadow.batch_items
    batch = trial.sort.items(size)
    bare_per_s, _ = trial.alone.per_s(batch, 1)
    per_s = min(bare_per_s, await _worker_per_s(trial, size))
    most = int(_FILLED * trial.worker.config.stream.max_bytes / batch.nbytes) - 2 * _lead(trial, size) // size
    n_batches = max(2, min(round(trial.scale.round_s * per_s / size), most))
    turns = []
    for number in range(trial.scale.rounds):
        turns.append(await _turn(trial, batch, n_batches))
        _say(
            f"{trial.name}, round {number + 1} of {trial.scale.rounds}: bare {turns[-1].bare_per_s:.4g}/s, worker "
            f"{turns[-1].worker_per_s:.4g}/s, {turns[-1].efficiency:.3f}; processor time {turns[-1].cpu_efficiency:.3f}"
        )
    return turns


def _lead(trial: Trial, size: int) -> int:
    """Return more exchanges than the workers ever have in hand."""
    gathered = max(size, min(_GATHERED, FETCH_BYTES // trial.sort.items(1).nbytes))
    return _LEAD_BATCHES * gathered * trial.scale.workers


async def _worker_per_s(trial: Trial, size: int) -> float:
    """Return about how many replays a second the worker makes, once it has made some: on a card the bare runtime makes far more."""
    await trial.traffic.publish(2 * size)
    await until_left(trial.queue, 0, size)
    n = _lead(trial, size)
    trial.worker.pause()
    await trial.traffic.publish(n)
    trial.worker.go_on()
    began = time.monotonic()
    await until_left(trial.queue, 0, size)
    return n / (time.monotonic() - began)


async def _turn(trial: Trial, batch: np.ndarray, n_batches: int) -> Turn:
    """Time `n_batches` in the middle of more.

    A worker that was stopped must take its work up again first. What it has fetched before the first of them stands for
    what it fetches of others before the last.
    """
    worker, queue, size = trial.worker, trial.queue, len(batch)
    lead = _lead(trial, size)
    worker.pause()
    await trial.traffic.publish(n_batches * size + 2 * lead)
    bare_per_s, bare_cpu_s = await asyncio.to_thread(trial.alone.per_s, batch, n_batches)
    worker.go_on()
    first = await until_left(queue, n_batches * size + lead, size)
    cpu_s, steps_s, began = worker.cpu_s(), worker.steps_s(), time.monotonic()
    last = await until_left(queue, lead, size)
    seconds, after, steps_after = time.monotonic() - began, worker.cpu_s(), worker.steps_s()
    await until_left(queue, 0, size)
    n = first - last
    return Turn(
        bare_per_s=bare_per_s,
        bare_cpu_s=bare_cpu_s,
        worker_per_s=n / seconds,
        cpu_s={part: (after[part] - cpu_s[part]) / n for part in after},
        steps_s={step: (took - steps_s.get(step, 0.0)) / n for step, took in steps_after.items()},
    )


async def _staleness(trial: Trial, turns: Sequence[Turn]) -> Figures:
    per_s = _median(turns)["worker_per_s"] / 2
    _say(f"{trial.name}: {trial.scale.steady_s:g} s at {per_s:.4g}/s")
    before = trial.worker.replays()
    connection = await asyncpg.connect(trial.servers.dsn)
    try:
        began = await connection.fetchval("select clock_timestamp()")
        await trial.traffic.steady(per_s, trial.scale.steady_s)
        await until_left(trial.queue, 0, trial.worker.config.shadow.batch_items)
        row = await connection.fetchrow(_STALENESS, began)
    finally:
        await connection.close()
    replays = {key: value - before[key] for key, value in trial.worker.replays().items()}
    return {
        "steady_per_s": per_s,
        "steady_batch_items": replays["items"] / replays["batches"],
        "steady_replay_s": replays["seconds"] / replays["batches"],
        "staleness_p50_s": row["p50"],
        "staleness_p99_s": row["p99"],
        "batch_delay_s": trial.worker.config.shadow.batch_delay_s,
    }


def _median(turns: Sequence[Turn]) -> dict[str, float]:
    names = ("bare_per_s", "worker_per_s", "efficiency", "cpu_efficiency")
    best = max(one.worker_per_s for one in turns) / max(one.bare_per_s for one in turns)
    return {name: statistics.median(getattr(one, name) for one in turns) for name in names} | {
        "best_over_best": best
    }


def _goals(name: str, found: Figures) -> list[Goal]:
    value = {key: float(one) for key, one in found.items() if isinstance(one, float | int)}
    return [
        Goal(
            name=f"efficiency_{name}",
            value=value["efficiency"],
            bound=_BOUNDS[name],
            unit="ratio",
            at_most=False,
        ),
        # What fills for the delay waits for the batch under way, and is replayed itself.
        Goal(
            name=f"staleness_p99_{name}",
            value=value["staleness_p99_s"],
            bound=round(value["batch_delay_s"] + 2 * value["steady_replay_s"], 3),
            unit="s",
        ),
    ]


def _print(title: str, turns: Sequence[Turn], found: Figures) -> None:
    print(title)
    for name, value in found.items():
        print(f"  {name:<28} {value:.4g}" if isinstance(value, float) else f"  {name:<28} {value}")
    print("  for each replay, in microseconds")
    print(f"    {'processor time, bare':<28} {_us(one.bare_cpu_s for one in turns):12,.1f}")
    for part in turns[0].cpu_s:
        print(f"    {'processor time, ' + part:<28} {_us(one.cpu_s[part] for one in turns):12,.1f}")
    for step in turns[0].steps_s:
        print(f"    {'time, ' + step:<28} {_us(one.steps_s.get(step, 0.0) for one in turns):12,.1f}")


def _us(seconds: Iterator[float]) -> float:
    return 1e6 * statistics.median(seconds)


def _saved(name: str, path: Path) -> Path:
    if not path.exists():
        _say(f"{name}: make {SORTS[name].title}")
        SORTS[name].save(path)
    return path


def _say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


_STALENESS: Final = """
    select percentile_cont(0.5) within group (order by extract(epoch from stored_at - captured_at))::float8 p50,
        percentile_cont(0.99) within group (order by extract(epoch from stored_at - captured_at))::float8 p99
    from comparison where captured_at >= $1
"""

if __name__ == "__main__":
    sys.exit(main())
