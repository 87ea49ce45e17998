"""What is said of the tokens of an answer, and the runtimes that score served tokens under a language model.

Two answers that were sampled freely tell little of a quantised model. So the reference is given the prompt together with
the tokens that were *served*, and says how likely it holds each of them (teacher forcing): one pass for an answer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.errors import OperatorError, QuarantineError, QuarantineReason, RetryError
from quantdrift.shadow.language.free_running_answer import FreeAnswer, FreeAnswerOutcome, FreeAnswerRequest
from quantdrift.shadow.runtimes.protocol import Array, Artefact, Provenance, TensorSpec
from quantdrift.shadow.runtimes.registry import RuntimeRequest

SCORES: Final = "scores"
ANSWER: Final = "answer"
ASKED: Final = "asked"
PROMPT: Final = "prompt"
_OBJECT: Final = np.dtype(object)
_CLOCK: Final = SystemClock()
UNTOLD: Final = np.empty(0)
UNTOLD.flags.writeable = False


class ScoringRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is to be scored, with what it answers. Ids of tokens go before texts.

    Parameters
    ----------
    messages, tools
        Of a chat, as they were sent.
    template
        What else the chat template is given, by name.
    prompt
        Text to go on from, where it is no chat.
    prompt_ids
        Tokens of the prompt, as the candidate had them.
    n_prompt_tokens
        How many tokens the candidate made of the prompt; None where that is not told.
    add_special_tokens
        Whether special tokens, such as a beginning, are added to `prompt`.
    served
        The answer's text; None where its text is not all that was generated, and so cannot be made into tokens.
    served_ids
        Tokens of the answer.
    is_cut
        Whether `served` may end within a token: the last one that is made of it is then not what was generated.
    is_copied
        Whether a copy of the candidate is to tell the log-probabilities that were not served.
    is_ended
        Whether the candidate ended it of itself, and no limit did; None where a sequence of the client may have done so, or
        where that is not told.
    own
        How the reference is to answer itself; None where it is not to.
    """

    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    template: dict[str, Any] = {}
    prompt: str = ""
    prompt_ids: tuple[int, ...] | None = None
    n_prompt_tokens: int | None = None
    add_special_tokens: bool = True
    served: str | None = None
    served_ids: tuple[int, ...] | None = None
    is_cut: bool = False
    is_copied: bool = False
    is_ended: bool | None = None
    own: FreeAnswerRequest | None = None


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """How likely one model holds each token of an answer, given all before it.

    Parameters
    ----------
    tokens
        The tokens, as they are spelt.
    ids
        Their ids; empty where they are not told.
    logprobs
        (tokens,), float64, nats; not a number where it is not told.
    ranks
        (tokens,), float64, 1 for the likeliest; not a number where it is not told.
    top_tokens
        The likeliest at each place, as they are spelt; all rows of one length, filled up with empty ones.
    top_ids
        (tokens, k), int64, -1 where it is not told.
    top_logprobs
        (tokens, k), float64, nats; not a number where a row is filled up. In any order.
    ends, ends_upper
        (tokens,) or without the last one, float64: how likely the model would have ended at each place where the candidate
        went on, at least and at most; not a number where that is not told. Empty where it does not know what ends an answer.
    end_p
        How likely it would have ended where the candidate did; not a number where that did not, or it is not told.
    copy
        Of a reference's scores: what a copy of the candidate says of the same tokens; None where it was not asked.
    own
        Of a reference's scores: what it answers itself; None where it was not asked.
    """

    tokens: tuple[bytes, ...]
    ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float64]
    ranks: npt.NDArray[np.float64]
    top_tokens: tuple[tuple[bytes, ...], ...]
    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float64]
    ends: npt.NDArray[np.float64] = UNTOLD
    ends_upper: npt.NDArray[np.float64] = UNTOLD
    end_p: float = math.nan
    copy: "Scores | None" = None
    own: FreeAnswer | None = None


NOTHING: Final = Scores(
    tokens=(),
    ids=(),
    logprobs=np.empty(0),
    ranks=np.empty(0),
    top_tokens=(),
    top_ids=np.empty((0, 0), dtype=np.int64),
    top_logprobs=np.empty((0, 0)),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a prompt, and those of the answer to be scored: at least one of each.

    Parameters
    ----------
    prompt, served
        The tokens.
    is_ended
        Whether the last one is the end.
    is_added
        Whether that end is none that was served: it is there to be asked about, and no part of the scores.
    """

    prompt: tuple[int, ...]
    served: tuple[int, ...]
    is_ended: bool = False
    is_added: bool = False


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


def refused(detail: str) -> QuarantineError:
    """Return the error that says that a reference cannot score this, and why."""
    return QuarantineError(QuarantineReason.REPLAY, detail[:300])


def without_own(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return inputs of which the same is computed again, but for the reference's own answers."""
    if ASKED not in inputs:
        return dict(inputs)
    asked = [
        msgspec.structs.replace(one, own=None) if isinstance(one, ScoringRequest) and one.own else one
        for one in inputs[ASKED].tolist()
    ]
    return {**inputs, ASKED: objects(asked)}


def objects(records: Sequence[Any]) -> Array:
    """Return records as an array : (items,)."""
    array = np.empty(len(records), dtype=object)
    for index, record in enumerate(records):
        array[index] = record
    return array
