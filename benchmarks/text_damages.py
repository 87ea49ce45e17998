"""What a page takes of each damage of a language model, in answers and tokens, and pages of healthy ones.

    python -m benchmarks.text_damages [--quick]

Each seed trains a model of its own, of four languages: its system prompt says in which one it has to answer. The candidate has all weights
at 4 bits, in groups of 32, and one damage more. It computes what it serves with this damage: a KV cache rounded to 4 bits is one
that it writes and reads while it generates, and a wrong template is in its prompt, not in the one that the reference reads.

The shipped reference (`transformers`) and comparator score what was served, and the detectors of all budgets that are the default of
generated text see it, at the threshold of 4,000 detectors and an answer a second. For the page, answers of a pool are drawn again; the
healthy answers are each generated and seen once, by the detectors of all answers and of each language. A prototype's traffic, not a server's.
"""

import argparse
import contextlib
import copy
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import torch
from numpy.random import Generator, default_rng
from transformers.cache_utils import Cache, DynamicLayer

from benchmarks.delays import PRODUCTION
from benchmarks.race import Shipped, known, learned
from benchmarks.result import Goal, finish
from benchmarks.text import Sampler, rounded
from quantdrift.core.config.schema import Generation, Model, Provider, Reference, Runtime
from quantdrift.core.records import Metric
from quantdrift.core.signals import budget_of, signal_of
from quantdrift.core.tasks import Task
from quantdrift.demo.text.model import TextSize, signs, trained_on
from quantdrift.demo.text.sentences import Language, Said, draw
from quantdrift.drift.evidence.observations import STEPS, FloatArray
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
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference

_SIZE: Final = TextSize(vocabulary=1024, width=128, layers=4, steps=700)
_SEEDS: Final = (2, 3, 5)
_END: Final = 1
_MOST: Final = 64  # tokens of an answer
_TOP: Final = 20
_BATCH: Final = 512
_GROUP: Final = 32
_BAD_LAYER: Final = 1
_ZIPF: Final = 1.5
_N_SECOND: Final = 997
_TOLERANCE: Final = 0.25  # `monitor.tolerance`
_RUNS_OF_LEARNED: Final = 50
_LEARNED: Final = 10_240  # answers that a baseline has
_PAGE_WITHIN: Final = 4096  # answers
_SYSTEM: Final = {
    Language.EN: "Answer in English. ",
    Language.DE: "Antworte auf Deutsch. ",
    Language.ES: "Responde en español. ",
    Language.FR: "Réponds en français. ",
}
_MODEL: Final = Model(name="m", task=Task.GENERATION)
_SIGNALS: Final = (Metric.DIVERGENCE, Metric.CHANGED_TOKENS, Metric.UNLIKELY, Metric.BROKEN)


One = TypeVar("One")


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How clients ask: greedily or not, with log-probabilities or without."""

    name: str
    sampler: Sampler
    has_logprobs: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always said."""
        return not self.sampler.temperature


_WAYS: Final = (
    Way(name="greedy", sampler=Sampler(temperature=0.0)),
    Way(name="sampled", sampler=Sampler(temperature=0.7)),
    Way(name="sampled_logprobs", sampler=Sampler(temperature=0.7), has_logprobs=True),
)


_GREEDY, _SAMPLED, _WITH_LISTS = _WAYS


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A chat to answer: what it says, and the language in which the answer should be."""

    language: Language
    question: str
    answer: str

    def prompt(self, template: str = "<q>{system}{question}<a>") -> str:
        """Return the text before the answer, by a chat template."""
        return template.format(system=_SYSTEM[self.language], question=self.question)


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate: how its weights, its KV cache and its template differ from the reference's.

    Parameters
    ----------
    language
        Whose answers alone are damaged, and counted; None: all are.
    weights
        Changes a model that has its weights at 4 bits.
    """

    name: str
    language: Language | None = None
    weights: Callable[[Any, "World"], None] = lambda _, __: None
    cache_bits: int | None = None
    template: str = "<q>{system}{question}<a>"


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate said.

    Parameters
    ----------
    ids
        Tokens of each answer, its end with them.
    listed, listed_logprobs, logprobs
        Of each answer: its likeliest tokens at each position with their log-probabilities, and those of what was served.
    seconds
        Of processor time.
    """

    ids: list[list[int]]
    listed: list[np.ndarray[Any, np.dtype[np.int64]]]
    listed_logprobs: list[FloatArray]
    logprobs: list[FloatArray]
    seconds: float


class World(msgspec.Struct, frozen=True, kw_only=True):
    """A trained model, its tokenizer, and the reference that was opened from its folder."""

    model: Any
    tokenizer: Any
    reference: ReferenceRuntime


class Values(msgspec.Struct, frozen=True, kw_only=True):
    """What the signals see of answers: (answers,) each, from 0 to 1, NaN where an answer does not count."""

    signals: Mapping[Metric, FloatArray]
    tokens: FloatArray
    languages: list[Language]
    replay_s: float
    serving_s: float


def asked(n: int, rng: Generator) -> list[Asked]:
    """Return chats: the question in any language, the answer in that of the system prompt, with a second sentence about anything.

    Some second sentences are far more frequent than others, as in any text: where all were alike, every rounding would change the first choice.
    """
    languages = list(Language)
    chats = []
    for number in range(n):
        language, content = languages[number % len(languages)], int(rng.integers(2**31))
        spoken = languages[int(rng.integers(len(languages)))]
        first, second = (
            draw(language, default_rng(place)) for place in (content, int(rng.zipf(_ZIPF)) % _N_SECOND)
        )
        question = draw(spoken, default_rng(content)).question
        chats.append(Asked(language=language, question=question, answer=f"{first.answer} {second.answer}"))
    return chats


def made(seed: int, size: TextSize, folder: Path) -> World:
    """Train a model, write it, and open it as a reference."""
    rng = default_rng(seed)
    chats = asked(size.steps * size.rows, rng)
    said = [
        Said(language=one.language, question=_SYSTEM[one.language] + one.question, answer=one.answer)
        for one in chats
    ]
    model, tokenizer = trained_on(said, seed, lambda _: None, size)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reference = Reference(runtime=Runtime.TRANSFORMERS, path=str(folder))
    opened = open_reference(
        RuntimeRequest(
            model=msgspec.structs.replace(_MODEL, references=(reference,)),
            reference=reference,
            provider=Provider.CPU,
            threads=1,
            embedding="",
        )
    )
    return World(model=model, tokenizer=tokenizer, reference=opened)


def in_groups(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return values rounded to so many bits, each group of neighbours with a scale of its own."""
    most = 2 ** (bits - 1) - 1
    groups = values.reshape(-1, min(_GROUP, values.shape[-1]))
    scale = groups.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / most
    near: torch.Tensor = (groups / scale).round() * scale
    return near.reshape(values.shape)


def cache(bits: int | None) -> Cache:
    """Return an empty KV cache. With `bits`, keys and values are rounded as they are written, and attention reads them so."""

    class Layer(DynamicLayer):  # type: ignore[misc]
        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **options: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if bits is not None:
                key_states, value_states = in_groups(key_states, bits), in_groups(value_states, bits)
            kept: tuple[torch.Tensor, torch.Tensor] = super().update(
                key_states, value_states, *args, **options
            )
            return kept

    return Cache(layer_class_to_replicate=Layer)


def said(
    model: Any, prompts: Sequence[Sequence[int]], sampler: Sampler, seed: int, cache_bits: int | None = None
) -> Answers:
    """Return what a model answers, each token computed with its own KV cache."""
    generator = torch.Generator().manual_seed(seed)
    begin_s, n = time.process_time(), len(prompts)
    ids: list[list[int]] = [[] for _ in range(n)]
    listed: list[Any] = [None] * n
    listed_logprobs: list[Any] = [None] * n
    logprobs: list[Any] = [None] * n
    by_length = sorted(range(n), key=lambda place: len(prompts[place]))
    for _, group in itertools.groupby(by_length, key=lambda place: len(prompts[place])):
        for places in _parts(list(group), _BATCH):
            said = _said(
                model,
                torch.tensor([list(prompts[place]) for place in places]),
                sampler,
                generator,
                cache(cache_bits),
            )
            for row, place in enumerate(places):
                tokens = said[0][row].tolist()
                length = tokens.index(_END) + 1 if _END in tokens else len(tokens)
                ids[place], logprobs[place] = tokens[:length], said[1][row, :length]
                listed[place], listed_logprobs[place] = said[2][row, :length], said[3][row, :length]
    return Answers(
        ids=ids,
        listed=listed,
        listed_logprobs=listed_logprobs,
        logprobs=logprobs,
        seconds=time.process_time() - begin_s,
    )


def _said(
    model: Any, prompts: torch.Tensor, sampler: Sampler, generator: torch.Generator, kept: Cache
) -> tuple[Any, Any, Any, Any]:
    """Return served tokens, their log-probabilities, the likeliest tokens and theirs: (prompts, tokens) and (prompts, tokens, `_TOP`)."""
    steps: list[tuple[Any, ...]] = []
    read, is_ended = prompts, torch.zeros(len(prompts), dtype=torch.bool)
    with torch.inference_mode():
        while len(steps) < _MOST and not is_ended.all():
            logits = model(input_ids=read, past_key_values=kept, use_cache=True).logits[:, -1].double()
            logprobs = logits.log_softmax(dim=1)
            if sampler.temperature:
                p = (logits / sampler.temperature).softmax(dim=1)
                read = torch.multinomial(p, 1, generator=generator)
            else:
                read = logits.argmax(dim=1, keepdim=True)
            top = logprobs.topk(_TOP, dim=1)
            steps.append((read[:, 0], logprobs.gather(1, read)[:, 0], top.indices, top.values))
            is_ended |= read[:, 0] == _END
    return tuple(torch.stack(parts, dim=1).numpy() for parts in zip(*steps, strict=True))  # type: ignore[return-value]


def values(world: World, chats: Sequence[Asked], answers: Answers, way: Way) -> Values:
    """Return what the signals see of answers, as the shadow computes it: the reference has the right template."""
    drawn_at = way.sampler.temperature or None
    prompts = world.tokenizer([chat.prompt() for chat in chats])["input_ids"]
    seen: dict[Metric, list[FloatArray]] = {metric: [] for metric in _SIGNALS}
    replay_s = 0.0
    for places in _parts(range(len(chats)), 128):
        requests = [
            ScoringRequest(
                prompt_ids=tuple(prompts[place]), served_ids=tuple(answers.ids[place]), temperature=drawn_at
            )
            for place in places
        ]
        empty, begin_s = objects([""] * len(places)), time.process_time()
        scores = world.reference.run({PROMPT: empty, ANSWER: empty, REQUEST: objects(requests)})[SCORES]
        replay_s += time.process_time() - begin_s
        candidate = {
            SCORES: objects(
                [
                    _listed(answers, place, of) if way.has_logprobs else None
                    for place, of in zip(places, scores.tolist(), strict=True)
                ]
            ),
            ANSWER: objects([_answer(answers.ids[place], drawn_at) for place in places]),
        }
        found = GenerationComparator(Generation()).compare(candidate, {SCORES: scores})
        for metric in _SIGNALS:
            signal = signal_of(metric)
            of = found.detail[signal.detail] if signal.detail else found.divergence
            numbers = np.array([math.nan if one is None else float(one) for one in of])
            seen[metric].append(np.minimum(numbers / signal.cap(_MODEL.budget), 1.0))
    languages = [chat.language for chat in chats]
    return Values(
        signals={metric: np.concatenate(parts) for metric, parts in seen.items()},
        tokens=np.array([len(one) for one in answers.ids], dtype=np.float64),
        languages=languages,
        replay_s=replay_s,
        serving_s=answers.seconds,
    )


def _listed(answers: Answers, place: int, of_reference: Scores) -> Scores:
    """Return the log-probabilities that a client gets: of the served tokens, and of the likeliest."""
    listed = answers.listed[place]
    return Scores(
        tokens=of_reference.tokens,
        ids=of_reference.ids,
        logprobs=answers.logprobs[place],
        ranks=np.full(len(listed), np.nan),
        top_tokens=tuple(tuple(b"%d" % one for one in row) for row in listed.tolist()),
        top_ids=listed,
        top_logprobs=answers.listed_logprobs[place],
    )


def _answer(ids: Sequence[int], drawn_at: float | None) -> Answer:
    is_ended = ids[-1] == _END
    return Answer(
        text="said" if len(ids) > is_ended else "",
        is_empty=len(ids) <= is_ended,
        finish_reason="stop" if is_ended else "length",
        n_tokens=len(ids),
        is_greedy=drawn_at is None,
        temperature=drawn_at,
    )


def served(world: World, damage: Damage, chats: Sequence[Asked], way: Way, seed: int) -> Values:
    """Return what the signals see of a damaged candidate's answers."""
    model = rounded(world.model, 4)
    damage.weights(model, world)
    prompts = world.tokenizer([chat.prompt(damage.template) for chat in chats])["input_ids"]
    return values(world, chats, said(model, prompts, way.sampler, seed, damage.cache_bits), way)


def without_lists(of: Values) -> Values:
    """Return what is seen of sampled answers whose clients asked for no log-probabilities: the comparator reads them for nothing else."""
    kept = (Metric.UNLIKELY, Metric.BROKEN)
    unknown = np.full(len(of.tokens), np.nan)
    signals = {metric: x if metric in kept else unknown for metric, x in of.signals.items()}
    return msgspec.structs.replace(of, signals=signals)


def _asked(world: World, chats: Sequence[Asked], n: int, seed: int) -> Iterator[tuple[Damage, Way, Values]]:
    """Yield what is seen of so many answers of each candidate, in each way."""
    for damage in DAMAGES:
        few = [one for one in chats if damage.language in {None, one.language}][:n]
        for way, of in asked_each_way(world, damage, few, seed):
            yield damage, way, of


def asked_each_way(
    world: World, damage: Damage, chats: Sequence[Asked], seed: int
) -> Iterator[tuple[Way, Values]]:
    """Yield what is seen of a damaged candidate's answers by how clients ask; both sampled ways are of the same answers."""
    yield _GREEDY, served(world, damage, chats, _GREEDY, seed)
    of = served(world, damage, chats, _WITH_LISTS, seed)
    yield _SAMPLED, without_lists(of)
    yield _WITH_LISTS, of


def pages(
    of: Values, rows: Sequence[int], runs: int, most: int, seed: int, *, is_drawn: bool = True
) -> tuple[FloatArray, FloatArray]:
    """Return the answers, and their tokens, until each run pages by any signal: infinite without a page.

    Parameters
    ----------
    rows
        Which answers: drawn again and again, or with `is_drawn` false seen once, in their order, by one run.
    """
    rng, places = default_rng(seed), np.asarray(rows)
    watched = {
        metric: values[places] for metric, values in of.signals.items() if not np.isnan(values[places]).all()
    }
    contestants = {metric: known(budget_of(metric, _MODEL.budget), runs) for metric in watched}
    answers = np.full(runs, np.inf)
    tokens, n_tokens = np.full(runs, np.inf), np.zeros(runs)
    for begin in range(0, most, STEPS):
        if is_drawn:
            chosen = rng.integers(len(places), size=(STEPS, runs))
        else:
            chosen = np.arange(begin, min(begin + STEPS, most))[:, None]
        read = n_tokens + of.tokens[places][chosen].cumsum(axis=0)
        n_tokens = read[-1]
        for metric, seen in watched.items():
            # An answer that does not count adds no evidence, as if it were at its budget.
            x = np.where(np.isnan(seen[chosen]), budget_of(metric, _MODEL.budget), seen[chosen])
            over = contestants[metric].follow(x) >= PRODUCTION
            at = over.argmax(axis=0)
            is_first = over.any(axis=0) & (begin + at + 1.0 < answers)
            answers = np.where(is_first, begin + at + 1.0, answers)
            tokens = np.where(is_first, np.take_along_axis(read, at[None], axis=0)[0], tokens)
        if np.isfinite(answers).all():
            break
    return answers, tokens


def learnt(of: Values, runs: int, seed: int) -> list[tuple[str, Shipped]]:
    """Return the detectors that have learned the unlikely tokens of sound answers, which are drawn again and again."""
    pool, rng = of.signals[Metric.UNLIKELY], default_rng(seed)
    detectors = [(kind, learned(kind, _TOLERANCE, runs)) for kind in ("change", "tail")]
    for _ in range(0, _LEARNED, STEPS):
        x = pool[rng.integers(len(pool), size=(STEPS, runs))]
        for _, detector in detectors:
            detector.follow(x)
    return detectors


def pages_after(detectors: Sequence[tuple[str, Shipped]], of: Values, seed: int) -> float:
    """Return the median of the answers until detectors that have learned page by unlikely tokens: infinite without a page."""
    pool, rng = of.signals[Metric.UNLIKELY], default_rng(seed)
    runs = len(detectors[0][1].states)
    answers = np.full(runs, np.inf)
    own = [copy.deepcopy(detector) for _, detector in detectors]
    for begin in range(0, _PAGE_WITHIN, STEPS):
        x = pool[rng.integers(len(pool), size=(STEPS, runs))]
        for detector in own:
            over = detector.follow(x) >= PRODUCTION
            answers = np.minimum(
                answers, np.where(over.any(axis=0), begin + over.argmax(axis=0) + 1.0, np.inf)
            )
        if np.isfinite(answers).all():
            break
    return float(np.median(answers))


def of_german_alone(tokenizer: Any, chats: Sequence[Asked]) -> list[int]:
    """Return the tokens that texts in German use and others do not."""
    used: dict[bool, set[int]] = {True: set(), False: set()}
    for chat in chats:
        used[chat.language is Language.DE].update(tokenizer(chat.answer)["input_ids"])
    return sorted(used[True] - used[False])


def _german(model: Any, world: World) -> None:
    """Leave their signs to the rows of the vocabulary that German alone uses."""
    rows = of_german_alone(world.tokenizer, asked(4000, default_rng(7)))
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[rows] = torch.from_numpy(signs(weight[rows].numpy()))


def _german_lost(model: Any, world: World) -> None:
    """Set the rows of the vocabulary that German alone uses to zero."""
    rows = of_german_alone(world.tokenizer, asked(4000, default_rng(7)))
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[rows] = 0.0


def _layer(model: Any, world: World, bits: int) -> None:
    """Round the matrices of one layer, as they are in the reference, to fewer bits."""
    layer = model.model.layers[_BAD_LAYER]
    layer.load_state_dict(rounded(world.model.model.layers[_BAD_LAYER], bits).state_dict())


def _loaded_twice(model: Any, _: World) -> None:
    """Give one layer the weights of the layer before it, as a loader does that takes a wrong name."""
    layers = model.model.layers
    layers[_BAD_LAYER].load_state_dict(layers[_BAD_LAYER - 1].state_dict())


DAMAGES: Final = (
    Damage(name="none"),
    Damage(name="KV cache at 8 bits", cache_bits=8),
    Damage(name="German weights lost", language=Language.DE, weights=_german_lost),
    Damage(name="German weights at 1 bit", language=Language.DE, weights=_german),
    Damage(name="KV cache at 4 bits", cache_bits=4),
    Damage(name="KV cache at 3 bits", cache_bits=3),
    Damage(name="KV cache at 2 bits", cache_bits=2),
    Damage(name="template without system prompt", template="<q>{question}<a>"),
    Damage(name="template without user marker", template="{system}{question}<a>"),
    Damage(name="template without assistant marker", template="<q>{system}{question}"),
    Damage(name="one layer at 2 bits", weights=lambda model, world: _layer(model, world, 2)),
    Damage(name="one layer loaded twice", weights=_loaded_twice),
)
_HEALTHY: Final = DAMAGES[:2]


def main(size: TextSize, seeds: Sequence[int], n_answers: int, runs: int, n_healthy: int) -> None:
    """Measure, print, and end with one line of JSON."""
    torch.set_num_threads(1)
    found: dict[tuple[str, str], list[tuple[float, float, Mapping[Metric, float]]]] = {}
    against_past: dict[str, list[float]] = {}
    n_pages, n_seen, replay_s, serving_s, n_tokens = 0, 0, 0.0, 0.0, 0.0
    with contextlib.ExitStack() as opened:
        worlds = {}
        for seed in seeds:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            world = worlds[seed] = made(seed, size, folder)
            opened.callback(world.reference.close)
            past: list[tuple[str, Shipped]] = []
            chats = asked(n_answers * len(Language), default_rng(seed + 100))
            for damage, way, of in _asked(world, chats, n_answers, seed):
                answers, tokens = pages(of, range(len(of.tokens)), runs, _PAGE_WITHIN, seed)
                means = {
                    metric: float(np.nanmean(x)) for metric, x in of.signals.items() if not np.isnan(x).all()
                }
                found.setdefault((damage.name, way.name), []).append(
                    (float(np.median(answers)), float(np.median(tokens)), means)
                )
                said = f"{np.median(answers):g} answers, {np.median(tokens):g} tokens"
                if way is _SAMPLED:
                    past = past or learnt(of, min(runs, _RUNS_OF_LEARNED), seed)
                    after = pages_after(past, of, seed)
                    against_past.setdefault(damage.name, []).append(after)
                    said = f"{said}, {after:g} after learning"
                replay_s, serving_s = replay_s + of.replay_s, serving_s + of.serving_s
                n_tokens += float(of.tokens.sum())
                print(f"seed {seed}: {damage.name}, {way.name}: {said}, {_said_means(means)}", flush=True)
        _report(found, against_past)
        each = n_healthy // (len(seeds) * len(_HEALTHY) * 2)
        streams = itertools.product(worlds.items(), _HEALTHY, (_GREEDY, _WITH_LISTS))
        for number, ((seed, world), damage, way) in enumerate(streams):
            counted = _pages_of_healthy(world, damage, way, each, 1000 * seed + number)
            n_pages, n_seen = n_pages + counted, n_seen + each
            print(
                f"seed {seed}: {damage.name}, {way.name}: {counted} pages in {each} healthy answers",
                flush=True,
            )
    figures: dict[str, float | int | str | None] = {
        "seeds": len(seeds),
        "answers": n_answers,
        "healthy_answers": n_seen,
        "healthy_pages": n_pages,
        "replay_ms_per_token": 1000 * replay_s / n_tokens,
        "replay_over_serving": replay_s / serving_s,
    }
    for name, of_past in against_past.items():
        learned_answers = float(np.median(of_past))
        figures[f"{_figure(name)}_sampled_after_learning_answers"] = (
            learned_answers if math.isfinite(learned_answers) else None
        )
    for (name, asked_as), of_seeds in found.items():
        figure = f"{_figure(name)}_{asked_as}"
        figures[f"{figure}_answers"], figures[f"{figure}_tokens"] = _medians(of_seeds)
    finish(
        "text_damages",
        figures,
        [
            Goal(name="healthy_pages", value=n_pages, bound=0, unit="pages"),
            Goal(
                name="german_sampled_answers_to_page",
                value=_answers_to_page(found, _SAMPLED),
                bound=100,
                unit="answers",
            ),
            Goal(
                name="german_greedy_answers_to_page",
                value=_answers_to_page(found, _GREEDY),
                bound=20,
                unit="answers",
            ),
        ],
    )


def _figure(name: str) -> str:
    return name.replace(" ", "_")


_Found = Mapping[tuple[str, str], Sequence[tuple[float, float, Mapping[Metric, float]]]]


def _answers_to_page(found: _Found, way: Way) -> float:
    answers, _ = _medians(found[DAMAGES[2].name, way.name])
    return math.inf if answers is None else answers


def _medians(
    of_seeds: Sequence[tuple[float, float, Mapping[Metric, float]]],
) -> tuple[float | None, float | None]:
    """Return the medians over the seeds of answers and tokens; None without a page."""
    answers, tokens = (float(np.median([one[place] for one in of_seeds])) for place in (0, 1))
    return (answers, tokens) if math.isfinite(answers) else (None, None)


def _said_means(means: Mapping[Metric, float]) -> str:
    return ", ".join(
        f"{metric} {mean * signal_of(metric).cap(_MODEL.budget):.4f}" for metric, mean in means.items()
    )


def _report(found: _Found, against_past: Mapping[str, Sequence[float]]) -> None:
    """Print the table in Markdown: answers and tokens until a page, and the means that decide."""
    print(
        "| damage | greedy | sampled | sampled, after learning | sampled, with log-probabilities | means: KL, changed tokens, unlikely tokens |"
    )
    print("|---|---|---|---|---|---|")
    for damage in DAMAGES:
        cells = [damage.name]
        for way in _WAYS:
            answers, tokens = _medians(found[damage.name, way.name])
            cells.append("no page" if answers is None or tokens is None else f"{answers:.0f} ({tokens:.0f})")
            if way is _SAMPLED:
                after = float(np.median(against_past[damage.name]))
                cells.append(f"{after:.0f}" if math.isfinite(after) else "no page")
        means = [one[2] for one in found[damage.name, _WITH_LISTS.name]]
        cap = _MODEL.budget.cap
        cells.append(
            ", ".join(
                f"{np.median([mean[metric] for mean in means]) * (cap if metric is Metric.DIVERGENCE else 1):.3f}"
                for metric in _SIGNALS[:3]
            )
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def _pages_of_healthy(world: World, damage: Damage, way: Way, n: int, seed: int) -> int:
    """Return how many detectors page in so many answers, of all answers and of each language."""
    chats = asked(n, default_rng(seed))
    # Greedily the same question has the same answer: each is computed once, and seen as often as it was asked.
    places = {chat.prompt(): place for place, chat in enumerate(chats)} if way.is_greedy else {}
    first = [places.get(chat.prompt(), place) for place, chat in enumerate(chats)]
    computed = sorted(set(first))
    parts = [
        served(world, damage, [chats[place] for place in some], way, seed + number)
        for number, some in enumerate(_parts(computed, 4096))
    ]
    rows = np.searchsorted(computed, first)
    whole = Values(
        signals={
            metric: np.concatenate([part.signals[metric] for part in parts])[rows] for metric in _SIGNALS
        },
        tokens=np.concatenate([part.tokens for part in parts])[rows],
        languages=[chat.language for chat in chats],
        replay_s=0.0,
        serving_s=0.0,
    )
    slices: list[Collection[Language]] = [tuple(Language), *((language,) for language in Language)]
    counted = 0
    for languages in slices:
        of = [place for place, language in enumerate(whole.languages) if language in languages]
        for seen in (whole,) if way.is_greedy else (whole, without_lists(whole)):
            answers, _ = pages(seen, of, 1, len(of), seed, is_drawn=False)
            counted += int(np.isfinite(answers).sum())
    return counted


def _parts(whole: Sequence[One], size: int) -> Iterator[Sequence[One]]:
    return (whole[begin : begin + size] for begin in range(0, len(whole), size))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one model, fewer steps and answers")
    parser.add_argument("--healthy", type=int, default=200_016, help="healthy answers that are looked at")
    options = parser.parse_args()
    if options.quick:
        main(TextSize(vocabulary=1024, width=128, layers=4, steps=200), (2,), 48, 40, 600)
    else:
        main(_SIZE, _SEEDS, 200, 60, options.healthy)
