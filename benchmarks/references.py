"""Three references of usual sizes, made by code with random weights: a small CNN, a ResNet-50 and a BERT-base."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from quantdrift.core.config.schema import Model, ModelTensor, Reference, Runtime

Array = npt.NDArray[Any]

_OPSET: Final = 20
_SEED: Final = 5


class Sort(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of reference.

    Parameters
    ----------
    title
        For people.
    input, shape, datatype
        Name, shape of one item and Open Inference datatype of its input.
    n_classes
        Width of its output, `logits`.
    cpu_batch
        Items in a batch on a CPU: 64 of the large ones take a quarter of a minute there.
    make
        Makes the module.
    any_side
        Dimensions of its input that may have any length, beside the number of items.
    """

    title: str
    input: str
    shape: tuple[int, ...]
    datatype: str
    n_classes: int
    cpu_batch: int
    make: Callable[[], nn.Module]
    any_side: tuple[int, ...] = ()

    def module(self) -> nn.Module:
        """Return the module, with the same weights each time."""
        torch.manual_seed(_SEED)
        return self.make().eval()

    def reference(self, path: Path, **options: Any) -> Reference:
        """Return how what lies at `path` is configured.

        Parameters
        ----------
        path
            As for `save`.
        **options
            Of the reference: `compile`, `buckets`, `cuda_graphs`.
        """
        if path.suffix != ".safetensors":
            return Reference(path=str(path), **options)
        return Reference(
            runtime=Runtime.TORCH, factory=f"{__name__}:{self.make.__name__}", path=str(path), **options
        )

    def model(self, name: str, reference: Reference) -> Model:
        """Return the configuration of a model with this reference: a module tells nothing of its tensors."""
        return Model(
            name=name,
            inputs=(ModelTensor(name=self.input, datatype=self.datatype, shape=(-1, *self.shape)),),
            outputs=(ModelTensor(name="logits", datatype="FP32"),),
            references=(reference,),
        )

    def items(self, n: int) -> Array:
        """Return random items : (n, ...), the same each time."""
        rng = np.random.default_rng(_SEED)
        if self.datatype == "INT64":
            return rng.integers(0, _VOCABULARY, (n, *self.shape))
        return rng.standard_normal((n, *self.shape), dtype=np.float32)

    def flops(self) -> int:
        """Return the floating-point operations of one item: two for each multiplication with its addition."""
        module = self.module()
        torch.backends.mha.set_fastpath_enabled(value=False)  # what is fused there is not counted
        try:
            with FlopCounterMode(display=False) as counter, torch.inference_mode():
                module(torch.from_numpy(self.items(1)))
        finally:
            torch.backends.mha.set_fastpath_enabled(value=True)
        return int(counter.get_total_flops())

    def save(self, path: Path) -> None:
        """Write it: as ONNX, any number of items at a time, or its weights as safetensors where the path ends so."""
        if path.suffix == ".safetensors":
            save_file(self.module().state_dict(), path)
            return
        program = torch.onnx.export(
            self.module(),
            (torch.from_numpy(self.items(2)),),
            input_names=[self.input],
            output_names=["logits"],
            dynamic_shapes=(
                {0: torch.export.Dim("items")} | dict.fromkeys(self.any_side, torch.export.Dim.AUTO),
            ),
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=False)


_VOCABULARY: Final = 30_522
_WIDTH, _HEADS, _LAYERS, _LENGTH = 768, 12, 12, 128


def _convolution(n_in: int, n_out: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(n_in, n_out, size, stride, size // 2, bias=False), nn.BatchNorm2d(n_out))


class _Residual(nn.Module):
    """`relu(x + body(x))`, with a projection of x where the shape changes."""

    def __init__(self, n_in: int, n_out: int, stride: int, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.short = nn.Identity() if n_in == n_out and stride == 1 else _convolution(n_in, n_out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return torch.relu(self.short(x) + self.body(x))


def _basic(n_in: int, n_out: int, stride: int) -> nn.Module:
    body = nn.Sequential(_convolution(n_in, n_out, 3, stride), nn.ReLU(), _convolution(n_out, n_out, 3))
    return _Residual(n_in, n_out, stride, body)


def _bottleneck(n_in: int, n_out: int, stride: int) -> nn.Module:
    inner = n_out // 4
    parts = (_convolution(n_in, inner, 1), nn.ReLU(), _convolution(inner, inner, 3, stride), nn.ReLU())
    return _Residual(n_in, n_out, stride, nn.Sequential(*parts, _convolution(inner, n_out, 1)))


def _stack(
    block: Callable[[int, int, int], nn.Module], n_in: int, stages: tuple[tuple[int, int], ...]
) -> nn.Sequential:
    """Return stages of (blocks, channels); each but the first one halves the image."""
    blocks: list[nn.Module] = []
    for stage, (n_blocks, n_out) in enumerate(stages):
        for index in range(n_blocks):
            blocks.append(block(n_in, n_out, 2 if stage and not index else 1))
            n_in = n_out
    return nn.Sequential(*blocks)


def _head(width: int, n_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, n_classes))


def resnet20() -> nn.Module:
    """ResNet-20 for 32x32 images (He et al., 2016): 0.27 million weights."""
    stages = _stack(_basic, 16, ((3, 16), (3, 32), (3, 64)))
    return nn.Sequential(_convolution(3, 16, 3), nn.ReLU(), stages, _head(64, 10))


def resnet50() -> nn.Module:
    """ResNet-50 (He et al., 2016): 25.6 million weights."""
    stem = (_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    stages = _stack(_bottleneck, 64, ((3, 256), (4, 512), (6, 1024), (3, 2048)))
    return nn.Sequential(*stem, stages, _head(2048, 1000))


class Bert(nn.Module):
    """The encoder of BERT-base (Devlin et al., 2019) with a classifier on its first token: 109 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_VOCABULARY, _WIDTH)
        self.places = nn.Parameter(torch.randn(1, _LENGTH, _WIDTH) / 50)
        self.first = nn.LayerNorm(_WIDTH)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.classify = nn.Linear(_WIDTH, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each text."""
        hidden = self.layers(self.first(self.words(tokens) + self.places))
        return cast("torch.Tensor", self.classify(hidden[:, 0]))


SORTS: Final[Mapping[str, Sort]] = MappingProxyType(
    {
        "small_cnn": Sort(
            title="ResNet-20, 3x32x32",
            input="pixels",
            shape=(3, 32, 32),
            datatype="FP32",
            n_classes=10,
            cpu_batch=64,
            make=resnet20,
        ),
        "resnet50": Sort(
            title="ResNet-50, 3x224x224",
            input="pixels",
            shape=(3, 224, 224),
            datatype="FP32",
            n_classes=1000,
            cpu_batch=16,
            make=resnet50,
        ),
        "bert": Sort(
            title="BERT-base, 128 tokens",
            input="tokens",
            shape=(_LENGTH,),
            datatype="INT64",
            n_classes=2,
            cpu_batch=8,
            make=Bert,
        ),
    }
)


def smallest() -> Sort:
    """Return the smallest one, for images of any size."""
    return msgspec.structs.replace(SORTS["small_cnn"], any_side=(2, 3))
