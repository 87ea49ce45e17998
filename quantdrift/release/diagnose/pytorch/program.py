"""Sites of an exported program that PyTorch 2 Export has quantised: pairs of quantise and dequantise, as in ONNX.

Activation ranges (`A:`) are pairs of the same scale, weights (`W:`) stored integers that are dequantised. Both are named after
the first layer that reads them, or after the node where the program does not tell.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch.fx import GraphModule, Node

from quantdrift.core.config.schema import Model, Reference
from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.pytorch.program import load_quantised_program
from quantdrift.release.diagnose.pytorch.copy import Switched, TorchCopy, reference_of, shares
from quantdrift.release.diagnose.pytorch.switches import Chosen, RangeSwitch, Switch, WeightSwitch
from quantdrift.release.sites import Site, SiteKind, Weight

_NAMESPACE: Final = "quantized_decomposed"
_CHOOSES: Final = "choose_qparams"
_BY_CHANNEL: Final = "quantize_per_channel"
_KNOWN: Final = frozenset({"quantize_per_tensor", _BY_CHANNEL, "quantize_per_token"})
_PRODUCTS: Final = ("conv", "linear", "matmul", "mm", "bmm")
_NORMS: Final = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_SAME_INTEGERS: Final = 0.99  # of a weight, to be matched by value
_PASSES: Final = ("view", "reshape", "transpose", "permute", "clone", "t", "unsqueeze", "squeeze", "flatten")


def copy_of_program(model: Model, reference: Reference, candidate: Path, pin: str, threads: int) -> TorchCopy:
    """Return the copy of a candidate that is an exported program.

    Parameters
    ----------
    model, reference
        The model, and its reference in PyTorch.
    candidate
        The file of the program.
    pin
        Its digest, `sha256:...`: it is code.
    threads
        CPU threads, 0 for PyTorch's own choice.

    Raises
    ------
    OperatorError
        One of both cannot be loaded, or the candidate has nothing that can be switched.
    """
    program, served = (load_quantised_program(candidate, pin) for _ in range(2))
    runtime = reference_of(model, reference, threads)
    module = program.module
    assert isinstance(module, GraphModule)
    search = _ProgramSearch(module, candidate, _Weights(runtime.module))
    switched = search.switched()
    if not switched.sites:
        raise OperatorError(
            f"the candidate {candidate} has no pair of quantize and dequantize that can be switched: only programs that were quantised"
            " by PyTorch 2 Export can be diagnosed. What is left: serve the slice by the reference, or roll the candidate back"
        )
    return TorchCopy(model, program, served, runtime, switched)


class _Weights:
    """The reference's weights by name, as they are and with batch norms folded into them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._weights = {
            name: tensor.detach()
            for name, tensor in module.state_dict().items()
            if tensor.dtype is torch.float32 and tensor.dim() > 1
        }
        self._norms = [*_norms_of_modules(module)]
        if isinstance(module, GraphModule):
            self._norms += _norms_of_graph(module)

    def weight(self, names: Sequence[str], integers: torch.Tensor, scale: "_Scale") -> torch.Tensor | None:
        """Return the weight that became these integers; None where the reference does not tell."""
        served = scale.dequantised(integers)
        for name in names:
            named = [form for form in self._forms(self._weights.get(name)) if form.shape == served.shape]
            if named:  # of several that are folded, the one that it comes from is the closest, also where it is damaged
                return min(named, key=lambda form: float((form - served).square().sum()))
        for stored in self._weights.values():
            for form in self._forms(stored):
                if form.shape == served.shape:
                    apart = (scale.integers(form) - integers).abs()
                    if (apart <= 1).all() and (apart == 0).float().mean() >= _SAME_INTEGERS:
                        return form
        return None

    def _forms(self, weight: torch.Tensor | None) -> Iterator[torch.Tensor]:
        """Yield a weight as it is, turned, and with each batch norm folded into it."""
        if weight is None:
            return
        yield weight
        if weight.dim() == 2:
            yield weight.T
        for factors in self._norms:
            if len(factors) == len(weight):
                yield weight * factors.reshape(-1, *[1] * (weight.dim() - 1))


class _Scale(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Scale, zero point and limits of a stored tensor."""

    scale: torch.Tensor
    zero_point: torch.Tensor
    axis: int | None
    lowest: int
    highest: int

    def integers(self, values: torch.Tensor) -> torch.Tensor:
        """Return the integers of values."""
        return torch.clamp(
            torch.round(values / self.along(self.scale, values.dim()))
            + self.along(self.zero_point, values.dim()),
            self.lowest,
            self.highest,
        )

    def dequantised(self, integers: torch.Tensor) -> torch.Tensor:
        """Return the values of integers."""
        n_dims = integers.dim()
        return (integers.float() - self.along(self.zero_point, n_dims)) * self.along(self.scale, n_dims)

    def along(self, part: torch.Tensor, n_dims: int) -> torch.Tensor:
        """Return a scale or zero point so that it multiplies a tensor along its axis."""
        if self.axis is None or part.numel() == 1:
            return part.reshape(())
        return part.reshape([-1 if dim == self.axis else 1 for dim in range(n_dims)])


class _ProgramSearch:
    """The search for pairs in a program; it puts a switch in the place of each."""

    def __init__(self, module: GraphModule, path: Path, reference: _Weights) -> None:
        self._module = module
        self._path = path
        self._reference = reference
        self._counts = _multiplications(module)
        self._names: set[str] = set()
        self._sites: list[Site] = []
        self._switches: list[tuple[Switch, ...]] = []
        self._weights: list[Weight] = []
        self._unmatched: list[str] = []
        self._costs: list[float | None] = []

    def switched(self) -> Switched:
        """Return the sites with their switches, activation ranges first."""
        ranges: dict[tuple[Any, ...], list[Node]] = {}
        stored = []
        for node in self._module.graph.nodes:
            name = _operator(node)
            if name.startswith("dequantize") and name.removeprefix("de") in _KNOWN:
                source = node.args[0]
                if source.op == "get_attr":
                    stored.append(node)
                elif _operator(source) == name.removeprefix("de"):
                    ranges.setdefault(_key(source), []).append(node)
        for nodes in ranges.values():
            self._range(nodes)
        for node in stored:
            self._weight(node)
        self._module.graph.eliminate_dead_code()
        self._module.recompile()
        return Switched(
            sites=tuple(self._sites),
            switches=tuple(self._switches),
            weights=tuple(self._weights),
            unmatched=tuple(self._unmatched),
            costs=shares(self._costs, sum(self._counts.values())),
        )

    def _range(self, nodes: Sequence[Node]) -> None:
        first: Any = nodes[0].args[0]
        lowest, highest = int(first.args[-3]), int(first.args[-2])
        is_dynamic = isinstance(first.args[1], Node) and first.args[1].op != "get_attr"
        axis = None
        scale: Any = np.asarray(1.0)
        zero: Any = np.asarray(0)
        if is_dynamic:
            chosen = self._chosen(first)
        else:
            by_channel = _operator(first) == _BY_CHANNEL
            axis = int(first.args[3]) if by_channel else None
            numbers = [torch.as_tensor(self._value(first.args[position])) for position in (1, 2)]
            scale = numbers[0].to(torch.float64).numpy()
            zero = numbers[1].to(torch.int64).numpy()
            chosen = _fixed(numbers[0], numbers[1], axis)
            if not by_channel:
                scale, zero = scale.reshape(()), zero.reshape(())
        switch = RangeSwitch(chosen, lowest, highest, is_dynamic=is_dynamic)
        readers = [reader for node in nodes for reader in _readers(node)]
        sources: list[Any] = list(dict.fromkeys(node.args[0].args[0] for node in nodes))  # type: ignore[union-attr]
        self._add(
            SiteKind.ACTIVATION,
            next((reader for reader in readers if reader in self._counts), sources[0]),
            tensors=tuple(source.name for source in sources),
            readers=readers,
            switch=switch,
            scale=scale,
            zero_point=zero,
            axis=axis,
            limits=(lowest, highest),
            is_dynamic=is_dynamic,
        )
        for node in nodes:
            self._replace(node, (node.args[0].args[0],))  # type: ignore[union-attr]

    def _weight(self, node: Node) -> None:
        source: Any = node.args[0]
        integers = self._value(source)
        by_channel = _operator(node).endswith("per_channel")
        scale = _Scale(
            scale=torch.as_tensor(self._value(node.args[1])).float(),
            zero_point=torch.as_tensor(0 if node.args[2] is None else self._value(node.args[2])).float(),
            axis=int(node.args[3]) if by_channel else None,  # type: ignore[arg-type]
            lowest=int(node.args[-3]),  # type: ignore[arg-type]
            highest=int(node.args[-2]),  # type: ignore[arg-type]
        )
        readers = _readers(node)
        path = _path_of(readers[0]) if readers else ""
        raw = self._reference.weight([f"{path}.weight", source.target], integers, scale)
        if raw is None:
            self._unmatched.append(path or source.target)
            return
        served = scale.dequantised(integers)
        number = len(self._sites)
        step = scale.along(scale.scale, integers.dim())
        zero = scale.along(scale.zero_point, integers.dim())
        low, high = (((end - zero) * step).numpy() for end in (scale.lowest, scale.highest))
        self._weights.append(
            Weight(
                site=number,
                raw=raw.numpy(),
                served=served.numpy(),
                axis=scale.axis,
                step=step.numpy(),
                low=low,
                high=high,
            )
        )
        self._add(
            SiteKind.WEIGHT,
            readers[0] if readers else source,
            tensors=(source.target,),
            readers=readers,
            switch=WeightSwitch(raw, served, step),
            scale=scale.scale.numpy().astype(np.float64),
            zero_point=scale.zero_point.numpy().astype(np.int64),
            axis=scale.axis,
            limits=(scale.lowest, scale.highest),
            is_dynamic=False,
        )
        self._replace(node, ())

    def _add(
        self,
        kind: SiteKind,
        at: Node,
        *,
        tensors: tuple[str, ...],
        readers: Sequence[Node],
        switch: Switch,
        scale: Any,
        zero_point: Any,
        axis: int | None,
        limits: tuple[int, int],
        is_dynamic: bool,
    ) -> None:
        path = _path_of(at) or at.name
        if f"{kind.value}:{path}" in self._names:  # a layer that reads two, or is called twice
            path = tensors[0]
        self._names.add(f"{kind.value}:{path}")
        self._module.add_submodule(_switch_name(len(self._sites)), switch)
        self._sites.append(
            Site(
                kind=kind,
                place=path,
                tensors=tensors,
                nodes=tuple(dict.fromkeys(reader.name for reader in readers)),
                scale=scale,
                zero_point=zero_point,
                axis=axis,
                lowest=limits[0],
                highest=limits[1],
                is_dynamic=is_dynamic,
            )
        )
        self._switches.append((switch,))
        self._costs.append(sum(self._counts.get(reader, 0.0) for reader in set(readers)))

    def _replace(self, node: Node, args: tuple[Any, ...]) -> None:
        """Put the switch of the last site in the place of a node."""
        with self._module.graph.inserting_before(node):
            call = self._module.graph.call_module(_switch_name(len(self._sites) - 1), args)
        node.replace_all_uses_with(call)

    def _chosen(self, node: Node) -> Chosen:
        """Return what chooses the scale of a range that is found while it is computed."""
        scale: Any = node.args[1]
        source: Any = scale.args[0] if scale.op == "call_function" else None
        if source is None or not _operator(source).startswith(_CHOOSES):
            raise OperatorError(
                f"the candidate {self._path} finds the scale at `{node.name}` in a way that is not known: such programs cannot be"
                " diagnosed"
            )
        others = source.args[1:]

        def chosen(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            numbers = source.target(values, *others)
            return numbers[0].to(torch.float32), numbers[1].to(torch.float32)

        return chosen

    def _value(self, argument: Any) -> Any:
        """Return a stored tensor, or a number as it is."""
        if not isinstance(argument, Node):
            return argument
        value: Any = self._module
        for part in str(argument.target).split("."):
            value = getattr(value, part)
        return value.detach()


def _fixed(scale: torch.Tensor, zero: torch.Tensor, axis: int | None) -> Chosen:
    def chosen(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = [-1 if dim == axis else 1 for dim in range(values.dim())] if axis is not None else []
        return scale.to(torch.float32).reshape(shape), zero.to(torch.float32).reshape(shape)

    return chosen


def _operator(node: Any) -> str:
    """Return the name of a quantising operator; empty for all others."""
    if not isinstance(node, Node) or node.op != "call_function":
        return ""
    namespace, _, name = str(node.target).partition(".")
    return name.partition(".")[0] if namespace == _NAMESPACE else ""


def _key(node: Node) -> tuple[Any, ...]:
    """Return what pairs of one range share: its numbers; a stored or found scale is its own."""
    return tuple(
        argument if not isinstance(argument, torch.dtype) else str(argument) for argument in node.args[1:]
    )


def _readers(node: Node) -> list[Node]:
    """Return the nodes that compute with what a node returns, behind turns and other forms of the same values."""
    readers = []
    for user in node.users:
        name = str(user.target).removeprefix("aten.").partition(".")[0]
        readers += _readers(user) if name in _PASSES else [user]
    return readers


def _path_of(node: Node) -> str:
    """Return the path of the layer that a node belongs to; empty where it is not known."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]
    return str(paths[-1]) if paths else ""


def _multiplications(module: GraphModule) -> Mapping[Node, float]:
    """Return the multiplications of each convolution and matrix product for one item, where its shape is known."""
    counts = {}
    for node in module.graph.nodes:
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        if node.op == "call_function" and name.startswith(_PRODUCTS):
            output = node.meta.get("val")
            values = [
                argument.meta.get("val")
                for argument in node.args[:3]
                if isinstance(argument, Node) and "val" in argument.meta
            ]
            weight = values[1] if len(values) > 1 else None
            if isinstance(output, torch.Tensor) and isinstance(weight, torch.Tensor):
                shape: tuple[Any, ...] = tuple(output.shape[1:])
                sizes = [size for size in shape if isinstance(size, int)]
                width = weight[0].numel() if name.startswith(("conv", "linear")) else weight.shape[-2]
                counts[node] = float(np.prod(sizes) * int(width))
    return counts


def _norms_of_modules(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield by what each batch norm multiplies its channels."""
    for layer in module.modules():
        if isinstance(layer, _NORMS):
            variance: torch.Tensor | None = layer.running_var
            if variance is not None:
                gamma = layer.weight.detach() if layer.affine else torch.ones_like(variance)
                yield gamma / torch.sqrt(variance + layer.eps)


def _norms_of_graph(module: GraphModule) -> list[torch.Tensor]:
    """Return the same of a program's batch norms."""
    state = module.state_dict()
    norms = []
    for node in module.graph.nodes:
        if node.op == "call_function" and "batch_norm" in str(node.target):
            gamma, variance = (
                state.get(str(argument.target)) if isinstance(argument, Node) else None
                for argument in (node.args[1], node.args[4])
            )
            eps = [argument for argument in node.args if isinstance(argument, float)]
            if variance is not None and eps:
                gamma = torch.ones_like(variance) if gamma is None else gamma
                norms.append(gamma.detach() / torch.sqrt(variance + eps[-1]))
    return norms


def _switch_name(number: int) -> str:
    return f"quantdrift_switch_{number}"
