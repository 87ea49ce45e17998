"""A copy of a PyTorch candidate in which each site can be switched to FP32, on the processor."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from quantdrift.core.config.schema import Model, Provider, Reference
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.models.runtimes.protocol import error_text
from quantdrift.models.runtimes.pytorch.errors import ERRORS
from quantdrift.models.runtimes.pytorch.program import Program
from quantdrift.models.runtimes.pytorch.runtime import TorchRuntime, outputs_of, tensor_of, zeros_of
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.diagnose.pytorch.switches import RangeSwitch, Switch
from quantdrift.release.sites import Site, SiteKind, Weight

_STEP: Final = 512  # items of one run
_PROBED: Final = 2  # items of zeros


class Switched(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The sites of a candidate, with their switches in a program of it.

    Parameters
    ----------
    switches
        Of each site, in the same order.
    weights
        The weights whose values are known on both sides.
    unmatched
        What the reference does not have.
    costs
        Share of multiplications that each site has a part in; None: unknown.
    """

    sites: tuple[Site, ...]
    switches: tuple[tuple[Switch, ...], ...]
    weights: tuple[Weight, ...]
    unmatched: tuple[str, ...]
    costs: tuple[float | None, ...]


class TorchCopy:
    """A copy of a candidate in PyTorch with its switches, the candidate itself, and its reference.

    Parameters
    ----------
    model
        The model: names of inputs and outputs.
    program
        The program that has the switches.
    served
        The candidate as it serves.
    runtime
        The reference.
    found
        The sites and switches of `program`.

    Raises
    ------
    OperatorError
        The candidate does not compute zeros, or has none of the reference's outputs.
    """

    file: Path | None = None

    def __init__(
        self, model: Model, program: Program, served: Program, runtime: TorchRuntime, found: Switched
    ) -> None:
        self.sites = found.sites
        self.weights = found.weights
        self.unmatched = found.unmatched
        self.costs = found.costs
        self._switches = found.switches
        self._program = program
        self._served = served
        self._runtime = runtime
        self._names = tuple(tensor.name for tensor in model.outputs)
        self.inputs = tuple(spec.name for spec in program.inputs)
        zeros = {spec.name: zeros_of(spec, _PROBED) for spec in program.inputs}
        wanted = {spec.name for spec in runtime.outputs}
        self.outputs = tuple(name for name in self.served(zeros) if name in wanted)
        if not self.outputs:
            raise OperatorError("the candidate has no output of a name that the reference's outputs have")

    @property
    def everywhere(self) -> range:
        """The numbers of all sites."""
        return range(len(self.sites))

    def run(
        self, inputs: Mapping[str, Array], restored: Iterable[int] = (), factors: Array | None = None
    ) -> dict[str, Array]:
        """Return the outputs with some sites in FP32; each scale is multiplied by its factor before it is used."""
        self._set(restored, factors)
        return self._in_steps(inputs, lambda part: self._of(self._program, part))

    def raw(self, inputs: Mapping[str, Array], restored: Iterable[int] = ()) -> dict[int, Array]:
        """Return the values before quantisation of each activation site : (items, ...) by site; those of dynamic ones in steps."""
        self._set(restored, None)
        ranges = {
            str(number): switch
            for number, site in enumerate(self.sites)
            if site.kind is SiteKind.ACTIVATION
            for switch in self._switches[number]
            if isinstance(switch, RangeSwitch)
        }

        def kept(part: Mapping[str, Array]) -> dict[str, Array]:
            for switch in ranges.values():
                switch.keeps, switch.raw = True, None
            self._of(self._program, part)
            values = {}
            n_items = len(next(iter(part.values())))
            for name, switch in ranges.items():
                if switch.raw is not None:
                    values[name] = switch.raw.numpy().reshape(n_items, -1)
                switch.keeps, switch.raw = False, None
            return values

        return {int(name): array for name, array in self._in_steps(inputs, kept).items()}

    def served(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the candidate's own kernels compute."""
        return self._in_steps(inputs, lambda part: self._of(self._served, part))

    def expected(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the reference computes."""
        names = {spec.name for spec in self._runtime.inputs}
        return self._in_steps(
            {name: array for name, array in inputs.items() if name in names}, self._runtime.run
        )

    def _set(self, restored: Iterable[int], factors: Array | None) -> None:
        chosen = set(restored)
        for number, switches in enumerate(self._switches):
            factor = 1.0 if factors is None else float(factors[number])
            for switch in switches:
                switch.set(restored=number in chosen, factor=factor)

    def _of(self, program: Program, inputs: Mapping[str, Array]) -> dict[str, Array]:
        tensors = [tensor_of(inputs[spec.name]) for spec in program.inputs]
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            return {
                name: tensor.detach().numpy()
                for name, tensor in outputs_of(program, tensors, self._names).items()
            }

    def _in_steps(
        self, inputs: Mapping[str, Array], compute: Callable[[dict[str, Array]], Mapping[str, Array]]
    ) -> dict[str, Array]:
        """Compute all items, in steps; a program for a fixed number of items is filled up with the first one of the step."""
        fixed = [spec.shape[0] for spec in self._program.inputs if spec.shape and spec.shape[0] is not None]
        n_items = len(next(iter(inputs.values())))
        size = fixed[0] if fixed else min(_STEP, max(n_items, 1))
        parts = []
        for begin in range(0, max(n_items, 1), size):
            end = min(begin + size, n_items)
            rows = np.arange(begin, begin + size if fixed else end)
            rows[end - begin :] = begin
            try:
                computed = compute({name: array[rows] for name, array in inputs.items()})
            except QuarantineError as error:
                raise OperatorError(f"PyTorch cannot compute these inputs: {error.detail}") from error
            except ERRORS as error:
                raise OperatorError(f"PyTorch cannot compute these inputs: {error_text(error)}") from error
            parts.append({name: array[: end - begin] for name, array in computed.items()})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def reference_of(model: Model, reference: Reference, threads: int) -> TorchRuntime:
    """Return the reference on the processor, not compiled."""
    plain = msgspec.structs.replace(reference, compile=False, buckets=(), cuda_graphs=False)
    return TorchRuntime(RuntimeRequest(model=model, reference=plain, provider=Provider.CPU, threads=threads))


def shares(counts: Sequence[float | None], total: float) -> tuple[float | None, ...]:
    """Return counts of multiplications as shares of all; None: unknown."""
    return tuple(None if count is None or not total else count / total for count in counts)
