"""The model of `onnx_models` in PyTorch, in each of the forms that a reference may have."""

import hashlib
import warnings
import weakref
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from quantdrift.core.config.schema import Model, ModelTensor, Provider, Reference, Runtime
from quantdrift.models.runtimes.pytorch.runtime import TorchRuntime
from quantdrift.models.runtimes.registry import RuntimeRequest
from tests.support.shadow.onnx_models import BIAS, N_FEATURES, WEIGHT

FACTORY = "tests.support.shadow.torch_models:made"
MODEL = Model(
    name="digits",
    inputs=(ModelTensor(name="x", datatype="FP32", shape=(-1, N_FEATURES)),),
    outputs=(ModelTensor(name="logits", datatype="FP32"),),
)


class Linear(torch.nn.Module):
    """`logits = x @ weight + bias`."""

    def __init__(self, weight: npt.NDArray[np.float32] = WEIGHT) -> None:
        super().__init__()
        self.product = torch.nn.Linear(weight.shape[0], weight.shape[1], bias=False)
        self.product.weight = torch.nn.Parameter(torch.from_numpy(weight.T.copy()))
        self.bias = torch.nn.Parameter(torch.from_numpy(BIAS.copy()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `logits` : (items, classes)."""
        return {"logits": self.product(x) + self.bias}


class Hungry(Linear):
    """Wants memory that grows with the twentieth power of the number of items, or of the largest of their thousands.

    For four no machine has it.
    """

    held: ClassVar[list[weakref.ref[torch.Tensor]]] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `logits` : (items, classes), if there is the memory."""
        doubled = x * 2
        Hungry.held.append(weakref.ref(doubled))
        torch.empty(max(len(x), int(x.max() / 1000)) ** 20)
        return super().forward(x)


def made() -> Linear:
    """Return the module with weights of no use, as a factory does."""
    return Linear(np.zeros_like(WEIGHT))


def exported(path: Path, module: torch.nn.Module | None = None, x: torch.Tensor | None = None) -> Path:
    """Write an exported program of any number of items, and return its path."""
    dims = {"x": {0: torch.export.Dim("items")}}
    example = torch.zeros(2, N_FEATURES) if x is None else x
    program = torch.export.export((module or Linear()).eval(), (example,), dynamic_shapes=dims)
    torch.export.save(program, path)
    return path


def weights(path: Path, **replaced: torch.Tensor) -> Path:
    """Write the weights as safetensors, some of them others, and return the path."""
    own = {name: one.detach().clone() for name, one in Linear().named_parameters()}
    save_file({**own, **replaced}, path)
    return path


def scripted(path: Path, module: torch.nn.Module | None = None) -> Path:
    """Write TorchScript, and return its path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script((module or Linear()).eval()), path)
    return path


def pin(path: Path) -> str:
    """Return the digest of a file as the configuration pins it."""
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def opening(path: Path, *, model: Model = MODEL, embedding: str = "", **options: Any) -> RuntimeRequest:
    """Return what the runtime is told of a reference in PyTorch on the CPU; a file that is code is pinned."""
    if "factory" not in options:
        options.setdefault("digest", pin(path))
    reference = Reference(runtime=Runtime.TORCH, path=str(path), **options)
    return RuntimeRequest(
        model=model, reference=reference, provider=Provider.CPU, threads=1, embedding=embedding
    )


def of_factory(directory: Path, factory: str = FACTORY, **options: Any) -> TorchRuntime:
    """Return the reference that a factory makes of the weights, on the CPU."""
    path = weights(directory / "linear.safetensors")
    return TorchRuntime(opening(path, factory=factory, **options))
