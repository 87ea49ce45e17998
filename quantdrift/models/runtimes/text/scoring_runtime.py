"""The runtime that scores served tokens with a language model."""

import contextlib
import math
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import partial
from typing import Final, Protocol

import msgspec
import numpy as np

from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.config.schema import Medium
from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.models.language.free_running_answer import FreeAnswer, FreeAnswerOutcome, FreeAnswerRequest
from quantdrift.models.language.media import media_problem
from quantdrift.models.language.scoring import (
    _OBJECT,
    ANSWER,
    EMBEDDING,
    NO_SCORES,
    PROMPT,
    REQUEST,
    SCORES,
    Scores,
    ScoringRequest,
    TokenRow,
    objects,
    replay_error,
    tokenizer_error,
)
from quantdrift.models.runtimes.embedding import check_spec
from quantdrift.models.runtimes.protocol import Artefact, Provenance
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.tensors.arrays import Array, TensorSpec

_CLOCK: Final = SystemClock()
_COMPARED: Final = 64  # tokens at either end of an answer whose text is compared with its spelling
_LEAST_COMPARED: Final = 8  # with fewer tokens or letters nothing is said
_MOST_LETTERS: Final = 256
_SAME: Final = 0.8  # share of the letters that agree: from here on the vocabulary is the same
_OTHER: Final = 0.5  # below, it is another one


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a free-running answer, and what returns the tokens of its prompt."""

    request: ScoringRequest
    answer_request: FreeAnswerRequest
    prompt: Callable[[], tuple[int, ...]]


class LanguageModel(Protocol):
    """A language model with its tokenizer.

    Every method raises `QuarantineError`, reason `replay`, if it cannot compute a request, and `RetryError` if its server is
    unreachable.
    """

    @property
    def artefact(self) -> Artefact:
        """The files that it was loaded from."""
        ...

    @property
    def provenance(self) -> Provenance:
        """The software and the device that run it."""
        ...

    @property
    def longest(self) -> int | None:
        """Most tokens of prompt and answer together; None if unknown."""
        ...

    @property
    def width(self) -> int:
        """Length of the vector of a prompt; 0: the model shows none."""
        ...

    @property
    def media(self) -> tuple[Medium, ...]:
        """What it reads besides text."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer; empty if unknown."""
        ...

    def chat_ids(self, request: ScoringRequest) -> tuple[int, ...]:
        """Return the tokens of a chat, up to where the answer begins."""
        ...

    def text_ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the tokens of a text."""
        ...

    def spelling(self, ids: Sequence[int]) -> str | None:
        """Return the text of tokens; None if unknown."""
        ...

    def score(self, rows: Sequence[TokenRow]) -> list[Scores]:
        """Return the scores of each row's answer, with `ends` and `ends_upper` at each position."""
        ...

    def answer(
        self,
        request: ScoringRequest,
        answer_request: FreeAnswerRequest,
        prompt: Callable[[], tuple[int, ...]],
        within_s: float,
    ) -> FreeAnswer:
        """Return a free-running answer to the tokens that `prompt` returns; it is late if it takes longer than `within_s`."""
        ...

    def answers(self, questions: Sequence[Question], within_s: float) -> list[FreeAnswer] | None:
        """Return the answers to questions with the same options; None: ask for one at a time."""
        ...

    def close(self) -> None:
        """Free memory, device and connections."""
        ...


class ScoringRuntime:
    """A reference that scores served tokens.

    It reads only the input `request`; `prompt` and `answer` are texts, for slices by their length.

    Parameters
    ----------
    clock
        Bounds the time of free-running answers.

    Raises
    ------
    OperatorError
        `models.embedding` names another than that of the prompt, or the model shows none.
    """

    def __init__(self, request: RuntimeRequest, language: LanguageModel, clock: Clock = _CLOCK) -> None:
        if request.embedding and (request.embedding != EMBEDDING or not language.width):
            others = f"`{EMBEDDING}` or " if language.width else ""
            raise OperatorError(
                f"models.embedding is `{request.embedding}`: a reference of runtime `{request.reference.runtime}` shows no "
                f"embedding{' of that name' if others else ''}. Take {others}`features`, or leave it empty"
            )
        self.language = language
        self._most = request.model.generation.max_tokens
        self._free_answer_s = request.model.generation.own_s
        self._clock = clock
        self._prepends: bool | None = None
        self._spells_alike = False
        self.artefact = language.artefact
        self.provenance = language.provenance
        self.inputs = tuple(
            TensorSpec(name=name, dtype=_OBJECT, shape=(None,)) for name in (PROMPT, ANSWER, REQUEST)
        )
        self.embedding = request.embedding
        vectors = TensorSpec(name=EMBEDDING, dtype=np.dtype(np.float32), shape=(None, language.width))
        if self.embedding:
            check_spec(vectors)
        scores = TensorSpec(name=SCORES, dtype=_OBJECT, shape=(None,))
        self.outputs = (scores, vectors) if self.embedding else (scores,)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return `scores` : (items,), a `Scores` each, for `request` : (items,), a `ScoringRequest` each.

        With an embedding also `prompt_state` : (items, width), float32, NaN where the prompt cannot be rebuilt.

        Raises
        ------
        QuarantineError
            Reason `replay`: the model cannot score this.
        RetryError
            Its server is unreachable.
        """
        if set(inputs) != {spec.name for spec in self.inputs}:
            raise replay_error(
                f"the reference takes {[s.name for s in self.inputs]}, but got {sorted(inputs)}"
            )
        requests = inputs[REQUEST].tolist()
        if not all(isinstance(request, ScoringRequest) for request in requests):
            raise replay_error("the input `request` does not hold scoring requests")
        rows = [self.row(request) for request in requests]
        # Where nothing is scored the vector of the prompt is all that is asked for.
        of_prompts = {
            index: row
            for index, (request, served) in enumerate(zip(requests, rows, strict=True))
            if self.embedding and served is None and (row := self._prompt_row(request)) is not None
        }
        found = self.language.score([*(row for row in rows if row is not None), *of_prompts.values()])
        scored, vectors = iter(found), found[len(found) - len(of_prompts) :]
        scores = [NO_SCORES if row is None else _finished(row, next(scored)) for row in rows]
        for index, of_prompt in zip(of_prompts, vectors, strict=True):
            scores[index] = msgspec.structs.replace(NO_SCORES, vector=of_prompt.vector)
        outputs = {SCORES: objects(self._with_free_answers(requests, scores))}
        if self.embedding:
            unknown = np.full(self.language.width, np.nan, dtype=np.float32)
            states = [of.vector if len(of.vector) else unknown for of in scores]
            outputs[EMBEDDING] = np.stack(states) if states else unknown[np.newaxis][:0]
        return outputs

    def close(self) -> None:
        """Free memory, device and connections."""
        self.language.close()

    def _with_free_answers(
        self, requests: Sequence[ScoringRequest], scores: Sequence[Scores]
    ) -> list[Scores]:
        """Return the scores with the reference's free-running answers.

        A failed answer loses no scores, and all of them together take no longer than `models.generation.own_s`.
        """
        until_s = self._clock.monotonic_s() + self._free_answer_s
        with_answers = list(scores)
        for numbers in _alike(requests).values():
            answers = self._free_answers([requests[number] for number in numbers], until_s)
            for number, answer in zip(numbers, answers, strict=True):
                with_answers[number] = msgspec.structs.replace(scores[number], free_answer=answer)
        return with_answers

    def _free_answers(self, requests: Sequence[ScoringRequest], until_s: float) -> list[FreeAnswer]:
        """Return the answers to requests with the same options: together, if the model can and no request is bad."""
        questions = [
            Question(
                request=request, answer_request=request.free_answer, prompt=partial(self._prompt, request)
            )
            for request in requests
            if request.free_answer is not None
        ]
        left_s = until_s - self._clock.monotonic_s()
        if len(questions) > 1 and left_s > 0:
            with contextlib.suppress(QuarantineError, RetryError):
                if (answers := self.language.answers(questions, left_s)) is not None:
                    return answers
        return [self._free_answer(question, until_s - self._clock.monotonic_s()) for question in questions]

    def _free_answer(self, question: Question, within_s: float) -> FreeAnswer:
        if within_s <= 0:
            return FreeAnswer(outcome=FreeAnswerOutcome.LATE)
        try:
            return self.language.answer(question.request, question.answer_request, question.prompt, within_s)
        except (QuarantineError, RetryError):
            return FreeAnswer(outcome=FreeAnswerOutcome.FAILED)

    def row(self, request: ScoringRequest) -> TokenRow | None:
        """Return the tokens of a request; None if there is nothing to score. Errors as of `LanguageModel`."""
        if request.has_media:
            return self._media_row(request)
        served = request.served_ids
        if served is not None and request.served and not self._spells_alike:
            self._compare_spelling(served, request.served)
        if served is None and request.served:
            served = self._served_ids(request.served)
            served = served[:-1] if request.is_cut else served
        if served is None and request.served_message:
            served = self._rendered_ids(request)
        if not served:
            return None
        prompt = self._prompt(request)
        longest = self.language.longest
        room = len(served) + 1 if longest is None else max(longest - len(prompt), 0)
        scored = served[: min(self._most, room)]
        if not scored:
            raise replay_error(f"the prompt has {len(prompt)} tokens, the reference takes {longest} in all")
        ends = self.language.end_ids
        row = TokenRow(prompt=prompt, served=scored, temperature=request.temperature)
        if request.is_ended is False or len(scored) < len(served):
            return row
        if scored[-1] in ends:
            return msgspec.structs.replace(row, is_ended=True)
        if request.is_ended and ends and len(scored) < room:
            return msgspec.structs.replace(row, served=(*scored, ends[0]), is_ended=True, is_added=True)
        return row

    def _media_row(self, request: ScoringRequest) -> TokenRow | None:
        """Return the row of a chat with more than text; None without the text that was generated."""
        if problem := media_problem(request.messages, self.language.media):
            raise replay_error(problem)
        return TokenRow(prompt=(), served=(), chat=request) if request.served else None

    def _compare_spelling(self, ids: Sequence[int], text: str) -> None:
        """Raise `QuarantineError` if served tokens are another text in the reference's vocabulary; nothing is asked any more once they were the same.

        Servers leave out special tokens and what follows a stop, and parsers rewrite what they found: so the texts need not be equal.
        """
        if len(ids) < _LEAST_COMPARED or len(text.strip()) < _LEAST_COMPARED:
            return
        # A server may have left out what was said first, as reasoning, or last, as what follows a stop.
        alike = 0.0
        for is_end in (False, True):
            spelt = self.language.spelling(ids[-_COMPARED:] if is_end else ids[:_COMPARED])
            if spelt is None:
                return
            alike = max(alike, _share_alike(spelt.strip(), text.strip(), is_end=is_end))
            if alike >= _SAME:
                self._spells_alike = True
                return
        if alike < _OTHER:
            raise tokenizer_error(
                f"the tokens of the answer are another text in the reference's vocabulary: {alike:.0%} of the letters agree. Serve the "
                "reference with the candidate's tokenizer"
            )

    def _prompt_row(self, request: ScoringRequest) -> TokenRow | None:
        """Return a row that scores any token after a prompt; None if the prompt cannot be rebuilt, or leaves no room."""
        try:
            prompt = self._prompt(request)
        except QuarantineError:
            return None
        longest = self.language.longest
        return (
            None
            if longest is not None and len(prompt) > longest
            else TokenRow(prompt=prompt, served=prompt[:1])
        )

    def _served_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of an answer's text, which continues the prompt.

        Some tokenizers (SentencePiece's, of Llama 2 and Mistral) put a space before any text: there must not be two.
        """
        if self._prepends is None:
            line, word, behind = (self._plain_ids(text) for text in ("\n", "a", "\n a"))
            self._prepends = behind == (*line, *word)
        return self._plain_ids(text.removeprefix(" ") if self._prepends else text)

    def _rendered_ids(self, request: ScoringRequest) -> tuple[int, ...]:
        """Return the tokens of an answer that the chat template renders, up to its end; none if it renders the prompt otherwise.

        A server reports text, reasoning and calls that its parsers took apart; the template puts them together as it does for the next
        turn, which is how the model learned to write them.
        """
        whole = msgspec.structs.replace(
            request,
            messages=(*request.messages, request.served_message),
            template={**request.template, "add_generation_prompt": False},
        )
        prompt, rendered = self.language.chat_ids(request), self.language.chat_ids(whole)
        if rendered[: len(prompt)] != prompt:
            return ()
        served = rendered[len(prompt) :]
        end = next((place for place, token in enumerate(served) if token in self.language.end_ids), None)
        if end is None:
            return served
        return served[: end if request.is_ended is False else end + 1]

    def _plain_ids(self, text: str) -> tuple[int, ...]:
        return self.language.text_ids(text, add_special_tokens=False)

    def _prompt(self, request: ScoringRequest) -> tuple[int, ...]:
        """Return the tokens of a prompt: the candidate's, or own ones, whose number is checked against the candidate's."""
        if request.prompt_ids is not None:
            prompt = request.prompt_ids
        elif request.messages:
            prompt = self.language.chat_ids(request)
        else:
            prompt = self.language.text_ids(request.prompt, add_special_tokens=request.add_special_tokens)
        if not prompt:
            raise replay_error("the prompt has no token: the first token of the answer cannot be scored")
        if request.prompt_ids is None and request.n_prompt_tokens not in {None, len(prompt)}:
            raise tokenizer_error(
                f"the candidate made {request.n_prompt_tokens} tokens of the prompt, the reference makes {len(prompt)}: their "
                "tokenizers or chat templates differ. Give both the same, or have clients set `return_token_ids`"
            )
        return prompt


def _alike(requests: Sequence[ScoringRequest]) -> dict[bytes, list[int]]:
    """Return the places of the requests for free-running answers, by what their answers are generated with."""
    places: dict[bytes, list[int]] = {}
    for place, request in enumerate(requests):
        if (asked := request.free_answer) is not None:
            key = msgspec.json.encode(
                (sorted(asked.options.items()), asked.max_tokens, asked.is_capped, bool(request.tools))
            )
            places.setdefault(key, []).append(place)
    return places


def _share_alike(spelt: str, text: str, *, is_end: bool) -> float:
    """Return which share of the letters agrees at the begin or the end of two texts; 0 where one of them is too short."""
    n = min(len(spelt), len(text), _MOST_LETTERS)
    if n < _LEAST_COMPARED:
        return 0.0
    part = slice(-n, None) if is_end else slice(n)
    return SequenceMatcher(None, spelt[part], text[part], autojunk=False).ratio()


def _finished(row: TokenRow, scores: Scores) -> Scores:
    """Return the scores of the served tokens, with the end's probability separated from those of earlier positions."""
    if row.chat is not None:
        return scores
    n_scored = len(row.served) - row.is_added
    scores = msgspec.structs.replace(scores, n_read=row.n_tokens)
    if len(scores.ends):
        n_before = len(row.served) - row.is_ended
        scores = msgspec.structs.replace(
            scores,
            ends=scores.ends[:n_before],
            ends_upper=scores.ends_upper[:n_before],
            end_p=float(scores.ends[-1]) if row.is_ended else math.nan,
        )
    if not row.is_added:
        return scores
    return msgspec.structs.replace(
        scores,
        tokens=scores.tokens[:n_scored],
        ids=scores.ids[:n_scored],
        logprobs=scores.logprobs[:n_scored],
        ranks=scores.ranks[:n_scored],
        top_tokens=scores.top_tokens[:n_scored],
        top_ids=scores.top_ids[:n_scored],
        top_logprobs=scores.top_logprobs[:n_scored],
        unlikely=scores.unlikely[:n_scored],
    )
