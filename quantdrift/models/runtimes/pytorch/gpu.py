"""Computation on a CUDA device: copies that overlap with computation, and CUDA graphs."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch

Tensors = Mapping[str, torch.Tensor]
Compute = Callable[[list[torch.Tensor]], Tensors]
_WARM_UPS: Final = 3  # before a capture, for what libraries set up when they are first used


class Staging:
    """Copies inputs and outputs on separate streams, through pinned memory, while other steps are computed.

    PyTorch's allocator for pinned memory does not reuse a block before the copies from it are done.

    Parameters
    ----------
    device
        A CUDA device.
    compute
        Computes a step on the device.
    """

    def __init__(self, device: torch.device, compute: Compute) -> None:
        self._device = device
        self._compute = compute
        self._upload_stream = stream_of(device)
        self._download_stream = stream_of(device)

    def run(self, steps: Iterable[Sequence[torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Return the outputs of each step, on the CPU.

        Parameters
        ----------
        steps
            The inputs of each step, on the CPU.
        """
        computing = torch.cuda.current_stream(self._device)
        results: list[dict[str, torch.Tensor]] = []
        for inputs in steps:
            pinned = [tensor.pin_memory() for tensor in inputs]
            with torch.cuda.stream(self._upload_stream):
                on_device = [tensor.to(self._device, non_blocking=True) for tensor in pinned]
            computing.wait_stream(self._upload_stream)
            for tensor in on_device:
                tensor.record_stream(computing)
            outputs = self._compute(on_device)
            self._download_stream.wait_stream(computing)
            with torch.cuda.stream(self._download_stream):
                results.append({name: self._back(tensor) for name, tensor in outputs.items()})
        self._download_stream.synchronize()
        return results

    def _back(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor
        tensor.record_stream(self._download_stream)
        on_cpu = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return on_cpu.copy_(tensor, non_blocking=True)


class Graphs:
    """A computation captured as one CUDA graph for each shape of its inputs.

    Parameters
    ----------
    device
        A CUDA device.
    compute
        The computation to capture.
    """

    def __init__(self, device: torch.device, compute: Compute) -> None:
        self._device = device
        self._compute = compute
        self._captured: dict[
            tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, list[torch.Tensor], Tensors]
        ] = {}

    def capture(self, inputs: Sequence[torch.Tensor]) -> None:
        """Capture the computation for inputs of these shapes, which are on the device."""
        static = [tensor.clone() for tensor in inputs]
        side_stream = _warm_up_stream(self._device)
        side_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side_stream):
            for _ in range(_WARM_UPS):
                self._compute(static)
        torch.cuda.current_stream(self._device).wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self._compute(static)
        self._captured[_shapes(inputs)] = (graph, static, outputs)

    def run(self, inputs: list[torch.Tensor]) -> Tensors:
        """Return the outputs, from the graph captured for these shapes if there is one."""
        captured = self._captured.get(_shapes(inputs))
        if captured is None:
            return self._compute(inputs)
        graph, static, outputs = captured
        for buffer, tensor in zip(static, inputs, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        # The next replay writes over them.
        return {name: tensor.clone() for name, tensor in outputs.items()}


def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return a new stream of a CUDA device."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # PyTorch's own
    return stream


@functools.cache
def _warm_up_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of a device for what is computed before a capture.

    cuBLAS takes memory to work in for each stream that it computes on, 32 MiB on Hopper, and keeps it as long as the process lives:
    with a stream for each graph, each reference that is opened again would cost some 100 MiB.
    """
    return stream_of(device)


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors)
