"""A network in PyTorch that reads digits, in FP32 and as torchao quantises it: in place, and as an exported program.

Its layers are random and its last one is a ridge regression on what they compute: nothing is trained.
"""

import hashlib
import importlib
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.repair.network import Images, drawn, pages
from quantdrift.core.config.schema import Model, ModelTensor, Reference, Runtime

INPUT, OUTPUT = "image", "logits"
MODEL: Final = Model(
    name="digits",
    output=OUTPUT,
    inputs=(ModelTensor(name=INPUT, datatype="FP32", shape=(-1, 1, 8, 8)),),
    outputs=(ModelTensor(name=OUTPUT, datatype="FP32"),),
)
_WIDTH = 128
_BLOCKS = 3
_RIDGE = 10.0
_SHARPNESS = 12.0
_COPIES = 3


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(_WIDTH, _WIDTH)
        self.b = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the block makes of x : (items, width)."""
        made: torch.Tensor = torch.relu(x + self.b(torch.relu(self.a(x))))
        return made


class Layers(nn.Module):
    """The network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Linear(8 * 64, _WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(_BLOCKS)])
        self.last = nn.Linear(_WIDTH, 10)

    def hidden(self, image: torch.Tensor) -> torch.Tensor:
        """Return what the last layer reads : (items, width)."""
        x = torch.relu(self.norm(self.conv(image)))
        x = torch.relu(self.first(x.flatten(1)))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `logits` : (items, 10)."""
        return {OUTPUT: self.last(self.hidden(image))}


def layers() -> Layers:
    """Return the network with weights of no use, as a factory does."""
    return Layers()


@cache
def solved() -> dict[str, torch.Tensor]:
    """Return weights of the network with which it reads digits."""
    rng = np.random.default_rng(1)
    learnt = pages()
    images = np.concatenate([learnt.learnable] * _COPIES)
    images = np.clip(images + rng.normal(0, 0.05, images.shape), 0, 1).astype(np.float32)
    torch.manual_seed(1)
    network = Layers()
    nn.init.uniform_(network.norm.running_var, 0.1, 0.3)  # type: ignore[arg-type] # it is a tensor
    network.eval()
    with torch.inference_mode():
        x = network.hidden(torch.from_numpy(images)).numpy()
    wide = np.concatenate([x, np.ones((len(x), 1))], axis=1).astype(np.float64)
    truth = np.eye(10)[np.tile(learnt.labels, _COPIES)] * _SHARPNESS
    found = np.linalg.solve(wide.T @ wide + _RIDGE * np.eye(wide.shape[1]), wide.T @ truth)
    state = {name: one.detach().clone() for name, one in network.state_dict().items()}
    state["last.weight"] = torch.from_numpy(found[:-1].T.astype(np.float32).copy())
    state["last.bias"] = torch.from_numpy(found[-1].astype(np.float32))
    return state


def written(path: Path) -> Path:
    """Write the weights in FP32, and return the path."""
    save_file(solved(), path)
    return path


def reference(path: Path) -> Reference:
    """Return the reference, as it is configured."""
    return Reference(runtime=Runtime.TORCH, path=str(path), factory="tests.quantised.layers:layers")


def torchao(module: str) -> Any:
    """Return a module of torchao: to import them takes seconds, which only the tests that need them spend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it calls of PyTorch is deprecated there
        return importlib.import_module(f"torchao.{module}")


def quantised(config: str, **options: Any) -> Layers:
    """Return the network as a configuration of torchao quantises it."""
    network = layers()
    network.load_state_dict(solved())
    quantization = torchao("quantization")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(network, getattr(quantization, config)(**options))
    return network.eval()


def static() -> Layers:
    """Return the network with an INT8 weight and a calibrated INT8 range at each layer."""
    network = layers().eval()
    network.load_state_dict(solved())
    reach: dict[str, float] = {}

    def watch(name: str) -> Any:
        def seen(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            reach[name] = float(args[0].abs().max())

        return seen

    linear = {name: one for name, one in network.named_modules() if isinstance(one, nn.Linear)}
    hooks = [one.register_forward_pre_hook(watch(name)) for name, one in linear.items()]
    with torch.inference_mode():
        network(torch.from_numpy(pages().learnable))
    for hook in hooks:
        hook.remove()
    quantization = torchao("quantization")
    granularity = [quantization.PerTensor(), quantization.PerRow()]
    for name, one in linear.items():
        scale = torch.tensor([[reach[name] / 127]])
        config = quantization.Int8StaticActivationInt8WeightConfig(
            act_quant_scale=scale, granularity=granularity
        )
        quantization.quantize_(one, config)
    return network


def in_place(path: Path) -> Layers:
    """Return the network with dynamic INT8 layers of PyTorch's own, as a factory does that loads the weights itself."""
    network = layers()
    network.load_state_dict(load_file(path))
    network.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and still served
        made: Layers = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call] # PyTorch's own
            network, {nn.Linear}, dtype=torch.qint8
        )
    return made


def plain(path: Path) -> Layers:
    """Return the network as it is."""
    network = layers()
    network.load_state_dict(load_file(path))
    return network


def saved(network: nn.Module, path: Path) -> Path:
    """Write what torchao has quantised as safetensors, as torchao does, and return the path."""
    support = torchao("prototype.safetensors.safetensors_support")
    tensors, about = support.flatten_tensor_state_dict(network.state_dict())
    save_file({name: one.contiguous() for name, one in tensors.items()}, path, metadata=about)
    return path


def exported(
    path: Path, *, dynamic: bool = False, scales: Mapping[str, float] = MappingProxyType({}), coarse: str = ""
) -> str:
    """Write the network as a program that PyTorch 2 Export has quantised, and return its digest.

    Parameters
    ----------
    dynamic
        Whether ranges are found while it is computed.
    scales
        By the name of a node: what the scale of its range is multiplied by.
    coarse
        The layer whose weight loses its low bits; empty: none.
    """
    network = layers()
    network.load_state_dict(solved())
    network.eval()
    images = torch.from_numpy(pages().learnable)
    dims = {INPUT: {0: torch.export.Dim("items")}}
    pt2e = torchao("quantization.pt2e.quantize_pt2e")
    x86 = torchao("quantization.pt2e.quantizer.x86_inductor_quantizer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(network, (images[:8],), dynamic_shapes=dims).module()
        config = x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic)
        prepared = pt2e.prepare_pt2e(program, x86.X86InductorQuantizer().set_global(config))
        prepared(images)
        made = pt2e.convert_pt2e(prepared)
        for node in made.graph.nodes:
            if "quantize_per_tensor" in str(node.target) and node.op == "call_function":
                source = node.args[0].args[0] if "dequantize" in str(node.target) else node.args[0]
                if source.name in scales:
                    node.update_arg(1, node.args[1] * scales[source.name])
            if coarse and "dequantize_per_channel" in str(node.target) and _reads(node, coarse):
                stored = getattr(made, node.args[0].target)
                stored.copy_((torch.floor(stored.float() / 32) * 32).to(torch.int8))
        made.recompile()
        torch.export.save(torch.export.export(made, (images[:8],), dynamic_shapes=dims), path)
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _reads(node: Any, layer: str) -> bool:
    return any(
        layer in [path for path, _ in user.meta.get("nn_module_stack", {}).values()] for user in node.users
    )


def pages_unlike(n_items: int, seed: int) -> Images:
    """Draw pages that no calibration has seen."""
    return drawn(pages().held_out, n_items, np.random.default_rng(seed))


def damage(network: nn.Module, layer: str, kind: str) -> nn.Module:
    """Put a fault into a layer that torchao has quantised, and return the network.

    Parameters
    ----------
    layer
        Its path.
    kind
        `coarse`: the weight loses its low bits. `channel`: the scale of one row is six times too large. `wide`, `narrow`: the
        range of what goes in is twenty times too wide, or a twentieth of it.
    """
    weight: Any = network.get_submodule(layer).weight
    if kind == "coarse":
        weight.qdata.copy_((torch.floor(weight.qdata.float() / 32) * 32).to(torch.int8))
    elif kind == "channel":
        weight.scale[3] *= 6
    else:
        weight.act_quant_scale.mul_({"wide": 20.0, "narrow": 1 / 20}[kind])
    return network
