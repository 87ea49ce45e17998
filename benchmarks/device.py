"""What the card gives beside ONNX Runtime: share of its FP32 peak, `torch.compile`, CUDA graphs. Nothing without a card."""

import time
from collections.abc import Callable
from typing import Final

import torch

from benchmarks.references import Sort
from quantdrift.core.config.schema import Provider
from quantdrift.models.runtimes.pytorch.determinism import configure_torch, device_for

BATCH: Final = 64
_RUNS: Final = 20
_WARM: Final = 3
# FP32 units of a multiprocessor by compute capability (CUDA C programming guide, arithmetic instructions).
_UNITS: Final = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
_USUAL_UNITS: Final = 128
Figures = dict[str, float | int | str | None]


def is_there() -> bool:
    """Return whether PyTorch has a CUDA device."""
    return bool(torch.cuda.is_available())


def figures(sort: Sort, bare_per_s: float) -> Figures:
    """Return what the card's FP32 peak is, how much of it the bare runtime reached, and what PyTorch does.

    Parameters
    ----------
    sort
        The reference.
    bare_per_s
        Items per second of the bare runtime.
    """
    if not is_there():
        return {}
    configure_torch(0)
    flops, peak = sort.flops(), _peak_flops()
    found: Figures = {
        "device": torch.cuda.get_device_name(),
        "fp32_peak_tflops": peak / 1e12,
        "bare_share_of_peak": bare_per_s * flops / peak,
    }
    device = device_for(Provider.CUDA)
    module, batch = sort.module().to(device), torch.from_numpy(sort.items(BATCH)).to(device)
    with torch.inference_mode():
        ways: dict[str, Callable[[], object]] = {"eager": lambda: module(batch)}
        compiled = torch.compile(module)
        ways["compiled"] = lambda: compiled(batch)
        ways["graph"] = _graph(lambda: module(batch))
        for name, run in ways.items():
            found[f"torch_{name}_per_s"] = _per_s(run)
            found[f"torch_{name}_share_of_peak"] = _per_s(run) * flops / peak
    return found


def _peak_flops() -> float:
    """Return multiprocessors x units x 2 x the highest clock: a multiplication with its addition in each cycle."""
    card = torch.cuda.get_device_properties(0)
    units = _UNITS.get((card.major, card.minor), _USUAL_UNITS)
    return float(card.multi_processor_count * units * 2 * card.clock_rate * 1e3)


def _graph(run: Callable[[], object]) -> Callable[[], object]:
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # it publishes no types
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _per_s(run: Callable[[], object]) -> float:
    for _ in range(_WARM):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_RUNS):
        run()
    torch.cuda.synchronize()
    return _RUNS * BATCH / (time.perf_counter() - began)
