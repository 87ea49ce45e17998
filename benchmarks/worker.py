"""What an exchange costs the shadow worker where the reference costs next to nothing: processor time, part by part.

    python -m benchmarks.worker [--quick] [--batch-items N ...]

The real worker, in a process of its own, on a real NATS and a real Postgres server (with `fsync`), works on a backlog of small
exchanges: an image of 8 x 8, ten classes, one item each, encrypted and numbered as sidecars send them, two kinds of slices, noise and
telemetry at their defaults. Processor time is counted in the middle of the backlog, from one acknowledgement to another, in
`/proc`: the worker's event loop, its other threads, NATS, Postgres. Nothing depends on how fast the machine's other work lets it go, but for caches.

`exchanges_per_s_core` is what one core could do if it did all of that, the servers included, and nothing else. `bare_us` is the same
reference alone on batches as large, in the same run.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from torch import nn

from benchmarks.references import Sort
from benchmarks.replays import (
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
from quantdrift.core.config.schema import Provider
from quantdrift.core.keys import Key, KeyRing, write_keys
from quantdrift.core.stream.connection import Queue

_GOAL_PER_S: Final = 10_000.0
_ITEMS: Final = 256  # different ones
LEAD: Final = 3_000  # before the part that counts, and after it


def _network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


TINY: Final = Sort(
    title="two layers, 8x8",
    input="image",
    shape=(1, 8, 8),
    datatype="FP32",
    n_classes=10,
    cpu_batch=64,
    make=_network,
)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of processor time for one exchange.

    Parameters
    ----------
    parts_us
        Of the worker's event loop (`loop`), its other threads (`threads`), `nats` and `postgres`.
    bare_us
        Of the reference alone.
    """

    parts_us: dict[str, float]
    bare_us: float

    @property
    def per_s(self) -> float:
        """Exchanges a second that one core could do."""
        return 1e6 / sum(self.parts_us.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one round of fewer exchanges")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--batch-items", type=int, nargs="+", default=[64, 512], help="values of shadow.batch_items"
    )
    given = parser.parse_args(arguments)
    n, rounds = (6_000, 1) if given.quick else (20_000, given.rounds)
    figures: dict[str, float | int | str | None] = {}
    best = 0.0
    with tempfile.TemporaryDirectory(prefix="qd-") as folder, servers_in(Path(folder)) as servers:
        for batch_items in given.batch_items:
            found = asyncio.run(_measure(servers, Path(folder), batch_items, n, rounds))
            best = max(best, found.per_s)
            _print(batch_items, found)
            figures |= {
                f"{part}_us_{batch_items}": value
                for part, value in (*found.parts_us.items(), ("bare", found.bare_us))
            }
            figures[f"exchanges_per_s_core_{batch_items}"] = found.per_s
    figures["exchanges_per_s_core"] = best
    goal = Goal(name="exchanges_per_s_core", value=best, bound=_GOAL_PER_S, unit="1/s", at_most=False)
    finish("worker", figures, [goal])
    return 0


async def _measure(servers: Servers, folder: Path, batch_items: int, n: int, rounds: int) -> Found:
    path, keys = folder / "tiny.onnx", folder / "keys.json"
    if not path.exists():
        TINY.save(path)
        write_keys(keys, KeyRing(keys=(Key.create(datetime.now(UTC) - timedelta(hours=1)),)), is_new=True)
    key = msgspec.json.decode(keys.read_bytes(), type=KeyRing).current(datetime.now(UTC))
    config = config_of(
        [TINY.model("tiny", TINY.reference(path))],
        servers,
        provider=Provider.CPU,
        keys=keys,
        batch_items=batch_items,
        threads=1,
    )
    items = TINY.items(_ITEMS)
    with bare(config) as alone:
        logits = np.concatenate(alone.compute([items]))
        _, bare_cpu_s = alone.per_s(np.resize(items, (batch_items, *items.shape[1:])), 200)
    async with running(config, servers) as worker:
        queue = await Queue.connect(config.stream, client_name="benchmark")
        try:
            traffic = Traffic(queue, ["tiny"], TINY, items, logits, key=key)
            await traffic.publish(LEAD)  # what a version's begin costs more is over
            await until_left(queue, 0, LEAD)
            turns = [await turn(worker, queue, traffic, n) for _ in range(rounds)]
        finally:
            await queue.close()
    parts = {part: statistics.median(each[part] for each in turns) for part in turns[0]}
    return Found(parts_us=parts, bare_us=1e6 * bare_cpu_s)


async def turn(
    worker: Worker,
    queue: Queue,
    traffic: Traffic,
    n: int,
    *,
    lead: int = LEAD,
    captured_per_s: float | None = None,
) -> dict[str, float]:
    """Return microseconds of processor time for each of `n` exchanges, by part, in the middle of a backlog of `2 * lead` more."""
    worker.pause()
    await traffic.publish(n + 2 * lead, captured_per_s=captured_per_s)
    worker.go_on()
    first = await until_left(queue, n + lead, lead)
    before = worker.cpu_s()
    last = await until_left(queue, lead, lead)
    after = worker.cpu_s()
    await until_left(queue, 0, lead)
    names = {"loop": "loop", "threads": "replay", "nats": "nats", "postgres": "postgres"}
    return {part: 1e6 * (after[key] - before[key]) / (first - last) for part, key in names.items()}


def _print(batch_items: int, found: Found) -> None:
    parts = ", ".join(f"{part} {value:.1f}" for part, value in found.parts_us.items())
    print(
        f"batch_items {batch_items}: {found.per_s:,.0f} exchanges/s and core; microseconds of processor time each: "
        f"{parts}; the bare reference {found.bare_us:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
