"""Whether a worker's memory stays flat: mixed shapes, mixed models, references that are closed and opened again."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.references import Sort, smallest
from benchmarks.replays import Servers, Traffic, Worker, config_of, running, until_left
from benchmarks.result import Goal
from quantdrift.core.config.schema import Model, Provider
from quantdrift.core.stream.connection import Queue

_LOOK_S: Final = 2.0
_WARM_SHARE: Final = 0.25
_BURST: Final = 40
_MODELS: Final = ("first", "second", "third")
_SIDES: Final = range(8, 97)
_BOUND_MB: Final = 64.0
Figures = dict[str, float | int | str | None]


async def measure(
    directory: Path, servers: Servers, provider: Provider, seconds: float
) -> tuple[Figures, list[Goal]]:
    """Run a worker for so long, and return how its resident memory grew after the first quarter.

    Three convolutional references take images of 89 sizes in turn, in batches of 1 to 40; two of them fit under
    `shadow.reference_memory_bytes`, so that one after the other is closed and opened again.

    Parameters
    ----------
    directory
        For the ONNX files.
    servers
        Stream and record.
    provider
        Where references run.
    seconds
        How long.
    """
    sort = smallest()
    models = []
    for name in _MODELS:
        path = directory / f"{name}.onnx"
        sort.save(path)
        models.append(Model(name=name, references=(sort.reference(path),)))
    config = config_of(models, servers, provider=provider, batch_delay_s=0.05, reference_memory_bytes=1 << 20)
    async with running(config, servers) as worker:
        queue = await Queue.connect(config.stream, client_name="worker-memory")
        try:
            looks = asyncio.create_task(_looks(worker, seconds))
            n = await _send(queue, sort, seconds)
            rss = await looks
        finally:
            await queue.close()
    warm = rss[round(_WARM_SHARE * len(rss)) :]
    at_s, mb = np.array(warm).T
    slope = float(np.polyfit(at_s, mb, 1)[0]) * 3600
    half = len(mb) // 2
    growth = float(np.median(mb[half:]) - np.median(mb[:half]))
    figures: Figures = {
        "seconds": round(seconds),
        "exchanges": n,
        "rss_first_mb": rss[0][1],
        "rss_warm_mb": float(np.median(mb[:half])),
        "rss_last_mb": float(np.median(mb[half:])),
        "growth_mb": growth,
        "slope_mb_per_hour": slope,
    }
    for name, value in figures.items():
        print(f"{name:20} {value:.4g}" if isinstance(value, float) else f"{name:20} {value}")
    return figures, [Goal(name="growth_mb", value=growth, bound=_BOUND_MB, unit="MB")]


async def _send(queue: Queue, sort: Sort, seconds: float) -> int:
    rng = np.random.default_rng(1)
    until, n = time.monotonic() + seconds, 0
    traffic = {
        (model, side): Traffic(queue, [model], sort, items, _logits(sort, items))
        for model in _MODELS
        for side in _SIDES
        for items in [rng.standard_normal((4, 3, side, side), dtype=np.float32)]
    }
    while time.monotonic() < until:
        model, side = rng.choice(_MODELS), int(rng.choice(_SIDES))
        burst = int(rng.integers(1, _BURST))
        await traffic[model, side].publish(burst)
        n += burst
        await until_left(queue, 0, _BURST)
    return n


async def _looks(worker: Worker, seconds: float) -> list[tuple[float, float]]:
    began, found = time.monotonic(), []
    while (at_s := time.monotonic() - began) < seconds:
        found.append((at_s, worker.rss_mb()))
        if len(found) % 30 == 1:
            print(f"... {at_s:.0f} s: {found[-1][1]:.0f} MB", file=sys.stderr, flush=True)
        await asyncio.sleep(_LOOK_S)
    return found


def _logits(sort: Sort, items: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.zeros((len(items), sort.n_classes), dtype=np.float32)
