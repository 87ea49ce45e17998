"""What a reference answers itself, of a share of the exchanges: how it is asked, and what it said."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec

from quantdrift.core.config.schema import Generation
from quantdrift.core.sampling.hash_draw import draw, number
from quantdrift.shadow.language.answer import Answer, ToolCall

_KEY: Final = b"quantdrift own"  # another draw than those of sampling and of noise
_SEED: Final = b"quantdrift seed"
_LIMITS: Final = ("max_completion_tokens", "max_tokens")


class FreeAnswerOutcome(StrEnum):
    """What became of an answer of the reference's own."""

    DONE = "done"
    UNFORCED = "unforced"  # done, without the grammar that makes JSON: the runtime has none
    UNABLE = "unable"  # left out: the request has an option that the runtime does not know
    LATE = "late"  # it took too long
    FAILED = "failed"  # refused, or failed


class FreeAnswerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the reference's own that is asked for.

    Parameters
    ----------
    max_tokens
        Most tokens of it.
    is_capped
        Whether that is less than the candidate was allowed, as far as that is known.
    options
        The client's, and what the candidate's server takes where it names none.
    seed
        To sample with where the client names none.
    """

    max_tokens: int
    is_capped: bool
    options: dict[str, Any]
    seed: int


class FreeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it.

    Parameters
    ----------
    outcome
        Whether it is there; what follows says nothing where it is not.
    text
        What it says.
    calls
        The tools it calls; None where the runtime cannot tell them from text.
    finish_reason
        Why it ended, in the protocol's words; empty where that is not told.
    n_tokens
        How many tokens it has, its end among them; None where that is not told.
    max_tokens, is_capped
        As of `FreeAnswerRequest`.
    """

    outcome: FreeAnswerOutcome
    text: str = ""
    calls: tuple[ToolCall, ...] | None = None
    finish_reason: str = ""
    n_tokens: int | None = None
    max_tokens: int = 0
    is_capped: bool = False

    @property
    def is_there(self) -> bool:
        """Whether there is an answer."""
        return self.outcome in {FreeAnswerOutcome.DONE, FreeAnswerOutcome.UNFORCED}


def wanted(
    exchange_id: str, generation: Generation, options: Mapping[str, Any], answer: Answer
) -> FreeAnswerRequest | None:
    """Return how the reference is to answer an exchange itself; None where it is not chosen.

    Parameters
    ----------
    exchange_id
        Decides, by `models.generation.own_share`.
    generation
        What is configured.
    options
        What the client asked for.
    answer
        What the candidate said: where a limit cut it, that limit was its length.
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
    """Return the options without a penalty that neither side has: not every server knows it."""
    penalties = {options.get("repetition_penalty", 1), generation.repetition_penalty}
    return {
        name: value for name, value in options.items() if name != "repetition_penalty" or penalties != {1}
    }
