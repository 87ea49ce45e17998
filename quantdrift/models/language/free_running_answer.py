"""Free-running answers: for a share of the exchanges the reference generates its own answer to the prompt."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec

from quantdrift.core.config.schema import Generation
from quantdrift.core.sampling.hash_draw import draw, number
from quantdrift.models.language.answer import Answer, ToolCall

_KEY: Final = b"quantdrift own"  # another draw than those of sampling and of noise
_SEED: Final = b"quantdrift seed"
_LIMITS: Final = ("max_completion_tokens", "max_tokens")


class FreeAnswerOutcome(StrEnum):
    """The outcome of a free-running answer; the values are labels of a metric."""

    DONE = "done"
    UNFORCED = "unforced"  # done, but without the JSON grammar, which the runtime does not have
    UNABLE = "unable"  # not generated: the runtime does not support an option of the request
    LATE = "late"  # it took too long
    FAILED = "failed"  # refused, or failed


class FreeAnswerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request for a free-running answer.

    Parameters
    ----------
    is_capped
        Whether `max_tokens` is less than the candidate was allowed, or the candidate's limit is unknown.
    options
        The client's options, with the defaults of the candidate's server.
    seed
        For sampling, if the client set none.
    """

    max_tokens: int
    is_capped: bool
    options: dict[str, Any]
    seed: int


class FreeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A free-running answer, or why there is none.

    Parameters
    ----------
    outcome
        If there is no answer, the other fields are meaningless.
    calls
        Its tool calls; None if the runtime cannot separate them from text.
    finish_reason
        Why it ended, in the protocol's words; empty if unknown.
    n_tokens
        Number of tokens, the end token included; None if unknown.
    max_tokens, is_capped
        As of `FreeAnswerRequest`.
    ids
        Its tokens, the end token included; empty if unknown.
    """

    outcome: FreeAnswerOutcome
    text: str = ""
    calls: tuple[ToolCall, ...] | None = None
    finish_reason: str = ""
    n_tokens: int | None = None
    max_tokens: int = 0
    is_capped: bool = False
    ids: tuple[int, ...] = ()

    @property
    def is_there(self) -> bool:
        """Whether there is an answer."""
        return self.outcome in {FreeAnswerOutcome.DONE, FreeAnswerOutcome.UNFORCED}


def free_answer_request(
    exchange_id: str, generation: Generation, options: Mapping[str, Any], answer: Answer
) -> FreeAnswerRequest | None:
    """Return the request for a free-running answer to an exchange; None if the exchange is not chosen.

    Parameters
    ----------
    exchange_id
        Its hash decides, with the probability `models.generation.own_share`.
    options
        The client's options.
    answer
        The candidate's answer: if its limit ended it, its length is that limit.
    """
    if draw(exchange_id, _KEY) >= generation.own_share:
        return None
    limit = next((options[name] for name in _LIMITS if type(options.get(name)) is int), None)
    if answer.finish_reason == "length" and answer.n_tokens:
        limit = answer.n_tokens
    is_capped = limit is None or limit > generation.own_tokens
    return FreeAnswerRequest(
        max_tokens=generation.own_tokens if limit is None else max(min(limit, generation.own_tokens), 1),
        is_capped=is_capped,
        options=_without_neutral(options, generation),
        seed=number(exchange_id, _SEED) >> 1,
    )


def _without_neutral(options: Mapping[str, Any], generation: Generation) -> dict[str, Any]:
    """Return the options without a neutral repetition penalty: not every server knows this option."""
    penalties = {options.get("repetition_penalty", 1), generation.repetition_penalty}
    return {
        name: value for name, value in options.items() if name != "repetition_penalty" or penalties != {1}
    }
