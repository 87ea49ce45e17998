"""A small causal language model with a tokenizer of its own, and references that hold it."""

import copy
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from quantdrift.core.config.schema import Generation, Model, Provider, Reference, Runtime
from quantdrift.core.tasks import Task
from quantdrift.models.runtimes.registry import RuntimeRequest

NAME: Final = "small"


def loaded(directory: Path) -> tuple[Any, Any]:
    """Return model and tokenizer of a directory."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # 6 s of processor time

    model = LlamaForCausalLM.from_pretrained(directory, local_files_only=True)
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


def quantised(model: Any) -> Any:
    """Return a copy with linear layers in INT8, weights by tensor, activations as they come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old, and still what PyTorch has without another package
        quantise: Any = torch.ao.quantization.quantize_dynamic
        return quantise(model, {torch.nn.Linear}, dtype=torch.qint8)


def rounded(model: Any, levels: int = 7) -> Any:
    """Return a copy whose weights have so many levels above 0 by tensor, 7 for four bits: it says other things, however the model was trained."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in copied.parameters():
            step = weight.abs().max() / levels
            weight.copy_((weight / step).round() * step)
    return copied


def rounded_in_blocks(weight: torch.Tensor, *, bits: int = 4) -> torch.Tensor:
    """Return a weight with so many bits, 32 neighbours with one scale."""
    blocks = weight.detach().reshape(-1, 32)
    step = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 0.5)
    integers = (blocks / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    values: torch.Tensor = (integers * step).reshape(weight.shape)
    return values


def polyglot(directory: Path) -> Path:
    """Train a small model of the languages of the demo with text, and return its folder; some seconds."""
    from numpy.random import default_rng

    from quantdrift.demo.text.model import TextSize, trained

    size = TextSize(vocabulary=512, width=64, layers=3, steps=100, rows=16)
    model, tokenizer = trained(2, default_rng(2), lambda _: None, size)
    for each in (model, tokenizer):
        each.save_pretrained(directory / "reference")
    return directory / "reference"


def model_of(reference: Reference, **options: Any) -> Model:
    """Return the configuration of a model whose answers are text."""
    return Model(name=NAME, task=Task.GENERATION, references=(reference,), generation=Generation(**options))


def opening(
    directory: Path, *, embedding: str = "", reference: dict[str, Any] | None = None, **options: Any
) -> RuntimeRequest:
    """Return what the runtime is told of a reference in a folder, on the CPU."""
    told = Reference(runtime=Runtime.TRANSFORMERS, path=str(directory), **(reference or {}))
    model = model_of(told, **options)
    return RuntimeRequest(model=model, reference=told, provider=Provider.CPU, threads=1, embedding=embedding)


def remote_opening(url: str, **options: Any) -> RuntimeRequest:
    """Return what the runtime is told of a reference at a server."""
    told = Reference(runtime=Runtime.OPENAI, url=url, timeout_s=150.0)
    return RuntimeRequest(model=model_of(told, **options), reference=told)
