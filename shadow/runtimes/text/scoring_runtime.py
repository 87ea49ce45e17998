"""The runtime that scores answers with a language model."""

import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.shadow.language.free_running_answer import FreeAnswer, FreeAnswerOutcome, FreeAnswerRequest
from quantdrift.shadow.language.scoring import (
    _OBJECT,
    ANSWER,
    ASKED,
    NOTHING,
    PROMPT,
    SCORES,
    Row,
    Scores,
    ScoringRequest,
    objects,
    refused,
)
from quantdrift.shadow.runtimes.protocol import Artefact, Provenance
from quantdrift.shadow.runtimes.registry import RuntimeRequest
from quantdrift.shadow.tensors.arrays import Array, TensorSpec

_CLOCK: Final = SystemClock()


class LanguageModel(Protocol):
    """A language model with its tokenizer.

    Every call raises `QuarantineError`, reason `replay`, where it cannot do what it is asked, and `RetryError` where what
    computes is away.
    """

    @property
    def artefact(self) -> Artefact:
        """What was loaded."""
        ...

    @property
    def provenance(self) -> Provenance:
        """What computes."""
        ...

    @property
    def longest(self) -> int | None:
        """Most tokens of prompt and answer together; None where that is not known."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer; empty where they are not known."""
        ...

    def chat_ids(self, asked: ScoringRequest) -> tuple[int, ...]:
        """Return the tokens of a chat, up to where the answer begins."""
        ...

    def text_ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the tokens of a text."""
        ...

    def score(self, rows: Sequence[Row]) -> list[Scores]:
        """Return the scores of the answer of each row, `ends` and `ends_upper` at each place."""
        ...

    def answer(
        self,
        asked: ScoringRequest,
        wanted: FreeAnswerRequest,
        prompt: Callable[[], tuple[int, ...]],
        within_s: float,
    ) -> FreeAnswer:
        """Return its own answer, to tokens that `prompt` finds; one that takes longer than `within_s` is late."""
        ...

    def close(self) -> None:
        """Let go of memory, device and connections."""
        ...


class ScoringRuntime:
    """A reference that scores served tokens.

    Of its inputs it reads `asked`; `prompt` and `answer` are texts, for slices by their length.

    Parameters
    ----------
    opening
        What is configured.
    language
        What computes.
    clock
        How long own answers take.

    Raises
    ------
    OperatorError
        An embedding is asked for: it has none.
    """

    def __init__(self, opening: RuntimeRequest, language: LanguageModel, clock: Clock = _CLOCK) -> None:
        if opening.embedding:
            raise OperatorError(
                f"models.embedding is `{opening.embedding}`: a reference of runtime `{opening.reference.runtime}` shows no "
                "embedding. Take `features`, or leave it empty"
            )
        self._language = language
        self._most = opening.model.generation.max_tokens
        self._own_s = opening.model.generation.own_s
        self._clock = clock
        self._prepends: bool | None = None
        self.artefact = language.artefact
        self.provenance = language.provenance
        self.inputs = tuple(
            TensorSpec(name=name, dtype=_OBJECT, shape=(None,)) for name in (PROMPT, ANSWER, ASKED)
        )
        self.outputs = (TensorSpec(name=SCORES, dtype=_OBJECT, shape=(None,)),)
        self.embedding = ""

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return `scores` : (items,), a `Scores` each, of `asked` : (items,), an `ScoringRequest` each.

        Raises
        ------
        QuarantineError
            Reason `replay`: the model cannot score this.
        RetryError
            What computes is away for now.
        """
        if set(inputs) != {spec.name for spec in self.inputs}:
            raise refused(f"given were {sorted(inputs)}, the reference takes {[s.name for s in self.inputs]}")
        asked = inputs[ASKED].tolist()
        if not all(isinstance(one, ScoringRequest) for one in asked):
            raise refused("what was asked and answered is missing")
        rows = [self.row(one) for one in asked]
        found = iter(self._language.score([row for row in rows if row is not None]))
        scores = [NOTHING if row is None else _finished(row, next(found)) for row in rows]
        return {SCORES: objects(self._with_own(asked, scores))}

    def close(self) -> None:
        """Let go of memory, device and connections."""
        self._language.close()

    def _with_own(self, asked: Sequence[ScoringRequest], scores: Sequence[Scores]) -> list[Scores]:
        """Return scores with the reference's own answers: nothing is lost over them, and nobody waits for them for long."""
        until_s = self._clock.monotonic_s() + self._own_s
        found = []
        for one, of in zip(asked, scores, strict=True):
            own = None if one.own is None else self._own(one, one.own, until_s - self._clock.monotonic_s())
            found.append(of if own is None else msgspec.structs.replace(of, own=own))
        return found

    def _own(self, asked: ScoringRequest, wanted: FreeAnswerRequest, within_s: float) -> FreeAnswer:
        if within_s <= 0:
            return FreeAnswer(outcome=FreeAnswerOutcome.LATE)
        try:
            return self._language.answer(asked, wanted, lambda: self._prompt(asked), within_s)
        except (QuarantineError, RetryError):
            return FreeAnswer(outcome=FreeAnswerOutcome.FAILED)

    def row(self, asked: ScoringRequest) -> Row | None:
        """Return the tokens; None where there is nothing that could be scored. Errors as of `LanguageModel`."""
        served = asked.served_ids
        if served is None and asked.served:
            served = self._served_ids(asked.served)
            served = served[:-1] if asked.is_cut else served
        if not served:
            return None
        prompt = self._prompt(asked)
        longest = self._language.longest
        room = len(served) + 1 if longest is None else max(longest - len(prompt), 0)
        scored = served[: min(self._most, room)]
        if not scored:
            raise refused(f"the prompt has {len(prompt)} tokens, the reference takes {longest} in all")
        ends = self._language.end_ids
        if asked.is_ended is False or len(scored) < len(served):
            return Row(prompt=prompt, served=scored)
        if scored[-1] in ends:
            return Row(prompt=prompt, served=scored, is_ended=True)
        if asked.is_ended and ends and len(scored) < room:
            return Row(prompt=prompt, served=(*scored, ends[0]), is_ended=True, is_added=True)
        return Row(prompt=prompt, served=scored)

    def _served_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of an answer's text, which goes on where the prompt ends.

        Some tokenizers (SentencePiece's, of Llama 2 and Mistral) put a space before any text: there must not be two.
        """
        if self._prepends is None:
            line, word, behind = (self._plain_ids(one) for one in ("\n", "a", "\n a"))
            self._prepends = behind == (*line, *word)
        return self._plain_ids(text.removeprefix(" ") if self._prepends else text)

    def _plain_ids(self, text: str) -> tuple[int, ...]:
        return self._language.text_ids(text, add_special_tokens=False)

    def _prompt(self, asked: ScoringRequest) -> tuple[int, ...]:
        """Return the tokens of a prompt: the candidate's, or as many as the candidate made of it."""
        if asked.prompt_ids is not None:
            prompt = asked.prompt_ids
        elif asked.messages:
            prompt = self._language.chat_ids(asked)
        else:
            prompt = self._language.text_ids(asked.prompt, add_special_tokens=asked.add_special_tokens)
        if not prompt:
            raise refused("the prompt has no token: nothing says what comes first")
        if asked.prompt_ids is None and asked.n_prompt_tokens not in {None, len(prompt)}:
            raise refused(
                f"the candidate made {asked.n_prompt_tokens} tokens of the prompt, the reference makes {len(prompt)}: their "
                "tokenizers or chat templates differ. Give both the same, or have clients ask for `return_token_ids`"
            )
        return prompt


def _finished(row: Row, scores: Scores) -> Scores:
    """Return the scores of what was served, with how likely the end was, apart from the places before it."""
    n_scored = len(row.served) - row.is_added
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
    )
