"""Sites of a candidate that a factory makes: layers of one name whose weights or activations differ from the reference's.

Tensors of torchao are told apart into their weights (`W:`) and, where they quantise what goes in, the range of that (`A:`). A
layer of another class than the reference's, or one that quantises what goes in in a way that is not known here, is a site as a
whole (`L:`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from safetensors.torch import load, save
from torch.utils.flop_counter import FlopCounterMode

from quantdrift.core.config.schema import Model, Reference
from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.pytorch.errors import ERRORS
from quantdrift.models.runtimes.pytorch.program import Program, load_candidate
from quantdrift.models.runtimes.pytorch.runtime import TorchRuntime, zeros_of
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.diagnose.pytorch.copy import Switched, TorchCopy, reference_of, shares
from quantdrift.release.diagnose.pytorch.switches import LayerSwitch, RangeSwitch, Switch, WeightSwitch
from quantdrift.release.sites import Site, SiteKind, Weight

_INT8: Final = "Int8Tensor"
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SAME: Final = 1e-3  # of what a layer returns: more is no rounding of float32
_PROBED: Final = 4
_OF_TRAINING: Final = "num_batches_tracked"


def copy_of_modules(
    model: Model, reference: Reference, candidate: Path, factory: str, threads: int
) -> TorchCopy:
    """Return the copy of a candidate that a factory makes.

    Parameters
    ----------
    model, reference
        The model, and its reference, which a factory makes too.
    candidate
        The file of the candidate's weights.
    factory
        `package.module:function` that makes the candidate.
    threads
        CPU threads, 0 for PyTorch's own choice.

    Raises
    ------
    OperatorError
        The reference has no factory, one of both cannot be loaded, or no layer of the candidate differs from the reference's.
    """
    if not reference.factory:
        raise OperatorError(
            f"the reference of model `{model.name}` has no factory, so its layers have no names by which they could take the place of"
            " the candidate's: give the reference in models.references as a factory with safetensors weights, too"
        )
    runtime = reference_of(model, reference, threads)
    program, served = (load_candidate(model, candidate, factory) for _ in range(2))
    search = _ModuleSearch(program.module)
    search.layer("", program.module, runtime.module)
    if not search.sites:
        raise OperatorError(
            f"no layer of the candidate that `{factory}` makes of {candidate} differs from the reference's: nothing is quantised there"
        )
    switched = Switched(
        sites=tuple(search.sites),
        switches=tuple(search.switches),
        weights=tuple(search.weights),
        unmatched=tuple(search.unmatched),
        costs=_costs(runtime, search.sites),
    )
    return ModuleCopy(model, program, served, runtime, switched, candidate=candidate, factory=factory)


class ModuleCopy(TorchCopy):
    """A copy of a candidate that a factory makes, and repairs of it: layers that get the reference's weights.

    Parameters
    ----------
    model, program, served, runtime, found
        As of `TorchCopy`.
    candidate
        The file of the candidate's weights.
    factory
        `package.module:function` that makes the candidate.
    """

    def __init__(
        self,
        model: Model,
        program: Program,
        served: Program,
        runtime: TorchRuntime,
        found: Switched,
        *,
        candidate: Path,
        factory: str,
    ) -> None:
        super().__init__(model, program, served, runtime, found)
        self._model, self._candidate, self._factory = model, candidate, factory

    def unfillable(self, names: Collection[str]) -> str:
        """Return why layers of these sites cannot get the reference's weights; empty: they can."""
        for site in self.sites:
            if site.name in names and site.kind is SiteKind.LAYER:
                sides = [
                    program.get_submodule(site.place) for program in (self._served.module, self._reference)
                ]
                if type(sides[0]) is not type(sides[1]):
                    return (
                        f"{site.name} is of another class than the reference's, so it cannot be filled with weights: make the network without"
                        " quantising it (filter_fn)"
                    )
        return ""

    def in_fp32(self, names: Collection[str]) -> bytes:
        """Return the reference's weights of the layers of these sites, as safetensors by the name in the module.

        Raises
        ------
        OperatorError
            The candidate has no such site.
        """
        if unknown := [name for name in names if name not in {site.name for site in self.sites}]:
            raise OperatorError(f"the candidate {self._candidate} has no site `{unknown[0]}`")
        state = dict(self._reference.state_dict())
        chosen: set[str] = set()
        for site in self.sites:
            if site.name in names:
                inside = {key for key in state if key.startswith(f"{site.place}.")}
                weight = {f"{site.place}.weight"}
                of_kind = {SiteKind.WEIGHT: set(site.tensors), SiteKind.ACTIVATION: weight}
                chosen |= of_kind.get(site.kind, inside)
        tensors = {name: state[name].detach().to(torch.float32).contiguous() for name in sorted(chosen)}
        return bytes(save(tensors))

    def runner(self, model: bytes) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """Return what computes the candidate with these weights, with its own kernels."""
        program = load_candidate(self._model, self._candidate, self._factory)
        for name, tensor in load(model).items():
            layer, _, key = name.rpartition(".")
            module = program.module.get_submodule(layer)
            setattr(module, key, torch.nn.Parameter(tensor, requires_grad=False))
        return lambda inputs: self._in_steps(inputs, lambda part: self._of(program, part))

    @property
    def _reference(self) -> torch.nn.Module:
        return self._runtime.module


class _Served(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A tensor of a candidate in floating point.

    Parameters
    ----------
    values
        Its values.
    step
        Width of its steps; None: unknown.
    axis
        The dimension of the channels; None: one scale for the tensor, or unknown.
    """

    values: torch.Tensor
    step: torch.Tensor | None
    axis: int | None


class _ModuleSearch:
    """The search for sites; it puts their switches into the candidate."""

    def __init__(self, candidate: torch.nn.Module) -> None:
        self._candidate = candidate
        self.sites: list[Site] = []
        self.switches: list[tuple[Switch, ...]] = []
        self.weights: list[Weight] = []
        self.unmatched: list[str] = []
        self._seen: set[int] = set()

    def layer(self, name: str, mine: torch.nn.Module, other: torch.nn.Module) -> None:
        """Find the sites of a layer and of those inside of it.

        Parameters
        ----------
        name
            Its path; empty for the whole model.
        mine, other
            It on both sides.
        """
        if id(mine) in self._seen:  # one layer under two names
            return
        self._seen.add(id(mine))
        own, wanted = _held(mine), _held(other)
        inner = dict(mine.named_children())
        others = dict(other.named_children())
        is_container = not own and not wanted and bool(inner.keys() & others.keys())
        if name and type(mine) is not type(other) and not is_container:
            if _has_tensors(mine) or _has_tensors(other):
                self._whole(name, mine, other)
            return
        differing = [key for key in own if key not in wanted or not _is_same(own[key], wanted[key])]
        if differing or own.keys() != wanted.keys():
            served = {key: _in_floating_point(own[key]) for key in differing}
            if own.keys() == wanted.keys() and all(
                tensor is not None and tensor.values.shape == wanted[key].shape
                for key, tensor in served.items()
            ):
                in_floating_point = {key: tensor for key, tensor in served.items() if tensor is not None}
                self._weights(name, mine, in_floating_point, wanted, other)
            elif name:
                self._whole(name, mine, other)
                return
            else:
                self.unmatched.extend(differing)
        for key, child in inner.items():
            path = f"{name}.{key}" if name else key
            if key in others:
                self.layer(path, child, others[key])
            elif _has_tensors(child):
                self.unmatched.append(path)

    def _weights(
        self,
        name: str,
        mine: torch.nn.Module,
        served: Mapping[str, _Served],
        wanted: Mapping[str, torch.Tensor],
        other: torch.nn.Module,
    ) -> None:
        """Add the weights of a layer as a site, and before it the range of what goes in, if there is one."""
        quantised = getattr(mine, "weight", None) if isinstance(mine, torch.nn.Linear) else None
        is_known = type(quantised).__name__ == _INT8
        if isinstance(mine, torch.nn.Linear) and "weight" in served and not is_known:
            if name and _quantises_what_goes_in(mine, served["weight"].values):
                self._whole(name, mine, other)
                return
        elif is_known and getattr(quantised, "act_quant_kwargs", None) is not None:
            self._range(name, mine, quantised)
        before = getattr(quantised, "act_pre_scale", None) if is_known else None
        number = len(self.sites)
        switches = []
        for key, tensor in served.items():
            raw = wanted[key].detach().to(torch.float32)
            values, step = tensor.values, tensor.step
            if key == "weight" and before is not None:
                values, step = values * before, None if step is None else step * before
            switch = WeightSwitch(raw, values, step)
            target = torch.nn.Parameter(values.clone(), requires_grad=False)
            if key in mine._parameters:  # noqa: SLF001 - a parameter of another class cannot be filled
                mine._parameters[key] = target  # noqa: SLF001
            else:
                mine._buffers[key] = target.data  # noqa: SLF001
            switch.target = target if key in mine._parameters else mine._buffers[key]  # type: ignore[assignment] # noqa: SLF001
            switches.append(switch)
            self.weights.append(Weight(site=number, raw=raw.numpy(), served=values.numpy(), axis=tensor.axis))
        path = name or next(iter(served))
        tensors = tuple(f"{name}.{key}" if name else key for key in served)
        steps = [float(tensor.step.mean()) for tensor in served.values() if tensor.step is not None]
        self._add(SiteKind.WEIGHT, path, tensors, tuple(switches), scale=steps[0] if steps else 0.0)

    def _range(self, name: str, mine: torch.nn.Module, weight: Any) -> None:
        """Add the range of what goes into a layer with an Int8Tensor."""
        is_dynamic = weight.act_quant_scale is None
        lowest, highest = (-64, 63) if weight.act_quant_kwargs.reduce_range else (-128, 127)
        switch = RangeSwitch(_chosen_by_torchao(weight), lowest, highest, is_dynamic=is_dynamic)
        before = weight.act_pre_scale

        def entering(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            first = switch(args[0]) if before is None else switch(args[0] * before) / before
            return (first, *args[1:])

        mine.register_forward_pre_hook(entering)
        scale = zero = None
        if not is_dynamic:
            scale, zero = weight.act_quant_scale, weight.act_quant_zero_point
        is_one = scale is not None and scale.numel() == 1
        self._add(
            SiteKind.ACTIVATION,
            name or "input",
            (f"{name}.input" if name else "input",),
            (switch,),
            scale=float(scale) if scale is not None and is_one else 1.0,
            zero=int(zero) if zero is not None and is_one else 0,
            limits=(lowest, highest),
            is_dynamic=not is_one,
        )

    def _whole(self, name: str, mine: torch.nn.Module, other: torch.nn.Module) -> None:
        """Add a layer as one site."""
        switch = LayerSwitch(mine, other)
        parent, _, leaf = name.rpartition(".")
        self._candidate.get_submodule(parent).add_module(leaf, switch)
        self._add(SiteKind.LAYER, name, (name,), (switch,))

    def _add(
        self,
        kind: SiteKind,
        place: str,
        tensors: tuple[str, ...],
        switches: tuple[Switch, ...],
        *,
        scale: float = 0.0,
        zero: int = 0,
        limits: tuple[int, int] = (0, 0),
        is_dynamic: bool = False,
    ) -> None:
        self.sites.append(
            Site(
                kind=kind,
                place=place,
                tensors=tensors,
                nodes=(place,),
                scale=np.asarray(scale),
                zero_point=np.asarray(zero),
                axis=None,
                lowest=limits[0],
                highest=limits[1],
                is_dynamic=is_dynamic,
            )
        )
        self.switches.append(switches)


def _held(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module itself, but for what only training reads."""
    tensors = {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }
    return {key: tensor for key, tensor in tensors.items() if key != _OF_TRAINING}


def _has_tensors(module: torch.nn.Module) -> bool:
    """Return whether a module or one inside of it holds anything; what is packed for kernels is in its state alone."""
    return any(True for _ in _all_tensors(module)) or bool(module.state_dict())


def _all_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _is_same(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        type(mine) in _PLAIN
        and mine.dtype == other.dtype
        and mine.shape == other.shape
        and torch.equal(mine, other)
    )


def _in_floating_point(tensor: Any) -> _Served | None:
    """Return a tensor in floating point; None where it does not tell its values."""
    if type(tensor) in _PLAIN and not tensor.is_quantized:
        if not tensor.dtype.is_floating_point:
            return None
        return _Served(values=tensor.detach().to(torch.float32), step=None, axis=None)
    try:
        values = tensor.detach().dequantize().to(torch.float32)
    except ERRORS:
        return None
    step = step_of(tensor, values.shape)
    by_row = step is not None and step.shape[:1] == values.shape[:1] and step[0].numel() == 1
    return _Served(values=values, step=step, axis=0 if by_row else None)


def step_of(tensor: Any, shape: torch.Size) -> torch.Tensor | None:
    """Return the width of the steps of a tensor of torchao, so that it divides the values; None: unknown."""
    scale = getattr(tensor, "scale", None)
    if not isinstance(scale, torch.Tensor) or scale.dim() != len(shape):
        return None
    step = scale.detach().to(torch.float32)
    for dim, length in enumerate(shape):
        if step.shape[dim] not in {1, length}:
            if length % step.shape[dim]:
                return None
            step = step.repeat_interleave(length // step.shape[dim], dim)
    return step


def _quantises_what_goes_in(layer: Any, weight: torch.Tensor) -> bool:
    """Return whether a linear layer computes something else than the product with its weight."""
    values = torch.randn(_PROBED, layer.in_features, generator=torch.Generator().manual_seed(1))
    bias = layer.bias.to(torch.float32) if layer.bias is not None else None
    with torch.inference_mode():
        try:
            output = layer(values.to(layer.weight.dtype)).to(torch.float32)
        except ERRORS:
            return True
        expected = torch.nn.functional.linear(values, weight, bias)
    allowed = _SAME if layer.weight.dtype is torch.float32 else 10 * _SAME
    return bool((output - expected).abs().max() > allowed * expected.abs().max())


def _chosen_by_torchao(weight: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return what chooses scale and zero point for what goes into a layer."""
    kwargs = weight.act_quant_kwargs

    def chosen(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero = weight.act_quant_scale, weight.act_quant_zero_point
        if scale is None:
            quantised = type(weight).from_hp(
                values,
                kwargs.granularity,
                mapping_type=kwargs.mapping_type,
                reduce_range=kwargs.reduce_range,
            )
            scale, zero = quantised.scale, quantised.zero_point
        zero = torch.zeros(()) if zero is None else zero.to(torch.float32)
        return scale, zero

    return chosen


def _costs(runtime: TorchRuntime, sites: list[Site]) -> tuple[float | None, ...]:
    """Return the share of multiplications that each site has a part in."""
    zeros = {spec.name: zeros_of(spec, 2) for spec in runtime.inputs}
    with FlopCounterMode(display=False) as counter:
        runtime.run(zeros)
    counts = {
        name: float(sum(by_operator.values())) for name, by_operator in counter.get_flop_counts().items()
    }
    root = type(runtime.module).__name__
    return shares([counts.get(f"{root}.{site.place}", 0.0) for site in sites], counts.get("Global", 0.0))
