"""What scoring served tokens costs over one bare pass through the reference: tokens per second, by the shape of the model.

    python -m benchmarks.text_replay [--shapes NAME ...] [--device cpu|cuda] [--quick]

The shapes are those of published models, with random weights and the tokenizer of `examples.generation.make`; the prompts and answers are
random tokens, too, as if drawn at temperature 0.7. In turn, round after round:

- **bare**: the model of `transformers` alone, on batches of as many texts as are quickest, with the logits of the answer's positions
  and nothing done with them;
- **scored**: the shipped reference at the defaults, which adds likelihood, rank, the 20 likeliest tokens and unlikely tokens, and shares
  no beginnings, since no text begins like another.

`scored_over_bare_NAME` is the median over the rounds of the ratio of tokens per second, prompts included.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.result import finish
from examples.generation.make import make
from quantdrift.core.config.schema import Generation, Model, Provider, Reference, Runtime
from quantdrift.core.tasks import Task
from quantdrift.models.language.scoring import ANSWER, PROMPT, REQUEST, ScoringRequest, objects
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.pytorch.determinism import configure_torch
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference

_PROMPT: Final = 256
_ANSWER: Final = 256
_BATCHES: Final = (1, 4, 16, 64)
_TEMPERATURE: Final = 0.7
Figures = dict[str, float | int | str | None]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder as published, with one matrix for the tokens that are read and those that are predicted."""

    width: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int

    def config(self) -> LlamaConfig:
        """Return it as `transformers` takes it."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )


SHAPES: Final = {
    "small": Shape(width=512, inner=1408, layers=8, heads=8, key_heads=2, vocabulary=32_000),
    "qwen2.5-0.5b": Shape(width=896, inner=4864, layers=24, heads=14, key_heads=2, vocabulary=151_936),
    "llama-3.2-1b": Shape(width=2048, inner=8192, layers=16, heads=32, key_heads=8, vocabulary=128_256),
    "llama-3.2-3b": Shape(width=3072, inner=8192, layers=28, heads=24, key_heads=8, vocabulary=128_256),
}


def saved(shape: Shape, tokenizer: Path, directory: Path, device: torch.device) -> Path:
    """Save a model with random weights and a tokenizer; return its folder."""
    torch.manual_seed(1)
    with device:
        LlamaForCausalLM(shape.config()).save_pretrained(directory)
    PreTrainedTokenizerFast.from_pretrained(tokenizer, local_files_only=True).save_pretrained(directory)
    return directory


def opened(directory: Path, provider: Provider, threads: int) -> ReferenceRuntime:
    """Return the shipped reference, at the defaults."""
    reference = Reference(runtime=Runtime.TRANSFORMERS, path=str(directory))
    model = Model(name="m", task=Task.GENERATION, references=(reference,), generation=Generation())
    return open_reference(
        RuntimeRequest(model=model, reference=reference, provider=provider, threads=threads, embedding="")
    )


def requests_of(tokens: np.ndarray, n_answer: int, temperature: float | None) -> list[ScoringRequest]:
    """Return what to score of texts : (texts, tokens), whose last tokens are the answer."""
    return [
        ScoringRequest(
            prompt_ids=tuple(text[:-n_answer]), served_ids=tuple(text[-n_answer:]), temperature=temperature
        )
        for text in tokens.tolist()
    ]


def scored_s(reference: ReferenceRuntime, requests: Sequence[ScoringRequest]) -> float:
    """Return the seconds for scoring answers that come together."""
    empty = objects([""] * len(requests))
    return timed(lambda: reference.run({PROMPT: empty, ANSWER: empty, REQUEST: objects(list(requests))}))


def timed(run: Callable[[], object]) -> float:
    """Return the seconds that it takes, until the device is done."""
    begin_s = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin_s


def bare(model: Any, tokens: torch.Tensor, n_answer: int, n_together: int) -> None:
    """Compute the logits of the answers of texts : (texts, tokens), so many texts together."""
    with torch.inference_mode():
        for begin in range(0, len(tokens), n_together):
            model(input_ids=tokens[begin : begin + n_together], use_cache=False, logits_to_keep=n_answer + 1)


def measured(name: str, provider: Provider, n_texts: int, rounds: int, directory: Path) -> Figures:
    """Return the figures of one shape."""
    shape, on_card = SHAPES[name], provider is Provider.CUDA
    device = torch.device("cuda" if on_card else "cpu")
    folder = saved(shape, directory / "tokenizer", directory / name, device)
    tokens = np.random.default_rng(3).integers(2, shape.vocabulary, (n_texts, _PROMPT + _ANSWER))
    requests = requests_of(tokens, _ANSWER, _TEMPERATURE)
    found: Figures = {}
    if on_card:
        torch.cuda.reset_peak_memory_stats()
    reference = opened(folder, provider, torch.get_num_threads())
    scored_s(reference, requests[:2])
    model = LlamaForCausalLM.from_pretrained(folder, local_files_only=True).eval().to(device)
    on_device = torch.from_numpy(tokens).to(device)
    together = [n for n in _BATCHES if n <= n_texts]
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        bare_s = min(timed(partial(bare, model, on_device, _ANSWER, n)) for n in together)
        times.append((bare_s, scored_s(reference, requests)))
    n_tokens = tokens.size
    found[f"bare_tokens_per_s_{name}"] = n_tokens / min(first for first, _ in times)
    found[f"scored_tokens_per_s_{name}"] = n_tokens / min(second for _, second in times)
    found[f"scored_over_bare_{name}"] = statistics.median(first / second for first, second in times)
    found[f"ms_per_answer_{name}"] = 1e3 * statistics.median(second for _, second in times) / n_texts
    if on_card:
        found[f"peak_gib_{name}"] = torch.cuda.max_memory_allocated() / 2**30
    reference.close()
    for figure, value in found.items():
        print(f"{figure:40} {value:,.2f}", flush=True)
    return found


def main(names: Sequence[str], provider: Provider, n_texts: int, rounds: int) -> None:
    """Measure, print, and end with one line of JSON."""
    configure_torch(0)
    figures: Figures = {"prompt_tokens": _PROMPT, "answer_tokens": _ANSWER, "answers": n_texts}
    if provider is Provider.CUDA:
        figures["device"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make(directory, steps=1).rename(directory / "tokenizer")
        for name in names:
            figures |= measured(name, provider, n_texts, rounds, directory)
    finish("text_replay", figures, [])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["small"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer answers and rounds")
    asked = parser.parse_args()
    main(
        asked.shapes,
        Provider.CUDA if asked.device == "cuda" else Provider.CPU,
        n_texts=8 if asked.quick else 64,
        rounds=2 if asked.quick else 5,
    )
