"""The records for scoring served tokens under a language model (teacher forcing).

Two freely sampled answers say little about a quantised model. So the reference gets the prompt together with the tokens
that were *served*, and computes the likelihood of each of them, in one pass for an answer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.said_tokens import SaidTokens
from quantdrift.models.language.free_running_answer import FreeAnswer, FreeAnswerRequest
from quantdrift.models.language.media import has_media
from quantdrift.models.tensors.arrays import Array

SCORES: Final = "scores"
ANSWER: Final = "answer"
REQUEST: Final = "request"
PROMPT: Final = "prompt"
_OBJECT: Final = np.dtype(object)
UNKNOWN: Final = np.empty(0)
UNKNOWN.flags.writeable = False
NOT_FORCED: Final = np.empty(0, dtype=np.bool_)
NOT_FORCED.flags.writeable = False
NO_VECTOR: Final = np.empty(0, dtype=np.float32)
NO_VECTOR.flags.writeable = False
EMBEDDING: Final = "prompt_state"
"""Name of the vector of a prompt, as `models.embedding` names it."""


class ScoringRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to score, with its prompt. Token ids take precedence over texts.

    Parameters
    ----------
    messages, tools
        Messages and tools of a chat, as they were sent.
    template
        Further arguments of the chat template, by name.
    prompt
        Text to complete, if it is not a chat.
    prompt_ids
        Tokens of the prompt, as the candidate had them; None if unknown.
    n_prompt_tokens
        Number of tokens of the candidate's prompt; None if unknown.
    add_special_tokens
        Whether special tokens, such as a start token, are added to `prompt`.
    served
        The answer's text; None if the text is not all that was generated, so that it cannot be tokenised.
    served_message
        The answer as a message of the chat, to be rendered by the chat template where `served` is None: what the server's parsers made
        of reasoning, text and calls. Empty if that is not known, or no number of tokens that could show another rendering.
    served_ids
        Tokens of the answer; None if unknown.
    is_cut
        Whether `served` may end within a token: its last token is then not what was generated.
    ask_replica
        Whether a replica of the candidate is to compute the log-probabilities that were not served.
    is_ended
        Whether the model ended the answer itself, and no limit did; None if unknown, or if a client's stop sequence may
        have.
    temperature
        At which its tokens were drawn; None if it is greedy or that is not known.
    free_answer
        The request for a free-running answer of the reference; None if it is not to generate one.
    """

    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    template: dict[str, Any] = {}
    prompt: str = ""
    prompt_ids: tuple[int, ...] | None = None
    n_prompt_tokens: int | None = None
    add_special_tokens: bool = True
    served: str | None = None
    served_message: dict[str, Any] = {}
    served_ids: tuple[int, ...] | None = None
    is_cut: bool = False
    ask_replica: bool = False
    is_ended: bool | None = None
    temperature: float | None = None
    free_answer: FreeAnswerRequest | None = None

    @property
    def has_media(self) -> bool:
        """Whether a message has a part that is not text: then tokens alone do not say what the model read."""
        return has_media(self.messages)


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The likelihood of each token of an answer under one model, given all tokens before it.

    Parameters
    ----------
    tokens
        The spellings of the tokens.
    ids
        Their ids; empty if unknown.
    logprobs
        (tokens,), float64, nats; NaN where unknown.
    ranks
        (tokens,), float64, 1 for the most likely token; NaN where unknown.
    top_tokens
        The most likely tokens at each position, as spelt; all rows have one length, padded with empty ones.
    top_ids
        (tokens, k), int64, -1 where unknown.
    top_logprobs
        (tokens, k), float64, nats; NaN where padded. In any order.
    ends, ends_upper
        (tokens,) or without the last one, float64: lower and upper bound of the probability of ending at each position where
        the candidate went on; NaN where unknown. Empty if the model's end tokens are unknown.
    end_p
        The probability of ending where the candidate ended; NaN if the candidate did not end itself, or it is unknown.
    forced
        (tokens,), bool: in scores that were served under a grammar, whether it left no other token. Empty: there was none, or it is not known.
    unlikely
        (tokens,), how far each is among the least likely ones, from all log-probabilities
        (`quantdrift.models.language.unlikely`). Empty: only the listed ones are known.
    vector
        (width,), float32, of the prompt: the model's last hidden state at its last token. Empty: it was not asked for.
    copy
        In a reference's scores: the scores of the candidate's replica for the same tokens; None if it was not asked.
    free_answer
        In a reference's scores: its free-running answer; None if none was requested.
    n_read
        In a reference's scores: tokens of prompt and answer that it read, or had kept.
    """

    tokens: tuple[bytes, ...]
    ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float64]
    ranks: npt.NDArray[np.float64]
    top_tokens: tuple[tuple[bytes, ...], ...]
    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float64]
    ends: npt.NDArray[np.float64] = UNKNOWN
    ends_upper: npt.NDArray[np.float64] = UNKNOWN
    end_p: float = math.nan
    forced: npt.NDArray[np.bool_] = NOT_FORCED
    unlikely: npt.NDArray[np.float64] = UNKNOWN
    vector: npt.NDArray[np.float32] = NO_VECTOR
    copy: "Scores | None" = None
    free_answer: FreeAnswer | None = None
    n_read: int = 0


def said_tokens(scores: Scores) -> SaidTokens:
    """Return the tokens that were served, with the likeliest one of these scores at each position."""

    def likeliest(position: int) -> tuple[str, float]:
        logprobs = scores.top_logprobs[position]
        if not len(logprobs) or np.isnan(logprobs).all():
            return "", math.nan
        place = int(np.nanargmax(logprobs))
        return _text(scores.top_tokens[position][place]), float(logprobs[place])

    first = [likeliest(position) for position in range(len(scores.tokens))]
    return SaidTokens(
        served=tuple(map(_text, scores.tokens)),
        first=tuple(token for token, _ in first),
        served_logprob=tuple(map(_known, scores.logprobs.tolist())),
        first_logprob=tuple(_known(logprob) for _, logprob in first),
    )


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def _known(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None


NO_SCORES: Final = Scores(
    tokens=(),
    ids=(),
    logprobs=np.empty(0),
    ranks=np.empty(0),
    top_tokens=(),
    top_ids=np.empty((0, 0), dtype=np.int64),
    top_logprobs=np.empty((0, 0)),
)


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt and of the answer to score: at least one of each.

    Parameters
    ----------
    is_ended
        Whether the last token of `served` is an end token.
    is_added
        Whether that end token was not served: it is appended to get its probability, and removed from the scores.
    temperature
        At which the tokens were drawn; None if they were not, or that is not known.
    chat
        The request whose messages and answer are to be sent as texts, because its prompt is more than tokens; `prompt` and `served` are
        then empty, and the scores are those of the whole answer without its end.
    """

    prompt: tuple[int, ...]
    served: tuple[int, ...]
    is_ended: bool = False
    is_added: bool = False
    temperature: float | None = None
    chat: ScoringRequest | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens of prompt and answer, as far as they are known."""
        return len(self.prompt) + len(self.served)


def tokens_read(outputs: Mapping[str, Array]) -> int:
    """Return how many tokens a reference and its replica read for these outputs; 0 if it is no language model."""
    scores = outputs.get(SCORES)
    if scores is None or scores.dtype != np.object_:
        return 0  # a detector has scores, too
    return sum(of.n_read + (of.copy.n_read if of.copy else 0) for of in scores.flat if isinstance(of, Scores))


def replay_error(detail: str) -> QuarantineError:
    """Return the error for a request that a reference cannot score."""
    return QuarantineError(QuarantineReason.REPLAY, detail[:300])


def tokenizer_error(detail: str) -> QuarantineError:
    """Return the error for a request whose tokens the reference's tokenizer or chat template makes otherwise."""
    return QuarantineError(QuarantineReason.TOKENIZER, detail)


def without_free_answer(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs without requests for free-running answers, for a repeated computation."""
    if REQUEST not in inputs:
        return dict(inputs)
    requests = [
        msgspec.structs.replace(request, free_answer=None)
        if isinstance(request, ScoringRequest) and request.free_answer
        else request
        for request in inputs[REQUEST].tolist()
    ]
    return {**inputs, REQUEST: objects(requests)}


def objects(records: Sequence[Any]) -> Array:
    """Return records as an array : (items,)."""
    array = np.empty(len(records), dtype=object)
    for index, record in enumerate(records):
        array[index] = record
    return array
