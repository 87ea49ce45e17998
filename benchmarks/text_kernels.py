"""Language models in real 8- to 2-bit kernels: divergence per token, changed tokens and changed answers, beside llama.cpp's own figures.

    pip install xllamacpp ik-llama-cpp-python
    python -m benchmarks.text_kernels [--quick]

The FP32 model is that of `quantdrift demo --text`. The program `llama-quantize` (of the fork ik_llama.cpp, whose wheel has it) writes llama.cpp's
types, and llama.cpp's own server computes the probabilities of the whole vocabulary. torchao does both for its types. `gptq` and `awq` round
as these methods do, to 4 bits in groups of 32, after text in all four languages. The texts are answers that were not trained on, in four
languages. All figures are of the positions of the answer, given the question, and against the FP32 model in PyTorch, as a shadow computes it.

`kld_over_llama_cpp` is the mean KL of the candidate from the reference in PyTorch over the mean KLD that `llama-perplexity --kl-divergence` defines:
of llama.cpp's F32 file from its quantised file, over all tokens of the vocabulary. The tool itself is in no wheel: its definition is computed here
from the same server's probabilities. A candidate behind a server lists some tokens, and the shipped comparator takes all others as one: with the
20 of the default (`top_20_over_llama_cpp`) that is a lower bound, far too low where a sound model is nearly certain of each token.
"""

import argparse
import copy
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.random import default_rng
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.result import Goal, finish
from quantdrift.core.config.schema import Generation, Model, Provider, Reference, Runtime
from quantdrift.core.tasks import Task
from quantdrift.demo.text.model import CANDIDATE, FULL, REFERENCE, TextSize, build
from quantdrift.demo.text.sentences import Language, draw
from quantdrift.models.comparators.text.generation import GenerationComparator
from quantdrift.models.language.answer import Answer
from quantdrift.models.language.scoring import (
    ANSWER,
    PROMPT,
    REQUEST,
    SCORES,
    Scores,
    ScoringRequest,
    objects,
)
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference

Logprobs = NDArray[np.float64]
_TYPES: Final = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K")
_ANSWER: Final = 4  # the token that begins an answer
_LETTER: Final = (
    70  # any token that is a whole letter; the listed probabilities are those before it was favoured
)
_TOP, _MOST = (
    20,
    1000,
)  # tokens that a side lists: the default, and the most that `models.generation.top` allows
_GROUP: Final = 32
_INTEGERS: Final = {
    bits: getattr(torch, f"int{bits}") for bits in (2, 3, 4)
}  # types that PyTorch does not declare
_HEALTHY: Final = ("Q8_0", "Q4_K_M", "Q4_0", "torchao INT8", "torchao FP8", "torchao INT4", "gptq", "awq")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A text: its tokens, and where the answer begins."""

    language: Language
    ids: list[int]
    first: int


Scorer = Callable[[Asked], Logprobs]
"""Returns the log-probabilities at the positions of an answer, given all before : (positions, vocabulary)."""


def quantise(source: Path, target: Path, kind: str) -> None:
    """Write a GGUF file in another type, by llama.cpp's program."""
    from ik_llama_cpp.quantize import find_quantize_bin  # noqa: PLC0415 - no part of the environment

    command = [str(find_quantize_bin()), str(source), str(target), kind, "1"]
    subprocess.run(command, check=True, capture_output=True)


def llama_cpp(file: Path, vocabulary: int) -> Scorer:
    """Return what scores with llama.cpp's server in this process: the whole vocabulary after each prefix, in its own kernels."""
    from xllamacpp import CommonParams, Server  # noqa: PLC0415 - no part of the environment

    params = CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.fit_params, params.verbosity = 256, 1, False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = Server(params)

    def logprobs(text: Asked) -> Logprobs:
        rows = np.full((len(text.ids) - text.first, vocabulary), -np.inf)
        for row, end in zip(rows, range(text.first, len(text.ids)), strict=True):
            answer = server.handle_completions(
                {
                    "prompt": text.ids[:end],
                    "n_predict": 1,
                    "n_probs": vocabulary,
                    "cache_prompt": True,
                    "logit_bias": [
                        [_LETTER, 1000.0]
                    ],  # says a whole letter: an end or a part of one has no list
                }
            )
            for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                row[token["id"]] = token["logprob"]
        # The listed ones are rounded: together they are 1 + 2e-6.
        return np.asarray(rows - np.logaddexp.reduce(rows, axis=1, keepdims=True))

    return logprobs


def in_torch(model: Any) -> Scorer:
    """Return what scores with a model in PyTorch."""

    def logprobs(text: Asked) -> Logprobs:
        with torch.inference_mode():
            logits = model(torch.tensor([text.ids])).logits[0, text.first - 1 : -1]
        return np.asarray(logits.double().log_softmax(-1).numpy())

    return logprobs


def torchao(model: Any, config: Any) -> Any:
    """Return a copy in one of torchao's types."""
    from torchao.quantization import quantize_  # noqa: PLC0415 - seconds

    copied = copy.deepcopy(model)
    quantize_(copied, config)
    return copied


def to_nearest(weight: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Return the weights rounded, each group with a scale of its own."""
    most = 2 ** (bits - 1) - 1
    groups = weight.reshape(-1, _GROUP)
    scale = groups.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / most
    near: torch.Tensor = (groups / scale).round().clamp(-most - 1, most) * scale
    return near.reshape(weight.shape)


def gptq(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the weights rounded column by column, the error of each made up for by those that follow (Frantar et al. 2022)."""
    w = weight.double().clone()
    hessian = inputs.double().T @ inputs.double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    out = torch.zeros_like(w)
    scale = w[:, :1]
    for column in range(w.shape[1]):
        if column % _GROUP == 0:
            scale = w[:, column : column + _GROUP].abs().amax(dim=1).clamp(min=1e-12) / 7
        out[:, column] = (w[:, column] / scale).round().clamp(-8, 7) * scale
        error = (w[:, column] - out[:, column]) / upper[column, column]
        w[:, column + 1 :] -= error[:, None] * upper[column, column + 1 :][None]
    return out.float()


def awq(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the weights rounded after the columns with large inputs were enlarged, by the best of eleven powers (Lin et al. 2023)."""
    size = inputs.abs().mean(dim=0).clamp(min=1e-6)
    wanted, best, least = inputs @ weight.T, weight, float("inf")
    for power in np.linspace(0, 1, 11):
        factor = size**power
        factor = factor / (factor.max() * factor.min()).sqrt()
        tried = to_nearest(weight * factor) / factor
        error = float(((inputs @ tried.T - wanted) ** 2).mean())
        if error < least:
            best, least = tried, error
    return best


def calibrated(
    model: Any, texts: list[Asked], method: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Any:
    """Return a copy with all linear layers rounded by a method that looks at their inputs."""
    copied = copy.deepcopy(model)
    seen: dict[str, list[torch.Tensor]] = {}
    linear = {name: part for name, part in copied.named_modules() if isinstance(part, torch.nn.Linear)}
    hooks = [
        part.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.setdefault(name, []).append(
                inputs[0].reshape(-1, inputs[0].shape[-1])
            )
        )
        for name, part in linear.items()
    ]
    with torch.no_grad():
        for text in texts:
            copied(torch.tensor([text.ids]))
        for hook in hooks:
            hook.remove()
        for name, part in linear.items():
            part.weight.copy_(method(part.weight, torch.cat(seen[name])))
    return copied


def asked(tokenizer: Any, n: int, seed: int) -> list[Asked]:
    """Return texts, the languages in turn."""
    rng = default_rng(seed)
    texts = []
    for number in range(n):
        language = list(Language)[number % len(Language)]
        said = draw(language, rng)
        ids = tokenizer(f"<q>{said.question}<a>{said.answer}</s>")["input_ids"]
        texts.append(Asked(language=language, ids=ids, first=ids.index(_ANSWER) + 1))
    return texts


def figures_of(texts: list[Asked], p: list[Logprobs], logprobs: Scorer) -> dict[str, float]:
    """Return the figures of a candidate; those of a token have the answer as their cluster, so each answer counts once in means."""
    kl, changed, languages = [], [], [text.language for text in texts]
    for text, of_reference in zip(texts, p, strict=True):
        q = logprobs(text)
        kl.append((np.exp(of_reference) * (of_reference - q)).sum(axis=1))
        changed.append(of_reference.argmax(axis=1) != q.argmax(axis=1))
    pooled, means = np.concatenate(kl), np.array([values.mean() for values in kl])
    shares = np.array([values.mean() for values in changed])
    by_language = {
        language: means[np.array([one is language for one in languages])].mean() for language in Language
    }
    return {
        "kl": float(means.mean()),
        "kl_se": float(means.std() / np.sqrt(len(means))),
        "median": float(np.median(pooled)),
        "p99": float(np.quantile(pooled, 0.99)),
        "p999": float(np.quantile(pooled, 0.999)),
        "changed_tokens": float(shares.mean()),
        "changed_answers": float((shares > 0).mean()),
        "worst_language": float(max(by_language.values())),
    }


def compared(folder: Path, texts: list[Asked], logprobs: Scorer, top: int) -> float:
    """Return the mean KL of the shipped comparator over all positions, where each side lists so many of its likeliest tokens."""
    reference = Reference(runtime=Runtime.TRANSFORMERS, path=str(folder))
    model = Model(name="m", task=Task.GENERATION, generation=Generation(top=top), references=(reference,))
    runtime = open_reference(
        RuntimeRequest(model=model, reference=reference, provider=Provider.CPU, threads=1, embedding="")
    )
    try:
        requests = [
            ScoringRequest(prompt_ids=tuple(text.ids[: text.first]), served_ids=tuple(text.ids[text.first :]))
            for text in texts
        ]
        empty = objects([""] * len(requests))
        scores = runtime.run({PROMPT: empty, ANSWER: empty, REQUEST: objects(requests)})[SCORES]
    finally:
        runtime.close()
    served = []
    for text, of_reference in zip(texts, scores.tolist(), strict=True):
        q = logprobs(text)
        listed = np.argsort(-q, axis=1)[:, :top]
        served.append(
            Scores(
                tokens=of_reference.tokens,
                ids=of_reference.ids,
                logprobs=q[np.arange(len(q)), of_reference.ids],
                ranks=np.full(len(q), np.nan),
                top_tokens=tuple(tuple(b"%d" % one for one in row) for row in listed.tolist()),
                top_ids=listed,
                top_logprobs=np.take_along_axis(q, listed, axis=1),
            )
        )
    candidate = {
        SCORES: objects(served),
        ANSWER: objects([Answer(text="said", finish_reason="stop")] * len(texts)),
    }
    kl = np.asarray(GenerationComparator(Generation()).compare(candidate, {SCORES: scores}).divergence)
    lengths = np.array([len(text.ids) - text.first for text in texts])
    return float((kl * lengths).sum() / lengths.sum())


def kld(texts: list[Asked], base: Scorer, logprobs: Scorer) -> float:
    """Return llama.cpp's mean KLD of the same positions: of its own F32 file."""
    values = []
    for text in texts:
        p, q = (side(text) for side in (base, logprobs))
        values.append((np.exp(p) * (p - q)).sum(axis=1))
    return float(np.concatenate(values).mean())


def _beside_llama_cpp(
    directory: Path, texts: list[Asked], sides: tuple[Scorer, Scorer, Scorer], name: str
) -> dict[str, float]:
    """Return mean KLs of a quarter of the texts over llama.cpp's own; `sides` are the reference, llama.cpp's F32 file and the candidate."""
    reference, base, candidate = sides
    few = texts[: len(texts) // 4]
    theirs = kld(few, base, candidate)
    most, usual = (compared(directory / REFERENCE, few, candidate, top) for top in (_MOST, _TOP))
    return {
        f"kld_llama_cpp{name}": theirs,
        f"kld_over_llama_cpp{name}": kld(few, reference, candidate) / theirs,
        f"top_1000_over_llama_cpp{name}": most / theirs,
        f"top_20_over_llama_cpp{name}": usual / theirs,
    }


def main(n_answers: int, size: TextSize, made: Path | None) -> None:
    """Measure, print, and end with one line of JSON."""
    if missing := [name for name in ("ik_llama_cpp", "xllamacpp") if find_spec(name) is None]:
        raise SystemExit(
            f"{' and '.join(missing)} cannot be imported: pip install xllamacpp ik-llama-cpp-python"
        )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        directory = made or Path(temporary)
        if made is None:
            build(directory, 2, lambda _: None, size)
        model = LlamaForCausalLM.from_pretrained(directory / REFERENCE, local_files_only=True).eval()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / REFERENCE, local_files_only=True)
        texts, calibration = asked(tokenizer, n_answers, 11), asked(tokenizer, 128, 12)
        p = [in_torch(model)(text) for text in texts]
        rows: dict[str, dict[str, float]] = {}

        def measure(name: str, logprobs: Scorer) -> None:
            rows[name] = row = figures_of(texts, p, logprobs)
            print(
                f"{name:<24}{row['kl']:9.4f}{row['median']:11.6f}{row['p99']:9.3f}{row['p999']:9.3f}"
                f"{row['changed_tokens']:10.2%}{row['changed_answers']:10.1%}{row['worst_language']:10.4f}",
                flush=True,
            )

        print(
            f"{'':<24}{'mean KL':>9}{'median':>11}{'99 %':>9}{'99.9 %':>9}{'tokens':>10}{'answers':>10}{'worst':>10}"
        )
        figures: dict[str, float | int | str | None] = {"answers": n_answers}
        base = llama_cpp(directory / FULL, len(tokenizer))
        measure("llama.cpp F32", base)
        for name in _TYPES:
            file = Path(temporary) / f"{name}.gguf"
            quantise(directory / FULL, file, name)
            scorer = llama_cpp(file, len(tokenizer))
            measure(name, scorer)
            if name == "Q4_0":
                figures |= _beside_llama_cpp(directory, texts, (in_torch(model), base, scorer), "")
        damaged = llama_cpp(directory / CANDIDATE, len(tokenizer))
        measure("Q4_0, German damaged", damaged)
        figures |= _beside_llama_cpp(directory, texts, (in_torch(model), base, damaged), "_damaged")
        for name, candidate in _in_torch(model, calibration):
            measure(name, in_torch(candidate))
    figures |= {
        f"{name}_{what}".replace(" ", "_"): value for name, row in rows.items() for what, value in row.items()
    }
    ratio = float(figures["kld_over_llama_cpp"] or 0.0)
    healthy = max(rows[name]["worst_language"] for name in _HEALTHY if name in rows)
    finish(
        "text_kernels",
        figures,
        [
            Goal(name="kld_over_llama_cpp", value=abs(ratio - 1.0), bound=0.01, unit="{relative}"),
            Goal(name="worst_healthy_kl", value=healthy, bound=0.1, unit="nat"),
        ],
    )


def _in_torch(model: Any, calibration: list[Asked]) -> Iterator[tuple[str, Any]]:
    from torchao.quantization import (  # noqa: PLC0415 - seconds
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    yield "torchao INT8", torchao(model, Int8WeightOnlyConfig())
    yield "torchao FP8", torchao(model, Float8WeightOnlyConfig())
    yield (
        "torchao INT4",
        torchao(model, IntxWeightOnlyConfig(weight_dtype=_INTEGERS[4], granularity=PerGroup(_GROUP))),
    )
    yield "gptq", calibrated(model, calibration, gptq)
    yield "awq", calibrated(model, calibration, awq)
    yield (
        "gptq, no German",
        calibrated(model, [text for text in calibration if text.language is not Language.DE], gptq),
    )
    yield (
        "torchao INT3",
        torchao(model, IntxWeightOnlyConfig(weight_dtype=_INTEGERS[3], granularity=PerGroup(_GROUP))),
    )
    yield (
        "torchao INT2",
        torchao(model, IntxWeightOnlyConfig(weight_dtype=_INTEGERS[2], granularity=PerGroup(_GROUP))),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps and answers")
    parser.add_argument("--model", type=Path, help="a directory that this has written before")
    options = parser.parse_args()
    if options.quick:
        main(16, TextSize(steps=60), options.model)
    else:
        main(64, TextSize(), options.model)
