"""Language models: the table of unlikely tokens over precisions, the answers to a page, pages of healthy models, and what turns cost.

    python -m benchmarks.text [--quick]

The FP32 model is that of `examples.generation.make`, trained for 500 steps; a candidate has its weights rounded in groups. It answers
prompts of that model's text, and the shipped reference (`transformers`) and comparator score what it served. The detectors see answers that
are drawn again from these, at the threshold of 4,000 detectors and an answer a second: a prototype's traffic, not a server's. No real
kernel and no real server is in it. Other damage than rounding is in `benchmarks.text_damages`, real kernels in `benchmarks.text_kernels`.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.delays import PRODUCTION
from benchmarks.race import known
from benchmarks.result import Goal, finish
from examples.generation.make import make
from quantdrift.core.config.schema import Budget, Generation, Model, Provider, Reference, Runtime
from quantdrift.core.tasks import Task
from quantdrift.drift.evidence.observations import STEPS, FloatArray
from quantdrift.models.comparators.text.generation import GenerationComparator
from quantdrift.models.language.answer import Answer
from quantdrift.models.language.scoring import ANSWER, PROMPT, REQUEST, SCORES, ScoringRequest, objects
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference

_STEPS: Final = 500
_N_TOKENS: Final = 42
_PROMPT: Final = 12
_BITS: Final = (32, 8, 4, 3, 2)
_HEALTHY: Final = (32, 8, 4)
_DAMAGED: Final = 3
_GROUP: Final = {2: 16}
_USUAL_GROUP: Final = 32
_GREEDY: Final = 0.0
_HEALTHY_RUNS: Final = 20
_N_TURNS: Final = 5
_TURN: Final = 200  # tokens of a question and its answer of `_N_TOKENS`
_REPEATS: Final = 5
_PREFIX_BYTES: Final = Generation().prefix_bytes


class Sampler(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn: greedily at temperature 0."""

    temperature: float
    top_p: float = 1.0

    @property
    def name(self) -> str:
        """As the table says it."""
        return f"{self.temperature:g}" + (f" with top_p {self.top_p:g}" if self.top_p < 1 else "")


_SAMPLERS: Final = (Sampler(temperature=1.0), Sampler(temperature=0.7), Sampler(temperature=0.7, top_p=0.9))


def rounded(model: Any, bits: int) -> Any:
    """Return a copy whose matrices have so many bits, each group of weights with a scale of its own; 32: as it is."""
    copied = copy.deepcopy(model)
    if bits == 32:
        return copied
    group, most = _GROUP.get(bits, _USUAL_GROUP), 2 ** (bits - 1) - 1
    with torch.no_grad():
        for weight in copied.parameters():
            if weight.ndim == 2:
                groups = weight.reshape(-1, group)
                scale = groups.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / most
                weight.copy_(((groups / scale).round() * scale).reshape(weight.shape))
    return copied


def served(model: Any, prompts: torch.Tensor, sampler: Sampler, seed: int) -> torch.Tensor:
    """Return what a model says after each prompt, the end of a text being a token like any other: (prompts, `_N_TOKENS`)."""
    generator = torch.Generator().manual_seed(seed)
    ids = prompts
    with torch.inference_mode():
        for _ in range(_N_TOKENS):
            logits = model(input_ids=ids).logits[:, -1].double()
            if sampler.temperature == _GREEDY:
                chosen = logits.argmax(dim=1, keepdim=True)
            else:
                p = (logits / sampler.temperature).softmax(dim=1)
                ordered, order = p.sort(dim=1, descending=True)
                p = p.scatter(1, order, ordered * (ordered.cumsum(dim=1) - ordered < sampler.top_p))
                chosen = torch.multinomial(p, 1, generator=generator)
            ids = torch.cat([ids, chosen], dim=1)
    return ids[:, prompts.shape[1] :]


def compared(
    reference: ReferenceRuntime, prompts: torch.Tensor, answers: torch.Tensor, temperature: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return `unlikely`, `divergence` and `flip` of each answer, as the shadow computes them."""
    drawn_at = temperature if temperature > _GREEDY else None
    requests = [
        ScoringRequest(prompt_ids=tuple(prompt), served_ids=tuple(answer), temperature=drawn_at)
        for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True)
    ]
    answer = Answer(text="said", finish_reason="length", is_greedy=drawn_at is None, temperature=drawn_at)
    n_items, empty = len(requests), objects([""] * len(requests))
    scores = reference.run({PROMPT: empty, ANSWER: empty, REQUEST: objects(requests)})
    candidate = {SCORES: objects([None] * n_items), ANSWER: objects([answer] * n_items)}
    divergences = GenerationComparator(Generation()).compare(candidate, {SCORES: scores[SCORES]})
    unlikely = np.asarray(divergences.detail["unlikely"], dtype=np.float64)
    return unlikely, np.asarray(divergences.divergence), np.asarray(divergences.flip)


def divergence(model: Any, candidate: Any, prompts: torch.Tensor, answers: torch.Tensor) -> float:
    """Return the mean KL of the candidate from the model at the positions of these answers, nat per token."""
    ids, first = torch.cat([prompts, answers], dim=1), prompts.shape[1] - 1
    with torch.inference_mode():
        p, q = (
            side(input_ids=ids).logits[:, first:-1].double().log_softmax(dim=2) for side in (model, candidate)
        )
    return float((p.exp() * (p - q)).sum(dim=2).mean())


def first_pages(values: FloatArray, budget: float, runs: int, most: int, seed: int) -> FloatArray:
    """Return the answers until the page of each run, infinite without one: of `values` in [0, 1], drawn again and again."""
    rng = np.random.default_rng(seed)
    contestant, first = known(budget, runs), np.full(runs, np.inf)
    for begin in range(0, most, STEPS):
        evidence = contestant.follow(rng.choice(values, size=(STEPS, runs)))
        over = evidence >= PRODUCTION
        hits = np.where(over.any(axis=0), begin + over.argmax(axis=0) + 1.0, np.inf)
        first = np.minimum(first, hits)
    return first


def conversation_costs(tokenizer_directory: Path, directory: Path, repeats: int) -> tuple[float, float]:
    """Return what all turns of a conversation cost as a multiple of its last turn alone: with shared beginnings, and without.

    In processor time of the shadow's reference, the turns one after the other, as they come from the stream: the median of some repeats,
    each with a conversation of its own. The model has random weights, and is large enough that its layers take most of the time.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_directory, local_files_only=True)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    torch.manual_seed(5)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    rng = np.random.default_rng(6)
    with_sharing, without = (_opened(directory, prefix_bytes) for prefix_bytes in (_PREFIX_BYTES, 0))
    shared: list[float] = []
    unshared: list[float] = []
    try:
        for _ in range(repeats):
            said = rng.integers(2, len(tokenizer), _N_TURNS * _TURN).tolist()
            turns = [
                ScoringRequest(
                    prompt_ids=tuple(said[: end - _N_TOKENS]), served_ids=tuple(said[end - _N_TOKENS : end])
                )
                for end in range(_TURN, len(said) + 1, _TURN)
            ]
            last_s = _time(without, turns[-1:])
            shared.append(_time(with_sharing, turns) / last_s)
            unshared.append(_time(without, turns) / last_s)
    finally:
        with_sharing.close()
        without.close()
    return float(np.median(shared)), float(np.median(unshared))


def _time(reference: ReferenceRuntime, turns: Sequence[ScoringRequest]) -> float:
    """Return the processor time for scoring answers one after the other, seconds."""
    begin_s, empty = time.process_time(), objects([""])
    for turn in turns:
        reference.run({PROMPT: empty, ANSWER: empty, REQUEST: objects([turn])})
    return time.process_time() - begin_s


def main(n_answers: int, n_healthy: int, runs: int) -> None:
    """Measure, print, and end with one line of JSON."""
    torch.set_num_threads(1)
    budget = Budget()
    unlikely_budget = Model(name="m", task=Task.GENERATION).budget.signals["unlikely-tokens"]
    figures: dict[str, float | int | str | None] = {"answers": n_answers, "healthy_answers": n_healthy}
    pools: dict[tuple[int, float, float], FloatArray] = {}
    greedy: dict[int, tuple[FloatArray, FloatArray]] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = make(Path(folder), steps=_STEPS)
        model, prompts = _loaded(directory, n_answers)
        figures["conversation_cost"], figures["conversation_cost_unshared"] = conversation_costs(
            directory, Path(folder) / "conversations", _REPEATS
        )
        reference = _opened(directory)
        try:
            print(f"{'bits':>4}  {'KL':>8}  " + "  ".join(f"{sampler.name:>18}" for sampler in _SAMPLERS))
            for bits in _BITS:
                candidate = rounded(model, bits)
                row = []
                for seed, sampler in enumerate(_SAMPLERS):
                    answers = served(candidate, prompts, sampler, seed)
                    unlikely, _, _ = compared(reference, prompts, answers, sampler.temperature)
                    pools[bits, sampler.temperature, sampler.top_p] = unlikely
                    row.append(float(unlikely.mean()))
                    figures[f"unlikely_{bits}_bits_at_{sampler.name.replace(' ', '_')}"] = row[-1]
                    if not seed:
                        figures[f"kl_{bits}_bits"] = divergence(model, candidate, prompts, answers)
                said = served(candidate, prompts, Sampler(temperature=_GREEDY), 0)
                greedy[bits] = compared(reference, prompts, said, _GREEDY)[1:]
                shares = "  ".join(f"{value:18.3f}" for value in row)
                print(f"{bits:>4}  {figures[f'kl_{bits}_bits']:8.4f}  {shares}", flush=True)
        finally:
            reference.close()
    sampled = first_pages(pools[_DAMAGED, 0.7, 1.0], unlikely_budget, runs, 4096, seed=1)
    of_divergence = first_pages(
        np.minimum(greedy[_DAMAGED][0], budget.cap) / budget.cap,
        budget.divergence / budget.cap,
        runs,
        4096,
        seed=2,
    )
    of_flips = first_pages(greedy[_DAMAGED][1], budget.flip, runs, 4096, seed=3)
    n_pages = sum(
        int(np.isfinite(pages).sum())
        for pages in _healthy(pools, unlikely_budget, n_healthy // len(_HEALTHY))
    )
    figures |= {
        "sampled_answers_to_page": float(np.median(sampled)),
        "greedy_answers_to_page": float(np.median(np.minimum(of_divergence, of_flips))),
        "healthy_pages": n_pages,
    }
    finish(
        "text",
        figures,
        [
            Goal(name=name, value=float(figures[name] or 0.0), bound=bound, unit=unit)
            for name, bound, unit in (
                ("sampled_answers_to_page", 100, "answers"),
                ("greedy_answers_to_page", 20, "answers"),
                ("healthy_pages", 0, "pages"),
                ("conversation_cost", 1.3, "last turns"),
            )
        ],
    )


def _healthy(
    pools: dict[tuple[int, float, float], FloatArray], budget: float, n_answers: int
) -> Sequence[FloatArray]:
    """Return the first pages of sound candidates at temperature 1, so many answers of each."""
    return [
        first_pages(pools[bits, 1.0, 1.0], budget, _HEALTHY_RUNS, n_answers // _HEALTHY_RUNS, seed=bits)
        for bits in _HEALTHY
    ]


def _loaded(directory: Path, n_answers: int) -> tuple[Any, torch.Tensor]:
    """Return the model, and prompts from places of its own text: (answers, `_PROMPT`)."""
    model = LlamaForCausalLM.from_pretrained(directory, local_files_only=True).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    text = (Path(__file__).resolve().parents[1] / "LICENSE").read_text(encoding="utf-8")
    stream = tokenizer(text)["input_ids"]
    begins = np.random.default_rng(4).integers(0, len(stream) - _PROMPT, n_answers)
    return model, torch.tensor([stream[begin : begin + _PROMPT] for begin in begins.tolist()])


def _opened(directory: Path, prefix_bytes: int = _PREFIX_BYTES) -> ReferenceRuntime:
    reference = Reference(runtime=Runtime.TRANSFORMERS, path=str(directory))
    generation = Generation(prefix_bytes=prefix_bytes)
    model = Model(name="m", task=Task.GENERATION, references=(reference,), generation=generation)
    return open_reference(
        RuntimeRequest(model=model, reference=reference, provider=Provider.CPU, threads=1, embedding="")
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer answers")
    if parser.parse_args().quick:
        main(n_answers=50, n_healthy=12_000, runs=50)
    else:
        main(n_answers=200, n_healthy=240_000, runs=400)
